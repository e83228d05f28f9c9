// One step of a cell (../../cells/cell.h): its pointwise part after library GEMMs, and small problems in float32 whole.
// A library GEMM of that size spends most of its time on choosing a kernel and packing operands.
#pragma once

#include <algorithm>
#include <vector>

#include "../step.h"
#include "math.h"
#include "vectorize.h"

namespace extops::cpu::step {

// ---- the pointwise part ----

constexpr int64_t kPiece = 256;  // elements of a row that stay in the L1 cache

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

// The sum of parts, rounded once.
template <class T, class... Parts>
[[gnu::always_inline]] inline void store_sum(T* to, int64_t count, const Parts*... parts) {
#pragma GCC ivdep
  for (int64_t j = 0; j < count; ++j) store(to[j], (load(parts[j]) + ...));
}

// The gates of a piece of a row: the results of GEMMs, and biases.
template <class Cell, class T>
[[gnu::always_inline]] inline void add_up(const StepArguments& in, int64_t row, int64_t column, int64_t count) {
  const int64_t units = in.sizes.state_size;
  for (int g = 0; g < Cell::kGates; ++g) {
    const T* parts[4];
    int found = 0;
    const auto add = [&](const void* from, int64_t line) {
      if (from != nullptr) parts[found++] = static_cast<const T*>(from) + line * units + column;
    };
    if (g < Cell::kInput) {
      add(in.input_gates, row * Cell::kInput + input_place<Cell>(g));
      add(in.bias_x, input_place<Cell>(g));
    }
    if (const int of_h = g - kFirstRecurrent<Cell>; of_h >= 0) {
      add(in.hidden_gates, row * Cell::kRecurrent + of_h);
      add(in.bias_h, of_h);
    }
    T* const to = static_cast<T*>(in.gates) + (row * Cell::kGates + g) * units + column;
    if (found == 1 && parts[0] != to) store_sum(to, count, parts[0]);
    if (found == 2) store_sum(to, count, parts[0], parts[1]);
    if (found == 3) store_sum(to, count, parts[0], parts[1], parts[2]);
    if (found == 4) store_sum(to, count, parts[0], parts[1], parts[2], parts[3]);
  }
}

template <class Cell, class T, class C, int... kGate>
[[gnu::always_inline]] inline void load_gates(
    const T* from, int64_t units, C (&to)[Cell::kGates], std::integer_sequence<int, kGate...>) {
  ((to[kGate] = load(from[kGate * units])), ...);
}

// The state of the elements [begin, end), from their gates.
template <class Cell, class T>
[[gnu::always_inline]] inline void advance(
    const StepArguments& in, int64_t first, int64_t row, int64_t column, int64_t count) {
  using C = typename Compute<T>::type;
  const int64_t units = in.sizes.state_size;
  const T* const gates = static_cast<const T*>(in.gates) + row * Cell::kGates * units + column;
  const T* __restrict c_0 = static_cast<const T*>(in.c_0) + first;
  T* __restrict h = static_cast<T*>(in.h) + first;
  T* __restrict c = static_cast<T*>(in.c) + first;
#pragma GCC ivdep
  for (int64_t j = 0; j < count; ++j) {
    C of_unit[Cell::kGates];
    load_gates<Cell>(gates + j, units, of_unit, std::make_integer_sequence<int, Cell::kGates>());
    const CellState<C> state = cell_forward<Cell, Math>(of_unit, C(load(c_0[j])));
    store(c[j], state.c);
    store(h[j], state.h);
  }
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

template <class Cell, class T, class C, int... kGate>
[[gnu::always_inline]] inline void store_gradients(
    const C (&from)[Cell::kGates], int64_t units, T* grad_x, T* grad_h_part, std::integer_sequence<int, kGate...>) {
  const auto put = [&](auto gate) __attribute__((always_inline)) {
    constexpr int g = gate;
    if constexpr (g < Cell::kInput) store(grad_x[input_place<Cell>(g) * units], from[g]);
    if constexpr (!kHasOneGradient<Cell> && g >= kFirstRecurrent<Cell>) {
      store(grad_h_part[(g - kFirstRecurrent<Cell>)*units], from[g]);
    }
  };
  (put(std::integral_constant<int, kGate>{}), ...);
}

template <class Cell, class T>
[[gnu::always_inline]] inline void backward(const StepBackwardArguments& in, int64_t begin, int64_t end) {
  using C = typename Compute<T>::type;
  constexpr auto kAll = std::make_integer_sequence<int, Cell::kGates>();
  const Gradient<T> grad_h(in.grad_h), grad_c(in.grad_c);
  const int64_t units = in.sizes.state_size;
  C upstream_h[kPiece];
  C upstream_c[kPiece];
  for_each_row_piece(
      units, begin, end, kPiece,
      [&](int64_t first, int64_t row, int64_t column, int64_t count) __attribute__((always_inline)) {
        grad_h.copy(row, column, count, upstream_h);
        grad_c.copy(row, column, count, upstream_c);
        const T* const gates = static_cast<const T*>(in.gates) + row * Cell::kGates * units + column;
        const T* __restrict saved_c = static_cast<const T*>(in.saved_c) + first;
        T* const grad_x = static_cast<T*>(in.grad_x) + row * Cell::kInput * units + column;
        T* const grad_h_part = static_cast<T*>(in.grad_h_part) + row * Cell::kRecurrent * units + column;
        T* __restrict grad_c_0 = static_cast<T*>(in.grad_c_0) + first;
#pragma GCC ivdep
        for (int64_t j = 0; j < count; ++j) {
          C of_unit[Cell::kGates], gradients[Cell::kGates];
          load_gates<Cell>(gates + j, units, of_unit, kAll);
          const C towards =
              cell_backward<Cell, Math>(of_unit, C(load(saved_c[j])), upstream_h[j], upstream_c[j], gradients);
          store_gradients<Cell>(gradients, units, grad_x + j, grad_h_part + j, kAll);
          store(grad_c_0[j], towards);
        }
      });
}

// ---- small problems in float32, of cells whose GEMMs have the same rows ----

// The rows [begin, end) of each gate's block of weights, and these columns of the states.
struct Part {
  int64_t begin;
  int64_t end;
};

// to[r * to_stride + *] = sum over d of a[r * row_stride + d * depth_stride] * b[d * b_stride + *], for kRows rows of
// kVectors vectors of kBytes each.
template <int kRows, int kVectors, int kBytes>
[[gnu::always_inline]] inline void multiply_tile(
    int64_t depth, const float* a, int64_t row_stride, int64_t depth_stride, const float* b, int64_t b_stride,
    float* to, int64_t to_stride) {
  typedef float V __attribute__((vector_size(kBytes), aligned(alignof(float)), may_alias));
  constexpr int kLanes = kBytes / sizeof(float);
  V sums[kRows][kVectors] = {};
  for (int64_t d = 0; d < depth; ++d) {
    const V* values = reinterpret_cast<const V*>(b + d * b_stride);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const float factor = a[r * row_stride + d * depth_stride];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[r][v] += factor * values[v];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) *reinterpret_cast<V*>(to + r * to_stride + v * kLanes) = sums[r][v];
  }
}

// The same where `depth` may be long: float32 sums of a few terms are added up in float64, so that the error does not
// grow with the number of terms.
template <int kRows, int kVectors, int kBytes>
[[gnu::always_inline]] inline void multiply_long_tile(
    int64_t depth, const float* a, int64_t row_stride, int64_t depth_stride, const float* b, int64_t b_stride,
    float* to, int64_t to_stride) {
  constexpr int64_t kShort = 256;  // as long as a library's blocks
  constexpr int64_t kBlock = 32;
  constexpr int kWidth = kVectors * kBytes / static_cast<int>(sizeof(float));
  if (depth <= kShort) {
    multiply_tile<kRows, kVectors, kBytes>(depth, a, row_stride, depth_stride, b, b_stride, to, to_stride);
    return;
  }
  double sums[kRows * kWidth] = {};
  for (int64_t first = 0; first < depth; first += kBlock) {
    float tile[kRows * kWidth];
    multiply_tile<kRows, kVectors, kBytes>(
        std::min(kBlock, depth - first), a + first * depth_stride, row_stride, depth_stride, b + first * b_stride,
        b_stride, tile, kWidth);
    for (int i = 0; i < kRows * kWidth; ++i) sums[i] += tile[i];
  }
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kWidth; ++i) to[r * to_stride + i] = static_cast<float>(sums[r * kWidth + i]);
  }
}

