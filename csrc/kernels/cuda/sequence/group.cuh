// A persistent kernel for whole sequences on Hopper GPUs. A group of blocks computes some tiles of samples. Each block
// owns some units, whose recurrent weights stay in its shared memory for all steps. After each step the blocks of a
// group exchange values (forward: h, backward: the gradients of the gates) through L2: each block writes its part and
// increments the tile's counter; once all have, the others copy it by TMA. GEMMs use tensor cores (wgmma) in 16-bit
// types and TF32, FFMA in strict float32.
//
// Blocks that wait for each other must be co-resident: the cooperative launch guarantees it or fails.
#pragma once

#include "../common/hopper.cuh"
#include "tensor.cuh"

namespace extops::cuda {
namespace group {

constexpr int kTileRows = 64;
constexpr int kFewRows = 8;    // rows of a tile in strict float32, for batches that would fill little of a tile of 64
constexpr int kWorkers = 256;  // threads that compute; one more warp issues the copies
constexpr int kBlockThreads = kWorkers + 32;
constexpr int kReusedStages = 16;  // more stages gain nothing if they are reused within a GEMM
constexpr int kMaxStages = 96;
constexpr int kCounterBytes = 128;  // one cache line each

template <class Cell_, class T_, Math kMath_, Pass kPass_, int kUnits_, int kRows_>
struct Tile {
  using Cell = Cell_;
  using T = T_;
  static constexpr Math kMath = kMath_;
  using CellMath = std::conditional_t<kMath == Math::kTensorCores, FastMath, ExactMath>;
  using Arguments = SequencePass<kPass_, Cell, T>;
  static constexpr bool kIsForward = kPass_ == Pass::kForward;
  static constexpr int kUnits = kUnits_;
  static constexpr int kRows = kRows_;
  static constexpr int kBytes = kRows * kTileRowBytes;
  static constexpr int kN = kIsForward ? Cell::kRecurrent * kUnits : kUnits;  // of the GEMM
  static constexpr int kPitch = kN % 16 == 0 ? kN + 8 : kN;                   // no two of four rows meet in a bank
  static constexpr int kPartialBytes = kRows * kPitch * static_cast<int>(sizeof(float));
  static constexpr int kLeastStages = std::max(2, (kPartialBytes + kBytes - 1) / kBytes);  // the sums may lie there
  static constexpr int kWeightBytes = kN * kTileRowBytes;                                  // of each K tile
  static constexpr int kCells = (kRows * kUnits + kWorkers - 1) / kWorkers;
  static constexpr int kMultipliers = kMath == Math::kTensorCores ? kWarpgroup : kWorkers;
  // In float32 a warp computes all rows of all columns of the GEMM, or of a half or a quarter of them, and the warps
  // split K.
  static constexpr int kColumnGroups = kN > 48 ? 4 : kN > 24 ? 2 : 1;
  static constexpr int kParts = 8 / kColumnGroups;

  static_assert(kWeightBytes % kTileAlignment == 0 && kN % 8 == 0);
  static_assert(kRows == kTileRows || kMath == Math::kFloat32);  // wgmma has 64 rows
};

// The layout of shared memory, and how the tiles are divided among the groups.
struct Plan {
  int k_tiles;
  int stages;
  bool reuses_stages;  // within a step; else the counters alone say when a stage is free
  int tiles;
  int copied_rows;     // of a tile: all, or the whole batch if that is smaller
  int partial_offset;  // bytes of shared memory before the sums
  dim3 grid;           // units, groups
  int shared_bytes;
};

// A kernel's workspace: a counter for each tile; in the forward the last two h, [2, batch, state_size]; the cell state
// or its gradient in float32.
template <class T>
struct Buffers {
  unsigned* counters;
  T* h;
  float* c;
  int64_t bytes;

