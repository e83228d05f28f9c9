"""torch's own layers, which are cuDNN's on a GPU, for what no kernel of ours computes in all steps at once."""

import contextlib
import functools
import os
import threading
from collections.abc import Sequence
from ctypes import c_char_p, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from extops import _autocast, _autograd, _private, _schemas, reference
from extops._libraries import Library
from extops.ops.sequence import GRU_CELL, LSTM_CELL

_library = functools.cache(Library)
_cudnn: Any = torch.backends.cudnn
_AS_IT_IS = contextlib.nullcontext()
_CELLS = {"lstm": LSTM_CELL, "gru": GRU_CELL}
_DTYPES = torch.float32, torch.bfloat16, torch.float16
# Compiled with an older one, torch computes bfloat16 step by step.
_FIRST_WITH_BFLOAT16 = 91300
_is_kernel_named = bool(os.environ.get("EXTOPS_SEQUENCE_KERNEL"))

Problem = tuple[int, ...]


def problem_of(input: Tensor) -> Problem:
    """What a kernel for ``[T, B, I]`` on a GPU is chosen by, but for the cell, its size and the pass."""
    given = _autocast.cast(input[:0])[0].dtype if _autocast.is_on() else input.dtype
    dtype = _library("cuda").product_dtype(given, _private.allows_tf32())
    time, batch, _ = input.shape
    is_batch_first = _schemas.is_batch_first(input)
    stream = torch.cuda.current_stream(input.device).cuda_stream
    is_captured = torch.cuda.is_current_stream_capturing()
    return dtype, time, batch, is_batch_first, input.device.index, stream, is_captured


def kernel_of(cell: str, state_size: int, backward: bool, problem: Problem) -> str:
    """The kernel of ours for a pass."""
    dtype, time, batch, is_batch_first, device, stream, _ = problem
    strides = (1, time) if is_batch_first else (batch, 1)
    # The stride of the weights is not asked: no kernel depends on it.
    sizes = (c_int64 * 8)(time, batch, state_size, state_size, *strides, 0, 0)
    types = c_char_p, c_int32, c_void_p, c_int64, c_void_p
    entry = _library("cuda").entry(f"{cell}_sequence_kernel", *types)
    with torch.cuda.device(device):
        name: bytes = entry(dtype, sizes, backward, stream)
    return name.decode()


@functools.lru_cache(maxsize=4096)
def _takes_steps(cell: str, state_size: int, with_backward: bool, problem: Problem) -> bool:
    """Remembered, as the host takes longer to ask than to compute some layers."""
    passes = (False, True) if with_backward else (False,)
    return any(kernel_of(cell, state_size, backward, problem) == "step" for backward in passes)


def is_acceptable(input: Tensor) -> bool:
    """Whether cuDNN computes layers of ``[T, B, I]``, of more than a step, and no kernel is named to do it."""
    if not input.is_cuda or input.dtype not in _DTYPES or len(input) < 2 or _is_kernel_named:
        return False
    if input.dtype is torch.bfloat16 and (_cudnn.version() or 0) < _FIRST_WITH_BFLOAT16:
        return False
    return torch.cudnn_is_acceptable(input)


def serves(cell: str, input: Tensor, state_size: int) -> bool:
    """Whether it shall: where our kernels would compute a pass by a product and a kernel for each step."""
    return _takes_steps(cell, state_size, torch.is_grad_enabled(), problem_of(input))


