"""nox sessions of a project that has a [tool.torchwheels] table. Its noxfile is two lines:

from torchwheels.sessions import add_sessions
add_sessions()
"""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import nox

from torchwheels.errors import UserError
from torchwheels.options import Project, Target, project, releases
from torchwheels.system import masked

_OPTIONS = ("--source", "--backend", "--dist", "--config", "--require-gpu")
# How alike a misspelt option must be, of 1: pytest has none over 0.63, pip none over 0.7.
_ALIKE = 0.8


def add_sessions(tool: str = "", quick_test: bool = True) -> None:
    """Adds build, test, audit, index, reproduce and matrix, and for the targets build-<target> and test-<target>.

    The latter are those that nox was asked for, also by a pattern: `nox -s 'build-3.11-*'`. The list of
    sessions has one of them each.

    After `--` they take the options of the command `torchwheels`, `--source` for another source, and
    those of a test what its command takes. `tool` is what pip installs to have torchwheels, where it
    is not beside nox. Without `quick_test` the project has a session `test` of its own.
    """
    try:
        options = project.load(Path("pyproject.toml").resolve())
        small = options.small_targets()
        asked = {}
        words = [*takewhile(lambda word: word != "--", sys.argv[1:])]
        words += os.environ.get("NOXSESSION", "").split(",")
        for name in (word.rpartition("=")[2] for word in words):
            verb, dash, pattern = name.partition("-")
            if verb in ("build", "test") and dash:
                asked[name] = verb, _targets(options, pattern)
    except UserError as error:
        sys.exit(f"torchwheels: {error}")
    nox.options.sessions = ["test"]
    logging.getLogger("nox").addFilter(_mask)  # which says commands

    def add(name: str, what: str, *commands: Sequence[str], of_sources: bool = True) -> None:
        def run(session: nox.Session) -> None:
            for command in commands:
                given = [*command, *session.posargs]
                try:
                    run_tool(
                        session, *(_with_source(given, options) if of_sources else given), tool=tool
                    )
                except UserError as error:
                    session.error(str(error))

        run.__doc__ = what
        nox.session(name=name, python=None if tool else False, reuse_venv=True)(run)

    quick = f"--target={small[0].name}"
    if quick_test:
        what = f"The quick default: builds {small[0].name}, and tests it."
        add("test", what, ["build", quick], ["test", quick])
    add("build", "Builds all wheels, or with `-- --target 3.11-cpu` some.", ["build"])
    if not asked:
        behind = f"such as {small[0].name}, or '3.11-*' for some; `torchwheels targets` lists them."
        add("build-TARGET", f"Builds the wheel of a target, {behind}", ["build"])
        add("test-TARGET", "Tests the wheel of a target, or the wheels of some.", ["test"])
    for name, (verb, targets) in asked.items():
        which = [f"--target={target.name}" for target in targets]
        what = f"{verb.title()}s {', '.join(target.name for target in targets)}."
        # A test is of one target.
        add(name, what, *([["build", *which]] if verb == "build" else (["test", x] for x in which)))
    add("reproduce", "Builds twice, and compares: `-- --target 3.11-cpu`.", ["reproduce"])
    for name, what in {
        "audit": "Checks the wheels in dist/, and writes a build report beside each.",
        "index": "Makes a package index and its page, site/, of the wheels in dist/.",
        "matrix": "Says which jobs CI starts: `-- small`, or `full`.",
    }.items():
        add(name, what, [name], of_sources=False)


def _mask(record: logging.LogRecord) -> bool:
    record.msg, record.args = masked(record.getMessage()), ()
    return True


def _targets(options: Project, pattern: str) -> Sequence[Target]:
    """The project's targets of that pattern; any target by its name."""
    own = [x for x in options.chosen_targets() if fnmatch.fnmatchcase(x.name, pattern)]
    return own or [
        options.releases.target(pattern)
    ]  # which names the nearest; nox itself names none


def run_tool(session: nox.Session, *arguments: str, tool: str = "") -> None:
    """Runs the command `torchwheels`, which cleans up at the end: that takes longer than nox waits."""
    if tool:
        install_tool(session, tool)
    python = "python" if tool else sys.executable
    command = [python, "-m", "torchwheels", *arguments]
    variables = {**os.environ, "TORCHWHEELS_PARENT": str(os.getpid())}
    session.run(
        *command, env=variables, external=not tool, interrupt_timeout=3, terminate_timeout=30
    )


def install_tool(session: nox.Session, folder: str) -> None:
    """Installs torchwheels from its sources, and what it requires as the lock file has it."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(releases.locked_own())
        file.flush()
        session.install("--quiet", "--require-hashes", f"--requirement={file.name}")
    session.install("--quiet", "--no-deps", "--no-build-isolation", "--editable", folder)


def _with_source(given: list[str], options: Project) -> list[str]:
    """The command with its source, which is the project's where no other is given.

    The project's own code may run on this machine where no Docker engine answers, nobody else's.
    """
    for argument in given:
        name = argument.partition("=")[0]
        near = difflib.get_close_matches(name, _OPTIONS, n=1, cutoff=_ALIKE)
        if name.startswith("--") and near and name not in (*_OPTIONS, "--target"):
            raise UserError(f"there is no option {name}: did you mean {near[0]}?")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("command")
    parser.add_argument("--target", action="append", default=[])
    parser.add_argument("--require-gpu", action="store_true")
    for option in ("--source", "--backend", "--dist", "--config"):
        parser.add_argument(option)
    known, others = parser.parse_known_args(given)
    if known.command != "test":  # `-- build-3.11-cu130`, or without `build-`
        known.target += [x.removeprefix("build-") for x in others if not x.startswith("-")]
        others = [x for x in others if x.startswith("-")]
    assert options.file is not None
    found = [known.command, known.source or str(options.file.parent / options.source)]
    found += [f"--target={target}" for target in known.target]
    if known.command == "build" and not known.target:
        found.append("--all")
    if not known.source:
        known.config = known.config or options.file
        known.backend = known.backend or os.environ.get("TORCHWHEELS_BACKEND") or "auto"
    for option in ("backend", "dist", "config"):
        value = getattr(known, option)
        found += [f"--{option}={value}"] if value else []
    found += ["--require-gpu"] if known.require_gpu else []
    return [*found, *(["--", *others] if known.command == "test" and others else others)]
