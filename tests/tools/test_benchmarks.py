"""The benchmark's arithmetic and its report, on figures that are known."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import multiprocessing
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plots, report, shapes, summary, targets
from benchmarks.results import Result, Spread, ratio
from benchmarks.summary import Summary
from extops_build import ROOT

OURS = {
    "tutorial_forward": [10.0, 20.0, 30.0],
    "tutorial_backward": [50.0, 50.0, 50.0],
    "wall_forward": [10.0, 20.0, 30.0],
    "wall_forward_backward": [100.0, 100.0, 100.0],
}
EAGER = {
    "wall_forward": [
        20.0,
        60.0,
        45.0,
    ],  # ratios 2, 3, 1.5: their median is 2, that of the medians 2.25
    "wall_forward_backward": [150.0, 160.0, 170.0],
}


def variant(samples: dict[str, list[float]], **more: Any) -> dict[str, Any]:
    return {"failed": {}, "first_call_seconds": 0.5, "samples": samples, **more}


def peers(ours: dict[str, list[float]]) -> dict[str, Any]:
    """The variants of a GPU's cell: each peer is fastest in another form forward and backward."""
    return {
        "torch.compile static": variant(device([30.0, 10.0, 30.0], [40.0, 40.0, 40.0])),
        "torch.compile dynamic": variant(device([15.0, 16.0, 17.0], [50.0, 60.0, 70.0])),
        "torch.compile max-autotune": {"failed": {"all": "RuntimeError: no choice"}},
        "extops": variant(ours),
        "mm": variant({"device_forward": [8.0] * 3, "device_grad_weights": [20.0] * 3}),
        "addmm": variant({"device_forward": [9.0] * 3, "device_grad_weights": [4.0, 6.0, 12.0]}),
        "linear": variant({"device_forward": [9.0] * 3, "device_grad_weights": [21.0] * 3}),
    }


def device(forward: list[float], forward_backward: list[float]) -> dict[str, list[float]]:
    return {"device_forward": forward, "device_forward_backward": forward_backward}


def case(size: dict[str, int], variants: dict[str, Any], **more: Any) -> dict[str, Any]:
    work = {"forward": {"flop": 2_000_000, "bytes": 4000}}
    return {
        "group": "cell",
        "operator": "cell",
        "mode": "float32",
        "threads": 1,
        "size": size,
        "work": work,
        "conditions": {"load": 0.5},
        "variants": variants,
        **more,
    }


DATA = {
    "format": 1,
    "rounds": 3,
    "environment": {
        "date": "2026-01-01",
        "device": "cpu",
        "device_name": "A processor",
        "processor": "A processor",
        "cores": 2,
        "system": "Linux x86_64",
        "python": "3.11.0",
        "torch": "2.13.0",
        "torch_cpu_capability": "AVX2",
        "extops": "0.1.0",
        "extops_binding": "stable",
        "extops_build": {},
        "commit": "0123456789ab",
        "seconds": 12,
    },
    "import": {"milliseconds": [20.0, 60.0, 30.0], "initialises_cuda": False},
    "builds": {"C++ ATen": {"seconds": 9.0}},
    "ceilings": [
        {"threads": 1, "bytes_per_second": 1e9, "flop_per_second": {"float32": 1e12}},
        {"threads": 2, "bytes_per_second": 2e9, "flop_per_second": {"float32": 2e12}},
    ],
    "failed_cases": {},
    "cases": [
        case(
            {"B": 16, "I": 32, "S": 128},
            {
                "eager": variant(EAGER),
                "torch.compile static": {"failed": {"all": "RuntimeError: no compiler"}},
                "extops": variant(OURS),
            },
        ),
        case(
            {"numel": 1024},
            {
                "torch.mul": variant({"wall_forward": [1.0, 2.0, 3.0]}),
                "extops": variant({"wall_forward": [1.5, 2.8, 4.5]}),
            },
            operator="multiply",
        ),
    ],
}


@pytest.fixture
def result() -> Result:
    return Result(copy.deepcopy(DATA))


