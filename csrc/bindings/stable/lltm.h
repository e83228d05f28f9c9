// The LLTM on torch's stable ABI.
// A `Device` is a type with the kernels' entry points and a `run(tensor, numel, kernel)` that calls `kernel` with what
// the entry points take last; `run_small(tensor, batch, features, state_size, kernel)` does so for the kernels that
// take the whole of a small problem. Some kernels, and TF32, exist where `Device::kIsCuda` alone.
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
inline Sizes check_cell(const char* op, const Tensor& gates, const char* name, const Tensor& cell) {
  check_rank(op, name, cell, "batch, state_size", 2);
  const Options options = cell.options();
  check_matches(op, "gates", gates, name, options);
  const Sizes sizes = cell.sizes();
  check_sizes(op, "gates", gates, {sizes[0], 3 * sizes[1]});
  return sizes;
}

// How the device is to multiply.
template <class Device>
ScalarType product_dtype(ScalarType dtype, bool allow_tf32) {
  return dtype == ScalarType::Float && Device::kIsCuda && allow_tf32 ? ScalarType::TF32 : dtype;
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

// Adds the bias, where there is one, to the gates first.
template <class Device>
std::tuple<Tensor, Tensor> run_cell(ScalarType dtype, const void* bias, const void* gates, const Tensor& old_cell) {
  const Sizes sizes = old_cell.sizes();
  const Dense c(old_cell);
  Tensor new_h = allocate(old_cell.options(), sizes[0], sizes[1]);
  Tensor new_cell = allocate(old_cell.options(), sizes[0], sizes[1]);
  Device::run(old_cell, sizes[0] * sizes[1], [&](auto... where) {
    return Device::lltm_cell(
        dtype, sizes[0], sizes[1], bias, const_cast<void*>(gates), c.data(), new_h.mutable_data(),
        new_cell.mutable_data(), where...);
  });
  return {std::move(new_h), std::move(new_cell)};
}

template <class Device>
std::tuple<Tensor, Tensor> lltm_cell(const Tensor& gates, const Tensor& old_cell) {
  constexpr const char* kOp = "lltm_cell";
  check_cell(kOp, gates, "old_cell", old_cell);
  const ScalarType dtype = kernel_dtype(kOp, "gates", old_cell.options().dtype);
  return run_cell<Device>(dtype, nullptr, Dense(gates).data(), old_cell);
}

template <class Device>
std::tuple<Tensor, Tensor> lltm_cell_backward(
    const std::optional<Tensor>& grad_h, const std::optional<Tensor>& grad_cell, const Tensor& gates,
    const Tensor& new_cell) {
  constexpr const char* kOp = "lltm_cell_backward";
  const Sizes sizes = check_cell(kOp, gates, "new_cell", new_cell);
  const Options options = new_cell.options();
  const ScalarType dtype = kernel_dtype(kOp, "gates", options.dtype);
  const Gradient upstream_h(kOp, "grad_h", grad_h, new_cell);
  const Gradient upstream_cell(kOp, "grad_cell", grad_cell, new_cell);
  const Dense z(gates);
  const Dense c(new_cell);
  Tensor grad_gates = allocate(options, sizes[0], 3 * sizes[1]);
  Tensor grad_old_cell = allocate(options, sizes[0], sizes[1]);
  Device::run(new_cell, sizes[0] * sizes[1], [&](auto... where) {
    return Device::lltm_cell_backward(
        dtype, sizes[0], sizes[1], upstream_h.data, upstream_h.row_stride, upstream_h.column_stride, upstream_cell.data,
        upstream_cell.row_stride, upstream_cell.column_stride, z.data(), c.data(), grad_gates.mutable_data(),
        grad_old_cell.mutable_data(), where...);
  });
  return {std::move(grad_gates), std::move(grad_old_cell)};
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor> small_lltm(
    ScalarType dtype, int64_t alignment, int64_t batch, int64_t features, int64_t state_size, const Tensor& input,
    const Tensor& weights, const Tensor& bias, const Tensor& old_h, const Tensor& old_cell) {
  const Options options = input.options();
  const Dense x(input, alignment);
  const Dense w(weights, alignment);
  const Dense b(bias);
  const Dense h(old_h, alignment);
  const Dense c(old_cell);
  Tensor new_h = allocate(options, batch, state_size);
  Tensor new_cell = allocate(options, batch, state_size);
  Tensor gates = allocate(options, batch, 3 * state_size);
  Device::run_small(input, batch, features, state_size, [&](auto... where) {
    return Device::lltm(
        dtype, batch, features, state_size, x.data(), w.data(), b.data(), h.data(), c.data(), new_h.mutable_data(),
        new_cell.mutable_data(), gates.mutable_data(), where...);
  });
  return {std::move(new_h), std::move(new_cell), std::move(gates)};
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
  if (const int64_t alignment = Device::lltm_alignment(dtype, batch, features, state_size)) {
    return small_lltm<Device>(dtype, alignment, batch, features, state_size, input, weights, bias, old_h, old_cell);
  }
  // The kernel adds the bias at no cost, but not where the product would be rounded before.
  const bool is_half = dtype == ScalarType::Half || dtype == ScalarType::BFloat16;
  const Tensor x = cat_columns(old_h, input);
  Tensor gates = is_half ? linear(x, weights, bias) : linear(x, weights);
  const Dense b(bias);
  auto [new_h, new_cell] = run_cell<Device>(dtype, is_half ? nullptr : b.data(), gates.mutable_data(), old_cell);
  return {std::move(new_h), std::move(new_cell), std::move(gates)};
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor, Tensor> small_lltm_backward(
    ScalarType dtype, int64_t alignment, int64_t batch, int64_t features, int64_t state_size, const Gradient& grad_h,
    const Gradient& grad_cell, const Tensor& input, const Tensor& old_h, const Tensor& gates, const Tensor& new_cell) {
  const Dense x(input, alignment);
  const Dense h(old_h, alignment);
  const Dense z(gates);
  const Dense c(new_cell);
  const Options options = gates.options();
  Tensor grad_gates = allocate(options, batch, 3 * state_size);
  Tensor grad_old_cell = allocate(options, batch, state_size);
  Tensor grad_weights = allocate(options, 3 * state_size, state_size + features);
  Tensor grad_bias = allocate(options, 3 * state_size);
  Device::run_small(gates, batch, features, state_size, [&](auto... where) {
    return Device::lltm_backward(
        dtype, batch, features, state_size, grad_h.data, grad_h.row_stride, grad_h.column_stride, grad_cell.data,
        grad_cell.row_stride, grad_cell.column_stride, x.data(), h.data(), z.data(), c.data(),
        grad_gates.mutable_data(), grad_old_cell.mutable_data(), grad_weights.mutable_data(), grad_bias.mutable_data(),
        where...);
  });
  return {std::move(grad_gates), std::move(grad_old_cell), std::move(grad_weights), std::move(grad_bias)};
}

// The gradient of the bias, for a grad_gates of the binding's own.
template <class Device>
Tensor bias_backward(ScalarType dtype, const Tensor& grad_gates, int64_t batch, int64_t features, int64_t state_size) {
  if constexpr (Device::kIsCuda) {
    if (Device::lltm_bias_backward_alignment(dtype, batch, features, state_size) != 0) {
      Tensor grad_bias = allocate(grad_gates.options(), 3 * state_size);
      Device::run(grad_gates, 3 * state_size, [&](auto... where) {
        return Device::lltm_bias_backward(
            dtype, batch, state_size, grad_gates.data(), grad_bias.mutable_data(), where...);
      });
      return grad_bias;
    }
  }
  return sum_rows(grad_gates);
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor, Tensor> lltm_backward(
    const std::optional<Tensor>& grad_h, const std::optional<Tensor>& grad_cell, const Tensor& input,
    const Tensor& old_h, const Tensor& gates, const Tensor& new_cell, const bool& allow_tf32) {
  constexpr const char* kOp = "lltm_backward";
  const Sizes sizes = check_cell(kOp, gates, "new_cell", new_cell);
  const Options options = new_cell.options();
  check_rank(kOp, "input", input, "batch, input_features", 2);
  check_matches(kOp, "input", input, "new_cell", options);
  check_matches(kOp, "old_h", old_h, "new_cell", options);
  const int64_t batch = sizes[0];
  const int64_t features = input.sizes()[1];
  const int64_t state_size = sizes[1];
  check_sizes(kOp, "input", input, {batch, features});
  check_sizes(kOp, "old_h", old_h, {batch, state_size});
  const ScalarType dtype = product_dtype<Device>(kernel_dtype(kOp, "gates", options.dtype), allow_tf32);
  if (const int64_t alignment = Device::lltm_backward_alignment(dtype, batch, features, state_size)) {
    return small_lltm_backward<Device>(
        dtype, alignment, batch, features, state_size, Gradient(kOp, "grad_h", grad_h, new_cell),
        Gradient(kOp, "grad_cell", grad_cell, new_cell), input, old_h, gates, new_cell);
  }
  auto [grad_gates, grad_old_cell] = lltm_cell_backward<Device>(grad_h, grad_cell, gates, new_cell);
  Tensor grad_weights = mm(transpose(grad_gates), cat_columns(old_h, input));
  Tensor grad_bias = bias_backward<Device>(dtype, grad_gates, batch, features, state_size);
  return {std::move(grad_gates), std::move(grad_old_cell), std::move(grad_weights), std::move(grad_bias)};
}

template <class Device>
std::tuple<Tensor, Tensor> lltm_input_backward(const Tensor& grad_gates, const Tensor& weights) {
  constexpr const char* kOp = "lltm_input_backward";
  check_rank(kOp, "grad_gates", grad_gates, "batch, 3*state_size", 2);
  check_rank(kOp, "weights", weights, "3*state_size, state_size + input_features", 2);
  const Options options = grad_gates.options();
  check_matches(kOp, "weights", weights, "grad_gates", options);
  const int64_t batch = grad_gates.sizes()[0];
  const int64_t state_size = grad_gates.sizes()[1] / 3;
  const int64_t features = weights.sizes()[1] - state_size;
  check_sizes(kOp, "grad_gates", grad_gates, {batch, 3 * state_size});
  STD_TORCH_CHECK(
      weights.sizes()[0] == 3 * state_size && features >= 0, kOp,
      ": expected `weights` to have shape [3*state_size, state_size + input_features] with state_size = ", state_size,
      ", but got ", to_string(weights.sizes()));
  if constexpr (Device::kIsCuda) {
    const ScalarType dtype = kernel_dtype(kOp, "grad_gates", options.dtype);
    if (Device::lltm_input_backward_alignment(dtype, batch, features, state_size) != 0) {
      const Dense g(grad_gates);
      const Dense w(weights);
      Tensor grad_old_h = allocate(options, batch, state_size);
      Tensor grad_input = allocate(options, batch, features);
      Device::run_small(grad_gates, batch, features, state_size, [&](auto... where) {
        return Device::lltm_input_backward(
            batch, features, state_size, g.data(), w.data(), grad_old_h.mutable_data(), grad_input.mutable_data(),
            where...);
      });
      return {std::move(grad_old_h), std::move(grad_input)};
    }
  }
  // Two products, not two views of one: the results of an operator may not share memory.
  return {mm(grad_gates, columns(weights, 0, state_size)), mm(grad_gates, columns(weights, state_size, features))};
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
