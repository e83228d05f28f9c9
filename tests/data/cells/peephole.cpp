#include "peephole.h"

#include "extops_cell.h"

EXTOPS_CELL(peephole, Peephole)
