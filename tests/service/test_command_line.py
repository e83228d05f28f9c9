"""What a user meets at the command line: real nox, real processes, real files."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import small_wheels
from fake_docker import FakeDocker

from service import ROOT, place, wheels

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
    takes = "a build takes the options --backend, --builder and --source"
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


def copies(wheel: Path, *names: str) -> list[Path]:
    """The wheel under other names."""
    return [shutil.copy(wheel, wheel.parent / name) for name in names]


def test_audit_judges_all_and_fails_at_the_end(tmp_path: Path) -> None:
    """Eight files that are no wheel of ours, and between them one that is, without libraries."""
    folder = tmp_path / "folder.whl"
    folder.mkdir()
    bare = small_wheels.make(tmp_path, "cpu")
    named = ("renamed.whl", "numpy-2.4.6-py3-none-any.whl", f"{bare.stem}-1.whl")
    misnamed = copies(bare, *named)
    (other_version,) = copies(bare, bare.name.replace("0.1.0", "9.9.0"))
    (truncated,) = copies(bare, bare.name.replace("manylinux_2_28", "manylinux_2_24"))
    os.truncate(truncated, bare.stat().st_size // 2)
    (spoiled,) = copies(bare, bare.name.replace("manylinux_2_28", "manylinux_2_17"))
    middle = spoiled.read_bytes().index(b"VARIANT = ")
    with spoiled.open("r+b") as file:
        file.seek(middle)
        file.write(b"variant")
    missing = tmp_path / "missing.whl"
    paths = [missing, folder, *misnamed, bare, other_version, truncated, spoiled]
    done = nox("-s", "audit", "--", *map(str, paths))
    assert done.returncode == 1
    said = re.findall(r"^extops: (.*)$", done.stdout, re.MULTILINE)
    expected = [
        f"{missing} cannot be read: No such file or directory",
        f"{folder} cannot be read: Is a directory",
        *(f"{path} is not named extops-<version>-<python>-<abi>-<platform>" for path in misnamed),
        f"{bare.name}: its tag is manylinux_2_28_x86_64, but auditwheel proves any",
        f"{other_version} holds no extops-9.9.0+cpu.dist-info/METADATA, as its name promises",
        f"{truncated} is no wheel: File is not a zip file",
        f"{spoiled} is no wheel: Bad CRC-32 for file 'extops/__init__.py'",
    ]
    assert len(said) == len(expected)
    for line, beginning in zip(said, expected, strict=True):
        assert line.startswith(f"not fit to publish: {beginning}")
    assert wheels.passport(bare).is_file()


@pytest.mark.parametrize("record", ['{"contents": "0123', "{}", "[]"])
def test_audit_with_a_record_of_tests_that_is_not_whole(tmp_path: Path, record: str) -> None:
    bare = small_wheels.make(tmp_path, "cpu")
    file = tmp_path / wheels.TESTS / CELL / "cpu.json"
    file.parent.mkdir(parents=True)
    file.write_text(record)
    done = nox("-s", "audit", "--", str(bare))
    assert done.returncode == 1
    beginning = f"extops: not fit to publish: {bare.name}: {file} is no whole record of tests"
    assert f"\n{beginning}: delete it, or run `nox -s test-{CELL}` again; its tag is" in done.stdout
    assert json.loads(wheels.passport(bare).read_text())["tests"] == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("extops-foo.whl", "is not named extops-<version>-<python>-<abi>-<platform>.whl"),
        (
            "extops-9.9.0-py3-none-any.whl",
            "holds no extops-9.9.0.dist-info/METADATA, as its name promises",
        ),
    ],
)
def test_index_with_a_foreign_wheel(tree: Path, name: str, expected: str) -> None:
    (foreign,) = copies(small_wheels.make(tree / "dist", "cpu"), name)
    done = nox("-s", "index", tree=tree)
    assert done.returncode == 1
    assert f"extops: {foreign} {expected}" in done.stdout
    assert not (tree / "site").exists()


def test_index_with_a_wheel_of_another_project(tree: Path) -> None:
    """It has our name, and nothing of ours in it."""
    foreign = small_wheels.make(tree / "dist", "cpu")
    with zipfile.ZipFile(foreign) as wheel:
        kept = {name: wheel.read(name) for name in wheel.namelist() if "/METADATA" in name}
    with zipfile.ZipFile(foreign, "w") as wheel:
        for name, data in kept.items():
            wheel.writestr(name, data)
    done = nox("-s", "index", tree=tree)
    assert done.returncode == 1
    assert f"extops: {foreign} holds no extops/_build_info.json that names " in done.stdout


def test_lock_of_another_user(tree: Path) -> None:
    """As `sudo nox` leaves one: it is there, and not ours to write."""
    small_wheels.make(tree / "dist", "cpu")
    lock = tree / "build" / "site.lock"
    lock.parent.mkdir()
    lock.touch()
    lock.chmod(0o444)
    done = nox("-s", "index", tree=tree, under=UNPRIVILEGED)
    assert done.returncode == 1
    denied = f"permission denied: {lock} belongs to {lock.owner()}"
    assert f'extops: {denied}; run `sudo chown --recursive "$USER" {tree}`\n' in done.stdout


def descendants(parent: int) -> list[int]:
    """The processes that `parent` started, and those that these started."""
    threads = Path(f"/proc/{parent}/task").glob("*/children")
    children = [int(child) for thread in threads for child in thread.read_text().split()]
    return [each for child in children for each in (child, *descendants(child))]


def kill(process: subprocess.Popen[str]) -> None:
    """Kills this process alone, and waits until all that it started has ended."""
    started = {each: os.pidfd_open(each) for each in descendants(process.pid)}
    assert len(started) > 1
    process.kill()
    process.wait()
    left = [each for each, end in started.items() if not select.select([end], [], [], 60)[0]]
    for each in left:
        os.kill(each, signal.SIGKILL)
    assert left == []


def start(
    tree: Path, *arguments: str, until: str, **environ: str
) -> tuple[subprocess.Popen[str], str]:
    """Starts nox, and waits until it prints a line with `until` in it, which is returned, too."""
    process = subprocess.Popen(
        command(tree, *arguments),
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if until in line:
            return process, line
    pytest.fail(f"{until!r} was not printed, but {''.join(said)}")


def test_killed_build_leaves_no_compiler(tree: Path) -> None:
    """It prints how far ninja is, too: without that, compiling is silent for minutes."""
    build = ["-s", f"build-{CELL}", "--", "--backend=local"]
    process, _ = start(tree, *build, until="[8/", MAX_JOBS="4")  # of ninja
    names = {Path(f"/proc/{each}/comm").read_text() for each in descendants(process.pid)}
    assert {"ninja\n", "cc1plus\n"} <= names
    kill(process)
    assert not list((tree / "dist").glob("*"))


def test_killed_build_in_docker_leaves_nothing(small_image: str, tree: Path) -> None:
    """Neither BuildKit's client, nor a file with the address of an index, password and all."""
    (tree / "Dockerfile").write_text(
        f"FROM {small_image} AS export\n"
        "RUN --mount=type=secret,id=settings"
        " echo extops: $(wc -c < /run/secrets/settings) bytes; exec tail -f /dev/null\n"
    )
    password = uuid.uuid4().hex
    index = f"https://user:{password}@example.org/simple"
    temporary = tree.parent / "temporary"
    temporary.mkdir()
    environ = {"EXTOPS_TORCH_INDEX": index, "MAX_JOBS": "", "EXTOPS_FRESH": "1"}
    environ["TMPDIR"] = str(temporary)
    size = len(f"EXTOPS_TORCH_INDEX={index}\n")
    build = ["-s", f"build-{CELL}", "--", "--backend=docker"]
    process, _ = start(tree, *build, until=f"extops: {size} bytes", **environ)
    kill(process)
    for folder in (tree, temporary):
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert not [path for path in files if password.encode() in path.read_bytes()]


def test_next_build_names_the_process_that_it_waits_for(
    fake_docker: FakeDocker, tree: Path
) -> None:
    fake_docker.says("building\n", code=1)
    pipe = fake_docker.waits()
    build = ["-s", f"build-{CELL}"]
    first, _ = start(tree, *build, until="building")
    second, said = start(tree, *build, until="extops: waiting for another build of cpu to end")
    commands = {
        each: Path(f"/proc/{each}/cmdline").read_text().rstrip("\0").replace("\0", " ")
        for each in descendants(first.pid)
    }
    (holder,) = (each for each, command in commands.items() if "service.cells" in command)
    assert said.endswith(f" to end: process {holder}, `{commands[holder]}`\n")
    for process in (first, second):
        pipe.write_text("go on\n")
        process.communicate()
        assert process.returncode == 1
