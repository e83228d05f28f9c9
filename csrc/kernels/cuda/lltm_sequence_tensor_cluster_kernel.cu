// A whole sequence on Hopper GPUs by tensor cores (16-bit types and TF32), for states of up to 512: a cluster of blocks
// computes eight or sixteen samples. Each block has 64 units, in TF32 32, whose recurrent weights its threads hold in
// registers for all steps.
//
// A step takes as long as its values travel between the blocks, so they are as few as can be. Forward, each block sends
// h of its units to all blocks, which multiply all of h by the weights of their gates. Backward, each block multiplies
// the gradients of its own gates, and sends the sums to the blocks whose units they are of: a number for each unit,
// where the gradients themselves are three. All of that goes straight from registers into the other blocks' shared
// memory (st.async), where mbarriers count the bytes.
//
// All blocks of a cluster run at the same time, and clusters do not wait for each other.
#include <algorithm>

#include "hopper.cuh"
#include "lltm_sequence_tensor.cuh"

// Named, not anonymous: nvcc would put the path of this file into the kernels' names, and no two builds be the same.
namespace extops::cuda {

template <class T_, Pass kPass_, int kBlocks_, int kSamples_>
struct TensorClusterTile {
  using T = T_;
  static constexpr bool kIsForward = kPass_ == Pass::kForward;
  static constexpr bool kIsTf32 = std::is_same_v<T, float>;
  static constexpr int kBlocks = kBlocks_;
  static constexpr int kSamples = kSamples_;
  static constexpr int kThreads = 256;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kUnits = kTileColumns<T>;  // of a block
  // Units come in groups of 16, the M of an instruction; samples in tiles of eight, its N.
  static constexpr int kGroups = kUnits / 16;
  static constexpr int kGroupWarps = kWarps / kGroups;
  static constexpr int kTileSamples = 8;
  static constexpr int kTiles = kSamples / kTileSamples;
  // Cells come in pairs: two units of one sample. A group has two for each lane and tile, one for a warp.
  static constexpr int kGroupPairs = 2 * kTiles;
  static_assert(kGroupPairs <= kGroupWarps);

  // Operands lie in chunks of 16 bytes along K, each of all samples.
  static constexpr int kStepK = Operand<T>::kStepK;
  static constexpr int kOfChunk = Operand<T>::kOfChunk;
  static constexpr int kChunk = kSamples * kChunkBytes;
  static constexpr int kOperandBytes = kUnits / kOfChunk * kChunk;  // of a value of all cells

  // Forward, a warp sums up the three gates of its group for some of the blocks. Backward, it sums up tiles of 16 units
  // of the whole cluster for all gates of this block.
  static constexpr int kM = kIsForward ? 3 : kBlocks * kGroups / kWarps;
  static constexpr int kSources = kIsForward ? kBlocks / kGroupWarps : 3;
  static constexpr int kSourceSteps = kUnits / kStepK;
  static constexpr int kSteps = kSources * kSourceSteps;

  // What comes from a block: forward h, backward sums.
  static constexpr int kSourceBytes = kIsForward ? kOperandBytes : kUnits * kSamples * static_cast<int>(sizeof(float));
  static constexpr int kSlotBytes = kBlocks * kSourceBytes;
  // What stays within the block: forward the sums of some blocks, backward the gradients of its gates. Two of these,
  // too: a warp may read those of a step while another writes those of the next.
  static constexpr int kOwnBytes =
      kIsForward ? kGroupWarps * 3 * kUnits * kSamples * static_cast<int>(sizeof(float)) : 3 * kOperandBytes;
  static constexpr int kStagedWeights = kSteps * kM;
  static constexpr int kSharedBytes = std::max(2 * (kSlotBytes + kOwnBytes), kStagedWeights * kThreads * kChunkBytes);
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// ---- who does what ----

__device__ inline int rank_in_cluster() { return static_cast<int>(blockIdx.x); }  // it runs over the cluster's blocks

template <class Tile>
__device__ int group_of_warp() {
  return warp_id() / Tile::kGroupWarps;
}
template <class Tile>
__device__ int warp_of_group() {
  return warp_id() % Tile::kGroupWarps;
}

// The block whose h a warp multiplies as number i: the nearest come first, since theirs comes first.
template <class Tile>
__device__ int source_of(int i) {
  return (rank_in_cluster() + i * Tile::kGroupWarps + warp_of_group<Tile>()) % Tile::kBlocks;
}

// A thread's pair of cells.
template <class Tile>
struct CellPair {
  int number = warp_of_group<Tile>();                                                    // within the group
  bool is_owned = Tile::kGroupPairs == Tile::kGroupWarps || number < Tile::kGroupPairs;  // else there is none
  int column = group_of_warp<Tile>() * 16 + lane_id() / 4 * 2;                 // of the first unit, within the block
  int row = number / 2 * Tile::kTileSamples + lane_id() % 4 * 2 + number % 2;  // sample within the cluster
  int unit = rank_in_cluster() * Tile::kUnits + column;
  int sample = static_cast<int>(blockIdx.y) * Tile::kSamples + row;

