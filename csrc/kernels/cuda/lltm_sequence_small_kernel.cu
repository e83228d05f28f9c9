// A whole sequence of a small state in one kernel: a block computes some samples, and its threads hold all of the
// recurrent weights in registers, in float32. No block waits for another one.
//
// Shared memory hands a lane 16 bytes in the time of four multiply-adds, so that each chunk of h that is loaded must
// meet the weights of many gates: the lanes of a half warp (backward: of a warp) split K, and have the same few units.
// Their sums meet by shuffles, after which the four lanes that have a unit's sums compute its cell.
#include "lltm_sequence.cuh"

// Named, not anonymous: nvcc would put the path of this file into the kernels' names, and no two builds be the same.
namespace extops::cuda {

constexpr int kMaxState = 128;
constexpr int kMaxRows = 8;  // samples of a block
constexpr int kThreadsOfUnit = 4;
constexpr int kMaxSmallThreads = kMaxState * kThreadsOfUnit;
constexpr int kQuad = 4;  // floats in a chunk of 16 bytes

// Of 2 * kHalf values, keeps the sums with the lane whose number differs in `mask`: the upper half where this lane has
// that bit, else the lower one.
template <int kHalf, int kSize>
__device__ void exchange_halves(float (&values)[kSize], int mask) {
  const bool is_upper = threadIdx.x & mask;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float sent = is_upper ? values[i] : values[kHalf + i];
    const float kept = is_upper ? values[kHalf + i] : values[i];
    values[i] = kept + __shfl_xor_sync(0xffffffff, sent, mask);
  }
}

template <int kCount, int kSize>
__device__ void add_across(float (&values)[kSize], int mask) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] += __shfl_xor_sync(0xffffffff, values[i], mask);
}

// The samples of a block.
struct Samples {
  int first;
  int count;

  __device__ Samples(const Steps& steps, int rows)
      : first(static_cast<int>(blockIdx.x) * rows), count(min(rows, steps.batch - first)) {}
};

// ---- forward: a half warp has four units ----

constexpr int kForwardUnits = 4;
constexpr int kForwardLanes = 16;

