// Arguments of the LLTM kernels that contain the product.
#pragma once

#include "../../cells/lltm.h"
#include "../lltm.h"
#include "launch.cuh"
#include "math.cuh"
#include "step/gradient.cuh"

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

  CellForward(const Sizes& sizes, const LltmForward& in) : sizes(sizes) {
    set_pointers({in.input, in.weights, in.bias, in.old_h, in.old_cell}, input, weights, bias, old_h, old_cell);
    set_pointers({in.new_h, in.new_cell, in.gates}, new_h, new_cell, gates);
  }
};

template <class T>
struct CellBackward {
  Sizes sizes;
  step::Gradient<T> grad_h;
  step::Gradient<T> grad_cell;
  const T* input;
  const T* old_h;
  const T* gates;
  const T* new_cell;
  T* grad_gates;
  T* grad_old_cell;
  T* grad_weights;
  T* grad_bias;

  CellBackward(const Sizes& sizes, const LltmBackward& in) : sizes(sizes), grad_h(in.grad_h), grad_cell(in.grad_cell) {
    set_pointers({in.input, in.old_h, in.gates, in.new_cell}, input, old_h, gates, new_cell);
    set_pointers({in.grad_gates, in.grad_old_cell}, grad_gates, grad_old_cell);
    set_pointers({in.grad_weights, in.grad_bias}, grad_weights, grad_bias);
  }
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
