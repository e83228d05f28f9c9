// A persistent kernel for Hopper GPUs in strict float32. A cluster of blocks computes eight or sixteen samples. Each
// block owns 32 units, whose recurrent weights its threads hold in registers for all steps. After each step the blocks
// exchange values (forward: h, backward: the gradients of the recurrent gates): these are copied directly into each
// other's shared memory, where an mbarrier counts the bytes.
//
// All blocks of a cluster run at the same time, and clusters do not wait for each other.
#pragma once

#include "../common/hopper.cuh"
#include "cells.cuh"
#include "choice.cuh"

namespace extops::cuda {
namespace float32_cluster {

constexpr int kTileSamples = 8;
constexpr int kTileCells = kFloat32ClusterUnits * kTileSamples;

// What the forward saved for the backward of a cell.
template <class Cell>
struct Saved {
  LocalDerivatives<Cell, float> derivatives;
  float grad_output;
};

template <class Cell_, Pass kPass_, int kBlocks_, int kSamples_>
struct Tile {
  using Cell = Cell_;
  using Arguments = SequencePass<kPass_, Cell, float>;
  static constexpr bool kIsForward = kPass_ == Pass::kForward;
  static constexpr int kBlocks = kBlocks_;
  static constexpr int kSamples = kSamples_;
  static constexpr int kUnits = kFloat32ClusterUnits;  // of a block
  static constexpr int kThreads = kTileCells;          // few, each with many weights
  static constexpr int kCells = kUnits * kSamples;
  static constexpr int kOwnCells = kCells / kThreads;                // of a thread: one unit, several samples
  static constexpr int kValues = kIsForward ? 1 : Cell::kRecurrent;  // values that a cell sends
  static constexpr int kSums = kIsForward ? Cell::kRecurrent : 1;    // sums that a cell receives
  static constexpr int kSourceK = kUnits * kValues;                  // K of what one block sends
  static constexpr int kRowBytes = kSourceK * static_cast<int>(sizeof(float));
  static constexpr int kSourceBytes = kSamples * kRowBytes;
  static constexpr int kSlotBytes = kBlocks * kSourceBytes;
  static constexpr int kSumBytes = kSums * kCells * static_cast<int>(sizeof(float));
  static constexpr int kSavedBytes = kIsForward ? 0 : kCells * static_cast<int>(sizeof(Saved<Cell>));
  static constexpr int kSharedBytes = 2 * kSlotBytes + kSumBytes + kSavedBytes;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The rank of this block in its cluster is blockIdx.x, which runs over all its blocks.

// A weight of the GEMM: sum number n of a sample along K, which runs over the blocks' values, each in the order in
// which it sends them.
template <class Tile>
__device__ float weight_at(const Steps& steps, const float* weights_h, int n, int k) {
  const int of_n = static_cast<int>(blockIdx.x) * Tile::kUnits + n % Tile::kUnits;
  const int of_k = k / Tile::kSourceK * Tile::kUnits + k % Tile::kUnits;
  const int gate = Tile::kIsForward ? n / Tile::kUnits : k % Tile::kSourceK / Tile::kUnits;
  const int row = Tile::kIsForward ? of_n : of_k;
  const int column = Tile::kIsForward ? of_k : of_n;
  if (of_n >= steps.state_size || of_k >= steps.state_size) return 0;
  return weights_h[(int64_t{gate} * steps.state_size + row) * steps.weights_stride + column];
}

// ---- GEMMs: the lanes of a warp split K, and exchange their sums by shuffles ----

// A warp has four units. Forward: a lane has the gates of two of them and a sixteenth of K, backward all four units and
// a 32nd of K. After the exchange, each lane has the sums of a cell.
template <class Tile>
class Gemm {
  static constexpr int kUnits = Tile::kIsForward ? 2 : 4;
  static constexpr int kOfUnit = Tile::kSums;
  static constexpr int kSums = kUnits * kOfUnit;
  static constexpr int kParts = Tile::kIsForward ? 2 : 4;  // of K, each of eight lanes
  static constexpr int kChunks = Tile::kBlocks * Tile::kValues / kParts;
  static constexpr int kFloats = kChunkBytes / static_cast<int>(sizeof(float));
  static constexpr int kPair = 2;  // samples at a time: registers hold no more
  static_assert(kChunks % Tile::kValues == 0 && Tile::kRowBytes == Tile::kValues * 8 * kChunkBytes);

