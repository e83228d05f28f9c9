// A whole sequence of a small state in strict float32: a block computes one sample or two, and its threads hold all of
// the recurrent weights in registers. No block waits for another.
//
// Shared memory hands a lane 16 bytes in the time of four multiply-adds, so each chunk that a thread loads must meet
// the weights of several sums: in the forward of the gates of two units, in the backward of eight units. Lanes of a
// warp add up the sums by shuffles, and one of them then has all that a cell needs.
//
// A step has one barrier of the block, with two buffers in turn: who writes a buffer again has passed the barrier of
// the step between, which the others reach after they have read it.
#pragma once

#include "sequence_choice.cuh"

namespace extops::cuda {

constexpr int kQuad = 4;           // floats in a chunk of 16 bytes
constexpr int kUnitsOfChunk = 16;  // and of a warp
constexpr int kMaxRows = 2;        // samples of a block

constexpr int threads_of(int chunks) { return chunks * 32; }

// Adds up the sums of two neighbours for each row of a block. Of two rows, the first lane keeps those of the first; one
// row is kept by both.
template <int kRows, int kCount>
__device__ __forceinline__ void add_neighbours(float (&sums)[kRows * kCount]) {
  if constexpr (kRows > 1) {
    exchange_halves<kRows * kCount>(sums, 1);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] += __shfl_xor_sync(0xffffffff, sums[i], 1);
  }
}

template <class T>
__device__ void swap(T& a, T& b) {
  const T former = a;
  a = b;
  b = former;
}

// sums[j] += weights[j] * values, along chunks that are `stride` floats apart.
template <int kSums, int kChunks>
__device__ __forceinline__ void multiply(
    float (&sums)[kSums], const float (&weights)[kSums][kChunks][kQuad], const float* values, int stride) {
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const float4 x = *reinterpret_cast<const float4*>(values + i * stride);
#pragma unroll
    for (int j = 0; j < kSums; ++j) sums[j] = fmaf(x.x, weights[j][i][0], sums[j]);
#pragma unroll
    for (int j = 0; j < kSums; ++j) sums[j] = fmaf(x.y, weights[j][i][1], sums[j]);
#pragma unroll
    for (int j = 0; j < kSums; ++j) sums[j] = fmaf(x.z, weights[j][i][2], sums[j]);
#pragma unroll
    for (int j = 0; j < kSums; ++j) sums[j] = fmaf(x.w, weights[j][i][3], sums[j]);
  }
}

// What a thread has between two products: a cell. Where a block has one row, two neighbours have the same cell, and
// each stores a part of the results.
template <class Cell, int kRows>
struct Owner {
  int row;
  int unit;
  bool exists;
  bool stores_gates;
  bool stores_state;
  int64_t at;         // in [time, batch, state_size]
  int64_t step_size;  // from one step to the next

  __device__ Owner(const Steps& steps, int first_sample, int unit, bool backward) : unit(unit) {
    const int lane = threadIdx.x & 1;
    row = kRows > 1 ? lane : 0;
    exists = unit < steps.state_size && first_sample + row < steps.batch;
    stores_gates = exists && (kRows > 1 || lane == 0);
    stores_state = exists && (kRows > 1 || lane == 1);
    const bool descends = steps.reverse != backward;
    at = steps.row(descends ? steps.time - 1 : 0, first_sample + row) * steps.state_size;
    step_size = (descends ? -steps.time_stride : steps.time_stride) * steps.state_size;
  }

  __device__ int64_t products() const { return Cell::kInput * at + unit; }
  __device__ int64_t gates() const { return Cell::kColumns * at + unit; }
  __device__ int64_t state() const { return at + unit; }
};