  Buffers(void* workspace, const SequenceSizes& sizes) {
    const auto aligned = [](int64_t n) { return (n + 255) / 256 * 256; };
    const int64_t cells = sizes.batch * sizes.state_size;
    const int64_t of_h = aligned((sizes.batch + kFewRows - 1) / kFewRows * kCounterBytes);
    const int64_t of_c = of_h + aligned(2 * cells * int64_t{sizeof(T)});
    bytes = of_c + aligned(cells * int64_t{sizeof(float)});
    char* const start = static_cast<char*>(workspace);
    counters = reinterpret_cast<unsigned*>(start);
    h = reinterpret_cast<T*>(start + of_h);
    c = reinterpret_cast<float*>(start + of_c);
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The counters in global memory that the blocks of a group increment, one for each tile.
__device__ inline unsigned* counter_of(unsigned* counters, int tile) {
  return counters + tile * (kCounterBytes / sizeof(unsigned));
}

__device__ inline void raise(unsigned* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ inline void wait_for(const unsigned* counter, unsigned count) {
  unsigned seen = 0;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  } while (seen < count);
}

// Makes this thread's writes to global memory visible to TMA copies, in this block and in others.
__device__ inline void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

__device__ inline void sync_workers() { asm volatile("bar.sync 1, %0;" ::"n"(kWorkers) : "memory"); }

// For each stage. Where stages are reused there are few enough for both kinds of barrier.
struct Barriers {
  Mbarrier all[kMaxStages];

  __device__ Mbarrier& full(int stage) { return all[stage]; }
  __device__ Mbarrier& empty(int stage) { return all[kMaxStages - kReusedStages + stage]; }
};
static_assert(2 * kReusedStages <= kMaxStages);

// The K tiles of successive GEMMs, in a ring of stages.
struct Ring {
  uint32_t first;
  int stage_bytes;
  int stages;
  bool reuses_stages;
  Barriers& barriers;
  int stage = 0;
  int round = 0;

  __device__ uint32_t tile() const { return first + stage * stage_bytes; }
  // A warp has read the stage before.
  __device__ void release() const {
    if (reuses_stages && threadIdx.x % 32 == 0) barriers.empty((stage > 0 ? stage : stages) - 1).arrive();
  }
  __device__ void advance() {
    if (++stage < stages) return;
    stage = 0;
    ++round;
  }
};

// A warpgroup multiplies a tile by the block's weights and stores the sums in `partial`, [kRows, kPitch].
template <class Tile>
__device__ void multiply_by_tensor_cores(const Plan& plan, uint32_t weights, Ring& ring, float* partial) {
  using T = typename Tile::T;
  Accumulator<Tile::kN> sums;
  const auto multiply = [&](int k_tile, bool adds) {
    ring.barriers.full(ring.stage).wait(ring.round);
    wgmma_fence();
    multiply_tiles<T>(sums, ring.tile(), weights + k_tile * Tile::kWeightBytes, adds);
    wgmma_commit();
  };
  // Outside of the loop: if the compiler does not see the first write of the sums, it serialises the instructions.
  multiply(0, false);
  ring.advance();
#pragma unroll 1
  for (int k_tile = 1; k_tile < plan.k_tiles; ++k_tile) {
    multiply(k_tile, true);
    wgmma_wait<1>();
    // The K tile before has been read.
    ring.release();
    ring.advance();
  }
  wgmma_wait<0>(sums);
  const int lane = threadIdx.x % 32;
  ring.release();
  // The sums may overwrite what other warps of the warpgroup still read.
  asm volatile("bar.sync 2, %0;" ::"n"(kWarpgroup) : "memory");
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float* const row = partial + (threadIdx.x / 32 * 16 + half * 8 + lane / 4) * Tile::kPitch + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < Tile::kN / 8; ++j) {
      *reinterpret_cast<float2*>(row + 8 * j) = {sums.values[4 * j + 2 * half], sums.values[4 * j + 2 * half + 1]};
    }
  }
}

// The same in strict float32, by all workers. Loading 16 bytes from shared memory takes a lane as long as four
// multiply-adds, so each loaded chunk must be used many times: a lane computes every eighth row and every fourth of its
// warp's columns, whose chunks lie in all banks.
template <class Tile>
__device__ void multiply_in_float32(const Plan& plan, uint32_t weights, Ring& ring, float* partial) {
  constexpr int kRows = Tile::kRows / 8;
  constexpr int kColumns = Tile::kN / Tile::kColumnGroups / 4;
  constexpr int kChunks = kTileRowBytes / kChunkBytes;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int part = warp / Tile::kColumnGroups;
  const int first_column = warp % Tile::kColumnGroups * (Tile::kN / Tile::kColumnGroups) + lane % 4;
  // For each chunk: the offset of a lane's first row of h in a tile, and of its first two rows of weights, which are
  // swizzled differently.
  constexpr int kOwnChunks = kChunks / Tile::kParts;
  uint32_t x_places[kOwnChunks], w_places[kOwnChunks][2];
#pragma unroll
  for (int i = 0; i < kOwnChunks; ++i) {
    const int chunk = i * Tile::kParts + part;
    x_places[i] = kept(chunk_place(lane / 4, chunk));
#pragma unroll
    for (int j = 0; j < 2; ++j) w_places[i][j] = kept(chunk_place(first_column + 4 * j, chunk));
  }
  const uint32_t full = kept(ring.barriers.full(0).address());
  const uint32_t empty = kept(ring.barriers.empty(0).address());
  const bool releases = ring.reuses_stages && lane == 0;
  float sums[kRows][kColumns] = {};
  uint32_t previous = 0;
  // A stage is released when the next one has arrived, after the sums that use its values. Directly after its last
  // loads, the compiler would let the warp arrive while these are in flight, and the next copy would overwrite what
  // they read. extops_build/machine_code.py checks for that.
  const auto release = [&] {
    __syncwarp();
    if (releases) Mbarrier::arrive_at(previous);
  };
#pragma unroll 1
  for (int k_tile = 0; k_tile < plan.k_tiles; ++k_tile) {
    Mbarrier::wait_at(full + ring.stage * int{sizeof(Mbarrier)}, ring.round);
    if (k_tile > 0) release();
    previous = empty + ring.stage * int{sizeof(Mbarrier)};
    const uint32_t tile = ring.tile();
    const uint32_t tile_weights = weights + k_tile * Tile::kWeightBytes;
#pragma unroll
    for (int chunk = 0; chunk < kOwnChunks; ++chunk) {
      float4 x[kRows];
      float4 w[kColumns];
#pragma unroll
      for (int i = 0; i < kRows; ++i) x[i] = load_chunk(tile + x_places[chunk] + i * 8 * kTileRowBytes);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        w[j] = load_chunk(tile_weights + w_places[chunk][j % 2] + j / 2 * 8 * kTileRowBytes);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          float& sum = sums[i][j];
          sum = fmaf(x[i].x, w[j].x, sum);
          sum = fmaf(x[i].y, w[j].y, sum);
          sum = fmaf(x[i].z, w[j].z, sum);
          sum = fmaf(x[i].w, w[j].w, sum);
        }
      }
    }
    ring.advance();
  }
  // One part after the other, so that the order of the sums is fixed. They may overwrite what other warps still read.
  for (int turn = 0; turn < Tile::kParts; ++turn) {
    sync_workers();
    if (turn == 0) release();
    if (turn != part) continue;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float* const row = partial + (i * 8 + lane / 4) * Tile::kPitch + first_column;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) row[4 * j] = turn == 0 ? sums[i][j] : row[4 * j] + sums[i][j];
    }
  }
}

