// What the kernels of whole sequences share: their arguments, which steps are valid, a unit at one step, and how
// clusters of blocks are launched. They are templates over a cell (../../cells/cell.h): a new cell needs only a file
// that names it (kernels.cuh).
#pragma once

#include "../../sequence.h"
#include "../common/launch.cuh"
#include "../common/math.cuh"
#include "../common/scalar.cuh"

namespace extops::cuda {

enum class Pass { kForward, kBackward };

// The layout of the steps of a sequence, and which of them are valid.
struct Steps {
  int time;
  int batch;
  int state_size;
  int64_t weights_stride;
  int64_t time_stride;
  int64_t batch_stride;
  int64_t state_stride;
  const int64_t* lengths;
  int first_direction;
  bool reverse;

  Steps(const SequenceSizes& sizes, const int64_t* lengths)
      : time(static_cast<int>(sizes.time)),
        batch(static_cast<int>(sizes.batch)),
        state_size(static_cast<int>(sizes.state_size)),
        weights_stride(sizes.weights_stride),
        time_stride(sizes.time_stride),
        batch_stride(sizes.batch_stride),
        state_stride(sizes.state_stride),
        lengths(lengths),
        first_direction(static_cast<int>(sizes.first_direction)),
        reverse(sizes.reverse != 0) {}

  // The third dimension of the grid runs over the directions.
  __device__ int direction() const { return first_direction + static_cast<int>(blockIdx.z); }
  __device__ bool is_reverse() const { return reverse != (direction() > 0); }

  __device__ int64_t row(int t, int sample) const { return t * time_stride + sample * batch_stride + direction(); }
  // The row of a sample in tensors of [batch, state_size], and the place of a unit.
  __device__ int64_t state_row(int sample) const { return sample * state_stride + direction(); }
  __device__ int64_t state(int sample, int unit) const { return state_row(sample) * state_size + unit; }
  // The places of a unit's cell state in tensors of it, for a row of another one.
  template <class Cell>
  __device__ int64_t cell(int64_t row, int number, int unit) const {
    return (row * kCellStates<Cell> + number) * state_size + unit;
  }
  // The recurrent weights of this direction.
  template <class Cell, class T>
  __device__ const T* weights_of(const T* weights_h) const {
    return weights_h + direction() * (int64_t{Cell::kRecurrent} * state_size * weights_stride);
  }
  // Clamped to the sequence: callers check the range of `lengths`.
  __device__ int length(int sample) const {
    return lengths == nullptr ? time : static_cast<int>(max(min(lengths[sample], int64_t{time}), int64_t{0}));
  }
  // The time of a step, numbered in the order of the forward's computation.
  __device__ int time_of(int step) const { return is_reverse() ? time - 1 - step : step; }
  // The last valid step, in that order.
  __device__ int last_time(int length) const { return is_reverse() ? 0 : length - 1; }
};

// Which steps of a sample are valid, in the order of computation.
struct ValidSteps {
  int first;
  unsigned count;

  __device__ ValidSteps(const Steps& steps, int length, bool backward)
      : first(steps.is_reverse() != backward ? steps.time - length : 0), count(length) {}

  __device__ bool operator()(int step) const { return static_cast<unsigned>(step - first) < count; }
};

// `input_gates` holds Cell::kInput values a unit, in the order of input_place(); `gates` and `grad_gates` hold
// Cell::kGates. Each gate is a contiguous block of all units.
template <class Cell, class T>
struct SequenceForward {
  Steps steps;
  const typename Compute<T>::type* input_gates;
  const T* weights_h;
  const T* bias_x;
  const T* bias_h;
  const T* h_0;
  const T* c_0;
  T* output;
  T* h_n;
  T* c_n;
  T* gates;
  T* cells;

  explicit SequenceForward(const SequenceArguments& in) : steps(in.sizes, in.lengths) {
    set_pointers({in.input_gates, in.weights_h, in.bias_x, in.bias_h}, input_gates, weights_h, bias_x, bias_h);
    set_pointers({in.h_0, in.c_0}, h_0, c_0);
    set_pointers({in.output, in.h_n, in.c_n, in.gates, in.cells}, output, h_n, c_n, gates, cells);
  }

  // Whether a backward may follow.
  __device__ bool is_training() const { return gates != nullptr; }

