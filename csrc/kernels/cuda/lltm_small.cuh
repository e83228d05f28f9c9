// The LLTM cell of small problems: product and pointwise part in one kernel, forward and backward. A library's product
// is bound by latency there: what counts are many loads in flight and few kernels.
//
// X stands for [old_h | input], which is never made: a column below state_size is old_h's, the others are input's.

#pragma once

#include "../lltm.h"
#include "hopper.cuh"
#include "lltm_problem.cuh"

// Named, not anonymous: nvcc would put the path of this file into the kernels' names, and no two builds be the same.
namespace extops::cuda {

// ---- forward: a warp computes one unit for a few rows; its lanes split K, the columns of X ----

constexpr int kForwardWarps = 4;

// A lane loads `kDepth` vectors of neighbouring columns before it uses the first.
template <int kRows_, int kVector_, int kDepth_>
struct SmallForwardTile {
  static constexpr int kRows = kRows_;
  static constexpr int kVector = kVector_;
  static constexpr int kDepth = kDepth_;
};

template <class T, class Tile>
__global__ void __launch_bounds__(32 * kForwardWarps) lltm_kernel(CellForward<T> in) {
  constexpr int kForwardRows = Tile::kRows;
  constexpr int kForwardDepth = Tile::kDepth;
  constexpr int kVector = Tile::kVector;
  using V = Vector<T, kVector>;
  using C = typename Compute<T>::type;
  const Sizes sizes = in.sizes;
  // No store touches what is loaded: `__restrict__` tells the compiler, which may then move loads up. Not on the
  // inputs, where it would allow non-coherent loads: see wait_for_previous_kernel.
  const T* const input = in.input;
  const T* const weights = in.weights;
  const T* const old_h = in.old_h;
  T* __restrict__ const gates = in.gates;
  T* __restrict__ const new_h = in.new_h;
  T* __restrict__ const new_cell = in.new_cell;
  wait_for_previous_kernel();
  const int lane = threadIdx.x % 32;
  const int state_size = sizes.state_size;
  const int columns = sizes.columns();
  const int unit = blockIdx.y * kForwardWarps + threadIdx.x / 32;
  if (unit >= state_size) return;
  const int row = blockIdx.x * kForwardRows + lane % kForwardRows;  // that this lane finishes
  const bool finishes = lane < kForwardRows && row < sizes.batch;
  const int64_t cell = int64_t{row} * state_size + unit;

  // Loads for the epilogue are issued before the loop, so that they arrive meanwhile.
  C gate_bias[3] = {};
  C old_c = 0;
  if (finishes) {
#pragma unroll
    for (int g = 0; g < 3; ++g) gate_bias[g] = load(in.bias[g * state_size + unit]);
    old_c = load(in.old_cell[cell]);
  }

  C sums[kForwardRows][3] = {};
  for (int k0 = lane * kVector; k0 < columns; k0 += 32 * kVector * kForwardDepth) {
    V w[kForwardDepth][3] = {};
    V x[kForwardDepth][kForwardRows] = {};
#pragma unroll
    for (int d = 0; d < kForwardDepth; ++d) {
      const int k = k0 + 32 * kVector * d;
      const bool inside = k < columns;
#pragma unroll
      for (int g = 0; g < 3; ++g) {
        if (inside) w[d][g] = *reinterpret_cast<const V*>(weights + int64_t{g * state_size + unit} * columns + k);
      }
#pragma unroll
      for (int r = 0; r < kForwardRows; ++r) {
        const int64_t at = blockIdx.x * kForwardRows + r;
        const T* from =
            k < state_size ? old_h + at * state_size + k : input + at * sizes.input_features + (k - state_size);
        if (inside && at < sizes.batch) x[d][r] = *reinterpret_cast<const V*>(from);
      }
    }
#pragma unroll
    for (int d = 0; d < kForwardDepth; ++d) {
#pragma unroll
      for (int r = 0; r < kForwardRows; ++r) {
#pragma unroll
        for (int g = 0; g < 3; ++g) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) sums[r][g] += load(x[d][r].values[i]) * load(w[d][g].values[i]);
        }
      }
    }
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
    for (int r = 0; r < kForwardRows; ++r) {
#pragma unroll
      for (int g = 0; g < 3; ++g) sums[r][g] += __shfl_xor_sync(0xffffffffu, sums[r][g], offset);
    }
  }
  if (!finishes) return;
  C kept[3];
