// What the operators check before they hand pointers to a kernel, with messages for the caller.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "../../kernels/types.h"
#include "tensor.h"

namespace extops::stable {

constexpr int64_t kPointwiseGrain = 8192;  // elements below which another thread costs more than it saves

inline void check_success(const char* op, Error error) {
  if (error != nullptr) throw std::runtime_error(std::string(op) + ": " + error);
}

inline std::string to_string(Sizes sizes) {
  std::string text = "[";
  for (size_t d = 0; d < sizes.size(); ++d) text += (d == 0 ? "" : ", ") + std::to_string(sizes[d]);
  return text + "]";
}

inline const char* dtype_name(int32_t dtype) {
  return torch::headeronly::toString(unbox<torch::headeronly::ScalarType>(box(dtype)));
}

inline ScalarType kernel_dtype(const char* op, const char* name, const Tensor& tensor) {
  const int32_t dtype = tensor.options().dtype;
  if (dtype == aoti_torch_dtype_float32()) return ScalarType::Float;
  if (dtype == aoti_torch_dtype_bfloat16()) return ScalarType::BFloat16;
  if (dtype == aoti_torch_dtype_float16()) return ScalarType::Half;
  STD_TORCH_CHECK(
      dtype == aoti_torch_dtype_float64(), op, ": expected `", name,
      "` of a floating-point dtype (float64, float32, bfloat16, float16), but got ", dtype_name(dtype));
  return ScalarType::Double;
}

// Everything that kernels assume: a wrong pointer or size would crash them.
inline void check_matches(
    const char* op, const char* name, const Tensor& tensor, const char* like_name, const Options& like) {
  const Options own = tensor.options();
  STD_TORCH_CHECK(
      own.dtype == like.dtype, op, ": expected `", name, "` of dtype ", dtype_name(like.dtype), ", the dtype of `",
      like_name, "`, but got ", dtype_name(own.dtype));
  STD_TORCH_CHECK(
      own.device_type == like.device_type && own.device_index == like.device_index, op, ": expected `", name,
      "` on the device of `", like_name, "`");
}

inline bool has_sizes(const Tensor& tensor, Sizes expected) {
  const Sizes sizes = tensor.sizes();
  return std::equal(sizes.begin(), sizes.end(), expected.begin(), expected.end());
}

inline void check_sizes(const char* op, const char* name, const Tensor& tensor, Sizes expected) {
  STD_TORCH_CHECK(
      has_sizes(tensor, expected), op, ": expected `", name, "` to have shape ", to_string(expected), ", but got ",
      to_string(tensor.sizes()));
}

}  // namespace extops::stable
