"""Builds several cells at once: `python -m service.several --jobs 2 3.11-cpu 3.11-cu130`.

Each is a nox session of its own, in a process of its own: what keeps two of them apart is what
keeps any two builds apart. Their progress is shown line by line, their whole output is kept in
build/logs/, and a table and build/summary.json end it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from service import ROOT, errors_for_the_user, images, place, toolchain, wheels
from service.cells import end_tidily
from service.matrix import Cell, load

# BuildKit's plain progress: `#12 [build 4/5] COPY csrc csrc`.
_STEP = re.compile(r"#\d+ (\[[\w-]+ +\d+/\d+\] .{,60})")
# ninja's: `[3/27] CUDA csrc/kernels/cuda/lltm_kernel.cu`, in Docker behind BuildKit's own.
_COMPILED = re.compile(r"(?:#\d+ [\d.]+ )?(\[\d+/\d+\] .*)")
_LINES_OF_A_FAILURE = 15


@dataclass(frozen=True)
class Result:
    """A row of the table."""

    cell: str
    result: str
    seconds: float
    wheel: str
    bytes: int


class Builds:
    """The builds of one call; `run` runs one of them, in a thread of its own."""

    def __init__(self, options: place.Options, jobs: int) -> None:
        self.options = options
        # The cores are shared out, unless someone has decided that already.
        share = max(1, toolchain.parallel_jobs() // jobs)
        self.environment = {"MAX_JOBS": str(share), **os.environ}
        self.processes: list[subprocess.Popen[str]] = []
        self.stopped = False
        self.lock = threading.Lock()

    def run(self, cell: Cell) -> Result:
        """Builds one cell, and says how it went."""
        start = time.monotonic()
        code = self._follow(cell)
        seconds = round(time.monotonic() - start, 1)
        wheel = wheels.published(cell.variant)[-1:] if code == 0 else []
        return Result(
            cell.name,
            "built" if code == 0 else "failed",
            seconds,
            wheel[0].name if wheel else "",
            wheel[0].stat().st_size if wheel else 0,
        )

    def stop(self) -> None:
        """Ends all builds; each cleans up after itself."""
        with self.lock:
            self.stopped = True
            for process in self.processes:
                process.terminate()

    def _follow(self, cell: Cell) -> int:
        command = [sys.executable, "-m", "nox", "--noxfile", str(ROOT / "noxfile.py")]
        command += ["-s", f"build-{cell.name}", "--"]
        command += [f"--backend={self.options.backend}"] if self.options.backend else []
        command += [f"--builder={self.options.builder}"] if self.options.builder else []
        log = log_file(cell)
        log.parent.mkdir(parents=True, exist_ok=True)
        with self.lock:
            if self.stopped:
                return 1
            process = subprocess.Popen(
                command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            self.processes.append(process)
        with process, log.open("w") as file:
            assert process.stdout is not None
            for line in process.stdout:
                file.write(line)
                if step := progress(line):
                    print(f"[{cell.name}] {step}", flush=True)
        return process.returncode


def progress(line: str) -> str | None:
    """What to show of a line that a build prints, None where it is for the log alone."""
    found = images.SAID.match(line) or _STEP.match(line) or _COMPILED.match(line)
    return found[1].strip() if found else None


def log_file(cell: Cell) -> Path:
    """Where the whole output of a cell's build is kept."""
    return ROOT / "build" / "logs" / f"{cell.name}.log"


def build(cells: list[Cell], jobs: int, options: place.Options) -> list[Result]:
    """Builds `cells`, `jobs` of them at once; the results are in the order of `cells`."""
    builds = Builds(options, jobs)
    results = {}
    with ThreadPoolExecutor(jobs) as pool:
        try:
            futures = [pool.submit(builds.run, cell) for cell in cells]
            for done in as_completed(futures):
                result = done.result()
                results[result.cell] = result
                print(
                    f"extops: {len(results)} of {len(cells)}: {result.cell} {result.result} "
                    f"in {result.seconds:.0f} s",
                    flush=True,
                )
        except BaseException:
            builds.stop()
            raise
    return [results[cell.name] for cell in cells]


def table(results: list[Result]) -> str:
    """The results as aligned text."""
    rows = [("cell", "result", "seconds", "wheel", "MB")]
    rows += [
        (row.cell, row.result, f"{row.seconds:.1f}", row.wheel or "–", f"{row.bytes / 1e6:.2f}")
        for row in results
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m service.several", description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="how many builds at once (default: 2)")
    parser.add_argument("cells", nargs="*", help="which cells (default: one for each wheel)")
    end_tidily()
    with errors_for_the_user():
        options, others = place.options(sys.argv[1:])
        arguments = parser.parse_args(others)
        if arguments.jobs < 1:
            parser.error(f"--jobs is {arguments.jobs}, but a number of builds from 1 is expected")
        cells = [load().cell(name) for name in dict.fromkeys(arguments.cells)]
        results = build(cells or list(load().default_cells), arguments.jobs, options)
    summary = ROOT / "build" / "summary.json"
    summary.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    failed = [result.cell for result in results if result.result != "built"]
    for name in failed:
        log = log_file(load().cell(name))
        lines = log.read_text().splitlines()[-_LINES_OF_A_FAILURE:]
        print(f"\n{name} failed; the end of {log.relative_to(ROOT)}:", *lines, sep="\n  ")
    print(f"\n{table(results)}")
    if failed:
        sys.exit(f"extops: {len(failed)} of {len(results)} cells failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