// Calls body(integral_constant rows, first) for tiles of kRows lines of the part. The last tile of a block overlaps the
// one before rather than ending early; where there are too few lines for one tile, they come one by one.
template <class Cell, int kRows, class Body>
[[gnu::always_inline]] inline void for_each_tile(int64_t units, const Part& part, const Body& body) {
  const int64_t count = part.end - part.begin;
  for (int64_t line = part.begin; line < Cell::kGates * units; line += units) {
    if (count < kRows) {
      for (int64_t first = 0; first < count; ++first) body(std::integral_constant<int, 1>{}, line + first);
    } else {
      for (int64_t first = 0; first < count; first += kRows) {
        body(std::integral_constant<int, kRows>{}, line + std::min(first, count - kRows));
      }
    }
  }
}

// gates = h_0 weights_h^T + input weights_x^T. A vector holds one column for as many rows of the batch as it has lanes.
template <class Cell, int kBytes>
[[gnu::always_inline]] inline void multiply_by_weights(const StepArguments& in, const Part& part) {
  constexpr int kLanes = kBytes / sizeof(float);
  constexpr int kLines = 8;
  const auto& [batch, features, units] = in.sizes;
  auto* const gates = static_cast<float*>(in.gates);
  std::vector<float> transposed((units + features) * kLanes);
  const float* const of_h = transposed.data();
  const float* const of_x = of_h + units * kLanes;
  for (int64_t first_row = 0; first_row < batch; first_row += kLanes) {
    const int64_t rows = std::min<int64_t>(kLanes, batch - first_row);
    for (int64_t r = 0; r < rows; ++r) {
      const float* h = static_cast<const float*>(in.h_0) + (first_row + r) * units;
      const float* x = static_cast<const float*>(in.input) + (first_row + r) * features;
      for (int64_t k = 0; k < units; ++k) transposed[k * kLanes + r] = h[k];
      for (int64_t k = 0; k < features; ++k) transposed[(units + k) * kLanes + r] = x[k];
    }
    for_each_tile<Cell, kLines>(units, part, [&](auto lines, int64_t line) __attribute__((always_inline)) {
      float tile_h[lines * kLanes], tile_x[lines * kLanes];
      const auto multiply = [&](const void* weights, int64_t stride, const float* b, int64_t depth, float* tile)
                                __attribute__((always_inline)) {
                                  const float* const a = static_cast<const float*>(weights) + line * stride;
                                  multiply_long_tile<lines, 1, kBytes>(depth, a, stride, 1, b, kLanes, tile, kLanes);
                                };
      multiply(in.weights_h, in.weights_h_stride, of_h, units, tile_h);
      multiply(in.weights_x, in.weights_x_stride, of_x, features, tile_x);
      for (int64_t r = 0; r < rows; ++r) {
        float* __restrict to = gates + (first_row + r) * Cell::kGates * units + line;
        for (int l = 0; l < lines; ++l) to[l] = tile_h[l * kLanes + r] + tile_x[l * kLanes + r];
      }
    });
  }
}

