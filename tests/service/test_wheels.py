"""Publishing wheels, and builds that die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

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


def test_failed_build_leaves_no_wheel(tmp_path: Path) -> None:
    def fail(variant: matrix.Variant, work: Path) -> Path:
        make_wheel(variant, work)
        raise ServiceError("the compiler said no")

    wheels.build(CPU, tmp_path / "dist", make_wheel)
    with pytest.raises(ServiceError, match="said no"):
        wheels.build(CPU, tmp_path / "dist", fail)
    assert list((tmp_path / "dist").iterdir()) == []


@pytest.mark.parametrize("step", ["service.wheels.publish", "os.fsync", "shutil.copyfile"])
def test_killed_build_leaves_no_wheel(tmp_path: Path, step: str) -> None:
    """Dies when `step` begins: with the wheel made, with a copy of it written, with none written."""
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
    dist = tmp_path / "dist"
    assert list(dist.glob("*.whl")) == []
    wheel = wheels.build(CPU, dist, make_wheel)
    assert list(dist.iterdir()) == [wheel]
    assert wheel.read_text() == "new"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_build_leaves_no_wheel(tmp_path: Path, number: signal.Signals) -> None:
    """Is interrupted with the wheel half made; `make` says when that is, and waits."""
    program = f"""
        import pathlib, signal, sys
        import service.wheels
        service.wheels.ROOT = root = pathlib.Path({str(tmp_path)!r})
        def make(variant, work):
            (work / {NAME.format("cpu")!r}).write_text("ne")
            print("half", flush=True)
            signal.pause()
        service.wheels.build(service.wheels.load().variant("cpu"), root / "dist", make)
    """
    dist = tmp_path / "dist"
    wheels.build(CPU, dist, make_wheel)
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
    process.communicate()
    assert process.returncode != 0
    assert list(dist.iterdir()) == []
    assert wheels.build(CPU, dist, make_wheel).read_text() == "new"


def test_full_disk_leaves_no_wheel(tmp_path: Path) -> None:
    """No file may grow over 1000 bytes, which fails where a full disk would."""
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
    assert done.stdout.startswith("there is no room to build cpu (File too large: ")
    assert done.stdout.endswith("): free some space and build again; nothing was published\n")
    dist = tmp_path / "dist"
    assert list(dist.iterdir()) == []
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


def test_no_wheel_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match=r"no wheel of cu130 in .*`nox -s build-3.11-cu130`"):
        wheels.wheel_for(matrix.load().cell("3.11-cu130"), tmp_path)


def test_failing_tool_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "pip", "nonsense"]
    with pytest.raises(ServiceError, match="the build failed in `pip nonsense`"):
        wheels.run_for_wheel(command, tmp_path, dict(os.environ))
    assert "nonsense" in capfd.readouterr().err
