"""Packed rows that are padded in pieces."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence

import extops
from extops import _packing
from operators import Tensors, by_device

FEATURES, STATE = 3, 4
LENGTHS = [(9, 2, 2, 1), (9, 8, 7, 6, 5, 4, 3, 2, 1), (2, 9, 1, 2), (4, 4, 4)]


@pytest.mark.parametrize(
    ("sizes", "shares"),
    [
        ([3, 3, 3], [(0, 3)]),
        ([9, 9, 1, 1, 1], [(0, 2), (2, 5)]),
        ([256] * 5 + [1] * 95, [(0, 5), (5, 100)]),
        ([100, 97, 94, 91, 88], [(0, 5)]),
        ([100, 80, 60, 40, 20], [(0, 2), (2, 3), (3, 5)]),
        ([64 - step // 4 for step in range(256)], [(0, 64), (64, 128), (128, 192), (192, 256)]),
        ([2], [(0, 1)]),
    ],
)
def test_pieces(sizes: list[int], shares: list[tuple[int, int]]) -> None:
    assert _packing._shares(sizes) == shares
    padded = sum((end - start) * sizes[start] for start, end in shares)
    assert padded <= 1.25 * sum(sizes)


def results_of(layer: nn.Module, packed: PackedSequence, states: Tensors) -> Tensors:
    """With gradients."""
    torch.manual_seed(2)  # of the masks
    data = packed.data.detach().requires_grad_()
    output, last = layer(
        PackedSequence(data, *packed[1:]), states if len(states) > 1 else states[0]
    )
    results = output.data, *(last if isinstance(last, tuple) else (last,))
    loss = torch.stack([(x**2).sum() for x in results]).sum()
    return *results, *torch.autograd.grad(loss, (data, *states, *layer.parameters()))


@by_device
@pytest.mark.parametrize("name", ["LLTMLayer", "LSTM", "GRU"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda it: "".join(map(str, it)))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_layers": 2, "bidirectional": True},
        {"num_layers": 3, "dropout": 0.5, "bias": False},
    ],
    ids=lambda it: "-".join(it) or "plain",
)
def test_pieces_are_as_all(
    options: dict[str, Any],
    lengths: tuple[int, ...],
    name: str,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make: dict[str, Any] = {"device": device, "dtype": torch.float64}
    layer = getattr(extops, name)(FEATURES, STATE, **make, **options)
    rows = [torch.randn(length, FEATURES, **make) for length in lengths]
    packed = pack_sequence(rows, enforce_sorted=lengths == tuple(sorted(lengths, reverse=True)))
    count = layer.num_layers * (1 + layer.bidirectional), len(lengths), STATE
    number = 1 if name == "GRU" else 2
    states = tuple(torch.randn(count, **make, requires_grad=True) for _ in range(number))
    expected = results_of(layer, packed, states)
    taken: list[int] = []
    pieces_of = _packing.pieces_of

    def counted(*arguments: Any) -> Any:
        found = pieces_of(*arguments)
        taken.append(len(found))
        return found

    monkeypatch.setattr(_packing, "pieces_of", counted)
    monkeypatch.setattr(_packing, "_FEW_BYTES", 0)
    torch.testing.assert_close(results_of(layer, packed, states), expected)
    if len(set(lengths)) > 1:
        assert len(taken) == 1
        assert taken[0] > 1


def test_pieces_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch's layer is not called."""
    layer = extops.LSTM(FEATURES, STATE)
    packed = pack_sequence([torch.randn(n, FEATURES) for n in LENGTHS[0]])
    found: list[Tensor] = []
    for few in (_packing._FEW_BYTES, 0):
        monkeypatch.setattr(_packing, "_FEW_BYTES", few)
        with torch.autocast("cpu", torch.bfloat16):
            found.append(layer(packed)[0].data)
    torch.testing.assert_close(*found)


@by_device
@pytest.mark.parametrize("bidirectional", [False, True], ids=["one", "both"])
@pytest.mark.parametrize("name", ["LLTMLayer", "LSTM", "GRU"])
def test_the_states_of_pieces_have_the_dtype_of_all(
    name: str, bidirectional: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first state is float32, and those after a step are as autocast has them."""
    layer = getattr(extops, name)(FEATURES, STATE, bidirectional=bidirectional, device=device)
    packed = pack_sequence([torch.randn(n, FEATURES, device=device) for n in LENGTHS[0]])
    found = []
    for few in (_packing._FEW_BYTES, 0):
        monkeypatch.setattr(_packing, "_FEW_BYTES", few)
        with torch.autocast(device, torch.float16 if device == "cuda" else torch.bfloat16):
            output, states = layer(packed)
        states = states if isinstance(states, tuple) else (states,)
        found.append([x.dtype for x in (output.data, *states)])
    assert found[0] == found[1]


@by_device
def test_what_is_kept_of_packed_rows(device: str) -> None:
    """One row is long: padded, the others would take a hundred times as much."""
    layer = extops.LLTMLayer(64, 128, device=device)
    sizes = torch.tensor([256] * 5 + [1] * 995)
    data = torch.randn(int(sizes.sum()), 64, device=device)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output, _ = layer(PackedSequence(data, sizes))
    assert output.data.shape == (len(data), 128)
    parameters = sum(x.nbytes for x in layer.parameters())
    # Of a row: the input, three gates, the cell, and the output.
    assert sum(kept.values()) <= 1.2 * len(data) * 4 * (64 + 5 * 128) + parameters + 2**20


@by_device
@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("name", ["LLTMLayer", "LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("is_sorted", [True, False], ids=["sorted", "unsorted"])
@pytest.mark.every(4, "name", "is_sorted")
def test_the_compiler_leaves_a_call_with_packed_rows_as_it_is(
    is_sorted: bool, name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it leaves torch's: it broke ours into several graphs, which padded all rows."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # in which kernels differ
    options = {"num_layers": 2, "bidirectional": True, "device": device}
    layer = getattr(extops, name)(FEATURES, STATE, **options)
    graphs: list[torch.fx.GraphModule] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(module)
        return module

    def run(input: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(input, lengths, enforce_sorted=is_sorted)
        output: Tensor = layer(packed)[0].data
        return output * 2

    compiled = torch.compile(run, backend=backend)
    for lengths in ((9, 2, 1), (8, 8, 7), (9, 9, 9)) if is_sorted else ((2, 9, 1), (7, 8, 8)):
        input = torch.randn(9, 3, FEATURES, device=device, requires_grad=True)
        results = [each(input, torch.tensor(lengths)) for each in (compiled, run)]
        leaves = input, *layer.parameters()
        gradients = [torch.autograd.grad((x**2).sum(), leaves) for x in results]
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*gradients)
    if is_sorted:  # only data tells how many rows there are
        called = {node.target for x in graphs for node in x.graph.nodes if "call" in node.op}
        assert called <= {operator.mul}, "a graph has more than what the caller computes"
