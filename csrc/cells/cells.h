// The cells of the package, a line each: the name of its functions, and the definition.
#pragma once

#include "gru.h"
#include "lltm.h"
#include "lstm.h"
#include "rnn.h"

// Those with the parameters of torch's modules.
#define EXTOPS_CELLS_OF_PARTS(CELL) \
  CELL(lstm, Lstm)                  \
  CELL(gru, Gru)                    \
  CELL(rnn_tanh, RnnTanh)           \
  CELL(rnn_relu, RnnRelu)

#define EXTOPS_CELLS(CELL) \
  CELL(lltm, Lltm)         \
  EXTOPS_CELLS_OF_PARTS(CELL)
