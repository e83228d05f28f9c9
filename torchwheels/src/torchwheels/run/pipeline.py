"""Turns sources into wheels of all targets in `dist`.

A wheel that `dist` has already is used; the others are built one after the other, on this machine (build/steps.py) or
in containers (containers.py), which do the same steps there. A finished wheel is audited and put into `dist`
(index/kept.py).
"""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchwheels import build
from torchwheels.build import toolchain
from torchwheels.errors import TestsError, UserError
from torchwheels.index import kept
from torchwheels.options import Project, Target, project
from torchwheels.run import containers, testing
from torchwheels.run.engines import Engine
from torchwheels.sources import Fetched
from torchwheels.system import processes, scratch


@dataclass
class Task:
    """A target that is wanted, and what has become of it."""

    target: Target
    options: Project
    """Those of this target."""
    digest: str
    """Of what it is built of, as that was before the first build."""
    wheel: Path | None
    """The one that `dist` has, or has got."""
    seconds: float = 0.0
    """How long its build took."""
    error: Exception | None = None

    def __str__(self) -> str:
        took = f"{self.seconds:.0f} s"
        if self.error:
            return f"{self.target.name}: FAILED after {took}: {processes.explained(self.error)}"
        assert self.wheel
        kept = "kept (delete it to have it built again)"
        return f"{self.target.name}: {self.wheel.name}, {took if self.seconds else kept}"


@dataclass(frozen=True)
class Order:
    """What is built, and how."""

    options: Project
    targets: Sequence[Target]
    source: Fetched
    dist: Path
    engine: Engine | None = None
    """Where; on this machine without one."""
    fresh: bool = False
    """Whether the compiler cache is not used."""
    keep: bool = True
    """Whether `dist` says what it has, and nothing of that is built again."""

    def tasks(self) -> Iterator[Task]:
        """What each target wants."""
        for target in dict.fromkeys(self.targets):
            options = self.options.of_target(target, project.preset(self.source.name))
            place = containers.base_image(target) if self.engine else toolchain.compilers_of(target)
            digest = kept.inputs(options, target, self.source, place)
            yield Task(target, options, digest, kept.find(self.dist, digest) if self.keep else None)

    def build(self, task: Task) -> None:
        """Builds the wheel of a target."""
        given = task.options, task.target, self.source, self.dist
        start, own = time.monotonic(), task.options
        try:
            if not (own.before_all or own.before_build or own.patches):  # which may make it
                build.project_folder(own, task.target, self.source.folder)
            if self.engine:
                task.wheel = containers.build_wheel(self.engine, *given, self.fresh)
            else:
                task.wheel = build.build_wheel(*given, build.STEPS, self.fresh)
            if self.keep and task.wheel:
                kept.note(self.dist, task.digest, task.wheel)
        except (UserError, OSError, subprocess.CalledProcessError) as error:
            task.error = error
        task.seconds = time.monotonic() - start


def run(order: Order) -> list[Path]:
    """The wheels of all targets, now in `dist`; an error names those that failed."""
    tasks = [*order.tasks()]
    wanted = [task for task in tasks if not task.wheel]
    for task in wanted:
        kept.forget_refused(order.dist, task.target, order.source.name)
    if len(tasks) > 1:
        there = f"{len(tasks) - len(wanted)} of which {order.dist} has"
        print(f"torchwheels: {len(tasks)} targets, {there}", flush=True)
    if order.keep:
        _announce(order, wanted)
    if not order.engine:
        for command in dict.fromkeys(task.options.before_all for task in wanted):
            if command:
                build.before_all(command, order.source.folder)
    for task in wanted:
        order.build(task)
    for task in tasks if len(tasks) > 1 or not wanted else ():
        print(f"torchwheels: {task}", flush=True)
    _check(tasks)
    return [task.wheel for task in tasks if task.wheel]


def built_of(order: Order) -> Path | None:
    """The wheel of these very sources in `dist`, where this machine tells."""
    try:
        return next(order.tasks()).wheel
    except UserError:  # it has no compiler for the target, and tests want none
        return None


def test(
    options: Project, target: Target, wheel: Path, source: Path, dist: Path, engine: Engine | None,
    arguments: Sequence[str] = (), require_gpu: bool = False,
) -> None:  # fmt: skip
    """Runs the project's tests on a wheel, and keeps their record in `dist`; an error says that they fail."""
    testing.check_paths(options, source)
    with scratch() as folder:
        # A build may put another file in its place before the tests end.
        wheel = Path(shutil.copyfile(wheel, folder / wheel.name))
        asked, kept = (arguments, require_gpu, folder), (folder, wheel, target, dist)
        try:
            if engine:
                code = containers.run_tests(engine, options, target, wheel, source, *asked)
            else:
                testing.install(options, target, wheel, folder)
                print(f"torchwheels: testing {wheel.name} in {target.name}", flush=True)
                code = testing.run_here(options, target, folder, source, *asked)
        except TestsError:  # they took too long
            testing.keep_record(*kept, 1)
            raise
        is_asked = bool(arguments or require_gpu)
        testing.keep_record(*kept, code, bool(options.tests.command), is_asked)
    if code:
        raise TestsError(f"the tests of {wheel.name} fail in {target.name} (exit code {code})")


def _check(tasks: Sequence[Task]) -> None:
    """Raises an error where a target has failed: of that kind, where all that failed are of one."""
    errors = {each.target.name: each.error for each in tasks if each.error}
    if errors and len(tasks) == 1:
        raise next(iter(errors.values()))
    if errors:
        found = errors.values()
        kind, *others = {type(x) if isinstance(x, UserError) else UserError for x in found}
        said = f"{len(errors)} of {len(tasks)} targets failed: {', '.join(errors)}"
        raise UserError(said) if others else kind(said)


def _announce(order: Order, wanted: Sequence[Task]) -> None:
    """Says which options are not the user's own."""
    name = order.source.name
    said: dict[str, None] = {}
    for task in wanted:
        own = order.options.of_target(task.target).table
        for key, value in Project().of_target(task.target, project.preset(name)).table.items():
            of_own = own.get(key, {})
            if isinstance(value, dict):
                said |= {f"{x}={y}": None for x, y in value.items() if x not in of_own}
            elif key not in own:
                said[f"{key} = {json.dumps(value)}"] = None
    for each in said:
        why = "(a preset; [tool.torchwheels] overrides it)"
        print(f"torchwheels: {name} is built with {each} {why}", flush=True)