@pytest.fixture
def gpu(result: Result) -> Result:
    """A cell on a GPU, its peers measured in every form."""
    result.data["environment"] |= {
        **{"device": "cuda", "compute_capability": "9.0", "multiprocessors": 132},
        **{"memory_gib": 139.8, "torch_cuda": "13.0", "driver": "580", "cudnn": 91900},
    }
    result.data["ceilings"][0]["threads"] = None
    variants = peers(device([9.0, 10.0, 8.8], [25.0, 15.0, 20.0]))
    result.data["cases"] = [case({"B": 24, "I": 200, "S": 384}, variants, threads=None)]
    return result


def test_quantiles_are_interpolated() -> None:
    samples = [float(value) for value in range(11, 0, -1)]
    assert Spread.of(samples) == Spread(6, 2, 10)
    assert Spread.of([4.0, 1.0, 2.0, 3.0]).median == 2.5
    assert Spread.of([7.0]) == Spread(7, 7, 7)


def test_ratios_are_taken_round_by_round(result: Result) -> None:
    assert ratio([2.0, 9.0], [1.0, 3.0]) == [2, 3]
    (cell,) = result.cases("cell")
    spread = cell.ratio(("eager", "wall_forward"), ("extops", "wall_forward"))
    assert spread is not None
    assert spread.median == 2
    assert math.isclose(spread.p10, 1.6)
    assert math.isclose(spread.p90, 2.8)


def test_the_floor_is_the_larger_of_memory_and_arithmetic(result: Result) -> None:
    (cell,) = result.cases("cell")
    assert result.floor(cell, "forward") == 4  # µs: 4000 bytes at 1 GB/s; the arithmetic takes 2
    assert result.floor(cell, "forward_backward") is None
    result.data["cases"][0]["threads"] = 2
    (cell,) = result.cases("cell")
    assert result.floor(cell, "forward") == 2


def test_targets_are_judged_by_the_median(result: Result) -> None:
    found = {(each.what, each.ratio): each for each in targets.targets(result)}
    cell = "cell 16, 32, 128 float32, 1 thread"
    forward = found[f"{cell}, forward, wall time", "eager / extops"]
    assert forward.goal == "≥ 1.6"
    assert forward.verdict == "met"
    assert str(forward.measured) == "2.00 (1.60–2.80)"
    both = found[f"{cell}, forward+backward, wall time", "eager / extops"]
    assert str(both.measured) == "1.60 (1.52–1.68)"
    assert both.verdict == "not met"  # 2.2 is the target
    assert (
        found[f"{cell}, forward, wall time", "best torch.compile / extops"].verdict
        == "not measured"
    )
    overhead = found["multiply 2^10 float32, 1 thread, forward, wall time", "extops / torch.mul"]
    assert (str(overhead.measured), overhead.verdict) == ("1.50 (1.42–1.50)", "met")
    importing = found["import extops", "ms beyond import torch"]
    assert (str(importing.measured), importing.verdict) == ("30.0 (22.0–54.0)", "met")


def test_a_peer_is_measured_at_its_best(gpu: Result) -> None:
    (cell,) = gpu.cases()
    assert cell.variants == ["best torch.compile", "extops", "best product"]
    assert cell.fastest("best product", "device_forward") == ("mm", [8, 8, 8])
    # Each product has its own fastest form; their times are added round by round.
    assert cell.fastest("best product", "device_forward_backward") == ("mm + addmm", [12, 14, 20])
    assert cell.fastest("best torch.compile", "device_forward") == ("dynamic", [15, 16, 17])
    assert cell.fastest("best torch.compile", "device_forward_backward") == ("static", [40] * 3)
    assert cell.fastest("best torch.compile", "wall_forward") == ("", None)
    ours = "extops", "device_forward"
    assert str(cell.ratio(ours, ("best product", "device_forward"))) == "1.12 (1.10–1.23)"


def test_every_size_is_held_against_the_best_of_its_peers(gpu: Result) -> None:
    found = targets.against_peers(gpu)
    assert len(found) == 45  # 15 sizes, 3 precision modes
    forward, both = found["24, 200, 384 float32"][:2], found["24, 200, 384 float32"][2:]
    assert [(str(x.measured), x.peer, x.goal, x.verdict) for x in forward] == [
        ("1.12 (1.10–1.23)", "mm", "≤ 1.15", "met"),
        ("1.67 (1.61–1.88)", "dynamic", "≥ 1", "met"),
    ]
    assert [(str(x.measured), x.peer, x.verdict) for x in both] == [
        ("1.07 (1.01–1.88)", "mm + addmm", "met"),
        ("2.00 (1.68–2.53)", "static", "met"),
    ]
    assert {x.verdict for x in found["512, 512, 512 bfloat16"]} == {"not measured"}


