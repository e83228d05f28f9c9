"""Drop-ins for the recurrent modules of torch."""

import functools
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from extops import _private
from extops.binding import _devices, _schemas
from extops.calling import _autocast, _autograd, _checks
from extops.choosing import _choice, _cudnn
from extops.choosing._packing import Packing, States
from extops.modules import Layers, Results, forward_uncompiled, parameters_of
from extops.ops.sequence import (
    CELLS,
    GRU_CELL,
    LSTM_CELL,
    RNN_CELLS,
    gru_sequence,
    lstm_sequence,
    rnn_cell,
    rnn_sequence,
    suit_torchs,
)
from extops.ops.step import Step

_logger = logging.getLogger("extops")

Model = TypeVar("Model", bound=torch.nn.Module)

_PARAMETERS = "weight_ih", "weight_hh", "bias_ih", "bias_hh"
"""Of a step, in torch's order."""


def _run_lstm(
    input: Tensor,
    h: Tensor,
    c: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    *bias: Any,
    **options: Any,
) -> Results:
    return lstm_sequence(input, (h, c), weight_ih, weight_hh, bias or None, **options)


def _run_gru(
    input: Tensor,
    h: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    *bias: Any,
    **options: Any,
) -> Results:
    output, h = gru_sequence(input, h, weight_ih, weight_hh, bias or None, **options)
    return output, (h,)


def _run_rnn(
    nonlinearity: str,
    input: Tensor,
    h: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    *bias: Any,
    **options: Any,
) -> Results:
    options["nonlinearity"] = nonlinearity
    output, h = rnn_sequence(input, h, weight_ih, weight_hh, bias or None, **options)
    return output, (h,)


def _check_features(op: str, input: Tensor, size: int) -> None:
    if input.shape[-1] != size:
        raise RuntimeError(
            f"{op}: expected `input` to have input_size = {size} features, but got {input.shape[-1]}: "
            f"{list(input.shape)}"
        )


class _Plan(NamedTuple):
    """How calls of a kind are computed. It is made once, since many layers take the GPU less time than the choice takes
    the host.
    """

    is_torchs: bool
    """Whether torch's own layers compute them."""
    step: Step | None
    """Computes them where they have a single step; None where the kernels of sequences do."""
    states: tuple[int, ...]
    """The shape of each state."""
    parameters: list[tuple[torch.Size, torch.dtype, torch.device]]
    """Of all layers, in torch's order."""
    call: _cudnn.Call


_plans: dict[tuple[Any, ...], _Plan] = {}
_MOST_PLANS = 4096


