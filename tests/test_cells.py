"""Cells of one's own: what `load_cell` makes of them, and what it says."""

from __future__ import annotations

import re
import subprocess

import pytest

import extops
from operators import needs_programs

GRADIENTS = """
#include "cells/cell.h"

struct Cell {
  enum { kA, kB, kColumns };

  template <class Math, class G, class C>
  EXTOPS_FUNCTION static void to_columns(
      G grad_h, G grad_c, const C (&a)[kColumns], C old_c, C squashed, C (&gradients)[kColumns]) {
    gradients[kA] = grad_h * a[kA];
    TO_B
  }
  template <class G, class C>
  EXTOPS_FUNCTION static C to_c(G grad_h, const C (&a)[kColumns], C squashed) {
    return TO_C;
  }
  template <class G, class C>
  EXTOPS_FUNCTION static C to_old_c(G grad_c, const C (&a)[kColumns]) {
    return TO_OLD_C;
  }
};

void apply(const extops::CellSlopes<Cell, float>& slopes, float grad_h, float& grad_c, float (&gradients)[2]) {
  extops::apply_slopes(slopes, grad_h, grad_c, gradients);
}
static_assert(extops::Gradients<Cell>::kByH == 1u << Cell::kA);
"""
RIGHT = {
    "TO_B": "gradients[kB] = (grad_c * Math::tanh(a[kA]) - gradients[kB] * 0 + grad_c / 2) * (1 - a[kB]);",
    "TO_C": "a[kA] > 0 ? grad_h * a[kA] : grad_h * C(0)",
    "TO_OLD_C": "grad_c * a[kB]",
}


def compile_gradients(**parts: str) -> str:
    """What the compiler says of a cell's gradients; empty where they are right."""
    needs_programs("c++")
    text = GRADIENTS
    for name, part in {**RIGHT, **parts}.items():
        text = text.replace(name, part)
    command = ["c++", "-std=c++17", "-fsyntax-only", f"-I{extops.cells.include()}", "-xc++", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True).stderr


@pytest.mark.parametrize(
    "right",
    ["", "gradients[kB] = C(0);", "gradients[kB] = grad_c; gradients[kB] *= a[kB] * old_c;"],
)
def test_gradients_that_compile(right: str) -> None:
    assert compile_gradients(**({"TO_B": right} if right else {})) == ""


A_SUM = "to_columns: the gradient of a column has a part of grad_h and a part of grad_c; a column "
NOT_LINEAR = (
    "to_columns: the gradient of each column must be set, to a multiple of grad_h or of grad"
)


@pytest.mark.parametrize(
    ("part", "wrong", "message"),
    [
        ("TO_B", "gradients[kB] = grad_c * a[kB] + grad_h * a[kA];", A_SUM),
        ("TO_B", "gradients[kB] = (gradients[kA] - grad_c) * a[kA];", A_SUM),
        ("TO_B", "gradients[kB] = a[kB] > 0 ? grad_c * a[kB] : grad_h * a[kB];", A_SUM),
        ("TO_B", "if (a[kB] < 0) gradients[kA] = grad_c; gradients[kB] = grad_c;", A_SUM),
        ("TO_B", "gradients[kB] = a[kB];", NOT_LINEAR),
        ("TO_B", "gradients[kB] = grad_c * grad_c;", NOT_LINEAR),
        ("TO_B", "gradients[kB] = a[kB] / gradients[kA];", NOT_LINEAR),
        ("TO_B", "gradients[kB] = Math::tanh(gradients[kA]);", NOT_LINEAR),
        ("TO_B", "", NOT_LINEAR),
        ("TO_C", "squashed", "to_c must return a multiple of grad_h"),
        ("TO_OLD_C", "a[kB]", "to_old_c must return a multiple of grad_c"),
    ],
)
def test_gradients_that_do_not_compile(part: str, wrong: str, message: str) -> None:
    """The kernels for GPUs get slopes, before they know the gradients: a column has one."""
    assert re.search(
        f'static assertion failed:? "?{re.escape(message)}', compile_gradients(**{part: wrong})
    )
