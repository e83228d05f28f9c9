// The LLTM cell on Hopper GPUs, product and pointwise part in one kernel: by tensor cores (wgmma) in 16-bit types and
// in float32 where TF32 is allowed, by ordinary multiply-adds (FFMA) in strict float32. A library's product is followed
// by a kernel that reads back what it wrote, and preceded by one that joins old_h and input.
//
// A cluster of blocks computes some units for 64 rows (split-K): each block has some K tiles of X = [old_h | input],
// which is never made; then each adds up the partial sums of some rows and finishes them. Sums are in float32 and
// always in the same order.
#include "../lltm.h"
#include "hopper.cuh"
#include "lltm_problem.cuh"

// Named, not anonymous: nvcc would put the path of this file into the kernels' names, and no two builds be the same.
namespace extops::cuda {

constexpr int kWarpgroupRows = 64;
constexpr int kWarpRows = kWarpgroupRows / (kWarpgroup / 32);
constexpr unsigned kMaxSplits = kWarpgroupRows / kWarpRows;  // of a sum; a larger cluster costs more than it saves

template <Math kMath_, int kRows_, int kUnits_, int kThreads_, int kCellsAtOnce_>
struct ForwardTile {
  static constexpr Math kMath = kMath_;
  static constexpr int kRows = kRows_;
  static constexpr int kUnits = kUnits_;
  // Of a busy multiprocessor, relative to others of the same math: in float32 wide tiles load less for each product.
  static constexpr double kSpeed = kMath == Math::kFloat32 && kUnits == 16 ? 0.64 : 1;
  static constexpr int kMultipliers = kMath == Math::kTensorCores ? kRows / kWarpgroupRows * kWarpgroup : 256;
  static constexpr int kThreads = kThreads_;           // the first multiply, and the one after them issues the copies
  static constexpr int kCellsAtOnce = kCellsAtOnce_;   // that a thread finishes
  static constexpr int kStages = kRows == 64 ? 6 : 4;  // K tiles in shared memory at a time
  static constexpr int kN = 3 * kUnits;                // columns of the gates: three gates of each unit
  static constexpr int kPitch = kN % 16 == 0 ? kN + 8 : kN;  // no two of four rows of sums meet in a bank
  static constexpr int kRowsBytes = kRows * kTileRowBytes;
  static constexpr int kStageBytes = kRowsBytes + kN * kTileRowBytes;
  static constexpr int kPartialBytes = kRows * kPitch * static_cast<int>(sizeof(float));
  static constexpr int kSharedBytes = kTileAlignment + kStages * kStageBytes + kPartialBytes;

  static_assert(kN <= 128 && kStageBytes % kTileAlignment == 0);
  static_assert(kPartialBytes <= kStages * kStageBytes);
  static_assert(kPitch % 32 == 8 || kPitch % 32 == 24);
};

struct ForwardMaps {
  CUtensorMap old_h;
  CUtensorMap input;
  CUtensorMap weights;  // [3, state_size, columns]
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
  int first_k_tile;
  int k_tiles;

