"""The command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torchwheels import build, project, releases, wheel
from torchwheels.errors import UserError
from torchwheels.releases import Cell


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs `torchwheels`: an error is one sentence, and exit code 1."""
    given = _parser().parse_args(arguments)
    try:
        given.run(given)
    except UserError as error:
        sys.exit(f"torchwheels: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchwheels", description="Wheels of PyTorch extensions, from untouched sources."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    build = commands.add_parser("build", help="build, audit and import a wheel")
    build.add_argument(
        "source", help="NAME==VERSION from PyPI, a folder, an archive, or git+URL@COMMIT"
    )
    which = build.add_mutually_exclusive_group()
    which.add_argument(
        "--cell",
        action="append",
        default=[],
        help="a Python and a CUDA, such as 3.11-cpu or 3.11-cu130 (repeatable; default: as the torch at hand)",
    )
    which.add_argument("--all", action="store_true", help="all cells of the project")
    build.add_argument(
        "--backend", choices=["local"], help="where the source's own code runs: on this machine"
    )
    build.add_argument("--config", type=Path, help="a TOML file with the options of the project")
    build.add_argument("--dist", type=Path, default=Path("dist"), help="where wheels go")
    build.set_defaults(run=_build)
    audit = commands.add_parser("audit", help="judge finished wheels")
    audit.add_argument("wheel", type=Path, nargs="+", help="a wheel that torchwheels has built")
    audit.add_argument("--config", type=Path, help="a TOML file with the options of the project")
    audit.set_defaults(run=_audit)
    cells = commands.add_parser("cells", help="list the cells there can be")
    cells.set_defaults(run=_cells)
    return parser


def _build(given: argparse.Namespace) -> None:
    options = _project(given.source, given.config)
    failed = 0
    cells = _chosen_cells(given, options)
    if given.backend != "local":
        raise UserError(
            f"building {given.source} runs its own code with your rights: give `--backend local` if you "
            "trust it; building in a container is not there yet"
        )
    for cell in cells:
        try:
            build.build_wheel(options, cell, given.source, given.dist)
        except UserError as error:
            if len(cells) == 1:
                raise
            print(f"torchwheels: {error}", file=sys.stderr, flush=True)
            failed += 1
    if failed:
        raise UserError(f"{failed} of {len(cells)} cells failed, as said above")


def _project(source: str, config: Path | None) -> project.Project:
    """The options of `--config`, else those of the folder that is the source."""
    if config:
        return project.load(config)
    own = Path(source) / "pyproject.toml"
    return project.load(own) if own.is_file() else project.Project()


def _chosen_cells(given: argparse.Namespace, options: project.Project) -> tuple[Cell, ...]:
    table = releases.load()
    if given.cell:
        return tuple(table.cell(name) for name in given.cell)
    if given.all:
        return table.matching(options.cells) if options.cells else table.cells
    return (table.current_cell(releases.python_at_hand()),)


def _audit(given: argparse.Namespace) -> None:
    options = project.load(given.config) if given.config else project.Project()
    for path in given.wheel:
        record = wheel.read(path).record
        if record is None:
            raise UserError(
                f"{path.name} has no build record that says which cell it is for: build it with "
                "`torchwheels build`"
            )
        cell = releases.load().cell(record["cell"])
        build.check_wheel(path, options, cell, tuple(record["architectures"]))
        print(f"torchwheels: {path.name} passes the audit of {cell.name}", flush=True)


def _cells(given: argparse.Namespace) -> None:
    table = releases.load()
    for cell in table.cells:
        print(f"{cell.name:24} torch {cell.torch:8} {cell.image}")


if __name__ == "__main__":
    main()