template <class Tile>
__device__ void multiply(const Plan& plan, uint32_t weights, Ring& ring, float* partial) {
  if constexpr (Tile::kMath == Math::kFloat32) {
    multiply_in_float32<Tile>(plan, weights, ring, partial);
  } else if (threadIdx.x < kWarpgroup) {
    multiply_by_tensor_cores<Tile>(plan, weights, ring, partial);
  }
  sync_workers();
}

// Loads the block's weights into shared memory, as K-major tiles with 128-byte swizzle: row n of the forward is gate n
// / kUnits of unit n % kUnits, along h; row n of the backward is unit n, along the gates of all units.
template <class Tile>
__device__ void load_weights(const Steps& steps, const typename Tile::T* weights, const Plan& plan, unsigned char* to) {
  using T = typename Tile::T;
  constexpr int kColumns = kTileColumns<T>;
  const int first_unit = blockIdx.x * Tile::kUnits;
  const int depth = plan.k_tiles * kColumns;
  constexpr bool kIsForward = Tile::kIsForward;
  for (int item = threadIdx.x; item < Tile::kN * depth; item += kBlockThreads) {
    // Neighbouring threads read neighbouring columns of the weights.
    const int n = kIsForward ? item / depth : item % Tile::kN;
    const int k = kIsForward ? item % depth : item / Tile::kN;
    const int unit = first_unit + n % Tile::kUnits;
    const int weight_row = kIsForward ? n / Tile::kUnits * steps.state_size + unit : k;
    const int column = kIsForward ? k : unit;
    const bool exists = unit < steps.state_size && (k < (kIsForward ? 1 : Tile::Cell::kRecurrent) * steps.state_size);
    T value;
    store(value, 0);
    if (exists) value = weights[weight_row * steps.weights_stride + column];
    if constexpr (std::is_same_v<T, float> && Tile::kMath == Math::kTensorCores) {
      value = round_to_tf32(value);
    }
    const int chunk = k % kColumns * static_cast<int>(sizeof(T)) / kChunkBytes;
    const int inside = k % kColumns * static_cast<int>(sizeof(T)) % kChunkBytes;
    *reinterpret_cast<T*>(
        to + k / kColumns * Tile::kWeightBytes + n * kTileRowBytes + (chunk ^ n % 8) * kChunkBytes + inside) = value;
  }
}

