"""The libraries of kernels, whose entry points (``csrc/kernels``) are called by ctypes, with pointers and sizes."""

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

paths: dict[str, Path] = {}
"""By type of device; filled by the loader."""

DTYPES = {torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bfloat16: 15}
"""The kernels' numbers."""

_TF32 = -6


class Plan(ctypes.Structure):
    """``SequencePlan`` of csrc/kernels/sequence.h."""

    _fields_ = tuple((x, ctypes.c_int64) for x in ("kernel", "workspace", "directions"))


class Library:
    """The kernels for a type of device."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.is_cuda = device == "cuda"
        self._functions = ctypes.CDLL(str(paths[device]))
        self._entries: dict[str, Any] = {}

    def entry(self, name: str, result: Any, *arguments: Any) -> Any:
        """An entry point of csrc/kernels."""
        if name not in self._entries:
            function = self._functions[f"extops_{name}_{self.device}"]
            function.argtypes, function.restype = arguments, result
            self._entries[name] = function
        return self._entries[name]

    def gemm_dtype(self, dtype: torch.dtype, allow_tf32: bool) -> int:
        """The kernels' number of the dtype, or of TF32 where GEMMs may be computed in it."""
        return _TF32 if self.is_cuda and allow_tf32 and dtype is torch.float32 else DTYPES[dtype]

    def plan(self, cell: str, dtype: int, sizes: Any, backward: bool, stream: int) -> Plan:
        """Which kernel computes a sequence on the current GPU; nothing is measured."""
        types = ctypes.c_int32, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p, ctypes.c_void_p
        entry = self.entry(f"{cell}_sequence_plan", Plan, *types)
        plan: Plan = entry(dtype, sizes, backward, stream, None)
        return plan


library = functools.cache(Library)
"""That for a type of device."""


def sm_count(device: int, stream: int) -> int:
    """The multiprocessors of a GPU that a stream may use: a green context has some of them."""
    entry = library("cuda").entry("sm_count", ctypes.c_int32, ctypes.c_void_p)
    with torch.cuda.device(device):
        return int(entry(stream))
