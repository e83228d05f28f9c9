"""Whole models before and after `extops.accelerate`: whether results agree, and what a call takes.

    python -m benchmarks.models --device cuda --output build/models
    python -m benchmarks.models --device cuda --output build/compiled --compiled --mode default

Each model runs in a process of its own, for a limited time. Some on each GPU prepare at once; while one is measured, a
signal stops the others. Models of packages that are not installed are left out. `models.json` has the samples of all
that were measured yet, `ratios.json` their ratios.
With `--compiled` each model is measured as `torch.compile` makes it, too, by default and for `reduce-overhead`: how
often a graph breaks, how long the first call takes, and what a further one takes.
With `--fullgraph` nothing is measured: `fullgraph.json` gets, for the torch at hand, the lines that are refused.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import json
import multiprocessing
import os
import re
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor import config
from torch.utils import _pytree as pytree

import extops
from benchmarks import environment, packages, protocol, zoo
from benchmarks.results import ratio
from benchmarks.runner import set_mode, tidy_up
from benchmarks.suite import say, write
from benchmarks.zoo import Made, Model
from extops.choosing import _table

MODELS = (*zoo.MODELS, *packages.MODELS)
MODES = {"cuda": ("default", "tf32", "autocast"), "cpu": ("float32", "autocast")}
SECONDS_OF_A_CASE, SECONDS_OF_COMPILED = 1.0, 5.0
ROUNDS = 5, 15
"""The median of three was once 0.72, of a model whose layers ran the same code before and after."""
SLICE = 0.01
"""Seconds of a sample, whose calls follow each other."""
LONG = 0.1
"""Those from which on it is not warmed up."""
STARTING = 1.0
"""Seconds after which another model may start to prepare, once the one before has taken its memory."""
PREPARING, DRAINING, MEASURING = 240.0, 10.0, 60.0
"""The seconds that a process may take to prepare, the GPU to compute what is queued, and a process to be measured."""
SHARE_OF_FIRST = 0.4
"""The part of that in which a process begins to compile: the second of each library finds what the first has made."""
AT_ONCE = {"cuda": 8, "cpu": 1}
"""Models that prepare on one device, each with two processes."""
turn: Connection | None = None
"""Where a process says that it waits to be measured."""
WORKS = ("forward", "training")
MOST_DIFFERENT = 0.05
"""Of the largest value."""

Calls = dict[str, Callable[[], object]]
Given = tuple[str, list[str], Callable[..., None]]
"""The device, the modes, and what fills a record."""
Place = tuple[str, frozenset[int]]
"""A GPU, and the cores of the CPU."""
_FORK = multiprocessing.get_context("fork")
_MY_TURN = "my turn"


def run(
    device: str,
    names: list[str],
    modes: list[str],
    seconds: float,
    output: Path,
    compiled: bool = False,
    preparing: float = PREPARING,
) -> None:
    """Measures the models in all modes, until the time is over."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # CUDA must not start before a fork
    config.compile_threads = 1  # the processes are parallel already
    importlib.import_module("torch._inductor.compile_fx")  # which takes each process seconds else
    end = time.perf_counter() + seconds
    output.mkdir(parents=True, exist_ok=True)
    fill = partial(_fill_compiled, seconds=SHARE_OF_FIRST * preparing) if compiled else _fill
    given = device, modes or [*MODES[device]], fill
    found = _side_by_side(names or [model.name for model in MODELS], given, end, preparing)
    with _FORK.Pool(1) as pool:
        environment_of_all = pool.apply(environment.describe, (device,))
        configuration = pool.apply(torch.__config__.show)
    torch.__config__.show = partial(str, configuration)  # torch_geometric asks when it is imported
    result: dict[str, Any] = {"environment": environment_of_all, "records": []}
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


class _Apart:
    """A model in a process of its own. It and those that it starts are one group, which a signal reaches at once."""

    def __init__(self, name: str, place: Place, given: Given, until: float) -> None:
        self.name, self.place, self.until = name, place, until
        self.messages = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.pipe, theirs = _FORK.Pipe()
        arguments = theirs, self.messages.fileno(), name, place, given
        self.process = _FORK.Process(target=_measure_apart, args=arguments)
        self.process.start()
        os.setpgid(self.process.pid or 0, 0)
        theirs.close()

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, number)

    def said(self) -> Any:
        """What it has sent: a record, or that its turn begins or ends; None once it has ended."""
        with contextlib.suppress(EOFError, ConnectionResetError):
            return self.pipe.recv()
        return None

    def failure(self, why: str = "") -> dict[str, Any]:
        """The record of one that was stopped, or has ended before it was measured."""
        self.signal(signal.SIGKILL)
        self.process.join()
        with self.messages:
            self.messages.seek(0)
            said = self.messages.read().splitlines() or [f"exit code {self.process.exitcode}"]
        return _failed(self.name, why or said[-1])


