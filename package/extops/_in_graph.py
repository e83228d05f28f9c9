"""Operators in Python for a graph that runs where it is traced: a layer of torch, since Dynamo refuses torch's own, and
what is not worth the time in which Inductor would compile it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from extops import _private
from extops.binding import _checks

_FUNCTIONS: dict[str, Any] = {
    "LSTM": torch._VF.lstm,
    "GRU": torch._VF.gru,
    "RNN_TANH": torch._VF.rnn_tanh,
    "RNN_RELU": torch._VF.rnn_relu,
}
_library = torch.library.Library("extops_torch", "DEF")


def add_operator(
    schema: str, compute: Callable[..., Any], shapes: Callable[..., Any], tags: Sequence[Any] = ()
) -> None:
    """Adds one to ``extops_torch``; ``shapes`` gives results without data."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=tags)
    _library.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"extops_torch::{name}", shapes, lib=_library)


def _compute(
    input: Tensor,
    states: list[Tensor],
    weights: list[Tensor],
    mode: str,
    bias: bool,
    num_layers: int,
    bidirectional: bool,
) -> list[Tensor]:
    """By steps, without dropout."""
    hx: Any = states if mode == "LSTM" else states[0]
    of_layers = bias, num_layers, 0.0, False, bidirectional, False
    return [x.contiguous() for x in _FUNCTIONS[mode](input, hx, weights, *of_layers)]


def _shapes(
    input: Tensor,
    states: list[Tensor],
    weights: list[Tensor],
    mode: str,
    bias: bool,
    num_layers: int,
    bidirectional: bool,
) -> list[Tensor]:
    steps, batch, _ = input.shape
    width = states[0].shape[2] * (1 + bidirectional)
    return [input.new_empty(steps, batch, width), *(x.new_empty(x.shape) for x in states)]


add_operator(
    "layer(Tensor input, Tensor[] states, Tensor[] weights, str mode, bool bias, int num_layers, "
    "bool bidirectional) -> Tensor[]",
    _compute,
    _shapes,
)


def is_torchs(module: Any, input: Any, hx: Any) -> bool:
    """Whether torch's layer is to compute such a call: Dynamo asks what is measured. Elsewhere ours is."""
    return False


def are_ours_forced() -> bool:
    """Whether the user wants our cells in a graph, too: Dynamo asks."""
    return False


def by_torchs(module: Any, input: Tensor, hx: Any, weights: list[Tensor]) -> tuple[Tensor, Any]:
    """The call, with the parameters in torch's order."""
    steps = (input.transpose(0, 1) if module.batch_first else input).contiguous()
    number = module._number_of_states
    given = (hx,) if number == 1 else hx
    if hx is None:
        given = (zeros(steps, *module._shape_of_states(steps.shape[1])),) * number
    of_layers = module.mode, module.bias, module.num_layers, module.bidirectional
    output, *last = torch.ops.extops_torch.layer.default(steps, list(given), weights, *of_layers)
    output = output.transpose(0, 1) if module.batch_first else output
    return output, tuple(last) if number > 1 else last[0]


def is_in_process() -> bool:
    """Whether the graph that is traced runs in this process: Dynamo answers, unless it exports a program."""
    return False


_private.answer_in_traces(is_in_process, lambda: True)


add_operator(
    "zeros(SymInt[] shape, ScalarType dtype, Device device) -> Tensor",
    (_zeros := lambda shape, dtype, device: torch.zeros(shape, dtype=dtype, device=device)),
    _zeros,
)
add_operator("stack(Tensor[] tensors) -> Tensor", torch.stack, torch.stack)
add_operator("cat(Tensor[] tensors) -> Tensor", torch.cat, torch.cat)


def zeros(like: Tensor, *shape: int) -> Tensor:
    """The states of a call that gives none. Inductor would have a kernel for each of them."""
    if not is_in_process():
        return like.new_zeros(shape)
    made: Tensor = torch.ops.extops_torch.zeros.default(shape, like.dtype, like.device)
    return made


def _is_operator() -> bool:
    """Whether a graph gets one of these, which have neither gradients nor rules of transforms."""
    return is_in_process() and not (torch.is_grad_enabled() or _private.are_transforms_active())


