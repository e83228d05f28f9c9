"""Checks that a tag can be released, and writes its notes: `nox -s notes -- v0.1.0`, or `torchwheels-v0.1.0`."""

from __future__ import annotations

import argparse
import re
import runpy
from dataclasses import dataclass

from extops_build import ROOT, UserError, errors_for_the_user

NOTES = ROOT / "build" / "notes.md"


@dataclass(frozen=True)
class Product:
    """What has releases of its own."""

    prefix: str
    """Of its tags, before the version."""
    version_file: str
    changelog: str

    def version(self) -> str:
        """The version of the sources."""
        return str(runpy.run_path(str(ROOT / self.version_file))["__version__"])


EXTOPS = Product("v", "package/extops/_version.py", "CHANGELOG.md")
TORCHWHEELS = Product(
    "torchwheels-v", "torchwheels/src/torchwheels/__init__.py", "torchwheels/CHANGELOG.md"
)


def notes(tag: str, version: str, changelog: str, product: Product = EXTOPS) -> str:
    """What `changelog` says of `version`, which must be the one that `tag` names."""
    right = f"{product.prefix}{version}"
    if tag != right:
        raise UserError(
            f"the tag is {tag}, but {product.version_file} says {version}, "
            f"which {right} would release: set the version, commit, and tag that commit"
        )
    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |\Z)"
    found = re.search(heading, changelog, re.MULTILINE | re.DOTALL)
    if not found or not found[1].strip():
        raise UserError(
            f"{product.changelog} says nothing under `## [{version}] - <year>-<month>-<day>`: "
            "give what is under `## [Unreleased]` that heading"
        )
    return found[1].strip() + "\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.notes", description=__doc__)
    parser.add_argument("tag", help="the tag, such as v0.1.0")
    tag = parser.parse_args().tag
    with errors_for_the_user():
        product = TORCHWHEELS if tag.startswith(TORCHWHEELS.prefix) else EXTOPS
        changelog = (ROOT / product.changelog).read_text()
        text = notes(tag, product.version(), changelog, product)
    NOTES.parent.mkdir(exist_ok=True)
    NOTES.write_text(text)
    print(f"extops: the notes of {tag} are in {NOTES}")


if __name__ == "__main__":
    main()
