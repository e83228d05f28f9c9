"""How times are taken. Four numbers (the second in two ways), which are never mixed.

A measure is named `<number>_<work>`, e.g. `wall_forward`:

- `host`: how long the host is busy issuing a call; the device works behind its back.
- `device`: how long the device is busy, by replaying a CUDA graph of many calls; no host in it.
- `queued`: the same for what cannot be captured in a graph or differs in one: calls that were queued while the device
  was kept busy with something else. Gaps between kernels are a little longer than in a graph.
- `wall`: a call and the wait for its end, as a user sees one call.
- `tutorial`: the protocol of PyTorch's tutorial "Custom C++ and CUDA Extensions", word for word: forward and
  `(new_h.sum() + new_cell.sum()).backward()` timed apart, each with the wait for its end, averaged over many runs.

On the CPU a call ends when it returns: `host` and `wall` are one, and there is no `device`.
"""

from __future__ import annotations

import contextlib
import gc
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], object]
Sampler = Callable[[], dict[str, float]]
"""Takes one round's samples: microseconds by measure."""

# Few enough that no launch waits for room in the driver's queue of about a thousand.
ISSUED_AT_ONCE = 10
Seconds = float
"""What one sampler may take of a round: enough for many calls, little enough for all variants to meet the same load."""


def wait_for(device: str) -> Callable[[], None]:
    """What waits until the device has done all it was given."""
    return torch.cuda.synchronize if device == "cuda" else lambda: None


def calls_within(seconds: Seconds, call: Call, device: str) -> int:
    """How many calls, each waited for, fit into that time: at least one."""
    wait = wait_for(device)
    for _ in range(2):
        call()
    wait()
    fastest = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        call()
        wait()
        fastest = min(fastest, time.perf_counter() - start)
    return max(1, min(1000, int(seconds / fastest)))


