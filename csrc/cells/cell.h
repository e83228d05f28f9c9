// What a recurrent cell is: the arithmetic of one unit at one step, written once for CPU and CUDA. The kernels of
// sequences are templates over it and know nothing else of a cell.
//
// A step gives each unit some columns: numbers that are sums of the input's product, of the recurrent product and of a
// bias, and that are kept for the backward as they are, before any function. A `Cell` is a struct with
//
//   kColumns     how many columns a unit has
//   kInput       the first ones of them, which have a part of the input's product
//   kFirstInput  the column with which weight_ih begins; the others follow, and then those before it. 0 if left out
//   kRecurrent   the last ones of them, which have a part of the recurrent product
//   kSavesNewC   whether the backward gets the new cell state as `saved_c`, or the old one
//   kByH         the columns, as bits, whose gradient comes from that of h; that of the others comes from that of c
//
// and functions of C, the compute type, that call sigmoid, tanh and elu of a `Math` only:
//
//   activate<Math, kColumn>(x)          the function that a column passes through by itself, or x
//   new_c<Math>(a, old_c)               the cell state after the step; `a` are the columns after `activate`
//   output<Math>(a, new_c)              h, the state that meets the recurrent weights in the next step
//
//   squash<Math>(a, saved_c)            the one function of the backward that `activate` does not compute
//   to_c(grad_h, a, squashed)           what the gradient of h adds to that of the new cell state
//   to_columns<Math>(grad_h, grad_c, a, saved_c, squashed, gradients)   the gradient of each column
//   to_old_c(grad_c, a)                 the gradient of the old cell state
//
// The gradients are linear in those of h and of the new c. A product begins with them, so that the backward can be
// computed before they are known, as slopes: One takes their place then.
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

// The place of a column, one of the first kInput, among the rows of weight_ih and in the input's product.
template <class Cell>
EXTOPS_FUNCTION constexpr int input_place(int column) {
  return (column + Cell::kInput - kFirstInputOf<Cell>) % Cell::kInput;
}

template <class C>
struct CellState {
  C h;
  C c;
  C saved_c;
};

template <class Cell, class Math, class C, int... kColumn>
EXTOPS_FUNCTION void activate(C (&columns)[Cell::kColumns], std::integer_sequence<int, kColumn...>) {
  ((columns[kColumn] = Cell::template activate<Math, kColumn>(columns[kColumn])), ...);
}

// Puts the columns through their functions, in place.
template <class Cell, class Math, class C>
EXTOPS_FUNCTION void activate(C (&columns)[Cell::kColumns]) {
  activate<Cell, Math>(columns, std::make_integer_sequence<int, Cell::kColumns>());
}

// A step of one unit.
template <class Cell, class Math, class C>
EXTOPS_FUNCTION CellState<C> cell_forward(const C (&columns)[Cell::kColumns], C old_c) {
  C a[Cell::kColumns];
  for (int j = 0; j < Cell::kColumns; ++j) a[j] = columns[j];
  activate<Cell, Math>(a);
  const C c = Cell::template new_c<Math>(a, old_c);
  return {Cell::template output<Math>(a, c), c, Cell::kSavesNewC ? c : old_c};
}

// The gradients of the columns, and the one of the old cell state.
template <class Cell, class Math, class C>
EXTOPS_FUNCTION C
cell_backward(const C (&columns)[Cell::kColumns], C saved_c, C grad_h, C grad_c, C (&gradients)[Cell::kColumns]) {
  C a[Cell::kColumns];
  for (int j = 0; j < Cell::kColumns; ++j) a[j] = columns[j];
  activate<Cell, Math>(a);
  const C squashed = Cell::template squash<Math>(a, saved_c);
  const C of_new_c = grad_c + Cell::to_c(grad_h, a, squashed);
  Cell::template to_columns<Math>(grad_h, of_new_c, a, saved_c, squashed, gradients);
  return Cell::to_old_c(of_new_c, a);
}

// How the gradients of a step depend on those of h and c. One where a cell says that they are equal.
template <class Cell, class C>
struct CellSlopes {
  C columns[Cell::kColumns];
  decltype(Cell::to_c(One(), std::declval<const C (&)[Cell::kColumns]>(), C())) to_c;
  decltype(Cell::to_old_c(One(), std::declval<const C (&)[Cell::kColumns]>())) to_old_c;
};

template <class Cell, class Math, class C>
EXTOPS_FUNCTION CellSlopes<Cell, C> cell_slopes(const C (&columns)[Cell::kColumns], C saved_c) {
  C a[Cell::kColumns];
  for (int j = 0; j < Cell::kColumns; ++j) a[j] = columns[j];
  activate<Cell, Math>(a);
  const C squashed = Cell::template squash<Math>(a, saved_c);
  CellSlopes<Cell, C> slopes;
  Cell::template to_columns<Math>(One(), One(), a, saved_c, squashed, slopes.columns);
  slopes.to_c = Cell::to_c(One(), a, squashed);
  slopes.to_old_c = Cell::to_old_c(One(), a);
  return slopes;
}

// The gradients of the columns from that of h and, in `grad_c`, of the new cell state, which becomes that of the old.
template <class Cell, class C>
EXTOPS_FUNCTION void apply_slopes(
    const CellSlopes<Cell, C>& slopes, C grad_h, C& grad_c, C (&gradients)[Cell::kColumns]) {
  grad_c += grad_h * slopes.to_c;
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int j = 0; j < Cell::kColumns; ++j) {
    gradients[j] = (Cell::kByH >> j & 1 ? grad_h : grad_c) * slopes.columns[j];
  }
  grad_c = grad_c * slopes.to_old_c;
}

}  // namespace extops
