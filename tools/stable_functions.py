"""Makes the list of the functions of torch's stable ABI again: `python -m tools.stable_functions SITE-PACKAGES...`.

It reads the headers of several releases, each in a folder of its own (`pip install --no-deps --target build/2.15
torch==2.15.0`). What the oldest of them declares may be older still. The release that first declares a function is the
one that the guards (`TORCH_FEATURE_VERSION`) of later headers name.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from torchwheels.options import minor, numbers
from torchwheels.wheel.stable_functions import FILE

_HEADERS = ("inductor/aoti_torch/c", "inductor/aoti_torch/generated", "stable/c")


# Of devices that wheels for Linux and CUDA know nothing of.
_OTHER_DEVICES = re.compile(r"shim_(mps|xpu)")
_COMMENT = re.compile(r"//.*|/\*.*?\*/|^\s*#.*", re.MULTILINE)
_DECLARATION = re.compile(r"\bAOTI_TORCH_EXPORT\b[^;{(]*?\b(\w+)\s*\(")


def declared(site_packages: Path) -> tuple[str, set[str]]:
    """The release of the torch in that folder, and the functions that its headers declare."""
    version = re.search(r"__version__ = '(.*?)'", (site_packages / "torch/version.py").read_text())
    if version is None:
        raise ValueError(f"{site_packages}/torch/version.py names no version")
    found: set[str] = set()
    for folder in _HEADERS:
        for header in (site_packages / "torch/include/torch/csrc" / folder).rglob("*.h"):
            if not _OTHER_DEVICES.search(header.name):
                found |= {*_DECLARATION.findall(_COMMENT.sub("", header.read_text()))}
    return minor(version[1]), found


def main() -> None:
    """The command line."""
    releases = sorted(
        (declared(Path(folder)) for folder in sys.argv[1:]), key=lambda each: numbers(each[0])
    )
    first: dict[str, str] = {}
    for release, functions in releases:
        first = {**dict.fromkeys(functions, release), **first}
    rows = sorted((numbers(release), function) for function, release in first.items())
    names = ", ".join(release for release, _ in releases)
    lines = [
        f"# From the headers of torch {names}; made by `python -m tools.stable_functions`.",
        *(f"{'.'.join(map(str, release))} {function}" for release, function in rows),
    ]
    FILE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
