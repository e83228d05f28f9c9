"""The floating-point operations of the operators, for ``torch.utils.flop_counter``: those of GEMMs, as in torch."""

import functools
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from extops import _private
from extops.binding import _schemas

_COUNTER = "torch.utils.flop_counter"


def _multiplied(rows: int, matrices: Sequence[Any]) -> int:
    """The operations of GEMMs of so many rows by the weights among these tensors."""
    weights: int = sum(x.numel() for x in matrices if x is not None and x.dim() == 2)
    return 2 * rows * weights


def _step(input: Tensor, *arguments: Any, **_: Any) -> int:
    return _multiplied(input.shape[0], arguments[:-2])  # before both states


def _step_input_backward(
    grad_x: Tensor, grad_h_part: Tensor, grad_c_0: Tensor | None, *weights: Tensor, **_: Any
) -> int:
    return _multiplied(grad_x.shape[0], weights)


def _step_parameters_backward(
    facts: _schemas.CellFacts,
    grad_h: Tensor | None,
    grad_c: Tensor | None,
    input: Tensor,
    h_0: Tensor,
    *_: Any,
    **__: Any,
) -> int:
    return 2 * h_0.numel() * (facts.input * input.shape[1] + facts.recurrent * h_0.shape[1])


def _sequence(input: Tensor, *arguments: Any, **__: Any) -> int:
    steps, batch, _ = input.shape
    return _multiplied(steps * batch, arguments[:-3])  # before both states and lengths


def _sequence_backward(
    grad_output: Tensor | None,
    grad_h_n: Tensor | None,
    grad_c_n: Tensor | None,
    weight_hh: Tensor,
    gates: Tensor,
    cells: Tensor,
    *_: Any,
    **__: Any,
) -> int:
    return _multiplied(cells.shape[:2].numel(), (weight_hh,))


def _register(counter: ModuleType) -> None:
    operators = torch.ops.extops
    formulas: dict[str, Callable[..., int]] = {}
    for cell, facts in _schemas.CELLS.items():
        formulas |= {
            f"{cell}_sequence": _sequence,
            f"{cell}_sequence_backward": _sequence_backward,
            f"{cell}_step": _step,
            f"{cell}_step_parameters_backward": functools.partial(_step_parameters_backward, facts),
            f"{cell}_step_input_backward": _step_input_backward,
        }
    for name, formula in formulas.items():
        operator = getattr(operators, name)
        counter.register_flop_formula(operator, get_raw=True)(formula)
        # Torch 2.4 registers it for the overload alone, where its counter does not look.
        counter.flop_registry.setdefault(operator, formula)


def provide() -> None:
    """Makes the formulas known to torch's counter, at once or when that is imported, and triton with it."""
    _private.once_imported(_COUNTER, lambda: _register(sys.modules[_COUNTER]))
