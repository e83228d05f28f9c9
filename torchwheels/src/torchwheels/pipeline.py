"""The way of targets from sources to wheels in `dist`.

What `dist` has is taken; each other target is built, on this machine (build.py) or by an engine (containers.py), which
hand a finished wheel through the audit to `dist` (kept.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchwheels import build, containers, kept, output, project, schedule, sources, toolchain
from torchwheels.engines import Engine
from torchwheels.errors import UserError
from torchwheels.project import Project
from torchwheels.releases import Target
from torchwheels.schedule import Outcome
from torchwheels.sources import Fetched


@dataclass(frozen=True)
class Order:
    """What is built, and how."""

    options: Project
    source: Fetched
    dist: Path
    engines: Sequence[Engine] = ()
    """Where; on this machine without one."""
    fresh: bool = False
    """Whether nothing of the compiler cache is taken."""
    keep: bool = True
    """Whether `dist` says what it has, and nothing of that is built again."""
    steps: Sequence[str] = build.STEPS
    digests: dict[str, str] = field(default_factory=dict)
    """By the names of targets, of what each is built: as it was before the first build."""

    def options_of(self, target: Target) -> Project:
        """The options of the project for a target."""
        return self.options.of_target(target, project.preset(self.source.name))

    def inputs(self, target: Target) -> str:
        """A hash of what the wheel of a target follows from."""
        if target.name not in self.digests:
            image = containers.base_image(target) if self.engines else ""
            place = image or toolchain.compilers_of(target)
            given = self.options_of(target), target, self.source, place
            self.digests[target.name] = kept.inputs(*given)
        return self.digests[target.name]

    def there(self, target: Target) -> Path | None:
        """The wheel of a target that `dist` has."""
        return kept.find(self.dist, self.inputs(target)) if self.keep else None

    def build(self, target: Target, engine: Engine | None) -> Path | None:
        """Builds the wheel of a target; returns its path in `dist`, or None after another step than the last."""
        given = self.options_of(target), target, self.source, self.dist
        grouped = engine is None or engine.alone  # else the lines of several are mixed
        with output.group(f"build {target.name}") if grouped else contextlib.nullcontext():
            if engine is None:
                path = build.build_wheel(*given, self.steps, self.fresh)
            else:
                path = containers.build_wheel(engine, *given, self.fresh)
        if self.keep and path:
            kept.note(self.dist, self.inputs(target), path)
        return path


def run(order: Order, targets: Sequence[Target]) -> list[Path]:
    """The wheels of `targets`, all of them in `dist` then; an error says which of them failed."""
    there = {x.name: Outcome(x, wheel=path) for x in targets if (path := order.there(x))}
    wanted = [target for target in targets if target.name not in there]
    if len(targets) > 1:
        print(
            f"torchwheels: {len(targets)} targets, {len(there)} of which {order.dist} has",
            flush=True,
        )
    if order.keep:
        _announce(order, wanted)
    if not order.engines and "requirements" in order.steps:
        for command in dict.fromkeys(order.options_of(x).before_all for x in wanted):
            if command:
                build.before_all(command, order.source.folder)
    try:
        found = there | schedule.spread(wanted, _builders(order, wanted))
    except KeyboardInterrupt:
        if ready := ", ".join(x.name for x in targets if order.there(x)):
            print(
                f"torchwheels: {order.dist} has the wheels of {ready}: the same command goes on with the others",
                file=sys.stderr,
            )
        raise
    outcomes = [found[target.name] for target in targets]
    if len(targets) > 1 or there:
        for outcome in outcomes:
            print(f"torchwheels: {outcome}", flush=True)
    _check(outcomes)
    return [outcome.wheel for outcome in outcomes if outcome.wheel]


def _builders(order: Order, targets: Sequence[Target]) -> list[schedule.Build]:
    """What builds one of `targets` at a time: this machine, or each engine as often as it can."""
    share = -(-len(targets) // max(1, len(order.engines)))
    options = {target: order.options_of(target) for target in targets[:share]}
    shared = [each for engine in order.engines for each in containers.shared(engine, options)]
    alone = len(shared) == 1 or len(targets) == 1
    places: list[Engine | None] = [dataclasses.replace(each, alone=alone) for each in shared]
    return [functools.partial(order.build, engine=each) for each in places or [None]]


def _check(outcomes: Sequence[Outcome]) -> None:
    """Raises an error where a target has failed: of that kind, where all that failed are of one."""
    errors = {each.target.name: each.error for each in outcomes if each.error}
    if errors and len(outcomes) == 1:
        raise next(iter(errors.values()))
    if errors:
        kinds = {type(error) for error in errors.values()}
        kind = kinds.pop() if len(kinds) == 1 else UserError
        raise kind(f"{len(errors)} of {len(outcomes)} targets failed: {', '.join(errors)}")


def _announce(order: Order, targets: Iterable[Target]) -> None:
    """Says which options are not the user's own, and which submodules are empty."""
    name = order.source.name
    said: dict[str, None] = {}
    for target in targets:
        own, preset = order.options.of_target(target).table, project.preset(name)
        for key, value in Project().of_target(target, preset).table.items():
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
    if targets and (empty := sources.empty_submodules(order.source.folder)):
        print(
            f"torchwheels: its submodules are empty ({', '.join(empty)}): where its build misses them, "
            "`git submodule update --init --recursive` fills them, and `git+URL@COMMIT` has them",
            flush=True,
        )
