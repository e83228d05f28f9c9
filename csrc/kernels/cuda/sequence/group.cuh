// A persistent kernel for whole sequences on GPUs from Ampere on. A group of blocks computes some tiles of samples.
// Each block owns some units, whose recurrent weights stay in its shared memory for all steps. After each step the
// blocks of a group exchange values through L2.
//
// Each warp of a block multiplies along a part of K alone. So it waits only for the blocks that own the units of its
// part, and loads their values from L2 into its registers, in the order in which it multiplies them: no other warp
// needs them, and they take no shared memory. The warps' sums are then added up in shared memory. Tensor cores multiply
// in 16-bit types and TF32 (mma.sync), multiply-adds in strict float32.
//
// In the forward a block computes all gates of its units, from h of all units. In the backward the gradients of all
// gates of all units would be several times as much to read. So `kRecurrent` neighbouring blocks share their units'
// columns: each multiplies the gradients of one gate, and they exchange their sums.
//
// Blocks that wait for each other must be co-resident: the cooperative launch guarantees it or fails.
#pragma once

#include "group_cells.cuh"
#include "group_plan.h"

namespace extops::cuda {
namespace group {

template <class Cell_, class T_, Math kMath_, Pass kPass_, int kUnits_>
struct Tile {
  using Cell = Cell_;
  using T = T_;
  static constexpr bool kIsFloat32 = kMath_ == Math::kFloat32;
  using CellMath = std::conditional_t<kIsFloat32, ExactMath, FastMath>;
  using Arguments = SequencePass<kPass_, Cell, T>;
  static constexpr bool kIsForward = kPass_ == Pass::kForward;
  static constexpr int kWorkers = kTeamThreads;
  static constexpr int kUnits = kUnits_;
  static constexpr int kMostRows = most_group_rows(kIsFloat32);
  static constexpr int kCells = kMostRows * kUnits / kWorkers;
  static constexpr int kColumns = Cell::kRecurrent * kUnits;  // of the GEMM
  static constexpr int kColumnTiles = kColumns / 8;
  static constexpr int kChunks = group_chunks(kIsFloat32);                            // of a row, in a piece of K
  static constexpr int kDepth = kChunks * kChunkBytes / static_cast<int>(sizeof(T));  // of a piece of K
  static constexpr int kTurnRows = kWorkers / kUnits;     // whose sums are added up at a time, one cell a thread
  static constexpr int kWarpSums = kColumns * kTurnRows;  // of a warp, at a time
  static constexpr int kParts = kIsForward ? 1 : Cell::kRecurrent;  // matrices that are multiplied, by different blocks
  static constexpr GroupKind kKind{Cell::kRecurrent, Cell::kGates, sizeof(T), kIsFloat32, !kIsForward};
};

// A kernel's workspace. `sums` are of the backward alone: of each tile and block, the sums by one gate.
struct Buffers {
  unsigned* counters;
  uint4* operands;
  float* c;
  float* sums;
  int64_t zeroed_bytes;
  int64_t bytes;

  template <class Tile>
  static Buffers make(void* workspace, const SequenceSizes& sizes, const GroupPlan& plan) {
    const auto aligned = [](int64_t n) { return (n + 255) / 256 * 256; };
    const int64_t tiles = plan.tiles * sizes.directions, rows = tiles * plan.rows;
    const int64_t columns = Tile::kIsForward ? 0 : plan.blocks / Tile::kParts;
    const int64_t of_counters = tiles * (kTeamWarps + columns) * kCounterBytes;
    const int64_t of_operands = 2 * Tile::kParts * rows * plan.k_blocks * Tile::kChunks * kChunkBytes;
    const int64_t of_c = aligned(sizes.batch * sizes.state_stride * sizes.state_size * int64_t{sizeof(float)});
    const int64_t of_sums = columns * Tile::kParts * Tile::kColumns * rows * int64_t{sizeof(float)};
    char* const start = static_cast<char*>(workspace);
    Buffers buffers{};
    buffers.zeroed_bytes = aligned(of_counters + of_operands);
    buffers.counters = reinterpret_cast<unsigned*>(start);
    buffers.operands = reinterpret_cast<uint4*>(start + of_counters);
    buffers.c = reinterpret_cast<float*>(start + buffers.zeroed_bytes);
    buffers.sums = reinterpret_cast<float*>(start + buffers.zeroed_bytes + of_c);
    buffers.bytes = buffers.zeroed_bytes + of_c + of_sums;
    return buffers;
  }
};

#if defined(EXTOPS_TENSOR_CORES)

__device__ inline int team_id() { return static_cast<int>(threadIdx.x) / kTeamThreads; }
__device__ inline int team_thread() { return static_cast<int>(threadIdx.x) % kTeamThreads; }
__device__ inline int team_warp() { return team_thread() / 32; }
__device__ inline void sync_team() {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + team_id()), "n"(kTeamThreads) : "memory");
}

