// What a recurrent cell is: the arithmetic of one unit at one step, written once for CPU and CUDA. The kernels are
// templates over it and know nothing else of a cell.
//
// At each step each unit gets a few numbers, its pre-activations; the code calls them gates. Each is the sum of an
// input part, a recurrent part and a bias. They are saved for the backward as they are, before `activate`. A `Cell` is
// a struct with
//
//   kGates                how many pre-activations a unit has
//   kInput                how many have an input part: the first ones
//   kNumbers              how many of these have no input, but are a number of the unit's, such as a peephole: the very
//                         first ones. They are the bias in each step. 0 if left out
//   kFirstInput           weight_ih holds pre-activations k, k+1, ..., and then 0 to k-1. 0 if left out
//   kRecurrent            how many have a recurrent part: the last ones, at most 6
//   kSavesNewC            whether the backward gets the new cell state as `saved_c`; else the old one
//   kHasSequenceKernels   whether GPUs get persistent kernels, for all steps at once. true if left out
//   kCellStates           how many numbers the cell state is. 1 if left out; what follows of more is said below
//
// and functions of C, the compute type, that call no functions but sigmoid, log_sigmoid, tanh, elu and exp of a
// `Math`, and whose numbers are double (0.1, not 0.1f), since C may be:
//
//   activate<Math, kGate>(x)   the function of a pre-activation alone, or x
//   new_c<Math>(a, old_c)      the cell state after the step; `a` are the pre-activations after `activate`
//   output<Math>(a, new_c)     h, the state that meets the recurrent weights in the next step
//
//   squash<Math>(a, saved_c)   a value that several gradients use, such as tanh(new_c); C(0) if there is none
//   to_c(grad_h, a, squashed)  what dL/dh adds to dL/d(new c)
//   to_gates<Math>(grad_h, grad_c, a, saved_c, squashed, gradients)
//                              sets gradients[k] to dL/d(pre-activation k), before `activate`;
//                              grad_c is dL/d(new c), with the part from to_c
//   to_old_c(grad_c, a)        dL/d(old c)
//
// Where these two need more, they may be to_c<Math>(grad_h, a, squashed) and to_old_c<Math>(grad_c, a, saved_c).
//
// Write dL/dh or dL/dc as the first factor of each gradient. Kernels pass `One` for it to precompute the local
// derivatives. Each pre-activation has one local derivative, so its gradient is a multiple of grad_h or of grad_c; a
// sum of both does not compile. A cell whose h is its new c returns grad_h itself from to_c.
//
// Where kCellStates is n > 1, as for the sLSTM, each c and each gradient of a c is a States<C, n>, squash() returns
// what it likes, and a gradient may be a sum of multiples of grad_h and of any part of grad_c. The backward gets the
// old c. Of the persistent kernels it has those that keep states in registers, and there is no operator of one step. In
// tensors of c, for a row and a direction, the first number of all units comes before the second.
#pragma once

#include <type_traits>
#include <utility>

#include "../elementwise/function.h"

namespace extops {

struct One {
  template <class C>
  EXTOPS_FUNCTION friend C operator*(One, C x) {
    return x;
  }
  template <class C>
  EXTOPS_FUNCTION friend C operator*(C x, One) {
    return x;
  }
};

template <class Cell, class = void>
constexpr int kFirstInputOf = 0;
template <class Cell>
constexpr int kFirstInputOf<Cell, std::void_t<decltype(Cell::kFirstInput)>> = Cell::kFirstInput;

template <class Cell, class = void>
constexpr int kNumbersOf = 0;
template <class Cell>
constexpr int kNumbersOf<Cell, std::void_t<decltype(Cell::kNumbers)>> = Cell::kNumbers;

template <class Cell, class = void>
constexpr int kCellStates = 1;
template <class Cell>
constexpr int kCellStates<Cell, std::void_t<decltype(Cell::kCellStates)>> = Cell::kCellStates;

template <class Cell, class = void>
constexpr bool kHasSequenceKernelsOf = true;
template <class Cell>
constexpr bool kHasSequenceKernelsOf<Cell, std::void_t<decltype(Cell::kHasSequenceKernels)>> =
    Cell::kHasSequenceKernels;

// A cell state of several numbers.
template <class C, int kCount>
struct States {
  C values[kCount];

