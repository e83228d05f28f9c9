"""What the operators share in their gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from extops import _private
from extops.binding import _schemas
from extops.calling import _autocast, _errors

# Looked up once: every call asks.
_is_compiling = torch.compiler.is_compiling
_are_transforms_active = _private.are_transforms_active
_is_tracing = _private.is_tracing
_is_forward_mode = _private.is_forward_mode
below_autograd = _private.below_autograd

Tensors = Sequence[Tensor | None]

TENSORS = Tensor, torch.nn.Parameter
"""The types of what the kernels take as it is: others may compute in ways of their own."""

is_tracing: Callable[[], bool] = cast("Any", torch.jit).is_tracing
"""Whether ``torch.jit.trace`` records a call; sizes are tensors there."""


def is_checked_elsewhere() -> bool:
    """Whether operators find wrong arguments themselves: within a trace by ``torch.jit`` sizes are tensors, which the
    kernels check, and Dynamo takes 0.1 s to trace a check that what stands for an operator in its graph makes anyway.
    """
    return torch.compiler.is_dynamo_compiling() or _is_tracing()


def is_plain() -> bool:
    """Whether a call is an ordinary eager one, with the hand-written backward at most; others go to the dispatcher."""
    return not (_is_compiling() or _are_transforms_active() or _is_tracing() or _is_forward_mode())


def is_compiled_plainly() -> bool:
    """Whether a graph of ``torch.compile`` is traced, and by no transform within.

    Not where Dynamo traces this very code, since it could not ask.
    """
    if torch.compiler.is_dynamo_compiling():
        return False
    return _private.is_compiled_here() and not _are_transforms_active()


def has_tangents(tensors: Iterable[Any]) -> bool:
    """Whether a tensor has a tangent of forward-mode AD. Compiled code enters no level, so the tensors themselves are
    checked.
    """
    with _private.unrecorded():  # else a traced program would record the question
        # Other layouts are refused later, and some cannot be asked.
        return any(
            isinstance(x, Tensor)
            and x.layout is torch.strided
            and forward_ad.unpack_dual(x, level=0).tangent is not None
            for x in tensors
        )


def needs_composite() -> bool:
    """Whether only a composition of differentiable PyTorch calls gives the right gradient: where that is itself
    differentiated, in reverse or in forward mode, or transformed by ``torch.func``.
    """
    return torch.is_grad_enabled() or _are_transforms_active() or _is_forward_mode()


def versions(tensors: Iterable[Tensor | None]) -> list[int | None]:
    """How often each tensor was changed in place. For tensors that a backward needs without their values; tensors that
    it saves must not change.
    """
    found = []
    for x in tensors:  # every call asks, and a comprehension is one call more
        found.append(None if x is None or x.is_inference() else x._version)
    return found


class Kept(NamedTuple):
    """Inputs of a forward, of which a backward needs some alone: others may change before it, as in torch."""

    others: list[Tensor | None]
    """The inputs, None in place of those that are needed."""
    versions: list[int | None]

    @classmethod
    def of(cls, inputs: Tensors, are_needed: Sequence[bool]) -> tuple[Kept, Tensors]:
        """And those that are to be saved."""
        needed, others = [], []
        for x, is_needed in zip(inputs, are_needed, strict=True):
            is_kept = x is None or is_needed
            others.append(None if is_kept else x)
            if is_kept:
                needed.append(x)
        return cls(others, versions(others)), needed

    def all(self, needed: Sequence[Any]) -> list[Any]:
        """All inputs, from those that were saved."""
        saved = iter(needed)
        return [next(saved) if x is None else x for x in self.others]

    def check(self) -> None:
        """For a composition, which needs all of them."""
        if versions(self.others) != self.versions:
            raise RuntimeError(
                "one of the variables needed for gradients of higher order has been modified by an inplace operation"
            )


def eager(name: str, *, is_traced: bool = True, **keywords: Any) -> Callable[..., Any]:
    """The operator ``name`` for eager calls; where ``is_traced`` and ``torch.compile`` traces, the plain one."""
    call = _private.without_frames(name)
    if keywords:
        call = functools.partial(call, **keywords)

    def eager_call(*arguments: Any, **options: Any) -> Any:
        try:
            if is_traced and type(arguments[0]) not in TENSORS:
                first = next(x for x in arguments if x is not None)
                if type(first) not in TENSORS and _private.is_compiled_here():
                    plain = getattr(torch.ops.extops_plain, name).default
                    return plain(*arguments, **keywords, **options)
            return call(*arguments, **options)
        except RuntimeError as error:
            _errors.raise_original(error, name, *arguments)
            raise

    return eager_call


_library = torch.library.Library("extops", "IMPL")
_plain = torch.library.Library("extops_plain", "DEF")
"""The same operators for compiled code, which has dealt with gradients: those of ``extops`` ask each tensor for a
tangent, which takes the host 20 us a call.
"""


def register(name: str, apply: Callable[..., Any], composite: Callable[..., Any]) -> None:
    """Gives an operator that the dispatcher calls its gradient, by ``apply`` of an autograd Function.

    Under ``torch.func`` transforms and forward-mode AD, which a hand-written backward does not serve, the operator is
    ``composite``, a composition of differentiable PyTorch calls. The dispatcher is the place to decide this: it alone
    sees what acts on a call while ``torch.compile`` traces, or on a program that ``torch.export`` made.
    """
    composite = _autocast.outside(composite)
    if not _private.may_bypass_autograd:
        return _register_publicly(name, composite)
    operator = eager(name)

    @_autocast.outside
    def with_gradient(*arguments: Any, **keywords: Any) -> Any:
        if has_tangents(arguments):
            return composite(*arguments, **keywords)
        if torch.is_grad_enabled() and any(
            isinstance(x, Tensor) and x.requires_grad for x in arguments
        ):
            return apply(*arguments, **keywords)
        with below_autograd():
            return operator(*arguments, **keywords)

    @_autocast.outside
    def plain(*arguments: Any, **keywords: Any) -> Any:
        if _is_forward_mode() or torch.is_grad_enabled():
            return with_gradient(*arguments, **keywords)
        with below_autograd():
            return operator(*arguments, **keywords)

    _library.impl(name, with_gradient, "Autograd")
    _library.impl(name, composite, "FuncTorchDynamicLayerFrontMode")
    _plain.define(_schemas.OPERATORS[name].schema)
    _plain.impl(name, plain, "Autograd")
    _plain.impl(name, eager(name, is_traced=False), "CompositeExplicitAutograd")
    _schemas.register_fakes([_schemas.OPERATORS[name]], "extops_plain")


def _register_publicly(name: str, composite: Callable[..., Any]) -> None:
    """By names that torch promises to keep: slower, and without forward-mode AD, which raises an error."""

    def save(ctx: Any, inputs: Any, output: Any, keyword_only_inputs: Any = None) -> None:
        ctx.numbers = [x for x in inputs if isinstance(x, (int, float))]  # they come last
        ctx.save_for_backward(*inputs[: len(inputs) - len(ctx.numbers)])
        ctx.options = keyword_only_inputs or {}

    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        def outputs(*inputs: Any) -> tuple[Tensor, ...]:
            result = composite(*inputs, **ctx.options)
            return result if isinstance(result, tuple) else (result,)

        inputs = (*ctx.saved_tensors, *ctx.numbers)
        return composite_gradients(outputs, inputs, ctx.needs_input_grad, grad_outputs)

    if not name.endswith("_backward"):  # called only where the private names are in use
        torch.library.register_autograd(f"extops::{name}", backward, setup_context=save)


def register_write(name: str, write: Callable[..., None], check: Callable[..., None]) -> None:
    """Makes calls of an operator that writes into an argument go through ``write``, which increments its version;
    ``check`` refuses arguments that require a gradient.
    """
    if not _private.may_bypass_autograd:
        return  # the public function then writes by ``copy_``, which increments the version
    operator = eager(name, is_traced=False)

    def without_gradient(*arguments: Any) -> None:
        check(*arguments)
        if has_tangents(arguments):
            raise RuntimeError(f"{name} writes no tangents; call it outside of forward-mode AD")
        with below_autograd():
            operator(*arguments)

    _library.impl(name, write, "ADInplaceOrView")
    _library.impl(name, without_gradient, "Autograd")


@_autocast.outside
def composite_gradients(
    composite: Callable[..., Any],
    inputs: Sequence[Any],
    needs_input_grad: Sequence[bool],
    grad_outputs: Tensors,
) -> tuple[Tensor | None, ...]:
    """The gradients of ``composite(*inputs)``, themselves differentiable where grad mode is on; None of numbers."""
    wanted = [place for place, needed in enumerate(needs_input_grad) if needed]
    of = _gradients_by_transform if _are_transforms_active() else _gradients_by_engine
    gradients = dict(zip(wanted, of(composite, inputs, wanted, grad_outputs), strict=True))
    return tuple(gradients.get(place) for place in range(len(inputs)))


def _gradients_by_engine(
    composite: Callable[..., Any], inputs: Sequence[Any], wanted: Sequence[int], towards: Tensors
) -> Tensors:
    with torch.enable_grad():
        # Views: an input may depend on another one or be the same tensor, and these gradients must not follow that.
        views = [x.view_as(x) if isinstance(x, Tensor) else x for x in inputs]
        outputs = composite(*views)
    # Of a sequence without steps, a result may depend on none of the inputs that require a gradient.
    pairs = zip(outputs, towards, strict=True)
    present = [(o, g) for o, g in pairs if g is not None and o.requires_grad]
    return torch.autograd.grad(
        [output for output, _ in present],
        [views[place] for place in wanted],
        [gradient for _, gradient in present],
        create_graph=torch.is_grad_enabled(),
        materialize_grads=True,  # zeros, as the kernels give
    )


def _gradients_by_transform(
    composite: Callable[..., Any], inputs: Sequence[Any], wanted: Sequence[int], towards: Tensors
) -> Tensors:
    """For use within transforms of ``torch.func``, which nest. Elsewhere they would refuse hooks on saved tensors."""

    def of_wanted(*chosen: Tensor) -> Any:
        replaced = dict(zip(wanted, chosen, strict=True))
        return composite(*(replaced.get(place, x) for place, x in enumerate(inputs)))

    vjp = cast("Any", torch.func.vjp)
    outputs, pull_back = vjp(of_wanted, *(inputs[place] for place in wanted))
    pairs = zip(towards, outputs, strict=True)
    found: Tensors = pull_back(tuple(torch.zeros_like(o) if g is None else g for g, o in pairs))
    return found