// From L2, where other blocks have written it.
__device__ inline uint4 load_from_l2(const uint4* from) {
  uint4 values;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(values.x), "=r"(values.y), "=r"(values.z), "=r"(values.w)
               : "l"(from));
  return values;
}

__device__ inline float load_from_l2(const float* from) {
  float value;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(from));
  return value;
}

// ---- which part of K is whose ----

// The first piece of K of a warp; that of the next warp is the first one after its last.
__device__ inline int first_k_block(const GroupPlan& plan, int warp) { return warp * plan.k_blocks / kTeamWarps; }

// The warp that multiplies the values of the units of this block.
template <class Tile>
__device__ int warp_of_own_units(const GroupPlan& plan) {
  const int k_block = static_cast<int>(blockIdx.x) * Tile::kUnits / Tile::kDepth;
  return (kTeamWarps * (k_block + 1) + plan.k_blocks - 1) / plan.k_blocks - 1;
}

// How many blocks own the units that this warp multiplies the values of.
template <class Tile>
__device__ unsigned blocks_of_warp(const Steps& steps, const GroupPlan& plan) {
  const int first = first_k_block(plan, team_warp()) * Tile::kDepth;
  const int last = min(first_k_block(plan, team_warp() + 1) * Tile::kDepth, steps.state_size);
  return last > first ? (last - first + Tile::kUnits - 1) / Tile::kUnits : 0;
}

// ---- the operands in L2 ----

// The number of a tile among those of all directions, of which each block computes one.
__device__ inline int64_t of_all(const GroupPlan& plan, int tile) { return int64_t{blockIdx.z} * plan.tiles + tile; }

// The values of the units of one step that are multiplied: slot `slot` of two, matrix `part`, of a tile.
template <class Tile>
__device__ uint4* operands_of(const GroupPlan& plan, const Buffers& buffers, int slot, int part, int tile) {
  const int64_t chunks = int64_t{plan.k_blocks} * Tile::kChunks * plan.rows;
  return buffers.operands +
         ((int64_t{slot} * Tile::kParts + part) * gridDim.z * plan.tiles + of_all(plan, tile)) * chunks;
}

// Where the value of a unit is among them. Each load of a warp reads neighbours. On tensor cores a lane loads its part
// of the operand of one instruction: 16 rows of which it has row l / 4 and eight further, and of each two words along
// K. K may be in any order, if it is the same in both factors.
template <class Tile>
__device__ int place_of(const GroupPlan& plan, int row, int unit) {
  using T = typename Tile::T;
  constexpr int kOfChunk = kChunkBytes / static_cast<int>(sizeof(T));
  if constexpr (Tile::kIsFloat32) {
    const int chunk = unit / kOfChunk;
    const int place =
        plan.rows == Tile::kMostRows ? chunk * plan.rows + row : row * plan.k_blocks * Tile::kChunks + chunk;
    return place * kOfChunk + unit % kOfChunk;
  } else {
    constexpr int kPerWord = Operand<T>::kPerWord;
    const int lane = row % 8 * 4 + unit % Operand<T>::kStepK / (2 * kPerWord);
    const int word = unit / kPerWord % 2 * 2 + row / 8 % 2;
    const int step = unit / Operand<T>::kStepK;
    const int fragment = (step / 2 * (plan.rows / 16) + row / 16) * 2 + step % 2;
    return (fragment * 32 + lane) * kOfChunk + word * kPerWord + unit % kPerWord;
  }
}

