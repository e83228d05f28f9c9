"""docs/design.md lists what the commit that ends torch 2.4 to 2.9 deletes and edits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from extops_build import ROOT

SECTION = "## Until when torch 2.4 to 2.9"
FOLDERS = ("package", "csrc", "extops_build", "tools", "tests", "benchmarks", "docs", "examples")
SUFFIXES = (".py", ".h", ".cuh", ".cpp", ".cu", ".md", ".svg")
# How a comment names such a torch, and what else exists only for it. Torch 2.10 itself has some of their faults.
TRACE = re.compile(
    r"torch (?:before )?2\.[4-9]\b(?!\.\d| to 2\.10)|torch>=2\.4|< \(2, \d\)|MINIMUM_TORCH"
    r"|\b_legacy\b|\"legacy\"|binding [!=]=",
    re.IGNORECASE,
)


def sources() -> Iterator[Path]:
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "noxfile.py", "setup.py"))
    yield ROOT / "pyproject.toml"
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            made = {"_build", "_generated", "reports", "results"} & set(path.parts)
            if path.suffix in SUFFIXES and not made:
                yield path


def test_the_list_is_complete() -> None:
    _, _, rest = (ROOT / "docs" / "design.md").read_text().partition(f"{SECTION}\n")
    named = set(re.findall(r"`([\w/-]+\.\w+)`", rest.partition("\n## ")[0]))
    assert all((ROOT / name).is_file() for name in named), named
    with_trace = {str(x.relative_to(ROOT)) for x in sources() if TRACE.search(x.read_text())}
    assert with_trace == named
