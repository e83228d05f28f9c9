// A whole sequence on Hopper GPUs in strict float32, for states of up to 512: a cluster of blocks computes eight or
// sixteen samples. Each block has 32 units, whose recurrent weights its threads hold in registers for all steps. What
// the blocks exchange after each step (forward: h, backward: the gradients of the gates) is copied straight into each
// other's shared memory, where an mbarrier counts the bytes.
//
// All blocks of a cluster run at the same time, and clusters do not wait for each other.
#include "hopper.cuh"
#include "lltm_sequence.cuh"

// Named, not anonymous: nvcc would put the path of this file into the kernels' names, and no two builds be the same.
namespace extops::cuda {

constexpr int kClusterUnits = 32;  // of a block
constexpr int kTileSamples = 8;
constexpr int kTileCells = kClusterUnits * kTileSamples;

template <Pass kPass_, int kBlocks_, int kSamples_>
struct ClusterTile {
  static constexpr bool kIsForward = kPass_ == Pass::kForward;
  static constexpr int kBlocks = kBlocks_;
  static constexpr int kSamples = kSamples_;
  static constexpr int kThreads = kTileCells;  // few, each with many weights
  static constexpr int kCells = kClusterUnits * kSamples;
  static constexpr int kOwnCells = kCells / kThreads;       // of a thread
  static constexpr int kValues = kIsForward ? 1 : 3;        // that a cell sends
  static constexpr int kSourceK = kClusterUnits * kValues;  // K of what one block sends
  static constexpr int kRowBytes = kSourceK * static_cast<int>(sizeof(float));
  static constexpr int kSourceBytes = kSamples * kRowBytes;
  static constexpr int kSlotBytes = kBlocks * kSourceBytes;
  static constexpr int kSumBytes = (kIsForward ? 3 : 1) * kCells * static_cast<int>(sizeof(float));
  static constexpr int kSharedBytes = 2 * kSlotBytes + kSumBytes;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The rank of this block in its cluster is blockIdx.x, which runs over all its blocks.

// A weight of the product: sum number n of a sample along K, which runs over the blocks' values, each in the order in
// which it sends them.
template <class Tile>
__device__ float weight_at(const Steps& steps, const float* weights, int n, int k) {
  const int of_n = static_cast<int>(blockIdx.x) * kClusterUnits + n % kClusterUnits;
  const int of_k = k / Tile::kSourceK * kClusterUnits + k % kClusterUnits;
  const int gate = Tile::kIsForward ? n / kClusterUnits : k % Tile::kSourceK / kClusterUnits;
  const int row = Tile::kIsForward ? of_n : of_k;
  const int column = Tile::kIsForward ? of_k : of_n;
  if (of_n >= steps.state_size || of_k >= steps.state_size) return 0;
  return weights[(int64_t{gate} * steps.state_size + row) * steps.weights_stride + column];
}

// ---- products: the lanes of a warp split K, and exchange their sums by shuffles ----

// A warp has four units. Forward: a lane has the gates of two of them and a sixteenth of K, backward all four units and
// a 32nd of K. After the exchange, each lane has the sums of a cell.
template <class Tile>
class Float32Product {
  static constexpr int kUnits = Tile::kIsForward ? 2 : 4;
  static constexpr int kGates = Tile::kIsForward ? 3 : 1;  // sums of a cell
  static constexpr int kParts = Tile::kIsForward ? 2 : 4;  // of K, each of eight lanes
  static constexpr int kChunks = Tile::kBlocks * Tile::kValues / kParts;
  static constexpr int kFloats = kChunkBytes / static_cast<int>(sizeof(float));
  static constexpr int kPair = 2;  // samples at a time, for want of registers
  static_assert(kChunks % Tile::kValues == 0 && Tile::kRowBytes == Tile::kValues * 8 * kChunkBytes);

 public:
  __device__ Float32Product(const Steps& steps, const float* weights) {
    const int warp = threadIdx.x / 32;
    const int first_unit = warp * 4 + (Tile::kIsForward ? static_cast<int>(threadIdx.x) % 32 / 16 * 2 : 0);
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int first_k = ((part() * kChunks + i) * 8 + static_cast<int>(threadIdx.x) % 8) * kFloats;
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
#pragma unroll
        for (int gate = 0; gate < kGates; ++gate) {
#pragma unroll
          for (int j = 0; j < kFloats; ++j) {
            const int n = gate * kClusterUnits + first_unit + unit;
            weights_[i][unit][gate][j] = weight_at<Tile>(steps, weights, n, first_k + j);
          }
        }
      }
    }
  }