def test_the_report_names_the_best_peer(gpu: Result, tmp_path: Path) -> None:
    gpu.data["cases"][0]["variants"]["extops"]["samples"]["device_forward"] = [16.0, 16.0, 16.0]
    file = tmp_path / "result.json"
    file.write_text(json.dumps(gpu.data))
    report.make(file)
    text = (tmp_path / "report.md").read_text()
    assert (
        "| 24, 200, 384 float32 | **2.00 (2.00–2.00) mm** | 1.00 (0.950–1.05) dynamic |"
        " 1.07 (1.01–1.88) mm + addmm | 2.00 (1.68–2.53) static |" in text
    )
    assert "| 16.0 (15.2–16.8) dynamic | 16.0 (16.0–16.0) | 8.00 (8.00–8.00) mm |" in text


def test_losses_are_listed_where_they_are_clear(result: Result) -> None:
    (loss,) = targets.losses(result)
    assert (loss.operator, loss.measure, loss.rival, loss.of) == (
        *("multiply", "wall_forward", "torch.mul"),
        1,
    )
    ((spread, title),) = loss.found
    assert (round(spread.median, 2), title) == (0.67, "2^10 float32, 1 thread")


def test_the_report_holds_the_figures(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps(DATA))
    report.make(file)
    text = (tmp_path / "report.md").read_text()
    assert (
        "| cell 16, 32, 128 float32, 1 thread, forward, wall time | eager / extops | ≥ 1.6 |"
        in text
    )
    assert (
        "| 16, 32, 128 float32, 1 thread | 45.0 (25.0–57.0) | 20.0 (12.0–28.0) | 4.00 | 20 % |"
        in text
    )
    assert (
        "- torch.compile static: RuntimeError: no compiler (cell 16, 32, 128 float32, 1 thread)"
        in text
    )
    assert (
        "| multiply | forward, wall time | torch.mul | 1 of 1 | 0.667 (0.667–0.705): 2^10" in text
    )


@pytest.fixture
def standard(gpu: Result) -> Result:
    """A standard cell, the tutorial's kernel queued, and a case that no summary holds."""
    gpu.data["cases"][0]["variants"] |= {
        "tutorial kernel": variant({"queued_forward": [19.0, 21.0, 20.0]}),
        "trivial kernel": variant({"device_forward": [1.0] * 3}),
    }
    other = copy.deepcopy(gpu.data["cases"][0])
    gpu.data["cases"][0]["size"] = {"B": 16, "I": 32, "S": 128}
    gpu.data["cases"].append(other)
    return gpu


def test_the_summary_holds_the_medians(standard: Result, tmp_path: Path) -> None:
    file = tmp_path / summary.NAME
    summary.write(standard, file)
    made = Summary.read(file)
    assert (made.environment["device_name"], made.number) == ("A processor", "device")
    (cell,) = made.cases
    assert cell.size == {"B": 16, "I": 32, "S": 128}
    assert cell.floor == {"forward": 4}
    assert cell.medians.keys() == {
        *("best torch.compile", "best product", "extops", "tutorial kernel"),
    }
    assert cell.median("best torch.compile", "device_forward") == 16
    assert cell.median("tutorial kernel", "device_forward") == 20  # the queued figure
    assert cell.median("tutorial kernel", "device_forward_backward") is None
    assert summary.step_table(made).splitlines()[-2:] == [
        "| 16, 32, 128 | forward | 16.0 | **8.00** | 9.00 |",
        "| 16, 32, 128 | forward + backward | 40.0 | **14.0** | 20.0 |",
    ]


def test_the_plot_shows_every_median_and_the_floor(standard: Result, tmp_path: Path) -> None:
    file = tmp_path / summary.NAME
    summary.write(standard, file)
    assert plots.make(file) == ["step.svg"]
    text = (tmp_path / "step.svg").read_text()
    for shown in ("torch.compile", "16.0 µs", "8.00 µs", "20.0 µs", "B 16, I 32, S 128", "floor"):
        assert shown in text.replace("\N{NO-BREAK SPACE}", " "), shown


