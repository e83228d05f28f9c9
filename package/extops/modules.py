"""The operators as ``torch.nn`` modules."""

from __future__ import annotations

import functools
import math
import numbers
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from extops import _in_graph, _packing, _padded, _private, reference
from extops._packing import Packing, States
from extops.binding import _checks, _loader
from extops.calling import _autograd
from extops.ops import sequence
from extops.ops.lltm import lltm
from extops.ops.rounding import round_ste
from extops.ops.sequence import lltm_sequence

_SAVED_PER_UNIT = 8
"""Numbers of a padded row for each unit: gates, cells and outputs of a direction."""

State = tuple[Tensor, Tensor]
Results = tuple[Tensor, States]
Run = Callable[..., Results]
"""One direction of a layer: of its input, the states before its first step and its parameters, and of ``reverse``.
Where that is None, both, as the operator takes them.
"""


def _check_packed(name: str, data: Tensor, sizes: list[int]) -> None:
    if sum(sizes) != len(data):
        rows = f"to have {sum(sizes)} rows, the sum of `input.batch_sizes`"
        raise _checks.unfit(name, "input.data", rows, len(data))
    if sizes != sorted(sizes, reverse=True) or sizes[-1] < 0:
        expected = "not to grow from one step to the next, nor to be negative"
        raise _checks.unfit(name, "input.batch_sizes", expected, sizes)


def parameters_of(module: torch.nn.Module, names: Sequence[str]) -> list[Tensor]:
    """Parameters, read directly from where torch.nn.Module keeps them: attribute access looks there last."""
    kept = getattr(module, "_parameters", {})
    found: list[Any] = [kept.get(name) for name in names]
    for x in found:
        if x is None:  # computed by torch.nn.utils, or of a replica
            return [getattr(module, name) for name in names]
    return found


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
    __prepare_scriptable__ = _checks.refuse_script

    def forward(self, input: Tensor, state: State | None = None) -> State:
        """One step: ``input`` [B, I] and ``state = (h, c)`` of [B, S] each give ``(new_h, new_cell)``."""
        if state is None:
            _checks.check_tensor("lltm", "input", input)
            _checks.check_dims("lltm", "input", input, "batch, input_features")
            state = self.zero_state(input)
        weights, bias = parameters_of(self, ("weights", "bias"))
        return self.step(input, weights, bias, *_checks.as_pair("LLTM", state))


class RoundSTE(torch.nn.Module):
    """:func:`extops.round_ste` as a module without parameters."""

    def forward(self, input: Tensor) -> Tensor:
        """``input`` of any shape gives a tensor of the same shape."""
        return round_ste(input)


_UNSQUEEZED = operator.methodcaller("unsqueeze_", 0)


def _joined_directions(outputs: list[Tensor], batch_first: bool, is_plain: bool) -> Tensor:
    """By steps; of plain calls no view."""
    if not batch_first:
        return torch.cat(outputs, dim=-1)
    joined = torch.cat([x.transpose(0, 1) for x in outputs], dim=-1)
    return joined.transpose_(0, 1) if is_plain else joined.transpose(0, 1)


