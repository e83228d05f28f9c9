// The LLTM cell's backward for the parameters, by the tensor cores of Hopper GPUs: in 16-bit types, and in float32
// where TF32 is allowed. A pointwise kernel fills grad_gates, while blocks of a second one already load their
// columns of X; these then multiply. X = [old_h | input] is never made.
#include "../lltm.h"
#include "hopper.cuh"
#include "lltm_problem.cuh"

// Named, not anonymous: nvcc would put the path of this file into the kernels' names, and no two builds be the same.
namespace extops::cuda {

// A block computes 64 units' three lines of grad_weights, a warpgroup each, for some columns.
constexpr int kBlockUnits = 64;
constexpr int kBlockLines = 3 * kBlockUnits;
constexpr int kGradientThreads = 3 * kWarpgroup;

template <class T, int kRows_, int kColumns_>
struct GradientTile {
  static constexpr int kRows = kRows_;  // of the batch, at most
  static constexpr int kColumns = kColumns_;
  static constexpr int kTiles = kRows / kTileColumns<T>;  // side by side, of 128 bytes of the batch
  static constexpr int kLinesBytes = kTiles * kBlockLines * kTileRowBytes;
  static constexpr int kSharedBytes = kTileAlignment + kLinesBytes + kTiles * kColumns * kTileRowBytes;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kProductColumns = 128;  // of one product

struct Chunk {
  uint32_t registers[4] = {};

  // Not by way of the read-only cache: the kernel before may write while this one has begun.
  __device__ void load(const void* from) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
                 : "l"(from));
  }

  template <class T>
  __device__ T& at(int i) {
    return reinterpret_cast<T*>(registers)[i];
  }

  // To what the tensor cores take of it.
  template <class T>
  __device__ void round() {
    if constexpr (std::is_same_v<T, float>) {
#pragma unroll
      for (uint32_t& number : registers) {
        // A NaN whose payload is in the bits that go would become an infinity.
        if (isnan(__uint_as_float(number)))
          number |= 0x00400000;
        else
          asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(number) : "f"(__uint_as_float(number)));
      }
    }
  }
};

// Some rows of a matrix from one column on; `rows` may be negative for none.
template <class T>
struct Rows {
  const T* first;
  int64_t stride;
  int rows;
};

// Which line of a result has a column of the matrix, or the reverse: such that a lane, which has the columns 2 * q and
// 2 * q + 1 of every eight, gets a chunk of neighbours.
__device__ inline int line_of(int q, int i) { return i / 2 * 8 + q * 2 + i % 2; }

// Copies `lines` columns of a matrix of kRows rows to tiles in shared memory, as their rows. A lane takes blocks of
// kChunk by kChunk and turns them over in registers. `matrix(row, column)` gives the Rows from there.
template <class T, int kRows, class Matrix>
__device__ void copy_transposed(uint32_t to, int lines, const Matrix& matrix) {
  constexpr int kGroup = 4 * kChunk<T>;              // columns in whose order line_of changes something
  constexpr int kWarpBlocks = kGroup == 32 ? 8 : 4;  // that a warp has below each other; it has 32 columns
  constexpr int kDown = kRows / kChunk<T> / kWarpBlocks;
  constexpr int kAtOnce = 8 / kChunk<T>;
  constexpr int kWarps = kGradientThreads / 32;
  const int lane = threadIdx.x % 32;
  const int q = lane % 4;
  const int group = kGroup == 32 ? 0 : lane / 8 % 2 * kGroup;
  const int block_in_warp = lane / 4 % 2 + lane / (kGroup == 32 ? 8 : 16) * 2;
  const int items = lines / 32 * kDown;
  for (int first = threadIdx.x / 32; first < items; first += kAtOnce * kWarps) {
    Chunk chunks[kAtOnce][kChunk<T>];
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a) {
      const int item = first + a * kWarps;
      const int row = (item % kDown * kWarpBlocks + block_in_warp) * kChunk<T>;
      const Rows<T> from = matrix(row, item / kDown * 32 + group + q * kChunk<T>);
#pragma unroll
      for (int i = 0; i < kChunk<T>; ++i) {
        if (item < items && i < from.rows) chunks[a][i].load(from.first + i * from.stride);
      }
    }
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a) {
      const int item = first + a * kWarps;
      if (item >= items) break;
#pragma unroll
      for (Chunk& chunk : chunks[a]) chunk.template round<T>();
      const int block = item % kDown * kWarpBlocks + block_in_warp;
      const uint32_t tile = to + block / 8 * lines * kTileRowBytes;
#pragma unroll
      for (int j = 0; j < kChunk<T>; ++j) {
        Chunk line;
#pragma unroll
        for (int i = 0; i < kChunk<T>; ++i) line.template at<T>(i) = chunks[a][i].template at<T>(j);
        const int row = item / kDown * 32 + group + line_of(q, j);
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(
                         tile + row * kTileRowBytes + (block % 8 ^ row % 8) * kChunkBytes),
                     "r"(line.registers[0]), "r"(line.registers[1]), "r"(line.registers[2]), "r"(line.registers[3])
                     : "memory");
      }
    }
  }
}

