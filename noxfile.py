"""The sessions of the project: `nox --list` shows them. Each is thin: what it does is in service/.

`build-…` and `test-…` exist for every cell of matrix.toml, and `test` is the quick default.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from itertools import takewhile
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from service import ServiceError, toolchain, wheels  # noqa: E402
from service.matrix import Cell, load  # noqa: E402

nox.needs_version = ">=2024.4.15"
# pip, not uv: pip's own configuration may name a smaller build of torch, and uv does not read it.
nox.options.default_venv_backend = "virtualenv"
# A cell whose Python is missing has failed, not passed.
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["test"]

MATRIX = load()


def refuse_unknown_cells(arguments: list[str]) -> None:
    """Names the nearest cells where one is asked for that does not exist; nox itself names none."""
    for argument in takewhile(lambda argument: argument != "--", arguments):
        session, dash, cell = argument.partition("-")
        if session in ("build", "test") and dash:
            try:
                MATRIX.cell(cell)
            except ServiceError as error:
                sys.exit(f"{argument}: {error}")


def install_build_tools(session: nox.Session, cell: Cell) -> None:
    """Installs what compiling the cell's wheel takes; of torch only the headers are used."""
    try:
        compiler = toolchain.missing_requirements(cell.variant)
    except ServiceError as error:
        session.error(str(error))
    session.install(*MATRIX.tools["build"], *compiler)
    session.install("--no-deps", f"torch=={MATRIX.headers_torch}")


def install_torch(session: nox.Session, version: str) -> None:
    """Installs torch, from the index EXTOPS_TORCH_INDEX where set (PyTorch's own, say)."""
    index = os.environ.get("EXTOPS_TORCH_INDEX")
    session.install(*([f"--index-url={index}"] if index else []), f"torch=={version}")


def test_wheel(session: nox.Session) -> None:
    """Runs the tests of the wheel that is installed, away from the source tree."""
    with tempfile.TemporaryDirectory(prefix="extops-tests-") as folder:
        shutil.copytree(
            ROOT / "tests", Path(folder) / "tests", ignore=shutil.ignore_patterns("service")
        )
        shutil.copy(ROOT / "pyproject.toml", folder)
        with session.chdir(folder):
            session.run("python", "-m", "pytest", "-p", "no:cacheprovider", *session.posargs)


def build_cell(session: nox.Session, cell: Cell) -> None:
    """Builds the cell's wheel into dist/."""
    install_build_tools(session, cell)
    session.run("python", "-m", "service.wheels", cell.variant.name)


def test_cell(session: nox.Session, cell: Cell) -> None:
    """Installs the cell's wheel from dist/ with the cell's torch, and runs its tests."""
    try:
        wheel = wheels.wheel_for(cell)
    except ServiceError as error:
        session.error(str(error))
    install_torch(session, cell.torch)
    session.install(str(wheel), *MATRIX.tools["test"])
    test_wheel(session)


def add_sessions(cell: Cell) -> None:
    """Makes the two sessions of a cell, under exactly the names that matrix.toml implies."""

    # Its environment is kept from one build to the next: the tools in it are pinned.
    @nox.session(name=f"build-{cell.name}", python=cell.python, reuse_venv=True)
    def build(session: nox.Session) -> None:
        build_cell(session, cell)

    @nox.session(name=f"test-{cell.name}", python=cell.python)
    def test(session: nox.Session) -> None:
        test_cell(session, cell)


refuse_unknown_cells(sys.argv[1:])
for each in MATRIX.cells:
    add_sessions(each)


@nox.session(reuse_venv=True)
def test(session: nox.Session) -> None:
    """The quick default: builds the CPU wheel and runs all tests, those of the service too."""
    cell = MATRIX.cell(f"{sys.version_info.major}.{sys.version_info.minor}-cpu")
    install_torch(session, cell.torch)
    session.install(*MATRIX.tools["build"], *MATRIX.tools["test"], "nox")
    with tempfile.TemporaryDirectory(prefix="extops-dist-") as dist:
        session.run("python", "-m", "service.wheels", cell.variant.name, f"--dist={dist}")
        wheel = wheels.wheel_for(cell, Path(dist))
        session.install("--force-reinstall", "--no-deps", str(wheel))
    test_wheel(session)
    if not session.posargs:  # which choose among the wheel's tests
        session.run("python", "-m", "pytest", "-p", "no:cacheprovider", "tests/service")


@nox.session(reuse_venv=True)
def lint(session: nox.Session) -> None:
    """Checks style and types of the sources, without changing them."""
    session.install(*MATRIX.tools["lint"], *MATRIX.tools["build"], *MATRIX.tools["test"], "nox")
    session.install("--no-deps", f"torch=={MATRIX.headers_torch}")  # for its types
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy", "package", "service", "noxfile.py", "setup.py")
    sources = [
        path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cuh", ".cpp", ".cu")
    ]
    session.run("clang-format", "--dry-run", "-Werror", *map(str, sources))
    session.run("shellcheck", ".ci/run")