// Four lanes compute the sums of two units: each has every fourth chunk of h.
template <class Cell, int kChunks, int kRows>
__global__ void __launch_bounds__(threads_of(kChunks)) sequence_float32_block_kernel(SequenceForward<Cell, float> in) {
  constexpr int kUnits = kChunks * kUnitsOfChunk;
  constexpr int kLanes = 4;
  constexpr int kColumns = Cell::kColumns;
  constexpr int kSums = 2 * Cell::kRecurrent;
  __shared__ __align__(16) float h[2][kRows][kUnits];
  const Steps& steps = in.steps;
  const int state_size = steps.state_size;
  const int first_sample = static_cast<int>(blockIdx.x) * kRows;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int first_unit = static_cast<int>(threadIdx.x) / kLanes * 2;
  const Owner<Cell, kRows> owner(steps, first_sample, first_unit + lane / 2, false);

  float weights[kSums][kChunks][kQuad];
#pragma unroll
  for (int j = 0; j < kSums; ++j) {
    const int unit = first_unit + j / Cell::kRecurrent;
    const float* const from = in.weights_h + (int64_t{j % Cell::kRecurrent} * state_size + unit) * steps.weights_stride;
#pragma unroll
    for (int i = 0; i < kChunks * kQuad; ++i) {
      const int k = (i / kQuad * kLanes + lane) * kQuad + i % kQuad;
      weights[j][i / kQuad][i % kQuad] = unit < state_size && k < state_size ? from[k] : 0.f;
    }
  }
  float bias[kColumns] = {};
  if (owner.exists) {
#pragma unroll
    for (int g = 0; g < kColumns; ++g) bias[g] = in.bias[g * state_size + owner.unit];
  }
  const auto length_of = [&](int row) {
    return first_sample + row < steps.batch ? steps.length(first_sample + row) : 0;
  };
  const Counted counted(steps, owner.exists ? length_of(owner.row) : 0, false);
  const Counted counted_by_row[] = {{steps, length_of(0), false}, {steps, length_of(kRows - 1), false}};
  const int64_t state = int64_t{first_sample + owner.row} * state_size + owner.unit;
  float c = owner.exists ? in.c_0[state] : 0.f;
  float own_h = owner.exists ? in.h_0[state] : 0.f;
  const float* read = &h[0][0][lane * kQuad];
  const float* other = &h[1][0][lane * kQuad];
  float* write = &h[1][owner.row][owner.unit];
  float* other_write = &h[0][owner.row][owner.unit];
  *other_write = own_h;

  const float* from = in.products + owner.products();
  float* gates = in.gates + owner.gates();
  float* cells = in.cells + owner.state();
  float* output = in.output + owner.state();
  // The products of the next step, on their way.
  float next[Cell::kInput] = {};
  const auto fetch = [&](int step) {
    if (counted(step)) {
#pragma unroll
      for (int g = 0; g < Cell::kInput; ++g) next[g] = from[g * state_size];
    }
    from += Cell::kInput * owner.step_size;
  };
  fetch(0);
  __syncthreads();
  for (int step = 0; step < steps.time; ++step) {
    float found[kRows * Cell::kRecurrent];
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      float sums[kSums] = {};
      if (counted_by_row[row](step)) multiply(sums, weights, read + row * kUnits, kLanes * kQuad);
      exchange_halves<kSums>(sums, 2);
#pragma unroll
      for (int g = 0; g < Cell::kRecurrent; ++g) found[row * Cell::kRecurrent + g] = sums[g];
    }
    add_neighbours<kRows, Cell::kRecurrent>(found);
    // Without a branch, which would cost more than it saves.
    const bool counts = counted(step);
    float columns[kColumns];
#pragma unroll
    for (int g = 0; g < kColumns; ++g) {
      const float sum = complete_sum<Cell>(g, next, bias, found);
      columns[g] = counts ? sum : 0.f;
    }
    fetch(step + 1);
    const CellState<float> result = cell_forward<Cell, ExactMath>(columns, c);
    const float new_h = counts ? result.h : 0.f;
    const float saved_c = counts ? result.saved_c : 0.f;
    own_h = counts ? new_h : own_h;
    c = counts ? result.c : c;
    *write = own_h;
    if (owner.stores_gates) {
#pragma unroll
      for (int g = 0; g < kColumns; ++g) gates[g * state_size] = columns[g];
    }
    if (owner.stores_state) {
      *cells = saved_c;
      *output = new_h;
    }
    gates += kColumns * owner.step_size;
    cells += owner.step_size;
    output += owner.step_size;
    swap(read, other);
    swap(write, other_write);
    __syncthreads();
  }
  if (!owner.stores_state) return;
  in.h_n[state] = own_h;
  in.c_n[state] = c;
}

