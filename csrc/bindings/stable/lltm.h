// The LLTM on torch's stable ABI.
// A `Device` is a type with the kernels' entry points and a `run(tensor, numel, kernel)` that calls `kernel` with what
// the entry points take last. `Device::kHasSmallInputBackward` tells whether it has kernels for the whole of a small
// problem.
#pragma once

#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "aten.h"
#include "checks.h"

namespace extops::stable {

inline void check_rank(const char* op, const char* name, const Tensor& tensor, const char* axes, int64_t rank) {
  STD_TORCH_CHECK(
      tensor.dim() == rank, op, ": expected `", name, "` to have ", rank, " dimensions [", axes, "], but got ",
      tensor.dim(), " dimensions: ", to_string(tensor.sizes()));
}

inline void check_cell(
    const char* op, const Tensor& products, const Tensor& bias, const char* name, const Tensor& cell) {
  check_rank(op, name, cell, "batch, state_size", 2);
  check_matches(op, "products", products, name, cell);
  check_matches(op, "bias", bias, name, cell);
  check_sizes(op, "products", products, {cell.size(0), 3 * cell.size(1)});
  check_sizes(op, "bias", bias, {3 * cell.size(1)});
}

struct Gradient {
  const void* data = nullptr;
  int64_t row_stride = 0;
  int64_t column_stride = 0;

