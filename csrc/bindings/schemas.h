// All operators: the one list that bindings read.
#pragma once

#include <cstddef>

#include "../elementwise/operators.h"
#include "../kernels/table.h"
#include "../kernels/types.h"

// The operators with a table (kernels/table.h), but for those of cells, which follow from their constants (cell.h).
//
// OPERATOR(name, struct) is one whose kernel serves every problem: `extops_<name>_cpu`, for the rows [begin, end) of
// the first result, and `extops_<name>_cuda`. It needs no binding of its own.
// clang-format off
#define EXTOPS_OPERATORS(OPERATOR)                                  \
  /* a line for each */

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
