#include "float32_cluster.cuh"
#include "group.cuh"
#include "tensor_cluster.cuh"

EXTOPS_SEQUENCE_HOPPER(extops::Lstm)
