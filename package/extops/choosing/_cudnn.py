"""torch's own layers, which are cuDNN's on a GPU, where none of our persistent kernels fits."""

import contextlib
import functools
import os
import threading
from collections.abc import Sequence
from ctypes import c_char_p, c_int32, c_int64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from extops import _private, reference
from extops.binding import _schemas
from extops.binding._libraries import Library
from extops.calling import _autocast, _autograd
from extops.choosing import _choice, _packing
from extops.choosing._packing import States
from extops.ops.sequence import CELLS

_library = functools.cache(Library)
_cudnn: Any = torch.backends.cudnn
_AS_IT_IS = contextlib.nullcontext()
_DTYPES = torch.float32, torch.bfloat16, torch.float16
# Compiled with an older one, torch computes bfloat16 step by step.
_FIRST_WITH_BFLOAT16 = 91300
_is_kernel_named = bool(os.environ.get("EXTOPS_SEQUENCE_KERNEL"))

has_onednn = torch.backends.mkldnn.is_available()  # torch.compile cannot ask

Place = tuple[int, ...]


def place_of(input: Tensor, time: int, batch: int) -> Place:
    """What the choice of a GPU kernel for ``[T, B, I]``, or for packed rows, depends on, besides the cell, its size and
    the pass.
    """
    given = _autocast.cast(input[:0])[0].dtype if _autocast.is_on() else input.dtype
    dtype = _library("cuda").product_dtype(given, _private.allows_tf32())
    is_batch_first = input.dim() == 3 and _schemas.is_batch_first(input)
    stream = torch.cuda.current_stream(input.device).cuda_stream
    is_captured = torch.cuda.is_current_stream_capturing()
    return dtype, time, batch, is_batch_first, input.device.index, stream, is_captured


def kernel_of(cell: str, state_size: int, backward: bool, place: Place) -> str:
    """Our kernel for a pass."""
    dtype, time, batch, is_batch_first, device, stream, _ = place
    strides = (1, time) if is_batch_first else (batch, 1)
    # The stride of the weights is left out: no kernel depends on it.
    sizes = (c_int64 * 8)(time, batch, state_size, state_size, *strides, 0, 0)
    types = c_char_p, c_int32, c_void_p, c_int64, c_void_p
    entry = _library("cuda").entry(f"{cell}_sequence_kernel", *types)
    with torch.cuda.device(device):
        name: bytes = entry(dtype, sizes, backward, stream)
    return name.decode()


def is_acceptable(input: Tensor, is_ragged: bool) -> bool:
    """Whether cuDNN can compute layers of such an input, and no kernel was named by the variable."""
    if _is_kernel_named or not torch.cudnn_is_acceptable(input):
        return False
    if is_ragged:
        return True
    if input.dtype is torch.bfloat16 and (_cudnn.version() or 0) < _FIRST_WITH_BFLOAT16:
        return False
    return input.dtype in _DTYPES


def chosen(problem: _choice.Problem, input: Tensor) -> str:
    """Whether our kernels or cuDNN compute it on a GPU."""
    if not is_acceptable(input, problem.is_ragged):
        return _choice.OURS
    place = place_of(input, problem.time, problem.batch)
    return _chosen(problem, place, _private.allows_tf32())


@functools.lru_cache(maxsize=4096)
def _chosen(problem: _choice.Problem, place: Place, allow_tf32: bool) -> str:
    """Cached, since the choice takes the host longer than some layers take the GPU."""
    passes = (False, True) if problem.with_gradients else (False,)
    kernels = [kernel_of(problem.cell, problem.state, backward, place) for backward in passes]
    return _choice.on_gpu(problem, kernels, allow_tf32)


