// A whole sequence on Hopper GPUs, for states of up to 512: a cluster of blocks computes eight or sixteen samples. Each
// block has 32 units, whose recurrent weights its threads hold in registers for all steps. What the blocks exchange
// after each step (forward: h, backward: the gradients of the gates) goes straight into each other's shared memory,
// where an mbarrier counts the bytes. Products are by tensor cores (mma.sync) in 16-bit types and TF32, by
// multiply-adds (FFMA) in strict float32.
//
// All blocks of a cluster run at the same time, and clusters do not wait for each other.
#include "hopper.cuh"
#include "lltm_sequence.cuh"

// Named, not anonymous: nvcc would put the path of this file into the kernels' names, and no two builds be the same.
namespace extops::cuda {

constexpr int kClusterThreads = 512;
constexpr int kClusterWarps = kClusterThreads / 32;
constexpr int kClusterUnits = 32;  // of a block

template <class T_, Math kMath_, Pass kPass_, int kBlocks_, int kSamples_>
struct ClusterTile {
  using T = T_;
  static constexpr Math kMath = kMath_;
  static constexpr bool kIsForward = kPass_ == Pass::kForward;
  static constexpr bool kIsFast = kMath == Math::kTensorCores;
  static constexpr int kBlocks = kBlocks_;
  static constexpr int kSamples = kSamples_;
  static constexpr int kCells = kClusterUnits * kSamples;          // each of a thread
  static constexpr int kValues = kIsForward ? 1 : 3;               // that a cell sends
  static constexpr int kN = kClusterUnits * (kIsForward ? 3 : 1);  // sums of a sample in a block
  static constexpr int kSourceK = kClusterUnits * kValues;         // K of what one block sends
  static constexpr int kK = kBlocks * kSourceK;
  static constexpr int kRowBytes = kSourceK * static_cast<int>(sizeof(T));
  static constexpr int kSourceBytes = kSamples * kRowBytes;
  static constexpr int kSlotBytes = kBlocks * kSourceBytes;
  // How the warps divide the product.
  static constexpr int kNGroups = kIsForward ? 2 : 1;
  static constexpr int kKGroups = kClusterWarps / kNGroups;
  static constexpr int kPartialBytes = kKGroups * kN * kSamples * static_cast<int>(sizeof(float));
  static constexpr int kSharedBytes = 2 * kSlotBytes + kPartialBytes;
  static_assert(kCells <= kClusterThreads);
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kTileSamples = 8;  // of a product
constexpr int kTileCells = kClusterUnits * kTileSamples;

// Where a chunk of 16 bytes of a sample's row lies, so that the same chunk of eight rows is in all banks.
template <class T>
__device__ constexpr int swizzle(int sample, int chunk) {
  return sizeof(T) == 2 ? chunk ^ (sample / 2 & 3) : chunk ^ (sample & 7);
}

// The rank of this block in its cluster is blockIdx.x, which runs over all its blocks.

// A weight of the product: sum number n of a sample along K, which runs over the blocks' values, each in the order in
// which it sends them.
template <class Tile>
__device__ typename Tile::T weight_at(const Steps& steps, const typename Tile::T* weights, int n, int k) {
  const int of_n = static_cast<int>(blockIdx.x) * kClusterUnits + n % kClusterUnits;
  const int of_k = k / Tile::kSourceK * kClusterUnits + k % kClusterUnits;
  const int gate = Tile::kIsForward ? n / kClusterUnits : k % Tile::kSourceK / kClusterUnits;
  const int row = Tile::kIsForward ? of_n : of_k;
  const int column = Tile::kIsForward ? of_k : of_n;
  typename Tile::T zero;
  store(zero, 0);
  if (of_n >= steps.state_size || of_k >= steps.state_size) return zero;
  return weights[(int64_t{gate} * steps.state_size + row) * steps.columns + column];
}

// ---- products by tensor cores: m16n8k16 or, in TF32, m16n8k8, whose M are the sums and whose N the samples ----

#define EXTOPS_MMA(T, shape_and_types)                                                              \
  __device__ inline void mma(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], T) { \
    asm volatile("mma.sync.aligned." shape_and_types                                                \
                 " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                 \
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));               \
  }
EXTOPS_MMA(__nv_bfloat16, "m16n8k16.row.col.f32.bf16.bf16.f32")
EXTOPS_MMA(__half, "m16n8k16.row.col.f32.f16.f16.f32")
EXTOPS_MMA(float, "m16n8k8.row.col.f32.tf32.tf32.f32")
#undef EXTOPS_MMA

// A warp's part of the product, with its weights.
template <class Tile>
class TensorProduct {
  using T = typename Tile::T;
  static constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));  // elements in a register
  static constexpr int kStep = 8 * kPerWord;
  static constexpr int kWarpK = Tile::kK / Tile::kKGroups;
  static constexpr int kSteps = kWarpK / kStep;
  static constexpr int kTiles = Tile::kN / Tile::kNGroups / 16;
  static_assert(kWarpK % kStep == 0 && Tile::kSourceK % kStep == 0);

 public:
  __device__ TensorProduct(const Steps& steps, const T* weights) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const int n = first_n() + tile * 16 + r % 2 * 8 + lane() / 4;
          const int k = first_k() + i * kStep + (r / 2 * 4 + lane() % 4) * kPerWord;
          T values[kPerWord];
#pragma unroll
          for (int j = 0; j < kPerWord; ++j) {
            values[j] = weight_at<Tile>(steps, weights, n, k + j);
            if constexpr (kPerWord == 1) values[j] = round_to_tf32(values[j]);
          }
          memcpy(&weights_[i][tile][r], values, 4);
        }
      }
    }
  }

  // The sums of a slot's values, to be added up over the K groups: partial is [K group, tile of samples, sum, sample].
  __device__ void multiply(const unsigned char* slot, float* partial) const {
#pragma unroll 1
    for (int samples = 0; samples < Tile::kSamples; samples += kTileSamples) {
      float sums[kTiles][4] = {};
      const int sample = samples + lane() / 4;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int k = first_k() + i * kStep;
        const unsigned char* row = slot + k / Tile::kSourceK * Tile::kSourceBytes + sample * Tile::kRowBytes;
        const int chunk = k % Tile::kSourceK * static_cast<int>(sizeof(T)) / kChunkBytes;
        uint32_t values[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const unsigned char* from = row + swizzle<T>(sample, chunk + r) * kChunkBytes + lane() % 4 * 4;
          values[r] = *reinterpret_cast<const uint32_t*>(from);
        }
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) mma(sums[tile], weights_[i][tile], values, T{});
      }
      float* const to = partial + place(warp() % Tile::kKGroups, first_n() + lane() / 4, samples) + lane() % 4 * 2;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float2* const pair = reinterpret_cast<float2*>(to + (tile * 16 + half * 8) * kTileSamples);
          *pair = {sums[tile][2 * half], sums[tile][2 * half + 1]};
        }
      }
    }
  }

  // Sum number n of a sample.
  __device__ static float sum(const float* partial, int n, int sample) {
    float total = 0;
#pragma unroll
    for (int group = 0; group < Tile::kKGroups; ++group) total += partial[place(group, n, sample)];
    return total;
  }

 private:
  __device__ static int lane() { return threadIdx.x % 32; }
  __device__ static int warp() { return threadIdx.x / 32; }
  __device__ static int first_n() { return warp() / Tile::kKGroups * (kTiles * 16); }
  __device__ static int first_k() { return warp() % Tile::kKGroups * kWarpK; }
  __device__ static int place(int group, int n, int sample) {
    const int tile = group * (Tile::kSamples / kTileSamples) + sample / kTileSamples;
    return (tile * Tile::kN + n) * kTileSamples + sample % kTileSamples;
  }

  uint32_t weights_[kSteps][kTiles][4];
};

