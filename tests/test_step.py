"""One step of an LSTM's and a GRU's cell: by operators of its own on a GPU, and by their compositions on a CPU."""

from __future__ import annotations

import functools
import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradgradcheck

import extops
from extops.ops.step import Step
from operators import (
    GPU,
    LAYOUTS,
    Layout,
    Tensors,
    assert_as_accurate_as_eager,
    by_device,
    by_layout,
    gradients,
    gru_by_cells,
    inputs_of_torch,
    lstm_by_cells,
    rnn_by_cells,
    upstream,
)
from test_cells import OWN_GRU, TURNED, Own, call
from test_precision import tf32

CELLS = "lstm", "gru", "rnn_tanh", "rnn_relu"
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
NUMBER_OF_STATES = {"lstm": 2, "gru": 1, "rnn_tanh": 1, "rnn_relu": 1}
STEPS: dict[str, Step] = {name: cell.step for name, cell in extops.ops.sequence.CELLS.items()}
BY_CELLS: dict[str, Callable[..., Any]] = {
    "lstm": lstm_by_cells,
    "gru": gru_by_cells,
    "rnn_tanh": rnn_by_cells,
    "rnn_relu": functools.partial(rnn_by_cells, nonlinearity="relu"),
}
SEQUENCES: dict[str, Callable[..., Any]] = {
    "lstm": extops.lstm_sequence,
    "gru": extops.gru_sequence,
    "rnn_tanh": extops.rnn_sequence,
    "rnn_relu": functools.partial(extops.rnn_sequence, nonlinearity="relu"),
}
by_cell = pytest.mark.parametrize("cell", CELLS)
PRECISIONS = ("float64", "float32", "tf32", "bfloat16", "float16")
by_precision = pytest.mark.parametrize("precision", PRECISIONS)

Sizes = tuple[int, int, int]

# Batch, input features and state size.
SMALL: dict[str, Sizes] = {
    "one": (1, 1, 1),
    "one_row": (1, 33, 61),
    "odd": (13, 33, 31),
    "empty_batch": (0, 5, 4),
    "no_features": (3, 0, 4),
    "no_state": (3, 5, 0),
    # In CUDA's kernel of a few rows, whose loads are vectors, and beyond its limits.
    "vectors_of_one_row": (1, 64, 64),
    "vectors_of_few_rows": (16, 128, 128),
    "rows_left_over": (7, 132, 124),
    "a_row_too_many": (17, 128, 128),
    "too_little_depth": (16, 124, 128),
    # The parameters' gradients: a block for the whole batch, and a cluster with some rows each.
    "rows_of_a_tile": (64, 20, 32),
    "rows_of_a_cluster": (65, 20, 32),
    "uneven_rows_of_a_cluster": (67, 5, 7),
}
# On either side of the other limits of step.cuh: some gigaflops, so on a GPU alone.
LARGE: dict[str, Sizes] = {
    "blocks_of_a_cluster": (200, 70, 131),
    "too_many_blocks_for_clusters": (70, 130, 150),
    "most_rows_of_a_backward": (256, 20, 32),
    "backward_of_a_library": (257, 20, 32),
    "most_depth": (1, 8128, 64),
    "too_much_depth": (1, 8192, 64),
    "much_of_one_row": (1, 2048, 2048),
    "too_much_of_one_row": (1, 3328, 3328),
    "much_of_few_rows": (16, 768, 768),
    "small_in_all": (12, 199, 201),
    "small_in_float32": (32, 200, 200),
    "too_large_of_an_lstm": (41, 200, 200),
    "backward_in_16_bit": (60, 180, 180),
    "backward_of_a_library_in_16_bit": (90, 180, 180),
    "backward_in_float32": (128, 360, 320),
    "backward_of_a_library_of_an_lstm": (128, 400, 400),
    "library": (300, 130, 257),
    "vectors_of_the_pointwise_part": (1024, 32, 256),
    # The kernels for tensor cores, in strict float32 too: by how many blocks K is shared, and what tiles leave over.
    "tiles": (40, 256, 256),
    "tiles_left_over": (65, 136, 328),
    "tiles_of_one_feature_chunk": (48, 8, 512),
    "tiles_that_share_k": (17, 1024, 1024),
    "tiles_of_two_warpgroups": (300, 256, 1024),
    "most_rows_of_tiles": (512, 72, 200),
    "rows_beyond_tiles": (513, 72, 200),
    "rows_between_chunks": (64, 252, 260),
    "most_rows_of_sums": (4096, 8, 12),
    "sums_of_a_library": (4097, 8, 12),
}
CASES = [
    *(pytest.param("cpu", size, id=f"{name}-cpu") for name, size in SMALL.items()),
    *(
        pytest.param("cuda", size, id=f"{name}-cuda", marks=pytest.mark.gpu)
        for name, size in (SMALL | LARGE).items()
    ),
]
by_case = pytest.mark.parametrize(("device", "sizes"), CASES)


