// The gradients of both weights of a step, from those of its gates: what their kernels for Hopper share. They are the
// same for every cell.
#pragma once

#include "../../step.h"
#include "../common/hopper.cuh"
#include "../common/scalar.cuh"

namespace extops::cuda::step {

// A block has some columns of so many rows of one of both, each warpgroup 64 rows.
constexpr int kWarpgroups = 3;
constexpr int kBlockRows = kWarpgroups * kWarpgroupRows;
constexpr int kWeightsThreads = kWarpgroups * kWarpgroup;  // the first of which issues the copies, too

template <class T>
struct WeightsGemm {
  const T* gradients;  // [batch, rows]
  const T* x;          // [batch, columns]
  int rows;
  int columns;
  T* grad_weights;  // [rows, columns]
  int64_t grad_weights_stride;
  T* grad_bias;  // [rows] or null
};

template <class T>
struct WeightsBackward {
  int batch;
  WeightsGemm<T> gemms[2];  // of h and of the input
};

// By the tensor cores of Hopper GPUs, after the kernel that fills the gradients: in 16-bit types (weights.cuh) and in
// TF32 (weights_tf32.cuh). All rows start at chunks of 16 bytes.
template <class T>
Error launch_weights_backward(const WeightsBackward<T>& in, cudaStream_t stream);
template <>
Error launch_weights_backward(const WeightsBackward<float>& in, cudaStream_t stream);

// The sums of the columns of one matrix, or of two (bias_sums.cuh).
template <class T>
struct ColumnSums {
  int64_t rows;
  int64_t columns[2];
  const T* values[2];
  T* sums[2];
  T* copy;  // of the first sums, or null
};

template <class T>
Error launch_column_sums(const ColumnSums<T>& in, cudaStream_t stream);

// The blocks of h come first.
template <class T>
dim3 grid_of(const WeightsBackward<T>& in, int columns) {
  const auto blocks = [](int items, int each) { return static_cast<unsigned>((items + each - 1) / each); };
  return {
      blocks(in.gemms[0].columns, columns) + blocks(in.gemms[1].columns, columns),
      blocks(std::max(in.gemms[0].rows, in.gemms[1].rows), kBlockRows)};
}

// Whether blocks of so many columns give (nearly) every SM a block.
template <class T>
bool fills_the_device(const WeightsBackward<T>& in, int columns) {
  const dim3 grid = grid_of(in, columns);
  return grid.x * grid.y >= static_cast<unsigned>(device_attribute(cudaDevAttrMultiProcessorCount)) * 9 / 10;
}

struct WeightsBlock {
  int gemm;
  int number;  // among the blocks of the same rows
  int blocks;  // of these
  int first_column;

  template <class T>
  __device__ WeightsBlock(const WeightsBackward<T>& in, int columns) {
    const int of_h = (in.gemms[0].columns + columns - 1) / columns;
    const int x = blockIdx.x;
    gemm = x >= of_h;
    number = gemm == 0 ? x : x - of_h;
    blocks = gemm == 0 ? of_h : static_cast<int>(gridDim.x) - of_h;
    first_column = number * columns;
  }

  __device__ int first_row() const { return blockIdx.y * kBlockRows; }

  // A choice, not an index: the compiler would copy the parameter into local memory for that.
  template <class T>
  __device__ WeightsGemm<T> of(const WeightsBackward<T>& in) const {
    return gemm == 0 ? in.gemms[0] : in.gemms[1];
  }
};

// A thread's part of the gradient of a bias, the sum of the gradients over the batch: the blocks of the same rows
// divide these, and the threads of a block the batch.
struct BiasColumn {
  int parts;
  int part;
  int gradient;  // among the rows of the block
  bool exists;

  template <class T>
  __device__ BiasColumn(const WeightsGemm<T>& in, const WeightsBlock& block) {
    const int gradients = of_each(block);
    parts = kWeightsThreads / gradients;
    part = threadIdx.x / gradients;
    gradient = block.number * gradients + threadIdx.x % gradients;
    exists = in.grad_bias != nullptr && gradient < kBlockRows && part < parts && block.first_row() + gradient < in.rows;
  }

  // Adds up what the threads have put into `sums`.
  template <class T>
  __device__ void finish(const float* sums, const WeightsBlock& block, T* grad_bias) const {
    if (!exists || part != 0) return;
    float sum = 0;
    for (int each = 0; each < parts; ++each) sum += sums[threadIdx.x + each * of_each(block)];
    store(grad_bias[block.first_row() + gradient], sum);
  }

 private:
  __device__ static int of_each(const WeightsBlock& block) { return (kBlockRows + block.blocks - 1) / block.blocks; }
};

}  // namespace extops::cuda::step
