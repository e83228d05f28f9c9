"""Records how the tests of a published wheel went with the newest torch.

`nox -s newest` runs this with the Python whose environment holds the two, after the tests.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
import sys
from pathlib import Path
from typing import Any

from service import ROOT

RESULT = ROOT / "benchmarks" / "results" / "newest-torch.json"


def counts(folder: Path) -> dict[str, int]:
    """How many tests passed, failed and were skipped, from the record that the tests left.

    All are 0 where there is none: then the tests did not even start.
    """
    records = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return {
        name: sum(record[name] for record in records) for name in ("passed", "failed", "skipped")
    }


def record(wheel: str, folder: Path, result: Path) -> dict[str, Any]:
    """Writes the result to the file `result`, and returns it."""
    found = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "wheel": wheel,
        **counts(folder),
    }
    result.write_text(json.dumps(found, indent=2) + "\n")
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m service.newest", description=__doc__)
    parser.add_argument("wheel", help="the file name of the wheel under test")
    parser.add_argument("folder", type=Path, help="where the tests left their record")
    arguments = parser.parse_args()
    found = record(arguments.wheel, arguments.folder, RESULT)
    said = f"{found['passed']} passed, {found['failed']} failed, {found['skipped']} skipped"
    print(f"extops: {found['wheel']} with torch {found['torch']}: {said}; see {RESULT}")
    if found["failed"] or not found["passed"]:
        sys.exit(f"extops: {found['wheel']} does not pass with torch {found['torch']}")


if __name__ == "__main__":
    main()
