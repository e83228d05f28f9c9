"""nox sessions of a project that has a [tool.torchwheels] table. Its noxfile is two lines:

from torchwheels.sessions import add_sessions
add_sessions()
"""

import fnmatch
import logging
import os
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import nox

from torchwheels.errors import UserError
from torchwheels.options import Project, Target, project
from torchwheels.system import masked

TEST = ("test", "")  # of the project here: what else is no option is for the tests' command


def add_sessions(quick_test: bool = True) -> None:
    """Adds build, test, audit, index, reproduce and matrix, and for the targets build-<target> and test-<target>.

    The latter are those that nox was asked for, also by a pattern: `nox -s 'build-3.11-*'`. The list of
    sessions has one of them each.

    After `--` they take the options of the command `torchwheels`, and those of a test what its command takes.
    Without `quick_test` the project has a session `test` of its own.
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

    def add(name: str, what: str, *commands: Sequence[str]) -> None:
        def run(session: nox.Session) -> None:
            for command in commands:
                run_tool(session, *command, *session.posargs)

        run.__doc__ = what
        nox.session(name=name, python=False)(run)

    quick = f"--target={small[0].name}"
    if quick_test:
        what = f"The quick default: builds {small[0].name}, and tests it."
        add("test", what, ["build", quick], [*TEST, quick])
    add("build", "Builds all wheels, or with `-- --target 3.11-cpu` some.", ["build", "--all"])
    if not asked:
        behind = f"such as {small[0].name}, or '3.11-*' for some; `torchwheels targets` lists them."
        add("build-TARGET", f"Builds the wheel of a target, {behind}", ["build"])
        add("test-TARGET", "Tests the wheel of a target, or the wheels of some.", [*TEST])
    for name, (verb, targets) in asked.items():
        which = [f"--target={target.name}" for target in targets]
        what = f"{verb.title()}s {', '.join(target.name for target in targets)}."
        # A test is of one target.
        add(name, what, *([["build", *which]] if verb == "build" else ([*TEST, x] for x in which)))
    add("reproduce", "Builds twice, and compares: `-- --target 3.11-cpu`.", ["reproduce"])
    for name, what in {
        "audit": "Checks the wheels in dist/, and writes a build report beside each.",
        "merge": "Puts the wheels of several builds into dist/: `-- FOLDER...`.",
        "index": "Makes a package index and its page, site/, of the wheels in dist/.",
        "matrix": "Says which jobs CI starts: `-- small`, or `full`.",
    }.items():
        add(name, what, [name])


def _mask(record: logging.LogRecord) -> bool:
    record.msg, record.args = masked(record.getMessage()), ()
    return True


def _targets(options: Project, pattern: str) -> Sequence[Target]:
    """The project's targets of that pattern; any target by its name."""
    own = [x for x in options.chosen_targets() if fnmatch.fnmatchcase(x.name, pattern)]
    return own or [options.releases.target(pattern)]  # which names the nearest; nox does not


def run_tool(session: nox.Session, *arguments: str) -> None:
    """Runs the command `torchwheels`, which cleans up at the end: that takes longer than nox waits."""
    command = [sys.executable, "-m", "torchwheels", *arguments]
    variables = {**os.environ, "TORCHWHEELS_PARENT": str(os.getpid())}
    session.run(*command, env=variables, external=True, interrupt_timeout=3, terminate_timeout=30)
