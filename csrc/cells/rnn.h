// The plain recurrent cell, with tanh or with the rectifier:
//
//   h = tanh(x), or max(x, 0)
#pragma once

#include "cell.h"

namespace extops {

template <bool kIsRelu>
struct Rnn {
  static constexpr int kColumns = 1;
  static constexpr int kInput = 1;
  static constexpr int kRecurrent = 1;
  static constexpr bool kSavesNewC = false;
  static constexpr bool kHasSequenceKernels = false;  // cuDNN's layer is as fast: a step has no more than a product

  template <class Math, int, class C>
  EXTOPS_FUNCTION static C activate(C x) {
    if constexpr (kIsRelu) {
      return x < 0 ? C(0) : x;  // NaN stays
    } else {
      return Math::tanh(x);
    }
  }

  template <class Math, class C>
  EXTOPS_FUNCTION static C new_c(const C (&a)[kColumns], C) {
    return a[0];
  }

  template <class Math, class C>
  EXTOPS_FUNCTION static C output(const C (&)[kColumns], C new_c) {
    return new_c;
  }

  template <class Math, class C>
  EXTOPS_FUNCTION static C squash(const C (&)[kColumns], C) {
    return 0;
  }

  template <class GradH, class C>
  EXTOPS_FUNCTION static GradH to_c(GradH grad_h, const C (&)[kColumns], C) {
    return grad_h;
  }

  template <class Math, class GradH, class GradC, class C>
  EXTOPS_FUNCTION static void to_columns(GradH, GradC grad_c, const C (&a)[kColumns], C, C, C (&gradients)[kColumns]) {
    if constexpr (kIsRelu) {
      gradients[0] = a[0] > 0 ? grad_c * C(1) : C(0);
    } else {
      gradients[0] = grad_c * (1 - a[0] * a[0]);
    }
  }

  template <class GradC, class C>
  EXTOPS_FUNCTION static C to_old_c(GradC, const C (&)[kColumns]) {
    return 0;
  }
};

using RnnTanh = Rnn<false>;
using RnnRelu = Rnn<true>;

}  // namespace extops
