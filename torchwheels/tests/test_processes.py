"""Nothing of a build outlives it, in whatever way it ends."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torchwheels import cli, sources
from torchwheels.build import backend
from torchwheels.index import site
from torchwheels.system import MARK, files, processes

SETUP = """
import pathlib, subprocess
pathlib.Path("build.ninja").write_text(
    "rule cxx\\n  command = c++ -fconstexpr-ops-limit=9000000000000000000 "
    "-fconstexpr-loop-limit=2147483647 -c $in -o $out\\n"
    "build one.o: cxx long.cpp\\nbuild two.o: cxx long.cpp\\n"
)
subprocess.run(["sh", "-c", "trap '' TERM; setsid sleep 1000000 & exec ninja -j2"], check=True)
"""

# Takes the compiler hours, in constant memory.
ENDLESS = """
constexpr unsigned sum(unsigned from) {
    for (unsigned long i = 0; i < 1ul << 30; ++i) from += i * from;
    return from;
}
constexpr unsigned sums() {
    unsigned s = 1;
    for (unsigned long i = 0; i < 1ul << 30; ++i) s += sum(s);
    return s;
}
static_assert(sums() == 1);
"""

# The command line beside these tests' own Python, without installing torch.
COMMAND = """
import sys
from pathlib import Path
from torchwheels import cli, environments
environments.with_torch = lambda *_, **__: environments.Environment(Path(sys.prefix))
cli.main(sys.argv[1:])
"""

# What a session of nox is to it: the parent that it names.
PARENT = """
import os, subprocess, sys
os.environ["TORCHWHEELS_PARENT"] = str(os.getpid())
sys.exit(subprocess.run([sys.executable, "-c", *sys.argv[1:]]).returncode)
"""

DEADLINE = 60  # seconds, far more than any of it takes


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """A shell that runs these tests in the background has them, and what they start, ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether `condition` comes true before the deadline."""
    end = time.monotonic() + DEADLINE
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def started_below(folder: Path) -> dict[int, str]:
    """The processes that have `folder` in their variables, by their numbers, and what they are."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in (process / "environ").read_bytes():
                found[int(process.name)] = (process / "comm").read_text().strip()
    return found


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """A project that two compilers under ninja never finish with, and that leaves a process behind."""
    folder = tmp_path / "endless"
    folder.mkdir()
    (folder / "setup.py").write_text(SETUP)
    (folder / "long.cpp").write_text(ENDLESS)
    return folder


@contextlib.contextmanager
def building(
    folder: Path, *options: str, parent: str | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A build of `folder` whose compilers run."""
    cache = folder.parent / "cache"
    command = [sys.executable, "-c", *([parent] if parent else []), COMMAND, "build", str(folder)]
    command += [
        "--target=3.11-cpu",
        "--backend=local",
        f"--dist={folder.parent / 'dist'}",
        *options,
    ]
    tool = str(Path(cli.__file__).parents[1])
    variables = {"TORCHWHEELS_CACHE": str(cache), "TMPDIR": str(folder.parent), "PYTHONPATH": tool}
    process = subprocess.Popen(
        command, env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )  # fmt: skip
    try:
        running = eventually(lambda: [*started_below(folder.parent).values()].count("cc1plus") == 2)
        assert running, process.communicate()[0]
        assert "sleep" in started_below(folder.parent).values()
        yield process
        assert eventually(lambda: not started_below(folder.parent)), started_below(folder.parent)
    finally:
        for left in started_below(folder.parent):
            with contextlib.suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    "signals",
    [
        [signal.SIGINT],
        [signal.SIGTERM],
        [signal.SIGHUP],
        [signal.SIGKILL],
        [signal.SIGTERM, signal.SIGTERM, signal.SIGINT],
    ],
    ids=lambda signals: "-".join(x.name for x in signals),
)
def test_nothing_outlives_a_stopped_build(endless: Path, signals: list[signal.Signals]) -> None:
    with building(endless) as process:
        for each in signals:
            process.send_signal(each)
        process.wait(DEADLINE)
    assert process.returncode == (-signal.SIGKILL if signal.SIGKILL in signals else 130)
    if process.returncode == 130:
        assert not [*endless.parent.glob("torchwheels-*")], "it leaves its temporary folders"


# A Python that says when it shall make an environment, and never does.
def test_ctrl_c_in_a_terminal_prints_no_traceback(own_project: Path, tmp_path: Path) -> None:
    """Not even of what was started, which a terminal stops, too."""
    index = socket.create_server(("127.0.0.1", 0))  # which never answers
    variables = {
        "PYTHONPATH": str(Path(cli.__file__).parents[1]),
        "TORCHWHEELS_CACHE": str(tmp_path / "cache"),
        "PIP_INDEX_URL": f"http://127.0.0.1:{index.getsockname()[1]}/",
    }
    command = [sys.executable, "-m", "torchwheels", "build", str(own_project), "--backend=local"]
    with (
        index,
        subprocess.Popen(
            [
                *command,
                f"--target={sys.version_info[0]}.{sys.version_info[1]}-cpu",
                f"--dist={tmp_path / 'dist'}",
            ],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        try:
            index.settimeout(DEADLINE)
            index.accept()
            os.killpg(process.pid, signal.SIGINT)
            said, _ = process.communicate(timeout=DEADLINE)
        finally:
            process.kill()  # the end of `with` waits for it
    assert process.returncode == 130
    assert said.startswith("torchwheels: stopped; ") and said.count("\n") == 1
    left = [x for x in tmp_path.glob("cache/environments/*") if x.is_dir()]
    assert not left, "half an environment serves nobody"


def test_signals_that_come_at_once_are_one_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a terminal is closed, and whoever started us ends us, too."""
    said: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    before = {each: signal.signal(each, cli._stop) for each in processes.STOPPING}
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, before)
        for each in before:  # to this thread: another one does not block them
            signal.pthread_kill(threading.get_ident(), each)
        with pytest.raises(KeyboardInterrupt):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, before)
        os.kill(os.getpid(), signal.SIGTERM)  # does not interrupt what clears away
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert said == []