// One of the cells that a thread computes at each step of a tile.
template <class Tile>
struct OwnCell {
  int row;  // within the tile
  int column;
  int sample;
  int unit;
  int length;
  bool exists;

  __device__ OwnCell(const Steps& steps, int tile, int i) {
    const int item = i * kWorkers + static_cast<int>(threadIdx.x);
    row = item / Tile::kUnits;
    column = item % Tile::kUnits;
    sample = tile * Tile::kRows + row;
    unit = static_cast<int>(blockIdx.x) * Tile::kUnits + column;
    exists = row < Tile::kRows && sample < steps.batch && unit < steps.state_size;
    length = exists ? steps.length(sample) : 0;
  }

  __device__ int64_t state(const Steps& steps) const { return int64_t{sample} * steps.state_size + unit; }
};

// Issues the copies of the operands of each step's GEMM.
template <class Tile>
__device__ void load_tiles(
    const Steps& steps, const Plan& plan, const CUtensorMap& map, unsigned* counters, Ring ring) {
  constexpr bool kIsForward = Tile::kIsForward;
  const int gemms = kIsForward ? steps.time : steps.time + 1;
  for (int step = kIsForward ? 0 : 1; step < gemms; ++step) {
    // Forward: the slot of h that the step before has written. Backward: the time of the step before.
    const int matrix = kIsForward ? step & 1 : steps.time_of(steps.time - step);
    for (int tile = blockIdx.y; tile < plan.tiles; tile += gridDim.y) {
      wait_for(counter_of(counters, tile), gridDim.x * (kIsForward ? step + 1 : step));
      fence_proxy_async_global();
      for (int k_tile = 0; k_tile < plan.k_tiles; ++k_tile) {
        Mbarrier& full = ring.barriers.full(ring.stage);
        // A stage is reused when each multiplying warp has arrived at `empty`, after the instructions that read the
        // stage are done. Phase number `round` of `full` tells them that the copy has arrived.
        if (ring.reuses_stages && ring.round > 0) ring.barriers.empty(ring.stage).wait(ring.round - 1);
        full.arrive_expect_tx(plan.copied_rows * kTileRowBytes);
        tma_load(ring.tile(), map, k_tile * kTileColumns<typename Tile::T>, tile * Tile::kRows, matrix, full);
        ring.advance();
      }
    }
  }
}

// All workers have written what other blocks read, and have read the sums, which the next copies may overwrite: those
// begin when all blocks have arrived, including this one. The fence is for these copies, which use the async proxy.
// After the barrier, one thread's release and the copying thread's acquire make the writes of all visible.
__device__ inline void arrive_for_group(unsigned* counters, int tile) {
  asm volatile("fence.proxy.async;" ::: "memory");
  sync_workers();
  if (threadIdx.x == 0) raise(counter_of(counters, tile));
}