// grad_weights = gradients^T x, for x of [batch, columns]. A vector holds neighbouring columns of one line.
template <class Cell, int kBytes>
[[gnu::always_inline]] inline void multiply_gradients(
    const StepSizes& sizes, const Part& part, const float* gradients, const void* x, int64_t columns,
    void* grad_weights, int64_t stride) {
  constexpr int kLanes = kBytes / sizeof(float);
  constexpr int kLines = kBytes == 64 ? 8 : 4;
  constexpr int kVectors = kBytes == 64 ? 2 : 3;
  const int64_t padded = (columns + kLanes - 1) / kLanes * kLanes;
  std::vector<float> rows(sizes.batch * padded);
  for (int64_t r = 0; r < sizes.batch; ++r) {
    std::copy_n(static_cast<const float*>(x) + r * columns, columns, rows.data() + r * padded);
  }
  for_each_tile<Cell, kLines>(sizes.state_size, part, [&](auto lines, int64_t line) __attribute__((always_inline)) {
    const float* factors = gradients + line;
    float* to = static_cast<float*>(grad_weights) + line * stride;
    const int64_t distance = Cell::kGates * sizes.state_size;
    int64_t column = 0;
    for (; column + kVectors * kLanes <= columns; column += kVectors * kLanes) {
      multiply_long_tile<lines, kVectors, kBytes>(
          sizes.batch, factors, 1, distance, rows.data() + column, padded, to + column, stride);
    }
    for (; column < columns; column += kLanes) {
      float tile[lines * kLanes];
      multiply_long_tile<lines, 1, kBytes>(
          sizes.batch, factors, 1, distance, rows.data() + column, padded, tile, kLanes);
      const int64_t count = std::min<int64_t>(kLanes, columns - column);
      for (int l = 0; l < lines; ++l) std::copy_n(tile + l * kLanes, count, to + l * stride + column);
    }
  });
}

