"""The LLTM over a whole sequence."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from extops import _autocast, _autograd, _checks, _private, _products, _schemas, reference
from extops.ops.lltm import lltm

_OP = "lltm_sequence"

_operator = torch.ops.extops.lltm_sequence.default
_eager = _autograd.eager(_OP)
_eager_backward = _autograd.eager("lltm_sequence_backward")

_allows_tf32 = _private.allows_tf32

_TIME_FIRST = _schemas.OPERATORS[_OP]
_BATCH_FIRST = dataclasses.replace(
    _TIME_FIRST,
    arguments=(_schemas.Row("input", "batch, time, input_features"), *_TIME_FIRST.arguments[1:]),
)


def lltm_sequence(
    input: Tensor,
    state: tuple[Tensor, Tensor],
    weights: Tensor,
    bias: Tensor,
    *,
    lengths: Tensor | None = None,
    batch_first: bool = False,
    reverse: bool = False,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """:func:`extops.lltm` at every step of a sequence, with the input's part of the matrix product done for all steps
    at once.

    Args:
        input: ``[T, B, I]``, or ``[B, T, I]`` with ``batch_first``.
        state: ``(h_0, c_0)``, the state before the first step, both ``[B, S]``.
        weights: ``[3S, S + I]``; the first ``S`` columns meet the hidden state.
        bias: ``[3S]``.
        lengths: ``[B]``, integers from 0 to ``T``, on the CPU or on the device of ``input``: how many steps of each row
            count. Beyond them the output and the gradient of ``input`` are zero, the state stays, and what ``input``
            holds has no effect.
        batch_first: the layout of ``input`` and ``output``.
        reverse: goes from the last step to the first.

    Returns:
        ``output, (h_n, c_n)``: the hidden state after every step, ``[T, B, S]`` or ``[B, T, S]``, and the last state,
        both ``[B, S]``. In memory the output is by steps or by rows, as ``input`` is.

    Raises:
        RuntimeError: a dtype, device, layout, number of dimensions or size does not fit, or one of ``lengths`` is out
            of range; the message names it. Lengths on a GPU are checked there, since the host does not wait for them:
            the message is then that of a device-side assertion, as for torch's own indices. Code that
            ``torch.jit.trace`` made of this function refuses them as an index that is out of range.
    """
    h, c = _checks.as_pair(_OP, state)
    try:
        is_plain = _autograd.is_plain()
        if _autocast.is_on() or not is_plain:
            input, weights, bias, h, c = _autocast.cast(input, weights, bias, h, c)
        # Within a trace sizes are tensors, which the kernels check.
        if lengths is not None or not (is_plain or _autograd.is_tracing()):
            _check(input, h, c, weights, bias, lengths, batch_first)
        steps = input.transpose(0, 1) if batch_first else input
        if lengths is not None:
            lengths = _checked(lengths, steps)
        if is_plain:
            output, h_n, c_n = _run(steps, weights, bias, h, c, lengths, reverse)
        else:
            arguments = steps, weights, bias, h, c, lengths
            output, h_n, c_n, _, _ = _operator(
                *arguments, reverse=reverse, allow_tf32=_allows_tf32()
            )
    except (*_checks.FAILURES, IndexError):
        _checks.explain(_check, input, h, c, weights, bias, lengths, batch_first)
        raise
    return output.transpose(0, 1) if batch_first else output, (h_n, c_n)


def _run(
    input: Tensor,
    weights: Tensor,
    bias: Tensor,
    h_0: Tensor,
    c_0: Tensor,
    lengths: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """A plain call."""
    if lengths is None and input.shape[0] == 1:  # for which the cell has kernels of its own
        h_n, c_n = lltm(input[0], weights, bias, h_0, c_0)
        return torch.stack((h_n,)), h_n, c_n
    allow_tf32 = input.is_cuda and _allows_tf32()
    arguments = input, weights, bias, h_0, c_0, lengths
    if torch.is_grad_enabled() and (
        weights.requires_grad
        or bias.requires_grad
        or input.requires_grad
        or h_0.requires_grad
        or c_0.requires_grad
    ):
        output, h_n, c_n, _, _ = _apply(reverse, allow_tf32, *arguments)
    else:
        with _autograd.below_autograd():
            output, h_n, c_n, _, _ = _eager(*arguments, reverse=reverse, allow_tf32=allow_tf32)
    return output, h_n, c_n


def _checked(lengths: Tensor, input: Tensor) -> Tensor:
    """Lengths as the operator takes them: of int64, on the device of ``input`` and in range."""
    # Small integer types hold no number of steps beyond their range, and unsigned ones cannot be compared. The caller
    # may change the tensor before a backward, or before it has reached the GPU: these read a copy. A trace is the same
    # with gradients and without.
    copy = torch.is_grad_enabled() or lengths.device != input.device or _autograd.is_tracing()
    numbers = lengths.to(torch.int64, copy=copy)
    steps = input.shape[0]
    assert_async = _private.assert_async
    if assert_async is not None:
        _check_range(assert_async, lengths, numbers, steps)
    # A trace, and compiled code of torch 2.4, leave out assertions, but not what the result depends on.
    if assert_async is None or _autograd.is_tracing() or torch.compiler.is_compiling():
        numbers = torch.arange(steps + 1, device=numbers.device).index_select(0, numbers)
    return _checks.to_device(_OP, "lengths", numbers, input)


def _check_range(
    assert_async: Callable[[Tensor, str], None], lengths: Tensor, numbers: Tensor, steps: int
) -> None:
    if torch.compiler.is_compiling():  # for any number of steps: the message cannot name it
        values, limit = numbers, "the number of steps of `input`"
    else:
        values, limit = _private.unwrapped(numbers), f"{steps}, the number of steps of `input`"
    in_range = ((values >= 0) & (values <= steps)).all()
    expected = f"{_OP}: expected `lengths` from 0 to {limit}"
    try:
        assert_async(in_range, expected)
    except RuntimeError:
        with _private.outside_transforms():  # within which new tensors have no values
            given = _private.unwrapped(lengths).tolist()
        raise RuntimeError(f"{expected}, but got {given}") from None


def _check(
    input: Tensor,
    h: Tensor,
    c: Tensor,
    weights: Tensor,
    bias: Tensor,
    lengths: Tensor | None,
    batch_first: bool,
) -> None:
    schema = _BATCH_FIRST if batch_first else _TIME_FIRST
    batch = schema.check(input, weights, bias, h, c)["batch"]
    if lengths is not None:
        _check_lengths(lengths, input, batch)


def _check_lengths(lengths: Tensor, input: Tensor, batch: int) -> None:
    _checks.check_dense(_OP, "lengths", lengths)
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype is torch.bool:
        raise RuntimeError(
            f"{_OP}: expected `lengths` of an integer dtype, but got {lengths.dtype}"
        )
    if lengths.device != input.device and lengths.device.type != "cpu":
        raise RuntimeError(
            f"{_OP}: expected `lengths` on the CPU or on device {input.device}, the device of `input`, "
            f"but got {lengths.device}"
        )
    _checks.check_shape(_OP, "lengths", lengths, (batch,), "[batch]")


# -- gradients: eager calls go straight to an autograd Function, as in lltm.py


class _Sequence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, reverse: bool, allow_tf32: bool, *inputs: Tensor | None
    ) -> tuple[Tensor, ...]:
        with _autograd.below_autograd():
            results: tuple[Tensor, ...] = _eager(*inputs, reverse=reverse, allow_tf32=allow_tf32)
        output, _, _, gates, cells = results
        ctx.reverse = reverse
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, output, gates, cells)
        return results

    @staticmethod
    def backward(ctx: Any, *towards: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, lengths, output, gates, cells = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:7]
        if _autograd.needs_composite() or towards[3] is not None or towards[4] is not None:
            composite = functools.partial(
                reference.lltm_sequence, lengths=lengths, reverse=ctx.reverse
            )
            found = _autograd.composite_gradients(composite, inputs, needs, towards)
        elif all(gradient is None for gradient in towards):
            found = (None,) * 5
        else:
            with _autograd.below_autograd():
                found = _gradients(
                    inputs, lengths, output, gates, cells, towards[:3], needs, ctx.reverse
                )
        return None, None, *found, None


@_autocast.outside
def _gradients(
    inputs: list[Tensor],
    lengths: Tensor | None,
    output: Tensor,
    gates: Tensor,
    cells: Tensor,
    towards: tuple[Tensor | None, ...],
    needs: tuple[bool, ...],
    reverse: bool,
) -> tuple[Tensor | None, ...]:
    """The gradients of ``input``, ``weights``, ``bias``, ``h_0`` and ``c_0`` that are needed."""
    input, weights, _, h_0, _ = inputs
    needs_input, needs_weights, needs_bias, _, _ = needs
    allow_tf32 = input.is_cuda and _allows_tf32()
    grad_gates, grad_h_0, grad_c_0 = _eager_backward(
        *towards, weights, gates, cells, lengths, reverse=reverse, allow_tf32=allow_tf32
    )
    batch_first = _schemas.is_batch_first(gates)
    rows = _schemas.rows(grad_gates, batch_first)
    counts = None if lengths is None else reference.steps_that_count(lengths, input.shape[0])
    grad_input = grad_weights = None
    if needs_input:
        of_rows = _products.mm(rows, weights[:, h_0.shape[1] :])
        grad_input = _transposed(of_rows.view(_transposed(input, batch_first).shape), batch_first)
        if counts is not None:  # a weight may be infinite or NaN, and zero times that is NaN
            grad_input = torch.where(counts, grad_input, 0)
    if needs_weights:
        old_h = _old_h(h_0, output, lengths, batch_first, reverse)
        factors = torch.cat([_transposed(x, batch_first) for x in (old_h, input)], dim=2)
        if counts is not None:  # so may be the factors of steps that do not count
            factors = torch.where(_transposed(counts, batch_first), factors, 0)
        grad_weights = torch.mm(rows.t(), factors.flatten(0, 1))
    return grad_input, grad_weights, rows.sum(0) if needs_bias else None, grad_h_0, grad_c_0


def _old_h(
    h_0: Tensor, output: Tensor, lengths: Tensor | None, batch_first: bool, reverse: bool
) -> Tensor:
    """The hidden state before each step, ``[T, B, S]``, in memory as the output is."""
    time = output.shape[0]
    states = (output, h_0.unsqueeze(0)) if reverse else (h_0.unsqueeze(0), output)
    joined = torch.cat([_transposed(x, batch_first) for x in states], dim=1 if batch_first else 0)
    # One more than there are steps, also for none: an index from the end, or a slice that is written, would ask whether
    # there are some, and a program for any number of steps cannot tell.
    old_h = _transposed(joined, batch_first).narrow(0, int(reverse), time)
    if lengths is None or not reverse:
        return old_h
    is_last = torch.arange(time, device=output.device).unsqueeze(1) == lengths - 1
    return torch.where(is_last.unsqueeze(2), h_0, old_h)


def _transposed(sequence: Tensor, batch_first: bool) -> Tensor:
    return sequence.transpose(0, 1) if batch_first else sequence


_apply = _private.apply(_Sequence)
_autograd.register(
    _OP,
    lambda *inputs, reverse=False, allow_tf32=False: _apply(reverse, allow_tf32, *inputs),
    lambda *inputs, reverse=False, allow_tf32=False: reference.lltm_sequence(
        *inputs, reverse=reverse
    ),
)


def _composite_backward(
    *inputs: Any, reverse: bool = False, allow_tf32: bool = False
) -> tuple[Tensor, ...]:
    return reference.lltm_sequence_backward(*inputs, reverse=reverse)


# For compiled code, which calls it.
_autograd.register(f"{_OP}_backward", _composite_backward, _composite_backward)
