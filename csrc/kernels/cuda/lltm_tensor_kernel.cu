// The LLTM cell in 16-bit types by tensor cores, product and pointwise part in one kernel, forward and backward. A
// library's product is followed by a kernel that reads back what it wrote, and preceded by one that joins old_h and
// input.
//
// X stands for [old_h | input], which is never made. Sums are in float32 and always in the same order.
#include <cooperative_groups.h>

#include "../lltm.h"
#include "lltm_problem.cuh"
#include "tensor_cores.cuh"

// Named, not anonymous: nvcc would put the path of this file into the kernels' names, and no two builds be the same.
namespace extops::cuda {

namespace cg = cooperative_groups;

// ---- forward: a cluster of blocks computes 32 units for 64 rows; its blocks share the columns of X ----

constexpr int kTileRows = 64;
constexpr int kTileUnits = 32;
constexpr int kTileLines = 3 * kTileUnits;
constexpr int kChunk = 8;  // neighbouring columns of a row, which a lane loads at once: 16 bytes
constexpr int kColumnsPerStep = 4 * kChunk;

// A lane's chunk of a row of X or weights. The sum over columns has no order, so that a lane's neighbouring columns
// may stand for those that the tensor core wants from it: two products take two registers each.
struct Chunk {
  uint32_t registers[4];

  __device__ void load(const void* from) {
    *reinterpret_cast<uint4*>(registers) = __ldg(static_cast<const uint4*>(from));
  }
};

template <class T, int kTiles>
struct Step {
  Chunk x[kTiles][2];
  Chunk weights[3];

  __device__ void multiply(Fragment (&sums)[kTiles][3]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        const uint32_t a[4] = {
            x[m][0].registers[2 * half], x[m][1].registers[2 * half], x[m][0].registers[2 * half + 1],
            x[m][1].registers[2 * half + 1]};
#pragma unroll
        for (int g = 0; g < 3; ++g) {
          const uint32_t b[2] = {weights[g].registers[2 * half], weights[g].registers[2 * half + 1]};
          multiply_add<T>(sums[m][g], a, b);
        }
      }
    }
  }
};

// Where an element of the tile is in shared memory: rows are 96 numbers, whose groups of 8 are swapped about so that
// neither rows nor columns meet in one bank.
__device__ inline int tile_index(int row, int line) { return row * kTileLines + (line ^ ((row & 3) * 8)); }

template <class T>
__global__ void __launch_bounds__(kThreads, 2) lltm_tensor_kernel(CellForward<T> in) {
#if __CUDA_ARCH__ >= 900
  constexpr int kTiles = kTileRows / 32;  // of 16 rows, in a warp; 2 x 4 warps share the rows and the units
  __shared__ float partial[kTileRows * kTileLines];
  const cg::cluster_group cluster = cg::this_cluster();
  const Sizes sizes = in.sizes;
  const int state_size = sizes.state_size;
  const int columns = sizes.columns();
  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 % 2 * (kTileRows / 2);
  const int warp_unit = threadIdx.x / 64 * 8;
  const int first_row = blockIdx.y * kTileRows;
  const int first_unit = blockIdx.x * kTileUnits;

  const int steps = columns / kColumnsPerStep;
  const int share = (steps + gridDim.z - 1) / gridDim.z;
  const int begin = blockIdx.z * share;
  const int end = min(begin + share, steps);
  // Where the lane's chunks of the next step are. Beyond the batch any row will do: its results are dropped.
  const T* x[kTiles][2];
  const auto point_to = [&](const T* first, int stride) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = min(first_row + warp_row + m * 16 + half * 8 + lane / 4, sizes.batch - 1);
        x[m][half] = first + int64_t{row} * stride + lane % 4 * kChunk;
      }
    }
  };
  const int steps_in_h = state_size / kColumnsPerStep;
  if (begin < steps_in_h) {
    point_to(in.old_h + begin * kColumnsPerStep, state_size);
  } else {
    point_to(in.input + (begin - steps_in_h) * kColumnsPerStep, sizes.input_features);
  }
  const T* w[3];
#pragma unroll
  for (int g = 0; g < 3; ++g) {
    const int64_t line = int64_t{g} * state_size + first_unit + warp_unit + lane / 4;
    w[g] = in.weights + line * columns + begin * kColumnsPerStep + lane % 4 * kChunk;
  }
  const auto load_next = [&](Step<T, kTiles>& to, int index) {
    if (index == steps_in_h) point_to(in.input, sizes.input_features);
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        to.x[m][half].load(x[m][half]);
        x[m][half] += kColumnsPerStep;
      }
    }
