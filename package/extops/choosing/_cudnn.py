"""torch's own layers, which are cuDNN's on a GPU, where they are faster than ours."""

import contextlib
import itertools
import os
import threading
import weakref
from collections.abc import Sequence
from ctypes import c_char_p, c_int32, c_int64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from extops import _private
from extops.binding import _loader, _schemas
from extops.binding._libraries import library
from extops.calling import _autocast, _autograd
from extops.choosing import _choice, _packing
from extops.choosing._packing import States
from extops.ops.sequence import CELLS

_cudnn: Any = torch.backends.cudnn
_AS_IT_IS = contextlib.nullcontext()
_DTYPES = torch.float32, torch.bfloat16, torch.float16
# Compiled with an older one, torch computes bfloat16 step by step.
_FIRST_WITH_BFLOAT16 = 91300
# In float16 cuDNN 9.19 computes wrong values for LSTM layers of 40, 48, 56, 72, 80, 88, 104, 112, 120, 136, 144, 152,
# 168, 176 and 184 units, of 223 sizes up to 2048, and for GRU layers of most of these. They are off by 0.1 to 0.8 of
# the largest value, with biases, for batches of 2 to 128 samples that are not packed.
_MOST_WRONG_IN_FLOAT16 = 256
_is_kernel_named = bool(os.environ.get("EXTOPS_SEQUENCE_KERNEL"))

# torch.compile cannot ask.
has_onednn = torch.backends.mkldnn.is_available()
has_avx512 = has_onednn and "AVX512" in torch.backends.cpu.get_cpu_capability()

Place = tuple[int, ...]


def place_of(input: Tensor, time: int, batch: int) -> Place:
    """What the choice of a GPU kernel for ``[T, B, I]``, or for packed rows, depends on, besides the cell, its size and
    the pass.
    """
    given = _autocast.cast(input[:0])[0].dtype if _autocast.is_on() else input.dtype
    dtype = library("cuda").gemm_dtype(given, _private.allows_tf32())
    is_batch_first = input.dim() == 3 and _schemas.is_batch_first(input)
    device = input.get_device()
    return dtype, time, batch, is_batch_first, device, _private.current_stream(device)


def kernel_of(cell: str, state_size: int, backward: bool, place: Place) -> str:
    """Our kernel for a pass."""
    dtype, time, batch, is_batch_first, device, stream = place
    strides = (1, time) if is_batch_first else (batch, 1)
    # The stride of the weights is left out: no kernel depends on it.
    sizes = (c_int64 * 8)(time, batch, state_size, state_size, *strides, 0, 0)
    types = c_char_p, c_int32, c_void_p, c_int64, c_void_p
    entry = library("cuda").entry(f"{cell}_sequence_kernel", *types)
    with torch.cuda.device(device):
        name: bytes = entry(dtype, sizes, backward, stream)
    return name.decode()


def is_acceptable(problem: _choice.Problem, input: Tensor) -> bool:
    """Whether cuDNN can compute such layers, and no kernel was named by the variable."""
    if _is_kernel_named or not torch.cudnn_is_acceptable(input):
        return False
    if problem.is_ragged:
        return True
    if input.dtype is torch.float16 and problem.state <= _MOST_WRONG_IN_FLOAT16:
        return False
    if input.dtype is torch.bfloat16 and not _computes_bfloat16(input):
        return False
    return input.dtype in _DTYPES


def chosen(problem: _choice.Problem, input: Tensor) -> str:
    """Whether our kernels or cuDNN compute it on a GPU."""
    if not is_acceptable(problem, input):
        return _choice.OURS
    if problem.time == 1 and input.dim() == 3 and _loader.binding == "stable":  # not packed
        step = CELLS[problem.cell].step
        has_kernel = step.has_kernel(input[0], problem.state)
        kernels = [_choice.ONE_STEP if has_kernel else _choice.ONE_STEP_BY_GEMMS]
    else:
        place = place_of(input, problem.time, problem.batch)
        passes = (False, True) if problem.with_gradients else (False,)
        kernels = [kernel_of(problem.cell, problem.state, backward, place) for backward in passes]
    return _choice.on_gpu(problem, kernels, _private.allows_tf32())


