"""The build report of a wheel: what it was built from, what it works with, what the audit found, where its tests
passed.

It is stored beside the wheel, not in it: adding the results to the tested file would make it another file.
"""

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from packaging.specifiers import SpecifierSet
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from torchwheels import wheel
from torchwheels.audit import rules
from torchwheels.errors import RefusedError, UserError
from torchwheels.options import Expectation, Project, Target, of_table, preset, releases
from torchwheels.system import as_json, files, read_json, sandbox, sha256, write_text
from torchwheels.wheel import Used, Wheel, finish, variants


def report_file(path: Path) -> Path:
    """Where the build report of a wheel lies."""
    return path.with_suffix(".report.json")


def audited(path: Path, project: Project, torch: str = "") -> dict[str, Any]:
    """The build report of the wheel `path`, for the target that it names, or beside which `torch` another tool has
    built it.
    """
    report: dict[str, Any] = sandbox.call(_audited, path, project, torch)
    known = _known(path) or {"tests": []}
    later = tests_of(path.parent / "tests", report["sha256"])
    earlier = [x for x in known["tests"] if not any(_replaces(run, x) for run in later)]
    of_farm = {"farm": known["farm"]} if "farm" in known else {}  # which no audit can see, either
    return {**report, "tests": earlier + later, **of_farm}


def _audited(path: Path, project: Project, torch: str) -> dict[str, Any]:
    found = wheel.read(path)
    target = releases.recorded(found.record) if found.record else None
    if torch:
        target = rules.target_of(found, torch, project.releases)
    elif not target:
        raise RefusedError(
            f"{path.name} has no build record that says for which target it is: build it with `torchwheels build`, or "
            f"name the torch that it was built beside: `torchwheels audit {path.name} --torch 2.13`"
        )
    options = project.of_target(target, preset(found.name))
    expectation = options.expectation(target, of_others=bool(torch))
    if found.record and not torch:
        # It was promised on the day what it says, whatever the options are by now; those that its own torch does not
        # satisfy are of another day.
        own = SpecifierSet(options.torch) & (found.torch_requirement or SpecifierSet())
        torches = str(own) if options.torch and target.torch in own else ""
        named = (*found.record["architectures"],)
        expectation = replace(expectation, architectures=named, torches=torches)
    return of(found, expectation) | {"options": project.table}


def stamped(path: Path, used: Used, options: Project, target: Target) -> dict[str, Any]:
    """The build report of the wheel `path` out of a container, once that says of its build what we know.

    Its variant lies beside it then. This is for `sandbox.call`.
    """
    found = finish.stamp(wheel.read(path), used)
    variants.write(found)
    return of(found, options.expectation(target))


def of(found: Wheel, expectation: Expectation) -> dict[str, Any]:
    """The build report of a wheel of which that is expected."""
    path = found.path
    findings = rules.findings(found, expectation)
    return {
        "wheel": path.name,
        "sha256": sha256(path),
        "size": path.stat().st_size,
        "name": found.name,
        "version": str(found.version),
        "tags": sorted(map(str, found.tags)),
        "variant": variant(found),
        "build": found.record,
        "works_with": {"python": found.pythons, "torch": found.torches, "cuda": found.cuda},
        "requires": found.metadata.get_all("Requires-Dist") or [],
        "requires_python": found.metadata["Requires-Python"],
        "summary": found.metadata["Summary"],
        "rules": [
            {"rule": rule, "passed": not texts, "detail": "; ".join(texts)}
            for rule, texts in findings.items()
        ],
        "options": expectation.options.table,
        "tests": [],
    }


def write_report(path: Path, project: Project) -> dict[str, Any]:
    """Audits the wheel `path`, writes its build report, and returns that."""
    report = audited(path, project)
    write(report, path)
    return report


def variant(found: Wheel) -> dict[str, Any] | None:
    """The report's entry of the wheel's variant; None if there is none."""
    other = variants.of(found)
    if other is None or not other.path.is_file() or not variants.check(other, found.path):
        return None
    return {
        "wheel": other.path.name,
        "sha256": sha256(other.path),
        "size": other.path.stat().st_size,
        "label": other.label,
        "properties": other.properties,
    }


def write(report: dict[str, Any], path: Path) -> None:
    """Puts the build report of the wheel `path` beside it."""
    write_text(report_file(path), as_json(report))


