"""What the survey reads from what the sessions print and leave."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from service import matrix, place, survey, wheels

CELL = matrix.load().cell("3.11-cu130")
RECORD = {
    "contents": "0123",
    "python": "3.11.7",
    "torch": "2.13.0+cu130",
    "device": "CPU",
    "passed": 1182,
    "failed": 1,
    "skipped": 1046,
}


def test_facts_of_a_test_run(tmp_path: Path) -> None:
    nothing = {"passed": 0, "failed": 0, "skipped": 0}
    assert survey.test_facts(tmp_path / "none") == nothing
    (tmp_path / "cpu.json").write_text(json.dumps(RECORD))
    facts = survey.test_facts(tmp_path)
    assert facts == {key: value for key, value in RECORD.items() if key != "contents"}


def test_seconds_and_place() -> None:
    said = (
        "extops: backend docker: asked for\n#9 1.0 extops: compiled cu130 in 12.3 s, up to 2 files"
    )
    assert survey.compile_seconds(said) == 12.3
    assert survey.compile_seconds("") is None
    assert survey.built_where(CELL, said) == "Docker, nvidia/cuda:13.0.2-devel-ubuntu22.04"
    assert survey.built_where(CELL, "extops: backend local: asked for") == "local"


def test_row_of_a_cell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the sessions replaced: which are run, and what of them gets into the row."""
    calls = []
    records = tmp_path / wheels.TESTS / CELL.name

    def session(name: str, options: place.Options, **environment: str) -> tuple[int, str]:
        calls.append((name, *environment))
        if name.startswith("test-"):
            assert not records.exists()  # any more
            records.mkdir(parents=True)
            (records / "cpu.json").write_text(json.dumps(RECORD))
        return 0, "extops: compiled cu130 in 12.3 s"

    wheel = tmp_path / "extops.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        info = {"cuda": "13.0.88", "cxx": "g++ 12", "architectures": ["9.0+PTX"], "commit": "abc"}
        archive.writestr("extops/_build_info.json", json.dumps(info))
    monkeypatch.setattr(survey, "session", session)
    monkeypatch.setattr(wheels, "DIST", tmp_path)
    monkeypatch.setattr(survey.wheels, "wheel_for", lambda cell: wheel)
    row = survey.survey(CELL, place.Options())
    assert (row["built"], row["compile_seconds_cold"], row["failed"]) == (True, 12.3, 1)
    assert (row["lane"], row["torch"], row["device"]) == ("stable", "2.13.0+cu130", "CPU")
    assert (row["wheel"], row["cuda_compiler"]) == ("extops.whl", "13.0.88")
    assert calls == [
        ("build-3.11-cu130", "EXTOPS_FRESH", "CCACHE_RECACHE"),
        ("build-3.11-cu130", "EXTOPS_FRESH"),
        ("test-3.11-cu130",),
    ]
    calls.clear()
    row = survey.survey(CELL, place.Options(), tests_only=True)
    assert (row["built_where"], row["passed"]) == ("another cell", 1182)
    assert calls == [("test-3.11-cu130",)]


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
