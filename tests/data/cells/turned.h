// A cell with all that built-in cells have apart: the input meets all columns, of which weight_ih begins with the
// second, the hidden state meets the last two, and the backward gets the new cell state.
//
//   new_c = old_c / 2 + sigmoid(i) * tanh(g);  h = sigmoid(o) * tanh(new_c)
#pragma once

#include "cells/cell.h"

struct Turned {
  enum { kO, kI, kG, kColumns };
  static constexpr int kInput = kColumns;
  static constexpr int kFirstInput = kI;
  static constexpr int kRecurrent = 2;
  static constexpr bool kSavesNewC = true;

  template <class Math, int kColumn, class C>
  EXTOPS_FUNCTION static C activate(C x) {
    return kColumn == kG ? Math::tanh(x) : Math::sigmoid(x);
  }
  template <class Math, class C>
  EXTOPS_FUNCTION static C new_c(const C (&a)[kColumns], C old_c) {
    return old_c * C(0.5) + a[kI] * a[kG];
  }
  template <class Math, class C>
  EXTOPS_FUNCTION static C output(const C (&a)[kColumns], C new_c) {
    return a[kO] * Math::tanh(new_c);
  }
  template <class Math, class C>
  EXTOPS_FUNCTION static C squash(const C (&)[kColumns], C new_c) {
    return Math::tanh(new_c);
  }
  template <class GradH, class C>
  EXTOPS_FUNCTION static C to_c(GradH grad_h, const C (&a)[kColumns], C tanh_c) {
    return grad_h * a[kO] * (1 - tanh_c * tanh_c);
  }
  template <class Math, class GradH, class GradC, class C>
  EXTOPS_FUNCTION static void to_columns(
      GradH grad_h, GradC grad_c, const C (&a)[kColumns], C, C tanh_c, C (&gradients)[kColumns]) {
    gradients[kO] = grad_h * tanh_c * a[kO] * (1 - a[kO]);
    gradients[kI] = grad_c * a[kG] * a[kI] * (1 - a[kI]);
    gradients[kG] = grad_c * a[kI] * (1 - a[kG] * a[kG]);
  }
  template <class GradC, class C>
  EXTOPS_FUNCTION static C to_old_c(GradC grad_c, const C (&)[kColumns]) {
    return grad_c * C(0.5);
  }
};
