"""The implementations of multiplication and rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

import extops
from benchmarks import tutorial_style
from benchmarks.names import COPY, EAGER, MUL, OURS, ROUND, TUTORIAL
from benchmarks.variant import DEFAULT_STREAM, Makers, Variant
from extops import reference


def elementwise_variants(operator: str, numel: int, device: str, dtype: torch.dtype) -> Makers:
    """Makers of the variants of `multiply` or `round` on vectors."""
    torch.manual_seed(0)
    count = 2 if operator == "multiply" else 1
    inputs = [torch.randn(numel, device=device, dtype=dtype) for _ in range(count)]
    grad = torch.randn(numel, device=device, dtype=dtype)
    functions: dict[str, Callable[..., Tensor]]
    if operator == "multiply":
        functions = {
            MUL: torch.mul,
            TUTORIAL: tutorial_style.elementwise_mult,
            OURS: extops.elementwise_mult,
        }
    else:
        functions = {
            COPY: torch.clone,
            MUL: lambda x: x * x,  # the same input: only for its overhead
            ROUND: torch.round,
            EAGER: reference.round_ste,
            TUTORIAL: tutorial_style.round_ste,
            OURS: extops.round_ste,
        }
    if device == "cpu":
        del functions[TUTORIAL]
    return {
        name: partial(elementwise_variant, name, function, inputs, grad)
        for name, function in functions.items()
    }


def elementwise_variant(
    name: str, function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor
) -> Variant:
    """One elementwise function of tensors."""
    leaves = [x.detach().requires_grad_() for x in inputs]

    def forward_backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(*leaves), leaves, grad)

    return Variant(
        {"forward": lambda: function(*inputs), "forward_backward": forward_backward},
        not_captured=DEFAULT_STREAM if name == TUTORIAL else None,
    )
