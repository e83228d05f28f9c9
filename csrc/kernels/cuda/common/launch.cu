#include "../sequence/measured_definitions.cuh"
#include "launch_definitions.cuh"
