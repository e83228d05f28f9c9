"""Builds wheels twice, in folders of different names, and compares them byte by byte.

`python -m service.reproduce build-3.11-cu130` takes two copies of the source tree, runs the cell's
session in each, as if the compiler cache were empty, and names what differs.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from service import ROOT, ServiceError, errors_for_the_user, images, place, wheels
from service.cells import end_tidily
from service.matrix import Cell, load

# Where the copies go: neither the name nor the length of the path shall matter.
FOLDERS = ("one", "another-folder/with-a-longer-path")

LEFT_OUT = shutil.ignore_patterns(
    *(".nox", ".venv", "build", "dist", "site", "__pycache__", ".*_cache", ".hypothesis", "*.so")
)
"""What is no source, as `shutil.copytree` takes it."""


def build(cell: Cell, copy: Path, options: place.Options) -> Path:
    """Builds the cell's wheel in the copy of the source tree at `copy`."""
    command = [sys.executable, "-m", "nox", "--noxfile", str(copy / "noxfile.py")]
    # The tools are pinned, so both builds can have the same.
    command += [f"--envdir={ROOT / '.nox'}", "-s", f"build-{cell.name}", "--"]
    command += [f"--backend={options.backend}"] if options.backend else []
    command += [f"--builder={options.builder}"] if options.builder else []
    fresh = {"EXTOPS_FRESH": "1", "CCACHE_RECACHE": "1"}
    code, _ = images.follow(command, {**os.environ, **fresh})
    if code != 0:
        raise ServiceError(f"build-{cell.name} failed in {copy}: its messages above say why")
    return wheels.wheel_for(cell, copy / "dist")


def differences(first: Path, second: Path) -> list[str]:
    """What differs between two wheels; empty where they are equal byte by byte."""
    if first.name != second.name:
        return [f"the names: {first.name} and {second.name}"]
    if first.read_bytes() == second.read_bytes():
        return []
    with zipfile.ZipFile(first) as one, zipfile.ZipFile(second) as other:
        names, others = one.namelist(), other.namelist()
        found = [f"{name}: in one wheel only" for name in sorted({*names} ^ {*others})]
        for name in sorted({*names} & {*others}):
            if one.read(name) != other.read(name):
                found.append(f"{name}: the contents")
            elif _entry(one.getinfo(name)) != _entry(other.getinfo(name)):
                found.append(f"{name}: its time, mode or compression")
    if not found and names != others:
        return ["the order of the files"]
    return found or ["the archives themselves, in none of their files"]


def _entry(info: zipfile.ZipInfo) -> tuple[object, ...]:
    return info.date_time, info.external_attr, info.compress_type, info.compress_size


def reproduce(cell: Cell, options: place.Options) -> list[str]:
    """Builds the cell's wheel twice, prints the hashes, and returns what differs."""
    with tempfile.TemporaryDirectory(prefix="extops-reproduce-") as folder:
        copies = [Path(folder) / name for name in FOLDERS]
        for copy in copies:  # both first, since the tree may change while one is built
            shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
        built = [build(cell, copy, options) for copy in copies]
        for name, wheel in zip(FOLDERS, built, strict=True):
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
            print(f"extops: {cell.name} in {name}: {wheel.name} sha256 {digest}", flush=True)
        return differences(*built)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m service.reproduce", description=__doc__)
    parser.add_argument("sessions", nargs="+", help="which builds, e.g. build-3.11-cu130")
    end_tidily()
    with errors_for_the_user():
        options, others = place.options(sys.argv[1:])
        sessions = parser.parse_args(others).sessions
        cells = [load().cell(name.removeprefix("build-")) for name in sessions]
        found = {cell.name: reproduce(cell, options) for cell in cells}
    bad = [f"{name} differs in {'; '.join(what)}" for name, what in found.items() if what]
    if bad:
        sys.exit("\n".join(f"extops: not reproducible: {line}" for line in bad))
    print(f"extops: built twice, and equal byte by byte: {', '.join(found)}")


if __name__ == "__main__":
    main()
