"""``accelerate``: torch's modules, whose plain calls run torch's own forward or our kernels."""

from __future__ import annotations

import contextlib
import copy
import copyreg
import functools
import logging
import math
import threading
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from extops import _in_graph, _private, rnn
from extops._padded import PaddedSequence
from extops.binding import _checks, _devices, _libraries
from extops.calling import _autocast, _autograd
from extops.choosing import _measure, _table
from extops.choosing._table import OURS, TORCH
from extops.modules import parameters_of
from extops.ops.sequence import CELLS

_logger = logging.getLogger("extops")

Model = TypeVar("Model", bound=torch.nn.Module)

# Every call asks.
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_is_autocasting = _private.is_autocasting
_current_stream = _private.current_stream
_get_num_threads = torch.get_num_threads
_cudnn_allows_tf32 = _private.cudnn_allows_tf32
_allows_tf32 = _private.allows_tf32
_graph_task = _private.graph_task
_is_tracing = _private.is_tracing

_KNOWN, _TORCHS = "_extops_known", "_extops_torchs"
"""The attributes of a module that hold what serves the calls it has seen, and which of them torch's forward serves."""
_MOST_KNOWN = 4096
_FAILURES = *_checks.FAILURES, ValueError, LookupError
"""Not all exceptions: a checkpoint ends a recomputation by one of its own."""
_NOTHING: dict[Any, str] = {}
_measuring = threading.Lock()


class _Accelerated(rnn.LikeTorchs):
    """Comes before a class of torch, or before one of ours that is like it. It looks as before it was taken."""

    _extops_ours: type[Any]
    """Always computes by our kernels."""
    _extops_is_traced = True
    """Whether the next class is ours, and not torch's."""
    training: bool
    _flat_weights_names: list[str]
    _forward_of_ours: Callable[..., Any]
    _forward_of_torchs: Callable[..., Any]

    def forward(self, input: Any, hx: Any = None, *more: Any, **named: Any) -> Any:
        """As of torch's modules, and with ``lengths``. These have no default, and no method is called by super() or a
        class: Dynamo of torch 2.6 looks for defaults and closures in torch's class, that of 2.4 refuses other classes.
        """
        lengths = None
        if more or (named and type(named) is dict):  # else fx traces
            if not rnn.is_of_lengths(more, named):
                # Which says what is wrong.
                return self._extops_kind.forward(self, input, hx, *more, **named)
            lengths = more[0] if more else named["lengths"]
        if _is_compiling() and not _is_torchs_in_graph(self, input):
            if lengths is None and type(input) is Tensor and _in_graph.is_torchs(self, input, hx):
                weights = parameters_of(cast("Any", self), self._flat_weights_names)
                return _in_graph.by_torchs(self, input, hx, weights)
            if self._extops_is_traced:
                return self._forward_of_ours(input, hx, lengths)
            given = (input, hx) if lengths is None else (input, hx, lengths)
            return self._forward_of_torchs(*given)
        if lengths is not None:
            return _with_lengths(self, input, hx, lengths)
        kind = type(input)
        if kind is not Tensor and kind is not PackedSequence:
            return self._extops_kind.forward(self, input, hx)
        rows = input if kind is Tensor else input.data
        try:
            # Calls that torch's forward serves are found by so much of a key. It asks for little: after a wait for the
            # GPU each question takes the host a microsecond or two.
            grad = _is_grad_enabled()
            quick: Any = (grad, rows.shape, rows.dtype, _is_autocasting())
            if quick in self.__dict__.get(_TORCHS, ()) and not (grad and _graph_task() != -1):
                return self._extops_kind.forward(self, input, hx)
            # All that a choice depends on and that may change from call to call.
            key: Any = (
                *(quick, rows.requires_grad, hx is None, self.training),
                *(rows.stride() if kind is Tensor or _is_tracing() else _sizes_of_packed(input),),
                *(_is_autocasting() and _autocast_dtype(rows),),
                _current_stream(rows.get_device()) if rows.is_cuda else _get_num_threads(),
                rows.is_cuda and rows.dtype is torch.float32 and _cudnn_allows_tf32(),
            )
        except (AttributeError, RuntimeError, TypeError):  # such as a tensor without strides
            key = quick = None
        return _serve(self, input, hx, quick, key)

    def _apply(self, *arguments: Any, **options: Any) -> Any:
        _forget(self.__dict__)
        return super()._apply(*arguments, **options)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickle has the module as it was before it was taken, and loads where extops is not installed."""
        if type(self).__reduce__ is not object.__reduce__:
            return self.__reduce__()
        return cast("Any", copyreg).__newobj__, (self._extops_looks,), _forget(rnn.state_of(self))

    def __copy__(self) -> Any:
        new: Any = object.__new__(type(self))
        new.__setstate__(_forget(rnn.state_of(self)))
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        new: Any = object.__new__(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(_forget(rnn.state_of(self)), memo))
        return new

    def __prepare_scriptable__(self) -> torch.nn.Module:
        """``torch.jit.script`` gets torch's module, with the same parameters."""
        original: torch.nn.Module = _shell(self, self._extops_looks)
        return original


