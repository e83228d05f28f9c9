"""Runs commands and kills every process they started, on their exit or ours.

Started as a program, this file is the process in between. It adopts the processes that the command leaves running,
whatever their group or session: ninja gives each compiler a group of its own.
"""

import collections
import contextlib
import ctypes
import errno
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that ask a process to end."""
_LAST_LINES = 200
FREE_SPACE = "free some space (`torchwheels clean` removes what is kept between builds)"
"""What to do where the disk is full."""


@contextlib.contextmanager
def limited(seconds: float, stop: Callable[[], object]) -> Iterator[threading.Event]:
    """Calls `stop` after so many seconds, where there is a limit: the event says so then."""
    late = threading.Event()

    def end() -> None:
        late.set()
        stop()

    timer = threading.Timer(seconds or threading.TIMEOUT_MAX, end)
    timer.daemon = True
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()


def run(
    command: Sequence[str | Path], timeout: float | None = None, given: bytes | None = None, **options: Any
) -> subprocess.CompletedProcess[Any]:  # fmt: skip
    """`subprocess.run` with `given` as input; no process outlives it. `options` are those of `Popen`."""
    if options.get("text"):
        options["errors"] = "replace"
    if given is not None:
        options["stdin"] = subprocess.PIPE
    with start(command, **options) as process:
        try:
            out, err = process.communicate(given, timeout=timeout)
        finally:
            end(process)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def ask(command: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of what starts nothing else; what it says is kept, as text of whatever encoding."""
    return subprocess.run(command, capture_output=True, text=True, errors="replace", **options)


def start(command: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
    """Starts `command`, whose processes end at the latest with the thread that calls this."""
    between = [sys.executable, "-I", "-S", __file__, str(os.getpid()), *map(str, command)]
    return subprocess.Popen(between, start_new_session=True, **options)


def follow(
    command: Sequence[str | Path],
    limit: float = 0,
    hidden: str = "",
    shown: Callable[[str], str] = str,
    **options: Any,
) -> tuple[int, str]:
    """Runs `command`, and passes on what it prints, in the form in which it is `shown`, but lines that match `hidden`.

    Returns its exit code and the last lines. After `limit` seconds, if there is one, it is ended, and TimeoutExpired
    raised.
    """
    last: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
    options |= {"stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    with (
        start(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, **options) as process,
        limited(limit, process.terminate) as late,
    ):
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if hidden and re.match(hidden, line):
                    continue
                if text := shown(line):
                    print(text, end="", flush=True)
                last.append(line)
        finally:
            end(process)
    if late.is_set():
        raise subprocess.TimeoutExpired(command, limit)
    return process.returncode, "".join(last)


def end(process: subprocess.Popen[Any]) -> None:
    """Ends what `start` has started; it is gone then."""
    process.terminate()
    process.wait()  # `with` does not, after Ctrl-C


def is_of_full_disk(error: Exception) -> bool:
    """Whether an error says that the disk is full, which is no fault of what was read or built."""
    return isinstance(error, OSError) and error.errno == errno.ENOSPC


def explained(error: Exception) -> str:
    """What to say of an error: ours says it."""
    if isinstance(error, subprocess.CalledProcessError):
        command = shlex.join(map(str, error.cmd))
        said = error.stderr.strip() if isinstance(error.stderr, str) else ""
        return f"{command} ended with exit code {error.returncode}: {said or 'the messages above say why'}"
    if not isinstance(error, OSError):
        return str(error)
    if isinstance(error, shutil.Error):  # of a folder that is copied: what is said of each file
        source, copy, why = error.args[0][0]
        if os.strerror(errno.ENOSPC) in why:
            return f"the disk of {copy} is full: {FREE_SPACE}"
        return f"{source} cannot be copied: {why}"
    # Where there are two, of a copy or another name, the first is that of what is there already.
    named = error.filename2 or error.filename
    if is_of_full_disk(error):
        of_file = f" of {named}" if named else ""
        return f"the disk{of_file} is full: {FREE_SPACE}"
    if named is None or not isinstance(error, PermissionError):
        return ": ".join(map(str, filter(None, (error.strerror or error, named))))
    path = Path(named)
    # `Path.exists` raises an error below a folder that may not be read.
    there = next(each for each in (path, *path.parents) if os.access(each, os.F_OK))
    owner = there.stat().st_uid
    if owner == os.geteuid():
        way_out = "is yours, and its permissions do not allow that: change them (`chmod`)"
        return f"permission denied: {path}: {there} {way_out}, or use another folder"
    way_out = f'run `sudo chown --recursive "$USER" {shlex.quote(str(there))}`'
    return f"permission denied: {there} belongs to the user {owner}; {way_out}, or use another one"


def end_with_parent() -> None:
    """Has the kernel send us SIGTERM when the process that started us is gone, even where it was killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def main() -> int:
    """Runs the command after the number of our parent; returns its exit code, as a shell does."""
    parent, *command = sys.argv[1:]
    # Signals are blocked until `sigwait`, so none is lost in between.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOPPING, signal.SIGCHLD})
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    end_with_parent()
    if os.getppid() != int(parent):
        return 1
    try:
        child = os.posix_spawnp(
            command[0], command, os.environ, setsigmask=before, setsigdef=[signal.SIGPIPE]
        )
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    code = _exit_code(child)
    _kill_children()
    return code


def _exit_code(child: int) -> int:
    """Waits for `child`, or for a signal that asks us to end."""
    while True:
        number = signal.sigwait({*STOPPING, signal.SIGCHLD})
        if number != signal.SIGCHLD:
            return 128 + number
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    code = os.waitstatus_to_exitcode(ended[1])
                    return code if code >= 0 else 128 - code


def _kill_children() -> None:
    """Kills all children, and then those that we inherit from them."""
    us = os.getpid()
    with contextlib.suppress(ChildProcessError):
        while True:
            for process in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    # The name, in parentheses, may hold any character.
                    _, ppid, *_ = (process / "stat").read_text().rpartition(")")[2].split()
                    if int(ppid) == us:
                        os.kill(int(process.name), signal.SIGKILL)
            os.waitpid(-1, 0)


if __name__ == "__main__":
    sys.exit(main())