class _TorchLayers(Layers, torch.nn.RNNBase):
    """Not a subclass of ``nn.LSTM`` or ``nn.GRU``, which ``torch.compile`` refuses."""

    _size = "hidden_size"
    _mode: str

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(self._mode, *arguments, **options)
        if self.proj_size:
            raise ValueError(
                f"{self._name}: expected `proj_size` to be 0, but got {self.proj_size}: "
                "torch.nn.LSTM has kernels for projections, extops none"
            )

    def flatten_parameters(self) -> None:
        """Moves the parameters on a GPU into one contiguous buffer, as cuDNN needs them: those in bfloat16, too, which
        torch's modules leave where they are. They stay the same objects.
        """
        # Parameters of a transform, or of a trace, have no address.
        are_real = all(type(x) in (Tensor, torch.nn.Parameter) for x in self._flat_weights)
        if are_real and _autograd.is_plain():
            super().flatten_parameters()
            self._flatten_bfloat16()

    def _flatten_bfloat16(self) -> None:
        sizes = self.input_size, self.hidden_size, self.num_layers, self.batch_first
        _cudnn.flatten_bfloat16(self.mode, self._flat_weights, *sizes, self.bidirectional)

    def _checked_states(self, input: Tensor, given: States | None, *batch: int) -> States:
        _check_features(self._mode.partition("_")[0], input, self.input_size)
        return super()._checked_states(input, given, *batch)

    def served_by(self, input: Tensor, sizes: Sequence[int] | None = None) -> str:
        """``"torch"`` or ``"cudnn"`` where torch's own layers compute ``[T, B, I]``, or packed rows of batches of these
        sizes; else empty.
        """
        dtype = input.dtype
        if _autocast.is_on():
            if input.device.type != "cpu" or not _autocast.is_cast(input):
                return _choice.OURS
            dtype = torch.get_autocast_dtype("cpu")
        if sizes is None:
            time, batch, features = input.shape
            rows = time * batch
        else:
            rows, features = input.shape
            time, batch = len(sizes), sizes[0]
        problem = _choice.Problem(
            self._mode.lower(),
            dtype,
            time,
            batch,
            rows,
            features,
            self.hidden_size,
            self.num_layers,
            1 + self.bidirectional,
            torch.is_grad_enabled(),
            _is_captured(input),
        )
        if input.is_cuda:
            return _cudnn.chosen(problem, input)
        if input.device.type != "cpu":
            return _choice.OURS
        if _autocast.is_on() and problem.with_gradients and not problem.is_ragged:
            return _choice.OURS  # oneDNN's has no gradients of higher order
        cpu = _choice.Cpu(_cudnn.has_onednn, _cudnn.has_avx512, torch.get_num_threads())
        return _choice.on_cpu(problem, cpu)

    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> tuple[Any, Any]:
        """As of torch's layers, whose state has this name."""
        if isinstance(input, PackedSequence):
            if torch.compiler.is_dynamo_compiling():
                return forward_uncompiled(self, input, hx)
            packed = self._packed_by_torch(input, hx)
            return super().forward(input, hx) if packed is None else packed
        plan = self._plan_of_plain(input)
        states = None if plan is None else self._plain_states(plan, input, hx)
        if plan is None or states is None:
            return super().forward(input, hx)
        found = self._by_torch(plan, input, states)
        if found is None:
            found = super()._forward_padded(input, states, batch_first=self.batch_first)
        return found[0], self._of_states(found[1])

    def _plan_of_plain(self, input: Any) -> _Plan | None:
        """The plan for most calls, with as few checks as possible, since the host takes longer than the GPU; None for
        other calls.
        """
        if not isinstance(input, Tensor) or not _autograd.is_plain() or _autocast.is_on():
            return None
        is_dense = input.layout is torch.strided and not input.is_nested
        return self._plan(input, self.batch_first) if is_dense else None

    def _plain_states(self, plan: _Plan, input: Tensor, hx: Any) -> States | None:
        """The states of a plain call; None if they need the checks of other calls."""
        if hx is None:
            return self._zero_states(input, plan.states)
        states, dtype, device = self._as_states(hx), input.dtype, input.device
        for x in states:
            if not isinstance(x, Tensor) or x.is_nested:
                return None
            if x.shape != plan.states or x.device != device:
                return None
            is_alike = x.dtype is dtype or (_autocast.is_on() and _autocast.is_cast(x))
            if not is_alike or x.layout is not torch.strided:
                return None
        return states

    def _packed_by_torch(self, packed: PackedSequence, hx: Any) -> tuple[Any, Any] | None:
        """The results of torch's layers for packed rows, with as few checks as possible; None for other calls."""
        rows, batch_sizes, to_sorted, to_original = packed
        if not isinstance(rows, Tensor) or not _autograd.is_plain():
            return None
        if rows.layout is not torch.strided or rows.is_nested or rows.dim() != 2:
            return None
        if batch_sizes.dtype is not torch.int64 or batch_sizes.dim() != 1:
            return None
        sizes = batch_sizes.tolist()
        # For zero rows torch computes no step. On a CPU rows of equal lengths are computed as if they were not packed.
        are_sizes = sum(sizes) == rows.shape[0] and sizes == sorted(sizes, reverse=True)
        if not (are_sizes and sizes and sizes[-1] > 0):
            return None
        if not rows.is_cuda and sizes[0] == sizes[-1]:
            return None
        plan = self._plan(rows, False, sizes)
        if plan is None or not plan.is_torchs:
            return None
        states = self._plain_states(plan, rows, hx)
        if states is None:
            return None
        if to_sorted is not None and hx is not None:
            states = tuple(x.index_select(1, to_sorted) for x in states)
        found = self._by_torch(plan, rows, states, batch_sizes)
        if found is None:
            return None
        output, last = found
        if to_original is not None:
            last = tuple(x.index_select(1, to_original) for x in last)
        results = PackedSequence(output, batch_sizes, to_sorted, to_original)
        return results, self._of_states(last)

    def _plan(
        self, input: Tensor, batch_first: bool, sizes: Sequence[int] | None = None
    ) -> _Plan | None:
        """How a call is computed: for ``[T, B, I]``, ``[B, T, I]``, or packed rows of batches of these sizes. None for
        inputs that are refused, or whose sizes are not known.
        """
        packed = None if sizes is None else (len(sizes), sizes[0])
        of_autocast = _autocast.is_on() and torch.get_autocast_dtype("cpu")
        key = (
            *(self._mode, self.input_size, self.hidden_size, self.num_layers),
            *(self.bias, self.bidirectional, batch_first, packed),
            *(input.shape, input.stride(), input.dtype, input.device),
            *(torch.is_grad_enabled(), _private.allows_tf32(), of_autocast),
            "cuda" in _devices.devices and _state_of_gpu(input.get_device())
            if input.is_cuda
            else torch.get_num_threads(),
        )
        try:
            plan = _plans.get(key)
        except TypeError:
            return None  # a trace has symbols for sizes, which have no hash: ours serve any size
        if plan is None:
            plan = self._new_plan(input, batch_first, sizes)
            if plan is not None:
                if len(_plans) >= _MOST_PLANS:
                    _plans.clear()
                _plans[key] = plan
        return plan

    def _new_plan(
        self, input: Tensor, batch_first: bool, sizes: Sequence[int] | None
    ) -> _Plan | None:
        dims = 3 if sizes is None else 2
        is_known = input.dtype in _checks.FLOATING and input.device.type in _devices.devices
        if not is_known or input.dim() != dims or input.shape[-1] != self.input_size:
            return None
        steps = input.transpose(0, 1) if batch_first else input
        batch = steps.shape[1] if sizes is None else sizes[0]
        # The key takes numbers for flags, which torch's functions refuse.
        flags = bool(self.bidirectional), bool(self.bias)
        cell, layers = self._mode.lower(), (int(self.num_layers), *flags)
        sizes_of_layer = self.input_size, self.hidden_size, *layers
        is_torchs, step = bool(self.served_by(steps, sizes)), CELLS[cell].step
        is_step = steps.shape[0] == 1 and sizes is None and not (is_torchs or _autocast.is_on())
        is_served = step.serves(steps, self._number_of_states == 1)
        return _Plan(
            is_torchs,
            step if is_step and is_served else None,
            self._shape_of_states(batch),
            _parameters_like(cell, *sizes_of_layer, input.dtype, input.device),
            _cudnn.Call(cell, *layers, bool(batch_first), _cudnn.is_strict(input)),
        )

    def _forward_padded(
        self, input: Tensor, states: States, packing: Packing | None = None, *, batch_first: bool
    ) -> Results:
        if packing is None and _autograd.is_plain() and _autocast.are_alike(input, states):
            found = self._by_torch(self._plan(input, batch_first), input, states)
            if found is not None:
                return found
        if packing is None and self._mode == "LSTM" and _cudnn.has_onednn and _autocast.is_on():
            # On a CPU torch's layer is one operator of oneDNN, and autocast casts all its arguments.
            states = _autocast.cast(*states)
        return super()._forward_padded(input, states, packing, batch_first=batch_first)

    def _by_torch(
        self, plan: _Plan | None, input: Tensor, states: States, batch_sizes: Tensor | None = None
    ) -> Results | None:
        """The results of torch's layers, for packed rows too, or of a single step; None if kernels of sequences compute
        them.
        """
        if plan is None or not (plan.is_torchs or plan.step):
            return None
        parameters = self._parameters_for_torchs(plan, input)
        if parameters is None:
            return None
        if not input.is_cuda and (input.element_size() == 2 or _autocast.is_on()):
            # GEMMs in a 16-bit type read what lies between padded rows (torch 2.13).
            input, states = input.contiguous(), tuple(x.contiguous() for x in states)
            parameters = [x.contiguous() for x in parameters]
        call = plan.call
        if plan.step is not None:
            return self._one_step(plan.step, call, input, states, parameters)
        dropout = self.dropout if self.training and call.layers > 1 else 0.0
        if dropout <= 0 or self._may_cudnn_drop(input):
            return _cudnn.run(call, input, states, parameters, batch_sizes, dropout)
        one, directions = call._replace(layers=1), 1 + self.bidirectional
        width, last = len(parameters) // call.layers, []
        for layer in range(call.layers):
            if layer > 0:
                input = self._dropped(input, batch_first=call.batch_first)
            of_layer = parameters[layer * width : (layer + 1) * width]
            initial = tuple(x[layer * directions : (layer + 1) * directions] for x in states)
            input, final = _cudnn.run(one, input, initial, of_layer, batch_sizes)
            last.append(final)
        return input, tuple(torch.cat(x) for x in zip(*last, strict=True))

    def _may_cudnn_drop(self, input: Tensor) -> bool:
        # The threads of DataParallel do not know that a checkpoint computes again.
        is_replica = getattr(self, "_is_replica", False)
        return _cudnn.may_drop(input) and not (is_replica or _is_captured(input))

    def _one_step(
        self, step: Step, call: _cudnn.Call, input: Tensor, states: States, parameters: list[Tensor]
    ) -> Results:
        """Without what whole sequences need, which takes the host longer than the step takes a GPU."""
        time_axis = int(call.batch_first)
        input = input.squeeze(time_axis)
        initial = list(zip(*(x.unbind(0) for x in states), strict=True))
        directions, width = 1 + call.bidirectional, 4 if call.has_biases else 2
        last: list[tuple[Tensor, ...]] = []
        for first in range(0, len(initial), directions):
            if first > 0:
                input = self._dropped(input)
            for place in range(first, first + directions):
                of_place = (*parameters[width * place : width * (place + 1)], None, None)[:4]
                last.append(step(input, *of_place, *initial[place]))
            outputs = [h for h, *_ in last[first:]]
            input = outputs[0] if directions == 1 else torch.cat(outputs, dim=-1)
        # Copies, since nothing of the output may share its memory with a state; in place, since it is no view.
        if len(last) == 1:
            final = input.clone(), *last[0][1:]
            return input.unsqueeze_(time_axis), tuple(x.unsqueeze_(0) for x in final)
        states = tuple(torch.stack(x) for x in zip(*last, strict=True))
        return input.unsqueeze_(time_axis), states

    def _parameters_for_torchs(self, plan: _Plan, input: Tensor) -> list[Tensor] | None:
        """All parameters, if torch's layers may get them. Others must go to our checks, which raise our messages: cuDNN
        would read memory by the sizes of the layer.
        """
        parameters = parameters_of(self, self._flat_weights_names)
        try:
            if [(x.shape, x.dtype, x.device) for x in parameters] != plan.parameters:
                shapes = [shape for shape, *_ in plan.parameters]
                is_cast = _autocast.is_on() and _autocast.are_alike(input, parameters)
                if not is_cast or [x.shape for x in parameters] != shapes:
                    return None
            needs_contiguous = input.is_cuda or plan.step is not None
            if needs_contiguous and not all(map(Tensor.is_contiguous, parameters)):
                return None
        except (AttributeError, RuntimeError, TypeError):  # no tensors, or of another layout
            return None
        return parameters

    def _parameters_of(self, suffix: str) -> tuple[Tensor, ...]:
        names = _PARAMETERS[: 4 if self.bias else 2]
        return tuple(parameters_of(self, [name + suffix for name in names]))


