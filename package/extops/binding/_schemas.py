"""The operators as the library describes them (``csrc/bindings/schemas.h``), and what follows: checks, new tensors."""

import ctypes
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from extops import _private
from extops.binding import _checks

OPERATORS: dict[str, "Operator"] = {}
"""All operators by name, in the library's order; filled once, by the loader."""

CELLS: dict[str, "CellFacts"] = {}
"""All recurrent cells by name, with those of users."""

_DIRECTION = "direction_size"
"""The units of one direction of a sequence, where a table knows both."""

Dimension = tuple[tuple[int, str], ...]
"""A sum of sizes, such as 3 * state_size."""


@dataclass(frozen=True)
class Row:
    """A tensor of an operator: an argument or a result."""

    name: str
    axes: str = ""
    """The shape in words, such as "batch, 3*state_size"; empty for that of an elementwise operator."""
    optional: bool = False
    shape: tuple[Dimension, ...] = field(init=False)

    def __post_init__(self) -> None:
        dimensions = self.axes.split(", ") if self.axes else []
        terms = [re.findall(r"(?:(\d+)\*)?(\w+)", dimension) for dimension in dimensions]
        shape = tuple(tuple((int(n or 1), size) for n, size in sum_) for sum_ in terms)
        object.__setattr__(self, "shape", shape)


@dataclass(frozen=True)
class Operator:
    """An operator, whose tensors have the shapes of a table or, for an elementwise one, shapes that broadcast."""

    name: str
    schema: str
    arguments: tuple[Row, ...]
    results: tuple[Row, ...]
    out: str = ""
    """The argument that an elementwise operator writes into; empty where its results are new tensors."""
    numbers: int = 0
    """How many an elementwise operator takes after its tensors."""
    sizes: tuple[str, ...] = ()
    """Of a table: in the order of the kernel's struct."""

    def split(self, arguments: Sequence[Any]) -> tuple[Sequence[Any], Sequence[float]]:
        """The tensors, and the numbers after them, which only elementwise operators take."""
        count = len(self.arguments)
        return arguments[:count], arguments[count:]

    def check(self, *tensors: Tensor | None) -> dict[str, int]:
        """Compares the arguments, in the operator's order, with what it takes, None where one is absent; returns the
        sizes of a table.
        """
        op = self.name
        arguments: list[tuple[Row, Any]] = list(zip(self.arguments, tensors, strict=True))
        present = [(row, x) for row, x in arguments if not (x is None and row.optional)]
        required = [(row, x) for row, x in present if not row.optional]
        like_row, like = required[0]
        _checks.check_tensor(op, like_row.name, like)
        for row, tensor in present:
            _checks.check_matches(op, row.name, tensor, like_row.name, like)
        if not self.sizes:
            self._check_broadcast(present)
            return {}
        for row, tensor in present:
            _checks.check_dims(op, row.name, tensor, row.axes)
        sizes, sources = _find_sizes(present)
        if _DIRECTION in sizes and sizes["state_size"] != 2 * sizes[_DIRECTION]:  # there is one
            sizes[_DIRECTION], sources[_DIRECTION] = sizes["state_size"], sources["state_size"]
        for row, tensor in present:
            expected = shape_of(row, sizes)
            if not _checks.same_shape(tensor.shape, expected):
                found = {size: sources[size] for terms in row.shape for _, size in terms}
                origin = [
                    f"{size} from `{x}` of shape {list(y.shape)}" for size, (x, y) in found.items()
                ]
                raise RuntimeError(
                    f"{op}: expected `{row.name}` to have shape [{row.axes}] = {list(expected)}, but got "
                    f"{list(tensor.shape)} (with {', '.join(origin)})"
                )
        return sizes

    def _check_broadcast(self, present: list[tuple[Row, Any]]) -> None:
        inputs = [(row.name, x) for row, x in present if row.name != self.out]
        shape = _checks.broadcast_shape(self.name, inputs)
        for row, tensor in present:
            if row.name == self.out and not _checks.same_shape(tensor.shape, shape):
                names = " and ".join(f"`{name}`" for name, _ in inputs)
                raise RuntimeError(
                    f"{self.name}: expected `{row.name}` to have shape {list(shape)}, the broadcast shape of {names}, "
                    f"but got {list(tensor.shape)}"
                )

    def new_results(self, *tensors: Tensor | None, training: bool = True) -> tuple[Tensor, ...]:
        """Checks the arguments, which are those of the table and then, where the operator takes them, lengths; returns
        new tensors for the results. Without ``training``, what a backward of a sequence would need has no steps.
        """
        count = len(self.arguments)
        sizes = self.check(*tensors[:count])
        if self.sizes:
            rows = zip(self.arguments, tensors[:count], strict=True)
            like, *others = [x for row, x in rows if x is not None and not row.optional]
            for lengths in tensors[count:]:
                if lengths is not None:
                    _checks.check_int64_lengths(self.name, lengths, like, sizes["batch"])
            sequences = [x for x in (like, *others) if x.dim() == 3]
            batch_first = bool(sequences) and is_batch_first(sequences[0])
            not_kept = () if training else ("gates", "cells")
            of_none = {**sizes, "time": 0}
            shapes = (shape_of(x, of_none if x.name in not_kept else sizes) for x in self.results)
            return tuple(new(shape, like, batch_first) for shape in shapes)
        arguments = zip(self.arguments, tensors[:count], strict=True)
        named = {row.name: x for row, x in arguments if x is not None}
        shape = _checks.broadcast_shape(self.name, list(named.items()))
        return tuple(
            _new_elementwise(named, row.name.removeprefix("grad_"), shape) for row in self.results
        )


