"""Memory: no growth over thousands of calls, and tensors are freed when the graph is."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

import extops
from operators import (
    ELEMENTWISE_MULT,
    GPU,
    LLTM,
    OPERATORS,
    ROUND_STE,
    Operator,
    Tensors,
    by_device,
    by_few_operators,
    by_operator,
    upstream,
)

CALLS = 3_000
# What the allocators' own coming and going may amount to: less than an object of Python leaked at
# every third of the calls, or the smallest tensor at every other.
ALLOWED = {"objects": 900, "bytes": 200 * CALLS}


def forward(operator: Operator, inputs: Tensors, towards: Tensors) -> None:
    with torch.no_grad():
        operator(*inputs)


def backward(operator: Operator, inputs: Tensors, towards: Tensors) -> None:
    torch.autograd.grad(operator(*inputs), inputs, towards)


def refused(operator: Operator, inputs: Tensors, towards: Tensors) -> None:
    with contextlib.suppress(RuntimeError):
        operator(*(tensor.long() for tensor in inputs))


def forward_without_backward(operator: Operator, inputs: Tensors, towards: Tensors) -> None:
    operator(*inputs)


def second_order(operator: Operator, inputs: Tensors, towards: Tensors) -> None:
    first = torch.autograd.grad(operator(*inputs), inputs, towards, create_graph=True)
    wanting = [gradient for gradient in first if gradient.requires_grad]
    if wanting:
        torch.autograd.grad(wanting, inputs, wanting, allow_unused=True)


def forward_mode(operator: Operator, inputs: Tensors, towards: Tensors) -> None:
    detached = tuple(tensor.detach() for tensor in inputs)
    torch.func.jvp(operator.function, detached, detached)


Way = Callable[[Operator, Tensors, Tensors], None]
by_way = pytest.mark.parametrize("way", [forward, backward], ids=lambda way: way.__name__)
# What is composed of many calls is called less often.
by_other_way = pytest.mark.parametrize(
    "way",
    [forward_without_backward, refused, second_order, forward_mode],
    ids=lambda way: way.__name__,
)


def live_tensors() -> int:
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def own_bytes() -> int:
    """The memory that this process has taken, without what is mapped from files."""
    ctypes.CDLL(None).malloc_trim(0)  # gives back what is free
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def finish_backward(device: str) -> None:
    """Makes autograd's thread of the GPU drop what the last backward returned.

    It wakes the caller first, so it may still hold these gradients when they are counted. It has
    dropped them once it takes the next task, and a call of `backward` returns nothing to hold.
    """
    if device != "cpu":
        torch.ones((), device=device, requires_grad=True).clone().backward()


def usage(device: str) -> dict[str, int]:
    """What is in use now; on a GPU by its allocator's exact count, on the CPU by the process."""
    finish_backward(device)
    gc.collect()
    found = {"tensors": live_tensors(), "objects": sys.getallocatedblocks()}
    if device == "cpu":
        return {**found, "bytes": own_bytes()}
    stats = torch.cuda.memory_stats()
    found["bytes on the GPU"] = stats["allocated_bytes.all.current"]
    found["blocks on the GPU"] = stats["allocation.all.current"]
    return found


