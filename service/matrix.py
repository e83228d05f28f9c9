"""Reads matrix.toml. `python -m service.matrix` prints the README's table of the wheels.

`python -m service.matrix --bake` prints a file for `docker buildx bake`.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service import ROOT, ServiceError, errors_for_the_user, native_libraries

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = ROOT / "matrix.toml"

RELEASE = "release"
"""The variant of the wheel that goes to PyPI."""


def release(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` as (2, 13, 0), for comparing."""
    return tuple(int(part) for part in version.partition("+")[0].split("."))


@dataclass(frozen=True)
class Variant:
    """What one wheel is built for: `cpu`, a CUDA version such as `cu130`, or the `release`."""

    name: str
    image: str
    runner: str
    torch: tuple[str, ...]
    cuda: str | None = None
    architectures: tuple[str, ...] = ()
    toolkit: str | None = None

    @property
    def label(self) -> str:
        """The local label of the wheel's version; the release is on the plain version."""
        return "" if self.name == RELEASE else self.name

    def __post_init__(self) -> None:
        named_after = "cu" + self.cuda.replace(".", "") if self.cuda else "cpu"
        if self.name not in (named_after, RELEASE):
            raise ServiceError(
                f"matrix.toml: variant {self.name} names CUDA {self.cuda}, which is another's"
            )
        if self.cuda and f":{self.cuda}." not in self.image:
            raise ServiceError(
                f"matrix.toml: {self.name} names CUDA {self.cuda}, but the image {self.image}"
            )
        if bool(self.cuda) != bool(self.architectures):
            raise ServiceError(
                f"matrix.toml: {self.name} needs `cuda` and `architectures`, or neither"
            )
        if not self.torch:
            raise ServiceError(f"matrix.toml: {self.name} names no torch release")


@dataclass(frozen=True)
class Cell:
    """A Python version x a variant x a torch release."""

    python: str
    variant: Variant
    torch: str

    @property
    def name(self) -> str:
        """What follows `build-` or `test-` in the cell's sessions, e.g. `3.11-cu124-torch2.5`."""
        name = f"{self.python}-{self.variant.name}"
        if self.torch == self.variant.torch[0]:
            return name
        return f"{name}-torch{'.'.join(self.torch.split('.')[:2])}"

    @property
    def lane(self) -> str:
        """`stable` (LibTorch stable ABI) or `legacy` (older torch: raw pointers)."""
        return lane(self.torch)


def lane(torch: str) -> str:
    """The lane of a torch release."""
    return "stable" if release(torch) >= native_libraries().STABLE_TORCH else "legacy"


