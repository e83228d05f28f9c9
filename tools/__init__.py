"""Tools for the maintainers of extops: they prove its tests, watch torch's releases, and prepare releases."""

from __future__ import annotations

import signal
import sys
from types import FrameType


def end_tidily() -> None:
    """Makes a signal that asks this process to end, end it by way of its clean-up."""

    def stop(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)  # a second one shall not break off the clean-up
        sys.exit(128 + number)

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, stop)
