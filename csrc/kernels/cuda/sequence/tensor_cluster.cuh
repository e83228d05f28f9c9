// A persistent kernel for Hopper GPUs on tensor cores (16-bit types and TF32), for states of up to 512. A cluster of
// blocks computes eight or sixteen samples. Each block owns 64 units, in TF32 32, whose recurrent weights its threads
// hold in registers for all steps; those of a fourth gate stay in shared memory.
//
// The exchange between the blocks dominates a step, so the blocks exchange as little as possible. Forward, each block
// sends h of its units to all blocks, which multiply all of h by the weights of their gates. Backward, each block
// multiplies the gradients of its own gates, and sends the sums to the blocks that own the units: one number for each
// unit, where the gradients themselves are three. All of that goes directly from registers into the other blocks'
// shared memory (st.async), where mbarriers count the bytes.
//
// All blocks of a cluster run at the same time, and clusters do not wait for each other.
#pragma once

#include <algorithm>

#include "../common/hopper.cuh"
#include "tensor.cuh"

namespace extops::cuda {
namespace tensor_cluster {

template <class Cell_, class T_, Pass kPass_, int kBlocks_, int kSamples_>
struct Tile {
  using Cell = Cell_;
  using T = T_;
  using Arguments = SequencePass<kPass_, Cell, T>;
  static constexpr bool kIsForward = kPass_ == Pass::kForward;
  static constexpr int kBlocks = kBlocks_;
  static constexpr int kUnits = kTileColumns<T>;  // of a block
  static constexpr int kSamples = kSamples_;
  static constexpr int kThreads = 256;
  static constexpr int kWarps = kThreads / 32;
  // Units come in groups of 16, the M of an instruction; samples in tiles of eight, its N.
  static constexpr int kGroups = kUnits / 16;
  static constexpr int kGroupWarps = kWarps / kGroups;
  static constexpr int kTileSamples = 8;
  static constexpr int kTiles = kSamples / kTileSamples;
  // Cells come in pairs: two units of one sample. A group has two pairs for each lane and tile; a warp takes one.
  static constexpr int kGroupPairs = 2 * kTiles;
  static_assert(kGroupPairs <= kGroupWarps);

  // Operands lie in chunks of 16 bytes along K, each of all samples.
  static constexpr int kStepK = Operand<T>::kStepK;
  static constexpr int kOfChunk = Operand<T>::kOfChunk;
  static constexpr int kChunk = kSamples * kChunkBytes;
  static constexpr int kOperandBytes = kUnits / kOfChunk * kChunk;  // of one value of each cell

  // Forward, a warp computes the sums of its group's gates over the h of some of the blocks. Backward, it computes
  // those of tiles of 16 units of the whole cluster over all gates of this block.
  static constexpr int kM = kIsForward ? Cell::kRecurrent : kBlocks * kGroups / kWarps;
  static constexpr int kSources = kIsForward ? kBlocks / kGroupWarps : Cell::kRecurrent;
  static constexpr int kSourceSteps = kUnits / kStepK;
  static constexpr int kSteps = kSources * kSourceSteps;

  // What comes from a block: forward h, backward sums.
  static constexpr int kSourceBytes = kIsForward ? kOperandBytes : kUnits * kSamples * static_cast<int>(sizeof(float));
  static constexpr int kSlotBytes = kBlocks * kSourceBytes;
  // What stays within the block: forward the sums of some blocks, backward the gradients of its gates.
  static constexpr int kOwnBytes =
      Cell::kRecurrent *
      (kIsForward ? kGroupWarps * kUnits * kSamples * static_cast<int>(sizeof(float)) : kOperandBytes);
  // Operands of weights, four registers of a thread each. Those that do not fit into registers stay in shared memory.
  static constexpr int kWeights = kSteps * kM;
  static constexpr int kStoredWeights = std::max(kWeights - kThreadWeights / 4, 0);
  static constexpr int kStagedWeights = greatest_divisor(kWeights, 48);
  static constexpr int kOperandsBytes = kThreads * kChunkBytes;  // of one for each thread
  static constexpr int kStoredAt =
      std::max(2 * (kSlotBytes + kOwnBytes), kStagedWeights* kOperandsBytes);  // they begin
  static constexpr int kSharedBytes = kStoredAt + kStoredWeights * kOperandsBytes;
  static constexpr bool kFits = kSharedBytes <= 226 * 1024;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// ---- who does what ----

__device__ inline int rank_in_cluster() { return static_cast<int>(blockIdx.x); }  // it runs over the cluster's blocks

template <class Tile>
__device__ int group_of_warp() {
  return warp_id() / Tile::kGroupWarps;
}
template <class Tile>
__device__ int warp_of_group() {
  return warp_id() % Tile::kGroupWarps;
}

// The block whose h a warp multiplies as number i: the nearest first, since its h arrives first.
template <class Tile>
__device__ int source_of(int i) {
  return (rank_in_cluster() + i * Tile::kGroupWarps + warp_of_group<Tile>()) % Tile::kBlocks;
}

// Which pair of cells is a thread's.
template <class Tile>
struct ThreadPair {
  int number = warp_of_group<Tile>();                                                    // within the group
  bool is_owned = Tile::kGroupPairs == Tile::kGroupWarps || number < Tile::kGroupPairs;  // else there is none
  int column = group_of_warp<Tile>() * 16 + lane_id() / 4 * 2;                 // of the first unit, within the block
  int row = number / 2 * Tile::kTileSamples + lane_id() % 4 * 2 + number % 2;  // sample within the cluster

