"""Builds a wheel beside the target's torch, from a copy of the sources that stay untouched."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from build import BuildBackendException, BuildException, ProjectBuilder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from torchwheels import (
    check_import,
    environments,
    finish,
    links,
    machines,
    output,
    processes,
    reports,
    sources,
    toolchain,
    variants,
    wheel,
)
from torchwheels.environments import Environment
from torchwheels.errors import BuildError, UserError
from torchwheels.project import Project, cmake_architecture, filled, gencode, of_arguments
from torchwheels.releases import Target
from torchwheels.sources import Fetched
from torchwheels.wheel import Wheel

STEPS = ("requirements", "compile", "install", "import")
_SINCE_1980 = "315532800"  # the oldest time that a zip file can name

_COMPILES = re.compile(r"Extension\(|ext.modules|scikit_build|mesonpy")
"""What a setup.py or a pyproject.toml says whose project compiles."""

# A line for each file, of setuptools and wheel; and what torch warns of in every build without a GPU or NumPy.
_CHATTER = (
    r"(copying|creating|adding|hard linking|removing|reading manifest|writing \S+ to|writing manifest) "
    r"|W\d{4} .* No CUDA runtime is found|.*: Failed to initialize NumPy: |  cpu = _conversion_method_template\("
    r"|ninja: Jobserver mode detected"
)

# What a build prints, and the sentence for it; {0} is what the pattern's group found.
_KNOWN_FAILURES = (
    (
        r"(?:Killed signal terminated program|died due to signal 9|signal 9 \(|\bKilled\b)",
        "a compiler ran out of memory: build with fewer jobs at once (MAX_JOBS, now {jobs}, or the option "
        "`memory-per-job`)",
    ),
    (
        r"No space left on device",
        "the disk is full: free some space and build again",
    ),
    (
        r"The detected CUDA version \(([\d.]+)\) mismatches .*?\n?.*?compile\s+PyTorch \(([\d.]+)\)",
        "CUDA {0} cannot compile for a torch of CUDA {1}: set CUDA_HOME to CUDA {1}, or unset it",
    ),
    (
        r"in _execute_child\n(?: .*\n)*FileNotFoundError: .*'(.+)'"
        r"|^\S*sh: (?:line )?(?:\d+: )?(\S+): (?:command )?not found$",
        "the command {0} is not there: install it, or have pip do so where PyPI has it, as it has cmake, "
        "meson and ninja (`build-requires`)",
    ),
    (
        r'build program corresponding to "Unix Makefiles"',
        "the command make is not there: install it",
    ),
    (
        r"unable to detect version for|Versioning for this project requires either an sdist",
        "its version comes from git, and these sources are no repository: build `git+URL@COMMIT` or the folder of "
        "the whole repository, or name the version (`environment` with SETUPTOOLS_SCM_PRETEND_VERSION)",
    ),
    (
        r"No CUDA GPUs are available|no CUDA-capable device|CUDA (?:is|was) not (?:available|found|detected)"
        r"|CPU version is not implemented|torch\.cuda\.(?:is_available|get_device_\w+)\(",
        "its setup asks for a GPU: in a CUDA target `pretend-gpu = true` in [tool.torchwheels] (a file for "
        "`--config` where the project is not yours) has it find one",
    ),
    (
        r"CUDA_HOME environment variable is not set|Failed to detect a default CUDA architecture"
        r"|No CMAKE_CUDA_COMPILER could be found",
        "its build needs a CUDA compiler, which a target for the CPU alone has not: choose one with CUDA "
        "(`torchwheels targets` lists all)",
    ),
    (
        r"Your installed Caffe2 version uses CUDA but I cannot find the CUDA",
        "this torch was built with CUDA, which its CMake files then ask for: let TORCHWHEELS_TORCH_INDEX or "
        "pip's configuration name an index with builds for the CPU alone, such as PyTorch's own",
    ),
    (
        r"Network is unreachable|Temporary failure in name resolution|Name or service not known"
        r"|Could not resolve host",
        "its build asks for the network, which it has not: in a container the option `network` gives it "
        "one",
    ),
    (
        r"ninja: error: '(?:/\S+/source/)?(\S+)', needed by .*missing and no known rule to make it",
        "its sources lack the file {0}: an archive on PyPI may be incomplete, so build those of its repository "
        "(`git+URL@COMMIT`)",
    ),
    (
        r"fatal error: (\S+): No such file",
        "the header {0} is not there: install what has it (`system-packages` in a container, or "
        "`build-requires`)",
    ),
    (
        r"unsupported GNU version! (.*)",
        "this g++ is too new for the target's nvcc ({0}): put an older g++ first on PATH, or build with "
        "`--backend docker`",
    ),
)


@dataclass(frozen=True)
class _Build:
    """A build of one target: its folder, environments and compilers."""

    project: Project
    target: Target
    work: Path
    base: Environment
    """Has the target's torch, and is kept for other builds."""
    environment: Environment
    """Stands upon it, and is this build's own."""
    compiler: toolchain.HostCompiler
    toolkit: toolchain.CudaToolkit | None
    source: Fetched
    fresh: bool

    @property
    def finished(self) -> Path:
        """Its wheel, once that is compiled."""
        (found,) = (self.work / "finished").glob("*.whl")
        return found

    @property
    def driver(self) -> Path:
        """What it links with as CUDA's driver."""
        return self.work / "driver" / "libcuda.so"

    @property
    def variables(self) -> Path:
        """The file with the variables of all that runs in it."""
        return self.work / "variables.json"

    @property
    def home(self) -> Path:
        """The home folder of all that runs in the build."""
        return self.work / "home"


