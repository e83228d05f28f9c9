// The LSTM, of torch's columns i, f, g, o:
//
//   new_c = sigmoid(f) * old_c + sigmoid(i) * tanh(g)
//   h     = sigmoid(o) * tanh(new_c)
#pragma once

#include "cell.h"

namespace extops {

struct Lstm {
  enum { kI, kF, kG, kO, kColumns };
  static constexpr int kInput = kColumns;
  static constexpr int kRecurrent = kColumns;
  static constexpr bool kSavesNewC = false;

  template <class Math, int kColumn, class C>
  EXTOPS_FUNCTION static C activate(C x) {
    return kColumn == kG ? Math::tanh(x) : Math::sigmoid(x);
  }

  template <class Math, class C>
  EXTOPS_FUNCTION static C new_c(const C (&a)[kColumns], C old_c) {
    return a[kF] * old_c + a[kI] * a[kG];
  }

  template <class Math, class C>
  EXTOPS_FUNCTION static C output(const C (&a)[kColumns], C new_c) {
    return a[kO] * Math::tanh(new_c);
  }

  template <class Math, class C>
  EXTOPS_FUNCTION static C squash(const C (&a)[kColumns], C old_c) {
    return Math::tanh(new_c<Math>(a, old_c));
  }

  template <class GradH, class C>
  EXTOPS_FUNCTION static C to_c(GradH grad_h, const C (&a)[kColumns], C tanh_c) {
    return grad_h * a[kO] * (1 - tanh_c * tanh_c);
  }

  template <class Math, class GradH, class GradC, class C>
  EXTOPS_FUNCTION static void to_columns(
      GradH grad_h, GradC grad_c, const C (&a)[kColumns], C old_c, C tanh_c, C (&gradients)[kColumns]) {
    gradients[kI] = grad_c * a[kG] * a[kI] * (1 - a[kI]);
    gradients[kF] = grad_c * old_c * a[kF] * (1 - a[kF]);
    gradients[kG] = grad_c * a[kI] * (1 - a[kG] * a[kG]);
    gradients[kO] = grad_h * tanh_c * a[kO] * (1 - a[kO]);
  }

  template <class GradC, class C>
  EXTOPS_FUNCTION static C to_old_c(GradC grad_c, const C (&a)[kColumns]) {
    return grad_c * a[kF];
  }
};

}  // namespace extops
