"""Builds and tests targets in their base images, with the commands `docker buildx` and `docker`.

The code of a project sees its sources there, and neither credentials nor folders of this machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from torchwheels import environments, processes, reports, sandbox, testing, toolchain
from torchwheels.backend import too_long
from torchwheels.engines import TIMEOUT, Engine, docker
from torchwheels.errors import BuildError, RefusedError, TestsError, UserError, of_code
from torchwheels.finish import Used
from torchwheels.kept import kept_if_refused, publish
from torchwheels.output import DEBUG
from torchwheels.project import Project
from torchwheels.releases import Target, load
from torchwheels.schedule import BuilderGoneError
from torchwheels.sources import Fetched
from torchwheels.wheel import wheels_in

_PROCESSES = 8192  # and threads, of a container with tests
_SHARE_OF_MEMORY = 0.8  # of the engine's machine, for a container with tests

# Patterns of BuildKit's messages, and our message for each; {0} is the base image, {1} the platform.
_KNOWN_FAILURES = (
    (
        r"failed to resolve source metadata for|pull access denied|manifest unknown",
        "a base image ({0}) is not here and cannot be pulled: `docker pull` says why, "
        "TORCHWHEELS_BASE_IMAGE names another one, and `--backend local` builds without Docker",
    ),
    (
        r"exec format error",
        "the Docker engine cannot run programs for {1}: name a builder on such a machine (`--builder`), or have the "
        "engine emulate it, as `docker run --privileged --rm tonistiigi/binfmt --install all` does",
    ),
    (
        r"(?i:no space left on device|disk quota exceeded)|torchwheels: pip cannot .*\): the disk of",
        "the disk of the Docker engine is full: `docker system df` shows what fills it, and "
        "`docker builder prune` frees the build cache",
    ),
    (
        r"no builder .* found",
        "there is no such builder: `docker buildx ls` lists those there are, and `docker buildx "
        "create` adds one",
    ),
)
# In a line of the client's own, without the number of a step: what a project prints has one.
_GONE = (
    r"^(?!#).*(annot connect to the Docker daemon|error during connect|connection refused"
    r"|failed to receive status|error reading from server|code = Unavailable)"
)
# The tool's own sentence inside BuildKit's plain progress, `#12 3.456 torchwheels: 3.11-cpu failed`, and
# the indented lines that go on with it.
_SAID = re.compile(r"^(?:#\d+ [\d.]+ )?torchwheels: (.*(?:\n#\d+ [\d.]+   .*)*)", re.MULTILINE)


def build_wheel(
    engine: Engine,
    project: Project,
    target: Target,
    source: Fetched,
    dist: Path,
    fresh: bool = False,
) -> Path:
    """Builds the wheel of `target` in its image; returns its path in `dist`. `fresh` is without the compiler cache."""
    with tempfile.TemporaryDirectory(prefix="torchwheels-") as work:
        exported = Path(work) / "exported"
        exported.mkdir()
        _export(engine, project, target, source, exported, fresh)
        left, used = _taken(exported, project, target, source)
        path = Path(work) / left.name.removesuffix(".refused")
        left.rename(path)
        with kept_if_refused(path, dist):
            # Audited again, here: the project's code could have changed the tool in the container.
            report = sandbox.call(reports.stamped, path, used, project, target)
            reports.write(reports.check(report), path)
            if left.name != path.name:
                raise RefusedError(f"in Docker {path.name} was refused: see the messages above")
        published = publish(path, dist)
    print(f"torchwheels: built {published} in {base_image(target)}", flush=True)
    return published


def _export(
    engine: Engine, project: Project, target: Target, source: Fetched, into: Path, fresh: bool
) -> None:
    """Builds the wheel in a container, and copies what that leaves, perhaps a refused one, into the folder `into`."""
    with _staged_options(project) as (options, config):
        command = ["torchwheels", "build", "/source", f"--target={target.name}", "--backend=local"]
        command += ["--dist=/dist", f"--origin={source.origin}"]
        command += [f"--name={source.name}"]
        command += [f"--config=/options/{config}"] if config else []
        command += ["--debug"] if os.environ.get(DEBUG) else []
        stage = {
            **_image(project, target),
            "target": "export",
            "contexts": {"source": str(source.folder), "options": str(options)},
            "output": [f"type=local,dest={into}"],
        }
        step = shlex.join(["python", "-m", *command])
        refused = "test -e /dist/*.refused"
        arguments = {
            # A refused wheel is also copied out of the container, for inspection.
            "COMMAND": f"{refused} || {step} || {{ set -- $?; {refused} || exit $1; }}",
            "PROJECT": hashlib.sha256(source.project.encode()).hexdigest()[:16],
            "STABLE": project.stable,
            **({"ONLINE": "requirements,compile", "OFFLINE": "none"} if project.network else {}),
            "TORCHWHEELS_ARCHITECTURES": os.environ.get("TORCHWHEELS_ARCHITECTURES"),
            **({"CCACHE_RECACHE": "1", "FRESH": uuid.uuid4().hex} if fresh else {}),
        }
        stage["args"] |= {k: v for k, v in arguments.items() if v}
        if engine.jobs:  # no argument: another number makes no other wheel
            stage["secret"].append("id=jobs,env=TORCHWHEELS_JOBS")
        _bake(engine, stage, project, target)


def shared(engine: Engine, targets: Mapping[Target, Project]) -> list[Engine]:
    """The engine as often as it shall build one of `targets` at a time, each with its share of the machine.

    They have the options of each.
    """
    asked = toolchain.asked_jobs()
    machine = _machine(engine)
    if machine is None or not targets:
        return [dataclasses.replace(engine, jobs=str(asked or ""))]
    job = max(toolchain.memory_per_job(options, target) for target, options in targets.items())
    jobs = toolchain.jobs_of(*machine, job)
    each = asked or max(1, jobs // len(targets))
    count = max(1, min(len(targets), jobs // each))
    return [dataclasses.replace(engine, jobs=str(asked or jobs // count))] * count


def _machine(engine: Engine) -> tuple[int, int] | None:
    """The cores of the engine's machine and its memory; None where nobody can say them."""
    where: tuple[str, ...] = ()
    try:
        if engine.builder:
            said = docker("buildx", "inspect", engine.builder)
            nodes = re.findall(r"^Endpoint:\s+(\S+)", said, re.MULTILINE)
            if (
                not re.search(r"^Driver:\s+docker(-container)?$", said, re.MULTILINE)
                or len(nodes) != 1
            ):
                return None
            where = ("--host" if "://" in nodes[0] else "--context", nodes[0])
        cores, memory, _ = _info(*where)
        return cores, memory
    except (subprocess.SubprocessError, ValueError):
        return None


