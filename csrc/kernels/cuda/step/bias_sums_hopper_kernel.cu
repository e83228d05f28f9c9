#include "bias_sums.cuh"

EXTOPS_BIAS_SUMS_HOPPER