def _is_captured(input: Tensor) -> bool:
    return input.is_cuda and _state_of_gpu(input.get_device())[1]


def _state_of_gpu(device: int) -> tuple[int, bool, bool]:
    """What the choice depends on besides the call: the stream, which may have few SMs, whether it is captured, and
    whether the user has turned cuDNN off.
    """
    stream = _private.current_stream(device)
    # The default stream, which is 0, cannot be captured.
    is_captured = stream != 0 and torch.cuda.is_current_stream_capturing()
    return stream, is_captured, _private.is_cudnn_enabled()


@functools.cache
def _parameters_like(
    cell: str,
    features: int,
    units: int,
    layers: int,
    bidirectional: bool,
    bias: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> list[tuple[torch.Size, torch.dtype, torch.device]]:
    """Shape, dtype and device of all parameters, in torch's order. Plans share the list."""
    directions, rows = 1 + bidirectional, _schemas.CELLS[cell].recurrent * units
    shapes: list[tuple[int, ...]] = []
    for width in [features] * directions + [directions * units] * (directions * (layers - 1)):
        shapes += [(rows, width), (rows, units), (rows,), (rows,)][: 4 if bias else 2]
    return [(torch.Size(shape), dtype, device) for shape in shapes]


class _OneState:
    """For modules whose only state is the hidden state."""

    _number_of_states = 1

    def _as_states(self, state: Tensor) -> States:
        return (state,)

    def _of_states(self, states: States) -> Tensor:
        return states[0]


class LSTM(_TorchLayers):
    """:class:`torch.nn.LSTM` by :func:`extops.lstm_sequence`: the same arguments but for ``proj_size``, parameters and
    results.
    """

    _mode = "LSTM"
    _run = staticmethod(_run_lstm)  # type: ignore[assignment]


class GRU(_OneState, _TorchLayers):
    """:class:`torch.nn.GRU` by :func:`extops.gru_sequence`: the same arguments, parameters and results."""

    _mode = "GRU"
    _run = staticmethod(_run_gru)  # type: ignore[assignment]


class RNN(_OneState, _TorchLayers):
    """:class:`torch.nn.RNN`: the same arguments, parameters and results. torch's own layers compute it, except where
    they cannot; a single step on a GPU is that of :class:`extops.RNNCell`.
    """

    nonlinearity: str

    def __init__(self, *arguments: Any, nonlinearity: str = "tanh", **options: Any) -> None:
        if len(arguments) > 3:  # where torch has it
            nonlinearity, arguments = arguments[3], arguments[:3] + arguments[4:]
        rnn_cell("RNN", nonlinearity)
        self.nonlinearity = nonlinearity
        super().__init__(*arguments, **options)

    @property
    def _mode(self) -> str:  # type: ignore[override]
        return f"RNN_{self.nonlinearity.upper()}"

    def _run(self, input: Tensor, *arguments: Tensor, **options: Any) -> Results:
        return _run_rnn(self.nonlinearity, input, *arguments, **options)


class _TorchCell(torch.nn.RNNCellBase):
    _number_of_states = 2
    _step: Step | None
    _torchs: Callable[..., Any]
    """torch's function for a step."""
    __prepare_scriptable__ = _checks.refuse_script

    def _run(self, input: Tensor, *arguments: Tensor, **options: Any) -> Results:
        raise NotImplementedError

    def _as_states(self, state: Any) -> States:
        return _checks.as_pair(type(self).__name__, state)

    def _of_states(self, states: States) -> Any:
        return states

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """One step, of ``[B, I]`` or, without a batch, of ``[I]``."""
        try:
            found = self._plain(input, hx)
        except _checks.FAILURES:
            _checks.explain(self._composed, input, hx)
            raise
        return self._composed(input, hx) if found is None else found

    def _plain(self, input: Tensor, hx: Any) -> Any:
        """The same for most calls, with as few checks as possible, since the host takes longer than the GPU; None for
        other calls.
        """
        if not _autograd.is_plain() or input.dim() != 2:
            return None
        parameters = parameters_of(self, _PARAMETERS)
        if hx is None:
            hx = self._of_states(
                (input.new_zeros(input.shape[0], self.hidden_size),) * self._number_of_states
            )
        states = self._as_states(hx)
        # Autocast keeps what it cast of the weights for the next step, but only of torch's own cells.
        is_cast = _autocast.is_on()
        step = None if is_cast else self._step
        is_served = step is not None and step.serves(input, self._number_of_states == 1)
        if step is not None and is_served:
            if step.has_kernel(input, self.hidden_size):
                return self._of_states(step(input, *parameters, *states))
            # On a GPU torch's kernels of cells with gates refuse what does not fit.
            if step.facts.gates > 1:
                return self._torchs(input, hx, *parameters)
        is_torchs = is_served or (is_cast and input.is_cuda) or input.device.type == "cpu"
        if is_torchs and suit_torchs(input, parameters, states):
            return self._torchs(input, hx, *parameters)  # little but GEMMs of a library
        return None

    def has_kernel(self, input: Tensor) -> bool:
        """Whether our kernel computes ``[B, I]`` on a GPU; torch's own cell does, where GEMMs are a library's."""
        return self._step is not None and self._step.has_kernel(input, self.hidden_size)

    def _composed(self, input: Tensor, hx: Any) -> Any:
        name = type(self).__name__
        _checks.check_tensor(name, "input", input)
        if input.dim() not in (1, 2):
            raise RuntimeError(
                f"{name}: expected `input` to have 2 dimensions, or 1 where it has no batch, "
                f"but got {input.dim()}: {list(input.shape)}"
            )
        _check_features(name, input, self.input_size)
        shape = (*input.shape[:-1], self.hidden_size)
        states = (input.new_zeros(shape),) * self._number_of_states
        if hx is not None:
            states = self._as_states(hx)
            axes = f"[{'batch, ' if input.dim() == 2 else ''}hidden_size]"
            for state_name, state in zip(("h", "c")[: len(states)], states, strict=True):
                _checks.check_tensor(name, state_name, state)
                _checks.check_shape(name, state_name, state, shape, axes)
        parameters = (self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh)
        given = [x for x in parameters if x is not None]
        if input.dim() == 2:
            return self._of_states(self._run(input.unsqueeze(0), *states, *given)[1])
        rows = (x.unsqueeze(0) for x in states)
        _, states = self._run(input.view(1, 1, -1), *rows, *given)
        return self._of_states(tuple(x.squeeze(0) for x in states))


def _lstm_cell(input: Tensor, states: States, *parameters: Any) -> tuple[Tensor, Tensor]:
    h, c = torch.lstm_cell(input, states, *parameters)
    if type(h.grad_fn).__name__ == "ThnnFusedLstmCellBackward0" and parameters[-1] is not None:
        cast("Any", h.grad_fn).register_hook(_with_distinct_biases)
    return h, c


def _with_distinct_biases(found: Sequence[Tensor | None], _: Any) -> tuple[Tensor | None, ...]:
    """torch gives one tensor as the gradient of both, which a caller may change in place."""
    *others, bias = found
    return *others, None if bias is None else bias.clone()


class LSTMCell(_TorchCell, torch.nn.LSTMCell):
    """:class:`torch.nn.LSTMCell` by extops' kernels: the same arguments, parameters and results."""

    _step = LSTM_CELL.step
    _torchs = staticmethod(_lstm_cell)
    _run = staticmethod(_run_lstm)  # type: ignore[assignment]


class GRUCell(_OneState, _TorchCell, torch.nn.GRUCell):
    """:class:`torch.nn.GRUCell` by extops' kernels: the same arguments, parameters and results."""

    _step = GRU_CELL.step
    _torchs = staticmethod(torch.gru_cell)
    _run = staticmethod(_run_gru)  # type: ignore[assignment]


class RNNCell(_OneState, _TorchCell, torch.nn.RNNCell):
    """:class:`torch.nn.RNNCell` by extops' kernels: the same arguments, parameters and results."""

    @property
    def _step(self) -> Step | None:  # type: ignore[override]
        return RNN_CELLS[self.nonlinearity].step if self.nonlinearity in RNN_CELLS else None

    def _torchs(self, *arguments: Any) -> Any:
        if self.nonlinearity not in RNN_CELLS:
            return torch.nn.RNNCell.forward(self, *arguments[:2])  # which refuses it
        return getattr(torch, f"rnn_{self.nonlinearity}_cell")(*arguments)

    def _run(self, input: Tensor, *arguments: Tensor, **options: Any) -> Results:
        return _run_rnn(self.nonlinearity, input, *arguments, **options)


_OURS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    torch.nn.LSTM: LSTM,
    torch.nn.GRU: GRU,
    torch.nn.RNN: RNN,
    torch.nn.LSTMCell: LSTMCell,
    torch.nn.GRUCell: GRUCell,
    torch.nn.RNNCell: RNNCell,
}
_TORCHS = {ours: torchs for torchs, ours in _OURS.items()}


