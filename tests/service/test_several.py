"""Several builds at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from service import ROOT, matrix, place, several

CELLS = [matrix.load().cell(name) for name in ("3.11-cpu", "3.11-cu130")]


def test_table() -> None:
    rows = [
        several.Result("3.11-cpu", "built", 12.34, "extops.whl", 170_000),
        several.Result("3.11-cu130", "failed", 1.0, "", 0),
    ]
    assert several.table(rows).splitlines() == [
        "cell        result  seconds  wheel       MB",
        "3.11-cpu    built   12.3     extops.whl  0.17",
        "3.11-cu130  failed  1.0      –           0.00",
    ]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("#17 72.31 extops: compiled cpu in 69.1 s", "extops: compiled cpu in 69.1 s"),
        ("#12 [build 4/5] COPY csrc csrc", "[build 4/5] COPY csrc csrc"),
        ("#17 9.7 [3/27] CUDA csrc/kernels/a.cu", "[3/27] CUDA csrc/kernels/a.cu"),
        ("[3/27] CUDA csrc/kernels/a.cu", "[3/27] CUDA csrc/kernels/a.cu"),
        ("#17 81.85 Fixed-up wheel written", None),
    ],
)
def test_lines_that_are_shown(line: str, shown: str | None) -> None:
    assert several.progress(f"{line}\n") == shown


def test_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAX_JOBS", raising=False)
    monkeypatch.setattr(several.toolchain, "parallel_jobs", lambda: 8)
    assert several.Builds(place.Options(), 4).environment["MAX_JOBS"] == "2"
    assert several.Builds(place.Options(), 16).environment["MAX_JOBS"] == "1"
    monkeypatch.setenv("MAX_JOBS", "5")
    assert several.Builds(place.Options(), 4).environment["MAX_JOBS"] == "5"


def run(*arguments: str, tree: Path = ROOT, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "service.several", *arguments],
        cwd=tree,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
    )


def test_unknown_cell() -> None:
    done = run("3.11-cpu", "3.11-cu131")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("extops: there is no cell '3.11-cu131' in matrix.toml; the nearest are ")


def test_failures_end_the_table(tree: Path) -> None:
    """No compiler anywhere: each build says so, and the table says which failed."""
    done = run("--jobs=2", "--backend=local", "3.11-cpu", "3.11-cu130", tree=tree, PATH="")
    assert done.returncode == 1
    assert "extops: 2 of 2 cells failed: 3.11-cpu, 3.11-cu130" in done.stderr
    rows = json.loads((tree / "build" / "summary.json").read_text())
    assert [(row["cell"], row["result"]) for row in rows] == [
        ("3.11-cpu", "failed"),
        ("3.11-cu130", "failed"),
    ]
    assert "3.11-cpu failed; the end of build/logs/3.11-cpu.log:" in done.stdout


@pytest.mark.skipif(
    not os.environ.get("EXTOPS_ENGINE_TESTS"),
    reason="builds two cells in Docker, twice: set EXTOPS_ENGINE_TESTS=1 to run it",
)
@pytest.mark.usefixtures("engine")
def test_at_once_as_one_after_the_other(tree: Path) -> None:
    wheels = []
    for jobs in (1, 2):
        done = run(
            f"--jobs={jobs}",
            "--backend=docker",
            *(cell.name for cell in CELLS),
            tree=tree,
            EXTOPS_FRESH="1",
        )
        assert done.returncode == 0, done.stdout + done.stderr
        built = sorted((tree / "dist").glob("*.whl"))
        assert len(built) == 2
        assert {path.stat().st_uid for path in built} == {os.getuid()}
        wheels.append({path.name: path.read_bytes() for path in built})
    assert wheels[0] == wheels[1]
