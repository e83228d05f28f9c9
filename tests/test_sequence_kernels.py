"""The kernels of all steps on a GPU, whose blocks wait for each other: they end whatever else the GPU does."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

import operators
from operators import Tensors, sequence

pytestmark = pytest.mark.gpu

TIME, FEATURES = 40, 24

# (state, batch): a block, a cluster of blocks and a group of them hold the weights.
by_kernel = pytest.mark.parametrize(
    ("state", "batch"),
    [
        pytest.param(128, 16, id="block"),
        pytest.param(512, 64, id="cluster"),
        pytest.param(1024, 128, id="group"),
    ],
)
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def make_inputs(state: int, batch: int, dtype: torch.dtype) -> Tensors:
    inputs = operators.sequence_inputs(TIME, batch, FEATURES, state)
    return tuple(x.to("cuda", dtype) for x in inputs)


def run(inputs: Tensors) -> list[Tensor]:
    """The results and the gradients of all inputs."""
    towards = tuple(torch.ones_like(x) for x in sequence(*inputs))
    results, gradients = operators.gradients(sequence, inputs, towards)
    return [x.detach() for x in (*results, *gradients)]


def keep_busy(stream: torch.cuda.Stream) -> None:
    """Fills every multiprocessor for some tens of milliseconds."""
    with torch.cuda.stream(stream):
        matrix = torch.randn(8192, 8192, device="cuda")
        for _ in range(3):
            matrix = torch.tanh(matrix @ matrix)


@by_dtype
@by_kernel
def test_beside_a_busy_stream(state: int, batch: int, dtype: torch.dtype) -> None:
    inputs = make_inputs(state, batch, dtype)
    expected = run(inputs)
    torch.cuda.synchronize()
    keep_busy(torch.cuda.Stream())
    found = run(inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@by_dtype
@by_kernel
def test_two_at_once(state: int, batch: int, dtype: torch.dtype) -> None:
    """Each wants most of the multiprocessors for itself."""
    inputs = make_inputs(state, batch, dtype)
    expected = run(inputs)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    found = []
    for _ in range(3):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(run(inputs))
    torch.cuda.synchronize()
    for each in found:
        torch.testing.assert_close(each, expected, rtol=0, atol=0)


@by_dtype
@by_kernel
def test_in_a_captured_graph(state: int, batch: int, dtype: torch.dtype) -> None:
    inputs = make_inputs(state, batch, dtype)
    other = tuple(x.flip(0) for x in inputs)
    expected = run(other)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(inputs)
    for target, source in zip(inputs, other, strict=True):
        target.copy_(source)
    for _ in range(2):
        graph.replay()
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


ANOTHER_PROCESS = """
import torch, test_sequence_kernels as tests
inputs = tests.make_inputs({state}, {batch}, {dtype})
expected = tests.run(inputs)
print("begun", flush=True)
for _ in range(20):
    torch.testing.assert_close(tests.run(inputs), expected, rtol=0, atol=0)
"""


@by_dtype
@by_kernel
def test_beside_another_process(
    state: int, batch: int, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    inputs = make_inputs(state, batch, dtype)
    expected = run(inputs)
    code = ANOTHER_PROCESS.format(state=state, batch=batch, dtype=dtype)
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=request.path.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        begun = other.stdout.readline()
        for _ in range(20):
            torch.testing.assert_close(run(inputs), expected, rtol=0, atol=0)
        _, errors = other.communicate(timeout=120)
    assert begun == "begun\n", errors
    assert other.returncode == 0, errors