def build_wheel(
    project: Project, target: Target, source: Fetched, dist: Path, steps: Sequence[str] = STEPS,
    fresh: bool = False,
) -> Path | None:  # fmt: skip
    """Builds the wheel of `source` for `target`, on this machine; returns its path in `dist` after the last step.

    It is there only once it has passed the audit and has been imported, where that runs here. The first and third step
    install what the others want, which may then be without a network. `fresh` takes nothing of the compiler
    cache.
    """
    start = time.monotonic()
    target = project.target_to_build(target)
    _check_machine(project, target)
    toolkit_requirement = toolchain.pip_toolkit(target)
    any_cuda = bool(project.stable)
    base = environments.with_torch(target, toolkit_requirement, any_cuda)
    toolkit = toolchain.find_toolkit(target, base.site_packages)
    compiler = toolchain.host_compiler(target.machine)
    # One place for all builds of a project: paths end up in hashes that no prefix map reaches.
    with environments.locked(f"build/{target.name}-{source.name}") as work:
        environment = Environment(work / "environment")
        build = _Build(project, target, work, base, environment, compiler, toolkit, source, fresh)
        if "requirements" in steps:
            _prepare(build)
        if "compile" in steps:
            _compile(build, dist)
        if "install" in steps and target.machine.is_here:
            with kept_if_refused(build.finished, dist):
                check_import.install(build.finished, base, work / "import")
        if "import" not in steps:
            return None
        with kept_if_refused(build.finished, dist):
            if target.machine.is_here:
                imported = Environment(work / "import")
                check_import.check_import(build.finished, imported, project.imports, build.driver)
        report = json.loads(reports.report_file(build.finished).read_text())
        published = publish(build.finished, dist, report)
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9
    print(
        f"torchwheels: built {published}, which {_imports(target)} "
        f"({published.stat().st_size / 1e6:.2f} MB, {time.monotonic() - start:.0f} s, "
        f"largest process {largest:.1f} GB)",
        flush=True,
    )
    return published


def _check_machine(project: Project, target: Target) -> None:
    """Raises an error where the project does not say that it can be built here for the target's machine."""
    if not target.machine.is_here and not project.cross_compile:
        raise UserError(
            f"{target.name} is for {target.machine.name}, and this machine is {machines.here().name}: build there, or "
            "with `--backend docker` on an engine that emulates it, or set `cross-compile = true` in "
            "[tool.torchwheels] where the project's build can do that"
        )


def _imports(target: Target) -> str:
    if target.machine.is_here:
        return f"imports beside torch {target.torch}"
    return f"nobody has imported: this machine is {machines.here().name}"