def _info(*where: str) -> tuple[int, int, str]:
    """The cores of an engine's machine, its memory, and the runtimes of containers that it has."""
    form = "--format={{.NCPU}} {{.MemTotal}} {{json .Runtimes}}"
    cores, memory, runtimes = docker(*where, "info", form).split(maxsplit=2)
    return int(cores), int(memory), runtimes


def _taken(exported: Path, project: Project, target: Target, source: Fetched) -> tuple[Path, Used]:
    """The one wheel that a container left, which nobody has checked yet, and what we know of its build."""
    found = [*wheels_in(exported / "dist"), *(exported / "dist").glob("*.whl.refused")]
    if len(found) != 1 or not found[0].is_file() or found[0].is_symlink():
        raise UserError(
            f"the container of {target.name} left {', '.join(sorted(x.name for x in found)) or 'nothing'} "
            "in place of one wheel: the project's code has interfered with the build"
        )
    compilers = json.loads((exported / "compilers.json").read_text())
    architectures = project.architectures(target)
    return found[0], Used(target, architectures, source.origin, **compilers)


@contextlib.contextmanager
def _staged_options(project: Project) -> Iterator[tuple[Path, str | None]]:
    """A folder with the project's options and patches alone, and the name of the file in it."""
    with tempfile.TemporaryDirectory(prefix="torchwheels-options-") as name:
        folder = Path(name)
        if project.file:
            own = project.file.parent
            for file in (project.file, *map(own.joinpath, project.patches)):
                if not file.resolve().is_relative_to(own.resolve()):
                    raise UserError(
                        f"the patch {file} is outside of {own}, the folder of the options: a container sees "
                        "nothing else, so move it there"
                    )
                target = folder / file.relative_to(own)
                target.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):  # of which the build says so
                    shutil.copyfile(file, target)
        yield folder, project.file.name if project.file else None


