"""Breaks the sources on purpose, one place at a time, and runs the tests on the result.

tests/mutants.toml says where. Building and testing are apart, so that CUDA mutants can be built
where there is a compiler and tested where there is a GPU: between the two stands a folder with the
package as it is, and for each mutant the files of the package that it changes.
"""

from __future__ import annotations

import contextlib
import filecmp
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from extops_build import ROOT, UserError
from extops_build.compile import commit

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = ROOT / "tests" / "mutants.toml"
DEVICES = ("cpu", "cuda")

# What `python -m extops_build.compile` reads.
_SOURCES = ("csrc", "extops_build", "package")
ORIGINAL = "original"

# The tests that know all operators, those which find most first. Not those that compile code.
_TEST_FILES = (
    *("golden", "precision", "values", "gradients", "cuda", "sequence", "sequence_kernels"),
    *("streams", "errors", "autocast", "lltm_module", "transforms", "dispatcher"),
    *("properties", "rnn"),
)
_NOT_SLOW = "not slow and not large"
_CHOICE = {"cpu": "not cuda", "cuda": "(cuda or gpu)"}


@dataclass(frozen=True)
class Mutant:
    """One place of the sources, and how it is broken."""

    name: str
    file: str
    original: str
    replacement: str
    why: str
    """What the change stands for."""
    seen_by: str = "tests"
    """Or the sanitizer that must report it, since the values stay right."""

    def spoil(self, text: str) -> str:
        """The text of the file with the change in it."""
        count = text.count(self.original)
        if count != 1 or self.original == self.replacement:
            raise UserError(
                f"{FILE.name}: {self.name} changes a text that occurs {count} times in {self.file}, "
                "not once: adapt its `original` and `replacement`"
            )
        return text.replace(self.original, self.replacement)


@dataclass(frozen=True)
class Run:
    """How a run of the tests went."""

    code: int | None
    """The exit code; None where the time was up."""
    output: str
    seconds: float

    @property
    def last_test(self) -> str:
        """The test that ran when the run ended."""
        started = re.findall(r"^tests/\S+::\S+", self.output, re.MULTILINE)
        return started[-1] if started else "no test"

    @property
    def passed(self) -> int:
        """How many tests passed."""
        found = re.search(r"^=.* (\d+) passed.*=$", self.output, re.MULTILINE)
        return int(found[1]) if found else 0


def mutants(device: str) -> list[Mutant]:
    """All mutants of the code that runs on `device`."""
    return [Mutant(**entry) for entry in tomllib.loads(FILE.read_text())[device]]


def build(chosen: Sequence[Mutant], device: str, folder: Path, *, sanitized: bool = False) -> None:
    """Compiles the package and each mutant of it into `folder`."""
    if (folder / ORIGINAL).exists():
        raise UserError(f"{folder} holds mutants already: remove it, or name another folder")
    with tempfile.TemporaryDirectory(prefix="extops-sources-") as temporary:
        sources = Path(temporary)
        _copy_sources(sources)
        _compile(sources, device, sanitized, "the sources as they are")
        shutil.copytree(sources / "package", folder / ORIGINAL)
        wrong = []
        for number, mutant in enumerate(chosen, start=1):
            print(f"extops: building {number}/{len(chosen)} {mutant.name}", flush=True)
            try:
                with _spoilt(sources / mutant.file, mutant):
                    _compile(sources, device, sanitized, mutant.name)
                    _keep_changes(sources / "package", folder / ORIGINAL, folder / mutant.name)
            except UserError as error:
                wrong.append(str(error))
    if wrong:
        raise UserError("; ".join(wrong))


def _copy_sources(to: Path) -> None:
    built = shutil.ignore_patterns("*.so", "__pycache__", "_build_info.json")
    for name in _SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=built)
        else:
            shutil.copy(ROOT / name, to)


def _compile(sources: Path, device: str, sanitized: bool, what: str) -> None:
    """Brings the libraries of the package up to date: only what changed is compiled again."""
    command = [sys.executable, "-m", "extops_build.compile", device]
    command += ["--into=package/extops", *(["--sanitized"] if sanitized else [])]
    done = subprocess.run(
        command,
        cwd=sources,
        env={**os.environ, "EXTOPS_COMMIT": commit() or "", "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        print(done.stdout)
        raise UserError(f"{what} did not compile: the messages above say why")


@contextlib.contextmanager
def _spoilt(file: Path, mutant: Mutant) -> Iterator[None]:
    text = file.read_text()
    file.write_text(mutant.spoil(text))
    try:
        yield
    finally:
        file.write_text(text)


def _keep_changes(package: Path, original: Path, to: Path) -> None:
    changed = [
        path.relative_to(package)
        for path in sorted(package.rglob("*"))
        if path.is_file() and not filecmp.cmp(path, original / path.relative_to(package), False)
    ]
    if not changed:
        raise UserError(f"{to.name} changes nothing: it compiles to the very same libraries")
    for path in changed:
        (to / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(package / path, to / path)


def run_tests(
    folder: Path | None,
    name: str | None,
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    under: Sequence[str] = (),
    limit: float,
) -> Run:
    """Runs the tests on the mutant `name` in `folder`, or on the package as it is.

    In a folder and a process of its own, and up to the first failure; `under` is a command that
    takes theirs. What still runs after `limit` seconds is killed. Without a `folder` the extops
    that is installed is tested.
    """
    if folder and not (folder / (name or ORIGINAL)).is_dir():
        raise UserError(f"{folder} has no {name or ORIGINAL}: build all mutants again")
    with tempfile.TemporaryDirectory(prefix="extops-tests-") as temporary:
        work = Path(temporary)
        shutil.copytree(ROOT / "tests", work / "tests", ignore=shutil.ignore_patterns("tools"))
        shutil.copy(ROOT / "pyproject.toml", work)
        path = {}
        if folder:
            path = {"PYTHONPATH": str(work / "package")}
            for part in (ORIGINAL, name) if name else (ORIGINAL,):
                shutil.copytree(folder / part, work / "package", dirs_exist_ok=True)
        # Not all of the output is pytest's to capture: sanitizers write below Python.
        pytest = [sys.executable, "-m", "pytest", "-v", "-x", "--tb=short", "--capture=sys"]
        # The summary of warnings names tests, too, after the one that failed.
        pytest += ["--disable-warnings"]
        command = [*under, *pytest, "-p", "no:cacheprovider", *arguments]
        # EXTOPS_JIT would have the sources of the checkout tested.
        around = {name: value for name, value in os.environ.items() if name != "EXTOPS_JIT"}
        return _run(command, work, {**around, **path, **(environment or {})}, limit)


def choice(device: str, names: Sequence[str] = ()) -> list[str]:
    """The arguments of pytest for the tests of `device`: all quick ones, or those of these names."""
    expression = _CHOICE[device]
    if names:
        expression += f" and ({' or '.join(names)})"
    return [*(f"tests/test_{file}.py" for file in _TEST_FILES), "-k", expression, "-m", _NOT_SLOW]


def _run(command: Sequence[str], cwd: Path, environment: Mapping[str, str], limit: float) -> Run:
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that what it starts can be killed with it
    )
    try:
        output, _ = process.communicate(timeout=limit)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        code = None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return Run(code, output, round(time.monotonic() - start, 1))