// ---- products in strict float32: the lanes of a warp split K, and exchange their sums by shuffles ----

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

// A warp has four units, and half of K. Forward: a lane has one unit's three gates, and every eighth chunk of K;
// backward: four units, and every 32nd chunk.
template <class Tile>
class Float32Product {
  static constexpr bool kIsForward = Tile::kIsForward;
  static constexpr int kSums = kIsForward ? 3 : 4;
  static constexpr int kLanes = kIsForward ? 8 : 32;  // that split K
  static constexpr int kRowChunks = Tile::kRowBytes / kChunkBytes;
  static constexpr int kHalfChunks = Tile::kBlocks / 2 * kRowChunks;
  static constexpr int kChunks = kHalfChunks / kLanes;
  static constexpr int kFloats = kChunkBytes / static_cast<int>(sizeof(float));
  static constexpr int kPass = kTileSamples / 2;  // samples at a time, for want of registers
  static constexpr int kKept = kIsForward ? 3 : 1;
  static constexpr int kTilePartial = 2 * kKept * kTileCells;
  static_assert(kHalfChunks % kLanes == 0 && kRowChunks % 8 == 0);

 public:
  __device__ Float32Product(const Steps& steps, const float* weights) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
#pragma unroll
      for (int s = 0; s < kSums; ++s) {
#pragma unroll
        for (int j = 0; j < kFloats; ++j) {
          const int n = kIsForward ? s * kClusterUnits + unit() : warp() % 8 * 4 + s;
          weights_[i][s][j] = weight_at<Tile>(steps, weights, n, chunk(i) * kFloats + j);
        }
      }
    }
  }

  // Partial is [tile of samples, half of K, sum, cell].
  __device__ void multiply(const unsigned char* slot, float* partial) const {
#pragma unroll 1
    for (int samples = 0; samples < Tile::kSamples; samples += kTileSamples) {
      float kept[2 * kSums];  // of the samples lane % 4 and lane % 4 + 4 of the tile
#pragma unroll
      for (int pass = 0; pass < 2; ++pass) {
        float sums[kPass * kSums] = {};
        multiply_samples(slot + samples * Tile::kRowBytes, pass * kPass, sums);
        exchange_halves<2 * kSums>(sums, 2);
        exchange_halves<kSums>(sums, 1);
#pragma unroll
        for (int s = 0; s < kSums; ++s) kept[pass * kSums + s] = sums[s];
      }
      exchange_halves<kSums>(kept, 4);
      if constexpr (!kIsForward) {
        exchange_halves<2>(kept, 16);
        exchange_halves<1>(kept, 8);
      }
      float* const to = partial + samples / kTileSamples * kTilePartial + warp() / 8 * kKept * kTileCells;
#pragma unroll
      for (int s = 0; s < kKept; ++s) to[s * kTileCells + threadIdx.x % kTileCells] = kept[s];
    }
  }

  __device__ static float sum(const float* partial, int n, int sample) {
    const float* const first =
        partial + sample / kTileSamples * kTilePartial + n / kClusterUnits * kTileCells + threadIdx.x % kTileCells;
    return first[0] + first[kKept * kTileCells];
  }

 private:
  __device__ static int warp() { return threadIdx.x / 32; }
  __device__ static int unit() { return warp() % 8 * 4 + static_cast<int>(threadIdx.x) % 32 / 8; }
  __device__ static int chunk(int i) {
    return warp() / 8 * kHalfChunks + i * kLanes + static_cast<int>(threadIdx.x) % kLanes;
  }

  // Sums of kPass samples from `first` on: sums is [sample, sum].
  __device__ void multiply_samples(const unsigned char* slot, int first, float (&sums)[kPass * kSums]) const {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const unsigned char* source = slot + chunk(i) / kRowChunks * Tile::kSourceBytes;
      const int column = chunk(i) % kRowChunks;
#pragma unroll
      for (int p = 0; p < kPass; ++p) {
        const int sample = first + p;
        const float4 x = *reinterpret_cast<const float4*>(
            source + sample * Tile::kRowBytes + swizzle<float>(sample, column) * kChunkBytes);
#pragma unroll
        for (int s = 0; s < kSums; ++s) {
          float& sum = sums[p * kSums + s];
          sum = fmaf(x.x, weights_[i][s][0], sum);
          sum = fmaf(x.y, weights_[i][s][1], sum);
          sum = fmaf(x.z, weights_[i][s][2], sum);
          sum = fmaf(x.w, weights_[i][s][3], sum);
        }
      }
    }
  }

  float weights_[kChunks][kSums][kFloats];
};

