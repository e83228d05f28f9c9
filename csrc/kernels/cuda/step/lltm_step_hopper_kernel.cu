#include "hopper.cuh"

EXTOPS_STEP_HOPPER(extops::Lltm)
