"""Declares operators of tensors, and then of numbers, that have one result: eager calls, gradients, behaviour in
transforms.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, cast

import torch
from torch import Tensor

from extops import _private
from extops.binding import _checks, _schemas
from extops.calling import _autograd, _errors, _sharding

P = ParamSpec("P")
Gradients = tuple[Tensor | None, ...]
Reference = Callable[..., Tensor]

# Every call asks.
is_plain, below_autograd = _autograd.is_plain, _autograd.below_autograd
is_grad_enabled = torch.is_grad_enabled


class Gradient(Protocol):
    """The backward of an operator, on tensors that the kernels take."""

    def save(self, ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Keeps what :meth:`backward` needs of the tensors, as ``torch.autograd.Function`` does; nothing unless
        overridden. The numbers are in ``ctx.numbers``.
        """
        return

    def backward(self, ctx: Any, grad_output: Tensor, reference: Reference) -> Gradients:
        """A gradient for each tensor; None where ``ctx.needs_input_grad`` is False.

        Only of differentiable PyTorch calls where ``_autograd.needs_composite()``.
        """


class StraightThrough(Gradient):
    """The gradient passes as it is."""

    def backward(self, ctx: Any, grad_output: Tensor, reference: Reference) -> Gradients:
        """See :class:`Gradient`."""
        return (grad_output,)


class ByKernel(Gradient):
    """An operator ``<name>_backward`` takes ``grad_output`` and all arguments, and gives all gradients."""

    def __init__(self, name: str) -> None:
        self.operator = _autograd.eager(name)

    def save(self, ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """All inputs."""
        ctx.save_for_backward(*inputs)

    def backward(self, ctx: Any, grad_output: Tensor, reference: Reference) -> Gradients:
        """See :class:`Gradient`."""
        inputs = ctx.saved_tensors
        if _autograd.needs_composite():
            given = inputs, ctx.needs_input_grad, (grad_output,)
            return _autograd.composite_gradients(lambda *x: (reference(*x),), *given)
        with below_autograd():
            gradients = self.operator(grad_output, *inputs, *ctx.numbers)
        gradients = (gradients,) if isinstance(gradients, Tensor) else gradients
        needed = zip(ctx.needs_input_grad[: len(inputs)], gradients, inputs, strict=True)
        return tuple(g.sum_to_size(x.shape) if needs else None for needs, g, x in needed)


def operator(name: str, gradient: Gradient) -> Callable[[Callable[P, Tensor]], Callable[P, Tensor]]:
    """Makes a public function of a registered operator.

    What is decorated is the reference: the operator in plain PyTorch calls, which :func:`reference_of` gives back. It
    stands in for the kernels where only a composition of differentiable calls will do.
    """

    def decorate(reference: Callable[P, Tensor]) -> Callable[P, Tensor]:
        registered = getattr(torch.ops.extops, name).default
        fast = _private.without_frames(name)
        schema = _schemas.OPERATORS[name]
        signature = inspect.signature(reference)
        save = gradient.save
        names = tuple(signature.parameters)
        tensors = len(schema.arguments)
        parameters = signature.parameters.items()
        defaults = {x: it.default for x, it in parameters if it.default is not it.empty}
        composite: Callable[..., Any] = reference

        def forward(ctx: Any, *inputs: Any) -> Tensor:
            with below_autograd():
                output: Tensor = fast(*inputs)
            ctx.numbers = inputs[tensors:]
            save(ctx, inputs[:tensors], output)
            return output

        def backward(ctx: Any, grad_output: Tensor) -> Gradients:
            def with_numbers(*inputs: Tensor) -> Any:
                return composite(*inputs, *ctx.numbers)

            return *gradient.backward(ctx, grad_output, with_numbers), *(None for _ in ctx.numbers)

        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        apply = _private.apply(type(name, (torch.autograd.Function,), methods))
        _autograd.register(name, apply, composite)
        if f"{name}_backward" in _schemas.OPERATORS:
            register_backward(f"{name}_backward", composite)

        def transformed(*inputs: Any) -> Any:
            if not _autograd.is_checked_elsewhere():
                schema.check(*inputs[:tensors])
            return registered(*inputs)

        @functools.wraps(reference)
        def call(*inputs: Any, **named: Any) -> Any:
            if named or len(inputs) < len(names):
                for x in names[len(inputs) :]:
                    if x not in named and x not in defaults:
                        break
                    inputs += (named.pop(x) if x in named else defaults[x],)
                if named:
                    signature.bind(*inputs, **named)  # raises Python's error for such a call
            try:
                if not is_plain():
                    return transformed(*inputs)
                for x in inputs[:tensors]:
                    if x.requires_grad and is_grad_enabled():
                        return apply(*inputs)
                with below_autograd():
                    return fast(*inputs)
            except _checks.FAILURES as error:
                unknown = isinstance(error, NotImplementedError)
                if unknown and _sharding.is_wanted() and _sharding.register():
                    return call(*inputs)
                signature.bind(*inputs)
                _checks.explain(schema.check, *inputs[:tensors])
                if isinstance(error, RuntimeError):
                    _errors.raise_original(error, name, *inputs)
                raise

        return call

    return decorate


def register_backward(name: str, reference: Callable[..., Tensor]) -> None:
    """Makes the operator that computes another one's gradient differentiable: compiled code calls it."""

    split = _schemas.OPERATORS[name].split

    def composite(*arguments: Any) -> Any:
        tensors, numbers = split(arguments)
        grad_output, *inputs = torch.broadcast_tensors(*tensors)

        def of_tensors(*x: Tensor) -> Any:
            return reference(*x, *numbers)

        _, pull_back = cast("Any", torch.func.vjp)(of_tensors, *inputs)
        gradients = pull_back(grad_output)
        return gradients if len(gradients) > 1 else gradients[0]

    _autograd.register(name, composite, composite)


def reference_of(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """The operator in plain PyTorch calls."""
    reference: Callable[P, Tensor] = inspect.unwrap(function)
    return reference
