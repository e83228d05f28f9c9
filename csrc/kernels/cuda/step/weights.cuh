// The gradients of weights and biases in 16-bit types, by the tensor cores of Hopper GPUs, from those of the gates:
//
//   grad_weights = gradients^T * x
//
// of h and of the input in one kernel, the same for every cell. The pointwise kernel computes the gradients; by
// programmatic dependent launch the blocks of this kernel start meanwhile and load their columns of x. wgmma reads both
// operands in their layout in memory: TMA loads tiles of 64 rows of the batch, which is the K dimension, and the
// descriptors transpose them.
#pragma once

#include "weights_gemm.cuh"

namespace extops::cuda::step {

constexpr int kTileRows = 64;  // of the batch: a K tile
constexpr int kTileBytes = kTileRows * kTileRowBytes;
constexpr int kAccumulatorColumns = 128;

template <int kColumns_, int kStages_>
struct WeightsTile {
  static constexpr int kColumns = kColumns_;
  static constexpr int kStages = kStages_;
  static constexpr int kAccumulators = kColumns / kAccumulatorColumns;
  static constexpr int kColumnTiles = kColumns * 2 / kTileRowBytes;
  static constexpr int kStageBytes = (kWarpgroups + kColumnTiles) * kTileBytes;
  static constexpr int kSharedBytes = kTileAlignment + kStages * kStageBytes;
};

struct WeightsMaps {
  CUtensorMap gradients;
  CUtensorMap x;
};

struct AllWeightsMaps {
  WeightsMaps gemms[2];
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <int kStages>
struct WeightsBarriers {
  Mbarrier full[kStages];
  Mbarrier empty[kStages];
};

// Copies the K tile's columns of x. Beyond its edges TMA fills in zeros.
template <class T, class Tile>
__device__ void load_columns(
    const WeightsBlock& block, const WeightsMaps& maps, int k_tile, uint32_t stage, const Mbarrier& full) {
  unrolled<Tile::kColumnTiles>([&](int tile) {
    const uint32_t to = stage + (kWarpgroups + tile) * kTileBytes;
    tma_load(to, maps.x, block.first_column + tile * kTileColumns<T>, k_tile * kTileRows, full);
  });
}

// Copies the K tile's gradients of the block's rows.
__device__ inline void load_gradients(
    const WeightsBlock& block, const WeightsMaps& maps, int k_tile, uint32_t stage, const Mbarrier& full) {
  unrolled<kWarpgroups>([&](int each) {
    const int row = block.first_row() + each * kWarpgroupRows;
    tma_load(stage + each * kTileBytes, maps.gradients, row, k_tile * kTileRows, full);
  });
}

// Fills the stages for the first time. It waits for the previous kernel before it loads the gradients.
template <class T, class Tile>
__device__ void fill_stages(
    const WeightsBlock& block, const WeightsMaps& maps, int k_tiles, uint32_t stages,
    WeightsBarriers<Tile::kStages>& barriers) {
  const int count = min(k_tiles, Tile::kStages);
  for (int k_tile = 0; k_tile < count; ++k_tile) {
    barriers.full[k_tile].arrive_expect_tx(Tile::kStageBytes);
    load_columns<T, Tile>(block, maps, k_tile, stages + k_tile * Tile::kStageBytes, barriers.full[k_tile]);
  }
  wait_for_previous_kernel();
  for (int k_tile = 0; k_tile < count; ++k_tile) {
    load_gradients(block, maps, k_tile, stages + k_tile * Tile::kStageBytes, barriers.full[k_tile]);
  }
}

// Refills the stage of a finished K tile, after every warp has released it.
template <class T, class Tile>
__device__ void refill_stage(
    const WeightsBlock& block, const WeightsMaps& maps, int done, int k_tiles, uint32_t stages,
    WeightsBarriers<Tile::kStages>& barriers) {
  const int k_tile = done + Tile::kStages;
  if (k_tile >= k_tiles) return;
  const int stage = done % Tile::kStages;
  const uint32_t to = stages + stage * Tile::kStageBytes;
  barriers.empty[stage].wait(done / Tile::kStages);
  barriers.full[stage].arrive_expect_tx(Tile::kStageBytes);
  load_columns<T, Tile>(block, maps, k_tile, to, barriers.full[stage]);
  load_gradients(block, maps, k_tile, to, barriers.full[stage]);
}

// Lanes of a quad hold neighbouring pairs of four groups of eight columns; afterwards each has one group's eight. The
// registers are numbered by the group before, by the pair after.
__device__ inline void transpose_quad(uint32_t (&pairs)[4]) {
  const int q = threadIdx.x % 4;
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2) {
    unrolled<4>([&](int i) {
      if (i & distance) return;
      // Of two registers, each lane keeps the one whose number agrees with its own, and swaps the other.
      const bool upper = q & distance;
      const uint32_t received = __shfl_xor_sync(0xffffffffu, upper ? pairs[i] : pairs[i + distance], distance);
      if (upper) {
        pairs[i] = received;
      } else {
        pairs[i + distance] = received;
      }
    });
  }
}

// Epilogue: writes a warpgroup's 64 rows of the gradient for 128 columns, 16 bytes a lane.
template <class T>
__device__ void store_rows(
    const WeightsBackward<T>& all, const WeightsBlock& block, int first_column,
    Accumulator<kAccumulatorColumns>& sums) {
  const WeightsGemm<T> in = block.of(all);
  constexpr int kGroups = 4;  // of eight columns, that a quad exchanges
  const int lane = threadIdx.x % 32;
  unrolled<2>([&](int half) {
    const int row = block.first_row() + threadIdx.x / 32 * 16 + half * 8 + lane / 4;
    T* const to = in.grad_weights + row * in.grad_weights_stride;
#pragma unroll
    for (int j = 0; j < kAccumulatorColumns / 8; j += kGroups) {
      uint32_t pairs[kGroups];
      unrolled<kGroups>([&](int group) {
        Vector<T, 2> pair;
        store(pair.values[0], sums.at(j + group, half, 0));
        store(pair.values[1], sums.at(j + group, half, 1));
        pairs[group] = *reinterpret_cast<const uint32_t*>(&pair);
      });
      transpose_quad(pairs);
      const int column = first_column + 8 * (j + lane % 4);
      if (row < in.rows && column < in.columns) {
        *reinterpret_cast<uint4*>(to + column) = {pairs[0], pairs[1], pairs[2], pairs[3]};
      }
    }
  });
}

// Adds a thread's rows of a K tile, from shared memory. The GEMM runs meanwhile.
template <class T>
__device__ float sum_rows(const BiasColumn& bias, uint32_t gradients) {
  float sum = 0;
  if (!bias.exists) return sum;
  const uint32_t tile = gradients + bias.gradient / kWarpgroupRows * kTileBytes;
  const int byte = bias.gradient % kWarpgroupRows * static_cast<int>(sizeof(T));
#pragma unroll 4
  for (int row = bias.part; row < kTileRows; row += bias.parts) {
    uint16_t bits;
    asm volatile("ld.shared.u16 %0, [%1];"
                 : "=h"(bits)
                 : "r"(tile + row * kTileRowBytes + (byte ^ row % 8 * kChunkBytes)));
    sum += load(reinterpret_cast<const T&>(bits));
  }
  return sum;
}

// Returns the thread's sum for the gradient of the bias.
template <class T, class Tile>
__device__ float consume(
    const WeightsBackward<T>& in, const WeightsBlock& block, const WeightsMaps& maps, int k_tiles, uint32_t stages,
    WeightsBarriers<Tile::kStages>& barriers, const BiasColumn& bias) {
  float bias_sum = 0;
  const int warpgroup = threadIdx.x / kWarpgroup;
  Accumulator<kAccumulatorColumns> sums[Tile::kAccumulators];
  for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
    const int stage = k_tile % Tile::kStages;
    barriers.full[stage].wait(k_tile / Tile::kStages);
    const uint32_t gradients = stages + stage * Tile::kStageBytes;
    wgmma_fence();
    unrolled<Tile::kAccumulators>([&](int i) {
      const uint32_t columns = gradients + (kWarpgroups + i * kAccumulatorColumns / kTileColumns<T>)*kTileBytes;
      multiply_transposed_tiles<T, kTileRows>(sums[i], gradients + warpgroup * kTileBytes, columns, k_tile > 0);
    });
    wgmma_commit();
    bias_sum += sum_rows<T>(bias, gradients);
    __syncwarp();
    if (k_tile > 0) {
      wgmma_wait<1>();
      if (threadIdx.x % 32 == 0) barriers.empty[(k_tile - 1) % Tile::kStages].arrive();
      if (threadIdx.x == 0) refill_stage<T, Tile>(block, maps, k_tile - 1, k_tiles, stages, barriers);
    }
  }
#pragma unroll
  for (Accumulator<kAccumulatorColumns>& each : sums) wgmma_wait<0>(each);
  unrolled<Tile::kAccumulators>(
      [&](int i) { store_rows(in, block, block.first_column + i * kAccumulatorColumns, sums[i]); });
  return bias_sum;
}

