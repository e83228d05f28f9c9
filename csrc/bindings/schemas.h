// All operators: the one list that bindings read.
#pragma once

#include <cstddef>

#include "../elementwise/operators.h"
#include "../kernels/lltm.h"
#include "sequence.h"

// The operators with a table (kernels/table.h), but for those of cells, which follow from their constants (cell.h): the
// name, the struct of the table, and the arguments after those of the table. `allow_tf32` is torch's switch for GEMMs
// of float32 on CUDA, which the stable ABI cannot read; torch's own GEMMs read it themselves.
//
// GENERIC(name, struct) is an operator without further arguments whose kernel serves every problem:
// `extops_<name>_cpu`, for the rows [begin, end) of the first result, and `extops_<name>_cuda`. It needs no binding of
// its own.
// clang-format off
#define EXTOPS_OPERATORS(OPERATOR, GENERIC)                         \
  OPERATOR(lltm, LltmForward, ", *, bool allow_tf32=False")         \
  OPERATOR(lltm_backward, LltmBackward, ", *, bool allow_tf32=False") \
  OPERATOR(lltm_input_backward, LltmInputBackward, "")              \
  OPERATOR(lltm_cell, LltmCell, "")                                 \
  OPERATOR(lltm_cell_backward, LltmCellBackward, "")                \
  OPERATOR(lltm_sequence, LltmSequenceTensors, EXTOPS_SEQUENCE_OPTIONS) \
  OPERATOR(lltm_sequence_backward, LltmSequenceBackwardTensors, EXTOPS_SEQUENCE_BACKWARD_OPTIONS)
// clang-format on

// The schema of each operator, null past the last; those of elementwise operators come last, in the order of their
// kernels.
EXTOPS_API const char* extops_schema(size_t index);

// The names of the sizes in the kernel's struct, and the rows of the table; empty for an operator without one. The
// binding in Python reads them.
EXTOPS_API const char* extops_sizes(size_t index);
EXTOPS_API const char* extops_rows(size_t index);

// The name of each cell and its constants (make_schema.h), null past the last.
EXTOPS_API const char* extops_cell(size_t index);
