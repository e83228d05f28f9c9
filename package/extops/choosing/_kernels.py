"""Which kernel a call would use: for tests and measurements."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from extops.binding import _loader
from extops.calling import _autocast, _checks
from extops.choosing import _cudnn
from extops.modules import Layers, LLTMLayer
from extops.ops import sequence
from extops.rnn import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell

_FUNCTIONS: dict[Any, str] = {
    sequence.lltm_sequence: "lltm",
    sequence.lstm_sequence: "lstm",
    sequence.gru_sequence: "gru",
    sequence.rnn_sequence: "rnn_tanh",  # as of either function
}
_CELLS = LSTMCell, GRUCell, RNNCell
_MODULES: dict[type[torch.nn.Module], str] = {
    LLTMLayer: "lltm",
    LSTM: "lstm",
    LSTMCell: "lstm",
    GRU: "gru",
    GRUCell: "gru",
    RNN: "rnn_",
    RNNCell: "rnn_",
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
    computed.

    Args:
        call: :class:`extops.LSTM`, :class:`extops.GRU`, :class:`extops.RNN`, one of their cells or an
            :class:`extops.LLTMLayer`, or one of the functions :func:`extops.lltm_sequence`,
            :func:`extops.lstm_sequence`, :func:`extops.gru_sequence` and :func:`extops.rnn_sequence`.
        input: as the call takes it.
        state: as the call takes it; modules do without.
        lengths: as the functions take them.
        batch_first: as the functions take it; modules have their own.
        backward: the kernel of the backward.

    Returns:
        On a CPU ``"cpu"``, or ``"torch"`` where torch's own layer computes it, forward and backward. On a GPU
        ``"tensor_block"``, ``"float32_block"``, ``"float32_cluster"``, ``"tensor_cluster"`` or ``"group"``, each one
        kernel for all steps, or ``"step"``: a GEMM and a kernel for each step, or both in one for a single step, which
        is also what computes the LLTM's on a CPU. ``"cudnn"`` where torch's own layer computes an :class:`extops.LSTM`
        or :class:`extops.GRU`, forward and backward. Torch's layers serve where they are faster, and packed input whose
        rows differ in length, which ours would pad; but not under autocast. ``"torch"`` for a cell on a GPU whose GEMMs
        are a library's, and under autocast: torch's own cell computes it. The environment variable
        ``EXTOPS_SEQUENCE_KERNEL``, which a process reads once, names a kernel for GPUs to be taken instead; ``"none"``
        where that cannot serve the call, which then fails.

    Raises:
        TypeError: ``call`` is none of these, or is a function and has no ``state``, or ``input`` is no tensor.
    """
    if isinstance(call, torch.nn.Module):
        cell = next((name for kind, name in _MODULES.items() if isinstance(call, kind)), None)
        if cell == "rnn_":
            cell += str(call.nonlinearity)
        batch_first = getattr(call, "batch_first", False)
        state_size = getattr(call, getattr(call, "_size", "hidden_size"), 0)
    else:
        cell = _FUNCTIONS.get(call)
        h = state[0] if isinstance(state, (tuple, list)) and state else state
        state_size = h.shape[-1] if isinstance(h, Tensor) else None
    if cell is None:
        raise TypeError(
            "which_kernel: expected `call` to be one of extops' recurrent layers, cells or functions over "
            f"sequences, but got {call!r}"
        )
    if state_size is None:
        raise TypeError(
            f"which_kernel: expected `state` as {cell}_sequence takes it, but got {state!r}"
        )
    if isinstance(input, PackedSequence):
        steps, sizes = input.data, input.batch_sizes.tolist()
        time, batch = len(sizes), sizes[0]
    else:
        _checks.check_tensor("which_kernel", "input", input)
        steps, sizes = _steps(call, input, batch_first), None
        time, batch = steps.shape[:2]
    is_one_step = time == 1 and lengths is None and sizes is None
    if cell == "lltm" and is_one_step:
        return "step"
    if isinstance(call, (LSTM, GRU, RNN)):
        library = call.served_by(steps, sizes)
        if library:
            return library
    is_stable = _loader.binding == "stable"
    if (
        isinstance(call, _CELLS)
        and isinstance(input, Tensor)
        and input.is_cuda
        and input.dim() == 2
    ):
        is_torchs = is_stable and not call.has_kernel(input)
        if is_torchs or _autocast.is_on():
            return "torch"
    if steps.is_cuda and is_one_step and is_stable:
        return "step"
    if steps.is_cuda:
        return _cudnn.kernel_of(cell, state_size, backward, _cudnn.place_of(steps, time, batch))
    is_torchs = is_one_step and not (torch.is_grad_enabled() or _autocast.is_on())
    return "torch" if is_torchs else "cpu"


def _steps(call: Any, input: Tensor, batch_first: bool) -> Tensor:
    """The input as the operator gets it: ``[time, batch, features]``."""
    if isinstance(call, _CELLS):
        return input.reshape(1, -1, input.shape[-1])
    if isinstance(call, Layers) and input.dim() == 2:
        input = input.unsqueeze(0 if batch_first else 1)
    return input.transpose(0, 1) if batch_first else input
