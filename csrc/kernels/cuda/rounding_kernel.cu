#include "../rounding.h"
#include "elementwise.cuh"

// Named, not anonymous: nvcc would put the path of this file into the kernels' names, and no two builds be the same.
namespace extops::cuda {

// floor(x + 0.5) is wrong just below one half, where the sum rounds up; x - floor(x) is exact there.
struct RoundHalfUp {
  template <class C>
  __device__ void operator()(C x, C& result) const {
    const C below = floor(x);
    result = x - below >= C(0.5) ? below + 1 : below;  // of infinities and NaN the difference is NaN: not larger
  }
};

}  // namespace extops::cuda

Error extops_round_ste_cuda(ScalarType dtype, int64_t dim, const int64_t* geometry, void* const* data, void* stream) {
  return extops::cuda::elementwise<1, 1>("round_ste", dtype, dim, geometry, data, stream, extops::cuda::RoundHalfUp{});
}
