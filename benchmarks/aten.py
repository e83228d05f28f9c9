"""The LLTM in C++ with ATen calls only, hand-written backward included, as in PyTorch's tutorial.

Compiled on first use by ``torch.utils.cpp_extension.load`` (seconds, and needs a C++ compiler and ninja); kept for
comparison, and as the smallest example of a just-in-time extension. The same code serves CPU and CUDA tensors.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from extops import reference
from extops.binding import _jit


def lltm(
    input: Tensor, weights: Tensor, bias: Tensor, old_h: Tensor, old_cell: Tensor
) -> tuple[Tensor, Tensor]:
    """See :func:`extops.lltm`; differentiable once, and without its input checks."""
    new_h, new_cell = _LLTM.apply(input, weights, bias, old_h, old_cell)
    return new_h, new_cell


class LLTM(reference.LLTM):
    """See :class:`extops.LLTM`."""

    step = staticmethod(lltm)


@cache
def _operators() -> Any:
    _jit.Build("extops_aten", [Path(__file__).with_suffix(".cpp")]).load()
    return torch.ops.extops_aten


class _LLTM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        new_h, new_cell, *saved = _operators().lltm_forward(*inputs)
        ctx.save_for_backward(new_cell, *saved, inputs[1])
        return new_h, new_cell

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_h: Tensor, grad_cell: Tensor) -> tuple[Tensor, ...]:
        gradients: tuple[Tensor, ...] = _operators().lltm_backward(
            grad_h, grad_cell, *ctx.saved_tensors
        )
        return gradients