#pragma unroll
    for (int g = 0; g < 3; ++g) {
      to.weights[g].load(w[g]);
      w[g] += kColumnsPerStep;
    }
  };

  Fragment sums[kTiles][3];
  Step<T, kTiles> step[2];
  if (begin < end) load_next(step[0], begin);
  for (int index = begin; index < end; index += 2) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      if (index + s + 1 < end) load_next(step[1 - s], index + s + 1);
      if (index + s < end) step[s].multiply(sums);
    }
  }

#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int g = 0; g < 3; ++g) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp_row + m * 16 + half * 8 + lane / 4;
        const int line = g * kTileUnits + warp_unit + lane % 4 * 2;
        *reinterpret_cast<float2*>(&partial[tile_index(row, line)]) = {
            sums[m][g].values[2 * half], sums[m][g].values[2 * half + 1]};
      }
    }
  }
  cluster.sync();
  // Each block of the cluster adds up the partial sums of some rows, and finishes them.
  const int blocks = gridDim.z;
  const int own_rows = kTileRows / blocks;
  for (int item = threadIdx.x; item < own_rows * kTileUnits; item += kThreads) {
    const int row_in_tile = blockIdx.z * own_rows + item / kTileUnits;
    const int unit_in_tile = item % kTileUnits;
    const int row = first_row + row_in_tile;
    const int unit = first_unit + unit_in_tile;
    if (row >= sizes.batch) break;
    float gates[3] = {};
    for (int block = 0; block < blocks; ++block) {
      const float* from = cluster.map_shared_rank(partial, block);
#pragma unroll
      for (int g = 0; g < 3; ++g) gates[g] += from[tile_index(row_in_tile, g * kTileUnits + unit_in_tile)];
    }
#pragma unroll
    for (int g = 0; g < 3; ++g) {
      T rounded;
      store(rounded, gates[g]);
      in.products[(int64_t{row} * 3 + g) * state_size + unit] = rounded;
      // From the product as it is stored, so that the backward sees the same gates.
      gates[g] = extops::cuda::load(rounded) + extops::cuda::load(in.bias[g * state_size + unit]);
    }
    const int64_t cell = int64_t{row} * state_size + unit;
    const CellState<float> state =
        cell_forward<float>(gates[0], gates[1], gates[2], extops::cuda::load(in.old_cell[cell]));
    store(in.new_cell[cell], state.cell);
    store(in.new_h[cell], state.h);
  }
  // No block may end while another reads its partial sums. Nothing is to be made visible: the arrival need not wait for
  // the results to be written.
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// ---- backward of the parameters: a block computes some units' lines of grad_weights for 256 columns ----

constexpr int kGradientColumns = 256;
constexpr int kGradientRows = 64;                         // of the batch, in shared memory at a time
constexpr int kColumnsPitch = kGradientColumns + kChunk;  // padded against bank conflicts

// Where a column is within its group of 32 in shared memory: such that a lane's results are 8 neighbouring columns.
__device__ inline int column_index(int column) {
  const int in_group = column % 32;
  return column - in_group + in_group % 8 / 2 * 8 + in_group / 8 * 2 + in_group % 2;
}

// Fills `shared` with some rows of X; zeros beyond its edges. A thread stays in its columns.
template <class T>
__device__ void load_columns(
    const CellBackward<T>& in, int first_row, int first_column, T (&shared)[kGradientRows][kColumnsPitch]) {
  constexpr int kChunks = kGradientColumns / kChunk;
  constexpr int kRowsAtOnce = kThreads / kChunks;
  const int column = threadIdx.x % kChunks * kChunk;
  const int k = first_column + column;
  const bool from_h = k < in.sizes.state_size;
  const int stride = from_h ? in.sizes.state_size : in.sizes.input_features;
  const T* from = from_h ? in.old_h + k : in.input + (k - in.sizes.state_size);
  const int r0 = threadIdx.x / kChunks;
  from += int64_t{first_row + r0} * stride;
  T* to = &shared[r0][column_index(column)];
  const int rows = k < in.sizes.columns() ? in.sizes.batch - first_row - r0 : 0;
  Chunk chunks[kGradientRows / kRowsAtOnce] = {};
#pragma unroll
  for (int i = 0; i < kGradientRows / kRowsAtOnce; ++i) {
    if (i * kRowsAtOnce < rows) chunks[i].load(from);
    from += kRowsAtOnce * stride;
  }
#pragma unroll
  for (int i = 0; i < kGradientRows / kRowsAtOnce; ++i) {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      *reinterpret_cast<uint32_t*>(to + i * kRowsAtOnce * kColumnsPitch + 8 * pair) = chunks[i].registers[pair];
    }
  }
}

