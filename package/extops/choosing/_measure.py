"""Times two ways to compute the same call."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from extops import _private
from extops.choosing._table import OURS, TORCH, Measured

_SECONDS = 0.02
"""Of measuring a kind, unless three rounds take longer."""
_TIES = 0.03
_LIKE = 0.25
"""Of the largest value. Gradients of torch's layers in float16 are nearly that far from the right ones."""
_MOST_CALLS = 8
_CYCLES_A_SECOND = 2e9
_CACHED, _FLUSHING = bytearray(2**21), bytes(2**21)
"""More than a core's own caches hold."""

Call = Callable[[], Sequence[Tensor]]


class Times(NamedTuple):
    """Seconds of a call."""

    host: float
    gpu: float

    @property
    def both(self) -> float:
        """What a model pays at most, which waits for one or the other."""
        return self.host + self.gpu


IsFaster = Callable[[Times, Times], bool]


def is_faster(ours: Times, torchs: Times) -> bool:
    """Whether ours is in three models, and in none of them slower by more than a tie: alone, where the host has as much
    else to do as torch's call takes it, and where the GPU has. What is longer there is what such a model pays.
    """
    slower = []
    for host, gpu in ((0.0, 0.0), (torchs.host, 0.0), (0.0, torchs.gpu)):
        own, other = (max(x.host + host, x.gpu + gpu) for x in (ours, torchs))
        slower.append(own / other)
    return max(slower) < 1 + _TIES and statistics.fmean(slower) < 1 - _TIES


def is_faster_in_graph(ours: Times, torchs: Times) -> bool:
    """Whether ours is where a graph is launched as a whole, or its code calls the operators. Ours wins ties: around
    torch's operator is more of the host's time.
    """
    own, other = (x.gpu or x.host for x in (ours, torchs))
    return own < (1 + _TIES) * other


def agree(ours: Iterable[Tensor], torchs: Iterable[Tensor]) -> bool:
    """Whether results are alike, but for what rounding may do to long sequences in 16 bits: a kernel that is wrong on
    a GPU on which nobody has run it is further off. What is not finite says nothing.
    """
    for x, y in zip(ours, torchs, strict=True):
        if y.numel() and bool(torch.isfinite(y).all()):
            limit = _LIKE * y.abs().max().clamp(min=torch.finfo(y.dtype).tiny)
            if not bool(((x - y).abs() <= limit).all()):  # nor where ours is not finite
                return False
    return True


def measure(
    torchs: Call,
    ours: Call,
    exact: Call,
    device: torch.device,
    is_faster: IsFaster = is_faster,
) -> Measured:
    """Both in turns, until one is ahead by more than their spread or the time is over. Where their values differ, ours
    are taken if they are those of ``exact``, torch's in float64; else that is an error.
    """
    calls = torchs, ours
    results = [call() for call in calls]  # libraries choose algorithms and load kernels
    is_wrong = not agree(results[1], results[0])
    if is_wrong and not agree(results[1], exact()):
        raise RuntimeError("our kernels give other values here; please report it")
    del results
    one = [_time(call, 1, device, 0.0) for call in calls]
    counts = [max(1, min(_MOST_CALLS, int(0.001 / max(x.both, 1e-6)))) for x in one]
    found: tuple[list[Times], list[Times]] = ([], [])
    end = time.perf_counter() + _SECONDS
    while not (len(found[0]) >= 3 and (_are_apart(*found) or time.perf_counter() > end)):
        order = (0, 1) if len(found[0]) % 2 == 0 else (1, 0)
        for place in order:
            found[place].append(_time(calls[place], counts[place], device, one[place].host))
    least = [Times(*map(min, zip(*each, strict=True))) for each in found]
    way = OURS if is_wrong or is_faster(least[1], least[0]) else TORCH
    return Measured(way, least[0].both, least[1].both)


def _are_apart(some: list[Times], others: list[Times]) -> bool:
    one, other = [x.both for x in some], [x.both for x in others]
    return max(one) < min(other) or max(other) < min(one)


def _time(call: Callable[[], Any], count: int, device: torch.device, host: float) -> Times:
    """A burst of calls, as a model makes them."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(count):
            call()
        return Times((time.perf_counter() - start) / count, 0.0)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.current_stream(device).synchronize()
    # The GPU waits until the host has issued all calls, so that it waits for none of them afterwards.
    of_all = count * (host + _seconds_to_flush())
    _private.keep_busy(int(1.5 * of_all * _CYCLES_A_SECOND))
    first.record()
    issuing = 0.0
    for _ in range(count):
        # What a model does between two calls leaves little of them in the host's caches. An LSTMCell of ours took the
        # host 50 us in a row and 175 so, torch's 60 and 118 (H200): in Tacotron2 ours was slower.
        _CACHED[:] = _FLUSHING
        start = time.perf_counter()
        call()
        issuing += time.perf_counter() - start
    last.record()
    last.synchronize()
    return Times(issuing / count, first.elapsed_time(last) / 1e3 / count)


@functools.cache
def _seconds_to_flush() -> float:
    start = time.perf_counter()
    _CACHED[:] = _FLUSHING
    return time.perf_counter() - start
