"""Errors of torch within an operator, for the stable binding.

Torch's stable ABI turns an exception into an error code, and its type is lost: running out of memory on a GPU would no
longer be a ``torch.OutOfMemoryError``. A call that failed there is therefore made once more by way of the legacy
binding, which calls torch from Python, where an exception stays what it is.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from extops import _autograd, _checks, _legacy


def keep_types(libraries: dict[str, Path]) -> None:
    """Has every operator raise what torch raised; ``libraries`` are the kernels, by type of device."""

    @functools.cache
    def device(name: str) -> _legacy.Device:
        return _legacy.DEVICES[name](libraries[name])

    for name, again in _legacy.operators().items():
        operator = getattr(torch.ops.extops, name).default
        operator._op = _explained(operator._op, again, device)


def _explained(
    operator: Callable[..., Any], again: Callable[..., Any], device: Callable[[str], _legacy.Device]
) -> Callable[..., Any]:
    def repeat(*arguments: Any, **keywords: Any) -> None:
        (name,) = {x.device.type for x in arguments if isinstance(x, torch.Tensor)}
        with _autograd.below_autograd():
            again(device(name), *arguments, **keywords)

    @functools.wraps(operator)
    def explained(*arguments: Any, **keywords: Any) -> Any:
        try:
            return operator(*arguments, **keywords)
        except RuntimeError as error:
            # As csrc/bindings/stable/aten.h and torch's headers put it.
            if "API call failed" in str(error) and _autograd.is_plain():
                _checks.explain(functools.partial(repeat, *arguments, **keywords))
            raise

    return explained
