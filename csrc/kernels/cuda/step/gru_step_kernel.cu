#include "step.cuh"

EXTOPS_STEP_CUDA(gru, extops::Gru)
