// What every kernel interface shares: element types and the error convention. No torch header, here or in any kernel.
#pragma once

#include <cstdint>

// Numbered like torch's ScalarType, so that bindings pass the number through. Only TF32 is ours: float32 whose GEMMs a
// kernel may compute from ten bits of each factor.
enum class ScalarType : int32_t { TF32 = -6, Half = 5, Float = 6, Double = 7, BFloat16 = 15 };

// Null on success, otherwise a sentence for the reader, valid until the thread's next failing call.
using Error = const char*;

#define EXTOPS_API extern "C" __attribute__((visibility("default")))

// Calls function(T{}) with the element type that `dtype` names; each kind of device has its own half types.
template <class Half, class BFloat16, class Function>
Error dispatch_as(ScalarType dtype, const Function& function) {
  switch (dtype) {
    case ScalarType::TF32:
    case ScalarType::Float:
      return function(float{});
    case ScalarType::Double:
      return function(double{});
    case ScalarType::BFloat16:
      return function(BFloat16{});
    case ScalarType::Half:
      return function(Half{});
  }
  return "expected dtype float64, float32, bfloat16 or float16";
}
