// Which kernel computes a step of the LLTM, and its entry points: those for small problems and for the pointwise part
// are of any cell (step/), those on tensor cores are the LLTM's own. The limits were read off an NVIDIA H200.
#include "../lltm.h"
#include "hopper.cuh"
#include "lltm_problem.cuh"
#include "step/step.cuh"

namespace extops::cuda {

constexpr double kHopperFrom = 4e6;         // multiplications from which on the kernels for Hopper are fastest
constexpr int64_t kHopperRows = 512;        // the most that was measured
constexpr int64_t kTf32BackwardRows = 256;  // above, a library's product is faster
constexpr int64_t kBackwardRows = step::kRows;

inline StepSizes step_sizes(const LltmSizes& sizes) { return {sizes.batch, sizes.input_features, sizes.state_size}; }

inline double multiplications(const LltmSizes& sizes) { return step::multiplications<Lltm>(step_sizes(sizes)); }

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

inline bool is_for_small_backward(ScalarType dtype, const LltmSizes& sizes) {
  return step::backward_alignment<Lltm>(dtype, step_sizes(sizes)) != 0;
}

inline bool is_for_tensor_backward(ScalarType dtype, const LltmSizes& sizes) {
  if (!is_for_tensor_cores(dtype, sizes)) return false;
  if (dtype == ScalarType::TF32) return sizes.batch <= kTf32BackwardRows && !is_for_small_backward(dtype, sizes);
  return sizes.batch <= kBackwardRows || !is_for_small_backward(dtype, sizes);
}

inline bool is_for_float32(ScalarType dtype, const LltmSizes& sizes) {
  return dtype == ScalarType::Float && sizes.batch > step::kFewRows && is_for_hopper(4, sizes);
}

inline Sizes make_sizes(const LltmSizes& sizes) {
  return {static_cast<int>(sizes.batch), static_cast<int>(sizes.input_features), static_cast<int>(sizes.state_size)};
}

// Sizes are 32-bit numbers inside these kernels, whatever the strides.
inline Error check_sizes(const LltmSizes& sizes) {
  return step::fits(step_sizes(sizes)) ? nullptr : "the kernel for small problems takes sizes below 2**28";
}

// ---- the LLTM in the terms of any cell: its weights are joined, [weights_h | weights_x] ----

template <class T>
StepArguments step_of(const LltmForward& in) {
  StepArguments arguments{};
  arguments.sizes = step_sizes(in.sizes);
  arguments.input = in.input;
  arguments.h_0 = in.old_h;
  arguments.weights_h = in.weights;
  arguments.weights_x = static_cast<const T*>(in.weights) + in.sizes.state_size;
  arguments.weights_h_stride = arguments.weights_x_stride = in.sizes.columns();
  arguments.bias_x = in.bias;
  arguments.c_0 = in.old_cell;
  arguments.h = in.new_h;
  arguments.c = in.new_cell;
  arguments.columns = in.gates;
  return arguments;
}

inline StepArguments step_of(const LltmCellWithBias& in) {
  StepArguments arguments{};
  arguments.sizes = step_sizes(in.sizes);
  arguments.products_x = in.gates;
  arguments.bias_x = in.bias;
  arguments.c_0 = in.old_cell;
  arguments.h = in.new_h;
  arguments.c = in.new_cell;
  arguments.columns = const_cast<void*>(in.gates);
  return arguments;
}

// Of both kinds of backward.
template <class Backward>
StepBackwardArguments step_backward_of(const Backward& in) {
  StepBackwardArguments arguments{};
  arguments.sizes = step_sizes(in.sizes);
  arguments.grad_h = in.grad_h;
  arguments.grad_c = in.grad_cell;
  arguments.columns = in.gates;
  arguments.saved_c = in.new_cell;
  arguments.grad_x = in.grad_gates;
  arguments.grad_c_0 = in.grad_old_cell;
  return arguments;
}

template <class T>
StepBackwardArguments step_of(const LltmBackward& in) {
  StepBackwardArguments arguments = step_backward_of(in);
  arguments.input = in.input;
  arguments.h_0 = in.old_h;
  arguments.grad_weights_h = in.grad_weights;
  arguments.grad_weights_x = static_cast<T*>(in.grad_weights) + in.sizes.state_size;
  arguments.grad_weights_h_stride = arguments.grad_weights_x_stride = in.sizes.columns();
  arguments.grad_bias_x = in.grad_bias;
  return arguments;
}

}  // namespace extops::cuda

using namespace extops::cuda;
using extops::Lltm;

