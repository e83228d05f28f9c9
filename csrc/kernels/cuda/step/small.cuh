// One step of small problems, both GEMMs and the pointwise part in one kernel. Library GEMMs are bound by latency
// there, so this kernel keeps many loads in flight, and saves launches.
//
// A warp computes one unit for a few rows; its lanes split K, which runs over h and then over the input.
#pragma once

#include "problem.cuh"

namespace extops::cuda::step {

constexpr int kWarps = 4;

// A lane loads `kDepth` vectors along K before it uses the first.
template <int kRows_, int kVector_, int kDepth_>
struct SmallTile {
  static constexpr int kRows = kRows_;
  static constexpr int kVector = kVector_;
  static constexpr int kDepth = kDepth_;
};

template <class Cell, class T, class Tile>
__global__ void __launch_bounds__(32 * kWarps) small_kernel(Forward<Cell, T> in) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kRows = Tile::kRows;
  constexpr int kDepth = Tile::kDepth;
  constexpr int kVector = Tile::kVector;
  constexpr int kWeights = Cell::kInput > Cell::kRecurrent ? Cell::kInput : Cell::kRecurrent;
  using V = Vector<T, kVector>;
  using C = typename Compute<T>::type;
  wait_for_previous_kernel();
  const int lane = threadIdx.x % 32;
  const int state_size = in.state_size;
  const int depth = state_size + in.input_features;
  const int unit = blockIdx.y * kWarps + threadIdx.x / 32;
  if (unit >= state_size) return;
  const int64_t row = int64_t{blockIdx.x} * kRows + lane % kRows;  // that this lane finishes
  const bool finishes = lane < kRows && row < in.batch;

  // Loads for the epilogue are issued before the loop, so that they arrive meanwhile.
  C bias[Cell::kGates] = {};
  C old_c = 0;
  if (finishes) {
#pragma unroll
    for (int g = 0; g < Cell::kGates; ++g) bias[g] = in.bias(g, unit);
    old_c = load(in.c_0[row * state_size + unit]);
  }

  C sums[kRows][Cell::kGates] = {};
  for (int k0 = lane * kVector; k0 < depth; k0 += 32 * kVector * kDepth) {
    V w[kDepth][kWeights] = {};
    V x[kDepth][kRows] = {};
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      const int k = k0 + 32 * kVector * d;
      if (k >= depth) continue;
      const bool of_h = k < state_size;
      const int64_t stride = of_h ? in.weights_h_stride : in.weights_x_stride;
      const T* const weights = of_h ? in.weights_h + k : in.weights_x + (k - state_size);
#pragma unroll
      for (int g = 0; g < kWeights; ++g) {
        if (g < (of_h ? Cell::kRecurrent : Cell::kInput)) {
          w[d][g] = *reinterpret_cast<const V*>(weights + (int64_t{g} * state_size + unit) * stride);
        }
      }
      const T* const from = of_h ? in.h_0 + k : in.input + (k - state_size);
      const int row_stride = of_h ? state_size : in.input_features;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int64_t at = int64_t{blockIdx.x} * kRows + r;
        if (at < in.batch) x[d][r] = *reinterpret_cast<const V*>(from + at * row_stride);
      }
    }
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      const bool of_h = k0 + 32 * kVector * d < state_size;
#pragma unroll
      for (int g = 0; g < Cell::kGates; ++g) {
        const int of_recurrent = g - kFirstRecurrent<Cell>;
        // A gate without a part in this GEMM adds nothing.
        if (of_h ? of_recurrent < 0 : g >= Cell::kInput) continue;
        const V& weights = w[d][of_h ? (of_recurrent < 0 ? 0 : of_recurrent) : input_place<Cell>(g)];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) sums[r][g] += load(x[d][r].values[i]) * load(weights.values[i]);
        }
      }
    }
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int g = 0; g < Cell::kGates; ++g) sums[r][g] += __shfl_xor_sync(0xffffffffu, sums[r][g], offset);
    }
  }
  if (!finishes) return;
  C gates[Cell::kGates];
#pragma unroll
  for (int g = 0; g < Cell::kGates; ++g) {
    C sum = sums[0][g];
#pragma unroll
    for (int r = 1; r < kRows; ++r) sum = lane == r ? sums[r][g] : sum;
    gates[g] = sum + bias[g];
  }
  in.template finish<MathOf<T>>(row, unit, gates, old_c);
#endif
}

template <class Tile, class Cell, class T>
Error launch_small_tile(const Forward<Cell, T>& in, cudaStream_t stream) {
  const dim3 grid(
      static_cast<unsigned>((in.batch + Tile::kRows - 1) / Tile::kRows),
      static_cast<unsigned>((in.state_size + kWarps - 1) / kWarps));
  return launch(&small_kernel<Cell, T, Tile>, {grid, 32 * kWarps}, stream, in);
}

// With `are_few_rows` all rows start at a multiple of 16 bytes.
template <class Cell, class T>
Error launch_small(const Forward<Cell, T>& in, bool are_few_rows, cudaStream_t stream) {
  if (are_few_rows) {
    constexpr int kVector = kChunkBytes / sizeof(T);
    if (in.batch == 1) return launch_small_tile<SmallTile<1, kVector, 4>>(in, stream);
    if constexpr (sizeof(T) >= 4) return launch_small_tile<SmallTile<4, kVector, 2>>(in, stream);
  }
  return launch_small_tile<SmallTile<2, 1, 6>>(in, stream);
}

}  // namespace extops::cuda::step
