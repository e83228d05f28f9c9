"""The Docker engine. Sessions ask for it where nothing but nox is installed, so this needs no more."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchwheels.errors import UserError

TIMEOUT = 10  # seconds: an engine behind ssh needs a few, a dead one shall not hold us up


@dataclass(frozen=True)
class Engine:
    """A Docker engine that answers, and the builder of `docker buildx` to use."""

    version: str
    builder: str | None = None
    context: str | None = None
    """Of `docker context ls`, where the builder is that of another engine."""
    jobs: str | None = None
    """How many compilers one build may run at once; None: what it finds there."""
    alone: bool = True
    """Whether nothing else builds at the same time: else each line that is printed names its target."""


def find_engine(builder: str | None = None) -> Engine:
    """The Docker engine; an error says why none answers."""
    try:
        contexts = docker("context", "ls", "--format={{.Name}}").splitlines()
        context = builder if builder in contexts else None
        there = ("--context", context) if context else ()
        version = docker(*there, "version", "--format", "{{.Server.Version}}")
        docker("buildx", "version")
    except FileNotFoundError:
        raise UserError("there is no `docker` command") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"the engine did not answer in {TIMEOUT} seconds") from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or ["`docker` failed without a word"]
        raise UserError(_explained(said[-1].rstrip("."))) from None
    return Engine(version, builder, context)


def docker(*arguments: str) -> str:
    """What the command `docker` prints."""
    return subprocess.run(
        ["docker", *arguments],
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
        timeout=TIMEOUT,
    ).stdout.strip()


def _explained(said: str, environ: Mapping[str, str] = os.environ) -> str:
    """What was said when no engine answered; in our words where its socket is another group's."""
    socket = Path(environ.get("DOCKER_HOST", "/var/run/docker.sock").removeprefix("unix://"))
    if "permission denied" not in said.lower() or not socket.is_socket():
        return said
    return (
        f"{socket} is open to the group {socket.group()}: run "
        f'`sudo usermod --append --groups {socket.group()} "$USER"` and log in again'
    )
