// The elementwise operators on CUDA.
#include <iterator>

#include "../../../elementwise/operators.h"
#include "elementwise.cuh"

namespace {

template <class Function>
Error run(
    ScalarType dtype, int64_t dim, const int64_t* geometry, void* const* data, const double* numbers, void* stream) {
  return extops::cuda::elementwise<Function>(dtype, dim, geometry, data, numbers, stream);
}

#define EXTOPS_KERNEL(Function, schema) {schema, &run<extops::Function>},
constexpr ElementwiseCuda kKernels[] = {EXTOPS_ELEMENTWISE(EXTOPS_KERNEL)};

}  // namespace

const ElementwiseCuda* extops_elementwise_cuda(size_t index) {
  return index < std::size(kKernels) ? &kKernels[index] : nullptr;
}