 public:
  __device__ Gemm(const Steps& steps, const float* weights_h) {
    const int warp = threadIdx.x / 32;
    const int first_unit = warp * 4 + (Tile::kIsForward ? static_cast<int>(threadIdx.x) % 32 / 16 * 2 : 0);
#pragma unroll
    for (int i = 0; i < kChunks * kSums * kFloats; ++i) {
      const int chunk = i / (kSums * kFloats);
      const int sum = i / kFloats % kSums;
      const int k = ((part() * kChunks + chunk) * 8 + static_cast<int>(threadIdx.x) % 8) * kFloats + i % kFloats;
      const int n = sum % kOfUnit * Tile::kUnits + first_unit + sum / kOfUnit;
      weights_[chunk][sum][i % kFloats] = weight_at<Tile>(steps, weights_h, n, k);
    }
  }

  // Partial is [tile of samples, sum of a cell, thread].
  __device__ void multiply(const unsigned char* slot, float* partial) const {
    const unsigned char* from =
        slot + part() * (kChunks / Tile::kValues) * Tile::kSourceBytes + threadIdx.x % 8 * kChunkBytes;
#pragma unroll 1
    for (int tile = 0; tile < Tile::kSamples / kTileSamples; ++tile) {
      float halves[2 * kOfUnit];
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        float pairs[2 * kOfUnit];
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          float sums[kUnits * kPair * kOfUnit] = {};
          multiply_pair(from, sums);
          from += kPair * Tile::kRowBytes;
          if constexpr (kUnits == 4) exchange_halves<4 * kPair * kOfUnit>(sums, 16);
          exchange_halves<2 * kPair * kOfUnit>(sums, 8);
          exchange_halves<kPair * kOfUnit>(sums, 1);
#pragma unroll
          for (int gate = 0; gate < kOfUnit; ++gate) pairs[pair * kOfUnit + gate] = sums[gate];
        }
        exchange_halves<2 * kOfUnit>(pairs, 2);
#pragma unroll
        for (int gate = 0; gate < kOfUnit; ++gate) {
          if (half == 0) halves[gate] = pairs[gate];
          halves[kOfUnit + gate] = pairs[gate];
        }
      }
      exchange_halves<2 * kOfUnit>(halves, 4);
#pragma unroll
      for (int gate = 0; gate < kOfUnit; ++gate)
        partial[(tile * kOfUnit + gate) * kTileCells + threadIdx.x] = halves[gate];
    }
  }

  // What this thread has computed itself, of its cell number i.
  __device__ static float sum(const float* partial, int gate, int i) {
    return partial[(i * kOfUnit + gate) * kTileCells + threadIdx.x];
  }

 private:
  __device__ static int part() { return static_cast<int>(threadIdx.x) % (kParts * 8) / 8; }

  // sums is [unit, sample, gate].
  __device__ void multiply_pair(const unsigned char* from, float (&sums)[kUnits * kPair * kOfUnit]) const {
    const auto chunk = [&](int i) {
      const int group = i / kPair;
      const int offset = group / Tile::kValues * Tile::kSourceBytes + group % Tile::kValues * 8 * kChunkBytes;
      return *reinterpret_cast<const float4*>(from + offset + i % kPair * Tile::kRowBytes);
    };
    float4 next = chunk(0);
#pragma unroll
    for (int i = 0; i < kChunks * kPair; ++i) {
      const float4 x = next;
      if (i + 1 < kChunks * kPair) next = chunk(i + 1);
#pragma unroll
      for (int j = 0; j < kSums; ++j) {
        float& sum = sums[(j / kOfUnit * kPair + i % kPair) * kOfUnit + j % kOfUnit];
        const float (&w)[kFloats] = weights_[i / kPair][j];
        sum = fmaf(x.x, w[0], sum);
        sum = fmaf(x.y, w[1], sum);
        sum = fmaf(x.z, w[2], sum);
        sum = fmaf(x.w, w[3], sum);
      }
    }
  }

