// The elementwise product, and both of its gradients in one pass over memory.
#pragma once

#include "elementwise.h"

// Operands: output, a, b.
EXTOPS_API ElementwiseCpu extops_elementwise_mult_cpu;
EXTOPS_API ElementwiseCuda extops_elementwise_mult_cuda;

// Operands: grad_a = grad_output * b, grad_b = grad_output * a, grad_output, a, b.
EXTOPS_API ElementwiseCpu extops_elementwise_mult_backward_cpu;
EXTOPS_API ElementwiseCuda extops_elementwise_mult_backward_cuda;
