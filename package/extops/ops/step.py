"""One step of a recurrent cell with the parameters of torch's modules, on a GPU."""

from typing import Any

import torch
from torch import Tensor

from extops import _autocast, _autograd, _loader, _private, _products, _schemas, reference

_allows_tf32 = _private.allows_tf32
_library = torch.library.Library("extops", "IMPL")


class Step:
    """The operator ``<cell>_step``, as Python calls it."""

    def __init__(self, cell: str, composition: reference.Cell) -> None:
        """The step of a cell by its name, as in ``csrc/cells/cells.h``, and the same in PyTorch."""
        name = f"{cell}_step"
        self.facts = facts = _schemas.CELLS[cell]
        self.number_of_states = facts.states
        self.saves_new_c = bool(facts.saves_new_c)
        self.has_one_gradient = (
            facts.input == facts.recurrent == facts.columns and not facts.first_input
        )
        self.composition = composition
        self.eager = _autograd.eager(name)
        self.eager_in_tf32 = _autograd.eager(name, allow_tf32=True)
        self.eager_backward = _autograd.eager(f"{name}_backward")
        self._register(name)

    def _register(self, name: str) -> None:
        self.composite = reference.in_float32(self._composite)
        backward = reference.in_float32(self._composite_backward)
        for operator, composite in ((name, self.composite), (f"{name}_backward", backward)):
            _autograd.register(operator, composite, composite)
            # No kernel serves a step there: torch's own cells are faster.
            for device in ("CPU",) if _loader.binding == "stable" else ("CPU", "CUDA"):
                _library.impl(operator, composite, device)

    def _composite(
        self, input: Tensor, *others: Any, allow_tf32: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        *parameters, h, c = others
        columns = self.composition.gates(input, *parameters, h)
        h, c = self.composition.forward(columns, c)
        return h, c.clone() if c is h else c, columns  # the results of an operator may not share memory

    def _composite_backward(
        self, grad_h: Tensor | None, grad_c: Tensor | None, columns: Tensor, saved_c: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        zeros = torch.zeros_like(saved_c)
        towards = (zeros if x is None else x for x in (grad_h, grad_c))
        gradients, grad_c_0 = self.composition.backward(*towards, columns, saved_c)
        state_size = saved_c.shape[1]
        of_input = self.facts.input * state_size
        of_h = 0 if self.has_one_gradient else self.facts.recurrent * state_size
        grad_x = gradients.narrow(1, 0, of_input).roll((-self.facts.first_input * state_size,), (1,))
        return grad_x, gradients.narrow(1, gradients.shape[1] - of_h, of_h).clone(), grad_c_0

    def serves(self, input: Tensor, has_one_state: bool) -> bool:
        """Whether a plain call is to come here."""
        has_all = has_one_state == (self.number_of_states == 1)
        return has_all and input.is_cuda and _loader.binding == "stable"

    def __call__(self, *arguments: Any) -> tuple[Tensor, ...]:
        """``h`` and, for a cell with two states, ``c``: of the input, both weights, both biases and the states."""
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arguments):
            return _apply(self, _allows_tf32(), *arguments)
        with _autograd.below_autograd():
            return self.run(_allows_tf32(), arguments)[: self.number_of_states]

    def run(self, allow_tf32: bool, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """The operator: for a cell with one state, ``h_0`` is ``c_0``, too."""
        operator = self.eager_in_tf32 if allow_tf32 else self.eager
        if self.number_of_states == 1:
            return operator(*arguments, arguments[-1])
        return operator(*arguments)


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: Step, allow_tf32: bool, *inputs: Tensor) -> tuple[Tensor, ...]:
        with _autograd.below_autograd():
            h, c, columns = step.run(allow_tf32, inputs)
        ctx.step = step
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, columns, *([c] if step.saves_new_c else []))
        return (h, c)[: step.number_of_states]

    @staticmethod
    def backward(ctx: Any, *towards: Tensor | None) -> tuple[Tensor | None, ...]:
        step = ctx.step
        needs = ctx.needs_input_grad[2:]
        inputs = ctx.saved_tensors[: len(needs)]
        if _autograd.needs_composite():

            def composite(*inputs: Tensor) -> tuple[Tensor, ...]:
                repeated = inputs if step.number_of_states == 2 else (*inputs, inputs[-1])
                return step.composite(*repeated)[: step.number_of_states]

            found = _autograd.composite_gradients(composite, inputs, needs, towards)
        elif all(gradient is None for gradient in towards):
            found = (None,) * len(needs)
        else:
            columns = ctx.saved_tensors[len(needs)]
            saved_c = ctx.saved_tensors[-1] if step.saves_new_c else inputs[-1]
            with _autograd.below_autograd():
                found = _gradients(step, inputs, columns, saved_c, towards, needs)
        return None, None, *found


@_autocast.outside
def _gradients(
    step: Step,
    inputs: tuple[Tensor, ...],
    columns: Tensor,
    saved_c: Tensor,
    towards: tuple[Tensor | None, ...],
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """The gradients of the input, the parameters and the states that are needed."""
    input, weight_ih, weight_hh, _, _, h_0, *_ = inputs
    grad_h, grad_c = towards if step.number_of_states == 2 else (*towards, None)
    grad_x, of_h, grad_c_0 = step.eager_backward(grad_h, grad_c, columns, saved_c)
    if step.has_one_gradient:
        of_h = grad_x
    biases = needs[3:5]
    of_bias_ih = grad_x.sum(0) if any(biases) and (biases[0] or step.has_one_gradient) else None
    of_bias_hh = None
    if biases[1]:
        # Two tensors: who gets them may change one in place.
        repeated = step.has_one_gradient and of_bias_ih is not None
        of_bias_hh = of_bias_ih.clone() if repeated else of_h.sum(0)
    states: tuple[Tensor | None, ...] = (None, grad_c_0)
    if needs[5]:
        if step.number_of_states == 2:
            states = torch.mm(of_h, weight_hh), grad_c_0
        else:
            states = (torch.addmm(grad_c_0, of_h, weight_hh),)
    return (
        _products.mm(grad_x, weight_ih) if needs[0] else None,
        torch.mm(grad_x.t(), input) if needs[1] else None,
        torch.mm(of_h.t(), h_0) if needs[2] else None,
        of_bias_ih if biases[0] else None,
        of_bias_hh,
        *states[: step.number_of_states],
    )


_apply = _private.apply(_Step)
