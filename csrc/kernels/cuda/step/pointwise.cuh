// The pointwise part of one step, after library GEMMs, and that of its backward.
#pragma once

#include "problem.cuh"

namespace extops::cuda::step {

// Calls body(row, unit) for the first of each `kVector` neighbouring units.
template <int kVector, class Body>
__device__ void for_each_vector(int64_t batch, int state_size, const Body& body) {
  const int64_t vectors = state_size / kVector;
  const int64_t items = batch * vectors;
  for (int64_t item = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; item < items;
       item += int64_t{gridDim.x} * blockDim.x) {
    // 64-bit division takes some 100 instructions: avoid it wherever 32 bits hold the numbers.
    const int64_t row =
        item <= UINT32_MAX ? static_cast<uint32_t>(item) / static_cast<uint32_t>(vectors) : item / vectors;
    body(row, static_cast<int>(item - row * vectors) * kVector);
  }
}

template <class Cell, class T, int kVector>
__global__ void __launch_bounds__(kThreads) pointwise_kernel(Forward<Cell, T> in) {
  using C = typename Compute<T>::type;
  using V = Vector<T, kVector>;
  constexpr int kFirst = kFirstRecurrent<Cell>;
  // The result of a library GEMM, kept as it is.
  const bool is_unchanged = in.gates == in.input_gates && in.hidden_gates == nullptr && in.bias_x == nullptr;
  wait_for_previous_kernel();
  for_each_vector<kVector>(in.batch, in.state_size, [&](int64_t row, int unit) {
    const auto at = [&](int width, int g) { return (row * width + g) * in.state_size + unit; };
    C sums[kVector][Cell::kGates];
#pragma unroll
    for (int g = 0; g < Cell::kGates; ++g) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) sums[j][g] = -0.f;  // keeps the sign of a zero that is added to it
      const auto add = [&](const T* from) {
        if (from == nullptr) return;
        const V part = *reinterpret_cast<const V*>(from);
#pragma unroll
        for (int j = 0; j < kVector; ++j) sums[j][g] += load(part.values[j]);
      };
      const auto of_unit = [&](const T* bias, int g) {
        return bias == nullptr ? bias : bias + g * in.state_size + unit;
      };
      if (g < Cell::kInput) {
        add(in.input_gates + at(Cell::kInput, input_place<Cell>(g)));
        add(of_unit(in.bias_x, input_place<Cell>(g)));
      }
      if (g >= kFirst) {
        if (in.hidden_gates != nullptr) add(in.hidden_gates + at(Cell::kRecurrent, g - kFirst));
        add(of_unit(in.bias_h, g - kFirst));
      }
    }
    const int64_t cell = row * in.state_size + unit;
    const V old_c = *reinterpret_cast<const V*>(in.c_0 + cell);
    V rounded[Cell::kGates], new_h, new_c;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
#pragma unroll
      for (int g = 0; g < Cell::kGates; ++g) {
        store(rounded[g].values[j], sums[j][g]);
        sums[j][g] = load(rounded[g].values[j]);  // as the backward will see it
      }
      const CellState<C> state = cell_forward<Cell, MathOf<T>>(sums[j], C(load(old_c.values[j])));
      store(new_h.values[j], state.h);
      store(new_c.values[j], state.c);
    }
#pragma unroll
    for (int g = 0; g < Cell::kGates; ++g) {
      if (!is_unchanged) *reinterpret_cast<V*>(in.gates + at(Cell::kGates, g)) = rounded[g];
    }
    *reinterpret_cast<V*>(in.h + cell) = new_h;
    *reinterpret_cast<V*>(in.c + cell) = new_c;
  });
}

template <class Cell, class T, int kVector>
__global__ void __launch_bounds__(kThreads) pointwise_backward_kernel(Backward<T> in) {
  using C = typename Compute<T>::type;
  using V = Vector<T, kVector>;
  wait_for_previous_kernel();
  for_each_vector<kVector>(in.batch, in.state_size, [&](int64_t row, int unit) {
    const auto at = [&](int width, int g) { return (row * width + g) * in.state_size + unit; };
    V gates[Cell::kGates];
#pragma unroll
    for (int g = 0; g < Cell::kGates; ++g) gates[g] = *reinterpret_cast<const V*>(in.gates + at(Cell::kGates, g));
    const int64_t cell = row * in.state_size + unit;
    const V saved_c = *reinterpret_cast<const V*>(in.saved_c + cell);
    V found[Cell::kGates], grad_c_0;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      C of_unit[Cell::kGates], gradients[Cell::kGates];
#pragma unroll
      for (int g = 0; g < Cell::kGates; ++g) of_unit[g] = load(gates[g].values[j]);
      const C grad_c = cell_backward<Cell, MathOf<T>>(
          of_unit, C(load(saved_c.values[j])), in.grad_h.at(row, unit + j), in.grad_c.at(row, unit + j), gradients);
#pragma unroll
      for (int g = 0; g < Cell::kGates; ++g) store(found[g].values[j], gradients[g]);
      store(grad_c_0.values[j], grad_c);
    }
#pragma unroll
    for (int g = 0; g < Cell::kGates; ++g) in.template store_gradient<Cell>(row, unit, g, found[g]);
    *reinterpret_cast<V*>(in.grad_c_0 + cell) = grad_c_0;
  });
}

// Calls function(integral_constant) with the vector width for these tensors: wide accesses if the rows are aligned and
// there is enough work for every SM, else one element at a time.
template <class T, class Function>
Error with_vector_width(const StepSizes& sizes, std::initializer_list<const void*> data, const Function& function) {
  constexpr int kWide = 4;
  constexpr int64_t kEnoughElements = 1 << 18;
  const bool is_wide =
      start_at_chunks(data) && sizes.state_size % kWide == 0 && sizes.batch * sizes.state_size >= kEnoughElements;
  return is_wide ? function(std::integral_constant<int, kWide>{}) : function(std::integral_constant<int, 1>{});
}

template <class Cell, class T>
Error launch_pointwise(const StepArguments& in, cudaStream_t stream) {
  const std::initializer_list<const void*> data = {in.input_gates, in.hidden_gates, in.bias_x, in.bias_h, in.c_0, in.h,
                                                   in.c,           in.gates};
  return with_vector_width<T>(in.sizes, data, [&](auto width) {
    const int64_t items = in.sizes.batch * in.sizes.state_size / width;
    return launch(&pointwise_kernel<Cell, T, width>, {blocks_for(items), kThreads}, stream, Forward<Cell, T>(in));
  });
}

template <class Cell, class T>
Error launch_pointwise(const StepBackwardArguments& in, cudaStream_t stream) {
  const std::initializer_list<const void*> data = {in.gates, in.saved_c, in.grad_x, in.grad_h_part, in.grad_c_0};
  return with_vector_width<T>(in.sizes, data, [&](auto width) {
    const int64_t items = in.sizes.batch * in.sizes.state_size / width;
    return launch(&pointwise_backward_kernel<Cell, T, width>, {blocks_for(items), kThreads}, stream, Backward<T>(in));
  });
}

}  // namespace extops::cuda::step
