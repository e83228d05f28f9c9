// One step of a recurrent cell (../cells/cell.h), in torch's terms of a cell module:
//
//   gates = input * weights_x^T + bias_x + h * weights_h^T + bias_h
//
// followed by the cell. `gates` are pre-activations: the first kInput of each unit have an input part, in the order of
// input_place(), and the last kRecurrent ones a recurrent part. In memory, gate k of all units comes before gate k + 1.
//
// Both GEMMs are a library's, or part of the kernel where that is faster.
#pragma once

#include "../cells/cells.h"
#include "table.h"
#include "types.h"

#define EXTOPS_STEP_SIZES batch, input_features, state_size

struct StepSizes {
  int64_t EXTOPS_STEP_SIZES;
};

struct StepArguments {
  StepSizes sizes;
  // For GEMMs in the kernel; null after library GEMMs.
  const void* input;         // [batch, input_features]
  const void* h_0;           // [batch, state_size]
  const void* weights_x;     // [kInput * state_size, input_features]
  const void* weights_h;     // [kRecurrent * state_size, state_size]
  int64_t weights_x_stride;  // elements from one row to the next
  int64_t weights_h_stride;
  // The library's: two, or for weights that are joined the sum of both as the first.
  const void* input_gates;   // [batch, kInput * state_size]
  const void* hidden_gates;  // [batch, kRecurrent * state_size] or null
  const void* bias_x;        // [kInput * state_size] or null
  const void* bias_h;        // [kRecurrent * state_size] or null
  const void* c_0;           // [batch, state_size]: h_0 again, for a cell whose h is c
  void* h;                   // [batch, state_size]
  void* c;                   // [batch, state_size]
  void* gates;               // [batch, kGates * state_size]; may be `input_gates`, where all have an input part
};

struct StepBackwardArguments {
  StepSizes sizes;
  Upstream grad_h;      // [batch, state_size]
  Upstream grad_c;      // [batch, state_size]
  const void* gates;    // [batch, kGates * state_size]
  const void* saved_c;  // [batch, state_size]: the new c where the cell saves that, else c_0
  void* grad_x;         // [batch, kInput * state_size], in the order of input_place(): of the input GEMM
  void* grad_h_part;    // [batch, kRecurrent * state_size]: of the recurrent GEMM; null where they are the same
  void* grad_c_0;       // [batch, state_size]: for a cell whose h is c, what is to be added to the gradient of h_0
  // With the parameters' gradients, in one kernel; null where a library computes them.
  const void* input;     // [batch, input_features]
  const void* h_0;       // [batch, state_size]
  void* grad_weights_x;  // [kInput * state_size, input_features]
  void* grad_weights_h;  // [kRecurrent * state_size, state_size]
  int64_t grad_weights_x_stride;
  int64_t grad_weights_h_stride;
  void* grad_bias_x;  // [kInput * state_size]
  void* grad_bias_h;  // [kRecurrent * state_size] or null
};

// The gradients of the biases, from those of both GEMMs.
struct StepBiasBackwardArguments {
  StepSizes sizes;
  const void* grad_x;       // [batch, kInput * state_size]
  const void* grad_h_part;  // [batch, kRecurrent * state_size] or null
  void* grad_bias_x;        // [kInput * state_size]
  void* grad_bias_h;        // [kRecurrent * state_size], or null where there is one bias
};

// The gradients of the input and of h_0, in float32 only.
struct StepInputBackwardArguments {
  StepSizes sizes;
  const void* grad_x;       // [batch, kInput * state_size]
  const void* grad_h_part;  // [batch, kRecurrent * state_size] or null
  const void* grad_c_0;     // [batch, state_size], to be added to grad_h_0, or null
  const void* weights_x;    // [kInput * state_size, input_features]
  const void* weights_h;    // [kRecurrent * state_size, state_size]
  int64_t weights_x_stride;
  int64_t weights_h_stride;
  void* grad_input;  // [batch, input_features]
  void* grad_h_0;    // [batch, state_size]
};

// Whether the gradients of both GEMMs are the same numbers.
template <class Cell>
constexpr bool kHasOneGradient =
    Cell::kInput == Cell::kGates && Cell::kRecurrent == Cell::kGates && extops::kFirstInputOf<Cell> == 0;

// Calls function(cell) for a cell that has kernels of one step.
template <class Cell, class Function>
Error with_step(const Function& function) {
  if constexpr (extops::kCellStates<Cell> == 1) {
    return function(Cell());
  } else {
    return "no kernel computes one step of such a cell";
  }
}

// The parts of a step that a kernel may compute with their GEMMs and sums.
enum class StepPart : int32_t { kForward, kParametersBackward, kBiasBackward, kInputBackward };

// alignment  0 where a library is faster, else the alignment that the tensors must have, in bytes
//
// A CPU function computes the elements [begin, end) of batch * state_size or, with GEMMs, those columns of each row,
// and of each block of state_size gates.
#define EXTOPS_DECLARE_STEP_CPU(cell, Cell)                                                                       \
  EXTOPS_API int64_t extops_##cell##_step_alignment_cpu(ScalarType dtype, const StepSizes& sizes, StepPart part); \
  EXTOPS_API Error extops_##cell##_step_cpu(                                                                      \
      ScalarType dtype, const StepArguments& arguments, int64_t begin, int64_t end);                              \
  EXTOPS_API Error extops_##cell##_step_backward_cpu(                                                             \
      ScalarType dtype, const StepBackwardArguments& arguments, int64_t begin, int64_t end);
#define EXTOPS_DECLARE_STEP_CUDA(cell, Cell)                                                                       \
  EXTOPS_API int64_t extops_##cell##_step_alignment_cuda(ScalarType dtype, const StepSizes& sizes, StepPart part); \
  EXTOPS_API Error extops_##cell##_step_cuda(ScalarType dtype, const StepArguments& arguments, void* stream);      \
  EXTOPS_API Error extops_##cell##_step_backward_cuda(                                                             \
      ScalarType dtype, const StepBackwardArguments& arguments, void* stream);                                     \
  EXTOPS_API Error extops_##cell##_step_bias_backward_cuda(                                                        \
      ScalarType dtype, const StepBiasBackwardArguments& arguments, void* stream);                                 \
  EXTOPS_API Error extops_##cell##_step_input_backward_cuda(                                                       \
      ScalarType dtype, const StepInputBackwardArguments& arguments, void* stream);
EXTOPS_CELLS(EXTOPS_DECLARE_STEP_CPU)
EXTOPS_CELLS(EXTOPS_DECLARE_STEP_CUDA)
