"""Measures layers drawn at random, ours beside torch's, and writes `random.json` after each of them."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

import extops
from benchmarks import environment, protocol
from benchmarks.runner import set_mode, tidy_up
from benchmarks.shapes import MEASURES, Shape, draw, summarise
from benchmarks.suite import RESULTS, say, slug, write

DTYPES = {"bfloat16": torch.bfloat16, "float64": torch.float64}
MODULES = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}
CELLS = {"lstm": torch.nn.LSTMCell, "gru": torch.nn.GRUCell, "rnn": torch.nn.RNNCell}
TOO_LONG = 2.0
"""Seconds of one call beyond which it is not measured."""
SECONDS_OF_A_SHAPE = 1.5
"""What all rounds of a shape shall take."""
SLICE = 2e-3
"""Seconds of a sample of short calls."""
ROUNDS = 3, 15
FAILURES = RuntimeError, ValueError

Input = torch.Tensor | PackedSequence
Calls = dict[str, Callable[[], object]]
"""By what they compute: ``forward`` and ``training``."""


def run(
    device: str, number: int, seed: int, seconds: float, output: Path | None, *, cells: bool
) -> None:
    """Measures until all shapes are, or the time is over."""
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("benchmarks: torch finds no CUDA device; leave out `--device cuda` for the CPU")
    start = time.perf_counter()
    described = environment.describe(device)
    folder = output or RESULTS / slug(described["device_name"], device)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / ("random-cells.json" if cells else "random.json")
    result: dict[str, Any] = {"seed": seed, "environment": described, "records": []}
    for shape in draw(device, number, seed, cells=cells):
        passed = time.perf_counter() - start
        if passed > seconds:
            break
        record = measure(shape, device)
        result["records"].append(record)
        result["environment"]["seconds"] = round(time.perf_counter() - start)
        write(file, result)
        say(f"[{len(result['records'])}/{number}] {passed:4.0f} s  {shape}: {_said(record)}")
        if device == "cuda":
            torch.cuda.synchronize()  # where a kernel has failed, nothing after it can be measured
    result["environment"]["conditions_at_end"] = environment.conditions(device)
    write(file, result)
    file.with_suffix(".md").write_text(report(result, device))
    say(summarise(result["records"], device))


def report(result: dict[str, Any], device: str) -> str:
    """What a page shows of a run."""
    of = result["environment"]
    where = (
        f"{of['device_name']}, torch {of['torch']}, commit {of['commit']}, seed {result['seed']}"
    )
    found = summarise(result["records"], device, by_kernel=False)
    return f"{where}:\n\n```text\n{found}\n```\n"


def _said(record: dict[str, Any]) -> str:
    kernels = "/".join(record["kernels"].values())
    failed = [f"{name} failed: {why}" for name, why in record["failed"].items()]
    found = summarise([record], record["device"]).splitlines()[1:]
    lines = [line for line in found if line.startswith(MEASURES[record["device"]])]
    means = [line.rpartition(" ")[2] for line in lines if " by " not in line]
    return "; ".join([f"{kernels} {' '.join(means)}", *failed])


def measure(shape: Shape, device: str) -> dict[str, Any]:
    """The record of a shape."""
    start = time.perf_counter()
    set_mode(shape.precision if shape.precision in ("tf32", "default") else "float32")
    if shape.threads:
        torch.set_num_threads(shape.threads)
    record: dict[str, Any] = {
        "shape": asdict(shape),
        "device": device,
        "kernels": {},
        "samples": {},
        "failed": {},
    }
    try:
        _fill(record, shape, device)
    except FAILURES as error:
        record["failed"]["all"] = protocol.describe(error)
    tidy_up(device)
    record["seconds"] = time.perf_counter() - start
    return record


def _fill(record: dict[str, Any], shape: Shape, device: str) -> None:
    torch.manual_seed(0)
    module = _module(shape, device)
    input = _input(shape, device)
    ours = extops.accelerate(copy.deepcopy(module))
    # How far the same call is from itself.
    control = copy.deepcopy(module)
    if isinstance(control, torch.nn.RNNBase):
        control.flatten_parameters()
    modules = {"torch": module, "control": control, "extops": ours}
    variants = {name: calls_of(each, input) for name, each in modules.items()}
    samplers: dict[str, list[protocol.Sampler]] = {}
    seconds_of_a_round = 0.0
    for name, calls in variants.items():
        try:
            taken = list(_samplers(calls, device))
        except FAILURES as error:
            record["failed"][name] = protocol.describe(error)
            continue
        samplers[name] = [sampler for sampler, _ in taken]
        seconds_of_a_round += sum(seconds for _, seconds in taken)
    least, most = ROUNDS
    rounds = max(least, min(most, int(SECONDS_OF_A_SHAPE / max(seconds_of_a_round, 1e-6))))
    record["samples"], failed = protocol.interleave(samplers, rounds)
    record["failed"] |= failed
    for work in ("forward", "training"):
        # What a call takes depends on whether gradients are wanted.
        with torch.set_grad_enabled(work == "training"):
            record["kernels"][work] = extops.which_kernel(ours, input, backward=work == "training")
    for name in ("torch", "extops") if device == "cuda" else ():
        samples = record["samples"].get(name, {})
        works = [work for work in variants[name] if f"wall_{work}" in samples]
        samples |= {f"memory_{work}": [_most_bytes(variants[name][work])] for work in works}


def _most_bytes(call: Callable[[], object]) -> float:
    """Of GPU memory that a call takes at most, beyond what is held before, and at least a page."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return float(max(torch.cuda.max_memory_allocated() - before, 4096))


