"""Runs the build backend of a project, and explains its failures."""

import contextlib
import os
import re
import subprocess
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from build import BuildBackendException, BuildException, ProjectBuilder

from torchwheels import sources
from torchwheels.build.workplace import Workplace
from torchwheels.errors import UserError
from torchwheels.options import Project
from torchwheels.system import cache, output, processes

# A line for each file, of setuptools and wheel; and what torch warns of in every build without a GPU or NumPy.
_CHATTER = (
    r"(copying|creating|adding|hard linking|removing|reading manifest|writing \S+ to|writing manifest) "
    r"|W\d{4} .* No CUDA runtime is found|.*: Failed to initialize NumPy: |  cpu = _conversion_method_template\("
    r"|ninja: Jobserver mode detected"
)

# What a build prints, by patterns, and behind each the message; {0} is the group of the pattern. A compiler that was
# killed is said so by GCC, nvcc, Python, a shell or make.
_KNOWN_FAILURES = re.findall(
    r"((?:^\S.*\n)+)((?:^ .*\n)+)",
    r"""
ModuleNotFoundError: No module named '([^'.]+)
    its build imports a module that is not there ({0}): add what has it to `build-requires` in [tool.torchwheels] (a
    file for `--config` where the project is not yours)
Killed signal terminated program|died due to signal 9|signal 9 \(|SIGKILL|^Killed$
|^\S*sh: .*\bKilled\b|\] (?:Error 137|Killed)$
    a compiler ran out of memory: build with fewer jobs at once (MAX_JOBS, now {jobs}, or the option
    `memory-per-job`)
No space left on device
    the disk is full: {space}
The detected CUDA version \(([\d.]+)\) mismatches .*?\n?.*?compile\s+PyTorch \(([\d.]+)\)
    CUDA {0} cannot compile for a torch of CUDA {1}: set CUDA_HOME to CUDA {1}, or unset it
in _execute_child\n(?: .*\n)*FileNotFoundError: .*'(.+)'
|^\S*sh: (?:line )?(?:\d+: )?(\S+): (?:command )?not found$
    the command {0} is not there: install it, or have pip do so where PyPI has it, as it has cmake, meson and ninja
    (`build-requires`)
unable to detect version for|Versioning for this project requires either an sdist
    its version comes from git, and these sources are no repository: build `git+URL@COMMIT` or the folder of the
    whole repository, or name the version (`environment` with SETUPTOOLS_SCM_PRETEND_VERSION)
No CUDA GPUs are available|no CUDA-capable device|CUDA (?:is|was) not (?:available|found|detected)
|CPU version is not implemented|torch\.cuda\.(?:is_available|get_device_\w+)\(
    its setup asks for a GPU: in a CUDA target `pretend-gpu = true` in [tool.torchwheels] (a file for `--config`
    where the project is not yours) has it find one
CUDA_HOME environment variable is not set|Failed to detect a default CUDA architecture
|No CMAKE_CUDA_COMPILER could be found|cannot find -l(?:c10|torch)_cuda\b
    its build needs a CUDA compiler, which a target for the CPU alone has not: choose one with CUDA (`torchwheels
    targets` lists all)
Your installed Caffe2 version uses CUDA but I cannot find the CUDA
    this torch was built with CUDA, which its CMake files then ask for: let TORCHWHEELS_TORCH_INDEX or pip's
    configuration name an index with builds for the CPU alone, such as PyTorch's own
Network is unreachable|Temporary failure in name|Could not resolve host|Name or service not known
    its build asks for the network, which it has not: in a container the option `network` gives it one
C\+\+(\d\d) (?:or later compatible compiler is )?required to use|You need C\+\+(\d\d) to compile PyTorch
    this torch's headers want C++{0}, and its setup asks for an older one: have `patches` or `before-build` write
    `-std=c++{0}` there, or choose a target with an older torch
Compatibility with CMake < ([\d.]+) has been removed from CMake
    its CMakeLists.txt is for a CMake before {0}, which this one no longer takes: set environment = {{
    CMAKE_POLICY_VERSION_MINIMUM = "{0}" }} in [tool.torchwheels]
fatal error: (THC?/\S+): No such file
    the header {0} was torch's until 1.10: these sources are for an older torch than any target has
fatal error: (\S+): No such file.*\n.*#include "
    the header {0} is not there, and may be of the project: an archive on PyPI may be incomplete, so build its
    repository (`git+URL@COMMIT`), or install what has it (`system-packages` in a container, or `build-requires`)
fatal error: (\S+): No such file
    the header {0} is not there: install what has it (`system-packages` in a container, or `build-requires`)
unsupported GNU version! (.*)
    this g++ is too new for the target's nvcc ({0}): put an older g++ first on PATH, or build with `--backend
    docker`
""",
    re.MULTILINE,
)