template <class Tile>
__device__ void put_operand(const GroupPlan& plan, uint4* operands, const OwnCell<Tile>& cell, typename Tile::T value) {
  using T = typename Tile::T;
  if constexpr (std::is_same_v<T, float> && !Tile::kIsFloat32) value = round_to_tf32(value);
  reinterpret_cast<T*>(operands)[place_of<Tile>(plan, cell.row, cell.unit)] = value;
}

// ---- GEMM ----

// Loads the block's weights into shared memory. Column n of the forward is gate n / kUnits of unit n % kUnits, along h
// of all units; column n of the backward is the n-th unit of this block and its neighbours, along one gate of all
// units.
template <class Tile>
__device__ void load_weights(const Steps& steps, const typename Tile::T* weights, const GroupPlan& plan, uint4* to) {
  using T = typename Tile::T;
  constexpr int kOfChunk = kChunkBytes / static_cast<int>(sizeof(T));
  constexpr int kColumns = Tile::kColumns;
  const int chunks = plan.k_blocks * Tile::kChunks;
  const int block = static_cast<int>(blockIdx.x);
  for (int item = threadIdx.x; item < kColumns * chunks; item += kGroupThreads) {
    // Neighbouring threads read neighbouring weights.
    const int n = Tile::kIsForward ? item / chunks : item % kColumns;
    const int chunk = Tile::kIsForward ? item % chunks : item / kColumns;
    // On tensor cores a chunk holds the weights of a lane for two instructions.
    constexpr int kOfStep = Tile::kIsFloat32 ? kOfChunk : kOfChunk / 2;
    const int first = Tile::kIsFloat32 ? chunk * kOfChunk : chunk / 4 * Tile::kDepth + chunk % 4 * kOfStep;
    T values[kOfChunk];
#pragma unroll
    for (int i = 0; i < kOfChunk; ++i) {
      const int k = first + i / kOfStep * (Tile::kDepth / 2) + i % kOfStep;
      values[i] = Tile::kIsForward
                      ? recurrent_weight(steps, weights, n / Tile::kUnits, block * Tile::kUnits + n % Tile::kUnits, k)
                      : recurrent_weight(steps, weights, block % Tile::kParts, k, block / Tile::kParts * kColumns + n);
      if constexpr (std::is_same_v<T, float> && !Tile::kIsFloat32) values[i] = round_to_tf32(values[i]);
    }
    // As lanes load them. In strict float32, four columns of two neighbouring chunks lie in different banks.
    const int place = Tile::kIsFloat32 ? chunk * kColumns + (n ^ chunk % 2 * 4)
                                       : (chunk / 4 * Tile::kColumnTiles + n / 8) * 32 + n % 8 * 4 + chunk % 4;
    memcpy(to + place, values, sizeof(uint4));
  }
}

// Adds up the sums of the warps of a team, one cell of a thread after the other. `sums` is where the warps store
// theirs, [kTeamWarps][kColumnTiles][kTurnRows][8]; `of_warp`(turn, to) stores those of this warp.
template <class Tile, class Sums>
__device__ void add_up(
    const Sums& of_warp, int rows, float* sums, float (&found)[Tile::kCells][Tile::Cell::kRecurrent]) {
#pragma unroll
  for (int turn = 0; turn < Sums::kTurns; ++turn) {
    if (turn * Tile::kTurnRows >= rows) break;
    if (turn > 0) sync_team();  // all have read those of the turn before
    of_warp(turn, sums + team_warp() * Tile::kWarpSums);
    sync_team();
    const int row = team_thread() / Tile::kUnits;
    const int unit = team_thread() % Tile::kUnits;
#pragma unroll
    for (int g = 0; g < Tile::Cell::kRecurrent; ++g) {
      const int column = g * Tile::kUnits + unit;
      const float* const from = sums + (column / 8 * Tile::kTurnRows + row) * 8 + column % 8;
      float sum = 0;
#pragma unroll
      for (int warp = 0; warp < kTeamWarps; ++warp) sum += from[warp * Tile::kWarpSums];
      found[turn][g] = sum;
    }
  }
}

