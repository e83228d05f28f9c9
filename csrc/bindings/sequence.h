// The tensors of the operators over whole sequences: for their schemas, and for what bindings check. What the kernels
// get is in ../kernels/sequence.h: the input GEMM instead of the input, and lengths, which a table lacks.
#pragma once

#include "../kernels/sequence.h"
#include "../kernels/table.h"

// What operators over sequences take after the tensors of their table. Without `training` no backward follows: `gates`
// and `cells` have no steps.
#define EXTOPS_SEQUENCE_BACKWARD_OPTIONS ", Tensor? lengths, *, bool reverse=False, bool allow_tf32=False"
#define EXTOPS_SEQUENCE_OPTIONS EXTOPS_SEQUENCE_BACKWARD_OPTIONS ", bool training=True"

#define EXTOPS_SEQUENCE_SIZES time, batch, input_features, state_size

struct SequenceTableSizes {
  int64_t EXTOPS_SEQUENCE_SIZES;
};

// clang-format off
// A cell's table, from the number of its gates and the rows of its parameters: weights that join weights_h and
// weights_x, with one bias, or those of torch's modules.
#define EXTOPS_SEQUENCE(IN, OUT, GATES, ...)                \
  IN(input, time, batch, input_features)                    \
  __VA_ARGS__                                               \
  IN(h_0, batch, state_size)                                \
  IN(c_0, batch, state_size)                                \
  OUT(output, time, batch, state_size)                      \
  OUT(h_n, batch, state_size)                               \
  OUT(c_n, batch, state_size)                               \
  OUT(gates, time, batch, GATES*state_size)                 \
  OUT(cells, time, batch, state_size)

#define EXTOPS_SEQUENCE_BACKWARD(IN, UPSTREAM, OUT, GATES, ...) \
  UPSTREAM(grad_output, time, batch, state_size)            \
  UPSTREAM(grad_h_n, batch, state_size)                     \
  UPSTREAM(grad_c_n, batch, state_size)                     \
  __VA_ARGS__                                               \
  IN(gates, time, batch, GATES*state_size)                  \
  IN(cells, time, batch, state_size)                        \
  OUT(grad_gates, time, batch, GATES*state_size)            \
  OUT(grad_h_0, batch, state_size)                          \
  OUT(grad_c_0, batch, state_size)

#define EXTOPS_LLTM_WEIGHTS(IN) IN(weights, 3*state_size, state_size + input_features)
#define EXTOPS_LLTM_SEQUENCE(IN, UPSTREAM, OUT) EXTOPS_SEQUENCE(IN, OUT, 3, EXTOPS_LLTM_WEIGHTS(IN) IN(bias, 3*state_size))
#define EXTOPS_LLTM_SEQUENCE_BACKWARD(IN, UPSTREAM, OUT) \
  EXTOPS_SEQUENCE_BACKWARD(IN, UPSTREAM, OUT, 3, EXTOPS_LLTM_WEIGHTS(IN))

#define EXTOPS_WEIGHT_HH(IN, GATES) IN(weight_hh, GATES*state_size, state_size)
#define EXTOPS_PARAMETERS(IN, OPTIONAL, INPUT, RECURRENT)   \
  IN(weight_ih, INPUT*state_size, input_features)           \
  EXTOPS_WEIGHT_HH(IN, RECURRENT)                           \
  OPTIONAL(bias_ih, INPUT*state_size)                       \
  OPTIONAL(bias_hh, RECURRENT*state_size)
// clang-format on

#define EXTOPS_SEQUENCE_TENSORS(Name, TABLE) EXTOPS_ARGUMENTS(Name, SequenceTableSizes, EXTOPS_SEQUENCE_SIZES, TABLE)
EXTOPS_SEQUENCE_TENSORS(LltmSequenceTensors, EXTOPS_LLTM_SEQUENCE)
EXTOPS_SEQUENCE_TENSORS(LltmSequenceBackwardTensors, EXTOPS_LLTM_SEQUENCE_BACKWARD)
