// The LLTM cell. With gates = [old_h | input] * weights^T + bias, [batch, 3 * state_size], in three blocks of columns:
//
//   input_gate, output_gate, candidate = gates
//   new_cell = old_cell + elu(candidate) * sigmoid(input_gate)
//   new_h    = tanh(new_cell) * sigmoid(output_gate)
//
// input is [batch, input_features], weights [3 * state_size, state_size + input_features], bias [3 * state_size], every
// other tensor [batch, state_size]. All are contiguous, except the two upstream gradients, which carry a row and a
// column stride (in elements; 0 for an expanded one) and may be null where a gradient is absent.
//
// A CPU function computes the elements [begin, end) of batch * state_size, so that the caller chooses the threads.
// A CUDA function enqueues on `stream` of the current device and does not wait.
#pragma once

#include "types.h"

// The pointwise part, fed by a product of the caller's. Where `bias` is not null it is added to the gates, in place; in
// a 16-bit type the product must hold it already, since it would be rounded before the sum otherwise.
EXTOPS_API Error extops_lltm_cell_cpu(
    ScalarType dtype, int64_t batch, int64_t state_size, const void* bias, void* gates, const void* old_cell,
    void* new_h, void* new_cell, int64_t begin, int64_t end);

EXTOPS_API Error extops_lltm_cell_cuda(
    ScalarType dtype, int64_t batch, int64_t state_size, const void* bias, void* gates, const void* old_cell,
    void* new_h, void* new_cell, void* stream);

// Its backward. grad_bias is the sum of grad_gates over the batch, and the caller's to make.
EXTOPS_API Error extops_lltm_cell_backward_cpu(
    ScalarType dtype, int64_t batch, int64_t state_size, const void* grad_h, int64_t grad_h_row_stride,
    int64_t grad_h_column_stride, const void* grad_cell, int64_t grad_cell_row_stride, int64_t grad_cell_column_stride,
    const void* gates, const void* new_cell, void* grad_gates, void* grad_old_cell, int64_t begin, int64_t end);

EXTOPS_API Error extops_lltm_cell_backward_cuda(
    ScalarType dtype, int64_t batch, int64_t state_size, const void* grad_h, int64_t grad_h_row_stride,
    int64_t grad_h_column_stride, const void* grad_cell, int64_t grad_cell_row_stride, int64_t grad_cell_column_stride,
    const void* gates, const void* new_cell, void* grad_gates, void* grad_old_cell, void* stream);

// The whole of a problem, where a library's product does not pay off; on the CPU in float32 only. Each is right at any
// size; the function after it says where it is fast: 0 means nowhere, else tensors must start at multiples of so many
// bytes. A CPU function computes the elements [begin, end) of each row of
// state_size elements, and of each of the three blocks of columns of gates and gradients, so that the caller chooses
// the threads.
EXTOPS_API Error extops_lltm_cpu(
    ScalarType dtype, int64_t batch, int64_t input_features, int64_t state_size, const void* input, const void* weights,
    const void* bias, const void* old_h, const void* old_cell, void* new_h, void* new_cell, void* gates, int64_t begin,
    int64_t end);

EXTOPS_API int64_t
extops_lltm_alignment_cpu(ScalarType dtype, int64_t batch, int64_t input_features, int64_t state_size);

EXTOPS_API Error extops_lltm_cuda(
    ScalarType dtype, int64_t batch, int64_t input_features, int64_t state_size, const void* input, const void* weights,
    const void* bias, const void* old_h, const void* old_cell, void* new_h, void* new_cell, void* gates, void* stream);

EXTOPS_API int64_t
extops_lltm_alignment_cuda(ScalarType dtype, int64_t batch, int64_t input_features, int64_t state_size);

// The backward of the pointwise part together with grad_weights and grad_bias.
EXTOPS_API Error extops_lltm_backward_cpu(
    ScalarType dtype, int64_t batch, int64_t input_features, int64_t state_size, const void* grad_h,
    int64_t grad_h_row_stride, int64_t grad_h_column_stride, const void* grad_cell, int64_t grad_cell_row_stride,
    int64_t grad_cell_column_stride, const void* input, const void* old_h, const void* gates, const void* new_cell,
    void* grad_gates, void* grad_old_cell, void* grad_weights, void* grad_bias, int64_t begin, int64_t end);

EXTOPS_API int64_t
extops_lltm_backward_alignment_cpu(ScalarType dtype, int64_t batch, int64_t input_features, int64_t state_size);

EXTOPS_API Error extops_lltm_backward_cuda(
    ScalarType dtype, int64_t batch, int64_t input_features, int64_t state_size, const void* grad_h,
    int64_t grad_h_row_stride, int64_t grad_h_column_stride, const void* grad_cell, int64_t grad_cell_row_stride,
    int64_t grad_cell_column_stride, const void* input, const void* old_h, const void* gates, const void* new_cell,
    void* grad_gates, void* grad_old_cell, void* grad_weights, void* grad_bias, void* stream);

EXTOPS_API int64_t
extops_lltm_backward_alignment_cuda(ScalarType dtype, int64_t batch, int64_t input_features, int64_t state_size);

// grad_bias, [3 * state_size]: the sum of grad_gates over the batch.
EXTOPS_API Error extops_lltm_bias_backward_cuda(
    ScalarType dtype, int64_t batch, int64_t state_size, const void* grad_gates, void* grad_bias, void* stream);

EXTOPS_API int64_t
extops_lltm_bias_backward_alignment_cuda(ScalarType dtype, int64_t batch, int64_t input_features, int64_t state_size);

// [grad_old_h | grad_input] = grad_gates * weights, all of them float32.
EXTOPS_API Error extops_lltm_input_backward_cuda(
    int64_t batch, int64_t input_features, int64_t state_size, const void* grad_gates, const void* weights,
    void* grad_old_h, void* grad_input, void* stream);

EXTOPS_API int64_t
extops_lltm_input_backward_alignment_cuda(ScalarType dtype, int64_t batch, int64_t input_features, int64_t state_size);
