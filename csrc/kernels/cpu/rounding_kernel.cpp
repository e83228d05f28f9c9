#include <cmath>

#include "../rounding.h"
#include "elementwise.h"

namespace {

// floor(x + 0.5) is wrong just below one half, where the sum rounds up; x - floor(x) is exact there.
struct RoundHalfUp {
  template <class C>
  [[gnu::always_inline]] void operator()(C x, C& result) const {
    const C below = std::floor(x);
    result = x - below >= C(0.5) ? below + 1 : below;  // of infinities and NaN the difference is NaN: not larger
  }
};

}  // namespace

Error extops_round_ste_cpu(
    ScalarType dtype, int64_t dim, const int64_t* geometry, void* const* data, int64_t begin, int64_t end) {
  return extops::cpu::elementwise<1, 1>(dtype, dim, geometry, data, begin, end, RoundHalfUp{});
}
