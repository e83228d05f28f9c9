// All elementwise operators on torch's stable ABI, by their schemas.
// A `Device` is a type with `elementwise(index)`, which gives a kernel, and a `run` as in device.h.
#pragma once

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "../../elementwise/operators.h"
#include "../../kernels/elementwise.h"
#include "../schemas.h"
#include "aten.h"
#include "checks.h"

namespace extops::stable {

// What a schema says of an operator.
class ElementwiseSchema {
 public:
  explicit ElementwiseSchema(const std::string& schema)
      : op(schema.substr(0, schema.find('('))), number_count(count_numbers(schema)) {
    const size_t arrow = schema.find("->");
    for (size_t at = schema.find("Tensor"); at != std::string::npos; at = schema.find("Tensor", at + 1)) {
      const bool is_mutable = schema.compare(at, 10, "Tensor(a!)") == 0;
      const size_t end = at + (is_mutable ? 10 : 6);
      const bool has_name = end < schema.size() && schema[end] == ' ';
      const std::string name = has_name ? schema.substr(end + 1, schema.find_first_of(",)", end) - end - 1) : "";
      if (at > arrow) {
        const auto like = std::find(inputs.begin(), inputs.end(), name.substr(name.find("grad_") == 0 ? 5 : 0));
        likes.push_back(like - inputs.begin());
      } else if (is_mutable) {
        out = name;
      } else {
        inputs.push_back(name);
      }
    }
  }

  std::string op;
  std::vector<std::string> inputs;
  std::string out;  // empty where all outputs are new
  size_t number_count;
  std::vector<size_t> likes;  // for each result, the input that it is laid out like; past the last: any of its shape
};

constexpr size_t kMaxOperands = 8;

// The operands of a call, in arrays of a fixed size: an allocation would take a good part of a small call.
struct ElementwiseOperands {
  std::array<Tensor, kMaxOperands> inputs;
  size_t input_count = 0;
  std::array<Tensor, kMaxOperands> outputs;
  size_t output_count = 0;
  std::array<double, kMaxOperands> numbers;
};

// The common shape of inputs that broadcast; `storage` holds it if no input has that shape.
inline Sizes broadcast_sizes(
    const ElementwiseSchema& schema, const ElementwiseOperands& operands, std::vector<int64_t>& storage) {
  const Tensor* const begin = operands.inputs.data();
  const Tensor* const end = begin + operands.input_count;
  const Sizes first = begin->sizes();
  if (std::all_of(begin + 1, end, [&](const Tensor& input) { return has_sizes(input, first); })) return first;
  bool fit = true;
  for (const Tensor* input = begin; input < end; ++input) {
    const Sizes sizes = input->sizes();
    if (sizes.size() > storage.size()) storage.insert(storage.begin(), sizes.size() - storage.size(), 1);
    for (size_t back = 1; back <= sizes.size(); ++back) {
      int64_t& size = storage[storage.size() - back];
      const int64_t own = sizes[sizes.size() - back];
      fit = fit && (size == own || size == 1 || own == 1);
      if (size == 1) size = own;
    }
  }
  if (fit) return storage;
  std::string shapes;
  for (size_t k = 0; k < operands.input_count; ++k) {
    const char* const separator = k == 0 ? "" : k + 1 < operands.input_count ? ", " : " and ";
    shapes += separator + ("`" + schema.inputs[k] + "` of shape ") + to_string(begin[k].sizes());
  }
  throw std::runtime_error(schema.op + ": " + shapes + " cannot be broadcast together");
}

// A new tensor, laid out like `inputs[like]` or, if its shape differs, like the first input of this shape.
inline Tensor allocate_result(const ElementwiseOperands& operands, size_t like, Sizes sizes) {
  const auto& inputs = operands.inputs;
  if (like < operands.input_count && has_sizes(inputs[like], sizes)) return allocate_like(inputs[like]);
  for (size_t k = 0; k < operands.input_count; ++k) {
    if (has_sizes(inputs[k], sizes)) return allocate_like(inputs[k]);
  }
  std::vector<int64_t> strides(sizes.size());
  return allocate(inputs[0].options(), sizes, contiguous_strides(sizes, strides.data()));
}

// Sizes and strides as kernels take them, see kernels/elementwise.h.
class Geometry {
 public:
  Geometry(Sizes sizes, size_t operands) : dim_(sizes.size()) {
    numbers_.reserve((operands + 1) * dim_);
    numbers_.assign(sizes.begin(), sizes.end());
  }