class _AcceleratedCell(_Accelerated):
    """Asks for as little as possible: a decoder calls it at each step."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        """As of torch's cells."""
        if _is_compiling():
            # Inductor fuses torch's with what is around it: in a dozen steps of a decoder ours took 1.0 to 2.2 times as
            # long on a CPU, and in StyleTTS2's text aligner 1.6 times on an H200, in CUDA graphs 0.96.
            is_ours = self._extops_is_traced and _in_graph.are_ours_forced()
            if is_ours and not _is_torchs_in_graph(self, input):
                return self._forward_of_ours(input, hx)
            return self._forward_of_torchs(input, hx)
        if type(input) is not Tensor or input.is_nested:
            return self._extops_kind.forward(self, input, hx)
        grad = _is_grad_enabled()
        quick = (grad, input.shape, input.dtype, _is_autocasting())
        if quick in self.__dict__.get(_TORCHS, ()) and not (grad and _graph_task() != -1):
            return self._extops_kind.forward(self, input, hx)
        key = (
            *(quick, input.requires_grad, hx is None),
            _is_autocasting() and _autocast_dtype(input),
            _get_num_threads() if not input.is_cuda else _current_stream(input.get_device()),
            input.is_cuda and _allows_tf32(),
        )
        return _serve(self, input, hx, quick, key)


def _sizes_of_packed(packed: Any) -> tuple[int, ...]:
    sizes = packed[1]
    return len(sizes), int(sizes[0])


class _Always(dict[Any, str]):
    """What serves all calls of a module that is measured, and whether torch's forward does."""

    def get(self, *_: Any) -> Any:
        """The way, whatever the call."""
        return self["way"]

    def __contains__(self, _: object) -> bool:
        return self["way"] == TORCH


def _autocast_dtype(rows: Tensor) -> Any:
    """That of the region; False where nothing is cast, as in one of another device."""
    device = rows.device.type
    is_cast = torch.is_autocast_enabled(device) and _autocast.is_cast(rows)
    return is_cast and torch.get_autocast_dtype(device)


def _forget(attributes: dict[str, Any]) -> dict[str, Any]:
    """Attributes of a module without those of this file."""
    for name in (_KNOWN, _TORCHS):
        attributes.pop(name, None)
    return attributes


def _shell(module: Any, kind: type[Any], **changed: Any) -> Any:
    """A module of another class with the same attributes but those that are given."""
    shell = object.__new__(kind)
    shell.__dict__.update(_forget({**module.__dict__, **changed}))
    return shell


def _is_torchs_in_graph(module: Any, input: Any) -> bool:
    """Whether a graph gets torch's own operators: for ONNX, and of dtypes that ours do not take."""
    if isinstance(input, Tensor):
        (weights,) = parameters_of(
            module, getattr(module, "_flat_weights_names", rnn.PARAMETERS)[:1]
        )
        is_cast = input.dtype is not weights.dtype and not _is_autocasting()
        if is_cast or input.dtype not in _checks.FLOATING:
            return True
    return torch.onnx.is_in_onnx_export()


def _is_torchs_in_trace(module: Any, input: Tensor, hx: Any) -> bool:
    """Whether torch's layer is faster in a graph, measured on numbers of ours in the sizes that are traced; not for
    training: the backward of torch's cannot be traced.
    """
    is_refused = torch.is_grad_enabled() or (module.training and module.dropout > 0)
    if is_refused or _is_autocasting() or _table.forced() == OURS:
        return False
    given = input, *_given(hx)
    sizes = [_private.hints_of(x.shape) for x in given]
    if any(None in x for x in sizes) or len(sizes[0]) != 3:
        return False
    rows, *states = map(_ramp, sizes, given)
    call = _Call.of(module, rows, _hx_of(states))
    if call is None:
        return False
    may_measure = not torch.are_deterministic_algorithms_enabled()
    kind = f"{call.kind()}, in a graph"
    way = _table.forced() or _chosen(call, kind, call.measured_in_graph, may_measure)[0]
    return way == TORCH


