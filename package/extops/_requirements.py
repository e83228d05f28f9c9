"""What extops needs of a machine, and the error where that is missing.

Pure standard library, since two others read this file by its path: `extops_doctor`, also where ``import extops`` fails,
and the build, where extops is not installed.
"""

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

MINIMUM_TORCH = (2, 4)

STABLE_TORCH = (2, 10)
"""The oldest torch whose stable ABI the `stable` libraries use; older ones get the legacy binding."""


def _own_source() -> str:
    """What pip shall install to have this extops again: the file that it came from, or its name."""
    for file in Path(__file__).parents[1].glob("extops-*.dist-info/direct_url.json"):
        url = json.loads(file.read_text())["url"]
        return shlex.quote(unquote(url).removeprefix("file://"))
    return "extops"  # which an index has


REINSTALL = f"pip install --force-reinstall --no-deps {_own_source()}"


class LoadError(ImportError):
    """extops cannot work here: for what cause, and the command that fixes it."""

    def __init__(self, cause: str, command: str) -> None:
        super().__init__(f"{cause}; run: {command} (for more: python -m extops_doctor)")
        self.cause = cause
        self.command = command


def check_torch(extops_version: str, version: str | None) -> tuple[int, int]:
    """The release of torch, None where there is no torch; an error where it is too old."""
    minimum = ".".join(map(str, MINIMUM_TORCH))
    command = f'pip install "torch>={minimum}"'
    need = f"extops {extops_version} needs torch {minimum} or newer"
    if version is None:
        raise LoadError(f"{need}, and {sys.executable} has none", command)
    major, minor = re.findall(r"\d+", version)[:2]
    if (int(major), int(minor)) < MINIMUM_TORCH:
        raise LoadError(f"{need}, but found torch {version}", command)
    return int(major), int(minor)


def read_build_info(package: Path) -> dict[str, Any]:
    """What the libraries of an installed extops were built from and with; empty where it holds none."""
    path = package / "_build_info.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}
