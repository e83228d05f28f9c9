"""Ends processes with the one that started them, also where that was killed and could not do it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PARENT = "EXTOPS_PARENT"
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_LIBC = ctypes.CDLL(None)


def end_with_parent() -> None:
    """Ends this process with its parent where that is one of ours, and has ours do the same.

    What a user starts may outlive their shell.
    """
    if os.environ.get(_PARENT) == str(os.getppid()):
        terminate_with_parent()
    os.environ[_PARENT] = str(os.getpid())


def terminate_with_parent() -> None:
    """Has the kernel send this process SIGTERM when its parent ends: a `preexec_fn`."""
    if sys.platform == "linux":  # others build in Docker, too
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
