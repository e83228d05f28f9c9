"""Shows that the tests catch broken kernels: each mutant of tests/mutants.toml must fail one.

`python -m tools.mutate` does so on the CPU. For CUDA the two halves may be on two machines:

    TORCH_CUDA_ARCH_LIST=9.0 python -m tools.mutate --device cuda --build-only FOLDER
    python -m tools.mutate --device cuda --use FOLDER
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from extops_build import ROOT, UserError, errors_for_the_user
from tools import end_tidily
from tools.mutants import DEVICES, ORIGINAL, Mutant, Run, build, choice, mutants, run_tests

RESULTS = ROOT / "benchmarks" / "results"

_LIMIT = 1800


def verdict(run: Run) -> tuple[str, str]:
    """The result of a mutant, and the test that gave it."""
    if run.code is None:
        return "killed", f"hangs in {run.last_test}"
    if run.code == 0:
        return "survived", ""
    if run.code == 1:
        return "killed", run.last_test
    if run.code < 0:
        return "killed", f"crashes in {run.last_test} (signal {-run.code})"
    print(run.output[-3000:])
    raise UserError(f"the tests did not run (exit code {run.code}): the messages above say why")


def try_all(
    folder: Path, chosen: list[Mutant], device: str, jobs: int
) -> tuple[Run, list[dict[str, Any]]]:
    """Runs the tests on the package as it is, which must pass, and on each mutant."""
    arguments = choice(device)
    original = run_tests(folder, None, arguments, limit=_LIMIT)
    if original.code != 0 or not original.passed:
        print(original.output[-3000:])
        raise UserError("the tests do not pass where nothing is broken: fix that first")
    print(f"extops: {original.passed} tests pass in {original.seconds} s", flush=True)
    limit = 60 + 3 * jobs * original.seconds  # a mutant that takes so much longer hangs
    rows = []
    with ThreadPoolExecutor(jobs) as pool:
        runs = pool.map(lambda x: run_tests(folder, x.name, arguments, limit=limit), chosen)
        for number, (mutant, run) in enumerate(zip(chosen, runs, strict=True), start=1):
            outcome, by = verdict(run)
            print(f"extops: {number}/{len(chosen)} {mutant.name}: {outcome} {by}", flush=True)
            rows.append(
                {
                    "mutant": mutant.name,
                    "file": mutant.file,
                    "why": mutant.why,
                    "outcome": outcome,
                    "by": by,
                    "seconds": run.seconds,
                }
            )
    return original, rows


def describe(folder: Path, device: str) -> dict[str, Any]:
    """The machine and the versions, in the words of the benchmark."""
    program = (
        "import json; from benchmarks import environment; "
        f"print(json.dumps(environment.describe({device!r})))"
    )
    path = {"PYTHONPATH": str((folder / ORIGINAL).resolve())}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, **path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return dict(json.loads(done.stdout))


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = ["| mutant | what is broken | outcome | by |", "|---|---|---|---|"]
    lines += [
        f"| {row['mutant']} | {row['why']} | {row['outcome']} | {row['by']} |" for row in rows
    ]
    return "\n".join(lines)


def test_mutants(
    folder: Path, chosen: list[Mutant], device: str, jobs: int, *, record: bool
) -> None:
    """Tries all mutants in `folder`, and says what became of them; an error where one survives."""
    original, rows = try_all(folder, chosen, device, jobs)
    survivors = [row["mutant"] for row in rows if row["outcome"] != "killed"]
    print(table(rows))
    if record:
        result = {
            **describe(folder, device),
            "tests": original.passed,
            "killed": len(rows) - len(survivors),
            "survived": len(survivors),
            "mutants": rows,
        }
        file = RESULTS / f"mutation-{device}.json"
        file.write_text(json.dumps(result, indent=2) + "\n")
    if survivors:
        raise UserError(
            f"{len(survivors)} of {len(rows)} mutants survived, so a test is missing: "
            f"{', '.join(survivors)}"
        )
    print(f"extops: all {len(rows)} mutants were killed")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutate", description=__doc__)
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    halves = parser.add_mutually_exclusive_group()
    halves.add_argument("--build-only", type=Path, metavar="FOLDER", help="build into it, no tests")
    halves.add_argument("--use", type=Path, metavar="FOLDER", help="test what was built into it")
    parser.add_argument("--jobs", type=int, default=1, help="how many to test at a time")
    parser.add_argument("names", nargs="*", help="which mutants (default: all, and record them)")
    arguments = parser.parse_args()
    end_tidily()
    with errors_for_the_user():
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    """Does what the command line says."""
    device, names, jobs = arguments.device, arguments.names, arguments.jobs
    known = mutants(device)
    if unknown := set(names) - {mutant.name for mutant in known}:
        raise UserError(f"there is no mutant {', '.join(sorted(unknown))} of {device}")
    chosen = [mutant for mutant in known if not names or mutant.name in names]
    by_tests = [mutant for mutant in chosen if mutant.seen_by == "tests"]
    if arguments.build_only:
        build(chosen, device, arguments.build_only)
    elif arguments.use:
        test_mutants(arguments.use, by_tests, device, jobs, record=not names)
    else:
        with tempfile.TemporaryDirectory(prefix="extops-mutants-") as folder:
            build(by_tests, device, Path(folder))
            test_mutants(Path(folder), by_tests, device, jobs, record=not names)


if __name__ == "__main__":
    main()
