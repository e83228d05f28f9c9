// The kernels of the gradients of weights and biases for Hopper, the same for every cell: a file that includes this and
// says EXTOPS_WEIGHTS_HOPPER has them.
#pragma once

#include "bias_sums.cuh"
#include "weights.cuh"
#include "weights_tf32.cuh"

#define EXTOPS_WEIGHTS_HOPPER                                                                  \
  namespace extops::cuda::step {                                                               \
  template Error launch_weights_backward(const WeightsBackward<__half>&, cudaStream_t);        \
  template Error launch_weights_backward(const WeightsBackward<__nv_bfloat16>&, cudaStream_t); \
  template Error launch_column_sums(const ColumnSums<double>&, cudaStream_t);                  \
  template Error launch_column_sums(const ColumnSums<float>&, cudaStream_t);                   \
  template Error launch_column_sums(const ColumnSums<__half>&, cudaStream_t);                  \
  template Error launch_column_sums(const ColumnSums<__nv_bfloat16>&, cudaStream_t);           \
  }
