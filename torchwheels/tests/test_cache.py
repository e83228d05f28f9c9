"""What is kept between builds: its size, and how it goes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import CalledProcessError
from typing import TextIO

import pytest

from conftest import ROOT
from torchwheels import __version__, build, cli, environments, system
from torchwheels.errors import UserError
from torchwheels.options import releases
from torchwheels.system import MARK
from torchwheels.system.cache import size


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two environments, one with 0.2 GB, a build, and what a compiler keeps."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("TORCHWHEELS_CACHE", str(folder))
    for name in ("environments/one", "environments/two", "build/3.11-cpu", "compiled/0"):
        (folder / name).mkdir(parents=True)
    (folder / MARK).touch()
    for lock in ("environments/one.lock", "environments/two.lock", "build/3.11-cpu.lock"):
        (folder / lock).touch()
    (folder / "environments" / "one" / "torch").write_bytes(bytes(200_000_000))
    return folder


def test_what_is_kept_is_listed_with_its_size(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["env"])
    assert capsys.readouterr().out.splitlines() == [
        f"the cache is {cache}: 0.2 GB",
        "  build/3.11-cpu    0.0 GB",
        "  compiled          0.0 GB",
        "  environments/one  0.2 GB",
        "  environments/two  0.0 GB",
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "a:b",
            "and build tools take ':' in a path for something else: have TORCHWHEELS_CACHE name",
        ),
        (
            "$x",
            "and build tools take '$' in a path for something else: have TORCHWHEELS_CACHE name",
        ),
        ("file", "`TORCHWHEELS_CACHE` names {0}/file, but {0}/file is no folder: name one"),
        ("file/x", "`TORCHWHEELS_CACHE` names {0}/file/x, but {0}/file is no folder: name one"),
    ],
)
def test_no_cache_can_be_there(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHWHEELS_CACHE", str(tmp_path / name))
    with pytest.raises(UserError) as error:
        system.cache.own()
    assert message.format(tmp_path) in str(error.value)


def test_a_folder_may_go_while_it_is_measured(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pip's do."""
    scandir = os.scandir

    def gone(path: str | Path) -> object:
        if Path(path).name == "two":
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", gone)
    assert round(size(cache) / 1e9, 1) == 0.2


@contextlib.contextmanager
def user_of(name: str) -> Iterator[None]:
    """Another process that uses that part of the cache."""
    code = f"""
import sys
from torchwheels.system import cache
cache.use(cache.place() / {name!r})
print(flush=True), sys.stdin.read()"""
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "torchwheels" / "src")}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code], env=variables, stdin=pipe, stdout=pipe
    ) as user:
        assert user.stdin and user.stdout and user.stdout.readline()
        yield
        user.stdin.close()