def stacked(tensors: list[Tensor]) -> Tensor:
    """``torch.stack``."""
    made: Tensor = (torch.ops.extops_torch.stack.default if _is_operator() else torch.stack)(
        tensors
    )
    return made


def joined(tensors: list[Tensor]) -> Tensor:
    """``torch.cat``."""
    made: Tensor = (torch.ops.extops_torch.cat.default if _is_operator() else torch.cat)(tensors)
    return made


def descending(values: Tensor) -> Tensor:
    """The order of a vector, of equal values the first one first. An operator: Inductor makes a kernel of Triton of a
    sort, and compiled the three of a packed sequence with their checks for 86 s (H200, torch 2.11).
    """
    return (torch.ops.extops_torch.descending.default if is_in_process() else _descending)(values)


def _descending(values: Tensor) -> Tensor:
    return torch.sort(values, descending=True, stable=True)[1]


add_operator(
    "descending(Tensor values) -> Tensor",
    _descending,
    lambda values: values.new_empty(values.shape, dtype=torch.int64),
)


def is_one_step(rows: Tensor) -> bool:
    """Whether ``[T, ...]`` have one step. Within a trace for any number of them it is none."""
    return type(rows.shape[0]) is int and rows.shape[0] == 1


_private.answer_in_traces(is_one_step, is_one_step)

NOT_SORTED = (
    "`lengths` array must be sorted in decreasing order when `enforce_sorted` is True. You can pass "
    "`enforce_sorted=False` to pack_padded_sequence to sidestep this requirement"
)
NOT_POSITIVE = (
    "Length of all samples has to be greater than 0, but found an element in 'lengths' that is <= 0"
)


class Checked(NamedTuple):
    """Lengths that need no further check, on the device of the rows."""

    lengths: Tensor


def checked_lengths(
    lengths: Tensor | list[int],
    device: torch.device,
    message: str = "",
    *,
    are_positive: bool = False,
    most: int = 2**62,
    is_reached: bool = False,
    enforce_sorted: bool = False,
) -> Tensor:
    """As int64 on ``device``. Raises ``message`` unless all are from 0 to ``most`` and, where that is to be reached,
    one is ``most``. Numbers make no tensor on the CPU, for which Inductor would compile C++.
    """
    options = are_positive, most, is_reached, message, enforce_sorted, device
    if not is_in_process():
        return _checked(lengths, *options)
    check: Callable[..., Tensor] = _checked
    if not isinstance(lengths, Tensor):
        check = torch.ops.extops_torch.lengths.numbers
    elif lengths.device.type == "cpu":
        check = torch.ops.extops_torch.lengths.default
    return check(lengths, *options)


def _checked(
    lengths: Tensor | list[int],
    are_positive: bool,
    most: int,
    is_reached: bool,
    message: str,
    enforce_sorted: bool,
    device: torch.device,
) -> Tensor:
    # Copied: the caller's may change before they have reached the GPU.
    if isinstance(lengths, Tensor):
        numbers = lengths.to(torch.int64, copy=True)
    else:
        numbers = torch.tensor(lengths, dtype=torch.int64)
    if (require := _private.assert_async) is not None:
        if are_positive:
            require((numbers > 0).all(), NOT_POSITIVE)
        require(((numbers >= 0) & (numbers <= most)).all(), message)
        if is_reached:
            require((numbers == most).any(), message)
        if enforce_sorted:
            require((numbers == numbers.cummin(0)[0]).all(), NOT_SORTED)
    return _checks.to_device("pack_padded_sequence", "lengths", numbers, device)


def _shape_of_lengths(lengths: Tensor | list[int], *others: Any) -> Tensor:
    batch = lengths.shape[0] if isinstance(lengths, Tensor) else len(lengths)
    return torch.empty(batch, dtype=torch.int64, device=others[-1])


for _name in ("lengths(Tensor", "lengths.numbers(SymInt[]"):
    add_operator(
        f"{_name} lengths, bool are_positive, SymInt most, bool is_reached, str message, bool enforce_sorted, "
        "Device device) -> Tensor",
        _checked,
        _shape_of_lengths,
        # A CUDA graph would read the CPU's memory at each replay.
        [tag] if (tag := getattr(torch.Tag, "cudagraph_unsafe", None)) else [],
    )
