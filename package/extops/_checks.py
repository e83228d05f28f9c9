"""Input checks whose messages name the operator, the argument, what was expected and what was given.

All raise ``RuntimeError``, as PyTorch does, except for an argument that is no tensor (``TypeError``).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from extops import _devices

FAILURES = (RuntimeError, TypeError, AttributeError)
"""What a call with wrong arguments may raise before its checks have their say."""

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def explain(check: Callable[..., None], *arguments: Any) -> None:
    """To be called where an operator failed: raises the message of ``check``, if that finds what was wrong.

    Kernels check what they are given, too: asking for permission first would cost each good call microseconds.
    """
    try:
        check(*arguments)
    except (RuntimeError, TypeError) as error:
        raise error from None


def check_tensor(op: str, name: str, tensor: Tensor) -> None:
    """A dense floating-point tensor on a device that has kernels."""
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{op}: expected `{name}` to be a torch.Tensor, but got {type(tensor).__name__}"
        )
    if tensor.layout is not torch.strided:
        raise RuntimeError(
            f"{op}: expected `{name}` to be a dense (strided) tensor, but got layout {tensor.layout}; "
            "call .to_dense() first"
        )
    if tensor.is_nested:
        raise RuntimeError(
            f"{op}: expected `{name}` to be a dense (strided) tensor, but got a nested tensor; "
            "call .to_padded_tensor(0.0) first"
        )
    if tensor.dtype not in FLOATING:
        raise RuntimeError(
            f"{op}: expected `{name}` of a floating-point dtype (float64, float32, bfloat16, float16), "
            f"but got {tensor.dtype}"
        )
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
        raise RuntimeError(
            f"{op}: expected `{name}` of dtype {like.dtype}, the dtype of `{like_name}`, but got {tensor.dtype}"
        )
    raise RuntimeError(
        f"{op}: expected `{name}` on device {like.device}, the device of `{like_name}`, but got {tensor.device}"
    )


def check_dims(op: str, name: str, tensor: Tensor, axes: str) -> None:
    """As many dimensions as ``axes``, such as ``"batch, state_size"``, names."""
    expected = axes.count(",") + 1
    if tensor.dim() != expected:
        dimensions = "1 dimension" if tensor.dim() == 1 else f"{tensor.dim()} dimensions"
        raise RuntimeError(
            f"{op}: expected `{name}` to have {expected} dimension{'s' * (expected > 1)} [{axes}], "
            f"but got {dimensions}: {list(tensor.shape)}"
        )


def check_shape(op: str, name: str, tensor: Tensor, shape: Sequence[int], axes: str) -> None:
    """Exactly ``shape``, which ``axes`` puts into words."""
    if tensor.shape != tuple(shape):
        raise RuntimeError(
            f"{op}: expected `{name}` to have shape {axes} = {list(shape)}, but got {list(tensor.shape)}"
        )


def check_lltm(
    op: str, input: Tensor, weights: Tensor, bias: Tensor, old_h: Tensor, old_cell: Tensor
) -> None:
    """The arguments of one step."""
    check_tensor(op, "input", input)
    check_dims(op, "input", input, "batch, input_features")
    for name, tensor in (
        ("weights", weights),
        ("bias", bias),
        ("old_h", old_h),
        ("old_cell", old_cell),
    ):
        check_matches(op, name, tensor, "input", input)
    check_dims(op, "old_h", old_h, "batch, state_size")
    batch, state_size = input.shape[0], old_h.shape[1]
    check_state(op, "old_h", old_h, batch, state_size)
    check_state(op, "old_cell", old_cell, batch, state_size)
    check_parameters(op, weights, bias, input, state_size)


def as_pair(op: str, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The hidden and the cell state, where ``state`` is these two."""
    try:
        h, c = state
    except (TypeError, ValueError):
        items = f" of {len(state)} items" if hasattr(state, "__len__") else ""
        raise TypeError(
            f"{op}: expected `state` to be a pair of tensors, (h, c), but got {type(state).__name__}{items}"
        ) from None
    return h, c


def check_layer_sizes(op: str, at_least: int = 0, **sizes: int) -> None:
    """The sizes that a module is made of."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < at_least:
            raise ValueError(
                f"{op}: expected `{name}` to be an integer of at least {at_least}, but got {size!r}"
            )


def check_layer_dtype(op: str, dtype: torch.dtype | None) -> None:
    """The dtype that a module is made of; none is torch's default."""
    if dtype is not None and dtype not in FLOATING:
        raise ValueError(
            f"{op}: expected `dtype` to be a floating-point dtype (float64, float32, bfloat16, float16), "
            f"but got {dtype}"
        )


def check_state(op: str, name: str, state: Tensor, batch: int, state_size: int) -> None:
    """A hidden or cell state."""
    check_shape(op, name, state, (batch, state_size), "[batch, state_size]")


