"""What a farm has: what its published index says, and nothing else. A row of it is of one wheel, or of a failure."""

import fnmatch
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import httpx2
import msgspec
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from torchwheels.audit import reports
from torchwheels.errors import UserError
from torchwheels.farm.wanted import Wanted
from torchwheels.index import site
from torchwheels.options import minor
from torchwheels.system import as_json, marked, read_json, sha256, write_text
from torchwheels.wheel import variants

FILE = "farm.json"
FAILED = ".failed.json"
"""How the name ends of a file that says why there is no wheel."""
# What reading raises where something else is there.
_NO_DATA = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
_TIMEOUT = 60  # seconds without an answer

Row: TypeAlias = dict[str, Any]

# Each becomes a part of a path: a row may be of whoever could write a build report.
_Name: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^(?!\.\.?$)[^/\x00]+$")]
_TargetName: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^\d[\dt.]*-[a-z0-9]+(-[\w.]+)*$")]
_Tag: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[^-]+-[^-]+-[^-]+$")]


class _Told(msgspec.Struct):
    project: _Name
    version: str
    target: _TargetName
    digest: str
    build: int
    tag: _Name
    built: str
    metadata: dict[str, str] = {}
    replaced: list[str] = []
    """The tags of the releases whose places it took: a tag is given once."""
    settings: str = ""


class _Variant(msgspec.Struct):
    wheel: _Name
    sha256: str
    size: int
    label: str
    properties: dict[str, Any]


class _Build(msgspec.Struct):
    target: _TargetName
    torch: str
    cuda: str | None
    architectures: list[str]


class _Wheel(msgspec.Struct):
    wheel: _Name
    sha256: str
    size: int
    name: _Name
    version: str
    tags: Annotated[list[_Tag], msgspec.Meta(min_length=1)]
    variant: _Variant | None
    build: _Build
    works_with: dict[str, str | None]
    requires: list[str]
    requires_python: str | None
    summary: str | None
    tests: list[dict[str, Any]]
    farm: _Told


class _Failure(msgspec.Struct):
    failed: str
    code: int
    farm: _Told


def checked(row: Row) -> Row:
    """The row, if all is in it that an index is made of; ValueError says what is not."""
    json.dumps(row, ensure_ascii=False).encode()  # JSON may hold what is no text
    if "failed" in row:
        msgspec.convert(row, _Failure)
        return row
    found = msgspec.convert(row, _Wheel)
    for said in (found.version, found.build.torch):
        Version(said)
    for pythons in (found.requires_python, found.works_with["python"]):
        SpecifierSet(pythons or "")
    for required in found.requires:
        Requirement(required)
    named = {found.wheel} | ({found.variant.wheel} if found.variant else set())
    if lacking := named - found.farm.metadata.keys():
        raise ValueError(f"it has no metadata of {min(lacking)}")
    return row


def read(place: str) -> list[Row]:
    """The rows of the published index at an address or in a folder; none where nothing is there yet."""
    address = f"{place.rstrip('/')}/{FILE}"
    try:
        if place.startswith(("http://", "https://")):
            answer = httpx2.get(address, timeout=_TIMEOUT, follow_redirects=True)
            if answer.status_code == 404:
                why = "is not there (404): nothing counts as published yet"
                print(f"torchwheels: {address} {why}", file=sys.stderr)
                return []
            said = answer.raise_for_status().json()
        else:
            said = read_json(Path(address)) if Path(address).exists() else {"rows": []}
        found: list[Row] = [checked(x) for x in said["rows"]]
    except (httpx2.HTTPError, httpx2.InvalidURL, ImportError, OSError, *_NO_DATA) as error:
        raise UserError(
            f"{address} does not say which wheels there are ({error}), and without that all would be built again: "
            "check the address and the network"
        ) from None
    return found