// What the gradients of a cell need of the forward.
template <class Cell>
struct Saved {
  float columns[Cell::kColumns];
  float c;
  float grad_output;
};

// Sixteen lanes compute the sums of eight units: each has every sixteenth chunk of the gates' gradients.
template <class Cell, int kChunks, int kRows>
__global__ void __launch_bounds__(threads_of(kChunks))
    sequence_float32_block_backward_kernel(SequenceBackward<Cell, float> in) {
  constexpr int kUnits = kChunks * kUnitsOfChunk;
  constexpr int kLanes = 16;
  constexpr int kSums = 8;
  constexpr int kColumns = Cell::kColumns;
  constexpr int kK = Cell::kRecurrent * kUnits;
  constexpr int kOwnChunks = kK / (kLanes * kQuad);
  static_assert(kK % (kLanes * kQuad) == 0);
  __shared__ __align__(16) float gradients[2][kRows][kK];
  const Steps& steps = in.steps;
  const int state_size = steps.state_size;
  const int first_sample = static_cast<int>(blockIdx.x) * kRows;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int first_unit = static_cast<int>(threadIdx.x) / kLanes * kSums;
  const Owner<Cell, kRows> owner(steps, first_sample, first_unit + lane / 2, true);

  float weights[kSums][kOwnChunks][kQuad];
#pragma unroll
  for (int j = 0; j < kSums; ++j) {
#pragma unroll
    for (int i = 0; i < kOwnChunks * kQuad; ++i) {
      const int k = (i / kQuad * kLanes + lane) * kQuad + i % kQuad;
      const bool inside = k % kUnits < state_size && first_unit + j < state_size;
      const int64_t row = int64_t{k / kUnits} * state_size + k % kUnits;
      weights[j][i / kQuad][i % kQuad] = inside ? in.weights_h[row * steps.weights_stride + first_unit + j] : 0.f;
    }
  }
  const auto length_of = [&](int row) {
    return first_sample + row < steps.batch ? steps.length(first_sample + row) : 0;
  };
  const Counted counted(steps, owner.exists ? length_of(owner.row) : 0, true);
  const Counted counted_by_row[] = {{steps, length_of(0), true}, {steps, length_of(kRows - 1), true}};
  const int64_t state = int64_t{first_sample + owner.row} * state_size + owner.unit;
  float grad_h = owner.exists ? load_if_present(in.grad_h_n, state) : 0.f;
  float grad_c = owner.exists ? load_if_present(in.grad_c_n, state) : 0.f;
  const float* read = &gradients[0][0][lane * kQuad];
  const float* other = &gradients[1][0][lane * kQuad];
  float* write = &gradients[0][owner.row][owner.unit];
  float* other_write = &gradients[1][owner.row][owner.unit];

  const float* gates = in.gates + owner.gates();
  int64_t at = owner.state();
  float* grad_gates = in.grad_gates + owner.gates();
  // What the next steps need of the forward: on its way, and turned into slopes a step before it is needed.
  Saved<Cell> next = {};
  const auto fetch = [&](int step) {
    if (counted(step)) {
#pragma unroll
      for (int g = 0; g < kColumns; ++g) next.columns[g] = gates[g * state_size];
      next.c = in.cells[at];
      if (in.grad_output != nullptr) next.grad_output = in.grad_output[at];
    }
    gates += kColumns * owner.step_size;
    at += owner.step_size;
  };
  CellSlopes<Cell, float> slopes;
  float grad_output;
  const auto advance = [&](int step) {
    // A copy, without which the compiler orders the instructions of a step in another way.
    const Saved<Cell> saved = next;
    slopes = cell_slopes<Cell, ExactMath>(saved.columns, saved.c);
    grad_output = next.grad_output;
    fetch(step + 1);
  };
  fetch(0);
  advance(0);
  for (int step = 0; step < steps.time; ++step) {
    const bool counts = counted(step);
    const float upstream = grad_h + grad_output;
    float columns[kColumns];
    float old_grad_c = grad_c;
    apply_slopes(slopes, upstream, old_grad_c, columns);
    grad_c = counts ? old_grad_c : grad_c;
#pragma unroll
    for (int g = 0; g < kColumns; ++g) columns[g] = counts ? columns[g] : 0.f;
#pragma unroll
    for (int g = 0; g < Cell::kRecurrent; ++g) write[g * kUnits] = columns[kFirstRecurrent<Cell> + g];
    __syncthreads();
    // Behind the barrier, where the product waits for shared memory.
    if (owner.stores_gates) {
#pragma unroll
      for (int g = 0; g < kColumns; ++g) grad_gates[g * state_size] = columns[g];
    }
    grad_gates += kColumns * owner.step_size;
    advance(step + 1);
    float found[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      float sums[kSums] = {};
      if (counted_by_row[row](step)) multiply(sums, weights, read + row * kK, kLanes * kQuad);
      exchange_halves<kSums>(sums, 8);
      exchange_halves<kSums / 2>(sums, 4);
      exchange_halves<kSums / 4>(sums, 2);
      found[row] = sums[0];
    }
    add_neighbours<kRows, 1>(found);
    grad_h = counts ? found[0] : grad_h;
    swap(read, other);
    swap(write, other_write);
  }
  if (!owner.stores_state) return;
  in.grad_h_0[state] = grad_h;
  in.grad_c_0[state] = grad_c;
}

