// The LSTM, of torch's pre-activations i, f, g, o:
//
//   new_c = sigmoid(f) * old_c + sigmoid(i) * tanh(g)
//   h     = sigmoid(o) * tanh(new_c)
#pragma once

#include "cell.h"

namespace extops {

struct Lstm {
  enum { kI, kF, kG, kO, kGates };
  static constexpr int kInput = kGates;
  static constexpr int kRecurrent = kGates;
  static constexpr bool kSavesNewC = false;

  template <class Math, int kGate, class C>
  EXTOPS_FUNCTION static C activate(C x) {
    return kGate == kG ? Math::tanh(x) : Math::sigmoid(x);
  }

  template <class Math, class C>
  EXTOPS_FUNCTION static C new_c(const C (&a)[kGates], C old_c) {
    return a[kF] * old_c + a[kI] * a[kG];
  }

  template <class Math, class C>
  EXTOPS_FUNCTION static C output(const C (&a)[kGates], C new_c) {
    return a[kO] * Math::tanh(new_c);
  }

  template <class Math, class C>
  EXTOPS_FUNCTION static C squash(const C (&a)[kGates], C old_c) {
    return Math::tanh(new_c<Math>(a, old_c));
  }

  template <class GradH, class C>
  EXTOPS_FUNCTION static C to_c(GradH grad_h, const C (&a)[kGates], C tanh_c) {
    return grad_h * a[kO] * (1 - tanh_c * tanh_c);
  }

  template <class Math, class GradH, class GradC, class C>
  EXTOPS_FUNCTION static void to_gates(
      GradH grad_h, GradC grad_c, const C (&a)[kGates], C old_c, C tanh_c, C (&gradients)[kGates]) {
    gradients[kI] = grad_c * a[kG] * a[kI] * (1 - a[kI]);
    gradients[kF] = grad_c * old_c * a[kF] * (1 - a[kF]);
    gradients[kG] = grad_c * a[kI] * (1 - a[kG] * a[kG]);
    gradients[kO] = grad_h * tanh_c * a[kO] * (1 - a[kO]);
  }

  template <class GradC, class C>
  EXTOPS_FUNCTION static C to_old_c(GradC grad_c, const C (&a)[kGates]) {
    return grad_c * a[kF];
  }
};

}  // namespace extops
