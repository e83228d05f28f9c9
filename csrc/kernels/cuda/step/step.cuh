// The functions of one step of a cell on a GPU, as ../../step.h declares them, and the choice of their kernels. The
// limits were read off an NVIDIA H200.
#pragma once

#include "small.cuh"

namespace extops::cuda::step {

// Below so many multiplications the small kernel beats a library's products with the kernel that they need beside them.
// In all precisions but strict float32 the library has tensor cores.
constexpr double kStrictFloat32Limit = 13e6;
constexpr double kOtherLimit = 4e6;
constexpr int64_t kMostDepth = 8192;  // a warp goes through all of K
// With few rows the time is that of reading the weights, and vector loads suffice.
constexpr double kRowLimit = 64e6;
constexpr int64_t kFewRows = 16;
constexpr int64_t kLeastDepth = 256;

template <class Cell>
double multiplications(const StepSizes& sizes) {
  return double(sizes.batch) * sizes.state_size *
         (Cell::kRecurrent * double(sizes.state_size) + Cell::kInput * double(sizes.input_features));
}

// Whether sizes are 32-bit numbers inside the kernel, whatever the strides.
inline bool fits(const StepSizes& sizes) {
  constexpr int64_t kMost = INT32_MAX / 8;
  return sizes.batch <= kMost && sizes.state_size <= 4 * int64_t{65535} && sizes.input_features <= kMost;
}

template <class Cell>
bool is_for_few_rows(ScalarType dtype, const StepSizes& sizes) {
  const bool is_half = dtype == ScalarType::Half || dtype == ScalarType::BFloat16;
  const int64_t vector = kChunkBytes / (is_half ? 2 : dtype == ScalarType::Double ? 8 : 4);
  const auto& [batch, input_features, state_size] = sizes;
  const int64_t depth = state_size + input_features;
  return state_size % vector == 0 && input_features % vector == 0 && depth <= kMostDepth &&
         multiplications<Cell>({1, input_features, state_size}) < kRowLimit &&
         (batch == 1 || (!is_half && batch <= kFewRows && depth >= kLeastDepth));
}

template <class Cell>
bool is_for_small(ScalarType dtype, const StepSizes& sizes) {
  const double most = dtype == ScalarType::Float ? kStrictFloat32Limit : kOtherLimit;
  return sizes.state_size + sizes.input_features <= kMostDepth && multiplications<Cell>(sizes) < most;
}

// On other GPUs nothing was measured: there a library multiplies.
inline bool is_hopper() { return device_attribute(cudaDevAttrComputeCapabilityMajor) == 9; }

template <class Cell>
int64_t alignment(ScalarType dtype, const StepSizes& sizes) {
  if (!is_hopper() || !fits(sizes)) return 0;
  if (is_for_few_rows<Cell>(dtype, sizes)) return kChunkBytes;
  return is_for_small<Cell>(dtype, sizes);
}

template <class Cell>
Error launch_forward(ScalarType dtype, const StepArguments& arguments, cudaStream_t stream) {
  const StepSizes& sizes = arguments.sizes;
  if (sizes.batch * sizes.state_size == 0) return nullptr;
  return dispatch(dtype, [&](auto scalar) {
    using T = decltype(scalar);
    if (arguments.products_x != nullptr) return launch_pointwise<Cell, T>(arguments, stream);
    const Forward<Cell, T> in(arguments);
    constexpr int kVector = kChunkBytes / sizeof(T);
    const bool has_chunks = start_at_chunks({in.input, in.h_0, in.weights_x, in.weights_h}) &&
                            in.weights_x_stride % kVector == 0 && in.weights_h_stride % kVector == 0;
    if (has_chunks && is_for_few_rows<Cell>(dtype, sizes)) {
      if (sizes.batch == 1) return launch_small<SmallTile<1, kVector, 4>>(in, stream);
      if constexpr (sizeof(T) >= 4) return launch_small<SmallTile<4, kVector, 2>>(in, stream);
    }
    return launch_small<SmallTile<2, 1, 6>>(in, stream);
  });
}

template <class Cell>
Error launch_backward(ScalarType dtype, const StepBackwardArguments& in, cudaStream_t stream) {
  if (in.sizes.batch * in.sizes.state_size == 0) return nullptr;
  return dispatch(dtype, [&](auto scalar) { return launch_pointwise<Cell, decltype(scalar)>(in, stream); });
}

}  // namespace extops::cuda::step

#define EXTOPS_STEP_CUDA(cell, Cell)                                                                           \
  int64_t extops_##cell##_step_alignment_cuda(ScalarType dtype, const StepSizes& sizes) {                      \
    return extops::cuda::step::alignment<Cell>(dtype, sizes);                                                  \
  }                                                                                                            \
  Error extops_##cell##_step_cuda(ScalarType dtype, const StepArguments& arguments, void* stream) {            \
    return extops::cuda::step::launch_forward<Cell>(dtype, arguments, static_cast<cudaStream_t>(stream));      \
  }                                                                                                            \
  Error extops_##cell##_step_backward_cuda(                                                                    \
      ScalarType dtype, const StepBackwardArguments& arguments, void* stream) {                                \
    return extops::cuda::step::launch_backward<Cell>(dtype, arguments, static_cast<cudaStream_t>(stream));     \
  }