  __device__ OwnCells own(const Steps& steps) const {
    const int sample = static_cast<int>(blockIdx.y) * Tile::kSamples + row;
    return {steps, sample, rank_in_cluster() * Tile::kUnits + column, is_owned ? 2 : 0, !Tile::kIsForward};
  }
};

// Where a sample's operand of a unit lies. In each tile the samples of even number come first, so that what a warp
// sends lies together.
template <class Tile>
__device__ int operand_place(int column, int row) {
  const int place = row / 8 * 8 + row % 2 * 4 + row % 8 / 2;
  return column / Tile::kOfChunk * Tile::kChunk + place * kChunkBytes +
         column % Tile::kOfChunk * static_cast<int>(sizeof(typename Tile::T));
}

// ---- GEMM ----

template <class Tile>
using Weights = TensorWeights<
    typename Tile::T, Tile::kSteps, Tile::kM, 1, Tile::kThreads, Tile::kStagedWeights, Tile::kStoredWeights>;

// The weight of row number `row` of the warp's sums m, along its K.
template <class Tile>
__device__ typename Tile::T weight_of_warp(const Steps& steps, const typename Tile::T* weights, int m, int row, int k) {
  const int source = k / Tile::kUnits;
  const int own = rank_in_cluster() * Tile::kUnits;
  if constexpr (Tile::kIsForward) {
    const int of_gate = own + group_of_warp<Tile>() * 16 + unit_of_row(row);
    return recurrent_weight(steps, weights, m, of_gate, source_of<Tile>(source) * Tile::kUnits + k % Tile::kUnits);
  } else {
    const int of_h = (warp_id() * Tile::kM + m) * 16 + unit_of_row(row);
    return recurrent_weight(steps, weights, source, own + k % Tile::kUnits, of_h);
  }
}

// Adds up the sums of a tile of samples. `operands`(i) is where those of source number i begin.
template <class Tile, class Operands>
__device__ void multiply_sources(
    float (&sums)[Tile::kM][1][4], const Weights<Tile>& weights, const Operands& operands) {
  const int own_row = operand_place<Tile>(lane_id() / 8 * Tile::kOfChunk, lane_id() % 8);
  uint32_t row = 0;
  weights.multiply(sums, [&](int step) {
    const int of_source = step % Tile::kSourceSteps;
    if (of_source == 0) row = operands(step / Tile::kSourceSteps) + own_row;
    return row + of_source * 2 * Tile::kChunk;
  });
}

// ---- what the blocks send each other ----

// What arrives for a step. Each half of the blocks has its own mbarrier, so that the GEMM can begin with the nearer
// half.
struct Arrivals {
  Mbarrier halves[2];

  __device__ void initialize() {
    for (Mbarrier& half : halves) half.initialize(1);
  }

  // To be called by one thread, for each phase.
  template <class Tile>
  __device__ void expect() {
    for (Mbarrier& half : halves) half.arrive_expect_tx(Tile::kSlotBytes / 2);
  }

  // The one in the block that is `distance` blocks before the sender, round the cluster.
  template <class Tile>
  __device__ const Mbarrier& of(int distance) const {
    return halves[distance / (Tile::kBlocks / 2)];
  }
};

// Stores 16 bytes into the shared memory of a block, at the address that they would have in this one's.
__device__ inline void store_to_block(uint32_t to, const uint32_t (&words)[4], const Mbarrier& arrived, int block) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   peer_address(to, block)),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(peer_address(arrived.address(), block))
               : "memory");
}

