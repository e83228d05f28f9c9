"""The published index of a farm: pages and listings alone, made of rows; the files lie where their releases do.

index.html                   the page: one types what one has, and it says what to install
project/NAME/                a page of each project: versions by targets, what is missing, and why
simple/                      the index of all projects, for installers that choose among variants
cu130/torch2.13/simple/      the index of what works with that CUDA and torch, whatever its label; and so on
farm.json                    what there is: the state of the farm
search.json                  the same for the page
"""

import itertools
import json
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.version import Version

from torchwheels.errors import RefusedError, UserError
from torchwheels.farm import pages
from torchwheels.farm.config import Farm
from torchwheels.farm.published import FILE, Row
from torchwheels.farm.serving import Serving
from torchwheels.farm.wanted import Wanted
from torchwheels.index import site
from torchwheels.system import write_text

ONE_NAME = "an index has one file of a name; where both are wanted, a patch (`patches`) can raise the version of one"
"""What to say of two wheels of one name."""


def merged(
    published: Iterable[Row], new: Iterable[Row], wanted: Iterable[Wanted], lost: Container[str]
) -> list[Row]:
    """The rows that count: a name has one content, the first, until its wheel is built again.

    That is so, too, where newer sources call it the same, unless both are wanted: then the later one is a failure,
    since it would be built in each run.

    Of failures those count whose wheels are wanted; wheels are kept whatever is wanted today.
    """
    current = {(x.project, x.version, x.target.name) for x in wanted}
    wheels: dict[str, Row] = {}
    failures: dict[tuple[str, str, str], Row] = {}
    for row in [*published, *sorted(new, key=lambda x: x["farm"]["built"])]:
        farm = row["farm"]
        key = _key(row)
        if "failed" in row:
            if key in current or key[0] in lost:
                failures[key] = row
            continue
        failures.pop(key, None)
        known = wheels.get(row["wheel"])
        if known is None:
            wheels[row["wheel"]] = row
        elif known["farm"]["build"] < farm["build"] or (
            key in current
            and _is_unwanted(known, current, lost)
            and known["farm"]["tag"] != farm["tag"]
        ):
            farm["replaced"] = [*known["farm"].get("replaced", []), known["farm"]["tag"]]
            wheels[row["wheel"]] = row
        elif _key(known) != key and key in current:
            project, version, _ = _key(known)
            why = f"{project} {version} has published another {row['wheel']}: {ONE_NAME}"
            failures[key] = {"failed": why, "code": RefusedError.code, "farm": farm}
    return [*wheels.values(), *failures.values()]


def _key(row: Row) -> tuple[str, str, str]:
    farm = row["farm"]
    return farm["project"], farm["version"], farm["target"]


def _is_unwanted(row: Row, current: Container[tuple[str, str, str]], lost: Container[str]) -> bool:
    key = _key(row)
    return key not in current and key[0] not in lost


def make(
    farm: Farm, rows: Sequence[Row], wanted: Sequence[Wanted], lost: Mapping[str, str], folder: Path
) -> None:
    """Makes the index in `folder`, which is empty."""
    yanked = {each.name: each.options.yanked for each in farm.projects}
    wheels = [
        {**x, "yanked": site.why_yanked(x["version"], yanked.get(x["farm"]["project"], {}))}
        for x in rows
        if "failed" not in x
    ]
    wheels.sort(key=lambda x: (x["name"], Version(x["version"])))
    serving = Serving()
    site.write_listings(folder, _listings(farm.files, wheels, serving, folder))
    state = json.dumps({"rows": [*rows]}, separators=(",", ":"))
    write_text(folder / FILE, f"{state}\n")
    write_text(folder / "search.json", pages.searched(wheels, serving))
    addresses = {x["wheel"]: _address(farm.files, x, x) for x in wheels}
    pages.write(rows, addresses, wanted, lost, folder)


def _listings(files: str, wheels: Iterable[Row], serving: Serving, folder: Path) -> site.Listings:
    found: site.Listings = {"simple": {}}
    for name, group in itertools.groupby(wheels, key=lambda x: str(x["name"])):
        labelled: list[Row] = []
        plain: list[Row] = []
        rows = [*group]
        built = sorted((x for x in rows if x["variant"]), key=lambda x: int(x["farm"]["build"]))
        variants = {x["variant"]["wheel"]: x for x in built}.values()  # a name has one content
        for row in rows:
            entry = _entry(row, row, files)
            (labelled if site.label(row) else plain).append(entry)
            for each in serving.places(row):
                found.setdefault(f"{each}/simple", {}).setdefault(name, []).append(entry)
        place = folder / "simple" / name
        place.mkdir(parents=True)
        try:
            plain += site.write_variants((x["variant"] for x in variants), place)
            plain += [_entry(x["variant"], x, files) for x in variants]
        except UserError as error:  # which stops no other project
            print(f"torchwheels: {name} has no variants in the index: {error}", flush=True)
        # Of labels, installers would take the one that sorts last, whatever the machine.
        found["simple"][name] = plain or labelled
    return found


def _entry(file: Mapping[str, Any], row: Row, files: str) -> dict[str, Any]:
    """How an index lists a wheel, or its variant."""
    metadata = row["farm"]["metadata"][file["wheel"]]
    return site.entry(file, row, _address(files, file, row), metadata)


def _address(files: str, file: Mapping[str, Any], row: Row) -> str:
    return f"{files.replace('{tag}', quote(row['farm']['tag']))}/{quote(file['wheel'])}"
