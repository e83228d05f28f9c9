"""Writes the static package indices that pip and uv install from: PEP 503, 658, 691, 700, 714."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import quote

from packaging.version import Version
from simple_repository.model import File, Meta, ProjectDetail, ProjectList, ProjectListElement
from simple_repository.serializer import SerializerHtmlV1, SerializerJsonV1

from service import ServiceError, wheels
from service.check import Wheel
from service.matrix import RELEASE

PROJECT = "extops"


def variant_of(wheel: Wheel) -> str:
    """The name of the wheel's variant, by its label, which decides what installers make of it."""
    return wheels.label(wheel.path) or RELEASE


def metadata(wheel: Wheel) -> bytes:
    """The wheel's METADATA."""
    return wheel.files[f"{wheel.dist_info}/METADATA"]


def read_all(dist: Path) -> list[Wheel]:
    """The wheels in `dist`, oldest version first."""
    found = [Wheel(path) for path in dist.glob(f"{PROJECT}-*.whl")]
    if not found:
        raise ServiceError(f"there is no wheel in {dist}: build some with `nox -s build`")
    return sorted(found, key=lambda wheel: Version(wheel.version))


def index_path(variant: str) -> str:
    """Where the wheels of a variant are listed, from the top of the site."""
    return "simple/" if variant == RELEASE else f"{variant}/simple/"


def indices(found: Sequence[Wheel]) -> dict[str, list[Wheel]]:
    """The wheels of each index, by its path.

    `simple/` holds the release wheel alone: installers prefer a version with a label to the same
    one without, and of two labels the one that sorts last, so that among all wheels a plain `pip
    install extops` would get that of the newest CUDA, whatever the machine. Only where there is no
    release wheel does it hold all.
    """
    listed: dict[str, list[Wheel]] = {}
    for wheel in found:
        listed.setdefault(index_path(variant_of(wheel)), []).append(wheel)
    listed.setdefault(index_path(RELEASE), list(found))
    return listed


def write_wheels(found: Iterable[Wheel], folder: Path) -> None:
    """Copies the wheels, with the metadata of each beside it (PEP 658) and its passport."""
    folder.mkdir()
    for wheel in found:
        shutil.copyfile(wheel.path, folder / wheel.path.name)
        (folder / f"{wheel.path.name}.metadata").write_bytes(metadata(wheel))
        passport = wheels.passport(wheel.path)
        if passport.is_file():
            shutil.copyfile(passport, folder / passport.name)


def entry(wheel: Wheel, folder: str) -> File:
    """The wheel as the index lists it; `folder` is the way to the wheels from the listing."""
    return File(
        filename=wheel.path.name,
        url=folder + quote(wheel.path.name),
        hashes={"sha256": hashlib.sha256(wheel.path.read_bytes()).hexdigest()},
        requires_python=wheel.metadata["Requires-Python"],
        dist_info_metadata={"sha256": hashlib.sha256(metadata(wheel)).hexdigest()},
        size=wheel.path.stat().st_size,
    )


def write_index(found: Iterable[Wheel], site: Path, path: str) -> None:
    """Writes one index: its list of projects and the listing of the one (PEP 503, 691, 700, 714).

    A static server cannot choose between HTML and JSON by what a client accepts: installers get the
    HTML, and the JSON lies beside it.
    """
    meta = Meta("1.1")
    up = "../" * (path.count("/") + 1)
    projects = ProjectList(meta, frozenset([ProjectListElement(PROJECT)]))
    detail = ProjectDetail(meta, PROJECT, tuple(entry(wheel, f"{up}wheels/") for wheel in found))
    folder = site / path / PROJECT
    folder.mkdir(parents=True)
    for name, serializer in (
        ("index.html", SerializerHtmlV1()),
        ("index.json", SerializerJsonV1()),
    ):
        (folder.parent / name).write_text(serializer.serialize_project_list(projects))
        (folder / name).write_text(serializer.serialize_project_page(detail))
