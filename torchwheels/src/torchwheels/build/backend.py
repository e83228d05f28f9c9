"""The workplace of a build, and the project's build backend, which runs there: its failures are explained."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from build import BuildBackendException, BuildException, ProjectBuilder

from torchwheels import environments, sources
from torchwheels.build import toolchain
from torchwheels.environments import Environment
from torchwheels.errors import BuildError, UserError
from torchwheels.options import Project, Target, Values, project
from torchwheels.sources import Fetched
from torchwheels.system import cache, output, processes

_SINCE_1980 = "315532800"  # the oldest time that a zip file can name

# Builds take the wrappers, whatever the folder in which Python's settings have a compiler, and link with nothing else
# that these settings say, such as where this machine's Python is. torch would call a compiler cache, which takes each
# build's wrappers for other compilers.
_COMPILERS = {
    "CC": "gcc", "CXX": "g++", "LDSHARED": "gcc -shared", "LDCXXSHARED": "g++ -shared",
    "TORCH_NO_COMPILER_WRAPPER": "1", "PYTHONUNBUFFERED": "1",  # else prints come after the last error
}  # fmt: skip


@dataclass(frozen=True)
class Workplace:
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

    def failed(self, why: object) -> BuildError:
        """The error that says why."""
        return BuildError(f"{self.target.name} failed: {why}")


def variables_of(place: Workplace) -> dict[str, str]:
    """The variables of the build, and what they name: wrappers, links, what each Python runs first."""
    target, toolkit, work = place.target, place.toolkit, place.work
    prefixes = {
        Path(sys.base_prefix): "/python",
        place.base.folder: "/environment",
        place.environment.folder: "/environment",
        **({toolkit.home: "/cuda"} if toolkit else {}),
        place.home: "/tmp",
        work / "source": ".",
    }
    launcher = toolchain.find_launcher(place.base.folder / "bin", work)
    compilers = work / "compilers"
    commands = [
        toolchain.make_wrappers(compilers, place.compiler, prefixes, launcher),
        place.environment.folder / "bin",
        place.base.folder / "bin",
        *([toolkit.home / "bin"] if toolkit else []),
        *toolchain.common_path(work),
    ]
    usual = toolchain.MEMORY_PER_JOB["cuda" if target.cuda else "cpu"]
    jobs = str(toolchain.parallel_jobs(place.project.memory_per_job or usual))
    variables = {
        **toolchain.cache_variables(_compiler_cache(place), work),
        **environments.clean_variables(place.home),
        **_COMPILERS,
        "PATH": os.pathsep.join(map(str, commands)),
        "MAX_JOBS": jobs,
        "CMAKE_BUILD_PARALLEL_LEVEL": jobs,
        "SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH", _SINCE_1980),
        "FORCE_CUDA": "1" if toolkit else "0",
    }
    if place.fresh:
        variables |= {"CCACHE_RECACHE": "1", "SCCACHE_RECACHE": "1"}
    if toolkit:
        variables |= toolchain.nvcc_variables(compilers, toolkit, launcher)
        named = place.project.architectures(target)
        variables |= {
            "CUDA_HOME": str(toolkit.home),
            "CUDAToolkit_ROOT": str(toolkit.home),
            "CUDAARCHS": ";".join(map(project.cmake_architecture, named)),
            "LIBRARY_PATH": f"{toolkit.home / 'lib64'}{os.pathsep}{place.driver.parent}",
        }
    else:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    _write_start(place)
    return variables | place.project.variables(values_of(place, variables))


def _compiler_cache(place: Workplace) -> Path:
    """The project's own, wherever its sources lie: a copy of them finds there what was compiled of the first."""
    return cache.use(cache.place() / "compiled") / (place.source.name or "unnamed")


def _write_start(place: Workplace) -> None:
    """Has each Python of the build run start_of_python.py first."""
    name = "torchwheels_start"
    start = place.environment.site_packages / f"{name}.py"
    shutil.copyfile(toolchain.WRAPPERS / "python" / "start_of_python.py", start)
    cuda = place.target.cuda
    named = place.project.architectures(place.target)
    pretended = named[-1].removesuffix("+PTX") if cuda and named else None
    own = place.project.variables(project.values_of(place.target))
    settings = {
        "hide-toolkit": cuda is None,
        "pretend-gpu": pretended if place.project.pretend_gpu else None,
        "architectures": own["TORCH_CUDA_ARCH_LIST"],
        "gencode": [*project.gencode(named)] if cuda else [],
    }
    start.with_suffix(".json").write_text(json.dumps(settings))
    start.with_suffix(".pth").write_text(f"import {name}\n")


def values_of(place: Workplace, variables: Mapping[str, str]) -> Values:
    """What the options of the project are filled in with."""
    given = variables["MAX_JOBS"], variables.get("CUDA_HOME", "")
    return project.values_of(place.target, *given, place.source.origin)


