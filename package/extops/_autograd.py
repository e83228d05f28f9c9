"""What the operators share in how they meet autograd."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

PRIVATE = {
    name: getattr(torch._C, name, None)
    for name in (
        "_are_functorch_transforms_active",
        "_AutoDispatchBelowAutograd",
        "_AutoDispatchBelowADInplaceOrView",
        "_DisableTorchDispatch",
        "_is_any_autocast_enabled",
    )
}
"""Names that torch does not promise to keep, for what has no public name. Where a torch lacks one, no call is plain:
all go to the dispatcher, with the gradient of :func:`_register_publicly`."""

_are_private = None not in PRIVATE.values() and hasattr(forward_ad, "_current_level")

# Looked up once: every call asks.
_is_compiling = torch.compiler.is_compiling
_are_transforms_active = PRIVATE["_are_functorch_transforms_active"] or (lambda: True)
_unrecorded = PRIVATE["_DisableTorchDispatch"] or contextlib.nullcontext

is_tracing: Callable[[], bool] = cast("Any", torch.jit).is_tracing
"""Whether ``torch.jit.trace`` records a call; sizes are tensors there."""

# Faster than the public name, by 0.1 µs, but nothing that torch.compile can trace.
_is_tracing = getattr(torch._C, "_is_tracing", is_tracing)


def is_plain() -> bool:
    """Whether a call is an ordinary eager one, with a hand-written backward at most; others go to the dispatcher."""
    return not (_is_compiling() or _are_transforms_active() or _is_tracing() or _is_forward_mode())


def _is_forward_mode() -> bool:
    return not _are_private or forward_ad._current_level >= 0


def has_tangents(tensors: Iterable[Any]) -> bool:
    """Whether forward-mode AD follows one of them; they know it in compiled code, too, where no level is entered."""
    with _unrecorded():  # or a program that is traced would hold the question
        return any(
            isinstance(x, Tensor)
            and x.layout is torch.strided  # others are refused, and not all can be asked
            and forward_ad.unpack_dual(x, level=0).tangent is not None
            for x in tensors
        )


def needs_composite() -> bool:
    """Whether only a composition of differentiable PyTorch calls gives the right gradient: where that is itself
    differentiated, in reverse or in forward mode, or transformed by ``torch.func``.
    """
    return torch.is_grad_enabled() or _are_transforms_active() or _is_forward_mode()


below_autograd: Callable[[], AbstractContextManager[None]] = (
    PRIVATE["_AutoDispatchBelowAutograd"] or contextlib.nullcontext
)
"""Calls within go straight to the kernels: the caller has seen to the gradient."""

below_counting: Callable[[], AbstractContextManager[None]] = (
    PRIVATE["_AutoDispatchBelowADInplaceOrView"] or contextlib.nullcontext
)
"""The same for an operator that writes: the caller also sees to the count of writes."""

is_autocasting: Callable[[], bool] = PRIVATE["_is_any_autocast_enabled"] or (lambda: True)
"""Whether autocast may be on for some type of device."""


# These are faster than torch.backends.cuda.matmul by 0.7 µs.
if hasattr(torch._C, "_get_fp32_precision_getter"):  # since torch 2.9

    def allows_tf32() -> bool:
        """Whether torch's switch lets products of float32 matrices on CUDA be computed in TF32."""
        return torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32"

    # What torch.compiler.assume_constant_result does, but for importing the compiler. Code compiled for one position of
    # the switch is guarded by it.
    cast("Any", allows_tf32)._dynamo_marked_constant = True
else:
    allows_tf32 = getattr(
        torch._C, "_get_cublas_allow_tf32", lambda: torch.backends.cuda.matmul.allow_tf32
    )


def without_frames(operator: torch._ops.OpOverload) -> Callable[..., Any]:
    """The operator without the Python frames that tracing and lost errors need, which cost half as much as a call."""
    return cast("Callable[..., Any]", inspect.unwrap(getattr(operator, "_op", operator)))


def eager(operator: torch._ops.OpOverload, **keywords: Any) -> Callable[..., Any]:
    """The operator for eager calls: :func:`without_frames` unless it fails."""
    call = without_frames(operator)
    if keywords:
        call = functools.partial(call, **keywords)

    def eager_call(*arguments: Any, **options: Any) -> Any:
        try:
            return call(*arguments, **options)
        except RuntimeError:
            pass
        return operator(
            *arguments, **keywords, **options
        )  # which raises what torch raised, see extops._errors

    return eager_call


_library = torch.library.Library("extops", "IMPL")


