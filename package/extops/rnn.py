"""The recurrent modules of torch, always by our kernels. :func:`extops.accelerate` measures where they are faster."""

from __future__ import annotations

import copyreg
from typing import Any, cast

import torch
from torch import Tensor

from extops import _private
from extops.binding import _checks
from extops.calling import _autocast, _autograd
from extops.modules import HasStates, Layers, Results, parameters_of
from extops.ops.sequence import CELLS, GRU_CELL, LSTM_CELL, Cell, rnn_cell

PARAMETERS = "weight_ih", "weight_hh", "bias_ih", "bias_hh"
"""Of a step, in torch's order."""


class LikeTorchs:
    """An instance of a class of torch to everybody who asks, though its type is not derived from it."""

    _extops_kind: type[torch.nn.Module]
    _extops_looks: type[torch.nn.Module]
    """The class that it says."""

    @property
    def __class__(self) -> Any:
        return type(self) if _private.is_asked_by_dynamo() else type(self)._extops_looks

    @__class__.setter
    def __class__(self, other: type) -> None:
        set_class(self, other)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Not as ``object`` does it, which asks for the class."""
        return cast("Any", copyreg)._reconstructor, (type(self), object, None), state_of(self)


def set_class(module: object, other: type) -> None:
    """``module.__class__ = other`` of any object."""
    object.__dict__["__class__"].__set__(module, other)


def state_of(module: Any) -> dict[str, Any]:
    """What pickle keeps of a module: a copy of its attributes."""
    get = getattr(module, "__getstate__", None)  # which all objects have since Python 3.11
    return dict(module.__dict__ if get is None else get())


class _TorchLayers(Layers, torch.nn.RNNBase):
    _size = "hidden_size"
    _number_of_states = 1
    _extops_kind: type[torch.nn.Module]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        # Of the class in torch: what it makes of its arguments, and its errors.
        self._extops_kind.__init__(self, *arguments, **options)
        if self.proj_size:
            found = f"{self.proj_size}: torch.nn.LSTM has kernels for projections, extops none"
            raise _checks.unfit(self._name, "proj_size", "to be 0", found, ValueError)

    def forward(  # type: ignore[override]
        self, input: Any, hx: Any = None, *more: Any, **named: Any
    ) -> tuple[Any, Any]:
        """As of torch's layers, whose state has this name, and with ``lengths``. That has no default, and no method is
        called by super(), as in ``accelerating._Accelerated``.
        """
        lengths = None
        if more or named:
            if not is_of_lengths(more, named):
                # Which says what is wrong.
                found: tuple[Any, Any] = self._extops_kind.forward(self, input, hx, *more, **named)
                return found
            lengths = more[0] if more else named["lengths"]
        if torch.compiler.is_compiling() or lengths is not None:
            return self._forward(input, hx, lengths)
        try:
            self._update_flat_weights()
            if type(input) is Tensor and _autograd.is_plain() and not _autocast.is_on():
                states = None if hx is None else self._as_states(hx)
                batch = input.shape[0 if self.batch_first else 1]
                shapes = {x.shape for x in states or ()}
                if input.dim() == 3 and shapes <= {self._shape_of_states(batch)}:
                    output, states = self.run_plain(input, states, self._flat_weights)
                    return output, self._of_states(states)
        except (*_checks.FAILURES, IndexError):
            pass  # the checks below raise what is wrong
        return self._forward(input, hx)

    def flatten_parameters(self) -> None:
        """As of torch's layers. In a graph there is nothing to do: torch 2.11 refuses to ask where weights lie."""
        if not torch.compiler.is_compiling():
            super().flatten_parameters()

    def run_plain(
        self, input: Tensor, states: tuple[Tensor, ...] | None, parameters: list[Any]
    ) -> Results:
        """All layers of a plain call that is not packed, with as few checks as possible, since the host takes longer
        than the GPU. Results lie as torch's: by steps, whatever the order of the input, and none is a view.
        """
        number, batch_first = self._number_of_states, self.batch_first
        cell = CELLS[self.mode.lower()]
        steps = (input.transpose(0, 1) if batch_first else input).contiguous()
        allow_tf32 = steps.is_cuda and _private.cudnn_allows_tf32()
        # torch's layers on a CPU save none of their results, so programs change them in place.
        options = allow_tf32, batch_first, steps.is_cuda

        def run(input: Tensor, *given: Any, reverse: bool | None) -> Results:
            steps = input.transpose(0, 1) if batch_first else input
            weights = (*given[number:], None, None)[:4]
            given = steps, *weights, given[0], given[number - 1], None
            output, h, c = cell.run(given, (reverse, *options), number == 1)
            return output, (h, c)[:number]

        width = 4 if self.bias else 2
        of_layers = [*zip(*[iter(parameters)] * width, strict=True)]
        input = steps.transpose(0, 1) if batch_first else steps
        return self._forward_layers(run, input, states, of_layers, batch_first=batch_first)

    def _check_sizes(self, input: Tensor, states: Any, *batch: int) -> None:
        _check_features(self.mode.partition("_")[0], input, self.input_size)
        super()._check_sizes(input, states, *batch)

    def _forward_padded(self, input: Tensor, states: Any, *arguments: Any, **options: Any) -> Any:
        # Results lie as torch's: by steps, whatever the order of the input.
        batch_first = options["batch_first"]
        steps = (input.transpose(0, 1) if batch_first else input).contiguous()
        input = steps.transpose(0, 1) if batch_first else steps
        # On a CPU torch's layer is one operator of oneDNN, and autocast casts all its arguments; not of packed rows.
        is_one = self.mode == "LSTM" and has_onednn and input.device.type == "cpu"
        if is_one and _autocast.is_on() and not (arguments and arguments[0] is not None):
            # Of the input, where there are no states: zeros are of its dtype.
            (input,), states = _autocast.cast(input), states and _autocast.cast(*states)
        return super()._forward_padded(input, states, *arguments, **options)

    def _run(self, input: Tensor, *arguments: Tensor, **options: Any) -> Results:
        """One direction of a layer; the operator takes two states and two biases, where the layer may have fewer."""
        number = self._number_of_states
        states, parameters = arguments[:number], arguments[number:]
        given = input, *(*parameters, None, None)[:4], states[0], states[-1]
        allow_tf32 = _private.switches.cudnn_allows_tf32
        options = {"batch_first": False, "reverse": False, "lengths": None, **options}
        # torch's layers on a CPU save none of their results, so programs change them in place.
        options = {**options, "allow_tf32": allow_tf32, "keeps_output": input.is_cuda}
        output, h_n, c_n = CELLS[self.mode.lower()](given, **options)
        return output, (h_n, c_n)[:number]

    def _parameters_of(self, suffix: str) -> tuple[Tensor, ...]:
        names = [name + suffix for name in PARAMETERS[: 4 if self.bias else 2]]
        if torch.compiler.is_compiling():
            return tuple(parameters_of(self, names))
        # torch's layers compute with this list, which its users may fill.
        first = self._flat_weights_names.index(names[0])
        return tuple(self._flat_weights[first : first + len(names)])  # type: ignore[arg-type]