// Fills `shared` with some rows of grad_products, for the three gates of some units; zeros beyond the batch.
template <int kUnits, class T, int kPitch>
__device__ void load_gradients(
    const CellBackward<T>& in, int first_row, int first_unit, T (&shared)[kGradientRows][kPitch]) {
  constexpr int kChunks = 3 * kUnits / kChunk;
  for (int item = threadIdx.x; item < kGradientRows * kChunks; item += kThreads) {
    const int r = item / kChunks;
    const int line = item % kChunks * kChunk;
    const int row = first_row + r;
    uint4 chunk{};
    if (row < in.sizes.batch) {
      const int64_t at = (int64_t{row} * 3 + line / kUnits) * in.sizes.state_size + first_unit + line % kUnits;
      // Not by way of the read-only cache: the kernel before may write while this one has begun.
      chunk = *reinterpret_cast<const uint4*>(in.grad_products + at);
    }
    *reinterpret_cast<uint4*>(&shared[r][line]) = chunk;
  }
}

// Runs after the pointwise kernel that fills grad_products, but starts while that one runs.
template <class T, int kUnits>
__global__ void __launch_bounds__(kThreads) lltm_tensor_backward_kernel(CellBackward<T> in) {
#if __CUDA_ARCH__ >= 900
  constexpr int kTiles = kUnits / 16;
  __shared__ __align__(16) T gradients[kGradientRows][3 * kUnits + kChunk];
  __shared__ __align__(16) T x[kGradientRows][kColumnsPitch];
  const int state_size = in.sizes.state_size;
  const int columns = in.sizes.columns();
  const int first_unit = blockIdx.y * kUnits;
  const int first_column = blockIdx.x * kGradientColumns;
  const int lane = threadIdx.x % 32;
  const int warp_column = threadIdx.x / 32 * 32;
  const bool sums_bias = blockIdx.x == 0 && threadIdx.x < 3 * kUnits;
  Fragment sums[3 * kTiles][4];
  float bias_sum = 0;
  for (int first_row = 0; first_row < in.sizes.batch; first_row += kGradientRows) {
    if (first_row > 0) __syncthreads();
    load_columns(in, first_row, first_column, x);
    if (first_row == 0) cudaGridDependencySynchronize();
    load_gradients<kUnits>(in, first_row, first_unit, gradients);
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kGradientRows; r += 16) {
      // The lane's row of four 8 x 8 matrices: of x, the two halves of the sum for two groups of columns ...
      uint32_t b[2][4];
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        load_transposed(b[pair], &x[r + lane % 16][warp_column + pair * 16 + lane / 16 * 8]);
      }
#pragma unroll
      for (int m = 0; m < 3 * kTiles; ++m) {
        // ... and of the gradients the two halves of the lines within each half of the sum.
        uint32_t a[4];
        load_transposed(a, &gradients[r + lane / 16 * 8 + lane % 8][m * 16 + lane / 8 % 2 * 8]);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const uint32_t group[2] = {b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]};
          multiply_add<T>(sums[m][n], a, group);
        }
      }
    }
    if (sums_bias) {
#pragma unroll 16
      for (int r = 0; r < kGradientRows; ++r) bias_sum += load(gradients[r][threadIdx.x]);
    }
  }
  const int column = first_column + warp_column + lane % 4 * kChunk;
#pragma unroll
  for (int m = 0; m < 3 * kTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Vector<T, kChunk> line;
#pragma unroll
      for (int j = 0; j < kChunk; ++j) store(line.values[j], sums[m][j / 2].values[2 * half + j % 2]);
      const int unit = first_unit + m % kTiles * 16 + half * 8 + lane / 4;
      const int64_t at = int64_t{m / kTiles} * state_size + unit;
      if (column < columns) *reinterpret_cast<Vector<T, kChunk>*>(in.grad_weights + at * columns + column) = line;
    }
  }
  if (sums_bias) {
    const int gate = static_cast<int>(threadIdx.x) / kUnits;
    store(in.grad_bias[gate * state_size + first_unit + threadIdx.x % kUnits], bias_sum);
  }
