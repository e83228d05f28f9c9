"""Says what the table of releases lacks, or has and the indexes have not: torches, their Pythons and CUDA versions.

`nox -s releases` asks the indexes that pip is configured for, or those after `--`: PyPI has each torch for one CUDA,
and PyTorch's own index has the others. Where it ends well, it has found nothing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

import httpx2
from packaging.utils import parse_wheel_filename
from unearth import PackageFinder

from extops_build import UserError, errors_for_the_user
from torchwheels import sources
from torchwheels.options import Releases, minor, numbers, releases


@dataclass
class Published:
    """The newest patch of a minor release, its Pythons, and the CUDA versions of labels."""

    version: str = "0"
    pythons: set[str] = field(default_factory=set)
    cudas: set[str] = field(default_factory=set)


def published(indexes: Iterable[str]) -> dict[str, Published]:
    """What there is of each minor release for Linux on x86-64, final ones alone."""
    found: dict[str, Published] = {}
    for index in indexes:
        try:
            finder = PackageFinder(index_urls=[index], ignore_compatibility=True)
            links = [x.link for x in finder.find_all_packages("torch") if x.link.is_wheel]
        except httpx2.RequestError as error:
            raise UserError(f"{index} does not answer ({error}): name another after `--`") from None
        if not links:
            raise UserError(
                f"{index} has no wheel of torch, or refuses to say: name another after `--`"
            )
        for link in links:
            _add(link.filename, found)
    return found


def _add(filename: str, found: dict[str, Published]) -> None:
    """Adds a wheel to those of its release."""
    _, version, _, tags = parse_wheel_filename(filename)
    pythons = {
        f"{abi[1]}.{abi[2]}"
        for tag in tags
        if "linux" in tag.platform and tag.platform.endswith("_x86_64")
        if (abi := re.fullmatch(r"cp(\d)(\d+t?)", tag.abi))
    }
    if not pythons or version.is_prerelease:
        return
    known = found.setdefault(minor(version.public), Published())
    if numbers(version.public) > numbers(known.version):
        known.version, known.pythons, known.cudas = version.public, set(), set()
    if version.public == known.version:
        known.pythons |= pythons
        if label := re.fullmatch(r"cu(\d\d)(\d)", version.local or ""):
            known.cudas.add(f"{label[1]}.{label[2]}")


def differences(table: Releases, found: dict[str, Published]) -> Iterator[str]:
    """A sentence for each difference of the table; what is older than all of that is nobody's any more."""
    known = {minor(each.version): each for each in table.torches}
    pythons = [python for each in table.torches for python in each.pythons]
    for release, there in sorted(found.items(), key=lambda x: numbers(x[0])):
        torch = f"torch {there.version}"
        ours = known.get(release)
        if ours is None:
            if numbers(release) > min(map(numbers, known)):
                yield f"the table lacks {torch}"
            continue
        if there.version != ours.version:
            yield f"the table has torch {ours.version}, and not {there.version}"
        yield from _compared(f"{torch} for Python", there.pythons, ours.pythons, pythons)
        if there.cudas:
            yield from _compared(f"{torch} for CUDA", there.cudas, ours.cudas, table.cudas)


def _compared(
    what: str, there: Collection[str], ours: Collection[str], all_of_table: Iterable[str]
) -> Iterator[str]:
    oldest = min(map(_order, all_of_table))
    for version in sorted({*there} ^ {*ours}, key=_order):
        if version in ours:
            yield f"no index has {what} {version}, as the table says"
        elif _order(version) >= oldest:
            yield f"the table lacks {what} {version}"


def _order(version: str) -> tuple[int, ...]:
    return numbers(version.removesuffix("t"))


def main() -> None:
    """The command line: the indexes, where they are others."""
    with errors_for_the_user():
        table = releases.load()
        found = [*differences(table, published(sys.argv[1:] or sources.index_urls()))]
    sys.exit("\n".join(f"extops: {each}" for each in found) or None)


if __name__ == "__main__":
    main()
