"""Layers of torch that our modules call: cuDNN's on a GPU, and torch's own on a CPU."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import extops
from extops import _private, rnn
from extops.choosing import _choice, _cudnn
from operators import GPU, Tensors, by_device, dtype_name
from processes import run_alone

FEATURES, STATE, TIME, BATCH = 3, 4, 5, 2
OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": False, "batch_first": True},
    {"num_layers": 2, "bidirectional": True},
    {"num_layers": 2, "dropout": 0.5, "batch_first": True, "training": False},
]
by_layer = pytest.mark.parametrize("name", ["LSTM", "GRU"])
by_options = pytest.mark.parametrize("options", OPTIONS, ids=lambda it: "-".join(it) or "plain")


def choose(patch: pytest.MonkeyPatch, choice: str) -> None:
    """Has torch's layers compute all that they can, or ours; on a GPU, torch's are cuDNN's."""
    on_gpu = _choice.CUDNN if choice == _choice.TORCH else choice
    patch.setattr(rnn, "_plans", {})
    patch.setattr(_choice, "on_cpu", lambda *_: choice)
    patch.setattr(_cudnn, "chosen", lambda *_: on_gpu)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """All layers are torch's; whether the results have gradients, for each call."""
    found = []
    torchs = _cudnn.run

    def run(*arguments: Any) -> Any:
        results = torchs(*arguments)
        found.append(results[0].requires_grad)
        return results

    choose(monkeypatch, _choice.TORCH)
    monkeypatch.setattr(_cudnn, "run", run)
    return found


def layer_of(
    name: str,
    dtype: torch.dtype = torch.float64,
    training: bool = True,
    device: str = "cpu",
    **options: Any,
) -> nn.Module:
    kind = getattr(extops, name)
    return kind(FEATURES, STATE, dtype=dtype, device=device, **options).train(training)


def arguments_of(layer: nn.Module, batch: tuple[int, ...] = (BATCH,)) -> Tensors:
    """The input and all states, which require gradients."""
    leading = (*batch, TIME) if layer.batch_first else (TIME, *batch)
    states = layer.num_layers * (1 + layer.bidirectional), *batch, STATE
    like = next(layer.parameters())
    options = {"dtype": like.dtype, "device": like.device, "requires_grad": True}
    shapes = [(*leading, FEATURES)] + [states] * (2 if isinstance(layer, extops.LSTM) else 1)
    return tuple(torch.randn(shape, **options) for shape in shapes)


def results_of(layer: nn.Module, arguments: Tensors) -> Tensors:
    input, *states = arguments
    output, last = layer(input, tuple(states) if len(states) > 1 else states[0])
    return (output, *last) if isinstance(last, tuple) else (output, last)


def loss_of(results: Tensors) -> Tensor:
    return torch.stack([(result**2).sum() for result in results]).sum()


def found_by(layer: nn.Module, arguments: Tensors, order: int = 1) -> Tensors:
    """Results and gradients."""
    leaves = [*arguments, *layer.parameters()]
    results = found = results_of(layer, arguments)
    for again in range(order):
        found = torch.autograd.grad(loss_of(found), leaves, create_graph=again < order - 1)
    return *results, *found


def by_kernels(layer: nn.Module, arguments: Tensors, order: int = 1) -> Tensors:
    with pytest.MonkeyPatch.context() as patch:
        choose(patch, _choice.OURS)
        return found_by(layer, arguments, order)


@by_layer
@by_options
@pytest.mark.parametrize("batch", [(BATCH,), ()], ids=["batch", "no_batch"])
@pytest.mark.parametrize("order", [1, 2, 3])
@by_device
def test_values_and_gradients(
    device: str,
    order: int,
    batch: tuple[int, ...],
    options: dict[str, Any],
    name: str,
    runs: list[bool],
) -> None:
    layer = layer_of(name, device=device, **options)
    arguments = arguments_of(layer, batch)
    expected = by_kernels(layer, arguments, order)
    assert runs == []
    torch.testing.assert_close(found_by(layer, arguments, order), expected)
    assert runs == [True]
    with torch.no_grad():
        results = results_of(layer, arguments)
    assert runs == [True, False]
    torch.testing.assert_close(results, tuple(x.detach() for x in expected[: len(results)]))


@by_layer
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@by_device
@pytest.mark.usefixtures("runs")
def test_gradcheck(device: str, bias: bool, name: str) -> None:
    layer = layer_of(name, num_layers=2, bidirectional=True, bias=bias, device=device)
    names = [name for name, _ in layer.named_parameters()]
    count = 3 if name == "LSTM" else 2

    def run(*leaves: Tensor) -> Tensors:
        for name, value in zip(names, leaves[count:], strict=True):
            layer._parameters[name] = value
        return results_of(layer, leaves[:count])

    leaves = *arguments_of(layer), *(x.detach().requires_grad_() for x in layer.parameters())
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


