"""Whole models before and after `extops.accelerate`: whether results agree, and what a call takes.

    python -m benchmarks.models --device cuda --output build/models

Models of packages that are not installed are left out. `models.json` has all samples, `ratios.json` their ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import extops
from benchmarks import environment, packages, protocol, zoo
from benchmarks.results import ratio
from benchmarks.runner import set_mode, tidy_up
from benchmarks.suite import say, write
from benchmarks.zoo import Model

MODELS = (*zoo.MODELS, *packages.MODELS)
MODES = {"cuda": ("default", "tf32", "autocast"), "cpu": ("float32", "autocast")}
SECONDS_OF_A_CASE = 1.0
ROUNDS = 3, 15
SLICE = 5e-3
WORKS = ("forward", "training")
MOST_DIFFERENT = 0.05
"""Of the largest value."""

Calls = dict[str, Callable[[], object]]


def run(device: str, names: list[str], modes: list[str], seconds: float, output: Path) -> None:
    """Measures all models in all modes, until the time is over."""
    start = time.perf_counter()
    output.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"environment": environment.describe(device), "records": []}
    for model in MODELS:
        for mode in modes or MODES[device]:
            if time.perf_counter() - start > seconds or (names and model.name not in names):
                continue
            record = measure(model, mode, device)
            result["records"].append(record)
            write(output / "models.json", result)
            write(output / "ratios.json", shortened(result))
            say(line(record))
    say(summarise(result["records"]))


def measure(model: Model, mode: str, device: str) -> dict[str, Any]:
    """The record of a model in a mode."""
    record: dict[str, Any] = {"model": model.name, "package": model.package, "mode": mode}
    record |= {"failed": {}, "samples": {}}
    set_mode("float32" if mode == "autocast" else mode)
    if device == "cpu":
        torch.set_num_threads(1)  # of more the figures depend on what else the machine does
    try:
        _fill(record, model, mode, device)
    except Exception as error:
        record["failed"]["all"] = protocol.describe(error)
    tidy_up(device)
    return record


def _fill(record: dict[str, Any], model: Model, mode: str, device: str) -> None:
    torch.manual_seed(0)
    before, inputs = model.make(device == "cpu")
    before.to(device)  # some classes return nothing
    given = pytree.tree_map_only(Tensor, lambda x: x.to(device), inputs)
    for module in before.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    after = extops.accelerate(copy.deepcopy(before))
    control = copy.deepcopy(before)
    for module in control.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    variants = {"torch": before, "extops": after}
    record["differences"] = differences(model, variants, given, mode, device)
    variants["control"] = control
    samplers, seconds = {}, 0.0
    for name, variant in variants.items():
        taken = list(_samplers(calls_of(model, variant, given, mode, device), device))
        samplers[name] = [sampler for sampler, _ in taken]
        seconds += sum(each for _, each in taken)
    least, most = ROUNDS
    rounds = max(least, min(most, int(SECONDS_OF_A_CASE / seconds)))
    record["samples"], failed = protocol.interleave(samplers, rounds)
    record["failed"] |= failed


@contextlib.contextmanager
def _region(mode: str, device: str) -> Iterator[None]:
    with torch.autocast(device, torch.bfloat16, enabled=mode == "autocast"):
        yield


def calls_of(
    model: Model, module: nn.Module, inputs: tuple[Any, ...], mode: str, device: str
) -> Calls:
    """A forward without gradients in evaluation, and a step of training but for the optimiser."""

    def forward() -> object:
        module.train(model.in_training)
        with torch.no_grad(), _region(mode, device):
            return model.run(module, *inputs)

    def training() -> object:
        module.train()
        module.zero_grad()
        with _region(mode, device):
            loss = model.run(module, *inputs).float().square().mean()
        return loss.backward()

    return (
        {"forward": forward, "training": training} if model.has_gradients else {"forward": forward}
    )


def differences(
    model: Model, variants: dict[str, nn.Module], inputs: tuple[Any, ...], mode: str, device: str
) -> dict[str, float]:
    """How far values and gradients are from torch's, relative to the largest. Dropout is off: each library and dtype
    draws in an order of its own. Torch's are computed without autocast, under which some of its layers on a GPU are
    wrong.
    """
    found: list[dict[str, list[Tensor]]] = []
    for name, original in variants.items():
        module = copy.deepcopy(original)
        module.train(model.in_training)
        for each in module.modules():
            if isinstance(each, nn.RNNBase):
                each.train(model.has_gradients or model.in_training)  # cuDNN's gradients want it
                each.dropout = 0.0
                each.flatten_parameters()
        torch.manual_seed(1)
        with (
            torch.set_grad_enabled(model.has_gradients),
            _region("" if name == "torch" else mode, device),
        ):
            values = model.run(module, *inputs).float()
        gradients = []
        if model.has_gradients:
            used = [x for x in module.parameters() if x.requires_grad]
            gradients = torch.autograd.grad(values.square().mean(), used, allow_unused=True)
        found.append(
            {"values": [values.detach()], "gradients": [x for x in gradients if x is not None]}
        )
    theirs, ours = found
    return {what: _difference(ours[what], theirs[what]) for what in theirs if theirs[what]}


def _difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    largest = max(float(x.abs().max()) for x in theirs)
    furthest = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
    return furthest / largest if largest else furthest


def _samplers(calls: Calls, device: str) -> Iterator[tuple[protocol.Sampler, float]]:
    wait = protocol.wait_for(device)
    for work, call in calls.items():
        for _ in range(2):
            call()
        wait()
        start = time.perf_counter()
        call()
        wait()
        seconds = time.perf_counter() - start
        number = max(1, min(20, int(SLICE / seconds)))
        yield protocol.wall_of(f"wall_{work}", call, device, number), number * seconds


# -- what is said of it


def ratios(record: dict[str, Any], of: str = "extops") -> dict[str, float]:
    """torch's time by ours: more than 1 where ours is faster."""
    theirs, ours = (record["samples"].get(name, {}) for name in ("torch", of))
    names = [f"wall_{work}" for work in WORKS]
    return {
        name: statistics.median(ratio(theirs[name], ours[name]))
        for name in names
        if name in theirs and name in ours
    }