// Sends h of a pair to all blocks, to be put at `part`. Lanes that have values of one chunk exchange them first, so
// that each has 16 bytes, and share the blocks among them.
template <class Tile>
__device__ void send_h(const ThreadPair<Tile>& pair, const float (&h)[2], uint32_t part, const Arrivals& arrivals) {
  using T = typename Tile::T;
  constexpr int kLanes = Tile::kOfChunk / 2;
  const int lane = lane_id();
  const Vector<T, 2> own = as_operands<T, 2>(h);
  uint32_t own_words[sizeof(own) / 4];
  memcpy(own_words, &own, sizeof(own));
  uint32_t words[4];
  unrolled<4>([&](int i) {
    const int neighbour = lane / 4 / kLanes * kLanes + i * kLanes / 4;
    words[i] = __shfl_sync(0xffffffff, own_words[i % (4 / kLanes)], neighbour * 4 + lane % 4);
  });
  const uint32_t to = part + operand_place<Tile>(pair.column / Tile::kOfChunk * Tile::kOfChunk, pair.row);
#pragma unroll
  for (int i = 0; i < Tile::kBlocks; i += kLanes) {
    const int distance = i + lane / 4 % kLanes;
    const int block = (rank_in_cluster() + Tile::kBlocks - distance) % Tile::kBlocks;
    store_to_block(to, words, arrivals.of<Tile>(distance), block);
  }
}

// Sends the sums of a tile of samples to the blocks that own the units: a lane's sums of 16 units at once.
template <class Tile>
__device__ void send_sums(const float (&sums)[Tile::kM][1][4], uint32_t part, int tile, const Arrivals& arrivals) {
  unrolled<Tile::kM>([&](int m) {
    const int group = warp_id() * Tile::kM + m;  // of the cluster's units
    const int block = group / Tile::kGroups;
    const int distance = (rank_in_cluster() + Tile::kBlocks - block) % Tile::kBlocks;
    uint32_t words[4];
    memcpy(words, sums[m][0], sizeof(words));
    const int place = (group % Tile::kGroups * Tile::kTiles + tile) * 32 + lane_id();
    store_to_block(part + place * kChunkBytes, words, arrivals.of<Tile>(distance), block);
  });
}

// Adds up what all blocks have sent for a pair.
template <class Tile>
__device__ void add_sums(float (&total)[2], const ThreadPair<Tile>& pair, const unsigned char* slot) {
  const int place = (group_of_warp<Tile>() * Tile::kTiles + pair.row / Tile::kTileSamples) * 32 + lane_id();
  const float* from = reinterpret_cast<const float*>(slot + place * kChunkBytes) + pair.row % 2;
  total[0] = total[1] = 0;
  unrolled<Tile::kBlocks>([&](int source) {
    total[0] += from[0];
    total[1] += from[2];
    from += Tile::kSourceBytes / static_cast<int>(sizeof(float));
  });
}

// ---- the passes ----

