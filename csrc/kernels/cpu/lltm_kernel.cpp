#include "../lltm.h"
#include "lltm_pointwise.h"
#include "vectorize.h"

using namespace extops::cpu;

Error extops_lltm_cell_cpu(
    ScalarType dtype, int64_t, int64_t state_size, const void* bias, void* gates, const void* old_cell, void* new_h,
    void* new_cell, int64_t begin, int64_t end) {
  return dispatch(dtype, [&](auto scalar) -> Error {
    using T = decltype(scalar);
    vectorize([&]() __attribute__((always_inline)) {
      cell(
          state_size, static_cast<const T*>(bias), static_cast<T*>(gates), static_cast<const T*>(old_cell),
          static_cast<T*>(new_h), static_cast<T*>(new_cell), begin, end);
    });
    return nullptr;
  });
}

Error extops_lltm_cell_backward_cpu(
    ScalarType dtype, int64_t, int64_t state_size, const void* grad_h, int64_t grad_h_row_stride,
    int64_t grad_h_column_stride, const void* grad_cell, int64_t grad_cell_row_stride, int64_t grad_cell_column_stride,
    const void* gates, const void* new_cell, void* grad_gates, void* grad_old_cell, int64_t begin, int64_t end) {
  return dispatch(dtype, [&](auto scalar) -> Error {
    using T = decltype(scalar);
    const Gradient<T> upstream_h{static_cast<const T*>(grad_h), grad_h_row_stride, grad_h_column_stride};
    const Gradient<T> upstream_cell{static_cast<const T*>(grad_cell), grad_cell_row_stride, grad_cell_column_stride};
    vectorize([&]() __attribute__((always_inline)) {
      cell_backward(
          state_size, upstream_h, upstream_cell, static_cast<const T*>(gates), static_cast<const T*>(new_cell),
          static_cast<T*>(grad_gates), static_cast<T*>(grad_old_cell), begin, end);
    });
    return nullptr;
  });
}
