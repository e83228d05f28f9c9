#include "../../cells/gru.h"
#include "sequence_float32_cluster.cuh"
#include "sequence_group.cuh"
#include "sequence_tensor_cluster.cuh"

EXTOPS_SEQUENCE_HOPPER(extops::Gru)
