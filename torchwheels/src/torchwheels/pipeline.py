"""Turns sources into wheels of all targets in `dist`.

A wheel that `dist` has already is used; the others are built, on this machine (build.py) or by an engine
(containers.py). A finished wheel is audited and put into `dist` (kept.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchwheels import build, containers, kept, output, project, schedule, sources, toolchain
from torchwheels.engines import Engine
from torchwheels.errors import UserError
from torchwheels.project import Project
from torchwheels.releases import Target
from torchwheels.schedule import Outcome
from torchwheels.sources import Fetched


@dataclass(frozen=True)
class Task:
    """A target that is wanted."""

    target: Target
    options: Project
    """Those of this target."""
    digest: str
    """Of what it is built of, as that was before the first build."""
    wheel: Path | None
    """The one that `dist` has."""


@dataclass(frozen=True)
class Order:
    """What is built, and how."""

    options: Project
    targets: Sequence[Target]
    source: Fetched
    dist: Path
    engines: Sequence[Engine] = ()
    """Where; on this machine without one."""
    fresh: bool = False
    """Whether the compiler cache is not used."""
    keep: bool = True
    """Whether `dist` says what it has, and nothing of that is built again."""
    steps: Sequence[str] = build.STEPS

    @functools.cached_property
    def tasks(self) -> dict[str, Task]:
        """What each target wants, by its name."""
        return {target.name: self._task(target) for target in self.targets}

    def _task(self, target: Target) -> Task:
        options = self.options.of_target(target, project.preset(self.source.name))
        place = containers.base_image(target) if self.engines else toolchain.compilers_of(target)
        digest = kept.inputs(options, target, self.source, place)
        return Task(target, options, digest, (self.keep and kept.find(self.dist, digest)) or None)

    def build(self, target: Target, engine: Engine | None) -> Path | None:
        """Builds the wheel of a target; returns its path in `dist`, or None after another step than the last."""
        task = self.tasks[target.name]
        given = task.options, target, self.source, self.dist
        grouped = engine is None or engine.alone  # else the lines of several are mixed
        with output.group(f"build {target.name}") if grouped else contextlib.nullcontext():
            if engine is None:
                path = build.build_wheel(*given, self.steps, self.fresh)
            else:
                path = containers.build_wheel(engine, *given, self.fresh)
        if self.keep and path:
            kept.note(self.dist, task.digest, path)
        return path


def run(order: Order) -> list[Path]:
    """The wheels of all targets, now in `dist`; an error names those that failed."""
    tasks = order.tasks.values()
    there = {x.target.name: Outcome(x.target, wheel=x.wheel) for x in tasks if x.wheel}
    wanted = [task for task in tasks if not task.wheel]
    for task in wanted:
        kept.forget_refused(order.dist, task.target, order.source.name)
    if len(tasks) > 1:
        print(
            f"torchwheels: {len(tasks)} targets, {len(there)} of which {order.dist} has", flush=True
        )
    if order.keep:
        _announce(order, wanted)
    if not order.engines and "requirements" in order.steps:
        for command in dict.fromkeys(task.options.before_all for task in wanted):
            if command:
                build.before_all(command, order.source.folder)
    try:
        built = schedule.spread([task.target for task in wanted], _builders(order, wanted))
    except KeyboardInterrupt:
        ready = [x.target.name for x in tasks if order.keep and kept.find(order.dist, x.digest)]
        if ready:
            print(
                f"torchwheels: {order.dist} has the wheels of {', '.join(ready)}: the same command goes on with the "
                "others",
                file=sys.stderr,
            )
        raise
    outcomes = [(there | built)[name] for name in order.tasks]
    if len(tasks) > 1 or there:
        for outcome in outcomes:
            print(f"torchwheels: {outcome}", flush=True)
    _check(outcomes)
    return [outcome.wheel for outcome in outcomes if outcome.wheel]


def _builders(order: Order, wanted: Sequence[Task]) -> list[schedule.Build]:
    """What builds one of the targets at a time: this machine, or each engine as often as it can."""
    share = -(-len(wanted) // max(1, len(order.engines)))
    options = {task.target: task.options for task in wanted[:share]}
    shared = [each for engine in order.engines for each in containers.shared(engine, options)]
    alone = len(shared) == 1 or len(wanted) == 1
    places: list[Engine | None] = [dataclasses.replace(each, alone=alone) for each in shared]
    return [functools.partial(order.build, engine=each) for each in places or [None]]


def _check(outcomes: Sequence[Outcome]) -> None:
    """Raises an error where a target has failed: of that kind, where all that failed are of one."""
    errors = {each.target.name: each.error for each in outcomes if each.error}
    if errors and len(outcomes) == 1:
        raise next(iter(errors.values()))
    if errors:
        kinds = {type(x) if isinstance(x, UserError) else UserError for x in errors.values()}
        kind = kinds.pop() if len(kinds) == 1 else UserError
        raise kind(f"{len(errors)} of {len(outcomes)} targets failed: {', '.join(errors)}")


def _announce(order: Order, wanted: Sequence[Task]) -> None:
    """Says which options are not the user's own, and which submodules are empty."""
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
        print(
            f"torchwheels: {name} is built with {each} (a preset; [tool.torchwheels] overrides it)",
            flush=True,
        )
    if wanted and (empty := sources.empty_submodules(order.source.folder)):
        print(
            f"torchwheels: its submodules are empty ({', '.join(empty)}): where its build misses them, "
            "`git submodule update --init --recursive` fills them, and `git+URL@COMMIT` has them",
            flush=True,
        )