  Gradient(const char* op, const char* name, const std::optional<Tensor>& gradient, const Tensor& new_cell) {
    if (!gradient.has_value() || !gradient->defined()) return;
    check_matches(op, name, *gradient, "new_cell", new_cell);
    check_sizes(op, name, *gradient, {new_cell.size(0), new_cell.size(1)});
    data = gradient->const_data_ptr();
    row_stride = gradient->stride(0);
    column_stride = gradient->stride(1);
  }
};

template <class Device>
std::tuple<Tensor, Tensor> lltm_cell(const Tensor& products, const Tensor& bias, const Tensor& old_cell) {
  constexpr const char* kOp = "lltm_cell";
  check_cell(kOp, products, bias, "old_cell", old_cell);
  const ScalarType dtype = kernel_dtype(kOp, "products", products);
  const Tensor dense_products = as_contiguous(products);
  const Tensor dense_bias = as_contiguous(bias);
  const Tensor dense_cell = as_contiguous(old_cell);
  const Tensor new_h = allocate_like(dense_cell);
  const Tensor new_cell = allocate_like(dense_cell);
  Device::run(old_cell, dense_cell.numel(), [&](auto... where) {
    return Device::lltm_cell(
        dtype, dense_cell.size(0), dense_cell.size(1), dense_products.const_data_ptr(), dense_bias.const_data_ptr(),
        dense_cell.const_data_ptr(), new_h.mutable_data_ptr(), new_cell.mutable_data_ptr(), where...);
  });
  return {new_h, new_cell};
}

template <class Device>
std::tuple<Tensor, Tensor> lltm_cell_backward(
    const std::optional<Tensor>& grad_h, const std::optional<Tensor>& grad_cell, const Tensor& products,
    const Tensor& bias, const Tensor& new_cell) {
  constexpr const char* kOp = "lltm_cell_backward";
  check_cell(kOp, products, bias, "new_cell", new_cell);
  const ScalarType dtype = kernel_dtype(kOp, "products", products);
  const Gradient upstream_h(kOp, "grad_h", grad_h, new_cell);
  const Gradient upstream_cell(kOp, "grad_cell", grad_cell, new_cell);
  const Tensor dense_products = as_contiguous(products);
  const Tensor dense_bias = as_contiguous(bias);
  const Tensor dense_cell = as_contiguous(new_cell);
  const Tensor grad_products = allocate_like(dense_products);
  const Tensor grad_old_cell = allocate_like(dense_cell);
  Device::run(new_cell, dense_cell.numel(), [&](auto... where) {
    return Device::lltm_cell_backward(
        dtype, dense_cell.size(0), dense_cell.size(1), upstream_h.data, upstream_h.row_stride, upstream_h.column_stride,
        upstream_cell.data, upstream_cell.row_stride, upstream_cell.column_stride, dense_products.const_data_ptr(),
        dense_bias.const_data_ptr(), dense_cell.const_data_ptr(), grad_products.mutable_data_ptr(),
        grad_old_cell.mutable_data_ptr(), where...);
  });
  return {grad_products, grad_old_cell};
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor> small_lltm(
    const Tensor& input, const Tensor& weights, const Tensor& bias, const Tensor& old_h, const Tensor& old_cell) {
  const ScalarType dtype = static_cast<::ScalarType>(input.scalar_type());
  const int64_t batch = input.size(0);
  const int64_t state_size = old_h.size(1);
  const Tensor x = as_contiguous(input);
  const Tensor w = as_contiguous(weights);
  const Tensor b = as_contiguous(bias);
  const Tensor h = as_contiguous(old_h);
  const Tensor c = as_contiguous(old_cell);
  const Tensor new_h = allocate(c, batch, state_size);
  const Tensor new_cell = allocate(c, batch, state_size);
  const Tensor products = allocate(c, batch, 3 * state_size);
  Device::run_whole(c, [&](auto... where) {
    return Device::lltm(
        dtype, batch, input.size(1), state_size, x.const_data_ptr(), w.const_data_ptr(), b.const_data_ptr(),
        h.const_data_ptr(), c.const_data_ptr(), new_h.mutable_data_ptr(), new_cell.mutable_data_ptr(),
        products.mutable_data_ptr(), where...);
  });
  return {new_h, new_cell, products};
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor> lltm(
    const Tensor& input, const Tensor& weights, const Tensor& bias, const Tensor& old_h, const Tensor& old_cell) {
  constexpr const char* kOp = "lltm";
  check_rank(kOp, "input", input, "batch, input_features", 2);
  check_rank(kOp, "old_h", old_h, "batch, state_size", 2);
  check_matches(kOp, "weights", weights, "input", input);
  check_matches(kOp, "bias", bias, "input", input);
  check_matches(kOp, "old_h", old_h, "input", input);
  check_matches(kOp, "old_cell", old_cell, "input", input);
  const int64_t batch = input.size(0);
  const int64_t features = input.size(1);
  const int64_t state_size = old_h.size(1);
  check_sizes(kOp, "old_h", old_h, {batch, state_size});
  check_sizes(kOp, "old_cell", old_cell, {batch, state_size});
  check_sizes(kOp, "weights", weights, {3 * state_size, state_size + features});
  check_sizes(kOp, "bias", bias, {3 * state_size});
  if (Device::lltm_is_fast(kernel_dtype(kOp, "input", input), batch, features, state_size)) {
    return small_lltm<Device>(input, weights, bias, old_h, old_cell);
  }
  const Tensor products = linear(cat_columns(old_h, input), weights);
  const auto [new_h, new_cell] = lltm_cell<Device>(products, bias, old_cell);
  return {new_h, new_cell, products};
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor, Tensor> small_lltm_backward(
    const Gradient& grad_h, const Gradient& grad_cell, const Tensor& input, const Tensor& bias, const Tensor& old_h,
    const Tensor& products, const Tensor& new_cell) {
  const ScalarType dtype = static_cast<::ScalarType>(products.scalar_type());
  const int64_t batch = input.size(0);
  const int64_t features = input.size(1);
  const int64_t state_size = old_h.size(1);
  const Tensor x = as_contiguous(input);
  const Tensor b = as_contiguous(bias);
  const Tensor h = as_contiguous(old_h);
  const Tensor p = as_contiguous(products);
  const Tensor c = as_contiguous(new_cell);
  const Tensor grad_products = allocate(p, batch, 3 * state_size);
  const Tensor grad_old_cell = allocate(c, batch, state_size);
  const Tensor grad_weights = allocate(p, 3 * state_size, state_size + features);
  const Tensor grad_bias = allocate_like(b);
  Device::run_whole(c, [&](auto... where) {
    return Device::lltm_backward(
        dtype, batch, features, state_size, grad_h.data, grad_h.row_stride, grad_h.column_stride, grad_cell.data,
        grad_cell.row_stride, grad_cell.column_stride, x.const_data_ptr(), b.const_data_ptr(), h.const_data_ptr(),
        p.const_data_ptr(), c.const_data_ptr(), grad_products.mutable_data_ptr(), grad_old_cell.mutable_data_ptr(),
        grad_weights.mutable_data_ptr(), grad_bias.mutable_data_ptr(), where...);
  });
  return {grad_products, grad_old_cell, grad_weights, grad_bias};
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor, Tensor> lltm_backward(
    const std::optional<Tensor>& grad_h, const std::optional<Tensor>& grad_cell, const Tensor& input,
    const Tensor& bias, const Tensor& old_h, const Tensor& products, const Tensor& new_cell) {
  constexpr const char* kOp = "lltm_backward";
  check_cell(kOp, products, bias, "new_cell", new_cell);
  check_rank(kOp, "input", input, "batch, input_features", 2);
  check_matches(kOp, "input", input, "new_cell", new_cell);
  check_matches(kOp, "old_h", old_h, "new_cell", new_cell);
  const int64_t batch = new_cell.size(0);
  const int64_t features = input.size(1);
  const int64_t state_size = new_cell.size(1);
  check_sizes(kOp, "input", input, {batch, features});
  check_sizes(kOp, "old_h", old_h, {batch, state_size});
  if (Device::lltm_backward_is_fast(kernel_dtype(kOp, "products", products), batch, features, state_size)) {
    return small_lltm_backward<Device>(
        Gradient(kOp, "grad_h", grad_h, new_cell), Gradient(kOp, "grad_cell", grad_cell, new_cell), input, bias, old_h,
        products, new_cell);
  }
  const auto [grad_products, grad_old_cell] = lltm_cell_backward<Device>(grad_h, grad_cell, products, bias, new_cell);
  const Tensor grad_weights = mm(torch::stable::transpose(grad_products, 0, 1), cat_columns(old_h, input));
  return {grad_products, grad_old_cell, grad_weights, sum_rows(grad_products)};
}

template <class Device>
std::tuple<Tensor, Tensor> lltm_input_backward(const Tensor& grad_products, const Tensor& weights) {
  constexpr const char* kOp = "lltm_input_backward";
  check_rank(kOp, "grad_products", grad_products, "batch, 3*state_size", 2);
  check_rank(kOp, "weights", weights, "3*state_size, state_size + input_features", 2);
  check_matches(kOp, "weights", weights, "grad_products", grad_products);
  const int64_t batch = grad_products.size(0);
  const int64_t state_size = grad_products.size(1) / 3;
  const int64_t features = weights.size(1) - state_size;
  check_sizes(kOp, "grad_products", grad_products, {batch, 3 * state_size});
  STD_TORCH_CHECK(
      weights.size(0) == 3 * state_size && features >= 0, kOp,
      ": expected `weights` to have shape [3*state_size, state_size + input_features] with state_size = ", state_size,
      ", but got ", to_string(weights.sizes()));
  if constexpr (Device::kHasSmallInputBackward) {
    const ScalarType dtype = kernel_dtype(kOp, "grad_products", grad_products);
    if (Device::lltm_input_backward_is_fast(dtype, batch, features, state_size)) {
      const Tensor p = as_contiguous(grad_products);
      const Tensor w = as_contiguous(weights);
      const Tensor grad_old_h = allocate(p, batch, state_size);
      const Tensor grad_input = allocate(p, batch, features);
      Device::run_whole(p, [&](auto... where) {
        return Device::lltm_input_backward(
            batch, features, state_size, p.const_data_ptr(), w.const_data_ptr(), grad_old_h.mutable_data_ptr(),
            grad_input.mutable_data_ptr(), where...);
      });
      return {grad_old_h, grad_input};
    }
  }
  // Two products, not two views of one: the results of an operator may not share memory.
  Tensor columns = weights;
  const Tensor grad_old_h = mm(grad_products, torch::stable::narrow(columns, 1, 0, state_size));
  return {grad_old_h, mm(grad_products, torch::stable::narrow(columns, 1, state_size, features))};
}

template <class Device>
void register_lltm(torch::stable::detail::StableLibrary& library) {
  library.impl("lltm", TORCH_BOX(&lltm<Device>));
  library.impl("lltm_backward", TORCH_BOX(&lltm_backward<Device>));
  library.impl("lltm_input_backward", TORCH_BOX(&lltm_input_backward<Device>));
  library.impl("lltm_cell", TORCH_BOX(&lltm_cell<Device>));
  library.impl("lltm_cell_backward", TORCH_BOX(&lltm_cell_backward<Device>));
}

}  // namespace extops::stable
