#include "extops_cell.cuh"
#include "peephole.h"

EXTOPS_CELL_KERNELS(peephole, Peephole)
