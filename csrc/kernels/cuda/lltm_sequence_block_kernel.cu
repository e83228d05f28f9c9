// A whole sequence of a small state in one kernel: a block computes one sample or two, and its threads hold all of the
// recurrent weights in registers, in float32: a thread has 4 * kChunks of each of four sums. No block waits for
// another.
//
// Shared memory hands a lane 16 bytes in the time of four multiply-adds, so that each chunk which a thread loads must
// meet the weights of several sums. A step has two halves, each followed by a barrier of the block: the product and
// what each sum needs alone, and what a cell needs of its three gates.
#include "lltm_sequence.cuh"

// Named, not anonymous: nvcc would put the path of this file into the kernels' names, and no two builds be the same.
namespace extops::cuda {

constexpr int kQuad = 4;  // floats in a chunk of 16 bytes
constexpr int kMaxChunks = 8;
constexpr int kUnitsOfChunk = 16;
constexpr int kMaxState = kMaxChunks * kUnitsOfChunk;
constexpr int kMaxRows = 2;  // samples of a block

// Where a block's samples are in [time, batch, ...], step by step: the row of the first sample.
struct Place {
  int64_t row;
  int64_t step;

  __device__ Place(const Steps& steps, int first_sample, bool backward) {
    const bool descends = steps.reverse != backward;
    row = steps.row(descends ? steps.time - 1 : 0, first_sample);
    step = descends ? -steps.time_stride : steps.time_stride;
  }
};

// Adds up four sums over four lanes: the lane with number q among them keeps sum number q, in sums[0].
__device__ inline void transpose_and_add(float (&sums)[4]) {
  const int lane = threadIdx.x;
#pragma unroll
  for (int mask = 2; mask > 0; mask /= 2) {
#pragma unroll
    for (int i = 0; i < mask; ++i) {
      const float sent = lane & mask ? sums[i] : sums[mask + i];
      const float kept = lane & mask ? sums[mask + i] : sums[i];
      sums[i] = kept + __shfl_xor_sync(0xffffffff, sent, mask);
    }
  }
}

// sums[j] += weights[j] * values, along chunks that are `stride` floats apart.
template <int kChunks>
__device__ void multiply(float (&sums)[4], const float (&weights)[4][kChunks][kQuad], const float* values, int stride) {
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const float4 x = *reinterpret_cast<const float4*>(values + i * stride);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sums[j] = fmaf(x.x, weights[j][i][0], sums[j]);
      sums[j] = fmaf(x.y, weights[j][i][1], sums[j]);
      sums[j] = fmaf(x.z, weights[j][i][2], sums[j]);
      sums[j] = fmaf(x.w, weights[j][i][3], sums[j]);
    }
  }
}

// A thread for each gate of each unit. Four neighbours compute their four sums together: each has every fourth chunk.
// Then a thread for each cell.
template <class T, int kChunks, int kRows, bool kFast>
__global__ void __launch_bounds__(3 * kChunks * kUnitsOfChunk) lltm_sequence_block_kernel(SequenceForward<T> in) {
  constexpr int kUnits = kChunks * kUnitsOfChunk;
  __shared__ __align__(16) float h[kRows][kUnits];
  __shared__ float activations[kRows][3][kUnits];
  const Steps& steps = in.steps;
  const int state_size = steps.state_size;
  const int first_sample = static_cast<int>(blockIdx.x) * kRows;
  const int gate = static_cast<int>(threadIdx.x) / kUnits;
  const int unit = static_cast<int>(threadIdx.x) % kUnits;
  const int lane = unit % 4;
  const bool exists = unit < state_size;

  float weights[4][kChunks][kQuad];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int row = unit - lane + j;
    const T* const from = in.weights + (int64_t{gate} * state_size + row) * steps.columns;
#pragma unroll
    for (int i = 0; i < kChunks * kQuad; ++i) {
      const int k = (i / kQuad * 4 + lane) * kQuad + i % kQuad;
      weights[j][i / kQuad][i % kQuad] = row < state_size && k < state_size ? load(from[k]) : 0.f;
    }
  }
  const float bias = exists ? load(in.bias[gate * state_size + unit]) : 0.f;
  int lengths[kRows];
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    lengths[row] = first_sample + row < steps.batch ? steps.length(first_sample + row) : 0;
  }
  // This thread's cell: that of row number `gate`.
  const bool has_cell = exists && gate < kRows && first_sample + gate < steps.batch;
  const int64_t state = int64_t{first_sample + gate} * state_size + unit;
  const int length = has_cell ? steps.length(first_sample + gate) : 0;
  float cell = has_cell ? load(in.c_0[state]) : 0.f;
  if (gate < kRows) h[gate][unit] = has_cell ? load(in.h_0[state]) : 0.f;
  __syncthreads();

  Place place(steps, first_sample, false);
  const auto gate_at = [&](int64_t of, int row) {
    return ((of + row * steps.batch_stride) * 3 + gate) * state_size + unit;
  };
  // The products of the next step, on their way.
  float next[kRows] = {};
  const auto fetch = [&](int step, int64_t of) {
    const int t = steps.time_of(step);
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (step < steps.time && exists && t < lengths[row]) next[row] = in.products[gate_at(of, row)];
    }
  };
  fetch(0, place.row);
  for (int step = 0; step < steps.time; ++step, place.row += place.step) {
    const int t = steps.time_of(step);
    float products[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) products[row] = next[row];
    fetch(step + 1, place.row + place.step);
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      float sums[4] = {};
      if (t < lengths[row]) {
        multiply<kChunks>(sums, weights, &h[row][lane * kQuad], 4 * kQuad);
        transpose_and_add(sums);
        sums[0] += bias + products[row];
      }
      T rounded;
      store(rounded, sums[0]);
      const float z = load(rounded);  // as the backward will see it
      activations[row][gate][unit] = gate == 2 ? elu<float, kFast>(z) : sigmoid<float, kFast>(z);
      if (exists && first_sample + row < steps.batch) in.gates[gate_at(place.row, row)] = rounded;
    }
    __syncthreads();
    if (has_cell) {
      T new_h, new_cell;
      store(new_h, 0);
      store(new_cell, 0);
      if (t < length) {
        const float (&of)[3][kUnits] = activations[gate];
        cell += of[2][unit] * of[0][unit];
        store(new_cell, cell);
        store(new_h, hyperbolic_tangent<float, kFast>(cell) * of[1][unit]);
        h[gate][unit] = load(new_h);
      }
      const int64_t at = (place.row + gate * steps.batch_stride) * state_size + unit;
      in.cells[at] = new_cell;
      in.output[at] = new_h;
    }
    __syncthreads();
  }
  if (!has_cell) return;
  store(in.h_n[state], h[gate][unit]);
  store(in.c_n[state], cell);
}

