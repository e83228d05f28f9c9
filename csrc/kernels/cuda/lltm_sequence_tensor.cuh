// What the kernels of whole sequences on tensor cores share: the weights in registers, the cells of a thread, and how
// these come from memory and go there.
#pragma once

#include <type_traits>

#include "lltm_sequence.cuh"
#include "tensor_cores.cuh"

namespace extops::cuda {

// How operands of tensor cores are cut up along K.
template <class T>
struct Operand {
  static constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));            // elements in a register
  static constexpr int kStepK = 8 * kPerWord;                                 // of an instruction
  static constexpr int kOfChunk = kChunkBytes / static_cast<int>(sizeof(T));  // elements
};

inline bool pairs_are_aligned(const SequenceSizes& sizes, std::initializer_list<const void*> tensors) {
  return sizes.state_size % 2 == 0 && start_at_chunks(tensors);
}

#if defined(EXTOPS_TENSOR_CORES)

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x) % 32; }
__device__ inline int warp_id() { return static_cast<int>(threadIdx.x) / 32; }

// The unit of a row of the 16 that an instruction computes: a lane has rows l / 4 and l / 4 + 8, so two neighbours.
__device__ inline int unit_of_row(int row) { return row % 8 * 2 + row / 8; }

// ---- products ----

// The weights of a warp in its registers, as the first operands of `kSteps` instructions along K, for `kTiles` tiles of
// 16 rows each. The sums of a tile are in `kChains` parts, each of consecutive steps: an instruction waits for the one
// before it that adds to the same registers.
template <class T, int kSteps, int kTiles, int kChains, int kThreads, int kStaged>
class TensorWeights {
 public:
  // `weight`(tile, row, k) is one of them. By way of shared memory, `kStaged` operands at a time, since a loop cannot
  // index registers, and unrolled the loads are thousands of instructions.
  template <class Weight>
  __device__ TensorWeights(unsigned char* staging, const Weight& weight) {
    constexpr int kPerWord = Operand<T>::kPerWord;
    static_assert(kSteps * kTiles % kStaged == 0);
    uint4* const staged = reinterpret_cast<uint4*>(staging) + threadIdx.x;
#pragma unroll
    for (int first = 0; first < kSteps * kTiles; first += kStaged) {
#pragma unroll 4
      for (int i = 0; i < kStaged; ++i) {
        const int step = (first + i) / kTiles;
        uint32_t words[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          T values[kPerWord];
#pragma unroll
          for (int j = 0; j < kPerWord; ++j) {
            const int k = step * Operand<T>::kStepK + (r / 2 * 4 + lane_id() % 4) * kPerWord + j;
            values[j] = weight((first + i) % kTiles, r % 2 * 8 + lane_id() / 4, k);
            if constexpr (std::is_same_v<T, float>) values[j] = round_to_tf32(values[j]);
          }
          memcpy(&words[r], values, 4);
        }
        staged[i * kThreads] = {words[0], words[1], words[2], words[3]};
      }
#pragma unroll
      for (int i = 0; i < kStaged; ++i) {
        const uint4 words = staged[i * kThreads];
        uint32_t (&to)[4] = weights_[(first + i) / kTiles][(first + i) % kTiles];
        to[0] = words.x;
        to[1] = words.y;
        to[2] = words.z;
        to[3] = words.w;
        // Here, not where they are used.
#pragma unroll
        for (int r = 0; r < 4; ++r) asm volatile("" : "+r"(to[r]));
      }
    }
  }

  // Adds the products with eight columns. `operands`(step) is where this lane's row of the operands of a step and the
  // next one begins, as `load_matrices` takes it. Within a chain it is called in the order of the steps.
  template <class Operands>
  __device__ void multiply(float (&sums)[kTiles][kChains][4], const Operands& operands) const {
    constexpr int kChainSteps = kSteps / kChains;
    static_assert(kSteps % kChains == 0 && kChainSteps % 2 == 0);
#pragma unroll
    for (int i = 0; i < kChainSteps; i += 2) {
      uint32_t values[kChains][4];
#pragma unroll
      for (int chain = 0; chain < kChains; ++chain) load_matrices(values[chain], operands(chain * kChainSteps + i));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int chain = 0; chain < kChains; ++chain) {
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            const uint32_t (&weights)[4] = weights_[chain * kChainSteps + i + j][tile];
            mma(sums[tile][chain], weights, values[chain][2 * j], values[chain][2 * j + 1], T{});
          }
        }
      }
    }
  }

 private:
  uint32_t weights_[kSteps][kTiles][4];
};

