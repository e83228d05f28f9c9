"""How ``torch.distributed.tensor`` may divide the tensors of elementwise operators among devices."""

import functools
import sys
from typing import Any

import torch

from extops.binding import _schemas


@functools.cache
def register() -> bool:
    """Registers a strategy for each elementwise operator; False where this torch has none."""
    try:  # on demand: importing it takes longer than importing extops
        from torch.distributed.tensor.experimental import register_sharding
    except ImportError:
        return False
    for name, operator in _schemas.OPERATORS.items():
        if not operator.sizes and not operator.out:
            overload = getattr(torch.ops.extops, name).default
            register_sharding(overload)(functools.partial(_strategies, operator))
    return True


def is_wanted() -> bool:
    """Whether a call may have failed for want of a strategy."""
    return "torch.distributed.tensor" in sys.modules and not register.cache_info().currsize


def _strategies(operator: _schemas.Operator, *arguments: Any) -> list[tuple[list[Any], list[Any]]]:
    """Placements of the results and of the arguments: all replicated, or divided along one dimension."""
    from torch.distributed.tensor import Replicate, Shard

    inputs, numbers = operator.split(arguments)
    dims = max(x.ndim for x in inputs)

    def placement(x: Any, dim: int) -> Any:
        own = dim - (dims - x.ndim)
        return Shard(own) if own >= 0 and x.shape[own] > 1 else Replicate()

    results = len(operator.results)
    none = [None for _ in numbers]
    found: list[tuple[list[Any], list[Any]]] = [
        ([Replicate()] * results, [*(Replicate() for _ in inputs), *none])
    ]
    for dim in range(dims):
        placements = [placement(x, dim) for x in inputs]
        if any(isinstance(each, Shard) for each in placements):
            found.append(([Shard(dim)] * results, [*placements, *none]))
    return found
