"""The LLTM over a whole sequence."""

import torch
import torch.nn.functional as F
from torch import Tensor

from extops import _autograd, _checks, _schemas
from extops.ops.lltm import autocast, lltm, lltm_cell

_OP = "lltm_sequence"


def _schema(axes: str) -> _schemas.Operator:
    rows = [
        _schemas.Row("input", axes),
        *(_schemas.Row(x, "batch, state_size") for x in ("h_0", "c_0")),
    ]
    rows += [x for x in _schemas.OPERATORS["lltm"].arguments if x.name in ("weights", "bias")]
    return _schemas.Operator(
        _OP, "", tuple(rows), (), sizes=("time", "batch", "input_features", "state_size")
    )


_TIME_FIRST = _schema("time, batch, input_features")
_BATCH_FIRST = _schema("batch, time, input_features")


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
    """:func:`extops.lltm` at every step of a sequence; in float32 and float64 the input's part of the matrix product is
    done for all at once.

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
        both ``[B, S]``.

    Raises:
        RuntimeError: a dtype, device, layout, number of dimensions or size does not fit, or one of ``lengths`` is out
            of range; the message names it. Lengths on a GPU are checked there, since the host does not wait for them:
            the message is then that of a device-side assertion, as for torch's own indices. Code that
            ``torch.jit.trace`` made of this function refuses them as an index that is out of range.
    """
    h, c = _checks.as_pair(_OP, state)
    _checks.check_tensor(_OP, "input", input)
    input, weights, bias, h, c = autocast(input, weights, bias, h, c)
    _check(input, h, c, weights, bias, lengths, batch_first)
    if batch_first:
        input = input.transpose(0, 1)
    if lengths is not None:
        counts = _which_steps_count(lengths, input)
        # The gradient of the weights is a product with all of the input, and zero times infinity or NaN is NaN.
        input = torch.where(counts, input, 0)
    state_size = h.shape[1]
    weights_h = weights[:, :state_size].t()
    # Not in 16-bit types: the input's part would be rounded before the hidden state's is added to it.
    at_once = input.dtype.itemsize > 2
    parts = (F.linear(input, weights[:, state_size:], bias) if at_once else input).unbind(0)
    outputs: list[Tensor] = []
    steps = range(len(parts))
    for t in reversed(steps) if reverse else steps:
        old_h, old_c = h, c
        if lengths is not None:
            # Beyond its length a row is computed from zeros: its gates are the bias, and nothing overflows.
            h, c = torch.where(counts[t], h, 0), torch.where(counts[t], c, 0)
        if at_once:
            h, c = lltm_cell(torch.addmm(parts[t], h, weights_h), c)
        else:
            h, c = lltm(parts[t], weights, bias, h, c)
        if lengths is not None:
            h, c = torch.where(counts[t], h, old_h), torch.where(counts[t], c, old_c)
        outputs.append(h)
    if reverse:
        outputs.reverse()
    time_axis = 1 if batch_first else 0
    if not outputs:  # the caller's states stay the caller's
        return _no_steps(input, h, batch_first), (h.clone(), c.clone())
    output = torch.stack(outputs, time_axis)
    if lengths is not None:
        output = torch.where(counts.movedim(0, time_axis), output, 0)
    return output, (h, c)


def _unwrapped(tensor: Tensor) -> Tensor:
    """The values behind a tensor of ``torch.func``: ``vmap`` has no rule for an assertion."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _which_steps_count(lengths: Tensor, input: Tensor) -> Tensor:
    """``[T, B, 1]``: whether a step is within its row's length."""
    # Small integer types hold no number of steps beyond their range, and unsigned ones cannot be compared.
    numbers = lengths.to(torch.int64)
    steps = len(input)
    values = numbers if torch.compiler.is_compiling() else _unwrapped(numbers)
    in_range = ((values >= 0) & (values <= steps)).all()
    expected = f"{_OP}: expected `lengths` from 0 to {steps}, the number of steps of `input`"
    try:
        torch._assert_async(in_range, expected)
    except RuntimeError:
        with torch._C._DisableFuncTorch():  # within whose transforms new tensors have no values
            given = _unwrapped(lengths).tolist()
        raise RuntimeError(f"{expected}, but got {given}") from None
    if _autograd.is_tracing():  # a trace leaves out assertions, but not what the result depends on
        numbers = torch.arange(steps + 1, device=numbers.device).index_select(0, numbers)
    numbers = numbers.to(input.device, non_blocking=True)
    return (torch.arange(steps, device=input.device).unsqueeze(1) < numbers).unsqueeze(2)


def _no_steps(input: Tensor, h: Tensor, batch_first: bool) -> Tensor:
    batch, state_size = h.shape
    return input.new_empty((batch, 0, state_size) if batch_first else (0, batch, state_size))


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
    batch = schema.check(input, h, c, weights, bias)["batch"]
    if lengths is not None:
        _check_lengths(lengths, input, batch)


def _check_lengths(lengths: Tensor, input: Tensor, batch: int) -> None:
    if not isinstance(lengths, Tensor):
        raise TypeError(
            f"{_OP}: expected `lengths` to be a torch.Tensor, but got {type(lengths).__name__}"
        )
    if lengths.layout is not torch.strided:
        raise RuntimeError(
            f"{_OP}: expected `lengths` to be a dense (strided) tensor, but got layout {lengths.layout}"
        )
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