template <class T, int kChunks, bool kFast>
__global__ void __launch_bounds__(kMaxSmallThreads) lltm_sequence_small_kernel(SequenceForward<T> in, int rows) {
  constexpr int kDepth = kForwardLanes * kChunks * kQuad;
  __shared__ __align__(16) float h[2][kMaxRows][kDepth];
  __shared__ float cells[kMaxRows][kDepth];
  __shared__ int lengths[kMaxRows];
  const Steps& steps = in.steps;
  const int state_size = steps.state_size;
  const Samples samples(steps, rows);
  const int lane = threadIdx.x % kForwardLanes;
  const int first_unit = static_cast<int>(threadIdx.x) / kForwardLanes * kForwardUnits;
  const int unit = first_unit + lane / kThreadsOfUnit;
  const int quarter = lane % kThreadsOfUnit;
  const bool exists = unit < state_size;

  float weights[kForwardUnits][3][kChunks][kQuad];
#pragma unroll
  for (int u = 0; u < kForwardUnits; ++u) {
#pragma unroll
    for (int g = 0; g < 3; ++g) {
#pragma unroll
      for (int i = 0; i < kChunks * kQuad; ++i) {
        const int k = (i / kQuad * kForwardLanes + lane) * kQuad + i % kQuad;
        const bool inside = first_unit + u < state_size && k < state_size;
        const int64_t row = int64_t{g} * state_size + first_unit + u;
        weights[u][g][i / kQuad][i % kQuad] = inside ? load(in.weights[row * steps.columns + k]) : 0.f;
      }
    }
  }
  float bias[3];
#pragma unroll
  for (int g = 0; g < 3; ++g) bias[g] = exists ? load(in.bias[g * state_size + unit]) : 0.f;
  for (int item = threadIdx.x; item < samples.count * kDepth; item += blockDim.x) {
    const int row = item / kDepth;
    const int k = item % kDepth;
    const int64_t at = int64_t{samples.first + row} * state_size + k;
    h[0][row][k] = k < state_size ? load(in.h_0[at]) : 0.f;
    h[1][row][k] = 0;
    cells[row][k] = k < state_size ? load(in.c_0[at]) : 0.f;
    if (k == 0) lengths[row] = steps.length(samples.first + row);
  }
  __syncthreads();

  // The products of the cell after this one, on their way.
  float next[3] = {};
  const auto fetch = [&](int step, int row) {
    const int t = steps.time_of(step);
    if (step >= steps.time || !exists || t >= lengths[row]) return;
    const float* from = in.products + steps.row(t, samples.first + row) * 3 * state_size + unit;
#pragma unroll
    for (int g = 0; g < 3; ++g) next[g] = from[g * state_size];
  };
  fetch(0, 0);
  for (int step = 0; step < steps.time; ++step) {
    const int t = steps.time_of(step);
    for (int row = 0; row < samples.count; ++row) {
      // Before the sums meet: they wait for all lanes, of which one writes the next.
      const float old_cell = exists ? cells[row][unit] : 0.f;
      const float (&old_h)[kDepth] = h[step & 1][row];
      float (&new_h)[kDepth] = h[(step + 1) & 1][row];
      const float products[3] = {next[0] + bias[0], next[1] + bias[1], next[2] + bias[2]};
      const bool is_last_row = row + 1 == samples.count;
      fetch(is_last_row ? step + 1 : step, is_last_row ? 0 : row + 1);
      const int64_t place = steps.row(t, samples.first + row);
      if (t >= lengths[row]) {
        if (exists && quarter == 0) {
          new_h[unit] = old_h[unit];
          skip_cell(in, place, unit);
        }
        continue;
      }
      float sums[kForwardUnits * 3] = {};
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const float4 x = *reinterpret_cast<const float4*>(&old_h[(chunk * kForwardLanes + lane) * kQuad]);
#pragma unroll
        for (int i = 0; i < kForwardUnits * 3; ++i) {
          const float (&w)[kQuad] = weights[i / 3][i % 3][chunk];
          sums[i] = fmaf(x.x, w[0], fmaf(x.y, w[1], fmaf(x.z, w[2], fmaf(x.w, w[3], sums[i]))));
        }
      }
      exchange_halves<6>(sums, 8);
      exchange_halves<3>(sums, 4);
      add_across<3>(sums, 2);
      add_across<3>(sums, 1);
      float gates[3];
      T rounded[3];
#pragma unroll
      for (int g = 0; g < 3; ++g) {
        store(rounded[g], sums[g] + products[g]);
        gates[g] = load(rounded[g]);  // as the backward will see it
      }
      if (!exists) continue;
      const CellState<float> state = cell_forward<float, kFast>(gates[0], gates[1], gates[2], old_cell);
      T kept_h;
      store(kept_h, state.h);
      const bool is_last = t == steps.last_time(lengths[row]);
      const int64_t at = int64_t{samples.first + row} * state_size + unit;
      // Each of the four lanes stores a part.
      if (quarter == 3) {
        new_h[unit] = load(kept_h);
        cells[row][unit] = state.cell;
        store(in.cells[place * state_size + unit], state.cell);
        in.output[place * state_size + unit] = kept_h;
        if (is_last) {
          in.h_n[at] = kept_h;
          store(in.c_n[at], state.cell);
        }
      } else {
        const T gate = quarter == 0 ? rounded[0] : quarter == 1 ? rounded[1] : rounded[2];
        in.gates[(place * 3 + quarter) * state_size + unit] = gate;
      }
    }
    __syncthreads();
  }
  // Rows without any step.
  for (int row = 0; row < samples.count; ++row) {
    if (lengths[row] > 0 || !exists || quarter > 0) continue;
    const int64_t at = int64_t{samples.first + row} * state_size + unit;
    in.h_n[at] = in.h_0[at];
    in.c_n[at] = in.c_0[at];
  }
}

// ---- backward: a warp has eight units ----

constexpr int kBackwardUnits = 8;

