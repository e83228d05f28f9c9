"""What a user meets at the command line: real nox, real processes, real files."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from fake_docker import FakeDocker

from service import ROOT, place

CELL = f"{sys.version_info.major}.{sys.version_info.minor}-cpu"


def command(tree: Path, *arguments: str) -> list[str]:
    """nox with these arguments, and with this Python's packages instead of new environments."""
    nox = [sys.executable, "-m", "nox", "--noxfile", str(tree / "noxfile.py")]
    return [*nox, "--no-venv", "--no-install", *arguments]


# root may do anything, whatever the modes of files say, unless it gives that up.
UNPRIVILEGED = ("setpriv", "--bounding-set=-dac_override") if os.geteuid() == 0 else ()


def nox(
    *arguments: str, tree: Path = ROOT, under: Sequence[str] = (), **environ: str
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*under, *command(tree, *arguments)],
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert "Traceback" not in done.stdout
    return done


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """This Python first on PATH, and no choice of a place."""
    folders = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    monkeypatch.setenv("PATH", folders)
    monkeypatch.delenv("EXTOPS_BACKEND", raising=False)


@pytest.fixture
def hung_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """An engine that takes connections and never answers."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/docker.sock")
        listener.listen()
        listener.setblocking(False)
        monkeypatch.setenv("DOCKER_HOST", f"unix://{folder}/docker.sock")
        yield listener


@pytest.mark.parametrize(
    "arguments",
    [
        ["--list"],
        ["--list", "-s", f"build-{CELL}"],
        ["-s", "matrix", "--", "small"],
        ["-s", "index"],
        ["-s", "test"],  # which ends early, for its MAX_JOBS
    ],
    ids=" ".join,
)
def test_session_without_a_cell_does_not_ask_docker(
    hung_engine: socket.socket, tree: Path, arguments: list[str]
) -> None:
    done = nox(*arguments, tree=tree, MAX_JOBS="none")
    assert re.search(rf"Running session|^. build-{CELL}", done.stdout, re.MULTILINE)
    with pytest.raises(BlockingIOError):
        hung_engine.accept()


@pytest.mark.parametrize(
    ("arguments", "environ"),
    [
        (["-s", f"build-{CELL}"], {}),
        ([f"--session=build-{CELL}"], {}),
        (["-k", "build and cpu"], {}),
        ([], {"NOXSESSION": f"matrix,build-{CELL}"}),
    ],
    ids=["-s", "--session", "-k", "NOXSESSION"],
)
def test_session_of_a_cell_asks_docker(
    fake_docker: FakeDocker, tree: Path, arguments: list[str], environ: dict[str, str]
) -> None:
    fake_docker.says("", code=1)
    done = nox(*arguments, tree=tree, **environ)
    assert "extops: backend docker: Docker 26.1.5 answers" in done.stdout
    assert f"extops: {CELL} failed in Docker" in done.stdout


@pytest.mark.parametrize(
    ("session", "arguments", "near"),
    [
        (f"build-{CELL}", "--backned local", "--backend"),
        (f"test-{CELL}", "--backned local", "--backend"),
        (f"test-{CELL}", "--require-gup", "--require-gpu"),
        ("test", "--through", "--thorough"),
        ("build", "--bulider=far", "--builder"),
    ],
)
def test_misspelt_option(fake_docker: FakeDocker, session: str, arguments: str, near: str) -> None:
    done = nox("-s", session, "--", *arguments.split())
    assert done.returncode != 0
    given = re.match(r"--[\w-]+", arguments)
    assert given
    assert done.stdout == f"extops: there is no option {given[0]}: did you mean {near}?\n"
    assert not (fake_docker.folder / "calls").exists()


def test_build_takes_no_other_arguments(fake_docker: FakeDocker) -> None:
    done = nox("-s", f"build-{CELL}", "--", "local", "-x")
    assert done.returncode != 0
    takes = "a build takes the options --backend and --builder"
    assert done.stdout == f"extops: {takes}, but was given `local -x`\n"
    assert not (fake_docker.folder / "calls").exists()


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ("3.14-cu121", "torch 2.4.1 has no wheel for Python 3.14"),
        ("3.10-cu132", "torch 2.15.0 has no wheel for Python 3.10"),
        ("3.13-release-torch2.4", "torch 2.4.1 has no wheel for Python 3.13"),
    ],
)
def test_cell_without_a_torch_says_so(cell: str, reason: str) -> None:
    expected = f"test-{cell}: there is no cell {cell!r} in matrix.toml: {reason}; the nearest are "
    assert nox("-s", f"test-{cell}").stdout.startswith(expected)


@pytest.mark.skipif(shutil.which("docker") is None, reason="there is no `docker` command")
def test_engine_of_a_group(hung_engine: socket.socket) -> None:
    path = Path(hung_engine.getsockname())
    path.chmod(0)
    done = nox("-s", f"build-{CELL}", "--", "--backend=docker", under=UNPRIVILEGED)
    group = path.group()
    assert done.stdout == (
        f"extops: no Docker engine answers ({path} is open to the group {group}: run "
        f'`sudo usermod --append --groups {group} "$USER"` and log in again): '
        "start one, or use `--backend local`\n"
    )


def test_build_leaves_the_options_of_pytest_to_a_test(fake_docker: FakeDocker, tree: Path) -> None:
    fake_docker.says("", code=1)
    done = nox("-s", f"build-{CELL}", f"test-{CELL}", "--", "-x", tree=tree)
    assert f"extops: {CELL} failed in Docker" in done.stdout


def test_options_of_pytest_pass() -> None:
    shown = [sys.executable, "-m", "pytest", "--help"]
    text = subprocess.run(shown, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    options = re.findall(r"(?<![\w-])--[\w-]+", text)
    assert {"--require-gpu", "--thorough", "--basetemp"} <= {*options}
    for option in options:
        assert place.options([option, "-k", "backend"], {})[1] == [option, "-k", "backend"]