  __device__ int cells() const { return is_owned ? 2 : 0; }
  __device__ int64_t state(const Steps& steps) const { return int64_t{sample} * steps.state_size + unit; }
};

// Where a sample's operand of a unit lies. In each tile the samples of even number come first, so that what a warp
// sends lies together.
template <class Tile>
__device__ int operand_place(int column, int row) {
  const int place = row / 8 * 8 + row % 2 * 4 + row % 8 / 2;
  return column / Tile::kOfChunk * Tile::kChunk + place * kChunkBytes +
         column % Tile::kOfChunk * static_cast<int>(sizeof(typename Tile::T));
}

// ---- products ----

template <class Tile>
using ClusterWeights = TensorWeights<typename Tile::T, Tile::kSteps, Tile::kM, 1, Tile::kThreads, Tile::kStagedWeights>;

// The weight of row number `row` of the warp's sums m, along its K.
template <class Tile>
__device__ typename Tile::T weight_of_warp(const Steps& steps, const typename Tile::T* weights, int m, int row, int k) {
  const int source = k / Tile::kUnits;
  const int own = rank_in_cluster() * Tile::kUnits;
  if constexpr (Tile::kIsForward) {
    const int of_gate = own + group_of_warp<Tile>() * 16 + unit_of_row(row);
    return recurrent_weight(steps, weights, m, of_gate, source_of<Tile>(source) * Tile::kUnits + k % Tile::kUnits);
  } else {
    const int of_h = (warp_id() * Tile::kM + m) * 16 + unit_of_row(row);
    return recurrent_weight(steps, weights, source, own + k % Tile::kUnits, of_h);
  }
}

// Adds up the sums of a tile of samples. `operands`(i) is where those of source number i begin.
template <class Tile, class Operands>
__device__ void multiply_sources(
    float (&sums)[Tile::kM][1][4], const ClusterWeights<Tile>& weights, const Operands& operands) {
  const int own_row = operand_place<Tile>(lane_id() / 8 * Tile::kOfChunk, lane_id() % 8);
  uint32_t row = 0;
  weights.multiply(sums, [&](int step) {
    const int of_source = step % Tile::kSourceSteps;
    if (of_source == 0) row = operands(step / Tile::kSourceSteps) + own_row;
    return row + of_source * 2 * Tile::kChunk;
  });
}

// ---- what the blocks send each other ----

// What comes for a step. Each half of the blocks has its own mbarrier, so that a product can begin with the nearer
// ones.
struct Arrivals {
  Mbarrier halves[2];

  __device__ void initialize() {
    for (Mbarrier& half : halves) half.initialize(1);
  }

  // To be called by one thread, for each phase.
  template <class Tile>
  __device__ void expect() {
    for (Mbarrier& half : halves) half.arrive_expect_tx(Tile::kSlotBytes / 2);
  }

  // Of a block that is `distance` blocks before the one that sends, round the cluster.
  template <class Tile>
  __device__ const Mbarrier& of(int distance) const {
    return halves[distance / (Tile::kBlocks / 2)];
  }
};

// Stores 16 bytes into the shared memory of a block, at the address that they would have in this one's.
__device__ inline void store_to_block(uint32_t to, const uint32_t (&words)[4], const Mbarrier& arrived, int block) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   peer_address(to, block)),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(peer_address(arrived.address(), block))
               : "memory");
}