_private.answer_in_traces(_in_graph.is_torchs, _is_torchs_in_trace)
_private.answer_in_traces(_in_graph.are_ours_forced, lambda: _table.forced() == OURS)
_private.answer_isinstance(lambda kind: issubclass(kind, (_Accelerated, PaddedSequence)))


def _ramp(sizes: list[Any], like: Tensor) -> Tensor:
    """No random numbers: the user's would be others then."""
    ramp = torch.arange(math.prod(sizes), device=like.device).view(sizes).sin().to(like.dtype)
    return ramp.requires_grad_(like.requires_grad)


def _with_lengths(module: Any, input: Any, hx: Any, lengths: Tensor) -> Any:
    """Packed, since torch's forward takes no lengths."""
    batch_first = module.batch_first
    packed = pack_padded_sequence(input, lengths.cpu(), batch_first, enforce_sorted=False)
    output, last = _Accelerated.forward(module, packed, hx)
    total = input.shape[int(batch_first)]
    return pad_packed_sequence(output, batch_first, total_length=total)[0], last


def _serve(module: Any, input: Any, hx: Any, quick: Any, key: Any) -> Any:
    """A call that torch's forward is not known to serve."""
    way = None
    if key is not None and _graph_task() == -1:  # else a checkpoint may compute it again
        way = module.__dict__.get(_KNOWN, _NOTHING).get(key)
    call = None
    if _autograd.is_plain() and not (way is None and _table.forced() == TORCH):
        call = _Call.of(module, input, hx, is_known=way is not None)
    if call is not None:
        if way is None:
            way = _way(module, call, quick, key)
        if way == OURS:
            try:
                return call.by_ours()
            except _FAILURES:  # torch's forward says what is wrong, or can compute it
                if type(module.__dict__.get(_KNOWN)) is _Always:
                    raise  # ours alone is measured
    return module._extops_kind.forward(module, input, hx)


def _remember(module: Any, key: Any, way: str) -> None:
    known = module.__dict__.setdefault(_KNOWN, {})
    if len(known) >= _MOST_KNOWN:
        known.pop(next(iter(known), None), None)
    known[key] = way


def _way(module: Any, call: _Call, quick: Any, key: Any) -> str:
    """What serves the call: known, measured or torch's."""
    if forced := _table.forced():
        return forced
    if _graph_task() != -1:
        return _way_of_recomputed(module, call, key)
    found, is_final = _chosen(call, call.kind(), call.measured, _may_measure(call))
    way = found or TORCH
    # A checkpoint that computes it again must get the same.
    _remember(module, ("last", key), way)
    if is_final and key is not None:
        _remember(module, key, way)
        if way == TORCH:
            module.__dict__.setdefault(_TORCHS, set()).add(quick)
    return way


def _chosen(
    call: _Call, kind: str, measure: Callable[[], _table.Measured | None], may_measure: bool
) -> tuple[str | None, bool]:
    """What is known to serve such calls or, where that may be, is measured: torch's, if that fails. And whether that is
    all that will be.
    """
    sizes, table = call.sizes(), call.table()
    way, is_final = table.kind(kind).way(sizes)
    if way is not None or not (may_measure and _measuring.acquire(blocking=False)):
        return way, is_final
    try:
        measured = measure()
    finally:
        _measuring.release()
    if measured is None:
        return TORCH, True
    table.add(kind, sizes, measured)
    return measured.way, True


def _way_of_recomputed(module: Any, call: _Call, key: Any) -> str:
    """That of the call which a checkpoint computes again; a reentrant one had wanted no gradients."""
    if key is not None and not _private.has_hooks_of_saved_tensors():
        quick, *others = key
        key = (False, *quick[1:]), *others
    way = module.__dict__.get(_KNOWN, _NOTHING).get(("last", key))
    return way or call.table().kind(call.kind()).way(call.sizes())[0] or TORCH


def _may_measure(call: _Call) -> bool:
    is_captured = call.rows.is_cuda and torch.cuda.is_current_stream_capturing()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    return not (is_captured or is_deterministic or _private.is_watched())


def described(module: Any, input: Any, hx: Any = None) -> tuple[str, str]:
    """What serves such a call of a module that was taken, or ``"not measured"``, and the times that led to it; empty
    for other modules.
    """
    if not isinstance(module, _Accelerated):
        return "", ""
    call = _Call.of(module, input, hx)
    if call is None:
        return TORCH, "since our kernels cannot"
    kind, sizes = call.kind(), call.sizes()
    of_kind = call.table().kind(kind)
    way = _table.forced() or of_kind.way(sizes)[0] or "not measured"
    measured = of_kind.measured.get(sizes)
    if measured is None:
        return way, kind
    times = f"torch {measured.torchs * 1e3:.3f} ms, extops {measured.ours * 1e3:.3f} ms"
    return way, f"{times}: {kind}"


