#include "launch_definitions.cuh"
