// Applies a function to every element of strided operands.
#pragma once

#include <algorithm>
#include <utility>

#include "../../../elementwise/function.h"
#include "../../elementwise_layout.h"
#include "../common/launch.cuh"
#include "../common/scalar.cuh"

namespace extops::cuda {

// Division of a 32-bit number by a fixed one as a multiplication and a shift (Granlund and Montgomery, 1994). Takes
// dividends below 2^31.
class Divisor {
 public:
  static constexpr int kMaxDims = 30;  // each of two elements or more

  Divisor() = default;
  explicit Divisor(uint32_t divisor) : divisor_(divisor) {
    while ((uint64_t{1} << shift_) < divisor) ++shift_;
    multiplier_ = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift_) - divisor)) / divisor + 1);
  }

  __device__ uint32_t divide(uint32_t dividend) const { return (__umulhi(dividend, multiplier_) + dividend) >> shift_; }
  __device__ uint32_t divisor() const { return divisor_; }

 private:
  uint32_t divisor_ = 1;
  uint32_t multiplier_ = 1;
  uint32_t shift_ = 0;
};

// The same interface for dividends of any size.
class WideDivisor {
 public:
  static constexpr int kMaxDims = ::kMaxDims;

  WideDivisor() = default;
  explicit WideDivisor(int64_t divisor) : divisor_(divisor) {}

  __device__ int64_t divide(int64_t dividend) const { return dividend / divisor_; }
  __device__ int64_t divisor() const { return divisor_; }

 private:
  int64_t divisor_ = 1;
};

// A division of 64 bits takes many instructions: with more elements a thread the code would be larger, but no faster.
template <class Index>
constexpr int kItemsPerThread = sizeof(Index) == 8 ? 1 : 4;

template <class T, int kOperands>
struct Pointers {
  T* data[kOperands];
};

template <class D, int kOperands>
struct Strides {
  int dim;
  D sizes[D::kMaxDims];
  int64_t strides[kOperands][D::kMaxDims];

  explicit Strides(const ElementwiseLayout<kOperands>& layout) : dim(layout.dim) {
    for (int d = 0; d < dim; ++d) sizes[d] = D(layout.sizes[d]);
    for (int k = 0; k < kOperands; ++k) std::copy_n(layout.strides[k], dim, strides[k]);
  }
};

template <int kOutputs, class T, class Function, size_t... Outputs, size_t... Inputs>
__device__ void apply(
    const Function& function, T* outputs, const T* inputs, std::index_sequence<Outputs...>,
    std::index_sequence<Inputs...>) {
  typename Compute<T>::type results[kOutputs];
  function(load(inputs[Inputs])..., results[Outputs]...);
  (store(outputs[Outputs], results[Outputs]), ...);
}

// Finds the address of an element in each operand.
template <class Index, class D, class T, int kOperands>
__device__ void locate(
    Index item, const Pointers<T, kOperands>& operands, const Strides<D, kOperands>& layout, T** pointers) {
#pragma unroll
  for (int k = 0; k < kOperands; ++k) pointers[k] = operands.data[k];
  for (int d = 0; d < layout.dim; ++d) {
    const Index next = layout.sizes[d].divide(item);
    const Index index = item - next * layout.sizes[d].divisor();
    item = next;
#pragma unroll
    for (int k = 0; k < kOperands; ++k) pointers[k] += index * layout.strides[k][d];
  }
}

template <int kOutputs, int kInputs, class T, int kVector, class Function>
__device__ void apply_vectors(const Function& function, Vector<T, kVector>* outputs, const Vector<T, kVector>* inputs) {
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    T from[kInputs];
    T to[kOutputs];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) from[k] = inputs[k].values[j];
    apply<kOutputs>(function, to, from, std::make_index_sequence<kOutputs>{}, std::make_index_sequence<kInputs>{});
#pragma unroll
    for (int k = 0; k < kOutputs; ++k) outputs[k].values[j] = to[k];
  }
}

// Every operand is dense, aligned for vectors, and visited in the order of its memory.
template <int kOutputs, int kInputs, int kVector, class T, class Function>
__global__ void __launch_bounds__(kThreads)
    contiguous_kernel(int64_t numel, Pointers<T, kOutputs + kInputs> operands, Function function) {
  using V = Vector<T, kVector>;
  const int64_t vectors = numel / kVector;
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t item = thread; item < vectors; item += step) {
    V inputs[kInputs];
    V outputs[kOutputs];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) inputs[k] = reinterpret_cast<const V*>(operands.data[kOutputs + k])[item];
    apply_vectors<kOutputs, kInputs>(function, outputs, inputs);
#pragma unroll
    for (int k = 0; k < kOutputs; ++k) reinterpret_cast<V*>(operands.data[k])[item] = outputs[k];
  }
  const int64_t item = vectors * kVector + thread;
  if (item < numel) {
    T from[kInputs];
    T to[kOutputs];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) from[k] = operands.data[kOutputs + k][item];
    apply<kOutputs>(function, to, from, std::make_index_sequence<kOutputs>{}, std::make_index_sequence<kInputs>{});
#pragma unroll
    for (int k = 0; k < kOutputs; ++k) operands.data[k][item] = to[k];
  }
}

