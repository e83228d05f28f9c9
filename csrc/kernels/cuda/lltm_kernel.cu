#include "../lltm.h"
#include "launch.cuh"
#include "scalar.cuh"

// Named, not anonymous: nvcc would put the path of this file into the kernels' names, and no two builds be the same.
namespace extops::cuda {

__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return ::exp(x); }

template <class C>
__device__ C sigmoid(C x) {
  return 1 / (1 + exponential(-x));
}

template <class C>
__device__ C elu(C x) {
  return x > 0 ? x : expm1(x);
}

// Rows and vectors of `kVector` columns, numbered row by row.
template <int kVector>
struct Position {
  int64_t row;
  int64_t column;

  __device__ Position(int64_t item, int64_t state_size) {
    const int64_t vectors = state_size / kVector;
    // 64-bit division takes some 100 instructions: avoid it wherever 32 bits hold the numbers.
    if (item <= UINT32_MAX && vectors <= UINT32_MAX) {
      row = static_cast<uint32_t>(item) / static_cast<uint32_t>(vectors);
    } else {
      row = item / vectors;
    }
    column = (item - row * vectors) * kVector;
  }
};

template <class T, int kVector>
__global__ void __launch_bounds__(kThreads) lltm_cell_kernel(
    int64_t items, int64_t state_size, const T* __restrict__ gates, const T* __restrict__ old_cell,
    T* __restrict__ new_h, T* __restrict__ new_cell) {
  using C = typename Compute<T>::type;
  using V = Vector<T, kVector>;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t item = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; item < items; item += step) {
    const Position<kVector> at(item, state_size);
    const T* row = gates + at.row * 3 * state_size + at.column;
    const V input_gate = *reinterpret_cast<const V*>(row);
    const V output_gate = *reinterpret_cast<const V*>(row + state_size);
    const V candidate = *reinterpret_cast<const V*>(row + 2 * state_size);
    const V old_c = *reinterpret_cast<const V*>(old_cell + item * kVector);
    V h, c;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const C cell = load(old_c.values[j]) + elu<C>(load(candidate.values[j])) * sigmoid<C>(load(input_gate.values[j]));
      store(c.values[j], cell);
      store(h.values[j], tanh(cell) * sigmoid<C>(load(output_gate.values[j])));
    }
    *reinterpret_cast<V*>(new_cell + item * kVector) = c;
    *reinterpret_cast<V*>(new_h + item * kVector) = h;
  }
}

// An upstream gradient: absent, expanded or strided.
template <class T>
struct Gradient {
  const T* data;
  int64_t row_stride;
  int64_t column_stride;

  __device__ typename Compute<T>::type at(int64_t row, int64_t column) const {
    return data == nullptr ? 0 : load(data[row * row_stride + column * column_stride]);
  }
};

template <class T, int kVector>
__global__ void __launch_bounds__(kThreads) lltm_cell_backward_kernel(
    int64_t items, int64_t state_size, Gradient<T> grad_h, Gradient<T> grad_cell, const T* __restrict__ gates,
    const T* __restrict__ new_cell, T* __restrict__ grad_gates, T* __restrict__ grad_old_cell) {
  using C = typename Compute<T>::type;
  using V = Vector<T, kVector>;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t item = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; item < items; item += step) {
    const Position<kVector> at(item, state_size);
    const int64_t offset = at.row * 3 * state_size + at.column;
    const V input_gate = *reinterpret_cast<const V*>(gates + offset);
    const V output_gate = *reinterpret_cast<const V*>(gates + offset + state_size);
    const V candidate = *reinterpret_cast<const V*>(gates + offset + 2 * state_size);
    const V cell = *reinterpret_cast<const V*>(new_cell + item * kVector);
    V grad_input_gate, grad_output_gate, grad_candidate, grad_old_c;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const C z = load(candidate.values[j]);
      const C candidate_value = elu(z);
      const C i = sigmoid<C>(load(input_gate.values[j]));
      const C o = sigmoid<C>(load(output_gate.values[j]));
      const C tanh_cell = tanh(load(cell.values[j]));
      const C dh = grad_h.at(at.row, at.column + j);
      const C dc = grad_cell.at(at.row, at.column + j) + dh * o * (1 - tanh_cell * tanh_cell);
      store(grad_old_c.values[j], dc);
      store(grad_input_gate.values[j], dc * candidate_value * i * (1 - i));
      store(grad_output_gate.values[j], dh * tanh_cell * o * (1 - o));
      store(grad_candidate.values[j], dc * i * (z > 0 ? C(1) : 1 + candidate_value));
    }
    *reinterpret_cast<V*>(grad_gates + offset) = grad_input_gate;
    *reinterpret_cast<V*>(grad_gates + offset + state_size) = grad_output_gate;
    *reinterpret_cast<V*>(grad_gates + offset + 2 * state_size) = grad_candidate;
    *reinterpret_cast<V*>(grad_old_cell + item * kVector) = grad_old_c;
  }
}

