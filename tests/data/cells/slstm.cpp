#include "slstm.h"

#include "extops_cell.h"

EXTOPS_CELL(slstm, Slstm)
