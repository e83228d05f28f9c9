// Which kernel computes a cell, and its entry points. The limits were read off an NVIDIA H200.
#include "../lltm.h"
#include "hopper.cuh"
#include "lltm_problem.cuh"
#include "lltm_small.cuh"

namespace extops::cuda {

// Below so many multiplications these kernels beat a library's product with the kernels that it needs beside it. In all
// precisions but strict float32 the library has tensor cores.
struct Limits {
  double strict_float32;
  double others;
  int64_t columns;  // of X
  int64_t batch;
};
constexpr Limits kForwardLimits{13e6, 4e6, 8192, INT64_MAX};    // a warp goes through all columns
constexpr Limits kBackwardLimits{130e6, 16e6, INT64_MAX, 256};  // a block goes through the whole batch
constexpr Limits kInputLimits{8e6, 0, INT64_MAX, INT64_MAX};
constexpr int64_t kSumRows = 4096;  // a library divides a column among blocks
constexpr double kRowLimit = 64e6;
constexpr int64_t kFewRows = 16;
constexpr double kHopperFrom = 4e6;         // multiplications from which on the kernels for Hopper are fastest
constexpr int64_t kHopperRows = 512;        // the most that was measured
constexpr int64_t kTf32BackwardRows = 256;  // above, a library's product is faster

inline double multiplications(const LltmSizes& sizes) { return 3.0 * sizes.batch * sizes.state_size * sizes.columns(); }

// On other GPUs nothing was measured: there a library multiplies.
inline bool is_hopper() { return device_attribute(cudaDevAttrComputeCapabilityMajor) == 9; }

inline bool is_within(const Limits& limits, ScalarType dtype, const LltmSizes& sizes) {
  const double most = dtype == ScalarType::Float ? limits.strict_float32 : limits.others;
  return is_hopper() && sizes.batch <= limits.batch && sizes.columns() <= limits.columns &&
         multiplications(sizes) < most;
}

// Whether the kernels for Hopper take such a problem and are the fastest for it.
inline bool is_for_hopper(int64_t bytes, const LltmSizes& sizes) {
  return sizes.batch <= kHopperRows && multiplications(sizes) >= kHopperFrom && sizes.state_size * bytes % 128 == 0 &&
         sizes.input_features * bytes % kChunkBytes == 0 && has_hopper_tensor_cores();
}

inline bool is_for_tensor_cores(ScalarType dtype, const LltmSizes& sizes) {
  if (dtype == ScalarType::Float || dtype == ScalarType::Double) return false;
  // A library multiplies a single row in full precision.
  if (dtype == ScalarType::TF32 && sizes.batch == 1) return false;
  return is_for_hopper(dtype == ScalarType::TF32 ? 4 : 2, sizes);
}

// TF32 shortens no backward of few rows, whose time is that of storing grad_weights.
inline bool is_for_small_backward(ScalarType dtype, const LltmSizes& sizes) {
  const bool is_few_in_tf32 = dtype == ScalarType::TF32 && sizes.batch <= kFewRows;
  return is_within(kBackwardLimits, is_few_in_tf32 ? ScalarType::Float : dtype, sizes);
}

inline bool is_for_tensor_backward(ScalarType dtype, const LltmSizes& sizes) {
  if (!is_for_tensor_cores(dtype, sizes)) return false;
  if (dtype == ScalarType::TF32) return sizes.batch <= kTf32BackwardRows && !is_for_small_backward(dtype, sizes);
  return sizes.batch <= kBackwardRows || !is_for_small_backward(dtype, sizes);
}

inline bool is_for_float32(ScalarType dtype, const LltmSizes& sizes) {
  return dtype == ScalarType::Float && sizes.batch > kFewRows && is_for_hopper(4, sizes);
}

// With few rows the time is that of reading the weights, and vector loads suffice. Also where TF32 is allowed, which
// would gain nothing.
inline bool is_for_few_rows(ScalarType dtype, const LltmSizes& sizes) {
  const bool is_half = dtype == ScalarType::Half || dtype == ScalarType::BFloat16;
  const int64_t vector = kChunkBytes / (is_half ? 2 : dtype == ScalarType::Double ? 8 : 4);
  constexpr int64_t kFewColumns = 256;
  const auto& [batch, input_features, state_size] = sizes;
  const int64_t columns = sizes.columns();
  return state_size % vector == 0 && input_features % vector == 0 && columns <= kForwardLimits.columns &&
         multiplications({1, input_features, state_size}) < kRowLimit &&
         (batch == 1 || (!is_half && batch <= kFewRows && columns >= kFewColumns)) && is_hopper();
}

inline Sizes make_sizes(const LltmSizes& sizes) {
  return {static_cast<int>(sizes.batch), static_cast<int>(sizes.input_features), static_cast<int>(sizes.state_size)};
}

// Sizes are 32-bit numbers inside these kernels, whatever the strides.
inline Error check_sizes(const LltmSizes& sizes) {
  constexpr int64_t kMost = INT32_MAX / 2;
  const bool fits = sizes.batch <= kMost && 3 * sizes.state_size <= kMost && sizes.input_features <= kMost;
  return fits ? nullptr : "the kernel for small problems takes sizes below 2**30";
}

}  // namespace extops::cuda

