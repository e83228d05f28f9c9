"""Other work of the machine while a case is computed repeatedly."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

import torch

# Starts some work on a stream, or does it on the CPU.
Work = tuple[torch.cuda.Stream | None, Callable[[], object]]


@contextlib.contextmanager
def beside(what: str, device: str) -> Iterator[None]:
    """Does something else all the time, in a thread and on streams of its own."""
    stop = threading.Event()
    thread = threading.Thread(target=_repeat, args=(_WORK[what](device), stop))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _repeat(work: list[Work], stop: threading.Event) -> None:
    before: list[torch.cuda.Event] = []
    while work and not stop.is_set():
        events = []
        for stream, start in work:
            with torch.cuda.stream(stream):
                start()
            if stream is not None:
                events.append(stream.record_event())
        # The host is a round ahead: no stream runs dry, and none gets more than it can do.
        for event in before:
            event.synchronize()
        before = events


@functools.cache
def _small_kernels(device: str) -> list[Work]:
    """Elementwise kernels, on a GPU of several sizes at a time, from graphs: a host cannot start so many."""
    work: list[Work] = []
    for size in (5_000, 70_000, 1_000_000) if device == "cuda" else (5_000,):
        a, b = torch.zeros(2, size, device=device)

        def compute(a: torch.Tensor = a, b: torch.Tensor = b) -> None:
            for _ in range(100):
                torch.add(a, 1, out=b)
                torch.mul(b, 0.5, out=a)

        if device == "cpu":
            work.append((None, compute))
            continue
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.graph(graph, stream=stream):
            compute()

        def start(graph: torch.cuda.CUDAGraph = graph, *_: object, memory: object = (a, b)) -> None:
            graph.replay()  # which writes to memory that nobody else would keep

        work.append((stream, start))
    return work


@functools.cache
def _large_gemms(device: str) -> list[Work]:
    on_gpu = device == "cuda"
    size, dtype = (4096, torch.bfloat16) if on_gpu else (300, torch.float32)
    a, b, c = torch.zeros(3, size, size, device=device, dtype=dtype)
    return [(torch.cuda.Stream() if on_gpu else None, lambda: torch.mm(a, b, out=c))]


_WORK: dict[str, Callable[[str], list[Work]]] = {
    "nothing": lambda device: [],
    # The case again, or another one, in threads that `check.py` starts.
    "threads": lambda device: [],
    "sequence": lambda device: [],
    "elementwise": _small_kernels,
    "gemms": _large_gemms,
}