def promised(path: Path, own: Project) -> Project:
    """The options that the wheel is audited by: those of its own project.

    `own` are those at hand. Where the wheel is of another project, its build report has what it was built with.
    """
    try:
        name = parse_wheel_filename(path.name)[0]
    except InvalidWheelFilename:
        return own  # which the audit reports
    if own.file and own.name in ("", name):
        return own
    known = {}
    for key, value in ((_known(path) or {}).get("options") or {}).items():
        with contextlib.suppress(UserError):  # of an option that another version of torchwheels has
            of_table({key: value}, "")
            known[key] = value
    return of_table(known, f"{report_file(path)}: options")


def _known(path: Path) -> dict[str, Any] | None:
    """The build report that lies beside the wheel, where it is of this very file."""
    if not os.path.lexists(report_file(path)):
        return None
    report = _whole(report_file(path), _Report, "build report")
    own = {"wheel": path.name, "sha256": sha256(path)}
    return report if own.items() <= report.items() else None


def tests_of(folder: Path, digest: str) -> list[dict[str, Any]]:
    """The records of the test runs of this very file."""
    named = [
        x for x in files.own_files(folder) if x.parent.parent == folder and x.suffix == ".json"
    ]
    records = (_whole(x, _Record, "record of tests") for x in named)
    return [x for x in records if x["sha256"] == digest]


def _replaces(later: Mapping[str, Any], run: Mapping[str, Any]) -> bool:
    """Whether a run of a file's tests takes the place of an earlier one, whose device nobody may know.

    Where nobody knows its own, a command of the project's own has run, or it died: if it passed, it is of all devices.
    """
    if "sha256" not in run or later["target"] != run["target"]:
        return False
    is_of_all = later["device"] == "unknown" and not later["failed"]
    return is_of_all or run["device"] in (later["device"], "unknown")


class _Run(msgspec.Struct):
    target: str
    device: str
    passed: int
    failed: int


class _Record(_Run):
    sha256: str


class _Report(msgspec.Struct):
    wheel: str
    sha256: str
    tests: list[_Run]
    options: dict[str, Any] | None = None


def _whole(file: Path, kind: type[msgspec.Struct], name: str) -> dict[str, Any]:
    """What a file says that has all of `kind`; an error where it has not: it may have said that tests failed."""
    try:
        said: dict[str, Any] = read_json(file)
        msgspec.convert(said, kind)
    except (OSError, ValueError):
        why = f"is no whole {name}: delete it, and run the tests again"
        raise RefusedError(f"{file} {why}") from None
    return said


def problems(report: dict[str, Any]) -> list[str]:
    """The reasons not to publish the wheel.

    A run that was added later, with a newer torch, has no hash: it is shown, but is no reason.
    """
    broken: dict[str, list[str]] = {}  # many rules say the same of a wheel without libraries
    for x in report["rules"]:
        if not x["passed"]:
            broken.setdefault(x["detail"], []).append(x["rule"])
    found = [f"{', '.join(names)}: {detail}" for detail, names in broken.items()]
    failed = [x["target"] for x in report["tests"] if x["failed"] and "sha256" in x]
    return [*found, *(f"its tests failed in {target}" for target in failed)]


def refuse(reports: Iterable[dict[str, Any]]) -> None:
    """Raises an error that says of each wheel what speaks against publishing it."""
    refused = {x["wheel"]: found for x in reports if (found := problems(x))}
    said = ["\n  ".join([f"{x} is not fit to publish:", *found]) for x, found in refused.items()]
    if said:
        raise RefusedError("\n".join(said))


def read_reports(dist: Path, own: Project) -> list[dict[str, Any]]:
    """The build reports of the wheels in `dist`, all fit to publish.

    Each wheel is audited again: anybody who can write into `dist` could have written its report. Of that only the
    tests are taken, which no audit can see.
    """
    wheels = wheel.wheels_in(dist)
    # As a flat copy of a site has them: left out in silence, they would be gone from the next site.
    for path in sorted({*dist.glob("*.whl")} - {*wheels}):
        raise RefusedError(f"{path} is a wheel's variant: it belongs into {dist / variants.FOLDER}")
    found = [write_report(path, promised(path, own)) for path in wheels]
    if not found:
        raise UserError(f"there is no wheel in {dist}: build some first")
    refuse(found)
    return found
