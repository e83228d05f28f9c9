// A function of one element, written once for CPU and CUDA: `function(inputs..., outputs&...)` in the compute type C.
// Its members are the numbers that the operator takes besides tensors: doubles, in the order of the schema.
#pragma once

#include <cstddef>
#include <cstring>
#include <string_view>
#include <type_traits>

#if defined(__CUDACC__)
#define EXTOPS_FUNCTION __device__ constexpr
#else
#define EXTOPS_FUNCTION [[gnu::always_inline]] inline constexpr
#endif

namespace extops {

template <class... Parameters>
struct CountParameters {
  static constexpr int kOutputs = (0 + ... + std::is_reference_v<Parameters>);
  static constexpr int kInputs = sizeof...(Parameters) - kOutputs;
};

template <class Function, class... Parameters>
CountParameters<Parameters...> count_parameters(void (Function::*)(Parameters...) const);

// How many operands a function has.
template <class Function>
using Operands = decltype(count_parameters(&Function::template operator()<float>));

template <class Function>
constexpr size_t kNumbers = std::is_empty_v<Function> ? 0 : sizeof(Function) / sizeof(double);

// How many numbers a schema names.
constexpr size_t count_numbers(std::string_view schema) {
  size_t count = 0;
  for (size_t at = schema.find("float "); at != schema.npos; at = schema.find("float ", at + 1)) ++count;
  return count;
}

template <class Function>
Function make_function(const double* numbers) {
  static_assert(std::is_trivially_copyable_v<Function>);
  Function function{};
  if constexpr (kNumbers<Function> > 0) std::memcpy(&function, numbers, sizeof function);
  return function;
}

}  // namespace extops