// Sends h of a pair to all blocks, to be put at `part`. Lanes that have values of one chunk exchange them first, so
// that each has 16 bytes, and share the blocks among them.
template <class Tile>
__device__ void send_h(const CellPair<Tile>& pair, const float (&h)[2], uint32_t part, const Arrivals& arrivals) {
  using T = typename Tile::T;
  constexpr int kLanes = Tile::kOfChunk / 2;
  const int lane = lane_id();
  const Vector<T, 2> own = as_operands<T, 2>(h);
  uint32_t own_words[sizeof(own) / 4];
  memcpy(own_words, &own, sizeof(own));
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int neighbour = lane / 4 / kLanes * kLanes + i * kLanes / 4;
    words[i] = __shfl_sync(0xffffffff, own_words[i % (4 / kLanes)], neighbour * 4 + lane % 4);
  }
  const uint32_t to = part + operand_place<Tile>(pair.column / Tile::kOfChunk * Tile::kOfChunk, pair.row);
#pragma unroll
  for (int i = 0; i < Tile::kBlocks; i += kLanes) {
    const int distance = i + lane / 4 % kLanes;
    const int block = (rank_in_cluster() + Tile::kBlocks - distance) % Tile::kBlocks;
    store_to_block(to, words, arrivals.of<Tile>(distance), block);
  }
}

// Sends the sums of a tile of samples to the blocks whose units they are of: what a lane has of 16 units at once.
template <class Tile>
__device__ void send_sums(const float (&sums)[Tile::kM][1][4], uint32_t part, int tile, const Arrivals& arrivals) {
#pragma unroll
  for (int m = 0; m < Tile::kM; ++m) {
    const int group = warp_id() * Tile::kM + m;  // of the cluster's units
    const int block = group / Tile::kGroups;
    const int distance = (rank_in_cluster() + Tile::kBlocks - block) % Tile::kBlocks;
    uint32_t words[4];
    memcpy(words, sums[m][0], sizeof(words));
    const int place = (group % Tile::kGroups * Tile::kTiles + tile) * 32 + lane_id();
    store_to_block(part + place * kChunkBytes, words, arrivals.of<Tile>(distance), block);
  }
}

// A pair's sum of all blocks.
template <class Tile>
__device__ void add_sums(float (&total)[2], const CellPair<Tile>& pair, const unsigned char* slot) {
  const int place = (group_of_warp<Tile>() * Tile::kTiles + pair.row / Tile::kTileSamples) * 32 + lane_id();
  const float* from = reinterpret_cast<const float*>(slot + place * kChunkBytes) + pair.row % 2;
  total[0] = total[1] = 0;
#pragma unroll
  for (int source = 0; source < Tile::kBlocks; ++source) {
    total[0] += from[0];
    total[1] += from[2];
    from += Tile::kSourceBytes / static_cast<int>(sizeof(float));
  }
}

// ---- the passes ----

