"""Whole sequences: the operators against a loop of cells, `extops.LLTMLayer` as nn.LSTM."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    pad_sequence,
)

import extops
import operators
from extops.binding._schemas import CELLS
from extops.ops import compositions
from operators import (
    GPU,
    LLTM_SEQUENCE,
    Operator,
    Tensors,
    by_device,
    by_dtype,
    by_sequence,
    needs_inductor,
    sequence,
    sequence_by_cells,
    upstream,
)
from test_precision import tf32

TIME, BATCH, FEATURES, STATE = 6, 3, 5, 4


def sequence_inputs(device: str, time: int = TIME) -> Tensors:
    """The input, h_0, c_0, weights and bias of one layer."""
    inputs = operators.sequence_inputs(time, BATCH, FEATURES, STATE)
    return tuple(tensor.to(device) for tensor in inputs)


def inputs_of(operator: Operator, device: str, time: int = TIME) -> tuple[Tensor, Tensors, Tensors]:
    """The input, the states before the first step and the parameters of one layer of any cell."""
    made = operators.SEQUENCE_INPUTS[operator.name](time, BATCH, FEATURES, STATE)
    input, *others = (tensor.to(device) for tensor in made)
    states = len(operator.results) - 1
    return input, tuple(others[:states]), tuple(others[states:])


by_reverse = pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])


@by_device
@by_sequence
def test_batch_first(operator: Operator, device: str) -> None:
    input, states, parameters = inputs_of(operator, device)
    output, *last = operator.function(input.transpose(0, 1), *states, *parameters, batch_first=True)
    expected = operator(input, *states, *parameters)
    torch.testing.assert_close((output.transpose(0, 1), *last), expected)


@by_device
@by_reverse
@pytest.mark.parametrize("batch_first", [False, True], ids=["time_first", "batch_first"])
@pytest.mark.parametrize("steps", [1, 4, 8], ids=lambda it: f"{it}_steps")
@pytest.mark.parametrize("lengths", [None, [7, 2, 0]], ids=["whole", "lengths"])
@by_sequence
def test_gates_in_chunks_of_steps(
    operator: Operator,
    lengths: list[int] | None,
    steps: int,
    batch_first: bool,
    reverse: bool,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Values, and gradients of first and second order, are those of all steps at once."""
    input, states, parameters = inputs_of(operator, device, 7)
    given = input.transpose(0, 1).contiguous() if batch_first else input
    options: dict[str, Any] = {"batch_first": batch_first, "reverse": reverse}
    if lengths is not None:
        options["lengths"] = torch.tensor(lengths, device=device)
    leaves = [x.requires_grad_() for x in (given, *states, *parameters)]

    def results(create_graph: bool) -> tuple[Tensors, Tensors, Tensors]:
        with torch.no_grad():
            without = operators.as_tuple(operator.function(*leaves, **options))
        outputs = operators.as_tuple(operator.function(*leaves, **options))
        towards = tuple(torch.full_like(x, i + 1.0) for i, x in enumerate(outputs))
        found = torch.autograd.grad(outputs, leaves, towards, create_graph=create_graph)
        return without, outputs, found

    expected, of_graph = results(False), results(True)
    gates = CELLS[operator.name.removesuffix("_sequence")].gates * STATE
    bytes_of_step = BATCH * gates * input.element_size()
    monkeypatch.setattr("extops.ops.sequence.CHUNK_BYTES", steps * bytes_of_step)
    found = results(False)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(results(True), of_graph)
    for outputs, of_all in zip(found[:2], expected[:2], strict=True):
        assert outputs[0].stride() == of_all[0].stride()
    output, *_ = operators.as_tuple(operator.function(*leaves, **options))
    output.mul_(2)  # which autograd refuses of some views


