// The few ATen operators that the bindings call, through torch's stable dispatcher, and new tensors.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "tensor.h"

// The message of an exception that torch turned into an error code. Since torch 2.13; older torch prints it.
extern "C" [[gnu::weak, gnu::visibility("default")]] const char* torch_exception_get_what_without_backtrace();

namespace extops::stable {

// The type of torch's exception is lost: package/extops/calling/_errors.py recognises this error by its message, and
// restores the type.
inline void check(AOTITorchError code, const char* name) {
  if (code == AOTI_TORCH_SUCCESS) return;
  auto* const what = torch_exception_get_what_without_backtrace;
  throw std::runtime_error(std::string(name) + ": torch's API call failed" + (what ? std::string(": ") + what() : ""));
}

// The dispatcher deletes the handles on its stack, so each call gets one of its own.
inline AtenTensorHandle new_handle(const Tensor& tensor) {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(tensor.get(), &handle));
  return handle;
}

inline StableIValue box(const Tensor& tensor) { return box(new_handle(tensor)); }

template <class... Arguments>
Tensor call_aten(const char* name, const char* overload, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack{box(arguments)...};
  check(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION), name);
  return Unbox<Tensor>::call(stack[0]);
}

inline Tensor to_float32(const Tensor& tensor) {
  return call_aten("aten::to", "dtype", tensor, torch::headeronly::ScalarType::Float, false, false, std::nullopt);
}

inline Tensor contiguous_copy(const Tensor& tensor) {
  return call_aten("aten::clone", "", tensor, std::optional(torch::headeronly::MemoryFormat::Contiguous));
}

// A new tensor, directly from the allocator. The dispatcher looks operators up by name: for a small problem, that would
// take longer than the kernel.
inline Tensor allocate(const Options& options, Sizes sizes, const int64_t* strides) {
  AtenTensorHandle result = nullptr;
  check(
      aoti_torch_empty_strided(
          static_cast<int64_t>(sizes.size()), sizes.data(), strides, options.dtype, options.device_type,
          options.device_index, &result),
      "empty_strided");
  return Tensor(result);
}

// Writes the strides of a contiguous tensor to `strides`.
inline const int64_t* contiguous_strides(Sizes sizes, int64_t* strides) {
  uint64_t stride = 1;  // may overflow for a huge shape, which torch then refuses
  for (size_t d = sizes.size(); d-- > 0; stride *= std::max<int64_t>(sizes[d], 1)) strides[d] = stride;
  return strides;
}

inline Tensor allocate(const Options& options, int64_t rows, int64_t columns) {
  const int64_t sizes[] = {rows, columns};
  const int64_t strides[] = {std::max<int64_t>(columns, 1), 1};
  return allocate(options, Sizes(sizes, 2), strides);
}

inline Tensor allocate(const Options& options, int64_t size) {
  const int64_t stride = 1;
  return allocate(options, Sizes(&size, 1), &stride);
}

inline Tensor allocate_like(const Tensor& like) {
  if (like.is_contiguous()) return allocate(like.options(), like.sizes(), like.strides().data());
  const auto none = std::nullopt;
  return call_aten("aten::empty_like", "", like, none, none, none, none, none);
}

inline Tensor allocate_bytes(Options options, int64_t size) {
  options.dtype = aoti_torch_dtype_uint8();
  return allocate(options, size);
}

inline Tensor zeros(const Options& options, int64_t rows, int64_t columns) {
  return call_aten("aten::zero_", "", allocate(options, rows, columns));
}

// These functions write into a given tensor. Autocast may be on around a captured program, and casts GEMMs, sums and
// concatenations that return a new tensor, which a kernel would then read as the wrong dtype.

inline void mm_into(const Tensor& a, const Tensor& b, const Tensor& product) {
  call_aten("aten::mm", "out", a, b, product);
}

// The same for factors in 16-bit types on CUDA, with a result in float32.
inline void mm_float32_into(const Tensor& a, const Tensor& b, const Tensor& product) {
  call_aten("aten::mm", "dtype_out", a, b, torch::headeronly::ScalarType::Float, product);
}

// input * weights^T, and the bias added before the sum is rounded.
inline Tensor linear(const Tensor& input, const Tensor& weights, const Tensor& bias) {
  Tensor sum = allocate(input.options(), input.sizes()[0], weights.sizes()[0]);
  call_aten("aten::linear", "out", input, weights, std::optional(new_handle(bias)), sum);
  return sum;
}

inline Tensor cat_columns(const Tensor& left, const Tensor& right) {
  Tensor joined = allocate(left.options(), left.sizes()[0], left.sizes()[1] + right.sizes()[1]);
  const std::vector<AtenTensorHandle> parts{new_handle(left), new_handle(right)};
  call_aten("aten::cat", "out", parts, int64_t{1}, joined);
  return joined;
}

inline Tensor sum_rows(const Tensor& matrix) {
  Tensor sum = allocate(matrix.options(), matrix.sizes()[1]);
  call_aten("aten::sum", "IntList_out", matrix, std::optional(std::vector<int64_t>{0}), false, std::nullopt, sum);
  return sum;
}

inline Tensor mm(const Tensor& a, const Tensor& b) {
  Tensor product = allocate(a.options(), a.sizes()[0], b.sizes()[1]);
  const bool is_column = b.sizes()[1] == 1 && b.strides()[0] != 1;
  if (is_column && a.options().device_type == aoti_torch_device_type_cpu()) {
    // Torch 2.7 to 2.10 read wrong numbers in such a column of a 16-bit type.
    mm_into(a, contiguous_copy(b), product);
  } else {
    mm_into(a, b, product);
  }
  return product;
}

// The same memory as a tensor of other sizes and strides, from `offset` elements on. It bypasses the dispatcher, which
// would take as long as a kernel.
inline Tensor reinterpret(const Tensor& tensor, Sizes sizes, Sizes strides, int64_t offset = 0) {
  AtenTensorHandle result = nullptr;
  check(
      aoti_torch__reinterpret_tensor(
          tensor.get(), static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), offset, &result),
      "reinterpret_tensor");
  return Tensor(result);
}

inline Tensor columns(const Tensor& matrix, int64_t first, int64_t count) {
  const int64_t shape[] = {matrix.sizes()[0], count};
  return reinterpret(matrix, Sizes(shape, 2), matrix.strides(), first * matrix.strides()[1]);
}

inline Tensor transpose(const Tensor& matrix) {
  const int64_t shape[] = {matrix.sizes()[1], matrix.sizes()[0]};
  const int64_t strides[] = {matrix.strides()[1], matrix.strides()[0]};
  return reinterpret(matrix, Sizes(shape, 2), Sizes(strides, 2));
}

// The elements of a tensor, contiguous and aligned to `alignment` bytes: in place if they are, else in a copy.
class Dense {
 public:
  explicit Dense(const Tensor& tensor, int64_t alignment = 1) : data_(tensor.data()) {
    if (tensor.is_contiguous() && reinterpret_cast<uintptr_t>(data_) % alignment == 0) return;
    copy_ = contiguous_copy(tensor);
    data_ = copy_->data();
  }

  const void* data() const { return data_; }

 private:
  std::optional<Tensor> copy_;
  const void* data_;
};

}  // namespace extops::stable
