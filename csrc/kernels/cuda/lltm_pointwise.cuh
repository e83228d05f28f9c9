// The arithmetic of one LLTM cell, shared by all its kernels.
#pragma once

#include "scalar.cuh"

namespace extops::cuda {

__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return ::exp(x); }

template <class C>
__device__ C sigmoid(C x) {
  return 1 / (1 + exponential(-x));
}

template <class C>
__device__ C elu(C x) {
  return x > 0 ? x : expm1(x);
}

template <class C>
struct CellState {
  C h;
  C cell;
};

template <class C>
__device__ CellState<C> cell_forward(C input_gate, C output_gate, C candidate, C old_cell) {
  const C cell = old_cell + elu(candidate) * sigmoid(input_gate);
  return {tanh(cell) * sigmoid(output_gate), cell};
}

template <class C>
struct CellGradients {
  C input_gate;
  C output_gate;
  C candidate;
  C old_cell;
};

template <class C>
__device__ CellGradients<C> cell_backward(C grad_h, C grad_cell, C input_gate, C output_gate, C candidate, C new_cell) {
  const C candidate_value = elu(candidate);
  const C i = sigmoid(input_gate);
  const C o = sigmoid(output_gate);
  const C tanh_cell = tanh(new_cell);
  const C dc = grad_cell + grad_h * o * (1 - tanh_cell * tanh_cell);
  return {
      dc * candidate_value * i * (1 - i), grad_h * tanh_cell * o * (1 - o),
      dc * i * (candidate > 0 ? C(1) : 1 + candidate_value), dc};
}

// An upstream gradient: absent, expanded or strided.
template <class T>
struct Gradient {
  const T* data;
  int64_t row_stride;
  int64_t column_stride;

  __device__ typename Compute<T>::type at(int64_t row, int64_t column) const {
    return data == nullptr ? 0 : load(data[row * row_stride + column * column_stride]);
  }
};

}  // namespace extops::cuda
