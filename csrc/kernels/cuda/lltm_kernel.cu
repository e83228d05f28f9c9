#include "../lltm.h"
#include "launch.cuh"
#include "lltm_pointwise.cuh"

// Named, not anonymous: nvcc would put the path of this file into the kernels' names, and no two builds be the same.
namespace extops::cuda {

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

// The pre-activations of a vector of units: those of the input gate, the output gate and the candidate.
template <class T, int kVector>
class Gates {
 public:
  __device__ Gates(const T* gates, int64_t state_size) {
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) gates_[gate] = *reinterpret_cast<const V*>(gates + gate * state_size);
  }

  __device__ void add_bias(const T* bias, T* gates, int64_t state_size) {
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) {
      const V from = *reinterpret_cast<const V*>(bias + gate * state_size);
#pragma unroll
      for (int j = 0; j < kVector; ++j) store(gates_[gate].values[j], at(gate, j) + load(from.values[j]));
      *reinterpret_cast<V*>(gates + gate * state_size) = gates_[gate];
    }
  }

  __device__ auto at(int gate, int j) const { return load(gates_[gate].values[j]); }

 private:
  using V = Vector<T, kVector>;
  V gates_[3];
};

template <class T, int kVector>
__global__ void __launch_bounds__(kThreads) lltm_cell_kernel(
    int64_t items, int64_t state_size, const T* bias, T* gates, const T* old_cell, T* __restrict__ new_h,
    T* __restrict__ new_cell) {
  using C = typename Compute<T>::type;
  using V = Vector<T, kVector>;
  wait_for_previous_kernel();
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t item = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; item < items; item += step) {
    const Position<kVector> at(item, state_size);
    T* const first_gate = gates + at.row * 3 * state_size + at.column;
    Gates<T, kVector> z(first_gate, state_size);
    const V old_c = *reinterpret_cast<const V*>(old_cell + item * kVector);
    if (bias != nullptr) z.add_bias(bias + at.column, first_gate, state_size);
    V h, c;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const C columns[3] = {z.at(0, j), z.at(1, j), z.at(2, j)};
      const CellState<C> state = cell_forward<Lltm, MathOf<T>>(columns, C(load(old_c.values[j])));
      store(c.values[j], state.c);
      store(h.values[j], state.h);
    }
    *reinterpret_cast<V*>(new_cell + item * kVector) = c;
    *reinterpret_cast<V*>(new_h + item * kVector) = h;
  }
}

template <class T, int kVector>
__global__ void __launch_bounds__(kThreads) lltm_cell_backward_kernel(
    int64_t items, int64_t state_size, Gradient<T> grad_h, Gradient<T> grad_cell, const T* gates, const T* new_cell,
    T* __restrict__ grad_gates, T* __restrict__ grad_old_cell) {
  using C = typename Compute<T>::type;
  using V = Vector<T, kVector>;
  wait_for_previous_kernel();
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t item = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; item < items; item += step) {
    const Position<kVector> at(item, state_size);
    const int64_t offset = at.row * 3 * state_size + at.column;
    const Gates<T, kVector> z(gates + offset, state_size);
    const V cell = *reinterpret_cast<const V*>(new_cell + item * kVector);
    V of_gates[3], grad_old_c;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const C columns[3] = {z.at(0, j), z.at(1, j), z.at(2, j)};
      C grad_c = grad_cell.at(at.row, at.column + j);
      C gradients[3];
      lltm_backward<MathOf<T>>(columns, C(load(cell.values[j])), grad_h.at(at.row, at.column + j), grad_c, gradients);
#pragma unroll
      for (int g = 0; g < 3; ++g) store(of_gates[g].values[j], gradients[g]);
      store(grad_old_c.values[j], grad_c);
    }
#pragma unroll
    for (int g = 0; g < 3; ++g) *reinterpret_cast<V*>(grad_gates + offset + g * state_size) = of_gates[g];
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

Error extops_lltm_cell_cuda(ScalarType dtype, const LltmCellWithBias& in, void* stream) {
  const int64_t state_size = in.sizes.state_size;
  const int64_t elements = in.sizes.batch * state_size;
  if (elements == 0) return nullptr;
  return dispatch(dtype, [&](auto scalar) {
    using T = decltype(scalar);
    with_vector_width<T>(
        elements, state_size, {in.bias, in.gates, in.old_cell, in.new_h, in.new_cell}, [&](auto width) {
          const int64_t items = elements / width;
          launch(
              &lltm_cell_kernel<T, width>, {blocks_for(items), kThreads}, static_cast<cudaStream_t>(stream), items,
              state_size, static_cast<const T*>(in.bias), static_cast<T*>(const_cast<void*>(in.gates)),
              static_cast<const T*>(in.old_cell), static_cast<T*>(in.new_h), static_cast<T*>(in.new_cell));
        });
    return launch_error();
  });
}

Error extops_lltm_cell_backward_cuda(ScalarType dtype, const LltmCellBackward& in, void* stream) {
  const int64_t state_size = in.sizes.state_size;
  const int64_t elements = in.sizes.batch * state_size;
  if (elements == 0) return nullptr;
  return dispatch(dtype, [&](auto scalar) {
    using T = decltype(scalar);
    with_vector_width<T>(
        elements, state_size, {in.gates, in.new_cell, in.grad_gates, in.grad_old_cell}, [&](auto width) {
          const int64_t items = elements / width;
          launch(
              &lltm_cell_backward_kernel<T, width>, {blocks_for(items), kThreads}, static_cast<cudaStream_t>(stream),
              items, state_size, make_gradient<T>(in.grad_h), make_gradient<T>(in.grad_cell),
              static_cast<const T*>(in.gates), static_cast<const T*>(in.new_cell), static_cast<T*>(in.grad_gates),
              static_cast<T*>(in.grad_old_cell));
        });
    return launch_error();
  });
}
