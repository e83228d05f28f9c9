// The backward of small problems, where library GEMMs are bound by latency: the pointwise part with the gradients of
// the parameters in one kernel, and those of the input and of h in another.
#pragma once

#include "../common/hopper.cuh"
#include "problem.cuh"

namespace extops::cuda::step {

// ---- the parameters: a block computes the gradients of both weights, for a few units' rows and some columns ----

constexpr int kUnits = 4;   // of a block
constexpr int kRows = 64;   // of the batch, in shared memory at a time
constexpr int kSplits = 4;  // of a long batch, among the blocks of a cluster

template <class Cell, class T>
struct ParametersBackward {
  Backward<T> pointwise;
  int input_features;
  const T* input;
  const T* h_0;
  T* grad_weights_x;
  T* grad_weights_h;
  int64_t grad_weights_x_stride;
  int64_t grad_weights_h_stride;
  T* grad_bias_x;
  T* grad_bias_h;

  explicit ParametersBackward(const StepBackwardArguments& in)
      : pointwise(in),
        input_features(static_cast<int>(in.sizes.input_features)),
        grad_weights_x_stride(in.grad_weights_x_stride),
        grad_weights_h_stride(in.grad_weights_h_stride) {
    set_pointers({in.input, in.h_0, in.grad_weights_x, in.grad_weights_h}, input, h_0, grad_weights_x, grad_weights_h);
    set_pointers({in.grad_bias_x, in.grad_bias_h}, grad_bias_x, grad_bias_h);
  }
};

// Fills `shared` with the gradients of the gates of some samples, rounded to T. Blocks of the first column also store
// them.
template <class Cell, class T, class C>
__device__ void load_gradients(
    const Backward<T>& in, int64_t first_row, int64_t end, int first_unit, C (&shared)[kRows][Cell::kGates][kUnits]) {
  const int state_size = in.state_size;
  for (int item = threadIdx.x; item < kRows * kUnits; item += blockDim.x) {
    const int u = item % kUnits;
    const int r = item / kUnits;
    const int64_t row = first_row + r;
    const int unit = first_unit + u;
    if (row >= end || unit >= state_size) {
      for (int g = 0; g < Cell::kGates; ++g) shared[r][g][u] = 0;
      continue;
    }
    C gates[Cell::kGates], gradients[Cell::kGates];
    for (int g = 0; g < Cell::kGates; ++g) {
      gates[g] = load(in.gates[(row * Cell::kGates + g) * state_size + unit]);
    }
    const int64_t cell = row * state_size + unit;
    const C grad_c = cell_backward<Cell, MathOf<T>>(
        gates, C(load(in.saved_c[cell])), in.grad_h.at(row, unit), in.grad_c.at(row, unit), gradients);
    const bool stores = blockIdx.x == 0;
    if (stores) store(in.grad_c_0[cell], grad_c);
#pragma unroll
    for (int g = 0; g < Cell::kGates; ++g) {
      T rounded;
      store(rounded, gradients[g]);
      shared[r][g][u] = load(rounded);
      if (stores) in.template store_gradient<Cell>(row, unit, g, rounded);
    }
  }
}

template <class Cell, class T, bool kInCluster>
__global__ void __launch_bounds__(kThreads) parameters_backward_kernel(ParametersBackward<Cell, T> in) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using C = typename Compute<T>::type;
  constexpr int kWeights = Cell::kInput > Cell::kRecurrent ? Cell::kInput : Cell::kRecurrent;
  constexpr int kSums = Cell::kGates * kUnits;  // of the biases
  __shared__ __align__(16) C gradients[kRows][Cell::kGates][kUnits];
  wait_for_previous_kernel();
  const int state_size = in.pointwise.state_size;
  const int depth = state_size + in.input_features;
  const int first_unit = blockIdx.y * kUnits;
  const int k = blockIdx.x * kThreads + threadIdx.x;
  const bool of_h = k < state_size;
  const T* const x = of_h ? in.h_0 + k : in.input + (k - state_size);
  const int64_t x_stride = of_h ? state_size : in.input_features;
  const bool sums_bias = blockIdx.x == 0 && threadIdx.x < kSums;
  const int64_t batch = in.pointwise.batch;
  const int64_t part = kInCluster ? (batch + kSplits - 1) / kSplits : batch;
  const int64_t begin = kInCluster ? part * blockIdx.z : 0;
  const int64_t end = min(batch, begin + part);
  // The gate to which the rows number w of the weights belong.
  const auto column_of = [&](int w) {
    return of_h ? kFirstRecurrent<Cell> + w : (w + kFirstInputOf<Cell>) % Cell::kInput;
  };
  const int weights = k >= depth ? 0 : of_h ? Cell::kRecurrent : Cell::kInput;
  C sums[kWeights][kUnits] = {};
  C bias_sum = 0;
  for (int64_t first_row = begin; first_row < end; first_row += kRows) {
    __syncthreads();
    load_gradients<Cell>(in.pointwise, first_row, end, first_unit, gradients);
    __syncthreads();
    const int rows = static_cast<int>(min(end - first_row, int64_t{kRows}));
    if (weights > 0) {
#pragma unroll 8
      for (int r = 0; r < rows; ++r) {
        const C value = load(x[(first_row + r) * x_stride]);
#pragma unroll
        for (int w = 0; w < kWeights; ++w) {
          if (w >= weights) continue;
#pragma unroll
          for (int u = 0; u < kUnits; ++u) sums[w][u] += value * gradients[r][column_of(w)][u];
        }
      }
    }
    if (sums_bias) {
      // A sum for each tile of rows: the error of a single sum would grow with the batch.
      C sum = 0;
      for (int r = 0; r < rows; ++r) sum += (&gradients[r][0][0])[threadIdx.x];
      bias_sum += sum;
    }
  }
  const auto store_weight = [&](int w, int u, C sum) {
    if (w >= weights || first_unit + u >= state_size) return;
    const int64_t row = int64_t{w} * state_size + first_unit + u;
    T* const to = of_h ? in.grad_weights_h + row * in.grad_weights_h_stride
                       : in.grad_weights_x + row * in.grad_weights_x_stride - state_size;
    store(to[k], sum);
  };
  const auto store_bias = [&](C sum) {
    const int unit = first_unit + static_cast<int>(threadIdx.x) % kUnits;
    const int g = static_cast<int>(threadIdx.x) / kUnits;
    if (!sums_bias || unit >= state_size) return;
    if (g < Cell::kInput) store(in.grad_bias_x[input_place<Cell>(g) * state_size + unit], sum);
    const int of_recurrent = g - kFirstRecurrent<Cell>;
    if (of_recurrent >= 0 && in.grad_bias_h != nullptr) store(in.grad_bias_h[of_recurrent * state_size + unit], sum);
  };
  if constexpr (!kInCluster) {
#pragma unroll
    for (int w = 0; w < kWeights; ++w) {
#pragma unroll
      for (int u = 0; u < kUnits; ++u) store_weight(w, u, sums[w][u]);
    }
    store_bias(bias_sum);
  } else {
    // Each block of the cluster adds up the sums of one unit; the first also those of the biases.
    static_assert(kUnits == kSplits);
    extern __shared__ __align__(kTileAlignment) unsigned char shared[];
    auto* const partial = reinterpret_cast<C(*)[kThreads]>(shared);
#pragma unroll
    for (int w = 0; w < kWeights; ++w) {
#pragma unroll
      for (int u = 0; u < kUnits; ++u) partial[u * kWeights + w][threadIdx.x] = sums[w][u];
    }
    partial[kWeights * kUnits][threadIdx.x] = bias_sum;
    sync_cluster();
    const auto add_up = [&](int i) {
      C sum = 0;
#pragma unroll
      for (int block = 0; block < kSplits; ++block) sum += *peer_pointer(&partial[i][threadIdx.x], block);
      return sum;
    };
    const int u = blockIdx.z;
#pragma unroll
    for (int w = 0; w < kWeights; ++w) store_weight(w, u, add_up(u * kWeights + w));
    if (u == 0) store_bias(add_up(kWeights * kUnits));
    sync_cluster();  // no block may end while others read from it
  }
#endif
}

