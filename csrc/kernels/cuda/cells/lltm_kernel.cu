#include "../sequence/float32_block.cuh"
#include "../sequence/kernels.cuh"
#include "../step/step.cuh"

EXTOPS_SEQUENCE_CUDA(lltm, extops::Lltm)
EXTOPS_STEP_CUDA(lltm, extops::Lltm)
