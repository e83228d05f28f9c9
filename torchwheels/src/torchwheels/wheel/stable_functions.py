"""PyTorch's own list of the functions of its stable ABI, and the release that each is in from."""

import functools
from pathlib import Path

from torchwheels.options import numbers

FILE = Path(__file__).with_suffix(".txt")


@functools.cache
def first_releases() -> dict[str, str]:
    """For each function its first release, such as `2.10`."""
    lines = [line.split() for line in FILE.read_text().splitlines() if line[:1].isdigit()]
    return {function: release for release, function in lines}


def releases() -> list[str]:
    """The releases whose functions are listed, the oldest first; what that one has may be older still."""
    return sorted({*first_releases().values()}, key=numbers)