@pytest.fixture(autouse=True)
def _steps_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain calls come to these operators on a CPU, too, and with the binding for an older torch."""

    def serves(self: Step, input: Tensor, has_one_state: bool) -> bool:
        return has_one_state or self.number_of_states == 2

    monkeypatch.setattr(Step, "serves", serves)


_SERVES = Step.serves


@by_device
@by_cell
def test_where_plain_calls_come_here(cell: str, device: str) -> None:
    """On a GPU, where a cell with one state is not given two."""
    input = torch.randn(3, 5, device=device)
    has_kernels = device == "cuda" and extops.binding._loader.binding == "stable"
    assert _SERVES(STEPS[cell], input, True) is has_kernels
    assert _SERVES(STEPS[cell], input, False) is (has_kernels and cell == "lstm")


def inputs_of(cell: str, sizes: Sizes, device: str, precision: str = "float64") -> Tensors:
    """The input, both weights, both biases and the states."""
    count = NUMBER_OF_STATES[cell]
    input, *others = inputs_of_torch(GATES[cell], count, 1, *sizes)
    dtype = torch.float32 if precision == "tf32" else getattr(torch, precision)
    weights, biases, states = others[count : count + 2], others[count + 2 :], others[:count]
    if cell == "rnn_relu":  # away from zero, on one side of which its gradient is another
        biases[0].copy_(8 * biases[0].sign())
    return tuple(x.to(device, dtype) for x in (input[0], *weights, *biases, *states))


def names_of(cell: str) -> tuple[str, ...]:
    parameters = "weight_ih", "weight_hh", "bias_ih", "bias_hh"
    return ("input", *parameters, "h_0", "c_0")[: 5 + NUMBER_OF_STATES[cell]]


def eager(cell: str, input: Tensor, *others: Any) -> Tensors:
    _, *states = BY_CELLS[cell](input.unsqueeze(0), *others[4:], *others[:4])
    return tuple(states)


def function_of(cell: str) -> Callable[..., Tensors]:
    return STEPS[cell].__call__


def flattened(found: tuple[Tensors, Tensors]) -> Tensors:
    return tuple(x.detach() for x in (*found[0], *found[1]))


def assert_near(actual: Any, expected: Any, precision: str = "float64") -> None:
    near = {
        "float32": {"rtol": 1e-4, "atol": 1e-4},
        "tf32": {"rtol": 0.02, "atol": 0.02},
        "bfloat16": {"rtol": 0.05, "atol": 0.05},
        "float16": {"rtol": 0.02, "atol": 0.02},
    }
    torch.testing.assert_close(actual, expected, **near.get(precision, {}))


# -- values and gradients ------------------------------------------------------------------------


@by_precision
@by_case
@by_cell
def test_as_accurate_as_eager(cell: str, device: str, sizes: Sizes, precision: str) -> None:
    inputs = inputs_of(cell, sizes, device, precision)
    reference = functools.partial(eager, cell)
    with tf32(allowed=precision == "tf32"):
        towards = upstream(reference(*inputs))
        found = flattened(gradients(function_of(cell), inputs, towards))
        of_eager = flattened(gradients(reference, inputs, towards))
    doubles = [tuple(x.double() for x in tensors) for tensors in (inputs, towards)]
    exact = flattened(gradients(reference, *doubles))
    names = (*("h", "c")[: NUMBER_OF_STATES[cell]], *names_of(cell))
    for name, *values in zip(names, found, of_eager, exact, strict=True):
        assert_as_accurate_as_eager(name, *values, ulps=8)


@pytest.mark.parametrize("absent", [(3,), (4,), (3, 4)], ids=["bias_ih", "bias_hh", "both"])
@pytest.mark.parametrize("sizes", [(3, 5, 7), (300, 130, 36)], ids=["small", "library"])
@by_device
@by_cell
def test_without_biases(cell: str, device: str, sizes: Sizes, absent: tuple[int, ...]) -> None:
    given = list(inputs_of(cell, sizes, device))
    found = []
    towards = upstream(tuple(given[5:]))
    for function in (function_of(cell), functools.partial(eager, cell)):
        leaves = [None if i in absent else x.clone().requires_grad_() for i, x in enumerate(given)]
        results = function(*leaves)
        of = [x for x in leaves if x is not None]
        found.append((*results, *torch.autograd.grad(results, of, towards)))
    assert_near(*found)


@by_layout
@pytest.mark.parametrize("precision", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize(
    "sizes",
    [(16, 128, 128), (1, 64, 64), (11, 33, 31), (70, 20, 32), (300, 136, 64)],
    ids=["vectors", "one_row", "small", "cluster", "library"],
)
@by_device
@by_cell
@pytest.mark.every(8, "layout", "precision", "sizes", "cell")
def test_layouts(cell: str, device: str, sizes: Sizes, precision: str, layout: Layout) -> None:
    """Layouts of the inputs, weights, biases, states and upstream gradients, with NaN in the gaps."""
    laid_out = [layout(x) for x in inputs_of(cell, sizes, device, precision)]
    towards = tuple(layout(x) for x in upstream(tuple(laid_out[5:])))
    found = []
    for contiguous in (False, True):
        leaves = [
            (x.contiguous().resolve_neg().clone() if contiguous else x).detach().requires_grad_()
            for x in laid_out
        ]
        results = function_of(cell)(*leaves)
        given = tuple(x.resolve_neg().contiguous().clone() for x in towards)
        grads = torch.autograd.grad(results, leaves, given if contiguous else towards)
        with torch.no_grad():
            found.append((*results, *function_of(cell)(*leaves), *grads))
    assert_near(*found, precision)


@pytest.mark.parametrize("place", range(7), ids=names_of("lstm"))
@by_device
@by_cell
@pytest.mark.parametrize("layout", ["padded", "offset", "transposed"])
def test_one_argument_laid_out(cell: str, device: str, place: int, layout: str) -> None:
    """Each alone may keep the others from the kernel of vectors, or be the one that is copied for it."""
    inputs = list(inputs_of(cell, (4, 128, 132), device, "float32"))
    if place >= len(inputs):
        inputs = list(inputs_of(cell, (1, 64, 64), device, "float32"))
        place = len(inputs) - 1
    expected = function_of(cell)(*inputs)
    inputs[place] = LAYOUTS[layout](inputs[place])
    assert_near(function_of(cell)(*inputs), expected, "float32")


@pytest.mark.parametrize("wanted", ["input", "weight_ih", "bias_hh", "h_0", "all_but_input", "all"])
@pytest.mark.parametrize(
    "sizes", [(5, 6, 7), (70, 20, 32), (300, 130, 36)], ids=["small", "cluster", "library"]
)
@pytest.mark.parametrize("precision", ["float64", "float32"])
@by_device
@by_cell
def test_some_gradients(cell: str, device: str, precision: str, sizes: Sizes, wanted: str) -> None:
    inputs = inputs_of(cell, sizes, device, precision)
    towards = upstream(inputs[5:])
    chosen = {"all": names_of(cell), "all_but_input": names_of(cell)[1:]}.get(wanted, (wanted,))
    found = []
    for function in (function_of(cell), functools.partial(eager, cell)):
        given = [
            x.clone().requires_grad_(n in chosen)
            for n, x in zip(names_of(cell), inputs, strict=True)
        ]
        leaves = [x for x in given if x.requires_grad]
        found.append(torch.autograd.grad(function(*given), leaves, towards))
    assert_near(*found, precision)


@pytest.mark.parametrize("given", [0, 1], ids=["h", "c"])
@pytest.mark.parametrize(
    "sizes", [(5, 6, 7), (70, 20, 32), (300, 130, 36)], ids=["small", "cluster", "library"]
)
@by_device
def test_one_upstream_gradient(device: str, sizes: Sizes, given: int) -> None:
    inputs = inputs_of("lstm", sizes, device)
    towards = torch.randn_like(inputs[5])
    found = []
    for function in (function_of("lstm"), functools.partial(eager, "lstm")):
        leaves = [x.clone().requires_grad_() for x in inputs]
        found.append(torch.autograd.grad(function(*leaves)[given], leaves, towards))
    assert_near(*found)


@by_device
@by_cell
def test_no_upstream_gradient(cell: str, device: str) -> None:
    leaves = [x.requires_grad_() for x in inputs_of(cell, (3, 5, 7), device)]

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, _: Tensor) -> None:
            return None

    result = Nothing.apply(function_of(cell)(*leaves)[0])
    found = torch.autograd.grad(result.sum(), leaves, allow_unused=True)
    assert found == (None,) * len(leaves)


@by_device
@by_cell
def test_gradients_of_gradients(cell: str, device: str) -> None:
    inputs = tuple(x.requires_grad_() for x in inputs_of(cell, (2, 3, 4), device))
    towards = tuple(x.requires_grad_() for x in upstream(inputs[5:]))
    assert gradgradcheck(function_of(cell), inputs, towards, fast_mode=True)


@by_device
@by_cell
def test_gradients_share_no_memory(cell: str, device: str) -> None:
    leaves = [x.requires_grad_() for x in inputs_of(cell, (3, 5, 7), device)]
    results = function_of(cell)(*leaves)
    found = torch.autograd.grad(results, leaves, upstream(results))
    places = [x.untyped_storage().data_ptr() for x in (*results, *found)]
    assert len(set(places)) == len(places)


# -- the same on every run, on streams and in graphs ---------------------------------------------

RUNS: dict[str, Sizes] = {
    "vectors": (16, 128, 128),
    "one_row": (1, 512, 512),
    "small": (21, 33, 61),
    "cluster": (200, 70, 128),
    "library": (300, 136, 256),
    "sums_of_a_library": (4100, 8, 12),
}
by_run = pytest.mark.parametrize("sizes", RUNS.values(), ids=RUNS)


def run(cell: str, leaves: list[Tensor], towards: Tensors) -> Tensors:
    results = function_of(cell)(*leaves)
    return (*results, *torch.autograd.grad(results, leaves, towards))


@pytest.mark.parametrize("device", [GPU])
@by_precision
@by_run
@by_cell
def test_same_bits_on_every_run(cell: str, sizes: Sizes, precision: str, device: str) -> None:
    leaves = [x.requires_grad_() for x in inputs_of(cell, sizes, device, precision)]
    towards = upstream(tuple(leaves[5:]))
    with tf32(allowed=precision == "tf32"):
        first, *others = (run(cell, leaves, towards) for _ in range(4))
    for other in others:
        assert all(map(torch.equal, first, other))


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@by_run
@by_cell
def test_side_streams(cell: str, sizes: Sizes, precision: str, device: str) -> None:
    """Each call on the current stream, behind what is there already."""
    inputs = inputs_of(cell, sizes, device, precision)
    towards = upstream(inputs[5:])
    leaves = [x.clone().requires_grad_() for x in inputs]
    expected = run(cell, leaves, towards)
    matrix = torch.randn(4096, 4096, device=device)
    late = [torch.full_like(x, math.nan).requires_grad_() for x in inputs]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        matrix @ matrix
        with torch.no_grad():
            for x, value in zip(late, inputs, strict=True):
                x.copy_(value)
        found = run(cell, late, towards)
    stream.synchronize()
    assert_near(found, expected, precision)


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
@by_run
@by_cell
def test_cuda_graphs(cell: str, sizes: Sizes, precision: str, device: str) -> None:
    """A replay computes what the inputs then hold."""
    leaves = [x.requires_grad_() for x in inputs_of(cell, sizes, device, precision)]
    towards = upstream(tuple(leaves[5:]))
    new = inputs_of(cell, sizes, device, precision)
    with tf32(allowed=precision == "tf32"):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run(cell, leaves, towards)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run(cell, leaves, towards)
        with torch.no_grad():
            for x, value in zip(leaves, new, strict=True):
                x.copy_(value)
        graph.replay()
        replayed = tuple(x.detach().clone() for x in found)
        expected = run(cell, leaves, towards)
    torch.cuda.synchronize()
    assert_near(replayed, tuple(x.detach() for x in expected), precision)


# -- the operators themselves --------------------------------------------------------------------


def operator(name: str) -> Any:
    return getattr(torch.ops.extops, name)


@by_precision
@pytest.mark.parametrize("grad_c", [True, False], ids=["both", "grad_h"])
@by_case
@by_cell
@pytest.mark.every(4, "sizes", "precision", "grad_c", "cell")
def test_operators_beside_their_compositions(
    cell: str, device: str, sizes: Sizes, grad_c: bool, precision: str
) -> None:
    input, *parameters, h_0 = inputs_of(cell, sizes, device, precision)[:6]
    c_0 = h_0 if NUMBER_OF_STATES[cell] == 1 else torch.randn_like(h_0)
    step = STEPS[cell]
    options = {"allow_tf32": precision == "tf32"}
    given = input, *parameters, h_0, c_0
    results = operator(f"{cell}_step")(*given, **options)
    with tf32(allowed=precision == "tf32"):
        assert_near(tuple(results), tuple(step.composite(*given)), precision)
    _, c, gates = results
    saved_c = c if step.saves_new_c else c_0
    towards = torch.randn_like(h_0), torch.randn_like(h_0) if grad_c else None
    kept = gates, saved_c
    backward = f"{cell}_step_backward"
    doubles = [None if x is None else x.double() for x in (*towards, input, h_0, *kept)]
    exact = step._parameters_backward(*doubles)
    parts = operator(backward)(*towards, *kept)
    assert_near(tuple(x.double() for x in parts), exact[:3], precision)
    found = operator(f"{cell}_step_parameters_backward")(*towards, input, h_0, *kept, **options)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, h_0.dtype) for x in exact]
    scaled = max(1, sizes[0]) ** 0.5
    for x, y in zip(found, exact, strict=True):
        assert_near(x.double() / scaled, y / scaled, precision)
    grad_x, grad_h_part, grad_c_0 = parts
    for of_c in (None, grad_c_0):
        arguments = grad_x, grad_h_part, of_c, *parameters[:2]
        found = operator(f"{cell}_step_input_backward")(*arguments, **options)
        in_double = [None if x is None else x.double() for x in arguments]
        exact_of_input = step._input_backward(*in_double)
        for x, y in zip(found, exact_of_input, strict=True):
            assert_near(x.double(), y, precision)


LISTED = [
    f"{cell}_step{suffix}"
    for cell, suffix in itertools.product(
        CELLS, ("", "_backward", "_parameters_backward", "_input_backward")
    )
]


def arguments_of(name: str, device: str, dtype: torch.dtype = torch.float32) -> list[Any]:
    schema = extops.binding._schemas.OPERATORS[name]
    values = {"batch": 3, "input_features": 5, "state_size": 4}
    shapes = [extops.binding._schemas.shape_of(row, values) for row in schema.arguments]
    return [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "expanded"])
@by_device
@pytest.mark.parametrize("name", LISTED)
def test_opcheck(name: str, device: str, layout: str) -> None:
    arguments = [LAYOUTS[layout](x) for x in arguments_of(name, device)]
    tests = {} if layout == "contiguous" else {"test_utils": ("test_schema", "test_faketensor")}
    torch.library.opcheck(operator(name).default, arguments, {}, **tests)


@by_device
@pytest.mark.parametrize("name", LISTED)
def test_wrong_arguments_of_an_operator(name: str, device: str) -> None:
    """The message names the operator and the argument."""
    rows = extops.binding._schemas.OPERATORS[name].arguments
    sizes = [size for row in rows for terms in row.shape for _, size in terms]
    required = [place for place, row in enumerate(rows) if not row.optional]
    for place, row in enumerate(rows):
        bad: list[Callable[[Tensor], Tensor]] = [lambda x: x.unsqueeze(0)]
        if place != required[0]:
            bad.append(lambda x: x.half())
        if all(sizes.count(size) > 1 for _, size in row.shape[-1]):
            bad.append(lambda x: torch.cat([x, x[..., :1]], -1) if x.numel() else x.new_zeros(3, 1))
        for make_bad in bad:
            arguments = arguments_of(name, device)
            arguments[place] = make_bad(arguments[place])
            with pytest.raises(RuntimeError) as caught:
                operator(name)(*arguments)
            assert f"{name}: expected `" in str(caught.value)  # torch 2.11 puts a place before it


# -- modules and sequences -----------------------------------------------------------------------

MODULES = "LSTMCell", "GRUCell", "RNNCell"


def cell_of(name: str) -> str:
    """The cell of a module with its defaults."""
    return name.removesuffix("Cell").lower().replace("rnn", "rnn_tanh")


by_module = pytest.mark.parametrize("name", MODULES)


def module_and_torchs(name: str, device: str, **options: Any) -> tuple[Any, Any]:
    ours, theirs = (
        getattr(library, name)(5, 7, device=device, dtype=torch.float64, **options)
        for library in (extops, torch.nn)
    )
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def state_of(name: str, device: str, *shape: int, dtype: torch.dtype = torch.float64) -> Any:
    h, c = torch.randn(2, *shape, device=device, dtype=dtype)
    return (h, c) if name == "LSTMCell" else h


def tensors_of(results: Any) -> Tensors:
    return (results,) if isinstance(results, Tensor) else tuple(results)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps that are called while the test runs."""
    found: list[str] = []
    call = Step.__call__

    def counted(self: Step, *arguments: Any, **options: Any) -> Tensors:
        found.append(next((name for name, step in STEPS.items() if self is step), "own"))
        return call(self, *arguments, **options)

    monkeypatch.setattr(Step, "__call__", counted)
    return found