template <class Tile>
using ClusterProduct = std::conditional_t<Tile::kMath == Math::kTensorCores, TensorProduct<Tile>, Float32Product<Tile>>;

// ---- the exchange ----

// The cell of a thread.
template <class Tile>
struct ClusterCell {
  int column;  // unit within the block
  int row;     // sample within the cluster
  int unit;
  int sample;
  int length;
  bool exists;

  __device__ explicit ClusterCell(const Steps& steps)
      : column(static_cast<int>(threadIdx.x) % kTileCells / kTileSamples),
        row(static_cast<int>(threadIdx.x) / kTileCells * kTileSamples + static_cast<int>(threadIdx.x) % kTileSamples),
        unit(static_cast<int>(blockIdx.x) * kClusterUnits + column),
        sample(static_cast<int>(blockIdx.y) * Tile::kSamples + row),
        exists(threadIdx.x < Tile::kCells && unit < steps.state_size && sample < steps.batch) {
    length = exists ? steps.length(sample) : 0;
  }
};

// Puts the cells' values into this block's part of a slot, and copies that to all other blocks of the cluster. The
// slot's mbarrier counts what this block and the others have sent.
template <class Tile>
__device__ void send(
    const ClusterCell<Tile>& cell, const typename Tile::T (&values)[Tile::kValues], unsigned char* slot,
    Mbarrier& full) {
  using T = typename Tile::T;
  const int rank = static_cast<int>(blockIdx.x);
  unsigned char* const part = slot + rank * Tile::kSourceBytes;
#pragma unroll
  for (int v = 0; v < Tile::kValues; ++v) {
    const int bytes = (v * kClusterUnits + cell.column) * static_cast<int>(sizeof(T));
    *reinterpret_cast<T*>(
        part + cell.row * Tile::kRowBytes + swizzle<T>(cell.row, bytes / kChunkBytes) * kChunkBytes +
        bytes % kChunkBytes) = values[v];
  }
  fence_proxy_async();
  asm volatile("bar.sync 1, %0;" ::"n"(Tile::kCells) : "memory");
  const int block = static_cast<int>(threadIdx.x);
  if (block >= Tile::kBlocks) return;
  if (block == rank) {
    full.arrive_expect_tx((Tile::kBlocks - 1) * Tile::kSourceBytes);
  } else {
    copy_to_peer(shared_address(part), shared_address(part), Tile::kSourceBytes, full, block);
  }
}