class _Call(NamedTuple):
    """A call that our kernels can serve."""

    module: Any
    rows: Tensor
    """``[T, B, I]``, ``[B, T, I]``, ``[T, I]``, packed rows, or the input of a cell."""
    packed: PackedSequence | None
    states: tuple[Tensor, ...]
    """None of them where they are zeros."""
    parameters: list[Any]

    @classmethod
    def of(cls, module: Any, input: Any, hx: Any, *, is_known: bool = False) -> _Call | None:
        """None for all other calls. Of one that is known, its key says what the input is."""
        packed = input if type(input) is PackedSequence else None
        rows = input if packed is None else packed.data
        is_layer = isinstance(module, torch.nn.RNNBase)
        dims = ((3, 2) if is_layer else (2, 1)) if packed is None else (2,)
        if not is_known:
            if not (_is_plain_tensor(rows) and rows.dim() in dims and rows.numel() > 0):
                return None
            if not _is_regular(module) or rows.shape[-1] != module.input_size:
                return None
        if packed is not None and not _are_sizes(packed.batch_sizes, rows):
            return None
        if is_layer:
            if not module.__dict__.keys().isdisjoint(_METHODS):
                return None
            if not _are_its_weights(module):
                module._update_flat_weights()
            parameters = module._flat_weights
            width = module.num_layers * (1 + module.bidirectional) * (4 if module.bias else 2)
            if len(parameters) != width:
                return None
        else:
            parameters = [x for name in rnn.PARAMETERS if (x := getattr(module, name)) is not None]
            if not all(x.is_contiguous() for x in _given(hx)):
                return None  # which torch's results follow
        states = () if hx is None else (hx,)
        if hx is not None and module._extops_kind.__name__.startswith("LSTM"):
            states = hx
            if not (isinstance(hx, (tuple, list)) and len(hx) == 2):
                return None
        if not _suit((*parameters, *states), rows, is_layer):
            return None
        call = cls(module, rows, packed, tuple(states), parameters)
        shape = call.shape_of_states() if states else ()
        for x in states:  # as all(), in half the time
            if x.shape != shape:
                return None
        # On a CPU torch computes h from the c that it returns, so that hooks on that c see the gradient of h.
        is_from_c = not (is_layer or rows.is_cuda) and isinstance(module, torch.nn.LSTMCell)
        return None if is_from_c and call.wants_gradients() else call

    def table(self) -> _table.Table:
        """Of the device."""
        return _table.table(self.rows.get_device())

    @property
    def is_layer(self) -> bool:
        """Not a cell."""
        return isinstance(self.module, torch.nn.RNNBase)

    def shape_of_states(self) -> tuple[int, ...]:
        """Of each."""
        module, rows = self.module, self.rows
        if not isinstance(module, torch.nn.RNNBase):
            return *rows.shape[:-1], module.hidden_size
        batch: tuple[int, ...] = ()
        if self.packed is not None:
            batch = _sizes_of_packed(self.packed)[1:]
        elif rows.dim() == 3:
            batch = (rows.shape[0 if module.batch_first else 1],)
        return module.num_layers * (1 + module.bidirectional), *batch, module.hidden_size

    def sizes(self) -> tuple[int, ...]:
        """Steps, samples and, of packed input, rows; of a cell its samples."""
        rows = self.rows
        if self.packed is not None:
            return *_sizes_of_packed(self.packed), len(rows)
        if not self.is_layer:
            return (rows.shape[0] if rows.dim() == 2 else 1,)
        if rows.dim() == 2:
            return len(rows), 1
        steps, batch, _ = rows.shape
        return (batch, steps) if self.module.batch_first else (steps, batch)

    def wants_gradients(self) -> bool:
        """Whether a backward may follow."""
        tensors = (self.rows, *self.states, *self.parameters)
        return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)

    def kind(self) -> str:
        """All that its time depends on but for the sizes, in words."""
        module, rows = self.module, self.rows
        of_module = [f"{module._extops_kind.__name__} {module.input_size} -> {module.hidden_size}"]
        if self.is_layer:
            of_module += [f"{module.num_layers} layers"] * (module.num_layers > 1)
            of_module += ["both ways"] * bool(module.bidirectional)
            of_module += ["dropout"] * (module.training and module.dropout > 0)
        of_module += ["no biases"] * (len(self.parameters) % 4 > 0)
        if "RNN" in module._extops_kind.__name__:
            of_module += [module.mode if self.is_layer else module.nonlinearity]
        of_call = [str(rows.dtype).removeprefix("torch.")]
        if _is_autocasting() and (dtype := _autocast_dtype(rows)):
            of_call += [f"autocast to {str(dtype).removeprefix('torch.')}"]
        allows_tf32 = _cudnn_allows_tf32 if self.is_layer else _allows_tf32
        of_call += ["TF32"] * (rows.is_cuda and rows.dtype is torch.float32 and allows_tf32())
        of_call += ["packed"] * (self.packed is not None)
        is_batched = rows.dim() == (3 if self.is_layer else 2) or self.packed is not None
        of_call += ["no batch"] * (not is_batched)
        if self.packed is None:
            of_call += ["by samples"] * bool(self.is_layer and module.batch_first)
            of_call += ["strided"] * (not rows.is_contiguous())
        of_call += ["states"] * bool(self.states)
        of_call += ["eval"] * (not module.training)
        if self.wants_gradients():
            inputs = {"input": [rows], "parameters": self.parameters, "states": self.states}
            wanted = [name for name, xs in inputs.items() if any(x.requires_grad for x in xs)]
            of_call += [f"gradients of {' and '.join(wanted)}"]
        processors = f"{_get_num_threads()} threads"
        if rows.is_cuda:
            device = rows.get_device()
            processors = f"{_libraries.sm_count(device, _current_stream(device))} SMs"
        return ", ".join((*of_module, *of_call, processors))

    def by_ours(self, shell: Any = None) -> Any:
        """Results as torch's; of parameters that are not the module's by a shell that has them."""
        module, rows, is_cast = self.module, self.rows, _is_autocasting()
        is_layer = isinstance(module, torch.nn.RNNBase)
        if is_cast and rows.is_cuda and (dtype := _autocast_dtype(rows)):
            # Whatever the region's, cuDNN's layers compute in float16, and so are their results.
            found = self._in_dtype(torch.float16 if is_layer else dtype)
            with _private.without_autocast():
                return found.by_ours(found._shell(module._extops_ours, found.parameters))
        if shell is None:
            shell = module
            if not module._extops_is_traced:  # attributes of the user's class may be its parameters
                shell = self._shell(module._extops_ours, self.parameters)
        if is_layer and self.packed is None and rows.dim() == 3 and not is_cast:
            of_call = rows, self.states or None, self.parameters
            output, states = module._extops_ours.run_plain(shell, *of_call)
            return output, states if len(states) > 1 else states[0]
        input = rows if self.packed is None else self.packed
        return module._extops_ours.forward(shell, input, _hx_of(self.states))

    def _in_dtype(self, dtype: torch.dtype) -> _Call:
        tensors = self.rows, *self.states, *self.parameters
        rows, *others = _autocast.cast_together(dtype, *tensors)
        states, weights = others[: len(self.states)], others[len(self.states) :]
        packed = None if self.packed is None else self.packed._replace(data=rows)
        return _Call(self.module, rows, packed, tuple(states), weights)

    def _shell(self, kind: type[Any], parameters: list[Any], **changed: Any) -> Any:
        """Of the module, with other parameters."""
        if self.is_layer:
            return _shell(self.module, kind, _flat_weights=parameters, **changed)
        named = zip(rnn.PARAMETERS, [*parameters, None, None][:4], strict=True)
        return _shell(self.module, kind, _parameters=dict(named), **changed)

    def measured(self) -> _table.Measured | None:
        """Both ways timed; None where that fails."""
        return self._compared(_Call._timed, _measure.is_faster)

    def _compared(
        self, timed: Callable[[_Call, str], _measure.Call], is_faster: _measure.IsFaster
    ) -> _table.Measured | None:
        def exact() -> Sequence[Tensor]:
            said = "extops: torch's and our values of %s differ: those in float64 decide"
            _logger.warning(said, self.kind())
            with _private.without_autocast():
                return timed(self._detached(torch.float64), TORCH)()

        unseen: Any = contextlib.nullcontext()
        if _private.has_hooks_of_saved_tensors():  # which see nothing within
            unseen = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        try:
            with unseen, torch.cuda.device(self.rows.get_device() if self.rows.is_cuda else -1):
                torchs, ours = (timed(self._detached(), way) for way in (TORCH, OURS))
                return _measure.measure(torchs, ours, exact, self.rows.device, is_faster)
        except Exception as error:  # whatever a kernel or its memory may lack, torch's serves
            level = logging.INFO if isinstance(error, torch.OutOfMemoryError) else logging.WARNING
            said = "extops: %s is torch's, since measuring failed: %s"
            _logger.log(level, said, self.kind(), error)
            return None

    def measured_in_graph(self) -> _table.Measured | None:
        """The operators of both ways, as a graph calls them; None where that fails."""

        def operator(call: _Call, way: str) -> Callable[[], list[Tensor]]:
            by, hx = _in_graph.by_torchs, _hx_of(call.states)
            if way == OURS:
                by, hx = call.module._extops_ours.run_plain, call.states or None
            return lambda: [by(call.module, call.rows, hx, call.parameters)[0]]

        return self._compared(operator, _measure.is_faster_in_graph)

    def _detached(self, dtype: torch.dtype | None = None) -> _Call:
        """The same on tensors that no hook of the user knows; of a long call its first steps."""

        def alone(x: Tensor) -> Tensor:
            new = x.detach().to(dtype or x.dtype)
            return new.requires_grad_(x.requires_grad and x.is_floating_point())

        parameters = [alone(x) for x in self.parameters]
        changed = {"dropout": 0.0} if self.is_layer else {}
        module = self._shell(type(self.module), parameters, **changed)
        rows, packed = self._first_steps()
        rows = alone(rows)
        if packed is not None:
            packed = packed._replace(data=rows)
        states = tuple(alone(x) for x in self.states)
        return _Call(module, rows, packed, states, parameters)

    def _first_steps(self) -> tuple[Tensor, PackedSequence | None]:
        if not self.is_layer or self.sizes()[0] <= _MOST_STEPS:
            return self.rows, self.packed
        if self.packed is not None:
            sizes = self.packed.batch_sizes[:_MOST_STEPS]
            rows = self.rows[: int(sizes.sum())]
            return rows, self.packed._replace(data=rows, batch_sizes=sizes)
        by_samples = self.module.batch_first and self.rows.dim() == 3
        return self.rows.narrow(int(by_samples), 0, _MOST_STEPS), None

    def _timed(self, way: str) -> Callable[[], list[Tensor]]:
        """A call that is known to be served in a way, with all that it takes the host to decide so; and its backward
        where one may follow. cuDNN has none outside of training.
        """
        input, hx = self.rows if self.packed is None else self.packed, _hx_of(self.states)
        module, first = self.module, _Accelerated if self.is_layer else _AcceleratedCell
        module.__dict__[_KNOWN] = module.__dict__[_TORCHS] = _Always(way=way)

        def run() -> list[Tensor]:
            results = first.forward(module, input, hx)
            outputs = results[:1] if self.is_layer else results
            outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
            return [x.data if isinstance(x, PackedSequence) else x for x in outputs]

        has_backward = self.module.training or not self.rows.is_cuda or not self.is_layer
        if not (self.wants_gradients() and has_backward):
            return run
        leaves = [x for x in (self.rows, *self.states, *self.parameters) if x.requires_grad]
        ones: list[Tensor] = []

        def train() -> list[Tensor]:
            outputs = run()
            if not ones:
                ones.extend(torch.ones_like(x) for x in outputs)
            found = torch.autograd.grad(outputs, leaves, ones, allow_unused=True)
            return [*outputs, *(x for x in found if x is not None)]

        return train


