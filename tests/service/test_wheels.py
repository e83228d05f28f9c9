"""Publishing wheels, and builds that die."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import small_wheels

from service import ROOT, ServiceError, matrix, wheels

CPU = matrix.load().variant("cpu")
NAME = "extops-0.1.0+{}-py3-none-manylinux_2_28_x86_64.whl"


@pytest.fixture(autouse=True)
def _no_locks_in_the_source_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "ROOT", tmp_path)


def make_wheel(variant: matrix.Variant, work: Path) -> Path:
    wheel = work / NAME.format(variant.name)
    wheel.write_text("new")
    return wheel


def test_build_replaces_the_wheel_of_its_variant_only(tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    dist.mkdir()
    old = dist / "extops-0.0.9+cpu-py3-none-manylinux_2_34_x86_64.whl"
    for stale in (old, wheels.passport(old)):
        stale.write_text("old")
    (dist / NAME.format("cu130")).write_text("other")
    wheel = wheels.build(CPU, dist, make_wheel)
    assert wheel.read_text() == "new"
    assert sorted(dist.iterdir()) == [wheel, dist / NAME.format("cu130")]


def test_release_is_the_wheel_without_a_label(tmp_path: Path) -> None:
    labelled = [tmp_path / NAME.format(name) for name in ("cpu", "cu124")]
    plain = tmp_path / "extops-0.1.0-py3-none-manylinux_2_28_x86_64.whl"
    for wheel in (*labelled, plain):
        wheel.touch()
    assert wheels.published(matrix.load().variant("release"), tmp_path) == [plain]
    assert wheels.published(CPU, tmp_path) == labelled[:1]


def put_old_wheel(dist: Path) -> list[Path]:
    """A wheel of an earlier build with its passport, under the name that the new one will have."""
    dist.mkdir()
    wheel = dist / NAME.format("cpu")
    files = [wheel, wheels.passport(wheel)]
    for file in files:
        file.write_text("old")
    return sorted(files)


def test_failed_build_keeps_the_old_wheel_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(variant: matrix.Variant, work: Path) -> Path:
        make_wheel(variant, work)
        raise ServiceError("the compiler said no")

    dist = tmp_path / "dist"
    for _ in range(2):  # without an old wheel, then with one
        with pytest.raises(ServiceError, match="said no"):
            wheels.build(CPU, dist, fail)
    assert list(dist.iterdir()) == []
    assert capsys.readouterr().out == ""
    dist.rmdir()
    old = put_old_wheel(dist)
    with pytest.raises(ServiceError, match="said no"):
        wheels.build(CPU, dist, fail)
    assert [file.read_text() for file in old] == ["old", "old"]
    assert capsys.readouterr().out == (
        f"extops: this build made no wheel; {dist / NAME.format('cpu')} is from an earlier one\n"
    )


@pytest.mark.parametrize("step", ["service.wheels.publish", "os.fsync", "shutil.copyfile"])
def test_killed_build_keeps_the_old_wheel(tmp_path: Path, step: str) -> None:
    """Dies when `step` begins: with the wheel made, with a copy of it written, with none written."""
    dist = tmp_path / "dist"
    old = put_old_wheel(dist)
    program = f"""
        import os, shutil, signal, sys, pathlib
        import service.wheels
        service.wheels.ROOT = root = pathlib.Path({str(tmp_path)!r})
        def make(variant, work):
            wheel = work / {NAME.format("cpu")!r}
            wheel.write_text("new")
            return wheel
        {step} = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
        service.wheels.build(service.wheels.load().variant("cpu"), root / "dist", make)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    assert [file.read_text() for file in old] == ["old", "old"]
    wheel = wheels.build(CPU, dist, make_wheel)
    assert list(dist.iterdir()) == [wheel]
    assert wheel.read_text() == "new"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_build_keeps_the_old_wheel_and_says_so(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Is interrupted with the wheel half made; `make` says when that is, and waits."""
    program = f"""
        import pathlib, signal
        import service.cells, service.wheels
        service.cells.end_tidily()
        service.wheels.ROOT = root = pathlib.Path({str(tmp_path)!r})
        def make(variant, work):
            (work / {NAME.format("cpu")!r}).write_text("ne")
            print("half", flush=True)
            signal.pause()
        service.wheels.build(service.wheels.load().variant("cpu"), root / "dist", make)
    """
    dist = tmp_path / "dist"
    old = put_old_wheel(dist)
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    process.send_signal(number)
    said, _ = process.communicate()
    assert process.returncode == 128 + number
    assert said.startswith("extops: this build made no wheel; ")
    assert sorted(dist.iterdir()) == old
    assert wheels.build(CPU, dist, make_wheel).read_text() == "new"


def test_full_disk_keeps_the_old_wheel_and_says_so(tmp_path: Path) -> None:
    """No file may grow over 1000 bytes, which fails where a full disk would."""
    dist = tmp_path / "dist"
    old = put_old_wheel(dist)
    program = f"""
        import pathlib, resource
        import service.wheels
        service.wheels.ROOT = root = pathlib.Path({str(tmp_path)!r})
        def make(variant, work):
            wheel = work / {NAME.format("cpu")!r}
            wheel.write_bytes(bytes(100_000))
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
            return wheel
        try:
            service.wheels.build(service.wheels.load().variant("cpu"), root / "dist", make)
        except service.ServiceError as error:
            print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    kept, error = done.stdout.splitlines()
    assert kept.startswith("extops: this build made no wheel; ")
    assert error.startswith("there is no room to build cpu (File too large: ")
    assert error.endswith("): free some space and build again; nothing was published")
    assert sorted(dist.iterdir()) == old
    assert wheels.build(CPU, dist, make_wheel).read_text() == "new"


def test_two_builds_of_one_variant_take_turns(tmp_path: Path) -> None:
    program = f"""
        import pathlib
        import service.wheels
        service.wheels.ROOT = root = pathlib.Path({str(tmp_path)!r})
        with service.wheels.turn(service.wheels.load().variant("cpu")) as work:
            (work / "mine").touch()
            print("building", flush=True)
            input()
            assert [path.name for path in work.iterdir()] == ["mine"]
    """

    def start(expected: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline().startswith(expected)
        return process

    first = start("building\n")
    wait = f"extops: waiting for another build of cpu to end: process {first.pid}, `"
    for process in (first, start(wait)):
        process.communicate("\n")
        assert process.returncode == 0


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A source tree of its own, as far as `--finished` reads it, with a commit of real git's."""
    tree = tmp_path / "repository"
    for name in ("service", "package"):
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    shutil.copy(ROOT / "matrix.toml", tree)
    author = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    for command in (
        ["init", "--quiet"],
        [*author, "commit", "--quiet", "--allow-empty", "-m", "A"],
    ):
        subprocess.run(["git", *command], cwd=tree, check=True)
    return tree


def hand_over(tree: Path, wheel: Path, **environment: str) -> list[str]:
    """What the command says that hands over a wheel of an image, as compose's `build` does."""
    command = [sys.executable, "-m", "service.wheels", "cpu", f"--finished={wheel.parent}"]
    clean = {name: value for name, value in os.environ.items() if name != "EXTOPS_COMMIT"}
    done = subprocess.run(
        command,
        cwd=tree,
        env={**clean, **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_wheel_is_handed_over_with_the_commit_it_names(tmp_path: Path, repository: Path) -> None:
    wheel = small_wheels.make(tmp_path / "image", "cpu", commit="0123456789abcdef")
    assert hand_over(repository, wheel) == [
        f"extops: built {repository / 'dist' / wheel.name} (0.00 MB, commit 0123456789abcdef)"
    ]


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("archive", "{tree} has no .git"),
        ("no git", "there is no `git` command"),
        (
            "another owner",
            "fatal: detected dubious ownership in repository at '{tree}' To add an "
            "exception for this directory, call: git config --global --add safe.directory {tree}",
        ),
        ("not told", "its build was not told which"),
    ],
)
def test_wheel_without_a_commit_says_why(
    tmp_path: Path, repository: Path, case: str, reason: str
) -> None:
    environment = {}
    if case == "archive":
        shutil.rmtree(repository / ".git")
    if case == "no git":
        environment["PATH"] = str(tmp_path)
    if case == "another owner":  # git's own switch, for its own tests
        environment["GIT_TEST_ASSUME_DIFFERENT_OWNER"] = "1"
    wheel = small_wheels.make(tmp_path / "image", "cpu", commit=None)
    said, note = hand_over(repository, wheel, **environment)
    assert said.endswith("(0.00 MB, no commit)")
    assert note == (
        f"extops: note: this wheel names no commit ({reason.format(tree=repository)}): to have it "
        "named, set EXTOPS_COMMIT to what `git describe --always --abbrev=40 --dirty` says, and "
        "SOURCE_DATE_EPOCH to what `git log -1 --format=%ct` says, and build again"
    )


def test_no_wheel_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match=r"no wheel of cu130 in .*`nox -s build-3.11-cu130`"):
        wheels.wheel_for(matrix.load().cell("3.11-cu130"), tmp_path)


def test_failing_tool_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "pip", "nonsense"]
    with pytest.raises(ServiceError, match="the build failed in `pip nonsense`"):
        wheels.run_for_wheel(command, tmp_path, dict(os.environ))
    assert "nonsense" in capfd.readouterr().err
