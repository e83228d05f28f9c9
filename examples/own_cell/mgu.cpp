#include "mgu.h"

#include "extops_cell.h"

EXTOPS_CELL(mgu, Mgu)
