"""What `accelerate` chooses: the table of what was measured, its file, and that nobody sees a measurement."""

from __future__ import annotations

import copy
import json
import logging
import math
import multiprocessing
import pwd
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import extops
from extops import accelerating
from extops.choosing import _measure, _table
from extops.choosing._measure import Times
from extops.choosing._table import OURS, TORCH, Kind, Measured, Table
from operators import by_device

LAYERS = "LSTM", "GRU", "RNN"
CELLS = "GRUCell", "RNNCell"  # torch's LSTMCell serves where gradients are wanted on a CPU
by_module = pytest.mark.parametrize("name", LAYERS + CELLS)
by_way = pytest.mark.parametrize("way", [TORCH, OURS])
SOME = Measured(OURS, 2e-4, 1e-4)

Measurement = tuple[Callable[[], Any], Callable[[], Any]]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where choices are kept; nothing is known at first."""
    file = tmp_path / "choices" / "choices.json"
    monkeypatch.setenv("EXTOPS_CHOICES", str(file))
    _table.table.cache_clear()
    yield file
    _table.table.cache_clear()


@pytest.fixture
def measured(file: Path, monkeypatch: pytest.MonkeyPatch) -> list[Measurement]:
    """Every measurement, which runs both ways and then finds ours to be faster."""
    found: list[Measurement] = []

    def measure(torchs: Callable[[], Any], ours: Callable[[], Any], *_: Any) -> Measured:
        found.append((torchs, ours))
        torchs()
        ours()
        return SOME

    monkeypatch.setattr(_measure, "measure", measure)
    return found


def layer(name: str = "GRU", device: str = "cpu", **options: Any) -> Any:
    return extops.accelerate(getattr(nn, name)(5, 7, device=device, **options))


def rows(name: str = "GRU", device: str = "cpu", steps: int = 6, batch: int = 3) -> Tensor:
    return torch.randn((steps, batch, 5)[name in CELLS :], device=device)


def results_of(results: Any) -> list[Tensor]:
    if isinstance(results, Tensor):
        return [results]
    if isinstance(results, (tuple, list)):
        return [x for each in results if each is not None for x in results_of(each)]
    return []


def total(results: Any) -> Tensor:
    return torch.stack([x.sum() for x in results_of(results) if x.is_floating_point()]).sum()


# -- the table -----------------------------------------------------------------------------------


def test_the_first_32_sizes_are_exact() -> None:
    kind = Kind()
    for steps in range(100, 132):
        assert kind.way((steps, 1)) == (None, False)
        kind.add((steps, 1), SOME)
        assert kind.way((steps, 1)) == (OURS, True)


def test_further_sizes_are_rounded_to_four_a_doubling() -> None:
    kind = Kind()
    for steps in range(1, 33):
        kind.add((steps, 1), SOME)
    kind.add((1024, 8), Measured(TORCH, 1e-4, 2e-4))
    same = [steps for steps in range(900, 1200) if kind.way((steps, 8)) == (TORCH, True)]
    assert 0.9 < same[0] / 1024 < 0.93 and 1.07 < same[-1] / 1024 < 1.1
    assert same == list(range(same[0], same[-1] + 1))


def test_a_neighbour_serves_once() -> None:
    kind = Kind()
    for steps in range(1, 33):
        kind.add((steps, 1), SOME._replace(way=OURS if steps < 30 else TORCH))
    assert kind.way((500, 1)) == (TORCH, False)
    assert kind.way((500, 1)) == (None, False)
    assert kind.way((505, 1)) == (None, False)  # rounded, the same
    assert kind.way((1, 500)) == (OURS, False)
    kind.add((500, 1), SOME)
    assert kind.way((505, 1)) == (OURS, True)


@by_device
@pytest.mark.parametrize("name", LAYERS)
def test_all_layers_of_a_stack_are_measured_under_autocast(
    name: str, device: str, measured: list[Measurement]
) -> None:
    """On a GPU a layer returns float16 in a region of bfloat16, too, and that is what the next one gets."""
    first, second = layer(name, device), extops.accelerate(getattr(nn, name)(7, 9, device=device))
    with torch.autocast(device, torch.bfloat16):
        second(first(rows(name, device))[0])
    assert len(measured) == 2


def test_an_lstm_cell_on_a_cpu_is_measured_without_gradients(measured: list[Measurement]) -> None:
    """With them torch's h comes from its c, and ours does not."""
    model = layer("LSTMCell")
    model(rows("GRUCell"))
    assert measured == []
    with torch.no_grad():
        model(rows("GRUCell"))
    assert len(measured) == 1