def growth(device: str, calls: int, call: Callable[[], None]) -> dict[str, int]:
    """What is in use more after the calls than before, a tenth of them having been made already."""
    gc.collect()
    gc.freeze()  # what exists by now need not be looked through each time
    try:
        for _ in range(calls // 10):
            call()
        before = usage(device)
        for _ in range(calls):
            call()
        return {name: used - before[name] for name, used in usage(device).items()}
    finally:
        gc.unfreeze()


def assert_no_growth(device: str, calls: int, call: Callable[[], object]) -> None:
    grown = growth(device, calls, call)
    too_much = {name: more for name, more in grown.items() if more > ALLOWED.get(name, 0)}
    assert not too_much, f"in use after {calls} calls, but not before: {too_much}"


@by_device
@by_way
@by_few_operators
@pytest.mark.every(4, "way", "operator")
def test_no_growth(operator: Operator, way: Way, device: str) -> None:
    inputs = operator.inputs("small", device, torch.float32, requires_grad=True)
    towards = upstream(operator(*inputs))
    assert_no_growth(device, CALLS, lambda: way(operator, inputs, towards))


@pytest.mark.every(4, "way", "operator")
@by_device
@by_other_way
@pytest.mark.parametrize(
    "operator", [LLTM, ROUND_STE, ELEMENTWISE_MULT], ids=lambda operator: operator.name
)
def test_no_growth_of_other_ways(operator: Operator, way: Way, device: str) -> None:
    inputs = operator.inputs("small", device, torch.float32, requires_grad=True)
    towards = upstream(operator(*inputs))
    assert_no_growth(device, CALLS // 3, lambda: way(operator, inputs, towards))


@by_device
def test_no_growth_of_out(device: str) -> None:
    a, b = ELEMENTWISE_MULT.inputs("row", device)
    for out in (torch.empty_like(a), a):  # written at once, or by way of a copy
        call = functools.partial(extops.elementwise_mult, a, b, out=out)
        assert_no_growth(device, CALLS, call)


@by_device
def test_no_growth_of_training(device: str) -> None:
    module = extops.LLTMLayer(5, 4, bidirectional=True, device=device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    input = torch.randn(3, 2, 5, device=device)

    def step() -> None:
        optimizer.zero_grad()
        module(input)[0].sum().backward()
        optimizer.step()

    assert_no_growth(device, CALLS // 6, step)


@by_device
def test_a_leak_would_be_noticed(device: str) -> None:
    """The check above can fail: a tensor, an object or some native memory lost at each call."""
    kept: list[object] = []
    libc = ctypes.CDLL(None)
    libc.calloc.restype = ctypes.c_void_p
    leaks: dict[str, Callable[[], object]] = {
        "tensors": lambda: torch.ones(16, device=device),
        "objects": lambda: object(),
    }
    if device == "cpu":
        leaks["bytes"] = lambda: ctypes.memset(libc.calloc(1, 8192), 1, 8192)
    for what, leak in leaks.items():
        with pytest.raises(AssertionError, match=f"after 1000 calls.*'{what}': "):
            assert_no_growth(device, 1000, lambda: kept.append(leak()))  # noqa: B023


# -- what the graph keeps ------------------------------------------------------------------------


class Packed:
    """A tensor that autograd saved, so that its end can be seen."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@contextmanager
def seen_saving() -> Iterator[list[weakref.ref[Packed]]]:
    """References to all tensors that the graph saves within."""
    saved: list[weakref.ref[Packed]] = []

    def pack(tensor: Tensor) -> Packed:
        packed = Packed(tensor.detach())  # a result that is saved would keep itself
        saved.append(weakref.ref(packed))
        return packed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.tensor):
        yield saved


@contextmanager
def without_the_garbage_collector() -> Iterator[None]:
    """Memory that waits for the collector of cycles is freed too late."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def count(references: list[weakref.ref[Packed]]) -> int:
    return sum(reference() is not None for reference in references)


@by_device
@by_operator
@pytest.mark.every(2, "operator")
def test_backward_frees_what_the_graph_saved(operator: Operator, device: str) -> None:
    inputs = operator.inputs("small", device, requires_grad=True)
    towards = upstream(operator(*inputs))
    with without_the_garbage_collector(), seen_saving() as saved:
        results = operator(*inputs)
        held = count(saved)
        assert (held == 0) == (operator is ROUND_STE)  # whose gradient needs nothing
        torch.autograd.grad(results, inputs, towards, retain_graph=True)
        assert count(saved) >= held
        torch.autograd.grad(results, inputs, towards)
        assert count(saved) == 0


@by_device
@by_operator
@pytest.mark.every(2, "operator")
def test_dropping_the_results_frees_the_graph(operator: Operator, device: str) -> None:
    inputs = operator.inputs("small", device, requires_grad=True)
    with without_the_garbage_collector(), seen_saving() as saved:
        results = operator(*inputs)
        freed = [weakref.ref(tensor) for tensor in (*inputs, *results)]
        del inputs
        assert count(saved) > 0 or operator is ROUND_STE
        del results
        assert count(saved) == 0
        assert [reference() for reference in freed] == [None] * len(freed)


@by_device
@by_operator
@pytest.mark.every(2, "operator")
def test_a_graph_of_gradients_is_freed(operator: Operator, device: str) -> None:
    inputs = operator.inputs("small", device, requires_grad=True)
    towards = upstream(operator(*inputs))
    torch.autograd.grad(operator(*inputs), inputs, towards, create_graph=True)  # what loads once
    with without_the_garbage_collector(), seen_saving() as saved:
        results = operator(*inputs)
        found = torch.autograd.grad(results, inputs, towards, create_graph=True)
        freed = [weakref.ref(tensor) for tensor in (*inputs, *results, *found)]
        del inputs, results, found, towards
        finish_backward(device)
        assert count(saved) == 0
        assert [reference() for reference in freed] == [None] * len(freed)


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("case", ["odd", "threaded"])
def test_the_gpu_holds_no_more_than_what_is_returned(case: str, device: str) -> None:
    """Exact: what the allocator counts after forward, after backward and after all."""
    for operator in OPERATORS:
        inputs = operator.inputs(case, device, torch.float32, requires_grad=True)
        towards = upstream(operator(*inputs))
        backward(operator, inputs, towards)  # libraries take their workspaces once
        gc.collect()  # what other tests left shall not be freed in between
        before = requested_bytes(device)
        results = operator(*inputs)
        found = torch.autograd.grad(results, inputs, towards)
        # Straight-through rounding hands on what it was given.
        given = {tensor.untyped_storage().data_ptr() for tensor in towards}
        storages = {
            storage.data_ptr(): storage.nbytes()
            for storage in (tensor.untyped_storage() for tensor in (*results, *found))
            if storage.data_ptr() not in given
        }
        assert requested_bytes(device) - before == sum(storages.values()), operator.name
        del results, found
        assert requested_bytes(device) == before, operator.name


def requested_bytes(device: str) -> int:
    finish_backward(device)
    return torch.cuda.memory_stats()["requested_bytes.all.current"]
