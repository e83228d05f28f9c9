// Applies a function to every element of strided operands.
#pragma once

#include <algorithm>
#include <tuple>
#include <type_traits>
#include <utility>

#include "../../elementwise/function.h"
#include "../elementwise_layout.h"
#include "half.h"
#include "scalar.h"
#include "vectorize.h"

namespace extops::cpu {

template <class Function, class T>
class ElementwiseLoop {
 public:
  static constexpr int kOutputs = Operands<Function>::kOutputs;
  static constexpr int kInputs = Operands<Function>::kInputs;
  static constexpr int kOperands = kOutputs + kInputs;

  ElementwiseLoop(const ElementwiseLayout<kOperands>& layout, void* const* data, const Function& function)
      : layout_(layout), function_(function) {
    for (int operand = 0; operand < kOperands; ++operand) data_[operand] = static_cast<T*>(data[operand]);
  }

  [[gnu::always_inline]] void run(int64_t begin, int64_t end) const {
    int64_t index[kMaxDims] = {};
    T* pointers[kOperands];
    locate(begin, index, pointers);
    const bool rows_are_dense = layout_.rows_are_dense();
    const int64_t longest = rows_are_dense ? end - begin : kPiece;
    for (int64_t done = begin; done < end;) {
      const int64_t count = std::min({longest, layout_.row_size() - index[0], end - done});
      if (rows_are_dense) {
        apply(pointers, count);
      } else {
        apply_strided(pointers, count);
      }
      done += count;
      advance(count, index, pointers);
    }
  }

 private:
  // Strided pieces pass through buffers that stay in the L1 cache, so that one vector loop serves all.
  static constexpr int64_t kPiece = 256;

  [[gnu::always_inline]] void locate(int64_t element, int64_t* index, T** pointers) const {
    for (int operand = 0; operand < kOperands; ++operand) pointers[operand] = data_[operand];
    for (int d = 0; d < layout_.dim; ++d) {
      index[d] = element % layout_.sizes[d];
      element /= layout_.sizes[d];
      for (int operand = 0; operand < kOperands; ++operand) pointers[operand] += index[d] * layout_.strides[operand][d];
    }
  }

  [[gnu::always_inline]] void advance(int64_t count, int64_t* index, T** pointers) const {
    index[0] += count;
    if (layout_.dim == 0) return;
    for (int operand = 0; operand < kOperands; ++operand) pointers[operand] += count * layout_.strides[operand][0];
    for (int d = 0; d + 1 < layout_.dim && index[d] == layout_.sizes[d]; ++d) {
      index[d] = 0;
      ++index[d + 1];
      for (int operand = 0; operand < kOperands; ++operand) {
        pointers[operand] += layout_.strides[operand][d + 1] - layout_.sizes[d] * layout_.strides[operand][d];
      }
    }
  }

  [[gnu::always_inline]] void apply_strided(T* const* pointers, int64_t count) const {
    T buffers[kOperands][kPiece];
    T* sources[kOperands];
    for (int operand = 0; operand < kOperands; ++operand) {
      const int64_t stride = layout_.strides[operand][0];
      sources[operand] = stride == 1 ? pointers[operand] : buffers[operand];
      if (stride == 1 || operand < kOutputs) continue;
      for (int64_t j = 0; j < count; ++j) buffers[operand][j] = pointers[operand][j * stride];
    }
    apply(sources, count);
    for (int operand = 0; operand < kOutputs; ++operand) {
      const int64_t stride = layout_.strides[operand][0];
      if (stride == 1) continue;
      for (int64_t j = 0; j < count; ++j) pointers[operand][j * stride] = buffers[operand][j];
    }
  }

  [[gnu::always_inline]] void apply(T* const* pointers, int64_t count) const {
    if constexpr (std::is_same_v<T, Half>) {
      apply_half(pointers, count);
    } else {
      apply(pointers, count, std::make_index_sequence<kOutputs>{}, std::make_index_sequence<kInputs>{});
    }
  }

  // Compilers do not vectorise with the conversion instructions of half: whole pieces are converted instead.
  [[gnu::always_inline]] void apply_half(T* const* pointers, int64_t count) const {
    float buffers[kOperands][kPiece];
    float* pieces[kOperands];
    for (int operand = 0; operand < kOperands; ++operand) pieces[operand] = buffers[operand];
    for (int64_t done = 0; done < count; done += kPiece) {
      const int64_t size = std::min(kPiece, count - done);
      for (int k = kOutputs; k < kOperands; ++k) widen(pointers[k] + done, buffers[k], size);
      apply(pieces, size, std::make_index_sequence<kOutputs>{}, std::make_index_sequence<kInputs>{});
      for (int k = 0; k < kOutputs; ++k) narrow(buffers[k], pointers[k] + done, size);
    }
  }

  // An output may be the very memory of an input, never a shifted part of it: the caller sees to that.
  template <class U, size_t... Outputs, size_t... Inputs>
  [[gnu::always_inline]] void apply(
      U* const* pointers, int64_t count, std::index_sequence<Outputs...>, std::index_sequence<Inputs...>) const {
    using C = typename Compute<U>::type;
    const std::tuple outputs{pointers[Outputs]...};
    const std::tuple inputs{pointers[kOutputs + Inputs]...};
#pragma GCC ivdep
    for (int64_t j = 0; j < count; ++j) {
      C results[kOutputs];
      function_(C(load(std::get<Inputs>(inputs)[j]))..., results[Outputs]...);
      (store(std::get<Outputs>(outputs)[j], results[Outputs]), ...);
    }
  }

  const ElementwiseLayout<kOperands>& layout_;
  const Function function_;
  T* data_[kOperands];
};

template <class Function>
Error elementwise(
    ScalarType dtype, int64_t dim, const int64_t* geometry, void* const* data, const double* numbers, int64_t begin,
    int64_t end) {
  ElementwiseLayout<Operands<Function>::kOutputs + Operands<Function>::kInputs> layout;
  if (const Error error = make_layout(dim, geometry, layout)) return error;
  if (begin >= end) return nullptr;
  return dispatch(dtype, [&](auto scalar) -> Error {
    const ElementwiseLoop<Function, decltype(scalar)> loop(layout, data, make_function<Function>(numbers));
    vectorize([&]() __attribute__((always_inline)) { loop.run(begin, end); });
    return nullptr;
  });
}

}  // namespace extops::cpu