#endif

// Starts while the pointwise kernel that fills the gradients runs.
template <class T, class Tile>
__global__ void __launch_bounds__(kWeightsThreads)
    weights_kernel(WeightsBackward<T> in, const EXTOPS_GRID_CONSTANT AllWeightsMaps all_maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(kTileAlignment) unsigned char shared[];
  __shared__ WeightsBarriers<Tile::kStages> barriers;
  __shared__ float bias_sums[kWeightsThreads];
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Tile::kStages; ++stage) {
      barriers.full[stage].initialize(1);
      barriers.empty[stage].initialize(kWeightsThreads / 32);
    }
    Mbarrier::publish();
  }
  __syncthreads();
  const WeightsBlock block(in, Tile::kColumns);
  const WeightsMaps& maps = all_maps.gemms[block.gemm];
  const uint32_t stages = shared_address(shared);
  const int k_tiles = (in.batch + kTileRows - 1) / kTileRows;
  if (threadIdx.x == 0) fill_stages<T, Tile>(block, maps, k_tiles, stages, barriers);
  __syncwarp();
  wait_for_previous_kernel();
  const BiasColumn bias(block.of(in), block);
  bias_sums[threadIdx.x] = consume<T, Tile>(in, block, maps, k_tiles, stages, barriers, bias);
  __syncthreads();
  bias.finish(bias_sums, block, block.of(in).grad_bias);
