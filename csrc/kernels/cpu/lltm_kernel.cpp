#include "../lltm.h"
#include "lltm_pointwise.h"
#include "vectorize.h"

using namespace extops::cpu;

Error extops_lltm_cell_cpu(ScalarType dtype, const LltmCellWithBias& in, int64_t begin, int64_t end) {
  return dispatch(dtype, [&](auto scalar) -> Error {
    using T = decltype(scalar);
    vectorize([&]() __attribute__((always_inline)) {
      lltm_forward(
          in.sizes.state_size, static_cast<const T*>(in.bias), static_cast<T*>(const_cast<void*>(in.gates)),
          static_cast<const T*>(in.old_cell), static_cast<T*>(in.new_h), static_cast<T*>(in.new_cell), begin, end);
    });
    return nullptr;
  });
}

Error extops_lltm_cell_backward_cpu(ScalarType dtype, const LltmCellBackward& in, int64_t begin, int64_t end) {
  return dispatch(dtype, [&](auto scalar) -> Error {
    using T = decltype(scalar);
    vectorize([&]() __attribute__((always_inline)) {
      lltm_backward(
          in.sizes.state_size, Gradient<T>(in.grad_h), Gradient<T>(in.grad_cell), static_cast<const T*>(in.gates),
          static_cast<const T*>(in.new_cell), static_cast<T*>(in.grad_gates), static_cast<T*>(in.grad_old_cell), begin,
          end);
    });
    return nullptr;
  });
}