def register(name: str, apply: Callable[..., Any], composite: Callable[..., Any]) -> None:
    """Gives an operator that the dispatcher calls its gradient, by ``apply`` of an autograd Function.

    Under ``torch.func`` transforms and forward-mode AD, which a hand-written backward does not serve, the operator is
    ``composite``, a composition of differentiable PyTorch calls. The dispatcher is the place to decide this: it alone
    sees what acts on a call while ``torch.compile`` traces, or on a program that ``torch.export`` made.
    """
    if not _are_private:
        return _register_publicly(name, composite)
    operator = getattr(torch.ops.extops, name).default

    def with_gradient(*arguments: Any, **keywords: Any) -> Any:
        if has_tangents(arguments):
            return composite(*arguments, **keywords)
        if torch.is_grad_enabled() and any(
            isinstance(x, Tensor) and x.requires_grad for x in arguments
        ):
            return apply(*arguments, **keywords)
        with below_autograd():
            return operator(*arguments, **keywords)

    _library.impl(name, with_gradient, "Autograd")
    _library.impl(name, composite, "FuncTorchDynamicLayerFrontMode")


def _register_publicly(name: str, composite: Callable[..., Any]) -> None:
    """By names that torch promises to keep: slower, and without forward-mode AD, which raises an error."""
    operator = getattr(torch.ops.extops, name).default
    options = [argument for argument in operator._schema.arguments if argument.kwarg_only]

    def save_with_options(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.options = keyword_only_inputs

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        save_with_options(ctx, inputs, {}, output)

    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        def outputs(*inputs: Tensor | None) -> tuple[Tensor, ...]:
            result = composite(*inputs, **ctx.options)
            return result if isinstance(result, tuple) else (result,)

        needs = ctx.needs_input_grad[: len(ctx.saved_tensors)]
        return composite_gradients(outputs, ctx.saved_tensors, needs, grad_outputs)

    if not name.endswith("_backward"):  # which only calls of private names lead to
        keep = save_with_options if options else save
        torch.library.register_autograd(f"extops::{name}", backward, setup_context=keep)


def register_write(name: str, write: Callable[..., None], check: Callable[..., None]) -> None:
    """Has a call of an operator that writes into an argument go through ``write``, which counts it; ``check`` refuses
    arguments that want a gradient.
    """
    if not _are_private:
        return  # the only caller that counts its writes is the public function, which copies then
    operator = getattr(torch.ops.extops, name).default

    def without_gradient(*arguments: Any) -> None:
        check(*arguments)
        if has_tangents(arguments):
            raise RuntimeError(f"{name} writes no tangents; call it outside of forward-mode AD")
        with below_autograd():
            operator(*arguments)

    _library.impl(name, write, "ADInplaceOrView")
    _library.impl(name, without_gradient, "Autograd")


def apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` for plain calls (:func:`is_plain`), without what it does for ``torch.func``."""
    # The engine's way to the backward is through a method that looks for it first, in each call.
    cast("Any", function)._backward_cls.apply = function.backward
    return cast("Callable[..., Any]", cast("Any", super(torch.autograd.Function, function)).apply)


def composite_gradients(
    composite: Callable[..., Any],
    inputs: Sequence[Tensor | None],
    needs_input_grad: Sequence[bool],
    grad_outputs: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """The gradients of ``composite(*inputs)``, themselves differentiable where grad mode is on."""
    wanted = [place for place, needed in enumerate(needs_input_grad) if needed]
    of = _gradients_by_transform if _are_transforms_active() else _gradients_by_engine
    gradients = dict(zip(wanted, of(composite, inputs, wanted, grad_outputs), strict=True))
    return tuple(gradients.get(place) for place in range(len(inputs)))


def _gradients_by_engine(
    composite: Callable[..., Any],
    inputs: Sequence[Tensor | None],
    wanted: Sequence[int],
    grad_outputs: Sequence[Tensor | None],
) -> Sequence[Tensor | None]:
    with torch.enable_grad():
        # Views, since an input may depend on another one, or be the same: that is not this gradient's to follow.
        views = [x if x is None else x.view_as(x) for x in inputs]
        outputs = composite(*views)
    present = [(o, g) for o, g in zip(outputs, grad_outputs, strict=True) if g is not None]
    return torch.autograd.grad(
        [output for output, _ in present],
        [x for place in wanted if (x := views[place]) is not None],
        [gradient for _, gradient in present],
        create_graph=torch.is_grad_enabled(),
        allow_unused=True,
    )


def _gradients_by_transform(
    composite: Callable[..., Any],
    inputs: Sequence[Tensor | None],
    wanted: Sequence[int],
    grad_outputs: Sequence[Tensor | None],
) -> Sequence[Tensor | None]:
    """Within transforms of ``torch.func``, since these nest. Elsewhere they would refuse hooks of saved tensors."""

    def of_wanted(*chosen: Tensor) -> Any:
        replaced = dict(zip(wanted, chosen, strict=True))
        return composite(*(replaced.get(place, x) for place, x in enumerate(inputs)))

    vjp = cast("Any", torch.func.vjp)
    outputs, pull_back = vjp(of_wanted, *(inputs[place] for place in wanted))
    upstream = zip(grad_outputs, outputs, strict=True)
    found: Sequence[Tensor] = pull_back(
        tuple(torch.zeros_like(o) if g is None else g for g, o in upstream)
    )
    return found