// The GEMM of a tile of 16 * kRowTiles rows on tensor cores: this warp's part of K.
template <class Tile, int kRowTiles>
struct TensorSums {
  // Pieces of K whose operands are on their way.
  static constexpr int kAhead = (Tile::kUnits == 8 ? 8 : 4) / kRowTiles;
  static constexpr int kTurns = std::max(1, kRowTiles * 16 / Tile::kTurnRows);
  float values[kRowTiles][Tile::kColumnTiles][4] = {};

  __device__ TensorSums(const GroupPlan& plan, const uint4* weights, const uint4* operands) {
    const int first = first_k_block(plan, team_warp());
    const int last = first_k_block(plan, team_warp() + 1);
    uint4 a[kAhead][kRowTiles][2];
    const auto fetch = [&](uint4(&to)[kRowTiles][2], int k_block) {
      if (k_block >= last) return;
      const uint4* const from = operands + k_block * kRowTiles * 64 + lane_id();
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        to[m][0] = load_from_l2(from + m * 64);
        to[m][1] = load_from_l2(from + m * 64 + 32);
      }
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) fetch(a[i], first + i);
#pragma unroll 1
    for (int k_block = first; k_block < last; k_block += kAhead) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (k_block + i >= last) break;
        multiply(a[i], weights + (k_block + i) * Tile::kColumnTiles * 32 + lane_id());
        fetch(a[i], k_block + i + kAhead);
      }
    }
  }

  __device__ void operator()(int turn, float* to) const {
    float* const own = to + lane_id() * 2;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int j = 0; j < Tile::kColumnTiles; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = m * 16 + half * 8;
          if (row / Tile::kTurnRows != turn) continue;
          *reinterpret_cast<float2*>(own + (j * Tile::kTurnRows + row % Tile::kTurnRows) * 8) = {
              values[m][j][2 * half], values[m][j][2 * half + 1]};
        }
      }
    }
  }

 private:
  // A piece of K takes two instructions.
  __device__ void multiply(const uint4 (&a)[kRowTiles][2], const uint4* weights) {
#pragma unroll
    for (int j = 0; j < Tile::kColumnTiles; ++j) {
      const uint4 w = weights[j * 32];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        mma(values[m][j], {a[m][0].x, a[m][0].y, a[m][0].z, a[m][0].w}, w.x, w.y, typename Tile::T{});
      }
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        mma(values[m][j], {a[m][1].x, a[m][1].y, a[m][1].z, a[m][1].w}, w.z, w.w, typename Tile::T{});
      }
    }
  }
};

// The sums of eight rows or columns by each lane in strict float32. Loading 16 bytes from shared memory takes a lane as
// long as four multiply-adds, so each loaded chunk must be used many times.
template <class Tile>
struct FloatSums {
  static constexpr int kOwnColumns = Tile::kColumns / 4;  // every fourth column
  float values[8][kOwnColumns] = {};

  // `weights` is where the weights of a chunk of K begin, for this lane.
  __device__ void multiply(const uint4 (&x)[8], const uint4* weights, int chunk) {
    const float4* const even = reinterpret_cast<const float4*>(weights + chunk % 2 * 4);
    const float4* const odd = reinterpret_cast<const float4*>(weights - chunk % 2 * 4);
#pragma unroll
    for (int j = 0; j < kOwnColumns; ++j) {
      const float4 w = (j % 2 == 0 ? even : odd)[4 * j];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& sum = values[i][j];
        sum = fmaf(__uint_as_float(x[i].x), w.x, sum);
        sum = fmaf(__uint_as_float(x[i].y), w.y, sum);
        sum = fmaf(__uint_as_float(x[i].z), w.z, sum);
        sum = fmaf(__uint_as_float(x[i].w), w.w, sum);
      }
    }
  }

  // Stores the sums `values`[i] of row lane / 4, `to` being where the first of the turn is.
  __device__ void store_row(int i, float* to) const {
#pragma unroll
    for (int j = 0; j < kOwnColumns; ++j) {
      to[(j / 2 * Tile::kTurnRows + lane_id() / 4) * 8 + j % 2 * 4 + lane_id() % 4] = values[i][j];
    }
  }
};