def _failed(name: str, why: str) -> dict[str, Any]:
    return {"model": name, "package": "", "mode": "", "samples": {}, "failed": {"all": why}}


def _measure_apart(pipe: Connection, messages: int, name: str, place: Place, given: Given) -> None:
    """What runs in such a process: a record of each mode is sent."""
    global turn
    turn = pipe
    device, modes, fill = given
    os.dup2(messages, 1)
    os.dup2(messages, 2)
    gpu, cores = place
    if gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    # On the same ones, two processes of a model are as far from its memory and its GPU.
    os.sched_setaffinity(0, cores)
    # Each process would have a thread for each core, and they spin while they wait.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        # Its own: a process that is stopped may have locked the user's.
        choices = Path(folder) / "choices.json"
        os.environ[_table.VARIABLE] = str(choices)
        try:
            for mode in modes:
                record = measure(_named(name), mode, device, fill)
                known = json.loads(choices.read_text()) if choices.exists() else {"machines": {}}
                pipe.send(record | {"choices": [*known["machines"].values()]})
        except Exception as error:
            pipe.send(_failed(name, protocol.describe(error)))


def _side_by_side(
    names: list[str], given: Given, end: float, preparing: float
) -> Iterator[dict[str, Any]]:
    """The records of the models: while one is measured, nothing else is computed."""
    places = _places(given[0])
    waiting, pauses = [*names], list[tuple[float, float]]()
    running: list[_Apart] = []
    measured: set[str] = set()
    try:
        while running or (waiting and time.perf_counter() < end):
            now = time.perf_counter()
            if (
                waiting
                and len(running) < len(places)
                and now < end
                and (not running or _has_room())
            ):
                place = next(x for x in places if x not in [y.place for y in running])
                running.append(_Apart(waiting.pop(0), place, given, now + preparing))
            first = min(end, now + STARTING, *(x.until for x in running))
            heard = wait([x.pipe for x in running], max(first - now, 0))
            for each in [x for x in running if x.pipe in heard]:
                said = each.said()
                if said == _MY_TURN:
                    others = [x for x in running if x is not each]
                    pauses.append(_measured_alone(each, others))
                elif said is None:
                    running.remove(each)
                    failed = each.failure()
                    if each.name not in measured:
                        yield failed
                else:
                    measured.add(each.name)
                    yield _without_pauses(said, pauses)
            now = time.perf_counter()
            for each in [x for x in running if min(x.until, end) <= now and not x.pipe.poll()]:
                running.remove(each)
                yield each.failure("there was no time to measure it")
        yield from (_failed(name, "there was no time to measure it") for name in waiting)
    finally:
        for each in running:
            each.failure()


