#include "../sequence/float32_block.cuh"
#include "../sequence/kernels.cuh"
#include "../step/step.cuh"

EXTOPS_SEQUENCE_CUDA(gru, extops::Gru)
EXTOPS_STEP_CUDA(gru, extops::Gru)