template <class Cell>
[[gnu::always_inline]] inline void sum_rows(
    const StepSizes& sizes, const Part& part, const float* from, void* bias_x, void* bias_h) {
  const int64_t count = part.end - part.begin;
  const int64_t width = Cell::kGates * sizes.state_size;
  std::vector<double> sums(count);
  for (int64_t line = part.begin; line < width; line += sizes.state_size) {
    std::fill(sums.begin(), sums.end(), 0);
    for (int64_t r = 0; r < sizes.batch; ++r) {
      for (int64_t k = 0; k < count; ++k) sums[k] += from[r * width + line + k];
    }
    for (void* const to : {bias_x, bias_h}) {
      for (int64_t k = 0; to != nullptr && k < count; ++k)
        static_cast<float*>(to)[line + k] = static_cast<float>(sums[k]);
    }
  }
}

// Where that is faster than oneDNN and MKL, as measured on a CPU with AVX-512. With few rows most lanes of a vector are
// empty, which pays off only for very small GEMMs. Not where a size is zero: another may be huge.
template <class Cell>
bool is_small(ScalarType dtype, const StepSizes& sizes) {
  const auto& [batch, features, units] = sizes;
  constexpr int64_t kRows = 16;
  const int64_t padded_batch = (batch + kRows - 1) / kRows * kRows;
  const double multiplications = double{Cell::kGates} * padded_batch * units * (units + features);
  const double limit = 4 * batch >= padded_batch ? 4e6 : 6e4;
  return kHasOneGradient<Cell> && dtype == ScalarType::Float && multiplications > 0 && multiplications < limit;
}

// ---- entry points ----

// Calls body(first, last) with the elements of each row of the part.
template <class Body>
[[gnu::always_inline]] inline void for_each_row(const StepSizes& sizes, const Part& part, const Body& body) {
  for (int64_t row = 0; row < sizes.batch; ++row) {
    body(row * sizes.state_size + part.begin, row * sizes.state_size + part.end);
  }
}

