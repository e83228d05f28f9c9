"""Builds or tests a cell in Docker: `python -m service.cells build 3.11-cu130`."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

from service import errors_for_the_user, images, processes, wheels
from service.matrix import Cell, load


def build(cell: Cell, builder: str | None = None) -> Path:
    """Builds the cell's wheel in its image into dist/."""
    return wheels.build(
        cell.variant, make=lambda variant, work: images.exported_wheel(cell, work, builder)
    )


def test(cell: Cell, arguments: list[str], builder: str | None = None) -> int:
    """Tests the cell's wheel of dist/ in a container; returns the exit code of the session there.

    `arguments` are for pytest.
    """
    from service import containers  # whose SDK a build does without

    wheel = wheels.wheel_for(cell)
    if "--require-gpu" in arguments:
        containers.require_gpu()  # before torch is downloaded for nothing
    with wheels.alone(f"test-{cell.name}", f"test of {cell.name}"):
        image = images.test_image(cell, wheel, builder)
        command = ["nox", "-r", "-s", f"test-{cell.name}", "--", *arguments]
        records = f"/extops/dist/{wheels.TESTS}"  # as Dockerfile places the source tree
        return containers.run(image, command, cell.name, (records, wheels.DIST))


def end_tidily() -> None:
    """Makes a signal that asks this process to end, end it by way of its clean-up.

    The end of the process of ours that started this one is such a signal, too.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)  # a second one shall not break off the clean-up
        sys.exit(128 + number)

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, stop)
    processes.end_with_parent()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m service.cells", description=__doc__)
    parser.add_argument("--builder", help="a builder of `docker buildx ls`")
    parser.add_argument("verb", choices=["build", "test"])
    parser.add_argument("cell", help="a cell of matrix.toml, e.g. 3.11-cu130")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of `test`: for pytest")
    asked = parser.parse_args()
    end_tidily()
    with errors_for_the_user():
        cell = load().cell(asked.cell)
        if asked.verb == "test":
            sys.exit(test(cell, asked.arguments, asked.builder))
        wheel = build(cell, asked.builder)
    wheels.say_what_was("published", wheel)


if __name__ == "__main__":
    main()