def test_what_a_model_measures(measured: list[Measurement]) -> None:
    model = layer()
    with torch.no_grad():
        for _ in range(3):
            model(rows())
        assert len(measured) == 1
        layer()(rows())  # another module of the kind
        assert len(measured) == 1
        model(rows(steps=7))
        model(rows().transpose(0, 1).contiguous().transpose(0, 1))
        model(rows(), torch.zeros(1, 3, 7))
        model.eval()(rows())
        assert len(measured) == 5
    model(rows())
    assert len(measured) == 6


def test_many_lengths(measured: list[Measurement]) -> None:
    model = layer()
    with torch.no_grad():
        for steps in range(1, 3000):
            model(torch.zeros(steps, 1, 5))
    # 32 as they are, and then four a doubling.
    assert 32 < len(measured) < 32 + 4 * 8


@pytest.mark.parametrize(
    ("torchs", "ours", "expected"),
    [
        ((1.0, 0.0), (0.9, 0.0), True),
        ((1.0, 0.0), (1.0, 0.0), False),
        ((1.0, 0.0), (0.98, 0.0), False),
        ((1.0, 0.0), (0.96, 0.0), True),
        ((0.0, 1.0), (0.0, 0.9), True),
        ((1.0, 1.0), (0.9, 1.0), False),  # where the GPU is waited for
        ((1.0, 1.0), (1.1, 0.7), False),
        ((1.0, 1.0), (0.7, 1.1), False),
        ((1.0, 1.4), (1.3, 0.5), False),  # where the host is
        ((0.6, 1.14), (0.63, 0.3), True),  # where that is a tie
        ((1.0, 10.0), (1.3, 5.0), True),
        ((10.0, 1.0), (5.0, 1.2), True),
        ((1.0, 1.0), (2.0, 2.0), False),
    ],
    ids=str,
)
def test_is_faster(torchs: tuple[float, float], ours: tuple[float, float], expected: bool) -> None:
    assert _measure.is_faster(Times(*ours), Times(*torchs)) is expected


