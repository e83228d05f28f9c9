"""The legacy binding, for torch 2.4 to 2.9: kernels are called with raw pointers through ctypes, and the operators are
defined from Python. Nothing in the libraries depends on the version of torch or Python.

Newer torch has the stable binding, whose operators can be called without Python; it takes nothing from here. What goes
when older torch is no longer served is listed in docs/design.md.
"""

import ctypes
import itertools
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_char_p, c_double, c_int32, c_int64, c_void_p
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from extops._gemm import mm
from extops.binding import _libraries, _schemas
from extops.binding._libraries import DTYPES
from extops.calling import _autocast

Kernel = Callable[..., "bytes | None"]

_library = torch.library.Library("extops", "FRAGMENT")


def load() -> None:
    """Defines the operators and registers the kernels, by type of device."""
    for operator in _schemas.OPERATORS.values():
        _library.define(operator.schema)
    for name in _libraries.paths:
        device = _DEVICES[name](name)
        for operator_name, function in _operators().items():
            _library.impl(operator_name, partial(function, device), device.key)


class Device(_libraries.Library):
    """A type of device: its kernels, and where and by how many threads they run."""

    key: str
    """The dispatcher's."""
    where: tuple[Any, ...]
    """The types of what an entry point takes last."""

    def alignment(self, name: str, dtype: int, sizes: Sequence[int]) -> int:
        """The alignment, in bytes, of the tensors of the kernel ``name``; 0 where another way is faster."""
        entry = self.entry(f"{name}_alignment", c_int64, c_int32, c_void_p)
        return int(entry(dtype, (c_int64 * len(sizes))(*sizes)))

    def run(
        self, op: str, like: Tensor, count: int, grain: int, kernel: Kernel, *arguments: Any
    ) -> None:
        """Calls a kernel on the device of ``like``, for ``count`` pieces of work that threads may divide."""
        raise NotImplementedError