template <class Tile>
__device__ void run_forward(
    const SequenceForward<typename Tile::T>& in, bool aligned, const ClusterWeights<Tile>& weights,
    unsigned char* shared, Arrivals (&arrivals)[2]) {
  using T = typename Tile::T;
  const Steps& steps = in.steps;
  const int state_size = steps.state_size;
  const uint32_t slots = shared_address(shared);
  const uint32_t part = slots + rank_in_cluster() * Tile::kSourceBytes;
  // [step of two, group, pair, warp that summed it up, gate, lane]
  float2* const partial = reinterpret_cast<float2*>(shared + 2 * Tile::kSlotBytes) +
                          group_of_warp<Tile>() * (Tile::kGroupPairs * Tile::kGroupWarps * 3 * 32) + lane_id();
  const auto partial_at = [&](int step, int number, int warp, int g) -> float2& {
    const int of_step = step % 2 * (Tile::kOwnBytes / static_cast<int>(sizeof(float2)));
    return partial[of_step + ((number * Tile::kGroupWarps + warp) * 3 + g) * 32];
  };
  const CellPair<Tile> pair;
  CellPlace place(steps, pair.sample, pair.unit, pair.cells(), false);
  const Counted counted(steps, place.count > 0 ? steps.length(pair.sample) : 0, false);
  float h[2] = {};
  float cells[2] = {};
  float bias[3][2] = {};
  Packed<float, 2> next[3] = {};  // products, on their way since the step before
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    if (c >= place.count) continue;
    h[c] = load(in.h_0[pair.state(steps) + c]);
    cells[c] = load(in.c_0[pair.state(steps) + c]);
#pragma unroll
    for (int g = 0; g < 3; ++g) bias[g][c] = load(in.bias[g * state_size + pair.unit + c]);
  }
  if (pair.is_owned) send_h<Tile>(pair, h, part, arrivals[0]);
  const auto fetch = [&](int64_t row, int step) {
    if (!counted(step)) return;
#pragma unroll
    for (int g = 0; g < 3; ++g)
      load_pair(next[g], in.products + (row * 3 + g) * state_size + pair.unit, place.count, aligned);
  };
  fetch(place.row, 0);
  for (int step = 0; step < steps.time; ++step) {
    Arrivals& arrived = arrivals[step % 2];
    const uint32_t slot = slots + step % 2 * Tile::kSlotBytes;
#pragma unroll
    for (int tile = 0; tile < Tile::kTiles; ++tile) {
      float sums[3][1][4] = {};
      multiply_sources<Tile>(sums, weights, [&](int source) {
        constexpr int kHalf = Tile::kSources / 2;
        if (tile == 0 && source % kHalf == 0) arrived.halves[source / kHalf].template wait<true>(step / 2);
        return slot + source_of<Tile>(source) * Tile::kSourceBytes + tile * (Tile::kTileSamples * kChunkBytes);
      });
#pragma unroll
      for (int column = 0; column < 2; ++column) {
#pragma unroll
        for (int g = 0; g < 3; ++g)
          partial_at(step, 2 * tile + column, warp_of_group<Tile>(), g) = {sums[g][0][column], sums[g][0][2 + column]};
      }
    }
    if (threadIdx.x == 0) arrived.expect<Tile>();
    asm volatile("bar.sync %0, %1;" ::"r"(1 + group_of_warp<Tile>()), "n"(Tile::kGroupWarps * 32) : "memory");
    if (!pair.is_owned) continue;
    float sums[3][2];
#pragma unroll
    for (int g = 0; g < 3; ++g) {
      unpack<float, 2>(sums[g], next[g]);
      sums[g][0] += bias[g][0];
      sums[g][1] += bias[g][1];
#pragma unroll
      for (int warp = 0; warp < Tile::kGroupWarps; ++warp) {
        const float2 of_warp = partial_at(step, pair.number, warp, g);
        sums[g][0] += of_warp.x;
        sums[g][1] += of_warp.y;
      }
    }
    T gates[3][2], new_cells[2], output[2];
    compute_cells(gates, new_cells, output, h, cells, sums, counted(step));
    if (step + 1 < steps.time)
      send_h<Tile>(pair, h, part + (step + 1) % 2 * Tile::kSlotBytes, arrivals[(step + 1) % 2]);
    fetch(place.row + place.step_rows, step + 1);
#pragma unroll
    for (int g = 0; g < 3; ++g)
      store_pair(in.gates + (place.row * 3 + g) * state_size + pair.unit, gates[g], place.count, aligned);
    store_pair(in.cells + place.row * state_size + pair.unit, new_cells, place.count, aligned);
    store_pair(in.output + place.row * state_size + pair.unit, output, place.count, aligned);
    place.row += place.step_rows;
  }
  store_pair(in.h_n + pair.state(steps), rounded<T, 2>(h).values, place.count, false);
  store_pair(in.c_n + pair.state(steps), rounded<T, 2>(cells).values, place.count, false);
}

