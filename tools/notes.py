"""Checks that a tag can be released, and writes its notes: `nox -s notes -- v0.1.0`."""

from __future__ import annotations

import argparse
import re
import runpy

from extops_build import ROOT, UserError, errors_for_the_user

NOTES = ROOT / "build" / "notes.md"


def version() -> str:
    """The version of the sources."""
    found: str = runpy.run_path(str(ROOT / "package" / "extops" / "_version.py"))["__version__"]
    return found


def notes(tag: str, version: str, changelog: str) -> str:
    """What `changelog` says of `version`, which must be the one that `tag` names."""
    if tag != f"v{version}":
        raise UserError(
            f"the tag is {tag}, but package/extops/_version.py says {version}, "
            f"which v{version} would release: set the version, commit, and tag that commit"
        )
    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |\Z)"
    found = re.search(heading, changelog, re.MULTILINE | re.DOTALL)
    if not found or not found[1].strip():
        raise UserError(
            f"CHANGELOG.md says nothing under `## [{version}] - <year>-<month>-<day>`: "
            "give what is under `## [Unreleased]` that heading"
        )
    return found[1].strip() + "\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.notes", description=__doc__)
    parser.add_argument("tag", help="the tag, such as v0.1.0")
    tag = parser.parse_args().tag
    with errors_for_the_user():
        text = notes(tag, version(), (ROOT / "CHANGELOG.md").read_text())
    NOTES.parent.mkdir(exist_ok=True)
    NOTES.write_text(text)
    print(f"extops: the notes of {tag} are in {NOTES}")


if __name__ == "__main__":
    main()
