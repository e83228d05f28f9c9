// The operator schemas: the one place where an operator's name, arguments and results are written down.
#pragma once

namespace extops {

inline constexpr const char* kSchemas[] = {
    "lltm_cell(Tensor gates, Tensor old_cell) -> (Tensor new_h, Tensor new_cell)",
    "lltm_cell_backward(Tensor? grad_h, Tensor? grad_cell, Tensor gates, Tensor new_cell)"
    " -> (Tensor grad_gates, Tensor grad_old_cell)",
    "round_ste(Tensor input) -> Tensor",
    "elementwise_mult(Tensor a, Tensor b) -> Tensor",
    "elementwise_mult_out(Tensor a, Tensor b, Tensor(a!) out) -> ()",
    "elementwise_mult_backward(Tensor grad_output, Tensor a, Tensor b) -> (Tensor grad_a, Tensor grad_b)",
};

}  // namespace extops
