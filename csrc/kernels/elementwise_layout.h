// Turns sizes and strides of an elementwise operator into the fewest loops that visit every element.
#pragma once

#include <algorithm>

#include "elementwise.h"

// Dimensions of size 1 do not count. A tensor with more of the others would have more than 2^48 elements.
constexpr int kMaxDims = 48;

template <int kOperands>
struct ElementwiseLayout {
  int dim = 0;  // after merging; the innermost loop is dimension 0
  int64_t numel = 1;
  int64_t sizes[kMaxDims];
  int64_t strides[kOperands][kMaxDims];

  int64_t row_size() const { return dim == 0 ? 1 : sizes[0]; }

  bool rows_are_dense() const {
    if (dim == 0) return true;
    return std::all_of(strides, strides + kOperands, [](const int64_t* stride) { return stride[0] == 1; });
  }

  bool is_contiguous() const { return dim <= 1 && rows_are_dense(); }
};

// Drops the dimensions of one element, orders the others by the first output's strides, and merges neighbours that
// every operand walks through without a gap.
template <int kOperands>
Error make_layout(int64_t dim, const int64_t* geometry, ElementwiseLayout<kOperands>& layout) {
  layout.dim = 0;
  layout.numel = 0;
  if (std::find(geometry, geometry + dim, 0) != geometry + dim) return nullptr;

  layout.numel = 1;
  int64_t order[kMaxDims];
  int count = 0;
  for (int64_t d = 0; d < dim; ++d) {
    layout.numel *= geometry[d];
    if (geometry[d] == 1) continue;
    if (count == kMaxDims) return "a tensor has more than 2^48 elements";
    order[count++] = d;
  }
  const int64_t* output_strides = geometry + dim;
  std::stable_sort(order, order + count, [&](int64_t left, int64_t right) {
    return output_strides[left] != output_strides[right] ? output_strides[left] < output_strides[right] : left > right;
  });

  for (int position = 0; position < count; ++position) {
    const int64_t source = order[position];
    const int64_t size = geometry[source];
    const auto stride = [&](int operand) { return geometry[(1 + operand) * dim + source]; };
    bool merges = layout.dim > 0;
    for (int operand = 0; merges && operand < kOperands; ++operand) {
      const int inner = layout.dim - 1;
      merges = stride(operand) == layout.strides[operand][inner] * layout.sizes[inner];
    }
    if (merges) {
      layout.sizes[layout.dim - 1] *= size;
      continue;
    }
    layout.sizes[layout.dim] = size;
    for (int operand = 0; operand < kOperands; ++operand) layout.strides[operand][layout.dim] = stride(operand);
    ++layout.dim;
  }
  return nullptr;
}
