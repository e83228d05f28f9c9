"""Drop-ins for the recurrent modules of torch."""

import logging
import warnings
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from extops import _autocast, _autograd, _checks, _cudnn
from extops.modules import Layers, Packing, Results, States, parameter_of
from extops.ops.sequence import GRU_CELL, LSTM_CELL, gru_sequence, lstm_sequence, suit_torchs
from extops.ops.step import Step

_logger = logging.getLogger("extops")

Model = TypeVar("Model", bound=torch.nn.Module)

_has_onednn = torch.backends.mkldnn.is_available()  # torch.compile cannot ask


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


def _check_features(op: str, input: Tensor, size: int) -> None:
    if input.shape[-1] != size:
        raise RuntimeError(
            f"{op}: expected `input` to have input_size = {size} features, but got {input.shape[-1]}: "
            f"{list(input.shape)}"
        )


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

    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> tuple[Any, Any]:
        """As of torch's layers, whose state has this name."""
        return super().forward(input, hx)

    def flatten_parameters(self) -> None:
        """Puts the parameters on a GPU into one piece of memory, as cuDNN reads them. They stay the same objects."""
        # Those of a transform, or of a trace, have no memory to ask for.
        are_real = all(type(x) in (Tensor, torch.nn.Parameter) for x in self._flat_weights)
        if are_real and _autograd.is_plain():
            super().flatten_parameters()

    def _checked_states(self, input: Tensor, given: States | None, *batch: int) -> States:
        _check_features(self._mode, input, self.input_size)
        return super()._checked_states(input, given, *batch)

    def is_torchs(self, input: Tensor) -> bool:
        """Whether torch's own layer computes ``[T, B, I]`` without lengths: on a CPU, without gradients, where it was
        measured to be no slower. Our kernel packs the weights first, which few steps do not make up for, and has no
        more threads than samples. But torch's gradient changes with autocast around the backward.
        """
        if input.device.type != "cpu" or torch.is_grad_enabled() or _autocast.is_on():
            return False
        if input.dtype is not torch.float32 or input.numel() == 0:
            return False
        time, batch, _ = input.shape
        if self._mode == "LSTM" and _has_onednn:
            return time == 1 or self.hidden_size >= 256
        return time <= max(1, min(self.hidden_size // 64, 16 if batch == 1 else 4))

    def is_cudnns(self, input: Tensor) -> bool:
        """Whether cuDNN's layer computes ``[T, B, I]`` without lengths. It could not draw its masks of dropout again,
        for gradients of higher order.
        """
        if _autocast.is_on() or (self.training and self.dropout > 0 and self.num_layers > 1):
            return False
        return _cudnn.is_acceptable(input) and _cudnn.serves(
            self._mode.lower(), input, self.hidden_size
        )

    def _forward_padded(
        self, input: Tensor, states: States, packing: Packing | None = None, *, batch_first: bool
    ) -> Results:
        if packing is None and _autograd.is_plain():
            found = self._by_torch(input.transpose(0, 1) if batch_first else input, states)
            if found is not None:
                output, states = found
                return output.transpose(0, 1) if batch_first else output, states
        if packing is None and self._mode == "LSTM" and _has_onednn and _autocast.is_on():
            # On a CPU torch's is one operator of oneDNN's, all of whose arguments autocast casts.
            states = _autocast.cast(*states)
        return super()._forward_padded(input, states, packing, batch_first=batch_first)

    def _by_torch(self, input: Tensor, states: States) -> Results | None:
        """What torch's layers make of ``[T, B, I]``, or nothing where ours compute it."""
        is_torchs = self.is_torchs(input)
        if not (is_torchs or self.is_cudnns(input)):
            return None
        names = [x for layer in range(self.num_layers) for x in self._suffixes(layer)]
        parameters = [self._parameters_of(name) for name in names]
        if not all(suit_torchs(input, each, states) for each in parameters):
            return None
        if not (is_torchs or self._suit_cudnns(parameters)):
            return None
        dropout = self.dropout if self.training else 0.0
        return _cudnn.run(
            self._mode.lower(), input, states, parameters, self.bidirectional, dropout
        )

    def _suit_cudnns(self, parameters: list[tuple[Tensor, ...]]) -> bool:
        """It reads memory by the sizes of the layer."""
        directions = 1 + self.bidirectional
        rows = (4 if self._mode == "LSTM" else 3) * self.hidden_size
        for place, (weight_ih, weight_hh, *biases) in enumerate(parameters):
            features = self.input_size if place < directions else directions * self.hidden_size
            if weight_ih.shape != (rows, features) or weight_hh.shape != (rows, self.hidden_size):
                return False
            if not all(x.is_contiguous() for x in (weight_ih, weight_hh, *biases)):
                return False
        return True

    def _parameters_of(self, suffix: str) -> tuple[Tensor, ...]:
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")[: 4 if self.bias else 2]
        return tuple(parameter_of(self, name + suffix) for name in names)


class _OneState:
    """What modules have whose hidden state is all that travels from step to step."""

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


class _TorchCell(torch.nn.RNNCellBase):
    _number_of_states = 2
    _step: Step | None
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
        """The same for most calls, with as few questions as can be, since the host takes longer than the GPU; nothing
        for others.
        """
        if not _autograd.is_plain() or _autocast.is_on() or input.dim() != 2:
            return None
        parameters = self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh
        if hx is None:
            hx = self._of_states(
                (input.new_zeros(input.shape[0], self.hidden_size),) * self._number_of_states
            )
        states = self._as_states(hx)
        if self._step is not None and self._step.serves(input, self._number_of_states == 1):
            return self._of_states(self._step(input, *parameters, *states))
        if input.device.type == "cpu" and suit_torchs(input, parameters, states):
            return super().forward(input, hx)  # little but products of a library
        return None

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


class LSTMCell(_TorchCell, torch.nn.LSTMCell):
    """:class:`torch.nn.LSTMCell` by extops' kernels: the same arguments, parameters and results."""

    _step = LSTM_CELL.step
    _run = staticmethod(_run_lstm)  # type: ignore[assignment]


class GRUCell(_OneState, _TorchCell, torch.nn.GRUCell):
    """:class:`torch.nn.GRUCell` by extops' kernels: the same arguments, parameters and results."""

    _step = GRU_CELL.step
    _run = staticmethod(_run_gru)  # type: ignore[assignment]


_OURS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    torch.nn.LSTM: LSTM,
    torch.nn.GRU: GRU,
    torch.nn.LSTMCell: LSTMCell,
    torch.nn.GRUCell: GRUCell,
}
_TORCHS = {ours: torchs for torchs, ours in _OURS.items()}


def accelerate(model: Model) -> Model:
    """Makes each ``nn.LSTM``, ``nn.GRU``, ``nn.LSTMCell`` and ``nn.GRUCell`` of a model one of extops, in place.

    A module stays the same object, with its parameters, hooks and name, and gets the class of extops. The logger
    ``"extops"`` says in one line, of level INFO, which. A warning names the recurrent modules that are left alone, and
    why. :func:`extops.restore` takes it back.

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
            taken.append(f"{_called(name)} ({ours.__name__})")
        elif reason := _why_left_alone(module):
            left.append(f"{_called(name)}, {reason}")
    _logger.info("extops.accelerate took: %s", ", ".join(taken) or "nothing")
    if left:
        warnings.warn(f"extops.accelerate left alone: {'; '.join(left)}", stacklevel=2)
    return model


def restore(model: Model) -> Model:
    """Takes back :func:`extops.accelerate`, in place: each :class:`extops.LSTM`, :class:`extops.GRU`,
    :class:`extops.LSTMCell` and :class:`extops.GRUCell` of a model becomes torch's of the same name, also where it was
    made as ours.

    As there, a module stays the same object, and the logger says which. Those of a class derived from ours are left.

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
