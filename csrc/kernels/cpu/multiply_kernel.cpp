#include "../multiply.h"
#include "elementwise.h"

namespace {

struct Multiply {
  template <class C>
  [[gnu::always_inline]] void operator()(C a, C b, C& product) const {
    product = a * b;
  }
};

struct MultiplyBackward {
  template <class C>
  [[gnu::always_inline]] void operator()(C grad_output, C a, C b, C& grad_a, C& grad_b) const {
    grad_a = grad_output * b;
    grad_b = grad_output * a;
  }
};

}  // namespace

Error extops_elementwise_mult_cpu(
    ScalarType dtype, int64_t dim, const int64_t* geometry, void* const* data, int64_t begin, int64_t end) {
  return extops::cpu::elementwise<1, 2>(dtype, dim, geometry, data, begin, end, Multiply{});
}

Error extops_elementwise_mult_backward_cpu(
    ScalarType dtype, int64_t dim, const int64_t* geometry, void* const* data, int64_t begin, int64_t end) {
  return extops::cpu::elementwise<2, 3>(dtype, dim, geometry, data, begin, end, MultiplyBackward{});
}