@dataclass(frozen=True)
class CellFacts:
    """What the library says of a recurrent cell, see ``csrc/cells/cell.h``."""

    gates: int
    input: int
    first_input: int
    numbers: int
    recurrent: int
    saves_new_c: int
    states: int
    """One where the hidden state is the cell state; more than two where the cell state is several numbers of a unit."""

    @property
    def cell_states(self) -> int:
        """How many numbers of a unit the cell state is."""
        return max(self.states - 1, 1)

    @property
    def has_one_gradient(self) -> bool:
        """Whether the gradients of both GEMMs are the same numbers."""
        return self.input == self.recurrent == self.gates and not self.first_input


def shape_of(row: Row, sizes: dict[str, int]) -> tuple[int, ...]:
    """The shape of a tensor for the sizes of a problem."""
    return tuple(sum(n * sizes[size] for n, size in terms) for terms in row.shape)


def is_batch_first(tensor: Tensor) -> bool:
    """Whether the memory of a tensor of ``[time, batch, ...]`` is in the order of the samples, not of the steps."""
    return _private.is_known(tensor.stride(0) < tensor.stride(1))


def rows(sequence: Tensor, batch_first: bool) -> Tensor:
    """A tensor of ``[time, batch, columns]`` as a matrix, in the order of its memory."""
    time, batch, columns = sequence.shape
    return (sequence.transpose(0, 1) if batch_first else sequence).reshape(time * batch, columns)


def new(shape: tuple[int, ...], like: Tensor, batch_first: bool) -> Tensor:
    if not (batch_first and len(shape) == 3):
        return like.new_empty(shape)
    time, batch, columns = shape
    return like.new_empty((batch, time, columns)).transpose_(0, 1)  # no view


def _new_elementwise(named: dict[str, Tensor], like: str, shape: tuple[int, ...]) -> Tensor:
    """Laid out like the argument ``like`` or, if its shape differs, like the first argument of this shape."""
    for tensor in (named.get(like), *named.values()):
        if tensor is not None and _checks.same_shape(tensor.shape, shape):
            return torch.empty_like(tensor)
    return next(iter(named.values())).new_empty(shape)


def _find_sizes(
    present: Sequence[tuple[Row, Any]],
) -> tuple[dict[str, int], dict[str, tuple[str, Any]]]:
    """The sizes, read from dimensions that are a single size, then from sums; and the argument each was read from."""
    sizes: dict[str, int] = {}
    sources: dict[str, tuple[str, Any]] = {}
    for may_be_sum in (False, True):
        for row, tensor in present:
            for terms, length in zip(row.shape, tensor.shape, strict=True):
                unknown = [(n, size) for n, size in terms if size not in sizes]
                if len(unknown) == 1 and (may_be_sum or terms == ((1, unknown[0][1]),)):
                    ((n, size),) = unknown
                    known = sum(m * sizes[other] for m, other in terms if other != size)
                    sizes[size] = max((length - known) // n, 0) if may_be_sum else length
                    sources[size] = row.name, tensor
    return sizes, sources


def load(path: Path) -> list[Operator]:
    """Adds to :data:`OPERATORS` and :data:`CELLS` what a library says: that of kernels for the CPU, or a cell's own."""
    library = ctypes.CDLL(str(path))
    rows_of = library.extops_sizes, library.extops_rows
    for function in (library.extops_schema, *rows_of, library.extops_cell):
        function.argtypes, function.restype = (ctypes.c_size_t,), ctypes.c_char_p
    found = [
        _parse(schema, *(function(index).decode() for function in rows_of))
        for index, schema in enumerate(_texts(library.extops_schema))
    ]
    OPERATORS.update((operator.name, operator) for operator in found)
    for text in _texts(library.extops_cell):
        name, *facts = text.split()
        CELLS[name] = CellFacts(**{fact: int(n) for fact, n in (x.split("=") for x in facts)})
    return found


def _texts(function: Callable[[int], bytes | None]) -> Iterator[str]:
    """What a function of a library says of 0, 1 and so on."""
    index = 0
    while text := function(index):
        yield text.decode()
        index += 1


def register_fakes(operators: Iterable[Operator], namespace: str = "extops") -> None:
    """Tells torch the results' shapes of operators, for tracing."""
    for operator in operators:

        def fake(*tensors: Tensor | None, of: Operator = operator, **options: Any) -> Any:
            results = of.new_results(*tensors, training=options.get("training", True))
            return None if of.out else results if len(results) > 1 else results[0]

        torch.library.register_fake(f"{namespace}::{operator.name}", fake)


def _parse(schema: str, sizes: str, rows: str) -> Operator:
    name, _, signature = schema.partition("(")
    arguments, _, results = signature.rpartition(") -> ")
    if sizes:
        found = re.findall(r"(-> )?Tensor(\??) (\w+)\[(.*?)\]", rows)
        inputs = [Row(row, axes, bool(mark)) for arrow, mark, row, axes in found if not arrow]
        outputs = [Row(row, axes) for arrow, _, row, axes in found if arrow]
        return Operator(name, schema, tuple(inputs), tuple(outputs), sizes=tuple(sizes.split(", ")))
    found = re.findall(r"Tensor(\(a!\))? (\w+)", arguments)
    return Operator(
        name,
        schema,
        tuple(Row(row) for _, row in found),
        tuple(Row(row) for row in re.findall(r"Tensor ?(\w*)", results)),
        out="".join(row for mark, row in found if mark),
        numbers=arguments.count("float "),
    )
