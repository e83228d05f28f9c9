// The plain recurrent cell, with tanh or with the rectifier:
//
//   h = tanh(x), or max(x, 0)
#pragma once

#include "cell.h"

namespace extops {

template <bool kIsRelu>
struct Rnn {
  static constexpr int kGates = 1;
  static constexpr int kInput = 1;
  static constexpr int kRecurrent = 1;
  static constexpr bool kSavesNewC = false;
  static constexpr bool kHasSequenceKernels = false;  // cuDNN's layer is as fast: a step is little more than a GEMM

  template <class Math, int, class C>
  EXTOPS_FUNCTION static C activate(C x) {
    if constexpr (kIsRelu) {
      return x < 0 ? C(0) : x;  // NaN stays
    } else {
      return Math::tanh(x);
    }
  }

  template <class Math, class C>
  EXTOPS_FUNCTION static C new_c(const C (&a)[kGates], C) {
    return a[0];
  }

  template <class Math, class C>
  EXTOPS_FUNCTION static C output(const C (&)[kGates], C new_c) {
    return new_c;
  }

  template <class Math, class C>
  EXTOPS_FUNCTION static C squash(const C (&)[kGates], C) {
    return 0;
  }

  template <class GradH, class C>
  EXTOPS_FUNCTION static GradH to_c(GradH grad_h, const C (&)[kGates], C) {
    return grad_h;
  }

  template <class Math, class GradH, class GradC, class C>
  EXTOPS_FUNCTION static void to_gates(GradH, GradC grad_c, const C (&a)[kGates], C, C, C (&gradients)[kGates]) {
    if constexpr (kIsRelu) {
      gradients[0] = a[0] <= 0 ? C(0) : grad_c * C(1);  // NaN passes the gradient, as in torch
    } else {
      gradients[0] = grad_c * (1 - a[0] * a[0]);
    }
  }

  template <class GradC, class C>
  EXTOPS_FUNCTION static C to_old_c(GradC, const C (&)[kGates]) {
    return 0;
  }
};

using RnnTanh = Rnn<false>;
using RnnRelu = Rnn<true>;

}  // namespace extops
