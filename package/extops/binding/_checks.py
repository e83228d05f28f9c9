"""Input checks whose messages name the operator, the argument, what was expected and what was given.

All raise ``RuntimeError``, as PyTorch does, except for an argument that is no tensor (``TypeError``).
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from extops.binding import _devices

FAILURES = (RuntimeError, TypeError, AttributeError)
"""What a call with wrong arguments may raise before they are checked."""

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def unfit(
    op: str, name: str, expected: str, found: object, error: type[Exception] = RuntimeError
) -> Exception:
    """The error of an argument that does not fit."""
    return error(f"{op}: expected `{name}` {expected}, but got {found}")


def explain(check: Callable[..., object], *arguments: Any) -> None:
    """To be called where an operator failed: raises the message of ``check``, if that finds what was wrong.

    Checking first would cost each correct call microseconds, and the bindings check what they get anyway. In a graph
    what stands for the operator has said it.
    """
    if torch.compiler.is_dynamo_compiling():
        return
    try:
        check(*arguments)
    except (RuntimeError, TypeError) as error:
        raise error from None


def to_device(op: str, name: str, tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``, without waiting for a copy to a GPU to end."""
    if (
        tensor.device.type == "cpu"
        and device.type == "cuda"
        and not torch.compiler.is_compiling()
        and torch.cuda.is_current_stream_capturing()
    ):
        raise RuntimeError(
            f"{op}: `{name}` is on the CPU, where each replay of the CUDA graph that is being captured would read it "
            f"again after it is gone; pass `lengths` on {device} to extops.lltm_sequence"
        )
    return tensor.to(device, non_blocking=device.type != "cpu")  # the CPU would read it too early


def check_dense(op: str, name: str, tensor: Tensor) -> None:
    """A tensor of any dtype, on any device, whose elements lie at strides."""
    if not isinstance(tensor, Tensor):
        raise unfit(op, name, "to be a torch.Tensor", type(tensor).__name__, TypeError)
    if tensor.is_nested:
        found = "a nested tensor; call .to_padded_tensor(0.0) first"
    elif tensor.layout is not torch.strided:
        found = f"layout {tensor.layout}; call .to_dense() first"
    else:
        return
    raise unfit(op, name, "to be a dense (strided) tensor", found)


def check_tensor(op: str, name: str, tensor: Tensor) -> None:
    """A dense floating-point tensor on a device that has kernels."""
    check_dense(op, name, tensor)
    if tensor.dtype not in FLOATING:
        expected = "of a floating-point dtype (float64, float32, bfloat16, float16)"
        raise unfit(op, name, expected, tensor.dtype)
    device = tensor.device.type
    if device not in _devices.devices:
        raise RuntimeError(
            f"{op}: `{name}` is on device {tensor.device}, for which no kernel is loaded; "
            f"{_devices.why_no_kernels(device)}"
        )


