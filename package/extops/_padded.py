"""Packed sequences in a graph, whose rows stay padded: so no size depends on data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import rnn
from torch.nn.utils.rnn import PackedSequence

from extops import _in_graph, _private
from extops.ops.compositions import valid_steps

_CPU = torch.device("cpu")


class PaddedSequence:
    """What ``pack_padded_sequence`` returns in a graph; to all who ask for packed rows, a ``PackedSequence``."""

    def __init__(
        self,
        rows: Tensor,
        lengths: Tensor | list[int],
        sent: Tensor,
        number: int | None,
        *,
        is_sorted: bool = False,
    ) -> None:
        """Of rows ``[T, B, ...]`` in any order; ``sent`` are the lengths on their device, as int64, and ``number`` is
        their sum, where data need not be asked for it.
        """
        self.padded, self.lengths, self.sent, self.number = rows, lengths, sent, number
        self.is_sorted = is_sorted
        self.packed: Tensor | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """torch's. A subclass would be a tuple of what is packed, which Dynamo reads by its places."""
        return type(self) if _private.is_asked_by_dynamo() else PackedSequence

    @property
    def rows(self) -> Tensor:
        """As the user may have changed them in place, by :attr:`data`."""
        if self.packed is None:
            return self.padded
        order, inverse = self.sorted_indices, self.unsorted_indices
        lengths = self.sent.index_select(0, order)
        return _unpacked(self.packed, lengths, self.padded.shape[0]).index_select(1, inverse)

    @property
    def data(self) -> Tensor:
        """The rows that are no padding."""
        if self.packed is None:
            self.packed = self._pack()
        return self.packed

    def _pack(self) -> Tensor:
        order = self.sorted_indices
        rows = self.padded.index_select(1, order)
        is_valid = valid_steps(self.sent.index_select(0, order), rows.shape[0])
        if self.number is None:
            return rows[is_valid]
        # By a mask the size would depend on data.
        places = _in_graph.descending(is_valid.flatten())
        return rows.flatten(0, 1).index_select(0, places.narrow(0, 0, self.number))

    @property
    def batch_sizes(self) -> Tensor:
        """One for each step."""
        steps = self.padded.shape[0]
        if not torch.compiler.is_compiling():  # behind a graph the longest row is known
            lengths = torch.as_tensor(self.lengths)
            return _batch_sizes(lengths, int(lengths.max()))
        count: Callable[..., Tensor] = _batch_sizes
        if _in_graph.is_in_process():
            count = torch.ops.extops_torch.batch_sizes.default
        wants = (
            "what reads the `batch_sizes` of packed rows wants the longest row to have all steps"
        )
        lengths = _with_longest(self.lengths, _CPU, steps, f"in a graph {wants} of the input")
        return count(lengths, steps)

    @property
    def sorted_indices(self) -> Tensor:
        """Of sorted rows, too: it says how many there are."""
        if self.is_sorted:
            return torch.arange(self.sent.shape[0], device=self.sent.device)
        return _in_graph.descending(self.sent)

    @property
    def unsorted_indices(self) -> Tensor:
        """The inverse."""
        return _inverse(self.sorted_indices)

    def __iter__(self) -> Any:
        return iter((self.data, self.batch_sizes, self.sorted_indices, self.unsorted_indices))

    def __len__(self) -> int:
        return 4

    def __getitem__(self, at: Any) -> Any:
        return tuple(self)[at]

    def __getattr__(self, name: str) -> Any:
        # One that is made without arguments, as copies are, has none of its own.
        if hasattr(PaddedSequence, name) or not hasattr(PackedSequence, name):
            raise AttributeError(name)
        return getattr(PackedSequence(*self), name)

    def __reduce__(self) -> Any:
        return PackedSequence, tuple(self)


def _inverse(order: Tensor) -> Tensor:
    """Of an order, without sorting it."""
    return torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))


def _mask(lengths: Tensor, rows: Tensor) -> Tensor:
    """Which of padded rows ``[T, B, ...]`` are valid, with as many dimensions."""
    is_valid = valid_steps(lengths, rows.shape[0])
    return is_valid.view(*is_valid.shape, *(1 for _ in rows.shape[2:]))


def _unpacked(packed: Tensor, lengths: Tensor, steps: int) -> Tensor:
    """Padded rows ``[T, B, ...]`` in the order of their lengths."""
    empty = packed.new_zeros(steps, lengths.shape[0], *packed.shape[1:])
    return empty.masked_scatter(_mask(lengths, empty), packed)


def _with_longest(
    lengths: Tensor | list[int], device: torch.device, steps: int, message: str
) -> Tensor:
    """torch's results end with the longest row; here a size would depend on data then."""
    return _in_graph.checked_lengths(lengths, device, message, most=steps, is_reached=True)


def _batch_sizes(lengths: Tensor, steps: int) -> Tensor:
    """How many rows of lengths on the CPU have each step."""
    return valid_steps(lengths, steps).sum(1)


_in_graph.add_operator(
    "batch_sizes(Tensor lengths, SymInt steps) -> Tensor",
    _batch_sizes,
    lambda lengths, steps: lengths.new_empty(steps),
)


