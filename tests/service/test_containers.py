"""Containers, in a real engine: what they print and return, and that none is left."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from service import ROOT, ServiceError

docker = pytest.importorskip("docker", reason="the Docker SDK is not installed")

from service import containers  # noqa: E402

CELL = "3.11-cpu of a test"


def left() -> list[str]:
    """The containers of this test that exist."""
    command = ["docker", "ps", "--all", "--quiet", f"--filter=label=extops.cell={CELL}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_output_and_exit_code(small_image: str, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert containers.run(small_image, ["sh", "-c", "echo out; echo err >&2; exit 7"], CELL) == 7
    assert sorted(capfdbinary.readouterr().out.split()) == [b"err", b"out"]
    assert left() == []


def test_output_folder_is_copied_out(small_image: str, tmp_path: Path) -> None:
    command = ["sh", "-c", "mkdir -p /dist/tests/cell && echo 1 > /dist/tests/cell/cpu.json"]
    assert containers.run(small_image, command, CELL, ("/dist/tests", tmp_path)) == 0
    copy = tmp_path / "tests" / "cell" / "cpu.json"
    assert copy.read_text() == "1\n"
    assert copy.owner() == tmp_path.owner()
    assert containers.run(small_image, ["true"], CELL, ("/dist/tests", tmp_path / "none")) == 0
    assert not (tmp_path / "none").exists()


def start(image: str) -> subprocess.Popen[str]:
    """A process that runs a container, which is running when this returns."""
    program = f"""
        from service import cells, containers
        cells.end_tidily()
        command = ["sh", "-c", "echo ready; exec tail -f /dev/null"]
        containers.run({image!r}, command, {CELL!r})
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_removes_the_container(small_image: str, number: signal.Signals) -> None:
    process = start(small_image)
    assert len(left()) == 1
    process.send_signal(number)
    process.communicate()
    assert process.returncode != 0
    assert left() == []


def test_next_run_removes_what_a_killed_one_left(small_image: str) -> None:
    process = start(small_image)
    process.kill()
    process.communicate()
    assert len(left()) == 1
    assert containers.run(small_image, ["true"], CELL) == 0
    assert left() == []


def test_missing_image(small_image: str) -> None:
    with pytest.raises(ServiceError, match="Docker has no such image: "):
        containers.run("extops-test:none", ["true"], CELL)


@pytest.mark.usefixtures("engine")
def test_no_gpu() -> None:
    if "nvidia" in docker.from_env().info()["Runtimes"]:
        pytest.skip("this Docker engine has the NVIDIA runtime")
    with pytest.raises(ServiceError, match=r"a GPU is required, .* NVIDIA Container Toolkit"):
        containers.require_gpu()


def test_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    with pytest.raises(ServiceError, match=r"^no Docker engine answers \(.*`--backend local`$"):
        containers.run("extops-test:none", ["true"], CELL)
