"""The notes of a release, and what keeps a tag from being released."""

from __future__ import annotations

import re

import pytest

import torchwheels
from extops_build import ROOT, UserError
from tools import notes

CHANGELOG = """# Changelog

## [Unreleased]

## [0.2.0] - 2027-01-31

### Added

- A thing.

## [0.1.0] - 2026-12-01

- The first.
"""


def test_notes_of_a_version() -> None:
    assert notes.notes("v0.2.0", "0.2.0", CHANGELOG) == "### Added\n\n- A thing.\n"
    assert notes.notes("v0.1.0", "0.1.0", CHANGELOG) == "- The first.\n"


@pytest.mark.parametrize("tag", ["v0.1.0", "0.2.0", "v0.2.0rc1"])
def test_a_tag_of_another_version(tag: str) -> None:
    with pytest.raises(UserError, match=rf"^the tag is {tag}, but .* says 0\.2\.0"):
        notes.notes(tag, "0.2.0", CHANGELOG)


def test_torchwheels_has_tags_of_its_own() -> None:
    product = notes.TORCHWHEELS
    found = notes.notes("torchwheels-v0.2.0", "0.2.0", CHANGELOG, product)
    assert found == "### Added\n\n- A thing.\n"
    with pytest.raises(
        UserError, match=r"torchwheels/__init__\.py says 0\.2\.0, which torchwheels-v0"
    ):
        notes.notes("torchwheels-v0.1.0", "0.2.0", CHANGELOG, product)
    with pytest.raises(UserError, match=r"^torchwheels/CHANGELOG\.md says nothing under"):
        notes.notes("torchwheels-v0.3.0", "0.3.0", CHANGELOG, product)
    assert product.version() == torchwheels.__version__


@pytest.mark.parametrize("changelog", [CHANGELOG, "## [0.3.0] - 2027-03-01\n\n## [0.2.0] - …"])
def test_a_version_without_notes(changelog: str) -> None:
    with pytest.raises(UserError, match=r"says nothing under `## \[0\.3\.0\] - <year>"):
        notes.notes("v0.3.0", "0.3.0", changelog)


@pytest.mark.parametrize(
    "product", [notes.EXTOPS, notes.TORCHWHEELS], ids=["extops", "torchwheels"]
)
def test_the_changelog_has_a_place_for_the_next_changes(product: notes.Product) -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / product.changelog).read_text(), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    released = [re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - \d{4}-\d\d-\d\d", x) for x in headings[1:]]
    assert all(released)
