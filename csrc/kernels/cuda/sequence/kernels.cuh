// The functions of a cell on a GPU, as ../sequence.h declares them: a file that includes this and invokes
// EXTOPS_SEQUENCE_CUDA(name, Cell) defines them. It also includes the headers of the kernels, or another file
// instantiates those.
#pragma once

#include "choice.cuh"

namespace extops::cuda {

// ---- one step, after a library GEMM ----

// Calls body(item, sample, unit) for all cells of a step.
template <class Body>
__device__ void for_each_cell(const Steps& steps, const Body& body) {
  const int64_t cells = int64_t{steps.batch} * steps.state_size;
  for (int64_t item = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; item < cells;
       item += int64_t{gridDim.x} * blockDim.x) {
    const int sample = static_cast<int>(item / steps.state_size);
    body(item, sample, static_cast<int>(item - int64_t{sample} * steps.state_size));
  }
}

template <class Cell, class T, class C = typename Compute<T>::type>
__global__ void __launch_bounds__(kThreads)
    sequence_step_kernel(SequenceForward<Cell, T> in, int step, const C* recurrent, C* carried) {
  wait_for_previous_kernel();
  const Steps& steps = in.steps;
  const int t = steps.time_of(step);
  for_each_cell(steps, [&](int64_t item, int sample, int unit) {
    const int64_t place = steps.row(t, sample);
    const int64_t state = steps.state(sample, unit);
    const int64_t first = steps.template cell<Cell>(steps.state_row(sample), 0, unit);
    const auto of_c = [&](int k) { return first + int64_t{k} * steps.state_size; };
    const auto of_carried = [&](int k) { return int64_t{k} * steps.batch * steps.state_size + item; };
    StatesOf<Cell, C> c;
    unrolled<kCellStates<Cell>>(
        [&](int k) { number_of(c, k) = step == 0 ? load(in.c_0[of_c(k)]) : carried[of_carried(k)]; });
    if (t < steps.length(sample)) {
      C gates[Cell::kGates];
#pragma unroll
      for (int g = 0; g < Cell::kGates; ++g) {
        const auto at = [&](int64_t row, int width, int g) { return (row * width + g) * steps.state_size + unit; };
        C& sum = gates[g] = in.bias(g, unit);
        if (g < Cell::kInput) sum += in.input_gates[at(place, Cell::kInput, input_place<Cell>(g))];
        const int of_recurrent = g - kFirstRecurrent<Cell>;
        if (of_recurrent >= 0) sum += recurrent[at(sample, Cell::kRecurrent, of_recurrent)];
      }
      round_to<T>(gates);
      const auto found = cell_forward<Cell, MathOf<T>>(gates, c);
      store_cell(in, place, unit, gates, found);
      c = found.c;
      store(in.h_n[state], found.h);
    } else {
      store_cell<Cell, T, C>(in, place, unit);
      if (step == 0) in.h_n[state] = in.h_0[state];
    }
    unrolled<kCellStates<Cell>>([&](int k) {
      carried[of_carried(k)] = number_of(c, k);
      if (step == steps.time - 1) store(in.c_n[of_c(k)], number_of(c, k));
    });
  });
}

template <class Cell, class T, class C = typename Compute<T>::type>
__global__ void __launch_bounds__(kThreads)
    sequence_step_backward_kernel(SequenceBackward<Cell, T> in, int step, const C* recurrent, C* carried_h) {
  wait_for_previous_kernel();
  const Steps& steps = in.steps;
  C* const carried_c = carried_h + int64_t{steps.batch} * steps.state_size;
  const int t = steps.time_of(steps.time - 1 - step);
  const int previous = steps.time_of(steps.time - step);
  for_each_cell(steps, [&](int64_t item, int sample, int unit) {
    const int length = steps.length(sample);
    const int64_t state = steps.state(sample, unit);
    C grad_h = step == 0 ? load_if_present(in.grad_h_n, state) : previous < length ? recurrent[item] : carried_h[item];
    const auto of_c = [&](int k) { return steps.template cell<Cell>(steps.state_row(sample), k, unit); };
    const auto of_carried = [&](int k) { return int64_t{k} * steps.batch * steps.state_size + item; };
    StatesOf<Cell, C> grad_c;
    unrolled<kCellStates<Cell>>([&](int k) {
      number_of(grad_c, k) = step == 0 ? load_if_present(in.grad_c_n, of_c(k)) : carried_c[of_carried(k)];
    });
    if (step == steps.time) {
      store(in.grad_h_0[state], grad_h);
      unrolled<kCellStates<Cell>>([&](int k) { store(in.grad_c_0[of_c(k)], number_of(grad_c, k)); });
      return;
    }
    const int64_t place = steps.row(t, sample);
    T* const grad_gates = in.grad_gates + place * Cell::kGates * steps.state_size + unit;
    C gradients[Cell::kGates] = {};
    if (t < length) {
      const auto derivatives = local_derivatives_at<MathOf<T>>(in, place, unit);
      const C upstream = grad_h + load_if_present(in.grad_output, place * steps.state_size + unit);
      apply_local_derivatives(derivatives, upstream, grad_c, gradients);
    }
    unrolled<Cell::kGates>([&](int g) { store(grad_gates[g * steps.state_size], gradients[g]); });
    carried_h[item] = grad_h;
    unrolled<kCellStates<Cell>>([&](int k) { carried_c[of_carried(k)] = number_of(grad_c, k); });
  });
}

// ---- the functions ----

inline Error check_sizes(const SequenceSizes& sizes) {
  constexpr int64_t kMost = INT32_MAX / 4;
  const bool fits = sizes.time <= kMost && sizes.batch <= kMost && sizes.state_size <= kMost;
  return fits ? nullptr : "the kernels for sequences take sizes below 2**29";
}

inline Problem make_problem(ScalarType dtype, const SequenceSizes& sizes, Pass pass, void* stream) {
  return {Context(static_cast<cudaStream_t>(stream)), dtype, sizes, pass};
}

template <class Cell, class In>
Error launch_all_steps(Kernel kernel, const Problem& problem, const In& in) {
  switch (kernel) {
    case Kernel::kTensorBlock:
      return launch_tensor_blocks<Cell>(problem, in);
    case Kernel::kFloat32Block:
      return launch_float32_blocks<Cell>(problem, in);
    case Kernel::kTensorCluster:
      return launch_tensor_clusters<Cell>(problem, in);
    default:
      break;
  }
  if constexpr (kHasAllKernels<Cell>) {
    if (kernel == Kernel::kFloat32Cluster) return launch_float32_clusters<Cell>(problem, in);
    if (kernel == Kernel::kGroup) return launch_groups<Cell>(problem, in);
  }
  return "no kernel computes all steps of such a sequence";
}

template <class Cell, class In>
Error launch_sequence(Kernel kernel, const Problem& problem, const In& in) {
  if (const Error error = check_sizes(in.sizes)) return error;
  if (kernel == Kernel::kNone) return no_kernel_error<Cell>(problem);
  if constexpr (kHasSequenceKernelsOf<Cell>) return launch_all_steps<Cell>(kernel, problem, in);
  return "no kernel computes all steps of such a cell";
}

template <class Cell, class In>
Error launch_step(ScalarType dtype, const In& in, void* stream) {
  if (const Error error = check_sizes(in.sizes)) return error;
  const int64_t cells = in.sizes.batch * in.sizes.state_size;
  if (cells == 0) return nullptr;
  return dispatch(dtype, [&](auto scalar) {
    using T = decltype(scalar);
    using C = typename Compute<T>::type;
    const auto launch_kernel = [&](auto kernel) {
      return launch(
          kernel, {blocks_for(cells), kThreads}, static_cast<cudaStream_t>(stream),
          SequencePass<kPassOf<In>, Cell, T>(in), static_cast<int>(in.sizes.step), static_cast<const C*>(in.recurrent),
          static_cast<C*>(in.workspace));
    };
    if constexpr (kPassOf<In> == Pass::kForward) {
      return launch_kernel(&sequence_step_kernel<Cell, T, C>);
    } else {
      return launch_kernel(&sequence_step_backward_kernel<Cell, T, C>);
    }
  });
}

}  // namespace extops::cuda

