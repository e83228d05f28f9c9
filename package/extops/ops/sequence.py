"""Recurrent cells over whole sequences."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from extops import _in_graph, _private
from extops.binding import _checks, _schemas
from extops.calling import _autocast, _autograd
from extops.ops import compositions
from extops.ops.sequence_gradients import Chunk, gradients, lengths_of
from extops.ops.step import Step

CHUNK_BYTES = 500_000_000
"""Sequences whose gates need fewer bytes run in one piece. In a few chunks a large batch takes a tenth longer, in many
half as long again.
"""
_ALL_STEPS = slice(None)

Arguments = tuple[Any, ...]
Results = tuple[Tensor, Tensor, Tensor]


class Cell:
    """The operator of a cell, ``<cell>_sequence``, as Python calls it."""

    def __init__(
        self,
        cell: str,
        composition: compositions.Cell | None = None,
        cast: Callable[..., Arguments] = _autocast.cast_with_state,
    ) -> None:
        """A cell by its name.

        Args:
            cell: as in ``csrc/cells/cells.h``.
            composition: the same in PyTorch; by default that of ``compositions``.
            cast: what autocast does to the arguments.
        """
        found: compositions.Cell = composition or getattr(compositions, f"_{cell}")
        self.name = f"{cell}_sequence"
        self.time_first = _schemas.OPERATORS[self.name]
        input, *others = self.time_first.arguments
        batch_first = dataclasses.replace(input, axes="batch, time, input_features")
        self.batch_first = dataclasses.replace(self.time_first, arguments=(batch_first, *others))
        self.step = Step(cell, found)
        self.cast = cast
        self.operator = getattr(torch.ops.extops, self.name).default
        self.eager = _autograd.eager(self.name)
        self.eager_backward = _autograd.eager(f"{self.name}_backward")
        self.reference = compositions.in_float32(found.sequence)
        self._register(compositions.in_float32(found.sequence_backward))

    def _register(self, reference_backward: Callable[..., Any]) -> None:
        def kept(training: bool, *results: Any) -> Any:
            return results if training else (*results[:3], *(x[:0] for x in results[3:]))

        def apply(
            *inputs: Any, reverse: bool = False, allow_tf32: bool = False, training: bool = True
        ) -> Any:
            direction = None if self._has_both(*inputs) else reverse
            options = direction, allow_tf32, False, inputs[0].is_cuda
            return kept(training, *_apply(self, [_ALL_STEPS], options, *inputs))

        def composite(
            *inputs: Any, reverse: bool = False, allow_tf32: bool = False, training: bool = True
        ) -> Any:
            direction = None if self._has_both(*inputs) else reverse
            return kept(training, *self.composition(*inputs, reverse=direction))

        def backward(*inputs: Any, reverse: bool = False, allow_tf32: bool = False) -> Any:
            *_, weights, gates, _, _ = inputs
            if weights.shape[1] * self.step.facts.gates == gates.shape[2]:
                return reference_backward(*inputs, reverse=reverse)
            return _by_directions(reference_backward, inputs, (2, 1, 1, 0, 2, 2, None))

        _autograd.register(self.name, apply, composite)
        # Compiled code calls the backward as an operator.
        _autograd.register(f"{self.name}_backward", backward, backward)

    def _has_both(self, input: Tensor, *others: Any) -> bool:
        """Whether the operator is given both directions, see :meth:`__call__`."""
        *parameters, h_0, _, _ = others
        if len(parameters) == 2:  # one matrix meets [h | input]
            return bool(parameters[0].shape[1] != h_0.shape[1] + input.shape[2])
        return bool(parameters[1].shape[1] != h_0.shape[1])

    def composition(self, *inputs: Any, reverse: bool | None, **options: Any) -> Any:
        """The operator in PyTorch calls, of both directions where ``reverse`` is None."""
        if reverse is not None:
            return self.reference(*inputs, reverse=reverse, **options)
        dims = None, *(0,) * (len(inputs) - 4), 1, 1, None  # parameters, and states
        return _by_directions(self.reference, inputs, dims)

    def __call__(
        self,
        arguments: Arguments,
        lengths: Tensor | _in_graph.Checked | None,
        *,
        batch_first: bool,
        reverse: bool | None,
        allow_tf32: bool | None = None,
        keeps_output: bool = True,
    ) -> Results:
        """The public function: its arguments are the input, the parameters, h_0 and c_0. Unless said otherwise, torch's
        switch of GEMMs allows TF32. The output must not change before the backward, unless that keeps a copy of it.
        A call on a GPU without ``reverse``, plain or in a graph, computes both directions: the parameters of one lie
        behind those of the other, their units side by side.
        """
        if allow_tf32 is None:
            allow_tf32 = _private.allows_tf32()
        is_checked = False
        if isinstance(lengths, _in_graph.Checked):
            is_checked, lengths = True, lengths.lengths
        try:
            is_plain = _autograd.is_plain()
            has_one_state = arguments[-1] is arguments[-2]
            if _autocast.is_on() or not is_plain:
                arguments = self.cast(*arguments)
            if lengths is not None or not (is_plain or _autograd.is_checked_elsewhere()):
                self.check(arguments, lengths, batch_first)
            input, *others = arguments
            steps = input.transpose(0, 1) if batch_first else input
            if lengths is not None and not is_checked:
                lengths = _checked(self.name, lengths, steps)
            if is_plain:
                options = reverse, allow_tf32 and input.is_cuda, batch_first, keeps_output
                return self.run((steps, *others, lengths), options, has_one_state)
            is_step = lengths is None and reverse is not None and _in_graph.is_one_step(steps)
            if is_step and self.step.serves(steps, has_one_state):
                h, c, _ = self.step.operator(steps[0], *others, allow_tf32=allow_tf32)
                # No result is a view, nor what a backward keeps.
                c = c.clone() if c.requires_grad else c
                return h.unsqueeze(int(batch_first)).clone(), h, c
            given = steps, *others, lengths
            # torch.jit checks a trace without gradients against one with them.
            training = torch.is_grad_enabled() or _autograd.is_tracing()
            switches = {"allow_tf32": allow_tf32, "training": training}
            output, h_n, c_n, _, _ = self.operator(*given, reverse=bool(reverse), **switches)
        except (*_checks.FAILURES, IndexError):
            _checks.explain(self.check, arguments, lengths, batch_first)
            raise
        return output.transpose(0, 1) if batch_first else output, h_n, c_n

    def run(self, inputs: Arguments, options: tuple[Any, ...], has_one_state: bool) -> Results:
        """A plain call; the options are ``reverse``, ``allow_tf32``, ``batch_first``, of the output alone, and
        ``keeps_output``. A cell with one state gets it twice, as hidden state and as cell state. No result is a view,
        which a caller could not change or detach in place.
        """
        input, *others, lengths = inputs
        reverse, allow_tf32, batch_first, keeps_output = options
        is_step = lengths is None and input.shape[0] == 1 and reverse is not None
        if is_step and self.step.serves(input, has_one_state):
            distinct = others[: len(others) - 2 + self.step.number_of_states]
            h, *c = self.step(input[0], *distinct, allow_tf32=allow_tf32)
            output = torch.stack((h,), dim=int(batch_first))
            # The backward of a step has kept c: a caller may change the copy in place.
            return output, h, c[0].clone() if c else h
        chunks = self._steps_of_chunks(input, others[-2], reverse)
        if torch.is_grad_enabled():
            for x in inputs[:-1]:  # as any(), in half the time
                if x is not None and x.requires_grad:
                    results: Results = _apply(self, chunks, options, *inputs)[:3]
                    if not input.is_cuda:
                        # Each gets a node of its own, as torch's on a CPU: else a hook on one that has no gradient is
                        # called, with None, where another has one.
                        for result in results[int(keeps_output) :]:
                            result.transpose_(0, 0)
                    return results
        with _autograd.below_autograd():
            results = self.in_chunks(chunks, inputs, reverse, allow_tf32)
        if batch_first:
            results[0].transpose_(0, 1)
        return results

    def _steps_of_chunks(self, input: Tensor, h_0: Any, reverse: bool | None) -> list[slice]:
        """The steps that are computed at once, in the order of computation: few, where their gates are large. Gates and
        their gradients take several times the memory of the output.
        """
        if reverse is None or not (input.dim() == 3 and isinstance(h_0, Tensor) and h_0.dim() == 2):
            return [_ALL_STEPS]  # of others, the operator refuses them
        time, batch, _ = input.shape
        size = time * batch * self.step.facts.gates * h_0.shape[1] * input.element_size()
        if size < CHUNK_BYTES:
            return [_ALL_STEPS]
        length = -(-time // (size // CHUNK_BYTES + 1))
        chunks = [slice(start, min(start + length, time)) for start in range(0, time, length)]
        return chunks[::-1] if reverse else chunks

    def in_chunks(
        self,
        chunks: list[slice],
        inputs: Sequence[Any],
        reverse: bool | None,
        allow_tf32: bool,
        kept: list[Chunk] | None = None,
    ) -> Results:
        """The output and the last states, below autograd; what a backward needs goes to ``kept``."""
        input, *parameters, h, c, lengths = inputs
        options = {"reverse": bool(reverse), "allow_tf32": allow_tf32}
        output = None
        if len(chunks) > 1:  # no view, which could not be changed in place
            time, batch, _ = input.shape
            units = h.shape[1]
            batch_first = _schemas.is_batch_first(input)
            strides = (units, time * units, 1) if batch_first else (batch * units, units, 1)
            output = input.new_empty_strided((time, batch, units), strides)
        for steps in chunks:
            part = input if output is None else input[steps]
            valid = lengths if output is None else lengths_of(steps, lengths)
            before = h, c
            of_chunk, h, c, *saved = self.eager(
                part, *parameters, *before, valid, training=kept is not None, **options
            )
            if kept is not None:
                kept.append(Chunk(*before, *saved))
            if output is not None:
                output[steps] = of_chunk
        return of_chunk if output is None else output, h, c

    def check(self, arguments: Arguments, lengths: Tensor | None, batch_first: bool) -> None:
        """Raises an error that says what does not fit."""
        schema = self.batch_first if batch_first else self.time_first
        if torch.compiler.is_dynamo_compiling():  # see is_checked_elsewhere
            batch = arguments[0].shape[int(not batch_first)]
        else:
            batch = schema.check(*arguments)["batch"]
        if lengths is not None:
            _check_lengths(self.name, lengths, arguments[0], batch)


def _by_directions(
    function: Callable[..., Any], inputs: Sequence[Any], dims: Sequence[int | None]
) -> tuple[Tensor, ...]:
    """What a function of one direction gives of both: of each, inputs have half of a dimension, or all of the input."""
    pairs = zip(inputs, dims, strict=True)
    halves = [(x, x) if x is None or dim is None else x.chunk(2, dim) for x, dim in pairs]
    found = [
        function(*of_one, reverse=bool(at)) for at, of_one in enumerate(zip(*halves, strict=True))
    ]
    return tuple([torch.cat(x, dim=-1) for x in zip(*found, strict=True)])


_EXPECTED_LENGTHS = "{}: expected `lengths` from 0 to {}"


def _checked(op: str, lengths: Tensor, input: Tensor) -> Tensor:
    """Lengths as the operator needs them: int64, on the device of ``input`` and in range."""
    steps = input.shape[0]
    if lengths.device.type == "cpu" and _in_graph.is_in_process():
        expected = _EXPECTED_LENGTHS.format(op, "the number of steps of `input`")
        return _in_graph.checked_lengths(lengths, input.device, expected, most=steps)
    # Converted, since small integer types may not hold the number of steps, and unsigned ones cannot be compared.
    # Copied, since the caller may change the tensor before a backward, or before it has reached the GPU. Always, so
    # that a trace is the same with gradients and without.
    copy = torch.is_grad_enabled() or lengths.device != input.device or _autograd.is_tracing()
    numbers = lengths.to(torch.int64, copy=copy)
    _check_range(op, lengths, numbers, steps)
    # A trace, and compiled code of torch 2.4, drop assertions, but not what the result depends on.
    if _private.assert_async is None or _autograd.is_tracing() or torch.compiler.is_compiling():
        numbers = torch.arange(steps + 1, device=numbers.device).index_select(0, numbers)
    return _checks.to_device(op, "lengths", numbers, input.device)


def _check_range(op: str, lengths: Tensor, numbers: Tensor, steps: int) -> None:
    if (assert_async := _private.assert_async) is None:
        return
    if torch.compiler.is_compiling():  # for any number of steps: the message cannot name it
        values, limit = numbers, "the number of steps of `input`"
    else:
        values, limit = _private.unwrapped(numbers), f"{steps}, the number of steps of `input`"
    in_range = ((values >= 0) & (values <= steps)).all()
    expected = _EXPECTED_LENGTHS.format(op, limit)
    try:
        assert_async(in_range, expected)
    except RuntimeError:
        with _private.outside_transforms():  # within which new tensors have no values
            given = _private.unwrapped(lengths).tolist()
        raise RuntimeError(f"{expected}, but got {given}") from None


def _check_lengths(op: str, lengths: Tensor, input: Tensor, batch: int) -> None:
    _checks.check_dense(op, "lengths", lengths)
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype is torch.bool:
        raise RuntimeError(f"{op}: expected `lengths` of an integer dtype, but got {lengths.dtype}")
    if lengths.device != input.device and lengths.device.type != "cpu":
        raise RuntimeError(
            f"{op}: expected `lengths` on the CPU or on device {input.device}, the device of `input`, "
            f"but got {lengths.device}"
        )
    _checks.check_shape(op, "lengths", lengths, (batch,), "[batch]")


# -- gradients: eager calls go straight to an autograd Function, as in step.py


class _Sequence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, cell: Cell, chunks: list[slice], options: Any, *inputs: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        reverse, allow_tf32, batch_first, keeps_output = options
        kept: list[Chunk] = []
        with _autograd.below_autograd():
            output, *states = cell.in_chunks(chunks, inputs, reverse, allow_tf32, kept)
            saved, steps = output if keeps_output else output.clone(), output.shape[0]
            if batch_first:
                output.transpose_(0, 1)
        ctx.cell, ctx.steps, ctx.options = cell, chunks, options
        ctx.set_materialize_grads(False)
        # The biases' values are not needed, and may change.
        *before, _, _, lengths = inputs
        half = 1 + len(before) // 2
        ctx.biases = before[half:]
        ctx.versions = _autograd.versions(ctx.biases)
        of_input, *of_weights = ctx.needs_input_grad[3 : 3 + half]
        # A single step multiplies by the recurrent weights for the gradient of h_0 alone.
        is_step = isinstance(steps, int) and steps == 1 and len(kept) == 1
        of_h = not is_step or ctx.needs_input_grad[-3]
        of_both = of_weights[0], *([of_input or of_h] if half == 2 else [of_input, of_h])
        others = *before[:half], kept[0].h, kept[0].c
        ctx.kept, needed = _autograd.Kept.of(others, [*of_both, of_weights[-1], False])
        _, _, *of_chunks = itertools.chain(*kept)
        ctx.save_for_backward(*needed, lengths, saved, *of_chunks)
        of_all = (kept[0].gates, kept[0].cells) if len(kept) == 1 else (None, None)
        return output, *states, *of_all

    @staticmethod
    def backward(ctx: Any, *towards: Tensor | None) -> tuple[Tensor | None, ...]:
        count, width = len(ctx.steps), len(Chunk._fields)
        reverse, allow_tf32, batch_first, keeps_output = ctx.options
        saved = ctx.saved_tensors
        *needed, lengths, output = saved[: 2 - count * width]
        *before, h_0, c_0 = ctx.kept.all(needed)
        if batch_first:
            output = output.transpose(0, 1) if keeps_output else output
            towards = (None if towards[0] is None else towards[0].transpose(0, 1), *towards[1:])
        of_chunks = h_0, c_0, *saved[2 - count * width :]
        chunks = [Chunk(*of_chunks[at : at + width]) for at in range(0, count * width, width)]
        inputs = [*before, *ctx.biases, chunks[0].h, chunks[0].c]
        needs = ctx.needs_input_grad[3:-1]
        if _autograd.needs_composite() or towards[3] is not None or towards[4] is not None:
            ctx.kept.check()
            is_same = _autograd.versions(ctx.biases) == ctx.versions
            in_order = [x.gates for x in (chunks[::-1] if reverse else chunks)]
            known_gates = None if is_same else torch.cat(in_order)

            def composite(*inputs: Tensor) -> Any:
                known = {} if reverse is None else {"known_gates": known_gates}
                return ctx.cell.composition(*inputs, lengths, reverse=reverse, **known)

            found = _autograd.composite_gradients(composite, inputs, needs, towards)
        elif all(gradient is None for gradient in towards):
            found = (None,) * len(needs)
        else:
            with _autograd.below_autograd():
                in_steps = list(zip(ctx.steps, chunks, strict=True))
                given = inputs, lengths, output, in_steps, towards[:3], needs
                found = gradients(ctx.cell, *given, reverse, allow_tf32)
        return None, None, None, *found, None


_apply = _private.apply(_Sequence)


# -- the LLTM

LLTM_CELL = Cell("lltm", cast=_autocast.cast)


def lltm_sequence(
    input: Tensor,
    state: tuple[Tensor, Tensor],
    weights: Tensor,
    bias: Tensor,
    *,
    lengths: Tensor | None = None,
    batch_first: bool = False,
    reverse: bool = False,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """:func:`extops.lltm` at every step of a sequence, with one GEMM for the inputs of all steps.

    Args:
        input: ``[T, B, I]``, or ``[B, T, I]`` with ``batch_first``.
        state: ``(h_0, c_0)``, the state before the first step, both ``[B, S]``.
        weights: ``[3S, S + I]``; the first ``S`` columns meet the hidden state.
        bias: ``[3S]``.
        lengths: ``[B]``, integers from 0 to ``T``, on the CPU or on the device of ``input``: how many steps of each row
            are valid. Beyond them the output and the gradient of ``input`` are zero, the state stays, and the values of
            ``input`` have no effect.
        batch_first: the layout of ``input`` and ``output``.
        reverse: goes from the last step to the first.

    Returns:
        ``output, (h_n, c_n)``: the hidden state after every step, ``[T, B, S]`` or ``[B, T, S]``, and the last state,
        both ``[B, S]``. The output has the memory order of ``input``: by steps or by rows.

    Raises:
        RuntimeError: a dtype, device, layout, number of dimensions or size does not fit, or one of ``lengths`` is out
            of range; the message names it. Lengths on a GPU are checked there, since the host does not wait for them: a
            device-side assertion fails, as for torch's own indices. Code from ``torch.jit.trace`` reports them as an
            index that is out of range.
    """
    arguments = input, weights, bias, *_checks.as_pair(LLTM_CELL.name, state)
    output, h_n, c_n = LLTM_CELL(arguments, lengths, batch_first=batch_first, reverse=reverse)
    return output, (h_n, c_n)


# -- those of torch


LSTM_CELL = Cell("lstm")
GRU_CELL = Cell("gru")
CELLS = {x: Cell(x, cast=_autocast.cast) for x in ("rnn_tanh", "rnn_relu")}
CELLS |= {"lstm": LSTM_CELL, "gru": GRU_CELL}
"""Those of torch's modules."""


