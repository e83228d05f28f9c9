"""Compiles the libraries of extops; `setup.py` is setuptools' side of it. None of this is part of the wheel."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The top of the source tree."""


class UserError(Exception):
    """An error that the user can fix; the message is one sentence that says how."""


@contextlib.contextmanager
def errors_for_the_user() -> Iterator[None]:
    """Ends a command with the sentence of a `UserError`, and without a traceback."""
    try:
        yield
    except UserError as error:
        sys.exit(f"extops: {error}")
