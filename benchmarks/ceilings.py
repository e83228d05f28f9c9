"""What the machine can do at best, measured: memory bandwidth and matrix products. The floors follow from these."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch

from benchmarks import protocol
from benchmarks.cases import MODES
from benchmarks.names import CPU_THREADS
from benchmarks.runner import set_mode

_SAMPLES = 5


def measure(device: str) -> list[dict[str, Any]]:
    """For each number of threads (none on a GPU): bytes a second, and FLOP a second by mode."""
    if device == "cuda":
        return [{"threads": None, **measure_now(device)}]
    result = []
    for threads in CPU_THREADS:
        torch.set_num_threads(threads)
        result.append({"threads": threads, **measure_now(device)})
    return result


def measure_now(device: str) -> dict[str, Any]:
    """A large copy, read and written; a large matrix product in every mode that the device has."""
    numel, edge = (2**28, 8192) if device == "cuda" else (2**24, 1024)
    source = torch.randn(numel, device=device)
    target = torch.empty_like(source)
    seconds = median_seconds(lambda: target.copy_(source), device)
    flop = {}
    for mode, (dtype, tf32) in MODES.items():
        if device == "cuda" or not tf32:
            set_mode(mode)
            a, b = torch.randn(2, edge, edge, device=device).to(dtype).unbind(0)
            product = median_seconds(lambda a=a, b=b: a @ b, device)  # type: ignore[misc]
            flop[mode] = 2 * edge**3 / product
    return {"bytes_per_second": 2 * source.nbytes / seconds, "flop_per_second": flop}


def median_seconds(call: protocol.Call, device: str) -> float:
    """The median time of a call that takes long."""
    queued = device == "cuda"
    wall = partial(protocol.wall, device=device, seconds=8e-3)
    sampler = protocol.queued("time", call) if queued else wall("time", call)
    return statistics.median(sampler()["time"] for _ in range(_SAMPLES)) / 1e6