def accelerate(model: Model) -> Model:
    """Makes each ``nn.LSTM``, ``nn.GRU``, ``nn.RNN``, ``nn.LSTMCell``, ``nn.GRUCell`` and ``nn.RNNCell`` of a model one
    of extops, in place.

    A module stays the same object, with its parameters, hooks and name, and gets the class of extops. Parameters of
    layers in bfloat16 on a GPU move into one buffer, as torch's modules do it in other dtypes. The logger ``"extops"``
    names these modules in one line of level INFO. A warning names the recurrent modules that are not
    changed, and why. :func:`extops.restore` undoes it.

    In float32 on a GPU our modules compute GEMMs in TF32 where ``torch.set_float32_matmul_precision`` allows it, which
    it does not unless it is called. torch's layers follow a switch of cuDNN's, which is on unless it is turned off: to
    keep their precision and speed, call ``torch.set_float32_matmul_precision("high")``.

    Args:
        model: any module; it may be such a layer itself.

    Returns:
        ``model``.
    """
    _check_model("accelerate", model)
    taken, left = [], []
    for name, module in model.named_modules():
        ours = _OURS.get(type(module))
        if ours is not None and not getattr(module, "proj_size", 0):
            module.__class__ = ours
            if isinstance(module, _TorchLayers):
                module._flatten_bfloat16()
            taken.append(f"{_called(name)} ({ours.__name__})")
        elif reason := _why_left_alone(module):
            left.append(f"{_called(name)}, {reason}")
    _logger.info("extops.accelerate took: %s", ", ".join(taken) or "nothing")
    if left:
        warnings.warn(f"extops.accelerate left alone: {'; '.join(left)}", stacklevel=2)
    return model


