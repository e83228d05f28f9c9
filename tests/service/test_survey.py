"""What the survey reads from the output of the sessions."""

from __future__ import annotations

import json
from pathlib import Path

from service import matrix, survey

CELL = matrix.load().cell("3.11-cu130")
TESTED = """
platform linux -- Python 3.11.7, pytest-9.2.0, pluggy-1.7.0
extops 0.1.0+cu130 (stable lane), torch 2.13.0+cu130, 0 GPU(s): no CUDA GPU
=========== short test summary info ===========
===== 1 failed, 1182 passed, 1046 skipped, 41 warnings in 68.34s (0:01:08) =====
nox > Session test-3.11-cu130 failed in 1 minute
"""


def test_facts_of_a_test_run() -> None:
    assert survey.test_facts(TESTED) == {
        "passed": 1182,
        "failed": 1,
        "skipped": 1046,
        "python": "3.11.7",
        "lane": "stable",
        "torch": "2.13.0+cu130",
        "gpus": "0",
    }
    assert survey.test_facts("no module named pytest") == {"passed": 0, "failed": 0, "skipped": 0}


def test_seconds_and_place() -> None:
    said = (
        "extops: backend docker: asked for\n#9 1.0 extops: compiled cu130 in 12.3 s, up to 2 files"
    )
    assert survey.compile_seconds(said) == 12.3
    assert survey.compile_seconds("") is None
    assert survey.built_where(CELL, said) == "Docker, nvidia/cuda:13.0.2-devel-ubuntu22.04"
    assert survey.built_where(CELL, "extops: backend local: asked for") == "local"


def test_a_row_replaces_that_of_its_cell(tmp_path: Path) -> None:
    results = tmp_path / "results" / "matrix.json"
    failed = {"built": False, "built_where": "local"}
    for cell in ("3.11-cu130", "3.11-cpu", "3.11-cu130"):
        survey.record({"cell": cell, **failed}, results)
    rows = json.loads(results.read_text())
    assert [row["cell"] for row in rows] == ["3.11-cpu", "3.11-cu130"]
    assert "| 3.11-cpu | no (local) |" in survey.table(rows)


def test_recorded_cells_exist() -> None:
    rows = json.loads(survey.RESULTS.read_text())
    assert {row["cell"] for row in rows} <= {cell.name for cell in matrix.load().cells}
