// The sLSTM of "xLSTM: Extended Long Short-Term Memory", with an exponential input gate, a normaliser n, and a
// stabiliser m that keeps the exponentials within range. log_f = log(sigmoid(z_f)), z = tanh(z_z), o = sigmoid(z_o):
//
//   m = max(i, log_f + old_m), and i in the first step, whose old n is zero
//   c = exp(log_f + old_m - m) * old_c + exp(i - m) * z
//   n = exp(log_f + old_m - m) * old_n + exp(i - m)
//   h = o * c / n
#pragma once

#include "cells/cell.h"

struct Slstm {
  enum { kI, kF, kZ, kO, kGates };
  enum { kC, kN, kM, kCellStates };
  static constexpr int kInput = kGates;
  static constexpr int kRecurrent = kGates;
  static constexpr bool kSavesNewC = false;
  template <class C>
  using States = extops::States<C, kCellStates>;

  template <class Math, int kGate, class C>
  EXTOPS_FUNCTION static C activate(C x) {
    if (kGate == kF) return Math::log_sigmoid(x);
    if (kGate == kZ) return Math::tanh(x);
    return kGate == kO ? Math::sigmoid(x) : x;
  }
  template <class Math, class C>
  EXTOPS_FUNCTION static States<C> new_c(const C (&a)[kGates], const States<C>& old) {
    const Step<C> step = squash<Math>(a, old);
    return {step.c, step.n, step.m};
  }
  template <class Math, class C>
  EXTOPS_FUNCTION static C output(const C (&a)[kGates], const States<C>& state) {
    return a[kO] * state[kC] / state[kN];
  }

  template <class C>
  struct Step {
    C i, f, c, n, m;
  };
  template <class Math, class C>
  EXTOPS_FUNCTION static Step<C> squash(const C (&a)[kGates], const States<C>& old) {
    const C kept = old[kN] == 0 ? a[kI] : a[kF] + old[kM];
    const C m = a[kI] > kept ? a[kI] : kept;
    const C i = Math::exp(a[kI] - m), f = Math::exp(kept - m);
    return {i, f, f * old[kC] + i * a[kZ], f * old[kN] + i, m};
  }
  template <class C>
  EXTOPS_FUNCTION static States<C> to_c(C grad_h, const C (&a)[kGates], const Step<C>& step) {
    const C by_n = grad_h * a[kO] / step.n;
    return {by_n, -by_n * step.c / step.n, C(0)};
  }

  // dL/di and dL/d(log_f + old_m). One of them is m, which divides c and n by its exponential.
  template <class C>
  struct Logs {
    C i, kept;
  };
  template <class C>
  EXTOPS_FUNCTION static Logs<C> to_logs(
      const States<C>& grad, const C (&a)[kGates], const States<C>& old, const Step<C>& step) {
    const C by_i = (grad[kC] * a[kZ] + grad[kN]) * step.i;
    const C by_f = (grad[kC] * old[kC] + grad[kN] * old[kN]) * step.f;
    const bool is_i = step.m == a[kI];
    return {is_i ? grad[kM] - by_f : by_i, is_i ? by_f : grad[kM] - by_i};
  }
  template <class Math, class C>
  EXTOPS_FUNCTION static void to_gates(
      C grad_h, const States<C>& grad, const C (&a)[kGates], const States<C>& old, const Step<C>& step,
      C (&gradients)[kGates]) {
    const Logs<C> logs = to_logs(grad, a, old, step);
    gradients[kI] = logs.i;
    gradients[kF] = logs.kept * (1 - Math::exp(a[kF]));
    gradients[kZ] = grad[kC] * step.i * (1 - a[kZ] * a[kZ]);
    gradients[kO] = grad_h * (step.c / step.n) * a[kO] * (1 - a[kO]);
  }
  template <class Math, class C>
  EXTOPS_FUNCTION static States<C> to_old_c(const States<C>& grad, const C (&a)[kGates], const States<C>& old) {
    const Step<C> step = squash<Math>(a, old);
    return {grad[kC] * step.f, grad[kN] * step.f, to_logs(grad, a, old, step).kept};
  }
};
