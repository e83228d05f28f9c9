// The pointwise part of the LLTM cell, forward and backward, shared by its kernels.
#pragma once

#include <algorithm>

#include "../../cells/lltm.h"
#include "../table.h"
#include "math.h"
#include "scalar.h"

namespace extops::cpu {

// Calls body(first, row, column, count) for each piece of a row within the elements [begin, end).
template <class Body>
[[gnu::always_inline]] inline void for_each_row_piece(
    int64_t state_size, int64_t begin, int64_t end, int64_t longest, const Body& body) {
  if (begin >= end) return;
  int64_t row = begin / state_size;
  int64_t column = begin % state_size;
  for (int64_t first = begin; first < end;) {
    const int64_t count = std::min({longest, state_size - column, end - first});
    body(first, row, column, count);
    first += count;
    column += count;
    if (column == state_size) {
      column = 0;
      ++row;
    }
  }
}

template <class T>
[[gnu::always_inline]] inline void add_bias(int64_t state_size, const T* bias, T* gates, int64_t count) {
  for (int64_t gate = 0; gate < 3 * state_size; gate += state_size) {
    const T* __restrict from = bias + gate;
    T* __restrict to = gates + gate;
    for (int64_t j = 0; j < count; ++j) store(to[j], load(to[j]) + load(from[j]));
  }
}

// A bias that is given is added to the gates first.
template <class T>
[[gnu::always_inline]] inline void lltm_forward(
    int64_t state_size, const T* bias, T* gates, const T* old_cell, T* new_h, T* new_cell, int64_t begin, int64_t end) {
  using C = typename Compute<T>::type;
  for_each_row_piece(
      state_size, begin, end, state_size,
      [&](int64_t first, int64_t row, int64_t column, int64_t count) __attribute__((always_inline)) {
        T* const first_gate = gates + row * 3 * state_size + column;
        if (bias != nullptr) add_bias(state_size, bias + column, first_gate, count);
        const T* __restrict old_c = old_cell + first;
        T* __restrict h = new_h + first;
        T* __restrict c = new_cell + first;
#pragma GCC ivdep
        for (int64_t j = 0; j < count; ++j) {
          const T* const gate = first_gate + j;
          const C gates[] = {load(gate[0]), load(gate[state_size]), load(gate[2 * state_size])};
          const CellState<C> state = cell_forward<Lltm, Math>(gates, load(old_c[j]));
          store(c[j], state.c);
          store(h[j], state.h);
        }
      });
}

// An upstream gradient: absent, expanded or strided.
template <class T>
struct Gradient {
  explicit Gradient(const Upstream& upstream)
      : data(static_cast<const T*>(upstream.data)),
        row_stride(upstream.row_stride),
        column_stride(upstream.column_stride) {}

  const T* data;
  int64_t row_stride;
  int64_t column_stride;

  template <class C>
  [[gnu::always_inline]] void copy(int64_t row, int64_t column, int64_t count, C* __restrict to) const {
    if (data == nullptr) {
      for (int64_t j = 0; j < count; ++j) to[j] = 0;
      return;
    }
    const T* __restrict from = data + row * row_stride + column * column_stride;
    if (column_stride == 1) {
      for (int64_t j = 0; j < count; ++j) to[j] = load(from[j]);
    } else {
      for (int64_t j = 0; j < count; ++j) to[j] = load(from[j * column_stride]);
    }
  }
};

template <class T>
[[gnu::always_inline]] inline void lltm_backward(
    int64_t state_size, Gradient<T> grad_h, Gradient<T> grad_cell, const T* gates, const T* new_cell, T* grad_gates,
    T* grad_old_cell, int64_t begin, int64_t end) {
  using C = typename Compute<T>::type;
  constexpr int64_t kPiece = 256;  // upstream gradients pass through buffers that stay in the L1 cache
  C upstream_h[kPiece];
  C upstream_cell[kPiece];
  for_each_row_piece(
      state_size, begin, end, kPiece,
      [&](int64_t first, int64_t row, int64_t column, int64_t count) __attribute__((always_inline)) {
        grad_h.copy(row, column, count, upstream_h);
        grad_cell.copy(row, column, count, upstream_cell);
        const int64_t offset = row * 3 * state_size + column;
        const T* const first_gate = gates + offset;
        const T* __restrict cell = new_cell + first;
        T* __restrict grad_input_gate = grad_gates + offset;
        T* __restrict grad_output_gate = grad_input_gate + state_size;
        T* __restrict grad_candidate = grad_output_gate + state_size;
        T* __restrict grad_old_c = grad_old_cell + first;
#pragma GCC ivdep
        for (int64_t j = 0; j < count; ++j) {
          const T* const gate = first_gate + j;
          const C gates[] = {load(gate[0]), load(gate[state_size]), load(gate[2 * state_size])};
          C gradients[Lltm::kGates];
          store(
              grad_old_c[j],
              cell_backward<Lltm, Math>(gates, load(cell[j]), upstream_h[j], upstream_cell[j], gradients));
          store(grad_input_gate[j], gradients[Lltm::kInputGate]);
          store(grad_output_gate[j], gradients[Lltm::kOutputGate]);
          store(grad_candidate[j], gradients[Lltm::kCandidate]);
        }
      });
}

}  // namespace extops::cpu
