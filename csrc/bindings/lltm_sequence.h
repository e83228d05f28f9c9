// The tensors of the operators over whole sequences: for their schemas, and for what bindings check. What the kernels
// get is in ../kernels/sequence.h: products of the input instead of the input, and lengths, which a table lacks.
#pragma once

#include "../kernels/sequence.h"
#include "../kernels/table.h"

#define EXTOPS_LLTM_SEQUENCE_SIZES time, batch, input_features, state_size

struct LltmSequenceTableSizes {
  int64_t EXTOPS_LLTM_SEQUENCE_SIZES;
};

// clang-format off
#define EXTOPS_LLTM_SEQUENCE(IN, UPSTREAM, OUT)             \
  IN(input, time, batch, input_features)                    \
  IN(weights, 3*state_size, state_size + input_features)    \
  IN(bias, 3*state_size)                                    \
  IN(h_0, batch, state_size)                                \
  IN(c_0, batch, state_size)                                \
  OUT(output, time, batch, state_size)                      \
  OUT(h_n, batch, state_size)                               \
  OUT(c_n, batch, state_size)                               \
  OUT(gates, time, batch, 3*state_size)                     \
  OUT(cells, time, batch, state_size)

#define EXTOPS_LLTM_SEQUENCE_BACKWARD(IN, UPSTREAM, OUT)    \
  UPSTREAM(grad_output, time, batch, state_size)            \
  UPSTREAM(grad_h_n, batch, state_size)                     \
  UPSTREAM(grad_c_n, batch, state_size)                     \
  IN(weights, 3*state_size, state_size + input_features)    \
  IN(gates, time, batch, 3*state_size)                      \
  IN(cells, time, batch, state_size)                        \
  OUT(grad_gates, time, batch, 3*state_size)                \
  OUT(grad_h_0, batch, state_size)                          \
  OUT(grad_c_0, batch, state_size)
// clang-format on

#define EXTOPS_LLTM_SEQUENCE_TENSORS(Name, TABLE) \
  EXTOPS_ARGUMENTS(Name, LltmSequenceTableSizes, EXTOPS_LLTM_SEQUENCE_SIZES, TABLE)
EXTOPS_LLTM_SEQUENCE_TENSORS(LltmSequenceTensors, EXTOPS_LLTM_SEQUENCE)
EXTOPS_LLTM_SEQUENCE_TENSORS(LltmSequenceBackwardTensors, EXTOPS_LLTM_SEQUENCE_BACKWARD)