template <class T, int kChunks, bool kFast>
__global__ void __launch_bounds__(kMaxSmallThreads)
    lltm_sequence_small_backward_kernel(SequenceBackward<T> in, int rows) {
  constexpr int kDepth = 32 * kChunks * kQuad;  // gates of all units
  __shared__ __align__(16) float gradients[2][kMaxRows][kDepth];
  __shared__ float grad_h[kMaxRows][kMaxState];
  __shared__ float grad_cells[2][kMaxRows][kMaxState];
  __shared__ int lengths[kMaxRows];
  const Steps& steps = in.steps;
  const int state_size = steps.state_size;
  const Samples samples(steps, rows);
  const int lane = threadIdx.x % 32;
  const int first_unit = static_cast<int>(threadIdx.x) / 32 * kBackwardUnits;
  const int unit = first_unit + lane / kThreadsOfUnit;
  const int quarter = lane % kThreadsOfUnit;
  const bool exists = unit < state_size;

  float weights[kBackwardUnits][kChunks][kQuad];
#pragma unroll
  for (int u = 0; u < kBackwardUnits; ++u) {
#pragma unroll
    for (int i = 0; i < kChunks * kQuad; ++i) {
      const int k = (i / kQuad * 32 + lane) * kQuad + i % kQuad;
      const bool inside = first_unit + u < state_size && k < 3 * state_size;
      weights[u][i / kQuad][i % kQuad] = inside ? load(in.weights[k * steps.columns + first_unit + u]) : 0.f;
    }
  }
  for (int item = threadIdx.x; item < samples.count * kDepth; item += blockDim.x) {
    const int row = item / kDepth;
    const int k = item % kDepth;
    gradients[0][row][k] = gradients[1][row][k] = 0;
    const int64_t at = int64_t{samples.first + row} * state_size + k;
    if (k < state_size) {
      grad_h[row][k] = load_if_present(in.grad_h_n, at);
      grad_cells[0][row][k] = load_if_present(in.grad_c_n, at);
    }
    if (k == 0) lengths[row] = steps.length(samples.first + row);
  }
  __syncthreads();

  // What the step after this one needs, on its way.
  struct Saved {
    float gates[3];
    float cell;
    float grad_output;
  };
  const auto fetch = [&](int step, int row) {
    Saved saved{};
    const int t = steps.time_of(steps.time - 1 - step);
    if (step >= steps.time || !exists || t >= lengths[row]) return saved;
    const int64_t place = steps.row(t, samples.first + row);
#pragma unroll
    for (int g = 0; g < 3; ++g) saved.gates[g] = load(in.gates[(place * 3 + g) * state_size + unit]);
    saved.cell = load(in.cells[place * state_size + unit]);
    saved.grad_output = load_if_present(in.grad_output, place * state_size + unit);
    return saved;
  };
  Saved next = fetch(0, 0);
  for (int step = 0; step < steps.time; ++step) {
    const int t = steps.time_of(steps.time - 1 - step);
    for (int row = 0; row < samples.count; ++row) {
      const Saved saved = next;
      const bool is_last_row = row + 1 == samples.count;
      next = fetch(is_last_row ? step + 1 : step, is_last_row ? 0 : row + 1);
      if (!exists) continue;
      T rounded[3];
      T zero;
      store(zero, 0);
      rounded[0] = rounded[1] = rounded[2] = zero;
      float grad_cell = grad_cells[step & 1][row][unit];
      if (t < lengths[row]) {
        const CellGradients<float> found = cell_backward<float, kFast>(
            grad_h[row][unit] + saved.grad_output, grad_cell, saved.gates[0], saved.gates[1], saved.gates[2],
            saved.cell);
        store(rounded[0], found.input_gate);
        store(rounded[1], found.output_gate);
        store(rounded[2], found.candidate);
        grad_cell = found.old_cell;
      }
      if (quarter == 3) {
        grad_cells[(step + 1) & 1][row][unit] = grad_cell;
        continue;
      }
      const T gradient = quarter == 0 ? rounded[0] : quarter == 1 ? rounded[1] : rounded[2];
      gradients[step & 1][row][quarter * state_size + unit] = load(gradient);
      in.grad_gates[(steps.row(t, samples.first + row) * 3 + quarter) * state_size + unit] = gradient;
    }
    __syncthreads();
    for (int row = 0; row < samples.count; ++row) {
      if (t >= lengths[row]) continue;
      float sums[kBackwardUnits] = {};
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const float4 x = *reinterpret_cast<const float4*>(&gradients[step & 1][row][(chunk * 32 + lane) * kQuad]);
#pragma unroll
        for (int u = 0; u < kBackwardUnits; ++u) {
          const float (&w)[kQuad] = weights[u][chunk];
          sums[u] = fmaf(x.x, w[0], fmaf(x.y, w[1], fmaf(x.z, w[2], fmaf(x.w, w[3], sums[u]))));
        }
      }
      exchange_halves<4>(sums, 16);
      exchange_halves<2>(sums, 8);
      exchange_halves<1>(sums, 4);
      add_across<1>(sums, 2);
      add_across<1>(sums, 1);
      if (exists && quarter == 0) grad_h[row][unit] = sums[0];
      __syncwarp();
    }
  }
  for (int row = 0; row < samples.count; ++row) {
    if (!exists || quarter > 0) continue;
    const int64_t at = int64_t{samples.first + row} * state_size + unit;
    store(in.grad_h_0[at], grad_h[row][unit]);
    store(in.grad_c_0[at], grad_cells[steps.time & 1][row][unit]);
  }
}