def _beside_each_other(states: Tensor) -> tuple[Tensor, ...]:
    """Those of each layer, the units of both directions side by side."""
    of_layers: Tensor = states.unflatten(0, (len(states) // 2, 2))
    return of_layers.transpose(1, 2).flatten(2).unbind(0)


def _joined(*parameters: Tensor) -> tuple[Tensor, ...]:
    """The parameters of two directions as an operator takes them, by one kernel."""
    half = len(parameters) // 2
    pairs = list(zip(parameters[:half], parameters[half:], strict=True))
    joined = _in_graph.joined([x.flatten() for pair in pairs for x in pair])
    parts = zip(joined.split([2 * x.numel() for x, _ in pairs]), pairs, strict=True)
    return tuple([part.view(2 * len(x), *x.shape[1:]) for part, (x, _) in parts])


class _BehindEachOther(torch.autograd.Function):
    """The same in plain calls, with gradients that are not copied."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> tuple[Tensor, ...]:
        return _joined(*parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        halves = [(None, None) if x is None else x.chunk(2) for x in gradients]
        return *(x for x, _ in halves), *(x for _, x in halves)


_behind_each_other = _private.apply(_BehindEachOther)


def _joined_in_graph(*parameters: Tensor) -> tuple[Tensor, ...]:
    """The same in a graph. Where there are gradients, each pair is joined by a kernel of its own: no copies of them."""
    if not torch.is_grad_enabled():
        return _joined(*parameters)
    half = len(parameters) // 2
    return tuple([torch.cat(x) for x in zip(parameters[:half], parameters[half:], strict=True)])


def _named(states: States) -> Iterator[tuple[str, Tensor]]:
    # As many names as states: torch.compile of 2.4 refuses others.
    names = "h_0", "c_0", *(f"state[{place}]" for place in range(2, len(states)))
    return zip(names[: len(states)], states, strict=True)


def _forward(layers: torch.nn.Module, *arguments: Any) -> tuple[Any, Any]:
    results: tuple[Any, Any] = layers.forward(*arguments)
    return results


forward_uncompiled: Callable[..., tuple[Any, Any]] = _private.uncompiled(_forward)
"""For packed rows, whose number of samples only data tells: the compiler breaks its graph there, as it does for torch's
layers.
"""


class HasStates:
    """Has one state or more: of one, programs give and get no tuple."""

    _number_of_states = 2

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _as_states(self, state: Any) -> States:
        number = self._number_of_states
        return (state,) if number == 1 else _checks.as_states(self._name, state, number)

    def _of_states(self, states: States) -> Any:
        return states[0] if self._number_of_states == 1 else states


class Layers(torch.nn.Module, HasStates):
    """Layers of a recurrent cell over whole sequences: what :class:`LLTMLayer` and those of torch share."""

    num_layers: int
    batch_first: bool
    dropout: float
    bidirectional: bool
    _size: str
    """The attribute that is the size of the states."""
    __prepare_scriptable__ = _checks.refuse_script

    def _run(self, input: Tensor, *arguments: Tensor, **options: Any) -> Results:
        """One direction of a layer, from the states before the first step and its parameters."""
        raise NotImplementedError

    def _parameters_of(self, suffix: str) -> tuple[Tensor, ...]:
        """Those of one direction of a layer."""
        raise NotImplementedError

    def forward(
        self, input: Any, state: Any = None, lengths: Tensor | None = None
    ) -> tuple[Any, Any]:
        """See the class."""
        is_packed = isinstance(input, (PackedSequence, _padded.PaddedSequence))
        if is_packed and torch.compiler.is_dynamo_compiling():
            if _padded.is_of_unknown_batch(input):
                return forward_uncompiled(self, input, state)
            return self._forward_in_graph(_padded.as_padded(input), state)
        states = None if state is None else self._as_states(state)
        for name, tensor in _named(states or ()):
            _checks.check_tensor(self._name, name, tensor)
        if isinstance(input, PackedSequence):
            packed, states = self._forward_packed(input, states)
            return packed, self._of_states(states)
        _checks.check_tensor(self._name, "input", input)
        if input.dim() not in (2, 3):
            expected = "to have 3 dimensions, or 2 where it has no batch"
            found = f"{input.dim()}: {list(input.shape)}"
            raise _checks.unfit(self._name, "input", expected, found)
        batch_axis = 0 if self.batch_first else 1
        is_batched = input.dim() == 3
        self._check_sizes(input, states, *input.shape[batch_axis:][: int(is_batched)])
        if not is_batched:
            input = input.unsqueeze(batch_axis)
            states = states and tuple(x.unsqueeze(1) for x in states)
        packing = None if lengths is None else (lengths, None)
        output, states = self._forward_padded(input, states, packing, batch_first=self.batch_first)
        if not is_batched:
            output, states = output.squeeze(batch_axis), tuple(x.squeeze(1) for x in states)
        return output, self._of_states(states)

    _forward = forward

    def _forward_in_graph(self, input: _padded.PaddedSequence, state: Any) -> tuple[Any, Any]:
        rows = input.rows.transpose(0, 1) if self.batch_first else input.rows
        checked: Any = _in_graph.Checked(input.sent)
        output, last = self.forward(rows, state, checked)
        output = output.transpose(0, 1) if self.batch_first else output
        given = input.lengths, input.sent, input.number
        return _padded.PaddedSequence(output, *given, is_sorted=input.is_sorted), last

    def _forward_packed(
        self, input: PackedSequence, given: States | None
    ) -> tuple[PackedSequence, States]:
        """The rows stay in the order of their lengths, in which they are packed."""
        data, batch_sizes, to_sorted, to_original = input
        _checks.check_dims(self._name, "input.data", data, "rows, input_features")
        # Numbers take less time than tensors, which sizes are within a trace, and so of any size.
        is_tracing = _autograd.is_tracing()
        sizes: Any = batch_sizes if is_tracing else batch_sizes.tolist()
        self._check_sizes(data, given, sizes[0])
        states = given
        if to_sorted is not None and given is not None:
            states = tuple(x.index_select(1, to_sorted) for x in given)
        if is_tracing:
            packing = _packing.packing_of(self._name, batch_sizes, sizes[0], data)
            pieces = [_packing.Piece(slice(None), sizes.shape[0], sizes[0], packing)]
        else:
            _check_packed(self._name, data, sizes)
            width = data.shape[1] + _SAVED_PER_UNIT * getattr(self, self._size)
            given_rows = batch_sizes, sizes, data
            pieces = _packing.pieces_of(self._name, *given_rows, width * data.element_size())
        if len(pieces) > 1:
            run = functools.partial(self._run_pieces, pieces)
            if states is None:
                zeros = data.new_zeros(self._shape_of_states(sizes[0]))
                states = (zeros,) * self._number_of_states
            rows, states = self._forward_layers(run, data, states)
        else:  # rows of equal lengths are treated as if they were not packed, as in torch
            (piece,) = pieces
            arguments = piece.padded(data), states, piece.packing
            output, states = self._forward_padded(*arguments, batch_first=False)
            rows = piece.packed(output)
            rows = rows if piece.packing else rows.clone()  # no view, as in _forward_layers
        if to_original is not None:
            states = tuple(x.index_select(1, to_original) for x in states)
        return PackedSequence(rows, batch_sizes, to_sorted, to_original), states

    def _run_pieces(
        self, pieces: Sequence[_packing.Piece], rows: Tensor, *arguments: Tensor, reverse: bool
    ) -> Results:
        """One direction of a layer, of packed rows."""
        number = self._number_of_states

        def run(place: int, states: States) -> Results:
            piece = pieces[place]
            given = piece.padded(rows[piece.rows]), *states, *arguments[number:]
            output, states = self._run(*given, lengths=piece.lengths, reverse=reverse)
            return piece.packed(output), states

        batches = [piece.batch for piece in pieces]
        return _packing.run_in_pieces(run, batches, arguments[:number], reverse)

    def _shape_of_states(self, *batch: int) -> tuple[int, ...]:
        return self.num_layers * (1 + self.bidirectional), *batch, getattr(self, self._size)

    def _check_sizes(self, input: Tensor, states: States | None, *batch: int) -> None:
        """Those of the states; without ``batch``, of an input that has no batch."""
        shape = self._shape_of_states(*batch)
        axes = f"[D*num_layers, {'batch, ' if batch else ''}{self._size}]"
        for name, tensor in _named(states or ()):
            _checks.check_shape(self._name, name, tensor, shape, axes)

    def _forward_padded(
        self,
        input: Tensor,
        states: States | None,
        packing: Packing | tuple[Tensor, None] | None = None,
        *,
        batch_first: bool,
    ) -> Results:
        lengths, places = packing or (None, None)
        run = functools.partial(self._run, lengths=lengths, batch_first=batch_first)
        return self._forward_layers(run, input, states, places=places, batch_first=batch_first)

    def _fits(self, input: Tensor, time: int, batch: int) -> bool:
        """Whether both directions may be computed at once: on a GPU, if the gates of both are few enough."""
        size = time * batch * getattr(self, self._size) * _SAVED_PER_UNIT * input.element_size()
        return input.is_cuda and size < sequence.CHUNK_BYTES

    def _forward_layers(
        self,
        run: Run,
        input: Tensor,
        states: States | None,
        parameters: Sequence[Sequence[Tensor]] | None = None,
        *,
        places: Tensor | None = None,
        batch_first: bool = False,
    ) -> Results:
        """All layers, of steps or, with states, of packed rows; ``places`` are those of rows that were packed. The
        parameters of each direction are given in plain calls, whose results are no views, which a caller could not
        detach in place.
        """
        is_plain = parameters is not None or _autograd.is_plain()
        if parameters is None:
            suffixes = map(self._suffixes, range(self.num_layers))
            parameters = [self._parameters_of(x) for of_layer in suffixes for x in of_layer]
        runs: Sequence[bool | None] = (False, True)[: 1 + self.bidirectional]
        may_be_together = self.bidirectional and input.dim() == 3 and _loader.binding == "stable"
        together = may_be_together and _are_together(self, input, is_plain)
        if together:
            runs = (None,)
            pairs = zip(parameters[::2], parameters[1::2], strict=True)
            join = _behind_each_other if is_plain else _joined_in_graph
            parameters = [join(*one, *other) for one, other in pairs]
        if states is None:
            shape = input.shape[int(not batch_first)], getattr(self, self._size) * (1 + together)
            zeros = input.new_zeros(shape) if is_plain else _in_graph.zeros(input, *shape)
            initial = [(zeros,) * self._number_of_states] * len(parameters)
        else:
            of_layers = _beside_each_other if together else Tensor.unbind
            initial = list(zip(*map(of_layers, states), strict=True))
        last: list[States] = []
        for at in range(0, len(initial), len(runs)):
            if at > 0:
                input = self._dropped(input, places, batch_first)
            outputs = []
            for place, reverse in enumerate(runs, at):
                output, final = run(input, *initial[place], *parameters[place], reverse=reverse)
                outputs.append(output)
                last.append(final)
            input = output if len(runs) == 1 else _joined_directions(outputs, batch_first, is_plain)
        if together:
            halves = ((y.chunk(2, dim=1) for y in of_run) for of_run in last)
            last = [x for of_run in halves for x in zip(*of_run, strict=True)]
        if is_plain and len(last) == 1:
            return input, tuple(map(_UNSQUEEZED, last[0]))
        return input, tuple([_in_graph.stacked(list(x)) for x in zip(*last, strict=True)])

    def _dropped(self, input: Tensor, places: Tensor | None, batch_first: bool) -> Tensor:
        """What the next layer reads. As torch's, masks are drawn for the packed rows alone and, on a CPU, by steps."""
        if not (self.training and self.dropout > 0):
            return input
        drop = functools.partial(torch.nn.functional.dropout, p=self.dropout)
        if places is not None:
            rows = input.flatten(0, 1)
            dropped = drop(rows.index_select(0, places))
            return torch.zeros_like(rows).index_copy(0, places, dropped).view_as(input)
        if input.device.type != "cpu":
            return drop(input)
        if batch_first:
            return drop(input.transpose(0, 1).contiguous()).transpose(0, 1)
        return drop(input.contiguous())

    def _suffixes(self, layer: int) -> list[str]:
        return [f"_l{layer}", f"_l{layer}_reverse"][: 1 + self.bidirectional]


def _are_together(layers: Layers, input: Tensor, is_plain: bool) -> bool:
    """Whether both directions are computed at once, in a plain call or a graph that Dynamo traces for this process."""
    return is_plain and layers._fits(input, *input.shape[:2])


_private.answer_in_traces(
    _are_together,
    lambda layers, input, _: layers._fits(
        input, *(x or 1 for x in _private.hints_of(input.shape[:2]))
    ),
)


class NewLayers(Layers):
    """Those that make their parameters themselves, by arguments as of :class:`torch.nn.LSTM`."""

    _features: str
    """The attribute that is the size of the input."""

    def __init__(
        self,
        features: int,
        state_size: int,
        num_layers: int,
        bias: bool,
        batch_first: bool,
        dropout: float,
        bidirectional: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        sizes = {self._features: features, self._size: state_size}
        _checks.check_layer_sizes(self._name, **sizes)
        _checks.check_layer_sizes(self._name, at_least=1, num_layers=num_layers)
        _checks.check_layer_dtype(self._name, dtype)
        is_number = isinstance(dropout, numbers.Real) and not isinstance(dropout, bool)
        if not (is_number and 0 <= dropout <= 1):
            given = self._name, "dropout", "to be a number from 0 to 1", repr(dropout)
            raise _checks.unfit(*given, ValueError)
        if dropout > 0 and num_layers == 1:
            warnings.warn(
                f"{self._name}: `dropout` acts between layers, and so not at all with num_layers=1",
                stacklevel=3,
            )
        for name, size in sizes.items():
            setattr(self, name, size)
        self.num_layers = num_layers
        self.bias = bias
        self.batch_first = batch_first
        self.dropout = dropout
        self.bidirectional = bidirectional
        for layer in range(num_layers):
            of_input = features if layer == 0 else state_size * (1 + bidirectional)
            for suffix in self._suffixes(layer):
                for name, shape in self._shapes(of_input, state_size).items():
                    if bias or not name.startswith("bias"):
                        empty = torch.empty(shape, device=device, dtype=dtype)
                        self.register_parameter(name + suffix, torch.nn.Parameter(empty))
        self.reset_parameters()

    def _shapes(self, features: int, state_size: int) -> dict[str, tuple[int, ...]]:
        """Those of the parameters of one direction of a layer."""
        raise NotImplementedError

    def _names(self, suffix: str) -> list[str]:
        return [name + suffix for name in self._shapes(0, 0) if self.bias or name[:4] != "bias"]

    def reset_parameters(self) -> None:
        """Draws all parameters uniformly from ±1/sqrt(size of the states)."""
        size = getattr(self, self._size)
        bound = 1 / math.sqrt(size) if size > 0 else 0.0
        for parameter in self.parameters():
            torch.nn.init.uniform_(parameter, -bound, bound)

    def extra_repr(self) -> str:
        """The sizes, for ``repr``."""
        return (
            f"{getattr(self, self._features)}, {getattr(self, self._size)}, num_layers={self.num_layers}, "
            f"bias={self.bias}, batch_first={self.batch_first}, dropout={self.dropout}, "
            f"bidirectional={self.bidirectional}"
        )


class LLTMLayer(NewLayers):
    r"""LLTM layers over whole sequences, shaped like :class:`torch.nn.LSTM`; each is :func:`extops.lltm_sequence`.

    Args:
        input_features: the size ``I`` of the input.
        state_size: the size ``S`` of the hidden and the cell state.
        num_layers: each layer after the first reads the output of the one before.
        bias: whether there are biases; if not, they are zeros.
        batch_first: ``input`` and ``output`` are ``[B, T, ...]`` instead of ``[T, B, ...]``.
        dropout: the probability, in training, that an element between two layers is dropped.
        bidirectional: each layer also runs backwards in time; ``D`` below is then 2, else 1.
        device: where the parameters are made.
        dtype: float64, float32, bfloat16 or float16.

    Attributes:
        weights_l[k]: ``[3S, S + I]`` for the first layer, ``[3S, S + D * S]`` for the others; those of the other
            direction are ``weights_l[k]_reverse``.
        bias_l[k]: ``[3S]``, also ``bias_l[k]_reverse``. All are initialised uniformly in :math:`\pm 1/\sqrt{S}`.

    Shape:
        ``layer(input, (h_0, c_0)) -> output, (h_n, c_n)`` with ``input`` of ``[T, B, I]``, unbatched ``[T, I]``, or a
        :class:`~torch.nn.utils.rnn.PackedSequence`; ``output`` of ``[T, B, D * S]``; states of
        ``[D * num_layers, B, S]``, zeros if not given.

    Raises:
        RuntimeError: a dtype, device, layout, number of dimensions or size does not fit; the message names it.
    """

    _features, _size = "input_features", "state_size"

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
        options = bias, batch_first, dropout, bidirectional, device, dtype
        super().__init__(input_features, state_size, num_layers, *options)

    def _shapes(self, features: int, state_size: int) -> dict[str, tuple[int, ...]]:
        return {"weights": (3 * state_size, state_size + features), "bias": (3 * state_size,)}

    def _run(self, input: Tensor, *arguments: Tensor, **options: Any) -> Results:
        h, c, weights, bias = arguments
        return lltm_sequence(input, (h, c), weights, bias, **options)

    def _parameters_of(self, suffix: str) -> tuple[Tensor, ...]:
        # Not get_parameter(), which torch 2.4 cannot trace.
        weights, *bias = parameters_of(self, self._names(suffix))
        return weights, bias[0] if bias else weights.new_zeros(len(weights))


def _holds_layers(module: object) -> bool:
    return isinstance(module, torch.nn.Module) and any(
        issubclass(type(x), Layers) for x in module.modules()
    )


_private.trace_instead(_padded.TRACED, _holds_layers, _padded.TRACED_ELSEWHERE)
