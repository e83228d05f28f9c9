"""How many kernels a call launches, and how long they run together: read from the CUDA profiler (CUPTI).

A process of its own, since a profiler once loaded slows every later launch: `python -m benchmarks.kernels` prints JSON.
The sum leaves out the gaps between kernels, so it is less than a device time by graph replay and is not compared with
one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import protocol
from benchmarks.cases import MODES, WEIGHTS, bis
from benchmarks.cell import Cell, cell_variants
from benchmarks.names import STANDARD
from benchmarks.runner import set_mode
from benchmarks.variant import Variant

CALLS = 10
_MARK = "kernels: "


def count_apart() -> list[dict[str, Any]]:
    """What `count` gives, counted by another process; nothing if that fails."""
    command = [sys.executable, "-m", "benchmarks.kernels"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    except subprocess.TimeoutExpired:
        return []
    marked = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    return list(json.loads(marked[-1].removeprefix(_MARK))) if marked else []


def count() -> list[dict[str, Any]]:
    """For the standard sizes in every mode, by variant and work: kernels a call, and their microseconds."""
    result = []
    for mode, (dtype, _) in MODES.items():
        set_mode(mode)
        for shape in STANDARD:
            cell = Cell(*shape, "cuda", dtype)
            makers = cell_variants(cell)
            variants = {name: count_variant(make) for name, make in makers.items()}
            result.append({"size": bis(*shape), "mode": mode, "variants": variants})
    return result


def count_variant(make: Callable[[], Variant]) -> dict[str, Any]:
    """One variant."""
    try:
        variant = make()
        return {work: count_call(variant.calls[work]) for work in WEIGHTS if work in variant.calls}
    except Exception as error:
        return {"failed": protocol.describe(error)}


def count_call(call: protocol.Call) -> dict[str, float]:
    """One kind of work; copies and fills count as kernels."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    on_device = [event for event in profiler.events() if event.device_type.name == "CUDA"]
    return {
        "kernels": len(on_device) / CALLS,
        "microseconds": sum(event.time_range.elapsed_us() for event in on_device) / CALLS,
    }


if __name__ == "__main__":
    print(_MARK + json.dumps(count()))
