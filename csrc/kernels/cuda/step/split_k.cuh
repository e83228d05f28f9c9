// One step on Hopper GPUs, both GEMMs and the pointwise part in one kernel, by tensor cores (wgmma): in 16-bit types,
// and in float32 where TF32 is allowed. Library GEMMs would need a second kernel, which reads back what they wrote.
//
// A cluster of blocks computes some units for 64 rows (split-K): K runs over h and then over the input, each block has
// some K tiles of it, and each then adds up the partial sums of some rows and finishes them. Sums are in float32 and
// always in the same order.
#pragma once

#include "../common/hopper.cuh"
#include "problem.cuh"

namespace extops::cuda::step {

inline unsigned ceil_div(int64_t a, int64_t b) { return static_cast<unsigned>((a + b - 1) / b); }

constexpr unsigned kMaxSplits = 4;  // of a sum; a larger cluster costs more than it saves

// How many blocks share K: as many as run at once.
inline unsigned splits_of(unsigned tiles, unsigned k_tiles, unsigned sm_count) {
  unsigned splits = 1;
  for (unsigned more = 2; more <= kMaxSplits && more <= k_tiles; more *= 2) {
    // All blocks of a cluster run in one GPC, so up to a tenth of the SMs may stay idle.
    if (tiles * more <= (more == 2 ? sm_count : sm_count * 9 / 10)) splits = more;
  }
  return splits;
}

constexpr int kWarpRows = kWarpgroupRows / (kWarpgroup / 32);
static_assert(kMaxSplits == kWarpgroupRows / kWarpRows);

// How many blocks share K, and the busy fraction of the device, as the estimated speed.
struct Plan {
  dim3 grid;
  double speed;
};

template <class Cell_, int kRows_, int kUnits_, int kThreads_, int kCellsAtOnce_>
struct ForwardTile {
  using Cell = Cell_;
  static constexpr int kRows = kRows_;
  static constexpr int kUnits = kUnits_;
  static constexpr int kN = Cell::kGates * kUnits;
  static constexpr int kMultipliers = kRows / kWarpgroupRows * kWarpgroup;
  static constexpr int kThreads = kThreads_;           // the first multiply, and the one after them issues the copies
  static constexpr int kCellsAtOnce = kCellsAtOnce_;   // that a thread finishes at a time
  static constexpr int kStages = kRows == 64 ? 6 : 4;  // K tiles in shared memory at a time
  static constexpr int kPitch = kN % 16 == 0 ? kN + 8 : kN;  // no bank conflicts between four rows of sums
  static constexpr int kRowsBytes = kRows * kTileRowBytes;
  static constexpr int kUnitsBytes = kUnits * kTileRowBytes;  // the weights of one gate
  static constexpr int kStageBytes = kRowsBytes + kN * kTileRowBytes;
  static constexpr int kPartialBytes = kRows * kPitch * static_cast<int>(sizeof(float));
  static constexpr int kSharedBytes = kTileAlignment + kStages * kStageBytes + kPartialBytes;

  // Whether a cell has such a tile.
  static constexpr bool kExists = kN <= 128 && kIsWgmmaWidth<kN>;

  static_assert(kUnitsBytes % kTileAlignment == 0);
  static_assert(!kExists || kPartialBytes <= kStages * kStageBytes);
  static_assert(!kExists || kPitch % 32 == 8 || kPitch % 32 == 24);
};

struct ForwardMaps {
  CUtensorMap h_0;
  CUtensorMap input;
  CUtensorMap weights_h;  // [kRecurrent, state_size, state_size]
  CUtensorMap weights_x;  // [kInput, state_size, input_features]
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <int kStages>
struct ForwardBarriers {
  Mbarrier full[kStages];
  Mbarrier empty[kStages];
  Mbarrier sums;
};

// A block's part of the cluster's tile: the K tiles that it multiplies, and the rows that it finishes.
template <class T, class Tile>
struct SplitK {
  int first_row = blockIdx.y * Tile::kRows;
  int first_unit = blockIdx.x * Tile::kUnits;
  int index = blockIdx.z;
  int blocks = gridDim.z;
  int own_rows = Tile::kRows / blocks;
  int h_tiles;  // of all K tiles, the first ones
  int first_k_tile;
  int k_tiles;

  __device__ SplitK(int state_size, int input_features) {
    constexpr int kColumns = kTileColumns<T>;
    h_tiles = (state_size + kColumns - 1) / kColumns;
    const int all = h_tiles + (input_features + kColumns - 1) / kColumns;
    first_k_tile = all * index / blocks;
    k_tiles = all * (index + 1) / blocks - first_k_tile;
  }

