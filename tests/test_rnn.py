"""`extops.LSTM`, `GRU` and their cells compared with torch's modules of the same names, and `extops.accelerate`."""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import extops
from operators import GPU, Tensors, by_device, dtype_name, padded

FEATURES, STATE, TIME, BATCH = 5, 7, 6, 3
LAYERS = "LSTM", "GRU", "RNN"
CELLS = "LSTMCell", "GRUCell", "RNNCell"
OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": False, "batch_first": True},
    {"num_layers": 2, "bidirectional": True},
    {"num_layers": 2, "bidirectional": True, "batch_first": True, "bias": False},
]
by_layer = pytest.mark.parametrize("name", LAYERS)
by_cell = pytest.mark.parametrize("name", CELLS)
by_module = pytest.mark.parametrize("name", LAYERS + CELLS)
by_function = pytest.mark.parametrize("function", [extops.lstm_sequence, extops.gru_sequence])
by_options = pytest.mark.parametrize("options", OPTIONS, ids=lambda it: "-".join(it) or "plain")


def pair(name: str, device: str = "cpu", **options: Any) -> tuple[nn.Module, nn.Module]:
    """Our module and torch's, with the same parameters."""
    ours, theirs = (
        getattr(library, name)(FEATURES, STATE, device=device, dtype=torch.float64, **options)
        for library in (extops, nn)
    )
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def random(*shape: int, device: str = "cpu") -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.float64)


def states(name: str, *shape: int, device: str = "cpu") -> Any:
    h, c = random(*shape, device=device), random(*shape, device=device)
    return (h, c) if name.startswith("LSTM") else h


def tensors_of(results: Any) -> Tensors:
    if isinstance(results, Tensor):
        return (results,)
    if isinstance(results, PackedSequence):
        return (results.data,)
    return tuple(tensor for each in results for tensor in tensors_of(each))


def assert_same(ours: nn.Module, theirs: nn.Module, *arguments: Any) -> None:
    """Results and gradients."""
    found = []
    for module in (ours, theirs):
        results = tensors_of(module(*arguments))
        loss = torch.stack([(result**2).sum() for result in results]).sum()
        found.append((*results, *torch.autograd.grad(loss, list(module.parameters()))))
    torch.testing.assert_close(*found)


@by_device
@by_layer
@by_options
def test_layers(name: str, options: dict[str, Any], device: str) -> None:
    ours, theirs = pair(name, device, **options)
    assert repr(ours) == repr(theirs)
    layers = options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
    batch = TIME if options.get("batch_first") else BATCH
    input = random(TIME, BATCH, FEATURES, device=device)
    assert_same(ours, theirs, input)
    assert_same(ours, theirs, input, states(name, layers, batch, STATE, device=device))
    assert_same(ours, theirs, input[0])
    assert_same(ours, theirs, input[0], states(name, layers, STATE, device=device))


@by_device
@by_layer
@pytest.mark.parametrize("enforce_sorted", [True, False], ids=["sorted", "unsorted"])
def test_packed_sequences(enforce_sorted: bool, name: str, device: str) -> None:
    ours, theirs = pair(name, device, num_layers=2, bidirectional=True)
    lengths = (6, 2, 1) if enforce_sorted else (2, 6, 1)
    input = pack_sequence([random(n, FEATURES, device=device) for n in lengths], enforce_sorted)
    assert_same(ours, theirs, input)
    assert_same(ours, theirs, input, states(name, 4, BATCH, STATE, device=device))


@by_device
@by_cell
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_cells(bias: bool, name: str, device: str) -> None:
    ours, theirs = pair(name, device, bias=bias)
    assert repr(ours) == repr(theirs)
    input = random(BATCH, FEATURES, device=device)
    assert_same(ours, theirs, input)
    assert_same(ours, theirs, input, states(name, BATCH, STATE, device=device))
    assert_same(ours, theirs, input[0])
    assert_same(ours, theirs, input[0], states(name, STATE, device=device))