int64_t extops_lltm_alignment_cuda(ScalarType dtype, const LltmSizes& sizes) {
  if (is_for_tensor_cores(dtype, sizes) || is_for_float32(dtype, sizes)) return kChunkBytes;
  return step::alignment<Lltm>(dtype, step_sizes(sizes));
}

int64_t extops_lltm_backward_alignment_cuda(ScalarType dtype, const LltmSizes& sizes) {
  return is_for_tensor_backward(dtype, sizes) ? kChunkBytes : is_for_small_backward(dtype, sizes);
}

int64_t extops_lltm_bias_backward_alignment_cuda(ScalarType, const LltmSizes& sizes) {
  return step::bias_backward_alignment(step_sizes(sizes));
}

int64_t extops_lltm_input_backward_alignment_cuda(ScalarType dtype, const LltmSizes& sizes) {
  return step::input_backward_alignment<Lltm>(dtype, step_sizes(sizes));
}

Error extops_lltm_cuda(ScalarType dtype, const LltmForward& arguments, void* stream_handle) {
  const LltmSizes& sizes = arguments.sizes;
  if (sizes.batch * sizes.state_size == 0) return nullptr;
  if (const Error error = check_sizes(sizes)) return error;
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  return dispatch(dtype, [&](auto scalar) {
    using T = decltype(scalar);
    const bool are_aligned = start_at_chunks({arguments.input, arguments.weights, arguments.old_h});
    const bool is_for_few_rows = step::is_for_few_rows<Lltm>(dtype, step_sizes(sizes)) && step::is_hopper();
    if constexpr (!std::is_same_v<T, double>) {
      const CellForward<T> in(make_sizes(sizes), arguments);
      if (are_aligned && !is_for_few_rows && is_for_tensor_cores(dtype, sizes))
        return launch_on_tensor_cores(in, stream);
      if constexpr (std::is_same_v<T, float>) {
        if (are_aligned && !is_for_few_rows && is_for_float32(dtype, sizes)) return launch_in_float32(in, stream);
      }
    }
    return step::launch_forward<Lltm>(dtype, step_of<T>(arguments), stream);
  });
}

Error extops_lltm_backward_cuda(ScalarType dtype, const LltmBackward& arguments, void* stream_handle) {
  const LltmSizes& sizes = arguments.sizes;
  if (sizes.state_size == 0) return nullptr;
  if (const Error error = check_sizes(sizes)) return error;
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  return dispatch(dtype, [&](auto scalar) {
    using T = decltype(scalar);
    if constexpr (!std::is_same_v<T, double>) {
      const CellBackward<T> in(make_sizes(sizes), arguments);
      if (is_for_tensor_backward(dtype, sizes) &&
          start_at_chunks({in.input, in.old_h, in.grad_gates, in.grad_weights})) {
        return launch_on_tensor_cores(in, stream);
      }
    }
    return step::launch_parameters_backward<Lltm, T>(step_of<T>(arguments), stream);
  });
}

Error extops_lltm_bias_backward_cuda(ScalarType dtype, const LltmBiasBackward& in, void* stream) {
  const StepBiasBackwardArguments arguments{step_sizes(in.sizes), in.grad_gates, nullptr, in.grad_bias, nullptr};
  return step::launch_bias_backward<Lltm>(dtype, arguments, static_cast<cudaStream_t>(stream));
}

Error extops_lltm_input_backward_cuda(ScalarType dtype, const LltmInputBackward& in, void* stream) {
  if (const Error error = check_sizes(in.sizes)) return error;
  StepInputBackwardArguments arguments{};
  arguments.sizes = step_sizes(in.sizes);
  arguments.grad_x = in.grad_gates;
  arguments.weights_h = in.weights;
  arguments.weights_x = static_cast<const float*>(in.weights) + in.sizes.state_size;
  arguments.weights_h_stride = arguments.weights_x_stride = in.sizes.columns();
  arguments.grad_input = in.grad_input;
  arguments.grad_h_0 = in.grad_old_h;
  return step::launch_input_backward<Lltm>(dtype, arguments, static_cast<cudaStream_t>(stream));
}

Error extops_lltm_cell_cuda(ScalarType dtype, const LltmCellWithBias& in, void* stream) {
  return step::launch_forward<Lltm>(dtype, step_of(in), static_cast<cudaStream_t>(stream));
}

Error extops_lltm_cell_backward_cuda(ScalarType dtype, const LltmCellBackward& in, void* stream) {
  return step::launch_backward<Lltm>(dtype, step_backward_of(in), static_cast<cudaStream_t>(stream));
}
