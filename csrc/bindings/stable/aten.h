// The few ATen operators that the bindings call, through torch's stable dispatcher.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
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

inline Tensor cat_columns(const Tensor& left, const Tensor& right) {
  return call_aten("aten::cat", std::vector<Tensor>{left, right}, int64_t{1});
}

inline Tensor sum_rows(const Tensor& tensor) {
  const int64_t rows[] = {0};
  return torch::stable::sum(tensor, torch::headeronly::IntHeaderOnlyArrayRef(rows, 1));
}

inline Tensor as_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

}  // namespace extops::stable
