// A cell that sets every constant: all gates have an input part, of which weight_ih begins with the second, the hidden
// state meets the last two, and the backward gets the new cell state.
//
//   new_c = old_c / 2 + sigmoid(i) * tanh(g);  h = sigmoid(o) * tanh(new_c)
#pragma once

#include "cells/cell.h"

struct Turned {
  enum { kO, kI, kG, kGates };
  static constexpr int kInput = kGates;
  static constexpr int kFirstInput = kI;
  static constexpr int kRecurrent = 2;
  static constexpr bool kSavesNewC = true;
  static constexpr bool kHasSequenceKernels = true;

  template <class Math, int kGate, class C>
  EXTOPS_FUNCTION static C activate(C x) {
    return kGate == kG ? Math::tanh(x) : Math::sigmoid(x);
  }
  template <class Math, class C>
  EXTOPS_FUNCTION static C new_c(const C (&a)[kGates], C old_c) {
    return old_c * C(0.5) + a[kI] * a[kG];
  }
  template <class Math, class C>
  EXTOPS_FUNCTION static C output(const C (&a)[kGates], C new_c) {
    return a[kO] * Math::tanh(new_c);
  }
  template <class Math, class C>
  EXTOPS_FUNCTION static C squash(const C (&)[kGates], C new_c) {
    return Math::tanh(new_c);
  }
  template <class GradH, class C>
  EXTOPS_FUNCTION static C to_c(GradH grad_h, const C (&a)[kGates], C tanh_c) {
    return grad_h * a[kO] * (1 - tanh_c * tanh_c);
  }
  template <class Math, class GradH, class GradC, class C>
  EXTOPS_FUNCTION static void to_gates(
      GradH grad_h, GradC grad_c, const C (&a)[kGates], C, C tanh_c, C (&gradients)[kGates]) {
    gradients[kO] = grad_h * tanh_c * a[kO] * (1 - a[kO]);
    gradients[kI] = grad_c * a[kG] * a[kI] * (1 - a[kI]);
    gradients[kG] = grad_c * a[kI] * (1 - a[kG] * a[kG]);
  }
  template <class GradC, class C>
  EXTOPS_FUNCTION static C to_old_c(GradC grad_c, const C (&)[kGates]) {
    return grad_c * C(0.5);
  }
};