def as_biases(op: str, bias: tuple[Tensor, Tensor] | None) -> Arguments:
    """``(bias_ih, bias_hh)``, or none of both."""
    if bias is None:
        return None, None
    pair = _checks.as_pair(op, bias, "bias", "(bias_ih, bias_hh)")
    for name, each in zip(("bias_ih", "bias_hh"), pair, strict=True):
        if each is None:
            _checks.check_dense(op, name, each)
    return pair


def lstm_sequence(
    input: Tensor,
    state: tuple[Tensor, Tensor],
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: tuple[Tensor, Tensor] | None = None,
    *,
    lengths: Tensor | None = None,
    batch_first: bool = False,
    reverse: bool = False,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """One direction of a layer of :class:`torch.nn.LSTM`.

    Args:
        input: ``[T, B, I]``, or ``[B, T, I]`` with ``batch_first``.
        state: ``(h_0, c_0)``, the state before the first step, both ``[B, S]``.
        weight_ih: ``[4S, I]``, for the gates i, f, g, o.
        weight_hh: ``[4S, S]``.
        bias: ``(bias_ih, bias_hh)``, both ``[4S]``, or none.
        lengths: see :func:`extops.lltm_sequence`, also for ``batch_first``, ``reverse`` and the errors.

    Returns:
        ``output, (h_n, c_n)``, as of :func:`extops.lltm_sequence`.
    """
    biases, pair = as_biases(LSTM_CELL.name, bias), _checks.as_pair(LSTM_CELL.name, state)
    arguments = input, weight_ih, weight_hh, *biases, *pair
    output, h_n, c_n = LSTM_CELL(arguments, lengths, batch_first=batch_first, reverse=reverse)
    return output, (h_n, c_n)


def gru_sequence(
    input: Tensor,
    state: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: tuple[Tensor, Tensor] | None = None,
    *,
    lengths: Tensor | None = None,
    batch_first: bool = False,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """One direction of a layer of :class:`torch.nn.GRU`.

    Args:
        input: ``[T, B, I]``, or ``[B, T, I]`` with ``batch_first``.
        state: ``h_0``, the state before the first step, ``[B, S]``.
        weight_ih: ``[3S, I]``, for the gates r, z, n.
        weight_hh: ``[3S, S]``.
        bias: ``(bias_ih, bias_hh)``, both ``[3S]``, or none.
        lengths: see :func:`extops.lltm_sequence`, also for ``batch_first``, ``reverse`` and the errors.

    Returns:
        ``output, h_n``: the hidden state after every step, ``[T, B, S]`` or ``[B, T, S]``, and the last one.
    """
    # The state is kept in the compute type between steps, and multiplied by the weights in its own dtype.
    arguments = input, weight_ih, weight_hh, *as_biases(GRU_CELL.name, bias), state, state
    output, h_n, _ = GRU_CELL(arguments, lengths, batch_first=batch_first, reverse=reverse)
    return output, h_n


def rnn_sequence(
    input: Tensor,
    state: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: tuple[Tensor, Tensor] | None = None,
    *,
    nonlinearity: str = "tanh",
    lengths: Tensor | None = None,
    batch_first: bool = False,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """One direction of a layer of :class:`torch.nn.RNN`. On a GPU each step is a GEMM and a kernel launch.

    Args:
        input: ``[T, B, I]``, or ``[B, T, I]`` with ``batch_first``.
        state: ``h_0``, the state before the first step, ``[B, S]``.
        weight_ih: ``[S, I]``.
        weight_hh: ``[S, S]``.
        bias: ``(bias_ih, bias_hh)``, both ``[S]``, or none.
        nonlinearity: ``"tanh"`` or ``"relu"``.
        lengths: see :func:`extops.lltm_sequence`, also for ``batch_first``, ``reverse`` and the errors.

    Returns:
        ``output, h_n``: the hidden state after every step, ``[T, B, S]`` or ``[B, T, S]``, and the last one.

    Raises:
        ValueError: there is no such ``nonlinearity``.
    """
    cell = rnn_cell("rnn_sequence", nonlinearity)
    arguments = input, weight_ih, weight_hh, *as_biases(cell.name, bias), state, state
    output, h_n, _ = cell(arguments, lengths, batch_first=batch_first, reverse=reverse)
    return output, h_n


def rnn_cell(op: str, nonlinearity: str) -> Cell:
    """The cell with that function."""
    if nonlinearity not in ("tanh", "relu"):
        raise ValueError(
            f"{op}: expected `nonlinearity` to be 'tanh' or 'relu', but got {nonlinearity!r}"
        )
    return CELLS[f"rnn_{nonlinearity}"]
