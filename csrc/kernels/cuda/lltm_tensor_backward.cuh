// Shared by the LLTM cell's backward kernels for tensor cores, in 16-bit types and in TF32.
#pragma once

#include "../lltm.h"
#include "hopper.cuh"
#include "lltm_problem.cuh"

namespace extops::cuda {

// A block of the backward for tensor cores has the rows of grad_weights of so many units, for each of the three gates.
constexpr int kBlockUnits = 64;
constexpr int kBlockGradients = 3 * kBlockUnits;
constexpr int kBackwardThreads = 3 * kWarpgroup;  // the first of which issues the copies, too

// The pointwise kernel of the backward.
template <class T>
Error launch_cell_backward(const CellBackward<T>& in, cudaStream_t stream) {
  constexpr ScalarType kDtype = std::is_same_v<T, float>    ? ScalarType::Float
                                : std::is_same_v<T, __half> ? ScalarType::Half
                                                            : ScalarType::BFloat16;
  const auto upstream = [](const step::Gradient<T>& gradient) {
    return Upstream{gradient.data, gradient.row_stride, gradient.column_stride};
  };
  return extops_lltm_cell_backward_cuda(
      kDtype,
      {{in.sizes.batch, in.sizes.input_features, in.sizes.state_size},
       upstream(in.grad_h),
       upstream(in.grad_cell),
       in.gates,
       in.new_cell,
       in.grad_gates,
       in.grad_old_cell},
      stream);
}

// Whether blocks of so many columns give (nearly) every multiprocessor one.
inline bool fills_the_device(const Sizes& sizes, int columns) {
  const unsigned blocks = ceil_div(sizes.columns(), columns) * ceil_div(sizes.state_size, kBlockUnits);
  return blocks >= static_cast<unsigned>(device_attribute(cudaDevAttrMultiProcessorCount)) * 9 / 10;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A thread's part of grad_bias, the sum of grad_gates over the batch: the blocks of a row of the grid divide their
// columns, and the threads of a block the rows of these.
struct BiasColumn {
  int state_size;
  int gradients = (kBlockGradients + gridDim.x - 1) / gridDim.x;
  int parts = kBackwardThreads / gradients;
  int part = threadIdx.x / gradients;
  int gradient = blockIdx.x * gradients + threadIdx.x % gradients;
  int unit = blockIdx.y * kBlockUnits + gradient % kBlockUnits;
  bool exists = gradient < kBlockGradients && part < parts && unit < state_size;

  __device__ int64_t place() const { return int64_t{gradient / kBlockUnits} * state_size + unit; }

  // Adds up what the threads have put into `sums`.
  template <class T>
  __device__ void finish(const float* sums, T* grad_bias) const {
    if (!exists || part != 0) return;
    float sum = 0;
    for (int each = 0; each < parts; ++each) sum += sums[threadIdx.x + each * gradients];
    store(grad_bias[place()], sum);
  }
};

#endif

}  // namespace extops::cuda
