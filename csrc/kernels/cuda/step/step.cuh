// The functions of one step of a cell on a GPU, as ../../step.h declares them, and the choice of their kernels. The
// limits were measured on an NVIDIA H200.
#pragma once

#include "pointwise.cuh"
#include "weights_gemm.cuh"

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
// From so many multiplications on the kernels for Hopper are fastest, up to the most rows that were measured.
constexpr double kHopperFrom = 4e6;
constexpr int64_t kHopperRows = 512;
// Up to so many weights. Those in 16-bit types stay in the L2 cache from call to call.
template <class Cell>
constexpr double kHalfWeights = Cell::kGates == 1 ? 20e6 : 12e6;
constexpr double kTf32Weights = 30e6;
// In TF32 tensor cores are faster above so many rows.
constexpr int64_t kFewRowsInTf32 = 8;
constexpr int64_t kFewRowsOfManyWeightsInTf32 = 4;
constexpr double kManyWeights = 10e6;
// In strict float32 a library has better tiles for more multiplications. For so many weights, or rows and weights, it
// also fills the device better, unless ours fill it at once.
constexpr double kMostInFloat32 = 1.2e9;
constexpr double kFloat32Weights = 3e6;
constexpr int64_t kManyRows = 256;
constexpr double kWeightsOfManyRows = 1e6;
constexpr int64_t kTileRows = 64;
constexpr double kFullDevice = 0.7;
constexpr int64_t kTf32BackwardRows = 256;  // above, a library GEMM is faster
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
  if (dtype != ScalarType::TF32 || multiplications<Cell>(sizes) < kHopperFrom) return kFewRows;
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

// The kernels for Hopper (split_k.cuh), by tensor cores and in strict float32.
template <class Cell, class T>
Error launch_on_tensor_cores(const Forward<Cell, T>& in, cudaStream_t stream);
template <class Cell>
Error launch_in_float32(const Forward<Cell, float>& in, cudaStream_t stream);

// Whether they support a cell: more gates would need other tiles.
template <class Cell>
constexpr bool kHasTiles = Cell::kGates <= 4;

template <class Cell>
bool is_for_hopper(int64_t bytes, const StepSizes& sizes) {
  return kHasTiles<Cell> && sizes.input_features > 0 && sizes.batch <= kHopperRows &&
         multiplications<Cell>(sizes) >= kHopperFrom && sizes.state_size * bytes % kChunkBytes == 0 &&
         sizes.input_features * bytes % kChunkBytes == 0 && has_hopper_tensor_cores();
}

template <class Cell>
bool is_for_tensor_cores(ScalarType dtype, const StepSizes& sizes) {
  if (dtype == ScalarType::Float || dtype == ScalarType::Double) return false;
  // A library multiplies a single row in full precision, not in TF32.
  if (dtype == ScalarType::TF32 && sizes.batch == 1) return false;
  return is_for_hopper<Cell>(dtype == ScalarType::TF32 ? 4 : 2, sizes);
}

template <class Cell>
bool is_forward_for_tensor_cores(ScalarType dtype, const StepSizes& sizes) {
  const double most = dtype == ScalarType::TF32 ? kTf32Weights : kHalfWeights<Cell>;
  return is_for_tensor_cores<Cell>(dtype, sizes) && sizes.batch > most_few_rows<Cell>(dtype, sizes) &&
         weights<Cell>(sizes) < most;
}

// Whether the tiles of strict float32 run at once, and keep the device busy with what is of use.
template <class Cell>
bool fill_device(const StepSizes& sizes) {
  constexpr int64_t kUnits = 4 * kUnitsPer8<Cell>;
  const unsigned sm_count = device_attribute(cudaDevAttrMultiProcessorCount);
  const unsigned tiles = ceil_div(sizes.state_size, kUnits) * ceil_div(sizes.batch, kTileRows);
  const unsigned splits = splits_of(tiles, kMaxSplits, sm_count);
  const double useful = double(sizes.batch) * sizes.state_size * splits / (kUnits * kTileRows);
  return tiles * splits <= sm_count && useful >= kFullDevice * sm_count;
}

template <class Cell>
bool is_for_float32(ScalarType dtype, const StepSizes& sizes) {
  if (dtype != ScalarType::Float || sizes.batch <= kFewRows || !is_for_hopper<Cell>(4, sizes)) return false;
  if (multiplications<Cell>(sizes) >= kMostInFloat32) return false;
  const bool is_large = (sizes.batch > kTileRows && weights<Cell>(sizes) >= kFloat32Weights) ||
                        (sizes.batch > kManyRows && weights<Cell>(sizes) >= kWeightsOfManyRows);
  return !is_large || fill_device<Cell>(sizes);
}

