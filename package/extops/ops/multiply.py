"""Elementwise multiplication."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from extops import _private
from extops.binding import _checks, _schemas
from extops.calling import _autograd
from extops.calling._operator import Gradient, Gradients, Reference, operator

_OP = "elementwise_mult"
_CHECKED = dataclasses.replace(_schemas.OPERATORS["elementwise_mult_out"], name=_OP)

_eager_mult_out = _autograd.eager("elementwise_mult_out", is_traced=False)
_eager_backward = _autograd.eager("elementwise_mult_backward")


class _Product(Gradient):
    """Keeps only the factors that the wanted gradients need; with both wanted, one kernel computes both."""

    def save(self, ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        a, b = inputs
        needs_a, needs_b = ctx.needs_input_grad
        ctx.shapes = a.shape, b.shape
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None)

    def backward(self, ctx: Any, grad_output: Tensor, reference: Reference) -> Gradients:
        a, b = ctx.saved_tensors
        needs_a, needs_b = ctx.needs_input_grad
        a_shape, b_shape = ctx.shapes
        composite = _autograd.needs_composite()
        if needs_a and needs_b and a_shape == b_shape and not composite:
            with _autograd.below_autograd():
                grad_a, grad_b = _eager_backward(grad_output, a, b)
            return grad_a, grad_b
        product = reference if composite else torch.ops.extops.elementwise_mult.default
        return (
            product(grad_output, b).sum_to_size(a_shape) if needs_a else None,
            product(grad_output, a).sum_to_size(b_shape) if needs_b else None,
        )


@operator(_OP, _Product())
def multiply(a: Tensor, b: Tensor) -> Tensor:
    """:func:`elementwise_mult` without ``out``."""
    return a * b


def elementwise_mult(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    r"""The product of two tensors, element by element.

    .. math:: \text{output} = a \cdot b

    Both gradients are computed in one pass over memory where both are wanted and the shapes are equal.

    Args:
        a: any shape and strides; float64, float32, bfloat16 or float16.
        b: the dtype and device of ``a``, and a shape that broadcasts with it.
        out: a tensor of the dtype and device of ``a`` and of the broadcast shape, into which the product is written; it
            may share memory with ``a`` and ``b``. Only where no gradient is wanted.

    Returns:
        ``out`` if given, otherwise a tensor of the broadcast shape. Differentiable to any order.

    Raises:
        RuntimeError: a dtype, device, layout or shape does not fit, or ``out`` is given where a gradient is wanted.
    """
    if out is None:
        return multiply(a, b)
    _check_out(a, b, out)
    if not _can_write_directly(a, b, out):
        return out.copy_(multiply(a, b))
    _write(a, b, out)
    return out


def _check_out(a: Tensor, b: Tensor, out: Tensor) -> None:
    _CHECKED.check(a, b, out)
    _refuse_gradients(a, b, out)
    if _shares_memory_within(out):
        found = f"shape {list(out.shape)} with strides {list(out.stride())}; pass out.contiguous() instead"
        expected = "to have a memory location of its own for each element"
        raise _checks.unfit(_OP, "out", expected, found)
    if torch.compiler.is_compiling():
        return  # torch refuses this itself, and cannot trace the question
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{_OP}: `out` is an inference tensor, which torch lets nobody write outside of inference mode; "
            "call it under torch.inference_mode() or pass out.clone() instead"
        )


def _refuse_gradients(a: Tensor, b: Tensor, out: Tensor) -> None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (a, b, out)):
        raise RuntimeError(
            f"{_OP}: `out` cannot be used where a gradient is wanted; call it under torch.no_grad() or without `out`"
        )


def _shares_memory_within(tensor: Tensor) -> bool:
    """Whether two elements share a location."""
    if tensor.is_contiguous():
        return False
    dims = [(n, stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]
    may_share = any(  # the smaller strides together reach as far as some stride
        size * stride <= sum((n - 1) * smaller for n, smaller in dims if smaller <= stride)
        for size, stride in dims
    )
    if not may_share or any(stride == 0 for _, stride in dims) or not _autograd.is_plain():
        return may_share
    length = 1 + sum((n - 1) * stride for n, stride in dims)
    with _private.unrecorded():  # a tensor with values, also among fake ones
        taken = torch.zeros(length, dtype=torch.bool, device="cpu")
        taken.as_strided(tensor.shape, tensor.stride()).fill_(True)
        return int(taken.count_nonzero()) < tensor.numel()


def _write(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Calls the kernel and increments the version of ``out``, as torch does for its own operators."""
    with _private.below_counting():
        _eager_mult_out(a, b, out)
    torch.autograd.graph.increment_version(out)


def _can_write_directly(a: Tensor, b: Tensor, out: Tensor) -> bool:
    """Whether the kernel may write ``out`` while it reads ``a`` and ``b``, all of them plain memory.

    What ``torch.compile`` traces is not: the same code may run on other memory, and inductor puts several tensors into
    one place.
    """
    if not _autograd.is_plain() or a.is_neg() or b.is_neg() or out.is_neg():
        return False
    return not (_overlaps(out, a) or _overlaps(out, b))


def _overlaps(out: Tensor, input: Tensor) -> bool:
    """Whether writing ``out`` could change an element of ``input`` before it is read."""
    memory, read = out.untyped_storage(), input.untyped_storage()
    try:
        begin, begin_read = memory.data_ptr(), read.data_ptr()
    except RuntimeError:
        return True  # a subclass without memory of its own: it might
    # Two storages may hold the same memory, where they came from another library.
    if begin + memory.nbytes() <= begin_read or begin_read + read.nbytes() <= begin:
        return False
    return not (
        begin == begin_read
        and out.storage_offset() == input.storage_offset()
        and out.shape == input.shape
        and out.stride() == input.stride()
    )


_autograd.register_write("elementwise_mult_out", _write, _refuse_gradients)
