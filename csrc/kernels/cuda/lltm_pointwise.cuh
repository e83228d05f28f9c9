// The arithmetic of one LLTM cell, shared by all its kernels.
#pragma once

#include "../table.h"
#include "scalar.cuh"

namespace extops::cuda {

__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return ::exp(x); }

// Whether to compute the functions by the special function units, to about six digits: enough where the products have
// only as many, as in 16-bit types and TF32.
constexpr bool kFastMath = true;
template <class T>
constexpr bool kIsHalf = sizeof(T) == 2;

// exp(x) to about six digits; zero where it would be denormal.
__device__ inline float fast_exponential(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.4426950408889634f));
  return result;
}

// To six digits of the result also near zero, where exp(x) - 1 loses them.
__device__ inline float fast_expm1(float x) {
  const float series =
      x * (1 + x * (1.f / 2 + x * (1.f / 6 + x * (1.f / 24 + x * (1.f / 120 + x * (1.f / 720))))));  // to x^6
  return fabsf(x) < 0.25f ? series : fast_exponential(x) - 1;
}

// 1 / x for x from 1 to infinity, to the last bit but one: a division has a branch for the numbers below.
__device__ inline float reciprocal(float x) {
  const float estimate = __fdividef(1, x);
  const float better = fmaf(fmaf(-x, estimate, 1.f), estimate, estimate);
  return x > 1e37f ? estimate : better;
}
__device__ inline double reciprocal(double x) { return 1 / x; }

template <class C, bool kFast>
__device__ C sigmoid(C x) {
  if constexpr (kFast) return __fdividef(1, 1 + fast_exponential(-x));
  return reciprocal(1 + exponential(-x));
}

template <class C, bool kFast>
__device__ C elu(C x) {
  const C below = x > 0 ? 0 : x;  // so that no branch is needed
  C tail;
  if constexpr (kFast) {
    tail = fast_expm1(below);
  } else {
    tail = expm1(below);
  }
  return x > 0 ? x : tail;
}

template <class C, bool kFast>
__device__ C hyperbolic_tangent(C x) {
  if constexpr (kFast) {
    const C below = fast_expm1(-2 * fabsf(x));  // from -1 to 0
    return copysignf(-below * __fdividef(1, 2 + below), x);
  }
  return tanh(x);
}

template <class C>
struct CellState {
  C h;
  C cell;
};

template <class C, bool kFast = false>
__device__ CellState<C> cell_forward(C input_gate, C output_gate, C candidate, C old_cell) {
  const C cell = old_cell + elu<C, kFast>(candidate) * sigmoid<C, kFast>(input_gate);
  return {hyperbolic_tangent<C, kFast>(cell) * sigmoid<C, kFast>(output_gate), cell};
}

template <class C>
struct CellGradients {
  C input_gate;
  C output_gate;
  C candidate;
  C old_cell;
};

template <class C, bool kFast = false>
__device__ CellGradients<C> cell_backward(C grad_h, C grad_cell, C input_gate, C output_gate, C candidate, C new_cell) {
  const C candidate_value = elu<C, kFast>(candidate);
  const C i = sigmoid<C, kFast>(input_gate);
  const C o = sigmoid<C, kFast>(output_gate);
  const C tanh_cell = hyperbolic_tangent<C, kFast>(new_cell);
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

template <class T>
Gradient<T> make_gradient(const Upstream& upstream) {
  return {static_cast<const T*>(upstream.data), upstream.row_stride, upstream.column_stride};
}

}  // namespace extops::cuda
