"""Builds and tests cells in their base images, with the commands `docker buildx` and `docker`.

The code of a project sees its sources there, and neither credentials nor folders of this machine.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from torchwheels import environments, finish
from torchwheels.errors import UserError
from torchwheels.project import Project
from torchwheels.releases import Cell, load
from torchwheels.sources import Fetched

_ENGINE_TIMEOUT = 10  # seconds: an engine behind ssh needs a few, a dead one shall not hold us up
_LAST_LINES = 60

# What BuildKit says, and the sentence for it; {0} are the base images.
_KNOWN_FAILURES = (
    (
        r"failed to resolve source metadata for|pull access denied|manifest unknown",
        "a base image ({0}) is not here and cannot be pulled: `docker pull` says why, "
        "TORCHWHEELS_BASE_IMAGE names another one, and `--backend local` builds without Docker",
    ),
    (
        r"no space left on device|disk quota exceeded",
        "the disk of the Docker engine is full: `docker system df` shows what fills it, and "
        "`docker builder prune` frees the build cache",
    ),
    (
        r"no builder .* found",
        "there is no such builder: `docker buildx ls` lists those there are, and `docker buildx "
        "create` adds one",
    ),
    (
        r"annot connect to the Docker daemon|error during connect|connection refused"
        r"|failed to receive status|error reading from server",
        "the Docker engine does not answer any more: start it and try again, or use `--backend local`",
    ),
)
# The tool's own sentence inside BuildKit's plain progress, `#12 3.456 torchwheels: 3.11-cpu failed`, and
# the indented lines that go on with it.
_SAID = re.compile(r"^(?:#\d+ [\d.]+ )?torchwheels: (.*(?:\n#\d+ [\d.]+   .*)*)", re.MULTILINE)


@dataclass(frozen=True)
class Engine:
    """A Docker engine that answers, and the builder of `docker buildx` to use."""

    version: str
    builder: str | None = None


def find_engine(builder: str | None = None) -> Engine:
    """The Docker engine; an error says why none answers."""
    try:
        version = _docker("version", "--format", "{{.Server.Version}}")
        _docker("buildx", "version")
    except FileNotFoundError:
        raise UserError("there is no `docker` command") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"the engine did not answer in {_ENGINE_TIMEOUT} seconds") from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or ["`docker` failed without a word"]
        raise UserError(_explained(said[-1].rstrip("."))) from None
    return Engine(version, builder)


def _docker(*arguments: str) -> str:
    return subprocess.run(
        ["docker", *arguments],
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
        timeout=_ENGINE_TIMEOUT,
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


def build_wheels(
    engine: Engine,
    project: Project,
    cells: Sequence[Cell],
    source: Fetched,
    into: Path,
    fresh: bool,
) -> dict[str, Path]:
    """Builds the wheels of `cells` in their images, all at once; returns them by the cells' names.

    They are copies in `into`, which nobody has judged yet: a name that ends in `.refused` says what was
    found in the container. `fresh` is without the compiler cache.
    """
    with _staged_options(project) as (options, config):
        targets = {}
        for cell in cells:
            command = ["torchwheels", "build", "/source", f"--cell={cell.name}", "--backend=local"]
            command += ["--dist=/dist", f"--origin={source.origin}"]
            command += [f"--config=/options/{config}"] if config else []
            targets[_target(cell)] = {
                **_image(project, cell),
                "target": "export",
                "contexts": {"source": str(source.folder), "options": str(options)},
                "output": [f"type=local,dest={into / cell.name}"],
            }
            arguments = {
                # A wheel that was refused leaves the container, too, for a look at it.
                "COMMAND": f"{shlex.join(['python', '-m', *command])} || test -e /dist/*.refused",
                "PROJECT": hashlib.sha256(source.project.encode()).hexdigest()[:16],
                "STABLE": project.stable,
                **{x: os.environ.get(x) for x in ("MAX_JOBS", "TORCHWHEELS_ARCHITECTURES")},
                **({"CCACHE_RECACHE": "1", "FRESH": uuid.uuid4().hex} if fresh else {}),
            }
            targets[_target(cell)]["args"] |= {k: v for k, v in arguments.items() if v}
        _bake(engine, targets, cells)
    return {cell.name: _stamped(into / cell.name, project, cell, source) for cell in cells}


def _stamped(exported: Path, project: Project, cell: Cell, source: Fetched) -> Path:
    """The wheel that came out of a container, with its origin as we know it."""
    found = [*(exported / "dist").glob("*.whl*")]
    if len(found) != 1 or not found[0].is_file() or found[0].is_symlink():
        raise UserError(
            f"the container of {cell.name} left {', '.join(sorted(x.name for x in found)) or 'nothing'} "
            "in place of one wheel: the project's code has interfered with the build"
        )
    compilers = json.loads((exported / "compilers.json").read_text())
    architectures = project.architectures(cell)
    path = found[0].rename(found[0].with_name(found[0].name.removesuffix(".refused")))
    finish.stamp(path, finish.Used(cell, architectures, source.origin, **compilers))
    return path.rename(found[0])


@contextlib.contextmanager
def _staged_options(project: Project) -> Iterator[tuple[Path, str | None]]:
    """A folder with the project's options and patches alone, and the name of the file in it."""
    with tempfile.TemporaryDirectory(prefix="torchwheels-options-") as name:
        folder = Path(name)
        if project.file:
            for given in (project.file, *map(project.file.parent.joinpath, project.patches)):
                _stage(given, project.file.parent, folder)
        yield folder, project.file.name if project.file else None