@contextlib.contextmanager
def opened(
    place: Workplace, folder: Path, variables: Mapping[str, str]
) -> Iterator[ProjectBuilder]:
    """The project's build backend, in processes of the build's environment; its failures are explained."""
    last = ""

    def run(
        cmd: Sequence[str], cwd: str | None = None, extra_environ: Mapping[str, str] | None = None
    ) -> None:
        nonlocal last
        own = {**variables, **(extra_environ or {})}
        where = {"env": own, "cwd": cwd or folder, "umask": 0o022}
        shown = output.Shortened(place.work / "source")
        limit = place.project.time_limit * 60
        try:
            code, last = processes.follow([*cmd], limit, hidden=_CHATTER, shown=shown, **where)
        except subprocess.TimeoutExpired:
            raise place.failed(too_long(place.project)) from None
        if code != 0:
            raise subprocess.CalledProcessError(code, cmd)

    # Of torch, whose warning in the backend comes back as one of this process.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    try:
        builder = ProjectBuilder(folder, str(place.environment.python), run)
    except ValueError as error:  # of `backend-path`
        raise place.failed(f"its [build-system]: {error}") from None
    except BuildException as error:
        raise place.failed(error) from None
    try:
        yield builder
    except BuildBackendException as error:
        # That it took too long, or that nobody reads what we print.
        if isinstance(error.exception, (UserError, BrokenPipeError)):
            raise error.exception from None
        # If the backend could not even be called, it has printed nothing.
        traceback = getattr(error.exception, "traceback", "")
        shown = map(output.Shortened(place.work / "source"), traceback.splitlines(keepends=True))
        print("".join(shown), end="", flush=True)
        why = _lacking(place, last + traceback) or _explain(last + traceback, variables["MAX_JOBS"])
        if empty := sources.empty_submodules(place.work / "source"):
            why += (
                f"; its submodules are empty ({', '.join(empty)}), so try again once `git submodule update --init "
                "--recursive` has filled them, or build `git+URL@COMMIT`"
            )
        raise place.failed(why) from None
    except BuildException as error:
        raise place.failed(error) from None


def too_long(project: Project) -> str:
    """What to say of a build that reaches its limit of time."""
    return (
        f"it took more than {project.time_limit:g} minutes: give it more cores (MAX_JOBS says how many "
        "compilers run at once), or raise `time-limit` in [tool.torchwheels]"
    )


# Of ninja, sccache and GCC, where a file that is to be compiled is not there; and an included one.
_NO_SOURCE = re.compile(
    r"ninja: error: '(.+?)', needed by .*missing and no known rule"
    r"|while hashing the input file '(.+?)'|cc1\w*: fatal error: (\S+): No such file"
)
_NO_HEADER = re.compile(r"fatal error: (\S+): No such file")


def _lacking(place: Workplace, printed: str) -> str:
    """What to say where a file of the project is missing: why the copy of the sources lacks it, if that is known."""
    copy, original = place.work / "source", Path(place.source.project or "/none")
    if found := _NO_SOURCE.search(printed):
        name = next(filter(None, found.groups()))
        path = Path(os.path.normpath(copy / place.project.subdirectory / name))
        if not path.is_relative_to(copy):
            why = (
                f"{os.path.relpath(path, copy)} lies outside of the folder that is built: build the folder that holds "
                "both, where `--subdirectory` says which part is the project"
            )
            return why if path.is_relative_to(cache.place()) else ""
    elif found := _NO_HEADER.search(printed):
        ends = (x.relative_to(original) for x in original.rglob(Path(found[1]).name))
        names = (x for x in ends if f"/{x}".endswith(f"/{found[1]}"))
        path = next((copy / x for x in names if not (copy / x).exists()), copy)
    else:
        return ""
    file = path.relative_to(copy)
    lacks = f"its sources lack the file {file}"
    if path.is_symlink():
        return f"{lacks}, a link out of their folder ({path.readlink()}): put the file itself there"
    if path == copy:
        return ""
    if (original / file).exists() and not (place.source.folder / file).exists():
        if (original / ".git").exists():
            return f"{lacks}, which git ignores: add it all the same (`git add --force {file}`)"
        way_out = f"rename the folder {file.parts[0]}"
        return f"{lacks}, which lies where builds leave their own: {way_out}"
    return (
        f"{lacks}: an archive on PyPI may be incomplete, so build those of its repository (`git+URL@COMMIT`), and of a "
        "folder git's are taken"
    )


def _explain(printed: str, jobs: str) -> str:
    for lines, sentence in _KNOWN_FAILURES:
        if found := re.search(lines.replace("\n", ""), printed, re.MULTILINE):
            values = {"jobs": jobs, "space": processes.FREE_SPACE}
            return " ".join(sentence.split()).format(*filter(None, found.groups()), **values)
    return "the messages above say why"
