"""The benchmark's arithmetic and its report, on figures that are known."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report, targets
from benchmarks.results import Result, Spread
from benchmarks.samples import median, quantile, ratio

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


def case(size: dict[str, int], variants: dict[str, Any], **more: Any) -> dict[str, Any]:
    work = {"forward": {"flop": 2_000_000, "bytes": 4000}}
    return {
        "group": "cell",
        "operator": "cell",
        "mode": "float32",
        "threads": 1,
        "size": size,
        "work": work,
        "weather": {"load": 0.5},
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
        "extops_lane": "stable",
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
                "torch.compile": {"failed": {"all": "RuntimeError: no compiler"}, "samples": {}},
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


def test_quantiles_are_interpolated() -> None:
    samples = [float(value) for value in range(11, 0, -1)]
    assert quantile(samples, 0.1) == 2
    assert quantile(samples, 0.9) == 10
    assert median([4.0, 1.0, 2.0, 3.0]) == 2.5
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
    assert found[f"{cell}, forward, wall time", "torch.compile / extops"].verdict == "not measured"
    overhead = found["multiply 2^10 float32, 1 thread, forward, wall time", "extops / torch.mul"]
    assert (str(overhead.measured), overhead.verdict) == ("1.50 (1.42–1.50)", "met")
    importing = found["import extops", "ms beyond import torch"]
    assert (str(importing.measured), importing.verdict) == ("30.0 (22.0–54.0)", "met")


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
    assert "- torch.compile: RuntimeError: no compiler (cell 16, 32, 128 float32, 1 thread)" in text
    assert (
        "| multiply | forward, wall time | torch.mul | 1 of 1 | 0.667 (0.667–0.705): 2^10" in text
    )


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
