// The GRU. The reset gate multiplies the recurrent part of the candidate n, whose two parts are pre-activations of
// their own: of n_x, r, z, n_h the first three have an input part, the last three a recurrent part.
//
//   n     = tanh(n_x + sigmoid(r) * n_h)
//   new_c = (1 - sigmoid(z)) * n + sigmoid(z) * old_c
//   h     = new_c
#pragma once

#include "cell.h"

namespace extops {

struct Gru {
  enum { kNx, kR, kZ, kNh, kGates };
  static constexpr int kInput = 3;
  static constexpr int kFirstInput = kR;  // torch's order is r, z, n
  static constexpr int kRecurrent = 3;
  static constexpr bool kSavesNewC = false;

  template <class Math, int kGate, class C>
  EXTOPS_FUNCTION static C activate(C x) {
    if constexpr (kGate == kR || kGate == kZ) {
      return Math::sigmoid(x);
    } else {
      return x;
    }
  }

  template <class Math, class C>
  EXTOPS_FUNCTION static C new_c(const C (&a)[kGates], C old_c) {
    const C n = squash<Math>(a, old_c);
    return n + a[kZ] * (old_c - n);
  }

  template <class Math, class C>
  EXTOPS_FUNCTION static C output(const C (&)[kGates], C new_c) {
    return new_c;
  }

  template <class Math, class C>
  EXTOPS_FUNCTION static C squash(const C (&a)[kGates], C) {
    return Math::tanh(a[kNx] + a[kR] * a[kNh]);
  }

  template <class GradH, class C>
  EXTOPS_FUNCTION static GradH to_c(GradH grad_h, const C (&)[kGates], C) {
    return grad_h;
  }

  template <class Math, class GradH, class GradC, class C>
  EXTOPS_FUNCTION static void to_gates(
      GradH, GradC grad_c, const C (&a)[kGates], C old_c, C n, C (&gradients)[kGates]) {
    gradients[kNx] = grad_c * (1 - a[kZ]) * (1 - n * n);
    gradients[kR] = gradients[kNx] * a[kNh] * a[kR] * (1 - a[kR]);
    gradients[kZ] = grad_c * (old_c - n) * a[kZ] * (1 - a[kZ]);
    gradients[kNh] = gradients[kNx] * a[kR];
  }

  template <class GradC, class C>
  EXTOPS_FUNCTION static C to_old_c(GradC grad_c, const C (&a)[kGates]) {
    return grad_c * a[kZ];
  }
};

}  // namespace extops
