"""Builds and tests cells one after the other, and records what came of each.

Each row of benchmarks/results/matrix.json was measured, and says where. A cell is built twice: as
if the compiler cache were empty, and with it. Then its wheel is tested under its torch and Python.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

from service import ROOT, errors_for_the_user, images, place, processes, wheels
from service.compile import BUILD_INFO
from service.matrix import Cell, load

RESULTS = ROOT / "benchmarks" / "results" / "matrix.json"

_COMPILED = re.compile(r"extops: compiled \S+ in ([\d.]+) s")


def session(name: str, options: place.Options, **environment: str) -> tuple[int, str]:
    """Runs a nox session; returns its exit code and all that it printed."""
    command = [sys.executable, "-m", "nox", "--noxfile", str(ROOT / "noxfile.py"), "-s", name, "--"]
    command += [f"--backend={options.backend}"] if options.backend else []
    command += [f"--builder={options.builder}"] if options.builder else []
    code, lines = images.follow(command, {**os.environ, **environment}, keep=None)
    return code, "\n".join(lines)


def build(cell: Cell, options: place.Options) -> dict[str, Any]:
    """Builds the cell twice; returns what a row says of that."""
    code, cold = session(f"build-{cell.name}", options, EXTOPS_FRESH="1", CCACHE_RECACHE="1")
    facts: dict[str, Any] = {"built": code == 0, "built_where": built_where(cell, cold)}
    if code == 0:
        _, warm = session(f"build-{cell.name}", options, EXTOPS_FRESH="1")
        facts["compile_seconds_cold"] = compile_seconds(cold)
        facts["compile_seconds_warm"] = compile_seconds(warm)
    return facts


def survey(cell: Cell, options: place.Options, *, tests_only: bool = False) -> dict[str, Any]:
    """Builds and tests one cell; returns its row.

    With `tests_only` it is the wheel in dist/ that is tested, which another cell of the variant
    built.
    """
    row: dict[str, Any] = {"cell": cell.name}
    row |= {"built": True, "built_where": "another cell"} if tests_only else build(cell, options)
    if not row["built"]:
        return row
    row |= {"lane": cell.lane, **wheel_facts(wheels.wheel_for(cell))}
    records = wheels.DIST / wheels.TESTS / cell.name
    shutil.rmtree(records, ignore_errors=True)  # of earlier runs
    session(f"test-{cell.name}", options)
    return row | test_facts(records)


def built_where(cell: Cell, output: str) -> str:
    """The place that the session picked, as it said."""
    if "extops: backend docker" in output:
        return f"Docker, {images.base_image(cell)}"
    return "local"


def compile_seconds(output: str) -> float | None:
    """How long the compilers ran; None where the session did not say."""
    found = _COMPILED.search(output)
    return float(found[1]) if found else None


def wheel_facts(wheel: Path) -> dict[str, Any]:
    """What the wheel says of itself."""
    with zipfile.ZipFile(wheel) as archive:
        info = json.loads(archive.read(f"extops/{BUILD_INFO}"))
    return {
        "wheel": wheel.name,
        "wheel_bytes": wheel.stat().st_size,
        "cuda_compiler": info["cuda"],
        "cxx": info["cxx"],
        "architectures": info["architectures"],
        "commit": info["commit"],
    }


def test_facts(records: Path) -> dict[str, Any]:
    """What the test session left in `records`: under what the tests ran, and how many passed."""
    for path in records.glob("*.json"):  # one, as the tests ran on one device
        row: dict[str, Any] = json.loads(path.read_text())
        del row["contents"]
        return row
    return {"passed": 0, "failed": 0, "skipped": 0}


def record(row: dict[str, Any], results: Path = RESULTS) -> None:
    """Puts the row into the file, in place of an older one of its cell."""
    order = [cell.name for cell in load().cells]
    with wheels.alone("survey", "survey's writing"):
        rows = json.loads(results.read_text()) if results.is_file() else []
        kept = [old for old in rows if old["cell"] != row["cell"]]
        kept = sorted([*kept, row], key=lambda entry: order.index(entry["cell"]))
        results.parent.mkdir(parents=True, exist_ok=True)
        results.write_text(json.dumps(kept, indent=2) + "\n")


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| cell | built | compiler | wheel | MB | compile s cold / warm | torch | Python "
        "| passed / failed / skipped |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if not row["built"]:
            lines.append(f"| {row['cell']} | no ({row['built_where']}) | | | | | | | |")
            continue
        compiler = f"nvcc {row['cuda_compiler']}" if row["cuda_compiler"] else row["cxx"]
        lines.append(
            f"| {row['cell']} | {row['built_where']} | {compiler} | {row['wheel']} "
            f"| {row['wheel_bytes'] / 1e6:.2f} "
            f"| {row.get('compile_seconds_cold', '–')} / {row.get('compile_seconds_warm', '–')} "
            f"| {row.get('torch', '–')} | {row.get('python', '–')} "
            f"| {row['passed']} / {row['failed']} / {row['skipped']} |"
        )
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m service.survey", description=__doc__)
    parser.add_argument("cells", nargs="*", help="which cells (default: none, only the table)")
    parser.add_argument(
        "--tests-only", action="store_true", help="test the wheels in dist/, and build none"
    )
    processes.end_with_parent()
    with errors_for_the_user():
        options, others = place.options(sys.argv[1:])
        arguments = parser.parse_args(others)
        for name in arguments.cells:
            record(survey(load().cell(name), options, tests_only=arguments.tests_only))
    rows = json.loads(RESULTS.read_text()) if RESULTS.is_file() else []
    print(table(rows))
    bad = [
        row["cell"] for row in rows if not (row["built"] and row["passed"] and not row["failed"])
    ]
    if bad:
        sys.exit(f"extops: not built, or not passed: {', '.join(bad)}")


if __name__ == "__main__":
    main()
