"""Says how the tests of a published wheel went with the newest torch, and adds it to the wheel's build report.

`nox -s newest` runs this with the Python whose environment holds the two, after the tests.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import sys
from pathlib import Path
from typing import Any

from extops_build import ROOT


def counts(folder: Path) -> dict[str, int]:
    """How many tests passed, failed and were skipped, from the record that the tests left.

    All are 0 where there is none: then the tests did not even start.
    """
    records = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return {
        name: sum(record[name] for record in records) for name in ("passed", "failed", "skipped")
    }


def record(report: Path, folder: Path) -> dict[str, Any]:
    """Adds the run to the file `report` where there is one, for the index; returns what it was."""
    today = datetime.datetime.now(datetime.timezone.utc).date()
    torch, python = importlib.metadata.version("torch"), platform.python_version()
    found = {
        "target": f"Python {python} with the newest torch, {torch}, on {today}",
        "torch": torch,
        "python": python,
        "device": "CPU",
        **counts(folder),
    }
    if report.is_file():
        known = json.loads(report.read_text())
        known["tests"].append(found)
        report.write_text(json.dumps(known, indent=2) + "\n")
    return found


def main() -> None:
    """The command line: the file name of the wheel, and the folder where the tests left their record."""
    wheel, folder = sys.argv[1:]
    found = record((ROOT / "dist" / wheel).with_suffix(".report.json"), Path(folder))
    said = f"{found['passed']} passed, {found['failed']} failed, {found['skipped']} skipped"
    print(f"extops: {wheel} with torch {found['torch']}: {said}")
    if found["failed"] or not found["passed"]:
        sys.exit(f"extops: {wheel} does not pass with torch {found['torch']}")


if __name__ == "__main__":
    main()