@dataclass(frozen=True)
class Matrix:
    """The whole file."""

    default_python: str
    headers_torch: str
    manylinux: str
    budget: Mapping[str, float]
    toolkit_requirement: str
    tools: Mapping[str, tuple[str, ...]]
    pythons: Mapping[str, tuple[str, ...]]
    """For each torch release, the Python versions it supports."""
    variants: Mapping[str, Variant]
    small_names: tuple[str, ...]
    """The names of the cells that CI takes for a pull request."""

    def __post_init__(self) -> None:
        for variant in self.variants.values():
            for torch in variant.torch:
                if torch not in self.pythons:
                    raise ServiceError(
                        f"matrix.toml: {variant.name} names torch {torch}, but [torch] does not"
                    )
            if self.default_python not in self.pythons[variant.torch[0]]:
                raise ServiceError(
                    f"matrix.toml: the default Python {self.default_python} has no cell of "
                    f"{variant.name}"
                )
        names = [cell.name for cell in self.cells]
        for name in names:
            if names.count(name) > 1:
                raise ServiceError(f"matrix.toml: two torch releases make the cell {name}")
        for name in self.small_names:
            if name not in names:
                raise ServiceError(f"matrix.toml: `small` names the cell {name}, which is none")

    @functools.cached_property
    def cells(self) -> tuple[Cell, ...]:
        """Every cell that can exist."""
        return tuple(
            Cell(python, variant, torch)
            for variant in self.variants.values()
            for torch in variant.torch
            for python in self.pythons[torch]
        )

    @property
    def default_cells(self) -> tuple[Cell, ...]:
        """A cell for each variant, so for each wheel."""
        return tuple(self.cell(f"{self.default_python}-{name}") for name in self.variants)

    @property
    def small(self) -> tuple[Cell, ...]:
        """The cells that CI takes for a pull request."""
        return tuple(self.cell(name) for name in self.small_names)

    def cell(self, name: str) -> Cell:
        """The cell of a session's suffix, e.g. `3.11-cu130`."""
        cells = {cell.name: cell for cell in self.cells}
        if name not in cells:
            near = difflib.get_close_matches(name, cells, n=3, cutoff=0.0)
            raise ServiceError(
                f"there is no cell {name!r} in matrix.toml{self._why_not(name)}; "
                f"the nearest are {', '.join(near)} (`nox --list` shows all)"
            )
        return cells[name]

    def _why_not(self, name: str) -> str:
        """Why there is no cell of that name, where it is for want of a torch."""
        python, _, rest = name.partition("-")
        torches = [cell.torch for cell in self.cells if cell.name == f"{cell.python}-{rest}"]
        if not torches or python not in {cell.python for cell in self.cells}:
            return ""
        return f": torch {torches[0]} has no wheel for Python {python}"

    def variant(self, name: str) -> Variant:
        """The variant of that name, as it is to be built: EXTOPS_ARCHITECTURES overrides its own."""
        if name not in self.variants:
            known = ", ".join(self.variants)
            raise ServiceError(f"there is no variant {name!r} in matrix.toml; it has {known}")
        variant = self.variants[name]
        architectures = os.environ.get("EXTOPS_ARCHITECTURES", "").split()
        if not architectures or not variant.cuda:
            return variant
        for architecture in architectures:
            if not re.fullmatch(r"\d+\.\d(\+PTX)?", architecture):
                raise ServiceError(
                    f"EXTOPS_ARCHITECTURES names {architecture!r}, but GPU compute capabilities "
                    "such as `8.0 9.0+PTX` are expected"
                )
        return dataclasses.replace(variant, architectures=tuple(architectures))

    def table(self) -> str:
        """The cells as a Markdown table."""
        rows = [
            "| session suffix | torch | binding | Python | CUDA | GPU architectures | base image |"
        ]
        rows.append("|---|---|---|---|---|---|---|")
        for variant in self.variants.values():
            for torch in variant.torch:
                pythons = self.pythons[torch]
                suffix = Cell("*", variant, torch).name
                row = [f"`{suffix}`", torch, lane(torch), f"{pythons[0]}–{pythons[-1]}"]
                row += [
                    variant.cuda or "–",
                    " ".join(variant.architectures) or "–",
                    f"`{variant.image}`",
                ]
                rows.append(f"| {' | '.join(row)} |")
        return "\n".join(rows)

    def variants_table(self) -> str:
        """The wheels as a Markdown table: what each one is tested with."""
        rows = [
            "| wheel | torch | Python | CUDA | GPUs (compute capability) |",
            "|---|---|---|---|---|",
        ]
        for variant in self.variants.values():
            torch = [v.rpartition(".")[0] for v in sorted(variant.torch, key=release)]
            pythons = sorted(
                {python for v in variant.torch for python in self.pythons[v]}, key=release
            )
            known = [
                f"{each[0]}–{each[-1]}" if len(each) > 1 else each[0] for each in (torch, pythons)
            ]
            row = [
                f"`{variant.name}`",
                *known,
                variant.cuda or "–",
                " ".join(variant.architectures) or "–",
            ]
            rows.append(f"| {' | '.join(row)} |")
        return "\n".join(rows)


def parse(data: Mapping[str, Any]) -> Matrix:
    """The matrix of a parsed file."""
    variants = {}
    for name, entry in data["variant"].items():
        try:
            fields: dict[str, Any] = {
                key: tuple(value) if isinstance(value, list) else value
                for key, value in entry.items()
            }
            variants[name] = Variant(name, **fields)
        except TypeError as error:  # a key that is missing, or that nobody reads
            raise ServiceError(f"matrix.toml: variant {name}: {error}") from None
    return Matrix(
        default_python=data["default_python"],
        headers_torch=data["headers_torch"],
        manylinux=data["manylinux"],
        budget=data["budget"],
        toolkit_requirement=data["toolkit_requirement"],
        tools={group: tuple(requirements) for group, requirements in data["tools"].items()},
        pythons={torch: tuple(pythons) for torch, pythons in data["torch"].items()},
        variants=variants,
        small_names=tuple(data["small"]),
    )


@functools.cache
def load(path: Path = FILE) -> Matrix:
    """The matrix of `path`."""
    with path.open("rb") as file:
        return parse(tomllib.load(file))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m service.matrix", description=__doc__)
    parser.add_argument("--bake", action="store_true", help="a bake file rather than the table")
    parser.add_argument("cells", nargs="*", help="with --bake: which cells (default: one a wheel)")
    arguments = parser.parse_args()
    if not arguments.bake:
        print(load().variants_table())
        return
    from service import images  # which needs this module

    with errors_for_the_user():
        cells = [load().cell(name) for name in arguments.cells] or list(load().default_cells)
    print(json.dumps(images.bake_file(cells), indent=2))


if __name__ == "__main__":
    main()