  void add(const Tensor& tensor, void* data) {
    const Sizes sizes = tensor.sizes();
    const Sizes strides = tensor.strides();
    const size_t missing = dim_ - sizes.size();
    for (size_t d = 0; d < dim_; ++d) {
      const bool broadcast = d < missing || (sizes[d - missing] == 1 && numbers_[d] != 1);
      numbers_.push_back(broadcast ? 0 : strides[d - missing]);
    }
    data_[count_++] = data;
  }

  int64_t dim() const { return static_cast<int64_t>(dim_); }
  const int64_t* numbers() const { return numbers_.data(); }
  void* const* data() const { return data_.data(); }

 private:
  size_t dim_;
  std::vector<int64_t> numbers_;
  std::array<void*, 2 * kMaxOperands> data_;
  size_t count_ = 0;
};

// Checks the inputs and the caller's output, allocates the others, and returns how the kernel finds them.
inline Geometry prepare(const ElementwiseSchema& schema, ElementwiseOperands& operands) {
  const char* const op = schema.op.c_str();
  const char* const like = schema.inputs[0].c_str();
  const Options options = operands.inputs[0].options();
  for (size_t k = 1; k < operands.input_count; ++k) {
    check_matches(op, schema.inputs[k].c_str(), operands.inputs[k], like, options);
  }
  std::vector<int64_t> storage;
  const Sizes sizes = broadcast_sizes(schema, operands, storage);
  if (operands.output_count > 0) {
    check_matches(op, schema.out.c_str(), operands.outputs[0], like, options);
    check_sizes(op, schema.out.c_str(), operands.outputs[0], sizes);
  }
  for (const size_t input : schema.likes) {
    operands.outputs[operands.output_count++] = allocate_result(operands, input, sizes);
  }
  Geometry geometry(sizes, operands.output_count + operands.input_count);
  for (size_t k = 0; k < operands.output_count; ++k) {
    geometry.add(operands.outputs[k], operands.outputs[k].mutable_data());
  }
  for (size_t k = 0; k < operands.input_count; ++k) {
    geometry.add(operands.inputs[k], const_cast<void*>(operands.inputs[k].data()));
  }
  return geometry;
}

// An operator as the dispatcher calls it, see Boxed.
template <class Device, size_t kIndex>
void call_elementwise(StableIValue* stack, uint64_t, uint64_t) {
  static const auto* const kernel = Device::elementwise(kIndex);
  static const ElementwiseSchema schema(kernel->schema);
  ElementwiseOperands operands;
  for (size_t k = 0; k < schema.inputs.size(); ++k) {
    operands.inputs[operands.input_count++] = Unbox<Tensor>::call(stack[k]);
  }
  if (!schema.out.empty()) {
    operands.outputs[operands.output_count++] = Unbox<Tensor>::call(stack[operands.input_count]);
  }
  const StableIValue* const numbers = stack + operands.input_count + operands.output_count;
  for (size_t k = 0; k < schema.number_count; ++k) operands.numbers[k] = Unbox<double>::call(numbers[k]);
  const char* const op = schema.op.c_str();
  const ScalarType dtype = kernel_dtype(op, schema.inputs[0].c_str(), operands.inputs[0]);
  const Geometry geometry = prepare(schema, operands);
  const Tensor& output = operands.outputs[0];
  Device::run(op, output, output.numel(), kPointwiseGrain, [&](auto... where) {
    return kernel->run(dtype, geometry.dim(), geometry.numbers(), geometry.data(), operands.numbers.data(), where...);
  });
  for (size_t k = 0; k < schema.likes.size(); ++k) {
    stack[k] = box(operands.outputs[k].release());
  }
}

#define EXTOPS_ONE(...) +1
constexpr size_t kElementwiseOperators = 0 EXTOPS_ELEMENTWISE(EXTOPS_ONE);

template <class Device, size_t... kIndex, class Library>
void register_elementwise(Library& library, std::index_sequence<kIndex...>) {
  const auto name = [](size_t index) { return ElementwiseSchema(Device::elementwise(index)->schema).op; };
  (library.impl(name(kIndex).c_str(), &call_elementwise<Device, kIndex>), ...);
}

template <class Device, class Library>
void register_elementwise(Library& library) {
  register_elementwise<Device>(library, std::make_index_sequence<kElementwiseOperators>());
}

}  // namespace extops::stable