template <class Tile>
__device__ void run_forward(
    const typename Tile::Arguments& in, bool aligned, const Weights<Tile>& weights, unsigned char* shared,
    Arrivals (&arrivals)[2]) {
  using Cell = typename Tile::Cell;
  using Cells = ForwardCells<Cell, typename Tile::T, FastMath, 2, PairAccess>;
  constexpr int kRecurrent = Cell::kRecurrent;
  const uint32_t slots = shared_address(shared);
  const uint32_t part = slots + rank_in_cluster() * Tile::kSourceBytes;
  // [step of two, group, pair, warp that summed it up, gate, lane]
  float2* const partial = reinterpret_cast<float2*>(shared + 2 * Tile::kSlotBytes) +
                          group_of_warp<Tile>() * (Tile::kGroupPairs * Tile::kGroupWarps * kRecurrent * 32) + lane_id();
  const auto partial_at = [&](int step, int number, int warp, int g) -> float2& {
    const int of_step = step % 2 * (Tile::kOwnBytes / static_cast<int>(sizeof(float2)));
    return partial[of_step + ((number * Tile::kGroupWarps + warp) * kRecurrent + g) * 32];
  };
  const ThreadPair<Tile> pair;
  const OwnCells own = pair.own(in.steps);
  Cells cells(in, own, {own.count, aligned});
  if (pair.is_owned) send_h<Tile>(pair, cells.h, part, arrivals[0]);
  cells.fetch(0, 0);
  for (int step = 0; step < in.steps.time; ++step) {
    Arrivals& arrived = arrivals[step % 2];
    const uint32_t slot = slots + step % 2 * Tile::kSlotBytes;
    unrolled<Tile::kTiles>([&](int tile) {
      float sums[kRecurrent][1][4] = {};
      multiply_sources<Tile>(sums, weights, [&](int source) {
        constexpr int kHalf = Tile::kSources / 2;
        if (tile == 0 && source % kHalf == 0) arrived.halves[source / kHalf].template wait<true>(step / 2);
        return slot + source_of<Tile>(source) * Tile::kSourceBytes + tile * (Tile::kTileSamples * kChunkBytes);
      });
      unrolled<2>([&](int column) {
        unrolled<kRecurrent>([&](int g) {
          partial_at(step, 2 * tile + column, warp_of_group<Tile>(), g) = {sums[g][0][column], sums[g][0][2 + column]};
        });
      });
    });
    if (threadIdx.x == 0) arrived.expect<Tile>();
    // Two alternating buffers: a warp of the group may still add up these sums while another writes those of the next
    // step. These are overwritten only after the next step's barrier, which a warp reaches after it has added them up.
    asm volatile("bar.sync %0, %1;" ::"r"(1 + group_of_warp<Tile>()), "n"(Tile::kGroupWarps * 32) : "memory");
    if (!pair.is_owned) continue;
    typename Cells::Gates sums;
    cells.begin_sums(sums);
    unrolled<kRecurrent>([&](int g) {
      float (&sum)[2] = sums[kFirstRecurrent<Cell> + g];
      unrolled<Tile::kGroupWarps>([&](int warp) {
        const float2 of_warp = partial_at(step, pair.number, warp, g);
        sum[0] += of_warp.x;
        sum[1] += of_warp.y;
      });
    });
    const typename Cells::Kept kept = cells.compute(sums, step);
    // Two alternating slots: this overwrites h of the step before, which nobody reads any more. This warp has waited
    // for h of this step from every group of every block, and each group sent it after its barrier above, after its
    // GEMM of the step before.
    if (step + 1 < in.steps.time)
      send_h<Tile>(pair, cells.h, part + (step + 1) % 2 * Tile::kSlotBytes, arrivals[(step + 1) % 2]);
    cells.fetch(step + 1, 1);
    cells.write(kept);
    cells.own.move(1);
  }
  cells.write_last_states();
}

template <class Tile>
__device__ void run_backward(
    const typename Tile::Arguments& in, bool aligned, const Weights<Tile>& weights, unsigned char* shared,
    Arrivals (&arrivals)[2]) {
  using T = typename Tile::T;
  using Cell = typename Tile::Cell;
  using Cells = BackwardCells<Cell, T, FastMath, 2, PairAccess>;
  const uint32_t part = shared_address(shared) + rank_in_cluster() * Tile::kSourceBytes;
  const ThreadPair<Tile> pair;
  const OwnCells own = pair.own(in.steps);
  Cells cells(in, own, {own.count, aligned});
  cells.fetch(0, 0);
  // Step number `time` only adds up the sums of the step before: the gradient of h_0.
  for (int step = 0; step <= in.steps.time; ++step) {
    cells.prepare();
    Arrivals& arrived = arrivals[step % 2];
    if (step > 0) {
      for (Mbarrier& half : arrived.halves) half.template wait<true>((step - 1) / 2);
    }
    if (step > 0 && cells.valid(step - 1)) add_sums<Tile>(cells.grad_h, pair, shared + step % 2 * Tile::kSlotBytes);
    if (step == in.steps.time) break;
    typename Cells::Gates gradients;
    cells.compute(gradients, step);
    unsigned char* const operands = shared + 2 * Tile::kSlotBytes + step % 2 * Tile::kOwnBytes;
    if (pair.is_owned) {
      unsigned char* const to = operands + operand_place<Tile>(pair.column, pair.row);
      unrolled<Cell::kRecurrent>([&](int g) {
        *reinterpret_cast<Vector<T, 2>*>(to + g * Tile::kOperandBytes) =
            as_operands<T, 2>(gradients[kFirstRecurrent<Cell> + g]);
      });
    }
    cells.fetch(step + 1, 1);
    // Two alternating buffers of operands: a warp may still multiply these while another writes those of the next step.
    // These are overwritten only after the next step's barrier, which a warp reaches after it has read them.
    __syncthreads();
    if (threadIdx.x == 0 && step > 0) arrived.expect<Tile>();
    unrolled<Tile::kTiles>([&](int tile) {
      float sums[Tile::kM][1][4] = {};
      multiply_sources<Tile>(sums, weights, [&](int source) {
        return shared_address(operands) + source * Tile::kOperandBytes + tile * (Tile::kTileSamples * kChunkBytes);
      });
      // Two alternating slots: the sums that these overwrite have been added up. This thread has waited for those of
      // the step before from every block, and each block sent them after its barrier above, after it had added up the
      // older ones.
      const int next = (step + 1) % 2;
      send_sums<Tile>(sums, part + next * Tile::kSlotBytes, tile, arrivals[next]);
      __syncwarp();  // keeps the loads of the next tile's weights behind it
    });
    cells.write(gradients);
    cells.own.move(1);
  }
  cells.write_first_states();
}