def _stage(file: Path, folder: Path, into: Path) -> None:
    if not file.resolve().is_relative_to(folder.resolve()):
        raise UserError(
            f"the patch {file} is outside of {folder}, the folder of the options: a container sees "
            "nothing else, so move it there"
        )
    target = into / file.relative_to(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):  # of which the build says so
        shutil.copyfile(file, target)


def _target(cell: Cell) -> str:
    """The cell's name where dots are not allowed, in a bake file and as an image's tag."""
    return cell.name.replace(".", "-")


def base_image(cell: Cell) -> str:
    """The cell's base image; TORCHWHEELS_BASE_IMAGE overrides it, with a mirror's name, say."""
    return os.environ.get("TORCHWHEELS_BASE_IMAGE") or cell.image


def _image(project: Project, cell: Cell) -> dict[str, Any]:
    """What the targets of a cell share."""
    arguments = {
        **build_arguments(project, cell),
        "PLACES_OF_TORCH": environments.places_of_torch(),
        "REQUIREMENTS": " ".join(_own_requirements()),
    }
    secrets = ["id=settings,env=TORCHWHEELS_SETTINGS"] if _settings() else []
    return {"context": str(Path(__file__).parent), "args": arguments, "secret": secrets}


def build_arguments(project: Project, cell: Cell) -> dict[str, str]:
    """The arguments of the Dockerfile that follow from the project and the table of releases."""
    return {
        "BASE_IMAGE": base_image(cell),
        "CELL": cell.name,
        "RELEASE": project.release,
        "PYTHON": cell.python,
        # Where NVIDIA's images have it; none of them sets the variable.
        "CUDA_HOME": "/usr/local/cuda" if cell.cuda else "",
        "UV": load().uv,
        "SYSTEM_PACKAGES": " ".join(project.system_packages),
    }


def _own_requirements() -> list[str]:
    """What this tool requires, in the versions that are installed here."""
    required = map(Requirement, importlib.metadata.requires("torchwheels") or [])
    return [
        f"{x.name}=={importlib.metadata.version(x.name)}"
        for x in required
        if not x.marker or x.marker.evaluate()
    ] + ["tomli"]


def _settings() -> str:
    """Shell assignments for the step that installs torch, before any code of the project is there.

    They reach BuildKit through the environment: a file might hold an index's password, and stay.
    """
    index = os.environ.get("TORCHWHEELS_TORCH_INDEX")
    return f"TORCHWHEELS_TORCH_INDEX={shlex.quote(index)}\n" if index else ""


def _bake(engine: Engine, targets: Mapping[str, Any], cells: Sequence[Cell]) -> None:
    """Runs `docker buildx bake`, passing on what it prints; an error says why it failed."""
    # Attestations would make the cached image another one each time.
    command = ["docker", "buildx", "bake", "--progress=plain", "--provenance=false", "--file=-"]
    command += [f"--builder={engine.builder}"] if engine.builder else []
    file = {"group": {"default": {"targets": list(targets)}}, "target": targets}
    last: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
    with subprocess.Popen(
        command,
        env={**os.environ, "TORCHWHEELS_SETTINGS": _settings()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(file))
            process.stdin.close()
            for line in process.stdout:
                print(line, end="", flush=True)
                last.append(line.rstrip())
        except BaseException:
            process.terminate()
            raise
    if process.returncode == 0:
        return
    text = "\n".join(last)
    for pattern, sentence in _KNOWN_FAILURES:
        if re.search(pattern, text):
            raise UserError(sentence.format(", ".join({base_image(cell) for cell in cells})))
    said = [re.sub(r"\n#\d+ [\d.]+ ", "\n", found) for found in _SAID.findall(text)]
    raise UserError(f"in Docker: {said[-1] if said else 'the messages above say why'}")


def run_tests(
    engine: Engine, project: Project, cell: Cell, wheel: Path, sources: Path, arguments: Sequence[str],
    results: Path,
) -> int:  # fmt: skip
    """Runs the tests of `wheel` in a container of the cell, with GPUs where the engine has some.

    It gets copies of the wheel and the sources. `arguments` are those of `torchwheels test`. What the
    tests leave behind is copied into the folder `results`. Returns the exit code.
    """
    image = f"torchwheels-test:{_target(cell)}"
    target = {**_image(project, cell), "target": "test", "tags": [image], "output": ["type=docker"]}
    _bake(engine, {_target(cell): target}, [cell])
    label = f"torchwheels.cell={cell.name}"
    for left in _docker("ps", "--all", "--quiet", f"--filter=label={label}").split():
        _docker("rm", "--force", left)  # of a test that was killed
    gpus = ["--gpus=all"] if "nvidia" in _docker("info", "--format={{json .Runtimes}}") else []
    with _staged_options(project) as (options, config):
        command = ["python", "-m", "torchwheels", "test", "/source", f"--cell={cell.name}"]
        command += [f"--wheel=/{wheel.name}", "--results=/results", "--backend=local"]
        command += [f"--config=/options/{config}"] if config else []
        name = _docker("create", "--init", f"--label={label}", *gpus, image, *command, *arguments)
        try:
            for path, place in (
                (str(wheel), f"/{wheel.name}"),
                (f"{sources}/.", "/source"),
                (f"{options}/.", "/options"),
            ):
                subprocess.run(["docker", "cp", "--quiet", path, f"{name}:{place}"], check=True)
            code = subprocess.run(["docker", "start", "--attach", name]).returncode
            copying = ["docker", "cp", "--quiet", f"{name}:/results/.", str(results)]
            subprocess.run(copying, capture_output=True)
            return code
        finally:
            _docker("rm", "--force", "--volumes", name)