template <class Cell>
int64_t alignment(ScalarType dtype, const StepSizes& sizes) {
  if (!has_hopper_tensor_cores() || !fits(sizes)) return 0;
  const bool has_chunks = is_for_few_rows<Cell>(dtype, sizes) || is_forward_for_tensor_cores<Cell>(dtype, sizes) ||
                          is_for_float32<Cell>(dtype, sizes);
  return has_chunks ? kChunkBytes : is_for_small<Cell>(dtype, sizes);
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
      if (has_chunks && is_forward_for_tensor_cores<Cell>(dtype, sizes)) return launch_on_tensor_cores(in, stream);
      if constexpr (std::is_same_v<T, float>) {
        if (has_chunks && is_for_float32<Cell>(dtype, sizes)) return launch_in_float32(in, stream);
      }
    }
    return launch_small(in, has_chunks && is_for_few_rows<Cell>(dtype, sizes), stream);
  });
}

// TF32 does not speed up a backward of few rows, which is bound by storing the gradients of the weights.
template <class Cell>
bool is_for_small_backward(ScalarType dtype, const StepSizes& sizes) {
  const bool is_few_in_tf32 = dtype == ScalarType::TF32 && sizes.batch <= kFewRows;
  const bool is_strict = dtype == ScalarType::Float || is_few_in_tf32;
  const double most = is_strict ? kStrictFloat32BackwardLimit : kOtherBackwardLimit;
  return has_hopper_tensor_cores() && fits(sizes) && sizes.batch > 0 && sizes.batch <= kMostBackwardRows &&
         multiplications<Cell>(sizes) < most;
}

template <class Cell>
bool is_for_weights_backward(ScalarType dtype, const StepSizes& sizes) {
  if (!is_for_tensor_cores<Cell>(dtype, sizes)) return false;
  if (dtype != ScalarType::TF32) return true;
  return sizes.batch <= kTf32BackwardRows && !is_for_small_backward<Cell>(dtype, sizes);
}

template <class Cell>
int64_t backward_alignment(ScalarType dtype, const StepSizes& sizes) {
  return is_for_weights_backward<Cell>(dtype, sizes) ? kChunkBytes : is_for_small_backward<Cell>(dtype, sizes);
}

// The pointwise kernel, and the kernel of the weights' gradients, whose start overlaps it.
template <class Cell, class T>
Error launch_with_weights(const StepBackwardArguments& arguments, cudaStream_t stream) {
  if (const Error error = launch_pointwise<Cell, T>(arguments, stream)) return error;
  const StepSizes& sizes = arguments.sizes;
  const int state_size = static_cast<int>(sizes.state_size);
  WeightsBackward<T> in{};
  in.batch = static_cast<int>(sizes.batch);
  auto& [of_h, of_x] = in.gemms;
  of_h.rows = Cell::kRecurrent * state_size;
  of_h.columns = state_size;
  of_h.grad_weights_stride = arguments.grad_weights_h_stride;
  of_x.rows = Cell::kInput * state_size;
  of_x.columns = static_cast<int>(sizes.input_features);
  of_x.grad_weights_stride = arguments.grad_weights_x_stride;
  const void* const gradients_h = kHasOneGradient<Cell> ? arguments.grad_x : arguments.grad_h_part;
  set_pointers({gradients_h, arguments.h_0}, of_h.gradients, of_h.x);
  set_pointers({arguments.grad_weights_h, arguments.grad_bias_h}, of_h.grad_weights, of_h.grad_bias);
  set_pointers({arguments.grad_x, arguments.input}, of_x.gradients, of_x.x);
  set_pointers({arguments.grad_weights_x, arguments.grad_bias_x}, of_x.grad_weights, of_x.grad_bias);
  return launch_weights_backward(in, stream);
}

template <class Cell>
Error launch_backward(ScalarType dtype, const StepBackwardArguments& in, cudaStream_t stream) {
  if (in.sizes.batch * in.sizes.state_size == 0 && in.grad_weights_h == nullptr) return nullptr;
  return dispatch(dtype, [&](auto scalar) {
    using T = decltype(scalar);
    if (in.grad_weights_h == nullptr) return launch_pointwise<Cell, T>(in, stream);
    if (in.sizes.state_size == 0) return Error{};
    if (!fits(in.sizes)) return kTooLarge;
    if constexpr (!std::is_same_v<T, double>) {
      const bool has_chunks = start_at_chunks({in.input, in.h_0, in.grad_x, in.grad_h_part, in.grad_weights_x}) &&
                              start_at_chunks({in.grad_weights_h}) &&
                              in.grad_weights_x_stride * sizeof(T) % kChunkBytes == 0 &&
                              in.grad_weights_h_stride * sizeof(T) % kChunkBytes == 0;
      if (has_chunks && is_for_weights_backward<Cell>(dtype, in.sizes)) return launch_with_weights<Cell, T>(in, stream);
    }
    return launch_parameters_backward<Cell, T>(in, stream);
  });
}

inline int64_t bias_backward_alignment(const StepSizes& sizes) {
  return has_hopper_tensor_cores() && sizes.batch <= kSumRows;
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

template <class Cell>
int64_t input_backward_alignment(ScalarType dtype, const StepSizes& sizes) {
  const double most = dtype == ScalarType::TF32 ? kTf32InputBackwardLimit : kInputBackwardLimit;
  return (dtype == ScalarType::Float || dtype == ScalarType::TF32) && has_hopper_tensor_cores() && fits(sizes) &&
         multiplications<Cell>(sizes) < most;
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
