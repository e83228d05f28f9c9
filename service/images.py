"""Builds a cell's stages with BuildKit: what nox sessions with `--backend docker` call for images.

BuildKit is `docker buildx`, called as a command: the Python SDK only knows the engine's old
builder. That also reaches builders on other machines, by their name.
"""

from __future__ import annotations

import collections
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import uuid
from pathlib import Path
from typing import Any

from service import ROOT, ServiceError, processes
from service.compile import commit, git
from service.matrix import Cell, Matrix, load

# Passed on into the sessions in the image, without a part in the layer cache.
SETTINGS = ("EXTOPS_TORCH_INDEX", "MAX_JOBS")

# What BuildKit says, and the sentence for it; {0} is the cell's image, {1} the cell.
_KNOWN_FAILURES = (
    (
        r"failed to resolve source metadata for|pull access denied|manifest unknown",
        "the base image {0} is not here and cannot be pulled: `docker pull {0}` says why, "
        "EXTOPS_BASE_IMAGE names another one, and `--backend local` builds without Docker",
    ),
    (
        r"no space left on device|disk quota exceeded",
        "the disk of the Docker engine is full: `docker system df` shows what fills it, "
        "and `docker builder prune` frees the build cache",
    ),
    (
        r"no builder .* found",
        "there is no such builder: `docker buildx ls` lists those there are, "
        "and `docker buildx create` adds one",
    ),
    (
        r"annot connect to the Docker daemon|error during connect|connection refused"
        r"|failed to receive status|error reading from server",
        "the Docker engine does not answer any more: start it and try again, "
        "or use `--backend local`",
    ),
)
_FAILURE_IS_IN_THE_LAST_LINES = 40

# A session's own words inside BuildKit's plain progress: `#12 3.456 extops: compiling …`.
SAID = re.compile(r"(?:#\d+ [\d.]+ )?(?:nox > )?(extops: .*)")


def base_image(cell: Cell) -> str:
    """The cell's base image; EXTOPS_BASE_IMAGE overrides it, with a mirror's name, say."""
    return os.environ.get("EXTOPS_BASE_IMAGE") or cell.variant.image


def build_arguments(cell: Cell, matrix: Matrix | None = None) -> dict[str, str]:
    """The arguments of the Dockerfile that follow from the matrix alone."""
    tools = (matrix or load()).tools
    return {
        "BASE_IMAGE": cell.variant.image,
        "CELL": cell.name,
        "PYTHON": cell.python,
        # Where NVIDIA's images have it; none of them sets the variable.
        "CUDA_HOME": "/usr/local/cuda" if cell.variant.cuda else "",
        "UV": tools["uv"][0],
        "NOX": tools["nox"][0],
    }


def _arguments(cell: Cell) -> dict[str, str]:
    """All arguments: also the base image of this machine, and what git knows of the sources."""
    found = {
        **build_arguments(cell),
        "BASE_IMAGE": base_image(cell),
        "EXTOPS_COMMIT": commit(),
        "SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH")
        or git("log", "-1", "--format=%ct"),
        "EXTOPS_ARCHITECTURES": os.environ.get("EXTOPS_ARCHITECTURES"),
        "CCACHE_RECACHE": os.environ.get("CCACHE_RECACHE"),
        # Not `--no-cache-filter`, with which BuildKit empties the cache mounts too.
        "EXTOPS_FRESH": uuid.uuid4().hex if os.environ.get("EXTOPS_FRESH") else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def target_name(cell: Cell) -> str:
    """The cell's name where dots are not allowed, in a bake file and as an image's tag."""
    return cell.name.replace(".", "-")


def bake_file(cells: list[Cell]) -> dict[str, Any]:
    """A file for `docker buildx bake`: a target for the wheel of each cell."""
    targets = {
        target_name(cell): {
            "context": ".",
            "target": "export",
            "args": _arguments(cell),
            "output": [f"type=local,dest=build/bake/{cell.name}"],
        }
        for cell in cells
    }
    return {"group": {"default": {"targets": list(targets)}}, "target": targets}


def exported_wheel(cell: Cell, work: Path, builder: str | None = None) -> Path:
    """Builds the cell's wheel in its image, and returns the copy of it inside `work`."""
    output = work / "exported"
    _build(cell, "export", ["--output", f"type=local,dest={output}"], builder)
    (wheel,) = output.glob("*.whl")
    return wheel


def test_image(cell: Cell, wheel: Path, builder: str | None = None) -> str:
    """Builds the image that tests `wheel`, and returns its tag."""
    tag = f"extops-test:{target_name(cell)}"
    with tempfile.TemporaryDirectory(prefix="extops-wheel-") as folder:
        shutil.copy(wheel, folder)
        _build(
            cell, "test", ["--build-context", f"wheel={folder}", "--load", "--tag", tag], builder
        )
    return tag


def _build(cell: Cell, target: str, output: list[str], builder: str | None) -> None:
    command = ["docker", "buildx", "build", "--progress=plain", f"--target={target}", *output]
    if builder:
        command += ["--builder", builder]
    # Attestations would make the cached image another one each time.
    command += ["--provenance=false"]
    for name, value in _arguments(cell).items():
        command += ["--build-arg", f"{name}={value}"]
    settings = _settings()
    command += ["--secret=id=settings,env=EXTOPS_SETTINGS"] if settings else []
    code, last = follow([*command, str(ROOT)], {**os.environ, "EXTOPS_SETTINGS": settings})
    if code != 0:
        raise ServiceError(_explain(cell, last))


def _explain(cell: Cell, last: list[str]) -> str:
    text = "\n".join(last)
    for pattern, sentence in _KNOWN_FAILURES:
        if re.search(pattern, text):
            return sentence.format(base_image(cell))
    said = [found[1] for line in last if (found := SAID.match(line))]
    why = said[-1].removeprefix("extops: ") if said else "its messages above say why"
    return f"{cell.name} failed in Docker: {why}"


def _settings() -> str:
    """Shell assignments for the sessions in the image, empty where there are none.

    They reach BuildKit through the environment: a file might hold an index's password, and stay.
    """
    given = {name: os.environ[name] for name in SETTINGS if os.environ.get(name)}
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in given.items())


def follow(
    command: list[str],
    environment: dict[str, str] | None = None,
    keep: int | None = _FAILURE_IS_IN_THE_LAST_LINES,
) -> tuple[int, list[str]]:
    """Runs `command`, passing on what it prints; returns its exit code and the last lines.

    It ends with us: where we are interrupted, it is told so and waited for. `keep` says how many
    lines, None all.
    """
    last: collections.deque[str] = collections.deque(maxlen=keep)
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=processes.terminate_with_parent,
        )
    except FileNotFoundError:
        raise ServiceError(
            f"there is no `{command[0]}` command: install it, or use `--backend local`"
        ) from None
    with process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                last.append(line.rstrip())
        except BaseException:
            process.terminate()
            raise
    return process.returncode, list(last)