// The GEMM of a tile of 64 rows in strict float32: a lane computes every eighth row.
template <class Tile>
struct FloatTile : FloatSums<Tile> {
  static constexpr int kTurns = Tile::kCells;

  __device__ FloatTile(const GroupPlan& plan, const uint4* weights, const uint4* operands) {
    const int first = first_k_block(plan, team_warp()) * Tile::kChunks;
    const int last = first_k_block(plan, team_warp() + 1) * Tile::kChunks;
    if (first == last) return;
    uint4 next[8];
    const auto fetch = [&](int chunk) {
      const uint4* const from = operands + chunk * Tile::kMostRows + lane_id() / 4;
#pragma unroll
      for (int i = 0; i < 8; ++i) next[i] = load_from_l2(from + i * 8);
    };
    fetch(first);
#pragma unroll 2
    for (int chunk = first; chunk < last; ++chunk) {
      uint4 x[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = next[i];
      if (chunk + 1 < last) fetch(chunk + 1);
      this->multiply(x, weights + chunk * Tile::kColumns + lane_id() % 4, chunk);
    }
  }

  __device__ void operator()(int turn, float* to) const {
    constexpr int kOfTurn = Tile::kTurnRows / 8;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i / kOfTurn == turn) this->store_row(i, to + i % kOfTurn * 64);
    }
  }
};

// The same of tiles with fewer rows, eight at a time: a lane computes all of them, for every eighth chunk of K.
template <class Tile>
struct FloatRows {
  static constexpr int kTurns = Tile::kMostRows / 2 / Tile::kTurnRows;
  const GroupPlan& plan;
  const uint4* weights;
  const uint4* operands;

  __device__ void operator()(int turn, float* to) const {
    const int rows = min(plan.rows - turn * Tile::kTurnRows, Tile::kTurnRows);
    const int first = first_k_block(plan, team_warp());
    const int last = first_k_block(plan, team_warp() + 1);
    const int chunks = plan.k_blocks * Tile::kChunks;
    const int own_chunk = lane_id() / 4;
    const uint4* const own_weights = weights + own_chunk * Tile::kColumns + lane_id() % 4;
    const uint4* const own_operands = operands + turn * Tile::kTurnRows * chunks + own_chunk;
#pragma unroll 1
    for (int row = 0; row < rows; row += 8) {
      FloatSums<Tile> sums;
      uint4 next[8];
      const auto fetch = [&](int k_block) {
#pragma unroll
        for (int i = 0; i < 8; ++i) next[i] = load_from_l2(own_operands + (row + i) * chunks + k_block * Tile::kChunks);
      };
      if (first < last) fetch(first);
#pragma unroll 1
      for (int k_block = first; k_block < last; ++k_block) {
        uint4 x[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = next[i];
        if (k_block + 1 < last) fetch(k_block + 1);
        sums.multiply(x, own_weights + k_block * Tile::kChunks * Tile::kColumns, own_chunk);
      }
      // Lane 4 * i + j gets the sums of row i.
      constexpr int kCount = FloatSums<Tile>::kOwnColumns;
      float* const values = &sums.values[0][0];
      exchange_halves<8 * kCount>(values, 16);
      exchange_halves<4 * kCount>(values, 8);
      exchange_halves<2 * kCount>(values, 4);
      sums.store_row(0, to + row * 8);
    }
  }
};

// Multiplies the operands of a tile by the block's weights: `found` gets, of each of this thread's cells, the sums in
// the columns with its number, kUnits apart.
template <class Tile>
__device__ void multiply(
    const GroupPlan& plan, const uint4* weights, const uint4* operands, float* sums,
    float (&found)[Tile::kCells][Tile::Cell::kRecurrent]) {
  const auto by = [&](const auto& of_warp) { add_up<Tile>(of_warp, plan.rows, sums, found); };
  if constexpr (Tile::kIsFloat32) {
    if (plan.rows == Tile::kMostRows) return by(FloatTile<Tile>(plan, weights, operands));
    by(FloatRows<Tile>{plan, weights, operands});
  } else {
    if (plan.rows == Tile::kMostRows) return by(TensorSums<Tile, 2>(plan, weights, operands));
    by(TensorSums<Tile, 1>(plan, weights, operands));
  }
}

// ---- the steps ----

// What the kernel keeps in shared memory, and its place among the blocks.
template <class Tile>
struct Block {
  const typename Tile::Arguments& in;
  const GroupPlan& plan;
  const Buffers& buffers;
  const uint4* weights;
  float* sums;

