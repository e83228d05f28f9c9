// A whole sequence of a small state by tensor cores (16-bit types and TF32): a block computes two or four samples. Each
// of its warps has 16 units, whose recurrent weights it holds in registers for all steps. No block waits for another.
//
// An instruction multiplies by eight columns, and as many samples would keep the units of the special functions busy
// for longer than the product takes. So each sample is two or four of the columns: a lane then has all sums of its
// cells.
#include <algorithm>

#include "lltm_sequence_tensor.cuh"

// Named, not anonymous: nvcc would put the path of this file into the kernels' names, and no two builds be the same.
namespace extops::cuda {

constexpr int kMostUnits = 128;

template <class T_, Pass kPass_, int kUnits_, int kSamples_>
struct TensorBlockTile {
  using T = T_;
  static constexpr bool kIsForward = kPass_ == Pass::kForward;
  static constexpr int kUnits = kUnits_;
  static constexpr int kSamples = kSamples_;
  static constexpr int kThreads = kUnits / 16 * 32;
  static constexpr int kCells = kSamples * 16 / 32;  // of a thread: neighbouring units of a sample

  // Operands lie in chunks of 16 bytes along K, each of all samples. Forward they are h, backward the gradients of the
  // three gates.
  static constexpr int kOfChunk = Operand<T>::kOfChunk;
  static constexpr int kChunk = kSamples * kChunkBytes;
  static constexpr int kOperandBytes = kUnits / kOfChunk * kChunk;
  static constexpr int kOperands = kIsForward ? 1 : 3;
  static constexpr int kOperandSteps = kUnits / Operand<T>::kStepK;

  // Forward, a warp sums up its units' gates, each a tile of weights. Backward, it sums up the gradient of its units'
  // h, each gate's part of its own.
  static constexpr int kTiles = kIsForward ? 3 : 1;
  static constexpr int kChains = kIsForward ? 1 : 3;
  // How many steps ahead values are fetched from far memory: they take longer than a step.
  static constexpr int kAhead = 3;
  static constexpr int kStagedWeights = 12;  // at most 48 KB
  static constexpr int kSharedBytes = std::max(2 * kOperands * kOperandBytes, kStagedWeights * kThreads * kChunkBytes);
};

#if defined(EXTOPS_TENSOR_CORES)

template <class Tile>
using BlockWeights = TensorWeights<
    typename Tile::T, Tile::kOperands * Tile::kOperandSteps, Tile::kTiles, Tile::kChains, Tile::kThreads,
    Tile::kStagedWeights>;

// The weight of row number `row` of a tile of the warp's, along its K.
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

// A thread's cells: of its sums' two columns the first, and both rows or one.
template <class Tile>
struct BlockCells {
  int row = lane_id() % 4 * Tile::kSamples / 4;  // sample within the block
  int half = Tile::kCells == 1 ? lane_id() % 2 : 0;
  int unit = warp_id() * 16 + lane_id() / 4 * 2 + half;
  int sample = static_cast<int>(blockIdx.x) * Tile::kSamples + row;

  __device__ int64_t state(const Steps& steps) const { return int64_t{sample} * steps.state_size + unit; }

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

// The sums of all columns.
template <class Tile>
__device__ void multiply_operands(
    float (&sums)[Tile::kTiles][Tile::kChains][4], const BlockWeights<Tile>& weights, const unsigned char* operands) {
  const int row = lane_id() % 8 * Tile::kSamples / 8;
  const uint32_t from = shared_address(operands) + lane_id() / 8 * Tile::kChunk + row * kChunkBytes;
  weights.multiply(sums, [&](int step) { return from + step * 2 * Tile::kChunk; });
}

// The steps that count for any sample of a block.
template <class Tile>
__device__ Counted steps_of_block(const Steps& steps, bool backward) {
  int length = 0;
  for (int row = 0; row < Tile::kSamples; ++row) {
    const int sample = static_cast<int>(blockIdx.x) * Tile::kSamples + row;
    if (sample < steps.batch) length = max(length, steps.length(sample));
  }
  return {steps, length, backward};
}

// Where the cells of a thread lie in tensors of one value for each cell, and in those of three.
struct CellOffset {
  int64_t state;
  int64_t gates;
  int64_t step_size;  // from one step to the next, of the former

