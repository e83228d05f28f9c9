// What the kernels of whole sequences on tensor cores share: the weights of a warp in its registers, and the GEMM.
#pragma once

#include <type_traits>

#include "../common/tensor_cores.cuh"
#include "cells.cuh"
#include "choice.cuh"

namespace extops::cuda {

// How operands of tensor cores are cut up along K.
template <class T>
struct Operand {
  static constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));            // elements in a register
  static constexpr int kStepK = 8 * kPerWord;                                 // of an instruction
  static constexpr int kOfChunk = kChunkBytes / static_cast<int>(sizeof(T));  // elements
};

constexpr int greatest_divisor(int number, int most) {
  while (number % most != 0) --most;
  return most;
}

// Whether pairs of cells can be loaded and stored by one access.
inline bool pairs_are_aligned(const SequenceArguments& in) {
  return in.sizes.state_size % 2 == 0 && start_at_chunks({in.input_gates, in.gates, in.cells, in.output});
}
inline bool pairs_are_aligned(const SequenceBackwardArguments& in) {
  return in.sizes.state_size % 2 == 0 && start_at_chunks({in.grad_output, in.gates, in.cells, in.grad_gates});
}

// Calls function(T{}) with the type of the operands.
template <class Function>
auto with_operand_type(ScalarType dtype, const Function& function) {
  if (dtype == ScalarType::BFloat16) return function(__nv_bfloat16{});
  if (dtype == ScalarType::Half) return function(__half{});
  return function(float{});
}

#if defined(EXTOPS_TENSOR_CORES)

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x) % 32; }
__device__ inline int warp_id() { return static_cast<int>(threadIdx.x) / 32; }

// The unit of a row of the 16 that an instruction computes: a lane has rows l / 4 and l / 4 + 8, so two neighbours.
__device__ inline int unit_of_row(int row) { return row % 8 * 2 + row / 8; }

// ---- GEMM ----

// The weights of a warp in its registers, as the first operands of `kSteps` instructions along K, for `kTiles` tiles of
// 16 rows each. The sums of a tile are in `kChains` parts, each of consecutive steps: an instruction waits for the one
// before it that adds to the same registers. The last `kStored` operands do not fit into registers, and stay in shared
// memory.
template <class T, int kSteps, int kTiles, int kChains, int kThreads, int kStaged, int kStored = 0>
class TensorWeights {
 public:
  // `weight`(tile, row, k) is one of them. They pass through shared memory, `kStaged` operands at a time: a loop cannot
  // index registers, and unrolled loads would be thousands of instructions.
  template <class Weight>
  __device__ TensorWeights(unsigned char* staging, unsigned char* stored, const Weight& weight)
      : stored_(reinterpret_cast<uint4*>(stored) + threadIdx.x) {
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
        if (first + i >= kHeld) {
          stored_[(first + i - kHeld) * kThreads] = words;
          continue;
        }
        uint32_t (&to)[4] = weights_[(first + i) / kTiles][(first + i) % kTiles];
        to[0] = words.x;
        to[1] = words.y;
        to[2] = words.z;
        to[3] = words.w;
        // Loads them here; the compiler would do it where they are used.
#pragma unroll
        for (int r = 0; r < 4; ++r) asm volatile("" : "+r"(to[r]));
      }
    }
  }

  // Multiplies by eight columns and adds. `operands`(step) is where this lane's row of the operands of a step and the
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
            const int step = chain * kChainSteps + i + j;
            const int index = step * kTiles + tile;
            uint32_t weights[4];
            if (index < kHeld) {
              memcpy(weights, weights_[step][tile], sizeof(weights));
            } else {
              memcpy(weights, &stored_[(index - kHeld) * kThreads], sizeof(weights));
            }
            mma(sums[tile][chain], weights, values[chain][2 * j], values[chain][2 * j + 1], T{});
          }
        }
      }
    }
  }

 private:
  static constexpr int kHeld = kSteps * kTiles - kStored;

  uint32_t weights_[kSteps][kTiles][4];
  uint4* stored_;
};

// The recurrent weight from unit `of_h` of h to a gate of unit `of_gate`.
template <class T>
__device__ T recurrent_weight(const Steps& steps, const T* weights, int gate, int of_gate, int of_h) {
  T zero;
  store(zero, 0);
  if (of_gate >= steps.state_size || of_h >= steps.state_size) return zero;
  return weights[(int64_t{gate} * steps.state_size + of_gate) * steps.weights_stride + of_h];
}

// Neighbouring values as operands of the tensor cores.
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

#endif

}  // namespace extops::cuda
