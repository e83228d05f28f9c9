"""Whole models before and after `extops.accelerate`: whether results agree, and what a call takes.

    python -m benchmarks.models --device cuda --output build/models
    python -m benchmarks.models --device cuda --output build/compiled --compiled --mode default

Each model runs in a process of its own, for a limited time. Some on each GPU prepare at once; while one is measured,
nothing else runs there, and nothing is compiled. Models of packages that are not installed are left out. `models.json`
has the samples of all that were measured yet, `ratios.json` their ratios.
With `--compiled` each model is measured as `torch.compile` makes it, too, by default and for `reduce-overhead`: how
often a graph breaks, how long the first call takes, and what a further one takes.
With `--fullgraph` nothing is measured: `fullgraph.json` gets, for the torch at hand, the lines that are refused.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import multiprocessing
import os
import re
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import extops
from benchmarks import environment, packages, protocol, zoo
from benchmarks.results import ratio
from benchmarks.runner import set_mode, tidy_up
from benchmarks.suite import say, slug, write
from benchmarks.zoo import Model

MODELS = (*zoo.MODELS, *packages.MODELS)
MODES = {"cuda": ("default", "tf32", "autocast"), "cpu": ("float32", "autocast")}
SECONDS_OF_A_CASE, SECONDS_OF_COMPILED = 1.0, 5.0
ROUNDS = 3, 15
SLICE = 0.02
"""Seconds of a sample, whose calls follow each other."""
LONG = 0.1
"""Those from which on it is not warmed up."""
PREPARING, MEASURING = 240.0, 60.0
"""The seconds that a process may take for each."""
SHARE_OF_FIRST = 0.4
"""The part of that in which a process begins to compile: the second of each library finds what the first has made."""
PROCESSES_OF_A_GPU = 6
told: int | None = None
"""Where a process says that it waits to be measured."""
WORKS = ("forward", "training")
MOST_DIFFERENT = 0.05
"""Of the largest value."""

Calls = dict[str, Callable[[], object]]


def run(
    device: str,
    names: list[str],
    modes: list[str],
    seconds: float,
    output: Path,
    compiled: bool = False,
    preparing: float = PREPARING,
) -> None:
    """Measures the models in all modes, until the time is over: one here, more of them side by side."""
    chosen = names or [model.name for model in MODELS]
    end = time.perf_counter() + seconds
    output.mkdir(parents=True, exist_ok=True)
    if len(chosen) > 1:
        asked = ["--device", device, f"--preparing={preparing}"]
        asked += ["--compiled"] if compiled else []
        asked += [x for mode in modes for x in ("--mode", mode)]
        found = _side_by_side(device, chosen, asked, output, end, preparing)
    else:
        fill = partial(_fill_compiled, seconds=SHARE_OF_FIRST * preparing) if compiled else _fill
        found = _one_by_one(device, chosen[0], modes or [*MODES[device]], fill)
    result: dict[str, Any] = {"environment": environment.describe(device), "records": []}
    for record in found:
        result["records"].append(record)
        write(output / "models.json", result)
        if compiled:
            (output / "compiled.md").write_text(report_of_compiled(result))
        else:
            write(output / "ratios.json", shortened(result))
            (output / "models.md").write_text(report(result))
        say((line_of_compiled if compiled else line)(record))
    say((summarise_compiled if compiled else summarise)(result["records"]))


def _named(name: str) -> Model:
    (model,) = (x for x in MODELS if x.name == name)
    return model


def _prepare(mode: str, device: str) -> None:
    set_mode("float32" if mode == "autocast" else mode)
    if device == "cpu":
        torch.set_num_threads(1)  # of more the figures depend on what else the machine does


def _one_by_one(
    device: str, name: str, modes: list[str], fill: Callable[..., None]
) -> Iterator[dict[str, Any]]:
    for mode in modes:
        yield measure(_named(name), mode, device, fill)


class _Apart:
    """A model in a process of its own, which says when it is ready, and waits until it is told to measure."""

    def __init__(self, name: str, gpu: str, asked: list[str], output: Path) -> None:
        self.name, self.folder, self.late = name, output / slug(name, ""), ""
        self.started = time.perf_counter()
        self.messages = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.said, write = os.pipe()  # what else a process starts may keep its standard output open
        command = [sys.executable, "-m", "benchmarks.models", "--model", name, *asked]
        self.process = subprocess.Popen(
            [*command, "--output", str(self.folder), "--wait", str(write)],
            # Each process would have a thread for each core, and they spin while they wait.
            env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self.messages,
            text=True,
            start_new_session=True,
            pass_fds=[write],
        )
        os.close(write)

    def is_heard(self, seconds: float) -> bool:
        """Whether it says within that time that it is ready, or was measured; else it is stopped. One that has ended
        says nothing, at once.
        """
        if select.select([self.said], [], [], max(seconds, 0))[0]:
            return bool(os.read(self.said, 1))
        self.late = f"it was stopped after {time.perf_counter() - self.started:.0f} s"
        os.killpg(self.process.pid, signal.SIGKILL)
        return False

    def go_on(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            print(file=self.process.stdin, flush=True)

    def records(self) -> list[dict[str, Any]]:
        """What it measured, or why it did not."""
        self.is_heard(MEASURING)
        self.process.communicate()
        os.close(self.said)
        with self.messages:
            self.messages.seek(0)
            failed = self.messages.read().splitlines() or [f"exit code {self.process.returncode}"]
        if self.process.returncode == 0:
            found: list[dict[str, Any]]
            found = json.loads((self.folder / "models.json").read_text())["records"]
            return found
        record = {"model": self.name, "package": "", "mode": "", "samples": {}}
        return [record | {"failed": {"all": self.late or failed[-1]}}]


def _within(seconds: float, end: float) -> float:
    now = time.perf_counter()
    return min(now + seconds, max(end, now + 1))


def _side_by_side(
    device: str, names: list[str], asked: list[str], output: Path, end: float, preparing: float
) -> Iterator[dict[str, Any]]:
    """The records of the models, by groups that prepare at once: while one is measured, nothing else is computed."""
    gpus = [""]
    if device == "cuda":
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = given.split(",") if given else [*map(str, range(torch.cuda.device_count()))]
    places = gpus * (PROCESSES_OF_A_GPU if device == "cuda" else 1)
    for first in range(0, len(names), len(places)):
        pairs = zip(names[first:], places, strict=False)
        group = [_Apart(name, gpu, asked, output) for name, gpu in pairs]
        for to_come in reversed(range(asked.count("--mode") or len(MODES[device]))):
            until = _within(preparing, end)
            for each in group:
                each.is_heard(until - time.perf_counter())
            for place in range(0, len(group), len(gpus)):  # of each GPU one
                turn = group[place : place + len(gpus)]
                for each in turn:
                    each.go_on()
                until = _within(MEASURING, end)
                for each in turn:
                    each.is_heard(until - time.perf_counter())
                    if not to_come:
                        yield from each.records()


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Waits until nothing else is computed, where others are measured beside this one."""
    if told is None:
        yield
        return
    os.write(told, b".")
    input()
    yield
    os.write(told, b".")