  EXTOPS_FUNCTION C& operator[](int at) { return values[at]; }
  EXTOPS_FUNCTION const C& operator[](int at) const { return values[at]; }
};

template <class Cell, class C>
using StatesOf = std::conditional_t<kCellStates<Cell> == 1, C, States<C, kCellStates<Cell>>>;

// One of its numbers; a cell state that is a single number is that.
template <class C>
EXTOPS_FUNCTION C& number_of(C& c, int) {
  return c;
}
template <class C, int kCount>
EXTOPS_FUNCTION C& number_of(States<C, kCount>& c, int at) {
  return c[at];
}
template <class C, int kCount>
EXTOPS_FUNCTION const C& number_of(const States<C, kCount>& c, int at) {
  return c[at];
}

// What the constants of a cell must be.
template <class Cell>
struct Constants {
  static constexpr int kMost = 6;  // no thread holds the weights of more gates for as few as 64 units
  static_assert(
      1 <= Cell::kRecurrent && Cell::kRecurrent <= Cell::kGates && Cell::kRecurrent <= kMost,
      "kRecurrent: expected at least 1, and at most kGates and 6");
  static_assert(
      1 <= Cell::kInput && Cell::kInput <= Cell::kGates && Cell::kInput - kNumbersOf<Cell> <= kMost,
      "kInput: expected at least 1, and at most kGates and 6, or kNumbers more");
  static_assert(
      0 <= kNumbersOf<Cell> && kNumbersOf<Cell> <= Cell::kGates - Cell::kRecurrent && kNumbersOf<Cell> < Cell::kInput &&
          kNumbersOf<Cell> <= kMost,
      "kNumbers: expected 0 to 6, less than kInput, and none of the last kRecurrent gates");
  static_assert(
      kNumbersOf<Cell> == 0 || kFirstInputOf<Cell> == 0, "kFirstInput: expected none in a cell that has kNumbers");
  static_assert(
      Cell::kInput + Cell::kRecurrent >= Cell::kGates,
      "kInput and kRecurrent: expected each of the kGates gates to be one of the first kInput, of the last kRecurrent, "
      "or both");
  static_assert(
      0 <= kFirstInputOf<Cell> && kFirstInputOf<Cell> < Cell::kInput, "kFirstInput: expected 0 to kInput - 1");
  static_assert(
      kCellStates<Cell> == 1 || (kCellStates<Cell> > 1 && !Cell::kSavesNewC),
      "kCellStates: expected at least 1, and kSavesNewC to be false where it is more");
  static constexpr int kFirstRecurrent = Cell::kGates - Cell::kRecurrent;
};

// The first pre-activation that has a recurrent part.
template <class Cell>
constexpr int kFirstRecurrent = Constants<Cell>::kFirstRecurrent;

// The place of a pre-activation, one of the first kInput, among the rows of weight_ih and in the input GEMM.
template <class Cell>
EXTOPS_FUNCTION int input_place(int gate) {
  return (gate + Cell::kInput - kFirstInputOf<Cell>) % Cell::kInput;
}

// Stands for C at compile time, to find out whether each gradient is a multiple of grad_h or of grad_c. Every
// comparison answers kAnswer.
template <bool kAnswer>
struct Traced {
  enum : unsigned { kZero = 0, kNumber = 1, kOfH = 2, kOfC = 4, kOther = 8 };
  unsigned is = kOther;  // as long as it is not set

  Traced() = default;
  EXTOPS_FUNCTION Traced(double x) : is(x == 0 ? kZero : kNumber) {}
  template <class X, class = std::enable_if_t<std::is_same_v<X, float>>>
  EXTOPS_FUNCTION Traced(X) {
    static_assert(!std::is_same_v<X, float>, "a cell's numbers must be double, since C may be: 0.1, not 0.1f");
  }
  EXTOPS_FUNCTION static Traced made(unsigned is) {
    Traced made;
    made.is = is;
    return made;
  }

