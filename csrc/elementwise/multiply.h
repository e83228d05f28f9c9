#pragma once

#include "function.h"

namespace extops {

struct Multiply {
  template <class C>
  EXTOPS_FUNCTION void operator()(C a, C b, C& product) const {
    product = a * b;
  }
};

// Both gradients, in one pass over memory.
struct MultiplyBackward {
  template <class C>
  EXTOPS_FUNCTION void operator()(C grad_output, C a, C b, C& grad_a, C& grad_b) const {
    grad_a = grad_output * b;
    grad_b = grad_output * a;
  }
};

}  // namespace extops