def _module(shape: Shape, device: str) -> torch.nn.Module:
    make: Any = {"device": device, "dtype": DTYPES.get(shape.precision, torch.float32)}
    if not shape.time:
        return CELLS[shape.cell](shape.features, shape.state, **make)
    module = MODULES[shape.cell](
        shape.features,
        shape.state,
        shape.layers,
        batch_first=shape.batch_first,
        bidirectional=shape.directions > 1,
        **make,
    )
    module.flatten_parameters()
    return module


def _input(shape: Shape, device: str) -> Input:
    make: Any = {"device": device, "dtype": DTYPES.get(shape.precision, torch.float32)}
    if shape.lengths:
        lengths = torch.tensor(shape.row_lengths())
        # How many rows have more steps than each.
        counts = shape.batch - torch.bincount(lengths, minlength=shape.time + 1).cumsum(0)[:-1]
        return PackedSequence(torch.randn(int(counts.sum()), shape.features, **make), counts)
    leading = (shape.time, shape.batch) if shape.time else (shape.batch,)
    sizes = leading[::-1] if shape.batch_first else leading
    return torch.randn(*sizes, shape.features, **make)


def calls_of(module: torch.nn.Module, input: Input) -> Calls:
    """A forward without gradients, and one with those of the parameters and the input."""
    if isinstance(module, torch.nn.RNNCellBase):
        return _calls_of_cell(module, input)
    parameters = tuple(module.parameters())
    packed = input if isinstance(input, PackedSequence) else None
    leaf = (input.data if packed is not None else input).detach().requires_grad_()
    given = leaf if packed is None else PackedSequence(leaf, packed.batch_sizes)

    def run() -> torch.Tensor:
        output = module(given)[0]
        return output if packed is None else output.data

    with torch.no_grad():
        towards = torch.randn_like(run())

    def forward() -> object:
        with torch.no_grad():
            return run()

    def training() -> object:
        return torch.autograd.grad(run(), (*parameters, leaf), towards)

    return {"forward": forward, "training": training}


def _calls_of_cell(module: torch.nn.RNNCellBase, input: Input) -> Calls:
    """The same of a cell, with those of its states, too."""
    assert isinstance(input, torch.Tensor)
    is_lstm = isinstance(module, torch.nn.LSTMCell)
    shape = (1 + is_lstm, len(input), module.hidden_size)
    states = tuple(torch.randn(shape, device=input.device, dtype=input.dtype).unbind(0))
    leaves = tuple(x.detach().clone().requires_grad_() for x in (input, *states))

    def run() -> tuple[torch.Tensor, ...]:
        found = module(leaves[0], leaves[1:] if is_lstm else leaves[1])
        return found if is_lstm else (found,)

    def forward() -> object:
        with torch.no_grad():
            return run()

    towards = tuple(torch.randn_like(x) for x in states)

    def training() -> object:
        return torch.autograd.grad(run(), (*module.parameters(), *leaves), towards)

    return {"forward": forward, "training": training}


def _samplers(calls: Calls, device: str) -> Iterator[tuple[protocol.Sampler, float]]:
    """Each with the seconds that a sample takes."""
    wait = protocol.wait_for(device)
    for work, call in calls.items():
        call()
        wait()
        start = time.perf_counter()
        call()
        wait()
        seconds = time.perf_counter() - start
        if seconds > TOO_LONG:
            continue
        number = max(1, min(20, int(SLICE / seconds)))
        yield protocol.wall_of(f"wall_{work}", call, device, number), number * seconds
        if device == "cuda":
            number = max(1, min(protocol.ISSUED_AT_ONCE, int(SLICE / seconds)))
            yield protocol.queued(f"device_{work}", call, number), 3 * number * seconds
