// The gradients of weights and biases in TF32, by the tensor cores of Hopper GPUs: as weights.cuh. wgmma needs K-major
// operands in TF32, but K is the batch here: so tiles are transposed on their way to shared memory.
#pragma once

#include "weights_gemm.cuh"

namespace extops::cuda::step {

template <int kRows_, int kColumns_>
struct Tf32WeightsTile {
  static constexpr int kRows = kRows_;  // of the batch, at a time
  static constexpr int kColumns = kColumns_;
  static constexpr int kAccumulators = kColumns / 128;
  static constexpr int kTiles = kRows / kTileColumns<float>;  // side by side, of 128 bytes of the batch
  static constexpr int kGradientBytes = kTiles * kBlockRows * kTileRowBytes;
  static constexpr int kSharedBytes = kTileAlignment + kGradientBytes + kTiles * kColumns * kTileRowBytes;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kChunk = kChunkBytes / static_cast<int>(sizeof(float));
constexpr int kGemmColumns = 128;  // of one GEMM

struct Chunk {
  uint32_t registers[kChunk] = {};

  // Not by way of the read-only cache: the kernel before may write while this one has begun.
  __device__ void load(const void* from) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
                 : "l"(from));
  }

  // To the bits that the tensor cores use.
  __device__ void round() {
#pragma unroll
    for (uint32_t& number : registers) {
      const float value = __uint_as_float(number);
      if (isnan(value)) {
        number |= 0x00400000;  // else a NaN with its payload in the dropped bits would become an infinity
      } else {
        asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(number) : "f"(value));
      }
    }
  }
};

// Some rows of a matrix from one column on; `rows` may be negative for none.
struct Rows {
  const float* first;
  int64_t stride;
  int rows;
};

// The row of a transposed tile that holds a column of the matrix. A lane of an accumulator has the columns 2 * q and
// 2 * q + 1 of every eight: in this order its results are neighbours in memory, which it stores by chunks.
__device__ inline int transposed_row(int q, int i) { return i / 2 * 8 + q * 2 + i % 2; }

// Copies `columns` columns of a matrix of kRows rows to tiles in shared memory, as their rows. A lane takes blocks of
// kChunk by kChunk and transposes them in registers. `matrix(row, column)` gives the Rows from there.
template <int kRows, class Matrix>
__device__ void copy_transposed(uint32_t to, int columns, const Matrix& matrix) {
  constexpr int kGroup = 4 * kChunk;  // columns that transposed_row reorders
  constexpr int kWarpBlocks = 4;      // that a warp has below each other; it has 32 columns
  constexpr int kDown = kRows / kChunk / kWarpBlocks;
  constexpr int kAtOnce = 2;
  constexpr int kWarps = kWeightsThreads / 32;
  const int lane = threadIdx.x % 32;
  const int q = lane % 4;
  const int group = lane / 8 % 2 * kGroup;
  const int block_in_warp = lane / 4 % 2 + lane / 16 * 2;
  const int items = columns / 32 * kDown;
  for (int first = threadIdx.x / 32; first < items; first += kAtOnce * kWarps) {
    Chunk chunks[kAtOnce][kChunk];
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a) {
      const int item = first + a * kWarps;
      const int row = (item % kDown * kWarpBlocks + block_in_warp) * kChunk;
      const Rows from = matrix(row, item / kDown * 32 + group + q * kChunk);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        if (item < items && i < from.rows) chunks[a][i].load(from.first + i * from.stride);
      }
    }
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a) {
      const int item = first + a * kWarps;
      if (item >= items) break;
#pragma unroll
      for (Chunk& chunk : chunks[a]) chunk.round();
      const int block = item % kDown * kWarpBlocks + block_in_warp;
      const uint32_t tile = to + block / 8 * columns * kTileRowBytes;
#pragma unroll
      for (int j = 0; j < kChunk; ++j) {
        Chunk transposed;
#pragma unroll
        for (int i = 0; i < kChunk; ++i) transposed.registers[i] = chunks[a][i].registers[j];
        const int row = item / kDown * 32 + group + transposed_row(q, j);
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(
                         tile + row * kTileRowBytes + (block % 8 ^ row % 8) * kChunkBytes),
                     "r"(transposed.registers[0]), "r"(transposed.registers[1]), "r"(transposed.registers[2]),
                     "r"(transposed.registers[3])
                     : "memory");
      }
    }
  }
}

// Epilogue: writes a warpgroup's 64 rows of the gradient for 128 columns, from `first_column` on.
__device__ inline void store_accumulator(
    const WeightsGemm<float>& in, int first_row, int first_column, Accumulator<kGemmColumns>& sums) {
  constexpr int kGroup = 4 * kChunk;
  const int lane = threadIdx.x % 32;
  const int column = first_column + lane % 4 * kChunk;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // The reverse of transposed_row, within the warpgroup.
    const int place = threadIdx.x % kWarpgroup / 32 * 16 + half * 8 + lane / 4;
    const int row = first_row + place / kGroup * kGroup + place % 8 / 2 * kChunk + place % kGroup / 8 * 2 + place % 2;
    if (row >= in.rows) continue;
    float* const to = in.grad_weights + row * in.grad_weights_stride + column;
#pragma unroll
    for (int group = 0; group < kGemmColumns / kGroup; ++group) {
      const int j = group * kGroup / 8;
      if (column + group * kGroup < in.columns) {
        *reinterpret_cast<float4*>(to + group * kGroup) = {
            sums.at(j, half, 0), sums.at(j, half, 1), sums.at(j + 1, half, 0), sums.at(j + 1, half, 1)};
      }
    }
  }
}

