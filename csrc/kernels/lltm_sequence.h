// The LLTM (lltm.h) over a whole sequence, from the input's products of all steps:
//
//   gates[t] = products[t] + bias + h[t - 1] * weights_h^T        weights_h: the first state_size columns of weights
//
// followed by the cell as in lltm.h. Where `lengths` are given, a row's steps from its length on do not count: its
// state stays, its output and its gradients of gates are zero, and its products are not read.
//
// In 16-bit types, products, the cell state between the steps and the gradients of both states are float32 (the
// "compute type", which is the dtype itself for the others); what is kept for the backward is of the dtype.
#pragma once

#include "types.h"

struct LltmSequenceSizes {
  int64_t time;
  int64_t batch;
  int64_t input_features;
  int64_t state_size;
  // Rows from one step to the next and from one sample to the next, in all tensors of [time, batch, ...].
  int64_t time_stride;
  int64_t batch_stride;
  int64_t reverse;  // 1: from the last step to the first
  int64_t step;     // for the functions of one step: its number in the order of computation

  int64_t columns() const { return state_size + input_features; }
};

struct LltmSequence {
  LltmSequenceSizes sizes;
  const void* products;    // [time, batch, 3 * state_size], of the compute type: input * weights_x^T
  const void* weights;     // [3 * state_size, state_size + input_features]
  const void* bias;        // [3 * state_size]
  const void* h_0;         // [batch, state_size]
  const void* c_0;         // [batch, state_size]
  const int64_t* lengths;  // [batch] or null
  const void* recurrent;   // of one step: h * weights_h^T, [batch, 3 * state_size], of the compute type
  void* output;            // [time, batch, state_size]
  void* h_n;               // [batch, state_size]
  void* c_n;               // [batch, state_size]
  void* gates;             // [time, batch, 3 * state_size]: may be `products`, where it is of the same type
  void* cells;             // [time, batch, state_size]: the cell state after each step
  void* workspace;
};

struct LltmSequenceBackward {
  LltmSequenceSizes sizes;
  const void* grad_output;  // [time, batch, state_size] or null
  const void* grad_h_n;     // [batch, state_size] or null
  const void* grad_c_n;     // [batch, state_size] or null
  const void* weights;      // [3 * state_size, state_size + input_features]
  const void* gates;        // [time, batch, 3 * state_size]
  const void* cells;        // [time, batch, state_size]
  const int64_t* lengths;   // [batch] or null
  const void* recurrent;    // of one step: grad_gates of the step before * weights_h, [batch, state_size], compute type
  void* grad_gates;         // [time, batch, 3 * state_size]
  void* grad_h_0;           // [batch, state_size]
  void* grad_c_0;           // [batch, state_size]
  void* workspace;
};

// ---- on the CPU: all steps of the rows [begin, end) of the batch, so that the caller chooses the threads ----

EXTOPS_API Error extops_lltm_sequence_cpu(ScalarType dtype, const LltmSequence& arguments, int64_t begin, int64_t end);
EXTOPS_API Error
extops_lltm_sequence_backward_cpu(ScalarType dtype, const LltmSequenceBackward& arguments, int64_t begin, int64_t end);

// ---- on a GPU: all steps in one kernel, where weights_h fits into its multiprocessors ----

// The name of the kernel that serves such a problem on the stream; "step" where only those of one step do.
EXTOPS_API const char* extops_lltm_sequence_kernel_cuda(
    ScalarType dtype, const LltmSequenceSizes& sizes, int64_t backward, void* stream);

// The bytes of workspace that the kernel needs (aligned to 256 bytes), 0 where it does not serve such a problem.
EXTOPS_API int64_t extops_lltm_sequence_workspace_cuda(ScalarType dtype, const LltmSequenceSizes& sizes, void* stream);
EXTOPS_API Error extops_lltm_sequence_cuda(ScalarType dtype, const LltmSequence& arguments, void* stream);
EXTOPS_API int64_t
extops_lltm_sequence_backward_workspace_cuda(ScalarType dtype, const LltmSequenceSizes& sizes, void* stream);
EXTOPS_API Error
extops_lltm_sequence_backward_cuda(ScalarType dtype, const LltmSequenceBackward& arguments, void* stream);

// ---- on a GPU: the pointwise part of one step, after a product of the caller's ----

// Step 0 starts from h_0 and c_0, later ones from h_n and from the workspace: [batch, state_size] of the compute type.
// The last one writes c_n.
EXTOPS_API Error extops_lltm_sequence_step_cuda(ScalarType dtype, const LltmSequence& arguments, void* stream);

// From the last step of the forward to its first, and once more with `step` = `time`, for grad_h_0 and grad_c_0. Step 0
// reads no `recurrent`. The workspace is [2, batch, state_size] of the compute type.
EXTOPS_API Error
extops_lltm_sequence_step_backward_cuda(ScalarType dtype, const LltmSequenceBackward& arguments, void* stream);
