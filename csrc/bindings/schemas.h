// All operators: the one list that bindings read.
#pragma once

#include <cstddef>

#include "../elementwise/operators.h"
#include "../kernels/types.h"

// The schema of each operator, null past the last: those of cells, by their tables (cell.h), and then those of
// elementwise operators, in the order of their kernels.
EXTOPS_API const char* extops_schema(size_t index);

// The names of the sizes in the kernel's struct, and the rows of the table; empty for an operator without one. The
// binding in Python reads them.
EXTOPS_API const char* extops_sizes(size_t index);
EXTOPS_API const char* extops_rows(size_t index);

// The name of each cell and its constants (make_schema.h), null past the last.
EXTOPS_API const char* extops_cell(size_t index);
