"""What is recorded of a run with the newest torch: from records that the suite itself leaves."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from extops_build import ROOT
from tools import newest

WHEEL = "extops-0.1.0-py3-none-manylinux_2_28_x86_64.whl"
TESTS = """
import pytest

@pytest.mark.parametrize("x", range(3))
def test_passes(x): pass

def test_fails(): assert False

@pytest.mark.skip(reason="no GPU")
def test_skips(): pass
"""


def run(folder: Path, tests: str) -> Path:
    """Runs `tests` as the suite is run; returns where the record of that is."""
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    (folder / "test_it.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--record=record"]
    subprocess.run(command, cwd=folder, capture_output=True)
    return folder / "record"


@pytest.mark.parametrize(
    ("tests", "counts"),
    [
        (TESTS, {"passed": 3, "failed": 1, "skipped": 1}),
        ("import no_such_module", {"passed": 0, "failed": 1, "skipped": 0}),
    ],
    ids=["tests", "import-error"],
)
def test_run_is_added_to_the_report(tmp_path: Path, tests: str, counts: dict[str, int]) -> None:
    report = tmp_path / "wheel.report.json"
    report.write_text(json.dumps({"tests": ["an earlier run"]}))
    found = newest.record(report, run(tmp_path, tests))
    assert json.loads(report.read_text()) == {"tests": ["an earlier run", found]}
    torch = importlib.metadata.version("torch")
    assert f"with the newest torch, {torch}, on 20" in found.pop("target")
    python = platform.python_version()
    assert found == {"torch": torch, "python": python, "device": "CPU", **counts}


def test_tests_that_do_not_even_start(tmp_path: Path) -> None:
    assert newest.counts(tmp_path / "record") == {"passed": 0, "failed": 0, "skipped": 0}


@pytest.mark.parametrize(
    ("record", "passes"),
    [
        ({"passed": 3, "failed": 0, "skipped": 1}, True),
        ({"passed": 3, "failed": 1, "skipped": 0}, False),
        ({"passed": 0, "failed": 0, "skipped": 4}, False),
    ],
    ids=["passed", "failed", "skipped"],
)
def test_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: dict[str, int], passes: bool
) -> None:
    (tmp_path / "cpu.json").write_text(json.dumps(record))
    monkeypatch.setattr(newest, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["newest", WHEEL, str(tmp_path)])
    if passes:
        newest.main()
    else:
        with pytest.raises(SystemExit, match="does not pass with torch"):
            newest.main()
