"""Several threads at once, as torch.nn.DataParallel uses them: each gets what it would get alone."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

import extops
from extops.binding import _loader
from operators import (
    LLTM,
    Operator,
    Tensors,
    by_device,
    by_few_operators,
    gradients,
    lltm_inputs,
    upstream,
)

THREADS = 4


@by_device
@by_few_operators
def test_same_values_as_alone(operator: Operator, device: str) -> None:
    """Forward and backward, half of the calls large enough for several threads of their own."""
    cases = ["odd", "odd", "odd", "threaded"] * 2
    inputs = [operator.inputs(case, device, torch.float32) for case in cases]
    towards = [upstream(operator(*tensors)) for tensors in inputs]

    def run(place: int) -> tuple[Tensors, Tensors]:
        for _ in range(5):
            found = gradients(operator.function, inputs[place], towards[place])
        return found

    alone = [run(place) for place in range(len(cases))]
    with ThreadPoolExecutor(THREADS) as pool:
        together = list(pool.map(run, range(len(cases))))
    torch.testing.assert_close(together, alone)


@pytest.mark.parametrize("sizes", [(16, 32, 128), (19, 40, 101), (130, 200, 7)], ids=str)
def test_a_small_cell_in_any_number_of_threads(sizes: tuple[int, int, int]) -> None:
    """Each thread computes a part of the states."""
    inputs = tuple(tensor.float() for tensor in lltm_inputs(*sizes))
    towards = upstream(LLTM(*inputs))
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(gradients(LLTM.function, inputs, towards))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_threads_do_not_pile_up() -> None:
    """However often their number changes, none is kept."""
    input = torch.randn(2**20)
    before = torch.get_num_threads()
    try:
        for threads in range(2, 20):
            torch.set_num_threads(threads)
            extops.round_ste(input)
    finally:
        torch.set_num_threads(before)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("extops")]


MEMORY_OF_A_LAYER = """
import resource, torch, extops
torch.set_num_threads(16)
layer, input = extops.GRU(64, 1024), torch.randn(10, 32, 64)
layer(input[:, :1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
layer(input)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(_loader.binding == "legacy", reason="there each thread packs its own")
def test_threads_share_the_weights() -> None:
    """Which take 12 MB, and are packed for the kernel."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_OF_A_LAYER], capture_output=True, text=True, check=False
    )
    kilobytes = int(done.stdout) if not done.returncode else done.stderr
    assert isinstance(kilobytes, int) and kilobytes < 80_000, kilobytes


CALL_AT_EXIT = """
import atexit, torch, extops

def at_exit():
    print(extops.round_ste(torch.full((2**20,), 0.75)).sum().item())

atexit.register(at_exit)
torch.set_num_threads(4)
at_exit()
"""


def test_a_call_while_the_interpreter_exits(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CALL_AT_EXIT],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == [str(float(2**20))] * 2, done.stderr


Step = Callable[[torch.nn.Module, Tensor], Tensor]


def cell(module: torch.nn.Module, input: Tensor) -> Tensor:
    state = input.new_zeros(len(input), 4)
    return module(input, (state, state))[0]


def layer(module: torch.nn.Module, input: Tensor) -> Tensor:
    return module(input.unsqueeze(1))[0]


by_module = pytest.mark.parametrize(
    ("make", "step"), [(extops.LLTM, cell), (extops.LLTMLayer, layer)], ids=["LLTM", "LLTMLayer"]
)


@by_device
@by_module
def test_one_batch_in_several_threads(make: type[torch.nn.Module], step: Step, device: str) -> None:
    """One module works on the parts of a batch; one backward pass goes through all of them."""
    module = make(5, 4, device=device, dtype=torch.float64)
    if make is extops.LLTMLayer:
        module.batch_first = True
    input = torch.randn(4 * THREADS, 5, device=device, dtype=torch.float64)
    found = []
    with ThreadPoolExecutor(THREADS) as pool:
        for parts in (1, THREADS):
            module.zero_grad()
            results = pool.map(lambda part: step(module, part), input.chunk(parts))
            output = torch.cat(list(results))
            (output**2).sum().backward()
            found.append([output, *(parameter.grad for parameter in module.parameters())])
    torch.testing.assert_close(*found)


@pytest.mark.multi_gpu
def test_data_parallel() -> None:
    """PyTorch's own module: a thread and a replica for each of two GPUs."""
    module = extops.LLTM(5, 4, device="cuda:0", dtype=torch.float64)
    parallel = torch.nn.DataParallel(module, device_ids=[0, 1])
    input, h, c = (torch.randn(8, size, device="cuda:0", dtype=torch.float64) for size in (5, 4, 4))
    found = []
    for function in (module, parallel):
        module.zero_grad()
        results = function(input, (h, c))
        torch.stack([(result**2).sum() for result in results]).sum().backward()
        found.append([*results, *(parameter.grad for parameter in module.parameters())])
    torch.testing.assert_close(*found)