#pragma unroll
  for (int g = 0; g < 3; ++g) {
    C sum = sums[0][g];
#pragma unroll
    for (int r = 1; r < kForwardRows; ++r) sum = lane == r ? sums[r][g] : sum;
    T rounded;
    store(rounded, sum + gate_bias[g]);
    gates[int64_t{row} * 3 * state_size + g * state_size + unit] = rounded;
    kept[g] = load(rounded);  // as the backward will see it
  }
  const CellState<C> state = cell_forward<Lltm, MathOf<T>>(kept, old_c);
  store(new_cell[cell], state.c);
  store(new_h[cell], state.h);
}

template <class Tile, class T>
Error launch_small(const CellForward<T>& in, cudaStream_t stream) {
  const dim3 grid(ceil_div(in.sizes.batch, Tile::kRows), ceil_div(in.sizes.state_size, kForwardWarps));
  launch(&lltm_kernel<T, Tile>, {grid, 32 * kForwardWarps}, stream, in);
  return launch_error();
}

// ---- backward of the parameters: a block computes a few units' rows of grad_weights for some columns ----

constexpr int kBackwardUnits = 4;
constexpr int kBackwardSums = 3 * kBackwardUnits;  // of a thread
constexpr int kBackwardRows = 64;                  // of the batch, in shared memory at a time
constexpr int kBackwardSplits = 4;                 // of a long batch, among the blocks of a cluster

// Fills `shared` with the gradients of some rows of gates as they are stored, rounded to T; the first column of
// blocks stores them.
template <class T, class C>
__device__ void load_gate_gradients(
    const CellBackward<T>& in, int first_row, int end, int first_unit, C (&shared)[kBackwardRows][3][kBackwardUnits]) {
  const int state_size = in.sizes.state_size;
  for (int item = threadIdx.x; item < kBackwardRows * kBackwardUnits; item += blockDim.x) {
    const int u = item % kBackwardUnits;
    const int r = item / kBackwardUnits;
    const int row = first_row + r;
    const int unit = first_unit + u;
    T rounded[3];
    if (row < end && unit < state_size) {
      const int64_t at = int64_t{row} * 3 * state_size + unit;
      const int64_t cell = int64_t{row} * state_size + unit;
      C gates[3], gradients[3];
      for (int g = 0; g < 3; ++g) gates[g] = load(in.gates[at + g * state_size]);
      C grad_c = in.grad_cell.at(row, unit);
      lltm_backward<MathOf<T>>(gates, C(load(in.new_cell[cell])), in.grad_h.at(row, unit), grad_c, gradients);
      for (int g = 0; g < 3; ++g) store(rounded[g], gradients[g]);
      if (blockIdx.x == 0) {
        for (int g = 0; g < 3; ++g) in.grad_gates[at + g * state_size] = rounded[g];
        store(in.grad_old_cell[cell], grad_c);
      }
    } else {
      for (int g = 0; g < 3; ++g) store(rounded[g], C(0));
    }
    for (int g = 0; g < 3; ++g) shared[r][g][u] = load(rounded[g]);
  }
}

