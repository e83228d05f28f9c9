"""A sequence of the sLSTM by extops and by FlashRNN of one head, in bfloat16, the GEMM of the input included.

    python -m pip install flashrnn==1.0.8
    python -m benchmarks.slstm

FlashRNN's fastest backend counts; each is compiled for its sizes, which takes a minute.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import extops
from benchmarks.protocol import describe
from benchmarks.suite import say

CELLS = Path(__file__).parent.parent / "tests" / "data" / "cells"
SIZES = 64, 128, 512
BATCH, STEPS = 16, 1024
BACKENDS = "cuda_fused", "triton_fused"


def _no_step(*_: Tensor) -> tuple[Tensor, ...]:
    raise NotImplementedError  # gradients of gradients would ask for it


def milliseconds(call: Callable[[], Tensor]) -> tuple[float, float]:
    """Of a forward without gradients, and of a forward with its backward: the GPU's time, medians of ten."""

    def forward() -> None:
        with torch.no_grad():
            call()

    def training() -> None:
        call().square().mean().backward()

    found = []
    for work in (forward, training):
        times = []
        for _ in range(13):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        found.append(statistics.median(times[3:]))
    return found[0], found[1]


def measure(units: int) -> None:
    """Prints both, and what FlashRNN takes by what extops takes."""
    from flashrnn import flashrnn

    def made(*shape: int, by: float = 1.0) -> Tensor:
        return (torch.randn(shape, device="cuda") * by).bfloat16()

    input, bias = made(BATCH, STEPS, units), made(4 * units)
    weight_ih, weight_hh = (made(4 * units, units, by=units**-0.5) for _ in range(2))
    zeros, states = torch.zeros_like(bias), (made(BATCH, units, by=0.0),) * 4
    for parameter in (weight_ih, weight_hh, bias):
        parameter.requires_grad_()
    cell = extops.load_cell("slstm", [CELLS / "slstm.cpp", CELLS / "slstm.cu"], _no_step)

    def by_extops() -> Tensor:
        biases = bias, zeros
        output: Tensor = cell(input, states, weight_ih, weight_hh, biases, batch_first=True)[0]
        return output

    def by_flashrnn(backend: str) -> Tensor:
        gates = F.linear(input, weight_ih, bias).view(BATCH, STEPS, 4, 1, units)
        given = gates, weight_hh.view(4, 1, units, units), zeros.view(4, 1, units)
        output: Tensor = flashrnn(*given, function="slstm", backend=backend)[0][0]
        return output

    ours = milliseconds(by_extops)
    for backend in BACKENDS:
        try:
            theirs = milliseconds(lambda backend=backend: by_flashrnn(backend))
            difference = (by_flashrnn(backend).view_as(input) - by_extops()).abs().max().item()
        except Exception as error:
            say(f"{units} units, FlashRNN {backend}: {describe(error)}")
            continue
        times = [f"{y:.2f} ms by {x:.2f}: {y / x:.2f}" for x, y in zip(ours, theirs, strict=True)]
        said = f"forward {times[0]}, training {times[1]} (values differ by up to {difference:.3f})"
        say(f"{units} units, FlashRNN {backend}: {said}")


if __name__ == "__main__":
    torch.manual_seed(0)
    for size in SIZES:
        measure(size)