template <class T, bool kIsTf32>
__device__ T as_operand(float value) {
  T result;
  if constexpr (kIsTf32) value = round_to_tf32(value);
  store(result, value);
  return result;
}

template <class Tile>
__device__ void run_forward(
    const SequenceForward<typename Tile::T>& in, unsigned char* slots, float* partial, Mbarrier (&full)[2]) {
  using T = typename Tile::T;
  constexpr bool kIsTf32 = std::is_same_v<T, float> && Tile::kIsFast;
  const Steps& steps = in.steps;
  const int state_size = steps.state_size;
  const ClusterProduct<Tile> product(steps, in.weights);
  const ClusterCell<Tile> cell(steps);
  const int64_t at = int64_t{cell.sample} * state_size + cell.unit;
  float old_cell = cell.exists ? load(in.c_0[at]) : 0.f;
  if (cell.exists && cell.length == 0) {
    in.h_n[at] = in.h_0[at];
    in.c_n[at] = in.c_0[at];
  }
  // The products of the step, on their way since the one before.
  float next[3] = {};
  const auto fetch = [&](int step) {
    const int t = steps.time_of(step);
    if (!cell.exists || step >= steps.time || t >= cell.length) return;
    const float* from = in.products + steps.row(t, cell.sample) * 3 * state_size + cell.unit;
#pragma unroll
    for (int g = 0; g < 3; ++g) next[g] = from[g * state_size];
  };
  fetch(0);
  for (int step = 0; step < steps.time; ++step) {
    const int t = steps.time_of(step);
    const bool is_last = step + 1 == steps.time;
    if (step > 0) full[step & 1].wait((step - 1) / 2);
    product.multiply(slots + (step & 1) * Tile::kSlotBytes, partial);
    __syncthreads();
    if (threadIdx.x >= Tile::kCells) continue;
    float sums[3];
#pragma unroll
    for (int g = 0; g < 3; ++g) {
      const float bias = cell.exists ? load(in.bias[g * state_size + cell.unit]) : 0.f;
      sums[g] = ClusterProduct<Tile>::sum(partial, g * kClusterUnits + cell.column, cell.row) + next[g] + bias;
      T rounded;
      store(rounded, sums[g]);
      sums[g] = load(rounded);  // as the backward will see it
    }
    const bool counts = t < cell.length;
    const CellState<float> state = cell_forward<float, Tile::kIsFast>(sums[0], sums[1], sums[2], old_cell);
    // Before a row's first step it has its first state; after its last one nobody reads it.
    const float h = counts ? state.h : cell.exists ? load(in.h_0[at]) : 0.f;
    if (!is_last) {
      const T sent[1] = {as_operand<T, kIsTf32>(h)};
      send<Tile>(cell, sent, slots + ((step + 1) & 1) * Tile::kSlotBytes, full[(step + 1) & 1]);
    }
    fetch(step + 1);
    if (!cell.exists) continue;
    const int64_t place = steps.row(t, cell.sample);
    if (!counts) {
      skip_cell(in, place, cell.unit);
      continue;
    }
#pragma unroll
    for (int g = 0; g < 3; ++g) store(in.gates[(place * 3 + g) * state_size + cell.unit], sums[g]);
    store(in.cells[place * state_size + cell.unit], state.cell);
    store(in.output[place * state_size + cell.unit], state.h);
    old_cell = state.cell;
    if (t != steps.last_time(cell.length)) continue;
    store(in.h_n[at], state.h);
    store(in.c_n[at], state.cell);
  }
}

