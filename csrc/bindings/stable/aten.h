// The few ATen operators that the bindings call, through torch's stable dispatcher.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

namespace extops::stable {

using torch::stable::Tensor;

template <class... Arguments>
Tensor call_aten(const char* name, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack{torch::stable::detail::from(arguments)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

inline Tensor mm(const Tensor& a, const Tensor& b) { return call_aten("aten::mm", a, b); }

// input * weights^T
inline Tensor linear(const Tensor& input, const Tensor& weights) {
  return call_aten("aten::linear", input, weights, std::optional<Tensor>());
}

inline Tensor cat_columns(const Tensor& left, const Tensor& right) {
  return call_aten("aten::cat", std::vector<Tensor>{left, right}, int64_t{1});
}

inline Tensor sum_rows(const Tensor& tensor) {
  const int64_t rows[] = {0};
  return torch::stable::sum(tensor, torch::headeronly::IntHeaderOnlyArrayRef(rows, 1));
}

// A new tensor of the dtype and device of `like`. Straight to the allocator: by way of the dispatcher, which looks its
// operators up by name, the results of a small problem cost more than the kernel.
inline Tensor allocate_strided(const Tensor& like, int64_t dim, const int64_t* sizes, const int64_t* strides) {
  int32_t dtype = 0;
  int32_t device_type = 0;
  int32_t device_index = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  AtenTensorHandle result = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dim, sizes, strides, dtype, device_type, device_index, &result));
  return Tensor(result);
}

inline Tensor allocate(const Tensor& like, int64_t rows, int64_t columns) {
  const int64_t sizes[] = {rows, columns};
  const int64_t strides[] = {std::max<int64_t>(columns, 1), 1};
  return allocate_strided(like, 2, sizes, strides);
}

inline Tensor allocate_like(const Tensor& like) {
  if (!like.is_contiguous()) return torch::stable::empty_like(like);
  return allocate_strided(like, like.dim(), like.sizes().data(), like.strides().data());
}

inline Tensor as_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

}  // namespace extops::stable
