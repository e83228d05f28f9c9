// The LLTM cell. With gates = [old_h | input] * weights^T + bias, in three blocks:
//
//   input_gate, output_gate, candidate = gates
//   new_cell = old_cell + elu(candidate) * sigmoid(input_gate)
//   new_h    = tanh(new_cell) * sigmoid(output_gate)
//
// A CUDA function enqueues on `stream` of the current device and does not wait.
#pragma once

#include "table.h"
#include "types.h"

#define EXTOPS_LLTM_SIZES batch, input_features, state_size

struct LltmSizes {
  int64_t EXTOPS_LLTM_SIZES;

  int64_t columns() const { return state_size + input_features; }
};

// clang-format off
#define EXTOPS_LLTM(IN, UPSTREAM, OUT)                      \
  IN(input, batch, input_features)                          \
  IN(weights, 3*state_size, state_size + input_features)    \
  IN(bias, 3*state_size)                                    \
  IN(old_h, batch, state_size)                              \
  IN(old_cell, batch, state_size)                           \
  OUT(new_h, batch, state_size)                             \
  OUT(new_cell, batch, state_size)                          \
  OUT(gates, batch, 3*state_size)

#define EXTOPS_LLTM_BACKWARD(IN, UPSTREAM, OUT)             \
  UPSTREAM(grad_h, batch, state_size)                       \
  UPSTREAM(grad_cell, batch, state_size)                    \
  IN(input, batch, input_features)                          \
  IN(old_h, batch, state_size)                              \
  IN(gates, batch, 3*state_size)                            \
  IN(new_cell, batch, state_size)                           \
  OUT(grad_gates, batch, 3*state_size)                      \
  OUT(grad_old_cell, batch, state_size)                     \
  OUT(grad_weights, 3*state_size, state_size + input_features) \
  OUT(grad_bias, 3*state_size)

#define EXTOPS_LLTM_INPUT_BACKWARD(IN, UPSTREAM, OUT)       \
  IN(grad_gates, batch, 3*state_size)                       \
  IN(weights, 3*state_size, state_size + input_features)    \
  OUT(grad_old_h, batch, state_size)                        \
  OUT(grad_input, batch, input_features)

#define EXTOPS_LLTM_BIAS_BACKWARD(IN, UPSTREAM, OUT)        \
  IN(grad_gates, batch, 3*state_size)                       \
  OUT(grad_bias, 3*state_size)

#define EXTOPS_LLTM_CELL(IN, UPSTREAM, OUT)                 \
  IN(gates, batch, 3*state_size)                            \
  IN(old_cell, batch, state_size)                           \
  OUT(new_h, batch, state_size)                             \
  OUT(new_cell, batch, state_size)

#define EXTOPS_LLTM_CELL_WITH_BIAS(IN, UPSTREAM, OUT)       \
  IN(bias, 3*state_size)                                    \
  EXTOPS_LLTM_CELL(IN, UPSTREAM, OUT)

#define EXTOPS_LLTM_CELL_BACKWARD(IN, UPSTREAM, OUT)        \
  UPSTREAM(grad_h, batch, state_size)                       \
  UPSTREAM(grad_cell, batch, state_size)                    \
  IN(gates, batch, 3*state_size)                            \
  IN(new_cell, batch, state_size)                           \
  OUT(grad_gates, batch, 3*state_size)                      \
  OUT(grad_old_cell, batch, state_size)
// clang-format on

#define EXTOPS_LLTM_ARGUMENTS(Name, TABLE) EXTOPS_ARGUMENTS(Name, LltmSizes, EXTOPS_LLTM_SIZES, TABLE)
EXTOPS_LLTM_ARGUMENTS(LltmForward, EXTOPS_LLTM)
EXTOPS_LLTM_ARGUMENTS(LltmBackward, EXTOPS_LLTM_BACKWARD)
EXTOPS_LLTM_ARGUMENTS(LltmInputBackward, EXTOPS_LLTM_INPUT_BACKWARD)
EXTOPS_LLTM_ARGUMENTS(LltmBiasBackward, EXTOPS_LLTM_BIAS_BACKWARD)
EXTOPS_LLTM_ARGUMENTS(LltmCell, EXTOPS_LLTM_CELL)
EXTOPS_LLTM_ARGUMENTS(LltmCellWithBias, EXTOPS_LLTM_CELL_WITH_BIAS)
EXTOPS_LLTM_ARGUMENTS(LltmCellBackward, EXTOPS_LLTM_CELL_BACKWARD)

// ---- the pointwise part, after a GEMM by the caller ----
// A CPU function computes the elements [begin, end) of batch * state_size, so that the caller chooses the threads.

// Where `bias` is not null it is added to `gates`, in place; in a 16-bit type the GEMM must have added it already,
// since it would be rounded before the sum otherwise.
EXTOPS_API Error extops_lltm_cell_cpu(ScalarType dtype, const LltmCellWithBias& arguments, int64_t begin, int64_t end);
EXTOPS_API Error extops_lltm_cell_cuda(ScalarType dtype, const LltmCellWithBias& arguments, void* stream);

// Its backward. grad_bias is the sum of grad_gates over the batch, and the caller's to make.
EXTOPS_API Error
extops_lltm_cell_backward_cpu(ScalarType dtype, const LltmCellBackward& arguments, int64_t begin, int64_t end);
EXTOPS_API Error extops_lltm_cell_backward_cuda(ScalarType dtype, const LltmCellBackward& arguments, void* stream);

// ---- whole problems, for sizes at which a library GEMM is slower ----
// Each is correct at any size. The function after it says whether it is the faster way: 0 if not, else the alignment of
// the tensors in bytes. A CPU function, in float32 only, computes the elements [begin, end) of each row of state_size
// elements, and of each of the three blocks of gates and gradients.

EXTOPS_API Error extops_lltm_cpu(ScalarType dtype, const LltmForward& arguments, int64_t begin, int64_t end);
EXTOPS_API int64_t extops_lltm_alignment_cpu(ScalarType dtype, const LltmSizes& sizes);
EXTOPS_API Error extops_lltm_cuda(ScalarType dtype, const LltmForward& arguments, void* stream);
EXTOPS_API int64_t extops_lltm_alignment_cuda(ScalarType dtype, const LltmSizes& sizes);

// The backward of the pointwise part together with grad_weights and grad_bias.
EXTOPS_API Error extops_lltm_backward_cpu(ScalarType dtype, const LltmBackward& arguments, int64_t begin, int64_t end);
EXTOPS_API int64_t extops_lltm_backward_alignment_cpu(ScalarType dtype, const LltmSizes& sizes);
EXTOPS_API Error extops_lltm_backward_cuda(ScalarType dtype, const LltmBackward& arguments, void* stream);
EXTOPS_API int64_t extops_lltm_backward_alignment_cuda(ScalarType dtype, const LltmSizes& sizes);

// The sum of grad_gates over the batch.
EXTOPS_API Error extops_lltm_bias_backward_cuda(ScalarType dtype, const LltmBiasBackward& arguments, void* stream);
EXTOPS_API int64_t extops_lltm_bias_backward_alignment_cuda(ScalarType dtype, const LltmSizes& sizes);

// [grad_old_h | grad_input] = grad_gates * weights, in float32 only.
EXTOPS_API Error extops_lltm_input_backward_cuda(ScalarType dtype, const LltmInputBackward& arguments, void* stream);
EXTOPS_API int64_t extops_lltm_input_backward_alignment_cuda(ScalarType dtype, const LltmSizes& sizes);