def host(measure: str, call: Call, seconds: Seconds) -> Sampler:
    """Times the issuing of calls, with nothing queued before them."""
    repeats = max(1, calls_within(seconds, call, "cuda") // ISSUED_AT_ONCE)

    def sample() -> dict[str, float]:
        issuing = 0.0
        for _ in range(repeats):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(ISSUED_AT_ONCE):
                call()
            issuing += time.perf_counter() - start
        torch.cuda.synchronize()
        return {measure: issuing / (repeats * ISSUED_AT_ONCE) * 1e6}

    return sample


def wall(measure: str, call: Call, device: str, seconds: Seconds) -> Sampler:
    """Times calls, each waited for."""
    return wall_of(measure, call, device, calls_within(seconds, call, device))


def wall_of(measure: str, call: Call, device: str, calls: int) -> Sampler:
    """Times as many calls, each waited for."""
    wait = wait_for(device)

    def sample() -> dict[str, float]:
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            call()
            wait()
        return {measure: (time.perf_counter() - start) / calls * 1e6}

    return sample


def device_time(measure: str, call: Call, graph_calls: int, seconds: Seconds) -> Sampler:
    """Times the replay of a CUDA graph of `graph_calls` calls."""
    graph = captured(call, graph_calls)
    graph.replay()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    milliseconds = begin.elapsed_time(end)
    replays = max(1, min(100, int(seconds * 1e3 / milliseconds)))

    def sample() -> dict[str, float]:
        if replays > 1:
            graph.replay()  # keeps the device busy while the host queues what is timed
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return {measure: begin.elapsed_time(end) * 1e3 / (replays * graph_calls)}

    return sample


def queued(measure: str, call: Call, calls: int = ISSUED_AT_ONCE) -> Sampler:
    """Times calls that were all queued while the device was kept busy, so that it need not wait for the host."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3 if calls > 1 else 1):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    busy = 2 * (time.perf_counter() - start)
    torch.cuda.synchronize()
    # Calls of more kernels than the driver's queue takes are never all queued.
    most = 8 * busy

    def sample() -> dict[str, float]:
        nonlocal busy
        for _ in range(4):
            torch.cuda._sleep(int(busy * cycles_per_second()))
            begin.record()
            for _ in range(calls):
                call()
            end.record()
            in_time = not begin.query()
            end.synchronize()
            if in_time or busy >= most:
                break
            busy *= 2
        return {measure: begin.elapsed_time(end) * 1e3 / calls}

    return sample


@cache
def cycles_per_second() -> float:
    """How fast `torch.cuda._sleep` counts."""
    cycles = 10_000_000
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):  # the clock rises in the first
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
    return cycles / float(begin.elapsed_time(end)) * 1e3


@cache
def capture_stream() -> torch.cuda.Stream:
    """One for all captures, so that the libraries' workspaces are made once."""
    return torch.cuda.Stream()


def captured(call: Call, graph_calls: int) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `graph_calls` calls, warmed up as capture asks for."""
    stream, pool = capture_stream(), torch.cuda.graph_pool_handle()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        # cuBLAS then takes its workspace within the capture, where the graph owns it. One from outside goes back to the
        # allocator as soon as somebody clears workspaces, which torch.compile does, and the graph would write to it.
        torch._C._cuda_clearCublasWorkspaces()
        graph.capture_begin(pool=pool)
        try:
            for _ in range(graph_calls):
                call()
        except Exception:
            abandon(graph, pool)
            raise
        graph.capture_end()
        torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.synchronize()
    return graph


def abandon(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """Ends a capture that failed, for the allocator too: it would go on asking at each allocation."""
    try:
        graph.capture_end()
    except RuntimeError:
        with contextlib.suppress(Exception):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)


def tutorial(
    step: Callable[[], tuple[Tensor, Tensor]],
    parameters: Sequence[Tensor],
    device: str,
    seconds: Seconds,
) -> Sampler:
    """Times forward and backward apart, as the tutorial does."""
    wait = wait_for(device)

    def one_run() -> tuple[float, float]:
        for parameter in parameters:
            parameter.grad = None
        start = time.perf_counter()
        new_h, new_cell = step()
        wait()
        middle = time.perf_counter()
        forward = middle - start
        start = time.perf_counter()
        (new_h.sum() + new_cell.sum()).backward()
        wait()
        return forward, time.perf_counter() - start

    runs = calls_within(seconds, one_run, device)

    def sample() -> dict[str, float]:
        wait()
        forward = backward = 0.0
        for _ in range(runs):
            each_forward, each_backward = one_run()
            forward += each_forward
            backward += each_backward
        for parameter in parameters:
            parameter.grad = None
        return {
            "tutorial_forward": forward / runs * 1e6,
            "tutorial_backward": backward / runs * 1e6,
        }

    return sample


def interleave(
    samplers: Mapping[str, Iterable[Sampler]], rounds: int
) -> tuple[dict[str, dict[str, list[float]]], dict[str, str]]:
    """The samples of each variant by measure, one a round, and the message of each variant that failed meanwhile.

    In each round every variant has its turn, in another order: what disturbs the machine disturbs all of them, and a
    ratio of two variants is taken within a round.
    """
    live = {name: list(each) for name, each in samplers.items()}
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in live}
    failed: dict[str, str] = {}
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            names = list(live)
            shift = number % max(1, len(names))
            for name in names[shift:] + names[:shift]:
                try:
                    for sampler in live[name]:
                        for measure, value in sampler().items():
                            samples[name].setdefault(measure, []).append(value)
                except Exception as error:
                    failed[name] = describe(error)
                    samples[name].clear()
                    del live[name]
    finally:
        gc.enable()
    return samples, failed


def describe(error: Exception) -> str:
    """The first lines of what an exception says, for the record; of paths only the file's name."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = re.sub(r"(?<![\w.:/])(/[\w.+-]+)+/", "…/", " ".join(lines[:3]))
    return f"{type(error).__name__}: {text}"[:400]
