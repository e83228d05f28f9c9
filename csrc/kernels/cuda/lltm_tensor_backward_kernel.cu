// The LLTM cell's backward for the parameters in 16-bit types, by the tensor cores of Hopper GPUs:
//
//   grad_weights = grad_gates^T [old_h | input]
//
// A pointwise kernel fills grad_gates; by programmatic dependent launch the blocks of a second kernel start meanwhile
// and load their columns of X = [old_h | input], which is never made. Both operands of wgmma are read as they lie in
// memory: TMA brings tiles of 64 rows of the batch, which are the K dimension, and the descriptors transpose them.
#include "../lltm.h"
#include "hopper.cuh"
#include "lltm_problem.cuh"
#include "lltm_tensor_backward.cuh"

// Named, not anonymous: nvcc would put the path of this file into the kernels' names, and no two builds be the same.
namespace extops::cuda {

// A block computes the rows of grad_weights of 64 units, a warpgroup each gate's, for some columns.
constexpr int kGates = 3;
constexpr int kTileRows = 64;  // of the batch: a K tile
constexpr int kTileBytes = kTileRows * kTileRowBytes;
constexpr int kAccumulatorColumns = 128;

template <int kColumns_, int kStages_>
struct BackwardTile {
  static constexpr int kColumns = kColumns_;
  static constexpr int kStages = kStages_;
  static constexpr int kAccumulators = kColumns / kAccumulatorColumns;
  static constexpr int kColumnTiles = kColumns * 2 / kTileRowBytes;
  static constexpr int kStageBytes = (kGates + kColumnTiles) * kTileBytes;
  static constexpr int kSharedBytes = kTileAlignment + kStages * kStageBytes;
};

struct BackwardMaps {
  CUtensorMap grad_gates;
  CUtensorMap old_h;
  CUtensorMap input;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <int kStages>
struct BackwardBarriers {
  Mbarrier full[kStages];
  Mbarrier empty[kStages];
};

// Copies the K tile's columns of X.
template <class T, class Tile>
__device__ void load_columns(
    const Sizes& sizes, const BackwardMaps& maps, int k_tile, uint32_t stage, const Mbarrier& full) {
  const int row = k_tile * kTileRows;
  unrolled<Tile::kColumnTiles>([&](int tile) {
    const int column = blockIdx.x * Tile::kColumns + tile * kTileColumns<T>;
    const uint32_t to = stage + (kGates + tile) * kTileBytes;
    // A tile is old_h's or input's: state_size is a multiple of its width. Beyond both, TMA fills in zeros.
    if (column < sizes.state_size || sizes.input_features == 0) {
      tma_load(to, maps.old_h, column, row, full);
    } else {
      tma_load(to, maps.input, column - sizes.state_size, row, full);
    }
  });
}

// Copies the K tile's gradients of the block's units.
__device__ inline void load_gradients(
    const Sizes& sizes, const BackwardMaps& maps, int k_tile, uint32_t stage, const Mbarrier& full) {
  unrolled<kGates>([&](int gate) {
    const int column = gate * sizes.state_size + static_cast<int>(blockIdx.y) * kBlockUnits;
    tma_load(stage + gate * kTileBytes, maps.grad_gates, column, k_tile * kTileRows, full);
  });
}

// Fills the stages for the first time. Of grad_gates only what the previous kernel has written, which it waits for.
template <class T, class Tile>
__device__ void fill_stages(
    const Sizes& sizes, const BackwardMaps& maps, int k_tiles, uint32_t stages,
    BackwardBarriers<Tile::kStages>& barriers) {
  const int count = min(k_tiles, Tile::kStages);
  for (int k_tile = 0; k_tile < count; ++k_tile) {
    barriers.full[k_tile].arrive_expect_tx(Tile::kStageBytes);
    load_columns<T, Tile>(sizes, maps, k_tile, stages + k_tile * Tile::kStageBytes, barriers.full[k_tile]);
  }
  wait_for_previous_kernel();
  for (int k_tile = 0; k_tile < count; ++k_tile) {
    load_gradients(sizes, maps, k_tile, stages + k_tile * Tile::kStageBytes, barriers.full[k_tile]);
  }
}

// Fills the stage of a K tile that is done with, once every warp has said so.
template <class T, class Tile>
__device__ void refill_stage(
    const Sizes& sizes, const BackwardMaps& maps, int done, int k_tiles, uint32_t stages,
    BackwardBarriers<Tile::kStages>& barriers) {
  const int k_tile = done + Tile::kStages;
  if (k_tile >= k_tiles) return;
  const int stage = done % Tile::kStages;
  const uint32_t to = stages + stage * Tile::kStageBytes;
  barriers.empty[stage].wait(done / Tile::kStages);
  barriers.full[stage].arrive_expect_tx(Tile::kStageBytes);
  load_columns<T, Tile>(sizes, maps, k_tile, to, barriers.full[stage]);
  load_gradients(sizes, maps, k_tile, to, barriers.full[stage]);
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

// Epilogue: writes a warpgroup's 64 rows of grad_weights for 128 columns, 16 bytes a lane.
template <class T>
__device__ void store_rows(
    const CellBackward<T>& in, int gate, int first_column, Accumulator<kAccumulatorColumns>& sums) {
  constexpr int kGroups = 4;  // of eight columns, that a quad exchanges
  const Sizes sizes = in.sizes;
  const int lane = threadIdx.x % 32;
  unrolled<2>([&](int half) {
    const int unit = blockIdx.y * kBlockUnits + threadIdx.x % kWarpgroup / 32 * 16 + half * 8 + lane / 4;
    T* const to = in.grad_weights + (int64_t{gate} * sizes.state_size + unit) * sizes.columns();
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
      if (column < sizes.columns()) {
        *reinterpret_cast<uint4*>(to + column) = {pairs[0], pairs[1], pairs[2], pairs[3]};
      }
    }
  });
}

// Adds a thread's rows of a K tile, from shared memory. The product runs meanwhile.
template <class T>
__device__ float sum_rows(const BiasColumn& bias, uint32_t gradients) {
  float sum = 0;
  if (!bias.exists) return sum;
  const uint32_t tile = gradients + bias.gradient / kBlockUnits * kTileBytes;
  const int byte = bias.gradient % kBlockUnits * static_cast<int>(sizeof(T));
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

// Returns the thread's sum for grad_bias.
template <class T, class Tile>
__device__ float consume(
    const CellBackward<T>& in, const BackwardMaps& maps, int k_tiles, uint32_t stages,
    BackwardBarriers<Tile::kStages>& barriers, const BiasColumn& bias) {
  float bias_sum = 0;
  const int gate = threadIdx.x / kWarpgroup;
  Accumulator<kAccumulatorColumns> sums[Tile::kAccumulators];
  for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
    const int stage = k_tile % Tile::kStages;
    barriers.full[stage].wait(k_tile / Tile::kStages);
    const uint32_t gradients = stages + stage * Tile::kStageBytes;
    wgmma_fence();
    unrolled<Tile::kAccumulators>([&](int i) {
      const uint32_t columns = gradients + (kGates + i * kAccumulatorColumns / kTileColumns<T>)*kTileBytes;
      multiply_transposed_tiles<T, kTileRows>(sums[i], gradients + gate * kTileBytes, columns, k_tile > 0);
    });
    wgmma_commit();
    bias_sum += sum_rows<T>(bias, gradients);
    __syncwarp();
    if (k_tile > 0) {
      wgmma_wait<1>();
      if (threadIdx.x % 32 == 0) barriers.empty[(k_tile - 1) % Tile::kStages].arrive();
      if (threadIdx.x == 0) refill_stage<T, Tile>(in.sizes, maps, k_tile - 1, k_tiles, stages, barriers);
    }
  }
#pragma unroll
  for (Accumulator<kAccumulatorColumns>& each : sums) wgmma_wait<0>(each);
  unrolled<Tile::kAccumulators>(
      [&](int i) { store_rows(in, gate, blockIdx.x * Tile::kColumns + i * kAccumulatorColumns, sums[i]); });
  return bias_sum;
}

#endif

// Starts while the pointwise kernel that fills grad_gates runs.
template <class T, class Tile>
__global__ void __launch_bounds__(kBackwardThreads)
    lltm_tensor_backward_kernel(CellBackward<T> in, const EXTOPS_GRID_CONSTANT BackwardMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(kTileAlignment) unsigned char shared[];
  __shared__ BackwardBarriers<Tile::kStages> barriers;
  __shared__ float bias_sums[kBackwardThreads];
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Tile::kStages; ++stage) {
      barriers.full[stage].initialize(1);
      barriers.empty[stage].initialize(kBackwardThreads / 32);
    }
    Mbarrier::publish();
  }
  __syncthreads();
  const uint32_t stages = shared_address(shared);
  const int k_tiles = (in.sizes.batch + kTileRows - 1) / kTileRows;
  if (threadIdx.x == 0) fill_stages<T, Tile>(in.sizes, maps, k_tiles, stages, barriers);
  __syncwarp();
  wait_for_previous_kernel();
  const BiasColumn bias{in.sizes.state_size};
  bias_sums[threadIdx.x] = consume<T, Tile>(in, maps, k_tiles, stages, barriers, bias);
  __syncthreads();
  bias.finish(bias_sums, in.grad_bias);
#endif
}