def flatten_bfloat16(
    mode: str,
    parameters: list[Any],
    input_size: int,
    hidden_size: int,
    layers: int,
    batch_first: bool,
    bidirectional: bool,
) -> None:
    """Moves parameters on a GPU into one buffer, as ``torch.nn.RNNBase.flatten_parameters`` does it in other dtypes.
    From elsewhere torch copies them in each call, which takes the host up to a millisecond.
    """
    if not all(type(x) in (Tensor, torch.nn.Parameter) for x in parameters):
        return
    first = parameters[0]
    if not first.is_cuda or any(
        x.dtype is not torch.bfloat16 or x.is_inference() for x in parameters
    ):
        return
    if {x.device for x in parameters} != {first.device} or not _computes_bfloat16(first):
        return
    # What shares its memory, with another parameter or anything else, must go on to do so.
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in parameters}
    sizes = [x.nbytes for x in parameters]
    if len(storages) < len(sizes) or sum(storages.values()) > sum(sizes):
        return
    # A graph would move them when it is replayed.
    if torch.cuda.is_current_stream_capturing():
        return
    width = len(parameters) // (layers * (1 + bidirectional))
    of_layers = input_size, _MODES.index(mode.lower()), hidden_size, 0, layers
    with torch.no_grad(), torch.cuda.device(first.device):
        _private.flatten_weights(parameters, width, *of_layers, batch_first, bidirectional)


def _computes_bfloat16(tensor: Tensor) -> bool:
    version = _cudnn.version() or 0
    return version >= _FIRST_WITH_BFLOAT16 and torch.cudnn_is_acceptable(tensor)


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

    def is_needed(self) -> bool:
        """Whether the switch is on, or would be on without the calls of other threads."""
        with self._lock:
            return self._calls > 0 or _private.cudnn_allows_tf32()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._calls -= 1
            if self._calls == 0 and self._was_on:
                _private.set_cudnn_tf32(True)


_strict = _Strict()


def is_strict(tensor: Tensor) -> bool:
    """Whether the switch of GEMMs, which we follow, is off. cuDNN has its own, which is on by default."""
    return tensor.dtype is torch.float32 and tensor.is_cuda and not _private.allows_tf32()


class Call(NamedTuple):
    """What the layers are, beside their tensors."""

    cell: str
    layers: int
    bidirectional: bool
    has_biases: bool
    batch_first: bool
    is_strict: bool = False
    """Whether cuDNN's switch of TF32 has to be off."""


def may_drop(input: Tensor) -> bool:
    """Whether cuDNN may drop between layers, which it computes side by side then. It neither draws the same masks
    again, as checkpoints of a model must, nor has gradients of higher order, which torch's layer has not either.
    """
    return (
        input.is_cuda
        and torch.is_grad_enabled()
        and not _private.has_hooks_of_saved_tensors()
        and not _private.is_in_backward()
    )


def run(
    call: Call,
    input: Tensor,
    states: States,
    parameters: Sequence[Tensor],
    batch_sizes: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, States]:
    """torch's layers for ``[T, B, I]``, ``[B, T, I]`` or packed rows; the parameters are in torch's order."""
    layer: Any = getattr(torch, call.cell)
    # cuDNN has gradients only in training mode. It refuses states that are not contiguous.
    training = dropout > 0 or (
        torch.is_grad_enabled() and any(x.requires_grad for x in (*parameters, input, *states))
    )
    h_0 = states[0].contiguous()
    given = h_0 if len(states) == 1 else (h_0, states[1].contiguous())
    options = call.has_biases, call.layers, dropout, training, call.bidirectional
    with _strict if call.is_strict else _AS_IT_IS:
        if batch_sizes is None:
            output, *last = layer(input, given, parameters, *options, call.batch_first)
        else:
            output, *last = layer(input, batch_sizes, given, parameters, *options)
    if training and input.is_cuda:
        _hook(output)
    return output, tuple(last)


# -- The backward of cuDNN's layers is torch's own node. Its hooks give what it lacks: the precision that we follow, and
#    gradients of higher order. They find all they need in the node, so they keep no tensor alive.


class _Backward:
    """Keeps TF32 off until it is ended, or forgotten: the engine holds it as long as a backward runs, even if that ends
    with an error.
    """

    def __init__(self) -> None:
        self._is_on = True
        _strict.__enter__()
        _private.at_end_of_backward(self.end)

    def end(self) -> None:
        if self._is_on:
            self._is_on = False
            _strict.__exit__()

    __del__ = end


def _hook(output: Tensor) -> None:
    node: Any = output.grad_fn
    # Where cuDNN cannot serve, torch's layers are a composition of differentiable calls.
    if type(node).__name__ == "CudnnRnnBackward0":
        node.register_prehook(_before_backward)


