"""The legacy lane, for torch 2.4 to 2.9: kernels are called with raw pointers through ctypes, and the operators are
defined from Python. Nothing in the libraries depends on the version of torch or Python.

Not for newer torch, which has the stable lane: an operator defined here cannot be called without Python. There, these
functions find the type of an error that torch's stable ABI has lost (:mod:`extops._errors`).
"""

import ctypes
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_char_p, c_int32, c_int64, c_void_p
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from extops import _checks

_DTYPES = {torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bfloat16: 15}
_TF32 = -6

# The arguments of the entry points in csrc/kernels, up to those that differ by device.
_DTYPE_SIZES = (c_int32, c_int64, c_int64, c_int64)
_GRADIENTS = (c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64)
_ELEMENTWISE = (c_int32, c_int64, c_void_p, c_void_p)
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "lltm_cell": (c_int32, c_int64, c_int64, *[c_void_p] * 5),
    "lltm_cell_backward": (c_int32, c_int64, c_int64, *_GRADIENTS, *[c_void_p] * 4),
    "round_ste": _ELEMENTWISE,
    "elementwise_mult": _ELEMENTWISE,
    "elementwise_mult_backward": _ELEMENTWISE,
}
# The kernels for small problems; each with a function that tells where it is fast, and for tensors of which alignment.
_SMALL_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "lltm": (*_DTYPE_SIZES, *[c_void_p] * 8),
    "lltm_backward": (*_DTYPE_SIZES, *_GRADIENTS, *[c_void_p] * 8),
}
_SMALL_CUDA_SIGNATURES: dict[str, tuple[Any, ...]] = {
    **_SMALL_SIGNATURES,
    "lltm_bias_backward": (c_int32, c_int64, c_int64, *[c_void_p] * 2),
    "lltm_input_backward": (c_int64, c_int64, c_int64, *[c_void_p] * 4),
}

_library = torch.library.Library("extops", "FRAGMENT")


def load(libraries: dict[str, Path]) -> None:
    """Defines the operators and registers the kernels, by type of device."""
    for schema in _schemas(libraries["cpu"]):
        _library.define(schema)
    for name, library in libraries.items():
        device = DEVICES[name](library)
        for operator, function in OPERATORS.items():
            _library.impl(operator, partial(function, device), device.key)


def _schemas(library: Path) -> list[str]:
    read = ctypes.CDLL(str(library)).extops_schema
    read.argtypes, read.restype = (ctypes.c_size_t,), c_char_p
    schemas: list[str] = []
    while schema := read(len(schemas)):
        schemas.append(schema.decode())
    return schemas


class Device:
    """The entry points of one library, and how to call them."""

    key: str
    has_tf32: bool
    signatures: ClassVar[dict[str, tuple[Any, ...]]]
    small_signatures: ClassVar[dict[str, tuple[Any, ...]]]

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        suffix = self.key.lower()
        self.kernels: dict[str, Callable[..., bytes | None]] = {}
        for name, signature in (self.signatures | self.small_signatures).items():
            function = library[f"extops_{name}_{suffix}"]
            function.argtypes, function.restype = signature, c_char_p
            self.kernels[name] = function
        self.alignments: dict[str, Callable[..., int]] = {}
        for name in self.small_signatures:
            function = library[f"extops_{name}_alignment_{suffix}"]
            function.argtypes, function.restype = _DTYPE_SIZES, c_int64
            self.alignments[name] = function

    def product_dtype(self, dtype: torch.dtype, allow_tf32: bool) -> int:
        """How to multiply, in the kernels' numbers."""
        return _TF32 if self.has_tf32 and allow_tf32 and dtype is torch.float32 else _DTYPES[dtype]

    def alignment(self, name: str, *dtype_and_sizes: int) -> int:
        """0 where the kernel ``name`` for small problems does not exist or pay off, else what its tensors start at."""
        return self.alignments[name](*dtype_and_sizes) if name in self.alignments else 0

    def run(self, name: str, like: Tensor, *arguments: Any) -> None:
        """Calls a kernel for the ``like.numel()`` elements of an output on the device of ``like``."""
        raise NotImplementedError

    def run_whole(self, name: str, like: Tensor, *arguments: Any) -> None:
        """Calls a kernel for all of a small problem on the device of ``like``."""
        raise NotImplementedError


class _Cpu(Device):
    key = "CPU"
    has_tf32 = False
    signatures: ClassVar = {k: (*v, c_int64, c_int64) for k, v in _SIGNATURES.items()}
    small_signatures: ClassVar = {k: (*v, c_int64, c_int64) for k, v in _SMALL_SIGNATURES.items()}

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
        others = [_begin(kernel, *arguments, *piece) for piece in pieces[1:]]
        for error in [kernel(*arguments, *pieces[0]), *(wait() for wait in others)]:
            _check_success(error)

    def run_whole(self, name: str, like: Tensor, *arguments: Any) -> None:
        _check_success(self.kernels[name](*arguments, 0, like.shape[1]))


