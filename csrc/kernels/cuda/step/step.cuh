// The functions of one step of a cell on a GPU, as ../../step.h declares them, and the choice of their kernels. The
// limits were measured on an NVIDIA H200.
#pragma once

#include "pointwise.cuh"

namespace extops::cuda::step {

// Below so many multiplications the small kernel is faster than library GEMMs and their pointwise kernel. In all
// precisions but strict float32 the library uses tensor cores.
constexpr double kStrictFloat32Limit = 13e6;
constexpr double kOtherLimit = 4e6;
constexpr int64_t kMostDepth = 8192;        // a warp computes all of K
constexpr int64_t kMostDepthOfRows = 1280;  // where it does for several rows
// With few rows the time is that of loading the weights, for which vector loads suffice.
constexpr double kRowLimit = 64e6;
constexpr int64_t kFewRows = 16;
constexpr int64_t kLeastDepth = 256;
// From so many multiplications on tensor cores are fastest, up to the most rows that were measured.
constexpr double kTensorCoresFrom = 4e6;
constexpr int64_t kTensorCoresRows = 512;
// Up to so many weights. Those in 16-bit types stay in the L2 cache from call to call.
template <class Cell>
constexpr double kHalfWeights = Cell::kGates == 1 ? 20e6 : 12e6;
constexpr double kTf32Weights = 30e6;
// In TF32 tensor cores are faster above so many rows.
constexpr int64_t kFewRowsInTf32 = 8;
constexpr int64_t kFewRowsOfManyWeightsInTf32 = 4;
constexpr double kManyWeights = 10e6;
// Of the backward: a block computes the whole batch.
constexpr double kStrictFloat32BackwardLimit = 130e6;
constexpr double kOtherBackwardLimit = 16e6;
constexpr int64_t kMostBackwardRows = 256;
constexpr double kInputBackwardLimit = 8e6;  // in strict float32
constexpr double kTf32InputBackwardLimit = 4e6;
constexpr int64_t kSumRows = 4096;  // a library divides a column among blocks

template <class Cell>
double multiplications(const StepSizes& sizes) {
  return double(sizes.batch) * sizes.state_size *
         (Cell::kRecurrent * double(sizes.state_size) + Cell::kInput * double(sizes.input_features));
}

template <class Cell>
double weights(const StepSizes& sizes) {
  return multiplications<Cell>({1, sizes.input_features, sizes.state_size});
}

// Whether 32-bit numbers hold the sizes inside the kernels, whatever the strides.
inline bool fits(const StepSizes& sizes) {
  constexpr int64_t kMost = INT32_MAX / 8;
  return sizes.batch <= kMost && sizes.state_size <= 4 * int64_t{65535} && sizes.input_features <= kMost;
}

// How many rows the kernel of vector loads takes where it can: fewer, where tensor cores are faster.
template <class Cell>
int64_t most_few_rows(ScalarType dtype, const StepSizes& sizes) {
  if (dtype == ScalarType::Half || dtype == ScalarType::BFloat16) return 1;
  if (dtype != ScalarType::TF32 || multiplications<Cell>(sizes) < kTensorCoresFrom) return kFewRows;
  return weights<Cell>(sizes) < kManyWeights ? kFewRowsInTf32 : kFewRowsOfManyWeightsInTf32;
}

template <class Cell>
bool is_for_few_rows(ScalarType dtype, const StepSizes& sizes) {
  const bool is_half = dtype == ScalarType::Half || dtype == ScalarType::BFloat16;
  const int64_t vector = kChunkBytes / (is_half ? 2 : dtype == ScalarType::Double ? 8 : 4);
  const auto& [batch, input_features, state_size] = sizes;
  const int64_t depth = state_size + input_features;
  return state_size % vector == 0 && input_features % vector == 0 && depth <= kMostDepth &&
         weights<Cell>(sizes) < (is_half ? kHalfWeights<Cell> : kRowLimit) &&
         (batch == 1 || (batch <= most_few_rows<Cell>(dtype, sizes) && depth >= kLeastDepth));
}

template <class Cell>
bool is_for_small(ScalarType dtype, const StepSizes& sizes) {
  const double most = dtype == ScalarType::Float ? kStrictFloat32Limit : kOtherLimit;
  const int64_t most_depth = sizes.batch == 1 ? kMostDepth : kMostDepthOfRows;
  return sizes.state_size + sizes.input_features <= most_depth && multiplications<Cell>(sizes) < most;
}

// The kernels of small problems (small.cuh, small_backward.cuh). Nothing was measured on GPUs before or after Hopper:
// there a library multiplies, and these kernels and those below are not compiled.
template <class Cell, class T>
Error launch_small(const Forward<Cell, T>& in, bool are_few_rows, cudaStream_t stream);
template <class Cell, class T>
Error launch_parameters_backward(const StepBackwardArguments& arguments, cudaStream_t stream);

// The same by tensor cores (split_k.cuh).
template <class Cell, class T>
Error launch_on_tensor_cores(const Forward<Cell, T>& in, cudaStream_t stream);

// Whether these support a cell: more gates would need other tiles.
template <class Cell>
constexpr bool kHasTiles = Cell::kGates <= 4;

template <class Cell>
bool is_for_tensor_cores(ScalarType dtype, const StepSizes& sizes) {
  if (dtype == ScalarType::Float || dtype == ScalarType::Double) return false;
  const bool is_tf32 = dtype == ScalarType::TF32;
  const int64_t bytes = is_tf32 ? 4 : 2;
  return kHasTiles<Cell> && sizes.input_features > 0 && sizes.batch > most_few_rows<Cell>(dtype, sizes) &&
         sizes.batch <= kTensorCoresRows && multiplications<Cell>(sizes) >= kTensorCoresFrom &&
         weights<Cell>(sizes) < (is_tf32 ? kTf32Weights : kHalfWeights<Cell>) &&
         sizes.state_size * bytes % kChunkBytes == 0 && sizes.input_features * bytes % kChunkBytes == 0;
}

template <class Cell>
int64_t alignment(ScalarType dtype, const StepSizes& sizes, StepPart part) {
  if (!has_hopper_tensor_cores() || !fits(sizes)) return 0;
  const bool is_tf32 = dtype == ScalarType::TF32, is_float = dtype == ScalarType::Float;
  switch (part) {
    case StepPart::kForward:
      if (is_for_few_rows<Cell>(dtype, sizes) || is_for_tensor_cores<Cell>(dtype, sizes)) return kChunkBytes;
      return is_for_small<Cell>(dtype, sizes);
    case StepPart::kParametersBackward: {
      // TF32 does not speed up a backward of few rows, which is bound by storing the gradients of the weights.
      const bool is_strict = is_float || (is_tf32 && sizes.batch <= kFewRows);
      const double most = is_strict ? kStrictFloat32BackwardLimit : kOtherBackwardLimit;
      return sizes.batch > 0 && sizes.batch <= kMostBackwardRows && multiplications<Cell>(sizes) < most;
    }
    case StepPart::kBiasBackward:
      return sizes.batch <= kSumRows;
    case StepPart::kInputBackward:
      return (is_float || is_tf32) &&
             multiplications<Cell>(sizes) < (is_tf32 ? kTf32InputBackwardLimit : kInputBackwardLimit);
  }
  return 0;
}

constexpr Error kTooLarge = "the kernels of a step take sizes below 2**28";

template <class Cell>
Error launch_forward(ScalarType dtype, const StepArguments& arguments, cudaStream_t stream) {
  const StepSizes& sizes = arguments.sizes;
  if (sizes.batch * sizes.state_size == 0) return nullptr;
  return dispatch(dtype, [&](auto scalar) {
    using T = decltype(scalar);
    if (arguments.input_gates != nullptr) return launch_pointwise<Cell, T>(arguments, stream);
    if (!fits(sizes)) return kTooLarge;
    const Forward<Cell, T> in(arguments);
    constexpr int kVector = kChunkBytes / sizeof(T);
    const bool has_chunks = start_at_chunks({in.input, in.h_0, in.weights_x, in.weights_h}) &&
                            in.weights_x_stride % kVector == 0 && in.weights_h_stride % kVector == 0;
    if constexpr (kHasTiles<Cell> && !std::is_same_v<T, double>) {
      if (has_chunks && is_for_tensor_cores<Cell>(dtype, sizes)) return launch_on_tensor_cores(in, stream);
    }
    return launch_small(in, has_chunks && is_for_few_rows<Cell>(dtype, sizes), stream);
  });
}

template <class Cell>
Error launch_backward(ScalarType dtype, const StepBackwardArguments& in, cudaStream_t stream) {
  if (in.sizes.batch * in.sizes.state_size == 0 && in.grad_weights_h == nullptr) return nullptr;
  return dispatch(dtype, [&](auto scalar) {
    using T = decltype(scalar);
    if (in.grad_weights_h == nullptr) return launch_pointwise<Cell, T>(in, stream);
    if (in.sizes.state_size == 0) return Error{};
    if (!fits(in.sizes)) return kTooLarge;
    return launch_parameters_backward<Cell, T>(in, stream);
  });
}

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
    return launch_column_sums(in, stream);
  });
}