// The sum of the batch's gradients for some of the block's lines, which the blocks of all columns share. Loads first,
// adds later.
template <class T>
class BiasSums {
 public:
  __device__ BiasSums(const CellBackward<T>& in, int first_unit)
      : lines_((kBlockLines + gridDim.x - 1) / gridDim.x),
        parts_(kGradientThreads / lines_),
        part_(threadIdx.x / lines_),
        line_(blockIdx.x * lines_ + threadIdx.x % lines_) {
    const int unit = first_unit + line_ % kBlockUnits;
    exists_ = line_ < kBlockLines && part_ < parts_ && unit < in.sizes.state_size;
    place_ = int64_t{line_ / kBlockUnits} * in.sizes.state_size + unit;
    stride_ = int64_t{3} * in.sizes.state_size;
    rows_ = exists_ ? in.sizes.batch : 0;
    from_ = in.grad_gates + place_;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int row = part_ + i * parts_;
      loaded_[i] = row < rows_ ? load(from_[row * stride_]) : 0;
    }
  }

  __device__ void add(float* shared) {
    float sum = 0;
#pragma unroll
    for (float value : loaded_) sum += value;
    for (int row = part_ + kLoads * parts_; row < rows_; row += parts_) sum += load(from_[row * stride_]);
    shared[threadIdx.x] = sum;
  }

  // After a barrier.
  __device__ void finish(const float* shared, T* grad_bias) const {
    if (!exists_ || part_ != 0) return;
    float sum = 0;
    for (int part = 0; part < parts_; ++part) sum += shared[threadIdx.x + part * lines_];
    store(grad_bias[place_], sum);
  }

 private:
  static constexpr int kLoads = 8;
  int lines_;
  int parts_;
  int part_;
  int line_;
  bool exists_;
  int rows_;
  int64_t place_;
  int64_t stride_;
  const T* from_;
  float loaded_[kLoads];
};

// Writes a warpgroup's 64 lines for 128 columns, from `first_column` on.
template <class T>
__device__ void store_lines(const CellBackward<T>& in, int gate, int first_unit, int first_column, Accumulator& sums) {
  constexpr int kGroup = 4 * kChunk<T>;
  const Sizes sizes = in.sizes;
  const int lane = threadIdx.x % 32;
  const int column = first_column + lane % 4 * kChunk<T>;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // The reverse of line_of, within the warpgroup.
    const int row = threadIdx.x % kWarpgroup / 32 * 16 + half * 8 + lane / 4;
    const int unit = first_unit + row / kGroup * kGroup + row % 8 / 2 * kChunk<T> + row % kGroup / 8 * 2 + row % 2;
    if (unit >= sizes.state_size) continue;
    T* const to = in.grad_weights + (int64_t{gate} * sizes.state_size + unit) * sizes.columns() + column;
#pragma unroll
    for (int group = 0; group < kProductColumns / kGroup; ++group) {
      Vector<T, kChunk<T>> chunk;
#pragma unroll
      for (int i = 0; i < kChunk<T>; ++i) store(chunk.values[i], sums.at(group * kGroup / 8 + i / 2, half, i % 2));
      if (column + group * kGroup < sizes.columns()) {
        *reinterpret_cast<Vector<T, kChunk<T>>*>(to + group * kGroup) = chunk;
      }
    }
  }
}

#endif