def measure(
    model: Model, mode: str, device: str, fill: Callable[..., None] | None = None
) -> dict[str, Any]:
    """The record of a model in a mode."""
    record: dict[str, Any] = {"model": model.name, "package": model.package, "mode": mode}
    record |= {"failed": {}, "samples": {}}
    _prepare(mode, device)
    try:
        (fill or _fill)(record, model, mode, device)
    except Exception as error:
        record["failed"]["all"] = protocol.describe(error)
    tidy_up(device)
    return record


def _made(model: Model, device: str) -> tuple[nn.Module, nn.Module, tuple[Any, ...]]:
    """The model as it is and accelerated, and its inputs."""
    torch.manual_seed(0)
    before, inputs = model.make(device == "cpu")
    before.to(device)  # some classes return nothing
    given = pytree.tree_map_only(Tensor, lambda x: x.to(device), inputs)
    for module in before.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return before, extops.accelerate(copy.deepcopy(before)), given


def _copied(model: nn.Module, library: str = "torch") -> nn.Module:
    """With weights that lie together again, which cuDNN would copy in each call else. A copy of an accelerated model
    may be none: flair's makes its layers anew.
    """
    copied = copy.deepcopy(model)
    for module in copied.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return extops.accelerate(copied) if library == "extops" else copied