def check_parameters(
    op: str, weights: Tensor, bias: Tensor, input: Tensor, state_size: int
) -> None:
    """The LLTM's weights and bias, of the dtype and device they should have."""
    features = input.shape[-1]
    shape = (3 * state_size, state_size + features)
    if weights.dim() == 2 and weights.shape[0] == shape[0] and weights.shape[1] >= state_size:
        taken = weights.shape[1] - state_size
        if taken != features:
            raise RuntimeError(
                f"{op}: expected `input` of {taken} features to go with `weights`, or `weights` of shape "
                f"[3*state_size, state_size + input_features] = {list(shape)} to go with `input`, but got `input` of "
                f"shape {list(input.shape)} and `weights` of shape {list(weights.shape)}"
            )
    check_shape(op, "weights", weights, shape, "[3*state_size, state_size + input_features]")
    check_shape(op, "bias", bias, (3 * state_size,), "[3*state_size]")


def check_cell(op: str, gates: Tensor, cell_name: str, cell: Tensor) -> None:
    """``gates`` [batch, 3 * state_size] and a cell state."""
    check_tensor(op, cell_name, cell)
    check_dims(op, cell_name, cell, "batch, state_size")
    check_matches(op, "gates", gates, cell_name, cell)
    batch, state_size = cell.shape
    check_shape(op, "gates", gates, (batch, 3 * state_size), "[batch, 3*state_size]")


def check_cell_gradients(
    op: str, grad_h: Tensor | None, grad_cell: Tensor | None, new_cell: Tensor
) -> None:
    """Upstream gradients like the cell state, either of them absent."""
    for name, gradient in (("grad_h", grad_h), ("grad_cell", grad_cell)):
        if gradient is not None:
            check_matches(op, name, gradient, "new_cell", new_cell)
            check_shape(op, name, gradient, new_cell.shape, "that of `new_cell`")


def check_backward_inputs(op: str, input: Tensor, old_h: Tensor, new_cell: Tensor) -> None:
    """The forward's inputs beside the cell state that it made."""
    check_matches(op, "input", input, "new_cell", new_cell)
    check_matches(op, "old_h", old_h, "new_cell", new_cell)
    check_dims(op, "input", input, "batch, input_features")
    check_shape(op, "old_h", old_h, new_cell.shape, "that of `new_cell`")
    check_shape(op, "input", input, (new_cell.shape[0], input.shape[1]), "[batch, input_features]")


def check_input_backward(op: str, grad_gates: Tensor, weights: Tensor) -> None:
    """``grad_gates`` [batch, 3 * state_size] and the weights that it goes through."""
    check_tensor(op, "grad_gates", grad_gates)
    check_dims(op, "grad_gates", grad_gates, "batch, 3*state_size")
    check_matches(op, "weights", weights, "grad_gates", grad_gates)
    check_dims(op, "weights", weights, "3*state_size, state_size + input_features")
    columns = grad_gates.shape[1]
    if columns % 3 != 0 or weights.shape[0] != columns or weights.shape[1] < columns // 3:
        raise RuntimeError(
            f"{op}: expected `weights` to have shape [3*state_size, state_size + input_features] with "
            f"3*state_size = {columns}, but got {list(weights.shape)}"
        )


def check_factors(op: str, a: Tensor, b: Tensor) -> None:
    """Two tensors of one dtype and device."""
    check_tensor(op, "a", a)
    check_matches(op, "b", b, "a", a)


def check_broadcast(op: str, a: Tensor, b: Tensor) -> None:
    """Two factors of shapes that broadcast."""
    check_factors(op, a, b)
    broadcast_shape(op, a, b)


def check_product(op: str, a: Tensor, b: Tensor, out: Tensor) -> None:
    """Two factors and a tensor that holds their product."""
    check_factors(op, a, b)
    check_matches(op, "out", out, "a", a)
    shape = broadcast_shape(op, a, b)
    if not same_shape(out.shape, shape):
        raise RuntimeError(
            f"{op}: expected `out` to have shape {list(shape)}, the broadcast shape of `a` and `b`, "
            f"but got {list(out.shape)}"
        )


def check_mult_backward(op: str, grad_output: Tensor, a: Tensor, b: Tensor) -> None:
    """Two factors and an upstream gradient, all of one shape."""
    check_factors(op, a, b)
    check_matches(op, "grad_output", grad_output, "a", a)
    check_shape(op, "b", b, a.shape, "that of `a`")
    check_shape(op, "grad_output", grad_output, a.shape, "that of `a`")


def empty_product(op: str, a: Tensor, b: Tensor) -> Tensor:
    """A new tensor for a product, laid out like the first factor that has its shape."""
    shape = broadcast_shape(op, a, b)
    for factor in (a, b):
        if same_shape(factor.shape, shape):
            return torch.empty_like(factor)
    return a.new_empty(shape)


def same_shape(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether two shapes are equal; compares no sizes of different ranks, on which a traced program would depend."""
    return len(a) == len(b) and tuple(a) == tuple(b)


def broadcast_shape(op: str, a: Tensor, b: Tensor) -> tuple[int, ...]:
    """The shape that ``a`` and ``b`` broadcast to."""
    if same_shape(a.shape, b.shape):
        return tuple(a.shape)
    try:
        return tuple(torch.broadcast_shapes(a.shape, b.shape))
    except RuntimeError:
        raise RuntimeError(
            f"{op}: `a` of shape {list(a.shape)} and `b` of shape {list(b.shape)} cannot be broadcast together"
        ) from None
