// What the operators check before they hand pointers to a kernel, with messages for the caller.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <string>
#include <vector>

#include "../../kernels/types.h"

namespace extops::stable {

using torch::stable::Tensor;

inline void check_success(Error error) { STD_TORCH_CHECK(error == nullptr, error); }

inline std::string to_string(torch::headeronly::IntHeaderOnlyArrayRef sizes) {
  std::string text = "[";
  for (size_t d = 0; d < sizes.size(); ++d) text += (d == 0 ? "" : ", ") + std::to_string(sizes[d]);
  return text + "]";
}

inline ScalarType kernel_dtype(const char* op, const char* name, const Tensor& tensor) {
  using torch::headeronly::ScalarType;
  const ScalarType dtype = tensor.scalar_type();
  STD_TORCH_CHECK(
      dtype == ScalarType::Float || dtype == ScalarType::Double || dtype == ScalarType::Half ||
          dtype == ScalarType::BFloat16,
      op, ": expected `", name, "` of a floating-point dtype (float64, float32, bfloat16, float16), but got ",
      torch::headeronly::toString(dtype));
  return static_cast<::ScalarType>(dtype);
}

// Everything a kernel takes for granted: a wrong pointer or size would be a crash.
inline void check_matches(
    const char* op, const char* name, const Tensor& tensor, const char* like_name, const Tensor& like) {
  STD_TORCH_CHECK(
      tensor.scalar_type() == like.scalar_type(), op, ": expected `", name, "` of dtype ",
      torch::headeronly::toString(like.scalar_type()), ", the dtype of `", like_name, "`, but got ",
      torch::headeronly::toString(tensor.scalar_type()));
  STD_TORCH_CHECK(tensor.device() == like.device(), op, ": expected `", name, "` on the device of `", like_name, "`");
}

inline void check_sizes(
    const char* op, const char* name, const Tensor& tensor, torch::headeronly::IntHeaderOnlyArrayRef expected) {
  const auto sizes = tensor.sizes();
  STD_TORCH_CHECK(
      std::equal(sizes.begin(), sizes.end(), expected.begin(), expected.end()), op, ": expected `", name,
      "` to have shape ", to_string(expected), ", but got ", to_string(sizes));
}

}  // namespace extops::stable
