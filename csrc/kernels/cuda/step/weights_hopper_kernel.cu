#include "weights.cuh"
#include "weights_tf32.cuh"

EXTOPS_WEIGHTS_HOPPER
