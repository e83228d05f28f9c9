// The cells of the package, a line each: the name of its functions, and the definition.
#pragma once

#include "gru.h"
#include "lltm.h"
#include "lstm.h"
#include "rnn.h"

#define EXTOPS_CELLS(CELL) \
  CELL(lltm, Lltm)         \
  CELL(lstm, Lstm)         \
  CELL(gru, Gru)           \
  CELL(rnn_tanh, RnnTanh)  \
  CELL(rnn_relu, RnnRelu)

namespace extops {

// Whether the parameters of a cell are joined, [weights_h | weights_x] and one bias; those of others are torch's.
template <class Cell>
constexpr bool kIsJoined = false;
template <>
inline constexpr bool kIsJoined<Lltm> = true;

}  // namespace extops
