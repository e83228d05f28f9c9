"""Builds a wheel against the target's torch, from a copy of the sources, which are not modified."""

import dataclasses
import functools
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import resource
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from torchwheels import environments, wheel
from torchwheels.audit import reports
from torchwheels.build import check_import, toolchain
from torchwheels.build.backend import Workplace, left_out, opened, values_of, variables_of
from torchwheels.environments import Environment
from torchwheels.errors import BuildError, UserError
from torchwheels.index import kept_if_refused, publish
from torchwheels.options import Project, Target, preset, releases
from torchwheels.sources import Fetched, pythons_of
from torchwheels.system import cache, processes, scratch
from torchwheels.wheel import Wheel, finish, variants

STEPS = ("requirements", "compile", "install", "import")


def build_wheel(
    project: Project, target: Target, source: Fetched, dist: Path, steps: Sequence[str] = STEPS,
    fresh: bool = False,
) -> Path | None:  # fmt: skip
    """Builds the wheel of `source` for `target`, on this machine; returns its path in `dist` after the last step.

    It is put there only after it has passed the audit and was imported, if that can run here. Steps 1 and 3
    use the network; 2 and 4 run without. `fresh` does not use the compiler cache.
    """
    start, is_here = time.monotonic(), target.machine.is_here
    if not is_here and not project.cross_compile:
        raise UserError(
            f"{target.name} is for {target.machine.name}, and this machine is {platform.machine()}: build there, or "
            "with `--backend docker` on an engine that emulates it, or set `cross-compile = true` in "
            "[tool.torchwheels] where the project's build can do that"
        )
    base, toolkit, compiler = toolchain.tools(project, target)
    # The same path for all builds of a project: paths become part of hashes, where no prefix map applies.
    with cache.locked(f"build/{target.name}-{source.name}") as work:
        own = Environment(work / "environment")
        place = Workplace(project, target, work, base, own, compiler, toolkit, source, fresh)
        if "requirements" in steps:
            _prepare(place)
        found = _compile(place, dist) if "compile" in steps else None
        if "install" in steps and is_here:
            with kept_if_refused(place.finished, dist):
                check_import.install(place.finished, base, work / "import")
        if "import" not in steps:
            (work / "took.json").write_text(json.dumps(_took(work, start)))
            return None
        found = found or wheel.read(place.finished)  # of a step in a process of its own
        with kept_if_refused(found.path, dist):
            if is_here:
                imported = Environment(work / "import")
                known = functools.partial(left_out, place)
                check_import.check_import(found, imported, project.imports, place.driver, known)
        published = publish(found.path, dist)
        seconds, largest = _took(work, start)
    modules = project.imports or check_import.top_level_modules(found.files)
    tried = f"{'imports' if modules else 'loads'} with torch {target.torch}"
    if not is_here:
        tried = f"nobody has imported: this machine is {platform.machine()}"
    took = f"{published.stat().st_size / 1e6:.2f} MB, {seconds:.0f} s"
    said = f"which {tried} ({took}, largest process {largest:.1f} GB)"
    print(f"torchwheels: built {published}, {said}", flush=True)
    return published


def _took(work: Path, start: float) -> tuple[float, float]:
    """The seconds of a build so far, and the GB of its largest process, those of steps in other processes included."""
    file = work / "took.json"
    before = json.loads(file.read_text()) if file.is_file() else (0, 0)
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9
    return before[0] + time.monotonic() - start, max(before[1], largest)


def _prepare(place: Workplace) -> None:
    """Lays out the folder of the build, and installs what it requires."""
    shutil.rmtree(place.work)
    place.home.mkdir(parents=True)
    if place.toolkit:
        libraries = None
        if not place.target.machine.is_here:
            libraries = environments.cuda_runtime(place.base, place.target, place.work / "runtime")
        driver = toolchain.make_driver(place.driver.parent, place.toolkit, place.compiler.cc)
        toolkit = toolchain.with_usual_layout(place.toolkit, place.work / "cuda", driver, libraries)
        place = dataclasses.replace(place, toolkit=toolkit)
    shutil.copytree(place.source.folder, place.work / "source", symlinks=True)
    _apply_patches(place.project, place.work / "source")
    environments.on_top_of(place.base, place.environment.folder)
    variables = variables_of(place)
    if place.project.before_build:
        command = place.project.before_build.format(**values_of(place, variables))
        _run_command("before-build", command, _project_folder(place), variables)
    with opened(place, _project_folder(place), variables) as backend:
        declared = sorted(backend.build_system_requires)
        _install(place, [*declared, *place.project.build_requires])
        settings = place.project.backend_settings(values_of(place, variables))
        _install(place, sorted(backend.get_requires_for_build("wheel", settings)))
    place.variables.touch(0o600)  # the addresses of indexes may hold passwords
    place.variables.write_text(json.dumps(variables))