def _prepare(build: _Build) -> None:
    """Lays out the folder of the build, and installs what it requires."""
    shutil.rmtree(build.work)
    build.home.mkdir(parents=True)
    if build.toolkit:
        libraries = None
        if not build.target.machine.is_here:
            libraries = environments.cuda_runtime(build.base, build.target, build.work / "runtime")
        driver = toolchain.make_driver(build.driver.parent, build.toolkit, build.compiler.cc)
        toolkit = toolchain.with_usual_layout(build.toolkit, build.work / "cuda", driver, libraries)
        build = dataclasses.replace(build, toolkit=toolkit)
    shutil.copytree(build.source.folder, build.work / "source", symlinks=True)
    _apply_patches(build.project, build.work / "source")
    environments.on_top_of(build.base, build.environment.folder)
    variables = _variables(build)
    if build.project.before_build:
        command = build.project.command_before_build(*_values(build, variables))
        _run_command("before-build", command, _project_folder(build), variables)
    _install_requirements(build, _project_folder(build), variables)
    build.variables.write_text(json.dumps(variables))


def _compile(build: _Build, dist: Path) -> None:
    """Makes the finished wheel, and audits it: one that is refused is kept in `dist`."""
    variables: dict[str, str] = json.loads(build.variables.read_text())
    jobs = variables["MAX_JOBS"]
    if (
        not build.target.machine.is_here
    ):  # for the compiling alone: pip would install what runs there
        variables["_PYTHON_HOST_PLATFORM"] = f"linux-{build.target.machine.name}"
    print(f"torchwheels: building {build.target.name}, {jobs} jobs at once", flush=True)
    with _backend(build, _project_folder(build), variables) as backend:
        built = Path(backend.build("wheel", build.work / "built", _settings(build, variables)))
    found = wheel.read(built)
    _check_compiled(build, found)
    links.check_linked(found, build.work / "compilers" / toolchain.LINKS, build.project)
    used = finish.Used(
        target=build.target,
        architectures=build.project.architectures(build.target),
        origin=build.source.origin,
        cxx=build.compiler.version,
        nvcc=build.toolkit.version if build.toolkit else None,
    )
    packages = build.base.site_packages
    provided = [packages / "torch" / "lib", *packages.glob("nvidia/*/lib")]
    provided += libraries_of_requirements(found, build.environment)
    machine = [build.work, build.base.folder, environments.installation(build.base) / "lib"]
    repair = None
    if build.project.repair:
        repair = functools.partial(_repair, build, variables)
    with kept_if_refused(built, dist):
        finished = finish.finish(built, build.work / "finished", used, provided, machine, repair)
    with kept_if_refused(finished, dist):
        reports.write(reports.check(finished, build.project, build.target), finished)


def libraries_of_requirements(found: Wheel, environment: Environment) -> list[Path]:
    """The folders of libraries that the wheel is linked with, and that packages have which it requires."""
    needed = {name for library in found.libraries.values() for name in library.needed}
    lines = map(Requirement, found.metadata.get_all("Requires-Dist") or [])
    required = {canonicalize_name(each.name) for each in lines}
    return sorted(
        {
            Path(str(file.locate())).parent
            for package in importlib.metadata.distributions(path=[str(environment.site_packages)])
            if canonicalize_name(package.metadata["Name"]) in required
            for file in package.files or ()
            if file.name in needed
        }
    )


def before_all(command: str, folder: Path) -> None:
    """Runs the project's command before all builds, in the sources that these then copy."""
    with tempfile.TemporaryDirectory(prefix="torchwheels-home-") as home:
        variables = {**environments.clean_variables(Path(home)), "PATH": os.environ["PATH"]}
        _run_command("before-all", command, folder, variables)


def _run_command(option: str, command: str, folder: Path, variables: Mapping[str, str]) -> None:
    """Runs the shell command that the project's `option` is."""
    print(f"torchwheels: {option}: {command}", flush=True)
    code, _ = processes.follow(["sh", "-ec", command], env=dict(variables), cwd=folder)
    if code != 0:
        raise UserError(
            f"the option `{option}` is `{command}`, which ended with exit code {code}: the messages above "
            "say why"
        )


def _apply_patches(project: Project, unpacked: Path) -> None:
    for patch in project.patches:
        assert project.file is not None
        file = (project.file.parent / patch).resolve()
        command = ["patch", "-p1", "--batch", f"--input={file}"]
        done = subprocess.run(command, cwd=unpacked, capture_output=True, text=True)
        if done.returncode != 0:
            said = " ".join((done.stdout + done.stderr).split())
            raise UserError(f"the patch {file} does not fit these sources: {said}")


