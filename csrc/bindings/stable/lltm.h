// The LLTM on torch's stable ABI; see device.h for what a `Device` is.
#pragma once

#include "../../kernels/lltm.h"
#include "device.h"

namespace extops::stable {

inline int64_t elements(const LltmSizes& sizes) { return sizes.batch * sizes.state_size; }

// A piece is a column of the state.
inline int64_t grain_of_whole(const LltmSizes& sizes) { return grain_of(3 * sizes.batch * sizes.columns()); }

template <class Device>
std::array<Tensor, 2> run_cell(
    const char* op, ScalarType dtype, const LltmSizes& sizes, const Tensor* bias, const Tensor& gates,
    const Tensor& old_cell) {
  return run<Device, LltmCellWithBias>(
      op, Device::lltm_cell, dtype, sizes, {bias, &gates, &old_cell}, old_cell, elements(sizes), kPointwiseGrain);
}

template <class Device>
std::array<Tensor, 2> lltm_cell(const Tensor& gates, const Tensor& old_cell) {
  constexpr const char* kOp = "lltm_cell";
  const Sizes cell = matrix_sizes(kOp, "old_cell", old_cell);
  const LltmSizes sizes{cell[0], 0, cell[1]};
  check<LltmCell>(kOp, sizes, {&gates, &old_cell}, "old_cell", old_cell);
  return run_cell<Device>(kOp, kernel_dtype(kOp, "gates", gates), sizes, nullptr, gates, old_cell);
}

template <class Device>
std::array<Tensor, 2> lltm_cell_backward(
    const std::optional<Tensor>& grad_h, const std::optional<Tensor>& grad_cell, const Tensor& gates,
    const Tensor& new_cell) {
  constexpr const char* kOp = "lltm_cell_backward";
  const Sizes cell = matrix_sizes(kOp, "new_cell", new_cell);
  const LltmSizes sizes{cell[0], 0, cell[1]};
  const Tensors tensors{get(grad_h), get(grad_cell), &gates, &new_cell};
  check<LltmCellBackward>(kOp, sizes, tensors, "new_cell", new_cell);
  return run<Device, LltmCellBackward>(
      kOp, Device::lltm_cell_backward, kernel_dtype(kOp, "gates", gates), sizes, tensors, new_cell, elements(sizes),
      kPointwiseGrain);
}

template <class Device>
std::array<Tensor, 3> lltm(
    const Tensor& input, const Tensor& weights, const Tensor& bias, const Tensor& old_h, const Tensor& old_cell,
    const bool& allow_tf32) {
  constexpr const char* kOp = "lltm";
  const Sizes rows = matrix_sizes(kOp, "input", input);
  const LltmSizes sizes{rows[0], rows[1], matrix_sizes(kOp, "old_h", old_h)[1]};
  const Tensors tensors{&input, &weights, &bias, &old_h, &old_cell};
  check<LltmForward>(kOp, sizes, tensors, "input", input);
  [[maybe_unused]] const typename Device::Guard guard(input);
  const ScalarType dtype = gemm_dtype<Device>(kernel_dtype(kOp, "input", input), allow_tf32);
  if (const int64_t alignment = Device::lltm_alignment(dtype, sizes)) {
    return run<Device, LltmForward>(
        kOp, Device::lltm, dtype, sizes, tensors, input, sizes.state_size, grain_of_whole(sizes), alignment);
  }
  // The kernel adds the bias for free. In 16-bit types linear() adds it, before it rounds the result.
  const Tensor x = cat_columns(old_h, input);
  Tensor gates = is_half(dtype) ? linear(x, weights, bias) : mm(x, transpose(weights));
  auto [new_h, new_cell] = run_cell<Device>(kOp, dtype, sizes, is_half(dtype) ? nullptr : &bias, gates, old_cell);
  return {std::move(new_h), std::move(new_cell), std::move(gates)};
}

// The gradient of the bias.
template <class Device>
Tensor bias_backward(const char* op, ScalarType dtype, const LltmSizes& sizes, const Tensor& grad_gates) {
  if constexpr (Device::kIsCuda) {
    if (Device::lltm_bias_backward_alignment(dtype, sizes) != 0) {
      auto [grad_bias] = run<Device, LltmBiasBackward>(
          op, Device::lltm_bias_backward, dtype, sizes, {&grad_gates}, grad_gates, sizes.state_size, 1);
      return std::move(grad_bias);
    }
  }
  return sum_rows(grad_gates);
}

template <class Device>
std::array<Tensor, 4> lltm_backward(
    const std::optional<Tensor>& grad_h, const std::optional<Tensor>& grad_cell, const Tensor& input,
    const Tensor& old_h, const Tensor& gates, const Tensor& new_cell, const bool& allow_tf32) {
  constexpr const char* kOp = "lltm_backward";
  const Sizes cell = matrix_sizes(kOp, "new_cell", new_cell);
  const LltmSizes sizes{cell[0], matrix_sizes(kOp, "input", input)[1], cell[1]};
  const Tensors tensors{get(grad_h), get(grad_cell), &input, &old_h, &gates, &new_cell};
  check<LltmBackward>(kOp, sizes, tensors, "new_cell", new_cell);
  [[maybe_unused]] const typename Device::Guard guard(new_cell);
  const ScalarType dtype = gemm_dtype<Device>(kernel_dtype(kOp, "gates", gates), allow_tf32);
  if (const int64_t alignment = Device::lltm_backward_alignment(dtype, sizes)) {
    return run<Device, LltmBackward>(
        kOp, Device::lltm_backward, dtype, sizes, tensors, gates, sizes.state_size, grain_of_whole(sizes), alignment);
  }
  auto [grad_gates, grad_old_cell] = lltm_cell_backward<Device>(grad_h, grad_cell, gates, new_cell);
  Tensor grad_weights = mm(transpose(grad_gates), cat_columns(old_h, input));
  Tensor grad_bias = bias_backward<Device>(kOp, dtype, sizes, grad_gates);
  return {std::move(grad_gates), std::move(grad_old_cell), std::move(grad_weights), std::move(grad_bias)};
}

template <class Device>
std::array<Tensor, 2> lltm_input_backward(const Tensor& grad_gates, const Tensor& weights) {
  constexpr const char* kOp = "lltm_input_backward";
  const Sizes gates = matrix_sizes(kOp, "grad_gates", grad_gates);
  const int64_t state_size = gates[1] / 3;
  const int64_t features = matrix_sizes(kOp, "weights", weights)[1] - state_size;
  const LltmSizes sizes{gates[0], std::max<int64_t>(features, 0), state_size};
  check<LltmInputBackward>(kOp, sizes, {&grad_gates, &weights}, "grad_gates", grad_gates);
  [[maybe_unused]] const typename Device::Guard guard(grad_gates);
  if constexpr (Device::kIsCuda) {
    const ScalarType dtype = kernel_dtype(kOp, "grad_gates", grad_gates);
    if (Device::lltm_input_backward_alignment(dtype, sizes) != 0) {
      return run<Device, LltmInputBackward>(
          kOp, Device::lltm_input_backward, dtype, sizes, {&grad_gates, &weights}, grad_gates, state_size, 1);
    }
  }
  // Two GEMMs, not two views of one: the results of an operator may not share memory.
  return {mm(grad_gates, columns(weights, 0, state_size)), mm(grad_gates, columns(weights, state_size, features))};
}

template <class Device, class Library>
void register_lltm(Library& library) {
  library.impl("lltm", &Boxed<&lltm<Device>>::call);
  library.impl("lltm_backward", &Boxed<&lltm_backward<Device>>::call);
  library.impl("lltm_input_backward", &Boxed<&lltm_input_backward<Device>>::call);
  library.impl("lltm_cell", &Boxed<&lltm_cell<Device>>::call);
  library.impl("lltm_cell_backward", &Boxed<&lltm_cell_backward<Device>>::call);
}

}  // namespace extops::stable
