"""Bidirectional layers, called on many streams and in many threads at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import extops

pytestmark = pytest.mark.gpu

STREAMS = 4
ROUNDS = 10

# time, batch, features, state
SIZES = {
    "group": ((20, 128, 1024, 1024), torch.bfloat16),
    "block": ((50, 64, 128, 128), torch.float32),
    "cluster": ((20, 64, 512, 512), torch.float32),
}
by_size = pytest.mark.parametrize(("sizes", "dtype"), SIZES.values(), ids=SIZES)


def forward(layer: extops.LLTMLayer, input: Tensor) -> list[Tensor]:
    with torch.no_grad():
        output, last = layer(input)
    return [output, *last]


def training(layer: extops.LLTMLayer, input: Tensor) -> list[Tensor]:
    leaf = input.detach().requires_grad_()
    output, last = layer(leaf * 1)  # which nobody holds any more when the backward has read it
    loss = torch.stack([x.float().square().mean() for x in (output, *last)]).sum()
    return list(torch.autograd.grad(loss, [leaf, *layer.parameters()]))


by_mode = pytest.mark.parametrize("mode", [forward, training], ids=lambda it: it.__name__)
Mode = Callable[[extops.LLTMLayer, Tensor], list[Tensor]]


def problem(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, mode: Mode
) -> tuple[extops.LLTMLayer, list[Tensor], list[list[Tensor]]]:
    """A layer, an input for each stream, and what each gives alone."""
    time, batch, features, state = sizes
    layer = extops.LLTMLayer(
        features, state, num_layers=2, bidirectional=True, device="cuda", dtype=dtype
    )
    inputs = [
        torch.randn(time, batch, features, device="cuda", dtype=dtype) for _ in range(STREAMS)
    ]
    expected = []
    for input in inputs:
        expected.append(mode(layer, input))
        torch.cuda.synchronize()
    return layer, inputs, expected


def differences(found: list[Tensor], expected: list[Tensor]) -> Tensor:
    """How many results differ, without waiting for the GPU."""
    return torch.stack([(x != y).any() for x, y in zip(found, expected, strict=True)]).sum()


def calls(layer: extops.LLTMLayer, input: Tensor, expected: list[Tensor], mode: Mode) -> Tensor:
    """How many results of many calls on the current stream differ from what they are alone."""
    return torch.stack([differences(mode(layer, input), expected) for _ in range(ROUNDS)]).sum()


@by_mode
@by_size
def test_streams_in_turn(sizes: tuple[int, int, int, int], dtype: torch.dtype, mode: Mode) -> None:
    layer, inputs, expected = problem(sizes, dtype, mode)
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]
    matrix = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    wrong = []
    for round in range(ROUNDS):
        for place, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if (round + place) % 3 == 0:
                    matrix @ matrix  # so that this stream falls behind the others
                wrong.append(differences(mode(layer, inputs[place]), expected[place]))
    torch.cuda.synchronize()
    assert sum(x.item() for x in wrong) == 0


@by_mode
@by_size
@pytest.mark.parametrize("own_streams", [True, False], ids=["own", "shared"])
def test_threads(
    own_streams: bool, sizes: tuple[int, int, int, int], dtype: torch.dtype, mode: Mode
) -> None:
    """Each on a stream of its own, or all on the default one."""
    layer, inputs, expected = problem(sizes, dtype, mode)
    streams = [
        torch.cuda.Stream() if own_streams else torch.cuda.default_stream() for _ in range(STREAMS)
    ]
    torch.cuda.synchronize()

    def work(place: int) -> Tensor:
        with torch.cuda.stream(streams[place]):
            return calls(layer, inputs[place], expected[place], mode)

    with ThreadPoolExecutor(STREAMS) as pool:
        wrong = list(pool.map(work, range(STREAMS)))
    torch.cuda.synchronize()
    assert sum(x.item() for x in wrong) == 0


@by_mode
@by_size
def test_captured_graphs(sizes: tuple[int, int, int, int], dtype: torch.dtype, mode: Mode) -> None:
    """Replayed at the same time, beside calls that no graph holds. Each is captured on a stream of its own: cuBLAS has
    one workspace for each. There another kernel may be faster, whose sums have another order.
    """
    layer, inputs, expected = problem(sizes, dtype, mode)
    alone = [[torch.zeros_like(x) for x in each] for each in expected]
    graphs = []
    streams = [torch.cuda.Stream() for _ in range(2)]
    for place, stream in enumerate(streams):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = mode(layer, inputs[place])
            differ = differences(found, alone[place])
        graphs.append((graph, differ))
        graph.replay()
        torch.cuda.synchronize()
        for x, value, outside in zip(alone[place], found, expected[place], strict=True):
            x.copy_(value)
            assert (x - outside).float().norm() <= 0.03 * outside.float().norm()
    torch.cuda.synchronize()
    wrong = []
    for _ in range(ROUNDS):
        for place, (graph, differ) in enumerate(graphs):
            with torch.cuda.stream(streams[place]):
                graph.replay()
                wrong.append(differ.clone())
        wrong.append(differences(mode(layer, inputs[2]), expected[2]))
    torch.cuda.synchronize()
    assert sum(x.item() for x in wrong) == 0


def test_gradients_that_outlive_the_backward() -> None:
    """An optimizer reads them on the stream of the caller and drops them, while others call the same layer."""
    sizes, dtype = SIZES["block"]
    layer, inputs, expected = problem(sizes, dtype, training)
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]
    matrix = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    wrong = []
    for _ in range(ROUNDS):
        for place, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found = training(layer, inputs[place])
                matrix @ matrix  # the gradients are read late
                wrong.append(differences(found, expected[place]))
                del found
    torch.cuda.synchronize()
    assert sum(x.item() for x in wrong) == 0