template <class Tile>
__device__ void run_backward(
    const SequenceBackward<typename Tile::T>& in, bool aligned, const ClusterWeights<Tile>& weights,
    unsigned char* shared, Arrivals (&arrivals)[2]) {
  using T = typename Tile::T;
  const Steps& steps = in.steps;
  const int state_size = steps.state_size;
  const uint32_t part = shared_address(shared) + rank_in_cluster() * Tile::kSourceBytes;
  const CellPair<Tile> pair;
  CellPlace place(steps, pair.sample, pair.unit, pair.cells(), true);
  const Counted counted(steps, place.count > 0 ? steps.length(pair.sample) : 0, true);
  float grad_h[2] = {};
  float grad_cell[2] = {};
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    if (c >= place.count) continue;
    grad_h[c] = load_if_present(in.grad_h_n, pair.state(steps) + c);
    grad_cell[c] = load_if_present(in.grad_c_n, pair.state(steps) + c);
  }
  SavedCells<T, 2> saved;  // of the step, on its way since the one before
  const auto load = [&](Packed<T, 2>& packed, const T* from) { load_pair(packed, from, place.count, aligned); };
  const auto fetch = [&](int64_t row, int step) {
    const int64_t state = row * state_size;
    if (counted(step)) saved.fetch(in, state + pair.unit, state * 3 + pair.unit, load);
  };
  fetch(place.row, 0);
  // Step number `time` has but the sums of the one before: the gradient of h_0.
  for (int step = 0; step <= steps.time; ++step) {
    CellSlopes<float> slopes[2];
    saved.unpack_slopes(slopes);
    Arrivals& arrived = arrivals[step % 2];
    if (step > 0) {
      for (Mbarrier& half : arrived.halves) half.template wait<true>((step - 1) / 2);
    }
    if (step > 0 && counted(step - 1)) add_sums<Tile>(grad_h, pair, shared + step % 2 * Tile::kSlotBytes);
    if (step == steps.time) break;
    float gradients[3][2];
    compute_gradients<T>(gradients, grad_cell, grad_h, saved.grad_output, slopes, counted(step));
    unsigned char* const operands = shared + 2 * Tile::kSlotBytes + step % 2 * Tile::kOwnBytes;
    if (pair.is_owned) {
      unsigned char* const to = operands + operand_place<Tile>(pair.column, pair.row);
#pragma unroll
      for (int g = 0; g < 3; ++g)
        *reinterpret_cast<Vector<T, 2>*>(to + g * Tile::kOperandBytes) = as_operands<T, 2>(gradients[g]);
    }
    fetch(place.row + place.step_rows, step + 1);
    __syncthreads();
    if (threadIdx.x == 0 && step > 0) arrived.expect<Tile>();
#pragma unroll
    for (int tile = 0; tile < Tile::kTiles; ++tile) {
      float sums[Tile::kM][1][4] = {};
      multiply_sources<Tile>(sums, weights, [&](int source) {
        return shared_address(operands) + source * Tile::kOperandBytes + tile * (Tile::kTileSamples * kChunkBytes);
      });
      const int next = (step + 1) % 2;
      send_sums<Tile>(sums, part + next * Tile::kSlotBytes, tile, arrivals[next]);
    }
#pragma unroll
    for (int g = 0; g < 3; ++g) {
      T* const to = in.grad_gates + (place.row * 3 + g) * state_size + pair.unit;
      store_pair(to, rounded<T, 2>(gradients[g]).values, place.count, aligned);
    }
    place.row += place.step_rows;
  }
  store_pair(in.grad_h_0 + pair.state(steps), rounded<T, 2>(grad_h).values, place.count, false);
  store_pair(in.grad_c_0 + pair.state(steps), rounded<T, 2>(grad_cell).values, place.count, false);
}

#endif

template <class Tile, class Arguments>
__global__ void __launch_bounds__(Tile::kThreads, 1) lltm_sequence_tensor_cluster_kernel(Arguments in, bool aligned) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(kTileAlignment) unsigned char shared[];
  __shared__ Arrivals arrivals[2];
  if (threadIdx.x == 0) {
    for (Arrivals& each : arrivals) each.initialize();
    Mbarrier::publish();
    for (Arrivals& each : arrivals) each.template expect<Tile>();
  }
  const ClusterWeights<Tile> weights(
      shared, [&](int m, int row, int k) { return weight_of_warp<Tile>(in.steps, in.weights, m, row, k); });
  // Before others store where the weights were, and count on the mbarriers.
  sync_cluster();
  if constexpr (Tile::kIsForward) {
    run_forward<Tile>(in, aligned, weights, shared, arrivals);
  } else {
    run_backward<Tile>(in, aligned, weights, shared, arrivals);
  }
  // No block may end while others send to it.
  arrive_at_cluster();
  wait_for_cluster();