@by_device
def test_a_bias_may_change_before_the_backward_of_chunks(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of higher order then take the gates of all chunks."""
    input, *others = (x.requires_grad_() for x in sequence_inputs(device))
    wanted = [input, *others[:3]]

    def gradients() -> Tensors:
        bias = others[3].detach().clone().requires_grad_()
        output, *_ = sequence(input, *others[:3], bias)
        with torch.no_grad():
            bias.add_(1)
        return torch.autograd.grad(output.sin().sum(), wanted, create_graph=True)

    expected = gradients()
    monkeypatch.setattr("extops.ops.sequence.CHUNK_BYTES", 1)
    torch.testing.assert_close(gradients(), expected)


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["time_first", "batch_first"])
def test_no_more_memory_than_of_torch(
    take: Callable[[str], None], batch_first: bool, training: bool, device: str
) -> None:
    """In training what is saved for the backward, and the gradients of the gates of a few steps."""
    take("group")
    peaks = []
    shape = (64, 1000, 1024) if batch_first else (1000, 64, 1024)
    input = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=training)
    for library in (extops, torch.nn):
        layer = library.LSTM(1024, 1024, batch_first=batch_first, device=device, dtype=input.dtype)

        def run(layer: torch.nn.Module = layer) -> None:
            with torch.set_grad_enabled(training):
                output, _ = layer(input)
            if training:
                output.backward(output.detach())
                layer.zero_grad()
                input.grad = None

        run()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del layer, run
    ours, torchs = peaks
    assert ours <= torchs


@pytest.mark.parametrize("time", [1, 2])
@pytest.mark.parametrize("missing", [(None, torch.ones(16, 4)), (torch.ones(16, 3), None)])
def test_a_weight_that_is_missing(missing: tuple[Any, Any], time: int) -> None:
    state = torch.ones(2, 4), torch.ones(2, 4)
    name = "weight_ih" if missing[0] is None else "weight_hh"
    expected = f"lstm_sequence: expected `{name}` to be a torch.Tensor, but got NoneType"
    with torch.no_grad(), pytest.raises(TypeError, match=expected):
        extops.lstm_sequence(torch.ones(time, 2, 3), state, *missing)


@by_device
@by_sequence
def test_nothing_is_kept_for_no_backward(operator: Operator, device: str) -> None:
    """The operator has no gates then, and the same results."""
    input, states, parameters = inputs_of(operator, device)
    state = states if len(states) > 1 else states * 2
    call = getattr(torch.ops.extops, operator.name)
    given = input, *parameters, *state, torch.tensor([TIME, 2, 0], device=device)
    *results, gates, cells = call(*given, training=False)
    expected = call(*given)
    torch.testing.assert_close(tuple(results), expected[:3], rtol=0, atol=0)
    assert (*gates.shape,) == (0, *expected[3].shape[1:])
    assert (*cells.shape,) == (0, *expected[4].shape[1:])
    *_, gates, cells = call(input.clone().requires_grad_(), *given[1:], training=False)
    assert len(gates) == len(cells) == 0


@by_device
@by_reverse
@by_sequence
def test_one_step(operator: Operator, reverse: bool, device: str) -> None:
    input, states, parameters = inputs_of(operator, device, 1)
    results = operator.function(input, *states, *parameters, reverse=reverse)
    torch.testing.assert_close(results, operator.eager(input, *states, *parameters))


@by_device
@by_reverse
@pytest.mark.parametrize("batch_first", [False, True], ids=["time_first", "batch_first"])
@by_sequence
def test_no_steps(operator: Operator, batch_first: bool, reverse: bool, device: str) -> None:
    """The states and their gradients pass unchanged, and no other argument has an effect."""
    input, states, parameters = inputs_of(operator, device, 0)
    leaves = [x.requires_grad_() for x in (input, *states, *parameters)]
    steps = input.transpose(0, 1) if batch_first else input
    output, *last = operator.function(
        steps, *states, *parameters, batch_first=batch_first, reverse=reverse
    )
    assert output.shape == ((BATCH, 0, STATE) if batch_first else (0, BATCH, STATE))
    torch.testing.assert_close(last, [*states])
    towards = upstream(tuple(last))
    found = torch.autograd.grad(last, leaves, towards)
    zeros = (torch.zeros_like(x) for x in parameters)
    torch.testing.assert_close(found, (torch.zeros_like(input), *towards, *zeros))


@by_device
@pytest.mark.parametrize("wanted", ["input", "weights", "bias", "h", "c"])
def test_no_steps_within_a_graph(wanted: str, device: str) -> None:
    """Gradients that are to be differentiated are those of a plain backward: zeros where nothing has an effect."""
    names = ["input", "h", "c", "weights", "bias"]
    inputs = [
        x.requires_grad_(y == wanted)
        for x, y in zip(sequence_inputs(device, 0), names, strict=True)
    ]
    leaf = inputs[names.index(wanted)]
    results = sequence(*inputs)
    for used in (results, results[:1], results[1:]):
        towards = upstream(used)
        (plain,) = torch.autograd.grad(used, leaf, towards, retain_graph=True)
        (found,) = torch.autograd.grad(used, leaf, towards, create_graph=True)
        torch.testing.assert_close(found.detach(), plain)


@by_device
@pytest.mark.parametrize("batch_first", [False, True], ids=["time_first", "batch_first"])
@pytest.mark.parametrize(
    ("time", "batch", "state"), [(TIME, 1, 1), (TIME, 3, 1), (1, 3, 1), (TIME, 3, STATE)]
)
def test_expanded_tensors(
    time: int, batch: int, state: int, batch_first: bool, device: str
) -> None:
    """Rows that are one in memory, of one column too: an input, and what sum() sends to the output."""
    _, *others = (x.to(device) for x in operators.sequence_inputs(time, batch, 1, state))
    leading = (batch, time) if batch_first else (time, batch)
    row = torch.randn(leading[0], 1, 1, device=device, dtype=others[0].dtype)
    for expanded in (row.expand(*leading, 1), row[:1].expand(*leading, 1)):
        dense = expanded.contiguous().requires_grad_()
        expected = sequence(dense, *others, batch_first=batch_first)
        torch.testing.assert_close(sequence(expanded, *others, batch_first=batch_first), expected)
        (of_sum,) = torch.autograd.grad(expected[0].sum(), dense, retain_graph=True)
        (of_ones,) = torch.autograd.grad(expected[0], dense, torch.ones_like(expected[0]))
        torch.testing.assert_close(of_sum, of_ones)


@by_device
@by_sequence
def test_lengths(operator: Operator, device: str) -> None:
    """Each row stops at its own length: zeros come after it, and its state stays."""
    input, states, parameters = inputs_of(operator, device)
    lengths = [TIME, 2, 0]
    output, *last = operator.function(
        input, *states, *parameters, lengths=torch.tensor(lengths, device=device)
    )
    for row, length in enumerate(lengths):
        alone = slice(row, row + 1)
        expected, *last_alone = operator(
            input[:length, alone], *(x[alone] for x in states), *parameters
        )
        torch.testing.assert_close(output[:length, alone], expected)
        assert bool((output[length:, alone] == 0).all())
        torch.testing.assert_close([x[alone] for x in last], last_alone)


INTEGERS = [
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
]


@by_device
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_lengths_of_any_integer_dtype(dtype: torch.dtype, device: str) -> None:
    """More steps than small integer types can count to."""
    input, *others = sequence_inputs(device, 300)
    lengths = torch.tensor([100, 127, 0])
    expected = sequence(input, *others, lengths=lengths.to(device))
    output, *last = sequence(input, *others, lengths=lengths.to(dtype).to(device))
    assert (output != 0).any(2).sum(0).tolist() == lengths.tolist()
    torch.testing.assert_close((output, *last), expected, rtol=0, atol=0)


@by_device
def test_lengths_on_the_cpu(device: str) -> None:
    """Where torch.nn.utils.rnn keeps them."""
    inputs = sequence_inputs(device)
    lengths = torch.tensor([TIME, 2, 0])
    expected = sequence(*inputs, lengths=lengths.to(device))
    torch.testing.assert_close(sequence(*inputs, lengths=lengths), expected, rtol=0, atol=0)


@by_device
@pytest.mark.parametrize("wrong", [[TIME + 1, 2, 0], [TIME, -1, 0], [2**62, 2, 0]], ids=str)
def test_lengths_out_of_range(wrong: list[int], device: str) -> None:
    expected = f"lltm_sequence: expected `lengths` from 0 to {TIME}, the number of steps of `input`"
    inputs = sequence_inputs(device)
    with pytest.raises(RuntimeError, match=re.escape(f"{expected}, but got {wrong}")):
        sequence(*inputs, lengths=torch.tensor(wrong))


def test_a_length_that_no_signed_integer_holds() -> None:
    wrong = [TIME, 2, 2**63 + 2]
    with pytest.raises(
        RuntimeError,
        match=re.escape(
            f"expected `lengths` from 0 to 6, the number of steps of `input`, but got {wrong}"
        ),
    ):
        sequence(*sequence_inputs("cpu"), lengths=torch.tensor(wrong, dtype=torch.uint64))


@by_device
def test_lengths_out_of_range_within_a_gradient(device: str) -> None:
    """Where tensors that are made have no values of their own in torch 2.4."""
    input, *others = sequence_inputs(device)
    lengths = torch.tensor([TIME + 1, 2, 0])

    def total(input: Tensor) -> Tensor:
        return sequence(input, *others, lengths=lengths)[0].sum()

    with pytest.raises(
        RuntimeError,
        match=re.escape(f"from 0 to {TIME}, the number of steps of `input`, but got [7, 2, 0]"),
    ):
        torch.func.grad(total)(input)


@pytest.mark.parametrize("wrong", [[TIME + 1, 2, 0], [TIME, -1, 0]], ids=str)
def test_traced_lengths_out_of_range(wrong: list[int]) -> None:
    """torch.jit.trace leaves out assertions, since no result depends on them."""
    inputs = sequence_inputs("cpu")
    traced = torch.jit.trace(
        lambda lengths, *inputs: sequence(*inputs, lengths=lengths),
        (torch.tensor([TIME, 2, 0]), *inputs),
    )
    lengths = torch.tensor([1, 5, 3])
    torch.testing.assert_close(traced(lengths, *inputs), sequence(*inputs, lengths=lengths))
    with pytest.raises(RuntimeError, match="index out of range"):
        traced(torch.tensor(wrong), *inputs)


@by_device
def test_lengths_of_each_sample_of_a_vmap(device: str) -> None:
    inputs = sequence_inputs(device)

    def outputs(lengths: Tensor) -> Tensor:
        return sequence(*inputs, lengths=lengths)[0]

    lengths = torch.tensor([[TIME, 2, 0], [1, 3, 5]], device=device)
    expected = torch.stack([outputs(of_one) for of_one in lengths])
    torch.testing.assert_close(torch.vmap(outputs)(lengths), expected)
    if device == "cpu":
        with pytest.raises(RuntimeError, match=r"from 0 to 6.*got \[\[7, 3, 1\], \[2, 4, 6\]\]"):
            torch.vmap(outputs)(lengths + 1)


@by_device
@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_lengths_in_a_compiled_call(backend: str, device: str) -> None:
    if backend == "inductor":
        needs_inductor()
    inputs = sequence_inputs(device)

    def outputs(lengths: Tensor) -> Tensor:
        return sequence(*inputs, lengths=lengths)[0]

    compiled = torch.compile(outputs, fullgraph=True, backend=backend)
    lengths = torch.tensor([TIME, 2, 0], dtype=torch.int8, device=device)
    torch.testing.assert_close(compiled(lengths), outputs(lengths))
    if device == "cpu":
        # Inductor of torch 2.4 leaves the message to the next check.
        expected = "expected `lengths` from 0 to the number of steps|out of bounds"
        with pytest.raises(RuntimeError, match=expected):
            compiled(lengths + 1)


# What no sum hides: zero times these is not zero, or the product overflows. The number is of float32 and stands for the
# largest of each dtype.
NAN = float("nan")
GARBAGE = [NAN, float("inf"), -float("inf"), 3e38]


@by_dtype
@by_device
@by_reverse
@pytest.mark.parametrize("garbage", GARBAGE, ids=str)
@by_sequence
def test_garbage_in_the_padding(
    operator: Operator, garbage: float, reverse: bool, device: str, dtype: torch.dtype
) -> None:
    """It reaches no output and no gradient, and its own gradient is zero."""
    input, states, parameters = inputs_of(operator, device)
    input, *others = (tensor.to(dtype) for tensor in (input, *states, *parameters))
    if math.isfinite(garbage):
        garbage = torch.finfo(dtype).max
    lengths = torch.tensor([TIME, 2, 0], device=device)
    padding = (torch.arange(TIME, device=device)[:, None] >= lengths)[:, :, None]

    def run(*inputs: Tensor) -> Tensors:
        return operator.function(*inputs, lengths=lengths, reverse=reverse)

    clean = input.masked_fill(padding, 0), *others
    towards = operators.upstream(run(*clean))
    expected = operators.gradients(run, clean, towards)
    found = operators.gradients(run, (input.masked_fill(padding, garbage), *others), towards)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert bool((found[1][0] * padding == 0).all())


@by_dtype
@by_device
def test_the_state_of_an_empty_row(device: str, dtype: torch.dtype) -> None:
    """A row without a step returns its state as it is, and adds nothing to any gradient."""
    input, h, c, weights, bias = (tensor.to(dtype) for tensor in sequence_inputs(device))
    lengths = torch.tensor([TIME, 2, 0], device=device)

    def run(*inputs: Tensor) -> Tensors:
        return sequence(*inputs, lengths=lengths)

    garbage = [state.index_fill(0, torch.tensor(2, device=device), NAN) for state in (h, c)]
    towards = operators.upstream(run(input, h, c, weights, bias))
    (output, *expected), gradients = operators.gradients(run, (input, h, c, weights, bias), towards)
    found, found_gradients = operators.gradients(run, (input, *garbage, weights, bias), towards)
    torch.testing.assert_close((found[0], *found_gradients), (output, *gradients), rtol=0, atol=0)
    for state, unharmed in zip(found[1:], expected, strict=True):
        torch.testing.assert_close(state[:2], unharmed[:2], rtol=0, atol=0)
        assert bool(state[2].isnan().all())


@by_device
@pytest.mark.parametrize("weight", [math.inf, math.nan], ids=str)
def test_gradient_of_the_padding_beside_weights_that_are_not_finite(
    weight: float, device: str
) -> None:
    input, h, c, weights, bias = sequence_inputs(device)
    input.requires_grad_()
    weights[1, -1] = weight
    lengths = torch.tensor([TIME, 2, 0])
    output, _, _ = sequence(input, h, c, weights, bias, lengths=lengths)
    (found,) = torch.autograd.grad(output.sum(), input)
    for row, length in enumerate(lengths.tolist()):
        assert bool((found[length:, row] == 0).all())


@by_device
@by_reverse
def test_gates_that_only_the_input_keeps_finite(reverse: bool, device: str) -> None:
    """Without it, the candidate of float16 is infinite: so it would be beyond a row's length."""
    weights = torch.tensor([[0.0, 0.0], [0.0, 0.0], [30000.0, -100.0]])
    bias = torch.tensor([0.0, 0.0, 60000.0])
    input = torch.full((2, 2, 1), 870.0)
    input[1, 1] = 0.0
    state = torch.full((2, 1), 0.9)
    inputs = [tensor.to(device).half() for tensor in (input, state, state, weights, bias)]
    lengths = torch.tensor([2, 1], device=device)

    def run(*inputs: Tensor) -> Tensors:
        return sequence(*inputs, lengths=lengths, reverse=reverse)

    towards = operators.upstream(run(*inputs))
    results, gradients = operators.gradients(run, tuple(inputs), towards)
    for tensor in (*results, *gradients):
        assert bool(tensor.isfinite().all())


def test_errors() -> None:
    input, h, c, weights, bias = sequence_inputs("cpu")
    with pytest.raises(RuntimeError, match=r"^lltm_sequence: .*`input`.*3 dimensions.*got 2"):
        sequence(input[0], h, c, weights, bias)
    with pytest.raises(RuntimeError, match=r"^lltm_sequence: .*`c_0`.*\[3, 4\].*got \[2, 4\]"):
        sequence(input, h, c[:2], weights, bias)
    with pytest.raises(RuntimeError, match=r"^lltm_sequence: .*`weights`.*\[12, 9\].*\[12, 8\]"):
        sequence(input, h, c, weights[:, 1:], bias)
    with pytest.raises(RuntimeError, match=r"^lltm_sequence: .*`bias`.*float64.*got .*float32"):
        sequence(input, h, c, weights, bias.float())
    with pytest.raises(RuntimeError, match=r"^lltm_sequence: .*`lengths`.*\[3\].*got \[2\]"):
        sequence(input, h, c, weights, bias, lengths=torch.tensor([1, 2]))
    with pytest.raises(RuntimeError, match=r"^lltm_sequence: .*`lengths`.*integer.*float32"):
        sequence(input, h, c, weights, bias, lengths=torch.ones(3))
    with pytest.raises(RuntimeError, match=r"^lltm_sequence: .*`lengths`.*device cpu.*got meta"):
        sequence(input, h, c, weights, bias, lengths=torch.ones(3, device="meta").long())
    with pytest.raises(TypeError, match=r"^lltm_sequence: .*`lengths`.*torch.Tensor.*list"):
        sequence(input, h, c, weights, bias, lengths=[1, 2, 3])


# -- values and gradients of each way to compute them ---------------------------------------------

# State sizes with remainders for every vector and tile, and those for which GPUs have kernels of all steps; batches of
# one row, of a tile, of several and with a remainder.
ODD = [(1, 5), (13, 2), (33, 17), (127, 3)]
SIZES = [(state, batch) for state in (64, 128, 200, 256, 512, 1024) for batch in (1, 16, 64, 130)]
SIZES += [(201, 9), (509, 17)]
# Small states, and more samples than blocks run at the same time.
SIZES += [(state, 300) for state in (63, 64, 127, 128)]
OPTIONS_OF_A_CALL: list[dict[str, Any]] = [
    {},
    {"reverse": True, "batch_first": True},
    {"lengths": True, "batch_first": True},
    {"lengths": True, "reverse": True},
]
by_options_of_a_call = pytest.mark.parametrize(
    "options", OPTIONS_OF_A_CALL, ids=lambda it: "-".join(it) or "plain"
)


def lengths_of(time: int, batch: int, device: str) -> Tensor:
    """Some rows are valid to the end, some not at all."""
    return (time - torch.arange(batch, device=device)) % (time + 1)


def compared(
    operator: Operator,
    sizes: tuple[int, int, int, int],
    device: str,
    dtype: torch.dtype,
    options: dict[str, Any],
    spread: float = 1.0,
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """The name of each result and each gradient, its value, the loop's and that in float64."""
    time, batch, _, _ = sizes
    made = operators.SEQUENCE_INPUTS[operator.name](*sizes, spread)
    inputs = tuple(x.to(device, dtype) for x in made)
    if options.get("lengths"):
        options = {**options, "lengths": lengths_of(time, batch, device)}
    if options.get("batch_first"):
        inputs = inputs[0].transpose(0, 1).contiguous(), *inputs[1:]
    ours, loop = (functools.partial(f, **options) for f in (operator.function, operator.reference))
    # Gradients add up over time: those of many steps are beyond float16 otherwise.
    towards = tuple(x / time**0.5 for x in upstream(ours(*inputs)))
    doubles = [tuple(x.double() for x in tensors) for tensors in (inputs, towards)]
    found = [
        operators.gradients(ours, inputs, towards),
        operators.gradients(loop, inputs, towards),
        operators.gradients(loop, *doubles),
    ]
    names = *operator.results, *operator.arguments
    values = ([x.detach() for x in (*results, *grads)] for results, grads in found)
    yield from zip(names, *values, strict=True)


def assert_right(operator: Operator, *problem: Any, ulps: float | None = None) -> None:
    for values in compared(operator, *problem):
        operators.assert_as_accurate_as_eager(*values, ulps or operator.ulps)


@by_dtype
@by_device
@by_options_of_a_call
@pytest.mark.parametrize("size", ODD, ids=str)
@by_sequence
def test_odd_sizes(
    operator: Operator,
    size: tuple[int, int],
    options: dict[str, Any],
    device: str,
    dtype: torch.dtype,
) -> None:
    state, batch = size
    assert_right(operator, (5, batch, 7, state), device, dtype, options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=operators.dtype_name)
@by_options_of_a_call
@pytest.mark.parametrize(("time", "batch"), [(1, 1), (3, 1), (4, 5), (2, 40)])
@by_sequence
def test_few_steps_on_a_cpu(
    operator: Operator, time: int, batch: int, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """Too few steps to pack the weights for: each step is a library GEMM, and a kernel on several threads."""
    assert_right(operator, (time, batch, 7, 200), "cpu", dtype, options)


@by_dtype
@by_device
@pytest.mark.parametrize(("features", "state"), [(1, 4), (4, 1)])
@by_sequence
def test_many_rows_of_one_column(
    operator: Operator, features: int, state: int, device: str, dtype: torch.dtype
) -> None:
    """Libraries have special kernels for matrices of one column."""
    # The gradient of a weight is a sum over all 6,000 rows, where eager adds two of 3,000: errors grow with the root.
    assert_right(operator, (2, 3000, features, state), device, dtype, {}, ulps=32)


@by_options_of_a_call
@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("precision", ["float64", "float32", "tf32", "bfloat16", "float16"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@by_sequence
def test_sizes_of_every_kernel(
    operator: Operator, size: tuple[int, int], precision: str, options: dict[str, Any], device: str
) -> None:
    state, batch = size
    sizes = (4, batch, 40, state)
    if precision != "tf32":
        assert_right(operator, sizes, device, getattr(torch, precision), options)
        return
    # A library does not always use TF32 where it may. Eager's float16 rounds to as many bits.
    with tf32(allowed=True):
        values = [*compared(operator, sizes, device, torch.float32, options)]
    coarse = [*compared(operator, sizes, device, torch.float16, options)]
    for (name, ours, eager, exact), (_, _, eager_half, exact_half) in zip(
        values, coarse, strict=True
    ):
        error, eager_error, half_error = (
            (x.double() - y).abs().max().item()
            for x, y in ((ours, exact), (eager, exact), (eager_half, exact_half))
        )
        assert error <= 1.5 * max(eager_error, half_error), name


@pytest.mark.every(3, "reverse", "dtype")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@by_device
@by_reverse
@pytest.mark.parametrize(
    "operator",
    [
        pytest.param(
            operator, id=operator.name, marks=() if operator is LLTM_SEQUENCE else pytest.mark.slow
        )
        for operator in operators.SEQUENCES
    ],
)
def test_a_thousand_steps(
    operator: Operator, reverse: bool, device: str, dtype: torch.dtype
) -> None:
    """Errors travel from step to step. With larger weights they would grow until they have nothing to do with where
    they began, and their size be a matter of luck. As it is, luck is a factor of 0.5 to 1.9 in strict float32, by data;
    a state or a sum in a narrower type would be a factor of hundreds.
    """
    sizes, options = (1000, 16, 5, 33), {"reverse": reverse}
    for name, ours, eager, exact in compared(operator, sizes, device, dtype, options, 0.05):
        error, eager_error = ((x.double() - exact).norm().item() for x in (ours, eager))
        assert error <= 3 * eager_error, f"{name}: error {error:.3g}, eager's {eager_error:.3g}"


@pytest.mark.every(2, "options", "operator")
@by_device
@by_options_of_a_call
@by_sequence
def test_gradients_of_any_order(
    operator: Operator, options: dict[str, Any], device: str, thorough: bool
) -> None:
    made = operators.SEQUENCE_INPUTS[operator.name](3, 2, 1, 2)
    inputs = tuple(x.to(device).requires_grad_() for x in made)
    if options.get("lengths"):
        options = {**options, "lengths": torch.tensor([2, 1], device=device)}
    if options.get("batch_first"):
        inputs = inputs[0].detach().transpose(0, 1).contiguous().requires_grad_(), *inputs[1:]
    run = functools.partial(operator.function, **options)
    assert gradcheck(run, inputs, check_forward_ad=True)
    fast = not thorough  # all elements at once
    assert gradgradcheck(run, inputs, check_fwd_over_rev=True, fast_mode=fast)


@by_dtype
@by_device
@by_options_of_a_call
@by_sequence
def test_same_bits_on_every_run(
    operator: Operator, options: dict[str, Any], device: str, dtype: torch.dtype
) -> None:
    made = operators.SEQUENCE_INPUTS[operator.name](6, 33, 40, 128)
    inputs = tuple(x.to(device, dtype) for x in made)
    if options.get("batch_first"):
        inputs = inputs[0].transpose(0, 1).contiguous(), *inputs[1:]
    if options.get("lengths"):
        options = {**options, "lengths": lengths_of(6, 33, device)}
    run = functools.partial(operator.function, **options)
    towards = upstream(run(*inputs))
    first, *others = (operators.gradients(run, inputs, towards) for _ in range(3))
    for other in others:
        for tensors, same in zip(first, other, strict=True):
            assert all(map(torch.equal, tensors, same))


@by_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=operators.dtype_name)
def test_the_state_of_a_long_sequence_within_a_transform(dtype: torch.dtype, device: str) -> None:
    """In float32 there too: in 16 bits a running sum stops to grow."""
    inputs = [x.to(device, dtype) for x in operators.sequence_inputs(1000, 3, 4, 8)]
    inputs[-1] = inputs[-1] + torch.tensor([0.0] * 16 + [0.3] * 8, device=device, dtype=dtype)

    def last_cell(input: Tensor, bias: Tensor) -> Tensor:
        others = (x.to(input.dtype) for x in inputs[1:-1])
        return sequence(input, *others, bias)[2]

    input, bias = inputs[0], inputs[-1].requires_grad_()
    exact = last_cell(input.double(), bias.double())
    (exact_gradient,) = torch.autograd.grad(exact.sum(), bias)
    batched = torch.vmap(last_cell, in_dims=(0, None))(input.unsqueeze(0), bias)[0]
    torch.testing.assert_close(batched.double(), exact, rtol=2e-2, atol=2e-2)
    for create_graph in (False, True):
        loss = last_cell(input, bias).sum()
        (found,) = torch.autograd.grad(loss, bias, create_graph=create_graph)
        error = (found - exact_gradient).double().norm() / exact_gradient.double().norm()
        assert error < 2e-2, create_graph


@by_device
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_lengths_changed_before_the_backward(dtype: torch.dtype, device: str) -> None:
    with torch.inference_mode():
        made = torch.tensor([TIME, 2, 0], dtype=dtype, device=device)
    inputs = [x.requires_grad_() for x in sequence_inputs(device)]
    expected = torch.autograd.grad(sequence(*inputs, lengths=made)[0].sum(), inputs)
    lengths = made.clone()
    output, _, _ = sequence(*inputs, lengths=lengths)
    lengths.zero_()
    torch.testing.assert_close(torch.autograd.grad(output.sum(), inputs), expected)


@by_device
def test_all_results_of_the_registered_operator_beyond_lengths(device: str) -> None:
    """Zeros, of which none has a gradient, in a plain call and within a transform."""
    input, h, c, weights, bias = sequence_inputs(device)
    lengths = torch.tensor([TIME, 2, 0], device=device)

    def run(bias: Tensor) -> list[Tensor]:
        results = torch.ops.extops.lltm_sequence(input, weights, bias, h, c, lengths)
        beyond = ~compositions.valid_steps(lengths, TIME).unsqueeze(2)
        return [torch.where(beyond, x, 0) for x in (results[0], *results[3:])]

    within_a_transform, pull_back = torch.func.vjp(run, bias)
    (gradient,) = pull_back([torch.ones_like(x) for x in within_a_transform])
    assert all(bool((x == 0).all()) for x in (*run(bias), *within_a_transform, gradient))


@by_device
def test_batch_first_is_not_copied(device: str) -> None:
    """Nor are the results: they are laid out like the input."""
    input, h, c, weights, bias = (x.to(device).float() for x in sequence_inputs(device))
    input = input.transpose(0, 1).contiguous().requires_grad_()
    sequence(input, h, c, weights, bias, batch_first=True)  # what is loaded once
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        output, *last = sequence(input, h, c, weights, bias, batch_first=True)
    assert not {"aten::clone", "aten::copy_"} & {event.key for event in profile.key_averages()}
    (gradient,) = torch.autograd.grad([output, *last], input, upstream((output, *last)))
    assert output.is_contiguous() and gradient.is_contiguous()


@by_device
@pytest.mark.parametrize("has_backward", [True, False])
def test_lengths_are_copied_for_a_backward_only(has_backward: bool, device: str) -> None:
    input, h, c, weights, bias = sequence_inputs(device)
    lengths = torch.tensor([TIME, 2, 0], device=device)
    with (
        torch.set_grad_enabled(has_backward),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
    ):
        sequence(input, h, c, weights, bias, lengths=lengths)
    copies = [event for event in profile.key_averages() if event.key == "aten::_to_copy"]
    assert len(copies) == has_backward


@by_device
def test_what_is_kept_for_the_backward(device: str) -> None:
    """The input, the hidden state and the weights; for each step the output, the cell state and three gates."""
    inputs = tuple(x.requires_grad_() for x in sequence_inputs(device))
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        results = sequence(*inputs)
    input, h, _, weights, _ = inputs
    others = input, h, weights
    assert sum(kept.values()) == sum(x.numel() for x in others) + 5 * TIME * BATCH * STATE
    del results


@by_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype, device: str) -> None:
    """Computed in the lower precision; gradients have the dtype of their arguments."""
    leaves = tuple(x.float().requires_grad_() for x in sequence_inputs(device))
    with torch.autocast(device, dtype):
        results = sequence(*leaves)
    expected = sequence(*(x.detach().to(dtype) for x in leaves))
    torch.testing.assert_close(results, expected, rtol=0, atol=0)
    for gradient in torch.autograd.grad(results, leaves, upstream(results)):
        assert gradient.dtype == torch.float32


@pytest.mark.parametrize(
    "wrong",
    [
        torch.ones(BATCH, dtype=torch.int32),
        torch.ones(BATCH),
        torch.ones(BATCH + 1, dtype=torch.int64),
        torch.ones(BATCH, 1, dtype=torch.int64),
        torch.ones(BATCH, dtype=torch.int64, device="meta"),
    ],
    ids=["int32", "float32", "longer", "two_dimensions", "device"],
)
def test_lengths_of_the_registered_operator(wrong: Tensor) -> None:
    input, h, c, weights, bias = sequence_inputs("cpu")
    with pytest.raises(RuntimeError, match="`lengths`"):
        torch.ops.extops.lltm_sequence(input, weights, bias, h, c, wrong)


# -- as one operator, for any number of steps ------------------------------------------------------


@by_device
@by_options_of_a_call
@pytest.mark.usefixtures("dynamo")
def test_compiled_for_any_number_of_steps(options: dict[str, Any], device: str) -> None:
    """One compilation, forward and backward, of one call of the operator, whatever the time and the batch."""
    targets: list[object] = []

    def backend(module: torch.fx.GraphModule, example: Any) -> Any:
        targets.extend(node.target for node in module.graph.nodes)
        return torch._dynamo.lookup_backend("aot_eager")(module, example)

    def run(lengths: Tensor | None, *inputs: Tensor) -> Tensors:
        return sequence(*inputs, **{**options, "lengths": lengths})

    compiled = torch.compile(run, fullgraph=True, backend=backend, dynamic=True)
    torch._dynamo.utils.counters.clear()
    for time, batch in ((6, 3), (7, 2), (40, 8)):  # of which none is a size of the others
        inputs = tuple(x.to(device) for x in operators.sequence_inputs(time, batch, 5, 4))
        if options.get("batch_first"):
            inputs = inputs[0].transpose(0, 1).contiguous(), *inputs[1:]
        lengths = lengths_of(time, batch, device) if options.get("lengths") else None
        towards = upstream(run(lengths, *inputs))
        actual, expected = (
            operators.gradients(functools.partial(f, lengths), inputs, towards)
            for f in (compiled, run)
        )
        torch.testing.assert_close(actual, expected)
    assert targets.count(torch.ops.extops.lltm_sequence.default) == 1
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@by_device
@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("batch_first", [False, True], ids=["time_first", "batch_first"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_compiled_for_steps_that_data_selects(backend: str, batch_first: bool, device: str) -> None:
    """The compiler does not know their number, which may be zero."""
    if backend == "inductor":
        needs_inductor()
    module = extops.LLTMLayer(5, 4, bidirectional=True, batch_first=batch_first, device=device)
    input = torch.randn(6, 3, 5, device=device, requires_grad=True)

    def run(input: Tensor, selected: Tensor) -> Tensor:
        steps = input[selected]
        return module(steps.transpose(0, 1) if batch_first else steps)[0]

    compiled = torch.compile(run, fullgraph=True, backend=backend)
    leaves = input, *module.parameters()
    for steps in (2, 0, 6):
        selected = torch.arange(6, device=device) < steps
        expected, found = run(input, selected), compiled(input, selected)
        towards = torch.randn_like(expected)
        gradients = [torch.autograd.grad(output, leaves, towards) for output in (expected, found)]
        torch.testing.assert_close((found, *gradients[1]), (expected, *gradients[0]))


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("batch_first", [False, True], ids=["time_first", "batch_first"])
def test_exported_for_any_number_of_steps(batch_first: bool) -> None:
    module = extops.LLTMLayer(FEATURES, STATE, bidirectional=True, batch_first=batch_first)
    time, batch = (torch.export.Dim(name, min=2, max=1000) for name in ("time", "batch"))
    leading = {0: batch, 1: time} if batch_first else {0: time, 1: batch}
    example = (torch.randn(5, 7, FEATURES),)
    program = torch.export.export(module, example, dynamic_shapes=(leading,)).module()
    for shape in ((3, 4), (11, 2)):
        input = torch.randn(*shape, FEATURES)
        torch.testing.assert_close(program(input), module(input))


@pytest.mark.parametrize("batch_first", [False, True], ids=["time_first", "batch_first"])
def test_traced_for_any_number_of_steps(batch_first: bool) -> None:
    def run(*inputs: Tensor) -> Tensors:
        return sequence(*inputs, batch_first=batch_first, reverse=True)

    def inputs(time: int) -> Tensors:
        input, *others = sequence_inputs("cpu", time)
        return input.transpose(0, 1) if batch_first else input, *others

    traced = torch.jit.trace(run, inputs(4))
    for time in (2, 9):
        others = inputs(time)
        torch.testing.assert_close(traced(*others), run(*others))


# -- the module, shaped like nn.LSTM -------------------------------------------------------------

OPTIONS = [
    {},
    {"num_layers": 2},
    {"bidirectional": True},
    {"num_layers": 2, "bidirectional": True, "batch_first": True},
]
by_options = pytest.mark.parametrize("options", OPTIONS, ids=lambda it: "-".join(it) or "plain")


def layer(device: str, **options: object) -> extops.LLTMLayer:
    return extops.LLTMLayer(FEATURES, STATE, device=device, dtype=torch.float64, **options)


def layer_input(device: str, module: extops.LLTMLayer) -> Tensor:
    leading = (BATCH, TIME) if module.batch_first else (TIME, BATCH)
    return torch.randn(*leading, FEATURES, dtype=torch.float64, device=device)


@by_device
@by_options
def test_shapes_are_those_of_lstm(options: dict[str, object], device: str) -> None:
    module = layer(device, **options)
    lstm = torch.nn.LSTM(FEATURES, STATE, device=device, dtype=torch.float64, **options)
    input = layer_input(device, module)
    ours, theirs = module(input), lstm(input)
    assert ours[0].shape == theirs[0].shape
    assert [state.shape for state in ours[1]] == [state.shape for state in theirs[1]]
    state = tuple(torch.randn_like(tensor) for tensor in theirs[1])
    assert module(input, state)[0].shape == lstm(input, state)[0].shape


def test_positional_arguments_are_those_of_lstm() -> None:
    theirs = list(inspect.signature(torch.nn.RNNBase).parameters.values())[1:8]
    ours = [
        x
        for x in inspect.signature(extops.LLTMLayer).parameters.values()
        if x.kind != x.KEYWORD_ONLY
    ]
    assert [x.name for x in ours[2:]] == [x.name for x in theirs[2:]]
    assert [x.default for x in ours] == [x.default for x in theirs]


@by_device
@by_options
def test_without_bias(options: dict[str, object], device: str) -> None:
    """No parameters, as in nn.LSTM, and the values of zeros."""
    module = layer(device, bias=False, **options)
    twin = layer(device, **options)
    assert [name for name in twin.state_dict() if "weights" in name] == list(module.state_dict())
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    twin.load_state_dict(module.state_dict(), strict=False)
    input = layer_input(device, module)
    torch.testing.assert_close(module(input), twin(input))


@by_device
def test_layers_and_directions(device: str) -> None:
    """Two layers of two directions, written out cell by cell."""
    module = layer(device, num_layers=2, bidirectional=True)
    input = layer_input(device, module)
    h, c = (torch.randn(4, BATCH, STATE, dtype=torch.float64, device=device) for _ in range(2))
    parameters = dict(module.named_parameters())
    current, last = input, []
    for number in range(2):
        outputs = []
        for direction, suffix in enumerate((f"_l{number}", f"_l{number}_reverse")):
            place = 2 * number + direction
            steps = current.flip(0) if direction else current
            output, h_n, c_n = sequence_by_cells(
                steps,
                h[place],
                c[place],
                parameters[f"weights{suffix}"],
                parameters[f"bias{suffix}"],
            )
            outputs.append(output.flip(0) if direction else output)
            last.append((h_n, c_n))
        current = torch.cat(outputs, dim=2)
    output, states = module(input, (h, c))
    torch.testing.assert_close(output, current)
    torch.testing.assert_close(states, tuple(torch.stack(each) for each in zip(*last, strict=True)))


@by_device
@by_options
@pytest.mark.parametrize("enforce_sorted", [True, False], ids=["sorted", "unsorted"])
def test_packed_sequences(enforce_sorted: bool, options: dict[str, object], device: str) -> None:
    """Each sequence of a packed batch gives what it gives alone."""
    module = layer(device, **options)
    lengths = [6, 4, 1] if enforce_sorted else [4, 1, 6]
    rows = [torch.randn(length, FEATURES, dtype=torch.float64, device=device) for length in lengths]
    count = module.num_layers * (1 + module.bidirectional)
    h, c = (torch.randn(count, 3, STATE, dtype=torch.float64, device=device) for _ in range(2))
    packed, (h_n, c_n) = module(pack_sequence(rows, enforce_sorted), (h, c))
    assert isinstance(packed, PackedSequence)
    output, found_lengths = pad_packed_sequence(packed, batch_first=True)
    assert found_lengths.tolist() == lengths
    expected = []
    for row, steps in enumerate(rows):
        alone, (h_1, c_1) = module(steps, (h[:, row], c[:, row]))  # unbatched, as nn.LSTM takes it
        expected.append(alone)
        torch.testing.assert_close([h_n[:, row], c_n[:, row]], [h_1, c_1])
    torch.testing.assert_close(output, pad_sequence(expected, batch_first=True))


@pytest.mark.parametrize("rows", [4, 6])
def test_packed_sequence_whose_sizes_do_not_fit(rows: int) -> None:
    packed = PackedSequence(torch.randn(rows, FEATURES), torch.tensor([3, 2]))
    with pytest.raises(RuntimeError, match=f"`input.data` to have 5 rows, .* but got {rows}"):
        extops.LLTMLayer(FEATURES, 4)(packed)


@pytest.mark.parametrize("sizes", [[3, 4, 1], [2, 0, 3]], ids=str)
def test_packed_sequence_whose_sizes_grow(sizes: list[int]) -> None:
    packed = PackedSequence(torch.randn(sum(sizes), FEATURES), torch.tensor(sizes))
    expected = f"`input.batch_sizes` not to grow from one step to the next, nor to be negative, but got {sizes}"
    with pytest.raises(RuntimeError, match=re.escape(expected)):
        extops.LLTMLayer(FEATURES, 4)(packed)


@pytest.mark.parametrize("shape", [(5,), (5, FEATURES, 1)], ids=str)
def test_packed_sequence_of_other_dimensions(shape: tuple[int, ...]) -> None:
    packed = PackedSequence(torch.randn(shape), torch.tensor([3, 2]))
    expected = "`input.data` to have 2 dimensions [rows, input_features], but got"
    with pytest.raises(RuntimeError, match=f"{re.escape(expected)}.*{re.escape(str(list(shape)))}"):
        extops.LLTMLayer(FEATURES, 4)(packed)


def test_packed_sequences_beside_another_default_device() -> None:
    module = layer("cpu")
    packed = pack_sequence([torch.randn(3, FEATURES, dtype=torch.float64)])
    expected, _ = module(packed)
    with torch.device("meta"):
        found, _ = module(packed)
    torch.testing.assert_close(found.data, expected.data)


@by_device
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_traced_packed_sequences(device: str) -> None:
    """For other lengths and another batch, also where the count of all rows is the same."""

    class Packed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer(device)

        def forward(self, input: Tensor, lengths: Tensor) -> Tensors:
            output, (h, c) = self.layer(pack_padded_sequence(input, lengths))
            return output.data, h, c

    def inputs(lengths: list[int]) -> Tensors:
        padded = torch.randn(lengths[0], len(lengths), FEATURES, dtype=torch.float64, device=device)
        return padded, torch.tensor(lengths)

    module = Packed()
    traced = torch.jit.trace(module, inputs([5, 2]))
    for lengths in ([5, 2], [3, 2, 2], [6], [4, 4, 4, 1]):
        others = inputs(lengths)
        torch.testing.assert_close(traced(*others), module(*others))


@pytest.mark.parametrize("shape", [(2, STATE), (1, 1, STATE), ()], ids=str)
def test_a_state_of_another_shape_in_a_call_without_a_batch(shape: tuple[int, ...]) -> None:
    expected = f"expected `h_0` to have shape [D*num_layers, state_size] = [1, {STATE}], but got {list(shape)}"
    with pytest.raises(RuntimeError, match=re.escape(expected)):
        extops.LLTMLayer(FEATURES, STATE)(torch.zeros(TIME, FEATURES), (torch.zeros(shape),) * 2)


def test_dropout_of_packed_rows_draws_for_them_alone() -> None:
    """So that other random numbers are those of a run that packs otherwise."""
    layer = extops.LLTMLayer(3, 4, num_layers=2, dropout=0.5)
    packed = pack_padded_sequence(torch.randn(5, 3, 3), torch.tensor([5, 2, 1]))
    torch.manual_seed(1)
    layer(packed)
    after = torch.get_rng_state()
    torch.manual_seed(1)
    torch.nn.functional.dropout(torch.ones(8, 4), 0.5)
    assert torch.equal(torch.get_rng_state(), after)


@by_device
def test_dropout_between_layers(device: str) -> None:
    module = layer(device, num_layers=2, dropout=0.5)
    input = layer_input(device, module)
    first, second = module(input)[0], module(input)[0]
    assert not torch.equal(first, second)
    module.eval()
    assert torch.equal(module(input)[0], module(input)[0])
    with pytest.warns(UserWarning, match="dropout"):  # one layer: there is nothing in between
        alone = layer(device, dropout=0.5)
    assert torch.equal(alone(input)[0], alone(input)[0])


@by_device
def test_no_steps_leave_the_callers_states_alone(device: str) -> None:
    _, h_0, c_0, weights, bias = LLTM_SEQUENCE.inputs("one", device)
    _, (h_n, c_n) = extops.lltm_sequence(weights.new_empty(0, 1, 1), (h_0, c_0), weights, bias)
    assert torch.equal(h_n, h_0) and torch.equal(c_n, c_0)
    assert h_n.data_ptr() != h_0.data_ptr() and c_n.data_ptr() != c_0.data_ptr()


def test_sparse_lengths() -> None:
    input, h_0, c_0, weights, bias = LLTM_SEQUENCE.inputs("one", "cpu")
    lengths = torch.ones(1, dtype=torch.int64).to_sparse()
    with pytest.raises(
        RuntimeError, match=r"expected `lengths` to be a dense .* layout torch\.sparse_coo"
    ):
        extops.lltm_sequence(input, (h_0, c_0), weights, bias, lengths=lengths)
