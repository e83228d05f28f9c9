// The element types of CPU kernels and their conversions: plain integer arithmetic, so that the compiler vectorises
// them with any instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#include "../types.h"

namespace extops::cpu {

template <class To, class From>
[[gnu::always_inline]] inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

struct BFloat16 {
  uint16_t bits;
};

struct Half {
  uint16_t bits;
};

// The type that a kernel computes in.
template <class T>
struct Compute {
  using type = T;
};
template <>
struct Compute<BFloat16> {
  using type = float;
};
template <>
struct Compute<Half> {
  using type = float;
};

[[gnu::always_inline]] inline float load(float value) { return value; }
[[gnu::always_inline]] inline double load(double value) { return value; }

[[gnu::always_inline]] inline float load(BFloat16 value) {
  return bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

[[gnu::always_inline]] inline float load(Half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fffu) << 13;
  // Below 2^-14 the number is subnormal: its bits are the last ones of 0.5 plus the number. No subnormal takes part in
  // the subtraction: the CPU may be set to treat these as zero.
  const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(0x3f000000u | (magnitude >> 13)) - 0.5f);
  const uint32_t normal = magnitude + 0x38000000u;  // moves the exponent from bias 15 to bias 127
  const uint32_t finite = magnitude < 0x00800000u ? subnormal : normal;
  const uint32_t special = magnitude | 0x7f800000u;
  const bool is_special = magnitude >= 0x0f800000u;
  return bit_cast<float>(sign | (is_special ? special : finite));
}

[[gnu::always_inline]] inline void store(float& to, float value) { to = value; }
[[gnu::always_inline]] inline void store(double& to, double value) { to = value; }

// Both round to nearest, ties to even.
[[gnu::always_inline]] inline void store(BFloat16& to, float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  to.bits = static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40u : rounded);
}

[[gnu::always_inline]] inline void store(Half& to, float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Below 2^-14 the result is subnormal: adding 0.5 lets the hardware round at half's last place.
  const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  // A NaN keeps the upper bits of its payload, as with the CPU's own instruction.
  const uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  const uint32_t special = magnitude > 0x7f800000u ? nan : 0x7c00u;
  to.bits = static_cast<uint16_t>(sign | (magnitude >= 0x47800000u ? special : finite));
}

template <class Function>
Error dispatch(ScalarType dtype, const Function& function) {
  return dispatch_as<Half, BFloat16>(dtype, function);
}

}  // namespace extops::cpu
