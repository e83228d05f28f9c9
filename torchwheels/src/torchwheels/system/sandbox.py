"""Reads untrusted files in a separate process with limits; in a user namespace, a malicious file can only crash that.

The process then has no network, sees no other process, and of the files only what it is to read, Python and the
system's libraries. Where the kernel gives it no namespace, it has the user's rights: SECURITY.md says so.
"""

import contextlib
import ctypes
import errno
import json
import os
import pickle
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

from torchwheels.errors import RefusedError, UserError, of_code
from torchwheels.system import processes
from torchwheels.system.files import scratch

Reader: TypeAlias = Callable[..., Any]

MEMORY = 12 * 10**9
"""Bytes of address space, for each process of a reader."""
FILE_SIZE = 4 * 10**9
SECONDS = 900
_KEPT = ("PATH", "LD_LIBRARY_PATH", "TORCHWHEELS_ARCHITECTURES")
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/nix/store", "/etc/ld.so.cache", "/dev/null")


def call(reader: Reader, path: Path, *arguments: Any, writes: Path | None = None) -> Any:
    """What `reader` returns for the archive `path`, or for the wheels in the folder `path`, as JSON has it.

    An error says what it took too much of. The reader's folder goes away with all that it writes, and
    whatever it starts ends with it. `writes`: another folder that it may write.
    """
    path = path.absolute()
    with scratch() as folder:
        home = folder / "home"
        home.mkdir()
        variables = {name: os.environ[name] for name in _KEPT if name in os.environ}
        variables |= {"HOME": str(home), "TMPDIR": str(home), "LANG": "C.UTF-8"}
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        command = [sys.executable, "-c", "from torchwheels.system import sandbox; sandbox.main()"]
        readable = [*_of_python(), path, path.parent / "variants"]
        readable += [Path(os.path.realpath(x)) for x in path.glob("*.whl") if x.is_symlink()]
        writable = [home, *([writes.absolute()] if writes else ())]
        given = pickle.dumps((readable, writable, reader, (path, *arguments)))
        pipe = subprocess.PIPE
        try:
            done = processes.run(command, SECONDS, given, env=variables, cwd=home, stdout=pipe)
        except subprocess.TimeoutExpired:
            raise _refused(path, f"reading it takes more than {SECONDS} s") from None
    if done.returncode > 128:
        raise _refused(path, f"its reader died of signal {done.returncode - 128}")
    if not done.stdout:
        raise _refused(path, f"its reader ended with exit code {done.returncode}, and said nothing")
    answer = json.loads(done.stdout)
    if "refused" in answer:
        raise of_code(answer["code"])(answer["refused"])
    if "full" in answer:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), answer["full"])
    if "error" in answer:
        raise _refused(path, answer["error"])
    return answer["result"]


def _refused(path: Path, why: str) -> UserError:
    kind = RefusedError if path.suffix == ".whl" else UserError
    return kind(f"{path.name} cannot be checked: {why}")


def _of_python() -> list[Path]:
    """Where Python is, what it imports and what the linker loads, without the folder that a user happens to be in."""
    here = Path(__file__).resolve().parents[2]
    names = [sys.prefix, sys.base_prefix, *sys.path]
    names += os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    return [here, *(x for x in map(Path, filter(None, names)) if x.resolve() != Path.cwd())]


def main() -> None:
    """The process of a reader: what to call comes in, and the answer goes out."""
    for limit, value in (
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_FSIZE, FILE_SIZE),
        (resource.RLIMIT_CPU, SECONDS),
        (resource.RLIMIT_CORE, 0),
    ):
        _, most = resource.getrlimit(limit)
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(limit, (value, value))
    try:
        readable, writable, reader, arguments = pickle.load(sys.stdin.buffer)
        with contextlib.suppress(OSError):  # of a kernel that lets only root do this, or nobody
            _confine(map(Path, (*_SYSTEM, *readable)), writable)
        text = json.dumps({"result": reader(*arguments)})
    except UserError as error:
        text = json.dumps({"refused": str(error), "code": error.code})
    except MemoryError:
        text = json.dumps({"error": f"reading it takes more than {MEMORY / 1e9:g} GB of memory"})
    except Exception as error:  # of any kind, by what was read
        text = json.dumps({"error": f"{type(error).__name__}: {error}"})
        if processes.is_of_full_disk(error):
            text = json.dumps({"full": str(getattr(error, "filename", None) or Path.cwd())})
    sys.stdout.write(text)


# Of linux/sched.h, linux/mount.h and linux/capability.h.
_NEW_NAMESPACES = 0x10000000 | 0x00020000 | 0x40000000 | 0x08000000 | 0x20000000
"""Of users, mounts, the network, shared memory and processes."""
_MS_BIND_ALL, _MNT_DETACH = 4096 | 16384, 2
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _READ_ONLY = 442, -100, 0x8000, 1
_CAPABILITIES = 0x20080522
_INSIDE = 1  # not root: programs of root's get all capabilities


def _confine(readable: Iterable[Path], writable: Iterable[Path]) -> None:
    """Moves this process into namespaces of its own, where it has these files and folders alone."""
    users = {"uid_map": f"{_INSIDE} {os.getuid()} 1", "gid_map": f"{_INSIDE} {os.getgid()} 1"}
    _kernel("unshare", _NEW_NAMESPACES)
    for name, text in {"setgroups": "deny", **users}.items():
        Path("/proc/self", name).write_text(text)
    if child := os.fork():  # which is in the namespace of processes
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(code if code >= 0 else 128 - code)
    home, writable = Path.cwd(), [*writable]
    root = home.with_name("root")
    root.mkdir()
    _kernel("mount", b"none", bytes(root), b"tmpfs", 0, None)
    for path in sorted({*readable, *writable}):
        _bind(path, root)
    (root / "proc").mkdir()
    _kernel("mount", b"none", bytes(root / "proc"), b"proc", 0, None)
    read_only = (ctypes.c_uint64 * 4)(_READ_ONLY)
    place = _AT_FDCWD, bytes(root), _AT_RECURSIVE
    _kernel("syscall", _MOUNT_SETATTR, *place, read_only, ctypes.sizeof(read_only))
    for path in writable:
        _bind(path, root)
    os.chdir(root)
    _kernel("pivot_root", b".", b".")
    _kernel("umount2", b".", _MNT_DETACH)
    os.chdir(home)
    _kernel("capset", (ctypes.c_uint32 * 2)(_CAPABILITIES), (ctypes.c_uint32 * 6)())


def _bind(path: Path, root: Path) -> None:
    """Has `path`, if there is one, below `root`, too."""
    place = root / path.relative_to("/")
    if path.is_symlink() and str(path) in _SYSTEM:  # as /lib is one into /usr
        place.symlink_to(path.readlink())
    elif path.exists():
        (place if path.is_dir() else place.parent).mkdir(parents=True, exist_ok=True)
        if not place.exists():
            place.touch()
        _kernel("mount", bytes(path), bytes(place), None, _MS_BIND_ALL, None)


def _kernel(name: str, *arguments: Any) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), name)