#endif
}

// ---- which problems, and how they are launched ----

inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0;
  int value = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, attribute, device);
  return value;
}

// Clusters of blocks came with compute capability 9.0; tiles and steps shall end where rows do.
bool tensor_cores_serve(ScalarType dtype, const Sizes& sizes) {
  const bool is_half = dtype == ScalarType::BFloat16 || dtype == ScalarType::Half;
  return is_half && sizes.state_size % kTileUnits == 0 && sizes.input_features % kColumnsPerStep == 0 &&
         device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
}

inline bool start_at_chunks(std::initializer_list<const void*> data) {
  return std::all_of(data.begin(), data.end(), [](const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % sizeof(Chunk) == 0;
  });
}

template <class T>
constexpr ScalarType kDtype = std::is_same_v<T, __half> ? ScalarType::Half : ScalarType::BFloat16;

template <class T>
bool tensor_cores_serve(const CellForward<T>& arguments) {
  return tensor_cores_serve(kDtype<T>, arguments.sizes) &&
         start_at_chunks({arguments.input, arguments.weights, arguments.old_h});
}

template <class T>
bool tensor_cores_serve(const CellBackward<T>& arguments) {
  return tensor_cores_serve(kDtype<T>, arguments.sizes) &&
         start_at_chunks({arguments.input, arguments.old_h, arguments.grad_weights});
}

template <class... Parameters, class... Arguments>
void launch(
    void (*kernel)(Parameters...), dim3 grid, cudaStream_t stream, cudaLaunchAttribute attribute,
    const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = kThreads;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  cudaLaunchKernelEx(&config, kernel, arguments...);
}

// In clusters of as many blocks as keep every multiprocessor busy.
template <class T>
Error launch_on_tensor_cores(const CellForward<T>& arguments, cudaStream_t stream) {
  constexpr unsigned kMaxBlocks = 8;  // of a portable cluster
  const Sizes sizes = arguments.sizes;
  const dim3 tiles(ceil_div(sizes.state_size, kTileUnits), ceil_div(sizes.batch, kTileRows));
  const unsigned steps = sizes.columns() / kColumnsPerStep;
  const unsigned multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  unsigned blocks = 1;
  while (blocks < kMaxBlocks && blocks * tiles.x * tiles.y <= multiprocessors && 2 * blocks <= steps) blocks *= 2;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {1, 1, blocks};
  launch(lltm_tensor_kernel<T>, {tiles.x, tiles.y, blocks}, stream, cluster, arguments);
  return launch_error("lltm");
}

template <class T>
Error launch_on_tensor_cores(const CellBackward<T>& in, cudaStream_t stream) {
  const Sizes sizes = in.sizes;
  if (const Error error = extops_lltm_cell_backward_cuda(
          kDtype<T>, sizes.batch, sizes.state_size, in.grad_h.data, in.grad_h.row_stride, in.grad_h.column_stride,
          in.grad_cell.data, in.grad_cell.row_stride, in.grad_cell.column_stride, in.products, in.bias, in.new_cell,
          in.grad_products, in.grad_old_cell, stream)) {
    return error;
  }
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  const unsigned tiles = ceil_div(sizes.columns(), kGradientColumns);
  const unsigned multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  // The more lines a block computes, the less often X is read: as many as leave work for every multiprocessor.
  if (tiles * ceil_div(sizes.state_size, 32) >= multiprocessors) {
    launch(lltm_tensor_backward_kernel<T, 32>, {tiles, ceil_div(sizes.state_size, 32)}, stream, overlap, in);
  } else {
    launch(lltm_tensor_backward_kernel<T, 16>, {tiles, ceil_div(sizes.state_size, 16)}, stream, overlap, in);
  }
  return launch_error("lltm_backward");
}

template bool tensor_cores_serve(const CellForward<__half>&);
template bool tensor_cores_serve(const CellForward<__nv_bfloat16>&);
template bool tensor_cores_serve(const CellBackward<__half>&);
template bool tensor_cores_serve(const CellBackward<__nv_bfloat16>&);
template Error launch_on_tensor_cores(const CellForward<__half>&, cudaStream_t);
template Error launch_on_tensor_cores(const CellForward<__nv_bfloat16>&, cudaStream_t);
template Error launch_on_tensor_cores(const CellBackward<__half>&, cudaStream_t);
template Error launch_on_tensor_cores(const CellBackward<__nv_bfloat16>&, cudaStream_t);

}  // namespace extops::cuda
