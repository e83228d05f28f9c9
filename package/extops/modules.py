"""The operators as ``torch.nn`` modules."""

import functools
import math
import numbers
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from extops import _autograd, _checks, reference
from extops.ops.lltm import lltm
from extops.ops.lltm_sequence import lltm_sequence
from extops.ops.rounding import round_ste

State = tuple[Tensor, Tensor]
T = TypeVar("T")


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _both(device: torch.device, one: Callable[[], T], other: Callable[[], T]) -> tuple[T, T]:
    """The results of two calls; on a GPU they run side by side, since small ones leave most of it idle."""
    if device.type != "cuda" or not _autograd.is_plain():
        return one(), other()
    stream = torch.cuda.current_stream(device)
    side = _side_stream(device)
    side.wait_stream(stream)
    with torch.cuda.stream(side):
        beside = other()
    result = one()
    # Memory of the side stream is reused only on that stream, which waits for this one before each use.
    stream.wait_stream(side)
    return result, beside


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
        # Within a trace both are tensors, and so of any size.
        steps = batch_sizes.shape[0]
        batch: Any = batch_sizes[0] if _autograd.is_tracing() else int(batch_sizes[0])
        h, c = self._checked_state(data, state, batch)
        if to_sorted is not None and state is not None:
            h, c = (x.index_select(1, to_sorted) for x in (h, c))
        # The GPU waits while the host computes: so only small tensors here.
        count_to = functools.partial(torch.arange, device=batch_sizes.device)
        ends = batch_sizes.cumsum(0)
        if not (_autograd.is_tracing() or torch.compiler.is_compiling()) and ends[-1] != len(data):
            raise RuntimeError(
                f"LLTMLayer: expected `input.data` to have {int(ends[-1])} rows, the sum of "
                f"`input.batch_sizes`, but got {len(data)}"
            )
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
        initial = list(zip(state[0].unbind(0), state[1].unbind(0), strict=True))
        last: list[State] = []
        for layer in range(self.num_layers):
            if layer > 0:
                input = torch.nn.functional.dropout(input, self.dropout, self.training)
            runs = [
                functools.partial(
                    self._run,
                    suffix,
                    input,
                    initial[len(last) + direction],
                    lengths,
                    reverse=direction == 1,
                    batch_first=batch_first,
                )
                for direction, suffix in enumerate(self._suffixes(layer))
            ]
            results = _both(input.device, *runs) if self.bidirectional else (runs[0](),)
            last += [final for _, final in results]
            outputs = [output for output, _ in results]
            input = torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]
        return input, (torch.stack([h for h, _ in last]), torch.stack([c for _, c in last]))

    def _run(
        self,
        suffix: str,
        input: Tensor,
        state: State,
        lengths: Tensor | None,
        *,
        reverse: bool,
        batch_first: bool,
    ) -> tuple[Tensor, State]:
        """One direction of a layer."""
        # Not get_parameter(), which torch 2.4 cannot trace.
        weights = getattr(self, "weights" + suffix)
        bias = getattr(self, "bias" + suffix) if self.bias else weights.new_zeros(len(weights))
        return lltm_sequence(
            input,
            state,
            weights,
            bias,
            lengths=lengths,
            batch_first=batch_first,
            reverse=reverse,
        )

    def _suffixes(self, layer: int) -> list[str]:
        return [f"_l{layer}", f"_l{layer}_reverse"][: 1 + self.bidirectional]

    def extra_repr(self) -> str:
        """The sizes, for ``repr``."""
        return (
            f"{self.input_features}, {self.state_size}, num_layers={self.num_layers}, bias={self.bias}, "
            f"batch_first={self.batch_first}, dropout={self.dropout}, bidirectional={self.bidirectional}"
        )