// Of the weights of a state, that of unit `of_gate` of a gate for unit `of_h` of h.
template <class T>
__device__ T recurrent_weight(const Steps& steps, const T* weights, int gate, int of_gate, int of_h) {
  T zero;
  store(zero, 0);
  if (of_gate >= steps.state_size || of_h >= steps.state_size) return zero;
  return weights[(int64_t{gate} * steps.state_size + of_gate) * steps.weights_stride + of_h];
}

// Neighbours as operands.
template <class T, int kCount>
__device__ Vector<T, kCount> as_operands(const float (&values)[kCount]) {
  Vector<T, kCount> operands;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (std::is_same_v<T, float>) {
      operands.values[i] = round_to_tf32(values[i]);
    } else {
      store(operands.values[i], values[i]);
    }
  }
  return operands;
}

// ---- the tensors ----

// Where a thread's cells lie, up to two neighbouring units of a sample: from the first step of the computation to the
// last.
struct CellPlace {
  int64_t row;        // of [time, batch]
  int64_t step_rows;  // from one step to the next
  int count;          // of the cells that exist

  __device__ CellPlace(const Steps& steps, int sample, int unit, int cells, bool backward) {
    const bool descends = steps.reverse != backward;
    row = steps.row(descends ? steps.time - 1 : 0, sample);
    step_rows = descends ? -steps.time_stride : steps.time_stride;
    count = sample < steps.batch ? max(min(steps.state_size - unit, cells), 0) : 0;
  }
};

// One value or two neighbours, as they come from memory: to take them apart is to wait for them.
template <class V, int kCount>
using Packed = std::conditional_t<sizeof(V) * kCount <= 4, uint32_t, uint2>;

template <class V, int kCount>
__device__ void unpack(V (&values)[kCount], const Packed<V, kCount>& packed) {
  memcpy(values, &packed, sizeof(values));
}

// An instruction that is executed where operand number `condition` is not zero. The compiler would make a branch, and
// copy what that loads, which is to wait for it.
#define EXTOPS_IF(condition, instruction) \
  "{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %" condition ", 0;\n@wanted " instruction ";\n}"

template <class V, int kCount>
__device__ void load_if(bool condition, Packed<V, kCount>& packed, const V* from) {
  const uint32_t wanted = condition;
  if constexpr (sizeof(V) * kCount == 2) {
    asm volatile(EXTOPS_IF("1", "ld.global.u16 %0, [%2]") : "+r"(packed) : "r"(wanted), "l"(from));
  } else if constexpr (sizeof(V) * kCount == 4) {
    asm volatile(EXTOPS_IF("1", "ld.global.u32 %0, [%2]") : "+r"(packed) : "r"(wanted), "l"(from));
  } else {
    asm volatile(EXTOPS_IF("2", "ld.global.v2.u32 {%0, %1}, [%3]")
                 : "+r"(packed.x), "+r"(packed.y)
                 : "r"(wanted), "l"(from));
  }
}

__device__ inline void prefetch_if(bool condition, const void* from) {
  asm volatile(EXTOPS_IF("0", "prefetch.global.L2 [%1]")::"r"(static_cast<uint32_t>(condition)), "l"(from));
}

template <class V, int kCount>
__device__ void store_if(bool condition, V* to, const V (&values)[kCount]) {
  const uint32_t wanted = condition;
  Packed<V, kCount> packed{};
  memcpy(&packed, values, sizeof(values));
  if constexpr (sizeof(values) == 2) {
    asm volatile(EXTOPS_IF("0", "st.global.u16 [%1], %2")::"r"(wanted), "l"(to), "r"(packed) : "memory");
  } else if constexpr (sizeof(values) == 4) {
    asm volatile(EXTOPS_IF("0", "st.global.u32 [%1], %2")::"r"(wanted), "l"(to), "r"(packed) : "memory");
  } else {
    asm volatile(EXTOPS_IF("0", "st.global.v2.u32 [%1], {%2, %3}")::"r"(wanted), "l"(to), "r"(packed.x), "r"(packed.y)
                 : "memory");
  }
}
#undef EXTOPS_IF