def test_the_picture_of_the_models_is_that_of_their_table(tmp_path: Path) -> None:
    assert plots.of_models(ROOT / "benchmarks/results/nvidia-h200/ratios.json", tmp_path)
    drawn, kept = ((x / plots.MODELS).read_text() for x in (tmp_path, ROOT / "docs" / "_static"))
    again = "python -m benchmarks.plots benchmarks/results/nvidia-h200/ratios.json docs/_static"
    assert drawn == kept, f"the picture of the models is of another table; run {again}"
    assert drawn.count("WaveRNN") == 1


def test_what_is_tracked_of_the_results_is_small() -> None:
    folders = (ROOT / "benchmarks" / "results", ROOT / "tests" / "data")
    files = [x for folder in folders for x in folder.rglob("*.*") if x.name != "result.json"]
    assert sum(x.stat().st_size for x in files if "__pycache__" not in x.parts) < 315_000
    assert (ROOT / "tests" / "data" / "golden.npz").stat().st_size < 50_000


def test_a_variant_that_fails_does_not_end_the_run() -> None:
    protocol = pytest.importorskip("benchmarks.protocol")
    calls = []

    def good() -> dict[str, float]:
        calls.append("good")
        return {"wall_forward": float(len(calls))}

    def bad() -> dict[str, float]:
        raise RuntimeError("first line\n\nsecond line")

    samples, failed = protocol.interleave({"bad": [bad], "good": [good]}, rounds=3)
    assert samples == {"bad": {}, "good": {"wall_forward": [1, 2, 3]}}
    assert failed == {"bad": "RuntimeError: first line second line"}


def test_every_form_of_the_product_computes_the_same() -> None:
    cell = pytest.importorskip("benchmarks.cell")
    torch = pytest.importorskip("torch")
    data = cell.Cell(3, 4, 5, "cpu", torch.float64)
    makers = cell.cell_variants(data)
    mm, *others = (makers[name]().calls for name in ("mm", "addmm", "linear"))
    for calls in others:
        assert calls.keys() == mm.keys() == {"forward", "grad_weights", "grad_input"}
        assert torch.allclose(calls["forward"](), mm["forward"]() + data.model.bias)
        assert torch.allclose(calls["grad_weights"](), mm["grad_weights"]())
        assert torch.allclose(calls["grad_input"](), mm["grad_input"]())


@pytest.mark.slow
def test_each_mode_of_the_compiler_compiles_its_own_code() -> None:
    """One may not run what another compiled, nor be compiled again while it is measured."""
    cell = pytest.importorskip("benchmarks.cell")
    torch = pytest.importorskip("torch")
    data = cell.Cell(3, 4, 5, "cpu", torch.float32)
    modes = [f"torch.compile {mode}" for mode in ("static", "dynamic", "max-autotune")]
    torch._dynamo.reset()
    calls = [cell.compiled_variant(mode, data).calls["forward"] for mode in modes]
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()
    for number, call in enumerate(calls, 1):
        call()
        assert graphs["unique_graphs"] == number
    for call in calls:
        call()
    assert graphs["unique_graphs"] == len(modes)
    torch._dynamo.reset()


