// The functions of one step of a cell on a GPU, as ../../step.h declares them, and the choice of their kernels. The
// limits were read off an NVIDIA H200.
#pragma once

#include "small.cuh"
#include "small_backward.cuh"

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
// Of the backward: a block goes through the whole batch.
constexpr double kStrictFloat32BackwardLimit = 130e6;
constexpr double kOtherBackwardLimit = 16e6;
constexpr int64_t kMostBackwardRows = 256;
constexpr double kInputBackwardLimit = 8e6;  // in strict float32
constexpr int64_t kSumRows = 4096;           // a library divides a column among blocks

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

// TF32 shortens no backward of few rows, whose time is that of storing the gradients of the weights.
template <class Cell>
int64_t backward_alignment(ScalarType dtype, const StepSizes& sizes) {
  const bool is_few_in_tf32 = dtype == ScalarType::TF32 && sizes.batch <= kFewRows;
  const bool is_strict = dtype == ScalarType::Float || is_few_in_tf32;
  const double most = is_strict ? kStrictFloat32BackwardLimit : kOtherBackwardLimit;
  return is_hopper() && fits(sizes) && sizes.batch > 0 && sizes.batch <= kMostBackwardRows &&
         multiplications<Cell>(sizes) < most;
}

template <class Cell>
Error launch_backward(ScalarType dtype, const StepBackwardArguments& in, cudaStream_t stream) {
  if (in.sizes.batch * in.sizes.state_size == 0) return nullptr;
  return dispatch(dtype, [&](auto scalar) {
    using T = decltype(scalar);
    if (in.grad_weights_h != nullptr) return launch_parameters_backward<Cell, T>(in, stream);
    return launch_pointwise<Cell, T>(in, stream);
  });
}

inline int64_t bias_backward_alignment(const StepSizes& sizes) { return is_hopper() && sizes.batch <= kSumRows; }

template <class Cell>
Error launch_bias_backward(ScalarType dtype, const StepBiasBackwardArguments& arguments, cudaStream_t stream) {
  const StepSizes& sizes = arguments.sizes;
  if (sizes.state_size == 0) return nullptr;
  return dispatch(dtype, [&](auto scalar) {
    using T = decltype(scalar);
    ColumnSums<T> in{};
    in.rows = sizes.batch;
    in.columns[0] = Cell::kInput * sizes.state_size;
    set_pointers({arguments.grad_x, arguments.grad_bias_x}, in.values[0], in.sums[0]);
    if constexpr (kHasOneGradient<Cell>) {
      in.copy = static_cast<T*>(arguments.grad_bias_h);
    } else {
      in.columns[1] = Cell::kRecurrent * sizes.state_size;
      set_pointers({arguments.grad_h_part, arguments.grad_bias_h}, in.values[1], in.sums[1]);
    }
    const auto blocks = static_cast<unsigned>((in.columns[0] + 31) / 32 + (in.columns[1] + 31) / 32);
    launch(&column_sums_kernel<T>, {blocks, 32 * kSumWarps}, stream, in);
    return launch_error();
  });
}

template <class Cell>
int64_t input_backward_alignment(ScalarType dtype, const StepSizes& sizes) {
  return dtype == ScalarType::Float && is_hopper() && fits(sizes) && multiplications<Cell>(sizes) < kInputBackwardLimit;
}

template <class Cell>
Error launch_input_backward(ScalarType dtype, const StepInputBackwardArguments& arguments, cudaStream_t stream) {
  if (dtype != ScalarType::Float) return "the kernel for small problems takes float32";
  const StepSizes& sizes = arguments.sizes;
  InputBackward in{};
  in.batch = static_cast<int>(sizes.batch);
  in.input_features = static_cast<int>(sizes.input_features);
  in.state_size = static_cast<int>(sizes.state_size);
  const void* const of_h = kHasOneGradient<Cell> ? arguments.grad_x : arguments.grad_h_part;
  set_pointers({arguments.grad_x, of_h, arguments.grad_c_0}, in.grad_x, in.grad_h_part, in.grad_c_0);
  set_pointers({arguments.weights_x, arguments.weights_h}, in.weights_x, in.weights_h);
  in.weights_x_stride = arguments.weights_x_stride;
  in.weights_h_stride = arguments.weights_h_stride;
  set_pointers({arguments.grad_input, arguments.grad_h_0}, in.grad_input, in.grad_h_0);
  const int column_blocks = (in.state_size + 31) / 32 + (in.input_features + 31) / 32;
  const auto blocks = static_cast<unsigned>((in.batch + kInputRows - 1) / kInputRows * column_blocks);
  if (blocks == 0) return nullptr;
  launch(&input_backward_kernel<Cell>, {blocks, 32 * kInputWarps}, stream, in);
  return launch_error();
}

}  // namespace extops::cuda::step

#define EXTOPS_STEP_CUDA(cell, Cell)                                                                                 \
  int64_t extops_##cell##_step_alignment_cuda(ScalarType dtype, const StepSizes& sizes) {                            \
    return extops::cuda::step::alignment<Cell>(dtype, sizes);                                                        \
  }                                                                                                                  \
  Error extops_##cell##_step_cuda(ScalarType dtype, const StepArguments& arguments, void* stream) {                  \
    return extops::cuda::step::launch_forward<Cell>(dtype, arguments, static_cast<cudaStream_t>(stream));            \
  }                                                                                                                  \
  Error extops_##cell##_step_backward_cuda(ScalarType dtype, const StepBackwardArguments& arguments, void* stream) { \
    return extops::cuda::step::launch_backward<Cell>(dtype, arguments, static_cast<cudaStream_t>(stream));           \
  }                                                                                                                  \
  int64_t extops_##cell##_step_backward_alignment_cuda(ScalarType dtype, const StepSizes& sizes) {                   \
    return extops::cuda::step::backward_alignment<Cell>(dtype, sizes);                                               \
  }                                                                                                                  \
  Error extops_##cell##_step_bias_backward_cuda(                                                                     \
      ScalarType dtype, const StepBiasBackwardArguments& arguments, void* stream) {                                  \
    return extops::cuda::step::launch_bias_backward<Cell>(dtype, arguments, static_cast<cudaStream_t>(stream));      \
  }                                                                                                                  \
  int64_t extops_##cell##_step_bias_backward_alignment_cuda(ScalarType, const StepSizes& sizes) {                    \
    return extops::cuda::step::bias_backward_alignment(sizes);                                                       \
  }                                                                                                                  \
  Error extops_##cell##_step_input_backward_cuda(                                                                    \
      ScalarType dtype, const StepInputBackwardArguments& arguments, void* stream) {                                 \
    return extops::cuda::step::launch_input_backward<Cell>(dtype, arguments, static_cast<cudaStream_t>(stream));     \
  }                                                                                                                  \
  int64_t extops_##cell##_step_input_backward_alignment_cuda(ScalarType dtype, const StepSizes& sizes) {             \
    return extops::cuda::step::input_backward_alignment<Cell>(dtype, sizes);                                         \
  }
