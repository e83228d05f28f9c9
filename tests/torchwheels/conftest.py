"""torchwheels from the source tree where it is not installed, and projects to build."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

collect_ignore = ["classic"]  # whose tests are of its wheel

# At the end: an installed one comes first, and the folder has modules with names of the standard
# library's.
sys.path.append(str(HERE.parents[1] / "service"))


@pytest.fixture
def classic(tmp_path: Path) -> Path:
    """The sources of a classic extension, in a folder of their own."""
    return shutil.copytree(HERE / "classic", tmp_path / "classic")
