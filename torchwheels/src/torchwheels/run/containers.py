"""Builds and tests targets in containers of their base images, one for each.

The code of a project sees its sources there, and neither credentials nor folders of this machine.
"""

import contextlib
import hashlib
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from docker.errors import ImageNotFound
from docker.types import DeviceRequest, Mount

from torchwheels import environments
from torchwheels.audit import reports
from torchwheels.build import too_long
from torchwheels.errors import BuildError, TestsError, UserError
from torchwheels.index import KEPT, kept_if_refused, publish
from torchwheels.options import Project, Target, indexes, releases
from torchwheels.run import inside, testing
from torchwheels.run.engines import TIMEOUT, Container, Engine, doing_its_part
from torchwheels.sources import Fetched
from torchwheels.system import DEBUG, processes, sandbox, scratch, without_userinfo
from torchwheels.wheel import Used

DOCKERFILE = Path(__file__).with_name("Dockerfile")
_HERE = (None, "localhost", "127.0.0.1", "::1")
_LOCK = "own.txt"  # of the Dockerfile
_PROCESSES = 8192  # and threads, of a container with tests
_SHARE_OF_MEMORY = 0.8  # of the engine's machine, for a container with tests
_VARIABLES = (
    "MAX_JOBS", "SOURCE_DATE_EPOCH", "TORCHWHEELS_ARCHITECTURES", "GITHUB_SERVER_URL", "GITHUB_REPOSITORY", DEBUG
)  # fmt: skip
_MIRRORS = (
    "TORCHWHEELS_APT_MIRROR", "TORCHWHEELS_TORCH_INDEX", "UV_PYTHON_DOWNLOADS_JSON_URL", "UV_PYTHON_INSTALL_MIRROR"
)  # fmt: skip


@doing_its_part()
def build_wheel(
    engine: Engine, project: Project, target: Target, source: Fetched, dist: Path, fresh: bool = False
) -> Path:  # fmt: skip
    """Builds the wheel of `target` in a container; returns its path in `dist`. `fresh`: without the compiler cache."""
    of_source = {"origin": source.origin, "source": source.name}
    job = _job(project, target, is_built=True, fresh=fresh, **of_source)
    with scratch() as work:
        left, used, failed = _left(engine, project, target, source, job, work)
        path = left.rename(work / left.name.removesuffix(".refused"))
        with kept_if_refused(path, dist):
            # Audited again, here: the project's code could have changed the tool in the container.
            arguments = used, project, target
            report = sandbox.call(reports.stamped, path, *arguments, writes=path.parent)
            reports.refuse([report])
            reports.write(report, path)
            if failed:
                raise failed
        published = publish(path, dist)
    print(f"torchwheels: built {published} in {base_image(target)}", flush=True)
    return published


def _left(
    engine: Engine, project: Project, target: Target, source: Fetched, job: dict[str, Any], into: Path
) -> tuple[Path, Used, UserError | None]:  # fmt: skip
    """The wheel that a container leaves, which nobody has checked yet, what we know of its build, and why it failed."""
    image = _image(engine, project, target, job)
    cache = f"torchwheels-{hashlib.sha256(source.project.encode()).hexdigest()[:16]}"
    mounts = [] if job["fresh"] else [Mount("/opt/cache/compiled", cache)]
    platform, failed = target.machine.docker, None
    with Container(engine, image, platform=platform, mounts=mounts) as container:
        _put(container, job, {inside.SOURCE: source.folder, **_patches(project)})
        # Before any code of the project has run.
        compilers = container.call("compilers", _variables())
        used = Used(target, project.architectures(target), source.origin, **compilers)
        try:
            _build(container, project)
        except TimeoutError:
            raise BuildError(f"{target.name} failed: {too_long(project)}") from None
        except UserError as error:
            failed = error
        files = container.take(inside.DIST, into)
    wheels = [file for file in files if re.search(r"\.whl(\.refused)?$", file.name)]
    if failed and not wheels:
        raise failed
    if len(wheels) != 1:
        left = f"{', '.join(sorted(x.name for x in wheels)) or 'nothing'} in place of one wheel"
        why = "the project's code has interfered with the build"
        raise UserError(f"the container of {target.name} left {left}: {why}")
    if failed:  # without where the container has it
        failed = type(failed)(str(failed).partition(KEPT)[0])
    return wheels[0], used, failed