  float weights_[kChunks][kSums][kFloats];
};

// ---- the exchange ----

// Where cell number i of a thread is: its unit within the block, its sample within the cluster.
__device__ inline int own_column() { return static_cast<int>(threadIdx.x) / kTileSamples; }
__device__ inline int own_row(int i) { return i * kTileSamples + static_cast<int>(threadIdx.x) % kTileSamples; }
template <class Tile>
__device__ int own_unit() {
  return static_cast<int>(blockIdx.x) * Tile::kUnits + own_column();
}
template <class Tile>
__device__ int own_sample(int i) {
  return static_cast<int>(blockIdx.y) * Tile::kSamples + own_row(i);
}

// Puts what cell number i sends into this block's part of a slot.
template <class Tile>
__device__ void put(int i, const float* values, unsigned char* slot) {
  float* const to = reinterpret_cast<float*>(slot + blockIdx.x * Tile::kSourceBytes + own_row(i) * Tile::kRowBytes);
  unrolled<Tile::kValues>([&](int v) { to[v * Tile::kUnits + own_column()] = values[v]; });
}

// The cells of a thread in the forward.
template <class Tile, class Cells>
struct ThreadCells {
  Cells cells[Tile::kOwnCells];

  __device__ explicit ThreadCells(const typename Tile::Arguments& in)
      : ThreadCells(in, std::make_integer_sequence<int, Tile::kOwnCells>()) {}
  template <int... kI>
  __device__ ThreadCells(const typename Tile::Arguments& in, std::integer_sequence<int, kI...>)
      : cells{make(in, kI)...} {}

  __device__ static Cells make(const typename Tile::Arguments& in, int i) {
    const OwnCells own(in.steps, own_sample<Tile>(i), own_unit<Tile>(), 1, false);
    return Cells(in, own, {own.count > 0, own.count > 0});
  }

  // Moves all cells to the step of the first one, so that no register keeps the offsets of the others during a GEMM.
  __device__ void follow_first(const Steps& steps) {
    const int64_t apart = kTileSamples * steps.batch_stride * steps.state_size;
    unrolled<Tile::kOwnCells>([&](int i) { cells[i].own.step = cells[0].own.step + i * apart; });
  }
};

// Two alternating slots: step s uses slot s % 2, whose mbarrier counts what the other blocks copy there. Each block
// copies its part whole: warps that send from registers, as those of tensor_cluster, take 1.1 times as long in the
// mean, with 384 units 1.25 times (H200).
//
// Why nothing is overwritten too early: a block copies for step s + 2 only when it has received all of step s + 1. This
// block sends its part of step s + 1 after a barrier, which its threads reach after they have read the slot of step s.
// So no byte arrives before the phase of step s has ended. The source of a block's own copies is safe likewise: what
// the others send for step s + 1 shows that they have received it.
struct Slots {
  unsigned char* first;
  Mbarrier* full;

  template <class Tile>
  __device__ unsigned char* of(int step) const {
    return first + step % 2 * Tile::kSlotBytes;
  }

  // Copies this block's part of what a step reads to all other blocks of the cluster.
  template <class Tile>
  __device__ void send(int step) const {
    const int rank = static_cast<int>(blockIdx.x);
    const uint32_t part = shared_address(of<Tile>(step) + rank * Tile::kSourceBytes);
    Mbarrier& barrier = full[step % 2];
    fence_proxy_async();
    __syncthreads();
    const int block = static_cast<int>(threadIdx.x);
    if (block >= Tile::kBlocks) return;
    if (block == rank) {
      barrier.arrive_expect_tx((Tile::kBlocks - 1) * Tile::kSourceBytes);
    } else {
      copy_to_peer(part, part, Tile::kSourceBytes, barrier, block);
    }
  }

