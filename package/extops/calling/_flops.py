"""The floating-point operations of the operators, for ``torch.utils.flop_counter``: those of GEMMs, as in torch."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from extops.binding import _schemas

_COUNTER = "torch.utils.flop_counter"


def _lltm(input: Tensor, weights: Tensor, *_: Any, **__: Any) -> int:
    return 2 * input.shape[0] * weights.numel()


def _lltm_backward(
    grad_h: Tensor | None,
    grad_cell: Tensor | None,
    input: Tensor,
    old_h: Tensor,
    gates: Tensor,
    *_: Any,
    **__: Any,
) -> int:
    return 2 * gates.numel() * (old_h.shape[1] + input.shape[1])


def _sequence(input: Tensor, *arguments: Any, **_: Any) -> int:
    parameters: Sequence[Tensor | None] = arguments[:-3]  # before both states and lengths
    weights = sum(x.numel() for x in parameters if x is not None and x.dim() == 2)
    return 2 * input.shape[0] * input.shape[1] * weights


def _sequence_backward(
    grad_output: Tensor | None,
    grad_h_n: Tensor | None,
    grad_c_n: Tensor | None,
    weights: Tensor,
    gates: Tensor,
    cells: Tensor,
    *_: Any,
    **__: Any,
) -> int:
    return 2 * cells.numel() * len(weights)


def _register(counter: ModuleType) -> None:
    operators = torch.ops.extops
    # lltm_input_backward multiplies as the forward does, with the gradient of the gates in place of the input.
    formulas: dict[str, Callable[..., int]] = {
        "lltm": _lltm,
        "lltm_backward": _lltm_backward,
        "lltm_input_backward": _lltm,
    }
    for name in _schemas.OPERATORS:
        if name.endswith("_sequence"):
            formulas[name] = _sequence
            formulas[f"{name}_backward"] = _sequence_backward
    for name, formula in formulas.items():
        operator = getattr(operators, name)
        counter.register_flop_formula(operator, get_raw=True)(formula)
        # Torch 2.4 registers it for the overload alone, where its counter does not look.
        counter.flop_registry.setdefault(operator, formula)


class _Finder(MetaPathFinder):
    """Registers the formulas when torch's counter is imported. Importing it here would import triton, too."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _COUNTER:
            return None
        spec = PathFinder.find_spec(name, path, target)
        loader: Any = spec and spec.loader
        execute = loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register(module)

        loader.exec_module = execute_and_register
        return spec


def provide() -> None:
    """Makes the formulas known to torch's counter, at once or when that is imported."""
    if _COUNTER in sys.modules:
        _register(sys.modules[_COUNTER])
    else:
        sys.meta_path.insert(0, _Finder())
