"""Runs the tests under tools that see what values do not: accesses out of bounds, races, and the like.

On the CPU that is AddressSanitizer and UndefinedBehaviorSanitizer, compiled into the libraries:
`python -m tools.sanitize`. On a GPU it is NVIDIA's compute-sanitizer, each of its tools in turn:
`python -m tools.sanitize --device cuda`, or with `--tool memcheck` one of them.

First nothing may be reported. Then each error that tests/mutants.toml plants must be: a tool that
sees nothing would otherwise look like code without mistakes.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from extops_build import UserError, errors_for_the_user
from tools import end_tidily
from tools.mutants import DEVICES, Mutant, Run, build, choice, mutants, run_tests

_LIMIT = 1800
_REPORTED = 86  # an exit code that neither Python nor pytest uses


@dataclass(frozen=True)
class Sanitizer:
    """A tool, or several that work in one run."""

    reports: Mapping[str, str]
    """For each tool a pattern of the line that reports an error of ours."""
    tests: tuple[str, ...] = ()
    """What selects the tests for it, joined by `or`; none is all that are quick."""
    under: tuple[str, ...] = ()
    """The command that runs them."""
    environment: Mapping[str, str] = field(default_factory=dict)

    def reported(self, run: Run) -> dict[str, list[str]]:
        """The tools that reported something, and their lines."""
        found = {
            tool: re.findall(pattern, run.output, re.MULTILINE)
            for tool, pattern in self.reports.items()
        }
        return {tool: lines for tool, lines in found.items() if lines}


def compiled_in() -> Sanitizer:
    """The sanitizers of the C++ compiler, whose runtime must be loaded before Python's libraries."""
    libraries = [_runtime(name) for name in ("libasan.so", "libstdc++.so")]
    return Sanitizer(
        reports={
            "AddressSanitizer": r"ERROR: AddressSanitizer.*",
            "UndefinedBehaviorSanitizer": r"\S+: runtime error: .*",
        },
        # It limits the process's addresses, of which AddressSanitizer reserves terabytes.
        tests=("not test_a_kernel_that_finds_no_memory",),
        environment={
            "LD_PRELOAD": ":".join(libraries),
            # Python and torch keep memory until the process ends: that is no leak of ours. And some tests ask for more
            # memory than there is.
            "ASAN_OPTIONS": f"detect_leaks=0:allocator_may_return_null=1:exitcode={_REPORTED}",
            "UBSAN_OPTIONS": f"print_stacktrace=1:exitcode={_REPORTED}",
        },
    )


