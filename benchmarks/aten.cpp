// The LLTM in C++ with ATen calls only. Two operators, forward and a hand-written backward; no kernel of its own, so
// the same code serves every device.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <tuple>

namespace {

using at::Tensor;

// new_h, new_cell, X, gates, input_gate, output_gate, candidate
using ForwardResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// grad_input, grad_weights, grad_bias, grad_old_h, grad_old_cell
using BackwardResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

ForwardResult lltm_forward(
    const Tensor& input, const Tensor& weights, const Tensor& bias, const Tensor& old_h, const Tensor& old_cell) {
  const Tensor X = at::cat({old_h, input}, /*dim=*/1);
  const Tensor gates = at::addmm(bias, X, weights.t());
  const auto blocks = gates.chunk(3, /*dim=*/1);
  const Tensor input_gate = at::sigmoid(blocks[0]);
  const Tensor output_gate = at::sigmoid(blocks[1]);
  const Tensor candidate = at::elu(blocks[2]);
  const Tensor new_cell = old_cell + candidate * input_gate;
  const Tensor new_h = at::tanh(new_cell) * output_gate;
  return {new_h, new_cell, X, gates, input_gate, output_gate, candidate};
}

Tensor d_sigmoid(const Tensor& s) { return (1 - s) * s; }

Tensor d_elu(const Tensor& z) { return at::where(z > 0, at::ones_like(z), z.exp()); }

BackwardResult lltm_backward(
    const Tensor& grad_h, const Tensor& grad_cell, const Tensor& new_cell, const Tensor& X, const Tensor& gates,
    const Tensor& input_gate, const Tensor& output_gate, const Tensor& candidate, const Tensor& weights) {
  const int64_t state_size = new_cell.size(1);
  const Tensor tanh_cell = new_cell.tanh();
  const Tensor grad_new_cell = grad_cell + grad_h * output_gate * (1 - tanh_cell * tanh_cell);
  const Tensor grad_gates = at::cat(
      {grad_new_cell * candidate * d_sigmoid(input_gate), grad_h * tanh_cell * d_sigmoid(output_gate),
       grad_new_cell * input_gate * d_elu(gates.narrow(1, 2 * state_size, state_size))},
      /*dim=*/1);
  const Tensor grad_X = grad_gates.mm(weights);
  return {
      grad_X.narrow(1, state_size, X.size(1) - state_size), grad_gates.t().mm(X), grad_gates.sum(0),
      grad_X.narrow(1, 0, state_size), grad_new_cell};
}

}  // namespace

TORCH_LIBRARY(extops_aten, library) {
  library.def("lltm_forward", &lltm_forward);
  library.def("lltm_backward", &lltm_backward);
}
