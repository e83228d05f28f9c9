#include "../sequence/float32_cluster.cuh"
#include "../sequence/tensor_cluster.cuh"
#include "../step/hopper.cuh"

EXTOPS_SEQUENCE_HOPPER(extops::Lltm)
EXTOPS_STEP_HOPPER(extops::Lltm)