def _build(container: Container, project: Project) -> None:
    """The steps of a build: two with a network, and two without, unless the project wants one when it compiles."""
    limit = project.time_limit * 60
    limit += TIMEOUT if limit else 0  # the step inside has its own, but its code could stop that
    container.call("requirements", _variables(), limit)
    if not project.network:
        container.leave()
    container.call("compile", _variables(), limit)
    if not project.network:
        container.join()
    container.call("install", _variables(), limit)
    container.leave()
    container.call("import", _variables(), limit)


@doing_its_part()
def run_tests(
    engine: Engine, project: Project, target: Target, wheel: Path, sources: Path, arguments: Sequence[str],
    require_gpu: bool, results: Path,
) -> int:  # fmt: skip
    """Runs the tests of `wheel` in a container of the target, with GPUs where the engine has some.

    It gets copies of the wheel and the sources. `arguments` are those of the tests' command. The record of the run is
    in the folder `results` then. Returns the exit code.
    """
    asked = {"arguments": [*arguments], "require_gpu": require_gpu}
    job = _job(project, target, is_built=False, wheel=wheel.name, **asked)
    image = _image(engine, project, target, job)
    said = engine.client.info()
    memory = int(project.tests.memory * 1e9 or _SHARE_OF_MEMORY * said["MemTotal"])
    gpus = [DeviceRequest(count=-1, capabilities=[["gpu"]])] if "nvidia" in said["Runtimes"] else []
    with Container(
        engine, image, platform=target.machine.docker, cap_drop=["ALL"], security_opt=["no-new-privileges"],
        pids_limit=_PROCESSES, mem_limit=memory, memswap_limit=memory, device_requests=gpus,
    ) as container:  # fmt: skip
        _put(container, job, {inside.SOURCE: sources, f"/{wheel.name}": wheel})
        container.call("install-tests", _variables())
        if not project.tests.network:
            container.leave()
        print(f"torchwheels: testing {wheel.name} in {target.name}", flush=True)
        try:
            code = container.call("test", _variables(), project.tests.minutes * 60 + TIMEOUT)
        except TimeoutError:
            raise TestsError(testing.too_long(project)) from None
        container.take(inside.RESULTS, results)
    return int(code)


def _job(project: Project, target: Target, **job: Any) -> dict[str, Any]:
    """What inside.py must know."""
    return {"options": project.table, "name": project.name, "target": target.name, **job}


def _put(container: Container, job: dict[str, Any], files: Mapping[str, Path]) -> None:
    """Puts files into a container, a job, and this tool."""
    tool = {"/opt/tool/torchwheels": Path(__file__).parents[1]}
    container.put({**tool, inside.JOB: json.dumps(job), **files})


def _patches(project: Project) -> dict[str, Path]:
    """The patches of the project, by their places in a container."""
    found = {}
    for patch in project.patches:
        assert project.file is not None
        file, own = project.file.parent / patch, project.file.parent.resolve()
        if not file.resolve().is_relative_to(own):
            outside = f"outside of {own}, the folder of the options"
            raise UserError(f"the patch {file} is {outside}: move it there")
        found[f"{inside.OPTIONS}/{patch}"] = file.resolve()
    return found


