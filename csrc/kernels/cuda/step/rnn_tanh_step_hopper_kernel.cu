#include "split_k.cuh"

EXTOPS_STEP_HOPPER(extops::RnnTanh)