template <class Tile>
__device__ void run_backward(
    const SequenceBackward<typename Tile::T>& in, unsigned char* slots, float* partial, Mbarrier (&full)[2]) {
  using T = typename Tile::T;
  constexpr bool kIsTf32 = std::is_same_v<T, float> && Tile::kIsFast;
  const Steps& steps = in.steps;
  const int state_size = steps.state_size;
  const ClusterProduct<Tile> product(steps, in.weights);
  const ClusterCell<Tile> cell(steps);
  const int64_t at = int64_t{cell.sample} * state_size + cell.unit;
  float grad_h = cell.exists ? load_if_present(in.grad_h_n, at) : 0.f;
  float grad_cell = cell.exists ? load_if_present(in.grad_c_n, at) : 0.f;
  CellSlopes<float> slopes{};
  float grad_output = 0;
  const auto fetch = [&](int step) {
    const int t = steps.time_of(steps.time - 1 - step);
    if (!cell.exists || step >= steps.time || t >= cell.length) return;
    const int64_t place = steps.row(t, cell.sample);
    slopes = cell_slopes<Tile::kIsFast, T, float>(in, place, cell.unit);
    grad_output = load_if_present(in.grad_output, place * state_size + cell.unit);
  };
  fetch(0);
  bool has_begun = false;
  // Step number `time` has but a product: the gradient of h_0.
  for (int step = 0; step <= steps.time; ++step) {
    const int t = step < steps.time ? steps.time_of(steps.time - 1 - step) : INT32_MAX;
    if (step > 0) {
      full[step & 1].wait((step - 1) / 2);
      product.multiply(slots + (step & 1) * Tile::kSlotBytes, partial);
      __syncthreads();
    }
    if (threadIdx.x >= Tile::kCells) continue;
    // From the row's first step on, and where it has gone on since, until it is done.
    if (has_begun) grad_h = ClusterProduct<Tile>::sum(partial, cell.column, cell.row);
    has_begun = t < cell.length;
    if (step == steps.time) break;
    float gradients[3] = {};
    if (has_begun) {
      const float upstream = grad_h + grad_output;
      grad_cell += upstream * slopes.cell;
      gradients[0] = grad_cell * slopes.input_gate;
      gradients[1] = upstream * slopes.output_gate;
      gradients[2] = grad_cell * slopes.candidate;
    }
    const T sent[3] = {
        as_operand<T, kIsTf32>(gradients[0]), as_operand<T, kIsTf32>(gradients[1]),
        as_operand<T, kIsTf32>(gradients[2])};
    send<Tile>(cell, sent, slots + ((step + 1) & 1) * Tile::kSlotBytes, full[(step + 1) & 1]);
    if (cell.exists) {
      T* const to = in.grad_gates + steps.row(t, cell.sample) * 3 * state_size + cell.unit;
#pragma unroll
      for (int g = 0; g < 3; ++g) store(to[g * state_size], gradients[g]);
    }
    fetch(step + 1);
  }
  if (!cell.exists) return;
  store(in.grad_h_0[at], grad_h);
  store(in.grad_c_0[at], grad_cell);
}

#endif

