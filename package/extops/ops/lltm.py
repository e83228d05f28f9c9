"""One step of the LLTM cell."""

import functools
from typing import Any

import torch
from torch import Tensor

from extops import _private, reference
from extops.binding import _schemas
from extops.calling import _autocast, _autograd, _checks

_OP = "lltm"

_eager_lltm = _autograd.eager("lltm")
_eager_lltm_in_tf32 = _autograd.eager("lltm", allow_tf32=True)
_eager_backward = _autograd.eager("lltm_backward")
_eager_backward_in_tf32 = _autograd.eager("lltm_backward", allow_tf32=True)
_eager_input_backward = _autograd.eager("lltm_input_backward")
_eager_cell = _autograd.eager("lltm_cell")
_eager_cell_backward = _autograd.eager("lltm_cell_backward")

_allows_tf32 = _private.allows_tf32
_check = _schemas.OPERATORS[_OP].check


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
        if (
            weights.requires_grad
            or bias.requires_grad
            or input.requires_grad
            or old_h.requires_grad
            or old_cell.requires_grad
        ) and torch.is_grad_enabled():
            new_h, new_cell = _apply_lltm(input, weights, bias, old_h, old_cell)
        else:
            operator = _eager_lltm_in_tf32 if input.is_cuda and _allows_tf32() else _eager_lltm
            with _autograd.below_autograd():
                new_h, new_cell, _ = operator(input, weights, bias, old_h, old_cell)
    except _checks.FAILURES:
        _checks.explain(_check, input, weights, bias, old_h, old_cell)
        raise
    return new_h, new_cell


def _transformed(*arguments: Tensor) -> tuple[Tensor, Tensor]:
    arguments = _autocast.cast(*arguments)
    if not _autograd.is_tracing():  # where sizes are tensors, which the kernels check
        _check(*arguments)
    new_h, new_cell, _ = torch.ops.extops.lltm.default(*arguments, allow_tf32=_allows_tf32())
    return new_h, new_cell


# -- gradients: eager calls go straight to an autograd Function, which has half the overhead of the dispatcher;
#    both share the backward


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    _, new_cell, gates = output
    ctx.set_materialize_grads(False)
    # The bias's values are not needed, and may change.
    input, weights, ctx.bias, *states = inputs
    ctx.versions = _autograd.versions([ctx.bias])
    ctx.save_for_backward(input, weights, *states, gates, new_cell)


def _backward(
    ctx: Any, grad_h: Tensor | None, grad_cell: Tensor | None, grad_gates: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    input, weights, old_h, old_cell, gates, new_cell = ctx.saved_tensors
    needs_input, needs_weights, needs_bias, needs_old_h, _ = needs = ctx.needs_input_grad[-5:]
    if _autograd.needs_composite() or grad_gates is not None:
        inputs = input, weights, ctx.bias, old_h, old_cell
        upstream = grad_h, grad_cell, grad_gates
        is_same = _autograd.versions([ctx.bias]) == ctx.versions
        composite = functools.partial(_with_gates, known=None if is_same else gates)
        return _autograd.composite_gradients(composite, inputs, needs, upstream)
    if grad_h is None and grad_cell is None:
        return (None,) * 5
    grad_weights = grad_bias = grad_input = grad_old_h = None
    with _autograd.below_autograd():
        if needs_weights or needs_bias:
            in_tf32 = input.is_cuda and _allows_tf32()
            operator = _eager_backward_in_tf32 if in_tf32 else _eager_backward
            grad_gates, grad_old_cell, grad_weights, grad_bias = operator(
                grad_h, grad_cell, input, old_h, gates, new_cell
            )
        else:
            grad_gates, grad_old_cell = _eager_cell_backward(grad_h, grad_cell, gates, new_cell)
        if needs_input or needs_old_h:
            grad_old_h, grad_input = _eager_input_backward(grad_gates, weights)
    return grad_input, grad_weights, grad_bias, grad_old_h, grad_old_cell


def _with_gates(
    input: Tensor,
    weights: Tensor,
    bias: Tensor,
    old_h: Tensor,
    old_cell: Tensor,
    known: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    gates = reference.with_values(reference.lltm_gates(input, weights, bias, old_h), known)
    return *reference.lltm_cell(gates, old_cell), gates


class _LLTM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        operator = _eager_lltm_in_tf32 if inputs[0].is_cuda and _allows_tf32() else _eager_lltm
        with _autograd.below_autograd():
            output = operator(*inputs)
        _save_for_backward(ctx, inputs, output)
        new_h, new_cell, _ = output
        return new_h, new_cell

    backward = staticmethod(_backward)


_apply_lltm = _private.apply(_LLTM)


class _LLTMOperator(torch.autograd.Function):
    """Also returns the gates, as the operator does; an eager call does not need them."""

    @staticmethod
    def forward(ctx: Any, allow_tf32: bool, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        operator = _eager_lltm_in_tf32 if allow_tf32 else _eager_lltm
        with _autograd.below_autograd():
            output: tuple[Tensor, Tensor, Tensor] = operator(*inputs)
        _save_for_backward(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *_backward(ctx, *gradients)


_apply_operator = _private.apply(_LLTMOperator)
_autograd.register(
    "lltm",
    lambda *inputs, allow_tf32=False: _apply_operator(allow_tf32, *inputs),
    lambda *inputs, allow_tf32=False: _with_gates(*inputs),
)


def _cell_backward(
    ctx: Any, grad_h: Tensor | None, grad_cell: Tensor | None
) -> tuple[Tensor | None, ...]:
    *inputs, new_cell = ctx.saved_tensors
    if _autograd.needs_composite():
        needs, upstream = ctx.needs_input_grad, (grad_h, grad_cell)
        return _autograd.composite_gradients(reference.lltm_cell, inputs, needs, upstream)
    if grad_h is None and grad_cell is None:
        return None, None
    gradients: tuple[Tensor, ...]
    with _autograd.below_autograd():
        gradients = _eager_cell_backward(grad_h, grad_cell, inputs[0], new_cell)
    return gradients


class _LLTMCell(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        with _autograd.below_autograd():
            output: tuple[Tensor, Tensor] = _eager_cell(*inputs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, output[1])
        return output

    backward = staticmethod(_cell_backward)


_apply_cell = _private.apply(_LLTMCell)
_autograd.register("lltm_cell", _apply_cell, reference.lltm_cell)


# -- gradients of the operators that compute gradients, which compiled code calls


def _lltm_backward(*inputs: Any, allow_tf32: bool = False) -> tuple[Tensor, ...]:
    return reference.lltm_backward(*inputs)


for _name, _composite in (
    ("lltm_backward", _lltm_backward),
    ("lltm_input_backward", reference.lltm_input_backward),
    ("lltm_cell_backward", reference.lltm_cell_backward),
):
    _autograd.register(_name, _composite, _composite)