def _fill(record: dict[str, Any], model: Model, mode: str, device: str) -> None:
    before, after, given = _made(model, device)
    control = _copied(before)
    variants = {"torch": before, "extops": after}
    record["differences"] = differences(model, variants, given, mode, device)
    variants["control"] = control
    samplers, seconds = {}, 0.0
    for name, variant in variants.items():
        taken = list(_samplers(calls_of(model, variant, given, mode, device), device))
        samplers[name] = [sampler for sampler, _ in taken]
        seconds += sum(each for _, each in taken)
    with _alone():
        record["samples"], failed = protocol.interleave(
            samplers, _rounds(SECONDS_OF_A_CASE, seconds)
        )
    record["failed"] |= failed


@contextlib.contextmanager
def _region(mode: str, device: str) -> Iterator[None]:
    with torch.autocast(device, torch.bfloat16, enabled=mode == "autocast"):
        yield


def calls_of(
    model: Model,
    module: nn.Module,
    inputs: tuple[Any, ...],
    mode: str,
    device: str,
    compiled: Callable[..., Tensor] | None = None,
) -> Calls:
    """A forward without gradients in evaluation, and a step of training but for the optimiser."""
    run = compiled or partial(model.run, module)

    def forward() -> object:
        module.train(model.in_training)
        with torch.no_grad(), _region(mode, device):
            return run(*inputs)

    def training() -> object:
        module.train()
        module.zero_grad()
        with _region(mode, device):
            loss = run(*inputs).float().square().mean()
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
        module = _copied(original, name)
        module.train(model.in_training)
        for each in module.modules():
            if isinstance(each, nn.RNNBase):
                each.train(model.has_gradients or model.in_training)  # cuDNN's gradients want it
                each.dropout = 0.0
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


# -- compiled


FORMS = {"eager": None, "compiled": "default", "graphs": "reduce-overhead"}
"""How a model runs: by its name in a record, the mode of `torch.compile`."""
PREPARED = [
    (work, form) for work in WORKS for form in FORMS if (work, form) != ("training", "graphs")
]
"""In this order: a training step may take minutes to compile."""
TURNS = {"torch": "torch", "extops": "extops"}, {"control": "torch", "again": "extops"}
"""Processes that compile side by side, and whose layers each has: two processes of one model differ where the host
decides, and what Dynamo refuses of a line of code for one layer, it leaves in eager code for any other."""


def _fill_compiled(
    record: dict[str, Any], model: Model, mode: str, device: str, seconds: float = PREPARING
) -> None:
    """Forwards of each form, training of all but `reduce-overhead`, in which one sentence at a time is served."""
    context = multiprocessing.get_context("spawn")
    samplers: dict[str, list[protocol.Sampler]] = {}
    record["first"], of_one, wanted = {}, 0.0, [*PREPARED]
    with contextlib.ExitStack() as ends:
        caches = ends.enter_context(tempfile.TemporaryDirectory())
        for turn in TURNS:
            pipes = {}
            for name, library in turn.items():
                # What the compiler made for one library must not shorten the first call of the other.
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{caches}/{library}"
                pipes[name], theirs = context.Pipe()
                arguments = theirs, model.name, mode, device, library, wanted, seconds
                process = context.Process(target=_measure_compiled, args=arguments, daemon=True)
                process.start()
                ends.callback(process.join)
                ends.callback(_end, pipes[name])
            for name, pipe in pipes.items():
                found = _received(pipe)
                of_one += sum(found["seconds"].values())
                wanted = [x for x in wanted if x in found["seconds"]]
                record["failed"] |= {f"{name} {x}": y for x, y in found["failed"].items()}
                for form, first in found["first"].items():
                    record["first"][f"{name} {form}"] = first
                    samplers[f"{name} {form}"] = [partial(_ask, pipe, form)]
        with _alone():
            rounds = _rounds(SECONDS_OF_COMPILED, of_one)
            record["samples"], failed = protocol.interleave(samplers, rounds)
    record["failed"] |= failed


def _rounds(most_seconds: float, seconds_of_one: float) -> int:
    least, most = ROUNDS
    return max(least, min(most, int(most_seconds / max(seconds_of_one, 1e-3))))


def _end(pipe: Connection) -> None:
    with contextlib.suppress(BrokenPipeError):
        pipe.send(None)


