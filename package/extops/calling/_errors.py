"""Errors of torch within an operator, for the stable binding.

Torch's stable ABI turns an exception into an error code. Its type is lost, also that which programs look for:
``torch.OutOfMemoryError``. So is its message before torch 2.13, which prints it.
"""

from typing import Any

import torch

from extops.binding import _checks, _schemas

_ALLOCATING = ("empty_strided", "aten::clone")


def raise_original(error: RuntimeError, name: str, *arguments: Any) -> None:
    """Raises torch's original exception, which the call of the operator ``name`` turned into ``error``."""
    # As csrc/bindings/stable/aten.h puts it.
    function, lost, message = str(error).partition(": torch's API call failed")
    if not lost:
        return
    # Python allocates the results again: if the memory is exhausted, torch raises its own error.
    _checks.explain(_schemas.OPERATORS[name].new_results, *arguments)
    message = message.removeprefix(": ")
    on_gpu = any(isinstance(x, torch.Tensor) and x.is_cuda for x in arguments)
    if not message and on_gpu and function in _ALLOCATING:
        message = f"CUDA out of memory: {name} found none for more than its results; torch printed how much"
    if message:
        is_memory = message.startswith("CUDA out of memory")
        raise (torch.OutOfMemoryError if is_memory else RuntimeError)(message) from None
