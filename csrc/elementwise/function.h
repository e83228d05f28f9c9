// A function of one element, written once for CPU and CUDA: `function(inputs..., outputs&...)` in the compute type C.
#pragma once

#include <type_traits>

#if defined(__CUDACC__)
#define EXTOPS_FUNCTION __device__
#else
#define EXTOPS_FUNCTION [[gnu::always_inline]] inline
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

}  // namespace extops