// Calls function(integral_constant) with the vector width for these tensors: wide accesses where the rows allow them
// and there is work enough for every multiprocessor, else one element a thread.
template <class T, class Function>
void with_vector_width(
    int64_t elements, int64_t state_size, std::initializer_list<const void*> data, const Function& function) {
  constexpr int kWide = 4;
  constexpr int64_t kEnoughElements = 1 << 18;
  const bool aligned = std::all_of(data.begin(), data.end(), [](const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % alignof(Vector<T, kWide>) == 0;
  });
  if (aligned && state_size % kWide == 0 && elements >= kEnoughElements) {
    function(std::integral_constant<int, kWide>{});
  } else {
    function(std::integral_constant<int, 1>{});
  }
}

}  // namespace extops::cuda

using namespace extops::cuda;

Error extops_lltm_cell_cuda(
    ScalarType dtype, int64_t batch, int64_t state_size, const void* gates, const void* old_cell, void* new_h,
    void* new_cell, void* stream) {
  const int64_t elements = batch * state_size;
  if (elements == 0) return nullptr;
  return dispatch(dtype, [&](auto scalar) {
    using T = decltype(scalar);
    with_vector_width<T>(elements, state_size, {gates, old_cell, new_h, new_cell}, [&](auto width) {
      const int64_t items = elements / width;
      lltm_cell_kernel<T, width><<<blocks_for(items), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
          items, state_size, static_cast<const T*>(gates), static_cast<const T*>(old_cell), static_cast<T*>(new_h),
          static_cast<T*>(new_cell));
    });
    return launch_error("lltm_cell");
  });
}

Error extops_lltm_cell_backward_cuda(
    ScalarType dtype, int64_t batch, int64_t state_size, const void* grad_h, int64_t grad_h_row_stride,
    int64_t grad_h_column_stride, const void* grad_cell, int64_t grad_cell_row_stride, int64_t grad_cell_column_stride,
    const void* gates, const void* new_cell, void* grad_gates, void* grad_old_cell, void* stream) {
  const int64_t elements = batch * state_size;
  if (elements == 0) return nullptr;
  return dispatch(dtype, [&](auto scalar) {
    using T = decltype(scalar);
    const Gradient<T> upstream_h{static_cast<const T*>(grad_h), grad_h_row_stride, grad_h_column_stride};
    const Gradient<T> upstream_cell{static_cast<const T*>(grad_cell), grad_cell_row_stride, grad_cell_column_stride};
    with_vector_width<T>(elements, state_size, {gates, new_cell, grad_gates, grad_old_cell}, [&](auto width) {
      const int64_t items = elements / width;
      lltm_cell_backward_kernel<T, width><<<blocks_for(items), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
          items, state_size, upstream_h, upstream_cell, static_cast<const T*>(gates), static_cast<const T*>(new_cell),
          static_cast<T*>(grad_gates), static_cast<T*>(grad_old_cell));
    });
    return launch_error("lltm_cell_backward");
  });
}