template <class Tile, class Arguments>
__global__ void __launch_bounds__(kClusterThreads) lltm_sequence_cluster_kernel(Arguments in) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using T = typename Tile::T;
  extern __shared__ __align__(kTileAlignment) unsigned char slots[];
  __shared__ Mbarrier full[2];
  float* const partial = reinterpret_cast<float*>(slots + 2 * Tile::kSlotBytes);
  if (threadIdx.x == 0) {
    for (Mbarrier& barrier : full) barrier.initialize(1);
    Mbarrier::publish();
  }
  if constexpr (Tile::kIsForward) {
    // Every block reads the first state itself.
    for (int item = threadIdx.x; item < Tile::kBlocks * Tile::kCells; item += kClusterThreads) {
      const int unit = item % (Tile::kBlocks * kClusterUnits);
      const int row = item / (Tile::kBlocks * kClusterUnits);
      const int sample = static_cast<int>(blockIdx.y) * Tile::kSamples + row;
      const bool exists = unit < in.steps.state_size && sample < in.steps.batch;
      const float value = exists ? load(in.h_0[int64_t{sample} * in.steps.state_size + unit]) : 0.f;
      const int bytes = unit % kClusterUnits * static_cast<int>(sizeof(T));
      *reinterpret_cast<T*>(
          slots + unit / kClusterUnits * Tile::kSourceBytes + row * Tile::kRowBytes +
          swizzle<T>(row, bytes / kChunkBytes) * kChunkBytes + bytes % kChunkBytes) = as_operand < T,
                                                                       std::is_same_v<T, float> &&
                                                                           Tile::kIsFast > (value);
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

inline bool is_small(const LltmSequenceSizes& sizes) { return sizes.state_size <= kSmallCluster * kClusterUnits; }

// How many clusters run at the same time, read off an NVIDIA H200.
inline int64_t clusters_at_once(const LltmSequenceSizes& sizes) { return is_small(sizes) ? 14 : 6; }

template <Pass kPass, class Function>
auto with_cluster_tile(ScalarType dtype, const LltmSequenceSizes& sizes, const Function& function) {
  const auto with_blocks = [&](auto scalar, auto math) {
    using T = decltype(scalar);
    const bool is_few = sizes.batch <= kFewSamples * clusters_at_once(sizes);
    if (is_small(sizes)) {
      if (is_few) return function(ClusterTile<T, math, kPass, kSmallCluster, kFewSamples>{});
      return function(ClusterTile<T, math, kPass, kSmallCluster, kManySamples>{});
    }
    if (is_few) return function(ClusterTile<T, math, kPass, kLargeCluster, kFewSamples>{});
    return function(ClusterTile<T, math, kPass, kLargeCluster, kManySamples>{});
  };
  constexpr std::integral_constant<Math, Math::kTensorCores> kTensorCores;
  constexpr std::integral_constant<Math, Math::kFloat32> kFloat32;
  switch (dtype) {
    case ScalarType::BFloat16:
      return with_blocks(__nv_bfloat16{}, kTensorCores);
    case ScalarType::Half:
      return with_blocks(__half{}, kTensorCores);
    case ScalarType::TF32:
      return with_blocks(float{}, kTensorCores);
    default:
      return with_blocks(float{}, kFloat32);
  }
}

bool is_for_clusters(ScalarType dtype, const LltmSequenceSizes& sizes) {
  return dtype != ScalarType::Double && has_hopper_tensor_cores() && sizes.state_size <= kMaxClusterState &&
         sizes.batch <= kManySamples * clusters_at_once(sizes);
}

template <class Tile, class Arguments>
Error launch_cluster_tile(const Arguments& in, cudaStream_t stream) {
  constexpr auto kernel = &lltm_sequence_cluster_kernel<Tile, Arguments>;
  if (const Error error = allow_shared_memory<kernel>(Tile::kSharedBytes)) return error;
  if constexpr (Tile::kBlocks > 8) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {Tile::kBlocks, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(Tile::kBlocks, (in.steps.batch + Tile::kSamples - 1) / Tile::kSamples);
  config.blockDim = kClusterThreads;
  config.dynamicSmemBytes = Tile::kSharedBytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  cudaLaunchKernelEx(&config, kernel, in);
  return launch_error();
}

Error launch_clusters(ScalarType dtype, const LltmSequence& in, cudaStream_t stream) {
  return with_cluster_tile<Pass::kForward>(dtype, in.sizes, [&](auto tile) -> Error {
    using Tile = decltype(tile);
    return launch_cluster_tile<Tile>(SequenceForward<typename Tile::T>(in), stream);
  });
}

Error launch_clusters(ScalarType dtype, const LltmSequenceBackward& in, cudaStream_t stream) {
  return with_cluster_tile<Pass::kBackward>(dtype, in.sizes, [&](auto tile) -> Error {
    using Tile = decltype(tile);
    return launch_cluster_tile<Tile>(SequenceBackward<typename Tile::T>(in), stream);
  });
}

}  // namespace extops::cuda
