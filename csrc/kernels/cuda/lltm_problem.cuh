// What the LLTM kernels that compute a product of their own have in common.
#pragma once

#include "launch.cuh"
#include "lltm_pointwise.cuh"

namespace extops::cuda {

struct Sizes {
  int batch;
  int input_features;
  int state_size;

  __host__ __device__ int columns() const { return state_size + input_features; }
};

inline unsigned ceil_div(int a, int b) { return static_cast<unsigned>((a + b - 1) / b); }

template <class T>
struct CellForward {
  Sizes sizes;
  const T* input;
  const T* weights;
  const T* bias;
  const T* old_h;
  const T* old_cell;
  T* new_h;
  T* new_cell;
  T* gates;
};

template <class T>
struct CellBackward {
  Sizes sizes;
  Gradient<T> grad_h;
  Gradient<T> grad_cell;
  const T* input;
  const T* old_h;
  const T* gates;
  const T* new_cell;
  T* grad_gates;
  T* grad_old_cell;
  T* grad_weights;
  T* grad_bias;
};

// By the tensor cores of Hopper GPUs (lltm_tensor_kernel.cu, lltm_tensor_backward_kernel.cu,
// lltm_tf32_backward_kernel.cu), for 16-bit types and, in TF32, float. For rows that start at chunks of 16 bytes;
// old_h's are of whole 128 bytes.
template <class T>
Error launch_on_tensor_cores(const CellForward<T>& arguments, cudaStream_t stream);
// The same in strict float32, without tensor cores.
Error launch_in_float32(const CellForward<float>& arguments, cudaStream_t stream);
template <class T>
Error launch_on_tensor_cores(const CellBackward<T>& arguments, cudaStream_t stream);
template <>
Error launch_on_tensor_cores(const CellBackward<float>& arguments, cudaStream_t stream);

}  // namespace extops::cuda