def _project_folder(build: _Build) -> Path:
    project, unpacked = build.project, build.work / "source"
    folder = (unpacked / project.subdirectory).resolve()
    if not folder.is_relative_to(unpacked.resolve()) or not any(
        (folder / name).is_file() for name in ("setup.py", "pyproject.toml")
    ):
        raise UserError(
            f"the source has neither a setup.py nor a pyproject.toml in {project.subdirectory or 'it'}: "
            f"the option `subdirectory` says where its project is{_other_project(unpacked)}"
        )
    return folder


def _check_compiled(build: _Build, found: Wheel) -> None:
    """Raises an error where the wheel holds no library."""
    if not found.libraries:
        other = _other_project(build.work / "source")
        raise BuildError(f"{build.target.name} failed: its setup has compiled nothing{other}")


def _other_project(unpacked: Path) -> str:
    """Which folder of the sources has a setup that compiles, and the option that takes it; empty where none has."""
    found = [
        file.parent.relative_to(unpacked)
        for pattern in ("*/setup.py", "*/pyproject.toml", "*/*/setup.py", "*/*/pyproject.toml")
        for file in sorted(unpacked.glob(pattern))
        if _COMPILES.search(file.read_text(encoding="utf-8", errors="replace"))
    ]
    return (
        f'; its folder {found[0]} has one that does: `subdirectory = "{found[0]}"`' if found else ""
    )


def _install_requirements(build: _Build, folder: Path, variables: Mapping[str, str]) -> None:
    """Installs what the project's pyproject.toml and its build backend ask for."""
    with _backend(build, folder, variables) as backend:
        declared = sorted(backend.build_system_requires)
        _install(build, [*declared, *build.project.build_requires])
        settings = _settings(build, variables)
        _install(build, sorted(backend.get_requires_for_build("wheel", settings)))


def _install(build: _Build, said: Iterable[str]) -> None:
    """Installs requirements of the build, beside the target's torch and never instead of it."""
    requirements = []
    for requirement in map(Requirement, said):
        if requirement.name != "torch":
            requirements.append(str(requirement))  # pip of the target's Python evaluates its marker
        elif requirement.marker and not requirement.marker.evaluate(
            {"python_version": build.target.python_version}
        ):
            continue
        elif not requirement.specifier.contains(build.target.torch, prereleases=True):
            raise UserError(
                f"its build requires {requirement}, and {build.target.name} has torch {build.target.torch}: "
                "choose another target (`torchwheels targets` lists all)"
            )
    if requirements:
        constraint = build.work / "constraint.txt"
        constraint.write_text(f"{environments.torch_requirement(build.target)}\n")
        variables = environments.clean_variables(build.home)
        variables["PIP_CONSTRAINT"] = str(constraint)
        environments.pip_install(build.environment, requirements, variables)


def _variables(build: _Build) -> dict[str, str]:
    """The variables of the build, and what they name: wrappers, links, what each Python runs first."""
    target, toolkit, work = build.target, build.toolkit, build.work
    prefixes = {
        Path(sys.base_prefix): "/python",
        build.base.folder: "/environment",
        build.environment.folder: "/environment",
        **({toolkit.home: "/cuda"} if toolkit else {}),
        build.home: "/tmp",
        work / "source": ".",
    }
    launcher = toolchain.find_launcher(build.base.folder / "bin")
    compilers = work / "compilers"
    commands = [
        toolchain.make_wrappers(compilers, build.compiler, prefixes, launcher),
        build.environment.folder / "bin",
        build.base.folder / "bin",
        *([toolkit.home / "bin"] if toolkit else []),
        *toolchain.common_path(work),
    ]
    jobs = str(toolchain.parallel_jobs(toolchain.memory_per_job(build.project, target)))
    variables = (
        toolchain.cache_variables(_compiler_cache(build), work)
        | environments.clean_variables(build.home)
        | toolchain.compiler_variables()
        | {
            "PATH": os.pathsep.join(map(str, commands)),
            "MAX_JOBS": jobs,
            "CMAKE_BUILD_PARALLEL_LEVEL": jobs,
            "SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH", _SINCE_1980),
            "FORCE_CUDA": "1" if toolkit else "0",
        }
    )
    if build.fresh:
        variables |= {"CCACHE_RECACHE": "1", "SCCACHE_RECACHE": "1"}
    if toolkit:
        variables |= toolchain.nvcc_variables(compilers, toolkit, launcher)
        named = build.project.architectures(target)
        variables |= {
            "CUDA_HOME": str(toolkit.home),
            "CUDAToolkit_ROOT": str(toolkit.home),
            "CUDAARCHS": ";".join(map(cmake_architecture, named)),
            "LIBRARY_PATH": f"{toolkit.home / 'lib64'}{os.pathsep}{build.driver.parent}",
        }
    else:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    _write_start(build)
    cuda_home = str(toolkit.home) if toolkit else ""
    variables |= build.project.variables(target, jobs, cuda_home, build.source.origin)
    return variables


