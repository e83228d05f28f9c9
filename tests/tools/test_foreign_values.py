"""The check of foreign wheels' values, on wheels whose values are known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks import foreign
from extops_build import ROOT

RANKS = "def soft_rank(x, regularization_strength): return x.argsort().argsort() + {first}"


def wheel(folder: Path, name: str, text: str) -> None:
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", text)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


def checked(folder: Path, out: Path) -> tuple[int, list[str]]:
    out.mkdir()
    command = [sys.executable, "-m", "benchmarks.foreign_values", folder, "--device=cpu"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OUT": str(out)}, capture_output=True, text=True
    )
    return done.returncode, done.stdout.splitlines()


@pytest.mark.slow
def test_each_wheel_gets_a_line_whatever_becomes_of_the_others(tmp_path: Path) -> None:
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel(folder, "torchsort", RANKS.format(first=1))
    code, lines = checked(folder, tmp_path / "alone")
    assert (code, lines) == (0, ["torchsort: ranks: right, off by 0.0e+00 of the largest"])
    wheel(folder, "torch_linear_assignment", "import what_is_not_there")
    wheel(folder, "torchsort", RANKS.format(first=2))
    wheel(folder, "unknown", "")
    code, lines = checked(folder, tmp_path / "together")
    assert code == 1
    assert lines == [
        "torch_linear_assignment: ModuleNotFoundError: No module named 'what_is_not_there': wrong",
        "torchsort: ranks: wrong, off by 5.0e-02 of the largest",
        "unknown: there is no check of it: wrong",
    ]
    runs = json.loads((tmp_path / "together" / "values.json").read_text())
    assert [run["right"] for run in runs] == [False, False, False]
    assert {run["device"] for run in runs} == {"CPU"}
    assert all(len(run["sha256"]) == 64 for run in runs)


def test_what_was_run_of_a_file_stays_while_its_project_gives_that_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "foreign.json"
    monkeypatch.setattr(foreign, "RESULTS", results)
    row = {"project": "x==1", "target": "3.11-cpu", "sha256": "1", "tests": [], "MB": 1}
    row |= {"GB": 1.5, "processes": 2}
    ran = {"tests": [{"device": "CPU", "passed": 1}], "values": [{"device": "H200", "right": True}]}
    for new, said in (
        ({**row, **ran}, {**row, **ran}),
        ({**row, "MB": 2, "GB": 0.2, "processes": 0}, {**row, **ran, "MB": 2}),
        ({**row, "sha256": "2"}, {**row, "sha256": "2"}),
        ({"project": "x==1", "target": "3.11-cpu", "failed": "it does"}, None),
    ):
        foreign.keep(new)
        assert json.loads(results.read_text()) == [said or new]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--help", "A record is what `torchwheels test` leaves"),
        ("", "the following arguments are required: PROJECT, TARGET"),
        ("torchsort", "the following arguments are required: PROJECT, TARGET"),
        ("torchsorted 3.11-cpu", "PROJECTS has no torchsorted"),
    ],
)
def test_command_line_of_foreign_projects(arguments: str, said: str) -> None:
    command = [sys.executable, "-m", "benchmarks.foreign", *arguments.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert said in done.stdout + done.stderr and "Traceback" not in done.stderr
    assert done.returncode == (0 if arguments == "--help" else 2)
