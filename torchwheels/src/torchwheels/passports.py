"""The passport of a wheel: what it was built of, whom it serves, what the audit found, where its tests passed.

It lies beside the wheel and not in it: it is the finished file that is tested, and one with the results
in it would be another.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torchwheels import audit, variants, wheel
from torchwheels.errors import UserError
from torchwheels.project import Project
from torchwheels.testing import sha256
from torchwheels.wheel import Wheel


def passport_file(path: Path) -> Path:
    """Where the passport of a wheel lies."""
    return path.with_suffix(".passport.json")


def write_passport(path: Path, project: Project) -> dict[str, Any]:
    """Judges the wheel `path`, writes its passport, and returns that."""
    found = wheel.read(path)
    if found.record is None:
        raise UserError(
            f"{path.name} has no build record that says which cell it is for: build it with "
            "`torchwheels build`"
        )
    cell = project.cell_to_build(project.releases.cell(found.record["cell"]))
    digest = sha256(path)
    passport = {
        "wheel": path.name,
        "sha256": digest,
        "size": path.stat().st_size,
        "name": found.name,
        "version": str(found.version),
        "tags": sorted(map(str, found.tags)),
        "variant": _variant(found),
        "build": found.record,
        "serves": {
            "python": found.pythons.what,
            "torch": found.torches.what,
            "cuda": found.cuda.what,
        },
        "requires": found.metadata.get_all("Requires-Dist") or [],
        "requires_python": found.metadata["Requires-Python"],
        "tests": _tests(path.parent / "tests", digest),
        "rules": [
            {"rule": rule, "passed": not texts, "detail": "; ".join(texts)}
            for rule, texts in audit.findings(found, audit.expectation_of(project, cell)).items()
        ],
    }
    passport_file(path).write_text(json.dumps(passport, indent=2) + "\n")
    return passport


def _variant(found: Wheel) -> dict[str, Any] | None:
    """The variant beside the wheel; None where there is none."""
    variant = variants.of(found)
    if variant is None or not variant.path.is_file():
        return None
    variants.check(variant)
    return {
        "wheel": variant.path.name,
        "sha256": sha256(variant.path),
        "size": variant.path.stat().st_size,
        "label": variant.label,
        "properties": variant.properties,
    }


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
    """What speaks against publishing the wheel."""
    found = [f"{x['rule']}: {x['detail']}" for x in passport["rules"] if not x["passed"]]
    failed = [x["cell"] for x in passport["tests"] if x["failed"]]
    return [*found, *(f"its tests failed in {cell}" for cell in failed)]


def read_passports(dist: Path) -> list[dict[str, Any]]:
    """The passports of the wheels in `dist`."""
    found = []
    for path in wheel.wheels_in(dist):
        file = passport_file(path)
        if not file.is_file():
            raise UserError(
                f"{path.name} has no passport: run `nox -s audit` or `torchwheels audit`"
            )
        passport = json.loads(file.read_text())
        for each in filter(None, (passport, passport.get("variant"))):
            given = dist / each["wheel"]
            if not given.is_file() or each["sha256"] != sha256(given):
                raise UserError(
                    f"the passport of {given.name} is another file's: run the audit again"
                )
        found.append(passport)
    if not found:
        raise UserError(f"there is no wheel in {dist}: build some first")
    return found