def _before_backward(towards: tuple[Tensor | None, ...]) -> None:
    """Most backwards need no more than this hook. The others get one that runs after them, once."""
    given = [x for x in towards if x is not None]
    if not given:  # no gradient reaches the node
        return
    backward = None
    if is_strict(given[0]) and _strict.is_needed():
        backward = weakref.ref(_Backward())
    is_composed = _autograd.needs_composite()
    if not (is_composed or (backward is not None and _private.knows_node)):
        return  # without a hook the precision ends with the whole backward

    def after(
        found: tuple[Tensor | None, ...], towards: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...] | None:
        handle.remove()
        strict = None if backward is None else backward()
        if strict is not None:
            strict.end()
        has_gradients = any(x is not None for x in found)
        return _composed_gradients(found, towards) if has_gradients and is_composed else None

    handle = _private.node_of_backward().register_hook(after)
    hooks = handle.hooks_dict_ref()
    for name in [x for x in hooks if x != handle.id]:  # a user's come after ours
        hooks[name] = hooks.pop(name)


def _composed_gradients(
    found: tuple[Tensor | None, ...], towards: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """What was found by cuDNN, in a way that can be differentiated: of the input, the parameters and the states."""
    node = _private.node_of_backward()
    # cuDNN does not tell what it dropped: torch raises an error where these gradients are differentiated.
    if node._saved_dropout:
        return found
    parameters = node._saved_weight
    states = [x for x in (node._saved_hx, node._saved_cx) if x is not None]
    call = Call(
        _MODES[node._saved_mode],
        node._saved_num_layers,
        node._saved_bidirectional,
        node._saved_weight_stride0 == 4,
        node._saved_batch_first,
    )
    batch_sizes = node._saved_batch_sizes or None

    def composite(input: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        number = len(parameters)
        return _composed(call, input, others[number:], others[:number], batch_sizes)

    inputs = node._saved_input, *parameters, *states
    edges = [function is not None for function, _ in node.next_functions]
    needs = [x is not None and is_edge for x, is_edge in zip(found, edges, strict=True)]
    results = towards[: 1 + len(states)]
    gradients = _autograd.composite_gradients(composite, inputs, needs[: len(inputs)], results)
    replaced = (*gradients, *found[len(inputs) :])
    return tuple(x if needed else y for x, y, needed in zip(replaced, found, needs, strict=True))


_MODES = "rnn_relu", "rnn_tanh", "lstm", "gru"


def _composed(
    call: Call,
    input: Tensor,
    states: States,
    parameters: Sequence[Tensor],
    batch_sizes: Sequence[int] | None,
) -> tuple[Tensor, ...]:
    """The same as a composition of differentiable calls."""
    is_batch_first = call.batch_first and batch_sizes is None
    if is_batch_first:
        input = input.transpose(0, 1)
    directions = 1 + call.bidirectional
    width = 4 if call.has_biases else 2
    last = []
    for first in range(0, call.layers * directions, directions):
        outputs = []
        for place in range(first, first + directions):
            of_direction = (*parameters[width * place : width * (place + 1)], None, None)[:4]
            initial = tuple(x[place] for x in states)
            output, final = _composed_direction(
                call.cell, input, of_direction, initial, place > first, batch_sizes
            )
            outputs.append(output)
            last.append(final)
        input = torch.cat(outputs, dim=-1)
    output = input.transpose(0, 1) if is_batch_first else input
    return output, *(torch.stack(x) for x in zip(*last, strict=True))


def _composed_direction(
    cell: str,
    input: Tensor,
    parameters: Sequence[Any],
    states: States,
    reverse: bool,
    batch_sizes: Sequence[int] | None,
) -> tuple[Tensor, States]:
    """The output of a direction of a layer, and its last states."""

    def run(steps: Tensor, states: States) -> tuple[Tensor, States]:
        output, *final, _, _ = CELLS[cell].reference(
            steps, *parameters, states[0], states[-1], None, reverse=reverse
        )
        return output, tuple(final[: len(states)])

    if batch_sizes is None:
        return run(input, states)
    # Steps of as many rows are as if they were not packed.
    groups = [(size, len(list(steps))) for size, steps in itertools.groupby(batch_sizes)]
    parts = input.split([size * count for size, count in groups])

    def run_part(place: int, states: States) -> tuple[Tensor, States]:
        size, count = groups[place]
        output, states = run(parts[place].view(count, size, -1), states)
        return output.flatten(0, 1), states

    return _packing.run_in_pieces(run_part, [size for size, _ in groups], states, reverse)