def _compiler_cache(build: _Build) -> Path:
    """The project's own, wherever its sources lie: a copy of them finds there what was compiled of the first."""
    return environments.cache() / "compiled" / (build.source.name or "unnamed")


def _write_start(build: _Build) -> None:
    """Has each Python of the build run start_of_python.py first."""
    name = "torchwheels_start"
    start = build.environment.site_packages / f"{name}.py"
    shutil.copyfile(toolchain.WRAPPERS / "start_of_python.py", start)
    cuda = build.target.cuda
    named = build.project.architectures(build.target)
    pretended = named[-1].removesuffix("+PTX") if cuda and named else None
    settings = {
        "hide-toolkit": cuda is None,
        "pretend-gpu": pretended if build.project.pretend_gpu else None,
        "architectures": build.project.variables(build.target)["TORCH_CUDA_ARCH_LIST"],
        "gencode": [*gencode(named)] if cuda else [],
    }
    start.with_suffix(".json").write_text(json.dumps(settings))
    start.with_suffix(".pth").write_text(f"import {name}\n")


def _settings(build: _Build, variables: Mapping[str, str]) -> dict[str, str | list[str]]:
    return build.project.backend_settings(*_values(build, variables))


def _values(build: _Build, variables: Mapping[str, str]) -> tuple[Target, str, str, str]:
    """What the options of the project are filled in with."""
    return build.target, variables["MAX_JOBS"], variables.get("CUDA_HOME", ""), build.source.origin


def _repair(build: _Build, variables: Mapping[str, str], built: Path, folder: Path) -> None:
    """Runs the project's command in place of auditwheel."""
    folder.mkdir()
    paths = {"wheel": shlex.quote(str(built)), "dest": shlex.quote(str(folder))}
    command = filled(build.project.repair, paths, "the option `repair` is set")
    path = os.pathsep.join([variables["PATH"], str(Path(sys.executable).parent)])  # auditwheel's
    _run_command("repair", command, _project_folder(build), {**variables, "PATH": path})


@contextlib.contextmanager
def _backend(build: _Build, folder: Path, variables: Mapping[str, str]) -> Iterator[ProjectBuilder]:
    """The project's build backend, in processes of the build's environment; its failures are explained."""
    last = ""

    def run(
        cmd: Sequence[str],
        cwd: str | None = None,
        extra_environ: Mapping[str, str] | None = None,
    ) -> None:
        nonlocal last
        given = {**variables, **(extra_environ or {})}
        try:
            code, last = processes.follow(
                [*cmd],
                build.project.time_limit * 60,
                hidden=_CHATTER,
                shown=output.Shortened(build.work / "source"),
                env=given,
                cwd=cwd or folder,
                umask=0o022,
            )
        except subprocess.TimeoutExpired:
            raise BuildError(f"{build.target.name} failed: {too_long(build.project)}") from None
        if code != 0:
            raise subprocess.CalledProcessError(code, cmd)

    # Of torch, whose warning in the backend comes back as one of this process.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    try:
        yield ProjectBuilder(folder, str(build.environment.python), run)
    except BuildBackendException as error:
        if isinstance(error.exception, UserError):  # that it took too long
            raise error.exception from None
        # Where the backend could not even be called, nothing has been printed of it.
        traceback = getattr(error.exception, "traceback", "")
        shown = map(output.Shortened(build.work / "source"), traceback.splitlines(keepends=True))
        print("".join(shown), end="", flush=True)
        why = _missing_modules(build, folder, last + traceback)
        why = why or _explain(last + traceback, variables["MAX_JOBS"])
        if empty := sources.empty_submodules(build.work / "source"):
            why += (
                f"; its submodules are empty ({', '.join(empty)}), so try again once `git submodule update --init "
                "--recursive` has filled them, or build `git+URL@COMMIT`"
            )
        raise BuildError(f"{build.target.name} failed: {why}") from None
    except BuildException as error:
        raise BuildError(f"{build.target.name} failed: {error}") from None


