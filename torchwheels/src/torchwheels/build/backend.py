"""Runs the build backend of a project, and explains its failures."""

import contextlib
import os
import re
import subprocess
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
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
    table = msgspec.toml.decode(Path(__file__).with_name("failures.toml").read_bytes())
    values = {"jobs": jobs, "space": processes.FREE_SPACE}
    for each in table["failure"]:
        if found := re.search("|".join(each["printed"]), printed, re.MULTILINE):
            return str(each["says"]).format(*filter(None, found.groups()), **values)
    return "the messages above say why"