@by_layer
@by_device
@pytest.mark.usefixtures("runs")
def test_gradients_that_are_asked_for(device: str, name: str) -> None:
    """Of some inputs, towards some results; of others there is none."""
    layer = layer_of(name, num_layers=2, device=device)
    arguments = arguments_of(layer)
    layer.weight_hh_l1.requires_grad_(False)
    wanted = [arguments[1], layer.weight_ih_l0, layer.bias_hh_l1]
    found = []
    for run in (found_by, by_kernels):
        *results, _ = run(layer, arguments, 0)[:3]
        found.append(torch.autograd.grad(results[-1].sum(), wanted, retain_graph=True))
        results[0][0].sum().backward()
        found[-1] += tuple(x.grad for x in (*arguments, *layer.parameters()) if x is not None)
        for x in (*arguments, *layer.parameters()):
            x.grad = None
    torch.testing.assert_close(*found)
    assert [x is None for x in found[0][-8:]].count(True) == 1


@by_layer
@by_device
@pytest.mark.usefixtures("runs")
def test_a_graph_that_is_kept(device: str, name: str) -> None:
    layer = layer_of(name, device=device)
    loss, leaves = loss_of(results_of(layer, arguments_of(layer))), list(layer.parameters())
    found = [torch.autograd.grad(loss, leaves, retain_graph=keep) for keep in (True, True, False)]
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, leaves)


@by_layer
@by_device
@pytest.mark.usefixtures("runs")
def test_a_graph_that_is_gone_through_holds_no_memory(device: str, name: str) -> None:
    layer = layer_of(name, device=device)
    kept: list[StorageWeakRef] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    arguments = tuple(x.clone() for x in arguments_of(layer))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(results_of(layer, arguments))
    del arguments
    assert not any(x.expired() for x in kept)
    loss.backward()
    parameters = {x.untyped_storage()._cdata for x in layer.parameters()}
    assert {x.cdata for x in kept if not x.expired()} <= parameters


@by_layer
@pytest.mark.parametrize("what", ["weight", "input"])
@by_device
@pytest.mark.usefixtures("runs")
def test_what_must_not_change_before_the_backward(device: str, what: str, name: str) -> None:
    layer = layer_of(name, torch.float32, device=device)
    input, *states = arguments_of(layer)
    input = input.clone()
    results = results_of(layer, (input, *states))
    with torch.no_grad():
        {"weight": layer.weight_hh_l0, "input": input}[what].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_of(results).backward()
    # It was off within the backward, which the engine's thread has dropped before it runs another.
    loss_of(results_of(layer, (input, *states))).backward()
    assert _private.cudnn_allows_tf32()


@by_layer
@pytest.mark.parametrize("reentrant", [True, False])
@by_device
@pytest.mark.usefixtures("runs")
def test_checkpoint(device: str, reentrant: bool, name: str) -> None:
    layer = layer_of(name, device=device)
    arguments = arguments_of(layer)
    expected = found_by(layer, arguments)
    results = checkpoint(
        lambda *given: results_of(layer, given), *arguments, use_reentrant=reentrant
    )
    loss_of(results).backward()
    found = [x.grad for x in (*arguments, *layer.parameters())]
    torch.testing.assert_close(found, list(expected[len(results) :]))


@by_layer
def test_what_stays_with_our_kernels(name: str, runs: list[bool]) -> None:
    layer = layer_of(name, torch.float32, num_layers=2)
    arguments = arguments_of(layer)
    with torch.autocast("cpu", torch.bfloat16):
        results_of(layer, arguments)
    torch.func.vmap(lambda x: layer(x.unsqueeze(1))[0], in_dims=1)(arguments[0])
    torch.jit.trace(layer, arguments[0].detach(), check_trace=False)
    layer.weight_ih_l1 = nn.Parameter(layer.weight_ih_l1[:, :-1].detach())
    with pytest.raises(RuntimeError, match="expected `weight_ih` to have shape"):
        results_of(layer, arguments)
    assert runs == []