class _Strict:
    """Calls within, of any thread, are not in TF32. The switch is the process's: the first call turns it off, the last
    one on again.
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


def _precision_of(dtype: torch.dtype) -> Any:
    """cuDNN has a switch of its own for TF32, which is on by default; ours is that of products."""
    is_strict = dtype is torch.float32 and not _private.allows_tf32()
    return _strict if is_strict else _AS_IT_IS


def run(
    cell: str,
    input: Tensor,
    states: Sequence[Tensor],
    parameters: Sequence[tuple[Tensor, ...]],
    bidirectional: bool,
    dropout: float,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """torch's layers for ``[T, B, I]``; the parameters are those of each direction of each layer. With gradients
    there is no dropout.
    """
    inputs = input, *states, *sum(parameters, ())
    sizes = len(states), len(parameters[0])
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        output, *last = _apply(cell, bidirectional, sizes, *inputs)
    else:
        output, *last = _torchs(cell, bidirectional, sizes, inputs, dropout, dropout > 0)
    return output, tuple(last)


def _torchs(
    cell: str,
    bidirectional: bool,
    sizes: tuple[int, int],
    inputs: Sequence[Tensor],
    dropout: float,
    training: bool,
) -> tuple[Tensor, ...]:
    """``sizes`` are the numbers of states, and of parameters of a direction."""
    number, width = sizes
    input, parameters = inputs[0], inputs[1 + number :]
    states = tuple(x.contiguous() for x in inputs[1 : 1 + number])  # cuDNN refuses others
    layers = len(parameters) // (width * (1 + bidirectional))
    layer: Any = getattr(torch, cell)
    with _precision_of(input.dtype):
        found: tuple[Tensor, ...] = layer(
            input,
            states if number > 1 else states[0],
            parameters,
            width == 4,
            layers,
            dropout,
            training,
            bidirectional,
            False,
        )
    return found


def _composed(
    cell: str,
    bidirectional: bool,
    sizes: tuple[int, int],
    inputs: Sequence[Tensor],
    biases: Tensor | None,
) -> tuple[Tensor, ...]:
    """The same as a composition of differentiable calls, with the values of the biases as given."""
    number, width = sizes
    if biases is not None:
        others, given = _parted(sizes, inputs)
        values = biases.view(len(given), -1).unbind(0)
        inputs = _joined(sizes, others, list(map(reference.with_values, given, values)))
    input, states, parameters = inputs[0], inputs[1 : 1 + number], inputs[1 + number :]
    directions = 1 + bidirectional
    last = []
    for first in range(0, len(parameters) // width, directions):
        outputs = []
        for place in range(first, first + directions):
            of_direction = (*parameters[width * place : width * (place + 1)], None, None)[:4]
            output, *final, _, _ = _CELLS[cell].reference(
                input,
                *of_direction,
                states[0][place],
                states[-1][place],
                None,
                reverse=place > first,
            )
            outputs.append(output)
            last.append(final[:number])
        input = torch.cat(outputs, dim=2)
    return input, *(torch.stack(x) for x in zip(*last, strict=True))


def _hollow(tensor: Tensor) -> Tensor:
    """Lets go of the memory of a tensor that only stands for a place in a graph."""
    tensor.data = tensor.new_empty(()).expand_as(tensor)
    return tensor


class _Layers(torch.autograd.Function):
    """Keeps the graph of torch's layers, and saves in its own name what that saves: so that is let go of after a
    backward, and seen by hooks, as that of any other function.
    """

    @staticmethod
    def forward(
        ctx: Any, cell: str, bidirectional: bool, sizes: tuple[int, int], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        needs = ctx.needs_input_grad[3:]
        # Not detached: the biases' values are not needed, and may change.
        leaves = [x.data.requires_grad_(needed) for x, needed in zip(inputs, needs, strict=True)]
        kept: list[Tensor] = []
        unpacked: list[Sequence[Tensor]] = []

        def keep(tensor: Tensor) -> int:
            kept.append(tensor.detach())
            return len(kept) - 1

        with torch.enable_grad(), saved_tensors_hooks(keep, lambda place: unpacked[-1][place]):
            # In training, since cuDNN has no other gradients.
            inner = _torchs(cell, bidirectional, sizes, leaves, 0.0, True)
        results = tuple(x.detach() for x in inner)
        others, biases = _parted(sizes, inputs)
        ctx.layers, ctx.biases, ctx.unpacked = (cell, bidirectional, sizes), biases, unpacked
        ctx.set_materialize_grads(False)
        values = torch.cat(biases) if biases else None
        ctx.save_for_backward(values, *others, *kept)
        kept.clear()  # the graph holds the hooks
        first = 1 + sizes[0]
        ctx.leaves = [*map(_hollow, leaves[:first]), *leaves[first:]]
        ctx.results = [_hollow(x) for x in inner]
        return results

    @staticmethod
    def backward(ctx: Any, *towards: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[3:]
        cell, bidirectional, sizes = ctx.layers
        values, *saved = ctx.saved_tensors
        if _autograd.needs_composite():
            inputs = _joined(sizes, saved[: len(needs) - len(ctx.biases)], ctx.biases)

            def composite(*inputs: Tensor) -> tuple[Tensor, ...]:
                return _composed(cell, bidirectional, sizes, inputs, values)

            found = _autograd.composite_gradients(composite, inputs, needs, towards)
        elif all(gradient is None for gradient in towards):
            found = (None,) * len(needs)
        else:
            # Any thread's are as good: a graph that is kept may be gone through by several.
            ctx.unpacked.append(saved[len(needs) - len(ctx.biases) :])
            try:
                found = _gradients(ctx.leaves, ctx.results, needs, towards)
            finally:
                ctx.unpacked.pop()
        return None, None, None, *found


@_autocast.outside
def _gradients(
    leaves: Sequence[Tensor],
    results: Sequence[Tensor],
    needs: Sequence[bool],
    towards: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    present = [(x, g) for x, g in zip(results, towards, strict=True) if g is not None]
    with _precision_of(leaves[0].dtype):
        found = torch.autograd.grad(
            [result for result, _ in present],
            [leaf for leaf, needed in zip(leaves, needs, strict=True) if needed],
            [gradient for _, gradient in present],
            retain_graph=True,  # which holds no memory
            materialize_grads=True,
        )
    remaining = iter(found)
    return tuple(next(remaining) if needed else None for needed in needs)


def _are_biases(sizes: tuple[int, int], count: int) -> list[bool]:
    """Which of the inputs are."""
    number, width = sizes
    return [place > number and (place - 1 - number) % width > 1 for place in range(count)]


def _parted(sizes: tuple[int, int], inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Those that are no biases, and those that are."""
    parts: tuple[list[Tensor], list[Tensor]] = [], []
    for is_bias, tensor in zip(_are_biases(sizes, len(inputs)), inputs, strict=True):
        parts[is_bias].append(tensor)
    return parts


def _joined(
    sizes: tuple[int, int], others: Sequence[Tensor], biases: Sequence[Tensor]
) -> list[Tensor]:
    parts = iter(others), iter(biases)
    are_biases = _are_biases(sizes, len(others) + len(biases))
    return [next(parts[is_bias]) for is_bias in are_biases]


_apply = _private.apply(_Layers)
