// The operator schemas: the one place where an operator's name, arguments and results are written down.
#pragma once

namespace extops {

inline constexpr const char* kSchemas[] = {
    // gates = [old_h | input] weights^T + bias; allow_tf32 is torch's switch for products of float32 on CUDA, which has
    // no function in the stable ABI; products by torch itself look at the switch alone
    "lltm(Tensor input, Tensor weights, Tensor bias, Tensor old_h, Tensor old_cell, *, bool allow_tf32=False)"
    " -> (Tensor new_h, Tensor new_cell, Tensor gates)",
    "lltm_backward(Tensor? grad_h, Tensor? grad_cell, Tensor input, Tensor old_h, Tensor gates, Tensor new_cell,"
    " *, bool allow_tf32=False)"
    " -> (Tensor grad_gates, Tensor grad_old_cell, Tensor grad_weights, Tensor grad_bias)",
    "lltm_input_backward(Tensor grad_gates, Tensor weights) -> (Tensor grad_old_h, Tensor grad_input)",
    "lltm_cell(Tensor gates, Tensor old_cell) -> (Tensor new_h, Tensor new_cell)",
    "lltm_cell_backward(Tensor? grad_h, Tensor? grad_cell, Tensor gates, Tensor new_cell)"
    " -> (Tensor grad_gates, Tensor grad_old_cell)",
    "round_ste(Tensor input) -> Tensor",
    "elementwise_mult(Tensor a, Tensor b) -> Tensor",
    "elementwise_mult_out(Tensor a, Tensor b, Tensor(a!) out) -> ()",
    "elementwise_mult_backward(Tensor grad_output, Tensor a, Tensor b) -> (Tensor grad_a, Tensor grad_b)",
};

}  // namespace extops
