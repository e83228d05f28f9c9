// An LSTM whose gates see the cell state, each by a number of the unit's:
//
//   i = sigmoid(z_i + p_i * old_c);  f = sigmoid(z_f + p_f * old_c);  g = tanh(z_g)
//   new_c = f * old_c + i * g
//   o = sigmoid(z_o + p_o * new_c);  h = o * tanh(new_c)
#pragma once

#include "cells/cell.h"

struct Peephole {
  enum { kPi, kPf, kPo, kI, kF, kG, kO, kGates };
  static constexpr int kNumbers = 3;
  static constexpr int kInput = kGates;
  static constexpr int kRecurrent = 4;
  static constexpr bool kSavesNewC = false;

  // The other gates need the cell state, which `activate` has not.
  template <class Math, int kGate, class C>
  EXTOPS_FUNCTION static C activate(C x) {
    return kGate == kG ? Math::tanh(x) : x;
  }
  template <class Math, class C>
  EXTOPS_FUNCTION static C seeing(C c, C gate, C peephole) {
    return Math::sigmoid(gate + peephole * c);
  }
  template <class Math, class C>
  EXTOPS_FUNCTION static C new_c(const C (&a)[kGates], C old_c) {
    return seeing<Math>(old_c, a[kF], a[kPf]) * old_c + seeing<Math>(old_c, a[kI], a[kPi]) * a[kG];
  }
  template <class Math, class C>
  EXTOPS_FUNCTION static C output(const C (&a)[kGates], C new_c) {
    return seeing<Math>(new_c, a[kO], a[kPo]) * Math::tanh(new_c);
  }
  template <class Math, class C>
  EXTOPS_FUNCTION static C squash(const C (&a)[kGates], C old_c) {
    return new_c<Math>(a, old_c);
  }
  template <class Math, class GradH, class C>
  EXTOPS_FUNCTION static C to_c(GradH grad_h, const C (&a)[kGates], C new_c) {
    const C o = seeing<Math>(new_c, a[kO], a[kPo]), tanh_c = Math::tanh(new_c);
    return grad_h * (o * (1 - tanh_c * tanh_c) + tanh_c * o * (1 - o) * a[kPo]);
  }
  template <class Math, class GradH, class GradC, class C>
  EXTOPS_FUNCTION static void to_gates(
      GradH grad_h, GradC grad_c, const C (&a)[kGates], C old_c, C new_c, C (&gradients)[kGates]) {
    const C i = seeing<Math>(old_c, a[kI], a[kPi]), f = seeing<Math>(old_c, a[kF], a[kPf]);
    const C o = seeing<Math>(new_c, a[kO], a[kPo]);
    gradients[kI] = grad_c * (a[kG] * i * (1 - i));
    gradients[kF] = grad_c * (old_c * f * (1 - f));
    gradients[kG] = grad_c * (i * (1 - a[kG] * a[kG]));
    gradients[kO] = grad_h * (Math::tanh(new_c) * o * (1 - o));
    gradients[kPi] = gradients[kI] * old_c;
    gradients[kPf] = gradients[kF] * old_c;
    gradients[kPo] = gradients[kO] * new_c;
  }
  template <class Math, class GradC, class C>
  EXTOPS_FUNCTION static C to_old_c(GradC grad_c, const C (&a)[kGates], C old_c) {
    const C i = seeing<Math>(old_c, a[kI], a[kPi]), f = seeing<Math>(old_c, a[kF], a[kPf]);
    return grad_c * (f + old_c * f * (1 - f) * a[kPf] + a[kG] * i * (1 - i) * a[kPi]);
  }
};
