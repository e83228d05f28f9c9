"""The passport of a wheel: what it was built of, whom it serves, what the audit found, where its tests passed.

It lies beside the wheel and not in it: it is the finished file that is tested, and one with the results
in it would be another.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from torchwheels import audit, sandbox, variants, wheel
from torchwheels.errors import UserError
from torchwheels.project import Project, of_table
from torchwheels.releases import Cell
from torchwheels.testing import sha256
from torchwheels.wheel import Wheel


def passport_file(path: Path) -> Path:
    """Where the passport of a wheel lies."""
    return path.with_suffix(".passport.json")


def judge(path: Path, project: Project, cell: Cell | None = None) -> dict[str, Any]:
    """The passport of the wheel `path`, which `project` promised for `cell`; None: the cell that it names."""
    passport: dict[str, Any] = sandbox.call(_judge, path, project, cell)
    return passport | {
        "options": project.table,
        "tests": _tests(path.parent / "tests", passport["sha256"]),
    }


def _judge(path: Path, project: Project, cell: Cell | None) -> dict[str, Any]:
    found = wheel.read(path)
    if found.record is None:
        raise UserError(
            f"{path.name} has no build record that says which cell it is for: build it with "
            "`torchwheels build`"
        )
    if cell is None:
        cell = project.cell_to_build(project.releases.cell(str(found.record.get("cell"))))
    findings = audit.findings(found, audit.expectation_of(project, cell))
    return {
        "wheel": path.name,
        "sha256": sha256(path),
        "size": path.stat().st_size,
        "name": found.name,
        "version": str(found.version),
        "tags": sorted(map(str, found.tags)),
        "variant": variant(found),
        "build": found.record,
        "serves": {
            "python": found.pythons.what,
            "torch": found.torches.what,
            "cuda": found.cuda.what,
        },
        "requires": found.metadata.get_all("Requires-Dist") or [],
        "requires_python": found.metadata["Requires-Python"],
        "rules": [
            {"rule": rule, "passed": not texts, "detail": "; ".join(texts)}
            for rule, texts in findings.items()
        ],
    }


def write_passport(path: Path, project: Project) -> dict[str, Any]:
    """Judges the wheel `path`, writes its passport, and returns that."""
    passport = judge(path, project)
    write(passport, path)
    return passport


def variant(found: Wheel) -> dict[str, Any] | None:
    """The variant beside the wheel; None where there is none."""
    beside = variants.of(found)
    if beside is None or not beside.path.is_file():
        return None
    variants.check(beside)
    return {
        "wheel": beside.path.name,
        "sha256": sha256(beside.path),
        "size": beside.path.stat().st_size,
        "label": beside.label,
        "properties": beside.properties,
    }


def write(passport: dict[str, Any], path: Path) -> None:
    """Puts the passport of the wheel `path` beside it."""
    passport_file(path).write_text(json.dumps(passport, indent=2) + "\n")


def check(path: Path, project: Project, cell: Cell) -> dict[str, Any]:
    """The passport of a wheel that was just built; an error has a line for everything that is wrong with it."""
    passport = judge(path, project, cell)
    if found := problems(passport):
        lines = "".join(f"\n  {problem}" for problem in found)
        raise UserError(f"{path.name} does not pass the audit:{lines}")
    return passport


def promised(path: Path, own: Project) -> Project:
    """The options that the wheel is judged by: those of its own project.

    `own` are those at hand. Where the wheel is of another project, its passport has what it was built with.
    """
    try:
        name = parse_wheel_filename(path.name)[0]
    except InvalidWheelFilename:
        return own  # which the audit reports
    if own.file and own.name in ("", name):
        return own
    if (passport := _known(path)) and isinstance(table := passport.get("options"), dict):
        return of_table(table, f"{passport_file(path)}: options")
    return Project()


def _known(path: Path) -> dict[str, Any] | None:
    """The passport that lies beside the wheel, where it is of this very file."""
    try:
        passport = json.loads(passport_file(path).read_text())
        name, version, _, _ = parse_wheel_filename(path.name)
        named = path.name, name, str(version)
        same = (passport["wheel"], passport["name"], passport["version"]) == named and all(
            each["sha256"] == sha256(path.with_name(each["wheel"]))
            for each in filter(None, (passport, passport.get("variant")))
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return passport if same else None


def _tests(folder: Path, digest: str) -> list[dict[str, Any]]:
    """The records of the test runs of this very file."""
    found = []
    for file in sorted(folder.glob("*/*.json")):
        try:
            record = json.loads(file.read_text())
            if record["sha256"] == digest:
                found.append(record)
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{file} is no whole record of tests: delete it, or run the tests again"
            ) from None
    return found


def problems(passport: dict[str, Any]) -> list[str]:
    """What speaks against publishing the wheel.

    A run that was added later, with a newer torch, has no hash: it is shown, and stops nothing.
    """
    found = [f"{x['rule']}: {x['detail']}" for x in passport["rules"] if not x["passed"]]
    failed = [x["cell"] for x in passport["tests"] if x["failed"] and "sha256" in x]
    return [*found, *(f"its tests failed in {cell}" for cell in failed)]


def refuse(passports: Iterable[dict[str, Any]]) -> None:
    """Raises an error that says of each wheel what speaks against publishing it."""
    bad = [f"\n  {x['wheel']}: {'; '.join(found)}" for x in passports if (found := problems(x))]
    if bad:
        raise UserError(f"not fit to publish:{''.join(bad)}")


def read_passports(dist: Path, own: Project) -> list[dict[str, Any]]:
    """The passports of the wheels in `dist`, all fit to publish; a wheel without one is judged."""
    found = []
    for path in wheel.wheels_in(dist):
        passport = _known(path)
        if passport and passport.get("rules"):
            tests = _tests(dist / "tests", passport["sha256"])
            passport["tests"] = [*(x for x in passport["tests"] if x not in tests), *tests]
        else:
            passport = write_passport(path, promised(path, own))
        found.append(passport)
    if not found:
        raise UserError(f"there is no wheel in {dist}: build some first")
    refuse(found)
    return found