def _image(engine: Engine, project: Project, target: Target, job: dict[str, Any]) -> str:
    """The image with the toolchain of the target and its torch, which is made once."""
    arguments = build_arguments(project, target)
    said = [
        DOCKERFILE.read_text(),
        arguments,
        releases.locked_own(),
        releases.load().tools,
        environments.torch_requirement(target),
        target.index,
        indexes.places_of_torch(),
    ]
    key = hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]
    name = f"torchwheels:{target.name}-{key}"
    with contextlib.suppress(ImageNotFound):
        engine.client.images.get(name)
        return name
    toolchain, settings = _toolchain(engine, target, arguments), mirrors()
    downloads = [Mount("/downloads", "torchwheels-downloads")]
    platform = target.machine.docker
    with Container(engine, toolchain, platform=platform, mounts=downloads) as container:
        _put(container, job, {})
        container.call("torch", {**settings, "UV_CACHE_DIR": "/downloads", "UV_LINK_MODE": "copy"})
        container.run(["rm", "-r", "/opt/tool", inside.JOB], {})
        container.commit(name)
    return name


def base_image(target: Target) -> str:
    """The target's base image; TORCHWHEELS_BASE_IMAGE overrides it: `mirror.example/{image}`, or `{tag}` alone."""
    asked = os.environ.get("TORCHWHEELS_BASE_IMAGE") or "{image}"
    return asked.replace("{image}", target.image).replace("{tag}", target.image.partition("@")[0])


def _toolchain(engine: Engine, target: Target, arguments: Mapping[str, str]) -> str:
    """Makes the image of the Dockerfile; returns its number."""
    settings = "".join(f"{name}={shlex.quote(value)}\n" for name, value in mirrors().items())
    with scratch() as folder:
        number = folder / "number"
        (folder / _LOCK).write_text(releases.locked_own())
        command = [*engine.command, "build", f"--platform={target.machine.docker}", str(folder)]
        command += [f"--file={DOCKERFILE}", f"--iidfile={number}"]
        command += ["--secret=id=settings,env=TORCHWHEELS_SETTINGS"]
        command += [f"--build-arg={name}={value}" for name, value in arguments.items()]
        done = processes.run(command, env={**os.environ, "TORCHWHEELS_SETTINGS": settings})
        if done.returncode:
            raise UserError(
                f"`{command[0]} build` of the toolchain of {target.name} ended with exit code {done.returncode}: the "
                f"messages above say why; it wants the base image {base_image(target)} (TORCHWHEELS_BASE_IMAGE names "
                f"another one), and an engine that runs programs for {target.machine.docker}"
            )
        return number.read_text().strip()


def build_arguments(project: Project, target: Target) -> dict[str, str]:
    """The arguments of the Dockerfile, which follow from the project and the table of releases."""
    return {
        "BASE_IMAGE": base_image(target),
        "PYTHON": target.python,
        # Where NVIDIA's images have it; none of them sets the variable.
        "CUDA_HOME": "/usr/local/cuda" if target.cuda else "",
        "UV": releases.load().uv,
        "SYSTEM_PACKAGES": " ".join(project.system_packages),
        "REQUIREMENTS": f"--require-hashes --requirement=/opt/{_LOCK}",
    }


def mirrors() -> dict[str, str]:
    """Where an image gets its packages, as variables and pip's configuration say, but for what is on this machine."""
    found = {name: os.environ[name] for name in _MIRRORS if os.environ.get(name)}
    pip = indexes.pip_settings("install")
    settings: dict[str, str] = {}
    for key in ("index-url", "extra-index-url", "find-links"):
        places = [x for x in pip.get(key, "").split() if urlsplit(x).hostname not in _HERE]
        settings |= {key: " ".join(places)} if places else {}
    settings |= {key: pip[key] for key in pip.keys() & {"trusted-host"}}
    return found | indexes.pip_variables(settings) | indexes.uv_variables(settings)


def _variables() -> dict[str, str]:
    """What the code of a project sees of this machine's: no password, and so nothing of a mirror that wants one."""
    own = {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)}
    return own | {name: without_userinfo(value) for name, value in mirrors().items()}
