"""What the operators share in how they meet autograd."""

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

# Looked up once: every call asks.
_is_compiling = torch.compiler.is_compiling
_are_transforms_active = torch._C._are_functorch_transforms_active


def needs_composite() -> bool:
    """Whether only a composition of differentiable PyTorch calls gives the right answer here.

    True under ``torch.func`` transforms and forward-mode AD, which a hand-written backward does not serve. While
    ``torch.compile`` or ``torch.export`` traces, the operators carry registered gradients instead.
    """
    return not torch.compiler.is_compiling() and not is_plain()


def is_plain() -> bool:
    """Whether a call is an ordinary eager one, with a hand-written backward at most."""
    return not (_is_compiling() or _are_transforms_active() or forward_ad._current_level >= 0)


below_autograd: Callable[[], AbstractContextManager[None]] = torch._C._AutoDispatchBelowAutograd
"""Calls within go straight to the kernels: the caller has seen to the gradient."""

is_autocasting: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether autocast is on for any type of device."""


if hasattr(torch._C, "_get_fp32_precision_getter"):  # since torch 2.9

    def allows_tf32() -> bool:
        """Whether torch's switch lets products of float32 matrices on CUDA be computed in TF32."""
        return torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32"

    # What torch.compiler.assume_constant_result does, but for importing the compiler. Code compiled for one position of
    # the switch is guarded by it.
    cast("Any", allows_tf32)._dynamo_marked_constant = True
else:
    allows_tf32 = torch._C._get_cublas_allow_tf32


def eager(operator: torch._ops.OpOverload, **keywords: Any) -> Callable[..., Any]:
    """The operator for eager calls, without the Python frames that tracing and lost errors need."""
    call = inspect.unwrap(operator._op)
    if keywords:
        call = functools.partial(call, **keywords)

    def eager_call(*arguments: Any) -> Any:
        try:
            return call(*arguments)
        except RuntimeError:
            pass
        return operator(
            *arguments, **keywords
        )  # which raises what torch raised, see extops._errors

    return eager_call


_library = torch.library.Library("extops", "IMPL")


def has_no_gradient(name: str) -> None:
    """Has autograd pass over an operator, so that calls need no :data:`below_autograd`."""
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")


def apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` for plain calls (:func:`is_plain`), without what it does for ``torch.func``."""
    # The engine's way to the backward is through a method that looks for it first, in each call.
    cast("Any", function)._backward_cls.apply = function.backward
    return cast("Callable[..., Any]", cast("Any", super(torch.autograd.Function, function)).apply)


def is_alias_of(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share a storage."""
    return bool(cast("Any", torch._C)._is_alias_of(a, b))


def composite_gradients(
    composite: Callable[..., Any],
    inputs: Sequence[Tensor],
    needs_input_grad: Sequence[bool],
    grad_outputs: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """The gradients of ``composite(*inputs)``, themselves differentiable where grad mode is on."""
    with torch.enable_grad():
        # Views, since an input may depend on another one, or be the same: that is not this gradient's to follow.
        inputs = [x.view_as(x) for x in inputs]
        outputs = composite(*inputs)
    present = [(o, g) for o, g in zip(outputs, grad_outputs, strict=True) if g is not None]
    wanted = [x for x, needed in zip(inputs, needs_input_grad, strict=True) if needed]
    gradients = iter(
        torch.autograd.grad(
            [output for output, _ in present],
            wanted,
            [gradient for _, gradient in present],
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
    )
    return tuple(next(gradients) if needed else None for needed in needs_input_grad)
