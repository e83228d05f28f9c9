// The LLTM by the kernels of any cell. Its weights are joined, [weights_h | weights_x]: those of a step see them as two
// views.
#include "../../lltm.h"
#include "../sequence/float32_block.cuh"
#include "../sequence/kernels.cuh"
#include "../sequence/tensor_block.cuh"
#include "../step/step.cuh"

EXTOPS_SEQUENCE_CUDA(lltm, extops::Lltm)

namespace extops::cuda {

inline StepSizes step_sizes(const LltmSizes& sizes) { return {sizes.batch, sizes.input_features, sizes.state_size}; }

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
  arguments.gates = in.gates;
  return arguments;
}

inline StepArguments step_of(const LltmCellWithBias& in) {
  StepArguments arguments{};
  arguments.sizes = step_sizes(in.sizes);
  arguments.input_gates = in.gates;
  arguments.bias_x = in.bias;
  arguments.c_0 = in.old_cell;
  arguments.h = in.new_h;
  arguments.c = in.new_cell;
  arguments.gates = const_cast<void*>(in.gates);
  return arguments;
}

// For both kinds of backward.
template <class Backward>
StepBackwardArguments step_backward_of(const Backward& in) {
  StepBackwardArguments arguments{};
  arguments.sizes = step_sizes(in.sizes);
  arguments.grad_h = in.grad_h;
  arguments.grad_c = in.grad_cell;
  arguments.gates = in.gates;
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
  return step::alignment<Lltm>(dtype, step_sizes(sizes));
}

int64_t extops_lltm_backward_alignment_cuda(ScalarType dtype, const LltmSizes& sizes) {
  return step::backward_alignment<Lltm>(dtype, step_sizes(sizes));
}

int64_t extops_lltm_bias_backward_alignment_cuda(ScalarType, const LltmSizes& sizes) {
  return step::bias_backward_alignment(step_sizes(sizes));
}

int64_t extops_lltm_input_backward_alignment_cuda(ScalarType dtype, const LltmSizes& sizes) {
  return step::input_backward_alignment<Lltm>(dtype, step_sizes(sizes));
}

Error extops_lltm_cuda(ScalarType dtype, const LltmForward& arguments, void* stream) {
  return dispatch(dtype, [&](auto scalar) {
    return step::launch_forward<Lltm>(dtype, step_of<decltype(scalar)>(arguments), static_cast<cudaStream_t>(stream));
  });
}

Error extops_lltm_backward_cuda(ScalarType dtype, const LltmBackward& arguments, void* stream) {
  return dispatch(dtype, [&](auto scalar) {
    return step::launch_backward<Lltm>(dtype, step_of<decltype(scalar)>(arguments), static_cast<cudaStream_t>(stream));
  });
}

Error extops_lltm_bias_backward_cuda(ScalarType dtype, const LltmBiasBackward& in, void* stream) {
  const StepBiasBackwardArguments arguments{step_sizes(in.sizes), in.grad_gates, nullptr, in.grad_bias, nullptr};
  return step::launch_bias_backward<Lltm>(dtype, arguments, static_cast<cudaStream_t>(stream));
}

Error extops_lltm_input_backward_cuda(ScalarType dtype, const LltmInputBackward& in, void* stream) {
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