def _target(target: Target) -> str:
    """The target's name where dots are not allowed, in a bake file and as an image's tag."""
    return target.name.replace(".", "-")


def base_image(target: Target) -> str:
    """The target's base image; TORCHWHEELS_BASE_IMAGE overrides it, with a mirror's name, say."""
    return os.environ.get("TORCHWHEELS_BASE_IMAGE") or target.image


def _image(project: Project, target: Target) -> dict[str, Any]:
    """What the build stages of a target share."""
    arguments = {
        **build_arguments(project, target),
        "PLACES_OF_TORCH": environments.places_of_torch(),
        "REQUIREMENTS": " ".join(_own_requirements()),
    }
    if own := project.table.get("releases"):
        arguments["RELEASES"] = json.dumps(own)
    secrets = ["id=settings,env=TORCHWHEELS_SETTINGS"] if _settings() else []
    return {
        "context": str(Path(__file__).parent),
        "args": {**arguments, "TOOL": "."},
        "secret": secrets,
        # The engine's own machine may be another than this one, and it may emulate others.
        "platforms": [target.machine.docker],
    }


def build_arguments(project: Project, target: Target) -> dict[str, str]:
    """The arguments of the Dockerfile that follow from the project and the table of releases."""
    return {
        "BASE_IMAGE": base_image(target),
        "TARGET": target.name,
        "RELEASE": project.release,
        "PYTHON": target.python,
        # Where NVIDIA's images have it; none of them sets the variable.
        "CUDA_HOME": "/usr/local/cuda" if target.cuda else "",
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

    They reach BuildKit through the environment: a file could expose an index's password.
    """
    index = os.environ.get("TORCHWHEELS_TORCH_INDEX")
    return f"TORCHWHEELS_TORCH_INDEX={shlex.quote(index)}\n" if index else ""


def _bake(engine: Engine, stage: Mapping[str, Any], project: Project, target: Target) -> None:
    """Runs `docker buildx bake`, passing on what it prints; an error says why it failed."""
    # Attestations would make the cached image another one each time.
    command = ["docker", *(["--context", engine.context] if engine.context else [])]
    command += ["buildx", "bake", "--progress=plain", "--provenance=false", "--file=-"]
    if engine.builder and not engine.context:  # buildx refuses the name of another context's
        command.append(f"--builder={engine.builder}")
    name = _target(target)
    file = {"group": {"default": {"targets": [name]}}, "target": {name: stage}}
    secrets = {"TORCHWHEELS_SETTINGS": _settings(), "TORCHWHEELS_JOBS": engine.jobs or ""}
    try:
        code, text = processes.follow(
            command,
            project.time_limit * 60,
            json.dumps(file),
            prefix="" if engine.alone else f"{target.name}  ",
            env={**os.environ, **secrets},
        )
    except subprocess.TimeoutExpired:
        raise BuildError(f"{target.name} failed: {too_long(project)}") from None
    if code == 0:
        return
    for pattern, sentence in _KNOWN_FAILURES:
        if re.search(pattern, text):
            raise UserError(sentence.format(base_image(target), target.machine.docker))
    if re.search(_GONE, text, re.MULTILINE):
        where = f"the builder {engine.builder}" if engine.builder else "the Docker engine"
        raise BuilderGoneError(
            f"{where} does not answer any more: start it and try again, or use `--backend local`"
        )
    said = [re.sub(r"\n#\d+ [\d.]+ ", "\n", found) for found in _SAID.findall(text)]
    codes = re.findall(r"did not complete successfully: exit code: (\d+)$", text, re.MULTILINE)
    kind = of_code(int(codes[-1])) if codes else UserError
    raise kind(f"in Docker: {said[-1] if said else 'the messages above say why'}")


def run_tests(
    engine: Engine, project: Project, target: Target, wheel: Path, sources: Path, arguments: Sequence[str],
    results: Path,
) -> int:  # fmt: skip
    """Runs the tests of `wheel` in a container of the target, with GPUs where the engine has some.

    It gets copies of the wheel and the sources. `arguments` are those of `torchwheels test`. What the
    tests leave behind is copied into the folder `results`. Returns the exit code.
    """
    image = f"torchwheels-test:{_target(target)}-{uuid.uuid4().hex}"  # no other test's
    stage = {
        **_image(project, target),
        "target": "test",
        "tags": [image],
        "output": ["type=docker"],
    }
    _bake(engine, stage, project, target)
    try:
        with _staged_options(project) as (options, config), _container(image, project) as name:
            for path, place in (
                (str(wheel), f"/{wheel.name}"),
                (f"{sources}/.", "/source"),
                (f"{options}/.", "/options"),
            ):
                subprocess.run(["docker", "cp", "--quiet", path, f"{name}:{place}"], check=True)
            command = ["docker", "exec", name, "python", "-m", "torchwheels", "test", "/source"]
            command += [f"--target={target.name}", f"--wheel=/{wheel.name}", "--backend=local"]
            command += ["--results=/results", "--folder=/tests"]
            command += [f"--config=/options/{config}"] if config else []
            code = processes.run([*command, "--install"]).returncode
            if code:
                return code
            if not project.tests.network:
                docker("network", "disconnect", "bridge", name)
            # The command inside has its own time limit, but could ignore it.
            limit = project.tests.minutes * 60 + TIMEOUT
            try:
                code = processes.run([*command, *arguments], timeout=limit).returncode
            except subprocess.TimeoutExpired:
                raise TestsError(testing.too_long(project)) from None
            copying = ["docker", "cp", "--quiet", f"{name}:/results/.", str(results)]
            subprocess.run(copying, capture_output=True)
            return code
    except subprocess.SubprocessError as error:
        raise UserError(f"the Docker engine did not do its part ({error}): try again") from None
    finally:
        subprocess.run(["docker", "image", "rm", image], capture_output=True)


@contextlib.contextmanager
def _container(image: str, project: Project) -> Iterator[str]:
    """A container of `image` that lives as long as this, and no longer than we do: its name.

    Its first process reads what we write, and so ends with us; then the engine ends the others.
    """
    name = f"torchwheels-test-{uuid.uuid4().hex}"
    _, total, runtimes = _info()
    memory = int(project.tests.memory * 1e9 or _SHARE_OF_MEMORY * total)
    command = ["docker", "run", "--interactive", "--rm", "--init", f"--name={name}"]
    command += ["--cap-drop=ALL", "--security-opt=no-new-privileges", f"--pids-limit={_PROCESSES}"]
    command += [f"--memory={memory}", f"--memory-swap={memory}", "--network=bridge"]
    if "nvidia" in runtimes:
        command.append("--gpus=all")
    pipe = subprocess.PIPE
    with processes.start(
        [*command, image, "sh", "-c", "echo ready; exec cat"], stdin=pipe, stdout=pipe, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            if process.stdout.readline() != "ready\n":
                raise UserError("the engine cannot start a container: the messages above say why")
            yield name
        finally:
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(TIMEOUT)
            processes.end(process)