// What the gradients of a cell need of the forward.
struct Saved {
  float gates[3];
  float cell;
  float grad_output;
};

// For the product a thread has four units, and a twelfth of all gates. Between two products a third of the threads has
// the cells of the first sample, another one those of the second; the last third computes the slopes of the next step,
// from what it loaded a step before.
template <class T, int kChunks, int kRows, bool kFast>
__global__ void __launch_bounds__(3 * kChunks * kUnitsOfChunk)
    lltm_sequence_block_backward_kernel(SequenceBackward<T> in) {
  constexpr int kUnits = kChunks * kUnitsOfChunk;
  constexpr int kParts = 12;
  constexpr int kSlopesRole = 2;
  __shared__ __align__(16) float gradients[kRows][3 * kUnits];
  __shared__ __align__(16) float partial[kRows][kParts][kUnits];
  __shared__ CellSlopes<float> slopes[2][kRows][kUnits];
  __shared__ float grad_outputs[2][kRows][kUnits];
  const Steps& steps = in.steps;
  const int state_size = steps.state_size;
  const int first_sample = static_cast<int>(blockIdx.x) * kRows;
  const int role = static_cast<int>(threadIdx.x) / kUnits;
  const int unit = static_cast<int>(threadIdx.x) % kUnits;
  const bool exists = unit < state_size;
  const int first_unit = static_cast<int>(threadIdx.x) % (kUnits / 4) * 4;
  const int part = static_cast<int>(threadIdx.x) / (kUnits / 4);

  float weights[4][kChunks][kQuad];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int i = 0; i < kChunks * kQuad; ++i) {
      const int k = part * kChunks * kQuad + i;
      const bool inside = k % kUnits < state_size && first_unit + j < state_size;
      const int64_t row = int64_t{k / kUnits} * state_size + k % kUnits;
      weights[j][i / kQuad][i % kQuad] = inside ? load(in.weights[row * steps.columns + first_unit + j]) : 0.f;
    }
  }
  int lengths[kRows];
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    lengths[row] = first_sample + row < steps.batch ? steps.length(first_sample + row) : 0;
  }
  const bool has_cell = exists && role < kRows && first_sample + role < steps.batch;
  const int64_t state = int64_t{first_sample + role} * state_size + unit;
  const int length = has_cell ? steps.length(first_sample + role) : 0;
  float grad_h = has_cell ? load_if_present(in.grad_h_n, state) : 0.f;
  float grad_cell = has_cell ? load_if_present(in.grad_c_n, state) : 0.f;

  Place place(steps, first_sample, true);
  const auto time_of = [&](int step) { return steps.time_of(steps.time - 1 - step); };
  Saved next[kRows] = {};
  const auto fetch = [&](int step, int64_t of) {
    if (step >= steps.time || !exists) return;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (time_of(step) >= lengths[row]) continue;
      const int64_t at = of + row * steps.batch_stride;
#pragma unroll
      for (int g = 0; g < 3; ++g) next[row].gates[g] = load(in.gates[(at * 3 + g) * state_size + unit]);
      next[row].cell = load(in.cells[at * state_size + unit]);
      next[row].grad_output = load_if_present(in.grad_output, at * state_size + unit);
    }
  };
  const auto compute_slopes = [&](int step) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      slopes[step & 1][row][unit] = cell_slopes<kFast>(next[row].gates, next[row].cell);
      grad_outputs[step & 1][row][unit] = next[row].grad_output;
    }
  };
  if (role == kSlopesRole) {
    fetch(0, place.row);
    compute_slopes(0);
    fetch(1, place.row + place.step);
  }
  __syncthreads();
  bool has_begun = false;
  for (int step = 0; step <= steps.time; ++step, place.row += place.step) {
    const int t = step < steps.time ? time_of(step) : INT32_MAX;
    if (role == kSlopesRole) {
      compute_slopes(step + 1);
      fetch(step + 2, place.row + 2 * place.step);
    } else if (role < kRows) {
      if (has_begun) {
        grad_h = 0;
#pragma unroll
        for (int p = 0; p < kParts; ++p) grad_h += partial[role][p][unit];
      }
      has_begun = t < length;
      float found[3] = {};
      if (has_begun) {
        const CellSlopes<float> slope = slopes[step & 1][role][unit];
        const float upstream = grad_h + grad_outputs[step & 1][role][unit];
        grad_cell += upstream * slope.cell;
        found[0] = grad_cell * slope.input_gate;
        found[1] = upstream * slope.output_gate;
        found[2] = grad_cell * slope.candidate;
      }
      const int64_t at = (place.row + role * steps.batch_stride) * 3 * state_size + unit;
#pragma unroll
      for (int g = 0; g < 3; ++g) {
        T rounded;
        store(rounded, found[g]);
        gradients[role][g * kUnits + unit] = load(rounded);
        if (has_cell && step < steps.time) in.grad_gates[at + g * state_size] = rounded;
      }
    }
    if (step == steps.time) break;
    __syncthreads();
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (t >= lengths[row]) continue;
      float sums[4] = {};
      multiply<kChunks>(sums, weights, &gradients[row][part * kChunks * kQuad], kQuad);
      *reinterpret_cast<float4*>(&partial[row][part][first_unit]) = {sums[0], sums[1], sums[2], sums[3]};
    }
    __syncthreads();
  }
  if (!has_cell) return;
  store(in.grad_h_0[state], grad_h);
  store(in.grad_c_0[state], grad_cell);
}

