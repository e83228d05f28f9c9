"""One step of a recurrent cell."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from extops import _private
from extops.binding import _loader, _schemas
from extops.calling import _autocast, _autograd
from extops.ops import compositions


def _by_tf32(name: str) -> tuple[Callable[..., tuple[Tensor, ...]], ...]:
    """The operator, without TF32 and with it."""
    return _autograd.eager(name), _autograd.eager(name, allow_tf32=True)


class Step:
    """The operator ``<cell>_step``, as Python calls it."""

    def __init__(self, cell: str, composition: compositions.Cell) -> None:
        """The step of a cell by its name, as in ``csrc/cells/cells.h``, and the same in PyTorch."""
        self.name = name = f"{cell}_step"
        self.facts = facts = _schemas.CELLS[cell]
        self.number_of_states = facts.states
        self.weights = 2
        """And as many biases: two, or one where both are joined."""
        if facts.cell_states > 1:
            return  # there is no such operator: see `serves`
        self.weights = (len(_schemas.OPERATORS[name].arguments) - 3) // 2
        self.saves_new_c = bool(facts.saves_new_c)
        self.composition = composition
        self.operator = getattr(torch.ops.extops, name).default
        self.eager = _by_tf32(name)
        self.eager_backward = _autograd.eager(f"{name}_backward")
        self.eager_parameters_backward = _by_tf32(f"{name}_parameters_backward")
        self.eager_input_backward = _by_tf32(f"{name}_input_backward")
        self.composite: Callable[..., tuple[Tensor, ...]] = compositions.in_float32(self._composite)

        def apply(*inputs: Tensor | None, allow_tf32: bool = False) -> Any:
            return _apply(self, allow_tf32, True, *inputs)

        _autograd.register(name, apply, self.composite)
        for of in ("backward", "parameters_backward", "input_backward"):
            composite: Callable[..., Any] = compositions.in_float32(getattr(self, f"_{of}"))
            _autograd.register(f"{name}_{of}", composite, composite)

    def _composite(
        self,
        input: Tensor,
        *others: Any,
        allow_tf32: bool = False,
        known_gates: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        *parameters, h, c = others
        gates = self.composition.gates(input, *parameters, h)
        gates = compositions.with_values(gates, known_gates)
        h, c = self.composition.forward(gates, c)
        # The results of an operator may not share memory.
        return h, c.clone() if c is h else c, gates

    def _backward(
        self, grad_h: Tensor | None, grad_c: Tensor | None, gates: Tensor, saved_c: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        zeros = torch.zeros_like(saved_c)
        grad_h, grad_c = (zeros if x is None else x for x in (grad_h, grad_c))
        gradients, grad_c_0 = self.composition.backward(grad_h, grad_c, gates, saved_c)
        state_size = saved_c.shape[1]
        of_input = self.facts.input * state_size
        of_h = 0 if self.facts.has_one_gradient else self.facts.recurrent * state_size
        shift = -self.facts.first_input * state_size
        grad_x = gradients.narrow(1, 0, of_input).roll((shift,), (1,))
        return grad_x, gradients.narrow(1, gradients.shape[1] - of_h, of_h).clone(), grad_c_0

    def _parameters_backward(self, *arguments: Any, allow_tf32: bool = False) -> tuple[Tensor, ...]:
        grad_h, grad_c, input, h_0, gates, saved_c = arguments
        pointwise = grad_x, grad_h_part, _ = self._backward(grad_h, grad_c, gates, saved_c)
        of_h = grad_x if self.facts.has_one_gradient else grad_h_part
        of_input, of_state = grad_x.t() @ input, of_h.t() @ h_0
        if self.weights == 1:
            return *pointwise, torch.cat([of_state, of_input], dim=1), grad_x.sum(0)
        return *pointwise, of_input, of_state, grad_x.sum(0), of_h.sum(0)

    def _input_backward(self, *arguments: Any, allow_tf32: bool = False) -> tuple[Tensor, ...]:
        grad_x, grad_h_part, grad_c_0, *weights = arguments
        weight_ih, weight_hh = weights[0], weights[-1]
        if self.weights == 1:
            state_size = len(weight_ih) // self.facts.gates
            weight_hh, weight_ih = weight_ih[:, :state_size], weight_ih[:, state_size:]
        grad_h_0 = (grad_x if self.facts.has_one_gradient else grad_h_part) @ weight_hh
        return grad_x @ weight_ih, grad_h_0 if grad_c_0 is None else grad_h_0 + grad_c_0

    def serves(self, input: Tensor, has_one_state: bool) -> bool:
        """Whether a plain call should use this operator. Both states of a cell with two may be the same tensor. Torch's
        own cells are faster on a CPU, and none has joined weights.
        """
        if self.weights == 1:
            return True
        has_all = has_one_state or self.number_of_states == 2
        return has_all and input.is_cuda and _loader.binding == "stable"

    def __call__(self, *arguments: Any, allow_tf32: bool | None = None) -> tuple[Tensor, ...]:
        """``h`` and, for a cell with two states, ``c``: of the input, the weights, the biases and the states. Unless
        said otherwise, torch's switch of GEMMs allows TF32.
        """
        if allow_tf32 is None:
            allow_tf32 = arguments[0].is_cuda and _private.allows_tf32()
        if torch.is_grad_enabled():
            for x in arguments:  # as any(), in half the time
                if x is not None and x.requires_grad:
                    return _apply(self, allow_tf32, False, *arguments)
        with _autograd.below_autograd():
            return self.run(allow_tf32, arguments)[: self.number_of_states]

    def run(self, allow_tf32: bool, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """The operator: for a cell with one state, ``h_0`` is ``c_0``, too."""
        if self.number_of_states == 1:
            arguments = (*arguments, arguments[-1])
        return self.eager[allow_tf32](*arguments)


class _Step(torch.autograd.Function):
    """A plain call, or with ``is_operator`` one of the operator, which takes two states and also returns the gates."""

    @staticmethod
    def forward(
        ctx: Any, step: Step, allow_tf32: bool, is_operator: bool, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        with _autograd.below_autograd():
            found = step.eager[allow_tf32](*inputs) if is_operator else step.run(allow_tf32, inputs)
        h, c, gates = found
        ctx.step, ctx.allow_tf32 = step, allow_tf32
        ctx.set_materialize_grads(False)
        # The biases' values are not needed, and may change.
        first, last = 1 + step.weights, 1 + 2 * step.weights
        ctx.biases = inputs[first:last]
        ctx.versions = _autograd.versions(ctx.biases)
        others, needs = (*inputs[:first], *inputs[last:]), ctx.needs_input_grad[3:]
        by_weights, of_x, of_h = any(needs[1:last]), needs[0], needs[last]
        by_input = (of_x, of_h) if step.weights == 2 else (of_x or of_h,)
        # Cells that do not save the new cell state need the old one, which may be the hidden state.
        has_c, needs_c = len(inputs) > last + 1, not step.saves_new_c
        of_states = by_weights or (needs_c and not has_c), *(needs_c,) * has_c
        ctx.kept, needed = _autograd.Kept.of(others, [by_weights, *by_input, *of_states])
        kept = (c,) if step.saves_new_c else ()
        ctx.save_for_backward(*needed, gates, *kept)
        return (h, c, gates) if is_operator else (h, c)[: step.number_of_states]

    @staticmethod
    def backward(ctx: Any, *towards: Tensor | None) -> tuple[Tensor | None, ...]:
        step: Step = ctx.step
        needs = ctx.needs_input_grad[3:]
        last = -2 if step.saves_new_c else -1
        found = ctx.saved_tensors
        saved = *ctx.kept.all(found[:last]), *found[last:]
        first = 1 + step.weights
        inputs = (*saved[:first], *ctx.biases, *saved[first:last])
        gates = saved[last]
        if _autograd.needs_composite() or (len(towards) == 3 and towards[2] is not None):
            ctx.kept.check()
            is_same = _autograd.versions(ctx.biases) == ctx.versions
            known_gates = None if is_same else gates

            def composite(*inputs: Tensor) -> tuple[Tensor, ...]:
                has_all = len(inputs) == len(ctx.biases) + first + 2
                given = inputs if has_all else (*inputs, inputs[-1])
                return step.composite(*given, known_gates=known_gates)[: len(towards)]

            found = _autograd.composite_gradients(composite, inputs, needs, towards)
        elif all(gradient is None for gradient in towards):
            found = (None,) * len(needs)
        else:
            saved_c = saved[-1] if step.saves_new_c else inputs[-1]
            with _autograd.below_autograd():
                found = _gradients(step, inputs, gates, saved_c, towards, needs, ctx.allow_tf32)
        return None, None, None, *found


@_autocast.outside
def _gradients(
    step: Step,
    inputs: tuple[Tensor, ...],
    gates: Tensor,
    saved_c: Tensor,
    towards: tuple[Tensor | None, ...],
    needs: tuple[bool, ...],
    in_tf32: bool,
) -> tuple[Tensor | None, ...]:
    """The gradients of the input, the parameters and the states that are needed."""
    first, last = 1 + step.weights, 1 + 2 * step.weights  # the places of a bias and of h_0
    input, h_0 = inputs[0], inputs[last]
    has_one_state = len(inputs) == last + 1
    grad_h, grad_c = (*towards, None)[:2]
    of_parameters: Sequence[Tensor | None] = (None,) * (last - 1)
    wanted = needs[1:last]
    if any(wanted):
        backward = step.eager_parameters_backward[in_tf32]
        grad_x, grad_h_part, grad_c_0, *of_parameters = backward(
            grad_h, grad_c, input, h_0, gates, saved_c
        )
        if not all(wanted):
            pairs = zip(of_parameters, wanted, strict=True)
            of_parameters = [x if needed else None for x, needed in pairs]
    else:
        grad_x, grad_h_part, grad_c_0 = step.eager_backward(grad_h, grad_c, gates, saved_c)
    grad_input = grad_h_0 = None
    if needs[0] or needs[last]:
        of_c = grad_c_0 if has_one_state else None
        backward = step.eager_input_backward[in_tf32]
        grad_input, grad_h_0 = backward(grad_x, grad_h_part, of_c, *inputs[1:first])
    states = (grad_h_0,) if has_one_state else (grad_h_0, grad_c_0)
    return grad_input, *of_parameters, *states


_apply: Callable[..., tuple[Tensor, ...]] = _private.apply(_Step)
