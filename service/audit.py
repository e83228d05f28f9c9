"""Judges wheels by the rules of `service.check`, and writes a passport beside each.

`python -m service.audit [WHEEL...]`, by default all of dist/. The passport says what the wheel was
built from and with, what each rule found, and where the tests of exactly these files passed: those
are the records that test sessions leave in dist/tests/<cell>/. They cannot be inside the wheel: it
is the finished file that is tested, and one with the results in it would be another.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from service import ServiceError, errors_for_the_user, sbom, wheels
from service.check import Wheel, findings
from service.matrix import load


def passport(wheel: Wheel, tests: list[dict[str, Any]]) -> dict[str, Any]:
    """All that is known of a wheel; `tests` are the test runs of its files."""
    variant = load().variant(wheel.info["variant"])
    data = wheel.path.read_bytes()
    return {
        "wheel": wheel.path.name,
        "sha256": _sha256(data),
        "size": len(data),
        "version": wheel.version,
        "variant": variant.name,
        "tag": f"{wheel.abi}-{wheel.platform}",
        "commit": wheel.info["commit"],
        "torch_headers": wheel.info["torch_headers"],
        "cuda": wheel.info["cuda"],
        "cxx": wheel.info["cxx"],
        "minimum_torch": sbom.minimum_torch(wheel.metadata),
        "requires_python": wheel.metadata["Requires-Python"],
        "architectures": wheel.info["architectures"],
        "libraries": {name: _sha256(code) for name, code in wheel.libraries.items()},
        "tests": tests,
        "rules": [
            {"rule": rule, "passed": not problems, "detail": "; ".join(problems)}
            for rule, problems in findings(wheel, variant).items()
        ],
    }


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def tests_of(wheel: Wheel, records: Path) -> list[dict[str, Any]]:
    """The test runs of these very files, in the order of the matrix."""
    found = []
    for cell in load().cells:
        for path in sorted((records / cell.name).glob("*.json")):
            try:
                test = json.loads(path.read_text())
                if test.pop("contents") == wheel.contents:
                    found.append({"cell": cell.name, **test})
            except (ValueError, KeyError, TypeError):
                raise ServiceError(
                    f"{path} is no whole record of tests: delete it, or run "
                    f"`nox -s test-{cell.name}` again"
                ) from None
    return found


def audit(path: Path) -> list[str]:
    """Writes the wheel's passport, prints what is in it, and returns what is wrong."""
    wheel, problems = Wheel(path), []
    try:
        tests = tests_of(wheel, path.parent / wheels.TESTS)
    except ServiceError as error:
        tests, problems = [], [str(error)]
    found = passport(wheel, tests)
    wheels.passport(path).write_text(json.dumps(found, indent=2) + "\n")
    print(f"{path.name} ({found['size'] / 1e6:.2f} MB, sha256 {found['sha256']})")
    for rule in found["rules"]:
        print(
            f"  {'ok  ' if rule['passed'] else 'FAIL'}  {rule['rule']}  {rule['detail']}".rstrip()
        )
    if found["tests"]:
        print(tests_table(found))
    failed = [test["cell"] for test in found["tests"] if test["failed"]]
    problems += [rule["detail"] for rule in found["rules"] if not rule["passed"]]
    return [*problems, *(f"its tests failed in {cell}" for cell in failed)]


def tests_table(passport: dict[str, Any]) -> str:
    """The test runs of a passport, as a Markdown table."""
    columns = ("cell", "Python", "torch", "device", "passed", "failed", "skipped")
    rows = [columns, ["---"] * len(columns)]
    rows += [[str(test[name.lower()]) for name in columns] for test in passport["tests"]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m service.audit", description=__doc__)
    parser.add_argument("wheels", nargs="*", type=Path, help="which (default: all of dist/)")
    paths = parser.parse_args().wheels or sorted(wheels.DIST.glob("*.whl"))
    with errors_for_the_user():
        if not paths:
            raise ServiceError(f"there is no wheel in {wheels.DIST}: build one with `nox -s build`")
        bad = []
        for path in paths:
            try:
                if problems := audit(path):
                    bad.append(f"{path.name}: {'; '.join(problems)}")
            except ServiceError as error:
                bad.append(str(error))
    if bad:
        sys.exit("\n".join(f"extops: not fit to publish: {line}" for line in bad))
    print(f"extops: {len(paths)} of {len(paths)} wheels are fit to publish")


if __name__ == "__main__":
    main()
