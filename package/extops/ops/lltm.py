"""One step of the LLTM cell."""

import dataclasses

import torch
from torch import Tensor

from extops import _private
from extops.binding import _checks, _schemas
from extops.calling import _autocast, _autograd
from extops.ops.sequence import LLTM_CELL

_STEP = LLTM_CELL.step
_OPERATOR = torch.ops.extops.lltm_step.default


_SCHEMA, _NAMES = _schemas.OPERATORS["lltm_step"], {"h_0": "old_h", "c_0": "old_cell"}
_ROWS = [dataclasses.replace(x, name=_NAMES.get(x.name, x.name)) for x in _SCHEMA.arguments]
_check = dataclasses.replace(_SCHEMA, name="lltm", arguments=tuple(_ROWS)).check
"""With the names of this function's arguments in messages."""


def lltm(
    input: Tensor, weights: Tensor, bias: Tensor, old_h: Tensor, old_cell: Tensor
) -> tuple[Tensor, Tensor]:
    r"""One step of an LSTM without a forget gate, with ELU as the candidate's activation.

    With :math:`X = [\text{old\_h} \mid \text{input}]` and :math:`z = X \, \text{weights}^T + \text{bias}`, whose three
    blocks of ``S`` columns belong to the input gate, the output gate and the candidate:

    .. math::
        \text{new\_cell} &= \text{old\_cell} + \mathrm{elu}(z_c) \cdot \sigma(z_i) \\
        \text{new\_h} &= \tanh(\text{new\_cell}) \cdot \sigma(z_o)

    Args:
        input: ``[B, I]``.
        weights: ``[3S, S + I]``; the first ``S`` columns meet ``old_h``.
        bias: ``[3S]``.
        old_h: ``[B, S]``.
        old_cell: ``[B, S]``.

    All have one dtype (float64, float32, bfloat16 or float16) and one device, and may have any strides. Under
    autocast they are cast as those of :class:`torch.nn.LSTMCell` are. Float32 GEMMs on CUDA are computed in TF32
    where torch's switch allows it (``torch.set_float32_matmul_precision``), in full precision otherwise.

    Returns:
        ``(new_h, new_cell)``, both ``[B, S]``. Differentiable to any order with respect to all five arguments.

    Raises:
        RuntimeError: a dtype, device, layout, number of dimensions or size does not fit; the message names it.

    Source: the cell of PyTorch's tutorial "Custom C++ and CUDA Extensions".
    """
    try:
        if not _autograd.is_plain():
            return _transformed(input, weights, bias, old_h, old_cell)
        if _autocast.is_on():
            arguments = _autocast.cast(input, weights, bias, old_h, old_cell)
            input, weights, bias, old_h, old_cell = arguments
        new_h, new_cell = _STEP(input, weights, bias, old_h, old_cell)
    except _checks.FAILURES:
        _checks.explain(_check, input, weights, bias, old_h, old_cell)
        raise
    return new_h, new_cell


def _transformed(*arguments: Tensor) -> tuple[Tensor, Tensor]:
    arguments = _autocast.cast(*arguments)
    if not _autograd.is_checked_elsewhere():
        _check(*arguments)
    new_h, new_cell, _ = _OPERATOR(*arguments, allow_tf32=_private.allows_tf32())
    return new_h, new_cell
