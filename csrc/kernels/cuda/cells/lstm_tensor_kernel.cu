#include "../sequence/group.cuh"
#include "../sequence/tensor_block.cuh"

EXTOPS_SEQUENCE_TENSOR(extops::Lstm)