// ---- how they are launched ----

// Calls function(chunks, rows).
template <class Cell, class Function>
Error with_block_sizes(const Problem& problem, const Function& function) {
  const auto with_rows = [&](auto chunks) {
    if (problem.sizes.batch > problem.context.multiprocessors())
      return function(chunks, std::integral_constant<int, kMaxRows>{});
    return function(chunks, std::integral_constant<int, 1>{});
  };
  if (problem.sizes.state_size <= 64) return with_rows(std::integral_constant<int, 4>{});
  return with_rows(std::integral_constant<int, kFloat32BlockUnits<Cell> / kUnitsOfChunk>{});
}

template <int kChunks, int kRows, class Arguments>
Error launch_rows(void (*kernel)(Arguments), const Arguments& in, cudaStream_t stream) {
  const unsigned blocks = (in.steps.batch + kRows - 1) / kRows;
  kernel<<<blocks, threads_of(kChunks), 0, stream>>>(in);
  return launch_error();
}

template <class Cell, class In>
Error launch_float32_blocks(const Problem& problem, const In& in) {
  return with_block_sizes<Cell>(problem, [&](auto chunks, auto rows) {
    const cudaStream_t stream = problem.context.stream();
    if constexpr (std::is_same_v<In, SequenceArguments>) {
      constexpr auto kernel = &sequence_float32_block_kernel<Cell, chunks, rows>;
      return launch_rows<chunks, rows>(kernel, SequenceForward<Cell, float>(in), stream);
    } else {
      constexpr auto kernel = &sequence_float32_block_backward_kernel<Cell, chunks, rows>;
      return launch_rows<chunks, rows>(kernel, SequenceBackward<Cell, float>(in), stream);
    }
  });
}

}  // namespace extops::cuda