_MOST_STEPS = 512
"""Of a call that is measured."""


_METHODS = (
    *("check_input", "check_forward_args", "check_hidden_size", "permute_hidden"),
    *("get_expected_hidden_size", "get_expected_cell_size", "_update_flat_weights"),
)
"""Of torch's layers, which their forward calls."""


def _is_regular(module: Any) -> bool:
    """Whether torch's forward computes by attributes as a constructor sets them, and by no method of the user's."""
    if "parametrizations" in module._modules:  # torch's forward computes them once
        return False
    if not isinstance(module, torch.nn.RNNBase):
        return True
    flags = module.bias, module.batch_first, module.bidirectional, module.training
    if not all(type(x) is bool for x in flags) or type(module.num_layers) is not int:
        return False
    is_known = module.mode.lower() in CELLS and module.proj_size == 0
    kind, torchs = type(module), module._extops_kind
    has_torchs = all(getattr(kind, x, None) is getattr(torchs, x, None) for x in _METHODS)
    return is_known and 0 <= module.dropout <= 1 and has_torchs


def _are_its_weights(module: Any) -> bool:
    """Whether a layer's list has its parameters, which torch's own question takes the host a fifth of a call to say."""
    refs, parameters = module.__dict__.get("_flat_weight_refs"), module._parameters
    for name, ref in zip(module._flat_weights_names, refs or (None,), strict=False):
        if ref is None or ref() is not parameters.get(name):
            return False
    return True