  __device__ explicit SplitK(const Sizes& sizes) {
    const int all = (sizes.columns() + kTileColumns<T> - 1) / kTileColumns<T>;
    first_k_tile = all * index / blocks;
    k_tiles = all * (index + 1) / blocks - first_k_tile;
  }
};

template <class T, class Tile>
__device__ void load_k_tiles(
    const Sizes& sizes, const ForwardMaps& maps, const SplitK<T, Tile>& split, uint32_t stages,
    ForwardBarriers<Tile::kStages>& barriers) {
  for (int k_tile = 0; k_tile < split.k_tiles; ++k_tile) {
    const int stage = k_tile % Tile::kStages;
    Mbarrier& full = barriers.full[stage];
    if (k_tile >= Tile::kStages) barriers.empty[stage].wait(k_tile / Tile::kStages - 1);
    full.arrive_expect_tx(Tile::kStageBytes);
    const uint32_t to = stages + stage * Tile::kStageBytes;
    const int k = (split.first_k_tile + k_tile) * kTileColumns<T>;
    tma_load(to + Tile::kRowsBytes, maps.weights, k, split.first_unit, 0, full);
    if (k < sizes.state_size) {
      tma_load(to, maps.old_h, k, split.first_row, full);
    } else {
      tma_load(to, maps.input, k - sizes.state_size, split.first_row, full);
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
    // The K tile before has been read.
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

// What a thread holds of the sums in strict float32. Shared memory hands a lane 16 bytes in the time of four
// multiply-adds, so that each loaded chunk must meet many others: a lane has every eighth row and every fourth of its
// warp's columns, whose chunks lie in all banks. Four warps have a quarter of the columns each; four more do so for the
// other half of each K tile.
template <class Tile>
struct Float32Sums {
  static constexpr int kRows = Tile::kRows / 8;
  static constexpr int kN = Tile::kN / 16;
  float values[kRows][kN] = {};

  __device__ static int row(int i) { return i * 8 + threadIdx.x % 32 / 4; }
  __device__ static int column(int j) { return threadIdx.x / 32 % 4 * (Tile::kN / 4) + j * 4 + threadIdx.x % 4; }
  __device__ static bool is_second_half() { return threadIdx.x >= Tile::kMultipliers / 2; }
};

template <class T, class Tile>
__device__ void multiply_k_tiles(
    const SplitK<T, Tile>& split, uint32_t stages, ForwardBarriers<Tile::kStages>& barriers, Float32Sums<Tile>& sums) {
  using Sums = Float32Sums<Tile>;
  static_assert(Tile::kN % 16 == 0);
  constexpr int kChunks = kTileRowBytes / kChunkBytes;
#pragma unroll 1
  for (int k_tile = 0; k_tile < split.k_tiles; ++k_tile) {
    const int stage = k_tile % Tile::kStages;
    barriers.full[stage].wait(k_tile / Tile::kStages);
    const uint32_t rows = stages + stage * Tile::kStageBytes;
    const int first = Sums::is_second_half() * kChunks / 2;
#pragma unroll
    for (int i = 0; i < kChunks / 2; ++i) {
      const int chunk = first + i;
      float4 x[Sums::kRows];
      float4 w[Sums::kN];
#pragma unroll
      for (int i = 0; i < Sums::kRows; ++i) x[i] = load_chunk(rows, Sums::row(i), chunk);
#pragma unroll
      for (int j = 0; j < Sums::kN; ++j) w[j] = load_chunk(rows + Tile::kRowsBytes, Sums::column(j), chunk);
#pragma unroll
      for (int i = 0; i < Sums::kRows; ++i) {
#pragma unroll
        for (int j = 0; j < Sums::kN; ++j) {
          float& sum = sums.values[i][j];
          sum = fmaf(x[i].x, w[j].x, sum);
          sum = fmaf(x[i].y, w[j].y, sum);
          sum = fmaf(x[i].z, w[j].z, sum);
          sum = fmaf(x[i].w, w[j].w, sum);
        }
      }
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) barriers.empty[stage].arrive();
  }
}

// The same in strict float32: first adds up the two halves of each K tile.
template <class T, class Tile>
__device__ void send_partial_sums(
    const SplitK<T, Tile>& split, const Float32Sums<Tile>& sums, float* partial, float* received, Mbarrier& barrier) {
  using Sums = Float32Sums<Tile>;
  const auto place_of = [&](int row) {
    return received + (split.index * split.own_rows + row % split.own_rows) * Tile::kPitch;
  };
  const auto for_each_sum = [&](auto function) {
#pragma unroll
    for (int i = 0; i < Sums::kRows; ++i) {
      const int row = Sums::row(i);
      float* const sums_row = row / split.own_rows == split.index ? place_of(row) : partial + row * Tile::kPitch;
#pragma unroll
      for (int j = 0; j < Sums::kN; ++j) function(sums_row[Sums::column(j)], sums.values[i][j]);
    }
  };
  if (Sums::is_second_half()) for_each_sum([](float& place, float sum) { place = sum; });
  sync_multipliers<Tile>();
  if (!Sums::is_second_half()) for_each_sum([](float& place, float sum) { place += sum; });
  fence_proxy_async();
  sync_multipliers<Tile>();
  constexpr int kGroups = Tile::kRows / kWarpRows;
  if (threadIdx.x % (Tile::kMultipliers / kGroups) != 0) return;
  const int row = threadIdx.x / (Tile::kMultipliers / kGroups) * kWarpRows;
  const int owner = row / split.own_rows;
  if (owner != split.index) {
    constexpr int kBytes = kWarpRows * Tile::kPitch * static_cast<int>(sizeof(float));
    const uint32_t from = shared_address(partial + row * Tile::kPitch);
    copy_to_peer(shared_address(place_of(row)), from, kBytes, barrier, owner);
  }
  barrier.arrive();
}

// One of the cells that a block finishes.
template <class T>
struct ForwardCell {
  int row = 0;
  int unit = 0;
  bool exists = false;
  float bias[3] = {};
  float old_cell = 0;

  template <class Tile>
  __device__ void load_inputs(const CellForward<T>& in, const SplitK<T, Tile>& split, int item) {
    row = split.first_row + split.index * split.own_rows + item / Tile::kUnits;
    unit = split.first_unit + item % Tile::kUnits;
    exists = item < split.own_rows * Tile::kUnits && row < in.sizes.batch && unit < in.sizes.state_size;
    if (!exists) return;
#pragma unroll
    for (int g = 0; g < 3; ++g) bias[g] = load(in.bias[g * in.sizes.state_size + unit]);
    old_cell = load(in.old_cell[int64_t{row} * in.sizes.state_size + unit]);
  }

  template <class Functions>
  __device__ void finish(const CellForward<T>& in, const float (&sums)[3]) const {
    if (!exists) return;
    const int state_size = in.sizes.state_size;
    float gates[3];
#pragma unroll
    for (int g = 0; g < 3; ++g) {
      T rounded;
      store(rounded, sums[g] + bias[g]);
      in.gates[(int64_t{row} * 3 + g) * state_size + unit] = rounded;
      gates[g] = load(rounded);  // as the backward will see it
    }
    const CellState<float> state = cell_forward<Lltm, Functions>(gates, old_cell);
    store(in.new_cell[int64_t{row} * state_size + unit], state.c);
    store(in.new_h[int64_t{row} * state_size + unit], state.h);
  }
};

// Waits for the partial sums and finishes the block's rows. Each thread takes several cells at a time, so that their
// loads and arithmetic overlap.
template <class T, class Tile>
__device__ void epilogue(
    const CellForward<T>& in, const SplitK<T, Tile>& split, const float* received, Mbarrier& barrier) {
  constexpr int kCells = Tile::kCellsAtOnce;
  const int items = split.own_rows * Tile::kUnits;
  for (int first = 0; first < items; first += kCells * Tile::kThreads) {
    ForwardCell<T> cells[kCells];
#pragma unroll
    for (int i = 0; i < kCells; ++i) cells[i].load_inputs(in, split, first + i * Tile::kThreads + threadIdx.x);
    barrier.wait(0);
    float sums[kCells][3] = {};
    for (int block = 0; block < split.blocks; ++block) {
#pragma unroll
      for (int i = 0; i < kCells; ++i) {
        const int item = min(first + i * Tile::kThreads + static_cast<int>(threadIdx.x), items - 1);
        const float* sums_row = received + (block * split.own_rows + item / Tile::kUnits) * Tile::kPitch;
#pragma unroll
        for (int g = 0; g < 3; ++g) sums[i][g] += sums_row[g * Tile::kUnits + item % Tile::kUnits];
      }
    }
#pragma unroll
    for (int i = 0; i < kCells; ++i) {
      cells[i].template finish<std::conditional_t<Tile::kMath == Math::kTensorCores, FastMath, ExactMath>>(in, sums[i]);
    }
  }
}

#endif

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads)
    lltm_tensor_kernel(CellForward<T> in, const EXTOPS_GRID_CONSTANT ForwardMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(kTileAlignment) unsigned char shared[];
  __shared__ ForwardBarriers<Tile::kStages> barriers;
  const SplitK<T, Tile> split(in.sizes);
  float* const received = reinterpret_cast<float*>(shared + Tile::kStages * Tile::kStageBytes);
  if (threadIdx.x == 0) {
    prefetch(maps.old_h);
    prefetch(maps.input);
    prefetch(maps.weights);
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
    std::conditional_t<Tile::kMath == Math::kTensorCores, Accumulator<Tile::kN>, Float32Sums<Tile>> sums;
    multiply_k_tiles<T, Tile>(split, shared_address(shared), barriers, sums);
    // Partial sums go where other warps may still be reading, and to blocks that must have begun.
    sync_multipliers<Tile>();
    wait_for_cluster();
    send_partial_sums<T, Tile>(split, sums, reinterpret_cast<float*>(shared), received, barriers.sums);
  } else {
    if (threadIdx.x == Tile::kMultipliers)
      load_k_tiles<T, Tile>(in.sizes, maps, split, shared_address(shared), barriers);
    __syncwarp();
    wait_for_cluster();
  }
  epilogue<T, Tile>(in, split, received, barriers.sums);
  // No block may end while others send to it, or copy from it.
  arrive_at_cluster();
  wait_for_cluster();
#endif
}

// ---- how it is launched ----

template <class T, class Tile>
bool make_tensor_map(ForwardMaps& maps, const CellForward<T>& in) {
  constexpr auto kType = map_type<T>(Tile::kMath == Math::kTensorCores);
  const cuuint64_t batch = in.sizes.batch;
  const cuuint64_t state_size = in.sizes.state_size;
  const cuuint64_t features = in.sizes.input_features;
  const cuuint64_t columns = in.sizes.columns();
  const cuuint64_t row_bytes = columns * sizeof(T);
  return make_tensor_map<T, 2>(
             maps.old_h, kType, in.old_h, {state_size, batch}, {state_size * sizeof(T)}, Tile::kRows) &&
         (features == 0 ||
          make_tensor_map<T, 2>(maps.input, kType, in.input, {features, batch}, {features * sizeof(T)}, Tile::kRows)) &&
         make_tensor_map<T, 3>(
             maps.weights, kType, in.weights, {columns, state_size, 3}, {row_bytes, state_size * row_bytes},
             Tile::kUnits, 3);
}

// How many blocks split K, and how fast that is: the part of the device that is busy, at the tile's own speed.
struct Plan {
  dim3 grid;
  double speed;
};

template <class T, class Tile>
Plan plan(const Sizes& sizes, unsigned multiprocessors) {
  const unsigned k_tiles = ceil_div(sizes.columns(), kTileColumns<T>);
  const unsigned tiles = ceil_div(sizes.state_size, Tile::kUnits) * ceil_div(sizes.batch, Tile::kRows);
  unsigned splits = 1;
  for (unsigned more = 2; more <= kMaxSplits && more <= k_tiles; more *= 2) {
    // All blocks of a cluster run in one GPC, where up to a tenth of the multiprocessors may then be left over.
    if (tiles * more <= (more == 2 ? multiprocessors : multiprocessors * 9 / 10)) splits = more;
  }
  const unsigned blocks = tiles * splits;
  const unsigned waves = (blocks + multiprocessors - 1) / multiprocessors;
  return {
      {ceil_div(sizes.state_size, Tile::kUnits), ceil_div(sizes.batch, Tile::kRows), splits},
      Tile::kSpeed * blocks / (waves * multiprocessors)};
}

template <class T, class Tile>
Error launch_tile(const CellForward<T>& in, dim3 grid, cudaStream_t stream) {
  ForwardMaps maps{};
  if (!make_tensor_map<T, Tile>(maps, in)) return kNoTensorMap;
  constexpr auto kernel = &lltm_tensor_kernel<T, Tile>;
  if (const Error error = allow_shared_memory<kernel>(Tile::kSharedBytes)) return error;
  launch(kernel, {grid, Tile::kThreads, Tile::kSharedBytes, {1, 1, grid.z}}, stream, in, maps);
  return launch_error();
}

// Takes the fastest of several tiles; of equals the first.
template <class T, class... Tiles>
Error launch_best_tile(const CellForward<T>& in, unsigned multiprocessors, cudaStream_t stream) {
  double best = 0;
  ((best = std::max(best, plan<T, Tiles>(in.sizes, multiprocessors).speed)), ...);
  Error error = nullptr;
  bool launched = false;
  const auto try_tile = [&](const Plan& plan, auto launch_it) {
    if (launched || plan.speed < best) return;
    launched = true;
    error = launch_it(plan.grid);
  };
  (try_tile(
       plan<T, Tiles>(in.sizes, multiprocessors), [&](dim3 grid) { return launch_tile<T, Tiles>(in, grid, stream); }),
   ...);
  return error;
}

template <class T>
Error launch_on_tensor_cores(const CellForward<T>& in, cudaStream_t stream) {
  constexpr Math kMath = Math::kTensorCores;
  using Tile = ForwardTile<kMath, 64, 40, 512, 3>;
  // Where tiles of 64 rows occupy the device without splitting K, tiles of 128 load the weights half as often.
  const unsigned multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  if (in.sizes.batch > kWarpgroupRows && plan<T, Tile>(in.sizes, multiprocessors).grid.z == 1) {
    return launch_best_tile<T, ForwardTile<kMath, 128, 32, 512, 2>, ForwardTile<kMath, 128, 40, 512, 3>>(
        in, multiprocessors, stream);
  }
  return launch_best_tile<T, ForwardTile<kMath, 64, 24, 256, 2>, ForwardTile<kMath, 64, 32, 512, 2>, Tile>(
      in, multiprocessors, stream);
}

template Error launch_on_tensor_cores(const CellForward<float>&, cudaStream_t);
template Error launch_on_tensor_cores(const CellForward<__half>&, cudaStream_t);
template Error launch_on_tensor_cores(const CellForward<__nv_bfloat16>&, cudaStream_t);

Error launch_in_float32(const CellForward<float>& in, cudaStream_t stream) {
  constexpr Math kMath = Math::kFloat32;
  const unsigned multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  return launch_best_tile<float, ForwardTile<kMath, 64, 32, 288, 2>, ForwardTile<kMath, 64, 16, 288, 2>>(
      in, multiprocessors, stream);
}

}  // namespace extops::cuda