def _received(pipe: Connection) -> dict[str, Any]:
    answer: dict[str, Any] | str = pipe.recv()
    if isinstance(answer, str):
        raise RuntimeError(answer)
    return answer


def _ask(pipe: Connection, form: str) -> dict[str, float]:
    pipe.send(form)
    return _received(pipe)


def _measure_compiled(pipe: Connection, *arguments: Any) -> None:
    """In a process of its own; what goes wrong is said."""
    try:
        _prepare_compiled(pipe, *arguments)
    except Exception as error:
        pipe.send(protocol.describe(error))


def _prepare_compiled(
    pipe: Connection,
    name: str,
    mode: str,
    device: str,
    library: str,
    wanted: list[tuple[str, str]],
    seconds: float,
) -> None:
    """Sends what the first call of each form took, then a sample of the form that is asked for, until none is. Nothing
    more is compiled once the seconds are over.
    """
    end = time.perf_counter() + seconds
    model = _named(name)
    _prepare(mode, device)
    module, _, given = _made(model, device)
    found: dict[str, Any] = {"first": {}, "failed": {}, "seconds": {}}
    start_compiler(device)
    calls = {}
    for form, of_compiler in FORMS.items():
        known = _copied(module, library)
        run = partial(model.run, known)
        run = torch.compile(run, mode=of_compiler) if of_compiler else run
        calls[form] = calls_of(model, known, given, mode, device, run)
    samplers: dict[str, list[tuple[protocol.Sampler, float]]] = {x: [] for x in FORMS}
    for work, form in wanted:
        if work not in calls[form] or form in found["failed"]:
            continue
        if time.perf_counter() > end:
            found["failed"][form] = f"{work}: not compiled within {seconds:.0f} s"
            continue
        call = _step(calls[form][work])
        torch._dynamo.utils.counters.clear()
        start = time.perf_counter()
        try:
            call()
            protocol.wait_for(device)()
            taken = time.perf_counter() - start
            samplers[form] += _samplers({work: call}, device)
        except Exception as error:
            found["failed"][form] = f"{work}: {protocol.describe(error)}"
            continue
        found["seconds"][work, form] = samplers[form][-1][1]
        first = found["first"].setdefault(form, {"seconds": taken, "breaks": 0})
        first["breaks"] += _breaks()
    pipe.send(found)
    while form := pipe.recv():
        answer: Any = {}
        try:
            for sampler, each in samplers[form]:
                if each < LONG:
                    sampler()  # this process has slept or trained: the first call behind that says little of others
                answer |= sampler()
        except Exception as error:
            answer = protocol.describe(error)
        pipe.send(answer)


def start_compiler(device: str) -> None:
    """Does what it does once in a process. By a function: modules and partial functions run in one frame of torch's,
    which is compiled for any sizes once it has met others. So was each whole model, not what breaks of a graph leave:
    docTR's CRNN by ours took 2.63 ms by 2.10 (H200), and takes 1.90 by 2.17 for its own sizes.
    """
    torch.compile(lambda x: x.sin())(torch.ones(8, device=device))


def _refused(model: Model, module: nn.Module, given: tuple[Any, ...]) -> str:
    """The line at which `fullgraph` ends; empty for a model that is one graph."""
    module.train(model.in_training)
    try:
        with torch.no_grad():
            torch.compile(partial(model.run, module), backend="eager", fullgraph=True)(*given)
    except Exception as error:
        lines = re.findall(r'File "([^"]*)", line (\d+)', str(error))
        path, number = lines[-1] if lines else ("", "")
        return (
            f"{protocol.describe(error).splitlines()[0]} {'/'.join(Path(path).parts[-2:])}:{number}"
        )
    finally:
        torch._dynamo.reset()
    return ""


def add_refused(names: list[str], output: Path) -> None:
    """Adds what this torch refuses of each model, on the CPU, to `fullgraph.json`, and makes its table anew."""
    output.mkdir(parents=True, exist_ok=True)
    file = output / "fullgraph.json"
    of_each: dict[str, dict[str, str]] = json.loads(file.read_text()) if file.exists() else {}
    found = of_each.setdefault(torch.__version__.partition("+")[0], {})
    _prepare("float32", "cpu")
    known = {model.name for model in MODELS}
    alone = [x for x in known if x.removesuffix(", serving") not in known - {x}]
    for name in names or sorted(alone):
        try:
            before, _, given = _made(_named(name), "cpu")
            found[name] = _refused(_named(name), _copied(before, "extops"), given)
        except Exception as error:
            found[name] = f"not made: {protocol.describe(error)}"
        write(file, of_each)
        (output / "fullgraph.md").write_text(report_of_refused(of_each))
        say(f"{name}: {found[name] or 'one graph'}")


