#include "own_gru.h"

#include "extops_cell.h"

EXTOPS_CELL(own_gru, OwnGru)