class _Strict:
    """Turns TF32 off for calls within, of any thread. The switch is global to the process: the first call turns it off,
    the last one on again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0
        self._was_on = False

    def __enter__(self) -> None:
        with self._lock:
            self._calls += 1
            if self._calls == 1:
                self._was_on = _private.cudnn_allows_tf32()
                if self._was_on:
                    _private.set_cudnn_tf32(False)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._calls -= 1
            if self._calls == 0 and self._was_on:
                _private.set_cudnn_tf32(True)


_strict = _Strict()


def _is_strict(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.is_cuda and not _private.allows_tf32()


def _precision_of(tensor: Tensor) -> Any:
    """cuDNN has its own switch for TF32, which is on by default; we follow the switch of matrix products."""
    return _strict if _is_strict(tensor) else _AS_IT_IS


class _Call(NamedTuple):
    """What the layers are, beside their tensors."""

    cell: str
    bidirectional: bool
    states: int
    width: int
    """How many parameters a direction has."""
    batch_sizes: Tensor | None
    """Of packed rows, on the CPU."""


def run(
    cell: str,
    bidirectional: bool,
    batch_sizes: Tensor | None,
    input: Tensor,
    states: Sequence[Tensor],
    parameters: Sequence[tuple[Tensor, ...]],
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """torch's layers for ``[T, B, I]``, or for packed rows; the parameters are by layers and directions."""
    inputs = input, *states, *sum(parameters, ())
    call = _Call(cell, bidirectional, len(states), len(parameters[0]), batch_sizes)
    needs_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    if needs_gradients and not _is_composed(call, input):
        if batch_sizes is not None:  # which the caller may change before a backward
            call = call._replace(batch_sizes=batch_sizes.clone())
        output, *last = _apply(call, *inputs)
    else:
        output, *last = _torchs(call, inputs, False)
    return output, tuple(last)


def _is_composed(call: _Call, input: Tensor) -> bool:
    """Whether torch's layers are a composition of differentiable calls themselves."""
    is_onednns = call.cell == "lstm" and call.batch_sizes is None and has_onednn
    return input.device.type == "cpu" and not (is_onednns and input.dtype in _DTYPES)


def _torchs(call: _Call, inputs: Sequence[Tensor], training: bool) -> tuple[Tensor, ...]:
    number, width = call.states, call.width
    input, parameters = inputs[0], inputs[1 + number :]
    states = tuple(x.contiguous() for x in inputs[1 : 1 + number])  # cuDNN refuses others
    layers = len(parameters) // (width * (1 + call.bidirectional))
    layer: Any = getattr(torch, call.cell)
    of_state = states if number > 1 else states[0]
    options = width == 4, layers, 0.0, training, call.bidirectional
    found: tuple[Tensor, ...]
    with _precision_of(input):
        if call.batch_sizes is None:
            found = layer(input, of_state, parameters, *options, False)
        else:
            found = layer(input, call.batch_sizes, of_state, parameters, *options)
    return found


