// The LLTM cell of small problems in float32, GEMM and pointwise part in one call. A library GEMM of that size spends
// most of its time on choosing a kernel and packing operands.
#include <vector>

#include "../lltm.h"
#include "lltm_pointwise.h"
#include "vectorize.h"

namespace extops::cpu {
namespace {

using Sizes = LltmSizes;

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
template <int kRows, class Body>
[[gnu::always_inline]] inline void for_each_tile(const Sizes& sizes, const Part& part, const Body& body) {
  const int64_t count = part.end - part.begin;
  for (int64_t line = part.begin; line < 3 * sizes.state_size; line += sizes.state_size) {
    if (count < kRows) {
      for (int64_t first = 0; first < count; ++first) body(std::integral_constant<int, 1>{}, line + first);
    } else {
      for (int64_t first = 0; first < count; first += kRows) {
        body(std::integral_constant<int, kRows>{}, line + std::min(first, count - kRows));
      }
    }
  }
}

// gates = [old_h | input] weights^T. A vector holds one column for as many rows of the batch as it has lanes.
template <int kBytes>
[[gnu::always_inline]] inline void multiply_by_weights(
    const Sizes& sizes, const Part& part, const float* input, const float* weights, const float* old_h, float* gates) {
  constexpr int kLanes = kBytes / sizeof(float);
  constexpr int kLines = 8;
  const int64_t columns = sizes.columns();
  std::vector<float> transposed(columns * kLanes);
  for (int64_t first_row = 0; first_row < sizes.batch; first_row += kLanes) {
    const int64_t rows = std::min<int64_t>(kLanes, sizes.batch - first_row);
    for (int64_t r = 0; r < rows; ++r) {
      const float* h = old_h + (first_row + r) * sizes.state_size;
      const float* x = input + (first_row + r) * sizes.input_features;
      for (int64_t k = 0; k < sizes.state_size; ++k) transposed[k * kLanes + r] = h[k];
      for (int64_t k = 0; k < sizes.input_features; ++k) transposed[(sizes.state_size + k) * kLanes + r] = x[k];
    }
    for_each_tile<kLines>(sizes, part, [&](auto lines, int64_t line) __attribute__((always_inline)) {
      float tile[lines * kLanes];
      multiply_long_tile<lines, 1, kBytes>(
          columns, weights + line * columns, columns, 1, transposed.data(), kLanes, tile, kLanes);
      for (int64_t r = 0; r < rows; ++r) {
        float* __restrict to = gates + (first_row + r) * 3 * sizes.state_size + line;
        for (int l = 0; l < lines; ++l) to[l] = tile[l * kLanes + r];
      }
    });
  }
}

// grad_weights = grad_gates^T [old_h | input]. A vector holds neighbouring columns of one line.
template <int kBytes>
[[gnu::always_inline]] inline void multiply_gradients(
    const Sizes& sizes, const Part& part, const float* input, const float* old_h, const float* grad_gates,
    float* grad_weights) {
  constexpr int kLanes = kBytes / sizeof(float);
  constexpr int kLines = kBytes == 64 ? 8 : 4;
  constexpr int kVectors = kBytes == 64 ? 2 : 3;
  const int64_t columns = sizes.columns();
  const int64_t padded = (columns + kLanes - 1) / kLanes * kLanes;
  std::vector<float> joined(sizes.batch * padded);
  for (int64_t r = 0; r < sizes.batch; ++r) {
    float* __restrict to = joined.data() + r * padded;
    for (int64_t k = 0; k < sizes.state_size; ++k) to[k] = old_h[r * sizes.state_size + k];
    to += sizes.state_size;
    for (int64_t k = 0; k < sizes.input_features; ++k) to[k] = input[r * sizes.input_features + k];
  }
  for_each_tile<kLines>(sizes, part, [&](auto lines, int64_t line) __attribute__((always_inline)) {
    const float* factors = grad_gates + line;
    float* to = grad_weights + line * columns;
    int64_t column = 0;
    for (; column + kVectors * kLanes <= columns; column += kVectors * kLanes) {
      multiply_long_tile<lines, kVectors, kBytes>(
          sizes.batch, factors, 1, 3 * sizes.state_size, joined.data() + column, padded, to + column, columns);
    }
    for (; column < columns; column += kLanes) {
      float tile[lines * kLanes];
      multiply_long_tile<lines, 1, kBytes>(
          sizes.batch, factors, 1, 3 * sizes.state_size, joined.data() + column, padded, tile, kLanes);
      const int64_t count = std::min<int64_t>(kLanes, columns - column);
      for (int l = 0; l < lines; ++l) std::copy_n(tile + l * kLanes, count, to + l * columns + column);
    }
  });
}

[[gnu::always_inline]] inline void sum_rows(const Sizes& sizes, const Part& part, const float* from, float* to) {
  const int64_t count = part.end - part.begin;
  std::vector<double> sums(count);
  for (int64_t line = part.begin; line < 3 * sizes.state_size; line += sizes.state_size) {
    std::fill(sums.begin(), sums.end(), 0);
    for (int64_t r = 0; r < sizes.batch; ++r) {
      for (int64_t k = 0; k < count; ++k) sums[k] += from[r * 3 * sizes.state_size + line + k];
    }
    for (int64_t k = 0; k < count; ++k) to[line + k] = static_cast<float>(sums[k]);
  }
}

constexpr Error kOnlyFloat32 = "the kernel for small problems takes float32";

// Where this is faster than oneDNN and MKL, as measured on a CPU with AVX-512. With few rows most lanes of a vector are
// empty, which pays off only for very small GEMMs. Not where a size is zero: another may be huge.
bool is_small(ScalarType dtype, const Sizes& sizes) {
  const auto& [batch, input_features, state_size] = sizes;
  constexpr int64_t kRows = 16;
  const int64_t padded_batch = (batch + kRows - 1) / kRows * kRows;
  const double multiplications = 3.0 * padded_batch * state_size * (state_size + input_features);
  const double limit = 4 * batch >= padded_batch ? 4e6 : 6e4;
  return dtype == ScalarType::Float && multiplications > 0 && multiplications < limit;
}

}  // namespace
}  // namespace extops::cpu