template <class Tile>
__device__ void start_forward(
    const typename Tile::Arguments& in, const Plan& plan, const Buffers<typename Tile::T>& buffers) {
  for (int tile = blockIdx.y; tile < plan.tiles; tile += gridDim.y) {
    for (int i = 0; i < Tile::kCells; ++i) {
      const OwnCell<Tile> cell(in.steps, tile, i);
      if (!cell.exists) continue;
      const int64_t at = cell.state(in.steps);
      buffers.h[at] = in.h_0[at];
      buffers.c[at] = load(in.c_0[at]);
      if (cell.length > 0) continue;
      in.h_n[at] = in.h_0[at];
      in.c_n[at] = in.c_0[at];
    }
    arrive_for_group(buffers.counters, tile);
  }
}

template <class Tile>
__device__ void forward_step(
    const typename Tile::Arguments& in, const Plan& plan, const Buffers<typename Tile::T>& buffers, int step, int tile,
    uint32_t weights, const float* biases, Ring& ring, float* partial) {
  using T = typename Tile::T;
  using Cell = typename Tile::Cell;
  const Steps& steps = in.steps;
  const int t = steps.time_of(step);
  float sums[Tile::kCells][Cell::kGates];
  float old_c[Tile::kCells];
  // Without a branch, which would serialise the loads of the cells.
#pragma unroll
  for (int i = 0; i < Tile::kCells; ++i) {
    const OwnCell<Tile> cell(steps, tile, i);
    const bool is_valid = cell.exists && t < cell.length;
    const float* const input_gates = in.input_gates + steps.row(t, cell.sample) * Cell::kInput * steps.state_size;
#pragma unroll
    for (int g = 0; g < Cell::kGates; ++g) {
      const int column = input_place<Cell>(g) * steps.state_size + cell.unit;
      const float bias = biases[g * Tile::kUnits + cell.column];
      sums[i][g] = is_valid ? (g < Cell::kInput ? input_gates[column] + bias : bias) : 0;
    }
    old_c[i] = is_valid ? buffers.c[cell.state(steps)] : 0;
  }
  multiply<Tile>(plan, weights, ring, partial);
  // Two alternating slots: this overwrites h of the step before. Its copies are done, since this block has finished its
  // GEMM of this step: all blocks had arrived for that, each after its GEMM of the step before.
  T* const next_h = buffers.h + ((step + 1) & 1) * int64_t{steps.batch} * steps.state_size;
  CellState<float> states[Tile::kCells];
#pragma unroll
  for (int i = 0; i < Tile::kCells; ++i) {
    const OwnCell<Tile> cell(steps, tile, i);
    if (!cell.exists) continue;
    unrolled<Cell::kRecurrent>([&](int g) {
      sums[i][kFirstRecurrent<Cell> + g] += partial[cell.row * Tile::kPitch + g * Tile::kUnits + cell.column];
    });
    float gates[Cell::kGates];
    unrolled<Cell::kGates>([&](int g) { gates[g] = sums[i][g]; });
    round_to<T>(gates);
    states[i] = cell_forward<Cell, typename Tile::CellMath>(gates, old_c[i]);
    const int64_t at = cell.state(steps);
    if (t < cell.length) {
      store(next_h[at], states[i].h);
    } else {
      // Before a sample's first valid step this is its initial state; after its last one nobody reads it.
      next_h[at] = in.h_0[at];
    }
  }
  // The other blocks wait for h alone.
  arrive_for_group(buffers.counters, tile);
#pragma unroll
  for (int i = 0; i < Tile::kCells; ++i) {
    const OwnCell<Tile> cell(steps, tile, i);
    if (!cell.exists) continue;
    const int64_t place = steps.row(t, cell.sample);
    if (t >= cell.length) {
      store_cell<Cell, T, float>(in, place, cell.unit);
      continue;
    }
    store_cell(in, place, cell.unit, sums[i], states[i]);
    const int64_t at = cell.state(steps);
    buffers.c[at] = states[i].c;
    if (t != steps.last_time(cell.length)) continue;
    store(in.h_n[at], states[i].h);
    store(in.c_n[at], states[i].c);
  }
}

