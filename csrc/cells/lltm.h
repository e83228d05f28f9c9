// The LLTM, of the pre-activations input_gate, output_gate, candidate:
//
//   new_c = old_c + elu(candidate) * sigmoid(input_gate)
//   h     = tanh(new_c) * sigmoid(output_gate)
#pragma once

#include "cell.h"

namespace extops {

struct Lltm {
  enum { kInputGate, kOutputGate, kCandidate, kGates };
  static constexpr int kInput = kGates;
  static constexpr int kRecurrent = kGates;
  static constexpr bool kSavesNewC = true;

  template <class Math, int kGate, class C>
  EXTOPS_FUNCTION static C activate(C x) {
    if constexpr (kGate == kCandidate) {
      return x;  // the backward needs it
    } else {
      return Math::sigmoid(x);
    }
  }

  template <class Math, class C>
  EXTOPS_FUNCTION static C new_c(const C (&a)[kGates], C old_c) {
    return old_c + Math::elu(a[kCandidate]) * a[kInputGate];
  }

  template <class Math, class C>
  EXTOPS_FUNCTION static C output(const C (&a)[kGates], C new_c) {
    return Math::tanh(new_c) * a[kOutputGate];
  }

  template <class Math, class C>
  EXTOPS_FUNCTION static C squash(const C (&)[kGates], C new_c) {
    return Math::tanh(new_c);
  }

  template <class GradH, class C>
  EXTOPS_FUNCTION static C to_c(GradH grad_h, const C (&a)[kGates], C tanh_c) {
    return grad_h * a[kOutputGate] * (1 - tanh_c * tanh_c);
  }

  template <class Math, class GradH, class GradC, class C>
  EXTOPS_FUNCTION static void to_gates(
      GradH grad_h, GradC grad_c, const C (&a)[kGates], C, C tanh_c, C (&gradients)[kGates]) {
    const C i = a[kInputGate];
    const C o = a[kOutputGate];
    const C elu = Math::elu(a[kCandidate]);
    gradients[kInputGate] = grad_c * elu * i * (1 - i);
    gradients[kOutputGate] = grad_h * tanh_c * o * (1 - o);
    gradients[kCandidate] = grad_c * i * (a[kCandidate] > 0 ? C(1) : 1 + elu);
  }

  template <class GradC, class C>
  EXTOPS_FUNCTION static GradC to_old_c(GradC grad_c, const C (&)[kGates]) {
    return grad_c;
  }
};

}  // namespace extops
