"""Which kernel a call would use: for tests and measurements."""

from collections.abc import Callable
from ctypes import c_char_p, c_int64
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from extops import _private, accelerating
from extops.binding import _checks, _loader, _schemas
from extops.binding._libraries import library
from extops.calling import _autocast
from extops.choosing._table import OURS
from extops.modules import Layers, LLTMLayer
from extops.ops import sequence

_FUNCTIONS: dict[Any, str] = {
    sequence.lltm_sequence: "lltm",
    sequence.lstm_sequence: "lstm",
    sequence.gru_sequence: "gru",
    sequence.rnn_sequence: "rnn_tanh",  # as of either function
}


def which_kernel(
    call: Callable[..., Any],
    input: Tensor | PackedSequence,
    state: Any = None,
    *,
    lengths: Tensor | None = None,
    batch_first: bool = False,
    backward: bool = False,
) -> str:
    """The name of the kernel that a call over a sequence would use now: on the current stream, with the present
    settings of TF32 and autocast. While the stream is captured in a CUDA graph, it may be another one. Nothing is
    computed: before the first call of a kind, which measures what can compute it, the kernel that is named is the one
    that is taken where nothing may be measured.

    Args:
        call: :class:`extops.LSTM`, :class:`extops.GRU`, :class:`extops.RNN`, one of their cells, a module of
            :func:`extops.accelerate` or an :class:`extops.LLTMLayer`, or one of the functions
            :func:`extops.lltm_sequence`, :func:`extops.lstm_sequence`, :func:`extops.gru_sequence` and
            :func:`extops.rnn_sequence`.
        input: as the call takes it.
        state: as the call takes it; modules of extops do without.
        lengths: as the functions take them.
        batch_first: as the functions take it; modules have their own.
        backward: the kernel of the backward.

    Returns:
        On a CPU ``"cpu"``. On a GPU ``"tensor_block"``, ``"float32_block"``, ``"float32_cluster"``,
        ``"tensor_cluster"`` or ``"group"``, each one kernel for all steps, or ``"step"``: a GEMM and a kernel for each
        step, or both in one for a single step, which is also what computes the LLTM's on a CPU. For a module of
        :func:`extops.accelerate` ``"torch"`` where torch's own forward computes such calls, and ``"not measured"``
        where the first of them is to come. The environment variable ``EXTOPS_SEQUENCE_KERNEL``, which a process reads
        once, names a kernel for GPUs to be taken instead; ``"none"`` where that cannot serve the call, which then
        fails.

    Raises:
        TypeError: ``call`` is none of these, or is a function and has no ``state``, or ``input`` is no tensor.
    """
    if isinstance(call, torch.nn.Module):
        way, _ = accelerating.described(call, input, state)
        if way not in ("", OURS):
            return way
        cell = _cell_of(call)
        batch_first = getattr(call, "batch_first", False)
        state_size = getattr(call, getattr(call, "_size", "hidden_size"), 0)
    else:
        cell = _FUNCTIONS.get(call)
        h = state[0] if isinstance(state, (tuple, list)) and state else state
        state_size = h.shape[-1] if isinstance(h, Tensor) else None
    if cell is None:
        expected = (
            "to be one of extops' recurrent layers, cells or functions over sequences, or a module of "
            "extops.accelerate"
        )
        raise _checks.unfit("which_kernel", "call", expected, repr(call), TypeError)
    if state_size is None:
        expected = f"as {cell}_sequence takes it"
        raise _checks.unfit("which_kernel", "state", expected, repr(state), TypeError)
    if isinstance(input, PackedSequence):
        sizes = input.batch_sizes
        steps = input.data[:1].unsqueeze(0).expand(len(sizes), int(sizes[0]), -1)
        is_one_step = False
    else:
        _checks.check_tensor("which_kernel", "input", input)
        steps = _steps(call, input, batch_first)
        is_one_step = steps.shape[0] == 1 and lengths is None
    is_stable = steps.is_cuda and _loader.binding == "stable"
    # Both at once are a sequence, of one step, too.
    directions = 1 + bool(getattr(call, "bidirectional", False) and is_stable)
    if is_one_step and directions == 1 and (cell == "lltm" or is_stable):
        return "step"
    if not steps.is_cuda:
        return "cpu"
    is_like_cudnn = isinstance(call, torch.nn.RNNBase)
    allow_tf32 = _private.cudnn_allows_tf32() if is_like_cudnn else _private.allows_tf32()
    kernels, device = library("cuda"), steps.get_device()
    dtype = kernels.gemm_dtype(_autocast.cast(steps[:0])[0].dtype, allow_tf32)
    time, batch, _ = steps.shape
    strides = (1, time) if _schemas.is_batch_first(steps) else (batch, 1)
    # The stride of the weights is left out, and what follows: no kernel depends on it.
    numbers = (c_int64 * 11)(time, batch, state_size, 0, *strides, directions, 0, directions)
    with torch.cuda.device(device):
        plan = kernels.plan(cell, dtype, numbers, backward, _private.current_stream(device))
    name: bytes | None = kernels.entry("sequence_kernel_name", c_char_p, c_int64)(plan.kernel)
    return "none" if name is None else name.decode()


def _cell_of(module: torch.nn.Module) -> str | None:
    if isinstance(module, LLTMLayer):
        return "lltm"
    torchs = getattr(type(module), "_extops_kind", None)  # of ours, and of those that were taken
    if torchs is None:
        return None
    cell: str = torchs.__name__.removesuffix("Cell").lower()
    return f"rnn_{module.nonlinearity}" if cell == "rnn" else cell


def _steps(call: Any, input: Tensor, batch_first: bool) -> Tensor:
    """The input as the operator gets it: ``[time, batch, features]``."""
    if isinstance(call, torch.nn.RNNCellBase):
        return input.reshape(1, -1, input.shape[-1])
    if isinstance(call, (Layers, torch.nn.RNNBase)) and input.dim() == 2:
        input = input.unsqueeze(0 if batch_first else 1)
    return input.transpose(0, 1) if batch_first else input
