"""`torchwheels farm`: what is missing, its builds, and the index of all."""

import argparse
import contextlib
import difflib
import fnmatch
import itertools
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchwheels.audit import reports
from torchwheels.errors import RefusedError, UserError
from torchwheels.farm import building, config, listing, published
from torchwheels.farm.published import Known, Row
from torchwheels.farm.wanted import Wanted, of_farm
from torchwheels.index import kept, site
from torchwheels.options import numbers
from torchwheels.run import engines
from torchwheels.system import files, output, sha256

_MOST_JOBS = 256  # of a matrix on GitHub


def add(add_command: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds the commands."""

    def add_to_farm(*given: Any, of_builds: bool = False) -> argparse.ArgumentParser:
        command = add_command(*given)
        said = "the file of the farm (default: farm.toml)"
        command.add_argument("--farm", type=Path, default="farm.toml", help=said)
        if of_builds:
            said = "a project, or 'PROJECT VERSION TARGET': names or patterns (default: all)"
            command.add_argument("--only", default="*", help=said)
            said = "again what there is of it, or has failed: a name or a pattern (repeatable)"
            words: dict[str, Any] = {"metavar": "PROJECT", "action": "append", "default": []}
            command.add_argument("--rebuild", help=said, **words)
        return command

    command = add_to_farm(_missing, "missing", "list what is not published yet", of_builds=True)
    said = "for the matrix of CI; the table is in the log"
    command.add_argument("--json", action="store_true", help=said)
    given = "build", "build what is not published yet", "--dist", "--backend"
    command = add_to_farm(_build, *given, of_builds=True)
    said = "which part of it: 0/3, 1/3 or 2/3"
    command.add_argument("--shard", type=_shard, default=(0, 1), metavar="I/N", help=said)
    command.add_argument("--minutes", type=_minutes, help="stop then; the next run goes on")
    said = "make the index and its pages, of reports alone"
    command = add_to_farm(_index, "index", said, "--site")
    said = "folders of builds (default: dist)"
    command.add_argument("dist", type=Path, nargs="*", default=[Path("dist")], help=said)
    said = "a folder to lay out what is new in: a folder for each tag"
    command.add_argument("--release", type=Path, help=said)
    said = "print a JSON schema of the file, for editors"
    add_command(lambda _: print(json.dumps(config.schema(), indent=2)), "schema", said)


def _farm(given: argparse.Namespace) -> config.Farm:
    """The farm, in which there is a project of each name that an option asks for."""
    farm = config.load(given.farm)
    names = [x.name for x in farm.projects]
    asked = [("--only", given.only.partition(" ")[0]), *(("--rebuild", x) for x in given.rebuild)]
    for option, name in asked:
        if not fnmatch.filter(names, name):
            near = difflib.get_close_matches(name, names, 1, cutoff=0.0)[0]
            raise UserError(
                f"`{option}` names {name!r}, and {given.farm} has no such project: did you mean {near}?"
            )
    return farm


def _missing(given: argparse.Namespace) -> None:
    farm = _farm(given)
    wanted, lost = of_farm(farm, given.only)
    known = Known(published.without(published.read(farm.index), given.rebuild))
    found = published.missing(wanted, known)
    rows = [(x.project, x.version, x.target.name, x.digest, "missing") for x in found]
    for each in wanted:
        if not known.wheel(each) and (failure := known.failure(each)):
            said = f"failed {failure['farm']['built'][:10]}: {failure['failed']}"
            rows.append((each.project, each.version, each.target.name, each.digest, said))
    rows += [(name, "?", "?", "?", why) for name, why in lost.items()]
    head = ("project", "version", "target", "digest", "")
    lines = [*output.in_columns([head, *rows])] if rows else []
    lines.append(f"torchwheels: {len(found)} of {len(wanted)} wheels are missing")
    print(*lines, sep="\n", file=sys.stderr if given.json else sys.stdout)
    if given.json:
        print(json.dumps([_job(each) for each in found[:_MOST_JOBS]]))


def _job(wanted: Wanted) -> dict[str, str]:
    """What CI's matrix says of a wheel. What pip has no compiler for is built in an image."""
    target = wanted.target
    of_image = target.cuda is not None and numbers(target.cuda.version)[0] < 13
    return {
        "project": wanted.project,
        "version": wanted.version,
        "target": target.name,
        "digest": wanted.digest,
        "python": target.python,
        "runner": target.machine.runner,
        "backend": "docker" if of_image else "local",
    }


def _build(given: argparse.Namespace) -> None:
    farm = _farm(given)
    files.check_writable(given.dist, "--dist")
    wanted, _ = of_farm(farm, given.only)
    rows = published.read(farm.index)
    hashes = {x.get("sha256") for x in rows}
    here = [x for x in published.in_folder(given.dist) if x.get("sha256") not in hashes]
    known = Known([*published.without(rows, given.rebuild), *here])
    index, count = given.shard
    lacking = published.missing(wanted, known)
    found = [x for x in lacking if zlib.crc32(x.key.encode()) % count == index]
    engine = engines.of_backend(given.backend, "a project of the farm")
    seconds = given.minutes * 60 if given.minutes else float("inf")
    run = building.Run(given.dist, engine, seconds, farm.cache, bool(given.rebuild))
    left = building.build(found, rows, known, run)
    gone = [*building.overwritten(wanted, hashes, known, given.dist)]
    done = sum(known.wheel(x) is not None and x not in gone for x in found)
    failed = len(found) - len(left) - done
    said = f", {failed} failed" if failed else ""
    print(f"torchwheels: {done} of {len(found)} wheels are done{said}")


def _shard(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/([1-9]\d*)", text)
    if not found or int(found[1]) >= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r}, but a part is expected: 0/3, 1/3 or 2/3")
    return int(found[1]), int(found[2])


def _minutes(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r}, but a positive number is expected")


def _index(given: argparse.Namespace) -> None:
    farm = config.load(given.farm)
    if given.release:
        release, own = (Path(os.path.realpath(x)) for x in (given.release, given.site))
        if own in (release, *release.parents):
            raise UserError(
                f"`--release` names {given.release}, a part of the index {given.site}: name a folder beside it"
            )
        files.check_writable(given.release, "--release")
    wanted, lost = of_farm(farm)
    for folder in given.dist:
        if not folder.is_dir():  # as where nothing had to be built
            print(f"torchwheels: there is no folder {folder}: it is left out", file=sys.stderr)
    built = {folder: [*published.in_folder(folder)] for folder in given.dist}
    new = itertools.chain.from_iterable(built.values())
    with site.replaced(given.site, *given.dist) as folder:  # what it says stays so until then
        before = published.read(farm.index)
        rows = listing.merged(before, new, wanted, lost)
        for dist, found in built.items() if given.release else ():
            _lay_out([x for x in found if x in rows and x not in before], dist, given.release)
        listing.make(farm, rows, wanted, lost, folder)
    wheels = sum("failed" not in x for x in rows)
    print(f"torchwheels: made {given.site} of {wheels} wheels and {len(rows) - wheels} failures")


def _lay_out(rows: Sequence[Row], dist: Path, release: Path) -> None:
    """Puts the files of new wheels into the folders of their tags: the wheels, what lies beside them, their reports."""
    for row in (x for x in rows if "failed" not in x):
        folder = release / row["farm"]["tag"]
        for path in published.files_of(row, dist):
            for file in (path, path.with_name(f"{path.name}.metadata")):
                there = folder / file.name
                if there.exists() and sha256(there) != sha256(file):
                    raise RefusedError(
                        f"{there} is there already, with another content, and what is published keeps its own: take it "
                        "away if nobody has it, or name another folder (`--release`)"
                    )
                kept.copy_whole(file, there)
        report = reports.report_file(dist / row["wheel"])
        kept.copy_whole(report, folder / report.name)
