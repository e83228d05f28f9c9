"""Packed rows in pieces: runs of steps, each of which may be padded by itself."""

import bisect
import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from extops.binding import _checks

States = tuple[Tensor, ...]
Packing = tuple[Tensor, Tensor]
"""The lengths of rows that are padded, and where the padded ones have the packed ones."""

_FEW_BYTES = 2**24
_MOST_PADDED = 1.25
"""Padded rows for each given one. Each piece starts a dozen kernels; of uniform lengths there are three or four."""


class Piece(NamedTuple):
    """Some steps of packed rows."""

    rows: slice
    steps: int
    batch: int
    packing: Packing | None
    """None where all rows have all steps."""

    @property
    def lengths(self) -> Tensor | None:
        """Of the rows, where they differ."""
        return None if self.packing is None else self.packing[0]

    def padded(self, rows: Tensor) -> Tensor:
        """Its rows as steps, ``[T, B, ...]``."""
        shape = self.steps, self.batch, *rows.shape[1:]
        if self.packing is None:
            return rows.reshape(shape)
        places = self.packing[1]
        zeros = rows.new_zeros(self.steps * self.batch, *rows.shape[1:])
        return zeros.index_copy(0, places, rows).view(shape)

    def packed(self, padded: Tensor) -> Tensor:
        """Its rows of those steps."""
        rows = padded.flatten(0, 1)
        return rows if self.packing is None else rows.index_select(0, self.packing[1])


def packing_of(name: str, batch_sizes: Tensor, batch: int, data: Tensor) -> Packing:
    """For rows as ``data`` has them. Within a trace ``batch`` may be a tensor."""
    steps = batch_sizes.shape[0]  # within a trace a tensor, too, and so of any size
    device = batch_sizes.device
    # The GPU waits while the host computes: so only small tensors here.
    ends = batch_sizes.cumsum(0)
    shifts = torch.arange(steps, device=device) * batch - (ends - batch_sizes)
    sent = _checks.to_device(name, "input.batch_sizes", torch.stack((ends, shifts)), data.device)
    ends, shifts = sent.unbind(0)
    rows = torch.arange(data.shape[0], device=data.device)
    places = rows + shifts.index_select(0, torch.searchsorted(ends, rows, right=True))
    count = torch.arange(batch, device=device)
    return steps - torch.searchsorted(batch_sizes.flip(0), count, right=True), places


def pieces_of(
    name: str, batch_sizes: Tensor, sizes: list[int], data: Tensor, bytes_of_row: int
) -> list[Piece]:
    """One piece or, where that would pad many bytes, as few as pad few rows. The ``sizes`` are numbers."""
    most = (len(sizes) * sizes[0] - len(data)) * bytes_of_row
    shares = _shares(sizes) if most > _FEW_BYTES else [(0, len(sizes))]
    pieces, first = [], 0
    for start, end in shares:
        number = sum(sizes[start:end])
        rows, steps, batch = slice(first, first + number), end - start, sizes[start]
        is_ragged = number < steps * batch
        packing = packing_of(name, batch_sizes[start:end], batch, data[rows]) if is_ragged else None
        pieces.append(Piece(rows, steps, batch, packing))
        first += number
    return pieces


def _shares(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """The first step of each piece, and the one after the last: a piece is divided where that leaves out most rows, as
    long as too many are padded.
    """
    rows, padded = sum(sizes), len(sizes) * sizes[0]
    falls = [step for step in range(1, len(sizes)) if sizes[step] < sizes[step - 1]]

    def divided(start: int, end: int) -> tuple[int, int, int, int]:
        inside = falls[bisect.bisect_right(falls, start) : bisect.bisect_left(falls, end)]
        left_out = [((sizes[start] - sizes[step]) * (end - step), step) for step in inside]
        most, step = max(left_out, default=(0, end))
        return -most, step, start, end

    pieces = [divided(0, len(sizes))]
    while padded > _MOST_PADDED * rows:
        most, step, start, end = pieces[0]
        heapq.heapreplace(pieces, divided(start, step))
        heapq.heappush(pieces, divided(step, end))
        padded += most
    return sorted((start, end) for *_, start, end in pieces)


def run_in_pieces(
    run: Callable[[int, States], tuple[Tensor, States]],
    batches: Sequence[int],
    initial: States,
    reverse: bool,
) -> tuple[Tensor, States]:
    """The rows of all pieces, and the last states; ``run`` gives those of one by its place and the states before."""
    states = tuple(x[: batches[-1 if reverse else 0]] for x in initial)
    places = range(len(batches))
    outputs, ended = [], []
    for place in reversed(places) if reverse else places:
        size, before = batches[place], len(states[0])
        # Rows end on the way, and on the way back begin.
        ended.append(tuple(x[size:] for x in states))
        pairs = zip(states, initial, strict=True)
        states = tuple(torch.cat((x[:size], y[before:size])) for x, y in pairs)
        output, states = run(place, states)
        outputs.append(output)
    if reverse:
        return torch.cat(outputs[::-1]), states
    lasts = zip(states, *reversed(ended), strict=True)
    # Before the first step they may have been of another dtype, which autocast has changed.
    return torch.cat(outputs), tuple(torch.cat(each).to(each[0].dtype) for each in lasts)