  EXTOPS_FUNCTION friend Traced operator+(Traced a, Traced b) { return made(a.is | b.is); }
  EXTOPS_FUNCTION friend Traced operator-(Traced a, Traced b) { return made(a.is | b.is); }
  EXTOPS_FUNCTION friend Traced operator*(Traced a, Traced b) {
    if (a.is == kZero || b.is == kZero) return made(kZero);
    return made(a.is == kNumber ? b.is : b.is == kNumber ? a.is : kOther);
  }
  EXTOPS_FUNCTION friend Traced operator/(Traced a, Traced b) { return b.is == kNumber ? a : made(kOther); }
  EXTOPS_FUNCTION Traced operator-() const { return *this; }
  EXTOPS_FUNCTION Traced& operator+=(Traced x) { return *this = *this + x; }
  EXTOPS_FUNCTION Traced& operator-=(Traced x) { return *this = *this - x; }
  EXTOPS_FUNCTION Traced& operator*=(Traced x) { return *this = *this * x; }
  EXTOPS_FUNCTION Traced& operator/=(Traced x) { return *this = *this / x; }
  EXTOPS_FUNCTION friend bool operator<(Traced, Traced) { return kAnswer; }
  EXTOPS_FUNCTION friend bool operator>(Traced, Traced) { return kAnswer; }
  EXTOPS_FUNCTION friend bool operator<=(Traced, Traced) { return kAnswer; }
  EXTOPS_FUNCTION friend bool operator>=(Traced, Traced) { return kAnswer; }
  EXTOPS_FUNCTION friend bool operator==(Traced, Traced) { return kAnswer; }
  EXTOPS_FUNCTION friend bool operator!=(Traced, Traced) { return kAnswer; }
};

struct TracedMath {
  template <class C>
  EXTOPS_FUNCTION static C sigmoid(C x) {
    return C::made(x.is <= C::kNumber ? C::kNumber : C::kOther);
  }
  template <class C>
  EXTOPS_FUNCTION static C log_sigmoid(C x) {
    return sigmoid(x);
  }
  template <class C>
  EXTOPS_FUNCTION static C tanh(C x) {
    return sigmoid(x);
  }
  template <class C>
  EXTOPS_FUNCTION static C elu(C x) {
    return sigmoid(x);
  }
  template <class C>
  EXTOPS_FUNCTION static C exp(C x) {
    return sigmoid(x);
  }
};

// A cell's to_c and to_old_c, in either form.
template <class Cell, class Math, class GradH, class C, class Squashed>
EXTOPS_FUNCTION auto to_c(GradH grad_h, const C (&a)[Cell::kGates], Squashed squashed)
    -> decltype(Cell::to_c(grad_h, a, squashed)) {
  return Cell::to_c(grad_h, a, squashed);
}
template <class Cell, class Math, class GradH, class C, class Squashed>
EXTOPS_FUNCTION auto to_c(GradH grad_h, const C (&a)[Cell::kGates], Squashed squashed)
    -> decltype(Cell::template to_c<Math>(grad_h, a, squashed)) {
  return Cell::template to_c<Math>(grad_h, a, squashed);
}
template <class Cell, class Math, class GradC, class C, class SavedC>
EXTOPS_FUNCTION auto to_old_c(GradC grad_c, const C (&a)[Cell::kGates], SavedC) -> decltype(Cell::to_old_c(grad_c, a)) {
  return Cell::to_old_c(grad_c, a);
}
template <class Cell, class Math, class GradC, class C, class SavedC>
EXTOPS_FUNCTION auto to_old_c(GradC grad_c, const C (&a)[Cell::kGates], SavedC saved_c)
    -> decltype(Cell::template to_old_c<Math>(grad_c, a, saved_c)) {
  return Cell::template to_old_c<Math>(grad_c, a, saved_c);
}

// Whether each gradient of a cell is a multiple of grad_h or of grad_c, and the rules for it.
template <class Cell>
class Gradients {
  using T = Traced<false>;
  struct Found {
    unsigned gates[Cell::kGates]{};
    unsigned to_c = 0;
    unsigned to_old_c = 0;
  };

  template <bool kAnswer>
  EXTOPS_FUNCTION static void trace(Found& found) {
    using C = Traced<kAnswer>;
    C a[Cell::kGates], gradients[Cell::kGates];
    for (C& x : a) x = 1;
    const C grad_h = C::made(C::kOfH);
    StatesOf<Cell, C> grad_c, saved_c;
    for (int k = 0; k < kCellStates<Cell>; ++k) {
      number_of(grad_c, k) = C::made(C::kOfC);
      number_of(saved_c, k) = 1;
    }
    const auto squashed = squashed_of(a, saved_c);
    Cell::template to_gates<TracedMath>(grad_h, grad_c, a, saved_c, squashed, gradients);
    for (int j = 0; j < Cell::kGates; ++j) found.gates[j] |= gradients[j].is;
    const auto of_c = extops::to_c<Cell, TracedMath>(grad_h, a, squashed);
    const auto of_old_c = extops::to_old_c<Cell, TracedMath>(grad_c, a, saved_c);
    for (int k = 0; k < kCellStates<Cell>; ++k) {
      found.to_c |= number_of(of_c, k).is;
      found.to_old_c |= number_of(of_old_c, k).is;
    }
  }

