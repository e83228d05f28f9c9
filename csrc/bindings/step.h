// The tensors of the operators of one step: for their schemas, and for what bindings check. What the kernels get is in
// ../kernels/step.h.
#pragma once

#include "../kernels/step.h"
#include "sequence.h"

#define EXTOPS_STEP_OPTIONS ", *, bool allow_tf32=False"

// clang-format off
// A cell's table, from the number of its columns and those of both products.
#define EXTOPS_STEP(IN, UPSTREAM, OUT, COLUMNS, INPUT, RECURRENT) \
  IN(input, batch, input_features)                          \
  EXTOPS_PARAMETERS(IN, UPSTREAM, INPUT, RECURRENT)         \
  IN(h_0, batch, state_size)                                \
  IN(c_0, batch, state_size)                                \
  OUT(h, batch, state_size)                                 \
  OUT(c, batch, state_size)                                 \
  OUT(columns, batch, COLUMNS*state_size)

// OF_H is 0 where the gradients of both products are the same, and given once.
#define EXTOPS_STEP_BACKWARD(IN, UPSTREAM, OUT, COLUMNS, INPUT, OF_H) \
  UPSTREAM(grad_h, batch, state_size)                       \
  UPSTREAM(grad_c, batch, state_size)                       \
  IN(columns, batch, COLUMNS*state_size)                    \
  IN(saved_c, batch, state_size)                            \
  OUT(grad_x, batch, INPUT*state_size)                      \
  OUT(grad_h_part, batch, OF_H*state_size)                  \
  OUT(grad_c_0, batch, state_size)

// The same with the gradients of the parameters.
#define EXTOPS_STEP_PARAMETERS_BACKWARD(IN, UPSTREAM, OUT, COLUMNS, INPUT, RECURRENT, OF_H) \
  UPSTREAM(grad_h, batch, state_size)                       \
  UPSTREAM(grad_c, batch, state_size)                       \
  IN(input, batch, input_features)                          \
  IN(h_0, batch, state_size)                                \
  IN(columns, batch, COLUMNS*state_size)                    \
  IN(saved_c, batch, state_size)                            \
  OUT(grad_x, batch, INPUT*state_size)                      \
  OUT(grad_h_part, batch, OF_H*state_size)                  \
  OUT(grad_c_0, batch, state_size)                          \
  OUT(grad_weight_ih, INPUT*state_size, input_features)     \
  OUT(grad_weight_hh, RECURRENT*state_size, state_size)     \
  OUT(grad_bias_ih, INPUT*state_size)                       \
  OUT(grad_bias_hh, RECURRENT*state_size)

// `grad_c_0` is added to grad_h_0 where it is given.
#define EXTOPS_STEP_INPUT_BACKWARD(IN, UPSTREAM, OUT, INPUT, RECURRENT, OF_H) \
  IN(grad_x, batch, INPUT*state_size)                       \
  IN(grad_h_part, batch, OF_H*state_size)                   \
  UPSTREAM(grad_c_0, batch, state_size)                     \
  IN(weight_ih, INPUT*state_size, input_features)           \
  IN(weight_hh, RECURRENT*state_size, state_size)           \
  OUT(grad_input, batch, input_features)                    \
  OUT(grad_h_0, batch, state_size)

#define EXTOPS_LSTM_STEP(IN, UPSTREAM, OUT) EXTOPS_STEP(IN, UPSTREAM, OUT, 4, 4, 4)
#define EXTOPS_LSTM_STEP_BACKWARD(IN, UPSTREAM, OUT) EXTOPS_STEP_BACKWARD(IN, UPSTREAM, OUT, 4, 4, 0)
#define EXTOPS_LSTM_STEP_PARAMETERS_BACKWARD(IN, UPSTREAM, OUT) \
  EXTOPS_STEP_PARAMETERS_BACKWARD(IN, UPSTREAM, OUT, 4, 4, 4, 0)
#define EXTOPS_LSTM_STEP_INPUT_BACKWARD(IN, UPSTREAM, OUT) EXTOPS_STEP_INPUT_BACKWARD(IN, UPSTREAM, OUT, 4, 4, 0)
#define EXTOPS_GRU_STEP_PARAMETERS_BACKWARD(IN, UPSTREAM, OUT) \
  EXTOPS_STEP_PARAMETERS_BACKWARD(IN, UPSTREAM, OUT, 4, 3, 3, 3)
#define EXTOPS_GRU_STEP_INPUT_BACKWARD(IN, UPSTREAM, OUT) EXTOPS_STEP_INPUT_BACKWARD(IN, UPSTREAM, OUT, 3, 3, 3)
#define EXTOPS_GRU_STEP(IN, UPSTREAM, OUT) EXTOPS_STEP(IN, UPSTREAM, OUT, 4, 3, 3)
#define EXTOPS_GRU_STEP_BACKWARD(IN, UPSTREAM, OUT) EXTOPS_STEP_BACKWARD(IN, UPSTREAM, OUT, 4, 3, 3)
// clang-format on

#define EXTOPS_STEP_TENSORS(Name, TABLE) EXTOPS_ARGUMENTS(Name, StepSizes, EXTOPS_STEP_SIZES, TABLE)
EXTOPS_STEP_TENSORS(LstmStepTensors, EXTOPS_LSTM_STEP)
EXTOPS_STEP_TENSORS(LstmStepBackwardTensors, EXTOPS_LSTM_STEP_BACKWARD)
EXTOPS_STEP_TENSORS(LstmStepParametersBackwardTensors, EXTOPS_LSTM_STEP_PARAMETERS_BACKWARD)
EXTOPS_STEP_TENSORS(LstmStepInputBackwardTensors, EXTOPS_LSTM_STEP_INPUT_BACKWARD)
EXTOPS_STEP_TENSORS(GruStepTensors, EXTOPS_GRU_STEP)
EXTOPS_STEP_TENSORS(GruStepParametersBackwardTensors, EXTOPS_GRU_STEP_PARAMETERS_BACKWARD)
EXTOPS_STEP_TENSORS(GruStepInputBackwardTensors, EXTOPS_GRU_STEP_INPUT_BACKWARD)
EXTOPS_STEP_TENSORS(GruStepBackwardTensors, EXTOPS_GRU_STEP_BACKWARD)