template <class Cell, class T>
Error launch_parameters_backward(const StepBackwardArguments& arguments, cudaStream_t stream) {
  const ParametersBackward<Cell, T> in(arguments);
  const auto blocks = [](int64_t items, int64_t each) { return static_cast<unsigned>((items + each - 1) / each); };
  const StepSizes& sizes = arguments.sizes;
  dim3 grid(blocks(sizes.state_size + sizes.input_features, kThreads), blocks(sizes.state_size, kUnits));
  const auto splits_fit = [&] {
    return grid.x * grid.y * kSplits <= static_cast<unsigned>(device_attribute(cudaDevAttrMultiProcessorCount));
  };
  if (sizes.batch <= kRows || !splits_fit()) {
    return launch(&parameters_backward_kernel<Cell, T, false>, {grid, kThreads}, stream, in);
  }
  constexpr int kWeights = Cell::kInput > Cell::kRecurrent ? Cell::kInput : Cell::kRecurrent;
  grid.z = kSplits;
  const unsigned shared_bytes = (kWeights * kUnits + 1) * kThreads * sizeof(typename Compute<T>::type);
  return launch(
      &parameters_backward_kernel<Cell, T, true>, {grid, kThreads, shared_bytes, {1, 1, kSplits}}, stream, in);
}

