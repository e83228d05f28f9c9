// Rounding to the nearest integer, halves upwards; infinities and NaN come out as they went in.
// Operands: output, input.
#pragma once

#include "elementwise.h"

EXTOPS_API ElementwiseCpu extops_round_ste_cpu;
EXTOPS_API ElementwiseCuda extops_round_ste_cuda;