#define EXTOPS_SEQUENCE_CUDA(cell, Cell)                                                                       \
  EXTOPS_API SequencePlan extops_##cell##_sequence_plan_cuda(                                                  \
      ScalarType dtype, const SequenceSizes& sizes, bool backward, void* stream, const SequenceTrial* trial) { \
    using namespace extops::cuda;                                                                              \
    const Pass pass = backward ? Pass::kBackward : Pass::kForward;                                             \
    return choose_plan<Cell>(#cell, make_problem(dtype, sizes, pass, stream), trial);                          \
  }                                                                                                            \
  EXTOPS_SEQUENCE_CUDA_PASS(cell##_sequence, Cell, SequenceArguments, kForward)                                \
  EXTOPS_SEQUENCE_CUDA_PASS(cell##_sequence_backward, Cell, SequenceBackwardArguments, kBackward)              \
  EXTOPS_SEQUENCE_CUDA_STEP(cell##_sequence_step, Cell, SequenceArguments)                                     \
  EXTOPS_SEQUENCE_CUDA_STEP(cell##_sequence_step_backward, Cell, SequenceBackwardArguments)

#define EXTOPS_SEQUENCE_CUDA_PASS(name, Cell, Arguments, pass)                                                        \
  EXTOPS_API Error extops_##name##_cuda(ScalarType dtype, const Arguments& in, int64_t kernel, void* stream) {        \
    using namespace extops::cuda;                                                                                     \
    return launch_sequence<Cell>(static_cast<Kernel>(kernel), make_problem(dtype, in.sizes, Pass::pass, stream), in); \
  }

#define EXTOPS_SEQUENCE_CUDA_STEP(name, Cell, Arguments)                                       \
  EXTOPS_API Error extops_##name##_cuda(ScalarType dtype, const Arguments& in, void* stream) { \
    return extops::cuda::launch_step<Cell>(dtype, in, stream);                                 \
  }