  // Whether a K tile of this block is one of h.
  __device__ bool is_of_h(int k_tile) const { return first_k_tile + k_tile < h_tiles; }
  __device__ int k(int k_tile) const {
    return (first_k_tile + k_tile - (is_of_h(k_tile) ? 0 : h_tiles)) * kTileColumns<T>;
  }
};

template <class T, class Tile>
__device__ void load_k_tiles(
    const ForwardMaps& maps, const SplitK<T, Tile>& split, uint32_t stages, ForwardBarriers<Tile::kStages>& barriers) {
  using Cell = typename Tile::Cell;
  for (int k_tile = 0; k_tile < split.k_tiles; ++k_tile) {
    const int stage = k_tile % Tile::kStages;
    Mbarrier& full = barriers.full[stage];
    if (k_tile >= Tile::kStages) barriers.empty[stage].wait(k_tile / Tile::kStages - 1);
    full.arrive_expect_tx(Tile::kStageBytes);
    const uint32_t rows = stages + stage * Tile::kStageBytes;
    const uint32_t weights = rows + Tile::kRowsBytes;
    const int k = split.k(k_tile);
    const bool is_of_h = split.is_of_h(k_tile);
    tma_load(rows, is_of_h ? maps.h_0 : maps.input, k, split.first_row, full);
    if constexpr (kHasOneGradient<Cell>) {
      tma_load(weights, is_of_h ? maps.weights_h : maps.weights_x, k, split.first_unit, 0, full);
    } else {
      // The weights of a gate that has no part in a GEMM are zeros: TMA fills them in beyond the last matrix.
#pragma unroll
      for (int gate = 0; gate < Cell::kGates; ++gate) {
        const int of_h = gate < kFirstRecurrent<Cell> ? Cell::kRecurrent : gate - kFirstRecurrent<Cell>;
        const int of_input = gate < Cell::kInput ? input_place<Cell>(gate) : Cell::kInput;
        tma_load(
            weights + gate * Tile::kUnitsBytes, is_of_h ? maps.weights_h : maps.weights_x, k, split.first_unit,
            is_of_h ? of_h : of_input, full);
      }
    }
  }
}

template <class Tile>
__device__ void sync_multipliers() {
  asm volatile("bar.sync 1, %0;" ::"n"(Tile::kMultipliers) : "memory");
}

template <class T, class Tile>
__device__ void multiply_k_tiles(
    const SplitK<T, Tile>& split, uint32_t stages, ForwardBarriers<Tile::kStages>& barriers,
    Accumulator<Tile::kN>& sums) {
  const auto multiply = [&](int k_tile, bool adds) {
    const int stage = k_tile % Tile::kStages;
    barriers.full[stage].wait(k_tile / Tile::kStages);
    const uint32_t rows = stages + stage * Tile::kStageBytes;
    const uint32_t warpgroup_rows = rows + threadIdx.x / kWarpgroup * kWarpgroupRows * kTileRowBytes;
    wgmma_fence();
    multiply_tiles<T>(sums, warpgroup_rows, rows + Tile::kRowsBytes, adds);
    wgmma_commit();
  };
  multiply(0, false);
#pragma unroll 1
  for (int k_tile = 1; k_tile < split.k_tiles; ++k_tile) {
    multiply(k_tile, true);
    wgmma_wait<1>();
    // The previous K tile has been read.
    if (threadIdx.x % 32 == 0) barriers.empty[(k_tile - 1) % Tile::kStages].arrive();
  }
  wgmma_wait<0>(sums);
}

// Sends the partial sums of a warp's 16 rows to the block that finishes them, through distributed shared memory.
template <class T, class Tile>
__device__ void send_partial_sums(
    const SplitK<T, Tile>& split, Accumulator<Tile::kN>& sums, float* partial, float* received, Mbarrier& barrier) {
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x / 32 * kWarpRows;
  const int owner = row / split.own_rows;
  float* const place = received + (split.index * split.own_rows + row % split.own_rows) * Tile::kPitch;
  float* const own = owner == split.index ? place : partial + row * Tile::kPitch;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float* sums_row = own + (half * 8 + lane / 4) * Tile::kPitch + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < Tile::kN / 8; ++j) {
      *reinterpret_cast<float2*>(sums_row + 8 * j) = {sums.at(j, half, 0), sums.at(j, half, 1)};
    }
  }
  fence_proxy_async();
  __syncwarp();
  if (lane > 0) return;
  if (owner != split.index) {
    constexpr int kBytes = kWarpRows * Tile::kPitch * static_cast<int>(sizeof(float));
    copy_to_peer(shared_address(place), shared_address(own), kBytes, barrier, owner);
  }
  barrier.arrive();
}