using namespace extops::cpu;

int64_t extops_lltm_alignment_cpu(ScalarType dtype, const LltmSizes& sizes) { return is_small(dtype, sizes); }

int64_t extops_lltm_backward_alignment_cpu(ScalarType dtype, const LltmSizes& sizes) { return is_small(dtype, sizes); }

Error extops_lltm_cpu(ScalarType dtype, const LltmForward& in, int64_t begin, int64_t end) {
  if (dtype != ScalarType::Float) return kOnlyFloat32;
  auto* const gates = static_cast<float*>(in.gates);
  return try_vectorize_with_width([&](auto bytes) __attribute__((always_inline)) {
    multiply_by_weights<bytes>(
        in.sizes, Part{begin, end}, static_cast<const float*>(in.input), static_cast<const float*>(in.weights),
        static_cast<const float*>(in.old_h), gates);
    const int64_t state_size = in.sizes.state_size;
    for (int64_t row = 0; row < in.sizes.batch; ++row) {
      lltm_forward(
          state_size, static_cast<const float*>(in.bias), gates, static_cast<const float*>(in.old_cell),
          static_cast<float*>(in.new_h), static_cast<float*>(in.new_cell), row * state_size + begin,
          row * state_size + end);
    }
  });
}

Error extops_lltm_backward_cpu(ScalarType dtype, const LltmBackward& in, int64_t begin, int64_t end) {
  if (dtype != ScalarType::Float) return kOnlyFloat32;
  const Gradient<float> grad_h(in.grad_h);
  const Gradient<float> grad_cell(in.grad_cell);
  auto* const grad_gates = static_cast<float*>(in.grad_gates);
  return try_vectorize_with_width([&](auto bytes) __attribute__((always_inline)) {
    const Part part{begin, end};
    const int64_t state_size = in.sizes.state_size;
    for (int64_t row = 0; row < in.sizes.batch; ++row) {
      lltm_backward(
          state_size, grad_h, grad_cell, static_cast<const float*>(in.gates), static_cast<const float*>(in.new_cell),
          grad_gates, static_cast<float*>(in.grad_old_cell), row * state_size + begin, row * state_size + end);
    }
    multiply_gradients<bytes>(
        in.sizes, part, static_cast<const float*>(in.input), static_cast<const float*>(in.old_h), grad_gates,
        static_cast<float*>(in.grad_weights));
    sum_rows(in.sizes, part, grad_gates, static_cast<float*>(in.grad_bias));
  });
}
