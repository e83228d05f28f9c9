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
[[gnu::noinline, gnu::target("avx2,fma,f16c")]] void run_avx2(const Body& body) {
  body();
}

template <class Body>
[[gnu::noinline, gnu::target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]] void run_avx512(const Body& body) {
  body();
}

inline bool has_avx512() {
  static const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return has;
}

inline bool has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return has;
}

#endif

template <class Body>
[[gnu::noinline]] void run_baseline(const Body& body) {
  body();
}

// For a CPU that has vectors of kBytes. Where a body calls it, that part is compiled once for all bodies: it must not
// depend on what they differ in.
template <int kBytes, class Body>
[[gnu::always_inline]] inline void run_with_width(const Body& body) {
#if defined(__x86_64__)
  if constexpr (kBytes == 64) return run_avx512(body);
  if constexpr (kBytes == 32) return run_avx2(body);
#endif
  return run_baseline(body);
}

// The body is given the bytes of a vector, as an integral_constant.
template <class Body>
void vectorize_with_width(const Body& body) {
#if defined(EXTOPS_VECTOR_BYTES)  // of the CPU at hand: what is compiled just in time runs on no other
  constexpr int kBytes = EXTOPS_VECTOR_BYTES;
  run_with_width<kBytes>([&]() __attribute__((always_inline)) { body(std::integral_constant<int, kBytes>{}); });
#else
#if defined(__x86_64__)
  if (has_avx512())
    return run_avx512([&]() __attribute__((always_inline)) { body(std::integral_constant<int, 64>{}); });
  if (has_avx2()) return run_avx2([&]() __attribute__((always_inline)) { body(std::integral_constant<int, 32>{}); });
#endif
  body(std::integral_constant<int, 16>{});
#endif
}

template <class Body>
void vectorize(const Body& body) {
  vectorize_with_width([&](auto) __attribute__((always_inline)) { body(); });
}

// For bodies that allocate: no exception may leave the extern "C" functions that call them.
template <class Body>
Error try_vectorize_with_width(const Body& body) {
  try {
    vectorize_with_width(body);
  } catch (const std::bad_alloc&) {
    return "not enough memory for the buffers of a CPU kernel";
  }
  return nullptr;
}

}  // namespace extops::cpu
