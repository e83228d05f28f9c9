#include "extops_cell.cuh"
#include "turned.h"

EXTOPS_CELL_KERNELS(turned, Turned)