  // The sum of the biases of a gate of a unit.
  __device__ typename Compute<T>::type bias(int gate, int unit) const {
    typename Compute<T>::type sum = 0;
    if (gate < Cell::kInput && bias_x != nullptr) {
      sum = load(bias_x[(steps.direction() * Cell::kInput + input_place<Cell>(gate)) * steps.state_size + unit]);
    }
    const int of_h = gate - kFirstRecurrent<Cell>;
    if (of_h >= 0 && bias_h != nullptr) {
      sum += load(bias_h[(steps.direction() * Cell::kRecurrent + of_h) * steps.state_size + unit]);
    }
    return sum;
  }

  // Loads the biases of all gates of the block's units into shared memory; block blockIdx.x has `units` of them.
  // Reading them from global memory at each step, with branches where there are none, would delay the loads of the
  // input GEMM's results.
  __device__ void load_biases(float* biases, int units) const {
    for (int i = threadIdx.x; i < Cell::kGates * units; i += blockDim.x) {
      const int unit = blockIdx.x * units + i % units;
      biases[i] = unit < steps.state_size ? bias(i / units, unit) : 0;
    }
  }
};

template <class Cell, class T>
struct SequenceBackward {
  Steps steps;
  const T* grad_output;
  const T* grad_h_n;
  const T* grad_c_n;
  const T* weights_h;
  const T* gates;
  const T* cells;
  T* grad_gates;
  T* grad_h_0;
  T* grad_c_0;

