// A whole sequence on a GPU: which kernel serves it, and the pointwise part of one step where a library multiplies.
#include "lltm_sequence.cuh"

// Named, not anonymous: nvcc would put the path of this file into the kernels' names, and no two builds be the same.
namespace extops::cuda {

// Calls body(sample, unit) for all cells of a step.
template <class Body>
__device__ void for_each_cell(const Steps& steps, const Body& body) {
  const int64_t cells = int64_t{steps.batch} * steps.state_size;
  for (int64_t item = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; item < cells;
       item += int64_t{gridDim.x} * blockDim.x) {
    const int sample = static_cast<int>(item / steps.state_size);
    body(item, sample, static_cast<int>(item - int64_t{sample} * steps.state_size));
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) lltm_sequence_step_kernel(
    SequenceForward<T> in, int step, const typename Compute<T>::type* recurrent, typename Compute<T>::type* carried) {
  using C = typename Compute<T>::type;
  wait_for_previous_kernel();
  const Steps& steps = in.steps;
  const int t = steps.time_of(step);
  for_each_cell(steps, [&](int64_t item, int sample, int unit) {
    const int64_t place = steps.row(t, sample);
    C cell = step == 0 ? load(in.c_0[item]) : carried[item];
    if (t < steps.length(sample)) {
      C sums[3];
#pragma unroll
      for (int g = 0; g < 3; ++g) {
        const int column = g * steps.state_size + unit;
        sums[g] = in.products[place * 3 * steps.state_size + column] + load(in.bias[column]) +
                  recurrent[int64_t{sample} * 3 * steps.state_size + column];
      }
      const CellState<C> state = finish_cell<kIsHalf<T>>(in, place, unit, sums, cell);
      cell = state.cell;
      store(in.h_n[item], state.h);
    } else {
      skip_cell(in, place, unit);
      if (step == 0) in.h_n[item] = in.h_0[item];
    }
    carried[item] = cell;
    if (step == steps.time - 1) store(in.c_n[item], cell);
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads) lltm_sequence_step_backward_kernel(
    SequenceBackward<T> in, int step, const typename Compute<T>::type* recurrent, typename Compute<T>::type* carried_h,
    typename Compute<T>::type* carried_cell) {
  using C = typename Compute<T>::type;
  wait_for_previous_kernel();
  const Steps& steps = in.steps;
  const int t = steps.time_of(steps.time - 1 - step);
  const int previous = steps.time_of(steps.time - step);
  for_each_cell(steps, [&](int64_t item, int sample, int unit) {
    const int length = steps.length(sample);
    C grad_h = step == 0 ? load_if_present(in.grad_h_n, item) : previous < length ? recurrent[item] : carried_h[item];
    C grad_cell = step == 0 ? load_if_present(in.grad_c_n, item) : carried_cell[item];
    if (step == steps.time) {
      store(in.grad_h_0[item], grad_h);
      store(in.grad_c_0[item], grad_cell);
      return;
    }
    const int64_t place = steps.row(t, sample);
    T* const grad_gates = in.grad_gates + place * 3 * steps.state_size + unit;
    C gradients[3] = {};
    if (t < length) {
      const CellSlopes<C> slopes = cell_slopes<kIsHalf<T>, T, C>(in, place, unit);
      const C upstream = grad_h + load_if_present(in.grad_output, place * steps.state_size + unit);
      grad_cell += upstream * slopes.cell;
      gradients[0] = grad_cell * slopes.input_gate;
      gradients[1] = upstream * slopes.output_gate;
      gradients[2] = grad_cell * slopes.candidate;
    }
#pragma unroll
    for (int g = 0; g < 3; ++g) store(grad_gates[g * steps.state_size], gradients[g]);
    carried_h[item] = grad_h;
    carried_cell[item] = grad_cell;
  });
}

inline Error check_sizes(const SequenceSizes& sizes) {
  constexpr int64_t kMost = INT32_MAX / 4;
  const bool fits = sizes.time <= kMost && sizes.batch <= kMost && sizes.state_size <= kMost;
  return fits ? nullptr : "the kernels for sequences take sizes below 2**29";
}

enum class Kernel { kStep, kTensorBlock, kFloat32Block, kFloat32Cluster, kTensorCluster, kGroup };
constexpr const char* kKernelNames[] = {"step",           "tensor_block", "float32_block", "float32_cluster",
                                        "tensor_cluster", "group"};

// The first that serves the problem; a product and a kernel for each step serve every one.
Kernel choose_kernel(const Context& context, ScalarType dtype, const SequenceSizes& sizes, bool backward) {
  if (sizes.time * sizes.batch * sizes.state_size == 0) return Kernel::kStep;
  if (is_for_tensor_blocks(context, dtype, sizes, backward)) return Kernel::kTensorBlock;
  if (is_for_float32_blocks(dtype, sizes)) return Kernel::kFloat32Block;
  if (is_for_float32_clusters(context, dtype, sizes, backward)) return Kernel::kFloat32Cluster;
  if (is_for_tensor_clusters(context, dtype, sizes, backward)) return Kernel::kTensorCluster;
  return is_for_groups(context, dtype, sizes, backward) ? Kernel::kGroup : Kernel::kStep;
}

Kernel choose_kernel(void* stream, ScalarType dtype, const SequenceSizes& sizes, bool backward) {
  return choose_kernel(Context(static_cast<cudaStream_t>(stream)), dtype, sizes, backward);
}

int64_t workspace(ScalarType dtype, const SequenceSizes& sizes, bool backward, void* stream) {
  switch (choose_kernel(stream, dtype, sizes, backward)) {
    case Kernel::kStep:
      return 0;
    case Kernel::kGroup:
      return group_workspace(dtype, sizes);
    default:
      return 1;
  }
}

template <class Arguments>
Error launch_sequence(ScalarType dtype, const Arguments& in, void* stream_handle, bool backward) {
  if (const Error error = check_sizes(in.sizes)) return error;
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  switch (choose_kernel(stream_handle, dtype, in.sizes, backward)) {
    case Kernel::kTensorBlock:
      return launch_tensor_blocks(dtype, in, stream);
    case Kernel::kFloat32Block:
      return launch_float32_blocks(in, stream);
    case Kernel::kFloat32Cluster:
      return launch_float32_clusters(in, stream);
    case Kernel::kTensorCluster:
      return launch_tensor_clusters(dtype, in, stream);
    case Kernel::kGroup:
      return launch_groups(dtype, in, stream);
    case Kernel::kStep:
      break;
  }
  return "no kernel computes all steps of such a sequence";
}

}  // namespace extops::cuda

using namespace extops::cuda;

const char* extops_lltm_sequence_kernel_cuda(
    ScalarType dtype, const SequenceSizes& sizes, int64_t backward, void* stream) {
  return kKernelNames[static_cast<int>(choose_kernel(stream, dtype, sizes, backward != 0))];
}

int64_t extops_lltm_sequence_workspace_cuda(ScalarType dtype, const SequenceSizes& sizes, void* stream) {
  return workspace(dtype, sizes, false, stream);
}

int64_t extops_lltm_sequence_backward_workspace_cuda(ScalarType dtype, const SequenceSizes& sizes, void* stream) {
  return workspace(dtype, sizes, true, stream);
}

Error extops_lltm_sequence_cuda(ScalarType dtype, const SequenceArguments& in, void* stream) {
  return launch_sequence(dtype, in, stream, false);
}

Error extops_lltm_sequence_backward_cuda(ScalarType dtype, const SequenceBackwardArguments& in, void* stream) {
  return launch_sequence(dtype, in, stream, true);
}

Error extops_lltm_sequence_step_cuda(ScalarType dtype, const SequenceArguments& in, void* stream) {
  if (const Error error = check_sizes(in.sizes)) return error;
  const int64_t cells = in.sizes.batch * in.sizes.state_size;
  if (cells == 0) return nullptr;
  return dispatch(dtype, [&](auto scalar) {
    using T = decltype(scalar);
    using C = typename Compute<T>::type;
    launch(
        &lltm_sequence_step_kernel<T>, {blocks_for(cells), kThreads}, static_cast<cudaStream_t>(stream),
        SequenceForward<T>(in), static_cast<int>(in.sizes.step), static_cast<const C*>(in.recurrent),
        static_cast<C*>(in.workspace));
    return launch_error();
  });
}

Error extops_lltm_sequence_step_backward_cuda(ScalarType dtype, const SequenceBackwardArguments& in, void* stream) {
  if (const Error error = check_sizes(in.sizes)) return error;
  const int64_t cells = in.sizes.batch * in.sizes.state_size;
  if (cells == 0) return nullptr;
  return dispatch(dtype, [&](auto scalar) {
    using T = decltype(scalar);
    using C = typename Compute<T>::type;
    C* const carried = static_cast<C*>(in.workspace);
    launch(
        &lltm_sequence_step_backward_kernel<T>, {blocks_for(cells), kThreads}, static_cast<cudaStream_t>(stream),
        SequenceBackward<T>(in), static_cast<int>(in.sizes.step), static_cast<const C*>(in.recurrent), carried,
        carried + cells);
    return launch_error();
  });
}
