// Runs a loop compiled for the widest vector instructions of the CPU at hand.
#pragma once

#include <new>
#include <type_traits>

#include "../types.h"

namespace extops::cpu {

#if defined(__x86_64__)

// The body is inlined into one function per instruction set, and so is compiled for each of them. It must be a callable
// whose operator() and all that it calls are always_inline.
template <class Body>
[[gnu::target("avx2,fma,f16c")]] void run_avx2(const Body& body) {
  body();
}

template <class Body>
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]] void run_avx512(const Body& body) {
  body();
}

inline bool has_avx512() {
  static const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return has;
}

template <class Body>
void vectorize(const Body& body) {
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (has_avx512()) return run_avx512(body);
  if (has_avx2) return run_avx2(body);
  body();
}

#else

inline bool has_avx512() { return false; }

template <class Body>
void vectorize(const Body& body) {
  body();
}

#endif

// Calls body(integral_constant), vectorised, with the bytes of the CPU's vectors.
template <class Body>
Error vectorize_with_width(const Body& body) {
  try {
    if (has_avx512()) {
      vectorize([&]() __attribute__((always_inline)) { body(std::integral_constant<int, 64>{}); });
    } else {
      vectorize([&]() __attribute__((always_inline)) { body(std::integral_constant<int, 32>{}); });
    }
  } catch (const std::bad_alloc&) {  // which must not leave a function that is called as one of C
    return "not enough memory for the buffers of a CPU kernel";
  }
  return nullptr;
}

}  // namespace extops::cpu