def test_a_run_that_was_cut_short_is_resumed(tmp_path: Path) -> None:
    suite = pytest.importorskip("benchmarks.suite")
    file = tmp_path / "result.json"
    new = {"rounds": 3, "environment": {**DATA["environment"], "date": "2026-01-02"}}
    assert suite.resumed(file, new) == new  # nothing there: from the start
    file.write_text(json.dumps(DATA))
    assert suite.resumed(file, new) == DATA
    with pytest.raises(SystemExit, match=r"rounds 3 there, 5 here"):
        suite.resumed(file, {**new, "rounds": 5})
    new["environment"]["commit"] = "fedcba987654"
    with pytest.raises(SystemExit, match=r"commit 0123456789ab there, fedcba987654 here"):
        suite.resumed(file, new)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_layers_of_one_name_take_the_same_state(kind: str) -> None:
    sequence = pytest.importorskip("benchmarks.sequence")
    cell = pytest.importorskip("benchmarks.cell")
    torch = pytest.importorskip("torch")
    data = sequence.Steps(3, cell.Cell(2, 5, 7, "cpu", torch.float32))
    makers = sequence.layer_variants(data, getattr(torch.nn, kind))
    assert [*makers] == ["extops", f"nn.{kind}"]
    for make in makers.values():
        calls = make().calls
        assert calls["forward"]().shape == (3, 2, 7)
        assert len(calls["forward_backward"]()) == 4


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_layers_at_random_are_the_same_for_a_seed_and_small_enough(device: str) -> None:
    drawn = list(shapes.draw(device, 300, seed=1))
    assert len(drawn) == 300
    assert drawn == list(shapes.draw(device, 300, seed=1))
    assert drawn[:100] != list(shapes.draw(device, 100, seed=2))
    assert {x.precision for x in drawn} == set(shapes.PRECISIONS[device])
    assert {(x.cell, x.layers, x.directions, x.batch_first) for x in drawn} == {
        (cell, layers, directions, first)
        for cell in ("lstm", "gru")
        for layers in (1, 2)
        for directions in (1, 2)
        for first in (False, True)
    }
    assert all(x.bytes() <= shapes.MOST_BYTES[device] for x in drawn)
    assert max(x.batch for x in drawn) > 1000
    assert max(x.time for x in drawn) > 300


def test_multiply_adds_of_a_layer() -> None:
    shape = shapes.Shape("lstm", 5, 3, 7, 11, 2, 2, False, "float32", 0)
    # Both directions: of the input and the state, then of both outputs and the state.
    assert shape.multiply_adds == 5 * 3 * 2 * 4 * 11 * ((7 + 11) + (22 + 11))
    assert str(shape) == "lstm 5, 3, 7, 11 x 2 both ways float32"


def test_summary_of_layers_at_random() -> None:
    shape = {"cell": "gru", "time": 5, "batch": 3, "features": 7, "state": 11, "layers": 1}
    shape |= {"directions": 1, "batch_first": True, "precision": "tf32", "threads": 0}
    record = {
        "shape": shape,
        "kernels": {"forward": "group", "training": "cudnn"},
        "samples": {
            "torch": {"wall_forward": [8.0, 8.0, 9.0], "device_training": [3.0, 3.0, 3.0]},
            "extops": {"wall_forward": [10.0, 10.0, 10.0], "device_training": [1.0, 1.5, 2.0]},
        },
    }
    for name, most in (("torch", 3e6), ("extops", 2e6)):
        record["samples"][name]["memory_training"] = [most]
    found = list(shapes.ratios(record))
    assert [(x.measure, x.value, x.kernel) for x in found] == [
        ("wall_forward", 0.8, "group"),
        ("device_training", 2.0, "cudnn"),
        ("memory_training", 1.5, "cudnn"),
    ]
    text = shapes.summarise([record, {**record, "samples": {}}], "cuda")
    assert text.startswith("1 shapes, 1 skipped")
    assert "wall_forward by group" in text
    assert "memory_training by cudnn" in text
    assert "1 below 0.98,    1 below 0.9, least 0.800, mean 0.800" in text
    assert "0.800 wall_forward gru 5, 3, 7, 11 batch first tf32 by group" in text


def test_lengths_at_random() -> None:
    for lengths in shapes.LENGTHS:
        shape = shapes.Shape("lstm", 50, 40, 1, 1, 1, 1, False, "float32", 0, lengths)
        found = shape.row_lengths()
        assert found == shape.row_lengths() == sorted(found, reverse=True)
        assert (len(found), found[0]) == (40, 50)
        assert min(found) >= 1
        assert sum(found) < 0.7 * 40 * 50


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_cells_at_random(device: str) -> None:
    drawn = list(shapes.draw(device, 100, seed=1, cells=True))
    assert drawn == list(shapes.draw(device, 100, seed=1, cells=True))
    assert {x.cell for x in drawn} == {"lstm", "gru", "rnn"}
    assert {(x.time, x.layers, x.directions) for x in drawn} == {(0, 1, 1)}
    assert {x.precision for x in drawn} == set(shapes.PRECISIONS[device])
    assert any(x.state % 2 for x in drawn) and all(32 <= x.state <= 2048 for x in drawn)
    assert str(shapes.Shape("gru", 0, 3, 5, 7, 1, 1, False, "tf32", 0)) == "grucell 3, 5, 7 tf32"