  // Partial is [tile of samples, sum of a cell, thread].
  __device__ void multiply(const unsigned char* slot, float* partial) const {
    const unsigned char* from =
        slot + part() * (kChunks / Tile::kValues) * Tile::kSourceBytes + threadIdx.x % 8 * kChunkBytes;
#pragma unroll 1
    for (int tile = 0; tile < Tile::kSamples / kTileSamples; ++tile) {
      float halves[2 * kGates];
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        float pairs[2 * kGates];
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          float sums[kUnits * kPair * kGates] = {};
          multiply_pair(from, sums);
          from += kPair * Tile::kRowBytes;
          if constexpr (kUnits == 4) exchange_halves<4 * kPair * kGates>(sums, 16);
          exchange_halves<2 * kPair * kGates>(sums, 8);
          exchange_halves<kPair * kGates>(sums, 1);
#pragma unroll
          for (int gate = 0; gate < kGates; ++gate) pairs[pair * kGates + gate] = sums[gate];
        }
        exchange_halves<2 * kGates>(pairs, 2);
#pragma unroll
        for (int gate = 0; gate < kGates; ++gate) {
          if (half == 0) halves[gate] = pairs[gate];
          halves[kGates + gate] = pairs[gate];
        }
      }
      exchange_halves<2 * kGates>(halves, 4);
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate)
        partial[(tile * kGates + gate) * kTileCells + threadIdx.x] = halves[gate];
    }
  }

  // What this thread has computed itself.
  __device__ static float sum(const float* partial, int gate, int sample) {
    return partial[(sample / kTileSamples * kGates + gate) * kTileCells + threadIdx.x];
  }

 private:
  __device__ static int part() { return static_cast<int>(threadIdx.x) % (kParts * 8) / 8; }

  // sums is [unit, sample, gate].
  __device__ void multiply_pair(const unsigned char* from, float (&sums)[kUnits * kPair * kGates]) const {
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
      for (int unit = 0; unit < kUnits; ++unit) {
#pragma unroll
        for (int gate = 0; gate < kGates; ++gate) {
          float& sum = sums[(unit * kPair + i % kPair) * kGates + gate];
          const float (&w)[kFloats] = weights_[i / kPair][unit][gate];
          sum = fmaf(x.x, w[0], sum);
          sum = fmaf(x.y, w[1], sum);
          sum = fmaf(x.z, w[2], sum);
          sum = fmaf(x.w, w[3], sum);
        }
      }
    }
  }

  float weights_[kChunks][kUnits][kGates][kFloats];
};

// ---- the exchange ----

// A cell of a thread.
template <class Tile>
struct ClusterCell {
  int column;  // unit within the block
  int row;     // sample within the cluster
  int unit;
  int sample;
  bool exists;

  __device__ ClusterCell(const Steps& steps, int i) {
    const int item = i * Tile::kThreads + static_cast<int>(threadIdx.x);
    column = item % kTileCells / kTileSamples;
    row = item / kTileCells * kTileSamples + item % kTileSamples;
    unit = static_cast<int>(blockIdx.x) * kClusterUnits + column;
    sample = static_cast<int>(blockIdx.y) * Tile::kSamples + row;
    exists = unit < steps.state_size && sample < steps.batch;
  }

  __device__ int64_t state(const Steps& steps) const { return int64_t{sample} * steps.state_size + unit; }
};

// Puts a cell's values into this block's part of a slot.
template <class Tile>
__device__ void put(const ClusterCell<Tile>& cell, const float (&values)[Tile::kValues], unsigned char* slot) {
  float* const row = reinterpret_cast<float*>(slot + blockIdx.x * Tile::kSourceBytes + cell.row * Tile::kRowBytes);
#pragma unroll
  for (int v = 0; v < Tile::kValues; ++v) row[v * kClusterUnits + cell.column] = values[v];
}

