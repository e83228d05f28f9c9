// The elementwise product on torch's stable ABI.
// A `Device` is a type with the kernels' entry points and a `run(tensor, numel, kernel)` that calls `kernel` with what
// the entry points take last.
#pragma once

#include <vector>

#include "aten.h"
#include "elementwise.h"

namespace extops::stable {

inline std::vector<int64_t> broadcast_sizes(const char* op, const Tensor& a, const Tensor& b) {
  const Sizes a_sizes = a.sizes();
  const Sizes b_sizes = b.sizes();
  const size_t dim = std::max(a_sizes.size(), b_sizes.size());
  std::vector<int64_t> sizes(dim);
  for (size_t back = 1; back <= dim; ++back) {
    const int64_t a_size = back <= a_sizes.size() ? a_sizes[a_sizes.size() - back] : 1;
    const int64_t b_size = back <= b_sizes.size() ? b_sizes[b_sizes.size() - back] : 1;
    STD_TORCH_CHECK(
        a_size == b_size || a_size == 1 || b_size == 1, op, ": `a` of shape ", to_string(a_sizes), " and `b` of shape ",
        to_string(b_sizes), " cannot be broadcast together");
    sizes[dim - back] = a_size == 1 ? b_size : a_size;
  }
  return sizes;
}

// A new tensor for the product, laid out like the first factor that has its shape.
inline Tensor empty_product(const char* op, const Tensor& a, const Tensor& b) {
  if (has_sizes(a, b.sizes())) return allocate_like(a);
  const std::vector<int64_t> sizes = broadcast_sizes(op, a, b);
  if (has_sizes(a, sizes)) return allocate_like(a);
  if (has_sizes(b, sizes)) return allocate_like(b);
  std::vector<int64_t> strides(sizes.size());
  uint64_t stride = 1;  // of a shape too large to exist it overflows, and torch refuses the shape
  for (size_t d = sizes.size(); d-- > 0; stride *= std::max<int64_t>(sizes[d], 1)) strides[d] = stride;
  return allocate(a.options(), sizes, strides.data());
}

template <class Device>
void elementwise_mult_into(const char* op, const Tensor& a, const Tensor& b, const Tensor& out) {
  const ScalarType dtype = kernel_dtype(op, "a", a.options().dtype);
  Geometry geometry(out.sizes(), 3);
  geometry.add_output(out);
  geometry.add_input(a);
  geometry.add_input(b);
  run_elementwise<Device>(Device::elementwise_mult, dtype, out, geometry);
}

template <class Device>
std::tuple<Tensor> elementwise_mult(const Tensor& a, const Tensor& b) {
  constexpr const char* kOp = "elementwise_mult";
  check_matches(kOp, "b", b, "a", a.options());
  Tensor out = empty_product(kOp, a, b);
  elementwise_mult_into<Device>(kOp, a, b, out);
  return {std::move(out)};
}

template <class Device>
std::tuple<> elementwise_mult_out(const Tensor& a, const Tensor& b, const Tensor& out) {
  constexpr const char* kOp = "elementwise_mult_out";
  const Options options = a.options();
  check_matches(kOp, "b", b, "a", options);
  check_matches(kOp, "out", out, "a", options);
  check_sizes(kOp, "out", out, broadcast_sizes(kOp, a, b));
  elementwise_mult_into<Device>(kOp, a, b, out);
  return {};
}

template <class Device>
std::tuple<Tensor, Tensor> elementwise_mult_backward(const Tensor& grad_output, const Tensor& a, const Tensor& b) {
  constexpr const char* kOp = "elementwise_mult_backward";
  const Options options = a.options();
  check_matches(kOp, "b", b, "a", options);
  check_matches(kOp, "grad_output", grad_output, "a", options);
  check_sizes(kOp, "b", b, a.sizes());
  check_sizes(kOp, "grad_output", grad_output, a.sizes());
  const ScalarType dtype = kernel_dtype(kOp, "a", options.dtype);
  Tensor grad_a = allocate_like(a);
  Tensor grad_b = allocate_like(b);
  Geometry geometry(a.sizes(), 5);
  geometry.add_output(grad_a);
  geometry.add_output(grad_b);
  geometry.add_input(grad_output);
  geometry.add_input(a);
  geometry.add_input(b);
  run_elementwise<Device>(Device::elementwise_mult_backward, dtype, grad_a, geometry);
  return {std::move(grad_a), std::move(grad_b)};
}

template <class Device>
void register_multiply(torch::stable::detail::StableLibrary& library) {
  library.impl("elementwise_mult", &Boxed<&elementwise_mult<Device>>::call);
  library.impl("elementwise_mult_out", &Boxed<&elementwise_mult_out<Device>>::call);
  library.impl("elementwise_mult_backward", &Boxed<&elementwise_mult_backward<Device>>::call);
}

}  // namespace extops::stable