def _is_plain_tensor(x: Any) -> bool:
    return (
        type(x) in _autograd.TENSORS
        and x.layout is torch.strided
        and not x.is_nested
        and x.dtype in _checks.FLOATING
        and x.device.type in ("cpu", "cuda")
        and x.device.type in _devices.devices
    )


def _suit(tensors: tuple[Any, ...], rows: Tensor, is_layer: bool) -> bool:
    """Whether parameters and states are of the input's kind; autocast casts what is float32."""
    device = rows.device
    dtypes: tuple[Any, ...] = (rows.dtype,)
    if _is_autocasting() and (dtype := _autocast_dtype(rows)):
        is_cudnns = is_layer and rows.is_cuda
        if is_cudnns and not _is_for_cudnn(rows.dtype):
            return False
        # cuDNN casts all to float16. Elsewhere torch's results of the other 16-bit type are not those of a cast.
        dtypes = _autocast.CAST_FROM if is_cudnns else (torch.float32, dtype)
    if rows.dtype not in dtypes:
        return False
    for x in tensors:  # as all(), in half the time
        if type(x) not in _autograd.TENSORS or x.layout is not torch.strided or x.device != device:
            return False
        if x.dtype not in dtypes:
            return False
    return True


def _is_for_cudnn(dtype: torch.dtype) -> bool:
    """Whether cuDNN computes torch's layers of such input: its older versions have none of bfloat16."""
    cudnn = torch.backends.cudnn
    return cudnn.enabled and (dtype is not torch.bfloat16 or (cudnn.version() or 0) >= 91300)


