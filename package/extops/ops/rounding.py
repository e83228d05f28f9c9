"""Straight-through rounding."""

import torch
from torch import Tensor

from extops.calling._operator import StraightThrough, operator


@operator("round_ste", StraightThrough())
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
    below = torch.floor(input)
    distance = below + (input - below >= 0.5) - input
    # Exact: the distance to the nearest integer fits the format, and adding it back gives that integer. An integer or
    # an infinity stays as it is, since adding -0.0 changes no number, nor the sign of a zero.
    return input + torch.where(input == below, -0.0, distance).detach()
