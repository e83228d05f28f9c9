// The interface of all elementwise kernels, in the order of csrc/elementwise/operators.h.
//
// data[operand]           first element of each operand: the outputs, then the inputs
// geometry[1 + operand]   rows of `dim` numbers: the common sizes, then the strides of each operand (in elements; 0
//                         where an operand is broadcast, never for an output)
//
// numbers                 what the operator takes besides tensors
//
// A CPU function computes the elements [begin, end), counted in the order of the first output's memory, so that the
// caller chooses the threads. A CUDA function enqueues on `stream` of the current device and does not wait.
#pragma once

#include <cstddef>

#include "types.h"

struct ElementwiseCpu {
  const char* schema;
  Error (*run)(
      ScalarType dtype, int64_t dim, const int64_t* geometry, void* const* data, const double* numbers, int64_t begin,
      int64_t end);
};

struct ElementwiseCuda {
  const char* schema;
  Error (*run)(
      ScalarType dtype, int64_t dim, const int64_t* geometry, void* const* data, const double* numbers, void* stream);
};

// Null past the last.
EXTOPS_API const ElementwiseCpu* extops_elementwise_cpu(size_t index);
EXTOPS_API const ElementwiseCuda* extops_elementwise_cuda(size_t index);
