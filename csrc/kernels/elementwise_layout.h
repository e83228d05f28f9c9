// Turns sizes and strides of an elementwise operator into the fewest loops that visit every element.
#pragma once

#include <algorithm>
#include <numeric>

#include "elementwise.h"

// As many as torch's own CUDA iterator takes, counted after merging.
constexpr int kMaxDims = 25;

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

// Orders the dimensions by the first output's strides, drops those of size one, and merges neighbours that every
// operand walks through without a gap.
template <int kOperands>
Error make_layout(int64_t dim, const int64_t* geometry, ElementwiseLayout<kOperands>& layout) {
  constexpr int kTorchMaxDims = 64;
  if (dim > kTorchMaxDims) return "elementwise kernel: a tensor has more than 64 dimensions";

  const int64_t* output_strides = geometry + dim;
  int order[kTorchMaxDims];
  std::iota(order, order + dim, 0);
  std::stable_sort(order, order + dim, [&](int left, int right) {
    return output_strides[left] != output_strides[right] ? output_strides[left] < output_strides[right] : left > right;
  });

  layout.dim = 0;
  layout.numel = 1;
  for (int64_t position = 0; position < dim; ++position) {
    const int source = order[position];
    const int64_t size = geometry[source];
    layout.numel *= size;
    if (size == 1) continue;

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
    if (layout.dim == kMaxDims) return "elementwise kernel: more than 25 dimensions that cannot be merged";
    layout.sizes[layout.dim] = size;
    for (int operand = 0; operand < kOperands; ++operand) layout.strides[operand][layout.dim] = stride(operand);
    ++layout.dim;
  }
  return nullptr;
}
