// A recurrent cell (../cells/cell.h) over a whole sequence, from the input GEMM of all steps:
//
//   gates[t] = input_gates[t] + bias_x + h[t - 1] * weights_h^T + bias_h
//
// followed by the cell. `gates` are pre-activations. The first kInput of each unit have a part in `input_gates` and
// bias_x, in the order of input_place(), and the last kRecurrent ones in weights_h and bias_h. In memory, gate k of all
// units comes before gate k + 1. Where `lengths` are given, a sample's steps from its length on are not valid: its
// state stays, its output and its gradients of gates are zero, and its `input_gates` are not read.
//
// Of two directions, the parameters of the second follow those of the first, and its row of a tensor lies behind that
// of the first for the same step and sample. Below are the shapes for one direction.
//
// A cell state has kCellStates numbers of each unit: its tensors have as many rows of state_size for each row below.
//
// The "compute type" is float32 for 16-bit types, else the dtype itself. `input_gates`, the cell state between the
// steps and the gradients of both states are of the compute type; what is saved for the backward is of the dtype.
#pragma once

#include "../cells/cells.h"
#include "types.h"

struct SequenceSizes {
  int64_t time;
  int64_t batch;
  int64_t state_size;
  int64_t weights_stride;  // elements from one row of weights_h to the next
  // Rows from one step to the next and from one sample to the next, in all tensors of [time, batch, ...].
  int64_t time_stride;
  int64_t batch_stride;
  int64_t state_stride;  // from one sample to the next in those of [batch, ...]
  int64_t reverse;       // 1: from the last step to the first
  int64_t directions;    // that are computed: of two, on a GPU alone, the second goes the other way
  int64_t first_direction;
  int64_t step;  // for the functions of one step: its number in the order of computation
};

struct SequenceArguments {
  SequenceSizes sizes;
  const void* input_gates;  // [time, batch, kInput * state_size], of the compute type: input * weights_x^T
  const void* weights_h;    // [kRecurrent * state_size, state_size]
  const void* bias_x;       // [kInput * state_size] or null
  const void* bias_h;       // [kRecurrent * state_size] or null
  const void* h_0;          // [batch, state_size]
  const void* c_0;          // [batch, state_size]: h_0 again, for a cell whose h is c
  const int64_t* lengths;   // [batch] or null
  const void* recurrent;    // of one step: h * weights_h^T, [batch, kRecurrent * state_size], of the compute type
  void* output;             // [time, batch, state_size]
  void* h_n;                // [batch, state_size]
  void* c_n;                // [batch, state_size]: may be h_n, for a cell whose h is c
  void* gates;              // [time, batch, kGates * state_size]: the pre-activations; may be `input_gates`, where all
                            // have an input part, in the same order and of the same type
  void* cells;              // [time, batch, state_size]: saved_c of each step; both null where no backward follows
  void* workspace;
};

struct SequenceBackwardArguments {
  SequenceSizes sizes;
  const void* grad_output;  // [time, batch, state_size] or null
  const void* grad_h_n;     // [batch, state_size] or null
  const void* grad_c_n;     // [batch, state_size] or null
  const void* weights_h;    // [kRecurrent * state_size, state_size]
  const void* gates;        // [time, batch, kGates * state_size]
  const void* cells;        // [time, batch, state_size]
  const int64_t* lengths;   // [batch] or null
  const void* recurrent;    // of one step: the last kRecurrent gates of grad_gates of the step before * weights_h,
                            // [batch, state_size], of the compute type
  void* grad_gates;         // [time, batch, kGates * state_size]
  void* grad_h_0;           // [batch, state_size]
  void* grad_c_0;           // [batch, state_size]: for a cell whose h is c, what is to be added to grad_h_0
  void* workspace;
};

// On the CPU, extops_<cell>_sequence_cpu and its backward compute all steps of the samples [begin, end) of the batch,
// so that the caller chooses the threads. If `recurrent` is given, and in the backward if `weights_h` is null, they
// compute step `sizes.step` alone, without lengths and in a dtype that is its own compute type. Step 0 starts from h_0
// and c_0 (grad_h_n, grad_c_n), later ones from h_n and c_n (grad_h_0, grad_c_0), where each stores its states. Only
// grad_h_0 is stored by the caller: it is a GEMM of the gradients of the recurrent gates.
//
// extops_<cell>_sequence_pack_cpu packs the recurrent weights of the units [begin, end) into `packed`, which is then
// the workspace of all of these; without that, it says how many bytes `packed` needs. Where the workspace is null, each
// call packs them for itself.
#define EXTOPS_DECLARE_SEQUENCE_CPU(cell, Cell)                                                         \
  EXTOPS_API Error extops_##cell##_sequence_pack_cpu(                                                   \
      ScalarType dtype, const SequenceSizes& sizes, bool backward, const void* weights_h, void* packed, \
      int64_t& bytes, int64_t begin, int64_t end);                                                      \
  EXTOPS_API Error extops_##cell##_sequence_cpu(                                                        \
      ScalarType dtype, const SequenceArguments& arguments, int64_t begin, int64_t end);                \
  EXTOPS_API Error extops_##cell##_sequence_backward_cpu(                                               \
      ScalarType dtype, const SequenceBackwardArguments& arguments, int64_t begin, int64_t end);

