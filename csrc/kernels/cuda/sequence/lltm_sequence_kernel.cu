#include "float32_block.cuh"
#include "kernels.cuh"
#include "tensor_block.cuh"

EXTOPS_SEQUENCE_CUDA(lltm, extops::Lltm)