# A line for each file, of setuptools and wheel; and what torch warns of in every build without a GPU or NumPy.
_CHATTER = (
    r"(copying|creating|adding|hard linking|removing|reading manifest|writing \S+ to|writing manifest) "
    r"|W\d{4} .* No CUDA runtime is found|.*: Failed to initialize NumPy: |  cpu = _conversion_method_template\("
    r"|ninja: Jobserver mode detected"
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
    except (BuildException, ValueError, RecursionError) as error:  # the second of `backend-path`
        raise place.failed(f"its [build-system]: {error}") from None
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
        printed = of_failure(last + traceback)
        known = {"jobs": variables["MAX_JOBS"], "space": processes.FREE_SPACE}
        why = left_out(place, printed) or explained(printed, "build", **known)
        why = why or _ended(getattr(error.exception, "returncode", 1))
        if empty := sources.empty_submodules(place.work / "source"):
            why += (
                f"; its submodules are empty ({', '.join(empty)}), so try again once `git submodule update --init "
                "--recursive` has filled them, or build `git+URL@COMMIT`"
            )
        raise place.failed(why) from None


def too_long(project: Project) -> str:
    """What to say of a build that reaches its limit of time."""
    return (
        f"it took more than {project.time_limit:g} minutes: give it more cores (MAX_JOBS says how many "
        "compilers run at once), or raise `time-limit` in [tool.torchwheels]"
    )


# Of ninja, sccache and GCC, where a file is not there that is to be compiled or included; of Python, where it is to be
# opened or imported.
_MISSING = re.compile(
    r"ninja: error: '(.+?)', needed by .*missing and no known rule"
    r"|while hashing the input file '(.+?)'|fatal error: (\S+): No such file"
    r"|FileNotFoundError: .*No such file or directory: '(.+?)'"
    r"|No module named '(?P<module>.+?)'|cannot import name '(?P<name>.+?)' from .*?'(?P<package>.+?)'"
)


def left_out(place: Workplace, printed: str) -> str:
    """What to say where a file is missing that the folder of the sources has, and their copy has not."""
    original = Path(place.source.project or "/none")
    for found in _MISSING.finditer(printed):
        names = [x for x in found.groups() if x]
        if found["module"] or found["name"]:
            path = (found["module"] or f"{found['package']}.{found['name']}").replace(".", "/")
            names = [f"{path}.py", f"{path}/__init__.py"]
        for name in names:
            if said := _why_missing(name, original, place):
                return said
    return ""


def _why_missing(name: str, original: Path, place: Workplace) -> str:
    _, up, inside = f"/{name}".rpartition("/../")
    for file in original.rglob(Path(inside).name):
        own = file.relative_to(original)
        if not (f"/{own}".endswith(f"/{inside.lstrip('/')}") or inside.endswith(f"/{own}")):
            continue
        lacks = f"its sources lack the file {own}"
        if file.is_symlink() and not (place.work / "source" / own).exists():
            return f"{lacks}, a link out of their folder ({file.readlink()}): put the file itself there"
        if not (place.source.folder / own).exists():
            if not sources.is_in_repository(original):
                return f"{lacks}, which lies where builds leave their own: move it out of {own.parts[0]}"
            why = "which git ignores, or which lies where builds leave their own"
            return f"{lacks}, {why}: add it all the same (`git add --force {own}`)"
    for folder in original.parents if up else ():
        if (folder / inside).is_file():
            part = original.relative_to(folder)
            why = "which lies outside of the folder that is built"
            return f"its sources lack the file {inside}, {why}: build {folder} with `--subdirectory {part}`"
    return ""


_COMMAND = r"(?:\S*/)?[\w.-]*(?:cc|\+\+|clang)[\d.-]* -"
# What setuptools prints before it does the next thing, and ninja below what has failed.
_NEXT = re.compile(rf"^(?:running \w+$|building '.*' extension$|{_COMMAND})", re.MULTILINE)
_FAILS = re.compile(rf"^(?:FAILED: |CMake Error|{_COMMAND})", re.MULTILINE)
_HEAD = r"Traceback \(most recent call last\):\n(?: .*\n)*"
_TRACEBACK = re.compile(
    rf"^(?:{_HEAD}\S.*\n+The above exception was the direct cause of .*\n+)*{_HEAD}(\S.*)",
    re.MULTILINE,
)
_ERROR = re.compile(r"^(?:.*\b(?i:error|fatal) *:|[\w.]*(?:Error|Exception)\b).*", re.MULTILINE)
_LINE = re.compile(r"^\S.*", re.MULTILINE)
# What says no more than that something failed, which has printed why.
_NO_REASON = re.compile(
    r"^(?:Traceback|make)\b|Error compiling objects|(?i:\bfail(?!ure in name)|non-zero|exit (?:code|status))"
)


def of_failure(printed: str) -> str:
    """What was printed of the error that has ended a build: what its setup only tries may have failed before."""
    printed = printed[max((x.start() for x in _NEXT.finditer(printed)), default=0) :]
    kinds = _ERROR.finditer(printed), _LINE.finditer(printed)
    errors, lines = ([x.start() for x in kind if not _NO_REASON.search(x[0])] for kind in kinds)
    last = (errors or lines or [0])[-1]
    for found in _TRACEBACK.finditer(printed):
        if found.start(1) <= last <= found.end():
            return printed[found.start() :]
    fails = _FAILS.search(printed)
    return printed[fails.start() if fails else last :]


def _ended(code: int) -> str:
    """What to say of a backend whose failure is not known."""
    if code == 1:
        return "the messages above say why"
    how = f"died of signal {code - 128}" if code > 128 else f"ended with exit code {code}"
    return f"its build backend {how}"


def explained(printed: str, what: str, **values: str) -> str:
    """What the table of failures says of `what` has failed and printed that; empty where it knows nothing."""
    table = msgspec.toml.decode(Path(__file__).with_name("failures.toml").read_bytes())
    found = [
        (printed.count("\n", 0, match.start()), -place, match, each["says"])
        for place, each in enumerate(table[what])
        for match in re.finditer("|".join(each["printed"]), printed, re.MULTILINE)
    ]
    if not found:
        return ""
    *_, match, says = max(found, key=lambda x: x[:2])
    return str(says).format(*filter(None, match.groups()), **values)
