#include "../../cells/lstm.h"
#include "sequence_float32_block.cuh"
#include "sequence_kernels.cuh"
#include "sequence_tensor_block.cuh"

EXTOPS_SEQUENCE_CUDA(lstm, extops::Lstm)