// One of the units that a block finishes, with its biases and old state.
template <class Cell, class T>
struct ForwardCell {
  int64_t row = 0;
  int unit = 0;
  bool exists = false;
  float bias[Cell::kGates] = {};
  float old_c = 0;

  template <class Tile>
  __device__ void load_inputs(const Forward<Cell, T>& in, const SplitK<T, Tile>& split, int item) {
    row = split.first_row + split.index * split.own_rows + item / Tile::kUnits;
    unit = split.first_unit + item % Tile::kUnits;
    exists = item < split.own_rows * Tile::kUnits && row < in.batch && unit < in.state_size;
    if (!exists) return;
#pragma unroll
    for (int g = 0; g < Cell::kGates; ++g) bias[g] = in.bias(g, unit);
    old_c = load(in.c_0[row * in.state_size + unit]);
  }
};

// Waits for the partial sums and finishes the block's rows. Each thread takes several units at a time, so that their
// loads and arithmetic overlap.
template <class Cell, class T, class Tile>
__device__ void epilogue(
    const Forward<Cell, T>& in, const SplitK<T, Tile>& split, const float* received, Mbarrier& barrier) {
  constexpr int kCells = Tile::kCellsAtOnce;
  const int items = split.own_rows * Tile::kUnits;
  for (int first = 0; first < items; first += kCells * Tile::kThreads) {
    ForwardCell<Cell, T> cells[kCells];
#pragma unroll
    for (int i = 0; i < kCells; ++i) cells[i].load_inputs(in, split, first + i * Tile::kThreads + threadIdx.x);
    barrier.wait(0);
    float sums[kCells][Cell::kGates] = {};
    for (int block = 0; block < split.blocks; ++block) {
#pragma unroll
      for (int i = 0; i < kCells; ++i) {
        const int item = min(first + i * Tile::kThreads + static_cast<int>(threadIdx.x), items - 1);
        const float* sums_row = received + (block * split.own_rows + item / Tile::kUnits) * Tile::kPitch;
#pragma unroll
        for (int g = 0; g < Cell::kGates; ++g) sums[i][g] += sums_row[g * Tile::kUnits + item % Tile::kUnits];
      }
    }
#pragma unroll
    for (int i = 0; i < kCells; ++i) {
#pragma unroll
      for (int g = 0; g < Cell::kGates; ++g) sums[i][g] += cells[i].bias[g];
      if (cells[i].exists) in.template finish<FastMath>(cells[i].row, cells[i].unit, sums[i], cells[i].old_c);
    }
  }
}

#endif

template <class Cell, class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads)
    split_k_kernel(Forward<Cell, T> in, const EXTOPS_GRID_CONSTANT ForwardMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(kTileAlignment) unsigned char shared[];
  __shared__ ForwardBarriers<Tile::kStages> barriers;
  const SplitK<T, Tile> split(in.state_size, in.input_features);
  float* const received = reinterpret_cast<float*>(shared + Tile::kStages * Tile::kStageBytes);
  if (threadIdx.x == 0) {
    prefetch(maps.h_0);
    prefetch(maps.input);
    prefetch(maps.weights_h);
    prefetch(maps.weights_x);
    for (int stage = 0; stage < Tile::kStages; ++stage) {
      barriers.full[stage].initialize(1);
      barriers.empty[stage].initialize(Tile::kMultipliers / 32);
    }
    barriers.sums.initialize(1 + Tile::kRows / kWarpRows);
    Mbarrier::publish();
    barriers.sums.arrive_expect_tx(Tile::kPartialBytes / split.blocks * (split.blocks - 1));
  }
  __syncthreads();
  arrive_at_cluster();
  wait_for_previous_kernel();
  if (threadIdx.x < Tile::kMultipliers) {
    Accumulator<Tile::kN> sums;
    multiply_k_tiles<T, Tile>(split, shared_address(shared), barriers, sums);
    // Partial sums overwrite what other warps may still read, and go to blocks that must have started.
    sync_multipliers<Tile>();
    wait_for_cluster();
    send_partial_sums<T, Tile>(split, sums, reinterpret_cast<float*>(shared), received, barriers.sums);
  } else {
    if (threadIdx.x == Tile::kMultipliers) load_k_tiles<T, Tile>(maps, split, shared_address(shared), barriers);
    __syncwarp();
    wait_for_cluster();
  }
  epilogue<Cell, T, Tile>(in, split, received, barriers.sums);
  // No block may end while others send to it, or copy from it.
  arrive_at_cluster();
  wait_for_cluster();
#endif
}

// ---- how it is launched ----

