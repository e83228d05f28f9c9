// exp, expm1, sigmoid, log_sigmoid and tanh as straight-line arithmetic, which the compiler vectorises. Relative error
// below 2 units in the last place; overflow, underflow and NaN behave as in libm.
#pragma once

#include <array>
#include <cstdint>
#include <type_traits>

#include "scalar.h"

namespace extops::cpu {

template <class T>
struct ExpConstants;

template <>
struct ExpConstants<float> {
  using Int = int32_t;
  static constexpr int kMantissaBits = 23;
  static constexpr int kBias = 127;
  static constexpr float kRoundToInt = 0x1.8p23f;  // adding it leaves the nearest integer in the low mantissa bits
  static constexpr float kLimit = 105.f;           // exp(-kLimit) is 0 and exp(kLimit) is infinite
  static constexpr float kLn2High = 0x1.62e4p-1f;  // few enough bits that n * kLn2High is exact
  static constexpr float kLn2Low = 0x1.7f7d1cp-20f;
  static constexpr int kTaylorDegree = 7;
};

template <>
struct ExpConstants<double> {
  using Int = int64_t;
  static constexpr int kMantissaBits = 52;
  static constexpr int kBias = 1023;
  static constexpr double kRoundToInt = 0x1.8p52;
  static constexpr double kLimit = 746.0;
  static constexpr double kLn2High = 0x1.62e42feep-1;
  static constexpr double kLn2Low = 0x1.a39ef35793c76p-33;
  static constexpr int kTaylorDegree = 13;
};

template <class T>
constexpr auto inverse_factorials() {
  std::array<T, ExpConstants<T>::kTaylorDegree + 1> result{};
  T factorial = 1;
  for (int n = 0; n <= ExpConstants<T>::kTaylorDegree; ++n) {
    factorial *= n == 0 ? 1 : static_cast<T>(n);
    result[n] = 1 / factorial;
  }
  return result;
}

// exp(x) = power * second_power * (1 + tail), with |ln(1 + tail)| <= ln(2) / 2. Two powers of two reach from below
// the subnormals to infinity.
template <class T>
struct ReducedExp {
  T tail;
  T power;
  T second_power;
};

template <class T>
[[gnu::always_inline]] inline ReducedExp<T> reduce_exp(T x) {
  using Constants = ExpConstants<T>;
  using Int = typename Constants::Int;
  constexpr T kLog2E = static_cast<T>(1.4426950408889634074L);

  x = x < -Constants::kLimit ? -Constants::kLimit : x;
  x = x > Constants::kLimit ? Constants::kLimit : x;
  const T shifted = x * kLog2E + Constants::kRoundToInt;
  const Int exponent = bit_cast<Int>(shifted) - bit_cast<Int>(Constants::kRoundToInt);
  const T n = shifted - Constants::kRoundToInt;
  const T r = (x - n * Constants::kLn2High) - n * Constants::kLn2Low;

  constexpr auto kCoefficients = inverse_factorials<T>();
  T tail = kCoefficients[Constants::kTaylorDegree];
  for (int degree = Constants::kTaylorDegree - 1; degree >= 2; --degree) tail = tail * r + kCoefficients[degree];
  tail = tail * r * r + r;

  const Int half = exponent >> 1;
  // Unsigned: for a NaN the exponent is arbitrary, and the shift must not overflow.
  const auto power_of_two = [](Int e) {
    return bit_cast<T>(static_cast<std::make_unsigned_t<Int>>(e + Constants::kBias) << Constants::kMantissaBits);
  };
  return {tail, power_of_two(half), power_of_two(exponent - half)};
}

template <class T>
[[gnu::always_inline]] inline T exp(T x) {
  const ReducedExp<T> e = reduce_exp(x);
  return (e.tail + 1) * e.power * e.second_power;
}

// Only for arguments whose exponential is finite.
template <class T>
[[gnu::always_inline]] inline T expm1(T x) {
  const ReducedExp<T> e = reduce_exp(x);
  const T power = e.power * e.second_power;
  return power * e.tail + (power - 1);
}

template <class T>
[[gnu::always_inline]] inline T sigmoid(T x) {
  return 1 / (1 + exp(-x));
}

// -log(1 + e^-x): with y = e^-|x|, log(1 + y) is twice the area tangent of y / (2 + y), which is at most 1/3.
template <class T>
[[gnu::always_inline]] inline T log_sigmoid(T x) {
  constexpr int kTerms = sizeof(T) == 4 ? 8 : 17;
  const T y = exp(x < 0 ? x : -x), s = y / (2 + y);
  T sum = T(1) / (2 * kTerms - 1);
  for (int k = kTerms - 1; k > 0; --k) sum = sum * (s * s) + T(1) / (2 * k - 1);
  return (x < 0 ? x : T(0)) - 2 * s * sum;
}

template <class T>
[[gnu::always_inline]] inline T tanh(T x) {
  constexpr T kSaturated = 20;  // tanh rounds to 1 from here on, in double too
  x = x < -kSaturated ? -kSaturated : x;
  x = x > kSaturated ? kSaturated : x;
  const T e = expm1(2 * x);
  return e / (e + 2);
}

template <class T>
[[gnu::always_inline]] inline T elu(T x) {
  return x < 0 ? expm1(x < 0 ? x : T(0)) : x;  // a zero keeps its sign
}

// The functions of a cell.
struct Math {
  template <class C>
  [[gnu::always_inline]] static C sigmoid(C x) {
    return cpu::sigmoid(x);
  }
  template <class C>
  [[gnu::always_inline]] static C log_sigmoid(C x) {
    return cpu::log_sigmoid(x);
  }
  template <class C>
  [[gnu::always_inline]] static C tanh(C x) {
    return cpu::tanh(x);
  }
  template <class C>
  [[gnu::always_inline]] static C elu(C x) {
    return cpu::elu(x);
  }
  template <class C>
  [[gnu::always_inline]] static C exp(C x) {
    return cpu::exp(x);
  }
};

}  // namespace extops::cpu
