"""The folder `dist`: finished wheels, which are not built again from the same inputs, and refused ones."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from torchwheels import sources, wheel
from torchwheels.audit import reports
from torchwheels.errors import RefusedError, UserError
from torchwheels.options import Project, Target, indexes, minor
from torchwheels.sources import Fetched
from torchwheels.system import MARK, as_json, files, marked, read_json, sandbox, sha256, write_text
from torchwheels.wheel import variants


def inputs(project: Project, target: Target, source: Fetched, place: str) -> str:
    """A hash of all inputs of the wheel of `target`, if it is built in `place`."""
    file = project.file or Path()
    patches = [file.parent / patch for patch in project.patches]
    variables = ("TORCHWHEELS_TORCH_INDEX", "SOURCE_DATE_EPOCH")
    said = [
        source.origin,
        sources.versions(source.folder),
        [*sources.outside(source.folder)],
        [project.table, project.name],
        [sha256(patch) for patch in patches if patch.is_file()],
        [target.name, target.torch, *project.architectures(target)],
        place,
        indexes.choices(),
        {name: os.environ.get(name) for name in variables},
        sources.hash_of_folder(Path(__file__).parents[1]),
    ]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


_NOTE = "builds/{:.16}.json"


def find(dist: Path, digest: str) -> Path | None:
    """The wheel in `dist` that was built of these inputs, unless it has changed since."""
    try:
        said = read_json(dist / _NOTE.format(digest))
        path = dist / Path(said["wheel"]).name
        variant = _variant_of(path)
        is_whole = sha256(path) == said["sha256"] and (variant is None or variant.is_file())
        return path if is_whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _variant_of(path: Path) -> Path | None:
    """The variant that a wheel's report names."""
    try:
        name: str = read_json(reports.report_file(path))["variant"]["wheel"]
        return path.parent / variants.FOLDER / Path(name).name
    except (OSError, ValueError, KeyError, TypeError):  # nobody says that there was one
        return None


def note(dist: Path, digest: str, path: Path) -> None:
    """Remembers that the wheel `path` was built of these inputs."""
    write_text(dist / _NOTE.format(digest), as_json({"wheel": path.name, "sha256": sha256(path)}))


KEPT = "\n  the wheel is kept as "
"""What the message of a refused wheel goes on with, before its path."""


@contextlib.contextmanager
def kept_if_refused(finished: Path, dist: Path) -> Iterator[None]:
    """Keeps a refused wheel in `dist` for inspection, under a name that no installer accepts."""
    refused = marked(dist) / f"{finished.name}.refused"
    refused.unlink(missing_ok=True)
    try:
        yield
    except UserError as error:
        copy_whole(finished, refused)
        raise type(error)(f"{error}{KEPT}{refused}") from None


def forget_refused(dist: Path, target: Target, name: str) -> None:
    """Removes the refused wheels that earlier builds of the project `name` for `target` left."""
    version = rf"[^-+]+(\+{target.label}(\.torch{minor(target.torch)})?)?"
    abi = rf"(abi3|none|cp{target.python.replace('.', '')})"
    project = "[-_.]".join(map(re.escape, name.split("-")))
    form = re.compile(rf"{project}-{version}-[^-]+-{abi}-[^-]+", re.IGNORECASE)
    for file in dist.glob("*.whl.refused"):
        if form.fullmatch(file.name):
            file.unlink()


_OF_A_BUILD = "target", "torch"


