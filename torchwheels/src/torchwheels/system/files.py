"""Files of this tool's own, and of others: which are whose, and how one is written and hashed."""

import contextlib
import ctypes
import errno
import fcntl
import functools
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from torchwheels.errors import RefusedError, UserError
from torchwheels.system.output import masked

MARK = ".torchwheels"
"""A file in each folder that is this tool's own: no sources are there."""


def marked(folder: Path) -> Path:
    """Makes `folder`, and marks it as this tool's own, where nothing is there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        (folder / MARK).touch()
    return folder


def expanded(path: str) -> Path:
    """`path`, whose `~` is a home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        why = "is in a home folder that there is not"
        raise UserError(f"{path} {why}: set HOME, or write the whole path") from None


def below(folder: Path) -> Iterator[Path]:
    """All in a folder but folders; a link to one may be anybody's."""
    for path in sorted(folder.iterdir()):
        is_folder = path.is_dir() and not path.is_symlink()
        yield from below(path) if is_folder else [path]


def own_files(folder: Path) -> list[Path]:
    """All files of a folder that gets published, if it is there; an error where one of them lies elsewhere."""
    found = [*below(folder)] if folder.is_dir() else []
    if link := next((x for x in (folder, *found) if x.is_symlink()), None):
        raise RefusedError(
            f"{link} is a link, and an index would publish what it leads to: put a copy of that in its place"
        )
    return found


SCRATCH = ".torchwheels-scratch"
"""A file in each folder of a run: the mark alone would be that of a folder with somebody's wheels, too."""


def acquire(lock: int, used: Path) -> None:
    """Takes the lock of `used`, however long another process has it.

    It asks again and again: with a call that waits, a signal that came just before it would wait, too.
    """
    is_said = False
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not is_said:
                print(f"torchwheels: waiting for another process that uses {used}", flush=True)
            is_said = True
            time.sleep(0.1)


@contextlib.contextmanager
def scratch(place: str | Path = "", prefix: str = "torchwheels-") -> Iterator[Path]:
    """A folder that goes away at the end, or, where this process is killed, with the next one that is made in `place`.

    Without a place it is in that of temporary files.
    """
    with tempfile.TemporaryDirectory(prefix=prefix, dir=place or None) as name:
        lock = os.open(name, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)  # while we live
            Path(name, SCRATCH).touch()
            Path(name, "work").mkdir()
            for other in Path(name).parent.glob(f"{prefix}*"):
                _remove_left(other)
            yield Path(name) / "work"
        finally:
            os.close(lock)


def _remove_left(folder: Path) -> None:
    """Removes the folder of a run that no process uses."""
    with contextlib.suppress(OSError):  # of another user, say
        lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (folder / SCRATCH).is_file() and os.fstat(lock).st_uid == os.geteuid():
                shutil.rmtree(folder)
        finally:
            os.close(lock)


def check_writable(folder: Path, option: str) -> None:
    """Raises an error, before any work, where the folder that an option names cannot be written, or made."""
    try:
        there = next(x for x in (folder, *folder.absolute().parents) if os.path.lexists(x))
        if not there.is_dir():
            raise UserError(f"`{option}` names {folder}, but {there} is no folder: name one")
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise UserError(
            f"`{option}` names {folder}, where nothing can be written ({error.strerror}): name another folder"
        ) from None


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of fcntl.h and linux/fs.h


def exchanged(one: Path, other: Path) -> bool:
    """Has two folders change their places, in which there is one at any time; not all file systems can do that."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)  # not every libc has it
    places = _AT_FDCWD, bytes(one), _AT_FDCWD, bytes(other)
    return rename is not None and rename(*places, _RENAME_EXCHANGE) == 0


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A file to write, which then takes the place of `path`: whoever reads that meanwhile finds the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # of a full disk, nobody says which
        raise
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a file that others may see: the whole of it at once, and without the passwords of addresses."""
    with whole(path) as file:
        file.write_text(masked(text), encoding="utf-8")


def as_json(document: object) -> str:
    """The text of a file that says this."""
    return json.dumps(document, indent=2) + "\n"


def read(path: Path, decode: Callable[[bytes], Any]) -> Any:
    """What a file says; OSError where it is none: a pipe, say, would never end. ValueError where it is no text."""
    if not (path.is_file() or path.is_dir()):
        raise FileNotFoundError(errno.ENOENT, "No such file, or it is a pipe", str(path))
    try:
        return decode(path.read_bytes())
    except RecursionError:
        raise ValueError("it has too many tables in one another") from None


read_json = functools.partial(read, decode=msgspec.json.decode)


def sha256(path: Path) -> str:
    """The hash of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
