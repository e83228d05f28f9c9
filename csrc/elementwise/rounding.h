#pragma once

#include <cmath>

#include "function.h"

namespace extops {

// Rounds to the nearest integer, halves upwards; infinities and NaN come out as they went in. floor(x + 0.5) is wrong
// just below one half, where the sum rounds up; x - floor(x) is exact there.
struct RoundHalfUp {
  template <class C>
  EXTOPS_FUNCTION void operator()(C x, C& result) const {
    const C below = std::floor(x);
    result = x - below >= C(0.5) ? below + 1 : below;  // x - below is NaN for infinities and NaN: not larger
  }
};

}  // namespace extops