@by_layer
@pytest.mark.parametrize("slow", [False, True], ids=["forward", "backward"])
def test_either_pass_decides(slow: bool, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def kernel_of(cell: str, state_size: int, backward: bool, place: Any) -> str:
        asked.append((cell, state_size, backward, place))
        return "step" if backward == slow else "group"

    def place_of(input: Tensor, *sizes: int) -> Any:
        return sizes

    def acceptable(*_: object) -> bool:
        return True

    for stand_in in (kernel_of, place_of):
        monkeypatch.setattr(_cudnn, stand_in.__name__, stand_in)
    monkeypatch.setattr(_cudnn, "is_acceptable", acceptable)
    input = torch.zeros(400, BATCH, FEATURES)
    problem = _choice.Problem(
        name.lower(), input.dtype, 400, BATCH, 400 * BATCH, FEATURES, STATE, 1, 1, True
    )
    assert _cudnn.chosen(problem, input) == "cudnn"
    without = problem._replace(with_gradients=False)
    assert _cudnn.chosen(without, input) == ("" if slow else "cudnn")
    both = [(name.lower(), STATE, backward, (400, BATCH)) for backward in (False, True)]
    assert asked == [*both, both[0]]


@pytest.mark.parametrize("state", [40, 184, 300])
@pytest.mark.parametrize("rows", [40, 30], ids=["padded", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=dtype_name)
def test_cudnn_is_not_called_where_it_is_wrong(
    dtype: torch.dtype, rows: int, state: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "cudnn_is_acceptable", lambda _: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    problem = _choice.Problem("lstm", dtype, 5, 8, rows, 40, state, 1, 1, True)
    is_wrong = dtype is torch.float16 and rows == 40 and state < 256
    assert _cudnn.is_acceptable(problem, torch.zeros(1, dtype=dtype)) != is_wrong


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("size", [32, 40, 48, 88, 144, 184, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=dtype_name)
@by_layer
def test_values_of_few_units(
    name: str,
    dtype: torch.dtype,
    size: int,
    device: str,
    take: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a kernel of all steps, as on most GPUs, where cuDNN is called where it serves."""
    take("step")
    monkeypatch.setattr(rnn, "_plans", {})
    layer = getattr(extops, name)(size, size, dtype=dtype, device=device)
    exact = copy.deepcopy(layer).double()
    input = torch.randn(20, 8, size, device=device, dtype=dtype)
    is_cudnns = dtype is not torch.float16 or size == 512
    with torch.no_grad():
        assert extops.which_kernel(layer, input) == ("cudnn" if is_cudnns else "step")
        found, expected = layer(input)[0], exact(input.double())[0]
    tolerance = 16 * torch.finfo(dtype).eps if dtype is not torch.float32 else 1e-5
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)


@by_layer
@pytest.mark.parametrize("flag", ["bias", "bidirectional", "batch_first"])
def test_a_number_for_a_flag_is_that_flag(flag: str, name: str, runs: list[bool]) -> None:
    """They are the same key of a plan, and torch's functions take no number."""
    layer = layer_of(name, **{flag: True})
    arguments = arguments_of(layer)
    expected = results_of(layer, arguments)
    setattr(layer, flag, 1)
    for _ in range(2):
        rnn._plans.clear()
        torch.testing.assert_close(results_of(layer, arguments), expected)
        setattr(layer, flag, True)
        torch.testing.assert_close(results_of(layer, arguments), expected)
        setattr(layer, flag, 1)
    assert runs == [True] * 5


@pytest.mark.parametrize("device", [GPU])
@by_layer
def test_the_switch_of_cudnn(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked in each call."""
    layer = getattr(extops, name)(650, 650, device=device)
    input = torch.randn(35, 20, 650, device=device)
    called = []
    torchs = _cudnn.run
    monkeypatch.setattr(_cudnn, "run", lambda *given: called.append(1) or torchs(*given))
    with torch.no_grad():
        for is_on in (True, False, True):
            monkeypatch.setattr(torch.backends.cudnn, "enabled", is_on)
            assert (extops.which_kernel(layer, input) == "cudnn") == is_on
            layer(input)
    assert len(called) == 2


@by_layer
def test_a_kind_of_calls_is_chosen_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def choice(problem: _choice.Problem, _: _choice.Cpu) -> str:
        asked.append((problem.time, problem.batch, problem.rows, problem.with_gradients))
        return _choice.TORCH

    monkeypatch.setattr(rnn, "_plans", {})
    monkeypatch.setattr(rnn, "_MOST_PLANS", 4)
    monkeypatch.setattr(_choice, "on_cpu", choice)
    layer = layer_of(name, torch.float32)
    packed = pack_sequence([torch.zeros(2, FEATURES), torch.zeros(1, FEATURES)])
    kinds: list[Any] = [torch.zeros(5, 2, FEATURES), torch.zeros(2, 5, FEATURES), packed]
    for _ in range(2):
        for input in kinds:
            layer(input)
    once = [(5, 2, 10, True), (2, 5, 10, True), (2, 2, 3, True)]
    assert asked == once
    with torch.no_grad():
        layer(kinds[0])
        layer(kinds[1])  # more kinds than are kept
    assert asked == [*once, (5, 2, 10, False), (2, 5, 10, False)]
    assert len(rnn._plans) == 1
    layer.batch_first = True
    layer(kinds[0])
    assert asked[5:] == [(2, 5, 10, True)]


@by_layer
@pytest.mark.parametrize("allowed", [False, True], ids=["strict", "tf32"])
@pytest.mark.parametrize("device", [GPU])
@pytest.mark.usefixtures("runs")
def test_the_switch_of_products_is_the_layers(
    device: str, allowed: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN has its own, which is on by default: it is turned for the call and its backward alone."""
    seen = []

    def watched(_: object) -> None:
        seen.append(_private.cudnn_allows_tf32())

    layer = layer_of(name, torch.float32, device=device)
    kind = getattr(torch, name.lower())

    def run(*given: Any) -> Any:
        watched(given)
        return kind(*given)

    monkeypatch.setattr(torch, name.lower(), run)
    monkeypatch.setattr(_private, "allows_tf32", lambda: allowed)
    assert _private.cudnn_allows_tf32()
    results = results_of(layer, arguments_of(layer))
    assert _private.cudnn_allows_tf32()
    results[0].grad_fn.register_prehook(watched)  # it runs after that of the layer
    loss_of(results).backward()
    assert _private.cudnn_allows_tf32()
    assert seen == [allowed] * 2


@by_layer
def test_the_backward_of_a_node_that_no_gradient_reaches(name: str) -> None:
    """The engine then calls a node with nothing, outside of whose own backward no hook can be added to it."""
    with torch.enable_grad():
        _cudnn._before_backward((None,) * (3 if name == "LSTM" else 2))
    assert not _cudnn._strict._calls


def by_sines(order: int) -> list[Tensor]:
    """The gradients of a sum of sines up to an order, where a user's hook doubles the first, and ours are before it."""
    input = torch.randn(3, requires_grad=True)
    output = input.sin()
    node: Any = output.grad_fn
    node.register_prehook(_cudnn._before_backward)
    node.register_hook(lambda found, _: (found[0] * 2,))
    found = [output.sum()]
    for again in range(order):
        found += torch.autograd.grad(found[-1].sum(), input, create_graph=again < order - 1)
    return [input, *found[1:]]


@pytest.mark.parametrize("order", [1, 2])
def test_hooks_of_a_user_come_after_ours(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any node: what cuDNN's would be composed of is what has no gradient of its own."""
    found: list[Tensor] = []

    def composed(_: object, towards: Tensors) -> Tensors:
        (node,) = {_private.node_of_backward()}
        return (towards[0] * node._saved_self.cos(),)

    monkeypatch.setattr(_cudnn, "_composed_gradients", composed)
    input, *found = by_sines(order)
    expected = (2 * input.cos(), -2 * input.sin())
    for x, y in zip(found, expected, strict=False):
        torch.testing.assert_close(x, y)
    assert len(found) == order


@pytest.mark.parametrize("knows_node", [True, False])
def test_a_strict_backward_of_a_torch_that_names_no_node(
    knows_node: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only gradients of higher order need to know it."""
    seen = []
    monkeypatch.setattr(_cudnn, "is_strict", lambda _: True)
    monkeypatch.setattr(_private, "knows_node", knows_node)
    if not knows_node:
        monkeypatch.setattr(_private, "node_of_backward", _private._unknown_node)
    assert _private.cudnn_allows_tf32()
    input = torch.randn(3, requires_grad=True)
    output = input.sin()
    node: Any = output.grad_fn
    node.register_prehook(_cudnn._before_backward)
    node.register_prehook(lambda _: seen.append(_private.cudnn_allows_tf32()))
    output.sum().backward()
    torch.testing.assert_close(input.grad, input.detach().cos())
    assert seen == [False]
    assert _private.cudnn_allows_tf32()


@pytest.mark.parametrize("allowed", [False, True])
def test_the_switch_is_turned_for_calls_that_overlap(allowed: bool) -> None:
    """As those of threads do: the last one turns it back."""
    before = _private.cudnn_allows_tf32()
    _private.set_cudnn_tf32(allowed)
    try:
        _cudnn._strict.__enter__()
        with _cudnn._strict:
            assert not _private.cudnn_allows_tf32()
        assert not _private.cudnn_allows_tf32()
        _cudnn._strict.__exit__()
        assert _private.cudnn_allows_tf32() == allowed
    finally:
        _private.set_cudnn_tf32(before)


@by_device
def test_a_graph_that_threads_go_through(device: str, runs: list[bool]) -> None:
    layer = layer_of("LSTM", torch.float32, num_layers=2, device=device)
    loss, leaves = loss_of(results_of(layer, arguments_of(layer))), list(layer.parameters())
    expected = torch.autograd.grad(loss, leaves, retain_graph=True)
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda _: torch.autograd.grad(loss, leaves, retain_graph=True), range(40))
    for gradients in found:
        torch.testing.assert_close(gradients, expected)
    assert runs == [True]
    assert _private.cudnn_allows_tf32()


class Flattening(nn.Module):
    """Many models call it before the layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, input: Tensor) -> Tensor:
        self.layer.flatten_parameters()
        output: Tensor = self.layer(input)[0]
        return output


@pytest.mark.parametrize("device", ["cpu", GPU])
@by_layer
@pytest.mark.filterwarnings("error:Accessing the data pointer")
@pytest.mark.usefixtures("dynamo")
def test_flattened_in_a_trace_or_a_transform(name: str, device: str) -> None:
    model = Flattening(layer_of(name).to(device))
    input = arguments_of(model.layer)[0].detach().to(device)
    expected = model(input)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(input), expected)
    torch.testing.assert_close(torch.jit.trace(model, input)(input), expected)
    torch.testing.assert_close(torch.export.export(model, (input,)).module()(input), expected)
    parameters = dict(model.named_parameters())
    found, _ = torch.func.vjp(lambda x: torch.func.functional_call(model, x, input), parameters)
    torch.testing.assert_close(found, expected)
    with FakeTensorMode():
        layer = getattr(extops, name)(FEATURES, STATE, device=device)
    assert layer.weight_hh_l0.device.type == device


# -- packed rows ---------------------------------------------------------------------------------


LENGTHS = [(5, 2, 2, 1), (5, 5, 3, 3), (2, 5, 1, 2)]
by_lengths = pytest.mark.parametrize("lengths", LENGTHS, ids=lambda it: "".join(map(str, it)))


def pack(lengths: tuple[int, ...], dtype: torch.dtype = torch.float64) -> PackedSequence:
    rows = [torch.randn(length, FEATURES, dtype=dtype) for length in lengths]
    return pack_sequence(rows, enforce_sorted=lengths == tuple(sorted(lengths, reverse=True)))


def found_of_packed(
    layer: nn.Module, packed: PackedSequence, states: Tensors, order: int = 1
) -> Tensors:
    data = packed.data.detach().requires_grad_()
    given = PackedSequence(data, *packed[1:])
    output, last = layer(given, states if len(states) > 1 else states[0])
    for found, expected in zip(output[1:], packed[1:], strict=True):
        assert found is expected
    results = found = (output.data, *(last if isinstance(last, tuple) else (last,)))
    leaves = [data, *states, *layer.parameters()]
    for again in range(order):
        found = torch.autograd.grad(loss_of(found), leaves, create_graph=again < order - 1)
    return *results, *found


@by_layer
@by_options
@by_lengths
@pytest.mark.parametrize("order", [1, 2, 3])
def test_packed_rows(
    order: int, lengths: tuple[int, ...], options: dict[str, Any], name: str, runs: list[bool]
) -> None:
    layer = layer_of(name, **options)
    states = arguments_of(layer, (len(lengths),))[1:]
    packed = pack(lengths)
    with pytest.MonkeyPatch.context() as patch:
        choose(patch, _choice.OURS)
        expected = found_of_packed(layer, packed, states, order)
    assert runs == []
    torch.testing.assert_close(found_of_packed(layer, packed, states, order), expected)
    assert runs == [True]
    with torch.no_grad():
        output, _ = layer(packed)
    torchs = getattr(nn, name)(
        FEATURES, STATE, **{k: options[k] for k in options if k != "training"}
    )
    torchs.double().load_state_dict(layer.state_dict())
    torch.testing.assert_close(output.data, torchs.eval()(packed)[0].data.detach())


@by_layer
@by_options
@by_lengths
def test_packed_rows_on_a_cpu(lengths: tuple[int, ...], options: dict[str, Any], name: str) -> None:
    """torch's layer is a composition of differentiable calls there."""
    layer = layer_of(name, **options)
    states = arguments_of(layer, (len(lengths),))[1:]
    packed = pack(lengths)
    assert extops.which_kernel(layer, packed) == "torch"
    found = found_of_packed(layer, packed, states, 2)
    with pytest.MonkeyPatch.context() as patch:
        choose(patch, _choice.OURS)
        assert extops.which_kernel(layer, packed) == "cpu"
        torch.testing.assert_close(found, found_of_packed(layer, packed, states, 2))


@by_layer
@pytest.mark.usefixtures("runs")
def test_sizes_of_packed_rows_may_change_before_the_backward(name: str) -> None:
    layer = layer_of(name)
    packed = pack((5, 2))
    found = []
    for changed in (False, True):
        output = layer(packed)[0].data
        if changed:
            packed.batch_sizes.fill_(1)
        first = torch.autograd.grad(loss_of((output,)), layer.weight_hh_l0, create_graph=True)
        found.append((*first, *torch.autograd.grad(loss_of(first), layer.weight_ih_l0)))
    torch.testing.assert_close(*found)


@by_layer
@pytest.mark.parametrize("lengths", [(), (5, 2, 1)], ids=["padded", "packed"])
@pytest.mark.parametrize("order", [1, 2])
def test_dropout_between_torchs_layers(
    order: int, lengths: tuple[int, ...], name: str, runs: list[bool]
) -> None:
    """Masks are drawn once, as ours are: gradients of higher order see the same."""
    layer = layer_of(name, num_layers=3, bidirectional=True, dropout=0.5)
    arguments = arguments_of(layer, (len(lengths) or BATCH,))
    found = []
    for choice in (_choice.OURS, _choice.TORCH):
        torch.manual_seed(3)
        with pytest.MonkeyPatch.context() as patch:
            choose(patch, choice)
            if lengths:
                torch.manual_seed(4)
                packed = pack(lengths)
                found.append(found_of_packed(layer, packed, arguments[1:], order))
            else:
                found.append(found_by(layer, arguments, order))
    torch.testing.assert_close(*found)
    assert runs == [True] * 3


@by_layer
@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("lengths", [(), (5, 2, 1)], ids=["padded", "packed"])
def test_cudnn_drops_between_layers(lengths: tuple[int, ...], device: str, name: str) -> None:
    """As in torch's layer: the same masks, and no gradients of higher order."""
    options = {"num_layers": 3, "dropout": 0.5, "bidirectional": True}
    ours = getattr(extops, name)(FEATURES, STATE, device=device, **options)
    theirs = getattr(nn, name)(FEATURES, STATE, device=device, **options)
    theirs.load_state_dict(ours.state_dict())
    input: Any = torch.randn(TIME, BATCH, FEATURES, device=device)
    if lengths:
        input = pack_sequence([torch.randn(length, FEATURES, device=device) for length in lengths])
    with (
        pytest.MonkeyPatch.context() as patch,
        torch.backends.cudnn.flags(enabled=True, allow_tf32=False),
    ):
        choose(patch, _choice.TORCH)
        found = []
        for layer in (ours, theirs):
            torch.manual_seed(3)
            output = layer(input)[0]
            loss = (output.data if lengths else output).square().sum()
            found.append((loss, *torch.autograd.grad(loss, layer.parameters(), create_graph=True)))
        torch.testing.assert_close(*found)
        for _, gradient, *_ in found:
            with pytest.raises(RuntimeError, match=r"cudnn\.flags\(enabled=False\)"):
                gradient.square().sum().backward()


@by_layer
@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
@pytest.mark.parametrize("device", [GPU])
def test_a_checkpoint_drops_the_same_again(device: str, reentrant: bool, name: str) -> None:
    layer = getattr(extops, name)(FEATURES, STATE, 2, dropout=0.5, device=device)
    input = torch.randn(TIME, BATCH, FEATURES, device=device, requires_grad=True)
    outputs: list[Tensor] = []
    layer.register_forward_hook(lambda *given: outputs.append(given[2][0].detach()))
    with pytest.MonkeyPatch.context() as patch:
        choose(patch, _choice.TORCH)
        with set_checkpoint_early_stop(False):
            checkpoint(layer, input, use_reentrant=reentrant)[0].sum().backward()
    assert len(outputs) == 2
    assert torch.equal(*outputs)


@by_layer
@pytest.mark.usefixtures("runs")
def test_what_no_layer_takes_of_packed_rows(name: str) -> None:
    layer, packed = layer_of(name), pack((5, 2))
    for data in (torch.tensor(1.0), torch.randn(7)):
        with pytest.raises(RuntimeError, match=rf"^{name}: expected `input.data` to have 2 dim"):
            layer(PackedSequence(data, packed.batch_sizes))
    nested = torch.nested.as_nested_tensor([torch.zeros(2, STATE, dtype=torch.float64)])
    hx = (nested, nested) if name == "LSTM" else nested
    with pytest.raises(RuntimeError, match="expected `h_0` to be a dense"):
        layer(packed, hx)


@pytest.mark.parametrize("name", ["LSTMCell", "GRUCell", "RNNCell"])
def test_a_weight_without_dimensions(name: str) -> None:
    cell = getattr(extops, name)(FEATURES, STATE)
    cell.weight_hh = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(RuntimeError, match="expected `weight_hh` to have 2 dimensions"):
        cell(torch.randn(BATCH, FEATURES))


@by_layer
def test_a_replica_drops_by_itself(
    name: str, runs: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads of DataParallel do not know that a checkpoint computes again."""
    monkeypatch.setattr(_cudnn, "may_drop", lambda _: True)
    layer = layer_of(name, num_layers=3, dropout=0.5)
    layer(torch.randn(TIME, BATCH, FEATURES, dtype=torch.float64))
    assert len(runs) == 1
    layer._is_replica = True  # as torch.nn.parallel.replicate says
    layer(torch.randn(TIME, BATCH, FEATURES, dtype=torch.float64))
    assert len(runs) == 4


def test_when_cudnn_may_drop() -> None:
    """Not where the same may have to be dropped again."""
    on_gpu: Any = SimpleNamespace(is_cuda=True)
    found = []
    assert _cudnn.may_drop(on_gpu) and not _cudnn.may_drop(torch.zeros(1))
    with torch.no_grad():
        assert not _cudnn.may_drop(on_gpu)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert not _cudnn.may_drop(on_gpu)

    def hook(_: Tensor) -> None:
        with torch.enable_grad():
            found.append(_cudnn.may_drop(on_gpu))

    leaf = torch.zeros(1, requires_grad=True)
    leaf.register_hook(hook)
    leaf.sum().backward()
    assert found == [False]


@by_layer
def test_what_torch_refuses_of_packed_rows(name: str, runs: list[bool]) -> None:
    """No row at a step."""
    layer = layer_of(name)
    packed = pack((5, 2))
    sizes = torch.cat((packed.batch_sizes, torch.tensor([0])))
    longer = PackedSequence(packed.data, sizes)
    torch.testing.assert_close(layer(longer)[0].data, layer(packed)[0].data)
    assert runs == [True]
    with pytest.raises(RuntimeError, match=r"expected `input.batch_sizes` not to grow"):
        layer(PackedSequence(packed.data, torch.tensor([1, 2, 2, 2])))


def peaks(device: str) -> dict[tuple[str, bool], tuple[int, int]]:
    """Bytes that a call takes at most, of ours and of torch's layer, by its name and whether it is in training. For a
    process of its own.
    """
    if device == "cpu":
        torch.set_num_threads(1)
        # Memory of more than a few pages goes back to the system at once.
        ctypes.CDLL(None).mallopt(-3, 2**16)
    lengths = torch.tensor([1000, *[5] * 255])
    sizes = 256 - torch.bincount(lengths, minlength=1001).cumsum(0)[:-1]
    found = {}
    for name, training in itertools.product(("LSTM", "GRU"), (False, True)):
        both = []
        for library in (extops, nn):
            layer = getattr(library, name)(64, 128, device=device)
            for _ in range(4):  # libraries and Python take some in the first calls
                data = torch.randn(int(sizes.sum()), 64, device=device, requires_grad=training)
                with torch.set_grad_enabled(training), most_bytes(device) as most:
                    output = layer(PackedSequence(data, sizes))[0].data
                    if training:
                        output.sum().backward()
                del output
            both.append(most())
        found[name, training] = both[0], both[1]
    return found


@contextlib.contextmanager
def most_bytes(device: str) -> Iterator[Callable[[], int]]:
    """Beyond those that are held before."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated
    else:
        Path("/proc/self/clear_refs").write_text("5")
        before, most = bytes_of("VmRSS"), lambda: at_the_end
    yield lambda: most() - before
    at_the_end = bytes_of("VmHWM")


def bytes_of(what: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition(f"{what}:")[2].split()[0])


@by_device
def test_packed_rows_take_no_more_memory_than_of_torch(device: str) -> None:
    """One row is long: padded, the others would take a hundred times as much."""
    for call, (ours, theirs) in run_alone(peaks, device).items():
        assert ours <= 1.1 * theirs + 2**22, call  # of Python's own objects, too


# -- on a GPU ------------------------------------------------------------------------------------


def storages(tensors: Iterable[Tensor]) -> list[int]:
    return [x.untyped_storage().data_ptr() for x in tensors]


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize("how", ["ours", "accelerated"])
@by_layer
@pytest.mark.filterwarnings("error")
def test_parameters_lie_together(how: str, name: str, dtype: torch.dtype, device: str) -> None:
    """Else cuDNN would copy them in each call, of which torch warns."""
    library = extops if how == "ours" else nn
    layer = getattr(library, name)(650, 650, num_layers=2)
    parameters = list(layer.parameters())
    values = {name: x.to(dtype) for name, x in layer.state_dict().items()}
    layer = extops.accelerate(layer.to(device, dtype))
    assert all(x is y for x, y in zip(layer.parameters(), parameters, strict=True))
    assert len(set(storages(parameters))) == 1
    torch.testing.assert_close({name: x.cpu() for name, x in layer.state_dict().items()}, values)
    input = torch.randn(35, 20, 650, device=device, dtype=dtype)
    layer(input)[0].sum().backward()
    torch.optim.SGD(parameters, lr=0.1).step()
    places = [x.data_ptr() for x in parameters]
    assert len(set(storages(parameters))) == 1
    extops.accelerate(layer)
    assert [x.data_ptr() for x in parameters] == places
    copied = copy.deepcopy(layer)
    copied.flatten_parameters()
    torch.testing.assert_close(copied(input), layer(input))


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("shared", ["with another parameter", "with a buffer"])
def test_shared_parameters_stay(shared: str, device: str) -> None:
    layer = nn.LSTM(FEATURES, STATE, num_layers=2, device=device, dtype=torch.bfloat16)
    if shared == "with another parameter":
        layer.bias_hh_l0.data = layer.bias_ih_l0.data
    else:
        buffer = torch.zeros(1000, device=device, dtype=torch.bfloat16)
        layer.bias_hh_l0.data = buffer[: 4 * STATE]
    places = storages(layer.parameters())
    extops.accelerate(layer)
    assert storages(layer.parameters()) == places


@pytest.mark.parametrize("device", [GPU])
def test_parameters_stay_where_they_cannot_move(device: str) -> None:
    """While a graph is captured, which would move them when it is replayed, or of a model for inference alone."""
    with torch.inference_mode():
        layer = nn.LSTM(FEATURES, STATE, device=device, dtype=torch.bfloat16)
    places = storages(layer.parameters())
    extops.accelerate(layer)
    assert storages(layer.parameters()) == places
    layer = copy.deepcopy(nn.GRU(FEATURES, STATE, device=device, dtype=torch.bfloat16))
    places = storages(layer.parameters())
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        extops.accelerate(layer)
        torch.zeros(1, device=device)
    assert storages(layer.parameters()) == places
    layer.flatten_parameters()
    assert len(set(storages(layer.parameters()))) == 1


@pytest.mark.parametrize("device", [GPU])
@by_layer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize("bidirectional", [False, True], ids=["one", "both"])
def test_as_accurate_as_float64(
    bidirectional: bool, dtype: torch.dtype, name: str, device: str
) -> None:
    time, batch, size = 35, 20, 650
    options: dict[str, Any] = {"num_layers": 2, "bidirectional": bidirectional, "device": device}
    layer = getattr(extops, name)(size, size, dtype=dtype, **options)
    exact = getattr(extops, name)(size, size, dtype=torch.float64, **options)
    exact.load_state_dict(layer.state_dict())
    input = torch.randn(time, batch, size, device=device, dtype=dtype, requires_grad=True)
    is_cudnns = dtype is not torch.bfloat16 or torch.backends.cudnn.version() >= 91300
    assert extops.which_kernel(layer, input) == ("cudnn" if is_cudnns else "step")
    assert extops.which_kernel(exact, input.double()) == "step"
    found = []
    for module, given in ((layer, input), (exact, input.detach().double().requires_grad_())):
        output, _ = module(given)
        leaves = [given, *module.parameters()]
        gradients = torch.autograd.grad(output.double().square().sum(), leaves)
        found.append([output.detach().double(), *(x.double() for x in gradients)])
    tolerance = (64 if dtype is torch.float32 else 16) * torch.finfo(dtype).eps
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(
            actual, expected, rtol=0, atol=tolerance * float(expected.abs().max())
        )


@pytest.mark.parametrize("device", [GPU])
@by_layer
def test_an_output_must_not_change_before_the_backward(name: str, device: str) -> None:
    layer = getattr(extops, name)(650, 650, device=device)
    output, _ = layer(torch.randn(35, 20, 650, device=device))
    with torch.no_grad():
        output.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("device", [GPU])
@by_layer
def test_strict_float32(name: str, device: str) -> None:
    """Whatever cuDNN's switch is, which TF32 would show in the third digit."""
    layer = getattr(extops, name)(650, 650, device=device)
    input = torch.randn(35, 20, 650, device=device)
    assert extops.which_kernel(layer, input) == "cudnn"
    with torch.no_grad():
        found, _ = layer(input)
        expected, _ = layer.double()(input.double())
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    assert _private.cudnn_allows_tf32()


@pytest.mark.parametrize("device", [GPU])
@by_layer
def test_captured_in_a_graph(name: str, device: str) -> None:
    layer = getattr(extops, name)(650, 650, device=device)
    input = torch.randn(35, 20, 650, device=device)
    with torch.no_grad():
        expected, _ = layer(input)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found, _ = layer(input)
    graph.replay()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