@pytest.mark.parametrize(("of_torch", "of_ours"), [(10, 5), (5, 10), (5, 5)], ids=str)
def test_measure(of_torch: int, of_ours: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only the calls move on."""
    now, calls = [0.0], [0, 0]

    def run(place: int, milliseconds: int) -> list[Tensor]:
        calls[place] += 1
        now[0] += milliseconds / 1000
        return []

    monkeypatch.setattr(_measure.time, "perf_counter", lambda: now[0])
    ways = [lambda: run(0, of_torch), lambda: run(1, of_ours)]
    found = _measure.measure(*ways, list, torch.device("cpu"))
    assert found.way == (OURS if of_ours < of_torch else TORCH)
    assert found[1:] == pytest.approx((of_torch / 1000, of_ours / 1000))
    assert calls[0] == calls[1] <= 8


@by_module
def test_wrong_values_of_ours(
    name: str, file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a kernel on a GPU on which nobody has run it: torch's serves, nothing is kept, and a warning says why."""
    model, input = layer(name), rows(name)
    by_ours = accelerating._Call.by_ours

    def wrong(call: Any) -> Any:
        return torch.utils._pytree.tree_map(lambda x: x.flip(-1) + 0.5, by_ours(call))

    monkeypatch.setattr(accelerating._Call, "by_ours", wrong)
    theirs = layer_as(model)(input)
    torch.testing.assert_close(model(input), theirs)
    torch.testing.assert_close(model(input), theirs)
    assert not file.exists()
    differ, left = [x.getMessage() for x in caplog.records if x.levelno == logging.WARNING][:2]
    assert differ.endswith("differ: those in float64 decide")
    assert left.startswith("extops: ") and left.endswith("give other values here; please report it")


@by_module
def test_wrong_values_of_torchs(
    name: str, file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As of cuDNN 9.19 in float16 for 40, 48 and 72 units: ours serves, however long it takes."""
    model, input = layer(name), rows(name)
    expected = layer_as(model)(input)
    kind = model.__class__
    right = kind.forward

    def wrong(module: Any, input: Tensor, *others: Any) -> Any:
        found = right(module, input, *others)
        if input.dtype is torch.float64:
            return found
        return torch.utils._pytree.tree_map(lambda x: x.flip(-1) + 0.5, found)

    monkeypatch.setattr(kind, "forward", wrong)
    monkeypatch.setattr(_measure, "is_faster", lambda *_: False)
    for _ in range(2):
        torch.testing.assert_close(model(input), expected)
    assert '"extops"' in file.read_text()
    (said,) = {x.getMessage() for x in caplog.records if x.levelno == logging.WARNING}
    assert "torch's and our values of" in said


@pytest.mark.parametrize(
    ("ours", "torchs", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.4], True),
        ([1.0, 2.0], [1.0, 2.8], False),
        ([1.0, math.nan], [1.0, 2.0], False),
        ([1.0, 2.0], [math.inf, 2.0], True),
        ([0.0], [0.0], True),
        ([], [], True),
    ],
    ids=str,
)
def test_agree(ours: list[float], torchs: list[float], expected: bool) -> None:
    assert _measure.agree([torch.tensor(ours)], [torch.tensor(torchs)]) is expected


# -- the file ------------------------------------------------------------------------------------


def test_the_second_run_measures_nothing(file: Path, measured: list[Measurement]) -> None:
    def run() -> None:
        layer()(rows())
        layer("GRUCell")(rows("GRUCell"))

    run()
    assert len(measured) == 2 and file.exists()
    content = file.read_text()
    _table.table.cache_clear()
    run()
    assert len(measured) == 2 and file.read_text() == content
    assert [x.name for x in file.parent.iterdir() if not x.name.startswith(".")] == [file.name]


def test_another_machine_is_kept(file: Path) -> None:
    Table(file, "one").add("kind", (1, 2), SOME)
    other = Table(file, "other")
    assert other.kinds == {}
    other.add("kind", (3, 4), SOME)
    for machine, sizes in (("one", (1, 2)), ("other", (3, 4))):
        assert list(Table(file, machine).kind("kind").measured) == [sizes]


def _add(file: Path, number: int) -> None:
    table = Table(file, "machine")
    for size in range(10):
        table.add(f"kind {number}", (size,), SOME)


def test_gpus_alike_know_the_same(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", ["one", "other", "one"].__getitem__)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 1)
    _table.table(2).add("GRU", (6, 3), SOME)
    assert _table.table(0).kind("GRU").way((6, 3)) == (OURS, True)
    assert _table.table(1).kind("GRU").way((6, 3)) == (None, False)
    extops.choices()
    assert capsys.readouterr().out.count("6 x 3") == 1


def test_many_processes_at_once(file: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_add, args=(file, number)) for number in range(4)]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        if file.exists():
            json.loads(file.read_text())  # it is whole at any time
    assert [process.exitcode for process in processes] == [0] * 4
    kinds = Table(file, "machine").kinds
    assert {name: len(kind.measured) for name, kind in kinds.items()} == {
        f"kind {number}": 10 for number in range(4)
    }


_GOOD: dict[str, Any] = {"format": "extops choices 1", "machines": {"machine": {"kind": {}}}}


def _with(sizes: str, measured: Any) -> str:
    kind = {"kind": {"1,2": ["torch", 1.0, 1.0], sizes: measured}}
    return json.dumps({**_GOOD, "machines": {"machine": kind}})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"3",
        b"{}",
        json.dumps({**_GOOD, "format": "extops choices 0"}).encode(),
        json.dumps({**_GOOD, "machines": []}).encode(),
        json.dumps({**_GOOD, "machines": {"machine": [1]}}).encode(),
        _with("3,4", ["cudnn", 1.0, 1.0]).encode(),
        _with("3,4", ["torch", -1.0, 1.0]).encode(),
        _with("3,4", ["torch", "1", 1.0]).encode(),
        _with("3,4", ["torch", 1.0]).encode(),
        _with("a", ["torch", 1.0, 1.0]).encode(),
        _with("-1,2", ["torch", 1.0, 1.0]).encode(),
    ],
    ids=str,
)
def test_a_damaged_file_is_left_as_it_is(
    content: bytes, file: Path, measured: list[Measurement], caplog: pytest.LogCaptureFixture
) -> None:
    """In a sentence, once."""
    file.parent.mkdir()
    file.write_bytes(content)
    table = Table(file, "machine")
    table.add("kind", (9, 9), SOME)
    assert table.kind("kind").way((9, 9)) == (OURS, True)
    layer()(rows())
    assert file.read_bytes() == content
    said = [x.getMessage() for x in caplog.records if x.levelno >= logging.WARNING]
    assert len(said) == 2  # of two tables
    assert said[0] == said[1] and said[0].startswith(f"extops: {file} holds no choices that this")
    assert "\n" not in said[0] and "delete it, or set EXTOPS_CHOICES" in said[0]


def test_a_file_that_is_damaged_meanwhile(file: Path) -> None:
    table = Table(file, "machine")
    table.add("kind", (1,), SOME)
    file.write_text("foreign")
    table.add("kind", (2,), SOME)
    assert file.read_text() == "foreign"
    assert len(table.kind("kind").measured) == 2


@pytest.mark.parametrize("what", ["a_file", "a_folder", "too_long"])
def test_a_file_that_cannot_be_written(
    what: str,
    file: Path,
    measured: list[Measurement],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Choices are then kept for the process, as a warning says once."""
    if what == "a_file":
        file.parent.write_text("no folder")
    elif what == "a_folder":
        file.mkdir(parents=True)
    else:
        monkeypatch.setenv("EXTOPS_CHOICES", str(file.with_name("x" * 300)))
    for name in ("GRU", "LSTM"):
        for _ in range(2):
            layer(name)(rows())
    assert len(measured) == 2
    assert len([x for x in caplog.records if x.levelno >= logging.WARNING]) == 1


def test_without_a_home(measured: list[Measurement], monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers whose user has no name."""

    def unknown(_: int) -> Any:
        raise KeyError("getpwuid(): uid not found")

    for name in ("HOME", "XDG_CACHE_HOME", "EXTOPS_CHOICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    _table.table.cache_clear()
    layer()(rows())
    assert len(measured) == 1


def test_where_it_is_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXTOPS_CHOICES", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _table._file() == tmp_path / "extops" / "choices.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _table._file() == tmp_path / ".cache" / "extops" / "choices.json"
    monkeypatch.setenv("EXTOPS_CHOICES", "~/mine.json")
    assert _table._file() == tmp_path / "mine.json"


_RUN = """
import extops, torch
model = extops.accelerate(torch.nn.GRU(64, 64))
with torch.no_grad():
    for _ in range(3):
        model(torch.ones(4, 2, 64))
extops.choices()
"""


def test_two_processes(file: Path) -> None:
    """With real measurements: the second chooses as the first."""
    said = []
    for _ in range(2):
        run = subprocess.run([sys.executable, "-c", _RUN], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        said.append(run.stdout)
    assert said[0] == said[1] and "GRU 64 -> 64, float32" in said[0]


# -- forcing and printing ------------------------------------------------------------------------


@by_way
@by_module
def test_forced(
    name: str, way: str, measured: list[Measurement], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXTOPS_CHOICES", way)
    model, calls = layer(name), []
    for owner, served, name_of in (
        (type(model)._extops_kind, TORCH, "forward"),
        (accelerating._Call, OURS, "by_ours"),
    ):
        original = getattr(owner, name_of)

        def call(*arguments: Any, served: str = served, original: Any = original) -> Any:
            calls.append(served)
            return original(*arguments)

        monkeypatch.setattr(owner, name_of, call)
    model(rows(name))
    assert calls == [way] and measured == []
    assert accelerating.described(model, rows(name))[0] == way


def test_choices(measured: list[Measurement], capsys: pytest.CaptureFixture[str]) -> None:
    layer(num_layers=2, bidirectional=True)(rows())
    layer("GRUCell", bias=False)(rows("GRUCell"))
    capsys.readouterr()
    extops.choices()
    machine, *lines = capsys.readouterr().out.splitlines()
    assert f"torch {torch.__version__}, extops {extops.__version__}" in machine
    threads = torch.get_num_threads()
    assert [" ".join(x.split()) for x in lines] == [
        "extops torch 200.0 us, extops 100.0 us 6 x 3 GRU 5 -> 7, 2 layers, both ways, float32, "
        f"gradients of parameters, {threads} threads",
        "extops torch 200.0 us, extops 100.0 us 3 GRUCell 5 -> 7, no biases, float32, "
        f"gradients of parameters, {threads} threads",
    ]


# -- a measurement is invisible ------------------------------------------------------------------


@by_device
@by_module
def test_nobody_sees_a_measurement(name: str, device: str, measured: list[Measurement]) -> None:
    """Hooks, gradients, versions and random numbers are as in a run that knows what serves."""
    options = {"num_layers": 2, "dropout": 0.5} if name in LAYERS else {}
    first = layer(name, device, **options)
    input = rows(name, device).requires_grad_()
    seen = []
    for model in (first, copy.deepcopy(first)):
        calls: list[str] = []
        for key, x in [("input", input), *model.named_parameters()]:
            x.register_hook(lambda _, key=key, calls=calls: calls.append(key))
        torch.manual_seed(3)
        versions = [x._version for x in (input, *model.parameters())]
        found = model(input)
        assert versions == [x._version for x in (input, *model.parameters())]
        assert calls == [] and all(x.grad is None for x in model.parameters())
        gradients = torch.autograd.grad(total(found), [input, *model.parameters()])
        seen.append((results_of(found), gradients, torch.rand(2, device=device), calls))
        assert len(measured) == 1
        input = input.detach().requires_grad_()
    torch.testing.assert_close(seen[0][:3], seen[1][:3])
    assert seen[0][3] == seen[1][3] != []


class Functions(TorchFunctionMode):
    count = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


@by_module
@pytest.mark.parametrize("mode", [Functions, Dispatched])
def test_modes(mode: type[Any], name: str, measured: list[Measurement]) -> None:
    """They see one call, and what they keep from being measured is measured later."""
    model, input = layer(name), rows(name)
    with torch.no_grad():
        with mode() as seen:
            model(input)
        assert seen.count > 0 and measured == []
        model(input)
        assert len(measured) == 1


@by_module
def test_the_profiler(name: str, measured: list[Measurement]) -> None:
    model, input = layer(name), rows(name)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        model(input)
    assert measured == []
    model(input)
    assert len(measured) == 1


def test_a_default_device(measured: list[Measurement]) -> None:
    """Which is a mode of torch's that programs leave on."""
    torch.set_default_device("cpu")
    try:
        layer()(rows())
    finally:
        torch.set_default_device(None)
    assert len(measured) == 1


@by_module
def test_hooks_on_saved_tensors(name: str, measured: list[Measurement]) -> None:
    """They see what they see where nothing is measured."""
    model, input, counts = layer(name), rows(name), []
    for _ in range(2):
        packed: list[Tensor] = []

        def pack(x: Tensor, packed: list[Tensor] = packed) -> Tensor:
            packed.append(x)
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model(input)
        counts.append([x.shape for x in packed])
    assert len(measured) == 1 and counts[0] == counts[1] != []


@by_module
def test_deterministic_algorithms(name: str, measured: list[Measurement]) -> None:
    model = layer(name)
    torch.use_deterministic_algorithms(True)
    try:
        model(rows(name))
        assert measured == []
        assert accelerating.described(model, rows(name))[0] == "not measured"
    finally:
        torch.use_deterministic_algorithms(False)
    model(rows(name))
    assert len(measured) == 1


@by_module
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not_reentrant"])
@pytest.mark.parametrize("sizes", ["first", "known", "many"])
def test_a_recomputation_gets_the_same(
    sizes: str, reentrant: bool, name: str, measured: list[Measurement]
) -> None:
    """Else values differ, or torch raises since other tensors are saved."""
    model = layer(name)

    def run(input: Tensor) -> Any:
        return tuple(results_of(model(input)))  # a reentrant checkpoint sees no inner tuples

    if sizes == "many":
        for batch in range(1, 33):
            model(rows(name, batch=batch).requires_grad_())
            with torch.no_grad():
                model(rows(name, batch=batch))
    elif sizes == "known":
        model(rows(name).requires_grad_())
    input = rows(name, batch=300 if sizes == "many" else 3).requires_grad_()
    expected = torch.autograd.grad(total(layer_as(model)(input)), input)
    for _ in range(2):
        input.grad = None
        total(checkpoint(run, input, use_reentrant=reentrant)).backward()
        torch.testing.assert_close(input.grad, *expected)


def layer_as(model: Any) -> Any:
    """torch's module with the same parameters."""
    return extops.restore(copy.deepcopy(model))


def test_a_checkpoint_within_a_step_that_is_profiled(measured: list[Measurement]) -> None:
    """What was not measured in the forward, and is known at its recomputation."""
    model, input = layer(), rows().requires_grad_()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        found = checkpoint(model, input, use_reentrant=False)
    layer()(rows())
    layer()(rows().requires_grad_())
    assert len(measured) == 2
    total(found).backward()


@by_module
def test_many_backwards_leave_little_behind(name: str, measured: list[Measurement]) -> None:
    """A recomputation is within a backward, each of which has a number of its own."""
    model, input = layer(name), rows(name).requires_grad_()
    for _ in range(20):
        total(checkpoint(model, input, use_reentrant=False)).backward()
    assert len(vars(model)["_extops_known"]) < 5


# -- what fails ----------------------------------------------------------------------------------


@by_module
@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError, ValueError, KeyError])
def test_an_error_in_ours(
    error: type[Exception],
    name: str,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """torch's serves, then and where it is measured: of a call that fails, no time is kept."""
    model, input = layer(name), rows(name)
    theirs = layer_as(model)

    def fails(*_: Any) -> Any:
        raise error("ours")

    monkeypatch.setattr(accelerating._Call, "by_ours", fails)
    torch.testing.assert_close(model(input), theirs(input))
    assert accelerating.described(model, input)[0] == "not measured" and not file.exists()
    said = [x.getMessage() for x in caplog.records if "measuring failed" in x.getMessage()]
    # Want of memory is no fault of an installation.
    assert len(said) == (error is not torch.OutOfMemoryError)
    monkeypatch.setenv("EXTOPS_CHOICES", OURS)
    another = extops.accelerate(copy.deepcopy(theirs))
    torch.testing.assert_close(another(input), theirs(input))


@by_module
def test_an_error_of_a_measurement(name: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(_measure, "measure", fails)
    model, input = layer(name), rows(name)
    torch.testing.assert_close(model(input), layer_as(model)(input))
    assert not file.exists()


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_a_long_call_is_measured_on_a_part(
    packed: bool, name: str, measured: list[Measurement], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerating, "_MOST_STEPS", 10)
    for batch_first in (False, True):
        model = layer(name, batch_first=batch_first)
        input: Any = rows(steps=50)
        if packed:
            input = pack_padded_sequence(input, torch.tensor([50, 20, 5]))
        elif batch_first:
            input = input.transpose(0, 1)
        theirs = layer_as(model)(input)
        torch.testing.assert_close(results_of(model(input)), results_of(theirs))
        measured[-1][0]()
        assert len(measured) == 1 + (batch_first and not packed)


@by_way
def test_dropout_masks(way: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement draws nothing, so masks are torch's whatever serves, in the first call, too."""
    monkeypatch.setattr(
        _measure, "measure", lambda torchs, ours, *_: (torchs(), ours(), SOME._replace(way=way))[2]
    )
    model = layer(num_layers=3, dropout=0.5)
    theirs, input = layer_as(model), rows()
    for _ in range(2):
        found = []
        for module in (model, theirs):
            torch.manual_seed(5)
            found.append((*module(input), torch.rand(3)))
        torch.testing.assert_close(*found)