// Copies this block's part of a slot to all other blocks of the cluster. The slot's mbarrier counts what this block and
// the others have sent.
template <class Tile>
__device__ void send(unsigned char* slot, Mbarrier& full) {
  const int rank = static_cast<int>(blockIdx.x);
  unsigned char* const part = slot + rank * Tile::kSourceBytes;
  fence_proxy_async();
  __syncthreads();
  const int block = static_cast<int>(threadIdx.x);
  if (block >= Tile::kBlocks) return;
  if (block == rank) {
    full.arrive_expect_tx((Tile::kBlocks - 1) * Tile::kSourceBytes);
  } else {
    copy_to_peer(shared_address(part), shared_address(part), Tile::kSourceBytes, full, block);
  }
}

template <class Tile>
__device__ void run_forward(
    const SequenceForward<float>& in, unsigned char* slots, float* partial, Mbarrier (&full)[2]) {
  const Steps& steps = in.steps;
  const int state_size = steps.state_size;
  const Float32Product<Tile> product(steps, in.weights);
  int lengths[Tile::kOwnCells];
  float old_cells[Tile::kOwnCells];
  // The products of the step, on their way since the one before.
  float next[Tile::kOwnCells][3] = {};
  const auto fetch = [&](int step) {
#pragma unroll
    for (int i = 0; i < Tile::kOwnCells; ++i) {
      const ClusterCell<Tile> cell(steps, i);
      const int t = steps.time_of(step);
      if (!cell.exists || step >= steps.time || t >= lengths[i]) continue;
      const float* from = in.products + steps.row(t, cell.sample) * 3 * state_size + cell.unit;
#pragma unroll
      for (int g = 0; g < 3; ++g) next[i][g] = from[g * state_size];
    }
  };
#pragma unroll
  for (int i = 0; i < Tile::kOwnCells; ++i) {
    const ClusterCell<Tile> cell(steps, i);
    const int64_t at = cell.state(steps);
    lengths[i] = cell.exists ? steps.length(cell.sample) : 0;
    old_cells[i] = cell.exists ? load(in.c_0[at]) : 0.f;
    if (cell.exists && lengths[i] == 0) {
      in.h_n[at] = in.h_0[at];
      in.c_n[at] = in.c_0[at];
    }
  }
  fetch(0);
  for (int step = 0; step < steps.time; ++step) {
    const int t = steps.time_of(step);
    if (step > 0) full[step & 1].wait((step - 1) / 2);
    product.multiply(slots + (step & 1) * Tile::kSlotBytes, partial);
    float sums[Tile::kOwnCells][3];
    CellState<float> states[Tile::kOwnCells];
    unsigned char* const slot = slots + ((step + 1) & 1) * Tile::kSlotBytes;
#pragma unroll
    for (int i = 0; i < Tile::kOwnCells; ++i) {
      const ClusterCell<Tile> cell(steps, i);
#pragma unroll
      for (int g = 0; g < 3; ++g) {
        const float bias = cell.exists ? load(in.bias[g * state_size + cell.unit]) : 0.f;
        sums[i][g] = product.sum(partial, g, cell.row) + next[i][g] + bias;
      }
      states[i] = cell_forward<float>(sums[i][0], sums[i][1], sums[i][2], old_cells[i]);
      // Before a row's first step it has its first state; after its last one nobody reads it.
      const float h = t < lengths[i] ? states[i].h : cell.exists ? load(in.h_0[cell.state(steps)]) : 0.f;
      put<Tile>(cell, {h}, slot);
    }
    if (step + 1 < steps.time) send<Tile>(slot, full[(step + 1) & 1]);
    fetch(step + 1);
#pragma unroll
    for (int i = 0; i < Tile::kOwnCells; ++i) {
      const ClusterCell<Tile> cell(steps, i);
      if (!cell.exists) continue;
      const int64_t place = steps.row(t, cell.sample);
      if (t >= lengths[i]) {
        skip_cell(in, place, cell.unit);
        continue;
      }
#pragma unroll
      for (int g = 0; g < 3; ++g) store(in.gates[(place * 3 + g) * state_size + cell.unit], sums[i][g]);
      store(in.cells[place * state_size + cell.unit], states[i].cell);
      store(in.output[place * state_size + cell.unit], states[i].h);
      old_cells[i] = states[i].cell;
      if (t != steps.last_time(lengths[i])) continue;
      store(in.h_n[cell.state(steps)], states[i].h);
      store(in.c_n[cell.state(steps)], states[i].cell);
    }
  }
}