def test_what_others_have_in_the_cache_is_not_removed(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever names a folder of theirs as the cache, be it one with a `build`."""
    (cache / MARK).unlink()
    (cache / "build" / "of a user").mkdir()
    own = str(ROOT / "examples" / "own_project")
    for command in (["clean"], ["build", own, "--target=3.11-cpu", "--backend=local"]):
        with pytest.raises(SystemExit, match=r"which holds other files \(build\).*: name a new"):
            cli.main(command)
    assert (cache / "build" / "of a user").is_dir()
    (cache / MARK).touch()  # as the folder of somebody's wheels has it
    (cache / "thesis").mkdir()
    with pytest.raises(SystemExit, match=r"which holds other files \(.*\).*: name a new folder"):
        cli.main(["clean"])
    assert (cache / "build" / "of a user").is_dir()
    (cache / "thesis").rmdir()
    cli.main(["clean", "build/*"])  # it is a cache of torchwheels 0.1
    assert not (cache / "build" / "of a user").exists()
    (cache / "thesis").mkdir()  # which is no part of it
    cli.main(["clean"])
    assert (cache / "thesis").is_dir() and not (cache / "compiled").exists()


def test_what_is_named_is_removed_but_not_what_is_in_use(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (cache / "environments" / "two.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cli.main(["clean", "environments/*"])
    assert capsys.readouterr().out.splitlines() == [
        "torchwheels: removed environments/one, 0.2 GB",
        "torchwheels: kept environments/two: another process uses it",
        "torchwheels: freed 0.2 GB",
    ]
    for name in ("environments/two", "compiled"):  # as tests or a build
        (cache / name).mkdir(exist_ok=True)
        with user_of(name):
            cli.main(["clean", name])
            said = f"torchwheels: kept {name}: another process uses it"
            assert said in capsys.readouterr().out
            assert (cache / name).is_dir()
    with pytest.raises(
        SystemExit, match=r"nothing in .* is named 'nothing': `torchwheels env` lists"
    ):
        cli.main(["clean", "nothing"])
    cli.main(["clean"])
    assert not [path for path in cache.glob("*/*") if path.is_dir()]


def test_a_linked_part_is_emptied(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one on another disk, which stays there."""
    disk = tmp_path / "disk"
    (disk / "a").mkdir(parents=True)
    (disk / "a" / "file").touch()
    (disk / "file").touch()
    (tmp_path / "mine").mkdir()
    (disk / "link").symlink_to(tmp_path / "mine")
    shutil.rmtree(cache / "compiled")
    (cache / "compiled").symlink_to(disk)
    (tmp_path / "mine" / "file").touch()
    (cache / "environments" / "mine").symlink_to(tmp_path / "mine")
    cli.main(["clean"])
    assert (tmp_path / "mine" / "file").is_file()
    assert not (cache / "environments" / "mine").is_symlink()
    assert (cache / "compiled").is_symlink() and not [*disk.iterdir()]
    assert (tmp_path / "mine").is_dir() and not (cache / "environments" / "two").exists()
    said = capsys.readouterr().out
    assert "torchwheels: removed compiled, 0.0 GB" in said
    assert "torchwheels: removed the link environments/mine" in said
    with pytest.raises(SystemExit):
        cli.main(["clean", ""])
    assert "an argument is empty" in capsys.readouterr().err


def test_who_waits_for_a_folder_has_it_after_it_was_removed(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def removed_meanwhile(lock: TextIO, how: int) -> None:
        shutil.rmtree(cache / "build" / "x", ignore_errors=True)
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
    with system.cache.locked("build/x") as folder:
        assert folder.is_dir()


def test_ctrl_c_is_said_though_nothing_is_there_to_clear_away(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(environments, "make", interrupted)
    target = releases.load().target("3.11-cpu")
    with pytest.raises(KeyboardInterrupt):
        environments._install_torch(
            target, sys.executable, environments.Environment(cache / "none")
        )


def test_a_file_that_the_disk_has_no_room_for_is_named(tmp_path: Path) -> None:
    """Who writes knows no name."""
    with pytest.raises(OSError) as error, system.files.whole(tmp_path / "x"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert error.value.filename == str(tmp_path / "x")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device", "/x"), "the disk of /x is full: free some space"),
        (PermissionError(1, "Operation not permitted"), "Operation not permitted"),
        (
            OSError(28, "No space left on device"),
            "the disk is full: free some space (`torchwheels clean` removes",
        ),
        (  # of a copy
            OSError(28, "No space left on device", "/from", None, "/to"),
            "the disk of /to is full: free some space",
        ),
        (  # of a folder
            shutil.Error([("/from/x", "/to/x", "[Errno 28] No space left on device: '/to/x'")]),
            "the disk of /to/x is full: free some space",
        ),
        (shutil.Error([("/from/x", "/to/x", "why")]), "/from/x cannot be copied: why"),
        (OSError(2, "No such file", "/x"), "No such file: /x"),
        (OSError(21, "Is a directory", "/.x.partial", None, "/x"), "Is a directory: /x"),
        (
            CalledProcessError(1, ["python", Path("/x y")], stderr="no venv\n"),
            "python '/x y' ended with exit code 1: no venv",
        ),
        (CalledProcessError(2, ["gcc"]), "gcc ended with exit code 2: the messages above say why"),
        (
            PermissionError(13, "Permission denied", "/"),
            "permission denied: / belongs to the user 0; run",
        ),
        (
            PermissionError(13, "Permission denied", f"{Path(__file__).parent}/x"),
            f"permission denied: {Path(__file__).parent}/x: {Path(__file__).parent} is yours, and its permissions",
        ),
    ],
)
def test_what_may_not_be_done_is_one_sentence(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no file is named, or a command fails that never should."""

    def fail(*_: object) -> None:
        raise error

    def unreadable(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(cli.cache, "lines", fail)
    monkeypatch.setattr(Path, "exists", unreadable)  # as below a folder that may not be read
    mine = Path(__file__).stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: 1 if "belongs" in said else mine)
    with pytest.raises(SystemExit) as ended:
        cli.main(["env"])
    assert str(ended.value.code).startswith(f"torchwheels: {said}")


def test_the_earlier_name_of_an_option_is_taken_and_not_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["test"])
    assert "the following arguments are required: --target\n" in capsys.readouterr().err
    for words in (["--cell", "3.11-no"], ["--cell=3.11-no"]):
        with pytest.raises(SystemExit, match=r"there is no target '3\.11-no'"):
            cli.main(["test", "x", *words])


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["--version"])
    assert (done.value.code, capsys.readouterr().out) == (0, f"torchwheels {__version__}\n")


@pytest.mark.parametrize(
    ("patterns", "names", "count"),
    [
        (["3.11-cpu-torch2.5"], ["3.11-cpu-torch2.5"], 1),
        (["3.1[12]-cu124"], ["3.11-cu124", "3.12-cu124-torch2.5"], 6),
        (["3.14-cu12"], ["3.14-cu128", "3.14-cu126-torch2.9"], 14),
        (
            ["torch2.15", "3.10-cu121"],
            ["3.14t-cpu-torch2.15", "3.11-cu132-aarch64", "3.10-cu121"],
            37,
        ),
    ],
)
def test_targets_are_a_table_with_a_filter(
    patterns: list[str],
    names: list[str],
    count: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    cli.main(["targets", *patterns])
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["target", "Python", "torch", "CUDA", "image"]
    assert {*names} <= {line.split()[0] for line in lines}
    assert len(lines) == count
    with pytest.raises(
        SystemExit, match=r"no target is named 9\.9: `torchwheels targets` lists all"
    ):
        cli.main(["targets", "9.9"])


def test_ctrl_c_says_what_is_left(
    cache: Path, own_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    dist = tmp_path / "dist"

    def build_wheel(options: object, target: object, *_: object) -> Path:
        if built:
            raise KeyboardInterrupt
        built.append(target)
        dist.mkdir()
        (dist / "a.whl").touch()
        return dist / "a.whl"

    built: list[object] = []
    monkeypatch.setattr(build, "build_wheel", build_wheel)
    command = ["build", str(own_project), f"--dist={dist}", "--backend=local"]
    with pytest.raises(SystemExit) as stopped:
        cli.main([*command, "--target=3.11-cpu", "--target=3.12-cpu"])
    assert stopped.value.code == 130
    assert capsys.readouterr().err.splitlines() == [
        f"torchwheels: stopped; {cache} keeps what the next build can use (`torchwheels clean` removes it)",
    ]


def test_who_waits_for_a_lock_hears_signals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A call that waits hears none that came just before it."""
    answers = iter([False, False, True])

    def flock(_: int, how: int) -> None:
        assert how == fcntl.LOCK_EX | fcntl.LOCK_NB
        if not next(answers):
            raise BlockingIOError

    monkeypatch.setattr(fcntl, "flock", flock)
    system.files.acquire(0, tmp_path)
    assert next(answers, None) is None
    said = f"torchwheels: waiting for another process that uses {tmp_path}\n"
    assert capsys.readouterr().out == said
