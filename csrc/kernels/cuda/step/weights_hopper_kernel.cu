#include "weights_hopper.cuh"

EXTOPS_WEIGHTS_HOPPER