// Starts while the pointwise kernel that fills grad_gates runs.
template <class T, class Tile>
__global__ void __launch_bounds__(kGradientThreads) lltm_tensor_backward_kernel(CellBackward<T> in) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(kTileAlignment) unsigned char shared[];
  __shared__ float bias_sums[kGradientThreads];
  const Sizes sizes = in.sizes;
  const int state_size = sizes.state_size;
  const int first_unit = blockIdx.y * kBlockUnits;
  const int first_column = blockIdx.x * Tile::kColumns;
  const uint32_t lines = shared_address(shared);
  const uint32_t columns = lines + Tile::kLinesBytes;
  copy_transposed<T, Tile::kRows>(columns, Tile::kColumns, [&](int row, int column) -> Rows<T> {
    const int k = first_column + column;
    const bool from_h = k < state_size;
    const int64_t stride = from_h ? state_size : sizes.input_features;
    const T* first = from_h ? in.old_h + k : in.input + (k - state_size);
    return {first + row * stride, stride, k < sizes.columns() ? sizes.batch - row : 0};
  });
  wait_for_previous_kernel();
  BiasSums<T> bias(in, first_unit);
  copy_transposed<T, Tile::kRows>(lines, kBlockLines, [&](int row, int line) -> Rows<T> {
    const int unit = first_unit + line % kBlockUnits;
    const T* first = in.grad_gates + (int64_t{row} * 3 + line / kBlockUnits) * state_size + unit;
    return {first, int64_t{3} * state_size, unit < state_size ? sizes.batch - row : 0};
  });
  publish_to_async_units();
  bias.add(bias_sums);
  __syncthreads();
  const int gate = threadIdx.x / kWarpgroup;
#pragma unroll
  for (int part = 0; part < Tile::kColumns; part += kProductColumns) {
    Accumulator sums;
    begin_products();
#pragma unroll
    for (int tile = 0; tile < Tile::kTiles; ++tile) {
      add_tile_product<T>(
          sums, lines + (tile * kBlockLines + gate * kBlockUnits) * kTileRowBytes,
          columns + (tile * Tile::kColumns + part) * kTileRowBytes, tile > 0);
    }
    commit_products();
    wait_for_products<0>(sums);
    store_lines(in, gate, first_unit, first_column + part, sums);
  }
  bias.finish(bias_sums, in.grad_bias);
#endif
}

// ---- how it is launched ----

template <class T>
constexpr ScalarType kDtype = std::is_same_v<T, float>    ? ScalarType::Float
                              : std::is_same_v<T, __half> ? ScalarType::Half
                                                          : ScalarType::BFloat16;

template <class T, class Tile>
Error launch_tile(const CellBackward<T>& in, cudaStream_t stream) {
  constexpr auto kernel = &lltm_tensor_backward_kernel<T, Tile>;
  if (const Error error = allow_shared_memory<kernel>(Tile::kSharedBytes, "lltm_backward")) return error;
  const dim3 grid(ceil_div(in.sizes.columns(), Tile::kColumns), ceil_div(in.sizes.state_size, kBlockUnits));
  launch(kernel, {grid, kGradientThreads, Tile::kSharedBytes}, stream, in);
  return launch_error("lltm_backward");
}

template <class T>
Error launch_on_tensor_cores(const CellBackward<T>& in, cudaStream_t stream) {
  const Sizes sizes = in.sizes;
  if (const Error error = extops_lltm_cell_backward_cuda(
          kDtype<T>, sizes.batch, sizes.state_size, in.grad_h.data, in.grad_h.row_stride, in.grad_h.column_stride,
          in.grad_cell.data, in.grad_cell.row_stride, in.grad_cell.column_stride, in.gates, in.new_cell, in.grad_gates,
          in.grad_old_cell, stream)) {
    return error;
  }
  // The more columns a block has, the less often grad_gates is read: as many as leave work for every multiprocessor.
  const unsigned wide = ceil_div(sizes.columns(), 256) * ceil_div(sizes.state_size, kBlockUnits);
  const bool is_wide = wide >= static_cast<unsigned>(device_attribute(cudaDevAttrMultiProcessorCount)) * 9 / 10;
  if (sizes.batch <= 64) {
    return is_wide ? launch_tile<T, GradientTile<T, 64, 256>>(in, stream)
                   : launch_tile<T, GradientTile<T, 64, 128>>(in, stream);
  }
  return is_wide ? launch_tile<T, GradientTile<T, 128, 256>>(in, stream)
                 : launch_tile<T, GradientTile<T, 128, 128>>(in, stream);
}

template Error launch_on_tensor_cores(const CellBackward<float>&, cudaStream_t);
template Error launch_on_tensor_cores(const CellBackward<__half>&, cudaStream_t);
template Error launch_on_tensor_cores(const CellBackward<__nv_bfloat16>&, cudaStream_t);

}  // namespace extops::cuda
