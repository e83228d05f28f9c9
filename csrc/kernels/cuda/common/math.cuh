// The functions that a cell (../../cells/cell.h) is made of, on a GPU.
#pragma once

#include <type_traits>

namespace extops::cuda {

__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return ::exp(x); }

// 1 / x for x from 1 to infinity, to the last bit but one. A division would need a branch for smaller numbers.
__device__ inline float reciprocal(float x) {
  const float estimate = __fdividef(1, x);
  const float better = fmaf(fmaf(-x, estimate, 1.f), estimate, estimate);
  return x > 1e37f ? estimate : better;
}
__device__ inline double reciprocal(double x) { return 1 / x; }

struct ExactMath {
  template <class C>
  __device__ static C sigmoid(C x) {
    return reciprocal(1 + exponential(-x));
  }
  template <class C>
  __device__ static C log_sigmoid(C x) {
    return (x < 0 ? x : 0) - ::log1p(exponential(x < 0 ? x : -x));
  }
  template <class C>
  __device__ static C elu(C x) {
    const C tail = expm1(x > 0 ? 0 : x);  // so that no branch is needed
    return x > 0 ? x : tail;
  }
  template <class C>
  __device__ static C tanh(C x) {
    return ::tanh(x);
  }
  template <class C>
  __device__ static C exp(C x) {
    return exponential(x);
  }
};

// By the special function units, with about six digits: enough where the GEMMs have no more, as in 16-bit types and
// TF32.
struct FastMath {
  // Zero where it would be denormal.
  __device__ static float exp(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.4426950408889634f));
    return result;
  }
  __device__ static float sigmoid(float x) { return __fdividef(1, 1 + exp(-x)); }
  __device__ static float log_sigmoid(float x) { return (x < 0 ? x : 0) - __logf(1 + exp(-fabsf(x))); }
  __device__ static float elu(float x) {
    const float tail = expm1(x > 0 ? 0 : x);
    return x > 0 ? x : tail;
  }
  __device__ static float tanh(float x) {
    const float below = expm1(-2 * fabsf(x));  // from -1 to 0
    return copysignf(-below * __fdividef(1, 2 + below), x);
  }

 private:
  // To six digits of the result also near zero, where exp(x) - 1 loses them.
  __device__ static float expm1(float x) {
    const float series =
        x * (1 + x * (1.f / 2 + x * (1.f / 6 + x * (1.f / 24 + x * (1.f / 120 + x * (1.f / 720))))));  // to x^6
    return fabsf(x) < 0.25f ? series : exp(x) - 1;
  }
};

// The functions where GEMMs have the full precision of T.
template <class T>
using MathOf = std::conditional_t<sizeof(T) == 2, FastMath, ExactMath>;

}  // namespace extops::cuda
