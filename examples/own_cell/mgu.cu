#include "extops_cell.cuh"
#include "mgu.h"

EXTOPS_CELL_KERNELS(mgu, Mgu)
