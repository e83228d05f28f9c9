"""What is kept between builds, in a folder of the user: who uses it, its size, and its removal."""

import contextlib
import fcntl
import fnmatch
import functools
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from torchwheels.errors import UserError
from torchwheels.system.files import MARK, acquire, check_writable, expanded, marked
from torchwheels.system.output import in_columns

PARTS = ("environments", "build", "compiled")
_OWN_MARK = ".torchwheels-cache"
_IN_PARTS = ("environments", "build")  # of which each part has a lock of its own


def place() -> Path:
    """Where environments and sources are kept between builds."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    named = expanded(os.environ.get("TORCHWHEELS_CACHE") or f"{home}/torchwheels")
    return named.absolute()  # builds run in other folders


def own() -> Path:
    """The cache, which is this tool's alone, or an error: `clean` empties it."""
    folder = place()
    if strange := re.sub(r"[\w.+@~/ -]", "", str(folder)):
        raise UserError(
            f"the cache is {folder}, and build tools take {strange[0]!r} in a path for something else: have "
            "TORCHWHEELS_CACHE name a folder without it"
        )
    check_writable(folder, "TORCHWHEELS_CACHE")
    marked(folder)
    # In a container a part is a volume.
    names = {x.name for x in folder.iterdir() if not x.is_mount()} - {"lost+found"}
    others = names - {MARK}
    # Until 0.2 it had the mark alone that a folder with somebody's wheels has, too.
    is_older = MARK in names and {x.partition(".")[0] for x in others} <= {*PARTS}
    if others and not is_older and _OWN_MARK not in names:
        raise UserError(
            f"TORCHWHEELS_CACHE names {folder}, which holds other files ({min(others)}), and `torchwheels clean` "
            "empties it: name a new folder"
        )
    for mark in (MARK, _OWN_MARK):
        (folder / mark).touch()
    return folder


@contextlib.contextmanager
def locked(name: str, wait: bool = True) -> Iterator[Path]:
    """The folder `name` of the cache, which no other process changes until the end.

    Where one does now, and this shall not `wait`, BlockingIOError is raised.
    """
    folder = own() / name
    folder.parent.mkdir(exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        if wait:
            acquire(lock.fileno(), folder)
        else:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder.mkdir(exist_ok=True)  # only now: who had the lock may have removed it
        yield folder


@functools.cache
def use(folder: Path) -> Path:
    """The folder of the cache, which nobody removes before this process ends, and with it the lock."""
    lock = os.open(folder.with_name(f"{folder.name}.used"), os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return folder


def size(folder: Path) -> int:
    """The bytes that a folder takes on the disk."""
    found = 0
    for parent, _, names in os.walk(folder):  # which passes over folders that have just gone
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found += os.lstat(f"{parent}/{name}").st_blocks * 512
    return found


def gigabytes(number: int) -> str:
    """`1.2 GB`."""
    return f"{number / 1e9:.1f} GB"


def entries() -> Iterator[str]:
    """The names of what is there, such as `environments/3.11-torch2.13.0+cpu-0a1b2c3d`."""
    folder = place()
    for top in sorted(folder.glob("*")):
        for path in sorted(top.glob("*")) if top.name in _IN_PARTS else [top]:
            if path.is_dir() and top.name in PARTS:
                yield str(path.relative_to(folder))


def lines() -> Iterator[str]:
    """What is there, with its sizes."""
    folder = place()
    sizes = {name: size(folder / name) for name in entries()}
    yield f"the cache is {folder}: {gigabytes(sum(sizes.values()))}"
    yield from in_columns([(f"  {name}", gigabytes(each)) for name, each in sizes.items()])


def remove(patterns: Sequence[str]) -> Iterator[str]:
    """Removes what the patterns name, and says of each what it was; what is in use stays."""
    names = [x for x in entries() if any(fnmatch.fnmatchcase(x, each) for each in patterns)]
    if patterns != ["*"] and not names:
        named = f"nothing in {place()} is named {' or '.join(map(repr, patterns))}"
        raise UserError(f"{named}: `torchwheels env` lists what there is")
    freed = 0
    for name in names:
        lock = (place() / name).with_name(f"{Path(name).name}.used")
        try:
            with locked(name, wait=False) as folder, lock.open("w") as used:
                fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if folder.is_symlink() and folder.parent != place():
                    folder.unlink()  # only a whole part lies elsewhere: this is a link of the user's
                    yield f"removed the link {name}"
                    continue
                taken = size(folder)
                for path in folder.iterdir():
                    is_folder = path.is_dir() and not path.is_symlink()
                    shutil.rmtree(path) if is_folder else path.unlink()
                with contextlib.suppress(OSError):  # a link to another disk, or a mount point
                    folder.rmdir()
        except BlockingIOError:
            yield f"kept {name}: another process uses it"
            continue
        freed += taken
        yield f"removed {name}, {gigabytes(taken)}"
    yield f"freed {gigabytes(freed)}"