  __device__ CellOffset(const Steps& steps, const CellPlace& place, int unit, int step) {
    step_size = place.step_rows * steps.state_size;
    const int64_t row = (place.row + step * place.step_rows) * steps.state_size;
    state = row + unit;
    gates = row * 3 + unit;
  }

  __device__ void advance() {
    state += step_size;
    gates += 3 * step_size;
  }
};

// Calls function(offset) for the steps that are not among these.
template <class Function>
__device__ void for_other_steps(
    const Counted& those, const Steps& steps, const CellPlace& place, int unit, const Function& function) {
  for (int step = 0; step < steps.time; ++step) {
    if (step == those.first) step += static_cast<int>(those.count);
    if (step < steps.time) function(CellOffset(steps, place, unit, step));
  }
}

template <class Tile>
__device__ void run_forward(
    const SequenceForward<typename Tile::T>& in, const BlockWeights<Tile>& weights, unsigned char* operands) {
  using T = typename Tile::T;
  constexpr int kCells = Tile::kCells;
  constexpr int kAhead = Tile::kAhead;
  const Steps& steps = in.steps;
  const int state_size = steps.state_size;
  const BlockCells<Tile> own;
  const CellPlace place(steps, own.sample, own.unit, kCells, false);
  const Counted counted(steps, place.count > 0 ? steps.length(own.sample) : 0, false);
  const Counted of_block = steps_of_block<Tile>(steps, false);
  float h[kCells] = {};
  float cells[kCells] = {};
  float bias[3][kCells] = {};
#pragma unroll
  for (int c = 0; c < kCells; ++c) {
    if (c >= place.count) continue;
    h[c] = load(in.h_0[own.state(steps) + c]);
    cells[c] = load(in.c_0[own.state(steps) + c]);
#pragma unroll
    for (int g = 0; g < 3; ++g) bias[g][c] = load(in.bias[g * state_size + own.unit + c]);
  }
  Packed<float, kCells> next[3] = {};  // products, on their way since the step before
  CellOffset coming(steps, place, own.unit, of_block.first);
  const auto fetch = [&](int step) {
#pragma unroll
    for (int g = 0; g < 3; ++g)
      load_if<float, kCells>(counted(step), next[g], in.products + coming.gates + g * state_size);
#pragma unroll
    for (int g = 0; g < 3; ++g)
      prefetch_if(
          counted(step + kAhead), in.products + coming.gates + (3 * kAhead * coming.step_size + g * state_size));
    coming.advance();
  };
  // Two buffers in turn: a warp may read one while another writes the next step's.
  int buffer = 0;
  unsigned char* const own_operands = operands + own.operand_place();
  const auto pass_on = [&](int to) {
    *reinterpret_cast<Vector<T, kCells>*>(own_operands + to) = as_operands<T, kCells>(h);
  };
  const auto leave = [&](const CellOffset& of_step, const T(&gates)[3][kCells], const T(&new_cells)[kCells],
                         const T(&output)[kCells]) {
    const bool wanted = place.count > 0;
#pragma unroll
    for (int g = 0; g < 3; ++g) store_if(wanted, in.gates + of_step.gates + g * state_size, gates[g]);
    store_if(wanted, in.cells + of_step.state, new_cells);
    store_if(wanted, in.output + of_step.state, output);
  };
  CellOffset at = coming;
  pass_on(buffer);
  fetch(of_block.first);
  __syncthreads();
  for (int step = of_block.first; of_block(step); ++step) {
    float found[3][Tile::kChains][4] = {};
    multiply_operands<Tile>(found, weights, operands + buffer);
    buffer = Tile::kOperandBytes - buffer;
    float sums[3][kCells];
#pragma unroll
    for (int g = 0; g < 3; ++g) {
      float products[kCells];
      unpack<float, kCells>(products, next[g]);
      own.take(sums[g], found[g]);
#pragma unroll
      for (int c = 0; c < kCells; ++c) sums[g][c] += products[c] + bias[g][c];
    }
    fetch(step + 1);
    T gates[3][kCells], new_cells[kCells], output[kCells];
    compute_cells(gates, new_cells, output, h, cells, sums, counted(step));
    pass_on(buffer);
    leave(at, gates, new_cells, output);
    at.advance();
    __syncthreads();
  }
  const T zeros[3][kCells] = {};
  for_other_steps(
      of_block, steps, place, own.unit, [&](const CellOffset& other) { leave(other, zeros, zeros[0], zeros[0]); });
#pragma unroll
  for (int c = 0; c < kCells; ++c) {
    if (c >= place.count) continue;
    store(in.h_n[own.state(steps) + c], h[c]);
    store(in.c_n[own.state(steps) + c], cells[c]);
  }
}

template <class Tile>
__device__ void run_backward(
    const SequenceBackward<typename Tile::T>& in, const BlockWeights<Tile>& weights, unsigned char* shared) {
  using T = typename Tile::T;
  constexpr int kCells = Tile::kCells;
  constexpr int kAhead = Tile::kAhead;
  const Steps& steps = in.steps;
  const int state_size = steps.state_size;
  const BlockCells<Tile> own;
  const CellPlace place(steps, own.sample, own.unit, kCells, true);
  const Counted counted(steps, place.count > 0 ? steps.length(own.sample) : 0, true);
  const Counted of_block = steps_of_block<Tile>(steps, true);
  float grad_h[kCells] = {};
  float grad_cell[kCells] = {};
#pragma unroll
  for (int c = 0; c < kCells; ++c) {
    if (c >= place.count) continue;
    grad_h[c] = load_if_present(in.grad_h_n, own.state(steps) + c);
    grad_cell[c] = load_if_present(in.grad_c_n, own.state(steps) + c);
  }
  // What a step needs of the forward is on its way since the second step before, and becomes slopes in the one before.
  SavedCells<T, kCells> saved;
  CellOffset coming(steps, place, own.unit, of_block.first);
  CellOffset at = coming;
  const auto fetch = [&](int step) {
    saved.fetch(in, coming.state, coming.gates, [&](Packed<T, kCells>& packed, const T* from) {
      load_if<T, kCells>(counted(step), packed, from);
    });
    const int64_t ahead = kAhead * coming.step_size;
    saved.fetch(in, coming.state + ahead, coming.gates + 3 * ahead, [&](Packed<T, kCells>&, const T* from) {
      prefetch_if(counted(step + kAhead), from);
    });
    coming.advance();
  };
  CellSlopes<float> slopes[kCells];
  Packed<T, kCells> grad_output;
  const auto advance = [&](int step) {
    saved.unpack_slopes(slopes);
    grad_output = saved.grad_output;
    fetch(step + 1);
  };
  const auto leave = [&](const CellOffset& of_step, const float (&gradients)[3][kCells]) {
#pragma unroll
    for (int g = 0; g < 3; ++g) {
      T* const to = in.grad_gates + of_step.gates + g * state_size;
      store_if(place.count > 0, to, rounded<T, kCells>(gradients[g]).values);
    }
  };
  int buffer = 0;
  fetch(of_block.first);
  advance(of_block.first);
  for (int step = of_block.first; of_block(step); ++step) {
    float gradients[3][kCells];
    compute_gradients<T>(gradients, grad_cell, grad_h, grad_output, slopes, counted(step));
    // Two buffers in turn: a warp may read one while another writes the next step's.
    unsigned char* const operands = shared + buffer;
    buffer = 3 * Tile::kOperandBytes - buffer;
#pragma unroll
    for (int g = 0; g < 3; ++g) {
      unsigned char* const to = operands + g * Tile::kOperandBytes + own.operand_place();
      *reinterpret_cast<Vector<T, kCells>*>(to) = as_operands<T, kCells>(gradients[g]);
    }
    __syncthreads();
    float found[1][Tile::kChains][4] = {};
    multiply_operands<Tile>(found, weights, operands);
    // Where the product waits for the tensor cores.
    leave(at, gradients);
    at.advance();
    advance(step + 1);
    float sums[kCells];
    own.take(sums, found[0]);
#pragma unroll
    for (int c = 0; c < kCells; ++c) grad_h[c] = counted(step) ? sums[c] : grad_h[c];
  }
  const float zeros[3][kCells] = {};
  for_other_steps(of_block, steps, place, own.unit, [&](const CellOffset& other) { leave(other, zeros); });
#pragma unroll
  for (int c = 0; c < kCells; ++c) {
    if (c >= place.count) continue;
    store(in.grad_h_0[own.state(steps) + c], grad_h[c]);
    store(in.grad_c_0[own.state(steps) + c], grad_cell[c]);
  }
}

#endif

template <class Tile, class Arguments>
__global__ void __launch_bounds__(Tile::kThreads, 1) lltm_sequence_tensor_block_kernel(Arguments in) {
#if defined(EXTOPS_TENSOR_CORES)
  __shared__ __align__(kChunkBytes) unsigned char shared[Tile::kSharedBytes];
  const BlockWeights<Tile> weights(
      shared, [&](int tile, int row, int k) { return weight_of_warp<Tile>(in.steps, in.weights, tile, row, k); });
  __syncthreads();  // before operands lie where the weights were
  if constexpr (Tile::kIsForward) {
    run_forward<Tile>(in, weights, shared);
  } else {
    run_backward<Tile>(in, weights, shared);
  }
#endif
}

// ---- how it is launched ----

inline bool fits_at_once(const Context& context, const SequenceSizes& sizes, int samples) {
  return sizes.batch <= int64_t{samples} * context.multiprocessors();
}

bool is_for_tensor_blocks(const Context& context, ScalarType dtype, const SequenceSizes& sizes, bool backward) {
  if (sizes.state_size > kMostUnits || !has_tensor_cores()) return false;
  // In TF32 a product takes twice as long: the kernel for float32 is faster while each of its blocks has a
  // multiprocessor, in the backward also with two samples a block.
  if (dtype == ScalarType::TF32) return !fits_at_once(context, sizes, backward ? 2 : 1);
  return dtype == ScalarType::Half || dtype == ScalarType::BFloat16;
}

// Calls function(tile). Two samples a block take less time than four, but then more blocks may be needed than run at
// the same time. With four, a thread has two neighbouring cells, which must be one access to memory.
template <Pass kPass, class Function>
Error with_block_tile(
    const Context& context, ScalarType dtype, const SequenceSizes& sizes, std::initializer_list<const void*> tensors,
    const Function& function) {
  const bool takes_two = fits_at_once(context, sizes, 2) || !pairs_are_aligned(sizes, tensors);
  const auto with_units = [&](auto scalar, auto units) {
    using T = decltype(scalar);
    return takes_two ? function(TensorBlockTile<T, kPass, units, 2>{})
                     : function(TensorBlockTile<T, kPass, units, 4>{});
  };
  const auto with_type = [&](auto scalar) {
    if (sizes.state_size <= kMostUnits / 2) return with_units(scalar, std::integral_constant<int, kMostUnits / 2>{});
    return with_units(scalar, std::integral_constant<int, kMostUnits>{});
  };
  switch (dtype) {
    case ScalarType::BFloat16:
      return with_type(__nv_bfloat16{});
    case ScalarType::Half:
      return with_type(__half{});
    default:
      return with_type(float{});
  }
}

template <class Tile, class Arguments>
Error launch_block_tile(const Arguments& in, cudaStream_t stream) {
  const unsigned blocks = (in.steps.batch + Tile::kSamples - 1) / Tile::kSamples;
  lltm_sequence_tensor_block_kernel<Tile><<<blocks, Tile::kThreads, 0, stream>>>(in);
  return launch_error();
}

Error launch_tensor_blocks(ScalarType dtype, const SequenceArguments& in, cudaStream_t stream) {
  return with_block_tile<Pass::kForward>(
      Context(stream), dtype, in.sizes, {in.products, in.gates, in.cells, in.output}, [&](auto tile) {
        using Tile = decltype(tile);
        return launch_block_tile<Tile>(SequenceForward<typename Tile::T>(in), stream);
      });
}

Error launch_tensor_blocks(ScalarType dtype, const SequenceBackwardArguments& in, cudaStream_t stream) {
  return with_block_tile<Pass::kBackward>(
      Context(stream), dtype, in.sizes, {in.grad_output, in.gates, in.cells, in.grad_gates}, [&](auto tile) {
        using Tile = decltype(tile);
        return launch_block_tile<Tile>(SequenceBackward<typename Tile::T>(in), stream);
      });
}

}  // namespace extops::cuda