// The gradients of a step, and at the end those of the initial state: `step` is in the order of the backward.
template <class Tile>
__device__ void backward_step(
    const typename Tile::Arguments& in, const Plan& plan, const Buffers<typename Tile::T>& buffers, int step, int tile,
    uint32_t weights, Ring& ring, float* partial) {
  using Cell = typename Tile::Cell;
  const Steps& steps = in.steps;
  const int t = step < steps.time ? steps.time_of(steps.time - 1 - step) : -1;
  const int previous = step > 0 ? steps.time_of(steps.time - step) : -1;
  LocalDerivatives<Cell, float> derivatives[Tile::kCells];
  float grad_h[Tile::kCells];
  float grad_c[Tile::kCells];
#pragma unroll
  for (int i = 0; i < Tile::kCells; ++i) {
    const OwnCell<Tile> cell(steps, tile, i);
    if (!cell.exists) continue;
    const int64_t at = cell.state(steps);
    grad_h[i] = 0;
    const bool is_first = step < steps.time && t == steps.last_time(cell.length);
    grad_c[i] = is_first || cell.length == 0 ? load_if_present(in.grad_c_n, at) : step > 0 ? buffers.c[at] : 0;
    if (step == steps.time || t >= cell.length) continue;
    const int64_t place = steps.row(t, cell.sample);
    derivatives[i] = local_derivatives_at<typename Tile::CellMath>(in, place, cell.unit);
    grad_h[i] = load_if_present(in.grad_output, place * steps.state_size + cell.unit);
    if (is_first) grad_h[i] += load_if_present(in.grad_h_n, at);
  }
  if (step > 0) multiply<Tile>(plan, weights, ring, partial);
#pragma unroll
  for (int i = 0; i < Tile::kCells; ++i) {
    const OwnCell<Tile> cell(steps, tile, i);
    if (!cell.exists) continue;
    const int64_t at = cell.state(steps);
    const bool is_valid = step < steps.time && t < cell.length;
    const bool has_previous = step > 0 && previous < cell.length;
    const float from_previous = has_previous ? partial[cell.row * Tile::kPitch + cell.column] : 0.f;
    if (!is_valid && (has_previous || (step == steps.time && cell.length == 0))) {
      // The row is done.
      store(in.grad_h_0[at], has_previous ? from_previous : load_if_present(in.grad_h_n, at));
      store(in.grad_c_0[at], grad_c[i]);
    }
    if (step == steps.time) continue;
    float gradients[Cell::kGates] = {};
    if (is_valid) {
      const bool is_first = t == steps.last_time(cell.length);
      apply_local_derivatives(derivatives[i], grad_h[i] + (is_first ? 0.f : from_previous), grad_c[i], gradients);
      buffers.c[at] = grad_c[i];
    }
    const int64_t place = steps.row(t, cell.sample) * Cell::kGates;
    unrolled<Cell::kGates>(
        [&](int g) { store(in.grad_gates[(place + g) * steps.state_size + cell.unit], gradients[g]); });
  }
  if (step < steps.time) {
    arrive_for_group(buffers.counters, tile);
  } else {
    sync_workers();  // the next tile's GEMM overwrites this one's
  }
}

#endif

template <class Tile>
__global__ void __launch_bounds__(kBlockThreads) sequence_group_kernel(
    typename Tile::Arguments in, Plan plan, Buffers<typename Tile::T> buffers,
    const EXTOPS_GRID_CONSTANT CUtensorMap map) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr bool kIsForward = Tile::kIsForward;
  extern __shared__ __align__(kTileAlignment) unsigned char shared[];
  __shared__ Barriers barriers;
  const int weight_bytes = plan.k_tiles * Tile::kWeightBytes;
  float* const partial = reinterpret_cast<float*>(shared + plan.partial_offset);
  if (threadIdx.x == 0) {
    prefetch(map);
    for (int stage = 0; stage < plan.stages; ++stage) {
      barriers.full(stage).initialize(1);
      if (plan.reuses_stages) barriers.empty(stage).initialize(Tile::kMultipliers / 32);
    }
    Mbarrier::publish();
  }
  load_weights<Tile>(in.steps, in.weights_h, plan, shared);
  __shared__ float biases[Tile::Cell::kGates * Tile::kUnits];
  if constexpr (kIsForward) in.load_biases(biases, Tile::kUnits);
  fence_proxy_async();
  __syncthreads();
  Ring ring{shared_address(shared + weight_bytes), Tile::kBytes, plan.stages, plan.reuses_stages, barriers};
  if (threadIdx.x < kWorkers) {
    if constexpr (kIsForward) start_forward<Tile>(in, plan, buffers);
    for (int step = 0; step < in.steps.time + !kIsForward; ++step) {
      for (int tile = blockIdx.y; tile < plan.tiles; tile += gridDim.y) {
        if constexpr (kIsForward) {
          forward_step<Tile>(in, plan, buffers, step, tile, shared_address(shared), biases, ring, partial);
        } else {
          backward_step<Tile>(in, plan, buffers, step, tile, shared_address(shared), ring, partial);
        }
      }
    }
  } else if (threadIdx.x == kWorkers) {
    load_tiles<Tile>(in.steps, plan, map, buffers.counters, ring);
  }
