"""The gradients of a sequence. The operator ``<cell>_sequence_backward`` goes from step to step, and gives those of the
gates and of the first state; the others are GEMMs and sums over all steps at once, or over those of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

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
    needs: tuple[bool, ...],
    reverse: bool,
    allow_tf32: bool,
) -> tuple[Tensor | None, ...]:
    """The gradients of the input, the parameters, ``h_0`` and ``c_0`` that are needed."""
    if len(chunks) == 1:
        ((_, chunk),) = chunks
        return _of_chunk(cell, inputs, lengths, output, chunk, towards, needs, reverse, allow_tf32)
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
            needs,
            reverse,
            allow_tf32,
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
    reverse: bool,
    allow_tf32: bool,
) -> tuple[Tensor | None, ...]:
    input, *parameters, h_0, _ = inputs
    gates, cells = chunk.gates, chunk.cells
    needs_input, *needs_parameters, _, _ = needs
    weights = parameters[: len(parameters) // 2]
    needs_weights = needs_parameters[: len(weights)]
    needs_biases = needs_parameters[len(weights) :]
    grad_gates, grad_h_0, grad_c_0 = cell.eager_backward(
        *towards, weights[-1], gates, cells, lengths, reverse=reverse, allow_tf32=allow_tf32
    )
    batch_first = _schemas.is_batch_first(gates)
    rows = _schemas.rows(grad_gates, batch_first)
    valid = None if lengths is None else valid_steps(lengths, input.shape[0]).unsqueeze(2)
    state_size = h_0.shape[1]
    shift = cell.first_input * state_size
    weights_x = weights[0] if len(weights) > 1 else weights[0][:, state_size:]
    # Narrowed, not indexed: indexing all columns returns an alias, which a batched gradient cannot create.
    rows_x = rows.narrow(1, 0, len(weights_x))
    rows_h = rows.narrow(1, rows.shape[1] - len(weights[-1]), len(weights[-1]))
    found: list[Tensor | None] = [None for _ in parameters]
    grad_input = None
    if needs_input:
        in_order = weights_x.roll(shift, 0) if shift else weights_x
        grad_input = _input_gradient(rows_x, in_order, input, valid, batch_first, allow_tf32)
    if len(weights) == 1 and needs_weights[0]:
        old_h = _old_h(h_0, output, lengths, batch_first, reverse)
        found[0] = _gemm.mm(rows.t(), _factor((old_h, input), valid, batch_first), allow_tf32)
    elif len(weights) > 1:
        if needs_weights[0]:
            of_rows = _gemm.mm(rows_x.t(), _factor((input,), valid, batch_first), allow_tf32)
            found[0] = of_rows.roll(-shift, 0) if shift else of_rows
        if needs_weights[1]:
            found[1] = _weight_hh_gradient(
                rows_h, h_0, output, lengths, valid, batch_first, reverse, allow_tf32
            )
    if any(needs_biases):
        sums = _gemm.column_sums(rows)
        if len(needs_biases) == 1:
            found[-1] = sums
        else:
            sizes = rows_x.shape[1], rows_h.shape[1]
            found[len(weights) :] = _bias_gradients(sums, *sizes, shift, needs_biases)
    return grad_input, *found, grad_h_0, grad_c_0


def _input_gradient(
    rows: Tensor,
    weights: Tensor,
    input: Tensor,
    valid: Tensor | None,
    batch_first: bool,
    allow_tf32: bool,
) -> Tensor:
    of_rows = _gemm.mm(rows, weights, allow_tf32).view(_transposed(input, batch_first).shape)
    grad_input = _transposed(of_rows, batch_first)
    # A weight may be infinite or NaN, and zero times that is NaN.
    return grad_input if valid is None else torch.where(valid, grad_input, 0)


def _factor(steps: Sequence[Tensor], valid: Tensor | None, batch_first: bool) -> Tensor:
    """What the gradients of the gates are multiplied by for those of the weights, in the same order of rows."""
    of_batch = [_transposed(x, batch_first) for x in steps]
    joined = torch.cat(of_batch, dim=2) if len(steps) > 1 else of_batch[0]
    if valid is not None:  # steps that are not may be infinite or NaN, too
        joined = torch.where(_transposed(valid, batch_first), joined, 0)
    return joined.flatten(0, 1)


def _bias_gradients(
    sums: Tensor, of_input: int, of_h: int, shift: int, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The first ``of_input`` of the sums and the last ``of_h`` of them, which may overlap."""
    first = sums.narrow(0, 0, of_input)
    second = sums.narrow(0, len(sums) - of_h, of_h)
    if shift:
        first = first.roll(-shift, 0)
    elif all(needs):
        first = first.clone()  # the two may overlap, and the caller may change one in place
    return first if needs[0] else None, second if needs[1] else None


def _weight_hh_gradient(
    rows: Tensor,
    h_0: Tensor,
    output: Tensor,
    lengths: Tensor | None,
    valid: Tensor | None,
    batch_first: bool,
    reverse: bool,
    allow_tf32: bool,
) -> Tensor:
    time = output.shape[0]
    # Compared by a traced program, the number of steps would be a constant of it.
    if lengths is not None or batch_first or not isinstance(time, int) or time < 2:
        old_h = _old_h(h_0, output, lengths, batch_first, reverse)
        return _gemm.mm(rows.t(), _factor((old_h,), valid, batch_first), allow_tf32)
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