// Two neighbours in memory, of which `count` exist: by one access where `aligned` tells that all pairs allow it.
template <class V>
__device__ void load_pair(Packed<V, 2>& packed, const V* from, int count, bool aligned) {
  if (aligned) {
    if (count > 0) packed = *reinterpret_cast<const Packed<V, 2>*>(from);
  } else {
    V values[2] = {};
    if (count > 0) values[0] = from[0];
    if (count > 1) values[1] = from[1];
    memcpy(&packed, values, sizeof(packed));
  }
}

template <class V>
__device__ void store_pair(V* to, const V (&values)[2], int count, bool aligned) {
  if (aligned) {
    Packed<V, 2> packed;
    memcpy(&packed, values, sizeof(packed));
    if (count > 0) *reinterpret_cast<Packed<V, 2>*>(to) = packed;
  } else {
    if (count > 0) to[0] = values[0];
    if (count > 1) to[1] = values[1];
  }
}

template <class T, int kCount>
__device__ Vector<T, kCount> rounded(const float (&values)[kCount]) {
  Vector<T, kCount> result;
#pragma unroll
  for (int i = 0; i < kCount; ++i) store(result.values[i], values[i]);
  return result;
}

// ---- the cells ----

// The cells of a step, from the sums of their gates; the old cell state and h become the new ones where the step
// counts.
template <class T, int kCount>
__device__ void compute_cells(
    T (&gates)[3][kCount], T (&new_cells)[kCount], T (&output)[kCount], float (&h)[kCount], float (&cells)[kCount],
    const float (&sums)[3][kCount], bool counts) {
#pragma unroll
  for (int c = 0; c < kCount; ++c) {
#pragma unroll
    for (int g = 0; g < 3; ++g) store(gates[g][c], counts ? sums[g][c] : 0.f);
    const CellState<float> state =
        cell_forward<float, kFastMath>(load(gates[0][c]), load(gates[1][c]), load(gates[2][c]), cells[c]);
    store(output[c], counts ? state.h : 0.f);
    store(new_cells[c], counts ? state.cell : 0.f);
    // Before a row's first step it has its first state.
    if (counts) {
      h[c] = load(output[c]);
      cells[c] = state.cell;
    }
  }
}

// What the gradients of a thread's cells need of the forward, as it comes from memory.
template <class T, int kCount>
struct SavedCells {
  Packed<T, kCount> gates[3] = {};
  Packed<T, kCount> new_cells{};
  Packed<T, kCount> grad_output{};

  // `load`(packed, from) loads what lies at `from`: of tensors of one value for each cell at `state`, of those of three
  // at `of_gates`.
  template <class Load>
  __device__ void fetch(const SequenceBackward<T>& in, int64_t state, int64_t of_gates, const Load& load) {
#pragma unroll
    for (int g = 0; g < 3; ++g) load(gates[g], in.gates + of_gates + g * in.steps.state_size);
    load(new_cells, in.cells + state);
    if (in.grad_output != nullptr) load(grad_output, in.grad_output + state);
  }

  __device__ void unpack_slopes(CellSlopes<float> (&slopes)[kCount]) const {
    T of_gates[3][kCount];
    T cells[kCount];
#pragma unroll
    for (int g = 0; g < 3; ++g) unpack<T, kCount>(of_gates[g], gates[g]);
    unpack<T, kCount>(cells, new_cells);
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      const float of_cell[3] = {load(of_gates[0][c]), load(of_gates[1][c]), load(of_gates[2][c])};
      slopes[c] = cell_slopes<kFastMath>(of_cell, float{load(cells[c])});
    }
  }
};

// The gradients of the gates of a step, from that of h by later steps; that of the cell state becomes that of the old
// one.
template <class T, int kCount>
__device__ void compute_gradients(
    float (&gradients)[3][kCount], float (&grad_cell)[kCount], const float (&grad_h)[kCount],
    const Packed<T, kCount>& grad_output, const CellSlopes<float> (&slopes)[kCount], bool counts) {
  T of_output[kCount];
  unpack<T, kCount>(of_output, grad_output);
#pragma unroll
  for (int c = 0; c < kCount; ++c) {
    const float upstream = grad_h[c] + load(of_output[c]);
    if (counts) grad_cell[c] += upstream * slopes[c].cell;
    gradients[0][c] = counts ? grad_cell[c] * slopes[c].input_gate : 0.f;
    gradients[1][c] = counts ? upstream * slopes[c].output_gate : 0.f;
    gradients[2][c] = counts ? grad_cell[c] * slopes[c].candidate : 0.f;
  }
}

#endif

}  // namespace extops::cuda