  // A number, unless it is of the cell's own type.
  template <class C, class SavedC>
  EXTOPS_FUNCTION static auto squashed_of(const C (&a)[Cell::kGates], const SavedC& saved_c) {
    if constexpr (kCellStates<Cell> == 1) {
      return C(1);
    } else {
      return Cell::template squash<TracedMath>(a, saved_c);
    }
  }

  EXTOPS_FUNCTION static bool is_h_the_c() {
    if constexpr (kCellStates<Cell> == 1) {
      using Gates = const float (&)[Cell::kGates];
      return std::is_same_v<decltype(extops::to_c<Cell, TracedMath>(One(), std::declval<Gates>(), 0.f)), One> &&
             kByH == 0;
    }
    return false;
  }

  // Of both branches: comparisons are false, then true.
  EXTOPS_FUNCTION static Found trace() {
    Found found;
    trace<false>(found);
    trace<true>(found);
    return found;
  }

  EXTOPS_FUNCTION static unsigned gates_that_are(unsigned parts) {
    const Found found = trace();
    unsigned gates = 0;
    for (int j = 0; j < Cell::kGates; ++j) gates |= unsigned{(found.gates[j] & parts) == parts} << j;
    return gates;
  }

 public:
  // Bit k is set if the gradient of pre-activation k starts with grad_h, else it starts with grad_c.
  static constexpr unsigned kByH = gates_that_are(T::kOfH);
  static constexpr bool kIsHTheC = is_h_the_c();