  // The counter of the blocks that own the units of a warp's part of K, and of blocks that share columns.
  __device__ unsigned* counter_of_warp(int tile, int warp) const {
    return counter_of(buffers.counters, of_all(plan, tile) * kTeamWarps + warp);
  }
  __device__ unsigned* counter_of_columns(int tile) const {
    const int64_t columns = gridDim.x / Tile::kParts;
    const int64_t first = int64_t{gridDim.z} * plan.tiles * kTeamWarps;
    return counter_of(buffers.counters, first + of_all(plan, tile) * columns + blockIdx.x / Tile::kParts);
  }

  // Waits until the operands of this warp have been written `times` times.
  __device__ void wait_for_operands(int tile, unsigned times) const {
    if (lane_id() == 0) wait_for(counter_of_warp(tile, team_warp()), times * blocks_of_warp<Tile>(in.steps, plan));
    __syncwarp();
  }

  // After the barrier, one thread's release makes the writes of all threads visible to those that wait. All have then
  // read the sums in shared memory, too.
  __device__ void arrive_with_operands(int tile) const {
    sync_team();
    if (team_thread() == 0 && blockIdx.x * Tile::kUnits < in.steps.state_size) {
      raise(counter_of_warp(tile, warp_of_own_units<Tile>(plan)));
    }
  }