def too_long(project: Project) -> str:
    """What to say of a build that reaches its limit of time."""
    return (
        f"it took more than {project.time_limit:g} minutes: give it more cores (MAX_JOBS says how many "
        "compilers run at once), or raise `time-limit` in [tool.torchwheels]"
    )


# Prints which of the modules that these files import cannot be found.
_FIND_MODULES = """
import ast, importlib.util, pathlib, sys
wanted = set()
class Imports(ast.NodeVisitor):
    def visit_Try(self, node): pass  # what may be missing
    def visit_Import(self, node): wanted.update(each.name for each in node.names)
    def visit_ImportFrom(self, node): wanted.update([node.module] if not node.level else [])
for file in sys.argv[1:]:
    Imports().visit(ast.parse(pathlib.Path(file).read_bytes()))
sys.path.insert(0, "")
tops = sorted({name.partition(".")[0] for name in wanted})
print(*(name for name in tops if importlib.util.find_spec(name) is None))
"""


def _missing_modules(build: _Build, folder: Path, printed: str) -> str:
    """What to say where an import failed: all modules that are missing, not one for each build."""
    first = re.search(r"ModuleNotFoundError: No module named '([^'.]+)", printed)
    if not first:
        return ""
    # setuptools hides the name of setup.py from the traceback.
    files = {folder / "setup.py", *map(Path, re.findall(r'File "(/[^"]+\.py)", line', printed))}
    own = [str(x) for x in sorted(files) if x.is_file() and x.is_relative_to(folder)]
    command = [str(build.environment.python), "-c", _FIND_MODULES, *own]
    variables = environments.clean_variables(build.home)
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    names = ", ".join(sorted({first[1], *done.stdout.split()}))
    return (
        f"its build imports modules that are not there ({names}): add what has them to `build-requires` "
        "in [tool.torchwheels] (a file for `--config` where the project is not yours)"
    )


def _explain(printed: str, jobs: str) -> str:
    for pattern, sentence in _KNOWN_FAILURES:
        found = re.search(pattern, printed, re.MULTILINE)
        if found:
            return sentence.format(*filter(None, found.groups()), jobs=jobs)
    return "the messages above say why"


@contextlib.contextmanager
def kept_if_refused(finished: Path, dist: Path) -> Iterator[None]:
    """Leaves a wheel that raises an error in `dist`, for a look at it, by a name that nothing installs."""
    refused = dist / f"{finished.name}.refused"
    refused.unlink(missing_ok=True)
    try:
        yield
    except UserError as error:
        _copy_whole(finished, refused)
        raise type(error)(f"{error}\n  the wheel is kept as {refused}") from None


def publish(finished: Path, dist: Path, report: dict[str, Any] | None = None) -> Path:
    """Copies a wheel into `dist`, with its build report and its variant, and returns its path there."""
    published = _copy_whole(finished, dist / finished.name)
    found = wheel.read(published)
    variants.write(found)
    if report:
        reports.write(report | {"variant": reports.variant(found)}, published)
    return published


def _copy_whole(finished: Path, target: Path) -> Path:
    """Copies `finished` to `target`, where it appears whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.copyfile(finished, partial)
        return partial.replace(target)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def main() -> None:
    """Writes which compilers an image has into a file, before any code of a project is there."""
    name, release, stable, own, file = sys.argv[1:]
    options = of_arguments(release, stable, own)
    target = options.target_to_build(options.releases.target(name))
    base = environments.with_torch(target, toolchain.pip_toolkit(target), any_cuda=bool(stable))
    toolkit = toolchain.find_toolkit(target, base.site_packages)
    said = {
        "cxx": toolchain.host_compiler(target.machine).version,
        "nvcc": toolkit.version if toolkit else None,
    }
    Path(file).write_text(json.dumps(said))


if __name__ == "__main__":
    main()
