// What the kernels of one step get.
#pragma once

#include "../../step.h"
#include "../common/launch.cuh"
#include "../common/math.cuh"
#include "../common/scalar.cuh"
#include "gradient.cuh"

namespace extops::cuda::step {

template <class Cell, class T>
struct Forward {
  using C = typename Compute<T>::type;

  int64_t batch;
  int input_features;
  int state_size;
  const T* input;
  const T* h_0;
  const T* weights_x;
  const T* weights_h;
  int64_t weights_x_stride;
  int64_t weights_h_stride;
  const T* input_gates;
  const T* hidden_gates;
  const T* bias_x;
  const T* bias_h;
  const T* c_0;
  T* h;
  T* c;
  T* gates;

  explicit Forward(const StepArguments& in)
      : batch(in.sizes.batch),
        input_features(static_cast<int>(in.sizes.input_features)),
        state_size(static_cast<int>(in.sizes.state_size)),
        weights_x_stride(in.weights_x_stride),
        weights_h_stride(in.weights_h_stride) {
    set_pointers({in.input, in.h_0, in.weights_x, in.weights_h}, input, h_0, weights_x, weights_h);
    set_pointers({in.input_gates, in.hidden_gates, in.bias_x, in.bias_h}, input_gates, hidden_gates, bias_x, bias_h);
    set_pointers({in.c_0, in.h, in.c, in.gates}, c_0, h, c, gates);
  }

  // The sum of the biases of a gate of a unit.
  __device__ C bias(int gate, int unit) const {
    C sum = 0;
    if (gate < Cell::kInput && bias_x != nullptr) sum = load(bias_x[input_place<Cell>(gate) * state_size + unit]);
    const int of_h = gate - kFirstRecurrent<Cell>;
    if (of_h >= 0 && bias_h != nullptr) sum += load(bias_h[of_h * state_size + unit]);
    return sum;
  }

  // Finishes a unit: rounds its gates as the backward will see them, and stores the results of the step.
  template <class Math>
  __device__ void finish(int64_t row, int unit, C (&sums)[Cell::kGates], C old_c) const {
    const int64_t at = row * state_size + unit;
#pragma unroll
    for (int g = 0; g < Cell::kGates; ++g) {
      T rounded;
      store(rounded, sums[g]);
      gates[(row * Cell::kGates + g) * state_size + unit] = rounded;
      sums[g] = load(rounded);
    }
    const CellState<C> state = cell_forward<Cell, Math>(sums, old_c);
    store(c[at], state.c);
    store(h[at], state.h);
  }
};

template <class T>
struct Backward {
  int64_t batch;
  int state_size;
  Gradient<T> grad_h;
  Gradient<T> grad_c;
  const T* gates;
  const T* saved_c;
  T* grad_x;
  T* grad_h_part;
  T* grad_c_0;

  explicit Backward(const StepBackwardArguments& in)
      : batch(in.sizes.batch), state_size(static_cast<int>(in.sizes.state_size)), grad_h(in.grad_h), grad_c(in.grad_c) {
    set_pointers({in.gates, in.saved_c}, gates, saved_c);
    set_pointers({in.grad_x, in.grad_h_part, in.grad_c_0}, grad_x, grad_h_part, grad_c_0);
  }

  // Stores the gradient of a gate of some neighbouring units, for each GEMM that needs it.
  template <class Cell, class Value>
  __device__ void store_gradient(int64_t row, int unit, int gate, const Value& value) const {
    const auto at = [&](int width, int g) { return (row * width + g) * state_size + unit; };
    if (gate < Cell::kInput) {
      *reinterpret_cast<Value*>(grad_x + at(Cell::kInput, input_place<Cell>(gate))) = value;
    }
    const int of_recurrent = gate - kFirstRecurrent<Cell>;
    if (!kHasOneGradient<Cell> && of_recurrent >= 0) {
      *reinterpret_cast<Value*>(grad_h_part + at(Cell::kRecurrent, of_recurrent)) = value;
    }
  }
};

// The sums of the columns of one matrix, or of two (bias_sums.cuh).
template <class T>
struct ColumnSums {
  int64_t rows;
  int64_t columns[2];
  const T* values[2];
  T* sums[2];
  T* copy;  // of the first sums, or null
};

template <class T>
Error launch_column_sums(const ColumnSums<T>& in, cudaStream_t stream);

}  // namespace extops::cuda::step