def is_of_lengths(more: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Whether arguments behind ``hx`` are ``lengths`` alone."""
    return len(more) + len(named) == 1 and (len(more) == 1 or "lengths" in named)


has_onednn = torch.backends.mkldnn.is_available()  # torch.compile cannot ask


def _check_features(op: str, input: Tensor, size: int) -> None:
    if input.shape[-1] != size:
        found = f"{input.shape[-1]}: {list(input.shape)}"
        raise _checks.unfit(op, "input", f"to have input_size = {size} features", found)


_NOT_TORCHS = {"__module__", "__dict__", "__weakref__", "__doc__", "__init__", "forward"}


def like_torchs(torchs: type[torch.nn.Module], *bases: type) -> type[Any]:
    """A class with all that torch's has, which is not derived from it."""
    taken = {name: x for name, x in vars(torchs).items() if name not in _NOT_TORCHS}
    # No property: a user may set an attribute of that name.
    taken |= {"_extops_kind": torchs, "_extops_looks": torchs, "_name": torchs.__name__}
    return type(torchs.__name__, (LikeTorchs, *bases), taken)


class LSTM(like_torchs(torch.nn.LSTM, _TorchLayers)):  # type: ignore[misc]
    """:class:`torch.nn.LSTM` by :func:`extops.lstm_sequence`: the same arguments but for ``proj_size``, parameters and
    results, with gradients of any order.
    """

    _number_of_states = 2


class GRU(like_torchs(torch.nn.GRU, _TorchLayers)):  # type: ignore[misc]
    """:class:`torch.nn.GRU` by :func:`extops.gru_sequence`: the same arguments, parameters and results, with gradients
    of any order.
    """


class RNN(like_torchs(torch.nn.RNN, _TorchLayers)):  # type: ignore[misc]
    """:class:`torch.nn.RNN` by :func:`extops.rnn_sequence`: the same arguments, parameters and results, with gradients
    of any order.
    """


class _TorchCell(torch.nn.RNNCellBase, HasStates):
    _extops_kind: type[torch.nn.Module]
    _extops_cell: Any
    _name = ""  # no property: a user may set an attribute of that name
    _number_of_states = 1
    __prepare_scriptable__ = _checks.refuse_script

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """One step, of ``[B, I]`` or, without a batch, of ``[I]``."""
        try:
            found = self._one_step(input, hx)
        except _checks.FAILURES:
            _checks.explain(self._composed, input, hx)
            raise
        return self._composed(input, hx) if found is None else found

    def _one_step(self, input: Tensor, hx: Any) -> Any:
        """The same with as few checks as possible, since the host takes longer than the GPU; None for other calls."""
        if not _autograd.is_plain() or _autocast.is_on() or input.dim() != 2:
            return None
        step, number = self._extops_cell.step, self._number_of_states
        if not step.serves(input, number == 1):
            return None
        if hx is None:
            states: Any = (input.new_zeros(input.shape[0], self.hidden_size),) * number
        else:
            states = self._as_states(hx)
        h, *c = step(input, *parameters_of(self, PARAMETERS), *states)
        # The backward keeps the cell state: a caller may change the copy in place.
        return self._of_states((h, *(x.clone() if x.requires_grad else x for x in c)))

    def _composed(self, input: Tensor, hx: Any) -> Any:
        name = type(self)._extops_kind.__name__
        _checks.check_tensor(name, "input", input)
        if input.dim() not in (1, 2):
            expected = "to have 2 dimensions, or 1 where it has no batch"
            raise _checks.unfit(name, "input", expected, f"{input.dim()}: {list(input.shape)}")
        _check_features(name, input, self.input_size)
        shape = (*input.shape[:-1], self.hidden_size)
        number = self._number_of_states
        states: Any = (input.new_zeros(shape),) * number
        if hx is not None:
            states = self._as_states(hx)
            axes = f"[{'batch, ' if input.dim() == 2 else ''}hidden_size]"
            for state_name, state in zip(("h", "c")[:number], states, strict=True):
                _checks.check_tensor(name, state_name, state)
                _checks.check_shape(name, state_name, state, shape, axes)
        is_batched = input.dim() == 2
        if not is_batched:
            input, states = input.unsqueeze(0), tuple(x.unsqueeze(0) for x in states)
        parameters = self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh
        given = input.unsqueeze(0), *parameters, states[0], states[-1]
        _, *found = self._extops_cell(given, None, batch_first=False, reverse=False)
        last = tuple(found[:number])
        return self._of_states(last if is_batched else tuple(x.squeeze(0) for x in last))


class LSTMCell(_TorchCell, torch.nn.LSTMCell):
    """:class:`torch.nn.LSTMCell` by extops' kernels: the same arguments, parameters and results, with gradients of any
    order.
    """

    _extops_kind = torch.nn.LSTMCell
    _name = "LSTMCell"
    # torch.compile of 2.6 refuses attributes of a class.
    _extops_cell = property(lambda _: LSTM_CELL)
    _number_of_states = 2


class GRUCell(_TorchCell, torch.nn.GRUCell):
    """:class:`torch.nn.GRUCell` by extops' kernels: the same arguments, parameters and results, with gradients of any
    order.
    """

    _extops_kind = torch.nn.GRUCell
    _name = "GRUCell"
    _extops_cell = property(lambda _: GRU_CELL)


class RNNCell(_TorchCell, torch.nn.RNNCell):
    """:class:`torch.nn.RNNCell` by extops' kernels: the same arguments, parameters and results, with gradients of any
    order.
    """

    _extops_kind = torch.nn.RNNCell
    _name = "RNNCell"

    @property
    def _extops_cell(self) -> Cell:
        return rnn_cell("RNNCell", self.nonlinearity)
