#include "mgu.h"

#include "extops_cell.cuh"

EXTOPS_CELL_KERNELS(mgu, Mgu)
