// A persistent kernel for small states on tensor cores (16-bit types and TF32). A block computes two or four samples.
// Each warp owns 16 units, whose recurrent weights it holds in registers for all steps. No block waits for another.
//
// An instruction multiplies by eight columns. With eight samples, the special functions would take longer than the
// GEMM. So each sample fills two or four of the columns: a lane then has all sums of its cells.
#pragma once

#include <algorithm>

#include "tensor.cuh"

namespace extops::cuda {
namespace tensor_block {

template <class Cell_, class T_, Pass kPass_, int kUnits_, int kSamples_>
struct Tile {
  using Cell = Cell_;
  using T = T_;
  using Arguments = SequencePass<kPass_, Cell, T>;
  static constexpr bool kIsForward = kPass_ == Pass::kForward;
  static constexpr int kUnits = kUnits_;
  static constexpr int kSamples = kSamples_;
  // GPUs other than Hopper have one tile for all sizes, since each is compiled for every one of them.
  static constexpr bool kIsForAll =
      !std::is_same_v<T, float> && kUnits == tensor_block_units<Cell>(false) && kSamples == 2;
  static constexpr int kThreads = kUnits / 16 * 32;
  static constexpr int kCells = kSamples * 16 / 32;  // of a thread: neighbouring units of a sample

  // Operands lie in chunks of 16 bytes along K, each of all samples. Forward they are h, backward the gradients of the
  // recurrent gates.
  static constexpr int kOfChunk = Operand<T>::kOfChunk;
  static constexpr int kChunk = kSamples * kChunkBytes;
  static constexpr int kOperandBytes = kUnits / kOfChunk * kChunk;
  static constexpr int kOperands = kIsForward ? 1 : Cell::kRecurrent;
  static constexpr int kOperandSteps = kUnits / Operand<T>::kStepK;

  // Forward, a warp computes the pre-activations of its units, with a tile of weights for each gate. Backward, it
  // computes dL/dh of its units, with sums of their own for each gate.
  static constexpr int kTiles = kIsForward ? Cell::kRecurrent : 1;
  static constexpr int kChains = kIsForward ? 1 : Cell::kRecurrent;
  // How many steps ahead values are prefetched from global memory.
  static constexpr int kAhead = 3;
  static constexpr int kWeights = Cell::kRecurrent * kOperandSteps;      // operands of a thread, of four registers each
  static constexpr int kStagedWeights = greatest_divisor(kWeights, 12);  // at most 48 KB
  static constexpr int kSharedBytes = std::max(2 * kOperands * kOperandBytes, kStagedWeights * kThreads * kChunkBytes);
};

#if defined(EXTOPS_TENSOR_CORES)

template <class Tile>
using Weights = TensorWeights<
    typename Tile::T, Tile::kOperands * Tile::kOperandSteps, Tile::kTiles, Tile::kChains, Tile::kThreads,
    Tile::kStagedWeights>;

// The weight in row number `row` of one of the warp's tiles, at place k along K.
template <class Tile>
__device__ typename Tile::T weight_of_warp(
    const Steps& steps, const typename Tile::T* weights, int tile, int row, int k) {
  const int unit = warp_id() * 16 + unit_of_row(row);
  if constexpr (Tile::kIsForward) {
    return recurrent_weight(steps, weights, tile, unit, k);
  } else {
    return recurrent_weight(steps, weights, k / Tile::kUnits, k % Tile::kUnits, unit);
  }
}

// The cells of a thread: of its sums, the first of the two columns, and of that both rows or one.
template <class Tile>
struct ThreadCells {
  int row = lane_id() % 4 * Tile::kSamples / 4;  // sample within the block
  int half = Tile::kCells == 1 ? lane_id() % 2 : 0;
  int unit = warp_id() * 16 + lane_id() / 4 * 2 + half;

  __device__ OwnCells own(const Steps& steps) const {
    const int sample = static_cast<int>(blockIdx.x) * Tile::kSamples + row;
    return {steps, sample, unit, Tile::kCells, !Tile::kIsForward};
  }

  __device__ void take(float (&of_cells)[Tile::kCells], const float (&sums)[Tile::kChains][4]) const {
    float rows[2] = {sums[0][0], sums[0][2]};
#pragma unroll
    for (int chain = 1; chain < Tile::kChains; ++chain) {
      rows[0] += sums[chain][0];
      rows[1] += sums[chain][2];
    }
    if constexpr (Tile::kCells == 1) {
      of_cells[0] = half == 0 ? rows[0] : rows[1];
    } else {
      of_cells[0] = rows[0];
      of_cells[1] = rows[1];
    }
  }