// ---- how they are launched ----

constexpr int kRowsWhereGroupsWin = 4;  // samples of a block from which on groups of blocks are faster, on an H200

inline int rows_of_a_block(int64_t batch) {
  const int64_t multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  return static_cast<int>(std::clamp<int64_t>((batch + multiprocessors - 1) / multiprocessors, 1, kMaxRows));
}

bool is_for_blocks(ScalarType dtype, const LltmSequenceSizes& sizes) {
  return dtype != ScalarType::Double && sizes.state_size <= kMaxState &&
         (rows_of_a_block(sizes.batch) < kRowsWhereGroupsWin || !is_for_groups(dtype, sizes, true));
}

template <class Arguments>
Error launch_rows(void (*kernel)(Arguments, int), const Arguments& in, cudaStream_t stream) {
  const int rows = rows_of_a_block(in.steps.batch);
  const unsigned blocks = (in.steps.batch + rows - 1) / rows;
  const unsigned threads = (in.steps.state_size * kThreadsOfUnit + 31) / 32 * 32;
  kernel<<<blocks, threads, 0, stream>>>(in, rows);
  return launch_error();
}

template <class T, bool kFast>
Error launch_forward(const SequenceForward<T>& in, cudaStream_t stream) {
  const bool is_narrow = in.steps.state_size <= kMaxState / 2;
  return launch_rows(
      is_narrow ? &lltm_sequence_small_kernel<T, 1, kFast> : &lltm_sequence_small_kernel<T, 2, kFast>, in, stream);
}

template <class T, bool kFast>
Error launch_backward(const SequenceBackward<T>& in, cudaStream_t stream) {
  const int chunks = (3 * in.steps.state_size + 127) / 128;
  return launch_rows(
      chunks == 1   ? &lltm_sequence_small_backward_kernel<T, 1, kFast>
      : chunks == 2 ? &lltm_sequence_small_backward_kernel<T, 2, kFast>
                    : &lltm_sequence_small_backward_kernel<T, 3, kFast>,
      in, stream);
}

template <class Function>
Error dispatch_blocks(ScalarType dtype, const Function& function) {
  constexpr std::bool_constant<true> kFast;
  switch (dtype) {
    case ScalarType::Half:
      return function(__half{}, kFast);
    case ScalarType::BFloat16:
      return function(__nv_bfloat16{}, kFast);
    case ScalarType::TF32:
      return function(float{}, kFast);
    default:
      return function(float{}, std::bool_constant<false>{});
  }
}

Error launch_blocks(ScalarType dtype, const LltmSequence& in, cudaStream_t stream) {
  return dispatch_blocks(dtype, [&](auto scalar, auto fast) {
    return launch_forward<decltype(scalar), fast>(SequenceForward<decltype(scalar)>(in), stream);
  });
}

Error launch_blocks(ScalarType dtype, const LltmSequenceBackward& in, cudaStream_t stream) {
  return dispatch_blocks(dtype, [&](auto scalar, auto fast) {
    return launch_backward<decltype(scalar), fast>(SequenceBackward<decltype(scalar)>(in), stream);
  });
}

}  // namespace extops::cuda
