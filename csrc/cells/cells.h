// The cells of the package, a line each: the name of its functions, and the definition.
#pragma once

#include "gru.h"
#include "lltm.h"
#include "lstm.h"

#define EXTOPS_CELLS(CELL) \
  CELL(lltm, Lltm)         \
  CELL(lstm, Lstm)         \
  CELL(gru, Gru)
