#include "extops_cell.cuh"
#include "own_gru.h"

EXTOPS_CELL_KERNELS(own_gru, OwnGru)