def _places(device: str) -> list[Place]:
    """Where models prepare side by side; neighbours on different GPUs."""
    gpus = [""]
    if device == "cuda":
        of_all = ",".join(map(str, range(torch.cuda.device_count())))
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", of_all).split(",")
    cores, number = sorted(os.sched_getaffinity(0)), len(gpus) * AT_ONCE[device]
    return [
        (
            gpus[x % len(gpus)],
            frozenset(cores[x * len(cores) // number :][: max(1, len(cores) // number)]),
        )
        for x in range(number)
    ]


def _measured_alone(one: _Apart, others: list[_Apart]) -> tuple[float, float]:
    """From when to when it was measured, while the others were stopped."""
    start = time.perf_counter()
    for each in others:
        each.signal(signal.SIGSTOP)
    while others and _is_busy() and time.perf_counter() < start + DRAINING:
        pass
    one.pipe.send(None)
    if not one.pipe.poll(MEASURING) or one.said() != _MY_TURN:
        one.signal(signal.SIGKILL)
    for each in others:
        each.signal(signal.SIGCONT)
    end = time.perf_counter()
    for each in (one, *others):
        each.until += end - start
    return start, end


def _has_room() -> bool:
    """Whether half of the first GPU's memory is free: where it is full, each call asks the driver for some."""
    said = environment.nvidia_smi("memory.used", "memory.total").values()
    used, total = [int(x.split()[0]) for x in said] or (0, 1)
    return used < total / 2


def _is_busy() -> bool:
    """Whether the first GPU computes: what stopped processes have queued goes on."""
    name = "utilization.gpu"
    return environment.nvidia_smi(name).get(name, "0 %") != "0 %"


def _without_pauses(record: dict[str, Any], pauses: list[tuple[float, float]]) -> dict[str, Any]:
    """With the seconds of first calls in which the process was not stopped."""
    for first in record.get("first", {}).values():
        begin = first.pop("begin")
        end = begin + first["seconds"]
        first["seconds"] -= sum(max(min(end, y) - max(begin, x), 0.0) for x, y in pauses)
    return record


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Waits until nothing else is computed, where others are measured beside this one."""
    if turn is None:
        yield
        return
    turn.send(_MY_TURN)
    turn.recv()
    try:
        yield
    finally:
        turn.send(_MY_TURN)


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
    tidy_up(device if torch.cuda.is_initialized() else "cpu")
    return record


def _made(model: Model, device: str) -> Made:
    """The model and its inputs, on the CPU."""
    torch.manual_seed(0)
    return model.make(device == "cpu")


def _moved(made: Made, device: str) -> Made:
    module, inputs = made
    module.to(device)  # some classes return nothing
    for each in module.modules():
        if isinstance(each, nn.RNNBase):
            each.flatten_parameters()
    return module, pytree.tree_map_only(Tensor, lambda x: x.to(device), inputs)


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
    before, given = _moved(_made(model, device), device)
    control = _copied(before)
    variants = {"torch": before, "extops": _copied(before, "extops")}
    record["differences"] = differences(model, variants, given, mode, device)
    variants = {"torch": before, "control": control, "extops": variants["extops"]}
    samplers, seconds = {}, 0.0
    calls = {x: calls_of(model, y, given, mode, device) for x, y in variants.items()}
    for name, each in calls.items():
        taken = list(_samplers(each, device))
        samplers[name] = [sampler for sampler, _ in taken]
        seconds += sum(x for _, x in taken)
    with _alone():
        if turn is not None:
            _choose_again(variants["extops"], calls["extops"])
        rounds = _rounds(SECONDS_OF_A_CASE, seconds)
        record["samples"], failed = protocol.interleave(samplers, rounds)
    record["failed"] |= failed


def _choose_again(module: nn.Module, calls: Calls) -> None:
    """Lets its layers measure once more, alone: beside others another way may be the faster one."""
    Path(os.environ[_table.VARIABLE]).unlink(missing_ok=True)
    _table.table.cache_clear()
    extops.accelerate(extops.restore(module))
    for call in calls.values():
        call()


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
    samplers: dict[str, list[protocol.Sampler]] = {}
    record["first"], of_one, wanted = {}, 0.0, [*PREPARED]
    made = _made(model, device)
    with contextlib.ExitStack() as ends:
        caches = ends.enter_context(tempfile.TemporaryDirectory())
        for together in TURNS:
            pipes = {}
            for name, library in together.items():
                # What the compiler made for one library must not shorten the first call of the other.
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{caches}/{library}"
                pipes[name], theirs = _FORK.Pipe()
                arguments = theirs, model, made, mode, device, library, wanted, seconds
                process = _FORK.Process(target=_measure_compiled, args=arguments, daemon=True)
                process.start()
                theirs.close()
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
            rounds = _rounds(SECONDS_OF_COMPILED, 2 * of_one)  # each sample is warmed up
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
    model: Model,
    made: Made,
    mode: str,
    device: str,
    library: str,
    wanted: list[tuple[str, str]],
    seconds: float,
) -> None:
    """Sends what the first call of each form took, then a sample of the form that is asked for, until none is. Nothing
    more is compiled once the process, and those that it waited for, have computed for so many seconds.
    """
    _prepare(mode, device)
    module, given = _moved(made, device)
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
        if sum(os.times()[:4]) > seconds:
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
        first = {"begin": start, "seconds": taken, "breaks": 0}
        first = found["first"].setdefault(form, first)
        first["breaks"] += _breaks()
    if device == "cuda":
        torch.cuda.empty_cache()  # others prepare
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
            before, given = _moved(_made(_named(name), "cpu"), "cpu")
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
    given = parser.parse_args()
    if given.fullgraph:
        return add_refused(given.model, given.output)
    chosen = given.device, given.model, given.mode, given.seconds
    run(*chosen, given.output, given.compiled, given.preparing)


if __name__ == "__main__":
    main()
