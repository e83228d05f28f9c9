// One step of the LLTM, shared by its kernels.
#pragma once

#include "../../cells/lltm.h"
#include "../table.h"
#include "math.cuh"
#include "scalar.cuh"

namespace extops::cuda {

// The gradients of the columns of one unit; that of the new cell state, `grad_c`, becomes that of the old one.
template <class Math, class C>
__device__ void lltm_backward(const C (&columns)[3], C new_c, C grad_h, C& grad_c, C (&gradients)[3]) {
  C a[3] = {columns[0], columns[1], columns[2]};
  activate<Lltm, Math>(a);
  const C tanh_c = Lltm::squash<Math>(a, new_c);
  grad_c += Lltm::to_c(grad_h, a, tanh_c);
  Lltm::to_columns<Math>(grad_h, grad_c, a, new_c, tanh_c, gradients);
}

// An upstream gradient: absent, expanded or strided.
template <class T>
struct Gradient {
  const T* data;
  int64_t row_stride;
  int64_t column_stride;

  __device__ typename Compute<T>::type at(int64_t row, int64_t column) const {
    return data == nullptr ? 0 : load(data[row * row_stride + column * column_stride]);
  }
};

template <class T>
Gradient<T> make_gradient(const Upstream& upstream) {
  return {static_cast<const T*>(upstream.data), upstream.row_stride, upstream.column_stride};
}

}  // namespace extops::cuda
