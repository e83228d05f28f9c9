"""Straight-through rounding."""

from typing import Any

import torch
from torch import Tensor

from extops import _autograd, _checks, reference

_OP = "round_ste"

_eager_round = _autograd.eager(torch.ops.extops.round_ste.default)


def round_ste(input: Tensor) -> Tensor:
    r"""Rounds to the nearest integer, halves upwards, and lets the gradient through unchanged.

    .. math:: \text{output} = \lfloor \text{input} + 1/2 \rfloor, \qquad
              \frac{\partial \text{output}}{\partial \text{input}} := 1

    The rounding is exact: the largest number below one half gives 0. Infinities come out as they went in, NaN as NaN.

    Args:
        input: any shape and strides; float64, float32, bfloat16 or float16.

    Returns:
        A tensor of the same shape and dtype. Differentiable to any order.

    Raises:
        RuntimeError: a dtype, device or layout does not fit.

    Source: the straight-through estimator of Bengio, Léonard and Courville, 2013 (arXiv:1308.3432).
    """
    try:
        if not _autograd.is_plain():
            return _transformed(input)
        output: Tensor
        if input.requires_grad and torch.is_grad_enabled():
            output = _apply(input)
        else:
            with _autograd.below_autograd():
                output = _eager_round(input)
    except _checks.FAILURES:
        _checks.explain(_checks.check_tensor, _OP, "input", input)
        raise
    return output


def _transformed(input: Tensor) -> Tensor:
    _checks.check_tensor(_OP, "input", input)
    output: Tensor = torch.ops.extops.round_ste.default(input)
    return output


def _backward(ctx: Any, grad_output: Tensor) -> Tensor:
    return grad_output


class _RoundSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        with _autograd.below_autograd():
            output: Tensor = _eager_round(input)
        return output

    backward = staticmethod(_backward)


_apply = _autograd.apply(_RoundSTE)
_autograd.register("round_ste", _apply, reference.round_ste)


@torch.library.register_fake("extops::round_ste")
def _(input: Tensor) -> Tensor:
    _checks.check_tensor(_OP, "input", input)
    return torch.empty_like(input)