@by_module
def test_the_state_by_its_name(name: str) -> None:
    ours, theirs = pair(name)
    leading = () if name.endswith("Cell") else (1,)
    hx = states(name, *leading, BATCH, STATE)
    input = random(*(TIME,) * len(leading), BATCH, FEATURES)
    torch.testing.assert_close(ours(input=input, hx=hx), theirs(input=input, hx=hx))


@by_module
def test_state_dicts_go_both_ways(name: str) -> None:
    ours, theirs = (getattr(library, name)(FEATURES, STATE) for library in (extops, nn))
    theirs.load_state_dict(ours.state_dict())
    assert_same(ours, theirs, torch.randn(TIME, FEATURES))
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(copied) is type(ours)
        assert_same(copied, theirs, torch.randn(TIME, FEATURES))


@pytest.mark.every(3, "name")
@by_layer
@pytest.mark.usefixtures("dynamo")
def test_compiled_and_exported(name: str) -> None:
    ours, theirs = pair(name, num_layers=2, bidirectional=True)
    input = random(TIME, BATCH, FEATURES)
    assert_same(torch.compile(ours, backend="aot_eager", fullgraph=True), theirs, input)
    program = torch.export.export(ours, (input,)).module()
    torch.testing.assert_close(program(input), theirs(input))


@by_module
def test_gradients_share_no_memory(name: str) -> None:
    ours, _ = pair(name)
    input = random(BATCH, FEATURES) if name in CELLS else random(TIME, BATCH, FEATURES)
    torch.stack([x.sum() for x in tensors_of(ours(input))]).sum().backward()
    found = {name: parameter.grad for name, parameter in ours.named_parameters()}
    twice = {name: 2 * gradient for name, gradient in found.items()}
    for gradient in found.values():
        gradient.mul_(2)
    torch.testing.assert_close(found, twice, rtol=0, atol=0)


@by_device
@by_module
@pytest.mark.parametrize("how", ["eager", "create_graph", "compiled"])
@pytest.mark.usefixtures("dynamo")
def test_gradients_of_biases_are_two_tensors(how: str, name: str, device: str) -> None:
    ours, _ = pair(name, device)
    sizes = (BATCH,) if name in CELLS else (TIME, BATCH)
    run = torch.compile(ours, backend="aot_eager") if how == "compiled" else ours
    results = tensors_of(run(random(*sizes, FEATURES, device=device)))
    biases = [x for name, x in ours.named_parameters() if name.startswith("bias")]
    loss = torch.stack([(result**2).sum() for result in results]).sum()
    found = torch.autograd.grad(loss, biases, create_graph=how == "create_graph")
    with torch.no_grad():
        expected = [gradient / 2 for gradient in found]
        torch._foreach_mul_(found, 0.5)
    torch.testing.assert_close(list(found), expected)