template <class Tile>
__device__ void run_backward(
    const SequenceBackward<float>& in, unsigned char* slots, float* partial, Mbarrier (&full)[2]) {
  constexpr int kOwnCells = Tile::kOwnCells;
  const Steps& steps = in.steps;
  const int state_size = steps.state_size;
  const Float32Product<Tile> product(steps, in.weights);
  int lengths[kOwnCells];
  float grad_h[kOwnCells];
  float grad_cell[kOwnCells];
  CellSlopes<float> slopes[kOwnCells] = {};
  float grad_output[kOwnCells] = {};
  bool has_begun[kOwnCells] = {};
#pragma unroll
  for (int i = 0; i < kOwnCells; ++i) {
    const ClusterCell<Tile> cell(steps, i);
    lengths[i] = cell.exists ? steps.length(cell.sample) : 0;
    grad_h[i] = cell.exists ? load_if_present(in.grad_h_n, cell.state(steps)) : 0.f;
    grad_cell[i] = cell.exists ? load_if_present(in.grad_c_n, cell.state(steps)) : 0.f;
  }
  const auto fetch = [&](int step) {
#pragma unroll
    for (int i = 0; i < kOwnCells; ++i) {
      const ClusterCell<Tile> cell(steps, i);
      const int t = steps.time_of(steps.time - 1 - step);
      if (!cell.exists || step >= steps.time || t >= lengths[i]) continue;
      const int64_t place = steps.row(t, cell.sample);
      slopes[i] = cell_slopes<false, float, float>(in, place, cell.unit);
      grad_output[i] = load_if_present(in.grad_output, place * state_size + cell.unit);
    }
  };
  fetch(0);
  // Step number `time` has but a product: the gradient of h_0.
  for (int step = 0; step <= steps.time; ++step) {
    const int t = step < steps.time ? steps.time_of(steps.time - 1 - step) : INT32_MAX;
    if (step > 0) {
      full[step & 1].wait((step - 1) / 2);
      product.multiply(slots + (step & 1) * Tile::kSlotBytes, partial);
    }
    unsigned char* const slot = slots + ((step + 1) & 1) * Tile::kSlotBytes;
    float gradients[kOwnCells][3] = {};
#pragma unroll
    for (int i = 0; i < kOwnCells; ++i) {
      const ClusterCell<Tile> cell(steps, i);
      // From the row's first step on, and where it has gone on since, until it is done.
      if (has_begun[i]) grad_h[i] = product.sum(partial, 0, cell.row);
      has_begun[i] = t < lengths[i];
      if (has_begun[i]) {
        const float upstream = grad_h[i] + grad_output[i];
        grad_cell[i] += upstream * slopes[i].cell;
        gradients[i][0] = grad_cell[i] * slopes[i].input_gate;
        gradients[i][1] = upstream * slopes[i].output_gate;
        gradients[i][2] = grad_cell[i] * slopes[i].candidate;
      }
      if (step < steps.time) put<Tile>(cell, gradients[i], slot);
    }
    if (step == steps.time) break;
    send<Tile>(slot, full[(step + 1) & 1]);
#pragma unroll
    for (int i = 0; i < kOwnCells; ++i) {
      const ClusterCell<Tile> cell(steps, i);
      if (!cell.exists) continue;
      float* const to = in.grad_gates + steps.row(t, cell.sample) * 3 * state_size + cell.unit;
#pragma unroll
      for (int g = 0; g < 3; ++g) store(to[g * state_size], gradients[i][g]);
    }
    fetch(step + 1);
  }
#pragma unroll
  for (int i = 0; i < kOwnCells; ++i) {
    const ClusterCell<Tile> cell(steps, i);
    if (!cell.exists) continue;
    store(in.grad_h_0[cell.state(steps)], grad_h[i]);
    store(in.grad_c_0[cell.state(steps)], grad_cell[i]);
  }
}

#endif

