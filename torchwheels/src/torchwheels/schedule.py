"""Distributes targets over builders: each gets the next one when it has finished one."""

from __future__ import annotations

import collections
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from torchwheels import processes
from torchwheels.errors import UserError
from torchwheels.releases import Target

Build = Callable[[Target], Path | None]
"""Builds the wheel of a target; None where only a step of that was asked for."""


class BuilderGoneError(UserError):
    """A builder no longer answers: another one must build its target."""


@dataclass(frozen=True)
class Outcome:
    """The result of a target."""

    target: Target
    seconds: float = 0.0
    wheel: Path | None = None
    error: Exception | None = None

    def __str__(self) -> str:
        took = f"{self.seconds:.0f} s"
        if self.error:
            return f"{self.target.name}: FAILED after {took}: {processes.explained(self.error)}"
        assert self.wheel
        return f"{self.target.name}: {self.wheel.name}, {took if self.seconds else 'kept'}"


def spread(targets: Iterable[Target], builders: Sequence[Build]) -> dict[str, Outcome]:
    """Builds each of `targets` with one of the `builders`; returns what became of them by their names.

    Where a builder is gone, the others go on with its target.
    """
    waiting = collections.deque(targets)
    outcomes: dict[str, Outcome] = {}
    left = [*builders]

    def work(build: Build, all_started: threading.Event) -> None:
        all_started.wait()
        while waiting:
            try:
                target = waiting.popleft()
            except IndexError:  # another was faster
                return
            start = time.monotonic()
            wheel: Path | None = None
            failure: Exception | None = None
            try:
                wheel = build(target)
            except BuilderGoneError as error:
                left.remove(build)
                if left:
                    print(
                        f"torchwheels: {target.name} waits for another builder: {error}", flush=True
                    )
                    waiting.append(target)
                    return
                failure = error
            except (UserError, OSError, subprocess.CalledProcessError) as error:
                failure = error
            outcomes[target.name] = Outcome(target, time.monotonic() - start, wheel, failure)
            if not left:
                return

    try:
        while waiting and left:
            # Ctrl-C while a thread starts leaves it to itself: none begins before.
            all_started = threading.Event()
            with ThreadPoolExecutor(len(left)) as pool:
                try:
                    pending = {pool.submit(work, build, all_started) for build in left}
                    all_started.set()
                    while pending:
                        # Ctrl-C just before a wait without an end does not wake it.
                        done, pending = wait(pending, timeout=1, return_when=FIRST_COMPLETED)
                        for future in done:
                            future.result()
                except BaseException:
                    waiting.clear()
                    processes.end_all()
                    all_started.set()
                    raise
    finally:
        processes.all_ended()
    for target in waiting:
        outcomes[target.name] = Outcome(target, error=UserError("no builder is left"))
    return outcomes
