#include "turned.h"

#include "extops_cell.h"

EXTOPS_CELL(turned, Turned)
