// The tensors of the operators of one step: for their schemas, and for what bindings check. What the kernels get is in
// ../kernels/step.h.
#pragma once

#include "../kernels/step.h"
#include "sequence.h"

// How many gradients a unit has for the recurrent GEMM alone: none where both GEMMs have the same, given once.
template <class Cell>
constexpr int kOfH = kHasOneGradient<Cell> ? 0 : Cell::kRecurrent;

#define EXTOPS_STEP_OPTIONS ", *, bool allow_tf32=False"

// clang-format off
// A cell's tables, for the rows of its parameters and their gradients (cell.h).
#define EXTOPS_STEP(IN, OUT, ...)                                   \
  IN(input, batch, input_features)                                  \
  __VA_ARGS__                                                       \
  IN(h_0, batch, state_size)                                        \
  IN(c_0, batch, state_size)                                        \
  OUT(h, batch, state_size)                                         \
  OUT(c, batch, state_size)                                         \
  OUT(gates, batch, Cell::kGates*state_size)

#define EXTOPS_STEP_BACKWARD(IN, UPSTREAM, OUT)                     \
  UPSTREAM(grad_h, batch, state_size)                               \
  UPSTREAM(grad_c, batch, state_size)                               \
  IN(gates, batch, Cell::kGates*state_size)                         \
  IN(saved_c, batch, state_size)                                    \
  OUT(grad_x, batch, Cell::kInput*state_size)                       \
  OUT(grad_h_part, batch, kOfH<Cell>*state_size)                    \
  OUT(grad_c_0, batch, state_size)

// The same with the gradients of the parameters.
#define EXTOPS_STEP_PARAMETERS_BACKWARD(IN, UPSTREAM, OUT, ...)     \
  UPSTREAM(grad_h, batch, state_size)                               \
  UPSTREAM(grad_c, batch, state_size)                               \
  IN(input, batch, input_features)                                  \
  IN(h_0, batch, state_size)                                        \
  IN(gates, batch, Cell::kGates*state_size)                         \
  IN(saved_c, batch, state_size)                                    \
  OUT(grad_x, batch, Cell::kInput*state_size)                       \
  OUT(grad_h_part, batch, kOfH<Cell>*state_size)                    \
  OUT(grad_c_0, batch, state_size)                                  \
  __VA_ARGS__

// `grad_c_0` is added to grad_h_0 where it is given.
#define EXTOPS_STEP_INPUT_BACKWARD(IN, UPSTREAM, OUT, ...)          \
  IN(grad_x, batch, Cell::kInput*state_size)                        \
  IN(grad_h_part, batch, kOfH<Cell>*state_size)                     \
  UPSTREAM(grad_c_0, batch, state_size)                             \
  __VA_ARGS__                                                       \
  OUT(grad_input, batch, input_features)                            \
  OUT(grad_h_0, batch, state_size)
// clang-format on
