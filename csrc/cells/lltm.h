// The LLTM, of the columns input_gate, output_gate, candidate:
//
//   new_c = old_c + elu(candidate) * sigmoid(input_gate)
//   h     = tanh(new_c) * sigmoid(output_gate)
#pragma once

#include "cell.h"

namespace extops {

struct Lltm {
  enum { kInputGate, kOutputGate, kCandidate, kColumns };
  static constexpr int kInput = kColumns;
  static constexpr int kRecurrent = kColumns;
  static constexpr bool kSavesNewC = true;

  template <class Math, int kColumn, class C>
  EXTOPS_FUNCTION static C activate(C x) {
    if constexpr (kColumn == kCandidate) {
      return x;  // the backward needs it
    } else {
      return Math::sigmoid(x);
    }
  }

  template <class Math, class C>
  EXTOPS_FUNCTION static C new_c(const C (&a)[kColumns], C old_c) {
    return old_c + Math::elu(a[kCandidate]) * a[kInputGate];
  }

  template <class Math, class C>
  EXTOPS_FUNCTION static C output(const C (&a)[kColumns], C new_c) {
    return Math::tanh(new_c) * a[kOutputGate];
  }

  template <class Math, class C>
  EXTOPS_FUNCTION static C squash(const C (&)[kColumns], C new_c) {
    return Math::tanh(new_c);
  }

  template <class GradH, class C>
  EXTOPS_FUNCTION static C to_c(GradH grad_h, const C (&a)[kColumns], C tanh_c) {
    return grad_h * a[kOutputGate] * (1 - tanh_c * tanh_c);
  }

  template <class Math, class GradH, class GradC, class C>
  EXTOPS_FUNCTION static void to_columns(
      GradH grad_h, GradC grad_c, const C (&a)[kColumns], C, C tanh_c, C (&gradients)[kColumns]) {
    const C i = a[kInputGate];
    const C o = a[kOutputGate];
    const C elu = Math::elu(a[kCandidate]);
    gradients[kInputGate] = grad_c * elu * i * (1 - i);
    gradients[kOutputGate] = grad_h * tanh_c * o * (1 - o);
    gradients[kCandidate] = grad_c * i * (a[kCandidate] > 0 ? C(1) : 1 + elu);
  }

  template <class GradC, class C>
  EXTOPS_FUNCTION static GradC to_old_c(GradC grad_c, const C (&)[kColumns]) {
    return grad_c;
  }
};

}  // namespace extops
