// A persistent kernel for small states in strict float32. A block computes one or two samples. Its threads hold the
// recurrent weights in registers, and the rest of them in shared memory. No block waits for another.
//
// Loading 16 bytes from shared memory takes a lane as long as four multiply-adds, so each loaded chunk must be used for
// several sums: in the forward for the gates of two units, in the backward for eight units. Lanes of a warp reduce the
// sums by shuffles; one of them then has all sums of a cell.
//
// Each step has one block barrier, and two buffers alternate. A buffer is overwritten only after the barrier of the
// step in between, which all threads reach after they have read it.
#pragma once

#include "cells.cuh"
#include "choice.cuh"

namespace extops::cuda {
namespace float32_block {

constexpr int kQuad = 4;           // floats in a chunk of 16 bytes
constexpr int kUnitsOfChunk = 16;  // and of a warp
constexpr int kMaxRows = 2;        // samples of a block

constexpr int threads_of(int chunks) { return chunks * 32; }

// Adds up the sums of two neighbouring lanes for each row of a block. With two rows, each lane keeps one row; with one
// row, both lanes keep it.
template <int kRows, int kCount>
__device__ __forceinline__ void add_neighbours(float (&sums)[kRows * kCount]) {
  if constexpr (kRows > 1) {
    exchange_halves<kRows * kCount>(sums, 1);
  } else {
    unrolled<kCount>([&](int i) { sums[i] += __shfl_xor_sync(0xffffffff, sums[i], 1); });
  }
}

template <class T>
__device__ void swap(T& a, T& b) {
  const T former = a;
  a = b;
  b = former;
}

// A thread's weights: for each of its sums `kChunks` chunks.
template <int kSums, int kChunks, int kThreads>
class Weights {
  static constexpr int kInRegisters = std::min(kChunks, kThreadWeights / (kSums * kQuad));
  static constexpr int kShared = kChunks - kInRegisters;

 public:
  static constexpr int kSharedBytes = kShared * kSums * kThreads * kChunkBytes;

  // weight(j, i) is that of sum j and value i of its chunks.
  template <class Weight>
  __device__ explicit Weights(const Weight& weight) {
    unrolled<kSums>([&](int j) {
      unrolled<kInRegisters * kQuad>([&](int i) { weights_[j][i / kQuad][i % kQuad] = weight(j, i); });
    });
    for (int j = 0; j < kSums; ++j) {
      for (int chunk = 0; chunk < kShared; ++chunk) {
        const int i = (kInRegisters + chunk) * kQuad;
        *shared(chunk, j) = make_float4(weight(j, i), weight(j, i + 1), weight(j, i + 2), weight(j, i + 3));
      }
    }
  }

  // sums[j] += weights[j] * values, along chunks that are `stride` floats apart.
  __device__ __forceinline__ void multiply(float (&sums)[kSums], const float* values, int stride) const {
#pragma unroll
    for (int i = 0; i < kInRegisters; ++i) {
      const float4 chunk = *reinterpret_cast<const float4*>(values + i * stride);
      const float x[kQuad] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
      for (int j = 0; j < kQuad * kSums; ++j) {
        sums[j % kSums] = fmaf(x[j / kSums], weights_[j % kSums][i][j / kSums], sums[j % kSums]);
      }
    }
#pragma unroll
    for (int i = 0; i < kShared; ++i) {
      const float4 x = *reinterpret_cast<const float4*>(values + (kInRegisters + i) * stride);
#pragma unroll
      for (int j = 0; j < kSums; ++j) {
        const float4 w = *shared(i, j);
        sums[j] = fmaf(x.x, w.x, fmaf(x.y, w.y, fmaf(x.z, w.z, fmaf(x.w, w.w, sums[j]))));
      }
    }
  }

 private:
  // Neighbouring threads have neighbouring chunks.
  __device__ static float4* shared(int chunk, int j) {
    extern __shared__ float4 chunks[];
    return chunks + (chunk * kSums + j) * kThreads + threadIdx.x;
  }

