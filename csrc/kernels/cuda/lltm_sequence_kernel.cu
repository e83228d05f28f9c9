#include "../../cells/lltm.h"
#include "sequence_float32_block.cuh"
#include "sequence_kernels.cuh"
#include "sequence_tensor_block.cuh"

EXTOPS_SEQUENCE_CUDA(lltm, extops::Lltm)
