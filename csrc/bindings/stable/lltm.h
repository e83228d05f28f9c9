// The LLTM on torch's stable ABI.
// A `Device` is a type with the kernels' entry points and a `run(tensor, numel, kernel)` that calls `kernel` with what
// the entry points take last; `run_small(tensor, batch, features, state_size, kernel)` does so for the kernels that
// take the whole of a small problem, of which `Device::kHasSmallInputBackward` tells whether it has the last.
// `Device::kHasTf32` tells whether those can multiply in TF32.
#pragma once

#include "aten.h"
#include "checks.h"

namespace extops::stable {

inline void check_rank(const char* op, const char* name, const Tensor& tensor, const char* axes, int64_t rank) {
  STD_TORCH_CHECK(
      tensor.dim() == rank, op, ": expected `", name, "` to have ", rank, " dimensions [", axes, "], but got ",
      tensor.dim(), " dimensions: ", to_string(tensor.sizes()));
}

// Returns the sizes of `cell`, [batch, state_size].
inline Sizes check_cell(
    const char* op, const Tensor& products, const Tensor& bias, const char* name, const Tensor& cell) {
  check_rank(op, name, cell, "batch, state_size", 2);
  const Options options = cell.options();
  check_matches(op, "products", products, name, options);
  check_matches(op, "bias", bias, name, options);
  const Sizes sizes = cell.sizes();
  check_sizes(op, "products", products, {sizes[0], 3 * sizes[1]});
  check_sizes(op, "bias", bias, {3 * sizes[1]});
  return sizes;
}

// How the device is to multiply.
template <class Device>
ScalarType product_dtype(ScalarType dtype, bool allow_tf32) {
  return dtype == ScalarType::Float && Device::kHasTf32 && allow_tf32 ? ScalarType::TF32 : dtype;
}

struct Gradient {
  const void* data = nullptr;
  int64_t row_stride = 0;
  int64_t column_stride = 0;