  // Backward, step 0 has no GEMM.
  template <class Tile>
  __device__ const unsigned char* wait(int step) const {
    full[step % 2].wait(Tile::kIsForward ? step / 2 : (step - 1) / 2);
    return of<Tile>(step);
  }
};

// ---- the passes ----

template <class Tile, class Cell>
__device__ void run(const SequenceForward<Cell, float>& in, const Slots& slots, float* partial) {
  using Cells = ForwardCells<Cell, float, ExactMath, 1, SingleAccess<true>>;
  const Gemm<Tile> gemm(in.steps, in.steps.template weights_of<Cell>(in.weights_h));
  __shared__ float biases[Cell::kGates * Tile::kUnits];
  in.load_biases(biases, Tile::kUnits);
  ThreadCells<Tile, Cells> own(in);
  unrolled<Tile::kOwnCells>([&](int i) {
    own.cells[i].fetch(0, 0);
    put<Tile>(i, own.cells[i].h, slots.template of<Tile>(0));
  });
  slots.template send<Tile>(0);
  for (int step = 0; step < in.steps.time; ++step) {
    gemm.multiply(slots.template wait<Tile>(step), partial);
    typename Cells::Kept kept[Tile::kOwnCells];
    unrolled<Tile::kOwnCells>([&](int i) {
      typename Cells::Gates sums = {};
      unrolled<Cell::kRecurrent>([&](int g) { sums[kFirstRecurrent<Cell> + g][0] = gemm.sum(partial, g, i); });
      own.cells[i].end_sums(sums, biases + own_column(), Tile::kUnits);
      kept[i] = own.cells[i].compute(sums, step);
      put<Tile>(i, own.cells[i].h, slots.template of<Tile>(step + 1));
    });
    if (step + 1 < in.steps.time) slots.template send<Tile>(step + 1);
    own.follow_first(in.steps);
    unrolled<Tile::kOwnCells>([&](int i) {
      own.cells[i].fetch(step + 1, 1);
      own.cells[i].write(kept[i]);
    });
    own.cells[0].own.move(1);
  }
  for (const Cells& cells : own.cells) cells.write_last_states();
}

// BackwardCells is not used: it keeps loop invariants in registers, which the GEMM needs with 16 blocks and 16 samples.
// What the forward saved for a step is prefetched into shared memory.
template <class Tile, class Cell>
__device__ void run(const SequenceBackward<Cell, float>& in, const Slots& slots, float* partial) {
  constexpr int kOwnCells = Tile::kOwnCells;
  const Steps& steps = in.steps;
  const int state_size = steps.state_size;
  const int unit = own_unit<Tile>();
  const auto exists = [&](int i) { return unit < state_size && own_sample<Tile>(i) < steps.batch; };
  const auto state = [&](int i) { return steps.state(own_sample<Tile>(i), unit); };
  const Gemm<Tile> gemm(steps, steps.weights_of<Cell>(in.weights_h));
  int lengths[kOwnCells];
  float grad_h[kOwnCells];
  float grad_c[kOwnCells];
  Saved<Cell>* const saved = reinterpret_cast<Saved<Cell>*>(partial + Tile::kSums * Tile::kCells) + threadIdx.x;
  bool has_begun[kOwnCells] = {};
  unrolled<kOwnCells>([&](int i) {
    lengths[i] = exists(i) ? steps.length(own_sample<Tile>(i)) : 0;
    grad_h[i] = exists(i) ? load_if_present(in.grad_h_n, state(i)) : 0.f;
    grad_c[i] = exists(i) ? load_if_present(in.grad_c_n, state(i)) : 0.f;
  });
  const auto fetch = [&](int step) {
    unrolled<kOwnCells>([&](int i) {
      const int t = steps.time_of(steps.time - 1 - step);
      if (step >= steps.time || t >= lengths[i]) return;
      const int64_t place = steps.row(t, own_sample<Tile>(i));
      const float grad_output = load_if_present(in.grad_output, place * state_size + unit);
      saved[i * Tile::kThreads] = {local_derivatives_at<ExactMath>(in, place, unit), grad_output};
    });
  };
  fetch(0);
  // Step number `time` is only a GEMM: the gradient of h_0.
  for (int step = 0; step <= steps.time; ++step) {
    const int t = step < steps.time ? steps.time_of(steps.time - 1 - step) : INT32_MAX;
    if (step > 0) gemm.multiply(slots.template wait<Tile>(step), partial);
    float gradients[kOwnCells][Cell::kGates] = {};
    unrolled<kOwnCells>([&](int i) {
      // The result is dL/dh of this sample only if the step before was valid.
      if (has_begun[i]) grad_h[i] = gemm.sum(partial, 0, i);
      has_begun[i] = t < lengths[i];
      if (has_begun[i]) {
        const Saved<Cell> of_step = saved[i * Tile::kThreads];
        apply_local_derivatives(of_step.derivatives, grad_h[i] + of_step.grad_output, grad_c[i], gradients[i]);
      }
      if (step == steps.time) return;
      put<Tile>(i, gradients[i] + kFirstRecurrent<Cell>, slots.template of<Tile>(step + 1));
    });
    if (step == steps.time) break;
    slots.template send<Tile>(step + 1);
    unrolled<kOwnCells>([&](int i) {
      float* const to = in.grad_gates + steps.row(t, own_sample<Tile>(i)) * Cell::kGates * state_size + unit;
      unrolled<Cell::kGates>([&](int g) {
        if (exists(i)) to[g * state_size] = gradients[i][g];
      });
    });
    fetch(step + 1);
  }
  unrolled<kOwnCells>([&](int i) {
    if (!exists(i)) return;
    in.grad_h_0[state(i)] = grad_h[i];
    in.grad_c_0[state(i)] = grad_c[i];
  });
}

#endif

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1) sequence_float32_cluster_kernel(typename Tile::Arguments in) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(kTileAlignment) unsigned char slots[];
  __shared__ Mbarrier full[2];
  if (threadIdx.x == 0) {
    for (Mbarrier& barrier : full) barrier.initialize(1);
    Mbarrier::publish();
  }
  __syncthreads();
  arrive_at_cluster();
  wait_for_cluster();
  run<Tile>(in, {slots, full}, reinterpret_cast<float*>(slots + 2 * Tile::kSlotBytes));
  release_to_cluster();  // no block may end while others send to it