template <class Tile, class Arguments>
__global__ void __launch_bounds__(Tile::kThreads) lltm_sequence_float32_cluster_kernel(Arguments in) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(kTileAlignment) unsigned char slots[];
  __shared__ Mbarrier full[2];
  float* const partial = reinterpret_cast<float*>(slots + 2 * Tile::kSlotBytes);
  if (threadIdx.x == 0) {
    for (Mbarrier& barrier : full) barrier.initialize(1);
    Mbarrier::publish();
  }
  if constexpr (Tile::kIsForward) {
    // Every block reads the first state itself.
    for (int item = threadIdx.x; item < Tile::kBlocks * Tile::kCells; item += Tile::kThreads) {
      const int unit = item % (Tile::kBlocks * kClusterUnits);
      const int row = item / (Tile::kBlocks * kClusterUnits);
      const int sample = static_cast<int>(blockIdx.y) * Tile::kSamples + row;
      const bool exists = unit < in.steps.state_size && sample < in.steps.batch;
      float* const to =
          reinterpret_cast<float*>(slots + unit / kClusterUnits * Tile::kSourceBytes + row * Tile::kRowBytes);
      to[unit % kClusterUnits] = exists ? in.h_0[int64_t{sample} * in.steps.state_size + unit] : 0.f;
    }
  }
  __syncthreads();
  arrive_at_cluster();
  wait_for_cluster();
  if constexpr (Tile::kIsForward) {
    run_forward<Tile>(in, slots, partial, full);
  } else {
    run_backward<Tile>(in, slots, partial, full);
  }
  // No block may end while others send to it.
  arrive_at_cluster();
  wait_for_cluster();
#endif
}

// ---- how it is launched ----

constexpr int kSmallCluster = 8;  // blocks
constexpr int kLargeCluster = 16;
constexpr int kFewSamples = 8;  // of a cluster
constexpr int kManySamples = 16;
constexpr int kMaxClusterState = kLargeCluster * kClusterUnits;

inline bool is_small(const SequenceSizes& sizes) { return sizes.state_size <= kSmallCluster * kClusterUnits; }

template <Pass kPass>
using ClusterArguments = std::conditional_t<kPass == Pass::kForward, SequenceForward<float>, SequenceBackward<float>>;

template <class Tile, class Arguments>
constexpr auto kClusterKernel = &lltm_sequence_float32_cluster_kernel<Tile, Arguments>;

// How many clusters of this pass run at the same time.
template <Pass kPass, int kBlocks, int kSamples>
int clusters_at_once(const Context& context) {
  using Tile = ClusterTile<kPass, kBlocks, kSamples>;
  return clusters_at_once<Tile, kClusterKernel<Tile, ClusterArguments<kPass>>>(context);
}

// Calls function(tile): with few samples each while such clusters all run at the same time.
template <Pass kPass, class Function>
Error with_cluster_tile(const Context& context, const SequenceSizes& sizes, const Function& function) {
  const auto with_blocks = [&](auto blocks) {
    if (sizes.batch <= kFewSamples * int64_t{clusters_at_once<kPass, blocks, kFewSamples>(context)}) {
      return function(ClusterTile<kPass, blocks, kFewSamples>{});
    }
    return function(ClusterTile<kPass, blocks, kManySamples>{});
  };
  if (is_small(sizes)) return with_blocks(std::integral_constant<int, kSmallCluster>{});
  return with_blocks(std::integral_constant<int, kLargeCluster>{});
}

template <Pass kPass>
bool fits_clusters(const Context& context, const SequenceSizes& sizes) {
  if (is_small(sizes)) {
    return sizes.batch <= kManySamples * kMostClusters &&
           clusters_at_once<kPass, kSmallCluster, kManySamples>(context) > 0;
  }
  // Where not all large clusters run at the same time, groups of blocks are faster.
  return sizes.batch <= kManySamples * int64_t{clusters_at_once<kPass, kLargeCluster, kManySamples>(context)};
}

bool is_for_float32_clusters(const Context& context, ScalarType dtype, const SequenceSizes& sizes, bool backward) {
  if (dtype != ScalarType::Float || !has_hopper_tensor_cores() || sizes.state_size > kMaxClusterState) return false;
  return backward ? fits_clusters<Pass::kBackward>(context, sizes) : fits_clusters<Pass::kForward>(context, sizes);
}

template <Pass kPass, class In>
Error launch_cluster_pass(const In& in, cudaStream_t stream) {
  return with_cluster_tile<kPass>(Context(stream), in.sizes, [&](auto tile) {
    using Tile = decltype(tile);
    using Arguments = ClusterArguments<kPass>;
    return launch_in_clusters<Tile, kClusterKernel<Tile, Arguments>>(in.sizes.batch, stream, Arguments(in));
  });
}

Error launch_float32_clusters(const SequenceArguments& in, cudaStream_t stream) {
  return launch_cluster_pass<Pass::kForward>(in, stream);
}

Error launch_float32_clusters(const SequenceBackwardArguments& in, cudaStream_t stream) {
  return launch_cluster_pass<Pass::kBackward>(in, stream);
}

}  // namespace extops::cuda
