// Conversion of runs of half precision, by the CPU's own instructions where it has them.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "scalar.h"

namespace extops::cpu {

inline void widen_portable(const Half* from, float* to, int64_t count) {
  for (int64_t j = 0; j < count; ++j) to[j] = load(from[j]);
}

inline void narrow_portable(const float* from, Half* to, int64_t count) {
  for (int64_t j = 0; j < count; ++j) store(to[j], from[j]);
}

#if defined(__x86_64__)

constexpr int64_t kHalvesPerVector = 8;

[[gnu::target("avx,f16c")]] inline void widen_f16c(const Half* from, float* to, int64_t count) {
  int64_t j = 0;
  for (; j + kHalvesPerVector <= count; j += kHalvesPerVector) {
    _mm256_storeu_ps(to + j, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + j))));
  }
  widen_portable(from + j, to + j, count - j);
}

[[gnu::target("avx,f16c")]] inline void narrow_f16c(const float* from, Half* to, int64_t count) {
  int64_t j = 0;
  for (; j + kHalvesPerVector <= count; j += kHalvesPerVector) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(from + j), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + j), halves);
  }
  narrow_portable(from + j, to + j, count - j);
}

inline void widen(const Half* from, float* to, int64_t count) {
  static const bool has_f16c = __builtin_cpu_supports("f16c");
  has_f16c ? widen_f16c(from, to, count) : widen_portable(from, to, count);
}

inline void narrow(const float* from, Half* to, int64_t count) {
  static const bool has_f16c = __builtin_cpu_supports("f16c");
  has_f16c ? narrow_f16c(from, to, count) : narrow_portable(from, to, count);
}

#else

inline void widen(const Half* from, float* to, int64_t count) { widen_portable(from, to, count); }
inline void narrow(const float* from, Half* to, int64_t count) { narrow_portable(from, to, count); }

#endif

}  // namespace extops::cpu