#endif
}

// ---- how it is launched ----

constexpr int kMaxState = 512;

// How many blocks hold the weights: half of them for a state of half the size.
inline int cluster_blocks(ScalarType dtype, const SequenceSizes& sizes) {
  const int most = dtype == ScalarType::TF32 ? 16 : 8;
  return sizes.state_size <= kMaxState / 2 ? most / 2 : most;
}

template <class Tile>
using ClusterArguments =
    std::conditional_t<Tile::kIsForward, SequenceForward<typename Tile::T>, SequenceBackward<typename Tile::T>>;

template <class Tile>
constexpr auto kClusterKernel = &lltm_sequence_tensor_cluster_kernel<Tile, ClusterArguments<Tile>>;

// Calls function(tile). Clusters that do not fit onto the GPU wait for others to end. In 16-bit types those of eight
// samples are still faster than fewer of sixteen. In TF32 it is the other way round where the few do not all run at the
// same time.
template <Pass kPass, class Function>
auto with_cluster_tile(const Context& context, ScalarType dtype, const SequenceSizes& sizes, const Function& function) {
  const int blocks = cluster_blocks(dtype, sizes);
  const auto with_16_bits = [&](auto scalar) {
    using T = decltype(scalar);
    return blocks == 4 ? function(TensorClusterTile<T, kPass, 4, 8>{}) : function(TensorClusterTile<T, kPass, 8, 8>{});
  };
  const auto with_tf32 = [&](auto of_tile) {
    using Few = TensorClusterTile<float, kPass, of_tile, 8>;
    const bool is_few = sizes.batch <= Few::kSamples * int64_t{clusters_at_once<Few, kClusterKernel<Few>>(context)};
    return is_few ? function(Few{}) : function(TensorClusterTile<float, kPass, of_tile, 16>{});
  };
  switch (dtype) {
    case ScalarType::BFloat16:
      return with_16_bits(__nv_bfloat16{});
    case ScalarType::Half:
      return with_16_bits(__half{});
    default:
      if (blocks == 8) return with_tf32(std::integral_constant<int, 8>{});
      return with_tf32(std::integral_constant<int, 16>{});
  }
}

bool is_for_tensor_clusters(const Context& context, ScalarType dtype, const SequenceSizes& sizes, bool backward) {
  if (dtype == ScalarType::Double || dtype == ScalarType::Float || !has_hopper_tensor_cores() ||
      sizes.state_size > kMaxState || sizes.batch > 8 * kMostClusters) {
    return false;
  }
  const auto fits = [&](auto tile) {
    using Tile = decltype(tile);
    return clusters_at_once<Tile, kClusterKernel<Tile>>(context) > 0;
  };
  return backward ? with_cluster_tile<Pass::kBackward>(context, dtype, sizes, fits)
                  : with_cluster_tile<Pass::kForward>(context, dtype, sizes, fits);
}

template <Pass kPass, class In>
Error launch_cluster_pass(ScalarType dtype, const In& in, bool aligned, cudaStream_t stream) {
  return with_cluster_tile<kPass>(Context(stream), dtype, in.sizes, [&](auto tile) -> Error {
    using Tile = decltype(tile);
    return launch_in_clusters<Tile, kClusterKernel<Tile>>(in.sizes.batch, stream, ClusterArguments<Tile>(in), aligned);
  });
}

Error launch_tensor_clusters(ScalarType dtype, const SequenceArguments& in, cudaStream_t stream) {
  const bool aligned = pairs_are_aligned(in.sizes, {in.products, in.gates, in.cells, in.output});
  return launch_cluster_pass<Pass::kForward>(dtype, in, aligned, stream);
}

Error launch_tensor_clusters(ScalarType dtype, const SequenceBackwardArguments& in, cudaStream_t stream) {
  const bool aligned = pairs_are_aligned(in.sizes, {in.grad_output, in.gates, in.cells, in.grad_gates});
  return launch_cluster_pass<Pass::kBackward>(dtype, in, aligned, stream);
}

}  // namespace extops::cuda