template <class T, bool kSplits>
__global__ void __launch_bounds__(kThreads) lltm_backward_kernel(CellBackward<T> in) {
  using C = typename Compute<T>::type;
  __shared__ __align__(16) C gradients[kBackwardRows][3][kBackwardUnits];
  wait_for_previous_kernel();
  const int state_size = in.sizes.state_size;
  const int columns = in.sizes.columns();
  const int first_unit = blockIdx.y * kBackwardUnits;
  const int k = blockIdx.x * kThreads + threadIdx.x;
  const bool from_h = k < state_size;
  const T* x = from_h ? in.old_h + k : in.input + (k - state_size);
  const int64_t x_stride = from_h ? state_size : in.sizes.input_features;
  const bool sums_bias = blockIdx.x == 0 && threadIdx.x < kBackwardSums;
  const int part = kSplits ? (in.sizes.batch + kBackwardSplits - 1) / kBackwardSplits : in.sizes.batch;
  const int begin = kSplits ? part * blockIdx.z : 0;
  const int end = min(in.sizes.batch, begin + part);
  C sums[3][kBackwardUnits] = {};
  C bias_sum = 0;
  for (int first_row = begin; first_row < end; first_row += kBackwardRows) {
    __syncthreads();
    load_gate_gradients(in, first_row, end, first_unit, gradients);
    __syncthreads();
    const int rows = min(end - first_row, kBackwardRows);
    if (k < columns) {
#pragma unroll 8
      for (int r = 0; r < rows; ++r) {
        const C value = load(x[(first_row + r) * x_stride]);
#pragma unroll
        for (int g = 0; g < 3; ++g) {
#pragma unroll
          for (int u = 0; u < kBackwardUnits; ++u) sums[g][u] += value * gradients[r][g][u];
        }
      }
    }
    if (sums_bias) {
      // A sum for each tile: the error of a single one would grow with the batch.
      C sum = 0;
      for (int r = 0; r < rows; ++r) sum += (&gradients[r][0][0])[threadIdx.x];
      bias_sum += sum;
    }
  }
  const auto store_weight = [&](int g, int u, C sum) {
    const int64_t weight_row = int64_t{g} * state_size + first_unit + u;
    if (k < columns && first_unit + u < state_size) store(in.grad_weights[weight_row * columns + k], sum);
  };
  const auto store_bias = [&](C sum) {
    const int unit = first_unit + static_cast<int>(threadIdx.x) % kBackwardUnits;
    const int gate = static_cast<int>(threadIdx.x) / kBackwardUnits;
    if (sums_bias && unit < state_size) store(in.grad_bias[gate * state_size + unit], sum);
  };
  if constexpr (!kSplits) {
#pragma unroll
    for (int g = 0; g < 3; ++g) {
#pragma unroll
      for (int u = 0; u < kBackwardUnits; ++u) store_weight(g, u, sums[g][u]);
    }
    store_bias(bias_sum);
  } else {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    // Each block of the cluster adds up the sums of one unit; the first also those of the bias.
    static_assert(kBackwardUnits == kBackwardSplits);
    extern __shared__ __align__(16) unsigned char shared[];
    auto* const partial = reinterpret_cast<C(*)[kThreads]>(shared);
#pragma unroll
    for (int g = 0; g < 3; ++g) {
#pragma unroll
      for (int u = 0; u < kBackwardUnits; ++u) partial[u * 3 + g][threadIdx.x] = sums[g][u];
    }
    partial[kBackwardSums][threadIdx.x] = bias_sum;
    sync_cluster();
    const auto add_up = [&](int i) {
      C sum = 0;
#pragma unroll
      for (int block = 0; block < kBackwardSplits; ++block) sum += *peer_pointer(&partial[i][threadIdx.x], block);
      return sum;
    };
    const int u = blockIdx.z;
#pragma unroll
    for (int g = 0; g < 3; ++g) store_weight(g, u, add_up(u * 3 + g));
    if (u == 0) store_bias(add_up(kBackwardSums));
    sync_cluster();  // no block may end while others read from it
#endif
  }
}

template <class T>
Error launch_small(const CellBackward<T>& in, cudaStream_t stream) {
  dim3 grid(ceil_div(in.sizes.columns(), kThreads), ceil_div(in.sizes.state_size, kBackwardUnits));
  const auto splits_fit = [&] {
    const auto multiprocessors = static_cast<unsigned>(device_attribute(cudaDevAttrMultiProcessorCount));
    return grid.x * grid.y * kBackwardSplits <= multiprocessors && has_hopper_tensor_cores();
  };
  if (in.sizes.batch <= kBackwardRows || !splits_fit()) {
    launch(&lltm_backward_kernel<T, false>, {grid, kThreads}, stream, in);
  } else {
    grid.z = kBackwardSplits;
    const unsigned shared_bytes = (kBackwardSums + 1) * kThreads * sizeof(typename Compute<T>::type);
    launch(&lltm_backward_kernel<T, true>, {grid, kThreads, shared_bytes, {1, 1, kBackwardSplits}}, stream, in);
  }
  return launch_error();
}