def _hx_of(states: Sequence[Tensor]) -> Any:
    return None if not states else states if len(states) > 1 else states[0]


def _given(hx: Any) -> tuple[Tensor, ...]:
    states = hx if isinstance(hx, (tuple, list)) else (hx,)
    return tuple(x for x in states if isinstance(x, Tensor) and x.layout is torch.strided)


def _are_sizes(sizes: Any, rows: Tensor) -> bool:
    if type(sizes) is not Tensor or sizes.dtype is not torch.int64 or sizes.dim() != 1:
        return False
    numbers = sizes.tolist()
    are_sorted = numbers == sorted(numbers, reverse=True)
    return bool(numbers) and numbers[-1] > 0 and are_sorted and sum(numbers) == len(rows)


# -- classes

_ALL: Any = rnn.LSTM, rnn.GRU, rnn.RNN, rnn.LSTMCell, rnn.GRUCell, rnn.RNNCell
_OURS: dict[type[torch.nn.Module], type[Any]] = {kind._extops_kind: kind for kind in _ALL}


class _Unregistered:
    """Before a class of the user's, which may keep a list of those derived from it."""

    def __init_subclass__(cls) -> None:
        pass


@functools.cache
def _accelerated(looks: type[torch.nn.Module]) -> type[Any]:
    """The class of accelerated modules of a class: of torch's, or derived from one of them."""
    torchs = next(kind for kind in looks.__mro__ if kind in _OURS)
    ours = _OURS[torchs]
    forwards = {"_forward_of_ours": ours.forward, "_forward_of_torchs": torchs.forward}
    first: Any = _Accelerated if issubclass(torchs, torch.nn.RNNBase) else _AcceleratedCell
    of = first.forward
    forward = types.FunctionType(of.__code__, of.__globals__, of.__name__, of.__defaults__)
    forward.__doc__, forward.__annotations__ = of.__doc__, of.__annotations__
    forward.__qualname__ = torchs.forward.__qualname__  # which an error of wrong arguments names
    attributes = {
        "_extops_looks": looks,
        "_extops_kind": torchs,
        "_extops_ours": ours,
        "forward": forward,
        **forwards,
    }
    names = {x: getattr(looks, x) for x in ("__module__", "__doc__", "__qualname__")}
    if looks is torchs:
        bases: tuple[type, ...] = first, ours
        return type(looks.__name__, bases, {**attributes, **names})
    if (looks.__reduce__, looks.__reduce_ex__) != (object.__reduce__, object.__reduce_ex__):
        attributes |= {"__copy__": None, "__deepcopy__": None}  # it copies in its own way
    # Its forward ends in super().forward(...): that is ours then.
    between = type(torchs.__name__, (first, torchs), {**attributes, "_extops_is_traced": False})
    # Its layout is that of the first of them, which an assignment to __class__ compares.
    is_told = not isinstance(looks.__init_subclass__, types.BuiltinMethodType)
    bases = (_Unregistered, looks, between) if is_told else (looks, between)
    taken: type[Any] = types.new_class(looks.__name__, bases, {}, lambda it: it.update(names))
    return taken