def _compile(place: Workplace, dist: Path) -> Wheel:
    """Makes the finished wheel, and audits it: one that is refused is kept in `dist`."""
    variables: dict[str, str] = json.loads(place.variables.read_text())
    place.variables.unlink()
    jobs = variables["MAX_JOBS"]
    # For the compiling alone: pip would install what runs there.
    if not place.target.machine.is_here:
        variables["_PYTHON_HOST_PLATFORM"] = f"linux-{place.target.machine.name}"
    print(f"torchwheels: building {place.target.name}, {jobs} jobs at once", flush=True)
    found = _built(place, variables)
    if not found.libraries:
        raise place.failed(
            "its setup has compiled nothing: one that compiles for CUDA alone needs such a target, one that looks "
            "for a GPU the option `pretend-gpu`, one of another folder of these sources the option "
            "`subdirectory`, one that a variable must tell to compile the option `environment`, and one that "
            "compiles when it is used, or is of Python alone, no wheel for each torch: `pip wheel` makes its one; "
            "an archive on PyPI may lack what is compiled, which its repository has"
        )
    _check_linked(found, place.work / "compilers" / toolchain.LINKS, place.project)
    tools = place.compiler.version, place.toolkit.version if place.toolkit else None
    architectures = place.project.architectures(place.target)
    used = finish.Used(place.target, architectures, place.source.origin, *tools)
    packages = place.base.site_packages
    provided = [packages / "torch" / "lib", *packages.glob("nvidia/*/lib")]
    provided += libraries_of_requirements(found, place.environment)
    repair = functools.partial(_repair, place, variables) if place.project.repair else None
    with kept_if_refused(found.path, dist):
        finished = finish.finish(found, place.work / "finished", used, provided, repair)
    with kept_if_refused(finished.path, dist):
        variants.write(finished)
        report = reports.of(finished, place.project.expectation(place.target))
        reports.refuse([report])
        reports.write(report, finished.path)
    return finished


def _built(place: Workplace, variables: Mapping[str, str]) -> Wheel:
    """The wheel that the project's build backend makes."""
    folder = place.work / "built"
    with opened(place, _project_folder(place), variables) as backend:
        settings = place.project.backend_settings(values_of(place, variables))
        try:
            path = Path(backend.build("wheel", folder, settings))
        except TypeError:  # what the backend returns is no text
            path = folder
    if path.parent != folder:
        raise place.failed("its build backend returns no name of a wheel")
    try:
        found = wheel.read(path)
        said = found.metadata["Version"]
        if Version(said or "0") != found.version:
            raise UserError(f"{path.name} says in its METADATA that its version is {said}")
    except (UserError, InvalidVersion) as error:
        raise place.failed(error) from None
    for each in found.metadata.get_all("Requires-Dist") or []:
        _requirement(each, "its wheel")
    return found


def _requirement(line: str, of: str) -> Requirement:
    """A requirement that the project's own files say."""
    try:
        return Requirement(line)
    except InvalidRequirement:
        raise BuildError(f"{of} requires {line!r}, which is no requirement") from None


# Neither `strip` nor a new RPATH changes these; each library has the first.
_CONTENTS = (".text", ".rodata", ".data", ".nv_fatbin")


def _check_linked(found: Wheel, links: Path, project: Project) -> None:
    """Raises an error where the wheel has a library that no compiler of the build linked.

    Each of those left a copy of what it linked in the folder `links`.
    """
    linked = {contents(path.read_bytes()) for path in links.iterdir()} - {None}
    for name in found.libraries:
        allowed = project.allows([PurePosixPath(name).name])
        if contents(found.files[name]) not in linked and not allowed:
            settings = preset(found.name).get("environment", {})
            switch = " and ".join(f'{key} = "{value}"' for key, value in settings.items())
            raise BuildError(
                f"no compiler of this build linked {name} (all linked {len(linked)} files): its setup has "
                f"fetched or copied it; set {switch or 'what makes it compile (often NAME_FORCE_BUILD)'} "
                "in `environment` of [tool.torchwheels], or name the library in `allow-libraries`"
            )


def contents(data: bytes) -> str | None:
    """Hashes of what a linker put together; None where that is no library."""
    try:
        elf: Any = ELFFile(io.BytesIO(data))
        if elf.get_section_by_name(".text") is None:
            return None
        sections = [elf.get_section_by_name(name) for name in _CONTENTS]
        return str([x and hashlib.sha256(x.data()).hexdigest() for x in sections])
    except (ELFError, ValueError, KeyError):
        return None