// ---- backward of the inputs, float32: a block computes 32 columns of grad_X for a few rows; its warps split K ----

constexpr int kInputRows = 2;
constexpr int kInputWarps = 16;
constexpr int kInputDepth = 8;  // rows of weights that a lane loads before it uses the first

__global__ void __launch_bounds__(32 * kInputWarps) lltm_input_backward_kernel(
    Sizes sizes, const float* grad_gates, const float* weights, float* __restrict__ grad_old_h,
    float* __restrict__ grad_input) {
  __shared__ float partial[kInputWarps][kInputRows][32];
  wait_for_previous_kernel();
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int columns = sizes.columns();
  // A grid of one dimension: the others end at 65535.
  const int column_blocks = (columns + 31) / 32;
  const int k = static_cast<int>(blockIdx.x) % column_blocks * 32 + lane;
  const int first_row = static_cast<int>(blockIdx.x) / column_blocks * kInputRows;
  const int weight_rows = 3 * sizes.state_size;
  float sums[kInputRows] = {};
  for (int weight_row0 = warp; weight_row0 < weight_rows; weight_row0 += kInputWarps * kInputDepth) {
    float w[kInputDepth];
    float gradients[kInputDepth][kInputRows];
#pragma unroll
    for (int d = 0; d < kInputDepth; ++d) {
      const int weight_row = weight_row0 + kInputWarps * d;
      w[d] = weight_row < weight_rows && k < columns ? weights[int64_t{weight_row} * columns + k] : 0.f;
#pragma unroll
      for (int r = 0; r < kInputRows; ++r) {
        const bool inside = weight_row < weight_rows && first_row + r < sizes.batch;
        gradients[d][r] = inside ? grad_gates[int64_t{first_row + r} * weight_rows + weight_row] : 0.f;
      }
    }
#pragma unroll
    for (int d = 0; d < kInputDepth; ++d) {
#pragma unroll
      for (int r = 0; r < kInputRows; ++r) sums[r] += gradients[d][r] * w[d];
    }
  }
#pragma unroll
  for (int r = 0; r < kInputRows; ++r) partial[warp][r][lane] = sums[r];
  __syncthreads();
  const int row = first_row + warp;
  if (warp >= kInputRows || row >= sizes.batch || k >= columns) return;
  float total = 0;
#pragma unroll
  for (int share = 0; share < kInputWarps; ++share) total += partial[share][warp][lane];
  if (k < sizes.state_size) {
    grad_old_h[int64_t{row} * sizes.state_size + k] = total;
  } else {
    grad_input[int64_t{row} * sizes.input_features + (k - sizes.state_size)] = total;
  }
}

// ---- backward of the bias: a block sums 32 columns of grad_gates, its warps some rows each ----

constexpr int kSumWarps = 32;
constexpr int kSumDepth = 4;  // rows that a lane loads before it uses the first

template <class T>
__global__ void __launch_bounds__(32 * kSumWarps)
    lltm_bias_backward_kernel(int64_t rows, int64_t columns, const T* grad_gates, T* __restrict__ grad_bias) {
  using C = typename Compute<T>::type;
  __shared__ C partial[kSumWarps][32];
  wait_for_previous_kernel();
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int64_t column = int64_t{blockIdx.x} * 32 + lane;
  C sum = 0;
  for (int64_t first = warp; first < rows; first += kSumWarps * kSumDepth) {
    C values[kSumDepth];
#pragma unroll
    for (int d = 0; d < kSumDepth; ++d) {
      const int64_t row = first + d * kSumWarps;
      values[d] = row < rows && column < columns ? load(grad_gates[row * columns + column]) : C(0);
    }
#pragma unroll
    for (C value : values) sum += value;
  }
  partial[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || column >= columns) return;
  for (int other = 1; other < kSumWarps; ++other) sum += partial[other][lane];
  store(grad_bias[column], sum);
}

}  // namespace extops::cuda