// ---- how they are launched ----

inline bool fills_device(int64_t blocks) { return blocks > device_attribute(cudaDevAttrMultiProcessorCount); }

bool is_for_blocks(ScalarType dtype, const LltmSequenceSizes& sizes) {
  // With more samples there is work enough for groups of blocks.
  const bool is_one_wave = !fills_device((sizes.batch + kMaxRows - 1) / kMaxRows);
  return dtype != ScalarType::Double && sizes.state_size <= kMaxState &&
         (is_one_wave || !is_for_groups(dtype, sizes, true));
}

// Calls function(T, chunks, rows, fast).
template <class Function>
Error dispatch_blocks(ScalarType dtype, const LltmSequenceSizes& sizes, const Function& function) {
  const auto with_state = [&](auto scalar, auto fast) {
    const auto with_rows = [&](auto chunks) {
      if (fills_device(sizes.batch)) return function(scalar, chunks, std::integral_constant<int, kMaxRows>{}, fast);
      return function(scalar, chunks, std::integral_constant<int, 1>{}, fast);
    };
    if (sizes.state_size <= 64) return with_rows(std::integral_constant<int, 4>{});
    return with_rows(std::integral_constant<int, kMaxChunks>{});
  };
  constexpr std::bool_constant<true> kFast;
  switch (dtype) {
    case ScalarType::Half:
      return with_state(__half{}, kFast);
    case ScalarType::BFloat16:
      return with_state(__nv_bfloat16{}, kFast);
    case ScalarType::TF32:
      return with_state(float{}, kFast);
    default:
      return with_state(float{}, std::bool_constant<false>{});
  }
}

template <int kChunks, int kRows, class Arguments>
Error launch_rows(void (*kernel)(Arguments), const Arguments& in, cudaStream_t stream) {
  const unsigned blocks = (in.steps.batch + kRows - 1) / kRows;
  kernel<<<blocks, 3 * kChunks * kUnitsOfChunk, 0, stream>>>(in);
  return launch_error();
}

Error launch_blocks(ScalarType dtype, const LltmSequence& in, cudaStream_t stream) {
  return dispatch_blocks(dtype, in.sizes, [&](auto scalar, auto chunks, auto rows, auto fast) {
    using T = decltype(scalar);
    constexpr auto kernel = &lltm_sequence_block_kernel<T, chunks, rows, fast>;
    return launch_rows<chunks, rows>(kernel, SequenceForward<T>(in), stream);
  });
}

Error launch_blocks(ScalarType dtype, const LltmSequenceBackward& in, cudaStream_t stream) {
  return dispatch_blocks(dtype, in.sizes, [&](auto scalar, auto chunks, auto rows, auto fast) {
    using T = decltype(scalar);
    constexpr auto kernel = &lltm_sequence_block_backward_kernel<T, chunks, rows, fast>;
    return launch_rows<chunks, rows>(kernel, SequenceBackward<T>(in), stream);
  });
}

}  // namespace extops::cuda
