"""The gradients of a sequence. The operator ``<cell>_sequence_backward`` goes from step to step, and gives those of the
gates and of the first state; the others are GEMMs and sums over all steps at once, or over those of a chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from extops import _gemm
from extops.binding import _schemas
from extops.calling import _autocast
from extops.ops.compositions import valid_steps

if TYPE_CHECKING:
    from extops.ops.sequence import Cell


class Chunk(NamedTuple):
    """What a forward saved of steps that it computed at once."""

    h: Tensor
    """The hidden state before the first of them, in the order of computation."""
    c: Tensor
    """The cell state."""
    gates: Tensor
    cells: Tensor


def lengths_of(steps: slice, lengths: Tensor | None) -> Tensor | None:
    """How many of some steps are valid."""
    return None if lengths is None else (lengths - steps.start).clamp(0, steps.stop - steps.start)


@_autocast.outside
def gradients(
    cell: Cell,
    inputs: list[Tensor],
    lengths: Tensor | None,
    output: Tensor,
    chunks: list[tuple[slice, Chunk]],
    towards: tuple[Tensor | None, ...],
    *others: Any,
) -> tuple[Tensor | None, ...]:
    """The gradients of the input, the parameters, ``h_0`` and ``c_0`` that are needed."""
    if len(chunks) == 1:
        ((_, chunk),) = chunks
        return _of_chunk(cell, inputs, lengths, output, chunk, towards, *others)
    input, *parameters, _, _ = inputs
    grad_output, *grad_states = towards
    grad_input: Tensor | None = None
    sums: list[Tensor | None] = [None for _ in parameters]
    for steps, chunk in reversed(chunks):
        of_steps = None if grad_output is None else grad_output[steps]
        first, *of_parameters, grad_h, grad_c = _of_chunk(
            cell,
            [input[steps], *parameters, chunk.h, chunk.c],
            lengths_of(steps, lengths),
            output[steps],
            chunk,
            (of_steps, *grad_states),
            *others,
        )
        if first is not None:
            if grad_input is None:
                batch_first = _schemas.is_batch_first(output)
                shape = _transposed(input, batch_first).shape
                grad_input = _transposed(first.new_empty(shape), batch_first)
            grad_input[steps] = first
        grad_states = [grad_h, grad_c]
        for place, found in enumerate(of_parameters):
            if found is not None:  # added up in float32: each was rounded once
                wide = found.to(torch.promote_types(found.dtype, torch.float32))
                known = sums[place]
                sums[place] = wide if known is None else known.add_(wide)
    of_all = [x if x is None else x.to(input.dtype) for x in sums]
    return grad_input, *of_all, *grad_states


def _of_chunk(
    cell: Cell,
    inputs: list[Tensor],
    lengths: Tensor | None,
    output: Tensor,
    chunk: Chunk,
    towards: tuple[Tensor | None, ...],
    needs: tuple[bool, ...],
    reverse: bool | None,
    allow_tf32: bool,
) -> tuple[Tensor | None, ...]:
    input, *parameters, h_0, _ = inputs
    gates, cells = chunk.gates, chunk.cells
    needs_input, *needs_parameters, _, _ = needs
    half = len(parameters) // 2
    weights = parameters[:half]
    needs_weights, needs_biases = needs_parameters[:half], needs_parameters[half:]
    each = 2 if reverse is None else 1  # directions
    of_h = h_0.shape[1] // each
    if half == 1:
        # Narrowed, not indexed: indexing all columns returns an alias, which a batched gradient cannot create.
        weights = [weights[0].narrow(1, of_h, input.shape[2]), weights[0].narrow(1, 0, of_h)]
    options = {"reverse": bool(reverse), "allow_tf32": allow_tf32}
    grad_gates, *grad_states = cell.eager_backward(
        *towards, weights[1], gates, cells, lengths, **options
    )
    batch_first = _schemas.is_batch_first(gates)
    rows = _schemas.rows(grad_gates, batch_first)
    valid = None if lengths is None else valid_steps(lengths, input.shape[0]).unsqueeze(2)
    shift = cell.step.facts.first_input * of_h
    gates_x, gates_h = (len(x) // each for x in weights)
    first_h = rows.shape[1] // each - gates_h
    rows_x = _columns(rows, 0, gates_x, each)
    grad_input, of_x, of_hh = None, None, None
    if needs_input:
        in_order = _rolled(weights[0], shift, each)
        of_rows = _gemm.mm(rows_x, in_order, allow_tf32)
        of_rows = of_rows.view(_transposed(input, batch_first).shape)
        grad_input = _transposed(of_rows, batch_first)
        if valid is not None:  # a weight may be infinite or NaN, and zero times that is NaN
            grad_input = torch.where(valid, grad_input, 0)
    if needs_weights[0]:
        factor = _factor(input, valid, batch_first)
        of_x = _rolled(_gemm.mm(rows_x.t(), factor, allow_tf32), -shift, each)
    if needs_weights[-1]:
        directions = (False, True) if reverse is None else (reverse,)
        parts = (rows.chunk(each, 1), h_0.chunk(each, 1), output.chunk(each, 2), directions)
        given = lengths, valid, batch_first, allow_tf32
        of_each = [
            _weight_hh_gradient(x.narrow(1, first_h, gates_h), h, y, z, *given)
            for x, h, y, z in zip(*parts, strict=True)
        ]
        of_hh = of_each[0] if each == 1 else torch.cat(of_each)
    found = [of_x, of_hh]
    if half == 1:
        found = [None if of_x is None or of_hh is None else torch.cat((of_hh, of_x), dim=1)]
    of_biases: list[Tensor | None] = [None for _ in needs_biases]
    if any(needs_biases):
        of_biases[0] = sums = _gemm.column_sums(rows)
        if half > 1:
            sums = sums.unsqueeze(0)
            first = _columns(sums, 0, gates_x, each).squeeze(0)
            second = _columns(sums, first_h, gates_h, each).squeeze(0)
            if all(needs_biases) and not shift:
                first = first.clone()  # the two may overlap, and the caller may change one in place
            first = _rolled(first, -shift, each)
            pairs = zip((first, second), needs_biases, strict=True)
            of_biases = [x if needed else None for x, needed in pairs]
    return grad_input, *found, *of_biases, *grad_states


def _columns(matrix: Tensor, first: int, count: int, directions: int) -> Tensor:
    """Some columns of each direction."""
    if directions == 1:
        return matrix.narrow(1, first, count)
    of_each: Tensor = matrix.unflatten(1, (directions, matrix.shape[1] // directions))
    return of_each.narrow(2, first, count).flatten(1)


def _rolled(tensor: Tensor, shift: int, directions: int) -> Tensor:
    """The rows of each direction in another order."""
    if directions == 1 or not shift:
        return tensor.roll(shift, 0) if shift else tensor
    of_each: Tensor = tensor.unflatten(0, (directions, len(tensor) // directions))
    return of_each.roll(shift, 1).flatten(0, 1)


def _factor(steps: Tensor, valid: Tensor | None, batch_first: bool) -> Tensor:
    """What the gradients of the gates are multiplied by for those of the weights, in the same order of rows."""
    if valid is not None:  # steps that are not may be infinite or NaN, too
        steps = torch.where(valid, steps, 0)
    return _transposed(steps, batch_first).flatten(0, 1)


def _weight_hh_gradient(
    rows: Tensor,
    h_0: Tensor,
    output: Tensor,
    reverse: bool,
    lengths: Tensor | None,
    valid: Tensor | None,
    batch_first: bool,
    allow_tf32: bool,
) -> Tensor:
    time = output.shape[0]
    # Compared by a traced program, the number of steps would be a constant of it.
    if lengths is not None or batch_first or not isinstance(time, int) or time < 2:
        old_h = _old_h(h_0, output, lengths, batch_first, reverse)
        return _gemm.mm(rows.t(), _factor(old_h, valid, batch_first), allow_tf32)
    batch = len(h_0)  # rows of the first step, which are apart: the output is not copied behind h_0
    others = (time - 1) * batch
    of_first = _gemm.mm(rows.narrow(0, others if reverse else 0, batch).t(), h_0, allow_tf32)
    of_others = rows.narrow(0, 0 if reverse else batch, others).t()
    steps = output.narrow(0, int(reverse), time - 1).flatten(0, 1)
    return _gemm.mm(of_others, steps, allow_tf32, added=of_first)


def _old_h(
    h_0: Tensor, output: Tensor, lengths: Tensor | None, batch_first: bool, reverse: bool
) -> Tensor:
    """The hidden state before each step, ``[T, B, S]``, in the memory order of the output."""
    time = output.shape[0]
    states = (output, h_0.unsqueeze(0)) if reverse else (h_0.unsqueeze(0), output)
    joined = torch.cat([_transposed(x, batch_first) for x in states], dim=1 if batch_first else 0)
    # One more than there are steps, even if there are none: an index from the end, or an assignment to a slice, would
    # add a guard on the number of steps, and a program for any number has none.
    old_h = _transposed(joined, batch_first).narrow(0, int(reverse), time)
    if lengths is None or not reverse:
        return old_h
    is_last = torch.arange(time, device=output.device).unsqueeze(1) == lengths - 1
    return torch.where(is_last.unsqueeze(2), h_0, old_h)


def _transposed(sequence: Tensor, batch_first: bool) -> Tensor:
    return sequence.transpose(0, 1) if batch_first else sequence
