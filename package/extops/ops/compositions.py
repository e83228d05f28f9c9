"""The recurrent cells in plain PyTorch calls: the reference for the kernels, and their replacement where a composition
of differentiable calls is needed (double backward, forward-mode AD, ``torch.func``).

Nothing here checks its input.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from extops import _private
from extops.binding import _schemas

P = ParamSpec("P")
Pair = tuple[Tensor, Tensor]
"""``h`` and ``c``, or the gradients of the gates and of ``c``."""


def lltm_gates(input: Tensor, weights: Tensor, bias: Tensor, old_h: Tensor) -> Tensor:
    """The pre-activations of :func:`lltm`, [old_h | input] weights^T + bias, [B, 3S]."""
    return F.linear(torch.cat([old_h, input], dim=1), weights, bias)


def with_values(gates: Tensor, known: Tensor | None) -> Tensor:
    """``gates`` with the values that are known, if so: a bias may have been changed since they were computed. They are
    exact: adding a difference to values that are large now would lose digits.
    """
    return gates if known is None else known.detach() + (gates - gates.detach())


def lltm_cell(gates: Tensor, old_cell: Tensor) -> Pair:
    """The pointwise part of :func:`lltm`, from its gates before their activations."""
    input_gate, output_gate, candidate = gates.chunk(3, dim=1)
    new_cell = old_cell + F.elu(candidate) * torch.sigmoid(input_gate)
    return torch.tanh(new_cell) * torch.sigmoid(output_gate), new_cell


def lltm(input: Tensor, weights: Tensor, bias: Tensor, old_h: Tensor, old_cell: Tensor) -> Pair:
    """See :func:`extops.lltm`."""
    return lltm_cell(lltm_gates(input, weights, bias, old_h), old_cell)


def valid_steps(lengths: Tensor, time: int) -> Tensor:
    """``[T, B]``: whether a step is valid, that is, within its row's length."""
    return torch.arange(time, device=lengths.device).unsqueeze(1) < lengths


_AS_IT_IS = contextlib.nullcontext()


def in_float32(function: Callable[P, tuple[Tensor, ...]]) -> Callable[P, tuple[Tensor, ...]]:
    """Computes with 16-bit types in float32, as the kernels do: over a sequence the cell state is a running sum."""

    @functools.wraps(function)
    def wide(*arguments: P.args, **options: P.kwargs) -> tuple[Tensor, ...]:
        tensors: Any = arguments
        first = next(x for x in tensors if x is not None)
        if first.dtype.itemsize > 2:
            return function(*arguments, **options)
        is_autocasting = _private.is_autocasting()
        with torch.autocast(first.device.type, enabled=False) if is_autocasting else _AS_IT_IS:
            wider = (x if x is None or x.dtype is not first.dtype else x.float() for x in tensors)
            return tuple(x.to(first.dtype) for x in function(*wider, **options))

    return wide


def lstm_cell(gates: Tensor, old_c: Tensor) -> Pair:
    """The pointwise part of an LSTM, from its gates before their activations, in torch's order."""
    i, f, g, o = gates.chunk(4, dim=1)
    new_c = torch.sigmoid(f) * old_c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(new_c), new_c


def gru_cell(gates: Tensor, old_c: Tensor) -> Pair:
    """The pointwise part of a GRU, from the input's part of the candidate, the gates r and z before their activations,
    and the recurrent part of the candidate. The hidden state is the cell state.
    """
    n_x, r, z, n_h = gates.chunk(4, dim=1)
    n = torch.tanh(n_x + torch.sigmoid(r) * n_h)
    new_c = n + torch.sigmoid(z) * (old_c - n)
    return new_c, new_c


def rnn_tanh_cell(gates: Tensor, old_c: Tensor) -> Pair:
    """The pointwise part of a plain recurrent cell. The hidden state is the cell state."""
    h = torch.tanh(gates)
    return h, h


def rnn_relu_cell(gates: Tensor, old_c: Tensor) -> Pair:
    """The same with a rectifier."""
    h = torch.relu(gates)
    return h, h


def gates_of_parts(
    input: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    old_h: Tensor,
    *,
    count: int,
    first_input: int,
) -> Tensor:
    """The pre-activations, ``count`` of them for each unit: the first have an input part, the last a recurrent part.
    The weights of the input begin with those of gate ``first_input``, and wrap around.
    """
    state_size = old_h.shape[1]
    of_input, of_h = F.linear(input, weight_ih, bias_ih), F.linear(old_h, weight_hh, bias_hh)
    if first_input:
        # Tuples: a trace treats a number that it computes as a constant.
        of_input = of_input.roll((first_input * state_size,), (1,))
    after, before = (count * state_size - x.shape[1] for x in (of_input, of_h))
    return F.pad(of_input, (0, after)) + F.pad(of_h, (before, 0))


