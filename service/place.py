"""Where a session runs: in the container image of its cell, or on this machine.

A session takes these options after `--`; what is not among them reaches pytest:

    nox -s build-3.11-cu130 -- --backend docker --builder a-remote-one
"""

from __future__ import annotations

import argparse
import difflib
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from service import ServiceError

BACKENDS = ("docker", "local")
# Those of this module, and the suite's own (tests/conftest.py).
_OPTIONS = ("--backend", "--builder", "--source", "--require-gpu", "--thorough")
# How alike a misspelt option must be, of 1: pytest has none over 0.63, pip none over 0.7.
_ALIKE = 0.8
_ENGINE_TIMEOUT = 10  # seconds: an engine behind ssh needs a few, a dead one shall not hold us up


@dataclass(frozen=True)
class Options:
    """What was asked for, on the command line or in the environment."""

    backend: str | None = None
    builder: str | None = None
    source: str | None = None


@dataclass(frozen=True)
class Place:
    """The place that was picked, and why."""

    docker: bool
    reason: str

    def __str__(self) -> str:
        return f"backend {'docker' if self.docker else 'local'}: {self.reason}"


def options(
    arguments: Sequence[str], environ: Mapping[str, str] = os.environ
) -> tuple[Options, list[str]]:
    """The options among `arguments`, and the other arguments.

    What is almost an option is an error: passed on, it would do nothing in a build, and stop a test
    only after its image has been built.
    """
    for argument in arguments:
        name = argument.partition("=")[0]
        near = difflib.get_close_matches(name, _OPTIONS, n=1, cutoff=_ALIKE)
        if name.startswith("--") and near and name not in _OPTIONS:
            raise ServiceError(f"there is no option {name}: did you mean {near[0]}?")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--backend", default=environ.get("EXTOPS_BACKEND") or None)
    parser.add_argument("--builder", default=environ.get("BUILDX_BUILDER") or None)
    parser.add_argument("--source")
    try:
        known, others = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ServiceError(str(error)) from None
    if known.backend not in (None, *BACKENDS):
        raise ServiceError(
            f"the backend is {known.backend!r}, but {' or '.join(BACKENDS)} is expected "
            "(--backend, or EXTOPS_BACKEND)"
        )
    return Options(known.backend, known.builder, known.source), others


def engine() -> str:
    """The Docker engine that answers, as `Docker 26.1.5`; an error that says why none does."""
    try:
        version = _docker("version", "--format", "{{.Server.Version}}")
        _docker("buildx", "version")
    except FileNotFoundError:
        raise ServiceError("there is no `docker` command") from None
    except subprocess.TimeoutExpired:
        raise ServiceError(f"the engine did not answer in {_ENGINE_TIMEOUT} seconds") from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or ["`docker` failed without a word"]
        raise ServiceError(explained(said[-1].rstrip("."))) from None
    return f"Docker {version}"


def explained(said: str, environ: Mapping[str, str] = os.environ) -> str:
    """What was said when no engine answered; in our words where its socket is another group's."""
    socket = Path(environ.get("DOCKER_HOST", "/var/run/docker.sock").removeprefix("unix://"))
    if "permission denied" not in said.lower() or not socket.is_socket():
        return said
    return (
        f"{socket} is open to the group {socket.group()}: run "
        f'`sudo usermod --append --groups {socket.group()} "$USER"` and log in again'
    )


def _docker(*arguments: str) -> str:
    return subprocess.run(
        ["docker", *arguments],
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
        timeout=_ENGINE_TIMEOUT,
    ).stdout.strip()


def choose(asked: str | None) -> Place:
    """The place of a session: the one asked for, else Docker where an engine answers."""
    if asked == "local":
        return Place(docker=False, reason="asked for")
    try:
        found = engine()
    except ServiceError as error:
        if asked == "docker":
            raise ServiceError(
                f"no Docker engine answers ({error}): start one, or use `--backend local`"
            ) from None
        return Place(docker=False, reason=f"no Docker engine answers ({error})")
    return Place(docker=True, reason="asked for" if asked else f"{found} answers")
