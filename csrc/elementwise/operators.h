// The elementwise operators, a line each: the function of one element, and the schema. What takes (a!) is an output of
// the caller's; numbers, such as `float slope=0.01`, come last; a result named grad_x is laid out like x, any other
// like the first input of its shape.
#pragma once

#include "multiply.h"
#include "rounding.h"

// clang-format off
#define EXTOPS_ELEMENTWISE(OPERATOR)                                                                                   \
  OPERATOR(RoundHalfUp, "round_ste(Tensor input) -> Tensor")                                                           \
  OPERATOR(Multiply, "elementwise_mult(Tensor a, Tensor b) -> Tensor")                                                 \
  OPERATOR(Multiply, "elementwise_mult_out(Tensor a, Tensor b, Tensor(a!) out) -> ()")                                 \
  OPERATOR(MultiplyBackward, "elementwise_mult_backward(Tensor grad_output, Tensor a, Tensor b)"                       \
                             " -> (Tensor grad_a, Tensor grad_b)")
// clang-format on