def _composed(call: _Call, inputs: Sequence[Tensor], biases: Tensor | None) -> tuple[Tensor, ...]:
    """The same as a composition of differentiable calls, with the values of the biases as given."""
    number, width = call.states, call.width
    if biases is not None:
        others, given = _parted(call, inputs)
        values = biases.view(len(given), -1).unbind(0)
        inputs = _joined(call, others, list(map(reference.with_values, given, values)))
    input, states, parameters = inputs[0], inputs[1 : 1 + number], inputs[1 + number :]
    directions = 1 + call.bidirectional
    last = []
    for first in range(0, len(parameters) // width, directions):
        outputs = []
        for place in range(first, first + directions):
            of_direction = (*parameters[width * place : width * (place + 1)], None, None)[:4]
            initial = tuple(x[place] for x in states)
            output, final = _composed_direction(call, input, of_direction, initial, place > first)
            outputs.append(output)
            last.append(final)
        input = torch.cat(outputs, dim=-1)
    return input, *(torch.stack(x) for x in zip(*last, strict=True))


def _composed_direction(
    call: _Call, input: Tensor, parameters: Sequence[Any], states: States, reverse: bool
) -> tuple[Tensor, States]:
    """The output of a direction of a layer, and its last states."""

    def run(steps: Tensor, states: States) -> tuple[Tensor, States]:
        output, *final, _, _ = CELLS[call.cell].reference(
            steps, *parameters, states[0], states[-1], None, reverse=reverse
        )
        return output, tuple(final[: call.states])

    if call.batch_sizes is None:
        return run(input, states)
    # Steps of as many rows are as if they were not packed.
    unique, counts = torch.unique_consecutive(call.batch_sizes, return_counts=True)
    sizes, steps = unique.tolist(), counts.tolist()
    parts = input.split([count * size for count, size in zip(steps, sizes, strict=True)])

    def run_part(place: int, states: States) -> tuple[Tensor, States]:
        output, states = run(parts[place].view(steps[place], sizes[place], -1), states)
        return output.flatten(0, 1), states

    return _packing.run_in_pieces(run_part, sizes, states, reverse)


def _hollow(tensor: Tensor) -> Tensor:
    """Frees the memory of a tensor that is only a node's placeholder in a graph."""
    tensor.data = tensor.new_empty(()).expand_as(tensor)
    return tensor


class _Layers(torch.autograd.Function):
    """Keeps the graph of torch's layers, and saves what that saves as its own tensors: so these are freed after a
    backward, and seen by hooks, as with any other function.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, *inputs: Tensor) -> tuple[Tensor, ...]:
        needs = ctx.needs_input_grad[1:]
        # Not detached: the biases' values are not needed, and may change.
        leaves = [x.data.requires_grad_(needed) for x, needed in zip(inputs, needs, strict=True)]
        kept: list[Tensor] = []
        unpacked: list[Sequence[Tensor]] = []

        def keep(tensor: Tensor) -> int:
            kept.append(tensor.detach())
            return len(kept) - 1

        with torch.enable_grad(), saved_tensors_hooks(keep, lambda place: unpacked[-1][place]):
            # In training mode, since cuDNN has gradients only there.
            inner = _torchs(call, leaves, True)
        results = tuple(x.detach() for x in inner)
        others, biases = _parted(call, inputs)
        ctx.call, ctx.biases, ctx.unpacked = call, biases, unpacked
        ctx.set_materialize_grads(False)
        values = torch.cat(biases) if biases else None
        ctx.save_for_backward(values, *others, *kept)
        kept.clear()  # the graph holds the hooks
        first = 1 + call.states
        ctx.leaves = [*map(_hollow, leaves[:first]), *leaves[first:]]
        ctx.results = [_hollow(x) for x in inner]
        return results

    @staticmethod
    def backward(ctx: Any, *towards: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[1:]
        values, *saved = ctx.saved_tensors
        if _autograd.needs_composite():
            inputs = _joined(ctx.call, saved[: len(needs) - len(ctx.biases)], ctx.biases)

            def composite(*inputs: Tensor) -> tuple[Tensor, ...]:
                return _composed(ctx.call, inputs, values)

            found = _autograd.composite_gradients(composite, inputs, needs, towards)
        elif all(gradient is None for gradient in towards):
            found = (None,) * len(needs)
        else:
            # Tensors of any thread will do: several threads may run the backward of a retained graph.
            ctx.unpacked.append(saved[len(needs) - len(ctx.biases) :])
            try:
                found = _gradients(ctx.leaves, ctx.results, needs, towards)
            finally:
                ctx.unpacked.pop()
        return None, *found


@_autocast.outside
def _gradients(
    leaves: Sequence[Tensor],
    results: Sequence[Tensor],
    needs: Sequence[bool],
    towards: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    present = [(x, g) for x, g in zip(results, towards, strict=True) if g is not None]
    with _precision_of(leaves[0]):
        found = torch.autograd.grad(
            [result for result, _ in present],
            [leaf for leaf, needed in zip(leaves, needs, strict=True) if needed],
            [gradient for _, gradient in present],
            # Retaining holds no memory, but cuDNN's node would copy what it may need again.
            retain_graph=_private.keeps_graph(),
            materialize_grads=True,
        )
    remaining = iter(found)
    return tuple(next(remaining) if needed else None for needed in needs)


def _are_biases(call: _Call, count: int) -> list[bool]:
    """Which of the inputs are."""
    first = 1 + call.states
    return [place >= first and (place - first) % call.width > 1 for place in range(count)]


def _parted(call: _Call, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Those that are no biases, and those that are."""
    parts: tuple[list[Tensor], list[Tensor]] = [], []
    for is_bias, tensor in zip(_are_biases(call, len(inputs)), inputs, strict=True):
        parts[is_bias].append(tensor)
    return parts


def _joined(call: _Call, others: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    parts = iter(others), iter(biases)
    return [next(parts[is_bias]) for is_bias in _are_biases(call, len(others) + len(biases))]


_apply = _private.apply(_Layers)
