"""The rooms of the sources: which of them knows which, and by what."""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchwheels

PACKAGE = Path(torchwheels.__file__).parent
# From the ground up: each imports what stands before it.
ORDER = (
    "errors", "system", "options", "environments", "sources", "wheel", "audit", "index", "build", "run", "farm", "cli",
)  # fmt: skip
ABOVE_ALL = ("__init__", "__main__", "sessions")
# Others are a file each; of one that was a folder, Python leaves what it compiled.
FOLDERS = [x for x in ORDER if (PACKAGE / x / "__init__.py").is_file()]


def files() -> Iterator[tuple[str, Path]]:
    """Each file that the tool imports, and its room; the wrappers are programs of a build's environment."""
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE)
        if "wrappers" not in place.parts:
            yield (place.parts[0] if len(place.parts) > 1 else place.stem), path


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """What a file imports of torchwheels: the module, and what of it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not any(x.name.startswith("torchwheels") for x in node.names), path
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, path
            if str(node.module).partition(".")[0] == "torchwheels":
                yield from ((str(node.module), x.name) for x in node.names)


def test_every_file_has_a_room() -> None:
    assert {room for room, _ in files()} == {*ORDER, *ABOVE_ALL}


@pytest.mark.parametrize("room", ORDER)
def test_a_room_imports_nothing_from_above_and_of_others_what_their_face_has(room: str) -> None:
    for own, path in files():
        for module, name in imported(path) if own == room else ():
            _, _, place = module.partition(".")
            other = place.partition(".")[0] or name
            if other in (room, "__version__"):
                continue
            assert ORDER.index(other) < ORDER.index(room), (path, module, name)
            if place and other in FOLDERS:
                assert place == other, (path, module)
                assert name in importlib.import_module(module).__all__, (path, module, name)


@pytest.mark.parametrize("room", FOLDERS)
def test_a_face_has_what_another_room_or_a_user_of_the_package_takes(room: str) -> None:
    repository = PACKAGE.parents[2]
    outside = [
        repository / "noxfile.py",
        *(x for each in ("tools", "benchmarks") for x in (repository / each).rglob("*.py")),
    ]
    users = [path for own, path in files() if own != room] + [x for x in outside if x.is_file()]
    taken = {
        name
        for path in users
        for module, name in imported_of_any(path)
        if module == f"torchwheels.{room}"
    }
    texts = "".join(path.read_text() for path in users)
    face = importlib.import_module(f"torchwheels.{room}").__all__
    assert [x for x in face if x not in taken and f"{room}.{x}" not in texts] == []


@functools.cache
def imported_of_any(path: Path) -> list[tuple[str, str]]:
    """The same of a file that is not the tool's."""
    nodes = [x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.ImportFrom)]
    return [(str(node.module), x.name) for node in nodes for x in node.names]