def restore(model: Model) -> Model:
    """Undoes :func:`extops.accelerate`, in place: each module of extops in a model becomes torch's of the same name,
    even if it was created as one of extops.

    A module stays the same object, and the logger names those that changed. Modules of a class derived from ours are
    not changed.

    Args:
        model: any module; it may be such a layer itself.

    Returns:
        ``model``.
    """
    _check_model("restore", model)
    taken = []
    for name, module in model.named_modules():
        torchs = _TORCHS.get(type(module))
        if torchs is not None:
            module.__class__ = torchs
            taken.append(f"{_called(name)} ({torchs.__name__})")
    _logger.info("extops.restore took: %s", ", ".join(taken) or "nothing")
    return model


def _check_model(function: str, model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"{function}: expected `model` to be a torch.nn.Module, but got {type(model).__name__}"
        )


def _called(name: str) -> str:
    return f"`{name}`" if name else "the model"


def _why_left_alone(module: torch.nn.Module) -> str:
    """Empty for what is not recurrent, or is ours."""
    if isinstance(module, (Layers, _TorchCell)):
        return ""
    if isinstance(module, torch.jit.ScriptModule):
        is_recurrent = module.original_name in {kind.__name__ for kind in _OURS}
        return "which torch.jit has compiled" if is_recurrent else ""
    if not isinstance(module, (torch.nn.RNNBase, torch.nn.RNNCellBase)):
        return ""
    if getattr(module, "proj_size", 0):
        return "which has `proj_size`"
    if isinstance(module, tuple(_OURS)):
        return f"whose class {type(module).__name__} may compute something else than its base"
    return f"since extops has no {type(module).__name__}"