@pytest.mark.parametrize("given", [True, False], ids=["state", "no_state"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("batch", [None, 0, 1, 3], ids=lambda it: f"batch_{it}")
@by_device
@by_module
def test_modules(
    name: str, device: str, batch: int | None, bias: bool, given: bool, calls: list[str]
) -> None:
    ours, theirs = module_and_torchs(name, device, bias=bias)
    leading = () if batch is None else (batch,)
    input = torch.randn(*leading, 5, device=device, dtype=torch.float64, requires_grad=True)
    hx = state_of(name, device, *leading, 7) if given else None
    found = []
    for module in (ours, theirs):
        results = tensors_of(module(input, hx))
        loss = torch.stack([(x**2).sum() for x in results]).sum()
        found.append((*results, *torch.autograd.grad(loss, [input, *module.parameters()])))
    torch.testing.assert_close(*found)
    assert calls == [cell_of(name)]
    with torch.no_grad():
        torch.testing.assert_close(tensors_of(ours(input, hx)), tensors_of(theirs(input, hx)))


@pytest.mark.parametrize("batch_first", [False, True], ids=["time_first", "batch_first"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
@by_device
@by_cell
def test_sequences_of_one_step(
    cell: str, device: str, reverse: bool, batch_first: bool, calls: list[str]
) -> None:
    inputs = tuple(x.requires_grad_() for x in inputs_of(cell, (3, 5, 7), device))
    input, *parameters = inputs[:5]
    h, *c = inputs[5:]
    function = SEQUENCES[cell]
    options = {"reverse": reverse, "batch_first": batch_first}
    steps = input.unsqueeze(int(batch_first))
    state = (h, *c) if c else h
    output, last = function(steps, state, *parameters[:2], tuple(parameters[2:]), **options)
    results = tensors_of(last)
    expected = eager(cell, *inputs)
    torch.testing.assert_close(results, expected)
    torch.testing.assert_close(output, expected[0].unsqueeze(int(batch_first)))
    towards = upstream((output, *results))
    found = torch.autograd.grad((output, *results), inputs, towards)
    of_output = towards[0].squeeze(int(batch_first))
    in_all = torch.autograd.grad(expected, inputs, (of_output + towards[1], *towards[2:]))
    torch.testing.assert_close(found, in_all)
    assert calls == [cell]


LAYERS: list[dict[str, Any]] = [
    {},
    {"batch_first": True, "bias": False},
    {"num_layers": 2, "bidirectional": True},
    {"num_layers": 3, "batch_first": True},
]


@pytest.mark.parametrize("options", LAYERS, ids="-".join)
@pytest.mark.parametrize("is_given", [False, True], ids=["zeros", "given"])
@by_device
@by_cell
def test_layers_of_one_step(
    cell: str,
    device: str,
    is_given: bool,
    options: dict[str, Any],
    calls: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind, _, nonlinearity = cell.partition("_")
    if nonlinearity:
        options = {**options, "nonlinearity": nonlinearity}
    ours, theirs = (
        getattr(library, kind.upper())(5, 7, device=device, dtype=torch.float64, **options)
        for library in (extops, torch.nn)
    )
    ours.load_state_dict(theirs.state_dict())
    shape = (3, 1, 5) if ours.batch_first else (1, 3, 5)
    input = torch.randn(shape, device=device, dtype=torch.float64, requires_grad=True)
    places = ours.num_layers * (1 + ours.bidirectional)
    hx = state_of(f"{kind.upper()}Cell", device, places, 3, 7) if is_given else None
    found = []
    for layer in (ours, theirs):
        output, last = layer(input, hx)
        results = output, *tensors_of(last)
        loss = torch.stack([(x**2).sum() for x in results]).sum()
        found.append((*results, *torch.autograd.grad(loss, [input, *layer.parameters()])))
    torch.testing.assert_close(*found)
    # A GPU computes both directions at once, as a sequence.
    together = ours.bidirectional and input.is_cuda and extops.binding._loader.binding == "stable"
    assert calls == [cell] * (0 if together else places)
    with torch.no_grad():
        output, last = ours(input, hx)
        expected = [x.clone() for x in tensors_of(last)]
        output.zero_()
    torch.testing.assert_close(tensors_of(last), tuple(expected))
    output.add_(torch.ones(output.shape[-1:], device=device, requires_grad=True))  # no view
    output.detach_()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x.to_sparse(),
        lambda x: torch.nested.as_nested_tensor([x]),
    ],
    ids=["sparse", "nested"],
)
@by_device
def test_wrong_parameters_of_a_layer_of_one_step(
    wrong: Callable[[Tensor], Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = extops.GRU(5, 7, device=device)
    layer._parameters["weight_hh_l0"] = wrong(layer.weight_hh_l0.detach())
    with pytest.raises((RuntimeError, TypeError), match=r"^gru_sequence: expected `weight_hh`"):
        layer(torch.randn(1, 3, 5, device=device))


@by_device
@by_module
def test_autocast(name: str, device: str) -> None:
    """Results in the region's dtype, gradients in those of the leaves; also with the backward within the region."""
    cell = getattr(extops, name)(5, 7, device=device)
    input = torch.randn(3, 5, device=device, requires_grad=True)
    hx = state_of(name, device, 3, 7, dtype=torch.float32)
    expected = torch.autograd.grad(
        tensors_of(cell(input, hx))[0].sum(), [input, *cell.parameters()]
    )
    for within in (False, True):
        with torch.autocast(device, torch.bfloat16):
            results = tensors_of(cell(input, hx))
            if within:
                found = torch.autograd.grad(results[0].sum(), [input, *cell.parameters()])
        if not within:
            found = torch.autograd.grad(results[0].sum(), [input, *cell.parameters()])
        # As torch's: on a CPU only the GEMMs are in the region's dtype, and what is made of nothing else.
        is_wide = device == "cpu" and name != "RNNCell"
        assert results[0].dtype is (torch.float32 if is_wide else torch.bfloat16)
        assert_near(found, expected, "bfloat16")


@by_device
@by_cell
def test_wrong_arguments_of_a_sequence_of_one_step(cell: str, device: str) -> None:
    function = SEQUENCES[cell]
    for place, name in enumerate(names_of(cell)):
        for bad in (lambda x: x.half(), lambda x: torch.cat([x, x]), lambda x: x[None]):
            inputs = [x.requires_grad_() for x in inputs_of(cell, (3, 5, 7), device, "float32")]
            inputs[place] = bad(inputs[place])
            input, w_ih, w_hh, b_ih, b_hh, *states = inputs
            state = tuple(states) if cell == "lstm" else states[0]
            for mode in (torch.enable_grad, torch.no_grad):
                with mode(), pytest.raises(RuntimeError, match=f"^{cell}_sequence: ") as caught:
                    function(input[None], state, w_ih, w_hh, (b_ih, b_hh))
                assert "expected `" in str(caught.value), name


@by_device
@by_cell
def test_the_output_is_no_alias_of_the_state(cell: str, device: str) -> None:
    input, *parameters, h = inputs_of(cell, (3, 5, 7), device)[:6]
    state = (h, h.clone()) if cell == "lstm" else h
    function = SEQUENCES[cell]
    output, last = function(input[None], state, *parameters[:2], tuple(parameters[2:]))
    h_n = tensors_of(last)[0]
    expected = h_n.clone()
    output.zero_()
    assert torch.equal(h_n, expected)


@pytest.mark.slow
@by_device
@pytest.mark.parametrize("own", [OWN_GRU, TURNED], ids=lambda own: own.name)
def test_a_cell_of_ones_own(own: Own, device: str) -> None:
    input, *others = own.inputs(device, torch.float64)
    inputs = (input[:1].detach().requires_grad_(), *others)
    cell = own.load(device)
    results, expected = call(cell, *inputs), own.loop(*inputs)
    torch.testing.assert_close(results, expected)
    towards = upstream(expected)
    found = torch.autograd.grad(results, inputs, towards)
    torch.testing.assert_close(found, torch.autograd.grad(expected, inputs, towards))
    with torch.no_grad():
        torch.testing.assert_close(call(cell, *inputs), expected)


@by_device
@by_module
def test_wrong_arguments_of_a_module(name: str, device: str) -> None:
    cell = getattr(extops, name)(5, 7, device=device, dtype=torch.float64)
    input = torch.randn(3, 5, device=device, dtype=torch.float64)
    op = f"{cell_of(name)}_sequence"
    state = functools.partial(state_of, name, device)
    wrong: list[tuple[Tensor, Any, str]] = [
        (input[None], None, rf"^{name}: expected `input` to have 2 dimensions, or 1 .*got 3"),
        (input[:, :4], None, rf"^{name}: expected `input` to have input_size = 5 .*got 4"),
        (input, state(2, 7), rf"^{name}: expected `h` .*\[3, 7\], but got \[2, 7\]"),
        (input, state(3, 6), rf"^{name}: expected `h` .*\[3, 7\], but got \[3, 6\]"),
        (input, state(7), rf"^{name}: expected `h` .*\[3, 7\], but got \[7\]"),
        (
            input.float(),
            None,
            rf"^{op}: expected `weight_ih` of dtype torch.float32, the dtype of `input`, but got torch.float64; "
            r"convert one: `weight_ih` by .to\(torch.float32\), or `input` by .to\(torch.float64\)$",
        ),
        (input, state(3, 7, dtype=torch.half), rf"^{op}: expected `h_0` of dtype torch.float64"),
        (input.long(), None, rf"^{name}: expected `input` of a floating-point dtype .*int64"),
        (input.to_sparse(), None, rf"^{name}: expected `input` to be a dense"),
    ]
    if device == "cuda":
        on_cpu = torch.utils._pytree.tree_map(lambda x: x.cpu(), state(3, 7))
        wrong.append((input, on_cpu, rf"^{op}: expected `h_0` on device cuda:0, the device of"))
        wrong.append((input.cpu(), None, rf"^{op}: expected `weight_ih` on device cpu, the device"))
    for gradient in (torch.enable_grad, torch.no_grad):
        for given, hx, message in wrong:
            with gradient(), pytest.raises((RuntimeError, TypeError), match=message):
                cell(given, hx)
    with pytest.raises(TypeError, match=f"^{name}: expected `"):
        cell(input, 7)


@by_device
@by_module
def test_parameters_that_would_be_broadcast(name: str, device: str) -> None:
    op = f"{cell_of(name)}_sequence"
    for wrong in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        # With one gate the rows of weight_ih are as many as units, by which weight_hh is judged.
        named = "weight_hh" if (name, wrong) == ("RNNCell", "weight_ih") else wrong
        cell = getattr(extops, name)(5, 7, device=device)
        setattr(cell, wrong, torch.nn.Parameter(getattr(cell, wrong)[:1].detach()))
        for gradient in (torch.enable_grad, torch.no_grad):
            with (
                gradient(),
                pytest.raises(RuntimeError, match=f"^{op}: expected `{named}` to have"),
            ):
                cell(torch.zeros(3, 5, device=device))


@by_device
@by_module
@pytest.mark.usefixtures("dynamo")
def test_compiled(name: str, device: str) -> None:
    ours, theirs = module_and_torchs(name, device)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    input = torch.randn(3, 5, device=device, dtype=torch.float64, requires_grad=True)
    hx = state_of(name, device, 3, 7)
    found = []
    for module in (compiled, theirs):
        results = tensors_of(module(input, hx))
        loss = torch.stack([(x**2).sum() for x in results]).sum()
        leaves = [input, *(ours if module is compiled else theirs).parameters()]
        found.append((*results, *torch.autograd.grad(loss, leaves)))
    torch.testing.assert_close(*found)


@by_device
@by_module
def test_transforms(name: str, device: str) -> None:
    """By compositions of PyTorch's calls."""
    ours, _ = module_and_torchs(name, device)
    cell = cell_of(name)
    parameters = dict(ours.named_parameters())
    order = [parameters[x].detach() for x in names_of(cell)[1:5]]

    def by_module(input: Tensor, *state: Tensor) -> Tensors:
        return tensors_of(ours(input, state if len(state) > 1 else state[0]))

    def by_eager(input: Tensor, *state: Tensor) -> Tensors:
        return eager(cell, input, *order, *state)

    input = torch.randn(2, 3, 5, device=device, dtype=torch.float64)
    states = [
        torch.randn(2, 3, 7, device=device, dtype=torch.float64)
        for _ in tensors_of(state_of(name, device, 1))
    ]
    given = input, *states
    torch.testing.assert_close(
        torch.func.vmap(by_module)(*given), torch.func.vmap(by_eager)(*given)
    )
    primals, tangents = (tuple(x[i] for x in given) for i in (0, 1))
    found = [torch.func.jvp(f, primals, tangents) for f in (by_module, by_eager)]
    torch.testing.assert_close(*found)

    def loss(function: Callable[..., Tensors], *given: Tensor) -> Tensor:
        return torch.stack([(x**2).sum() for x in function(*given)]).sum()

    places = tuple(range(len(given)))
    of_loss = [torch.func.grad(functools.partial(loss, f), places) for f in (by_module, by_eager)]
    torch.testing.assert_close(*(f(*primals) for f in of_loss))
    torch.testing.assert_close(*(torch.func.vmap(f)(*given) for f in of_loss))


@by_device
@by_cell
def test_gradients_of_both_biases_are_two_tensors(cell: str, device: str) -> None:
    for sizes in ((3, 5, 7), (70, 20, 32), (300, 20, 32), (4100, 3, 4)):
        leaves = [x.requires_grad_() for x in inputs_of(cell, sizes, device)]
        results = function_of(cell)(*leaves)
        loss = torch.stack([(x**2).sum() for x in results]).sum()
        found = torch.autograd.grad(loss, leaves[3:5])
        expected = [x / 2 for x in found]
        torch._foreach_mul_(list(found), 0.5)
        torch.testing.assert_close(list(found), expected)


@pytest.mark.parametrize("order", [1, 2], ids=["once", "twice"])
@by_device
@by_cell
def test_a_bias_may_change_before_the_backward(cell: str, device: str, order: int) -> None:
    leaves = [x.requires_grad_() for x in inputs_of(cell, (3, 5, 7), device)]

    def found(change: bool) -> Tensors:
        tensors: Any = function_of(cell)(*leaves)
        with torch.no_grad():
            for bias in leaves[3:5]:
                bias.add_(float(change))
        for again in range(order):
            loss = torch.stack([(x**2).sum() for x in tensors]).sum()
            tensors = torch.autograd.grad(loss, leaves, create_graph=again < order - 1)
        return tensors

    expected = found(False)
    torch.testing.assert_close(found(True), expected)


@pytest.mark.parametrize("place", [0, 1, 2, 5], ids=["input", "weight_ih", "weight_hh", "h_0"])
@by_device
@by_cell
def test_what_else_may_not_change_before_the_backward(cell: str, device: str, place: int) -> None:
    leaves = [x.requires_grad_() for x in inputs_of(cell, (3, 5, 7), device)]
    results = function_of(cell)(*leaves)
    with torch.no_grad():
        leaves[place].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(results, leaves, upstream(results))


def test_no_kernel_replaces_another(tmp_path: Path) -> None:
    """Torch warns of that, or refuses to import extops, where two parts of it register the same."""
    command = [sys.executable, "-c", "import extops"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "previously registered" not in done.stderr