def publish(finished: Path, dist: Path) -> Path:
    """Copies a wheel into `dist`, and its build report and its variant, which lie beside it; returns its path there.

    It takes the place of an earlier one of its target, and of no other.
    """
    there, report = marked(dist) / finished.name, read_json(reports.report_file(finished))
    own = [report["build"][key] for key in _OF_A_BUILD]
    known = _built_for(there) if there.exists() else own
    if known[:1] != own[:1]:
        of = known[0] if known else "nobody knows what"
        raise RefusedError(
            f"{there} is there already, built for {of}, and a name has one content: delete the wheel first, or leave "
            f"{own[0]} out of the targets, which the other may serve, too"
        )
    # Of changed sources: its label, and so its name, may be another.
    same = [x for x in wheel.wheels_in(dist) if x != there and _plain(x) == _plain(there)]
    earlier = [x for x in same if _built_for(x) == own]
    replaced = {*filter(None, map(_variant_of, earlier))}
    for variant in finished.parent.glob(f"{variants.FOLDER}/*.whl"):
        place = dist / variants.FOLDER / variant.name
        torch, other = (
            sandbox.call(variants.one_torch, x) if place.exists() else "" for x in (variant, place)
        )
        if torch != other and place not in replaced:
            reports.write({**report, "variant": None}, finished)
            print(
                f"torchwheels: {finished.name} has no variant: {place} is there already, of a wheel for another torch, "
                f"and a name has one content: the target {own[0]}-torch{torch} has one of its own",
                flush=True,
            )
        else:
            copy_whole(variant, place)
            replaced.discard(place)
    for each in (*earlier, *map(reports.report_file, earlier), *replaced):
        each.unlink(missing_ok=True)
    copy_whole(reports.report_file(finished), dist / reports.report_file(finished).name)
    return copy_whole(finished, there)


def _plain(path: Path) -> str:
    """What a wheel is of: its project and version, whatever torch its label names."""
    return re.sub(r"\.torch[\d.]+$", "", "-".join(path.name.split("-")[:2]))


_WHEEL = r"[^/-]+(-[^/-]+){4,6}"
_OF_DIST = re.compile(
    rf"(?P<anew>(.+/)?{_WHEEL}\.(report\.json|whl\.metadata|whl\.refused)|[^/]+(-[^/]+){{2,}}\.failed\.json|"
    rf"builds/[0-9a-f]{{16}}\.json|tests/[^/]+/[0-9a-f]{{12}}-[^/]+\.json)|(.+/)?{_WHEEL}\.whl|docs/.*"
)


def merge(parts: Iterable[Path], dist: Path) -> list[Path]:
    """Copies what builds left in several folders into `dist`, where a name has one content; returns the copies.

    Reports and records are of the last folder, but tests that failed in one of them have failed. Nothing else is
    replaced, and what else somebody has there stays.
    """
    marked(dist)
    copied: dict[Path, Path] = {}
    for part in parts:
        if not part.is_dir():
            raise UserError(f"there is no folder {part}: name those in which builds left wheels")
        for folder in ("docs", "tests"):
            files.own_files(part / folder)
        for file in (x for x in sorted(part.rglob("*")) if not x.is_dir() and x.name != MARK):
            name = file.relative_to(part)
            if not (known := _OF_DIST.fullmatch(str(name))):
                why = "is left out: it is no wheel, and no record or documentation of one"
                print(f"torchwheels: {file} {why}", file=sys.stderr)
                continue
            if not file.is_file():
                raise UserError(f"{file} is no file, or a link to none: take it away, or fetch it")
            there = copied.get(dist / name, dist / name)
            anew = known["anew"] and there.is_file()
            if not anew and there.exists() and (there.is_dir() or sha256(there) != sha256(file)):
                raise RefusedError(
                    f"{file} has the name of a file with another content, {there}: a name has one content, so delete "
                    "the older one, or give one of their targets a label of its own, or leave it out"
                )
            if not (dist / name in copied and _failed(there)):
                copied[dist / name] = file
    return [copy_whole(file, there) for there, file in copied.items()]


def _failed(record: Path) -> bool:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return record.parent.parent.name == "tests" and bool(read_json(record)["failed"])
    return False


def _built_for(path: Path) -> list[str]:
    """The target and the torch that a wheel was built for; nothing where another tool has built it, or it is none."""
    with contextlib.suppress(UserError):
        return [*sandbox.call(_target_and_torch, path)]
    return []


def _target_and_torch(path: Path) -> list[str]:
    record = wheel.read(path).record or {}
    return [str(record[key]) for key in _OF_A_BUILD if key in record]


def copy_whole(finished: Path, target: Path) -> Path:
    """Copies `finished` to `target`, where it appears whole or not at all."""
    with files.whole(target) as file:
        shutil.copyfile(finished, file)
    return target