#endif
}

// ---- how it is launched ----

constexpr int kFewSamples = 8;  // of a cluster
constexpr int kManySamples = 16;

template <class Tile>
int64_t samples_at_once(const Problem& problem) {
  return int64_t{Tile::kSamples} * clusters_at_once<Tile, &sequence_float32_cluster_kernel<Tile>>(problem.context);
}

// Calls function(blocks) with the smallest cluster that holds all units.
template <class Cell, class Function>
auto with_blocks(const SequenceSizes& sizes, const Function& function) {
  constexpr int kMost = kFloat32ClusterBlocks<Cell>;
  if constexpr (kFloat32BlockUnits<Cell> < 4 * kFloat32ClusterUnits) {
    if (sizes.state_size <= 4 * kFloat32ClusterUnits) return function(std::integral_constant<int, 4>{});
  }
  if constexpr (kMost > 8) {
    if (sizes.state_size > 8 * kFloat32ClusterUnits) return function(std::integral_constant<int, kMost>{});
  }
  return function(std::integral_constant<int, std::min(kMost, 8)>{});
}

}  // namespace float32_cluster

template <class Cell>
int64_t samples_of_float32_clusters(const Problem& problem) {
  using namespace float32_cluster;
  return with_blocks<Cell>(problem.sizes, [&](auto blocks) {
    return problem.pass == Pass::kForward ? samples_at_once<Tile<Cell, Pass::kForward, blocks, kManySamples>>(problem)
                                          : samples_at_once<Tile<Cell, Pass::kBackward, blocks, kManySamples>>(problem);
  });
}

template <class Cell, class In>
Error launch_float32_clusters(const Problem& problem, const In& in) {
  using namespace float32_cluster;
  return with_blocks<Cell>(problem.sizes, [&](auto blocks) {
    const auto launch_tile = [&](auto tile) {
      using Tile = decltype(tile);
      return launch_in_clusters<Tile, &sequence_float32_cluster_kernel<Tile>>(problem, typename Tile::Arguments(in));
    };
    // With few samples each, as long as all such clusters run at the same time.
    using Few = Tile<Cell, kPassOf<In>, blocks, kFewSamples>;
    if (problem.samples() <= samples_at_once<Few>(problem)) return launch_tile(Few{});
    return launch_tile(Tile<Cell, kPassOf<In>, blocks, kManySamples>{});
  });
}

}  // namespace extops::cuda