#endif
}

// ---- how it is launched ----

template <class T, class Tile>
Error launch_weights(const WeightsBackward<T>& in, cudaStream_t stream) {
  AllWeightsMaps maps{};
  for (int i = 0; i < 2; ++i) {
    const WeightsGemm<T>& gemm = in.gemms[i];
    const cuuint64_t rows = gemm.rows, columns = gemm.columns, batch = in.batch;
    constexpr auto kType = map_type<T>();
    if (!make_tensor_map<T, 2>(
            maps.gemms[i].gradients, kType, gemm.gradients, {rows, batch}, {rows * sizeof(T)}, kTileRows) ||
        !make_tensor_map<T, 2>(maps.gemms[i].x, kType, gemm.x, {columns, batch}, {columns * sizeof(T)}, kTileRows)) {
      return kNoTensorMap;
    }
  }
  constexpr auto kernel = &weights_kernel<T, Tile>;
  if (const Error error = allow_shared_memory<kernel>(Tile::kSharedBytes)) return error;
  launch(kernel, {grid_of(in, Tile::kColumns), kWeightsThreads, Tile::kSharedBytes}, stream, in, maps);
  return launch_error();
}

template <class T>
Error launch_weights_backward(const WeightsBackward<T>& in, cudaStream_t stream) {
  // The more columns a block has, the less often the gradients are read: as many as leave work for every SM.
  return fills_the_device(in, 256) ? launch_weights<T, WeightsTile<256, 3>>(in, stream)
                                   : launch_weights<T, WeightsTile<128, 4>>(in, stream);
}

}  // namespace extops::cuda::step
