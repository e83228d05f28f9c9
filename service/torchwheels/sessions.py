"""nox sessions of a project that has a [tool.torchwheels] table. Its noxfile is two lines:

from torchwheels.sessions import add_sessions
add_sessions()
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import nox

from torchwheels import containers, project
from torchwheels.errors import UserError
from torchwheels.project import Project


def add_sessions(file: Path = Path("pyproject.toml")) -> None:
    """Adds build-<cell>, test-<cell>, build, test, audit, index, reproduce and matrix.

    After `--` they take the options of the command `torchwheels`, and `--source` another source.
    """
    try:
        options = project.load(file.resolve())
        cells, small = options.chosen_cells(), options.small_cells()
    except UserError as error:
        sys.exit(f"torchwheels: {error}")
    nox.options.sessions = ["test"]
    for cell in cells:
        which = f"--cell={cell.name}"
        _add(f"build-{cell.name}", f"Builds the wheel of {cell.name}.", [["build", which]], options)
        _add(f"test-{cell.name}", f"Tests the wheel of {cell.name}.", [["test", which]], options)
    quick = f"--cell={small[0].name}"
    what = f"The quick default: builds the wheel of {small[0].name}, and tests it."
    _add("test", what, [["build", quick], ["test", quick]], options)
    _add("build", "Builds all wheels: `-- --cell 3.11-cpu` some.", [["build"]], options)
    what = "Builds twice, and compares the bytes: `-- --cell 3.11-cpu`."
    _add("reproduce", what, [["reproduce"]], options)
    for name, what in {
        "audit": "Judges the wheels in dist/, and writes a passport beside each.",
        "index": "Makes a package index and its page, site/, of the wheels in dist/.",
        "matrix": "Says which jobs CI starts: `-- small`, or `full`.",
    }.items():
        _add(name, what, [[name]], None)


def _add(name: str, what: str, commands: Sequence[list[str]], options: Project | None) -> None:
    """Adds a session that runs `commands` of the tool; `options` where they are about sources."""

    def run(session: nox.Session) -> None:
        for command in commands:
            given = [*command, *session.posargs]
            if options:
                given = _with_source(given, options)
            if name == "build" and not any(x.startswith("--cell") for x in given):
                given.append("--all")
            tool = [sys.executable, "-m", "torchwheels"]
            session.run(*tool, *given, external=True, interrupt_timeout=3, terminate_timeout=30)

    run.__doc__ = what
    nox.session(name=name, python=False)(run)


def _with_source(given: list[str], options: Project) -> list[str]:
    """The command with its source, which is the project's where no other is given.

    The project's own code may run on this machine where no Docker engine answers, nobody else's.
    """
    command, *arguments = given
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--source")
    parser.add_argument("--backend")
    known, others = parser.parse_known_args(arguments[:end])
    assert options.file is not None
    found = [command, known.source or str(options.file.parent / options.source)]
    if known.backend:
        found.append(f"--backend={known.backend}")
    elif not known.source:
        try:
            containers.find_engine()
        except UserError as error:
            print(f"torchwheels: building here: no Docker engine answers ({error})", flush=True)
            found.append("--backend=local")
    if not known.source:
        found.append(f"--config={options.file}")
    return [*found, *others, *arguments[end:]]
