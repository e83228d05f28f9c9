"""The operators as ``torch.nn`` modules."""

import functools
import math
import numbers
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from extops import _autograd, _checks, _private, reference
from extops.ops.lltm import lltm
from extops.ops.lltm_sequence import lltm_sequence
from extops.ops.rounding import round_ste

State = tuple[Tensor, Tensor]
Results = tuple[Tensor, State]
Run = Callable[..., Results]


@functools.lru_cache  # of some streams: a program may make new ones all the time
def _beside(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """A stream for what runs beside ``stream``; each has its own, so that callers do not wait for each other."""
    return torch.cuda.Stream(stream.device)


def _side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream beside the current one; none where calls run one after the other."""
    if device.type != "cuda" or not _autograd.is_plain():
        return None
    return _beside(torch.cuda.current_stream(device))


def _both(
    run: Run, one: Sequence[Tensor], other: Sequence[Tensor], side: torch.cuda.Stream | None
) -> list[Results]:
    """What ``run`` makes of each; with a side stream at the same time, since a small call leaves most of a GPU idle."""
    if side is None:
        return [run(*one, reverse=False), run(*other, reverse=True)]
    stream = torch.cuda.current_stream(side.device)
    if torch.is_grad_enabled():
        # Autograd runs a node on the stream on which it was made: these hand the gradients over to this one.
        other = [x.view_as(x) if x.requires_grad else x for x in other]
    side.wait_stream(stream)
    try:
        with torch.cuda.stream(side):
            beside = run(*other, reverse=True)
        if beside[0].requires_grad:
            # The backward reads them on the side stream, and then lets go of them.
            with _private.unrecorded():
                for x in other:
                    x.record_stream(side)
        return [run(*one, reverse=False), beside]
    finally:
        stream.wait_stream(side)


def _hand_back(side: torch.cuda.Stream) -> None:
    """To be called while all that was made on the side stream is still held, and has been used on the current one.

    The allocator gives its memory to the next call on the side stream, of any thread, and does not know that another
    stream may still read it.
    """
    # A graph is captured by one thread, whose next call waits anyway.
    if not torch.cuda.is_current_stream_capturing():
        side.wait_stream(torch.cuda.current_stream(side.device))


def _run(
    input: Tensor,
    h: Tensor,
    c: Tensor,
    weights: Tensor,
    bias: Tensor,
    *,
    lengths: Tensor | None,
    batch_first: bool,
    reverse: bool,
) -> Results:
    """One direction of a layer."""
    return lltm_sequence(
        input, (h, c), weights, bias, lengths=lengths, batch_first=batch_first, reverse=reverse
    )


def _check_packed(data: Tensor, batch_sizes: Tensor, rows: int) -> None:
    if rows != len(data):
        raise RuntimeError(
            f"LLTMLayer: expected `input.data` to have {rows} rows, the sum of `input.batch_sizes`, "
            f"but got {len(data)}"
        )
    if (batch_sizes[1:] > batch_sizes[:-1]).any():
        raise RuntimeError(
            "LLTMLayer: expected `input.batch_sizes` not to grow from one step to the next, "
            f"but got {batch_sizes.tolist()}"
        )


class LLTM(reference.LLTM):
    r"""An LSTM cell without a forget gate; :func:`extops.lltm` with its parameters.

    A drop-in for the class of PyTorch's tutorial "Custom C++ and CUDA Extensions": the same parameters, and state dicts
    of the two interchange.

    Args:
        input_features: the size ``I`` of the input.
        state_size: the size ``S`` of the hidden and the cell state.
        device: where the parameters are made.
        dtype: float64, float32, bfloat16 or float16.

    Attributes:
        weights: ``[3S, S + I]``, for the input gate, the output gate and the candidate; columns meet ``[h | input]``.
        bias: ``[3S]``. Both are initialised uniformly in :math:`\pm 1/\sqrt{S}`.

    Shape:
        ``rnn(input, (h, c)) -> (new_h, new_cell)``, with ``input`` of ``[B, I]`` and all others of ``[B, S]``; the
        state is zeros if not given.

    Example::

        rnn = extops.LLTM(32, 128)
        h = c = torch.zeros(16, 128)
        h, c = rnn(torch.randn(16, 32), (h, c))
    """

    step = staticmethod(lltm)

    def __init__(
        self,
        input_features: int,
        state_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _checks.check_layer_sizes("LLTM", input_features=input_features, state_size=state_size)
        _checks.check_layer_dtype("LLTM", dtype)
        super().__init__(input_features, state_size, device, dtype)

    def forward(self, input: Tensor, state: State | None = None) -> State:
        """One step: ``input`` [B, I] and ``state = (h, c)`` of [B, S] each give ``(new_h, new_cell)``."""
        if state is None:
            _checks.check_tensor("lltm", "input", input)
            _checks.check_dims("lltm", "input", input, "batch, input_features")
            state = self.zero_state(input)
        # Read where torch.nn.Module keeps them: asked for an attribute, it looks there last.
        parameters = getattr(self, "_parameters", {})
        weights, bias = parameters.get("weights"), parameters.get("bias")
        if weights is None:  # computed by torch.nn.utils, or part of a replica
            weights = self.weights
        if bias is None:
            bias = self.bias
        return self.step(input, weights, bias, *_checks.as_pair("LLTM", state))


class RoundSTE(torch.nn.Module):
    """:func:`extops.round_ste` as a module without parameters."""

    def forward(self, input: Tensor) -> Tensor:
        """``input`` of any shape gives a tensor of the same shape."""
        return round_ste(input)


class LLTMLayer(torch.nn.Module):
    r"""LLTM layers over whole sequences, shaped like :class:`torch.nn.LSTM`; each is :func:`extops.lltm_sequence`.

    Args:
        input_features: the size ``I`` of the input.
        state_size: the size ``S`` of the hidden and the cell state.
        num_layers: each layer after the first reads the output of the one before.
        bias: whether there are biases; without, they count as zeros.
        batch_first: ``input`` and ``output`` are ``[B, T, ...]`` instead of ``[T, B, ...]``.
        dropout: the probability, in training, that an element between two layers is dropped.
        bidirectional: each layer also runs backwards in time; ``D`` below is then 2, else 1.
        device: where the parameters are made.
        dtype: float64, float32, bfloat16 or float16.

    Attributes:
        weights_l[k], weights_l[k]_reverse: ``[3S, S + I]`` for the first layer, ``[3S, S + D * S]`` for the others.
        bias_l[k], bias_l[k]_reverse: ``[3S]``. All are initialised uniformly in :math:`\pm 1/\sqrt{S}`.

    Shape:
        ``layer(input, (h_0, c_0)) -> output, (h_n, c_n)`` with ``input`` of ``[T, B, I]``, unbatched ``[T, I]``, or a
        :class:`~torch.nn.utils.rnn.PackedSequence`; ``output`` of ``[T, B, D * S]``; states of
        ``[D * num_layers, B, S]``, zeros if not given.

    Raises:
        RuntimeError: a dtype, device, layout, number of dimensions or size does not fit; the message names it.
    """

    def __init__(
        self,
        input_features: int,
        state_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _checks.check_layer_sizes("LLTMLayer", input_features=input_features, state_size=state_size)
        _checks.check_layer_sizes("LLTMLayer", at_least=1, num_layers=num_layers)
        _checks.check_layer_dtype("LLTMLayer", dtype)
        is_number = isinstance(dropout, numbers.Real) and not isinstance(dropout, bool)
        if not (is_number and 0 <= dropout <= 1):
            raise ValueError(
                f"LLTMLayer: expected `dropout` to be a number from 0 to 1, but got {dropout!r}"
            )
        if dropout > 0 and num_layers == 1:
            warnings.warn(
                "LLTMLayer: `dropout` acts between layers, and so not at all with num_layers=1",
                stacklevel=2,
            )
        self.input_features = input_features
        self.state_size = state_size
        self.num_layers = num_layers
        self.bias = bias
        self.batch_first = batch_first
        self.dropout = dropout
        self.bidirectional = bidirectional
        for layer in range(num_layers):
            features = input_features if layer == 0 else state_size * (1 + bidirectional)
            for suffix in self._suffixes(layer):
                shapes: dict[str, tuple[int, ...]] = {
                    "weights": (3 * state_size, state_size + features)
                }
                if bias:
                    shapes["bias"] = (3 * state_size,)
                for name, shape in shapes.items():
                    empty = torch.empty(shape, device=device, dtype=dtype)
                    self.register_parameter(name + suffix, torch.nn.Parameter(empty))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all parameters uniformly from ±1/sqrt(state_size)."""
        bound = 1 / math.sqrt(self.state_size) if self.state_size > 0 else 0.0
        for parameter in self.parameters():
            torch.nn.init.uniform_(parameter, -bound, bound)

    def forward(
        self, input: Tensor | PackedSequence, state: State | None = None
    ) -> tuple[Tensor | PackedSequence, State]:
        """See the class."""
        if state is not None:
            state = _checks.as_pair("LLTMLayer", state)
            for name, tensor in zip(("h_0", "c_0"), state, strict=True):
                _checks.check_tensor("LLTMLayer", name, tensor)
        if isinstance(input, PackedSequence):
            return self._forward_packed(input, state)
        _checks.check_tensor("LLTMLayer", "input", input)
        if input.dim() not in (2, 3):
            raise RuntimeError(
                "LLTMLayer: expected `input` to have 3 dimensions, or 2 where it has no batch, "
                f"but got {input.dim()}: {list(input.shape)}"
            )
        if input.dim() == 2:
            batch_axis = 0 if self.batch_first else 1
            h, c = self._checked_state(input, state)
            output, (h, c) = self._forward_padded(
                input.unsqueeze(batch_axis),
                (h.unsqueeze(1), c.unsqueeze(1)),
                None,
                batch_first=self.batch_first,
            )
            return output.squeeze(batch_axis), (h.squeeze(1), c.squeeze(1))
        state = self._checked_state(input, state, input.shape[0 if self.batch_first else 1])
        return self._forward_padded(input, state, None, batch_first=self.batch_first)

    def _forward_packed(
        self, input: PackedSequence, state: State | None
    ) -> tuple[PackedSequence, State]:
        """The rows stay in the order of their lengths, in which they are packed."""
        data, batch_sizes, to_sorted, to_original = input
        _checks.check_dims("LLTMLayer", "input.data", data, "rows, input_features")
        # Within a trace both are tensors, and so of any size.
        steps = batch_sizes.shape[0]
        batch: Any = batch_sizes[0] if _autograd.is_tracing() else int(batch_sizes[0])
        h, c = self._checked_state(data, state, batch)
        if to_sorted is not None and state is not None:
            h, c = (x.index_select(1, to_sorted) for x in (h, c))
        # The GPU waits while the host computes: so only small tensors here.
        count_to = functools.partial(torch.arange, device=batch_sizes.device)
        ends = batch_sizes.cumsum(0)
        if not (_autograd.is_tracing() or torch.compiler.is_compiling()):
            _check_packed(data, batch_sizes, int(ends[-1]))
        shifts = count_to(steps) * batch - (ends - batch_sizes)
        sent = _checks.to_device(
            "LLTMLayer", "input.batch_sizes", torch.stack((ends, shifts)), data
        )
        ends, shifts = sent.unbind(0)
        rows = torch.arange(data.shape[0], device=data.device)
        places = rows + shifts.index_select(0, torch.searchsorted(ends, rows, right=True))
        lengths = steps - torch.searchsorted(batch_sizes.flip(0), count_to(batch), right=True)
        padded = data.new_zeros(steps * batch, *data.shape[1:]).index_copy(0, places, data)
        output, (h, c) = self._forward_padded(
            padded.view(steps, batch, *data.shape[1:]), (h, c), lengths, batch_first=False
        )
        if to_original is not None:
            h, c = (x.index_select(1, to_original) for x in (h, c))
        packed = output.flatten(0, 1).index_select(0, places)
        return PackedSequence(packed, batch_sizes, to_sorted, to_original), (h, c)

    def _checked_state(self, input: Tensor, state: State | None, *batch: int) -> State:
        """The given state, or zeros; without ``batch``, that of an input that has no batch."""
        shape = (self.num_layers * (1 + self.bidirectional), *batch, self.state_size)
        if state is None:
            zeros = input.new_zeros(shape)
            return zeros, zeros
        for name, tensor in zip(("h_0", "c_0"), state, strict=True):
            axes = f"[D*num_layers, {'batch, ' if batch else ''}state_size]"
            _checks.check_shape("LLTMLayer", name, tensor, shape, axes)
        return state

    def _forward_padded(
        self, input: Tensor, state: State, lengths: Tensor | None, *, batch_first: bool
    ) -> tuple[Tensor, State]:
        run = functools.partial(_run, lengths=lengths, batch_first=batch_first)
        initial = list(zip(state[0].unbind(0), state[1].unbind(0), strict=True))
        last: list[State] = []
        side = _side_stream(input.device) if self.bidirectional else None
        try:
            for layer in range(self.num_layers):
                if layer > 0:
                    input = torch.nn.functional.dropout(input, self.dropout, self.training)
                forward, *backward = [
                    (input, *initial[len(last) + number], *self._parameters_of(suffix))
                    for number, suffix in enumerate(self._suffixes(layer))
                ]
                if backward:
                    results = _both(run, forward, backward[0], side)
                    input = torch.cat([output for output, _ in results], dim=2)
                else:
                    results = [run(*forward, reverse=False)]
                    input = results[0][0]
                last += [final for _, final in results]
            return input, (torch.stack([h for h, _ in last]), torch.stack([c for _, c in last]))
        finally:
            if side is not None:
                _hand_back(side)

    def _parameters_of(self, suffix: str) -> tuple[Tensor, Tensor]:
        # Not get_parameter(), which torch 2.4 cannot trace.
        weights = getattr(self, "weights" + suffix)
        bias = getattr(self, "bias" + suffix) if self.bias else weights.new_zeros(len(weights))
        return weights, bias

    def _suffixes(self, layer: int) -> list[str]:
        return [f"_l{layer}", f"_l{layer}_reverse"][: 1 + self.bidirectional]

    def extra_repr(self) -> str:
        """The sizes, for ``repr``."""
        return (
            f"{self.input_features}, {self.state_size}, num_layers={self.num_layers}, bias={self.bias}, "
            f"batch_first={self.batch_first}, dropout={self.dropout}, bidirectional={self.bidirectional}"
        )