  float weights_[kSums][kInRegisters][kQuad];
};

// Which steps of a row of the block are valid.
template <int kRows>
__device__ ValidSteps valid_steps_of(const Steps& steps, int row, bool backward) {
  const int sample = static_cast<int>(blockIdx.x) * kRows + row;
  return {steps, sample < steps.batch ? steps.length(sample) : 0, backward};
}

// A thread's cell between two GEMMs. If the block has one row, two neighbouring lanes have the same cell, and each
// stores a part of the results.
template <int kRows>
struct Owner {
  int lane = static_cast<int>(threadIdx.x) % 2;
  int row = kRows > 1 ? lane : 0;
  OwnCells own;
  SingleAccess<false> access;

  __device__ Owner(const Steps& steps, int unit, bool backward)
      : own(steps, static_cast<int>(blockIdx.x) * kRows + row, unit, 1, backward),
        access{own.count > 0 && (kRows > 1 || lane == 0), own.count > 0 && (kRows > 1 || lane == 1)} {}
};

// The weights of a thread in a block of `kChunks` warps, each with 16 units.
template <class Cell, int kChunks>
using ForwardWeights = Weights<2 * Cell::kRecurrent, kChunks, threads_of(kChunks)>;
template <class Cell, int kChunks>
using BackwardWeights = Weights<8, Cell::kRecurrent * kChunks / 4, threads_of(kChunks)>;
template <class Cell, Pass kPass, int kChunks>
using WeightsOf =
    std::conditional_t<kPass == Pass::kForward, ForwardWeights<Cell, kChunks>, BackwardWeights<Cell, kChunks>>;

// Four lanes compute the sums of two units: each has every fourth chunk of h.
template <int kChunks, int kRows, class Cell>
__device__ void run(const SequenceForward<Cell, float>& in) {
  constexpr int kUnits = kChunks * kUnitsOfChunk;
  constexpr int kLanes = 4;
  constexpr int kSums = 2 * Cell::kRecurrent;
  __shared__ __align__(16) float h[2][kRows][kUnits];
  using Cells = ForwardCells<Cell, float, ExactMath, 1, SingleAccess<false>>;
  const Steps& steps = in.steps;
  const int state_size = steps.state_size;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int first_unit = static_cast<int>(threadIdx.x) / kLanes * 2;

  const float* const weights_h = steps.weights_of<Cell>(in.weights_h);
  const ForwardWeights<Cell, kChunks> weights([&](int j, int i) {
    const int unit = first_unit + j / Cell::kRecurrent;
    const int k = (i / kQuad * kLanes + lane) * kQuad + i % kQuad;
    const int64_t row = int64_t{j % Cell::kRecurrent} * state_size + unit;
    return unit < state_size && k < state_size ? weights_h[row * steps.weights_stride + k] : 0.f;
  });
  const ValidSteps valid_by_row[] = {
      valid_steps_of<kRows>(steps, 0, false), valid_steps_of<kRows>(steps, kRows - 1, false)};
  const Owner<kRows> owner(steps, first_unit + lane / 2, false);
  const OwnCells& own = owner.own;
  Cells cells(in, own, owner.access);
  const float* read = &h[0][0][lane * kQuad];
  const float* other = &h[1][0][lane * kQuad];
  float* write = &h[1][owner.row][own.unit];
  float* other_write = &h[0][owner.row][own.unit];
  *other_write = cells.h[0];
  // Running pointers: computing them at each step would take longer.
  const float* from = in.input_gates + own.place(Cell::kInput);
  float* gates = in.gates + own.place(Cell::kGates);
  float* saved_c = in.cells + own.place(1);
  float* output = in.output + own.place(1);
  const auto fetch = [&](int step) {
    cells.fetch(step, from);
    from += Cell::kInput * own.advance;
  };
  fetch(0);
  __syncthreads();
  for (int step = 0; step < steps.time; ++step) {
    float found[kRows * Cell::kRecurrent];
    unrolled<kRows>([&](int row) {
      float sums[kSums] = {};
      if (valid_by_row[row](step)) weights.multiply(sums, read + row * kUnits, kLanes * kQuad);
      exchange_halves<kSums>(sums, 2);
      unrolled<Cell::kRecurrent>([&](int g) { found[row * Cell::kRecurrent + g] = sums[g]; });
    });
    add_neighbours<kRows, Cell::kRecurrent>(found);
    typename Cells::Gates sums;
    cells.begin_sums(sums);
    unrolled<Cell::kRecurrent>([&](int g) { sums[kFirstRecurrent<Cell> + g][0] += found[g]; });
    fetch(step + 1);
    const typename Cells::Kept kept = cells.compute(sums, step);
    *write = cells.h[0];
    cells.write(kept, gates, saved_c, output);
    gates += Cell::kGates * own.advance;
    saved_c += own.advance;
    output += own.advance;
    swap(read, other);
    swap(write, other_write);
    __syncthreads();
  }
  cells.write_last_states();
}

// Sixteen lanes compute the sums of eight units: each has every sixteenth chunk of the gates' gradients.
template <int kChunks, int kRows, class Cell>
__device__ void run(const SequenceBackward<Cell, float>& in) {
  constexpr int kUnits = kChunks * kUnitsOfChunk;
  constexpr int kLanes = 16;
  constexpr int kSums = 8;
  constexpr int kK = Cell::kRecurrent * kUnits;
  static_assert(kK % (kLanes * kQuad) == 0);
  __shared__ __align__(16) float gradients[2][kRows][kK];
  using Cells = BackwardCells<Cell, float, ExactMath, 1, SingleAccess<false>>;
  const Steps& steps = in.steps;
  const int state_size = steps.state_size;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int first_unit = static_cast<int>(threadIdx.x) / kLanes * kSums;

  const float* const weights_h = steps.weights_of<Cell>(in.weights_h);
  const BackwardWeights<Cell, kChunks> weights([&](int j, int i) {
    const int k = (i / kQuad * kLanes + lane) * kQuad + i % kQuad;
    const bool inside = k % kUnits < state_size && first_unit + j < state_size;
    const int64_t row = int64_t{k / kUnits} * state_size + k % kUnits;
    return inside ? weights_h[row * steps.weights_stride + first_unit + j] : 0.f;
  });
  const ValidSteps valid_by_row[] = {
      valid_steps_of<kRows>(steps, 0, true), valid_steps_of<kRows>(steps, kRows - 1, true)};
  const Owner<kRows> owner(steps, first_unit + lane / 2, true);
  const OwnCells& own = owner.own;
  Cells cells(in, own, owner.access);
  const float* read = &gradients[0][0][lane * kQuad];
  const float* other = &gradients[1][0][lane * kQuad];
  float* write = &gradients[0][owner.row][own.unit];
  float* other_write = &gradients[1][owner.row][own.unit];
  const float* gates = in.gates + own.place(Cell::kGates);
  int64_t state = own.place(1);
  float* grad_gates = in.grad_gates + own.place(Cell::kGates);
  const auto fetch = [&](int step) {
    cells.fetch(step, gates, state);
    gates += Cell::kGates * own.advance;
    state += own.advance;
  };
  fetch(0);
  cells.prepare();
  fetch(1);
  for (int step = 0; step < steps.time; ++step) {
    typename Cells::Gates of_step;
    cells.compute(of_step, step);
    unrolled<Cell::kRecurrent>([&](int g) { write[g * kUnits] = of_step[kFirstRecurrent<Cell> + g][0]; });
    __syncthreads();
    // Behind the barrier, while the GEMM waits for shared memory.
    cells.write(of_step, grad_gates);
    grad_gates += Cell::kGates * own.advance;
    cells.prepare();
    fetch(step + 2);
    float found[kRows];
    unrolled<kRows>([&](int row) {
      float sums[kSums] = {};
      if (valid_by_row[row](step)) weights.multiply(sums, read + row * kK, kLanes * kQuad);
      exchange_halves<kSums>(sums, 8);
      exchange_halves<kSums / 2>(sums, 4);
      exchange_halves<kSums / 4>(sums, 2);
      found[row] = sums[0];
    });
    add_neighbours<kRows, 1>(found);
    if (cells.valid(step)) cells.grad_h[0] = found[0];
    swap(read, other);
    swap(write, other_write);
  }
  cells.write_first_states();
}

// The shared memory that a cell of so many units needs in both passes, with what threads exchange.
template <class Cell, int kChunks>
constexpr int kSharedBytesOfBlock =
    WeightsOf<Cell, Pass::kBackward, kChunks>::kSharedBytes +
    2 * kMaxRows * Cell::kRecurrent * kChunks * kUnitsOfChunk * static_cast<int>(sizeof(float));

template <class Cell, Pass kPass, int kChunks, int kRows>
__global__ void __launch_bounds__(threads_of(kChunks))
    sequence_float32_block_kernel(SequencePass<kPass, Cell, float> in) {
#if defined(__CUDA_ARCH__)
  if constexpr (kSharedBytesOfBlock<Cell, kChunks> <= most_shared_bytes(__CUDA_ARCH__)) run<kChunks, kRows>(in);
#endif
}

// Calls function(chunks) with the smallest of up to three numbers of chunks that hold all units. The middle one is the
// largest whose weights fit into registers: LSTMs of up to 96 units.
template <class Cell, class Function>
auto with_chunks(const SequenceSizes& sizes, const Function& function) {
  constexpr int kMost = kFloat32BlockUnits<Cell> / kUnitsOfChunk;
  constexpr int kFew = std::min(4, kMost);
  constexpr int kInRegisters = std::min(kMost, kThreadWeights / (8 * Cell::kRecurrent));
  if (sizes.state_size <= kFew * kUnitsOfChunk) return function(std::integral_constant<int, kFew>{});
  if constexpr (kInRegisters < kMost) {
    if (sizes.state_size <= kInRegisters * kUnitsOfChunk) return function(std::integral_constant<int, kInRegisters>{});
  }
  return function(std::integral_constant<int, kMost>{});
}

}  // namespace float32_block

template <class Cell>
int shared_bytes_of_float32_blocks(const SequenceSizes& sizes) {
  using namespace float32_block;
  return with_chunks<Cell>(sizes, [](auto chunks) { return kSharedBytesOfBlock<Cell, chunks>; });
}

// Two samples a block if there are more samples than SMs.
template <class Cell, class In>
Error launch_float32_blocks(const Problem& problem, const In& in) {
  using namespace float32_block;
  return with_chunks<Cell>(problem.sizes, [&](auto chunks) {
    const auto launch_tile = [&](auto rows) {
      constexpr auto* kKernel = &sequence_float32_block_kernel<Cell, kPassOf<In>, chunks, rows>;
      constexpr int kSharedBytes = WeightsOf<Cell, kPassOf<In>, chunks>::kSharedBytes;
      if constexpr (kSharedBytes > 0) {
        if (const Error error = allow_shared_memory<kKernel>(kSharedBytes)) return error;
      }
      const unsigned blocks = (in.sizes.batch + rows - 1) / rows;
      kKernel<<<dim3(blocks, 1, in.sizes.directions), threads_of(chunks), kSharedBytes, problem.context.stream()>>>(
          SequencePass<kPassOf<In>, Cell, float>(in));
      return launch_error();
    };
    if (problem.samples() > problem.context.sm_count()) {
      return launch_tile(std::integral_constant<int, kMaxRows>{});
    }
    return launch_tile(std::integral_constant<int, 1>{});
  });
}

}  // namespace extops::cuda