def accelerate(model: Model) -> Model:
    """Lets each ``nn.LSTM``, ``nn.GRU``, ``nn.RNN``, ``nn.LSTMCell``, ``nn.GRUCell`` and ``nn.RNNCell`` of a model run
    by our kernels where they are faster, in place.

    A module stays what it is: the same object, an instance of its class, with its parameters, hooks, state dict and
    pickle. The first call of a kind is computed in both ways, torch's and ours, and timed, which takes about ten calls
    of each; calls of that kind then run the faster one (see :func:`extops.choices`). Results are torch's: values within
    its own rounding, shapes, strides, dtypes, errors and, in float32 on a GPU, the precision that
    ``torch.backends.cudnn.allow_tf32`` sets. What our kernels cannot compute, torch's forward does. Where that serves,
    gradients of second order are torch's as well; :class:`extops.LSTM` and its like always have them.

    In ``torch.compile`` and ``torch.export`` a module that was taken is one operator in the graph, where torch's own is
    refused. Modules of classes derived from torch's are taken, too, but are refused there as before.

    The logger ``"extops"`` names the modules in one line of level INFO. A warning names the recurrent modules that are
    left alone, and why, or says that there is none to take. :func:`extops.restore` undoes it.

    Args:
        model: any module; it may be such a layer itself.

    Returns:
        ``model``.
    """
    check_model("accelerate", model)
    taken, left = [], []
    is_any = False  # of those that are ours already
    for name, module in model.named_modules():
        if issubclass(type(module), (_Accelerated, *_OURS.values())):
            is_any = True
        elif reason := _why_left_alone(module):
            left.append(f"{_called(name)}, {reason}")
        elif isinstance(module, tuple(_OURS)):
            try:
                kind = _accelerated(cast("Any", type(module)))
                rnn.set_class(module, kind)
            except Exception as error:
                left.append(f"{_called(name)}, of whose class none can be derived: {error}")
                continue
            if isinstance(module, torch.nn.RNNBase):
                module.flatten_parameters()  # a copy of a model scatters them
            taken.append(f"{_called(name)} ({kind.__name__})")
    _logger.info("extops.accelerate took: %s", ", ".join(taken) or "nothing")
    if left:
        warnings.warn(f"extops.accelerate left alone: {'; '.join(left)}", stacklevel=2)
    elif not (taken or is_any):
        warnings.warn(
            "extops.accelerate found no LSTM, GRU or RNN of torch.nn, and no cell of one, so it changed nothing",
            stacklevel=2,
        )
    return model


def restore(model: Model) -> Model:
    """Undoes :func:`extops.accelerate`, in place. What was created as :class:`extops.LSTM` or its like becomes torch's,
    too; modules of a class derived from ours are not changed.

    A module stays the same object, and the logger names those that changed.

    Args:
        model: any module; it may be such a layer itself.

    Returns:
        ``model``.
    """
    check_model("restore", model)
    taken = []
    for name, module in model.named_modules():
        kind: Any = type(module)
        if isinstance(module, _Accelerated):
            other = kind._extops_looks
        elif kind in _OURS.values():
            other = kind._extops_kind
        else:
            continue
        _forget(module.__dict__)
        rnn.set_class(module, other)
        taken.append(f"{_called(name)} ({other.__name__})")
    _logger.info("extops.restore took: %s", ", ".join(taken) or "nothing")
    return model


def check_model(function: str, model: object) -> None:
    """Raises an error for what is no module."""
    if not isinstance(model, torch.nn.Module):
        found = type(model).__name__
        raise _checks.unfit(function, "model", "to be a torch.nn.Module", found, TypeError)


def _called(name: str) -> str:
    return f"`{name}`" if name else "the model"


def _why_left_alone(module: torch.nn.Module) -> str:
    """Empty for what is not recurrent, or is taken."""
    if isinstance(module, torch.jit.ScriptModule):
        is_recurrent = module.original_name in {kind.__name__ for kind in _OURS}
        return "which torch.jit has compiled" if is_recurrent else ""
    if not isinstance(module, (torch.nn.RNNBase, torch.nn.RNNCellBase)):
        return ""
    if getattr(module, "proj_size", 0):
        return "which has `proj_size`"
    if isinstance(module, (*_OURS, *_OURS.values())):
        return ""
    return f"since extops has no {type(module).__name__}"