template <int kOutputs, int kInputs, class Index, class D, class T, class Function>
__global__ void __launch_bounds__(kThreads) strided_kernel(
    int64_t numel, Pointers<T, kOutputs + kInputs> operands, Strides<D, kOutputs + kInputs> layout, Function function) {
  constexpr int kOperands = kOutputs + kInputs;
  constexpr int kItems = kItemsPerThread<Index>;
  constexpr int64_t kTile = int64_t{kThreads} * kItems;
  for (int64_t tile = blockIdx.x * kTile; tile < numel; tile += gridDim.x * kTile) {
    // All loads come before the first use, so that they are in flight together.
    T from[kItems][kInputs];
    T* targets[kItems][kOutputs];
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      const int64_t item = tile + j * kThreads + threadIdx.x;
      if (item >= numel) break;
      T* pointers[kOperands];
      locate<Index>(static_cast<Index>(item), operands, layout, pointers);
#pragma unroll
      for (int k = 0; k < kOutputs; ++k) targets[j][k] = pointers[k];
#pragma unroll
      for (int k = 0; k < kInputs; ++k) from[j][k] = *pointers[kOutputs + k];
    }
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      if (tile + j * kThreads + threadIdx.x >= numel) break;
      T to[kOutputs];
      apply<kOutputs>(function, to, from[j], std::make_index_sequence<kOutputs>{}, std::make_index_sequence<kInputs>{});
#pragma unroll
      for (int k = 0; k < kOutputs; ++k) *targets[j][k] = to[k];
    }
  }
}

// In its innermost dimension each operand is dense or broadcast. The layout counts that dimension in vectors.
template <int kOutputs, int kInputs, int kVector, class T, class Function>
__global__ void __launch_bounds__(kThreads) broadcast_kernel(
    int64_t vectors, Pointers<T, kOutputs + kInputs> operands, Strides<Divisor, kOutputs + kInputs> layout,
    Function function) {
  using V = Vector<T, kVector>;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t item = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; item < vectors; item += step) {
    T* pointers[kOutputs + kInputs];
    locate(static_cast<uint32_t>(item), operands, layout, pointers);
    V inputs[kInputs];
    V outputs[kOutputs];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      if (layout.strides[kOutputs + k][0] != 0) {
        inputs[k] = *reinterpret_cast<const V*>(pointers[kOutputs + k]);
      } else {
        const T value = *pointers[kOutputs + k];
#pragma unroll
        for (int j = 0; j < kVector; ++j) inputs[k].values[j] = value;
      }
    }
    apply_vectors<kOutputs, kInputs>(function, outputs, inputs);
#pragma unroll
    for (int k = 0; k < kOutputs; ++k) *reinterpret_cast<V*>(pointers[k]) = outputs[k];
  }
}

template <class T, int kVector, int kOperands>
bool is_aligned(const Pointers<T, kOperands>& operands) {
  return std::all_of(operands.data, operands.data + kOperands, [](const T* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % alignof(Vector<T, kVector>) == 0;
  });
}

// Whether the layout can be counted in vectors, and if so counts it.
template <int kVector, int kOutputs, int kOperands>
bool count_in_vectors(ElementwiseLayout<kOperands>& layout) {
  if (layout.dim == 0 || layout.sizes[0] % kVector != 0 || layout.numel > INT32_MAX) return false;
  for (int k = 0; k < kOperands; ++k) {
    const int64_t* strides = layout.strides[k];
    const bool broadcast = strides[0] == 0 && k >= kOutputs;
    if (broadcast) continue;
    const bool aligned =
        std::all_of(strides + 1, strides + layout.dim, [](int64_t stride) { return stride % kVector == 0; });
    if (strides[0] != 1 || !aligned) return false;
  }
  layout.sizes[0] /= kVector;
  for (int k = 0; k < kOperands; ++k) layout.strides[k][0] *= kVector;
  return true;
}

template <class Function>
Error elementwise(
    ScalarType dtype, int64_t dim, const int64_t* geometry, void* const* data, const double* numbers,
    void* stream_handle) {
  const Function function = make_function<Function>(numbers);
  constexpr int kOutputs = Operands<Function>::kOutputs;
  constexpr int kInputs = Operands<Function>::kInputs;
  constexpr int kOperands = kOutputs + kInputs;
  ElementwiseLayout<kOperands> layout;
  if (const Error error = make_layout(dim, geometry, layout)) return error;
  if (layout.numel == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  return dispatch(dtype, [&](auto scalar) {
    using T = decltype(scalar);
    Pointers<T, kOperands> operands;
    for (int k = 0; k < kOperands; ++k) operands.data[k] = static_cast<T*>(data[k]);
    constexpr int kVector = 16 / sizeof(T);
    if (layout.is_contiguous() && is_aligned<T, kVector>(operands)) {
      contiguous_kernel<kOutputs, kInputs, kVector>
          <<<blocks_for(layout.numel, kVector), kThreads, 0, stream>>>(layout.numel, operands, function);
    } else if (is_aligned<T, kVector>(operands) && count_in_vectors<kVector, kOutputs>(layout)) {
      const int64_t vectors = layout.numel / kVector;
      broadcast_kernel<kOutputs, kInputs, kVector><<<blocks_for(vectors), kThreads, 0, stream>>>(
          vectors, operands, Strides<Divisor, kOperands>(layout), function);
    } else if (layout.numel <= INT32_MAX) {
      using Index = uint32_t;
      strided_kernel<kOutputs, kInputs, Index>
          <<<blocks_for(layout.numel, kItemsPerThread<Index>), kThreads, 0, stream>>>(
              layout.numel, operands, Strides<Divisor, kOperands>(layout), function);
    } else {
      using Index = int64_t;
      strided_kernel<kOutputs, kInputs, Index>
          <<<blocks_for(layout.numel, kItemsPerThread<Index>), kThreads, 0, stream>>>(
              layout.numel, operands, Strides<WideDivisor, kOperands>(layout), function);
    }
    return launch_error();
  });
}

}  // namespace extops::cuda
