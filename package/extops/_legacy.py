"""The legacy lane, for torch 2.4 to 2.9: kernels are called with raw pointers through ctypes, and the operators are
defined from Python. Nothing in the libraries depends on the version of torch or Python.

Not for newer torch, which has the stable lane: an operator defined here cannot be called without Python.
"""

import ctypes
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_char_p, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from extops import _checks

_DTYPES = {torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bfloat16: 15}

# The arguments of the entry points in csrc/kernels, up to those that differ by device.
_ELEMENTWISE = (c_int32, c_int64, c_void_p, c_void_p)
_GRADIENT = (c_void_p, c_int64, c_int64)
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "lltm_cell": (c_int32, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_void_p),
    "lltm_cell_backward": (
        *(c_int32, c_int64, c_int64),
        *(*_GRADIENT, *_GRADIENT),
        *(c_void_p, c_void_p, c_void_p, c_void_p),
    ),
    "round_ste": _ELEMENTWISE,
    "elementwise_mult": _ELEMENTWISE,
    "elementwise_mult_backward": _ELEMENTWISE,
}

_library = torch.library.Library("extops", "DEF")


def load(cpu: Path, cuda: Path | None = None) -> None:
    """Defines the operators and registers the kernels of one or both libraries."""
    cpu_library = ctypes.CDLL(str(cpu))
    for schema in _schemas(cpu_library):
        _library.define(schema)
    _register(_Cpu(cpu_library))
    if cuda is not None:
        _register(_Cuda(ctypes.CDLL(str(cuda))))


def _schemas(library: ctypes.CDLL) -> list[str]:
    read = library.extops_schema
    read.argtypes, read.restype = (ctypes.c_size_t,), c_char_p
    schemas: list[str] = []
    while schema := read(len(schemas)):
        schemas.append(schema.decode())
    return schemas


class _Device:
    """The entry points of one library, and how to call them."""

    key: str
    last_arguments: tuple[Any, ...]

    def __init__(self, library: ctypes.CDLL) -> None:
        self.kernels: dict[str, Callable[..., bytes | None]] = {}
        for name, signature in _SIGNATURES.items():
            function = library[f"extops_{name}_{self.key.lower()}"]
            function.argtypes, function.restype = signature + self.last_arguments, c_char_p
            self.kernels[name] = function

    def run(self, name: str, like: Tensor, *arguments: Any) -> None:
        """Calls a kernel for the ``like.numel()`` elements of an output on the device of ``like``."""
        raise NotImplementedError