// Which kernel computes a sequence on a GPU.
struct SequencePlan {
  static constexpr int64_t kStep = 0;
  static constexpr int64_t kNone = -1;

  int64_t kernel;      // kStep: a GEMM by the caller, and the kernel of one step, for each; kNone: the variable below
                       // names one that cannot
  int64_t workspace;   // the bytes that the kernel needs (aligned to 256 bytes)
  int64_t directions;  // that the kernel computes at once
};

// Lets the library find out which kernel is the fastest for a call: `run` computes as many of its steps as these, into
// results that are not used. False where that fails.
constexpr int64_t kMeasuredSteps = 64;
struct SequenceTrial {
  bool (*run)(const void* self, const SequencePlan& plan);
  const void* self;
};

// Names the kernel that all sequences use, for tests and measurements.
constexpr const char* kSequenceKernelVariable = "EXTOPS_SEQUENCE_KERNEL";

// The same within a process; empty: none.
EXTOPS_API void extops_name_sequence_kernel_cuda(const char* name);
// The name of a kernel by its number in a plan, null for others.
EXTOPS_API const char* extops_sequence_kernel_name_cuda(int64_t kernel);

// What was measured of a kind of call: the kernels of eager calls and of those in CUDA graphs.
struct SequenceKernels {
  int64_t eager;
  int64_t captured;
};

// Who keeps that for longer than the process. Without one, nothing is measured.
struct SequenceMemory {
  // 1 where the kind is known, 0 where it may be measured, -1 where it may not.
  int32_t (*recall)(const char* kind, SequenceKernels& kernels);
  void (*keep)(const char* kind, const SequenceKernels& kernels, double eager_seconds, double captured_seconds);
};
EXTOPS_API void extops_set_sequence_memory_cuda(const SequenceMemory& memory);

// The multiprocessors that a stream may use: a green context has some of them.
EXTOPS_API int32_t extops_sm_count_cuda(void* stream);

// product = a * b, or product + a * b with `accumulate`, in float32 or TF32 as `dtype` says, whatever torch's switch of
// GEMMs says: layers follow that of cuDNN. By torch's handle of cuBLAS. Matrices of [rows, inner], [inner, columns]
// and, contiguous, [rows, columns]; of the strides of a factor one is 1. The error says that torch has to compute it.
EXTOPS_API Error extops_gemm_cuda(
    void* handle, ScalarType dtype, const int64_t (&sizes)[3], const float* a, const int64_t (&a_strides)[2],
    const float* b, const int64_t (&b_strides)[2], float* product, int64_t accumulate);

// On a GPU, one persistent kernel computes all steps where weights_h fits into the SMs:
//
// plan        what computes such a problem on the stream: the fastest where that is known or `trial` finds it out, else
//             the first that can. `trial` may be null.
// step        the pointwise part of one step, after a GEMM by the caller. Step 0 starts from h_0 and c_0, later
//             ones from h_n and from the workspace: [kCellStates, batch, state_size] of the compute type. The last one
//             writes c_n. The backward goes from the last step of the forward to its first, and once more with `step` =
//             `time`, for grad_h_0 and grad_c_0. Its step 0 reads no `recurrent`; its workspace is
//             [1 + kCellStates, batch, state_size] of the compute type.
#define EXTOPS_DECLARE_SEQUENCE_CUDA(cell, Cell)                                                              \
  EXTOPS_API SequencePlan extops_##cell##_sequence_plan_cuda(                                                 \
      ScalarType dtype, const SequenceSizes& sizes, bool backward, void* stream, const SequenceTrial* trial); \
  EXTOPS_API Error extops_##cell##_sequence_cuda(                                                             \
      ScalarType dtype, const SequenceArguments& arguments, int64_t kernel, void* stream);                    \
  EXTOPS_API Error extops_##cell##_sequence_backward_cuda(                                                    \
      ScalarType dtype, const SequenceBackwardArguments& arguments, int64_t kernel, void* stream);            \
  EXTOPS_API Error extops_##cell##_sequence_step_cuda(                                                        \
      ScalarType dtype, const SequenceArguments& arguments, void* stream);                                    \
  EXTOPS_API Error extops_##cell##_sequence_step_backward_cuda(                                               \
      ScalarType dtype, const SequenceBackwardArguments& arguments, void* stream);

EXTOPS_CELLS(EXTOPS_DECLARE_SEQUENCE_CPU)
EXTOPS_CELLS(EXTOPS_DECLARE_SEQUENCE_CUDA)
