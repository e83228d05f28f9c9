// Checks an operator's tensors and calls its kernels, by the table of the operator (kernels/table.h).
#pragma once

#include <array>
#include <initializer_list>
#include <vector>

#include "../../kernels/table.h"
#include "aten.h"
#include "checks.h"

namespace extops::stable {

inline Sizes sizes_of(const char* op, const char* name, const Tensor& tensor, int64_t dimensions) {
  STD_TORCH_CHECK(
      tensor.dim() == dimensions, op, ": expected `", name, "` to have ", dimensions, " dimensions, but got ",
      tensor.dim(), ": ", to_string(tensor.sizes()));
  return tensor.sizes();
}

inline Sizes matrix_sizes(const char* op, const char* name, const Tensor& tensor) {
  return sizes_of(op, name, tensor, 2);
}

using Tensors = std::initializer_list<const Tensor*>;

// Compares tensors with the rows of a table, except those of results. An absent tensor is a null pointer.
class Check {
 public:
  Check(const char* op, const Tensor* const* tensors, const char* like_name, const Tensor& like)
      : op_(op), next_(tensors), like_name_(like_name), like_(like.options()) {}

  void in(const void*, const char* name, Sizes sizes) {
    const Tensor* const tensor = *next_++;
    if (tensor == nullptr) return;
    check_matches(op_, name, *tensor, like_name_, like_);
    sizes_of(op_, name, *tensor, static_cast<int64_t>(sizes.size()));
    check_sizes(op_, name, *tensor, sizes);
  }
  void upstream(const Upstream&, const char* name, Sizes sizes) { in(nullptr, name, sizes); }
  void out(const void*, const char*, Sizes) {}

 private:
  const char* op_;
  const Tensor* const* next_;
  const char* like_name_;
  Options like_;
};

// Fills a kernel's struct: inputs, copied where they are not contiguous and aligned, and new tensors for results.
template <class Arguments>
class Fill {
 public:
  Fill(const Tensor* const* tensors, const Options& options, int64_t alignment)
      : next_(tensors), options_(options), alignment_(alignment) {
    copies_.reserve(Arguments::kInputs);
  }

  void in(const void*& data, const char* name, Sizes) {
    const Tensor* const tensor = *next_++;
    check_dtype(name, tensor);
    data = tensor == nullptr ? nullptr : copies_.emplace_back(*tensor, alignment_).data();
  }
  void upstream(Upstream& upstream, const char* name, Sizes) {
    const Tensor* const tensor = *next_++;
    check_dtype(name, tensor);
    upstream = tensor == nullptr ? Upstream{} : Upstream{tensor->data(), tensor->strides()[0], tensor->strides()[1]};
  }
  void out(void*& data, const char*, Sizes sizes) {
    std::array<int64_t, 4> strides;
    STD_TORCH_CHECK(sizes.size() <= strides.size(), "tables have tensors of ", strides.size(), " dimensions at most");
    results[made_] = allocate(options_, sizes, contiguous_strides(sizes, strides.data()));
    data = results[made_++].mutable_data();
  }

  std::array<Tensor, Arguments::kResults> results;

 private:
  // Also of what was computed after the arguments were checked.
  void check_dtype(const char* name, const Tensor* tensor) const {
    STD_TORCH_CHECK(
        tensor == nullptr || tensor->dtype() == options_.dtype, "a kernel expects `", name, "` of dtype ",
        dtype_name(options_.dtype), ", but got ", dtype_name(tensor->dtype()));
  }

  const Tensor* const* next_;
  Options options_;
  int64_t alignment_;
  std::vector<Dense> copies_;
  int made_ = 0;
};

template <class Arguments, class SizesOf>
void check(const char* op, const SizesOf& sizes, Tensors tensors, const char* like_name, const Tensor& like) {
  Arguments arguments{};
  arguments.sizes = sizes;
  Check check(op, tensors.begin(), like_name, like);
  Arguments::visit(arguments, check);
}

// Calls a kernel with tensors that were checked. `count` and `grain` say how its work may be divided among threads.
template <class Device, class Arguments, class Kernel, class SizesOf>
std::array<Tensor, Arguments::kResults> run(
    const char* op, Kernel kernel, ScalarType dtype, const SizesOf& sizes, Tensors tensors, const Tensor& like,
    int64_t count, int64_t grain, int64_t alignment = 1) {
  Arguments arguments{};
  arguments.sizes = sizes;
  Fill<Arguments> fill(tensors.begin(), like.options(), alignment);
  Arguments::visit(arguments, fill);
  Device::run(op, like, count, grain, [&](auto... where) { return kernel(dtype, arguments, where...); });
  return std::move(fill.results);
}

}  // namespace extops::stable