#endif
}

// ---- how it is launched ----

inline int round_up_division(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

// Beside the barriers and the biases, which are static.
template <class Tile>
int most_shared_bytes() {
  constexpr int kBiasBytes = Tile::kIsForward ? Tile::Cell::kGates * Tile::kUnits * int{sizeof(float)} : 0;
  constexpr int kStaticBytes = (kMaxStages * int{sizeof(uint64_t)} + kBiasBytes + kTileAlignment - 1) / kTileAlignment;
  return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - kStaticBytes * kTileAlignment;
}

// How a tile would divide the problem; 0 stages if it does not fit.
template <class Tile>
Plan make_plan(const Problem& problem) {
  const SequenceSizes& sizes = problem.sizes;
  const int sm_count = problem.context.sm_count();
  Plan plan{};
  plan.k_tiles = round_up_division(
      (Tile::kIsForward ? 1 : Tile::Cell::kRecurrent) * sizes.state_size, kTileColumns<typename Tile::T>);
  plan.tiles = round_up_division(sizes.batch, Tile::kRows);
  plan.copied_rows = static_cast<int>(std::min<int64_t>(sizes.batch, Tile::kRows));
  const int blocks = round_up_division(sizes.state_size, Tile::kUnits);
  if (blocks > sm_count) return plan;
  plan.grid = dim3(blocks, std::min(plan.tiles, sm_count / blocks));
  // A block with one tile copies nothing before its sums are read: sums and copies share memory.
  const bool is_single = plan.tiles <= static_cast<int>(plan.grid.y);
  const int64_t weights = int64_t{plan.k_tiles} * Tile::kWeightBytes;
  const int64_t stages = (most_shared_bytes<Tile>() - (is_single ? 0 : Tile::kPartialBytes) - weights) / Tile::kBytes;
  if (stages < Tile::kLeastStages) return plan;
  // The next step's copies begin only after this block has arrived at the tile's counter.
  plan.reuses_stages = !is_single || plan.k_tiles > std::min<int64_t>(stages, kMaxStages);
  const int most = plan.reuses_stages ? kReusedStages : kMaxStages;
  plan.stages = static_cast<int>(std::min<int64_t>({stages, most, std::max(plan.k_tiles, Tile::kLeastStages)}));
  plan.partial_offset = static_cast<int>(weights) + (is_single ? 0 : plan.stages * Tile::kBytes);
  plan.shared_bytes = static_cast<int>(weights) + plan.stages * Tile::kBytes + (is_single ? 0 : Tile::kPartialBytes);
  return plan;
}

inline int tiles_of_a_block(const Plan& plan) {
  return plan.stages == 0 ? kNoGroups : round_up_division(plan.tiles, plan.grid.y);
}

// Calls function(tile) with the tile size that gives a block the fewest tiles of samples; of equals the one of fewer
// units.
template <class Cell, class T, Math kMath, Pass kPass, int kRows = kTileRows, class Function>
auto with_best_tile(const Problem& problem, const Function& function) {
  using Narrow = Tile<Cell, T, kMath, kPass, 8, kRows>;
  using Wide = Tile<Cell, T, kMath, kPass, 16, kRows>;
  const bool wide = tiles_of_a_block(make_plan<Wide>(problem)) < tiles_of_a_block(make_plan<Narrow>(problem));
  return wide ? function(Wide{}) : function(Narrow{});
}

template <class Cell, Pass kPass, class Function>
auto with_tile(const Problem& problem, const Function& function) {
  if (problem.dtype == ScalarType::Float) {
    return problem.sizes.batch <= 2 * kFewRows
               ? with_best_tile<Cell, float, Math::kFloat32, kPass, kFewRows>(problem, function)
               : with_best_tile<Cell, float, Math::kFloat32, kPass>(problem, function);
  }
  return with_operand_type(problem.dtype, [&](auto scalar) {
    return with_best_tile<Cell, decltype(scalar), Math::kTensorCores, kPass>(problem, function);
  });
}

// What the blocks copy: forward h, backward the gradients of the recurrent gates.
template <class Tile>
bool make_map(CUtensorMap& map, const SequenceArguments& in, int rows) {
  using T = typename Tile::T;
  const cuuint64_t batch = in.sizes.batch;
  const cuuint64_t units = in.sizes.state_size;
  return make_tensor_map<T, 3>(
      map, map_type<T>(Tile::kMath == Math::kTensorCores), Buffers<T>(in.workspace, in.sizes).h, {units, batch, 2},
      {units * sizeof(T), batch * units * sizeof(T)}, rows);
}
template <class Tile>
bool make_map(CUtensorMap& map, const SequenceBackwardArguments& in, int rows) {
  using T = typename Tile::T;
  using Cell = typename Tile::Cell;
  const SequenceSizes& sizes = in.sizes;
  const cuuint64_t row_bytes = Cell::kGates * sizes.state_size * sizeof(T);
  return make_tensor_map<T, 3>(
      map, map_type<T>(Tile::kMath == Math::kTensorCores),
      static_cast<const T*>(in.grad_gates) + kFirstRecurrent<Cell> * sizes.state_size,
      {cuuint64_t(Cell::kRecurrent * sizes.state_size), cuuint64_t(sizes.batch), cuuint64_t(sizes.time)},
      {sizes.batch_stride * row_bytes, sizes.time_stride * row_bytes}, rows);
}

}  // namespace group

