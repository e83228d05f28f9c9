// Upstream gradients of one step.
#pragma once

#include "../../table.h"
#include "../common/scalar.cuh"

namespace extops::cuda::step {

// An upstream gradient: absent, expanded or strided.
template <class T>
struct Gradient {
  const T* data;
  int64_t row_stride;
  int64_t column_stride;

  explicit Gradient(const Upstream& upstream)
      : data(static_cast<const T*>(upstream.data)),
        row_stride(upstream.row_stride),
        column_stride(upstream.column_stride) {}

  __device__ typename Compute<T>::type at(int64_t row, int64_t column) const {
    return data == nullptr ? 0 : load(data[row * row_stride + column * column_stride]);
  }
};

}  // namespace extops::cuda::step
