// The gradients of the biases, the same for every cell: sums of columns. A file that includes this and invokes
// EXTOPS_BIAS_SUMS_HOPPER instantiates the kernels.
#pragma once

#include "../common/scalar.cuh"
#include "problem.cuh"

namespace extops::cuda::step {

// A block sums 32 columns of one of two matrices, its warps some rows each.
constexpr int kSumWarps = 32;
constexpr int kSumDepth = 4;  // rows that a lane loads before it uses the first

template <class T>
__global__ void __launch_bounds__(32 * kSumWarps) column_sums_kernel(ColumnSums<T> in) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using C = typename Compute<T>::type;
  __shared__ C partial[kSumWarps][32];
  wait_for_previous_kernel();
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int64_t first_blocks = (in.columns[0] + 31) / 32;
  const bool is_second = blockIdx.x >= first_blocks;
  const int64_t columns = is_second ? in.columns[1] : in.columns[0];
  const T* const values = is_second ? in.values[1] : in.values[0];
  const int64_t column = (int64_t{blockIdx.x} - (is_second ? first_blocks : 0)) * 32 + lane;
  C sum = 0;
  for (int64_t first = warp; first < in.rows; first += kSumWarps * kSumDepth) {
    C loaded[kSumDepth];
#pragma unroll
    for (int d = 0; d < kSumDepth; ++d) {
      const int64_t row = first + d * kSumWarps;
      loaded[d] = row < in.rows && column < columns ? load(values[row * columns + column]) : C(0);
    }
#pragma unroll
    for (C value : loaded) sum += value;
  }
  partial[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || column >= columns) return;
  for (int other = 1; other < kSumWarps; ++other) sum += partial[other][lane];
  store((is_second ? in.sums[1] : in.sums[0])[column], sum);
  if (in.copy != nullptr) store(in.copy[column], sum);
#endif
}

template <class T>
Error launch_column_sums(const ColumnSums<T>& in, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((in.columns[0] + 31) / 32 + (in.columns[1] + 31) / 32);
  return launch(&column_sums_kernel<T>, {blocks, 32 * kSumWarps}, stream, in);
}

}  // namespace extops::cuda::step

#define EXTOPS_BIAS_SUMS_HOPPER                                                      \
  namespace extops::cuda::step {                                                     \
  template Error launch_column_sums(const ColumnSums<double>&, cudaStream_t);        \
  template Error launch_column_sums(const ColumnSums<float>&, cudaStream_t);         \
  template Error launch_column_sums(const ColumnSums<__half>&, cudaStream_t);        \
  template Error launch_column_sums(const ColumnSums<__nv_bfloat16>&, cudaStream_t); \
  }