def in_folder(dist: Path) -> Iterator[Row]:
    """The rows of what was built into `dist`. A file that is not whole is left out: it stops no other."""
    for file in [*sorted(dist.glob("*.report.json")), *sorted(dist.glob(f"*{FAILED}"))]:
        try:
            found = read_json(file)
            if "farm" not in found:
                continue
            row = checked(found if "failed" in found else row_of(found))
            if "failed" not in row:
                _check(found, row, dist)
            yield row
        except (UserError, OSError, ValueError, KeyError, TypeError) as error:
            print(f"torchwheels: {file} is left out: {error}", file=sys.stderr)


def _check(report: Row, row: Row, dist: Path) -> None:
    """Raises ValueError where a file in `dist` is another one, or something speaks against publishing it by now."""
    for path, digest in files_of(row, dist).items():
        metadata = path.with_name(f"{path.name}.metadata")
        known = row["farm"]["metadata"][path.name]
        for file, expected in ((path, digest), (metadata, known)):
            if sha256(file) != expected:
                raise ValueError(f"{file.name} is another file")
    runs = reports.tests_of(dist / "tests", row["sha256"]) or report["tests"]
    if why := reports.problems({**report, "tests": runs}):
        raise ValueError("; ".join(why))


def files_of(row: Row, dist: Path) -> dict[Path, str]:
    """A wheel and its variant in `dist`, with their hashes."""
    found = {dist / row["wheel"]: row["sha256"]}
    if variant := row["variant"]:
        found[dist / variants.FOLDER / variant["wheel"]] = variant["sha256"]
    return found


def row_of(report: Row) -> Row:
    """What the index keeps of a build report."""
    row = {key: report[key] for key in _Wheel.__struct_fields__}
    return {**row, "build": {key: report["build"][key] for key in _Build.__struct_fields__}}


def note_failure(told: Row, error: Exception, dist: Path) -> Row:
    """Says in `dist` why there is no wheel."""
    row = {"failed": str(error), "code": getattr(error, "code", 1), "farm": told}
    name = "-".join(told[key].replace("/", "-") for key in ("project", "version", "target"))
    write_text(marked(dist) / f"{name}{FAILED}", as_json(row))
    return row


class Known:
    """The rows that count, found by what they are of."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self.wheels: dict[tuple[str, str], dict[str, Row]] = {}
        self.failures: dict[tuple[str, str, str], Row] = {}
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        """One more, later than the others."""
        project, digest, target = (row["farm"][key] for key in ("project", "digest", "target"))
        if "failed" in row:
            self.failures[project, digest, target] = row
        else:
            self.wheels.setdefault((project, digest), {})[target] = row

    def wheel(self, wanted: Wanted) -> Row | None:
        """That wheel, or one that serves its target as well."""
        rows, target = self.wheels.get((wanted.project, wanted.digest), {}), wanted.target
        own = rows.get(target.name)
        if own and minor(own["build"]["torch"]) == minor(target.torch):  # else of an earlier table
            return own
        return next((x for x in rows.values() if site.works_with(x, target)), None)

    def failure(self, wanted: Wanted) -> Row | None:
        """Why it could not be built of these very sources and options."""
        found = self.failures.get((wanted.project, wanted.digest, wanted.target.name))
        tried = found and found["farm"].get("settings")  # of an earlier torchwheels, nobody knows
        return found if not tried or tried == wanted.settings else None


def missing(wanted: Sequence[Wanted], known: Known) -> list[Wanted]:
    """What is not there, but what cannot be built: what failed for another reason may have lacked a network."""
    again = None, UserError.code
    return [
        x for x in wanted if not known.wheel(x) and (known.failure(x) or {}).get("code") in again
    ]


def without(rows: Iterable[Row], patterns: Sequence[str]) -> list[Row]:
    """The rows but those of what shall be built again: of projects that a pattern names."""
    return [
        x for x in rows if not any(fnmatch.fnmatchcase(x["farm"]["project"], p) for p in patterns)
    ]
