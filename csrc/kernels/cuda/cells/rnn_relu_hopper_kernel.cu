#include "../step/hopper.cuh"

EXTOPS_STEP_HOPPER(extops::RnnRelu)