def shortened(result: dict[str, Any]) -> dict[str, Any]:
    """The ratios of each model by mode, forward and training, without the samples. What differs is no faster."""
    models: dict[str, dict[str, list[float]]] = {}
    for record in result["records"]:
        found = ratios(record)
        if found and record["differences"]["values"] < MOST_DIFFERENT:
            of_model = models.setdefault(record["model"], {})
            of_model[record["mode"]] = [round(x, 3) for x in found.values()]
    environment = {
        x: result["environment"][x] for x in ("device_name", "torch", "extops", "commit")
    }
    return {"environment": environment, "models": models}


def line(record: dict[str, Any]) -> str:
    """A row of the table."""
    name = record["model"] + (f" ({record['package']})" if record["package"] else " (its shape)")
    found, samples = ratios(record), record["samples"].get("extops", {})
    control = ratios(record, "control")
    if not found:
        return f"{name:40} {record['mode']:9} {record['failed']}"
    times = "  ".join(
        f"{found[x]:6.3f} ({statistics.median(samples[x]) / 1e3:8.2f} ms, control {control[x]:.3f})"
        for x in found
    )
    errors = " ".join(f"{x} {y:.1e}" for x, y in record["differences"].items())
    return f"{name:40} {record['mode']:9} {times}  {errors}"


def summarise(records: list[dict[str, Any]]) -> str:
    """By mode, then all."""
    lines = []
    for mode in dict.fromkeys(record["mode"] for record in records):
        for work in WORKS:
            for variant in ("extops", "control"):
                of = [ratios(x, variant) for x in records if x["mode"] == mode]
                values = [x[f"wall_{work}"] for x in of if f"wall_{work}" in x]
                if values:
                    mean, below = statistics.geometric_mean(values), sum(x < 0.98 for x in values)
                    lines.append(
                        f"{mode} {work}, {variant}: {len(values)} models, mean {mean:.3f}, "
                        f"least {min(values):.3f}, {below} below 0.98, {sum(x < 0.9 for x in values)} below 0.9"
                    )
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", action="append", default=[], help="one of them; may be repeated")
    parser.add_argument("--mode", action="append", default=[], choices=MODES["cuda"])
    parser.add_argument("--seconds", type=float, default=600, help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("build/models"))
    arguments = parser.parse_args()
    run(arguments.device, arguments.model, arguments.mode, arguments.seconds, arguments.output)


if __name__ == "__main__":
    main()
