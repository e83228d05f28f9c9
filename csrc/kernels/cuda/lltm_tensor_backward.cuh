// Shared by the LLTM cell's backward kernels for tensor cores, in 16-bit types and in TF32.
#pragma once

#include "../lltm.h"
#include "lltm_problem.cuh"

namespace extops::cuda {

// A block of the backward for tensor cores has the rows of grad_weights of so many units, for each of the three gates.
constexpr int kBlockUnits = 64;
constexpr int kBlockGradients = 3 * kBlockUnits;

// The pointwise kernel of the backward.
template <class T>
Error launch_cell_backward(const CellBackward<T>& in, cudaStream_t stream) {
  constexpr ScalarType kDtype = std::is_same_v<T, float>    ? ScalarType::Float
                                : std::is_same_v<T, __half> ? ScalarType::Half
                                                            : ScalarType::BFloat16;
  const auto upstream = [](const Gradient<T>& gradient) {
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

// grad_bias: the sum over the batch of the block's columns of grad_gates, which are divided among the blocks of a row
// of the grid. It loads first and adds later, so that the loads overlap the product.
template <class T, int kThreads>
class BiasSums {
 public:
  __device__ BiasSums(const CellBackward<T>& in, int first_unit)
      : gradients_((kBlockGradients + gridDim.x - 1) / gridDim.x),
        parts_(kThreads / gradients_),
        part_(threadIdx.x / gradients_),
        gradient_(blockIdx.x * gradients_ + threadIdx.x % gradients_) {
    const int unit = first_unit + gradient_ % kBlockUnits;
    exists_ = gradient_ < kBlockGradients && part_ < parts_ && unit < in.sizes.state_size;
    place_ = int64_t{gradient_ / kBlockUnits} * in.sizes.state_size + unit;
    stride_ = int64_t{3} * in.sizes.state_size;
    rows_ = exists_ ? in.sizes.batch : 0;
    from_ = in.grad_gates + place_;
    load_rows(0);
  }

  __device__ void add(float* shared) {
    float sum = 0;
    for (int first = kLoads * parts_;; first += kLoads * parts_) {
#pragma unroll
      for (float value : loaded_) sum += value;
      if (first >= rows_) break;
      load_rows(first);
    }
    shared[threadIdx.x] = sum;
  }

  // After a barrier.
  __device__ void finish(const float* shared, T* grad_bias) const {
    if (!exists_ || part_ != 0) return;
    float sum = 0;
    for (int part = 0; part < parts_; ++part) sum += shared[threadIdx.x + part * gradients_];
    store(grad_bias[place_], sum);
  }

 private:
  static constexpr int kLoads = 8;

  __device__ void load_rows(int first) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int row = first + part_ + i * parts_;
      loaded_[i] = row < rows_ ? load(from_[row * stride_]) : 0;
    }
  }

  int gradients_;
  int parts_;
  int part_;
  int gradient_;
  bool exists_;
  int rows_;
  int64_t place_;
  int64_t stride_;
  const T* from_;
  float loaded_[kLoads];
};

}  // namespace extops::cuda