@pytest.mark.parametrize(
    ("cell", "time", "lengths"),
    [
        ("gru", 1, ""),
        ("gru", 1, "uniform"),
        ("gru", 2, ""),
        ("gru", 2, "uniform"),
        ("lstm", 0, ""),
        ("gru", 0, ""),
        ("rnn", 0, ""),
    ],
)
def test_a_shape_at_random_is_measured(cell: str, time: int, lengths: str) -> None:
    random_run = pytest.importorskip("benchmarks.random_run")
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    more: Any = (2, 2, True) if time else (1, 1, False)
    shape = shapes.Shape(cell, time, 2, 4, 4, *more, "float64", 1, lengths)
    try:
        record = random_run.measure(shape, "cpu")
    finally:
        torch.set_num_threads(threads)
    assert record["failed"] == {}
    assert record["samples"].keys() >= {"torch", "extops"}
    for samples in record["samples"].values():
        assert samples.keys() == {"wall_forward", "wall_training"}
    assert len(list(shapes.ratios(record))) == 2


@pytest.mark.parametrize("mode", ["float32", "autocast"])
@pytest.mark.parametrize("name", ["policy, one step", "tagger, packed"])
def test_models_before_and_after(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models = pytest.importorskip("benchmarks.models")
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    monkeypatch.setattr(models, "SECONDS_OF_A_CASE", 0.0)
    (model,) = (x for x in models.MODELS if x.name == name)
    try:
        record = models.measure(model, mode, "cpu")
    finally:
        torch.set_num_threads(threads)
    assert record["failed"] == {}
    assert record["differences"].keys() == {"values", "gradients"}
    assert max(record["differences"].values()) < (1e-5 if mode == "float32" else 0.05)
    assert models.ratios(record).keys() == {"wall_forward", "wall_training"}
    assert models.line(record).startswith(f"{name} (its shape)")
    assert "1 models" in models.summarise([record])


@pytest.mark.slow
def test_models_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each in a process, which waits for its turn; one that ends before keeps no other from it."""
    models = pytest.importorskip("benchmarks.models")
    monkeypatch.setitem(models.AT_ONCE, "cpu", 2)
    names = ["policy, one step", "none of them", "voice activity, Silero"]
    models.run("cpu", names, ["float32", "autocast"], 120, tmp_path)
    records = json.loads((tmp_path / "models.json").read_text())["records"]
    (failed,) = (x for x in records if x["model"] == names[1])
    assert "not enough values to unpack" in failed["failed"]["all"]
    for name in (names[0], names[2]):
        of_model = [x for x in records if x["model"] == name]
        assert [x["mode"] for x in of_model] == ["float32", "autocast"]
        for record in of_model:
            assert record["failed"] == {}
            assert models.ratios(record).keys() == {"wall_forward", "wall_training"}
            (kinds,) = record["choices"]  # of one machine
            assert kinds
    models.run("cpu", names[:1], ["float32"], 0, tmp_path)
    assert "there was no time to measure it" in capsys.readouterr().out
    (place, _) = models._places("cpu")
    late = models._Apart(names[0], place, ("cpu", ["float32"], models._fill), 0.0)
    assert late.failure("late")["failed"] == {"all": "late"}
    assert late.process.exitcode == -signal.SIGKILL


def test_others_are_stopped_while_a_model_is_measured() -> None:
    """They get as much more time, and what they were stopped for is no part of a first call."""
    models = pytest.importorskip("benchmarks.models")

    class Pipe:
        def __init__(self) -> None:
            self.sent: list[str] = []

        def send(self, _: None) -> None:
            self.sent.append("go on")

        def poll(self, seconds: float) -> bool:
            return True

    class Apart:
        def __init__(self, said: str) -> None:
            self.until, self.pipe, self.signals, self.answer = 100.0, Pipe(), list[int](), said

        def signal(self, number: int) -> None:
            self.signals.append(number)

        def said(self) -> str:
            return self.answer

    one, other = Apart(models._MY_TURN), Apart("")
    start, end = models._measured_alone(one, [other])
    assert one.pipe.sent == ["go on"]
    assert (one.signals, other.signals) == ([], [signal.SIGSTOP, signal.SIGCONT])
    assert one.until == other.until == 100 + end - start > 100
    ended = Apart("")
    models._measured_alone(ended, [])
    assert ended.signals == [signal.SIGKILL]
    first = {"begin": 10.0, "seconds": 5.0, "breaks": 0}
    pauses = [(8.0, 11.0), (12.0, 13.0), (14.5, 20.0), (30.0, 40.0)]
    record = models._without_pauses({"first": {"torch eager": first}}, pauses)
    assert record == {"first": {"torch eager": {"seconds": 2.5, "breaks": 0}}}


@pytest.mark.slow
def test_models_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ours is one graph where torch's is none."""
    models = pytest.importorskip("benchmarks.models")
    monkeypatch.setattr(models, "ROUNDS", (1, 1))
    monkeypatch.setattr(models, "PREPARED", [x for x in models.PREPARED if "graphs" not in x])
    models.run("cpu", ["policy, one step"], ["float32"], 300, tmp_path, compiled=True)
    (record,) = json.loads((tmp_path / "models.json").read_text())["records"]
    assert record["failed"] == {}
    assert record["first"]["extops compiled"]["breaks"] == 0
    assert record["first"]["torch compiled"]["breaks"] > 0
    names = {f"{form} wall_{work}" for work, form in models.PREPARED}
    assert models.ratios_of_compiled(record).keys() == names
    assert "0 breaks, first call" in models.line_of_compiled(record)
    said = models.summarise_compiled([record])
    assert "compiled wall_forward: 1 models, mean " in said
    environment = {"device_name": "this CPU", "torch": "2", "commit": "0"}
    page = models.report_of_compiled({"environment": environment, "records": [record]})
    assert "| policy, one step | " in page


def test_what_each_torch_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the line of the model; what another torch refused is kept."""
    torch, models = pytest.importorskip("torch"), pytest.importorskip("benchmarks.models")

    class Branching(torch.nn.Module):
        def forward(self, input: Any) -> Any:
            return input.cos() if input.sum() > 0 else input

    line = Branching.forward.__code__.co_firstlineno + 1
    one = next(x for x in models.MODELS if x.name == "policy, one step")
    made = Branching(), (torch.ones(2),)
    branches = dataclasses.replace(one, name="branches", make=lambda _: made, run=lambda f, x: f(x))
    monkeypatch.setattr(models, "MODELS", [one, branches])
    monkeypatch.setattr(models, "_prepare", lambda *_: None)
    (tmp_path / "fullgraph.json").write_text('{"1.13.1": {"branches": "x models/other.py:7"}}')
    models.add_refused([], tmp_path)
    version = torch.__version__.partition("+")[0]
    found = json.loads((tmp_path / "fullgraph.json").read_text())[version]
    assert found.pop("branches").endswith(f"/{Path(__file__).name}:{line}")
    assert found == {one.name: ""}
    page = (tmp_path / "fullgraph.md").read_text()
    assert f"One graph: torch 1.13.1 0 of 1, torch {version} 1 of 2. The others:" in page
    assert "| branches | `models/other.py:7` | `" in page
    assert one.name not in page


def test_models_that_take_long_to_compile() -> None:
    """What there was time for is measured."""
    models = pytest.importorskip("benchmarks.models")
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    ours, theirs = multiprocessing.Pipe()
    ours.send(None)
    (model,) = (x for x in models.MODELS if x.name == "policy, one step")
    others = "float32", "cpu", "torch", models.PREPARED, 0
    try:
        models._measure_compiled(theirs, model, model.make(True), *others)
    finally:
        torch.set_num_threads(threads)
    found = models._received(ours)
    assert found["first"] == found["seconds"] == {}
    assert found["failed"] == dict.fromkeys(models.FORMS, "forward: not compiled within 0 s")
    models._measure_compiled(theirs, model, (None, ()), *others)
    with pytest.raises(RuntimeError, match="AttributeError: 'NoneType' object"):
        models._received(ours)


def test_models_are_compiled_for_their_own_sizes() -> None:
    """Not for any, as a frame is that has met others: what breaks of a graph leave has frames of its own."""
    torch, models = pytest.importorskip("torch"), pytest.importorskip("benchmarks.models")
    sizes: list[type] = []

    def note(graph: Any, inputs: list[Any]) -> Any:
        sizes.extend(type(x) for each in inputs for x in getattr(each, "shape", (each,)))
        return graph.forward

    def run(module: Any, x: Any) -> Any:
        return module(x)

    models.start_compiler("cpu")
    torch.compile(functools.partial(run, torch.nn.ReLU()), backend=note)(torch.ones(3, 4))
    assert sizes
    assert set(sizes) == {int}


def test_ratios_of_compiled_models() -> None:
    """Of two processes the fastest sample; the control says how far two of torch's are apart."""
    models = pytest.importorskip("benchmarks.models")
    fastest = {"torch": 8.0, "control": 10.0, "extops": 5.0, "again": 4.0}
    samples = {f"{x} compiled": {"wall_forward": [99.0, y, 98.0]} for x, y in fastest.items()}
    record = {"model": "of one step", "samples": samples}
    assert models.ratios_of_compiled(record) == {"compiled wall_forward": 2.0}
    assert models.ratios_of_compiled(record, "control") == {"compiled wall_forward": 0.8}
    slow = {
        **samples,
        "extops compiled": {"wall_forward": [16.0]},
        "again compiled": {"wall_forward": [20.0]},
    }
    said = models.summarise_compiled([record, {"model": "slow one", "samples": slow}])
    assert "2 models, mean 1.00, control's 5th percentile 0.80" in said
    assert "below it 1: slow one 0.50" in said


def test_a_module_of_a_package_that_imports_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = pytest.importorskip("benchmarks.packages")
    folder = tmp_path / "heavy_zoo" / "models"
    folder.mkdir(parents=True)
    for each in (folder, folder.parent):
        (each / "__init__.py").write_text("raise AssertionError('it ran')")
    (folder / "layers.py").write_text("SIZE = 3")
    (folder / "model.py").write_text(
        "from absent_zoo.parts import Base\nfrom .layers import SIZE\nclass Model(Base): size = SIZE"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    try:
        with pytest.raises(ModuleNotFoundError, match="No module named 'absent_zoo'"):
            packages.load("heavy_zoo.models.model")
        assert packages.load("heavy_zoo.models.model", "absent_zoo").Model.size == 3
        assert not any(x.startswith("absent_zoo") for x in sys.modules)
        with pytest.raises(ModuleNotFoundError, match="No module named 'missing_zoo'"):
            packages.load("missing_zoo.model")
    finally:
        for each in set(sys.modules) - before:
            del sys.modules[each]


def test_models_of_packages_have_names_and_requirements() -> None:
    models = pytest.importorskip("benchmarks.models")
    packages = pytest.importorskip("benchmarks.packages")
    names = [model.name for model in models.MODELS]
    assert len(names) == len(set(names))
    lines = (ROOT / "benchmarks" / "zoo_requirements.txt").read_text().splitlines()
    pinned = {line.partition("==")[0] for line in lines if not line.startswith("#")}
    assert {model.package for model in packages.MODELS} <= pinned


def test_a_model_whose_package_is_missing() -> None:
    models = pytest.importorskip("benchmarks.models")

    def missing(small: bool) -> None:
        raise ModuleNotFoundError("No module named 'openunmix'")

    record = models.measure(models.Model("Open-Unmix", "openunmix", missing), "float32", "cpu")
    assert record["failed"] == {"all": "ModuleNotFoundError: No module named 'openunmix'"}
    assert "No module named" in models.line(record)
    assert models.summarise([record]) == ""


@pytest.mark.slow
def test_the_cell_of_aten_calls() -> None:
    """It is compiled, and computes what the composition does."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("extops")
    from benchmarks import aten
    from extops import reference

    shapes = (4, 3), (15, 8), (15,), (4, 5), (4, 5)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    found, expected = (
        torch.autograd.grad([x.sum() for x in of(*inputs)], inputs)
        for of in (aten.lltm, reference.lltm)
    )
    torch.testing.assert_close(found, expected)