  __device__ uint4* operands(int slot, int part, int tile) const {
    return operands_of<Tile>(plan, buffers, slot, part, tile);
  }
};

template <class Tile>
__device__ void run_forward(const Block<Tile>& block, const float* biases) {
  using T = typename Tile::T;
  const GroupPlan& plan = block.plan;
  const auto each_tile = [&](const auto& body) {
    for (int tile = blockIdx.y * kGroupTeams + team_id(); tile < plan.tiles; tile += gridDim.y * kGroupTeams)
      body(tile);
  };
  each_tile([&](int tile) {
    start_forward<Tile>(block.in, block.buffers.c, plan.rows, tile, [&](const OwnCell<Tile>& cell, T h) {
      put_operand<Tile>(plan, block.operands(0, 0, tile), cell, h);
    });
    block.arrive_with_operands(tile);
  });
  for (int step = 0; step < block.in.steps.time; ++step) {
    each_tile([&](int tile) {
      ForwardStep<Tile> cells(block.in, block.buffers.c, plan.rows, step, tile);
      float found[Tile::kCells][Tile::Cell::kRecurrent];
      block.wait_for_operands(tile, step + 1);
      multiply<Tile>(plan, block.weights, block.operands(step & 1, 0, tile), block.sums, found);
      // Two alternating slots: this overwrites h of the step before. All have read it, since each block arrived after
      // its GEMM of that step, and the warps of this block have seen all arrivals.
      uint4* const next = block.operands((step + 1) & 1, 0, tile);
      cells.compute(
          biases, [&](int i, int g) { return found[i][g]; },
          [&](const OwnCell<Tile>& cell, T h) { put_operand<Tile>(plan, next, cell, h); });
      block.arrive_with_operands(tile);
      cells.write();
    });
  }
}

// The sums of one gate that this block's neighbours and itself wait for, and their sum. Everybody has read them before
// they are overwritten, since the gradients that come from them are needed for the next ones.
template <class Tile>
__device__ void write_sums(
    const Block<Tile>& block, int tile, const float (&found)[Tile::kCells][Tile::Cell::kRecurrent]) {
  const GroupPlan& plan = block.plan;
  float* const sums = block.buffers.sums + (of_all(plan, tile) * gridDim.x + blockIdx.x) * Tile::kColumns * plan.rows;
#pragma unroll
  for (int i = 0; i < Tile::kCells; ++i) {
    const int item = i * Tile::kWorkers + team_thread();
    const int row = item / Tile::kUnits;
    if (row >= plan.rows) break;
    unrolled<Tile::Cell::kRecurrent>([&](int g) {
      const int column = g * Tile::kUnits + item % Tile::kUnits;
      sums[(column / 8 * plan.rows + row) * 8 + column % 8] = found[i][g];
    });
  }
  sync_team();
  if (team_thread() == 0) raise(block.counter_of_columns(tile));
}

template <class Tile>
__device__ void read_sums(const Block<Tile>& block, int tile, float (&found)[Tile::kCells]) {
  const GroupPlan& plan = block.plan;
  const int64_t size = int64_t{Tile::kColumns} * plan.rows;
  const int own = static_cast<int>(blockIdx.x) % Tile::kParts;
  const int column = own * Tile::kUnits + team_thread() % Tile::kUnits;
  const float* const sums = block.buffers.sums + (of_all(plan, tile) * gridDim.x + blockIdx.x - own) * size +
                            column / 8 * plan.rows * 8 + column % 8;
  const int count = OwnCell<Tile>::count(plan.rows);
  float values[Tile::kCells][Tile::kParts];
  // Those of rows that the tile lacks are not used.
#pragma unroll
  for (int i = 0; i < Tile::kCells; ++i) {
    if (OwnCell<Tile>::are_all(i, count)) break;
    const int row = min((i * Tile::kWorkers + team_thread()) / Tile::kUnits, plan.rows - 1);
    unrolled<Tile::kParts>([&](int part) { values[i][part] = load_from_l2(sums + part * size + row * 8); });
  }
#pragma unroll
  for (int i = 0; i < Tile::kCells; ++i) {
    found[i] = 0;
    unrolled<Tile::kParts>([&](int part) { found[i] += values[i][part]; });
  }
}

template <class Tile>
__device__ void run_backward(const Block<Tile>& block) {
  using T = typename Tile::T;
  using Cell = typename Tile::Cell;
  const GroupPlan& plan = block.plan;
  const int part = static_cast<int>(blockIdx.x) % Tile::kParts;
  const auto each_tile = [&](const auto& body) {
    for (int tile = blockIdx.y * kGroupTeams + team_id(); tile < plan.tiles; tile += gridDim.y * kGroupTeams)
      body(tile);
  };
  for (int step = 0; step <= block.in.steps.time; ++step) {
    if (step > 0) {
      each_tile([&](int tile) {
        float found[Tile::kCells][Cell::kRecurrent];
        block.wait_for_operands(tile, step);
        multiply<Tile>(plan, block.weights, block.operands((step - 1) & 1, part, tile), block.sums, found);
        write_sums(block, tile, found);
      });
    }
    each_tile([&](int tile) {
      BackwardStep<Tile> cells(block.in, block.buffers.c, plan.rows, step, tile);
      if (step > 0) {
        if (lane_id() == 0) wait_for(block.counter_of_columns(tile), step * Tile::kParts);
        __syncwarp();
      }
      // Two alternating slots: all have read what this overwrites, since it went into the sums of the step before.
      cells.compute(
          [&](float (&gradients)[Tile::kCells]) { read_sums(block, tile, gradients); },
          [&](const OwnCell<Tile>& cell, const float (&gradients)[Cell::kGates]) {
            unrolled<Cell::kRecurrent>([&](int g) {
              T value;
              store(value, gradients[kFirstRecurrent<Cell> + g]);
              put_operand<Tile>(plan, block.operands(step & 1, g, tile), cell, value);
            });
          });
      if (cells.is_last()) return;
      block.arrive_with_operands(tile);
      cells.write();
    });
  }
}

#endif

template <class Tile>
__global__ void __launch_bounds__(kGroupThreads, 1)
    sequence_group_kernel(typename Tile::Arguments in, GroupPlan plan, Buffers buffers) {
#if defined(EXTOPS_TENSOR_CORES)
  extern __shared__ uint4 weights[];
  float* const sums = reinterpret_cast<float*>(reinterpret_cast<unsigned char*>(weights) + plan.weight_bytes);
  load_weights<Tile>(in.steps, in.steps.template weights_of<typename Tile::Cell>(in.weights_h), plan, weights);
  const Block<Tile> block{in, plan, buffers, weights, sums + team_id() * kTeamWarps * Tile::kWarpSums};
  if constexpr (Tile::kIsForward) {
    __shared__ float biases[Tile::Cell::kGates * Tile::kUnits];
    in.load_biases(biases, Tile::kUnits);
    __syncthreads();
    run_forward(block, biases);
  } else {
    __syncthreads();
    run_backward(block);
  }
#endif
}

// ---- how it is launched ----

// Calls function(tile, plan) with the best plan and its tile, or without units where none fits.
template <class Cell, class T, Math kMath, Pass kPass, class Function>
auto with_units(const Problem& problem, const Function& function) {
  using Narrow = Tile<Cell, T, kMath, kPass, 8>;
  const int sm_count = problem.context.sm_count() / static_cast<int>(problem.sizes.directions);
  const GroupLimits limits{sm_count, device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)};
  const GroupPlan plan = best_group_plan(Narrow::kKind, problem.sizes.batch, problem.sizes.state_size, limits);
  if constexpr (most_group_units(sizeof(T)) == 16) {
    if (plan.units == 16) return function(Tile<Cell, T, kMath, kPass, 16>{}, plan);
  }
  return function(Narrow{}, plan);
}

