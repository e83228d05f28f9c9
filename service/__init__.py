"""The build-and-test service: what the nox sessions call. It is no part of the wheel."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
"""The top of the source tree."""


class ServiceError(Exception):
    """Something the user can mend; the message is one sentence that says how."""


@contextlib.contextmanager
def errors_for_the_user() -> Iterator[None]:
    """Ends a command with the sentence of a `ServiceError`, and without a traceback.

    The same where a file belongs to someone else, as all do that `sudo nox` leaves.
    """
    try:
        yield
    except ServiceError as error:
        sys.exit(f"extops: {error}")
    except PermissionError as error:
        wanted = Path(error.filename)
        there = next(path for path in (wanted, *wanted.parents) if os.path.lexists(path))
        said = f"permission denied: {there} belongs to {there.owner()}"
        if there.is_relative_to(ROOT):
            said += f'; run `sudo chown --recursive "$USER" {shlex.quote(str(ROOT))}`'
        sys.exit(f"extops: {said}")


def native_libraries() -> ModuleType:
    """`extops._libraries`, loaded by its path: the build runs where extops is not installed."""
    name = "extops_libraries"
    if name not in sys.modules:
        path = ROOT / "package" / "extops" / "_libraries.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up while it is executed
        spec.loader.exec_module(module)
    return sys.modules[name]