  // Where the cells' operands lie.
  __device__ int operand_place() const {
    return unit / Tile::kOfChunk * Tile::kChunk + row * kChunkBytes +
           unit % Tile::kOfChunk * static_cast<int>(sizeof(typename Tile::T));
  }
};

// The sums of all gates.
template <class Tile>
__device__ void multiply_operands(
    float (&sums)[Tile::kTiles][Tile::kChains][4], const Weights<Tile>& weights, const unsigned char* operands) {
  const int row = lane_id() % 8 * Tile::kSamples / 8;
  const uint32_t from = shared_address(operands) + lane_id() / 8 * Tile::kChunk + row * kChunkBytes;
  weights.multiply(sums, [&](int step) { return from + step * 2 * Tile::kChunk; });
}

// The steps that are valid for any sample of a block.
template <class Tile>
__device__ ValidSteps steps_of_block(const Steps& steps) {
  int length = 0;
  for (int row = 0; row < Tile::kSamples; ++row) {
    const int sample = static_cast<int>(blockIdx.x) * Tile::kSamples + row;
    if (sample < steps.batch) length = max(length, steps.length(sample));
  }
  return {steps, length, !Tile::kIsForward};
}

// Stores zeros for the steps that are valid for no sample of the block. The cells are at the first valid step.
template <class Cells, class Zeros>
__device__ void zero_other_steps(Cells& cells, const Steps& steps, const ValidSteps& valid, const Zeros& zeros) {
  cells.own.move(-valid.first);
  for (int step = 0; step < steps.time; ++step) {
    if (!valid(step)) cells.write(zeros);
    cells.own.move(1);
  }
}

template <class Tile>
__device__ void run_forward(const typename Tile::Arguments& in, const Weights<Tile>& weights, unsigned char* operands) {
  using T = typename Tile::T;
  using Cell = typename Tile::Cell;
  using Cells = ForwardCells<Cell, T, FastMath, Tile::kCells, PredicatedAccess<Tile::kAhead>>;
  const ThreadCells<Tile> place;
  const OwnCells own = place.own(in.steps);
  Cells cells(in, own, PredicatedAccess<Tile::kAhead>(own.count));
  const ValidSteps of_block = steps_of_block<Tile>(in.steps);
  cells.own.move(of_block.first);
  Cursor coming(cells.own, Cell::kInput);
  Cursor at(cells.own, Cell::kGates);
  const auto fetch = [&](int step) {
    cells.fetch(step, in.input_gates + coming.place);
    coming.move();
  };
  int buffer = 0;
  unsigned char* const own_operands = operands + place.operand_place();
  const auto pass_on = [&](int to) {
    *reinterpret_cast<Vector<T, Tile::kCells>*>(own_operands + to) = as_operands<T, Tile::kCells>(cells.h);
  };
  pass_on(buffer);
  fetch(of_block.first);
  __syncthreads();
  for (int step = of_block.first; of_block(step); ++step) {
    float found[Tile::kTiles][Tile::kChains][4] = {};
    multiply_operands<Tile>(found, weights, operands + buffer);
    // Two alternating buffers: other warps may still read h of the step before from one while this warp writes the
    // other. They have read it when they reach this step's barrier, and nobody overwrites it before that. So one
    // barrier a step is enough: it also makes h of this step visible to all.
    buffer = Tile::kOperandBytes - buffer;
    typename Cells::Gates sums;
    cells.begin_sums(sums);
    unrolled<Cell::kRecurrent>([&](int g) {
      float recurrent[Tile::kCells];
      place.take(recurrent, found[g]);
      unrolled<Tile::kCells>([&](int i) { sums[kFirstRecurrent<Cell> + g][i] += recurrent[i]; });
    });
    fetch(step + 1);
    const typename Cells::Kept kept = cells.compute(sums, step);
    pass_on(buffer);
    cells.write(kept, in.gates + at.place, in.cells + at.state, in.output + at.state);
    at.move();
    __syncthreads();
  }
  zero_other_steps(cells, in.steps, of_block, typename Cells::Kept{});
  cells.write_last_states();
}

template <class Tile>
__device__ void run_backward(const typename Tile::Arguments& in, const Weights<Tile>& weights, unsigned char* shared) {
  using T = typename Tile::T;
  using Cell = typename Tile::Cell;
  using Cells = BackwardCells<Cell, T, FastMath, Tile::kCells, PredicatedAccess<Tile::kAhead>>;
  const ThreadCells<Tile> place;
  const OwnCells own = place.own(in.steps);
  Cells cells(in, own, PredicatedAccess<Tile::kAhead>(own.count));
  const ValidSteps of_block = steps_of_block<Tile>(in.steps);
  cells.own.move(of_block.first);
  Cursor coming(cells.own, Cell::kGates);
  Cursor at = coming;
  const auto fetch = [&](int step) {
    cells.fetch(step, in.gates + coming.place, coming.state);
    coming.move();
  };
  // What the forward saved for a step is loaded two steps before, and becomes local derivatives one step before.
  fetch(of_block.first);
  cells.prepare();
  fetch(of_block.first + 1);
  int buffer = 0;
  for (int step = of_block.first; of_block(step); ++step) {
    typename Cells::Gates gradients;
    cells.compute(gradients, step);
    // Two alternating buffers, as in the forward: after this step's barrier a warp may still read this buffer while
    // another writes the next step's values into the second one. This buffer is overwritten only after the next step's
    // barrier, which all warps reach after they have read it.
    unsigned char* const operands = shared + buffer;
    buffer = Tile::kOperands * Tile::kOperandBytes - buffer;
    unrolled<Cell::kRecurrent>([&](int g) {
      unsigned char* const to = operands + g * Tile::kOperandBytes + place.operand_place();
      *reinterpret_cast<Vector<T, Tile::kCells>*>(to) =
          as_operands<T, Tile::kCells>(gradients[kFirstRecurrent<Cell> + g]);
    });
    __syncthreads();
    float found[1][Tile::kChains][4] = {};
    multiply_operands<Tile>(found, weights, operands);
    // While the GEMM waits for the tensor cores.
    cells.write(gradients, in.grad_gates + at.place);
    at.move();
    cells.prepare();
    fetch(step + 2);
    if (cells.valid(step)) place.take(cells.grad_h, found[0]);
  }
  zero_other_steps(cells, in.steps, of_block, typename Cells::Gates{});
  cells.write_first_states();
}

#endif

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1) sequence_tensor_block_kernel(typename Tile::Arguments in) {
#if defined(EXTOPS_TENSOR_CORES)
  if constexpr (Tile::kIsForAll || kIsHopper) {
    __shared__ __align__(kChunkBytes) unsigned char shared[Tile::kSharedBytes];
    const auto* const weights_h = in.steps.template weights_of<typename Tile::Cell>(in.weights_h);
    const Weights<Tile> weights(shared, nullptr, [&](int tile, int row, int k) {
      return weight_of_warp<Tile>(in.steps, weights_h, tile, row, k);
    });
    __syncthreads();  // before operands overwrite the weights
    if constexpr (Tile::kIsForward) {
      run_forward<Tile>(in, weights, shared);
    } else {
      run_backward<Tile>(in, weights, shared);
    }
  }
#endif
}

// ---- how it is launched ----

template <class Tile, class In>
Error launch_tile(const Problem& problem, const In& in) {
  static_assert(4 * Tile::kWeights <= kThreadWeights);
  const unsigned blocks = (in.sizes.batch + Tile::kSamples - 1) / Tile::kSamples;
  sequence_tensor_block_kernel<Tile>
      <<<dim3(blocks, 1, in.sizes.directions), Tile::kThreads, 0, problem.context.stream()>>>(
          typename Tile::Arguments(in));
  return launch_error();
}

template <class Cell, class T, int kUnits, class In>
Error launch_units(const Problem& problem, const In& in, bool takes_two) {
  return takes_two ? launch_tile<Tile<Cell, T, kPassOf<In>, kUnits, 2>>(problem, in)
                   : launch_tile<Tile<Cell, T, kPassOf<In>, kUnits, 4>>(problem, in);
}

}  // namespace tensor_block

// A block of two samples takes less time than one of four, but twice as many blocks may not all run at the same time.
// With four, a thread has two neighbouring cells, which must be aligned for one access.
template <class Cell, class In>
Error launch_tensor_blocks(const Problem& problem, const In& in) {
  using namespace tensor_block;
  const bool is_hopper = has_hopper_tensor_cores();
  const bool takes_two = problem.samples() <= 2 * problem.context.sm_count() || !pairs_are_aligned(in) || !is_hopper;
  return with_operand_type(problem.dtype, [&](auto scalar) {
    using T = decltype(scalar);
    constexpr int kMost = tensor_block_units<Cell>(std::is_same_v<T, float>);
    constexpr int kFew = 64;
    return is_hopper && in.sizes.state_size <= kFew ? launch_units<Cell, T, kFew>(problem, in, takes_two)
                                                    : launch_units<Cell, T, kMost>(problem, in, takes_two);
  });
}

}  // namespace extops::cuda
