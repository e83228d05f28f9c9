#include "../multiply.h"
#include "elementwise.cuh"

// Named, not anonymous: nvcc would put the path of this file into the kernels' names, and no two builds be the same.
namespace extops::cuda {

struct Multiply {
  template <class C>
  __device__ void operator()(C a, C b, C& product) const {
    product = a * b;
  }
};

struct MultiplyBackward {
  template <class C>
  __device__ void operator()(C grad_output, C a, C b, C& grad_a, C& grad_b) const {
    grad_a = grad_output * b;
    grad_b = grad_output * a;
  }
};

}  // namespace extops::cuda

Error extops_elementwise_mult_cuda(
    ScalarType dtype, int64_t dim, const int64_t* geometry, void* const* data, void* stream) {
  return extops::cuda::elementwise<1, 2>(
      "elementwise_mult", dtype, dim, geometry, data, stream, extops::cuda::Multiply{});
}

Error extops_elementwise_mult_backward_cuda(
    ScalarType dtype, int64_t dim, const int64_t* geometry, void* const* data, void* stream) {
  return extops::cuda::elementwise<2, 3>(
      "elementwise_mult_backward", dtype, dim, geometry, data, stream, extops::cuda::MultiplyBackward{});
}