#endif

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    sequence_tensor_cluster_kernel(typename Tile::Arguments in, bool aligned) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(kTileAlignment) unsigned char shared[];
  __shared__ Arrivals arrivals[2];
  if (threadIdx.x == 0) {
    for (Arrivals& each : arrivals) each.initialize();
    Mbarrier::publish();
    for (Arrivals& each : arrivals) each.template expect<Tile>();
  }
  const auto* const weights_h = in.steps.template weights_of<typename Tile::Cell>(in.weights_h);
  const Weights<Tile> weights(shared, shared + Tile::kStoredAt, [&](int m, int row, int k) {
    return weight_of_warp<Tile>(in.steps, weights_h, m, row, k);
  });
  // Before other blocks overwrite the weights and signal the mbarriers. Each phase of these has one arrival from this
  // block, so it cannot end before all bytes have arrived, even bytes that arrive before they are expected. The fence
  // waits until the weights have been read.
  __threadfence_block();
  sync_cluster();
  if constexpr (Tile::kIsForward) {
    run_forward<Tile>(in, aligned, weights, shared, arrivals);
  } else {
    run_backward<Tile>(in, aligned, weights, shared, arrivals);
  }
  release_to_cluster();  // no block may end while others send to it
#endif
}

// ---- how it is launched ----

template <class Tile>
constexpr auto kKernel = &sequence_tensor_cluster_kernel<Tile>;

// Calls function(tile) for states of up to kState units. A block has as many units as 128 bytes of h.
//
// Clusters that do not fit onto the GPU wait for others to end. In 16-bit types many clusters of eight samples are
// still faster than half as many of sixteen. In TF32 the larger clusters are faster if the smaller ones do not all run
// at the same time.
template <class Cell, class T, Pass kPass, int kState, class Function>
auto with_tile_of(const Problem& problem, const Function& function) {
  constexpr int kBlocks = kState / kTileColumns<T>;
  using Few = Tile<Cell, T, kPass, kBlocks, 8>;
  if constexpr (std::is_same_v<T, float> && Few::kFits) {
    const int64_t at_once = clusters_at_once<Few, kKernel<Few>>(problem.context);
    if (problem.samples() > Few::kSamples * at_once) return function(Tile<Cell, T, kPass, kBlocks, 16>{});
  }
  return function(Few{});
}

template <class Cell, Pass kPass, class Function>
auto with_tile(const Problem& problem, const Function& function) {
  return with_operand_type(problem.dtype, [&](auto scalar) {
    using T = decltype(scalar);
    constexpr int kMost = kTensorClusterUnits;
    return problem.sizes.state_size <= kMost / 2 ? with_tile_of<Cell, T, kPass, kMost / 2>(problem, function)
                                                 : with_tile_of<Cell, T, kPass, kMost>(problem, function);
  });
}

}  // namespace tensor_cluster

template <class Cell>
int64_t samples_of_tensor_clusters(const Problem& problem) {
  using namespace tensor_cluster;
  const auto samples = [&](auto tile) -> int64_t {
    using Tile = decltype(tile);
    if constexpr (Tile::kFits) {
      return Tile::kSamples * clusters_at_once<Tile, kKernel<Tile>>(problem.context);
    } else {
      return 0;
    }
  };
  return problem.pass == Pass::kForward ? with_tile<Cell, Pass::kForward>(problem, samples)
                                        : with_tile<Cell, Pass::kBackward>(problem, samples);
}

template <class Cell, class In>
Error launch_tensor_clusters(const Problem& problem, const In& in) {
  using namespace tensor_cluster;
  return with_tile<Cell, kPassOf<In>>(problem, [&](auto tile) -> Error {
    using Tile = decltype(tile);
    if constexpr (Tile::kFits) {
      return launch_in_clusters<Tile, kKernel<Tile>>(problem, typename Tile::Arguments(in), pairs_are_aligned(in));
    } else {
      return "no cluster holds the weights of such a cell";
    }
  });
}

}  // namespace extops::cuda
