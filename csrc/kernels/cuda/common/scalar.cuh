// The element types of CUDA kernels and their conversions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <initializer_list>
#include <utility>

#include "../../types.h"

namespace extops::cuda {

// The type that a kernel computes in.
template <class T>
struct Compute {
  using type = float;
};
template <>
struct Compute<double> {
  using type = double;
};

__device__ inline float load(float value) { return value; }
__device__ inline double load(double value) { return value; }
__device__ inline float load(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline float load(__half value) { return __half2float(value); }

__device__ inline void store(float& to, float value) { to = value; }
__device__ inline void store(double& to, double value) { to = value; }
__device__ inline void store(__nv_bfloat16& to, float value) { to = __floats2bfloat162_rn(value, 0.f).x; }
__device__ inline void store(__half& to, float value) { to = __float2half_rn(value); }

// `kSize` neighbours in memory, moved by one instruction of up to 16 bytes.
template <class T, int kSize>
struct alignas(sizeof(T) * kSize <= 16 ? sizeof(T) * kSize : 16) Vector {
  T values[kSize];
};

template <class Body, int... kI>
__device__ __forceinline__ void unrolled(const Body& body, std::integer_sequence<int, kI...>) {
  (body(kI), ...);
}

// Calls body(i) for 0 <= i < kCount, one after the other without a loop, so that registers hold arrays.
template <int kCount, class Body>
__device__ __forceinline__ void unrolled(const Body& body) {
  unrolled(body, std::make_integer_sequence<int, kCount>());
}

// Assigns untyped pointers, in order, to typed ones.
template <class... Pointers>
void set_pointers(std::initializer_list<const void*> from, Pointers&... to) {
  const void* const* next = from.begin();
  ((to = static_cast<Pointers>(const_cast<void*>(*next++))), ...);
}

template <class Function>
Error dispatch(ScalarType dtype, const Function& function) {
  return dispatch_as<__half, __nv_bfloat16>(dtype, function);
}

}  // namespace extops::cuda
