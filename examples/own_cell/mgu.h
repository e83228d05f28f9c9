// A minimal gated unit, whose one gate f forgets and resets (arXiv:1603.09420; here f is multiplied after the GEMM,
// as in torch's GRU). The gates n_x and f have an input part, f and n_h a recurrent part:
//
//   f = sigmoid(f);  n = tanh(n_x + f * n_h);  new_c = h = (1 - f) * old_c + f * n
#pragma once

#include "cells/cell.h"

struct Mgu {
  enum { kNx, kF, kNh, kGates };
  static constexpr int kInput = 2;
  static constexpr int kRecurrent = 2;
  static constexpr bool kSavesNewC = false;

  template <class Math, int kGate, class C>
  EXTOPS_FUNCTION static C activate(C x) {
    return kGate == kF ? Math::sigmoid(x) : x;
  }
  template <class Math, class C>
  EXTOPS_FUNCTION static C new_c(const C (&a)[kGates], C old_c) {
    return old_c + a[kF] * (squash<Math>(a, old_c) - old_c);
  }
  template <class Math, class C>
  EXTOPS_FUNCTION static C output(const C (&)[kGates], C new_c) {
    return new_c;
  }
  template <class Math, class C>
  EXTOPS_FUNCTION static C squash(const C (&a)[kGates], C) {
    return Math::tanh(a[kNx] + a[kF] * a[kNh]);
  }
  template <class GradH, class C>
  EXTOPS_FUNCTION static GradH to_c(GradH grad_h, const C (&)[kGates], C) {
    return grad_h;
  }
  template <class Math, class GradH, class GradC, class C>
  EXTOPS_FUNCTION static void to_gates(
      GradH, GradC grad_c, const C (&a)[kGates], C old_c, C n, C (&gradients)[kGates]) {
    gradients[kNx] = grad_c * a[kF] * (1 - n * n);
    gradients[kF] = (grad_c * (n - old_c) + gradients[kNx] * a[kNh]) * a[kF] * (1 - a[kF]);
    gradients[kNh] = gradients[kNx] * a[kF];
  }
  template <class GradC, class C>
  EXTOPS_FUNCTION static C to_old_c(GradC grad_c, const C (&a)[kGates]) {
    return grad_c * (1 - a[kF]);
  }
};