template <class Cell>
int tiles_of_groups(const Problem& problem) {
  using namespace group;
  const auto tiles = [&](auto tile) {
    using Tile = decltype(tile);
    // TMA needs rows aligned to chunks of 16 bytes.
    const bool has_chunks = problem.sizes.state_size * sizeof(typename Tile::T) % kChunkBytes == 0;
    return has_chunks ? tiles_of_a_block(make_plan<Tile>(problem)) : kNoGroups;
  };
  return problem.pass == Pass::kForward ? with_tile<Cell, Pass::kForward>(problem, tiles)
                                        : with_tile<Cell, Pass::kBackward>(problem, tiles);
}

template <class Cell>
int64_t group_workspace(const Problem& problem) {
  using namespace group;
  return with_tile<Cell, Pass::kForward>(
      problem, [&](auto tile) { return Buffers<typename decltype(tile)::T>(nullptr, problem.sizes).bytes; });
}

template <class Cell, class In>
Error launch_groups(const Problem& problem, const In& in) {
  using namespace group;
  return with_tile<Cell, kPassOf<In>>(problem, [&](auto tile) -> Error {
    using Tile = decltype(tile);
    const Plan plan = make_plan<Tile>(problem);
    const Buffers<typename Tile::T> buffers(in.workspace, in.sizes);
    const cudaStream_t stream = problem.context.stream();
    CUtensorMap map;
    if (!make_map<Tile>(map, in, plan.copied_rows)) return kNoTensorMap;
    cudaMemsetAsync(buffers.counters, 0, plan.tiles * kCounterBytes, stream);
    constexpr auto kernel = &sequence_group_kernel<Tile>;
    if (const Error error = allow_shared_memory<kernel>(most_shared_bytes<Tile>())) return error;
    cudaLaunchAttribute cooperative{};
    cooperative.id = cudaLaunchAttributeCooperative;
    cooperative.val.cooperative = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = plan.grid;
    config.blockDim = kBlockThreads;
    config.dynamicSmemBytes = plan.shared_bytes;
    config.stream = stream;
    config.attrs = &cooperative;
    config.numAttrs = 1;
    cudaLaunchKernelEx(&config, kernel, typename Tile::Arguments(in), plan, buffers, map);
    return launch_error();
  });
}

}  // namespace extops::cuda