// For float32 only.
template <class Cell>
Error launch_small_input_backward(const StepInputBackwardArguments& arguments, cudaStream_t stream);

template <class Cell>
Error launch_input_backward(ScalarType dtype, const StepInputBackwardArguments& arguments, cudaStream_t stream) {
  if (dtype != ScalarType::Float && dtype != ScalarType::TF32) return "the kernel for small problems takes float32";
  return fits(arguments.sizes) ? launch_small_input_backward<Cell>(arguments, stream) : kTooLarge;
}

}  // namespace extops::cuda::step

#define EXTOPS_STEP_CUDA(cell, Cell)                                                                                   \
  int64_t extops_##cell##_step_alignment_cuda(ScalarType dtype, const StepSizes& sizes, StepPart part) {               \
    return extops::cuda::step::alignment<Cell>(dtype, sizes, part);                                                    \
  }                                                                                                                    \
  Error extops_##cell##_step_cuda(ScalarType dtype, const StepArguments& arguments, void* stream) {                    \
    return with_step<Cell>([&](auto cell) {                                                                            \
      return extops::cuda::step::launch_forward<decltype(cell)>(dtype, arguments, static_cast<cudaStream_t>(stream));  \
    });                                                                                                                \
  }                                                                                                                    \
  Error extops_##cell##_step_backward_cuda(ScalarType dtype, const StepBackwardArguments& arguments, void* stream) {   \
    return with_step<Cell>([&](auto cell) {                                                                            \
      return extops::cuda::step::launch_backward<decltype(cell)>(dtype, arguments, static_cast<cudaStream_t>(stream)); \
    });                                                                                                                \
  }                                                                                                                    \
  Error extops_##cell##_step_bias_backward_cuda(                                                                       \
      ScalarType dtype, const StepBiasBackwardArguments& arguments, void* stream) {                                    \
    return extops::cuda::step::launch_bias_backward<Cell>(dtype, arguments, static_cast<cudaStream_t>(stream));        \
  }                                                                                                                    \
  Error extops_##cell##_step_input_backward_cuda(                                                                      \
      ScalarType dtype, const StepInputBackwardArguments& arguments, void* stream) {                                   \
    return with_step<Cell>([&](auto cell) {                                                                            \
      return extops::cuda::step::launch_input_backward<decltype(cell)>(                                                \
          dtype, arguments, static_cast<cudaStream_t>(stream));                                                        \
    });                                                                                                                \
  }