def _runtime(name: str) -> str:
    command = ["g++", f"-print-file-name={name}"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(path).is_absolute():
        raise UserError(f"g++ has no {name}: install its sanitizers, e.g. `apt-get install g++`")
    return path


# The cases of every kernel, of odd sizes and strides; not those that call a kernel a thousand times.
_CALLS = ("test_golden", "test_values_of_gradients", "test_gradients_of_layouts")
_SEQUENCES = "(test_sizes_of_every_kernel and lengths-reverse and not float16)"
_TESTS = {
    "memcheck": ("test_values.py", *_CALLS, "test_expanded_upstream_gradients", _SEQUENCES),
    # It ends in an "Internal Sanitizer Error" in cuBLAS's products of 16-bit types, in kernels to which TMA brings
    # their tiles, and in those whose blocks store into each other's memory: so no 16-bit types but in the kernels for
    # small problems, none of the sizes that are for TMA, and of sequences only those that single blocks compute in
    # float32.
    "racecheck": (
        *(f"({name} and not float16 and not tiles and not large_cancelling)" for name in _CALLS),
        "(test_same_bits_of_the_parameters_gradients and tutorial)",
        "(test_sizes_of_every_kernel and lengths-reverse and (127 or 128) and float32)",
    ),
    "synccheck": (*_CALLS, _SEQUENCES),
    # It watches every kernel, torch's too, and takes minutes for what others do in seconds: a few sizes of each kind of
    # kernel.
    "initcheck": (
        "(test_values_of_gradients and (float32 or bfloat16) and (odd or tutorial or middle or tiles))",
        "(test_no_nan_becomes_infinite_in_tf32 and (left_over or few_rows))",
    ),
}


def find_compute_sanitizer() -> Path:
    """NVIDIA's checker of memory accesses and races: the system's, or the one pip installed."""
    from_pip = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin/compute-sanitizer"))
    found = [*systems_compute_sanitizer(), *from_pip]
    if not found:
        raise UserError(
            "there is no compute-sanitizer in CUDA_HOME or on PATH: set CUDA_HOME to the directory "
            "of a CUDA toolkit, or run `pip install nvidia-cuda-sanitizer-api`"
        )
    return found[0]


def systems_compute_sanitizer() -> list[Path]:
    """That of CUDA_HOME, or on PATH."""
    home = os.environ.get("CUDA_HOME")
    path = os.pathsep.join([*([f"{home}/bin"] if home else []), os.environ.get("PATH", "")])
    found = shutil.which("compute-sanitizer", path=path)
    return [Path(found)] if found else []


def compute_sanitizer(tool: str) -> Sanitizer:
    """A tool of NVIDIA's compute-sanitizer."""
    command = [str(find_compute_sanitizer()), f"--tool={tool}", "--show-backtrace=device"]
    # torch tries calls of the driver that may fail.
    command += ["--report-api-errors=no"]
    if tool == "initcheck":
        # It must watch all kernels, since those of others initialise our inputs; what it says of
        # theirs is not ours, so its exit code is of no use.
        command += ["--print-limit=0"]
    else:
        command += ["--kernel-name=kernel_substring=extops", f"--error-exitcode={_REPORTED}"]
    return Sanitizer(
        reports={tool: r"^=========.*\bextops::cuda::.*"},
        tests=_TESTS[tool],
        under=tuple(command),
        # torch's allocator hands out parts of large pieces, within which no access is out of bounds.
        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )


def check(sanitizer: Sanitizer, device: str, folder: Path | None, planted: list[Mutant]) -> None:
    """Runs the tests under `sanitizer`, on the package as it is and then on each planted error."""
    tools = " and ".join(sanitizer.reports)
    arguments = choice(device, sanitizer.tests)
    run = _run(sanitizer, folder, None, arguments)
    found = sanitizer.reported(run)
    if found or run.code != 0 or not run.passed:
        print(run.output)
        what = f"{' and '.join(found)} reported errors" if found else "the tests did not pass"
        raise UserError(f"{what} under {tools}, in {run.last_test}: see above")
    print(f"extops: {tools}: nothing to report in {run.passed} tests, {run.seconds} s", flush=True)
    for mutant in planted:
        run = _run(sanitizer, folder, mutant.name, arguments)
        lines = sanitizer.reported(run).get(mutant.seen_by)
        if not lines:
            print(run.output[-3000:])
            raise UserError(f"{mutant.seen_by} did not report {mutant.name}: {mutant.why}")
        print(f"extops: {mutant.seen_by}: reports {mutant.name}: {lines[0].strip()}", flush=True)


def _run(
    sanitizer: Sanitizer, folder: Path | None, name: str | None, arguments: Sequence[str]
) -> Run:
    return run_tests(
        folder,
        name,
        arguments,
        environment=sanitizer.environment,
        under=sanitizer.under,
        limit=_LIMIT,
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.sanitize", description=__doc__)
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument(
        "--tool", choices=_TESTS, action="append", help="of compute-sanitizer (default: all)"
    )
    built = parser.add_mutually_exclusive_group()
    built.add_argument(
        "--use", type=Path, metavar="FOLDER", help="what `tools.mutate --build-only` put there"
    )
    built.add_argument(
        "--installed", action="store_true", help="the CUDA kernels as installed; nothing is planted"
    )
    arguments = parser.parse_args()
    end_tidily()
    with errors_for_the_user():
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    """Does what the command line says."""
    device = arguments.device
    tools = arguments.tool or _TESTS
    on_gpu = device == "cuda"
    sanitizers = [compute_sanitizer(tool) for tool in tools] if on_gpu else [compiled_in()]
    wanted = {tool for sanitizer in sanitizers for tool in sanitizer.reports}
    planted = [mutant for mutant in mutants(device) if mutant.seen_by in wanted]
    with tempfile.TemporaryDirectory(prefix="extops-planted-") as temporary:
        folder = arguments.use
        if arguments.installed:
            planted = []
        elif not folder:
            folder = Path(temporary)
            build(planted, device, folder, sanitized=not on_gpu)
        for sanitizer in sanitizers:
            check(sanitizer, device, folder, [x for x in planted if x.seen_by in sanitizer.reports])


if __name__ == "__main__":
    main()