def test_ctrl_c_need_not_wait_for_another_process(own_project: Path, tmp_path: Path) -> None:
    lock = tmp_path / "cache" / "build" / "3.11-cpu-own-project.lock"
    lock.parent.mkdir(parents=True)
    (tmp_path / "cache" / MARK).touch()
    variables = {
        "PYTHONPATH": str(Path(cli.__file__).parents[1]),
        "TORCHWHEELS_CACHE": str(tmp_path / "cache"),
    }
    command = [sys.executable, "-c", COMMAND, "build", str(own_project), "--backend=local"]
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with subprocess.Popen(
            [*command, "--target=3.11-cpu", f"--dist={tmp_path / 'dist'}"],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            try:
                assert process.stdout is not None
                said = process.stdout.readline()
                assert said.startswith("torchwheels: waiting for another process")
                process.send_signal(signal.SIGINT)
                said, _ = process.communicate(timeout=DEADLINE)
            finally:
                process.kill()
    assert said.startswith("torchwheels: stopped; ")
    assert process.returncode == 130


@pytest.mark.slow
def test_nothing_outlives_a_parent_that_is_killed(endless: Path) -> None:
    with building(endless, parent=PARENT) as process:
        process.kill()


def test_nothing_outlives_a_command_that_ends(tmp_path: Path) -> None:
    """Not even what has left its session, and does not hear requests to end."""
    command = (
        "trap '' TERM HUP; setsid sh -c 'sleep 1000000 & sleep 1000000' & echo started; exit 3"
    )
    done = processes.run(
        ["sh", "-c", command], env={**os.environ, "MARK": str(tmp_path)}, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (3, "started\n")
    assert not started_below(tmp_path)


def killed_in(folder: contextlib.AbstractContextManager[object]) -> None:
    """As by SIGKILL, which lets nothing be cleaned up."""
    child = os.fork()
    if child == 0:
        with folder:
            os._exit(0)
    os.waitpid(child, 0)


def test_what_a_killed_run_has_left_goes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But nothing that another run uses, or that is somebody else's."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "source").mkdir()
    wheels = files.marked(tmp_path / "torchwheels-wheels")  # that somebody has built there
    mine = {tmp_path / "torchwheels-mine", tmp_path / ".site-mine", tmp_path / "source", wheels}
    for folder in mine:
        folder.mkdir(exist_ok=True)
        (folder / "thesis.txt").touch()
    fetched = functools.partial(sources.fetched, str(tmp_path / "source"), "", "")
    indexed = functools.partial(site.replaced, tmp_path / "site")
    with fetched() as used:
        for folder in (fetched, indexed):
            killed_in(folder())
        assert len([*tmp_path.iterdir()]) == len(mine) + 3
        with fetched() as again, indexed() as new:  # another one would wait
            places = (used.folder, again.folder, new)
            in_use = {tmp_path / x.relative_to(tmp_path).parts[0] for x in places}
            assert {*tmp_path.iterdir()} == mine | in_use
    assert {*tmp_path.iterdir()} == {*mine, tmp_path / "site"}


def test_hidden_lines_are_not_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    lines = (
        "copying a.py -> build/a.py\nerror: copying failed\nadding 'a.py'\n"
        "W1123 17:51:31.588000 28625 torch/utils/cpp_extension.py:178] No CUDA runtime is found, using "
        "CUDA_HOME='/usr/local/cuda'\n"
        "torch/_subclasses/functional_tensor.py:368: BuildBackendWarning: Failed to initialize NumPy: No module "
        "named 'numpy' (Triggered internally at tensor_numpy.cpp:84.)\n"
        '  cpu = _conversion_method_template(device=torch.device("cpu"))\n'
    )
    assert processes.follow(["printf", lines], hidden=backend._CHATTER) == (
        0,
        "error: copying failed\n",
    )
    assert capsys.readouterr().out == "error: copying failed\n"
