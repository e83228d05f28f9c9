// Arguments of the LLTM kernels that contain the product.
#pragma once

#include "../lltm.h"
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
  CellForward(const Sizes& sizes, const LltmForward& in)
      : sizes(sizes),
        input(static_cast<const T*>(in.input)),
        weights(static_cast<const T*>(in.weights)),
        bias(static_cast<const T*>(in.bias)),
        old_h(static_cast<const T*>(in.old_h)),
        old_cell(static_cast<const T*>(in.old_cell)),
        new_h(static_cast<T*>(in.new_h)),
        new_cell(static_cast<T*>(in.new_cell)),
        gates(static_cast<T*>(in.gates)) {}

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
  CellBackward(const Sizes& sizes, const LltmBackward& in)
      : sizes(sizes),
        grad_h(make_gradient<T>(in.grad_h)),
        grad_cell(make_gradient<T>(in.grad_cell)),
        input(static_cast<const T*>(in.input)),
        old_h(static_cast<const T*>(in.old_h)),
        gates(static_cast<const T*>(in.gates)),
        new_cell(static_cast<const T*>(in.new_cell)),
        grad_gates(static_cast<T*>(in.grad_gates)),
        grad_old_cell(static_cast<T*>(in.grad_old_cell)),
        grad_weights(static_cast<T*>(in.grad_weights)),
        grad_bias(static_cast<T*>(in.grad_bias)) {}

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