  explicit SequenceBackward(const SequenceBackwardArguments& in) : steps(in.sizes, in.lengths) {
    set_pointers({in.grad_output, in.grad_h_n, in.grad_c_n}, grad_output, grad_h_n, grad_c_n);
    set_pointers({in.weights_h, in.gates, in.cells}, weights_h, gates, cells);
    set_pointers({in.grad_gates, in.grad_h_0, in.grad_c_0}, grad_gates, grad_h_0, grad_c_0);
  }
};

template <Pass kPass, class Cell, class T>
using SequencePass = std::conditional_t<kPass == Pass::kForward, SequenceForward<Cell, T>, SequenceBackward<Cell, T>>;

template <class In>
constexpr Pass kPassOf = std::is_same_v<In, SequenceArguments> ? Pass::kForward : Pass::kBackward;

template <class T>
__device__ typename Compute<T>::type load_if_present(const T* data, int64_t at) {
  return data == nullptr ? 0 : load(data[at]);
}

// ---- a unit at one step: `place` is a row of [time, batch] ----

// Rounds values to T, in which the backward will see them.
template <class T, int kCount, class C>
__device__ void round_to(C (&values)[kCount]) {
#pragma unroll
  for (C& value : values) {
    T rounded;
    store(rounded, value);
    value = load(rounded);
  }
}

// Stores the results of a step: zeros if the step is not valid.
template <class Cell, class T, class C>
__device__ void store_cell(
    const SequenceForward<Cell, T>& in, int64_t place, int unit, const C (&gates)[Cell::kGates] = {},
    const CellState<C, StatesOf<Cell, C>>& state = {}) {
  const int state_size = in.steps.state_size;
  if (in.is_training()) {
    T* const to = in.gates + place * Cell::kGates * state_size + unit;
    unrolled<Cell::kGates>([&](int g) { store(to[int64_t{g} * state_size], gates[g]); });
#pragma unroll
    for (int k = 0; k < kCellStates<Cell>; ++k) {
      store(in.cells[(place * kCellStates<Cell> + k) * state_size + unit], number_of(state.saved_c, k));
    }
  }
  store(in.output[place * state_size + unit], state.h);
}

// The local derivatives of a step.
template <class Math, class Cell, class T, class C = typename Compute<T>::type>
__device__ DerivativesOf<Cell, Math, C> local_derivatives_at(
    const SequenceBackward<Cell, T>& in, int64_t place, int unit) {
  const int state_size = in.steps.state_size;
  C gates[Cell::kGates];
  unrolled<Cell::kGates>([&](int g) { gates[g] = load(in.gates[(place * Cell::kGates + g) * state_size + unit]); });
  StatesOf<Cell, C> saved_c;
  unrolled<kCellStates<Cell>>(
      [&](int k) { number_of(saved_c, k) = load(in.cells[in.steps.template cell<Cell>(place, k, unit)]); });
  return local_derivatives<Cell, Math>(gates, saved_c);
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

struct Problem {
  Context context;
  ScalarType dtype;
  SequenceSizes sizes;
  Pass pass;

  // The samples of all directions.
  int64_t samples() const { return sizes.batch * sizes.directions; }
  // One of the directions.
  Problem of_one() const {
    Problem one = *this;
    one.sizes.directions = 1;
    return one;
  }
};

// The most clusters of a grid, whose second dimension they are.
constexpr int64_t kMostClusters = 65535;

// How a kernel of clusters is launched, each cluster for some samples.
template <class Tile, auto kKernel>
struct ClusterLaunch : Launch {
  Error error = allow_shared_memory<kKernel>(Tile::kSharedBytes);

  ClusterLaunch(int64_t batch, int64_t directions, cudaStream_t stream)
      : Launch(
            {dim3(Tile::kBlocks, (batch + Tile::kSamples - 1) / Tile::kSamples, directions), Tile::kThreads,
             Tile::kSharedBytes, dim3(Tile::kBlocks)},
            stream) {
    if (Tile::kBlocks > 8) cudaFuncSetAttribute(kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
};

// How many clusters run at the same time: none may fit if a context has few SMs.
template <class Tile, auto kKernel>
int clusters_at_once(const Context& context) {
  static PerContext known;
  return known.get(context.id(), [&] {
    const ClusterLaunch<Tile, kKernel> one(Tile::kSamples, 1, context.stream());
    int clusters = 0;
    if (one.error != nullptr) return -1;  // no answer, so nothing is cached
    if (cudaOccupancyMaxActiveClusters(&clusters, kKernel, &one.config) != cudaSuccess) cudaGetLastError();
    return clusters;
  });
}

template <class Tile, auto kKernel, class... Arguments>
Error launch_in_clusters(const Problem& problem, const Arguments&... arguments) {
  const SequenceSizes& sizes = problem.sizes;
  const ClusterLaunch<Tile, kKernel> all(sizes.batch, sizes.directions, problem.context.stream());
  return all.error != nullptr ? all.error : all.run(kKernel, arguments...);
}

// ---- the kernels, each in a header of its own: choice.cuh says which one serves a problem ----

// `In` is SequenceArguments or SequenceBackwardArguments, which goes with the problem's pass.
template <class Cell, class In>
Error launch_tensor_blocks(const Problem& problem, const In& in);
template <class Cell, class In>
Error launch_float32_blocks(const Problem& problem, const In& in);
template <class Cell, class In>
Error launch_float32_clusters(const Problem& problem, const In& in);
template <class Cell, class In>
Error launch_tensor_clusters(const Problem& problem, const In& in);
template <class Cell, class In>
Error launch_groups(const Problem& problem, const In& in);

// The shared memory for weights that do not fit into the registers of a block, and for what its threads exchange.
template <class Cell>
int shared_bytes_of_float32_blocks(const SequenceSizes& sizes);
// How many samples are computed at the same time by clusters: 0 if no cluster fits into the context.
template <class Cell>
int64_t samples_of_float32_clusters(const Problem& problem);
template <class Cell>
int64_t samples_of_tensor_clusters(const Problem& problem);
// The bytes that a group of blocks needs: 0 if the weights do not fit into their shared memory, or the blocks cannot
// all run at the same time.
template <class Cell>
int64_t group_workspace(const Problem& problem);

// The kernels for tensor cores, in a file that is compiled for the GPUs that have them.
#define EXTOPS_SEQUENCE_TENSOR(Cell)                      \
  namespace extops::cuda {                                \
  EXTOPS_INSTANTIATE_LAUNCH(launch_tensor_blocks, Cell)   \
  EXTOPS_INSTANTIATE_LAUNCH(launch_groups, Cell)          \
  template int64_t group_workspace<Cell>(const Problem&); \
  }

// The kernels for Hopper, in a file that is compiled for that alone.
#define EXTOPS_SEQUENCE_HOPPER(Cell)                                  \
  namespace extops::cuda {                                            \
  EXTOPS_INSTANTIATE_LAUNCH(launch_float32_clusters, Cell)            \
  EXTOPS_INSTANTIATE_LAUNCH(launch_tensor_clusters, Cell)             \
  template int64_t samples_of_float32_clusters<Cell>(const Problem&); \
  template int64_t samples_of_tensor_clusters<Cell>(const Problem&);  \
  }
#define EXTOPS_INSTANTIATE_LAUNCH(launch, Cell)                          \
  template Error launch<Cell>(const Problem&, const SequenceArguments&); \
  template Error launch<Cell>(const Problem&, const SequenceBackwardArguments&);

}  // namespace extops::cuda