// ---- the input and h, float32: a block computes 32 columns of both for a few rows; its warps split K ----

constexpr int kInputRows = 2;
constexpr int kInputWarps = 16;
constexpr int kInputDepth = 8;  // rows of weights that a lane loads before it uses the first

struct InputBackward {
  int batch;
  int input_features;
  int state_size;
  const float* grad_x;
  const float* grad_h_part;
  const float* grad_c_0;  // or null
  const float* weights_x;
  const float* weights_h;
  int64_t weights_x_stride;
  int64_t weights_h_stride;
  float* grad_input;
  float* grad_h_0;
};

template <class Cell>
__global__ void __launch_bounds__(32 * kInputWarps) input_backward_kernel(InputBackward in) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __shared__ float partial[kInputWarps][kInputRows][32];
  wait_for_previous_kernel();
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  // The grid has one dimension, since the others end at 65535. No block has columns of both.
  const int blocks_h = (in.state_size + 31) / 32;
  const int column_blocks = blocks_h + (in.input_features + 31) / 32;
  const int block = static_cast<int>(blockIdx.x) % column_blocks;
  const bool of_h = block < blocks_h;
  const int k = (of_h ? block : block - blocks_h) * 32 + lane;
  const int columns = of_h ? in.state_size : in.input_features;
  const int weight_rows = (of_h ? Cell::kRecurrent : Cell::kInput) * in.state_size;
  const float* const weights = of_h ? in.weights_h : in.weights_x;
  const int64_t stride = of_h ? in.weights_h_stride : in.weights_x_stride;
  const float* const grad_rows = of_h ? in.grad_h_part : in.grad_x;
  const int first_row = static_cast<int>(blockIdx.x) / column_blocks * kInputRows;
  float sums[kInputRows] = {};
  for (int weight_row0 = warp; weight_row0 < weight_rows; weight_row0 += kInputWarps * kInputDepth) {
    float w[kInputDepth];
    float gradients[kInputDepth][kInputRows];
#pragma unroll
    for (int d = 0; d < kInputDepth; ++d) {
      const int weight_row = weight_row0 + kInputWarps * d;
      w[d] = weight_row < weight_rows && k < columns ? weights[weight_row * stride + k] : 0.f;
#pragma unroll
      for (int r = 0; r < kInputRows; ++r) {
        const bool inside = weight_row < weight_rows && first_row + r < in.batch;
        gradients[d][r] = inside ? grad_rows[int64_t{first_row + r} * weight_rows + weight_row] : 0.f;
      }
    }
#pragma unroll
    for (int d = 0; d < kInputDepth; ++d) {
#pragma unroll
      for (int r = 0; r < kInputRows; ++r) sums[r] += gradients[d][r] * w[d];
    }
  }
#pragma unroll
  for (int r = 0; r < kInputRows; ++r) partial[warp][r][lane] = sums[r];
  __syncthreads();
  const int row = first_row + warp;
  if (warp >= kInputRows || row >= in.batch || k >= columns) return;
  const int64_t at = int64_t{row} * columns + k;
  float total = of_h && in.grad_c_0 != nullptr ? in.grad_c_0[at] : 0.f;
#pragma unroll
  for (int share = 0; share < kInputWarps; ++share) total += partial[share][warp][lane];
  (of_h ? in.grad_h_0 : in.grad_input)[at] = total;
#endif
}

template <class Cell>
Error launch_small_input_backward(const StepInputBackwardArguments& arguments, cudaStream_t stream) {
  const StepSizes& sizes = arguments.sizes;
  InputBackward in{};
  in.batch = static_cast<int>(sizes.batch);
  in.input_features = static_cast<int>(sizes.input_features);
  in.state_size = static_cast<int>(sizes.state_size);
  const void* const of_h = kHasOneGradient<Cell> ? arguments.grad_x : arguments.grad_h_part;
  set_pointers({arguments.grad_x, of_h, arguments.grad_c_0}, in.grad_x, in.grad_h_part, in.grad_c_0);
  set_pointers({arguments.weights_x, arguments.weights_h}, in.weights_x, in.weights_h);
  in.weights_x_stride = arguments.weights_x_stride;
  in.weights_h_stride = arguments.weights_h_stride;
  set_pointers({arguments.grad_input, arguments.grad_h_0}, in.grad_input, in.grad_h_0);
  const int column_blocks = (in.state_size + 31) / 32 + (in.input_features + 31) / 32;
  const auto blocks = static_cast<unsigned>((in.batch + kInputRows - 1) / kInputRows * column_blocks);
  if (blocks == 0) return nullptr;
  return launch(&input_backward_kernel<Cell>, {blocks, 32 * kInputWarps}, stream, in);
}

}  // namespace extops::cuda::step
