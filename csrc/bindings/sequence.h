// The tensors of the operators over whole sequences: for their schemas, and for what bindings check. What the kernels
// get is in ../kernels/sequence.h: the input GEMM instead of the input, and lengths, which a table lacks.
#pragma once

#include "../kernels/sequence.h"
#include "../kernels/table.h"

// What operators over sequences take after the tensors of their table. Without `training` no backward follows: `gates`
// and `cells` have no steps.
#define EXTOPS_SEQUENCE_BACKWARD_OPTIONS ", Tensor? lengths, *, bool reverse=False, bool allow_tf32=False"
#define EXTOPS_SEQUENCE_OPTIONS EXTOPS_SEQUENCE_BACKWARD_OPTIONS ", bool training=True"

// The units are those of all directions. Of two, the columns of the recurrent weights meet the states of one.
#define EXTOPS_SEQUENCE_SIZES time, batch, input_features, state_size, direction_size

struct SequenceTableSizes {
  int64_t EXTOPS_SEQUENCE_SIZES;
};

// clang-format off
// A cell's tables, for the rows of its parameters (cell.h).
#define EXTOPS_SEQUENCE(IN, OUT, ...)                       \
  IN(input, time, batch, input_features)                    \
  __VA_ARGS__                                               \
  IN(h_0, batch, state_size)                                \
  IN(c_0, batch, kCellStates<Cell>*state_size)              \
  OUT(output, time, batch, state_size)                      \
  OUT(h_n, batch, state_size)                               \
  OUT(c_n, batch, kCellStates<Cell>*state_size)             \
  OUT(gates, time, batch, Cell::kGates*state_size)          \
  OUT(cells, time, batch, kCellStates<Cell>*state_size)

#define EXTOPS_SEQUENCE_BACKWARD(IN, UPSTREAM, OUT)         \
  UPSTREAM(grad_output, time, batch, state_size)            \
  UPSTREAM(grad_h_n, batch, state_size)                     \
  UPSTREAM(grad_c_n, batch, kCellStates<Cell>*state_size)   \
  IN(weight_hh, Cell::kRecurrent*state_size, direction_size) \
  IN(gates, time, batch, Cell::kGates*state_size)           \
  IN(cells, time, batch, kCellStates<Cell>*state_size)      \
  OUT(grad_gates, time, batch, Cell::kGates*state_size)     \
  OUT(grad_h_0, batch, state_size)                          \
  OUT(grad_c_0, batch, kCellStates<Cell>*state_size)
// clang-format on
