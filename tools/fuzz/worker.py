"""A process that computes cases: it may crash or hang, and a GPU may be lost to it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
import warnings
from multiprocessing.connection import Connection
from typing import Any

from tools.fuzz.cases import Answer, Case

# What takes so many seconds hangs; torch.compile may take a minute.
LIMIT = 120


def _answer(asked: Case | str, device: str) -> Answer:
    # Here, not above: the process that asks needs no torch.
    from tools.fuzz.cells import own
    from tools.fuzz.check import check

    try:
        if isinstance(asked, Case):
            return check(asked, device)
        own(asked)
        return Answer()
    except Exception as error:
        where = traceback.format_tb(error.__traceback__)[-1] if isinstance(asked, Case) else ""
        return Answer(type(error).__name__, f"{error}\n{where}".strip())


def _serve(connection: Connection, device: str) -> None:
    warnings.simplefilter("ignore")
    with contextlib.suppress(EOFError):  # the one who asks has ended
        while True:
            connection.send(_answer(connection.recv(), device))


class Worker:
    """Starts the process when it is asked, and again when it has ended."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._process: Any = None

    def _start(self) -> None:
        # Threads that wait shall leave the cores to others: of cases, or of the machine.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, self.device), daemon=True)
        self._process.start()
        other.close()

    def ask(self, what: Case | str, limit: float = LIMIT) -> Answer:
        """What is found of a case; or, of a cell of one's own, whether it can be compiled."""
        if self._process is None:
            self._start()
        try:
            self._connection.send(what)
            answer: Answer = Answer("hang", f"it takes more than {limit:.0f} s")
            if self._connection.poll(limit):
                answer = self._connection.recv()
                if "CUDA error" not in answer.text:
                    return answer
        except (EOFError, OSError):
            self._process.join()
            answer = Answer("crash", f"the process ended with {self._process.exitcode}")
        self.end()  # the next case gets a new one
        return answer

    def end(self) -> None:
        """Ends the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None