def report_of_refused(of_each: dict[str, dict[str, str]]) -> str:
    """How many models are one graph with each torch, and which lines of the others are refused."""
    versions = sorted(of_each, key=lambda x: [*map(int, x.split("."))])
    names = sorted(set.union(*(set(x) for x in of_each.values())))
    counts = [sum(not x for x in of_each[version].values()) for version in versions]
    said = ", ".join(
        f"torch {x} {y} of {len(of_each[x])}" for x, y in zip(versions, counts, strict=True)
    )
    lines = [f"One graph: {said}. The others:", "", f"| | {' | '.join(versions)} |"]
    lines.append("|---" * (len(versions) + 1) + "|")
    for name in names:
        cells = [of_each[version].get(name, "") for version in versions]
        if any(cells):
            places = (f"`{x.split()[-1]}`" if x else "one graph" for x in cells)
            lines.append(f"| {name} | {' | '.join(places)} |")
    return "\n".join(lines) + "\n"


def _breaks() -> int:
    """Of graphs, and what was left in eager code as a whole."""
    counters = torch._dynamo.utils.counters
    left = counters["frames"]["total"] - counters["frames"]["ok"]
    return sum(counters["graph_break"].values()) + left


def _step(call: Callable[[], object]) -> Callable[[], object]:
    """A graph of `reduce-overhead` may write over the results of the call before."""

    def step() -> object:
        torch.compiler.cudagraph_mark_step_begin()
        return call()

    return step


def ratios_of_compiled(record: dict[str, Any], of: str = "extops") -> dict[str, float]:
    """torch's time by ours, of each the fastest sample of two processes, since what else a host does can only add: the
    medians of two processes of one model were up to 1.5 times apart. The control is torch's faster process by its
    slower one.
    """
    found = {}
    for form in FORMS:
        taken = {x: record["samples"].get(f"{x} {form}", {}) for turn in TURNS for x in turn}
        for name in set.intersection(*(set(x) for x in taken.values())):
            of_each = {x: min(y[name]) for x, y in taken.items()}
            theirs = of_each["torch"], of_each["control"]
            ours = min(of_each["extops"], of_each["again"])
            found[f"{form} {name}"] = min(theirs) / (ours if of == "extops" else max(theirs))
    return found


def line_of_compiled(record: dict[str, Any]) -> str:
    """Rows of the table."""
    lines = [f"{record['model']} ({record['mode']})"]
    for variant, first in record.get("first", {}).items():
        samples = record["samples"].get(variant, {})
        times = [f"{x} {min(samples[x]) / 1e3:.3f} ms" for x in sorted(samples)]
        said = f"{first['breaks']} breaks, first call {first['seconds']:.1f} s"
        lines.append(f"  {variant:16} {said}, {', '.join(times)}")
    lines += [f"  {x}: {y}" for x, y in record["failed"].items()]
    lines.append(f"  { ({x: round(y, 2) for x, y in sorted(ratios_of_compiled(record).items())}) }")
    return "\n".join(lines)


def summarise_compiled(records: list[dict[str, Any]]) -> str:
    """By form and work, the mean of all models, and those below what the control is in 19 of 20 models."""
    found: dict[str, dict[str, list[tuple[float, str]]]] = {}
    for of in ("extops", "control"):
        for record in records:
            for name, value in ratios_of_compiled(record, of).items():
                serving = (", serving",) * ("serving" in record["model"])
                for what in ("", *serving):
                    here = found.setdefault(f"{name}{what}", {}).setdefault(of, [])
                    here.append((value, record["model"]))
    lines = []
    for name, of_each in sorted(found.items()):
        ours, control = ([x for x, _ in of_each[of]] for of in ("extops", "control"))
        least = statistics.quantiles([*control, 1.0], n=20, method="inclusive")[0]
        below = [
            f"{model} {value:.2f}" for value, model in sorted(of_each["extops"]) if value < least
        ]
        mean = statistics.geometric_mean(ours)
        lines.append(
            f"{name}: {len(ours)} models, mean {mean:.2f}, control's 5th percentile {least:.2f}"
        )
        lines.append(f"  below it {len(below)}{': ' * bool(below)}{', '.join(below)}")
    return "\n".join(lines)