template <class Cell, Pass kPass, class Function>
auto with_plan(const Problem& problem, const Function& function) {
  if (problem.dtype == ScalarType::Float) return with_units<Cell, float, Math::kFloat32, kPass>(problem, function);
  return with_operand_type(problem.dtype, [&](auto scalar) {
    return with_units<Cell, decltype(scalar), Math::kTensorCores, kPass>(problem, function);
  });
}

// The same, by the pass of the problem.
template <class Cell, class Function>
auto with_plan(const Problem& problem, const Function& function) {
  return problem.pass == Pass::kForward ? with_plan<Cell, Pass::kForward>(problem, function)
                                        : with_plan<Cell, Pass::kBackward>(problem, function);
}

}  // namespace group

template <class Cell>
int64_t group_workspace(const Problem& problem) {
  return group::with_plan<Cell>(problem, [&](auto tile, const GroupPlan& plan) -> int64_t {
    if (plan.units == 0) return 0;
    return group::Buffers::make<decltype(tile)>(nullptr, problem.sizes, plan).bytes;
  });
}

template <class Cell, class In>
Error launch_groups(const Problem& problem, const In& in) {
  using namespace group;
  return with_plan<Cell, kPassOf<In>>(problem, [&](auto tile, const GroupPlan& plan) -> Error {
    using Tile = decltype(tile);
    const Buffers buffers = Buffers::make<Tile>(in.workspace, in.sizes, plan);
    const cudaStream_t stream = problem.context.stream();
    cudaMemsetAsync(in.workspace, 0, buffers.zeroed_bytes, stream);
    constexpr auto kernel = &sequence_group_kernel<Tile>;
    const int most =
        device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - group_bias_bytes(Tile::kKind, plan.units);
    if (const Error error = allow_shared_memory<kernel>(most)) return error;
    const dim3 grid(plan.blocks, plan.groups, in.sizes.directions);
    Launch launch({grid, kGroupThreads, static_cast<unsigned>(plan.shared_bytes)}, stream);
    launch.add(cudaLaunchAttributeCooperative).cooperative = 1;
    return launch.run(kernel, typename Tile::Arguments(in), plan, buffers);
  });
}

}  // namespace extops::cuda