// Adds up a column of the gradients, not from shared memory, where it is rounded. It loads first and adds later, so
// that the loads overlap the GEMM.
class BiasSum {
 public:
  __device__ BiasSum(const BiasColumn& bias, const WeightsGemm<float>& in, int row, int batch)
      : bias_(bias), rows_(bias.exists ? batch : 0), stride_(in.rows), from_(in.gradients + row) {
    load_rows(0);
  }

  __device__ float add() {
    float sum = 0;
    for (int first = kLoads * bias_.parts;; first += kLoads * bias_.parts) {
#pragma unroll
      for (float value : loaded_) sum += value;
      if (first >= rows_) return sum;
      load_rows(first);
    }
  }

 private:
  static constexpr int kLoads = 8;

  __device__ void load_rows(int first) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int row = first + bias_.part + i * bias_.parts;
      loaded_[i] = row < rows_ ? from_[row * stride_] : 0;
    }
  }

  BiasColumn bias_;
  int rows_;
  int64_t stride_;
  const float* from_;
  float loaded_[kLoads];
};

#endif

// Starts while the pointwise kernel that fills the gradients runs.
template <class Tile>
__global__ void __launch_bounds__(kWeightsThreads) tf32_weights_kernel(WeightsBackward<float> in) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(kTileAlignment) unsigned char shared[];
  __shared__ float bias_sums[kWeightsThreads];
  const WeightsBlock block(in, Tile::kColumns);
  const WeightsGemm<float> gemm = block.of(in);
  const uint32_t gradients = shared_address(shared);
  const uint32_t columns = gradients + Tile::kGradientBytes;
  const auto load = [&](uint32_t to, const float* matrix, int width, int first_column, int count, int first_row) {
    copy_transposed<Tile::kRows>(to, count, [&](int row, int column) -> Rows {
      const int64_t stride = width;
      const int place = first_column + column;
      return {matrix + (first_row + row) * stride + place, stride, place < width ? in.batch - first_row - row : 0};
    });
  };
  const auto load_columns = [&](int first_row) {
    load(columns, gemm.x, gemm.columns, block.first_column, Tile::kColumns, first_row);
  };
  const auto load_gradients = [&](int first_row) {
    load(gradients, gemm.gradients, gemm.rows, block.first_row(), kBlockRows, first_row);
  };
  load_columns(0);
  wait_for_previous_kernel();
  const BiasColumn bias(gemm, block);
  BiasSum bias_sum(bias, gemm, block.first_row() + bias.gradient, in.batch);
  load_gradients(0);
  fence_proxy_async();
  bias_sums[threadIdx.x] = bias_sum.add();
  __syncthreads();
  const int warpgroup = threadIdx.x / kWarpgroup;
  Accumulator<kGemmColumns> sums[Tile::kAccumulators];
  for (int first_row = 0;;) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Tile::kAccumulators; ++i) {
#pragma unroll
      for (int tile = 0; tile < Tile::kTiles; ++tile) {
        multiply_tiles<float>(
            sums[i], gradients + (tile * kBlockRows + warpgroup * kWarpgroupRows) * kTileRowBytes,
            columns + (tile * Tile::kColumns + i * kGemmColumns) * kTileRowBytes, first_row > 0 || tile > 0);
      }
    }
    wgmma_commit();
#pragma unroll
    for (Accumulator<kGemmColumns>& each : sums) wgmma_wait<0>(each);
    first_row += Tile::kRows;
    if (first_row >= in.batch) break;
    __syncthreads();
    load_columns(first_row);
    load_gradients(first_row);
    fence_proxy_async();
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < Tile::kAccumulators; ++i) {
    store_accumulator(
        gemm, block.first_row() + warpgroup * kWarpgroupRows, block.first_column + i * kGemmColumns, sums[i]);
  }
  bias.finish(bias_sums, block, gemm.grad_bias);
#endif
}

// ---- how it is launched ----

template <class Tile>
Error launch_tf32_weights(const WeightsBackward<float>& in, cudaStream_t stream) {
  constexpr auto kernel = &tf32_weights_kernel<Tile>;
  if (const Error error = allow_shared_memory<kernel>(Tile::kSharedBytes)) return error;
  launch(kernel, {grid_of(in, Tile::kColumns), kWeightsThreads, Tile::kSharedBytes}, stream, in);
  return launch_error();
}

template <>
Error launch_weights_backward(const WeightsBackward<float>& in, cudaStream_t stream) {
  // The more columns a block has, the less often the gradients are read: as many as leave work for every SM.
  const bool is_wide = fills_the_device(in, 256);
  if (in.batch <= 64) {
    return is_wide ? launch_tf32_weights<Tf32WeightsTile<64, 256>>(in, stream)
                   : launch_tf32_weights<Tf32WeightsTile<64, 128>>(in, stream);
  }
  return is_wide ? launch_tf32_weights<Tf32WeightsTile<128, 256>>(in, stream)
                 : launch_tf32_weights<Tf32WeightsTile<128, 128>>(in, stream);
}

}  // namespace extops::cuda::step
