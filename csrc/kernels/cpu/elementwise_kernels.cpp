// The elementwise operators on the CPU.
#include <iterator>

#include "../../elementwise/operators.h"
#include "elementwise.h"

namespace {

template <class Function>
Error run(
    ScalarType dtype, int64_t dim, const int64_t* geometry, void* const* data, const double* numbers, int64_t begin,
    int64_t end) {
  return extops::cpu::elementwise<Function>(dtype, dim, geometry, data, numbers, begin, end);
}

#define EXTOPS_CHECK(Function, schema) \
  static_assert(                       \
      extops::kNumbers<extops::Function> == extops::count_numbers(schema), "a member for each number of " schema);
EXTOPS_ELEMENTWISE(EXTOPS_CHECK)

#define EXTOPS_KERNEL(Function, schema) {schema, &run<extops::Function>},
constexpr ElementwiseCpu kKernels[] = {EXTOPS_ELEMENTWISE(EXTOPS_KERNEL)};

}  // namespace

const ElementwiseCpu* extops_elementwise_cpu(size_t index) {
  return index < std::size(kKernels) ? &kKernels[index] : nullptr;
}