def report_of_compiled(result: dict[str, Any]) -> str:
    """What a page shows of a run: the means, and each model by torch's layers and by ours."""
    of = result["environment"]
    columns = "compiled forward", "compiled training", "graphs forward"
    lines = [
        f"{of['device_name']}, torch {of['torch']}, commit {of['commit']}. Times by torch's layers to those by ours, "
        "of each the fastest sample of two processes; in brackets the control, torch's faster process to its slower. "
        "Breaks of the graph and seconds of the first call by torch's layers, then by ours:",
        "",
        f"```text\n{summarise_compiled(result['records'])}\n```",
        "",
        f"| | {' | '.join(columns)} | breaks | first call |",
        "|---" * (len(columns) + 3) + "|",
    ]
    for record in result["records"]:
        found, control = (ratios_of_compiled(record, x) for x in ("extops", "control"))
        names = [f"{x.split()[0]} wall_{x.split()[1]}" for x in columns]
        cells = [
            f"{found[x]:.2f} ({control[x]:.2f})" if x in found and x in control else ""
            for x in names
        ]
        first = [record.get("first", {}).get(f"{x} compiled") for x in ("torch", "extops")]
        if None not in first:
            breaks, seconds = ([x[y] for x in first] for y in ("breaks", "seconds"))
            cells += [f"{breaks[0]}, {breaks[1]}", f"{seconds[0]:.1f}, {seconds[1]:.1f}"]
            lines.append(f"| {record['model']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


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


def report(result: dict[str, Any]) -> str:
    """What a page shows of a run: the means, and each model beside its control."""
    of, records = result["environment"], result["records"]
    modes = list(dict.fromkeys(record["mode"] for record in records))
    columns = [(mode, f"wall_{work}") for mode in modes for work in WORKS]
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for record in records:
        if ratios(record):
            package = f" ({record['package']})" if record["package"] else ""
            rows.setdefault(record["model"] + package, {})[record["mode"]] = record

    def cells(of_model: dict[str, dict[str, Any]]) -> Iterator[str]:
        for mode, work in columns:
            record = of_model.get(mode, {"samples": {}})
            found = [ratios(record, variant).get(work) for variant in ("extops", "control")]
            yield "" if None in found else "{:.2f} ({:.2f})".format(*found)

    def gain(name: str) -> float:
        return -max(x for record in rows[name].values() for x in ratios(record).values())

    lines = [
        f"{of['device_name']}, torch {of['torch']}, commit {of['commit']}; in brackets the control:",
        "",
        f"```text\n{summarise(records)}\n```",
        "",
        "| | " + " | ".join(f"{x}, {y.removeprefix('wall_')}" for x, y in columns) + " |",
        "|---" * (1 + len(columns)) + "|",
        *(f"| {x} | {' | '.join(cells(rows[x]))} |" for x in sorted(rows, key=gain)),
    ]
    return "\n".join(lines) + "\n"


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
    parser.add_argument(
        "--mode", action="append", default=[], choices=sorted({*MODES["cpu"], *MODES["cuda"]})
    )
    parser.add_argument("--seconds", type=float, default=600, help="default: %(default)s")
    parser.add_argument(
        "--preparing", type=float, default=PREPARING, help="seconds a model; default: %(default)s"
    )
    parser.add_argument("--compiled", action="store_true", help="beside what torch.compile makes")
    parser.add_argument("--fullgraph", action="store_true", help="what is refused, and no times")
    parser.add_argument("--output", type=Path, default=Path("build/models"))
    parser.add_argument("--wait", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    global told
    if (told := given.wait) is not None:
        os.set_inheritable(told, False)
    if given.fullgraph:
        return add_refused(given.model, given.output)
    chosen = given.device, given.model, given.mode, given.seconds
    run(*chosen, given.output, given.compiled, given.preparing)


if __name__ == "__main__":
    main()