@by_device
@pytest.mark.parametrize("order", [1, 2], ids=["once", "twice"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize("name", [*LAYERS, *CELLS, "LLTM", "LLTMLayer"])
def test_a_bias_may_change_before_the_backward(
    name: str, dtype: torch.dtype, order: int, device: str
) -> None:
    """As with torch, where only a sum depends on it."""
    module = getattr(extops, name)(FEATURES, STATE, device=device, dtype=dtype)
    sizes = (TIME, BATCH)[1 if name in (*CELLS, "LLTM") else 0 :]
    input = torch.randn(*sizes, FEATURES, device=device, dtype=dtype, requires_grad=True)
    biases = [x for name, x in module.named_parameters() if name.startswith("bias")]
    leaves = [input, *module.parameters()]

    def gradients(change: bool) -> Tensors:
        found = tensors_of(module(input))
        with torch.no_grad():
            for bias in biases:
                bias.add_(float(change))
        for again in range(order):
            loss = torch.stack([(x**2).sum() for x in found]).sum()
            found = torch.autograd.grad(loss, leaves, create_graph=again < order - 1)
        return found

    if name in LAYERS and extops.which_kernel(module, input) == "cudnn":  # whose node keeps biases
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(True)
        return
    expected = gradients(False)
    near = {} if dtype is torch.float64 else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(gradients(True), expected, **near)


@by_module
def test_traced(name: str) -> None:
    ours, theirs = pair(name)
    traced = torch.jit.trace(ours, random(TIME, FEATURES))
    input = random(TIME + 1, FEATURES)
    torch.testing.assert_close(traced(input), theirs(input))


@by_layer
@pytest.mark.parametrize("shape", [(3,), (5, 3), (5, 2, 3)], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested(shape: tuple[int, ...], name: str) -> None:
    nested = torch.nested.nested_tensor([torch.randn(shape)] * 2)
    with pytest.raises(
        RuntimeError, match=r"but got a nested tensor; call .to_padded_tensor\(0.0\)"
    ):
        getattr(extops, name)(3, 4)(nested)


@by_module
def test_traced_for_any_size(name: str) -> None:
    """By make_fx, whose sizes are symbols, which have no hash."""
    module = getattr(extops, name)(3, 4)
    input = torch.randn((5, 2, 3) if name in LAYERS else (2, 3))
    parameters = dict(module.named_parameters())

    def call(input: Tensor, *values: Tensor) -> Tensor:
        given = dict(zip(parameters, values, strict=True))
        results = torch.func.functional_call(module, given, (input,))
        found: Tensor = results if isinstance(results, Tensor) else results[0]
        return found

    with torch.no_grad():
        traced = make_fx(call, tracing_mode="symbolic")(input, *parameters.values())
        other = torch.randn((7, 4, 3) if name in LAYERS else (4, 3))
        for given in (input, other):
            expected = call(given, *parameters.values())
            torch.testing.assert_close(traced(given, *parameters.values()), expected)


@by_function
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_traced_for_any_sizes(bias: bool, function: Any) -> None:
    gates = 4 if function is extops.lstm_sequence else 3

    def run(input: Tensor, h: Tensor, *parameters: Tensor) -> Tensors:
        state = (h, h) if gates == 4 else h
        return tensors_of(function(input, state, *parameters[:2], parameters[2:] or None))

    def inputs(features: int, size: int) -> Tensors:
        weights = random(gates * size, features), random(gates * size, size)
        biases = (random(gates * size), random(gates * size)) if bias else ()
        return random(TIME, BATCH, features), random(BATCH, size), *weights, *biases

    traced = torch.jit.trace(run, inputs(FEATURES, STATE))
    others = inputs(FEATURES - 1, STATE + 2)
    torch.testing.assert_close(traced(*others), run(*others))


# That of an LSTM is one operator of oneDNN's.
_needs_onednn = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="no bfloat16 of oneDNN on this CPU"
)
CALLS = [(name, False) for name in ("GRU", *CELLS)] + [(name, True) for name in LAYERS]
PRECISIONS = torch.float32, torch.bfloat16


@pytest.mark.parametrize("given", [False, True], ids=["zeros", "state"])
@pytest.mark.parametrize("of_state", PRECISIONS, ids=dtype_name)
@pytest.mark.parametrize("of_input", PRECISIONS, ids=dtype_name)
@pytest.mark.parametrize(
    ("name", "packed"), [*CALLS, pytest.param("LSTM", False, marks=_needs_onednn)]
)
def test_autocast_on_a_cpu(
    name: str, packed: bool, of_input: torch.dtype, of_state: torch.dtype, given: bool
) -> None:
    """torch's dtypes: but for the layer of an LSTM only the GEMMs are cast, and not the state."""
    ours, theirs = (module.float() for module in pair(name))
    leading = () if name in CELLS else (1,)
    input: Any = torch.randn(*(TIME,) * len(leading), BATCH, FEATURES, dtype=of_input)
    if packed:
        input = nn.utils.rnn.pack_padded_sequence(input, torch.tensor([TIME, 2, 1]))
    h, c = torch.randn(2, *leading, BATCH, STATE).to(of_state)
    hx = ((h, c) if name.startswith("LSTM") else h,) if given else ()
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (tensors_of(module(input, *hx)) for module in (ours, theirs))
        with torch.no_grad():
            without_gradient = tensors_of(ours(input, *hx))
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(without_gradient, found, rtol=0.02, atol=0.02)  # may be torch's own
    gradients = torch.autograd.grad(found[0].sum(), list(ours.parameters()))
    assert {gradient.dtype for gradient in gradients} == {torch.float32}


@_needs_onednn
@pytest.mark.parametrize("lengths", [[TIME, TIME, TIME], [TIME, TIME, 1]], ids=["equal", "others"])
def test_autocast_of_packed_rows_on_a_cpu(lengths: list[int]) -> None:
    """torch's LSTM takes rows of equal lengths as if they were not packed."""
    ours, theirs = (module.float() for module in pair("LSTM"))
    packed = nn.utils.rnn.pack_padded_sequence(
        torch.randn(TIME, BATCH, FEATURES), torch.tensor(lengths)
    )
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (tensors_of(module(packed)) for module in (ours, theirs))
        if (
            min(lengths) == TIME
            and theirs(torch.randn(TIME, BATCH, FEATURES))[0].dtype != expected[0].dtype
        ):
            pytest.skip("this torch takes them for others")
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@by_device
@pytest.mark.parametrize("name", CELLS)
def test_what_lies_between_rows(name: str, device: str) -> None:
    """Torch 2.13 reads it on a CPU, in a 16-bit type."""
    module = getattr(extops, name)(33, 61, device=device, dtype=torch.bfloat16)
    padded = torch.full((17, 40), math.nan, device=device, dtype=torch.bfloat16)
    input = padded[:, :33].copy_(torch.randn(17, 33))
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            found, expected = (tensors_of(module(x)) for x in (input, input.contiguous()))
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@by_device
@by_module
def test_what_lies_between_rows_of_weights(name: str, device: str) -> None:
    """The same, which a gradient of second order met."""
    module = getattr(extops, name)(3, 23, device=device, dtype=torch.bfloat16)
    weights = [x for x in module._parameters if x.startswith("weight")]
    shape = (8, 23) if name in CELLS else (1, 8, 23)
    input = torch.randn(*shape[:-1], 3, device=device, dtype=torch.bfloat16)
    number = 2 if "LSTM" in name else 1
    states = torch.randn(number, *shape, device=device, dtype=torch.bfloat16).unbind()
    upstream = torch.randn(*shape[:-2], 23, 8, device=device, dtype=torch.bfloat16).mT
    found = []
    for layout in (torch.Tensor.contiguous, padded):
        for x in weights:
            setattr(module, x, nn.Parameter(layout(module._parameters[x].detach())))
        leaves = [x.clone().requires_grad_() for x in (input, *states)]
        hx = tuple(leaves[1:]) if number > 1 else leaves[1]
        result = tensors_of(module(leaves[0], hx))[0]
        first = torch.autograd.grad(result, leaves, upstream, create_graph=True)
        second = torch.autograd.grad([x.sum() for x in first], [*leaves, *module.parameters()])
        found.append((result, *first, *second))
    torch.testing.assert_close(*found, rtol=0.05, atol=0.05)


@by_device
@by_module
@pytest.mark.usefixtures("dynamo")
def test_compiled_under_autocast(name: str, device: str) -> None:
    ours, _ = pair(name, device)
    ours.float()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    input = torch.randn(TIME, FEATURES, device=device)
    # Eager cells are torch's, which round in other places: on a CPU autocast casts their GEMMs alone.
    tolerance = {"rtol": 0.02, "atol": 0.02} if name in CELLS else {}
    with torch.autocast(device, torch.bfloat16):
        torch.testing.assert_close(compiled(input), ours(input), **tolerance)


@pytest.mark.parametrize("device", [GPU])
@by_module
def test_autocast_on_a_gpu(name: str, device: str) -> None:
    """The region's dtype, where cuDNN's layers return float16."""
    module = getattr(extops, name)(FEATURES, STATE, device=device)
    with torch.autocast(device, torch.bfloat16):
        results = tensors_of(module(torch.randn(TIME, FEATURES, device=device)))
    assert {result.dtype for result in results} == {torch.bfloat16}
    torch.stack([result.sum() for result in results]).sum().backward()
    assert {p.grad.dtype for p in module.parameters()} == {torch.float32}


@by_layer
def test_dropout(name: str) -> None:
    ours, theirs = pair(name, num_layers=2, dropout=0.5)
    input = random(TIME, BATCH, FEATURES)
    assert not torch.equal(ours(input)[0], ours(input)[0])
    assert_same(ours.eval(), theirs.eval(), input)


@pytest.mark.parametrize("layout", ["padded", "batch_first", "by_rows", "packed", "unsorted"])
@pytest.mark.parametrize("bidirectional", [False, True], ids=["one", "both"])
@by_layer
def test_dropout_on_a_cpu_draws_as_torch(name: str, bidirectional: bool, layout: str) -> None:
    """The same masks, and the generator is then where torch leaves it. cuDNN has its own."""
    batch_first = layout == "batch_first"
    options = {"num_layers": 3, "dropout": 0.5, "bidirectional": bidirectional}
    ours, theirs = pair(name, batch_first=batch_first, **options)
    input: Any = random(TIME, BATCH, FEATURES)
    if layout == "by_rows":
        input = random(BATCH, TIME, FEATURES).transpose(0, 1)
    elif layout in ("packed", "unsorted"):
        lengths = (6, 2, 1) if layout == "packed" else (2, 6, 1)
        input = pack_sequence([random(n, FEATURES) for n in lengths], layout == "packed")
    found = []
    for module in (ours, theirs):
        torch.manual_seed(5)
        found.append((*tensors_of(module(input)), torch.rand(3)))
    torch.testing.assert_close(*found)


def test_projections_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^LSTM: expected `proj_size` to be 0, but got 2: "):
        extops.LSTM(FEATURES, STATE, proj_size=2)


@pytest.mark.parametrize(
    ("name", "state", "message"),
    [
        ("LSTM", random(1, BATCH, STATE), r"^LSTM: expected `state` to be a pair .*\(h, c\)"),
        (
            "LSTM",
            (random(1, BATCH, 2),) * 2,
            r"^LSTM: expected `h_0` .*hidden_size\] = \[1, 3, 7\]",
        ),
        (
            "GRU",
            random(2, BATCH, STATE),
            r"^GRU: expected `h_0` .*\[1, 3, 7\], but got \[2, 3, 7\]",
        ),
        ("GRU", (1, 2), r"^GRU: expected `h_0` to be a torch.Tensor, but got tuple"),
    ],
)
def test_wrong_states(name: str, state: Any, message: str) -> None:
    module = getattr(extops, name)(FEATURES, STATE, dtype=torch.float64)
    with pytest.raises((TypeError, RuntimeError), match=message):
        module(random(TIME, BATCH, FEATURES), state)


@by_layer
def test_negative_batch_sizes(name: str) -> None:
    layer, data = getattr(extops, name)(FEATURES, STATE), torch.zeros(2, FEATURES)
    layer(PackedSequence(data, torch.tensor([1, 1, 0])))
    expected = rf"^{name}: expected `input.batch_sizes` not to .*, nor to be negative, but got \[1, 1, 1, -1\]"
    with pytest.raises(RuntimeError, match=expected):
        layer(PackedSequence(data, torch.tensor([1, 1, 1, -1])))


@by_layer
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_wrong_features(name: str, packed: bool) -> None:
    input: Any = random(TIME, BATCH, FEATURES + 1)
    if packed:
        input = nn.utils.rnn.pack_padded_sequence(input, torch.tensor([TIME] * BATCH))
    expected = f"^{name}: expected `input` to have input_size = 5 features, but got 6: "
    with pytest.raises(RuntimeError, match=expected):
        getattr(extops, name)(FEATURES, STATE, dtype=torch.float64)(input)


@by_cell
def test_wrong_arguments_of_a_cell(name: str) -> None:
    cell = getattr(extops, name)(FEATURES, STATE, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=rf"^{name}: expected `input` to have 2 dim.*got 3"):
        cell(random(1, BATCH, FEATURES))
    expected = rf"^{name}: expected `input` to have input_size = 5 features, but got 4: \[3, 4\]"
    with pytest.raises(RuntimeError, match=expected):
        cell(random(BATCH, FEATURES - 1))
    with pytest.raises(RuntimeError, match=rf"^{name}: expected `h` .*\[3, 7\], but got \[2, 7\]"):
        cell(random(BATCH, FEATURES), states(name, 2, STATE))
    with pytest.raises(
        RuntimeError, match=r"expected `weight_ih` of dtype torch.float32, the dtype"
    ):
        cell(torch.randn(BATCH, FEATURES))
    h = torch.randn(BATCH, STATE)
    with pytest.raises(RuntimeError, match=r"expected `h_0` of dtype torch.float64, the dtype of"):
        cell(random(BATCH, FEATURES), (h, h) if name == "LSTMCell" else h)


@by_function
@pytest.mark.parametrize(
    ("bias", "message"),
    [
        (7, r"`bias` to be a pair of tensors, \(bias_ih, bias_hh\), but got int$"),
        ((torch.zeros(28), None), "`bias_hh` to be a torch.Tensor, but got NoneType$"),
        ((torch.zeros(1), torch.zeros(1)), r"`bias_ih` to have shape"),
        ((torch.zeros(1), torch.zeros(28)), r"`bias_ih` to have shape"),
    ],
    ids=["number", "one", "small", "unlike"],
)
def test_wrong_biases(function: Any, bias: Any, message: str) -> None:
    is_lstm = function is extops.lstm_sequence
    rows = 28 if is_lstm else 21
    input, state = torch.zeros(TIME, BATCH, FEATURES), torch.zeros(BATCH, STATE)
    weights = torch.zeros(rows, FEATURES), torch.zeros(rows, STATE)
    with pytest.raises(
        (TypeError, RuntimeError), match=f"^{function.__name__}: expected {message}"
    ):
        function(input, (state, state) if is_lstm else state, *weights, bias)


@by_function
@pytest.mark.parametrize("requires_grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("shape", [(1,), (BATCH, -1), (1, -1)], ids=str)
@pytest.mark.parametrize("wrong", ["bias_ih", "bias_hh"])
def test_biases_that_would_be_broadcast(
    wrong: str, shape: tuple[int, ...], requires_grad: bool, function: Any
) -> None:
    """Also in a single step without gradients, which is torch's own on a CPU."""
    is_lstm = function is extops.lstm_sequence
    rows = 28 if is_lstm else 21
    biases = {name: torch.zeros(rows) for name in ("bias_ih", "bias_hh")}
    biases[wrong] = torch.zeros([rows if size == -1 else size for size in shape])
    h = torch.zeros(BATCH, STATE)
    arguments = (h, h) if is_lstm else h, torch.zeros(rows, FEATURES), torch.zeros(rows, STATE)
    with (
        torch.set_grad_enabled(requires_grad),
        pytest.raises(RuntimeError, match=f"^{function.__name__}: expected `{wrong}` to have"),
    ):
        function(torch.zeros(1, BATCH, FEATURES), *arguments, tuple(biases.values()))


@by_layer
@pytest.mark.parametrize("requires_grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("time", [1, 2])
@pytest.mark.parametrize("wrong", ["weight_ih", "bias_hh"])
def test_parameters_that_would_be_broadcast(
    wrong: str, time: int, requires_grad: bool, name: str
) -> None:
    layer = getattr(extops, name)(FEATURES, 256)
    op = f"{name.lower()}_sequence".replace("rnn_", "rnn_tanh_")
    # With one gate the rows of weight_ih are as many as units, by which weight_hh is judged.
    named = "weight_hh" if (name, wrong) == ("RNN", "weight_ih") else wrong
    parameter = getattr(layer, f"{wrong}_l0")
    setattr(layer, f"{wrong}_l0", nn.Parameter(parameter[:1].detach()))
    with (
        torch.set_grad_enabled(requires_grad),
        pytest.raises(RuntimeError, match=f"^{op}: expected `{named}` to have"),
    ):
        layer(torch.zeros(time, BATCH, FEATURES))


# -- accelerate ----------------------------------------------------------------------------------


# -- which_kernel --------------------------------------------------------------------------------


KERNELS = "step", "float32_block", "tensor_block", "float32_cluster", "tensor_cluster", "group"


@by_device
def test_which_kernel(device: str) -> None:
    names = {"cpu"} if device == "cpu" else set(KERNELS)
    input = torch.randn(TIME, BATCH, FEATURES, device=device)
    packed = pack_sequence([input[:n, 0] for n in (4, 2)])
    h = torch.zeros(BATCH, STATE, device=device)
    for kind in (extops.LSTM, extops.GRU, extops.LLTMLayer):
        for given in (input, input[:, 0], packed):
            for batch_first in (False, True):
                layer = kind(FEATURES, STATE, batch_first=batch_first)
                for backward in (False, True):
                    assert extops.which_kernel(layer, given, backward=backward) in names
    for cell in (extops.LSTMCell, extops.GRUCell):
        for given in (input[0], input[0, 0]):
            assert extops.which_kernel(cell(FEATURES, STATE), given) in names
    for function, state in (
        (extops.lltm_sequence, (h, h)),
        (extops.lstm_sequence, (h, h)),
        (extops.gru_sequence, h),
    ):
        assert extops.which_kernel(function, input, state) in names
        rows = input.transpose(0, 1)
        assert extops.which_kernel(function, rows, state, batch_first=True) in names
    assert extops.which_kernel(extops.LLTMLayer(FEATURES, STATE), input[:1]) == "step"
    # With lengths one step is a sequence like others.
    lengths = torch.ones(BATCH, dtype=torch.int64, device=device)
    state = torch.randn(BATCH, STATE, device=device)
    with torch.no_grad():
        for options in ({}, {"lengths": lengths}):
            kernel = extops.which_kernel(extops.gru_sequence, input[:1], state, **options)
            is_step = device == "cuda" and not options
            assert kernel == "step" if is_step else kernel in names


def test_which_kernel_of_something_else() -> None:
    with pytest.raises(TypeError, match=r"which_kernel: expected `call` .* but got LSTM\(5, 7\)"):
        extops.which_kernel(nn.LSTM(FEATURES, STATE), torch.randn(TIME, BATCH, FEATURES))
    with pytest.raises(TypeError, match=r"which_kernel: expected `state` .* but got None"):
        extops.which_kernel(extops.gru_sequence, torch.randn(TIME, BATCH, FEATURES))
    with pytest.raises(TypeError, match=r"which_kernel: expected `state` .* but got 5$"):
        extops.which_kernel(extops.lstm_sequence, torch.randn(TIME, BATCH, FEATURES), 5)
    with pytest.raises(TypeError, match=r"which_kernel: expected `input` .* but got list$"):
        extops.which_kernel(extops.LSTM(FEATURES, STATE), [1.0])


FRAMES = """
import sys, torch, extops

folder = extops.__path__[0]
input, state = torch.randn(5, 3, 8), (torch.zeros(1, 3, 16),) * 2

def frames(*arguments):
    found = []
    def note(frame, event, _):
        files = [x.f_code.co_filename for x in (frame, frame.f_back)]
        # A binding in Python, as older torch has it, is as slow as it is short.
        is_bindings = any("/binding/" in x for x in files)
        if event == "call" and files[0].startswith(folder) and not is_bindings:
            found.append(frame.f_code.co_name)
    sys.setprofile(note)
    module(*arguments)
    sys.setprofile(None)
    return found

for module in (extops.LSTM(8, 16), extops.accelerate(torch.nn.LSTM(8, 16))):
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            for given in ((input,), (input, state)):
                module(*given)
                known = vars(module).get("_extops_known", {})
                known.update(dict.fromkeys(known, "extops"))
                vars(module).pop("_extops_torchs", None)
                found = frames(*given)
                print(len(found), type(module).__module__, grad, len(given), *found, sep=", ")
"""


def test_frames_of_a_call(tmp_path: Path) -> None:
    """Each Python function that a plain call runs through takes the host a tenth of a microsecond and more."""
    done = subprocess.run(
        [sys.executable, "-c", FRAMES], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr
    calls = [line.split(", ") for line in done.stdout.splitlines()]
    assert len(calls) == 8
    assert all(int(count) <= 20 for count, *_ in calls), done.stdout