  Gradient(const char* op, const char* name, const std::optional<Tensor>& gradient, const Tensor& new_cell) {
    if (!gradient.has_value() || !gradient->defined()) return;
    check_matches(op, name, *gradient, "new_cell", new_cell.options());
    check_sizes(op, name, *gradient, new_cell.sizes());
    data = gradient->data();
    row_stride = gradient->strides()[0];
    column_stride = gradient->strides()[1];
  }
};

template <class Device>
std::tuple<Tensor, Tensor> lltm_cell(const Tensor& products, const Tensor& bias, const Tensor& old_cell) {
  constexpr const char* kOp = "lltm_cell";
  const Sizes sizes = check_cell(kOp, products, bias, "old_cell", old_cell);
  const Options options = old_cell.options();
  const ScalarType dtype = kernel_dtype(kOp, "products", options.dtype);
  const Dense p(products);
  const Dense b(bias);
  const Dense c(old_cell);
  Tensor new_h = allocate(options, sizes[0], sizes[1]);
  Tensor new_cell = allocate(options, sizes[0], sizes[1]);
  Device::run(old_cell, sizes[0] * sizes[1], [&](auto... where) {
    return Device::lltm_cell(
        dtype, sizes[0], sizes[1], p.data(), b.data(), c.data(), new_h.mutable_data(), new_cell.mutable_data(),
        where...);
  });
  return {std::move(new_h), std::move(new_cell)};
}

template <class Device>
std::tuple<Tensor, Tensor> lltm_cell_backward(
    const std::optional<Tensor>& grad_h, const std::optional<Tensor>& grad_cell, const Tensor& products,
    const Tensor& bias, const Tensor& new_cell) {
  constexpr const char* kOp = "lltm_cell_backward";
  const Sizes sizes = check_cell(kOp, products, bias, "new_cell", new_cell);
  const Options options = new_cell.options();
  const ScalarType dtype = kernel_dtype(kOp, "products", options.dtype);
  const Gradient upstream_h(kOp, "grad_h", grad_h, new_cell);
  const Gradient upstream_cell(kOp, "grad_cell", grad_cell, new_cell);
  const Dense p(products);
  const Dense b(bias);
  const Dense c(new_cell);
  Tensor grad_products = allocate(options, sizes[0], 3 * sizes[1]);
  Tensor grad_old_cell = allocate(options, sizes[0], sizes[1]);
  Device::run(new_cell, sizes[0] * sizes[1], [&](auto... where) {
    return Device::lltm_cell_backward(
        dtype, sizes[0], sizes[1], upstream_h.data, upstream_h.row_stride, upstream_h.column_stride, upstream_cell.data,
        upstream_cell.row_stride, upstream_cell.column_stride, p.data(), b.data(), c.data(),
        grad_products.mutable_data(), grad_old_cell.mutable_data(), where...);
  });
  return {std::move(grad_products), std::move(grad_old_cell)};
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor> small_lltm(
    ScalarType dtype, const Options& options, int64_t batch, int64_t features, int64_t state_size, const Tensor& input,
    const Tensor& weights, const Tensor& bias, const Tensor& old_h, const Tensor& old_cell) {
  const Dense x(input);
  const Dense w(weights);
  const Dense b(bias);
  const Dense h(old_h);
  const Dense c(old_cell);
  Tensor new_h = allocate(options, batch, state_size);
  Tensor new_cell = allocate(options, batch, state_size);
  Tensor products = allocate(options, batch, 3 * state_size);
  Device::run_small(input, batch, features, state_size, [&](auto... where) {
    return Device::lltm(
        dtype, batch, features, state_size, x.data(), w.data(), b.data(), h.data(), c.data(), new_h.mutable_data(),
        new_cell.mutable_data(), products.mutable_data(), where...);
  });
  return {std::move(new_h), std::move(new_cell), std::move(products)};
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor> lltm(
    const Tensor& input, const Tensor& weights, const Tensor& bias, const Tensor& old_h, const Tensor& old_cell,
    const bool& allow_tf32) {
  constexpr const char* kOp = "lltm";
  check_rank(kOp, "input", input, "batch, input_features", 2);
  check_rank(kOp, "old_h", old_h, "batch, state_size", 2);
  const Options options = input.options();
  check_matches(kOp, "weights", weights, "input", options);
  check_matches(kOp, "bias", bias, "input", options);
  check_matches(kOp, "old_h", old_h, "input", options);
  check_matches(kOp, "old_cell", old_cell, "input", options);
  const int64_t batch = input.sizes()[0];
  const int64_t features = input.sizes()[1];
  const int64_t state_size = old_h.sizes()[1];
  check_sizes(kOp, "old_h", old_h, {batch, state_size});
  check_sizes(kOp, "old_cell", old_cell, {batch, state_size});
  check_sizes(kOp, "weights", weights, {3 * state_size, state_size + features});
  check_sizes(kOp, "bias", bias, {3 * state_size});
  const ScalarType dtype = product_dtype<Device>(kernel_dtype(kOp, "input", options.dtype), allow_tf32);
  if (Device::lltm_is_fast(dtype, batch, features, state_size)) {
    return small_lltm<Device>(dtype, options, batch, features, state_size, input, weights, bias, old_h, old_cell);
  }
  Tensor products = linear(cat_columns(old_h, input), weights);
  auto [new_h, new_cell] = lltm_cell<Device>(products, bias, old_cell);
  return {std::move(new_h), std::move(new_cell), std::move(products)};
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor, Tensor> small_lltm_backward(
    ScalarType dtype, int64_t batch, int64_t features, int64_t state_size, const Gradient& grad_h,
    const Gradient& grad_cell, const Tensor& input, const Tensor& bias, const Tensor& old_h, const Tensor& products,
    const Tensor& new_cell) {
  const Dense x(input);
  const Dense b(bias);
  const Dense h(old_h);
  const Dense p(products);
  const Dense c(new_cell);
  const Options options = products.options();
  Tensor grad_products = allocate(options, batch, 3 * state_size);
  Tensor grad_old_cell = allocate(options, batch, state_size);
  Tensor grad_weights = allocate(options, 3 * state_size, state_size + features);
  Tensor grad_bias = allocate(options, 3 * state_size);
  Device::run_small(products, batch, features, state_size, [&](auto... where) {
    return Device::lltm_backward(
        dtype, batch, features, state_size, grad_h.data, grad_h.row_stride, grad_h.column_stride, grad_cell.data,
        grad_cell.row_stride, grad_cell.column_stride, x.data(), b.data(), h.data(), p.data(), c.data(),
        grad_products.mutable_data(), grad_old_cell.mutable_data(), grad_weights.mutable_data(),
        grad_bias.mutable_data(), where...);
  });
  return {std::move(grad_products), std::move(grad_old_cell), std::move(grad_weights), std::move(grad_bias)};
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor, Tensor> lltm_backward(
    const std::optional<Tensor>& grad_h, const std::optional<Tensor>& grad_cell, const Tensor& input,
    const Tensor& bias, const Tensor& old_h, const Tensor& products, const Tensor& new_cell, const bool& allow_tf32) {
  constexpr const char* kOp = "lltm_backward";
  const Sizes sizes = check_cell(kOp, products, bias, "new_cell", new_cell);
  const Options options = new_cell.options();
  check_rank(kOp, "input", input, "batch, input_features", 2);
  check_matches(kOp, "input", input, "new_cell", options);
  check_matches(kOp, "old_h", old_h, "new_cell", options);
  const int64_t batch = sizes[0];
  const int64_t features = input.sizes()[1];
  const int64_t state_size = sizes[1];
  check_sizes(kOp, "input", input, {batch, features});
  check_sizes(kOp, "old_h", old_h, {batch, state_size});
  const ScalarType dtype = product_dtype<Device>(kernel_dtype(kOp, "products", options.dtype), allow_tf32);
  if (Device::lltm_backward_is_fast(dtype, batch, features, state_size)) {
    return small_lltm_backward<Device>(
        dtype, batch, features, state_size, Gradient(kOp, "grad_h", grad_h, new_cell),
        Gradient(kOp, "grad_cell", grad_cell, new_cell), input, bias, old_h, products, new_cell);
  }
  auto [grad_products, grad_old_cell] = lltm_cell_backward<Device>(grad_h, grad_cell, products, bias, new_cell);
  Tensor grad_weights = mm(transpose(grad_products), cat_columns(old_h, input));
  Tensor grad_bias = sum_rows(grad_products);
  return {std::move(grad_products), std::move(grad_old_cell), std::move(grad_weights), std::move(grad_bias)};
}

template <class Device>
std::tuple<Tensor, Tensor> lltm_input_backward(const Tensor& grad_products, const Tensor& weights) {
  constexpr const char* kOp = "lltm_input_backward";
  check_rank(kOp, "grad_products", grad_products, "batch, 3*state_size", 2);
  check_rank(kOp, "weights", weights, "3*state_size, state_size + input_features", 2);
  const Options options = grad_products.options();
  check_matches(kOp, "weights", weights, "grad_products", options);
  const int64_t batch = grad_products.sizes()[0];
  const int64_t state_size = grad_products.sizes()[1] / 3;
  const int64_t features = weights.sizes()[1] - state_size;
  check_sizes(kOp, "grad_products", grad_products, {batch, 3 * state_size});
  STD_TORCH_CHECK(
      weights.sizes()[0] == 3 * state_size && features >= 0, kOp,
      ": expected `weights` to have shape [3*state_size, state_size + input_features] with state_size = ", state_size,
      ", but got ", to_string(weights.sizes()));
  if constexpr (Device::kHasSmallInputBackward) {
    const ScalarType dtype = kernel_dtype(kOp, "grad_products", options.dtype);
    if (Device::lltm_input_backward_is_fast(dtype, batch, features, state_size)) {
      const Dense p(grad_products);
      const Dense w(weights);
      Tensor grad_old_h = allocate(options, batch, state_size);
      Tensor grad_input = allocate(options, batch, features);
      Device::run_small(grad_products, batch, features, state_size, [&](auto... where) {
        return Device::lltm_input_backward(
            batch, features, state_size, p.data(), w.data(), grad_old_h.mutable_data(), grad_input.mutable_data(),
            where...);
      });
      return {std::move(grad_old_h), std::move(grad_input)};
    }
  }
  // Two products, not two views of one: the results of an operator may not share memory.
  return {
      mm(grad_products, columns(weights, 0, state_size)), mm(grad_products, columns(weights, state_size, features))};
}

template <class Device>
void register_lltm(torch::stable::detail::StableLibrary& library) {
  library.impl("lltm", &Boxed<&lltm<Device>>::call);
  library.impl("lltm_backward", &Boxed<&lltm_backward<Device>>::call);
  library.impl("lltm_input_backward", &Boxed<&lltm_input_backward<Device>>::call);
  library.impl("lltm_cell", &Boxed<&lltm_cell<Device>>::call);
  library.impl("lltm_cell_backward", &Boxed<&lltm_cell_backward<Device>>::call);
}

}  // namespace extops::stable