  static_assert(
      kCellStates<Cell> > 1 || gates_that_are(T::kOfH | T::kOfC) == 0,
      "to_gates: the gradient of a pre-activation has a part of grad_h and a part of grad_c; a kernel keeps one local "
      "derivative for each, so it must be a multiple of one of them, the same in each branch");
  static_assert(
      gates_that_are(T::kNumber) == 0 && gates_that_are(T::kOther) == 0,
      "to_gates: the gradient of each pre-activation must be set, to a multiple of grad_h or of grad_c");
  static_assert((trace().to_c & ~T::kOfH) == 0, "to_c must return a multiple of grad_h");
  static_assert((trace().to_old_c & ~T::kOfC) == 0, "to_old_c must return a multiple of grad_c");
};

template <class C, class Cs = C>
struct CellState {
  C h;
  Cs c;
  Cs saved_c;
};

template <class Cell, class Math, class C, int... kGate>
EXTOPS_FUNCTION void activate(C (&gates)[Cell::kGates], std::integer_sequence<int, kGate...>) {
  ((gates[kGate] = Cell::template activate<Math, kGate>(gates[kGate])), ...);
}

// Applies `activate` to all pre-activations, in place.
template <class Cell, class Math, class C>
EXTOPS_FUNCTION void activate(C (&gates)[Cell::kGates]) {
  activate<Cell, Math>(gates, std::make_integer_sequence<int, Cell::kGates>());
}

// A step of one unit.
template <class Cell, class Math, class C>
EXTOPS_FUNCTION CellState<C, StatesOf<Cell, C>> cell_forward(const C (&gates)[Cell::kGates], StatesOf<Cell, C> old_c) {
  C a[Cell::kGates];
  for (int j = 0; j < Cell::kGates; ++j) a[j] = gates[j];
  activate<Cell, Math>(a);
  const auto c = Cell::template new_c<Math>(a, old_c);
  return {Cell::template output<Math>(a, c), c, Cell::kSavesNewC ? c : old_c};
}

// Compiles for a cell that computes in C alone.
template <class Cell>
constexpr bool kIsOfC = [] {
  using C = Traced<false>;
  C gates[Cell::kGates];
  for (C& x : gates) x = 1;
  StatesOf<Cell, C> c;
  for (int k = 0; k < kCellStates<Cell>; ++k) number_of(c, k) = 1;
  cell_forward<Cell, TracedMath>(gates, c);
  Cell::template squash<TracedMath>(gates, c);
  return true;
}();

// Sets the gradients of the pre-activations, and returns dL/d(old c). `a` are the pre-activations after `activate`.
template <class Cell, class Math, class C>
EXTOPS_FUNCTION StatesOf<Cell, C> activated_backward(
    const C (&a)[Cell::kGates], StatesOf<Cell, C> saved_c, C grad_h, StatesOf<Cell, C> grad_c,
    C (&gradients)[Cell::kGates]) {
  const auto squashed = Cell::template squash<Math>(a, saved_c);
  const auto of_new_c = to_c<Cell, Math>(grad_h, a, squashed);
  for (int k = 0; k < kCellStates<Cell>; ++k) number_of(grad_c, k) += number_of(of_new_c, k);
  Cell::template to_gates<Math>(grad_h, grad_c, a, saved_c, squashed, gradients);
  return to_old_c<Cell, Math>(grad_c, a, saved_c);
}

// The same of the pre-activations themselves, for a cell state that is a single number.
template <class Cell, class Math, class C>
EXTOPS_FUNCTION C
cell_backward(const C (&gates)[Cell::kGates], C saved_c, C grad_h, C grad_c, C (&gradients)[Cell::kGates]) {
  C a[Cell::kGates];
  for (int j = 0; j < Cell::kGates; ++j) a[j] = gates[j];
  activate<Cell, Math>(a);
  return activated_backward<Cell, Math>(a, saved_c, grad_h, grad_c, gradients);
}

// The local derivatives of a step: the gradients of the pre-activations and old c by dL/dh or dL/dc. One where a
// gradient is passed on as it is.
template <class Cell, class C>
struct LocalDerivatives {
  C gates[Cell::kGates];
  using Gates = const C (&)[Cell::kGates];
  decltype(extops::to_c<Cell, TracedMath>(One(), std::declval<Gates>(), C())) to_c;
  decltype(extops::to_old_c<Cell, TracedMath>(One(), std::declval<Gates>(), C())) to_old_c;
};

// What a cell with more states has in their place, whose gradients are sums: what they are computed from.
template <class Cell, class Math, class C>
struct SavedStep {
  C a[Cell::kGates];
  StatesOf<Cell, C> saved_c;
};

template <class Cell, class Math, class C>
using DerivativesOf = std::conditional_t<kCellStates<Cell> == 1, LocalDerivatives<Cell, C>, SavedStep<Cell, Math, C>>;

template <class Cell, class Math, class C>
EXTOPS_FUNCTION SavedStep<Cell, Math, C> local_derivatives(
    const C (&gates)[Cell::kGates], States<C, kCellStates<Cell>> saved_c) {
  SavedStep<Cell, Math, C> step{{}, saved_c};
  for (int j = 0; j < Cell::kGates; ++j) step.a[j] = gates[j];
  activate<Cell, Math>(step.a);
  return step;
}

template <class Cell, class Math, class C>
EXTOPS_FUNCTION void apply_local_derivatives(
    const SavedStep<Cell, Math, C>& step, C grad_h, StatesOf<Cell, C>& grad_c, C (&gradients)[Cell::kGates]) {
  grad_c = activated_backward<Cell, Math>(step.a, step.saved_c, grad_h, grad_c, gradients);
}

template <class Cell, class Math, class C>
EXTOPS_FUNCTION LocalDerivatives<Cell, C> local_derivatives(const C (&gates)[Cell::kGates], C saved_c) {
  C a[Cell::kGates];
  for (int j = 0; j < Cell::kGates; ++j) a[j] = gates[j];
  activate<Cell, Math>(a);
  const C squashed = Cell::template squash<Math>(a, saved_c);
  LocalDerivatives<Cell, C> derivatives;
  Cell::template to_gates<Math>(One(), One(), a, saved_c, squashed, derivatives.gates);
  derivatives.to_c = to_c<Cell, Math>(One(), a, squashed);
  derivatives.to_old_c = to_old_c<Cell, Math>(One(), a, saved_c);
  return derivatives;
}

// Multiplies them by dL/dh and dL/dc. `grad_c` is dL/d(new c) at first and dL/d(old c) afterwards.
template <class Cell, class C>
EXTOPS_FUNCTION void apply_local_derivatives(
    const LocalDerivatives<Cell, C>& derivatives, C grad_h, C& grad_c, C (&gradients)[Cell::kGates]) {
  grad_c += grad_h * derivatives.to_c;
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int j = 0; j < Cell::kGates; ++j) {
    gradients[j] = (Gradients<Cell>::kByH >> j & 1 ? grad_h : grad_c) * derivatives.gates[j];
  }
  grad_c = grad_c * derivatives.to_old_c;
}

}  // namespace extops
