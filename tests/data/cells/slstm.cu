#include "extops_cell.cuh"
#include "slstm.h"

EXTOPS_CELL_KERNELS(slstm, Slstm)