template <class Cell, class T>
[[gnu::always_inline]] inline void forward(const StepArguments& in, int64_t begin, int64_t end) {
  for_each_row_piece(
      in.sizes.state_size, begin, end, kPiece,
      [&](int64_t first, int64_t row, int64_t column, int64_t count) __attribute__((always_inline)) {
        add_up<Cell, T>(in, row, column, count);
        advance<Cell, T>(in, first, row, column, count);
      });
}

constexpr Error kNotSmall = "the kernel for small problems takes float32, and cells whose GEMMs have the same rows";

template <class Cell>
Error run(ScalarType dtype, const StepArguments& in, int64_t begin, int64_t end) {
  if (begin >= end) return nullptr;
  if (in.input_gates != nullptr) {
    return dispatch(dtype, [&](auto scalar) -> Error {
      vectorize([&]() __attribute__((always_inline)) { forward<Cell, decltype(scalar)>(in, begin, end); });
      return nullptr;
    });
  }
  if constexpr (kHasOneGradient<Cell>) {
    if (dtype != ScalarType::Float) return kNotSmall;
    StepArguments multiplied = in;
    multiplied.input_gates = in.gates;
    return try_vectorize_with_width([&](auto bytes) __attribute__((always_inline)) {
      const Part part{begin, end};
      multiply_by_weights<Cell, bytes>(in, part);
      for_each_row(in.sizes, part, [&](int64_t first, int64_t last) __attribute__((always_inline)) {
        forward<Cell, float>(multiplied, first, last);
      });
    });
  }
  return kNotSmall;
}

template <class Cell>
Error run(ScalarType dtype, const StepBackwardArguments& in, int64_t begin, int64_t end) {
  if (begin >= end) return nullptr;
  if (in.grad_weights_h == nullptr) {
    return dispatch(dtype, [&](auto scalar) -> Error {
      vectorize([&]() __attribute__((always_inline)) { backward<Cell, decltype(scalar)>(in, begin, end); });
      return nullptr;
    });
  }
  if constexpr (kHasOneGradient<Cell>) {
    if (dtype != ScalarType::Float) return kNotSmall;
    const auto* const gradients = static_cast<const float*>(in.grad_x);
    const auto& [batch, features, units] = in.sizes;
    return try_vectorize_with_width([&](auto bytes) __attribute__((always_inline)) {
      const Part part{begin, end};
      for_each_row(in.sizes, part, [&](int64_t first, int64_t last) __attribute__((always_inline)) {
        backward<Cell, float>(in, first, last);
      });
      multiply_gradients<Cell, bytes>(
          in.sizes, part, gradients, in.h_0, units, in.grad_weights_h, in.grad_weights_h_stride);
      multiply_gradients<Cell, bytes>(
          in.sizes, part, gradients, in.input, features, in.grad_weights_x, in.grad_weights_x_stride);
      sum_rows<Cell>(in.sizes, part, gradients, in.grad_bias_x, in.grad_bias_h);
    });
  }
  return kNotSmall;
}

}  // namespace extops::cpu::step

#define EXTOPS_DEFINE_STEP_CPU(cell, Cell)                                                                       \
  int64_t extops_##cell##_step_alignment_cpu(ScalarType dtype, const StepSizes& sizes, StepPart) {               \
    return extops::cpu::step::is_small<Cell>(dtype, sizes);                                                      \
  }                                                                                                              \
  Error extops_##cell##_step_cpu(ScalarType dtype, const StepArguments& arguments, int64_t begin, int64_t end) { \
    return with_step<Cell>(                                                                                      \
        [&](auto cell) { return extops::cpu::step::run<decltype(cell)>(dtype, arguments, begin, end); });        \
  }                                                                                                              \
  Error extops_##cell##_step_backward_cpu(                                                                       \
      ScalarType dtype, const StepBackwardArguments& arguments, int64_t begin, int64_t end) {                    \
    return with_step<Cell>(                                                                                      \
        [&](auto cell) { return extops::cpu::step::run<decltype(cell)>(dtype, arguments, begin, end); });        \
  }