class _Cpu(Device):
    key = "CPU"
    where = (c_int64, c_int64)

    def run(
        self, op: str, like: Tensor, count: int, grain: int, kernel: Kernel, *arguments: Any
    ) -> None:
        threads = min(torch.get_num_threads(), count // grain) if grain else 1
        if threads <= 1:
            return _check_success(op, kernel(*arguments, 0, count))
        step = math.ceil(count / threads)
        pieces = [(begin, min(begin + step, count)) for begin in range(0, count, step)]
        others = [_begin(kernel, *arguments, *piece) for piece in pieces[1:]]
        for error in [kernel(*arguments, *pieces[0]), *(wait() for wait in others)]:
            _check_success(op, error)


class _Cuda(Device):
    key = "CUDA"
    where = (c_void_p,)

    def run(
        self, op: str, like: Tensor, count: int, grain: int, kernel: Kernel, *arguments: Any
    ) -> None:
        with torch.cuda.device(like.device):
            stream = torch.cuda.current_stream(like.device).cuda_stream
            _check_success(op, kernel(*arguments, stream))


_DEVICES: dict[str, type[Device]] = {"cpu": _Cpu, "cuda": _Cuda}

_POINTWISE_GRAIN = 65536
"""Elements below which a second thread costs more than it saves."""


def _check_success(op: str, error: bytes | None) -> None:
    if error is not None:
        raise RuntimeError(f"{op}: {error.decode()}")


def _begin(kernel: Kernel, *arguments: Any) -> Callable[[], bytes | None]:
    """Calls a kernel in another thread; the function that is returned waits for the result."""
    try:
        return _pool().submit(kernel, *arguments).result
    except RuntimeError:  # the interpreter is about to exit: threads accept no work
        return partial(kernel, *arguments)


@cache
def _pool() -> ThreadPoolExecutor:
    """Threads for kernels: ctypes releases the interpreter lock while one runs."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="extops")


# A forked child inherits the pool but none of its threads, and would wait for them for ever.
os.register_at_fork(after_in_child=_pool.cache_clear)


# -- operators with a table: the kernel's struct is the sizes, then the tensors in the order of the table


def _problem(operator: str, *tensors: Tensor | None) -> list[int]:
    """Checks the arguments; returns the sizes in the order of the kernel's struct."""
    found = _schemas.OPERATORS[operator].check(*tensors)
    return [found.get(size, 0) for size in _schemas.OPERATORS[operator].sizes]


def _run(
    device: Device,
    kernel: str,
    dtype: int,
    sizes: Sequence[int],
    tensors: Sequence[Tensor | None],
    results: Sequence[Tensor | None],
    *,
    upstream: Sequence[Tensor | None] = (),
    count: int,
    grain: int = 0,
    more: Sequence[int] = (),
) -> None:
    """Calls a kernel. Upstream gradients, which come first, may have any strides; other tensors are made contiguous."""
    dense = [None if x is None else _dense(x, 1) for x in tensors]
    words = [*sizes, *_strided(*upstream), *_pointers(*dense, *results)]
    like = next(x for x in results if x is not None)
    _call(device, kernel, dtype, words, like, count, grain, *more)


def _call(
    device: Device,
    kernel: str,
    dtype: int,
    words: Sequence[int],
    like: Tensor,
    count: int,
    grain: int,
    *more: int,
) -> None:
    """Calls a kernel with the words of its struct, and what its function takes more."""
    types = c_char_p, c_int32, c_void_p, *[c_int64] * len(more), *device.where
    entry = device.entry(kernel, *types)
    device.run(kernel, like, count, grain, entry, dtype, (c_int64 * len(words))(*words), *more)


def _pointers(*tensors: Tensor | None) -> list[int]:
    return [0 if x is None else x.data_ptr() for x in tensors]


def _strided(*upstream: Tensor | None) -> list[int]:
    triples = ((0, 0, 0) if x is None else (x.data_ptr(), *x.stride()) for x in upstream)
    return [number for triple in triples for number in triple]


def _dense(tensor: Tensor, alignment: int) -> Tensor:
    """The tensor, or a copy if it is not contiguous or not aligned to ``alignment`` bytes."""
    if tensor.is_contiguous() and tensor.data_ptr() % alignment == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


# -- one step: csrc/kernels/step.h has the kernels' structs


def _aligned_weights(
    weights: Sequence[Tensor], state_size: int, alignment: int
) -> tuple[Tensor, Tensor]:
    """Those of the input and of the state; of joined ones, ``[weights_h | weights_x]``, two views."""
    dense = [_dense(x, alignment) for x in weights]
    if len(dense) == 2:
        return dense[0], dense[1]
    return dense[0][:, state_size:], dense[0][:, :state_size]


def _grain_of_columns(gates: int, sizes: Sequence[int]) -> int:
    batch, features, state_size = sizes
    return 1 + 250_000 // max(gates * batch * (state_size + features), 1)


def _step(
    name: str,
    device: Device,
    input: Tensor,
    *arguments: Any,
    allow_tf32: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    *parameters, h_0, c_0 = arguments
    half = len(parameters) // 2
    weights, biases = parameters[:half], parameters[half:]
    h, c, gates = _schemas.OPERATORS[name].new_results(input, *arguments)
    state_size = h_0.shape[1]
    sizes = *input.shape, state_size
    dtype = device.gemm_dtype(input.dtype, allow_tf32)
    count, grain, like = h.numel(), _POINTWISE_GRAIN, h
    factors: list[Tensor | None] = [None] * 4
    products: list[Tensor | None] = [None] * 2
    strides = [0, 0]
    if alignment := device.alignment(name, dtype, sizes):
        of_x, of_h = _aligned_weights(weights, state_size, alignment)
        factors = [_dense(input, alignment), _dense(h_0, alignment), of_x, of_h]
        strides = [of_x.stride(0), of_h.stride(0)]
        count, grain = state_size, _grain_of_columns(gates.shape[1] // max(state_size, 1), sizes)
    elif half == 1:
        # The kernel adds the bias for free. In 16-bit types linear() adds it, before it rounds the result.
        bias = biases.pop() if input.dtype.itemsize == 2 else None
        gates = torch.nn.functional.linear(torch.cat([h_0, input], dim=1), weights[0], bias)
        products = [gates, None]
    else:
        products = [mm(input, weights[0].t()), mm(h_0, weights[1].t())]
    dense = [
        None if x is None else _dense(x, 1) for x in (*biases, *[None] * (2 - len(biases)), c_0)
    ]
    pointers = _pointers(*factors), _pointers(*products, *dense, h, c, gates)
    _call(device, name, dtype, [*sizes, *pointers[0], *strides, *pointers[1]], like, count, grain)
    return h, c, gates


def _step_backward(
    name: str,
    device: Device,
    grad_h: Tensor | None,
    grad_c: Tensor | None,
    gates: Tensor,
    saved_c: Tensor,
) -> tuple[Tensor, ...]:
    results = _schemas.OPERATORS[name].new_results(grad_h, grad_c, gates, saved_c)
    dtype, count = DTYPES[gates.dtype], saved_c.numel()
    dense = _dense(gates, 1), _dense(saved_c, 1)
    words = [*_strided(grad_h, grad_c), *_pointers(*dense, *results), *[0] * 8]
    sizes = saved_c.shape[0], 0, saved_c.shape[1]
    _call(device, name, dtype, [*sizes, *words], saved_c, count, _POINTWISE_GRAIN)
    return results


def _step_parameters_backward(
    name: str,
    device: Device,
    grad_h: Tensor | None,
    grad_c: Tensor | None,
    input: Tensor,
    h_0: Tensor,
    gates: Tensor,
    saved_c: Tensor,
    *,
    allow_tf32: bool = False,
) -> tuple[Tensor, ...]:
    upstream, tensors = (grad_h, grad_c), (input, h_0, gates, saved_c)
    cell = name.removesuffix("_step_parameters_backward")
    results = _schemas.OPERATORS[name].new_results(*upstream, *tensors)
    dtype = device.gemm_dtype(gates.dtype, allow_tf32)
    state_size = saved_c.shape[1]
    sizes = *input.shape, state_size
    kernel = f"{cell}_step_backward"
    alignment_of = kernel if device.is_cuda else f"{cell}_step"
    if alignment := device.alignment(alignment_of, dtype, sizes):
        parameters = results[3:]
        half = len(parameters) // 2
        of_x, of_h = _aligned_weights(parameters[:half], state_size, 1)
        input, h_0, gates, saved_c = (_dense(x, alignment) for x in tensors)
        biases = (*parameters[half:], None)[:2]
        words = [
            *(*sizes, *_strided(*upstream)),
            *_pointers(gates, saved_c, *results[:3], input, h_0, of_x, of_h),
            *(of_x.stride(0), of_h.stride(0), *_pointers(*biases)),
        ]
        grain = _grain_of_columns(_schemas.CELLS[cell].gates, sizes)
        _call(device, kernel, dtype, words, gates, state_size, grain)
        return results
    pointwise = _step_backward(kernel, device, *upstream, gates, saved_c)
    grad_x, grad_h_part, _ = pointwise
    of_h = grad_x if _schemas.CELLS[cell].has_one_gradient else grad_h_part
    if len(results) == 5:
        grad_weights = torch.mm(grad_x.t(), torch.cat([h_0, input], dim=1))
        return *pointwise, grad_weights, grad_x.sum(0)
    return *pointwise, mm(grad_x.t(), input), mm(of_h.t(), h_0), grad_x.sum(0), of_h.sum(0)


def _step_input_backward(
    name: str,
    device: Device,
    grad_x: Tensor,
    grad_h_part: Tensor,
    grad_c_0: Tensor | None,
    *weights: Tensor,
    allow_tf32: bool = False,
) -> tuple[Tensor, ...]:
    operator = _schemas.OPERATORS[name]
    grad_input, grad_h_0 = results = operator.new_results(grad_x, grad_h_part, grad_c_0, *weights)
    sizes = *grad_input.shape, grad_h_0.shape[1]
    dtype = device.gemm_dtype(grad_x.dtype, allow_tf32)
    of_x, of_h = _aligned_weights(weights, sizes[2], 1)
    if device.is_cuda and device.alignment(name, dtype, sizes):
        dense = [None if x is None else _dense(x, 1) for x in (grad_x, grad_h_part, grad_c_0)]
        strides = of_x.stride(0), of_h.stride(0)
        words = [*sizes, *_pointers(*dense, of_x, of_h), *strides, *_pointers(*results)]
        _call(device, name, dtype, words, grad_x, 0, 0)
        return results
    facts = _schemas.CELLS[name.removesuffix("_step_input_backward")]
    towards_h = mm(grad_x if facts.has_one_gradient else grad_h_part, of_h)
    return mm(grad_x, of_x), towards_h if grad_c_0 is None else towards_h + grad_c_0


# -- whole sequences: the kernel's struct is the sizes, what it reads and what it writes (csrc/kernels/sequence.h)

_SEQUENCE_ALIGNMENT = 16
"""In bytes, of every tensor that a kernel gets."""


def _sequence(
    name: str,
    device: Device,
    input: Tensor,
    *arguments: Any,
    reverse: bool = False,
    allow_tf32: bool = False,
    training: bool = True,
) -> tuple[Tensor, ...]:
    *parameters, h_0, c_0, lengths = arguments
    results = _schemas.OPERATORS[name].new_results(input, *arguments, training=training)
    output, h_n, _, gates, cells = results
    state_size, batch_first = h_0.shape[1], _schemas.is_batch_first(input)
    if len(parameters) == 2:  # both kinds of weights joined
        weights, bias = parameters
        weights_h, weights_x, *biases = weights[:, :state_size], weights[:, state_size:], bias, None
    else:
        weights_x, weights_h, *biases = parameters
    weights_h = _dense_rows(weights_h)
    # The kernel may write the gates where it reads the result of the input GEMM, if that holds all, in the same order.
    in_order = _schemas.CELLS[name.removesuffix("_sequence")].first_input == 0
    in_place = (
        training and in_order and input.dtype.itemsize > 2 and len(weights_x) == gates.shape[2]
    )
    memory = _schemas.rows(gates, batch_first) if in_place else None
    input_gates = _multiply(_schemas.rows(input, batch_first), weights_x.t(), memory)
    if output.numel() == 0:
        last = (x.clone(memory_format=torch.contiguous_format) for x in (h_0, c_0))
        return output, *last, gates, cells

    def recurrent(step: int) -> Tensor:
        return _multiply(h_n if step > 0 else h_0, weights_h.t())

    dtype = device.gemm_dtype(input.dtype, allow_tf32)
    dense = (x if x is None else _dense(x, _SEQUENCE_ALIGNMENT) for x in (*biases, h_0, c_0))
    tensors = input_gates, weights_h, *dense, lengths
    _run_sequence(device, name, dtype, reverse, input, weights_h, tensors, results, recurrent)
    return results


def _sequence_backward(
    name: str,
    device: Device,
    grad_output: Tensor | None,
    grad_h_n: Tensor | None,
    grad_c_n: Tensor | None,
    weights: Tensor,
    gates: Tensor,
    cells: Tensor,
    lengths: Tensor | None,
    *,
    reverse: bool = False,
    allow_tf32: bool = False,
) -> tuple[Tensor, ...]:
    upstream = grad_h_n, grad_c_n
    results = _schemas.OPERATORS[name].new_results(
        grad_output, *upstream, weights, gates, cells, lengths
    )
    time, _, state_size = cells.shape
    grad_gates, *grad_states = results
    if cells.numel() == 0:
        for result, gradient in zip(grad_states, upstream, strict=True):
            result.zero_() if gradient is None else result.copy_(gradient)
        return results
    weights_h = _dense_rows(weights[:, :state_size])

    def recurrent(step: int) -> Tensor | None:
        if step == 0:
            return None
        before = grad_gates[step - 1 if reverse else time - step]
        return _multiply(before[:, -len(weights_h) :], weights_h)

    def dense(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        return _dense(_schemas.rows(x, batch_first) if x.dim() == 3 else x, _SEQUENCE_ALIGNMENT)

    batch_first = _schemas.is_batch_first(gates)
    dtype = device.gemm_dtype(gates.dtype, allow_tf32)
    given = (dense(x) for x in (grad_output, *upstream))
    tensors = *given, weights_h, dense(gates), dense(cells), lengths
    _run_sequence(device, name, dtype, reverse, gates, weights_h, tensors, results, recurrent)
    return results


def _dense_rows(weights: Tensor) -> Tensor:
    """Recurrent weights as a kernel gets them: in place, if each row is dense, else in a copy."""
    rows, columns = weights.stride()
    aligned = weights.data_ptr() % _SEQUENCE_ALIGNMENT == 0
    return (
        weights if columns == 1 and rows >= weights.shape[1] and aligned else weights.contiguous()
    )


def _multiply(a: Tensor, b: Tensor, product: Tensor | None = None) -> Tensor:
    """A GEMM, whose result the kernel adds to others: in float32 for 16-bit types, since rounding it first would lose
    digits.

    Written into a given tensor, whose dtype autocast does not change.
    """
    dtype = torch.promote_types(a.dtype, torch.float32)
    if product is None:
        product = a.new_empty(a.shape[0], b.shape[1], dtype=dtype)
    if dtype is not a.dtype and a.is_cuda and hasattr(torch.ops.aten.mm, "dtype"):  # torch 2.8
        return torch.mm(a, b, out_dtype=dtype, out=product)
    return torch.mm(a.to(dtype), b.to(dtype), out=product)


def _run_sequence(
    device: Device,
    name: str,
    dtype: int,
    reverse: bool,
    like: Tensor,
    weights_h: Tensor,
    tensors: Sequence[Tensor | None],
    results: Sequence[Tensor],
    recurrent: Callable[[int], Tensor | None],
) -> None:
    """All steps in one kernel or, if a GPU has none for the problem, a GEMM and a kernel launch for each step.

    The sequence has the memory order of ``like``, one of its tensors.
    """
    time, batch, _ = like.shape
    state_size = weights_h.shape[1]
    strides = (1, time) if _schemas.is_batch_first(like) else (batch, 1)
    sizes = [time, batch, state_size, weights_h.stride(0), *strides, int(reverse), 0]
    # Only its address is wanted, and what is handed over must be dense.
    tensors = [x[0] if x is weights_h else x for x in tensors]
    if not device.is_cuda:
        grain = 1 + 250_000 // (time * weights_h.numel())
        arguments = (*tensors, None), (*results, None)
        return _run(device, name, dtype, sizes, *arguments, count=batch, grain=grain)
    backward = name.endswith("_backward")
    cell, _, _ = name.partition("_sequence")
    with torch.cuda.device(like.device):
        stream = torch.cuda.current_stream().cuda_stream
        plan = device.plan(cell, dtype, (c_int64 * len(sizes))(*sizes), backward, stream)
    if plan.kernel != 0:
        workspace = like.new_empty(plan.workspace, dtype=torch.uint8)
        arguments = (*tensors, None), (*results, workspace)
        return _run(device, name, dtype, sizes, *arguments, count=0, more=(plan.kernel,))
    compute = torch.promote_types(like.dtype, torch.float32)
    workspace = like.new_empty(1 + backward, batch, state_size, dtype=compute)
    for step in range(time + backward):
        sizes[-1] = step
        arguments = (*tensors, recurrent(step)), (*results, workspace)
        kernel = name.replace("sequence", "sequence_step")
        _run(device, kernel, dtype, sizes, *arguments, count=0)


# -- operators whose kernel serves every problem


def _generic(operator: _schemas.Operator, device: Device, *tensors: Tensor | None) -> Any:
    """An operator whose kernel serves every problem; threads divide the rows of the first result."""
    results = operator.new_results(*tensors)
    sizes = _problem(operator.name, *tensors)
    optional = sum(row.optional for row in operator.arguments)
    count = len(results[0])
    _run(
        *(device, operator.name, DTYPES[results[0].dtype], sizes, tensors[optional:], results),
        upstream=tensors[:optional],
        count=count,
        grain=1 + _POINTWISE_GRAIN * count // max(results[0].numel(), 1),
    )
    return results if len(results) > 1 else results[0]


# -- elementwise operators


def _elementwise(operator: _schemas.Operator, index: int, device: Device, *arguments: Any) -> Any:
    """Calls kernel ``index`` of csrc/kernels/elementwise.h."""
    tensors, numbers = operator.split(arguments)
    new = operator.new_results(*tensors)
    inputs, outputs = (tensors[:-1], tensors[-1:]) if operator.out else (tensors, new)
    shape = outputs[0].shape
    operands = (*outputs, *inputs)
    extents = [*shape, *(stride for x in operands for stride in _broadcast_strides(x, shape))]
    geometry = (c_int64 * len(extents))(*extents)
    data = (c_void_p * len(operands))(*(x.data_ptr() for x in operands))
    dtype, count = DTYPES[inputs[0].dtype], outputs[0].numel()
    kernel = _elementwise_kernel(device, index)
    given = dtype, len(shape), geometry, data, (c_double * len(numbers))(*numbers)
    device.run(operator.name, outputs[0], count, _POINTWISE_GRAIN, kernel, *given)
    return None if operator.out else new if len(new) > 1 else new[0]


@cache
def _elementwise_kernel(device: Device, index: int) -> Kernel:
    kernels = device.entry("elementwise", ctypes.POINTER(c_void_p * 2), ctypes.c_size_t)
    run = kernels(index).contents[1]
    return ctypes.CFUNCTYPE(c_char_p, c_int32, c_int64, *[c_void_p] * 3, *device.where)(run)


def _broadcast_strides(tensor: Tensor, shape: torch.Size) -> list[int]:
    missing = len(shape) - tensor.dim()
    own = zip(tensor.shape, tensor.stride(), shape[missing:], strict=True)
    return [0] * missing + [0 if size == 1 != to else stride for size, stride, to in own]


def _operators() -> dict[str, Callable[..., Any]]:
    """By name; each takes a device before its own arguments."""
    of_cells: dict[str, Callable[..., Any]] = {
        "sequence": _sequence,
        "sequence_backward": _sequence_backward,
        "step": _step,
        "step_backward": _step_backward,
        "step_parameters_backward": _step_parameters_backward,
        "step_input_backward": _step_input_backward,
    }
    found: dict[str, Callable[..., Any]] = {
        f"{cell}_{name}": partial(function, f"{cell}_{name}")
        for cell in _schemas.CELLS
        for name, function in of_cells.items()
    }
    elementwise = itertools.count()  # their kernels are in this order
    for name, operator in _schemas.OPERATORS.items():
        if name in found:
            continue
        if operator.sizes:
            found[name] = partial(_generic, operator)
        else:
            found[name] = partial(_elementwise, operator, next(elementwise))
    return {name: _autocast.outside(function) for name, function in found.items()}
