// The LLTM cell on torch's stable ABI.
// A `Device` is a type with the kernels' entry points and a `run(tensor, numel, kernel)` that calls `kernel` with what
// the entry points take last.
#pragma once

#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "checks.h"

namespace extops::stable {

inline void check_gates(const char* op, const Tensor& gates, const char* cell_name, const Tensor& cell) {
  STD_TORCH_CHECK(
      cell.dim() == 2, op, ": expected `", cell_name, "` to have 2 dimensions [batch, state_size], but got ",
      cell.dim());
  check_matches(op, "gates", gates, cell_name, cell);
  const int64_t expected[] = {cell.size(0), 3 * cell.size(1)};
  check_sizes(op, "gates", gates, torch::headeronly::IntHeaderOnlyArrayRef(expected, 2));
}

template <class Device>
std::tuple<Tensor, Tensor> lltm_cell(const Tensor& gates, const Tensor& old_cell) {
  constexpr const char* kOp = "lltm_cell";
  check_gates(kOp, gates, "old_cell", old_cell);
  const ScalarType dtype = kernel_dtype(kOp, "gates", gates);
  const Tensor dense_gates = as_contiguous(gates);
  const Tensor dense_cell = as_contiguous(old_cell);
  const Tensor new_h = torch::stable::empty_like(dense_cell);
  const Tensor new_cell = torch::stable::empty_like(dense_cell);
  Device::run(old_cell, dense_cell.numel(), [&](auto... where) {
    return Device::lltm_cell(
        dtype, dense_cell.size(0), dense_cell.size(1), dense_gates.const_data_ptr(), dense_cell.const_data_ptr(),
        new_h.mutable_data_ptr(), new_cell.mutable_data_ptr(), where...);
  });
  return {new_h, new_cell};
}

struct Gradient {
  const void* data = nullptr;
  int64_t row_stride = 0;
  int64_t column_stride = 0;

  Gradient(const char* op, const char* name, const std::optional<Tensor>& gradient, const Tensor& new_cell) {
    if (!gradient.has_value() || !gradient->defined()) return;
    check_matches(op, name, *gradient, "new_cell", new_cell);
    check_sizes(op, name, *gradient, new_cell.sizes());
    data = gradient->const_data_ptr();
    row_stride = gradient->stride(0);
    column_stride = gradient->stride(1);
  }
};

template <class Device>
std::tuple<Tensor, Tensor> lltm_cell_backward(
    const std::optional<Tensor>& grad_h, const std::optional<Tensor>& grad_cell, const Tensor& gates,
    const Tensor& new_cell) {
  constexpr const char* kOp = "lltm_cell_backward";
  check_gates(kOp, gates, "new_cell", new_cell);
  const ScalarType dtype = kernel_dtype(kOp, "gates", gates);
  const Gradient upstream_h(kOp, "grad_h", grad_h, new_cell);
  const Gradient upstream_cell(kOp, "grad_cell", grad_cell, new_cell);
  const Tensor dense_gates = as_contiguous(gates);
  const Tensor dense_cell = as_contiguous(new_cell);
  const Tensor grad_gates = torch::stable::empty_like(dense_gates);
  const Tensor grad_old_cell = torch::stable::empty_like(dense_cell);
  Device::run(new_cell, dense_cell.numel(), [&](auto... where) {
    return Device::lltm_cell_backward(
        dtype, dense_cell.size(0), dense_cell.size(1), upstream_h.data, upstream_h.row_stride, upstream_h.column_stride,
        upstream_cell.data, upstream_cell.row_stride, upstream_cell.column_stride, dense_gates.const_data_ptr(),
        dense_cell.const_data_ptr(), grad_gates.mutable_data_ptr(), grad_old_cell.mutable_data_ptr(), where...);
  });
  return {grad_gates, grad_old_cell};
}

template <class Device>
void register_lltm(torch::stable::detail::StableLibrary& library) {
  library.impl("lltm_cell", TORCH_BOX(&lltm_cell<Device>));
  library.impl("lltm_cell_backward", TORCH_BOX(&lltm_cell_backward<Device>));
}

}  // namespace extops::stable