class _Cuda(Device):
    key = "CUDA"
    has_tf32 = True
    signatures: ClassVar = {k: (*v, c_void_p) for k, v in _SIGNATURES.items()}
    small_signatures: ClassVar = {k: (*v, c_void_p) for k, v in _SMALL_CUDA_SIGNATURES.items()}

    def run(self, name: str, like: Tensor, *arguments: Any) -> None:
        with torch.cuda.device(like.device):
            stream = torch._C._cuda_getCurrentRawStream(like.device.index)
            _check_success(self.kernels[name](*arguments, stream))

    run_whole = run


DEVICES: dict[str, type[Device]] = {"cpu": _Cpu, "cuda": _Cuda}


def _check_success(error: bytes | None) -> None:
    if error is not None:
        raise RuntimeError(error.decode())


def _begin(kernel: Callable[..., bytes | None], *arguments: Any) -> Callable[[], bytes | None]:
    """Calls a kernel in another thread; what comes back waits for its result."""
    try:
        return _pool().submit(kernel, *arguments).result
    except RuntimeError:  # once the interpreter is about to exit, no thread takes anything on
        return partial(kernel, *arguments)


@cache
def _pool() -> ThreadPoolExecutor:
    """Threads that spend their time in kernels: ctypes lets go of the interpreter lock meanwhile."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="extops")


# A forked child inherits the pool but none of its threads, and would wait for them for ever.
os.register_at_fork(after_in_child=_pool.cache_clear)


def _lltm(
    device: Device,
    input: Tensor,
    weights: Tensor,
    bias: Tensor,
    old_h: Tensor,
    old_cell: Tensor,
    *,
    allow_tf32: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    _checks.check_lltm("lltm", input, weights, bias, old_h, old_cell)
    problem = device.product_dtype(input.dtype, allow_tf32), *input.shape, old_h.shape[1]
    if not (alignment := device.alignment("lltm", *problem)):
        # The kernel adds the bias at no cost, but not where the product would be rounded before.
        is_half = input.dtype.itemsize == 2
        x = torch.cat([old_h, input], dim=1)
        gates = torch.nn.functional.linear(x, weights, bias if is_half else None)
        return *_run_cell(device, None if is_half else bias, gates, old_cell), gates
    inputs = [_dense(x, alignment) for x in (input, weights, bias, old_h, old_cell)]
    new_h, new_cell = old_cell.new_empty(old_cell.shape), old_cell.new_empty(old_cell.shape)
    gates = old_cell.new_empty(len(input), 3 * old_h.shape[1])
    tensors = *inputs, new_h, new_cell, gates
    device.run_whole("lltm", old_cell, *problem, *_pointers(*tensors))
    return new_h, new_cell, gates


def _lltm_backward(
    device: Device,
    grad_h: Tensor | None,
    grad_cell: Tensor | None,
    input: Tensor,
    old_h: Tensor,
    gates: Tensor,
    new_cell: Tensor,
    *,
    allow_tf32: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    op = "lltm_backward"
    _checks.check_cell(op, gates, "new_cell", new_cell)
    _checks.check_cell_gradients(op, grad_h, grad_cell, new_cell)
    _checks.check_backward_inputs(op, input, old_h, new_cell)
    (batch, features), state_size = input.shape, new_cell.shape[1]
    problem = device.product_dtype(gates.dtype, allow_tf32), batch, features, state_size
    if not (alignment := device.alignment(op, *problem)):
        grad_gates, grad_old_cell = _lltm_cell_backward(device, grad_h, grad_cell, gates, new_cell)
        grad_weights = torch.mm(grad_gates.t(), torch.cat([old_h, input], dim=1))
        return grad_gates, grad_old_cell, grad_weights, _bias_backward(device, grad_gates, problem)
    inputs = [_dense(x, alignment) for x in (input, old_h, gates, new_cell)]
    grads = (
        gates.new_empty(batch, 3 * state_size),
        gates.new_empty(batch, state_size),
        gates.new_empty(3 * state_size, state_size + features),
        gates.new_empty(3 * state_size),
    )
    upstream = *_gradient(grad_h), *_gradient(grad_cell)
    pointers = _pointers(*inputs, *grads)
    device.run_whole(op, new_cell, *problem, *upstream, *pointers)
    return grads


def _bias_backward(device: Device, grad_gates: Tensor, problem: tuple[int, ...]) -> Tensor:
    dtype, batch, _, state_size = problem
    if not device.alignment("lltm_bias_backward", *problem):
        return grad_gates.sum(0)
    grad_bias = grad_gates.new_empty(3 * state_size)
    pointers = _pointers(grad_gates, grad_bias)
    device.run_whole("lltm_bias_backward", grad_gates, dtype, batch, state_size, *pointers)
    return grad_bias


def _lltm_input_backward(
    device: Device, grad_gates: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    op = "lltm_input_backward"
    _checks.check_input_backward(op, grad_gates, weights)
    batch, state_size = grad_gates.shape[0], grad_gates.shape[1] // 3
    features = weights.shape[1] - state_size
    if not device.alignment(op, _DTYPES[weights.dtype], batch, features, state_size):
        of_h, of_input = weights.split([state_size, features], dim=1)
        return torch.mm(grad_gates, of_h), torch.mm(grad_gates, of_input)
    grads = weights.new_empty(batch, state_size), weights.new_empty(batch, features)
    pointers = _pointers(grad_gates.contiguous(), weights.contiguous(), *grads)
    device.run_whole(op, grad_gates, batch, features, state_size, *pointers)
    return grads


def _lltm_cell(device: Device, gates: Tensor, old_cell: Tensor) -> tuple[Tensor, Tensor]:
    _checks.check_cell("lltm_cell", gates, "old_cell", old_cell)
    return _run_cell(device, None, gates.contiguous(), old_cell)


def _run_cell(
    device: Device, bias: Tensor | None, gates: Tensor, old_cell: Tensor
) -> tuple[Tensor, Tensor]:
    """Adds the bias, where there is one, to the gates first."""
    bias = None if bias is None else bias.contiguous()
    old_cell = old_cell.contiguous()
    new_h, new_cell = old_cell.new_empty(old_cell.shape), old_cell.new_empty(old_cell.shape)
    pointers = (
        None if bias is None else bias.data_ptr(),
        *_pointers(gates, old_cell, new_h, new_cell),
    )
    device.run("lltm_cell", old_cell, _DTYPES[gates.dtype], *old_cell.shape, *pointers)
    return new_h, new_cell


def _lltm_cell_backward(
    device: Device,
    grad_h: Tensor | None,
    grad_cell: Tensor | None,
    gates: Tensor,
    new_cell: Tensor,
) -> tuple[Tensor, Tensor]:
    op = "lltm_cell_backward"
    _checks.check_cell(op, gates, "new_cell", new_cell)
    _checks.check_cell_gradients(op, grad_h, grad_cell, new_cell)
    inputs = [x.contiguous() for x in (gates, new_cell)]
    grads = gates.new_empty(gates.shape), new_cell.new_empty(new_cell.shape)
    upstream = *_gradient(grad_h), *_gradient(grad_cell)
    pointers = _pointers(*inputs, *grads)
    device.run(op, new_cell, _DTYPES[gates.dtype], *new_cell.shape, *upstream, *pointers)
    return grads


def _round_ste(device: Device, input: Tensor) -> Tensor:
    _checks.check_tensor("round_ste", "input", input)
    output = torch.empty_like(input)
    _elementwise(device, "round_ste", output, input)
    return output


def _elementwise_mult(device: Device, a: Tensor, b: Tensor) -> Tensor:
    _checks.check_factors("elementwise_mult", a, b)
    out = _checks.empty_product("elementwise_mult", a, b)
    _elementwise(device, "elementwise_mult", out, a, b)
    return out


def _elementwise_mult_out(device: Device, a: Tensor, b: Tensor, out: Tensor) -> None:
    _checks.check_product("elementwise_mult_out", a, b, out)
    _elementwise(device, "elementwise_mult", out, a, b)


def _elementwise_mult_backward(
    device: Device, grad_output: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor]:
    _checks.check_mult_backward("elementwise_mult_backward", grad_output, a, b)
    grads = torch.empty_like(a), torch.empty_like(b)
    _elementwise(device, "elementwise_mult_backward", *grads, grad_output, a, b)
    return grads


def _dense(tensor: Tensor, alignment: int) -> Tensor:
    """The elements one after another from a multiple of ``alignment`` bytes on, in place or in a copy."""
    if tensor.is_contiguous() and tensor.data_ptr() % alignment == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _pointers(*tensors: Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _gradient(gradient: Tensor | None) -> tuple[int | None, int, int]:
    """The pointer and the strides of an upstream gradient, which may be absent or expanded."""
    if gradient is None:
        return None, 0, 0
    row_stride, column_stride = gradient.stride()
    return gradient.data_ptr(), row_stride, column_stride


def _elementwise(device: Device, name: str, output: Tensor, *others: Tensor) -> None:
    """Calls a kernel of csrc/kernels/elementwise.h; the operands come outputs first."""
    operands = (output, *others)
    shape = output.shape
    numbers = [*shape, *(n for x in operands for n in _broadcast_strides(x, shape))]
    geometry = (c_int64 * len(numbers))(*numbers)
    data = (c_void_p * len(operands))(*_pointers(*operands))
    device.run(name, output, _DTYPES[output.dtype], len(shape), geometry, data)


def _broadcast_strides(tensor: Tensor, shape: torch.Size) -> list[int]:
    missing = len(shape) - tensor.dim()
    own = zip(tensor.shape, tensor.stride(), shape[missing:], strict=True)
    return [0] * missing + [0 if size == 1 != to else stride for size, stride, to in own]


OPERATORS: dict[str, Callable[..., Any]] = {
    function.__name__.removeprefix("_"): function
    for function in (
        *(_lltm, _lltm_backward, _lltm_input_backward, _lltm_cell, _lltm_cell_backward),
        *(_round_ste, _elementwise_mult, _elementwise_mult_out, _elementwise_mult_backward),
    )
}
"""By name; each takes a device before its own arguments."""
