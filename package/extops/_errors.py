"""Errors of torch within an operator, for the stable binding.

Torch's stable ABI turns an exception into an error code, and its type is lost: running out of memory on a GPU would no
longer be a ``torch.OutOfMemoryError``. A call that failed there is therefore made once more by way of the legacy
binding, which calls torch from Python, where an exception stays what it is.
"""

import functools
from pathlib import Path
from typing import Any

import torch

from extops import _checks, _legacy

libraries: dict[str, Path] = {}
"""The kernels by type of device; filled by the loader."""


@functools.cache
def device(name: str) -> _legacy.Device:
    """The kernels for this type of device, called from Python."""
    return _legacy.DEVICES[name](libraries[name])


def raise_original(error: RuntimeError, name: str, *arguments: Any, **keywords: Any) -> None:
    """Raises what torch raised, where the call of the operator ``name`` lost it and ended in ``error``."""
    if "API call failed" in str(error):  # as csrc/bindings/stable/aten.h and torch's headers put it
        _checks.explain(functools.partial(_repeat, name, *arguments, **keywords))


def _repeat(name: str, *arguments: Any, **keywords: Any) -> None:
    (kind,) = {x.device.type for x in arguments if isinstance(x, torch.Tensor)}
    with torch.no_grad():
        _legacy.operators()[name](device(kind), *arguments, **keywords)
