"""What only extops has around its build: compiling, breaking and watching its kernels, releasing it.

Building, testing and judging wheels is torchwheels', in the folder of that name. None of this is part
of the wheel.
"""

from __future__ import annotations

import contextlib
import functools
import runpy
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
"""The top of the source tree."""


class ServiceError(Exception):
    """Something the user can put right; the message is one sentence that says how."""


@contextlib.contextmanager
def errors_for_the_user() -> Iterator[None]:
    """Ends a command with the sentence of a `ServiceError`, and without a traceback."""
    try:
        yield
    except ServiceError as error:
        sys.exit(f"extops: {error}")


def end_tidily() -> None:
    """Makes a signal that asks this process to end, end it by way of its clean-up."""

    def stop(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)  # a second one shall not break off the clean-up
        sys.exit(128 + number)

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, stop)


@functools.cache
def native_libraries() -> SimpleNamespace:
    """What `extops._libraries` defines, by its path: the build runs where extops is not installed."""
    path = ROOT / "package" / "extops" / "_libraries.py"
    return SimpleNamespace(**runpy.run_path(str(path), run_name="extops_libraries"))