def is_of_unknown_batch(sequence: PackedSequence | PaddedSequence) -> bool:
    """Whether only data tells how many rows there are."""
    return type(sequence) is not PaddedSequence and sequence.sorted_indices is None


def are_counted(rows: Tensor) -> bool:
    """Whether it is known how many rows there are, before data tell. Dynamo answers, unless it exports a program."""
    return False


_private.answer_in_traces(are_counted, lambda x: _private.hints_of(x.shape[:1]) != [None])


def as_padded(sequence: PackedSequence | PaddedSequence) -> PaddedSequence:
    """One that was packed before; its order says how many rows there are."""
    if type(sequence) is PaddedSequence:
        return sequence
    data, sizes, order, inverse = sequence
    assert order is not None
    if inverse is None:
        inverse = _inverse(order)
    steps, batch = sizes.shape[0], order.shape[0]
    places = torch.arange(batch, device=data.device).unsqueeze(1)
    lengths = (sizes.to(data.device).unsqueeze(0) > places).sum(1)
    rows = _unpacked(data, lengths, steps)
    lengths = lengths.index_select(0, inverse)
    number = len(data) if are_counted(data) else None
    return PaddedSequence(rows.index_select(1, inverse), lengths, lengths, number)


def pack_padded_sequence(
    input: Tensor, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True
) -> PaddedSequence:
    """That of ``torch.nn.utils.rnn``, as a graph has it. It copies, since the caller may change what is given."""
    if isinstance(lengths, (list, tuple)):
        are_numbers = all(isinstance(x, int) for x in lengths)
        lengths = list(lengths) if are_numbers else torch.tensor(lengths)
    else:
        lengths = torch.as_tensor(lengths)
    rows = _of_lengths(input.transpose(0, 1) if batch_first else input, lengths, enforce_sorted)
    message = "pack_padded_sequence: expected `lengths` from 1 to the number of steps of `input`"
    limits: dict[str, Any] = {"are_positive": True, "most": rows.shape[0]}
    given = lengths, rows.device, message
    sent = _in_graph.checked_lengths(*given, **limits, enforce_sorted=enforce_sorted)
    number = None if isinstance(lengths, Tensor) else sum(lengths)
    if isinstance(lengths, Tensor):
        lengths = sent if sent.device == _CPU else _in_graph.checked_lengths(lengths, _CPU)
    return PaddedSequence(rows.clone(), lengths, sent, number, is_sorted=enforce_sorted)


def _of_lengths(rows: Tensor, lengths: Tensor | list[int], enforce_sorted: bool) -> Tensor:
    """The rows that have lengths: where torch sorts them, the first ones."""
    batch = rows.shape[1]
    number = lengths.shape[0] if isinstance(lengths, Tensor) else len(lengths)
    if not _private.is_known(number != batch):
        return rows
    if enforce_sorted or number > batch:
        raise RuntimeError(
            f"Expected `len(lengths)` to be equal to batch_size, but got {number} (batch_size={batch})"
        )
    return rows.narrow(1, 0, number)


def pad_packed_sequence(
    sequence: PackedSequence | PaddedSequence,
    batch_first: bool = False,
    padding_value: float = 0.0,
    total_length: int | None = None,
) -> tuple[Tensor, Tensor]:
    """That of ``torch.nn.utils.rnn``, as a graph has it."""
    if is_of_unknown_batch(sequence):
        return _pad_uncompiled(sequence, batch_first, padding_value, total_length)
    padded = as_padded(sequence)
    rows, lengths = padded.rows, padded.lengths
    if total_length is None:
        message = "in a graph the longest row has all steps of the input, or pad_packed_sequence a `total_length`"
        sent = _with_longest(lengths, rows.device, rows.shape[0], message)
    elif total_length != rows.shape[0]:
        message = "Expected total_length to be at least the length of the longest sequence in input"
        sent = _in_graph.checked_lengths(lengths, rows.device, message, most=total_length)
        index = torch.arange(total_length, device=rows.device).clamp(max=rows.shape[0] - 1)
        rows = rows.index_select(0, index)
    else:
        sent = padded.sent
    rows = rows.masked_fill(~_mask(sent, rows), padding_value)  # in the dtype of the rows
    if batch_first:  # torch puts rows that were not sorted back into their order, which copies them
        rows = rows.transpose(0, 1) if padded.is_sorted else rows.transpose(0, 1).contiguous()
    return rows, _in_graph.checked_lengths(lengths, _CPU)


_pad_uncompiled: Callable[..., tuple[Tensor, Tensor]] = _private.uncompiled(rnn.pad_packed_sequence)


def _pad_elsewhere(sequence: Any, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    pad = pad_packed_sequence if type(sequence) is PaddedSequence else _pad_uncompiled
    return pad(sequence, *arguments, **options)


TRACED: dict[Callable[..., Any], Callable[..., Any]] = {
    rnn.pack_padded_sequence: pack_padded_sequence,
    rnn.pad_packed_sequence: pad_packed_sequence,
}
"""What Dynamo traces in place of torch's, which it refuses, in methods of modules that hold layers of ours."""

TRACED_ELSEWHERE: dict[Callable[..., Any], Callable[..., Any]] = {
    rnn.pad_packed_sequence: _pad_elsewhere
}
"""Of rows of others the graph ends before it, as of torch 2.13: that of 2.11 raises an error where sizes are known."""