template <class T, class Tile, class Cell>
bool make_tensor_maps(ForwardMaps& maps, const Forward<Cell, T>& in) {
  const cuuint64_t batch = in.batch, state_size = in.state_size, input_features = in.input_features;
  const auto make_rows_map = [&](CUtensorMap& map, const T* rows, cuuint64_t columns) {
    return make_tensor_map<T, 2>(map, rows, {columns, batch}, {columns * sizeof(T)}, Tile::kRows);
  };
  const auto make_weights_map = [&](CUtensorMap& map, const T* weights, cuuint64_t columns, int64_t stride, int count) {
    const cuuint64_t row_bytes = stride * sizeof(T);
    return make_tensor_map<T, 3>(
        map, weights, {columns, state_size, static_cast<cuuint64_t>(count)}, {row_bytes, state_size * row_bytes},
        Tile::kUnits, kHasOneGradient<Cell> ? count : 1);
  };
  return make_rows_map(maps.h_0, in.h_0, state_size) && make_rows_map(maps.input, in.input, input_features) &&
         make_weights_map(maps.weights_h, in.weights_h, state_size, in.weights_h_stride, Cell::kRecurrent) &&
         make_weights_map(maps.weights_x, in.weights_x, input_features, in.weights_x_stride, Cell::kInput);
}

template <class T, class Tile, class Cell>
Plan plan(const Forward<Cell, T>& in, unsigned sm_count) {
  const unsigned k_tiles = ceil_div(in.state_size, kTileColumns<T>) + ceil_div(in.input_features, kTileColumns<T>);
  const unsigned tiles = ceil_div(in.state_size, Tile::kUnits) * ceil_div(in.batch, Tile::kRows);
  const unsigned splits = splits_of(tiles, k_tiles, sm_count);
  const unsigned blocks = tiles * splits;
  const unsigned waves = (blocks + sm_count - 1) / sm_count;
  return {
      {ceil_div(in.state_size, Tile::kUnits), ceil_div(in.batch, Tile::kRows), splits},
      Tile::kExists ? double(blocks) / (waves * sm_count) : 0};
}

template <class T, class Tile, class Cell>
Error launch_tile(const Forward<Cell, T>& in, dim3 grid, cudaStream_t stream) {
  if constexpr (!Tile::kExists) {
    return "no such tile";
  } else {
    ForwardMaps maps{};
    if (!make_tensor_maps<T, Tile>(maps, in)) return kNoTensorMap;
    constexpr auto kernel = &split_k_kernel<Cell, T, Tile>;
    if (const Error error = allow_shared_memory<kernel>(Tile::kSharedBytes)) return error;
    return launch(kernel, {grid, Tile::kThreads, Tile::kSharedBytes, {1, 1, grid.z}}, stream, in, maps);
  }
}

// Launches the fastest of several tiles, of equally fast ones the first.
template <class T, class... Tiles, class Cell>
Error launch_best_tile(const Forward<Cell, T>& in, unsigned sm_count, cudaStream_t stream) {
  double best = 0;
  ((best = std::max(best, plan<T, Tiles>(in, sm_count).speed)), ...);
  Error error = nullptr;
  bool launched = false;
  const auto try_tile = [&](const Plan& plan, auto launch_it) {
    if (launched || plan.speed < best) return;
    launched = true;
    error = launch_it(plan.grid);
  };
  (try_tile(plan<T, Tiles>(in, sm_count), [&](dim3 grid) { return launch_tile<T, Tiles>(in, grid, stream); }), ...);
  return error;
}

template <class Cell, class T>
Error launch_on_tensor_cores(const Forward<Cell, T>& in, cudaStream_t stream) {
  // With a single gate a unit has a third of the work, so a tile has three times as many units.
  constexpr int kUnits = Cell::kGates == 1 ? 24 : 8;
  using Narrow = ForwardTile<Cell, 64, 3 * kUnits, 256, 2>;
  using Wide = ForwardTile<Cell, 64, 4 * kUnits, 512, 2>;
  using Widest = ForwardTile<Cell, 64, 5 * kUnits, 512, 3>;
  // If tiles of 64 rows fill the device without splitting K, tiles of 128 rows load the weights half as often.
  const unsigned sm_count = device_attribute(cudaDevAttrMultiProcessorCount);
  using Most = std::conditional_t<Widest::kExists, Widest, Wide>;
  if (in.batch > kWarpgroupRows && plan<T, Most>(in, sm_count).grid.z == 1) {
    using Wide128 = ForwardTile<Cell, 128, 4 * kUnits, 512, 2>;
    using Widest128 = ForwardTile<Cell, 128, 5 * kUnits, 512, 3>;
    return launch_best_tile<T, Wide128, Widest128>(in, sm_count, stream);
  }
  return launch_best_tile<T, Narrow, Wide, Widest>(in, sm_count, stream);
}

}  // namespace extops::cuda::step
