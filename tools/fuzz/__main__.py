"""Looks for a case in which extops is wrong: `python -m tools.fuzz`, or `nox -s fuzz`.

Cases are drawn at random until the time is over. A failing case is simplified while it still fails; then the command
that repeats it is printed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

from extops_build import UserError, errors_for_the_user
from tools.fuzz.cases import DEVICES, OWN_CELLS, Answer, Case, draw, from_json, settled, shrink
from tools.fuzz.worker import Worker

# For how many seconds a case that fails is made simpler.
SHRINKING = 60


def command(case: Case, device: str) -> str:
    """What repeats a case."""
    start = "nox -s fuzz --" if "NOX_CURRENT_SESSION" in os.environ else "python -m tools.fuzz"
    return f"{start} --device {device} --case {shlex.quote(case.to_json())}"


def compile_cells(device: str, given: dict[str, Any]) -> set[str]:
    """Compiles the cells of one's own, side by side; gives those that cannot be, and says why."""
    names = [name for name in OWN_CELLS if given.get("cell", name) == name]
    if not names:
        return set()

    def compile_cell(name: str) -> Answer:
        worker = Worker(device)
        answer = worker.ask(name, limit=1800)
        worker.end()
        return answer

    start = time.monotonic()
    print(f"extops: compiling {', '.join(names)}, if they have not been", flush=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        answers = dict(zip(names, pool.map(compile_cell, names), strict=True))
    for name, answer in answers.items():
        if answer.kind:
            print(f"extops: left out: {name}: {answer.text}")
    print(f"extops: that took {time.monotonic() - start:.0f} s", flush=True)
    return {name for name, answer in answers.items() if answer.kind}


def search(
    worker: Worker, seed: int, seconds: float, given: dict[str, Any], left_out: set[str]
) -> tuple[Case, Answer] | None:
    """The first case that fails, if one does."""
    random, device = Random(seed), worker.device
    start = time.monotonic()
    count, kernels = 0, Counter[str]()
    while time.monotonic() - start < seconds:
        case = draw(random, device, given)
        if case.cell in left_out:
            continue
        answer = worker.ask(case)
        count += 1
        kernels.update(answer.kernels)
        if answer.kind:
            print(f"extops: case {count}, after {time.monotonic() - start:.0f} s: {answer}")
            print(command(case, device), flush=True)
            return case, answer
    reached = ", ".join(f"{name} {number}" for name, number in sorted(kernels.items()))
    print(f"extops: nothing found in {count} cases of seed {seed}; by kernel: {reached}")
    return None


def simplest(worker: Worker, case: Case, answer: Answer) -> tuple[Case, Answer]:
    """A simpler case that fails in the same way."""
    print(f"extops: looking for a simpler one, for {SHRINKING} s at the most", flush=True)
    end = time.monotonic() + SHRINKING
    answers = {case: answer}

    def fails(candidate: Case) -> bool:
        # What other work brings about may need several tries.
        for _ in range(1 if candidate.beside == "nothing" else 2):
            answers[candidate] = worker.ask(candidate)
            if answers[candidate].kind == answer.kind:
                return True
        return False

    found = shrink(case, worker.device, fails, lambda: time.monotonic() > end)
    return found, answers[found]


def run(arguments: argparse.Namespace) -> None:
    """Does what the command line says."""
    device = arguments.device
    worker = Worker(device)
    if arguments.case:
        case = settled(Case(**from_json(arguments.case)), device)
        answer = worker.ask(case, limit=1800)
        if answer.kind:
            raise UserError(f"{answer}\n{command(case, device)}")
        print(f"extops: nothing found, by {' and '.join(answer.kernels)}")
        return
    given = from_json(arguments.given)
    left_out = compile_cells(device, given)
    found = search(worker, arguments.seed, arguments.seconds, given, left_out)
    if found is not None:
        case, answer = simplest(worker, *found)
        raise UserError(f"{answer}\n\nThis repeats it:\n{command(case, device)}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__)
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--seconds", type=float, default=60, help="how long (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of what is drawn (default: another each time)")
    parser.add_argument("--given", default="{}", metavar="JSON", help="fields that all cases have")
    parser.add_argument("--case", metavar="JSON", help="this case alone")
    arguments = parser.parse_args()
    if arguments.seed is None:
        arguments.seed = Random().randrange(10**6)
    with errors_for_the_user():
        run(arguments)


if __name__ == "__main__":
    main()
