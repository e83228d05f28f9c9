"""Runs the tests of a project on its finished wheel, away from the sources."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from torchwheels import environments, wheel
from torchwheels.build import toolchain
from torchwheels.environments import Environment
from torchwheels.errors import TestsError, UserError
from torchwheels.options import Project, Target
from torchwheels.system import files, machines, processes, sandbox, sha256, without_userinfo
from torchwheels.wheel import Wheel

RECORD = "record.json"
"""What a run of the tests leaves in the folder of its results."""

_PLUGIN = "torchwheels_pytest"
_SECRETS = re.compile(r"NETRC|UV_\w+_(USERNAME|PASSWORD|TOKEN)")


def find_wheel(dist: Path, target: Target, project: str = "", versions: str = "") -> Path:
    """The newest wheel in `dist` that works with `target`: the target's own, or one for several targets.

    Where the name of the project is not known, `dist` must have wheels of one alone.
    """
    found: list[tuple[str, str]] = sandbox.call(_serving, dist, target, project, versions)
    names = sorted({name for _, name in found})
    if len(names) > 1:
        several = f"wheels of several projects for {target.name}, {' and '.join(names)}"
        raise UserError(f"{dist} has {several}: say which one to test, with `--wheel PATH`")
    if not found:
        of = f" of {project}{versions}" if project else ""
        raise UserError(
            f"there is no wheel{of} for {target.name} in {dist}: build it with `nox -s build-{target.name}` or "
            f"`torchwheels build SOURCE --target {target.name}`"
        )
    return max((dist / file for file, _ in found), key=lambda path: path.stat().st_mtime)


def _serving(dist: Path, target: Target, project: str, versions: str) -> list[tuple[str, str]]:
    """The wheels in `dist` that work with `target`, and the names of their projects."""
    files, wanted = filter(Path.is_file, wheel.wheels_in(dist)), SpecifierSet(versions)
    found = (x for x in map(wheel.read, files) if project in ("", x.name))
    found = (x for x in found if wanted.contains(x.version, prereleases=True))
    return [(each.path.name, each.name) for each in found if works_with(each, target)]


def check_wheel(path: Path, target: Target, project: str) -> None:
    """Raises an error where a wheel is of another project, or not for the Python of `target`, before anything is
    installed for it.
    """
    if other := sandbox.call(_other, path, target, project):
        raise UserError(f"`--wheel` names {path.name}, {other}")


def _other(path: Path, target: Target, project: str) -> str:
    found = wheel.read(path)
    if project not in ("", found.name):
        return f"and the sources are those of {project}"
    if not (found.takes(target) and target.is_of(found.required_pythons)):
        return f"and {target.name} has Python {target.python}"
    return ""


def works_with(found: Wheel, target: Target) -> bool:
    """Whether a wheel is for the Python, the CUDA and the torch of `target`, by what it holds and says."""
    built_in = (found.record or {}).get("target", "")
    if built_in == target.name:
        return True
    of_label = re.fullmatch(rf"[^-]+-{target.label}(-.*)?", built_in)
    if not of_label or machines.of_name(built_in) != target.machine:
        return False
    # Where the libraries use torch's C++, they say which torch; else the metadata do.
    torches = found.torches if found.classic_use else str(found.torch_requirement or "")
    fits = torches is not None and SpecifierSet(torches).contains(target.torch, prereleases=True)
    return fits and found.takes(target) and target.is_of(found.required_pythons)


def install(project: Project, target: Target, path: Path, folder: Path) -> None:
    """Makes an environment with the wheel `path` and what its tests need, in `folder`."""
    home = folder / "home"
    home.mkdir(parents=True)
    environment = environments.on_top_of(_base(target), folder / "environment")
    torch = environments.torch_requirement(target)  # which stays as it is
    wanted = [torch, str(path.resolve()), "pytest", *project.tests.requires]
    environments.install(environment, wanted, environments.clean_variables(home))
    shutil.copy(toolchain.WRAPPERS / "python" / f"{_PLUGIN}.py", environment.site_packages)


def _base(target: Target) -> Environment:
    if not target.machine.is_here:
        raise UserError(
            f"{target.name} is for {target.machine.name}, which this machine is not: test there, or with "
            "`--backend docker` on an engine that emulates it"
        )
    # Tests need no compiler.
    return environments.with_torch(target, (), any_cuda=target.is_release)


def run_here(
    project: Project, target: Target, folder: Path, sources: Path, arguments: Sequence[str],
    require_gpu: bool, results: Path,
) -> int:  # fmt: skip
    """Runs the tests in what `install` made in `folder`; returns the exit code of their command.

    `arguments` are added to the command. The record of the run is in the folder `results` then.
    """
    base, environment = _base(target), Environment(folder / "environment")
    tests, work = project.tests, folder / "work"
    work.mkdir()
    paths = {*map(Path, tests.paths)}
    for each in paths:
        if not paths & {*each.parents}:  # with which it comes
            _copy((sources / project.subdirectory).resolve(), each, work)
    commands = [environment.folder / "bin", base.folder / "bin", os.environ["PATH"]]
    # Nothing is installed any more, so no password is needed, and all may be printed.
    own = environments.clean_variables(folder / "home").items()
    variables = {k: without_userinfo(v) for k, v in own if not _SECRETS.fullmatch(k)} | {
        "PATH": os.pathsep.join(map(str, commands)),
        "PYTEST_PLUGINS": _PLUGIN,
        "TORCHWHEELS_RECORD": str(results / RECORD),
    }
    kept = os.environ.keys() & {"CUDA_VISIBLE_DEVICES", "CUDA_HOME"}
    variables |= {name: os.environ[name] for name in kept}
    if not target.cuda:  # its torch may have CUDA, and its wheel nothing for a GPU
        variables["CUDA_VISIBLE_DEVICES"] = ""
    command = ["python", "-m", "pytest", *tests.paths]
    if tests.command:  # of a shell, as all that the options name
        command = ["sh", "-ec", f'{tests.command} "$@"', "sh"]
    asks_pytest = require_gpu and not tests.require_gpu
    if asks_pytest:
        variables["TORCHWHEELS_REQUIRE_GPU"] = "1"
    elif require_gpu:
        command.append(tests.require_gpu)
    limit = tests.minutes * 60
    try:
        done = processes.run([*command, *arguments], limit, cwd=work, env=variables)
    except subprocess.TimeoutExpired:
        raise TestsError(too_long(project)) from None
    is_own = tests.command or arguments
    if done.returncode or (results / RECORD).is_file() or (is_own and not asks_pytest):
        return done.returncode
    if is_own:
        raise UserError(
            f"--require-gpu: the tests' command ({tests.command or 'pytest'}) has run no pytest to its end, and nobody "
            "knows which tests it skipped: the option `tests.require-gpu` says what it takes to fail then"
        )
    why = "a test, or what it calls, has ended the process with exit code 0"
    print(f"torchwheels: pytest has not come to its end: {why}", flush=True)
    return 1


def too_long(project: Project) -> str:
    """What to say of tests that reach their limit of time."""
    return (
        f"the tests took more than {project.tests.minutes:g} minutes: mend what hangs, or raise "
        "`tests.minutes` in [tool.torchwheels]"
    )


def check_paths(project: Project, sources: Path) -> None:
    """Raises an error where the sources have not what the tests need."""
    folder = sources / project.subdirectory
    for path in project.tests.paths:
        there = folder / path
        if not there.exists() or not there.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"the option `tests.paths` names {path}, which the sources do not have")


def _copy(folder: Path, path: Path, into: Path) -> None:
    source, destination = folder / path, into / path
    destination.parent.mkdir(parents=True, exist_ok=True)
    _copy_all(source, destination)
    links = [x for x in destination.rglob("*") if x.is_symlink() and not x.exists()]
    for link in links:
        original = Path(os.path.realpath(source / link.relative_to(destination)))
        # What lies elsewhere in the sources comes along. A link out of them stays one: it may lead to a whole disk.
        if original.exists() and original.is_relative_to(folder):
            link.unlink()
            _copy_all(original, link)


def _copy_all(source: Path, destination: Path) -> None:
    if source.is_dir():
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, destination, symlinks=True, ignore=ignored, dirs_exist_ok=True)
    else:
        shutil.copy(source, destination)


def keep_record(
    results: Path,
    path: Path,
    target: Target,
    dist: Path,
    code: int,
    own_command: bool = False,
    is_asked: bool = False,
) -> None:
    """Puts the record of a run that ended with `code` into `dist`/tests, for the build report of the wheel.

    A run that died has left none, nor may one by a command of the project's own: each counts as one test. A run that
    was stopped, or ran no test, has said nothing of the wheel, nor one that could not do what the user has asked for.
    """
    file = results / RECORD
    found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    if not any(found.get(count) for count in ("passed", "failed", "skipped")):
        silent = (0, 2, 4, 5) if is_asked else (0, 2, 5)  # 4: of options, or of a conftest.py
        if code in (130, 143) or (code in silent and not own_command):
            return
        found = {"device": "unknown", "passed": int(code == 0), "failed": 0, "skipped": 0}
    if code and not found["failed"]:  # it died after the last of them, say
        found["failed"] = 1
    record: dict[str, Any] = {"target": target.name, "sha256": sha256(path), **found}
    device, digest = re.sub(r"[^a-z0-9]+", "-", record["device"].lower()), record["sha256"][:12]
    folder = files.marked(dist) / "tests" / target.name
    file = folder / f"{digest}-{device}.json"
    files.write_text(file, files.as_json(record))
    # Of a run before, on whichever device; where this one passed without saying its own, it is of all.
    replaced = "unknown" if device != "unknown" or record["failed"] else "*"
    for other in {*folder.glob(f"{digest}-{replaced}.json")} - {file}:
        other.unlink()
