"""Makes site/ from the wheels in dist/: what any web server then serves, at any address.

index.html               the landing page
simple/                  what `pip install extops` shall find: the release wheel
cu130/simple/            the wheels of a variant, and so on
wheels/                  the wheels, the metadata of each, and its passport where it has one
benchmarks/              the plots of the landing page
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from service import ROOT, errors_for_the_user, index, landing, wheels
from service.matrix import RELEASE, Matrix, load

SITE = ROOT / "site"


def build(dist: Path = wheels.DIST, site: Path = SITE, matrix: Matrix | None = None) -> list[str]:
    """Makes `site` anew and returns what to say of it.

    What was there is replaced at the end, by a whole site: one that fails leaves the old one.
    """
    matrix = matrix or load()
    found = index.read_all(dist)
    listed = index.indices(found)
    with (
        wheels.alone("site", "making of the site"),
        tempfile.TemporaryDirectory(prefix=".site-", dir=site.parent) as work,
    ):
        new = Path(work) / "new"
        new.mkdir()
        index.write_wheels(found, new / "wheels")
        for path, wheels_there in listed.items():
            index.write_index(wheels_there, new, path)
        landing.write(found, new, matrix)
        if site.exists():
            site.rename(Path(work) / "old")
        new.rename(site)
    said = [f"made {site} with {', '.join(listed)}"]
    if RELEASE not in map(index.variant_of, found):
        said.append(
            "dist/ has no release wheel, so simple/ lists all, of which `pip install extops` "
            f"takes {found[-1].version}"
        )
    return said


def main() -> None:
    """The command line."""
    with errors_for_the_user():
        said = build()
    for sentence in said:
        print(f"extops: {sentence}")


if __name__ == "__main__":
    main()
