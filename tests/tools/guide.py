"""Applies docs/write-an-operator.md to a copy of the repository: each block that names a file is written there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(
    r"^```\{code-block\} \w+\n:caption: ([^\n]+)\n\n(.*?)^```$", re.DOTALL | re.MULTILINE
)


def copy_tree(into: Path) -> None:
    """What git tracks, and what it would."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).splitlines():
        if (ROOT / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, into / name)


def apply(guide: Path, tree: Path) -> None:
    """A caption is a new file's path, or that of a file and, after "below", a text of the line above the block."""
    for caption, text in BLOCK.findall(guide.read_text()):
        name, _, above = caption.partition(", below ")
        path = tree / name.strip("`")
        if not above:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            continue
        lines = path.read_text().splitlines(keepends=True)
        (place,) = [number for number, line in enumerate(lines, 1) if above.strip("`") in line]
        path.write_text("".join([*lines[:place], text, *lines[place:]]))


if __name__ == "__main__":
    copy_tree(Path(sys.argv[1]))
    apply(ROOT / "docs" / "write-an-operator.md", Path(sys.argv[1]))
