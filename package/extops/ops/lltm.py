"""One step of the LLTM cell."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from extops import _autograd, _checks, reference

_OP = "lltm"
_CAST_FROM = (torch.float32, torch.bfloat16, torch.float16)


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
    autocast they are cast as those of :class:`torch.nn.LSTMCell` are.

    Returns:
        ``(new_h, new_cell)``, both ``[B, S]``. Differentiable to any order with respect to all five arguments.

    Raises:
        RuntimeError: a dtype, device, layout, number of dimensions or size does not fit; the message names it.

    Source: the cell of PyTorch's tutorial "Custom C++ and CUDA Extensions".
    """
    _checks.check_tensor(_OP, "input", input)
    input, weights, bias, old_h, old_cell = autocast(input, weights, bias, old_h, old_cell)
    _check(input, weights, bias, old_h, old_cell)
    return lltm_cell(F.linear(torch.cat([old_h, input], dim=1), weights, bias), old_cell)


def lltm_cell(gates: Tensor, old_cell: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`extops.reference.lltm_cell` by the fused kernels, for arguments that were checked."""
    if _autograd.needs_composite():
        return reference.lltm_cell(gates, old_cell)
    if torch.compiler.is_compiling():
        new_h, new_cell = torch.ops.extops.lltm_cell.default(gates, old_cell)
        return new_h, new_cell
    if _autograd.wants_grad(gates, old_cell):
        new_h, new_cell = _LLTMCell.apply(gates, old_cell)
        return new_h, new_cell
    with _autograd.below_autograd():
        new_h, new_cell = torch.ops.extops.lltm_cell.default(gates, old_cell)
    return new_h, new_cell


def autocast(input: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """The arguments as autocast hands them to operators that run in lower precision: all but float64 are cast."""
    device = input.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return input, *others
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        x.to(dtype) if isinstance(x, Tensor) and x.dtype in _CAST_FROM else x
        for x in (input, *others)
    )


def _check(input: Tensor, weights: Tensor, bias: Tensor, old_h: Tensor, old_cell: Tensor) -> None:
    _checks.check_dims(_OP, "input", input, "batch, input_features")
    for name, tensor in (
        ("weights", weights),
        ("bias", bias),
        ("old_h", old_h),
        ("old_cell", old_cell),
    ):
        _checks.check_matches(_OP, name, tensor, "input", input)
    _checks.check_dims(_OP, "old_h", old_h, "batch, state_size")
    batch, features = input.shape
    state = old_h.shape[1]
    _checks.check_shape(_OP, "old_h", old_h, (batch, state), "[batch, state_size]")
    _checks.check_shape(_OP, "old_cell", old_cell, (batch, state), "[batch, state_size]")
    _checks.check_shape(
        _OP,
        "weights",
        weights,
        (3 * state, state + features),
        "[3*state_size, state_size + input_features]",
    )
    _checks.check_shape(_OP, "bias", bias, (3 * state,), "[3*state_size]")


def _save_for_backward(
    ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]
) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, output[1])


def _backward(
    ctx: Any, grad_h: Tensor | None, grad_cell: Tensor | None
) -> tuple[Tensor | None, ...]:
    gates, old_cell, new_cell = ctx.saved_tensors
    if grad_h is None and grad_cell is None:
        return None, None
    if torch.is_grad_enabled():
        return tuple(
            _autograd.differentiable_gradients(
                reference.lltm_cell,
                (gates, old_cell),
                ctx.needs_input_grad[:2],
                (grad_h, grad_cell),
            )
        )
    grad_gates, grad_old_cell = torch.ops.extops.lltm_cell_backward.default(
        grad_h, grad_cell, gates, new_cell
    )
    return grad_gates, grad_old_cell


class _LLTMCell(torch.autograd.Function):
    """The eager path: half the overhead of an operator's registered gradient."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, old_cell: Tensor) -> tuple[Tensor, Tensor]:
        with _autograd.below_autograd():
            output: tuple[Tensor, Tensor] = torch.ops.extops.lltm_cell.default(gates, old_cell)
        _save_for_backward(ctx, (gates, old_cell), output)
        return output

    backward = staticmethod(_backward)


@torch.library.register_fake("extops::lltm_cell")
def _(gates: Tensor, old_cell: Tensor) -> tuple[Tensor, Tensor]:
    _checks.check_cell("lltm_cell", gates, "old_cell", old_cell)
    return old_cell.new_empty(old_cell.shape), old_cell.new_empty(old_cell.shape)


@torch.library.register_fake("extops::lltm_cell_backward")
def _(
    grad_h: Tensor | None, grad_cell: Tensor | None, gates: Tensor, new_cell: Tensor
) -> tuple[Tensor, Tensor]:
    _checks.check_cell_backward("lltm_cell_backward", grad_h, grad_cell, gates, new_cell)
    return gates.new_empty(gates.shape), new_cell.new_empty(new_cell.shape)


torch.library.register_autograd("extops::lltm_cell", _backward, setup_context=_save_for_backward)
