// Arguments of the kernels of a whole sequence.
#pragma once

#include "../sequence.h"
#include "launch.cuh"
#include "lltm_pointwise.cuh"

namespace extops::cuda {

enum class Pass { kForward, kBackward };

// Where the steps of a sequence lie, and which of them count.
struct Steps {
  int time;
  int batch;
  int state_size;
  int64_t weights_stride;
  int64_t time_stride;
  int64_t batch_stride;
  const int64_t* lengths;
  bool reverse;

  Steps(const SequenceSizes& sizes, const int64_t* lengths)
      : time(static_cast<int>(sizes.time)),
        batch(static_cast<int>(sizes.batch)),
        state_size(static_cast<int>(sizes.state_size)),
        weights_stride(sizes.weights_stride),
        time_stride(sizes.time_stride),
        batch_stride(sizes.batch_stride),
        lengths(lengths),
        reverse(sizes.reverse != 0) {}

  __device__ int64_t row(int t, int sample) const { return t * time_stride + sample * batch_stride; }
  // Within the sequence, whatever `lengths` hold: their range is the caller's to check.
  __device__ int length(int sample) const {
    return lengths == nullptr ? time : static_cast<int>(max(min(lengths[sample], int64_t{time}), int64_t{0}));
  }
  // The time of a step, numbered in the order of the forward's computation.
  __device__ int time_of(int step) const { return reverse ? time - 1 - step : step; }
  // The last step that counts, in that order.
  __device__ int last_time(int length) const { return reverse ? 0 : length - 1; }
};

// Which steps of a sample count, in the order of the computation.
struct Counted {
  int first;
  unsigned count;

  __device__ Counted(const Steps& steps, int length, bool backward)
      : first(steps.reverse != backward ? steps.time - length : 0), count(length) {}

  __device__ bool operator()(int step) const { return static_cast<unsigned>(step - first) < count; }
};

template <class T>
struct SequenceForward {
  using C = typename Compute<T>::type;

  explicit SequenceForward(const SequenceArguments& in)
      : steps(in.sizes, in.lengths),
        products(static_cast<const C*>(in.products)),
        weights(static_cast<const T*>(in.weights_h)),
        bias(static_cast<const T*>(in.bias)),
        h_0(static_cast<const T*>(in.h_0)),
        c_0(static_cast<const T*>(in.c_0)),
        output(static_cast<T*>(in.output)),
        h_n(static_cast<T*>(in.h_n)),
        c_n(static_cast<T*>(in.c_n)),
        gates(static_cast<T*>(in.gates)),
        cells(static_cast<T*>(in.cells)) {}

  Steps steps;
  const C* products;
  const T* weights;
  const T* bias;
  const T* h_0;
  const T* c_0;
  T* output;
  T* h_n;
  T* c_n;
  T* gates;
  T* cells;
};

template <class T>
struct SequenceBackward {
  explicit SequenceBackward(const SequenceBackwardArguments& in)
      : steps(in.sizes, in.lengths),
        grad_output(static_cast<const T*>(in.grad_output)),
        grad_h_n(static_cast<const T*>(in.grad_h_n)),
        grad_c_n(static_cast<const T*>(in.grad_c_n)),
        weights(static_cast<const T*>(in.weights_h)),
        gates(static_cast<const T*>(in.gates)),
        cells(static_cast<const T*>(in.cells)),
        grad_gates(static_cast<T*>(in.grad_gates)),
        grad_h_0(static_cast<T*>(in.grad_h_0)),
        grad_c_0(static_cast<T*>(in.grad_c_0)) {}

  Steps steps;
  const T* grad_output;
  const T* grad_h_n;
  const T* grad_c_n;
  const T* weights;
  const T* gates;
  const T* cells;
  T* grad_gates;
  T* grad_h_0;
  T* grad_c_0;
};

template <class T>
__device__ typename Compute<T>::type load_if_present(const T* data, int64_t at) {
  return data == nullptr ? 0 : load(data[at]);
}

// One cell at one step: `place` counts rows of [time, batch]. Returns the new state; h as it is kept, in T.
template <bool kFast, class T, class C>
__device__ CellState<C> finish_cell(
    const SequenceForward<T>& in, int64_t place, int unit, const C (&sums)[3], C old_cell) {
  const int state_size = in.steps.state_size;
  C gates[3];
#pragma unroll
  for (int g = 0; g < 3; ++g) {
    T rounded;
    store(rounded, sums[g]);
    in.gates[(place * 3 + g) * state_size + unit] = rounded;
    gates[g] = load(rounded);  // as the backward will see it
  }
  const CellState<C> state = cell_forward<C, kFast>(gates[0], gates[1], gates[2], old_cell);
  store(in.cells[place * state_size + unit], state.cell);
  store(in.output[place * state_size + unit], state.h);
  return state;
}

// What a step that does not count leaves behind.
template <class T>
__device__ void skip_cell(const SequenceForward<T>& in, int64_t place, int unit) {
  const int state_size = in.steps.state_size;
#pragma unroll
  for (int g = 0; g < 3; ++g) store(in.gates[(place * 3 + g) * state_size + unit], 0);
  store(in.cells[place * state_size + unit], 0);
  store(in.output[place * state_size + unit], 0);
}

// How the gradients of a step depend on that of h: all but the first of these also on that of the cell state, so that
// they can be computed before either is known.
template <class C>
struct CellSlopes {
  C output_gate;  // by grad_h
  C cell;         // by grad_h
  C input_gate;   // by grad_cell
  C candidate;    // by grad_cell
};

template <bool kFast, class C>
__device__ CellSlopes<C> cell_slopes(const C (&gates)[3], C cell) {
  const C candidate_value = elu<C, kFast>(gates[2]);
  const C i = sigmoid<C, kFast>(gates[0]);
  const C o = sigmoid<C, kFast>(gates[1]);
  const C tanh_cell = hyperbolic_tangent<C, kFast>(cell);
  return {
      tanh_cell * o * (1 - o), o * (1 - tanh_cell * tanh_cell), candidate_value * i * (1 - i),
      i * (gates[2] > 0 ? C(1) : 1 + candidate_value)};
}

template <bool kFast, class T, class C>
__device__ CellSlopes<C> cell_slopes(const SequenceBackward<T>& in, int64_t place, int unit) {
  const int state_size = in.steps.state_size;
  C gates[3];
#pragma unroll
  for (int g = 0; g < 3; ++g) gates[g] = load(in.gates[(place * 3 + g) * state_size + unit]);
  return cell_slopes<kFast>(gates, C(load(in.cells[place * state_size + unit])));
}

// Adds sums to those of the lane whose number differs in the bit `mask`: the lane without it keeps the first half of
// the sums, the other one the second, both in the first half of the array.
template <int kCount>
__device__ __forceinline__ void exchange_halves(float* sums, int mask) {
  const bool is_second = threadIdx.x & mask;
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    const float sent = is_second ? sums[i] : sums[kCount / 2 + i];
    const float kept = is_second ? sums[kCount / 2 + i] : sums[i];
    sums[i] = kept + __shfl_xor_sync(0xffffffff, sent, mask);
  }
}