@dataclasses.dataclass(frozen=True)
class Cell:
    """A recurrent cell over sequences, as a composition of differentiable calls."""

    gates: Callable[..., Tensor]
    """Of the input, the parameters and the hidden state."""
    forward: Callable[[Tensor, Tensor], Pair]
    saves_new_c: bool
    """Whether :meth:`backward` gets the cell state after the step, or the one before."""
    cell_states: int = 1
    """How many numbers of a unit the cell state is: the first of all units, then the second."""

    def backward(self, grad_h: Tensor, grad_c: Tensor, gates: Tensor, saved_c: Tensor) -> Pair:
        """The gradients of ``forward`` for its gates and its old cell state."""
        vjp = cast("Any", torch.func).vjp
        old_c = saved_c
        if self.saves_new_c:
            # This is linear in the state before, with a factor that depends on the gates alone (``to_old_c`` in
            # csrc/cells/cell.h).
            offset, slope = vjp(lambda c: self.forward(gates, c)[1], torch.zeros_like(saved_c))
            (factor,) = slope(torch.ones_like(saved_c))
            old_c = (saved_c - offset) / torch.where(factor == 0, 1, factor)
        _, pull_back = vjp(self.forward, gates, old_c)
        of_gates, of_c = pull_back((grad_h, grad_c))
        # In the graph of grad_c, also where a cell does without its old state: a result of an operator has a gradient.
        return of_gates, of_c + grad_c.masked_fill(grad_c.new_ones((), dtype=torch.bool), 0)

    def sequence(
        self,
        input: Tensor,
        *arguments: Any,
        reverse: bool = False,
        known_gates: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """The operator for an input ``[T, B, I]``, the parameters, both states and lengths: the output, the last hidden
        and cell state, and the gates and the cell state of every step.
        """
        *parameters, h_0, c_0, lengths = arguments
        h, c = h_0.clone(), c_0.clone()
        if len(input) == 0:
            gates = self.gates(input.flatten(0, 1), *parameters, h[:0])
            gates = gates.reshape(0, len(h), gates.shape[1])
            output = gates.narrow(2, 0, h.shape[1])
            return output, h, c, gates, torch.cat([output] * self.cell_states, dim=2)
        if lengths is not None:
            valid = valid_steps(lengths, len(input)).unsqueeze(2)
            # The gradient of the weights is a GEMM with the whole input, and zero times infinity or NaN is NaN.
            input = torch.where(valid, input, 0)
            known_gates = known_gates if known_gates is None else torch.where(valid, known_gates, 0)
        steps = []
        for t in _order(len(input), reverse):
            old_h, old_c = h, c
            if lengths is not None:
                # Beyond its length a row is computed from zeros: its gates are the bias, and nothing overflows.
                h, c = torch.where(valid[t], h, 0), torch.where(valid[t], c, 0)
            gates = self.gates(input[t], *parameters, h)
            gates = with_values(gates, None if known_gates is None else known_gates[t])
            h, new_c = self.forward(gates, c)
            steps.append((h, gates, new_c if self.saves_new_c else c))
            c = new_c
            if lengths is not None:
                h, c = torch.where(valid[t], h, old_h), torch.where(valid[t], c, old_c)
        stacked = _stack(steps, reverse)
        if lengths is not None:
            stacked = [torch.where(valid, x, 0) for x in stacked]
        output, gates, cells = stacked
        return output, h, c, gates, cells

    def sequence_backward(
        self,
        grad_output: Tensor | None,
        grad_h_n: Tensor | None,
        grad_c_n: Tensor | None,
        weights: Tensor,
        gates: Tensor,
        cells: Tensor,
        lengths: Tensor | None = None,
        *,
        reverse: bool = False,
    ) -> tuple[Tensor, ...]:
        """The gradients of :meth:`sequence` for its gates and both of its first states."""
        time, batch, width = cells.shape
        state_size = width // self.cell_states
        zeros = cells.new_zeros(batch, width)
        grad_h = (zeros.narrow(1, 0, state_size) if grad_h_n is None else grad_h_n).clone()
        grad_c = zeros if grad_c_n is None else grad_c_n.clone()
        if time == 0:
            return gates.clone(), grad_h, grad_c
        if lengths is not None:
            valid = valid_steps(lengths, time).unsqueeze(2)
            gates, cells = torch.where(valid, gates, 0), torch.where(valid, cells, 0)
        steps = []
        for t in _order(time, not reverse):
            later_h, later_c = grad_h, grad_c
            towards = grad_h if grad_output is None else grad_h + grad_output[t]
            grad_gates, grad_c = self.backward(towards, grad_c, gates[t], cells[t])
            if lengths is not None:
                grad_gates = torch.where(valid[t], grad_gates, 0)
            first = grad_gates.shape[1] - len(weights)
            grad_h = grad_gates[:, first:] @ weights[:, :state_size]
            if lengths is not None:
                grad_h = torch.where(valid[t], grad_h, later_h)
                grad_c = torch.where(valid[t], grad_c, later_c)
            steps.append((grad_gates,))
        (grad_of_all_gates,) = _stack(steps, not reverse)
        return grad_of_all_gates, grad_h, grad_c


def _order(time: int, reverse: bool) -> range:
    return range(time)[::-1] if reverse else range(time)


def _stack(steps: Sequence[tuple[Tensor, ...]], reverse: bool) -> list[Tensor]:
    """The results of single steps, stacked in the order of time."""
    return [torch.stack(x) for x in zip(*(steps[::-1] if reverse else steps), strict=True)]


def cell_of_parts(facts: _schemas.CellFacts, forward: Callable[[Tensor, Tensor], Pair]) -> Cell:
    """A cell with the weights of the input and of the hidden state apart, as torch's modules have them."""
    gates = functools.partial(gates_of_parts, count=facts.gates, first_input=facts.first_input)
    return Cell(gates, forward, bool(facts.saves_new_c), facts.cell_states)


_lltm = Cell(lltm_gates, lltm_cell, bool(_schemas.CELLS["lltm"].saves_new_c))
_lstm = cell_of_parts(_schemas.CELLS["lstm"], lstm_cell)
_gru = cell_of_parts(_schemas.CELLS["gru"], gru_cell)
_rnn_tanh = cell_of_parts(_schemas.CELLS["rnn_tanh"], rnn_tanh_cell)
_rnn_relu = cell_of_parts(_schemas.CELLS["rnn_relu"], rnn_relu_cell)
