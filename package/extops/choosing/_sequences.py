"""Which kernel computes a sequence on a GPU. The library measures that in the first call of a kind; here is the memory
that it asks, which is the file of choices.
"""

from __future__ import annotations

from ctypes import CDLL, CFUNCTYPE, POINTER, Structure, byref, c_char_p, c_double, c_int32, c_int64
from pathlib import Path
from typing import Any

import torch

from extops import _private
from extops.binding import _libraries
from extops.choosing import _table


class _Kernels(Structure):
    """``SequenceKernels`` of csrc/kernels/sequence.h, by their numbers."""

    _fields_ = (("eager", c_int64), ("captured", c_int64))


_Recall = CFUNCTYPE(c_int32, c_char_p, POINTER(_Kernels))
_Keep = CFUNCTYPE(None, c_char_p, POINTER(_Kernels), c_double, c_double)


class _Memory(Structure):
    _fields_ = (("recall", _Recall), ("keep", _Keep))


_given: list[_Memory] = []


def provide() -> None:
    """For the kernels of this package."""
    if "cuda" in _libraries.paths:
        remember_for(_libraries.paths["cuda"])


def remember_for(path: Path) -> None:
    """Lets a library with kernels for GPUs measure, and keeps what it finds."""
    library = CDLL(str(path))
    name_of = library.extops_sequence_kernel_name_cuda
    name_of.argtypes, name_of.restype = (c_int64,), c_char_p
    names: list[str] = []  # of the kernels, by their numbers
    while name := name_of(len(names)):
        names.append(name.decode())

    @_Recall
    def recall(kind: bytes, kernels: Any) -> int:
        name, sizes = _parsed(kind)
        known = _table.table(torch.cuda.current_device()).kind(name).measured.get(sizes)
        ways = known.way.split(_table.SEPARATOR) if known else []
        if ways and set(ways) <= set(names):
            kernels.contents.eager, kernels.contents.captured = map(names.index, ways)
            return 1
        may_measure = not (torch.are_deterministic_algorithms_enabled() or _private.is_watched())
        return 0 if may_measure else -1

    @_Keep
    def keep(kind: bytes, kernels: Any, eager: float, captured: float) -> None:
        numbers = kernels.contents.eager, kernels.contents.captured
        way = _table.SEPARATOR.join(names[number] for number in numbers)
        measured = _table.Measured(way, eager, captured)
        _table.table(torch.cuda.current_device()).add(*_parsed(kind), measured)

    _given.append(_Memory(recall, keep))
    library.extops_set_sequence_memory_cuda(byref(_given[-1]))


def _parsed(kind: bytes) -> tuple[str, tuple[int, ...]]:
    """As the library writes it: steps, samples, and what else its calls have in common."""
    sizes, _, name = kind.decode().partition(":")
    return name, tuple(map(int, sizes.split(",")))
