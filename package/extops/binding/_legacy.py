"""The legacy binding, for torch 2.4 to 2.9: kernels are called with raw pointers through ctypes, and the operators are
defined from Python. Nothing in the libraries depends on the version of torch or Python.

Newer torch has the stable binding, whose operators can be called without Python; it takes nothing from here. What goes
when older torch is no longer served is listed in docs/design.md.
"""

import ctypes
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_char_p, c_double, c_int32, c_int64, c_void_p
from functools import partial
from typing import Any

import torch
from torch import Tensor

from extops import _private
from extops._private import mm
from extops.binding import _libraries, _schemas
from extops.binding._libraries import DTYPES, Library

Kernel = Callable[..., "bytes | None"]
Results = tuple[Tensor, ...]

_library = torch.library.Library("extops", "FRAGMENT")


def load() -> None:
    """Defines the operators and registers the kernels, by type of device."""
    for operator in _schemas.OPERATORS.values():
        _library.define(operator.schema)
    for device in map(_libraries.library, _libraries.paths):
        for name, function in _operators().items():
            of_device = partial(_outside_autocast, function, device)
            _library.impl(name, of_device, device.device.upper())


def _outside_autocast(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    with _private.without_autocast():
        return function(*arguments, **options)


_POINTWISE_GRAIN = 65536
"""Elements below which a second thread costs more than it saves."""


def _types_of_place(device: Library) -> tuple[Any, ...]:
    """Of what an entry point takes last: the first piece of work and the end, or a stream."""
    return (c_void_p,) if device.is_cuda else (c_int64, c_int64)


def _call(op: str, like: Tensor, count: int, grain: int, kernel: Kernel, *arguments: Any) -> None:
    """Calls a kernel on the device of ``like``, for ``count`` pieces of work that threads of a CPU may divide."""
    call = partial(kernel, *arguments)
    threads = min(torch.get_num_threads(), count // grain)
    if like.is_cuda:
        with torch.cuda.device(like.device):
            errors = [call(torch.cuda.current_stream().cuda_stream)]
    elif threads <= 1:
        errors = [call(0, count)]
    else:
        ends = [count * thread // threads for thread in range(threads + 1)]
        try:  # ctypes releases the interpreter lock while a kernel runs
            with ThreadPoolExecutor(threads, thread_name_prefix="extops") as pool:
                errors = [*pool.map(call, ends[:-1], ends[1:])]
        except RuntimeError:  # the interpreter is about to exit: threads accept no work
            errors = [call(0, count)]
    for error in errors:
        if error is not None:
            raise RuntimeError(f"{op}: {error.decode()}")


# -- operators with a struct: the sizes, then the tensors


def _run(
    device: Library,
    kernel: str,
    dtype: int,
    sizes: Sequence[int],
    tensors: Sequence[Tensor | None],
    results: Sequence[Tensor | None],
    *,
    upstream: Sequence[Tensor | None] = (),
    count: int,
    grain: int = _POINTWISE_GRAIN,
    more: Sequence[int] = (),
) -> None:
    """Calls a kernel, and hands over what its function takes ``more``. Upstream gradients, which come first, may have
    any strides; other tensors are made dense.
    """
    dense = [None if x is None else _dense(x) for x in tensors]
    triples = ((0, 0, 0) if x is None else (x.data_ptr(), *x.stride()) for x in upstream)
    pointers = (0 if x is None else x.data_ptr() for x in (*dense, *results))
    words = [*sizes, *itertools.chain(*triples), *pointers]
    like = next(x for x in results if x is not None)
    types = c_char_p, c_int32, c_void_p, *[c_int64] * len(more), *_types_of_place(device)
    entry = device.entry(kernel, *types)
    _call(kernel, like, count, grain, entry, dtype, (c_int64 * len(words))(*words), *more)


def _dense(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if it is not contiguous or not aligned to 16 bytes, as kernels of sequences need it."""
    is_dense = tensor.is_contiguous() and tensor.data_ptr() % 16 == 0
    return tensor if is_dense else tensor.clone(memory_format=torch.contiguous_format)


def _both(weights: Sequence[Tensor], state_size: int) -> Sequence[Tensor]:
    """Those of the state and of the input; of joined ones, which lie so, views."""
    return weights[::-1] if len(weights) == 2 else weights[0].tensor_split([state_size], dim=1)


# -- one step, after or before GEMMs of torch, whose switch allows TF32: csrc/kernels/step.h has the kernels' structs


def _step(name: str, device: Library, input: Tensor, *arguments: Any, **_: bool) -> Results:
    *parameters, h_0, c_0 = arguments
    half = len(parameters) // 2
    weights, biases = parameters[:half], parameters[half:]
    h, c, gates = _schemas.OPERATORS[name].new_results(input, *arguments)
    products: list[Tensor | None]
    if half == 1:
        # The kernel adds the bias for free. In 16-bit types linear() adds it, before it rounds the result.
        bias = biases.pop() if input.dtype.itemsize == 2 else None
        products = [torch.nn.functional.linear(torch.cat([h_0, input], 1), weights[0], bias), None]
    else:
        products = [mm(input, weights[0].t()), mm(h_0, weights[1].t())]
    sizes = *input.shape, h_0.shape[1], *[0] * 6  # no factors and strides of GEMMs in the kernel
    tensors = *products, *(*biases, None, None)[:2], c_0
    _run(device, name, DTYPES[input.dtype], sizes, tensors, (h, c, gates), count=h.numel())
    return h, c, gates


def _step_backward(name: str, device: Library, *arguments: Any) -> Results:
    upstream, tensors = arguments[:2], arguments[2:]
    gates, saved_c = tensors
    results = _schemas.OPERATORS[name].new_results(*arguments)
    sizes, none = (saved_c.shape[0], 0, saved_c.shape[1]), [None] * 8  # of GEMMs in the kernel
    given = device, name, DTYPES[gates.dtype], sizes, tensors, (*results, *none)
    _run(*given, upstream=upstream, count=saved_c.numel())
    return results


def _step_parameters_backward(name: str, device: Library, *arguments: Any, **_: bool) -> Results:
    cell = name.removesuffix("_step_parameters_backward")
    _schemas.OPERATORS[name].check(*arguments)
    grad_h, grad_c, input, h_0, gates, saved_c = arguments
    found = _step_backward(f"{cell}_step_backward", device, grad_h, grad_c, gates, saved_c)
    grad_x, of_h = found[:2]
    if _schemas.CELLS[cell].has_one_gradient:
        of_h = grad_x
    if len(_schemas.OPERATORS[name].results) == 5:
        return *found, torch.mm(grad_x.t(), torch.cat([h_0, input], dim=1)), grad_x.sum(0)
    return *found, mm(grad_x.t(), input), mm(of_h.t(), h_0), grad_x.sum(0), of_h.sum(0)


def _step_input_backward(name: str, device: Library, *arguments: Any, **_: bool) -> Results:
    cell = name.removesuffix("_step_input_backward")
    sizes = _schemas.OPERATORS[name].check(*arguments)
    grad_x, grad_h_part, grad_c_0, *weights = arguments
    of_h, of_x = _both(weights, sizes["state_size"])
    part = grad_x if _schemas.CELLS[cell].has_one_gradient else grad_h_part
    towards_h = mm(part, of_h)
    return mm(grad_x, of_x), towards_h if grad_c_0 is None else towards_h + grad_c_0


# -- whole sequences: the kernel's struct is the sizes, what it reads and what it writes (csrc/kernels/sequence.h)


def _sequence(
    name: str,
    device: Library,
    input: Tensor,
    *arguments: Any,
    reverse: bool = False,
    allow_tf32: bool = False,
    training: bool = True,
) -> Results:
    *parameters, h_0, c_0, lengths = arguments
    results = _schemas.OPERATORS[name].new_results(input, *arguments, training=training)
    output, h_n, _, gates, cells = results
    half = len(parameters) // 2
    weights_h, weights_x = _both(parameters[:half], h_0.shape[1])
    biases = (*parameters[half:], None)[:2]
    rows = _schemas.rows(input, _schemas.is_batch_first(input))
    input_gates = _multiply(rows, weights_x.t())
    if output.numel() == 0:
        last = (x.clone(memory_format=torch.contiguous_format) for x in (h_0, c_0))
        return output, *last, gates, cells

    def recurrent(step: int) -> Tensor:
        return _multiply(h_n if step > 0 else h_0, weights_h.t())

    weights_h = _aligned(name, weights_h, h_0.shape[1])
    tensors = input_gates, weights_h[0], *biases, h_0, c_0, lengths
    of_call = device, name, input, weights_h.stride(0), reverse, allow_tf32
    _run_sequence(*of_call, tensors, results, recurrent)
    return results


def _sequence_backward(
    name: str, device: Library, *arguments: Any, reverse: bool = False, allow_tf32: bool = False
) -> Results:
    grad_output, *upstream, weight_hh, gates, cells, lengths = arguments
    results = _schemas.OPERATORS[name].new_results(*arguments)
    time = len(cells)
    grad_gates, *grad_states = results
    if cells.numel() == 0:
        for result, gradient in zip(grad_states, upstream, strict=True):
            result.zero_() if gradient is None else result.copy_(gradient)
        return results
    weights_h = _aligned(name, weight_hh, cells.shape[2])

    def recurrent(step: int) -> Tensor | None:
        if step == 0:
            return None
        before = grad_gates[step - 1 if reverse else time - step]
        return _multiply(before[:, -len(weights_h) :], weights_h)

    batch_first = _schemas.is_batch_first(gates)
    of_output, *others = (
        x if x is None else _schemas.rows(x, batch_first) for x in (grad_output, gates, cells)
    )
    tensors = of_output, *upstream, weights_h[0], *others, lengths
    of_call = device, name, gates, weights_h.stride(0), reverse, allow_tf32
    _run_sequence(*of_call, tensors, results, recurrent)
    return results


def _aligned(op: str, weights: Tensor, state_size: int) -> Tensor:
    """Recurrent weights as a kernel gets them: dense rows, which may lie apart."""
    if weights.shape[1] != state_size:
        raise RuntimeError(
            f"{op}: two directions at once need torch 2.10, but this is {torch.__version__}"
        )
    is_aligned = weights.stride(1) == 1 and weights.data_ptr() % 16 == 0
    return weights if is_aligned else weights.clone(memory_format=torch.contiguous_format)


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """A GEMM, whose result the kernel adds to others: in float32 for 16-bit types, since rounding it first would lose
    digits.
    """
    dtype = torch.promote_types(a.dtype, torch.float32)
    return torch.mm(a.to(dtype), b.to(dtype))


def _run_sequence(
    device: Library,
    name: str,
    like: Tensor,
    weights_stride: int,
    reverse: bool,
    allow_tf32: bool,
    tensors: Sequence[Tensor | None],
    results: Sequence[Tensor],
    recurrent: Callable[[int], Tensor | None],
) -> None:
    """All steps in one kernel or, if a GPU has none for the problem, a GEMM and a kernel launch for each step.

    The sequence has the memory order of ``like``, one of its tensors.
    """
    backward = name.endswith("_backward")
    time, batch, _ = like.shape
    state_size = results[1].shape[1]
    strides = (1, time) if _schemas.is_batch_first(like) else (batch, 1)
    sizes = [time, batch, state_size, weights_stride, *strides, 1, int(reverse), 1, 0, 0]
    given = device, name, device.gemm_dtype(like.dtype, allow_tf32), sizes
    if not device.is_cuda:
        arguments = (*tensors, None), (*results, None)
        return _run(*given, *arguments, count=batch, grain=1 + 80_000 // (time * state_size**2))
    cell, _, _ = name.partition("_sequence")
    with torch.cuda.device(like.device):
        stream = torch.cuda.current_stream().cuda_stream
        plan = device.plan(cell, given[2], (c_int64 * len(sizes))(*sizes), backward, stream)
    if plan.kernel != 0:
        workspace = like.new_empty(plan.workspace, dtype=torch.uint8)
        arguments = (*tensors, None), (*results, workspace)
        return _run(*given, *arguments, count=0, more=(plan.kernel,))
    compute = torch.promote_types(like.dtype, torch.float32)
    workspace = like.new_empty(1 + backward, batch, state_size, dtype=compute)
    for step in range(time + backward):
        sizes[-1] = step
        arguments = (*tensors, recurrent(step)), (*results, workspace)
        _run(device, name.replace("sequence", "sequence_step"), *given[2:], *arguments, count=0)


# -- elementwise operators


def _elementwise(operator: _schemas.Operator, index: int, device: Library, *arguments: Any) -> Any:
    """Calls kernel ``index`` of csrc/kernels/elementwise.h."""
    tensors, numbers = operator.split(arguments)
    new = operator.new_results(*tensors)
    inputs, outputs = (tensors[:-1], tensors[-1:]) if operator.out else (tensors, new)
    shape = outputs[0].shape
    operands = (*outputs, *inputs)
    extents = [*shape, *itertools.chain(*(x.expand(shape).stride() for x in operands))]
    geometry = (c_int64 * len(extents))(*extents)
    data = (c_void_p * len(operands))(*(x.data_ptr() for x in operands))
    dtype, count = DTYPES[inputs[0].dtype], outputs[0].numel()
    kernels = device.entry("elementwise", ctypes.POINTER(c_void_p * 2), ctypes.c_size_t)
    types = c_char_p, c_int32, c_int64, *[c_void_p] * 3, *_types_of_place(device)
    kernel = ctypes.CFUNCTYPE(*types)(kernels(index).contents[1])
    given = dtype, len(shape), geometry, data, (c_double * len(numbers))(*numbers)
    _call(operator.name, outputs[0], count, _POINTWISE_GRAIN, kernel, *given)
    return None if operator.out else new if len(new) > 1 else new[0]


def _operators() -> dict[str, Callable[..., Any]]:
    """By name; each takes a device before its own arguments."""
    of_steps: Any = _step, _step_backward, _step_parameters_backward, _step_input_backward
    found: dict[str, Callable[..., Any]] = {}
    for cell in _schemas.CELLS:
        for function in (_sequence, _sequence_backward, *of_steps):
            name = f"{cell}{function.__name__}"
            found[name] = partial(function, name)
    elementwise = itertools.count()  # their kernels are in this order
    for name, operator in _schemas.OPERATORS.items():
        if name not in found:
            found[name] = partial(_elementwise, operator, next(elementwise))
    return found
