"""Cells of one's own: what `load_cell` makes of them, and what it says."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradgradcheck

import extops
from operators import Tensors, by_device, needs_programs, upstream

SOURCES = Path(__file__).parent / "data" / "cells"
TIME, BATCH, FEATURES, STATE = 4, 3, 5, 6


@dataclass(frozen=True)
class Own:
    """A cell of tests/data/cells."""

    name: str
    step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    columns: int
    input: int
    first_input: int
    recurrent: int
    states: int

    def load(self, device: str) -> Callable[..., Any]:
        if extops._loader.binding != "stable":
            pytest.skip("needs torch 2.10 or newer")
        needs_programs("c++", "ninja", *(["nvcc"] if device == "cuda" else []))
        return _load(self)

    def inputs(self, device: str, dtype: torch.dtype) -> Tensors:
        """The input, h_0, c_0 and the parameters."""
        shapes = (TIME, BATCH, FEATURES), (BATCH, STATE), (BATCH, STATE)
        rows = self.input * STATE, self.recurrent * STATE
        parameters = (rows[0], FEATURES), (rows[1], STATE), (rows[0],), (rows[1],)
        made = [torch.randn(x, dtype=torch.float64) for x in (*shapes, *parameters)]
        if self.states == 1:
            made[2] = made[1]
        return tuple(x.to(device, dtype).requires_grad_() for x in made)

    def loop(self, input: Tensor, h: Tensor, c: Tensor, *parameters: Tensor) -> Tensors:
        """A step after the other."""
        weight_ih, weight_hh, bias_ih, bias_hh = parameters
        output = []
        for x in input:
            columns: list[Any] = [0] * self.columns
            for place, part in enumerate(F.linear(x, weight_ih, bias_ih).chunk(self.input, 1)):
                columns[(place + self.first_input) % self.input] += part
            first = self.columns - self.recurrent
            for place, part in enumerate(F.linear(h, weight_hh, bias_hh).chunk(self.recurrent, 1)):
                columns[first + place] += part
            h, c = self.step(torch.cat(columns, 1), c)
            output.append(h)
        return torch.stack(output), h, c


def turned_step(columns: Tensor, old_c: Tensor) -> tuple[Tensor, Tensor]:
    o, i, g = columns.chunk(3, dim=1)
    new_c = old_c / 2 + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(new_c), new_c


OWN_GRU = Own("own_gru", extops.reference.gru_cell, 4, 3, 1, 3, states=1)
TURNED = Own("turned", turned_step, 3, 3, 1, 2, states=2)
by_cell = pytest.mark.parametrize("own", [OWN_GRU, TURNED], ids=lambda own: own.name)


@functools.cache
def _load(own: Own) -> Callable[..., Any]:
    sources = [SOURCES / f"{own.name}.{suffix}" for suffix in ("cpp", "cu")]
    return extops.load_cell(own.name, sources, own.step)


def call(cell: Callable[..., Any], input: Tensor, h: Tensor, c: Tensor, *parameters: Tensor) -> Any:
    output, (h_n, c_n) = cell(input, (h, c), *parameters[:2], parameters[2:])
    return output, h_n, c_n


@pytest.mark.slow
@by_device
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@by_cell
def test_values_and_gradients(own: Own, dtype: torch.dtype, device: str) -> None:
    cell = own.load(device)
    inputs = own.inputs(device, dtype)
    results, expected = call(cell, *inputs), own.loop(*inputs)
    torch.testing.assert_close(results, expected)
    towards = upstream(expected)
    found = torch.autograd.grad(results, inputs, towards)
    torch.testing.assert_close(found, torch.autograd.grad(expected, inputs, towards))


@pytest.mark.slow
@by_device
@by_cell
def test_transforms(own: Own, device: str) -> None:
    """Gradients of gradients, in forward mode and of a batch: by the composition of PyTorch calls."""
    cell = functools.partial(call, own.load(device))
    inputs = own.inputs(device, torch.float64)
    assert gradgradcheck(cell, inputs, upstream(own.loop(*inputs)), fast_mode=True)
    tangents = tuple(torch.randn_like(x) for x in inputs)
    of_cell, of_loop = (torch.func.jvp(f, inputs, tangents) for f in (cell, own.loop))
    torch.testing.assert_close(of_cell, of_loop)
    batch = tuple(torch.stack([x, y]) for x, y in zip(inputs, tangents, strict=True))
    of_cell, of_loop = (torch.func.vmap(f)(*batch) for f in (cell, own.loop))
    torch.testing.assert_close(of_cell, of_loop)


@pytest.mark.slow
@by_device
@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
@by_cell
def test_composite_backward(own: Own, reverse: bool, device: str) -> None:
    """The backward as compiled code calls it: where it is differentiated, too, a composition takes its place."""
    own.load(device)
    input, h, c, *parameters = (x.detach() for x in own.inputs(device, torch.float64))
    lengths = torch.tensor([TIME, 2, 0], device=device)
    operators = torch.ops.extops
    forward = getattr(operators, f"{own.name}_sequence")
    backward = getattr(operators, f"{own.name}_sequence_backward")
    output, h_n, c_n, gates, cells = forward(input, *parameters, h, c, lengths, reverse=reverse)
    towards = upstream((output, h_n, c_n))
    kept = parameters[1], gates, cells
    expected = backward(*towards, *kept, lengths, reverse=reverse)
    leaves = tuple(x.clone().requires_grad_() for x in kept)
    found = backward(*towards, *leaves, lengths, reverse=reverse)
    torch.testing.assert_close(tuple(x.detach() for x in found), tuple(expected))
    assert cast("Tensor", found[0]).requires_grad


@pytest.mark.slow
@by_device
def test_a_state_alone(device: str) -> None:
    """It is both states of a cell whose h is its c, and no other one takes it."""
    input, h, _, *parameters = OWN_GRU.inputs(device, torch.float64)
    cell = OWN_GRU.load(device)
    output, h_n = cell(input, h, *parameters[:2], parameters[2:])
    torch.testing.assert_close((output, h_n), OWN_GRU.loop(input, h, h, *parameters)[:2])
    input, h, _, *parameters = TURNED.inputs(device, torch.float64)
    expected = re.escape("turned_sequence: expected `state` to be a pair of tensors, (h, c)")
    for state in (h, h[:2]):
        with pytest.raises(TypeError, match=f"^{expected}"):
            TURNED.load(device)(input, state, *parameters[:2], parameters[2:])


# ---- what does not compile

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
