"""The floating-point operations of the operators, for ``torch.utils.flop_counter``: those of GEMMs, as in torch."""

import functools
import math
import sys
from types import ModuleType
from typing import Any

import torch

from extops import _private
from extops.binding import _schemas

_COUNTER = "torch.utils.flop_counter"


def _flops(operator: _schemas.Operator, *arguments: Any, **_: Any) -> int:
    """Each row of a batch is multiplied by the weights, or takes part in their gradient."""
    sizes = operator.check(*arguments[: len(operator.arguments)])
    weights = (x for x in (*operator.arguments, *operator.results) if "weight" in x.name)
    elements = sum(math.prod(_schemas.shape_of(x, sizes)) for x in weights)
    return 2 * sizes["batch"] * sizes.get("time", 1) * elements


def _register(counter: ModuleType) -> None:
    for name, operator in _schemas.OPERATORS.items():
        if operator.sizes:  # it is a cell's
            # What ``register_flop_formula`` does, but for every torch by the key that its counter looks for.
            formula = functools.partial(_flops, operator)
            counter.flop_registry[getattr(torch.ops.extops, name)] = formula


def provide() -> None:
    """Makes the formulas known to torch's counter, at once or when that is imported, and triton with it."""
    _private.once_imported(_COUNTER, lambda: _register(sys.modules[_COUNTER]))