def check_matches(op: str, name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    """The dtype, device and layout of another argument that was checked already."""
    if (
        isinstance(tensor, Tensor)
        and tensor.dtype is like.dtype
        and tensor.device == like.device
        and tensor.layout is torch.strided
        and not tensor.is_nested
    ):
        return
    check_tensor(op, name, tensor)
    if tensor.dtype is not like.dtype:
        advice = (
            f"convert one: `{name}` by .to({like.dtype}), or `{like_name}` by .to({tensor.dtype})"
        )
        expected = f"of dtype {like.dtype}, the dtype of `{like_name}`"
        raise unfit(op, name, expected, f"{tensor.dtype}; {advice}")
    raise unfit(op, name, f"on device {like.device}, the device of `{like_name}`", tensor.device)


def check_dims(op: str, name: str, tensor: Tensor, axes: str) -> None:
    """As many dimensions as ``axes``, such as ``"batch, state_size"``, names."""
    expected = axes.count(",") + 1
    if tensor.dim() != expected:
        dimensions = "1 dimension" if tensor.dim() == 1 else f"{tensor.dim()} dimensions"
        what = f"to have {expected} dimension{'s' * (expected > 1)} [{axes}]"
        raise unfit(op, name, what, f"{dimensions}: {list(tensor.shape)}")


def check_shape(op: str, name: str, tensor: Tensor, shape: Sequence[int], axes: str) -> None:
    """Exactly ``shape``, which ``axes`` puts into words."""
    if tensor.shape != tuple(shape):
        raise unfit(op, name, f"to have shape {axes} = {list(shape)}", list(tensor.shape))


def check_int64_lengths(op: str, lengths: Tensor, like: Tensor, batch: int) -> None:
    """How many steps of each row count, as kernels read them."""
    if lengths.dtype is torch.int64 and lengths.device == like.device and lengths.dim() == 1:
        return check_shape(op, "lengths", lengths, (batch,), "[batch]")
    expected = f"of 1 dimension, dtype torch.int64 and device {like.device}"
    found = f"{lengths.dim()}, {lengths.dtype} and {lengths.device}"
    raise unfit(op, "lengths", expected, found)


def as_pair(
    op: str, pair: tuple[Tensor, ...], name: str = "state", items: str = "(h, c)"
) -> tuple[Tensor, Tensor]:
    """Two tensors, the hidden and the cell state unless said otherwise, where ``pair`` is these two."""
    try:
        first, second = pair
    except (TypeError, ValueError):
        given = f" of {len(pair)} items" if hasattr(pair, "__len__") else ""
        found = f"{type(pair).__name__}{given}"
        raise unfit(op, name, f"to be a pair of tensors, {items}", found, TypeError) from None
    return first, second


def as_states(op: str, state: Any, number: int) -> tuple[Tensor, ...]:
    """The hidden state and those of the cell, where ``state`` is these."""
    if number == 2:
        return as_pair(op, state)
    if not (isinstance(state, (tuple, list)) and len(state) == number):
        given = f" of {len(state)} items" if hasattr(state, "__len__") else ""
        expected = f"to be {number} tensors, h and {number - 1} of the cell"
        raise unfit(op, "state", expected, f"{type(state).__name__}{given}", TypeError)
    return tuple(state)


def refuse_script(module: torch.nn.Module) -> NoReturn:
    """What ``torch.jit.script`` asks of a module, as its ``__prepare_scriptable__``."""
    raise RuntimeError(
        f"{type(module).__name__}: torch.jit.script cannot compile modules of extops; "
        "use torch.jit.trace, torch.compile or torch.export instead"
    )


def check_layer_sizes(op: str, at_least: int = 0, **sizes: int) -> None:
    """The sizes that a module is made of."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < at_least:
            expected = f"to be an integer of at least {at_least}"
            raise unfit(op, name, expected, repr(size), ValueError)


def check_layer_dtype(op: str, dtype: torch.dtype | None) -> None:
    """The dtype that a module is made of; none is torch's default."""
    if dtype is not None and dtype not in FLOATING:
        expected = "to be a floating-point dtype (float64, float32, bfloat16, float16)"
        raise unfit(op, "dtype", expected, dtype, ValueError)


def same_shape(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether two shapes are equal; compares no sizes of different ranks, on which a traced program would depend."""
    return len(a) == len(b) and tuple(a) == tuple(b)


def broadcast_shape(op: str, named: Sequence[tuple[str, Tensor]]) -> tuple[int, ...]:
    """The shape that tensors broadcast to."""
    shapes = [x.shape for _, x in named]
    if all(same_shape(shape, shapes[0]) for shape in shapes):
        return tuple(shapes[0])
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        given = [f"`{name}` of shape {list(x.shape)}" for name, x in named]
        raise RuntimeError(
            f"{op}: {', '.join(given[:-1])} and {given[-1]} cannot be broadcast together"
        ) from None