// Clusters that a grid takes: they are its second dimension.
constexpr int64_t kMostClusters = 65535;

// Allows what a kernel of clusters needs, and says how one is launched.
template <class Tile, auto kKernel>
Error configure_clusters(int64_t batch, cudaStream_t stream, cudaLaunchAttribute& cluster, cudaLaunchConfig_t& config) {
  if (const Error error = allow_shared_memory<kKernel>(Tile::kSharedBytes)) return error;
  if constexpr (Tile::kBlocks > 8) {
    cudaFuncSetAttribute(kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {Tile::kBlocks, 1, 1};
  config.gridDim = dim3(Tile::kBlocks, static_cast<unsigned>((batch + Tile::kSamples - 1) / Tile::kSamples));
  config.blockDim = Tile::kThreads;
  config.dynamicSmemBytes = Tile::kSharedBytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return nullptr;
}

// How many clusters run at the same time: where a context has few multiprocessors, none may fit.
template <class Tile, auto kKernel>
int clusters_at_once(const Context& context) {
  static PerContext known;
  return known.get(context.id(), [&] {
    cudaLaunchAttribute cluster{};
    cudaLaunchConfig_t config{};
    int clusters = 0;
    if (configure_clusters<Tile, kKernel>(Tile::kSamples, context.stream(), cluster, config) != nullptr) return 0;
    if (cudaOccupancyMaxActiveClusters(&clusters, kKernel, &config) != cudaSuccess) cudaGetLastError();
    return clusters;
  });
}

// Launches clusters of blocks, each cluster for some samples.
template <class Tile, auto kKernel, class... Arguments>
Error launch_in_clusters(int64_t batch, cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute cluster{};
  cudaLaunchConfig_t config{};
  if (const Error error = configure_clusters<Tile, kKernel>(batch, stream, cluster, config)) return error;
  cudaLaunchKernelEx(&config, kKernel, arguments...);
  return launch_error();
}

// The kernels that hold the recurrent weights for all steps: in the registers of one block (a small state) or of a
// cluster of blocks, each by tensor cores or in strict float32, or in the shared memory of a group of blocks. Those of
// several blocks are for Hopper, and for contexts that run as many blocks at the same time.
bool is_for_tensor_blocks(const Context& context, ScalarType dtype, const SequenceSizes& sizes, bool backward);
Error launch_tensor_blocks(ScalarType dtype, const SequenceArguments& in, cudaStream_t stream);
Error launch_tensor_blocks(ScalarType dtype, const SequenceBackwardArguments& in, cudaStream_t stream);

bool is_for_float32_blocks(ScalarType dtype, const SequenceSizes& sizes);
Error launch_float32_blocks(const SequenceArguments& in, cudaStream_t stream);
Error launch_float32_blocks(const SequenceBackwardArguments& in, cudaStream_t stream);

bool is_for_float32_clusters(const Context& context, ScalarType dtype, const SequenceSizes& sizes, bool backward);
Error launch_float32_clusters(const SequenceArguments& in, cudaStream_t stream);
Error launch_float32_clusters(const SequenceBackwardArguments& in, cudaStream_t stream);

bool is_for_tensor_clusters(const Context& context, ScalarType dtype, const SequenceSizes& sizes, bool backward);
Error launch_tensor_clusters(ScalarType dtype, const SequenceArguments& in, cudaStream_t stream);
Error launch_tensor_clusters(ScalarType dtype, const SequenceBackwardArguments& in, cudaStream_t stream);

bool is_for_groups(const Context& context, ScalarType dtype, const SequenceSizes& sizes, bool backward);
int64_t group_workspace(ScalarType dtype, const SequenceSizes& sizes);
Error launch_groups(ScalarType dtype, const SequenceArguments& in, cudaStream_t stream);
Error launch_groups(ScalarType dtype, const SequenceBackwardArguments& in, cudaStream_t stream);

}  // namespace extops::cuda