def libraries_of_requirements(found: Wheel, environment: Environment) -> list[Path]:
    """The folders of libraries that the wheel is linked with, and that packages have which come with it."""
    needed = {name for library in found.libraries.values() for name in library.needed}
    installed = importlib.metadata.distributions(path=[str(environment.site_packages)])
    packages = {canonicalize_name(x.metadata["Name"]): x for x in installed}
    folders, seen = set(), set()
    lines = found.metadata.get_all("Requires-Dist") or []
    while lines:
        name = canonicalize_name(Requirement(lines.pop()).name)
        if name in packages and name not in seen:
            seen.add(name)
            files = packages[name].files or ()
            folders |= {Path(str(x.locate())).parent for x in files if x.name in needed}
            lines += packages[name].requires or ()
    return sorted(folders)


def before_all(command: str, folder: Path) -> None:
    """Runs the project's command before all builds, in the sources that these then copy."""
    with scratch() as home:
        variables = {**environments.clean_variables(home), "PATH": os.environ["PATH"]}
        _run_command("before-all", command, folder, variables)


def _run_command(option: str, command: str, folder: Path, variables: Mapping[str, str]) -> None:
    """Runs the shell command that the project's `option` is."""
    print(f"torchwheels: {option}: {command}", flush=True)
    code, _ = processes.follow(["sh", "-ec", command], env=dict(variables), cwd=folder)
    if code != 0:
        ended = f"which ended with exit code {code}: the messages above say why"
        raise BuildError(f"the option `{option}` is `{command}`, {ended}")


def _apply_patches(project: Project, unpacked: Path) -> None:
    for patch in project.patches:
        assert project.file is not None
        file = (project.file.parent / patch).resolve()
        command = ["patch", "-p1", "--batch", f"--input={file}"]
        try:
            done = processes.ask(command, cwd=unpacked)
        except FileNotFoundError:
            raise UserError(
                f"there is no `patch` command to apply {file} with: install patch"
            ) from None
        if done.returncode != 0:
            said = " ".join((done.stdout + done.stderr).split())
            raise BuildError(f"the patch {file} does not fit these sources: {said}")


def _project_folder(place: Workplace) -> Path:
    return project_folder(place.project, place.target, place.work / "source")


def project_folder(project: Project, target: Target, sources: Path) -> Path:
    """Where in its sources the project is; an error says that it is not there, or is for other Pythons."""
    folder = Path(os.path.realpath(sources / project.subdirectory))
    is_project = any((folder / name).is_file() for name in ("setup.py", "pyproject.toml"))
    if not is_project or not folder.is_relative_to(sources.resolve()):
        lacks = f"neither a setup.py nor a pyproject.toml in {project.subdirectory or 'it'}"
        way_out = "the option `subdirectory` says where its project is"
        raise BuildError(f"the source has {lacks}: {way_out}")
    table = folder / "pyproject.toml"
    if table.exists() and not table.is_file():  # it may have no end
        raise BuildError(f"the {table.name} of the source is no plain file")
    pythons = pythons_of(folder)
    if not target.is_of(pythons):
        raise BuildError(
            f"its sources are for Python {pythons}, and {target.name} has Python {target.python}: choose another "
            "target (`torchwheels targets` lists all)"
        )
    return folder


def _install(place: Workplace, said: Iterable[str]) -> None:
    """Installs requirements of the build; never another torch than the target's."""
    requirements, tools = [], dict(x.split("==") for x in releases.load().tools)
    here = {"python_version": place.target.python_version}
    for each in said:
        requirement = _requirement(each, "its build")
        if requirement.name != "torch":
            version = tools.get(requirement.name)
            if version and not requirement.url and requirement.specifier.contains(version):
                requirement.specifier = SpecifierSet(f"=={version}")
            requirements.append(str(requirement))  # uv evaluates its marker
        elif requirement.marker and not requirement.marker.evaluate(here):
            continue
        elif not requirement.specifier.contains(place.target.torch, prereleases=True):
            raise BuildError(
                f"its build requires {requirement}, and {place.target.name} has torch {place.target.torch}: choose a "
                "target with such a torch (`torchwheels targets` lists all), or add one by "
                "`[[tool.torchwheels.releases]]`, or have `patches` ask for less"
            )
    # What wants another torch is refused. But what torch itself requires to run need not be what a build wants:
    # many ask for an older setuptools.
    torch = environments.torch_requirement(place.target)
    own = environments.clean_variables(place.home)
    environments.install(place.environment, requirements, own, constraint=torch)


def _repair(place: Workplace, variables: Mapping[str, str], built: Path, folder: Path) -> None:
    """Runs the project's command in place of auditwheel."""
    folder.mkdir()
    paths = {"wheel": shlex.quote(str(built)), "dest": shlex.quote(str(folder))}
    command = place.project.repair.format(**paths)
    path = os.pathsep.join([variables["PATH"], str(Path(sys.executable).parent)])  # auditwheel's
    _run_command("repair", command, _project_folder(place), {**variables, "PATH": path})
