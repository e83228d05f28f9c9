#include "step.cuh"

EXTOPS_STEP_CUDA(lstm, extops::Lstm)