// ---- how it is launched ----

template <class T, class Tile>
Error launch_tile(const CellBackward<T>& in, cudaStream_t stream) {
  const cuuint64_t batch = in.sizes.batch;
  const cuuint64_t state_size = in.sizes.state_size;
  const cuuint64_t features = in.sizes.input_features;
  BackwardMaps maps{};
  const bool described =
      make_tensor_map<T, 2>(
          maps.grad_gates, map_type<T>(), in.grad_gates, {kGates * state_size, batch},
          {kGates * state_size * sizeof(T)}, kTileRows) &&
      make_tensor_map<T, 2>(
          maps.old_h, map_type<T>(), in.old_h, {state_size, batch}, {state_size * sizeof(T)}, kTileRows) &&
      (features == 0 || make_tensor_map<T, 2>(
                            maps.input, map_type<T>(), in.input, {features, batch}, {features * sizeof(T)}, kTileRows));
  if (!described) return kNoTensorMap;
  constexpr auto kernel = &lltm_tensor_backward_kernel<T, Tile>;
  if (const Error error = allow_shared_memory<kernel>(Tile::kSharedBytes)) return error;
  const dim3 grid(ceil_div(in.sizes.columns(), Tile::kColumns), ceil_div(in.sizes.state_size, kBlockUnits));
  launch(kernel, {grid, kBackwardThreads, Tile::kSharedBytes}, stream, in, maps);
  return launch_error();
}

template <class T>
Error launch_on_tensor_cores(const CellBackward<T>& in, cudaStream_t stream) {
  if (const Error error = launch_cell_backward(in, stream)) return error;
  // The more columns a block has, the less often grad_gates is read: as many as leave work for every multiprocessor.
  return fills_the_device(in.sizes, 256) ? launch_tile<T, BackwardTile<256, 3>>(in, stream)
                                         : launch_tile<T, BackwardTile<128, 4>>(in, stream);
}

template Error launch_on_tensor_cores(const CellBackward<__half>&, cudaStream_t);
template Error launch_on_tensor_cores(const CellBackward<__nv_bfloat16>&, cudaStream_t);

}  // namespace extops::cuda
