// The pointwise part of the LLTM cell; the matrix product that feeds it is the caller's.
//
// gates [batch, 3 * state_size] holds the pre-activations of the input gate, the output gate and the candidate, in
// this order; every other tensor is [batch, state_size]. All are contiguous, except the two upstream gradients, which
// carry a row and a column stride (in elements; 0 for an expanded one) and may be null where a gradient is absent.
//
//   new_cell = old_cell + elu(candidate) * sigmoid(input_gate)
//   new_h    = tanh(new_cell) * sigmoid(output_gate)
//
// A CPU function computes the elements [begin, end) of batch * state_size, so that the caller chooses the threads.
// A CUDA function enqueues on `stream` of the current device and does not wait.
#pragma once

#include "types.h"

EXTOPS_API Error extops_lltm_cell_cpu(
    ScalarType dtype, int64_t batch, int64_t state_size, const void* gates, const void* old_cell, void* new_h,
    void* new_cell, int64_t begin, int64_t end);

EXTOPS_API Error extops_lltm_cell_cuda(
    ScalarType dtype, int64_t batch, int64_t state_size, const void* gates, const void* old_cell, void* new_h,
    void* new_cell, void* stream);

EXTOPS_API Error extops_lltm_cell_backward_cpu(
    ScalarType dtype, int64_t batch, int64_t state_size, const void* grad_h, int64_t grad_h_row_stride,
    int64_t grad_h_column_stride, const void* grad_cell, int64_t grad_cell_row_stride, int64_t grad_cell_column_stride,
    const void* gates, const void* new_cell, void* grad_gates, void* grad_old_cell, int64_t begin, int64_t end);

EXTOPS_API Error extops_lltm_cell_backward_cuda(
    ScalarType dtype, int64_t batch, int64_t state_size, const void* grad_h, int64_t grad_h_row_stride,
    int64_t grad_h_column_stride, const void* grad_cell, int64_t grad_cell_row_stride, int64_t grad_cell_column_stride,
    const void* gates, const void* new_cell, void* grad_gates, void* grad_old_cell, void* stream);