using namespace extops::cuda;

int64_t extops_lltm_alignment_cuda(ScalarType dtype, const LltmSizes& sizes) {
  if (is_for_few_rows(dtype, sizes) || is_for_tensor_cores(dtype, sizes) || is_for_float32(dtype, sizes)) {
    return kChunkBytes;
  }
  return is_within(kForwardLimits, dtype, sizes);
}

int64_t extops_lltm_backward_alignment_cuda(ScalarType dtype, const LltmSizes& sizes) {
  return is_for_tensor_backward(dtype, sizes) ? kChunkBytes : is_for_small_backward(dtype, sizes);
}

int64_t extops_lltm_bias_backward_alignment_cuda(ScalarType, const LltmSizes& sizes) {
  return is_hopper() && sizes.batch <= kSumRows;
}

int64_t extops_lltm_input_backward_alignment_cuda(ScalarType dtype, const LltmSizes& sizes) {
  return is_within(kInputLimits, dtype, sizes);
}

Error extops_lltm_cuda(ScalarType dtype, const LltmForward& arguments, void* stream_handle) {
  const LltmSizes& sizes = arguments.sizes;
  if (sizes.batch * sizes.state_size == 0) return nullptr;
  if (const Error error = check_sizes(sizes)) return error;
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  return dispatch(dtype, [&](auto scalar) {
    using T = decltype(scalar);
    const CellForward<T> in(make_sizes(sizes), arguments);
    // Problems of few rows are bound by the bandwidth at which weights arrive.
    constexpr int kVector = kChunkBytes / sizeof(T);
    const bool are_aligned = start_at_chunks({in.input, in.weights, in.old_h});
    if (are_aligned && is_for_few_rows(dtype, sizes)) {
      if (sizes.batch == 1) return launch_small<SmallForwardTile<1, kVector, 4>>(in, stream);
      if constexpr (sizeof(T) >= 4) return launch_small<SmallForwardTile<4, kVector, 2>>(in, stream);
    }
    if constexpr (!std::is_same_v<T, double>) {
      if (are_aligned && is_for_tensor_cores(dtype, sizes)) return launch_on_tensor_cores(in, stream);
    }
    if constexpr (std::is_same_v<T, float>) {
      if (are_aligned && is_for_float32(dtype, sizes)) return launch_in_float32(in, stream);
    }
    return launch_small<SmallForwardTile<2, 1, 6>>(in, stream);
  });
}

Error extops_lltm_backward_cuda(ScalarType dtype, const LltmBackward& arguments, void* stream_handle) {
  const LltmSizes& sizes = arguments.sizes;
  if (sizes.state_size == 0) return nullptr;
  if (const Error error = check_sizes(sizes)) return error;
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  return dispatch(dtype, [&](auto scalar) {
    using T = decltype(scalar);
    const CellBackward<T> in(make_sizes(sizes), arguments);
    if constexpr (!std::is_same_v<T, double>) {
      if (is_for_tensor_backward(dtype, sizes) &&
          start_at_chunks({in.input, in.old_h, in.grad_gates, in.grad_weights})) {
        return launch_on_tensor_cores(in, stream);
      }
    }
    return launch_small(in, stream);
  });
}

Error extops_lltm_bias_backward_cuda(ScalarType dtype, const LltmBiasBackward& in, void* stream) {
  const int64_t columns = 3 * in.sizes.state_size;
  if (columns == 0) return nullptr;
  return dispatch(dtype, [&](auto scalar) {
    using T = decltype(scalar);
    const auto blocks = static_cast<unsigned>((columns + 31) / 32);
    launch(
        &lltm_bias_backward_kernel<T>, {blocks, 32 * kSumWarps}, static_cast<cudaStream_t>(stream), in.sizes.batch,
        columns, static_cast<const T*>(in.grad_gates), static_cast<T*>(in.grad_bias));
    return launch_error();
  });
}

Error extops_lltm_input_backward_cuda(ScalarType dtype, const LltmInputBackward& in, void* stream) {
  if (dtype != ScalarType::Float) return "the kernel for small problems takes float32";
  if (in.sizes.batch * in.sizes.columns() == 0) return nullptr;
  if (const Error error = check_sizes(in.sizes)) return error;
  const Sizes sizes = make_sizes(in.sizes);
  const unsigned grid = ceil_div(sizes.batch, kInputRows) * ceil_div(sizes.columns(), 32);
  launch(
      &lltm_input_backward_kernel, {grid, 32 * kInputWarps}, static_cast<cudaStream_t>(stream), sizes,
      static_cast<const float*>(in.grad_gates), static_cast<const float*>(in.weights),
      static_cast<float*>(in.grad_old_h), static_cast<float*>(in.grad_input));
  return launch_error();
}