class _Cpu(_Device):
    key = "CPU"
    last_arguments = (c_int64, c_int64)

    # Below this a second thread costs more than it saves.
    _GRAIN = 65536

    def run(self, name: str, like: Tensor, *arguments: Any) -> None:
        kernel = self.kernels[name]
        numel = like.numel()
        threads = min(torch.get_num_threads(), numel // self._GRAIN)
        if threads <= 1:
            return _check_success(kernel(*arguments, 0, numel))
        step = math.ceil(numel / threads)
        pieces = [(begin, min(begin + step, numel)) for begin in range(0, numel, step)]
        tasks = [_pool(threads).submit(kernel, *arguments, *piece) for piece in pieces[1:]]
        errors = [kernel(*arguments, *pieces[0]), *(task.result() for task in tasks)]
        for error in errors:
            _check_success(error)


class _Cuda(_Device):
    key = "CUDA"
    last_arguments = (c_void_p,)

    def run(self, name: str, like: Tensor, *arguments: Any) -> None:
        with torch.cuda.device(like.device):
            stream = torch._C._cuda_getCurrentRawStream(like.device.index)
            _check_success(self.kernels[name](*arguments, stream))


def _check_success(error: bytes | None) -> None:
    if error is not None:
        raise RuntimeError(error.decode())


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads that spend their time in kernels: ctypes lets go of the interpreter lock meanwhile."""
    return ThreadPoolExecutor(threads - 1, thread_name_prefix="extops")


# A forked child inherits the pool but none of its threads, and would wait for them for ever.
os.register_at_fork(after_in_child=_pool.cache_clear)


def _register(device: _Device) -> None:
    """Registers every operator for one device."""

    def lltm_cell(gates: Tensor, old_cell: Tensor) -> tuple[Tensor, Tensor]:
        _checks.check_cell("lltm_cell", gates, "old_cell", old_cell)
        gates, old_cell = gates.contiguous(), old_cell.contiguous()
        new_h, new_cell = torch.empty_like(old_cell), torch.empty_like(old_cell)
        pointers = (x.data_ptr() for x in (gates, old_cell, new_h, new_cell))
        device.run("lltm_cell", old_cell, _DTYPES[gates.dtype], *old_cell.shape, *pointers)
        return new_h, new_cell

    def lltm_cell_backward(
        grad_h: Tensor | None, grad_cell: Tensor | None, gates: Tensor, new_cell: Tensor
    ) -> tuple[Tensor, Tensor]:
        op = "lltm_cell_backward"
        _checks.check_cell_backward(op, grad_h, grad_cell, gates, new_cell)
        upstream = (*_gradient(grad_h), *_gradient(grad_cell))
        gates, new_cell = gates.contiguous(), new_cell.contiguous()
        grad_gates, grad_old_cell = torch.empty_like(gates), torch.empty_like(new_cell)
        pointers = (x.data_ptr() for x in (gates, new_cell, grad_gates, grad_old_cell))
        device.run(op, new_cell, _DTYPES[gates.dtype], *new_cell.shape, *upstream, *pointers)
        return grad_gates, grad_old_cell

    def round_ste(input: Tensor) -> Tensor:
        _checks.check_tensor("round_ste", "input", input)
        output = torch.empty_like(input)
        _elementwise(device, "round_ste", output, input)
        return output

    def elementwise_mult(a: Tensor, b: Tensor) -> Tensor:
        _checks.check_factors("elementwise_mult", a, b)
        out = _checks.empty_product("elementwise_mult", a, b)
        _elementwise(device, "elementwise_mult", out, a, b)
        return out

    def elementwise_mult_out(a: Tensor, b: Tensor, out: Tensor) -> None:
        _checks.check_product("elementwise_mult_out", a, b, out)
        _elementwise(device, "elementwise_mult", out, a, b)

    def elementwise_mult_backward(
        grad_output: Tensor, a: Tensor, b: Tensor
    ) -> tuple[Tensor, Tensor]:
        _checks.check_mult_backward("elementwise_mult_backward", grad_output, a, b)
        grads = torch.empty_like(a), torch.empty_like(b)
        _elementwise(device, "elementwise_mult_backward", *grads, grad_output, a, b)
        return grads

    for implementation in (
        *(lltm_cell, lltm_cell_backward, round_ste),
        *(elementwise_mult, elementwise_mult_out, elementwise_mult_backward),
    ):
        _library.impl(implementation.__name__, implementation, device.key)


def _gradient(gradient: Tensor | None) -> tuple[int | None, int, int]:
    """The pointer and the strides of an upstream gradient, which may be absent or expanded."""
    if gradient is None:
        return None, 0, 0
    row_stride, column_stride = gradient.stride()
    return gradient.data_ptr(), row_stride, column_stride


def _elementwise(device: _Device, name: str, output: Tensor, *others: Tensor) -> None:
    """Calls a kernel of csrc/kernels/elementwise.h; the operands come outputs first."""
    operands = (output, *others)
    shape = output.shape
    numbers = [*shape, *(n for x in operands for n in _broadcast_strides(x, shape))]
    geometry = (c_int64 * len(numbers))(*numbers)
    data = (c_void_p * len(operands))(*(x.data_ptr() for x in operands))
    device.run(name, output, _DTYPES[output.dtype], len(shape), geometry, data)


def _broadcast_strides(tensor: Tensor, shape: torch.Size) -> list[int]:
    missing = len(shape) - tensor.dim()
    own = zip(tensor.shape, tensor.stride(), shape[missing:], strict=True)
    return [0] * missing + [0 if size == 1 != to else stride for size, stride, to in own]
