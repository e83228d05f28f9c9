#include "../sequence/float32_block.cuh"
#include "../sequence/kernels.cuh"
#include "../step/step.cuh"

EXTOPS_SEQUENCE_CUDA(lstm, extops::Lstm)
EXTOPS_STEP_CUDA(lstm, extops::Lstm)
