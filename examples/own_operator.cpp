// An operator of your own: x / (1 + |x|), and its gradient, on a CPU.

#include <ATen/ATen.h>
#include <torch/library.h>

namespace {

at::Tensor softsign(const at::Tensor& input) {
  const at::Tensor x = input.contiguous();
  at::Tensor output = at::empty_like(x);
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "softsign", [&] {
    const scalar_t* from = x.const_data_ptr<scalar_t>();
    scalar_t* to = output.mutable_data_ptr<scalar_t>();
    for (int64_t i = 0; i < x.numel(); ++i) to[i] = from[i] / (1 + std::abs(from[i]));
  });
  return output;
}

at::Tensor softsign_backward(const at::Tensor& grad_output, const at::Tensor& input) {
  const at::Tensor g = grad_output.contiguous(), x = input.contiguous();
  at::Tensor grad_input = at::empty_like(x);
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "softsign_backward", [&] {
    const scalar_t *up = g.const_data_ptr<scalar_t>(), *from = x.const_data_ptr<scalar_t>();
    scalar_t* to = grad_input.mutable_data_ptr<scalar_t>();
    for (int64_t i = 0; i < x.numel(); ++i) {
      const scalar_t below = 1 + std::abs(from[i]);
      to[i] = up[i] / (below * below);
    }
  });
  return grad_input;
}

}  // namespace

TORCH_LIBRARY(own, library) {
  library.def("softsign(Tensor input) -> Tensor");
  library.def("softsign_backward(Tensor grad_output, Tensor input) -> Tensor");
}

TORCH_LIBRARY_IMPL(own, CPU, library) {
  library.impl("softsign", softsign);
  library.impl("softsign_backward", softsign_backward);
}
