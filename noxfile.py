"""The sessions of the project: `nox --list` shows them. Each is thin: what it does is in service/.

`build-…` and `test-…` exist for every cell of matrix.toml, and `test` is the quick default. Where a
Docker engine answers, those of a cell run in the cell's image: the same sessions, which install and
run there what they would here. `-- --backend local` keeps them here.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from types import FrameType

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from service import (  # noqa: E402
    ServiceError,
    errors_for_the_user,
    mutants,
    place,
    processes,
    toolchain,
    wheels,
)
from service.matrix import Cell, load  # noqa: E402

nox.needs_version = ">=2024.4.15"
# pip, not uv: pip's own configuration may name a smaller build of torch, and uv does not read it.
nox.options.default_venv_backend = "virtualenv"
# A cell whose Python is missing has failed, not passed.
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["test"]

MATRIX = load()


def interrupt(number: int, frame: FrameType | None) -> None:
    """Treats a polite request to end like Ctrl-C: nox then ends what it started."""
    raise KeyboardInterrupt


signal.signal(signal.SIGTERM, interrupt)
processes.end_with_parent()


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """nox's own arguments, and those after `--`."""
    before = list(takewhile(lambda argument: argument != "--", arguments))
    return before, arguments[len(before) + 1 :]


def choose_place() -> place.Place:
    """Where the sessions of the cells run: their Python depends on it, so it is settled here.

    Only where one of them may run: an engine that hangs would hold up the other sessions, too.
    """
    arguments, posargs = split_arguments(sys.argv[1:])
    listed = {"-l", "--list", "--list-sessions"} & {*arguments}
    chosen = " ".join([*arguments, os.environ.get("NOXSESSION", "")])
    with errors_for_the_user():
        options, others = place.options(posargs)
        if others and re.search(r"\bbuild-\d", chosen) and not re.search(r"\btest\b", chosen):
            raise ServiceError(
                "a build takes the options --backend, --builder and --source, but was given "
                f"`{shlex.join(others)}`"
            )
        # By its name, or by a pattern: `-k` or `-p`.
        if listed or not re.search(r"\b(build|test)-\d|(^| )--?[kp]", chosen):
            return place.Place(docker=False, reason="no session of a cell was chosen")
        return place.choose(options.backend)


def refuse_unknown_cells(arguments: list[str]) -> None:
    """Names the nearest cells where one is asked for that does not exist; nox itself names none."""
    for argument in split_arguments(arguments)[0]:
        session, dash, cell = argument.partition("-")
        if session in ("build", "test") and dash:
            try:
                MATRIX.cell(cell)
            except ServiceError as error:
                sys.exit(f"{argument}: {error}")


def install_build_tools(session: nox.Session, cell: Cell) -> None:
    """Installs what compiling the cell's wheel takes; of torch only the headers are used."""
    compiler = toolchain.missing_requirements(cell.variant)
    session.install(*MATRIX.tools["build"], *compiler)
    session.install("--no-deps", f"torch=={MATRIX.headers_torch}")


def install_torch(session: nox.Session, version: str | None = None) -> None:
    """Installs torch, from the index EXTOPS_TORCH_INDEX where set; no version: the newest."""
    index = os.environ.get("EXTOPS_TORCH_INDEX")
    requirement = f"torch=={version}" if version else "torch"
    session.install(*([f"--index-url={index}"] if index else []), requirement)


def run_patiently(session: nox.Session, *command: str) -> None:
    """Runs a command that cleans up when it is to end, which takes longer than nox waits."""
    session.run(*command, interrupt_timeout=3, terminate_timeout=30)


def run_in_docker(session: nox.Session, verb: str, cell: Cell) -> None:
    """Runs the session of the cell in the cell's image."""
    options, others = place.options(session.posargs)
    builder = [f"--builder={options.builder}"] if options.builder else []
    command = ["python", "-m", "service.cells", *builder, verb, cell.name]
    session.install("--quiet", *MATRIX.tools["docker"])
    run_patiently(session, *command, *(others if verb == "test" else []))


def test_wheel(session: nox.Session, *arguments: str, success_codes: Iterable[int] = (0,)) -> None:
    """Runs the tests of the wheel that is installed, away from the source tree.

    `arguments` are pytest's, and so are the exit codes that let the session go on.
    """
    with tempfile.TemporaryDirectory(prefix="extops-tests-") as folder:
        shutil.copytree(
            ROOT / "tests",
            Path(folder) / "tests",
            ignore=shutil.ignore_patterns("service", "torchwheels"),
        )
        shutil.copytree(ROOT / "examples", Path(folder) / "examples")
        shutil.copy(ROOT / "pyproject.toml", folder)
        with session.chdir(folder):
            command = ["python", "-m", "pytest", "-p", "no:cacheprovider", *arguments]
            session.run(*command, success_codes=success_codes)


def build_cell(session: nox.Session, cell: Cell) -> None:
    """Builds the cell's wheel into dist/."""
    install_build_tools(session, cell)
    session.run("python", "-m", "service.wheels", cell.variant.name)


def test_cell(session: nox.Session, cell: Cell) -> None:
    """Installs the cell's wheel from dist/ with the cell's torch, and runs its tests."""
    # An image is made ready before there is a wheel: see Dockerfile.
    wheel = None if "--install-only" in sys.argv else wheels.wheel_for(cell)
    install_torch(session, cell.torch)
    session.install(*MATRIX.tools["test"])
    if wheel:
        session.install(str(wheel))
        chosen = place.options(session.posargs)[1]
        # A run of all of them leaves a record, for the passport of the wheel.
        record = [f"--record={wheels.DIST / wheels.TESTS / cell.name}"]
        test_wheel(session, *(record if set(chosen) <= {"--require-gpu"} else []), *chosen)


def build_other_source(session: nox.Session, cell: Cell, options: place.Options) -> None:
    """Builds the wheel of another project, which `--source` names."""
    session.install("--editable", "./service")
    command = ["torchwheels", "build", str(options.source), f"--cell={cell.name}"]
    command += [f"--backend={options.backend}"] if options.backend else []
    command += [f"--builder={options.builder}"] if options.builder else []
    run_patiently(session, *command)


def run_cell(session: nox.Session, verb: str, cell: Cell) -> None:
    """Builds or tests the cell, where it was chosen to."""
    options = place.options(session.posargs)[0]
    if verb == "build" and options.source:
        return build_other_source(session, cell, options)
    print(f"extops: {PLACE}", flush=True)
    try:
        if PLACE.docker:
            run_in_docker(session, verb, cell)
        elif verb == "build":
            build_cell(session, cell)
        else:
            test_cell(session, cell)
    except ServiceError as error:
        session.error(str(error))


def add_sessions(cell: Cell) -> None:
    """Makes the two sessions of a cell, under exactly the names that matrix.toml implies."""
    # In Docker only the image needs the cell's Python.
    python = None if PLACE.docker else cell.python

    # Its environment is kept from one build to the next: the tools in it are pinned.
    @nox.session(name=f"build-{cell.name}", python=python, reuse_venv=True)
    def build(session: nox.Session) -> None:
        run_cell(session, "build", cell)

    # That of a test is made anew, except in an image, which comes with it: `nox -r` there.
    @nox.session(name=f"test-{cell.name}", python=python, reuse_venv=PLACE.docker or None)
    def test(session: nox.Session) -> None:
        run_cell(session, "test", cell)


refuse_unknown_cells(sys.argv[1:])
PLACE = choose_place()


@nox.session(python=False)
def build(session: nox.Session) -> None:
    """Builds several cells at once: `nox -s build -- --jobs 2 [CELL...]`, or one for each wheel."""
    run_patiently(session, sys.executable, "-m", "service.several", *session.posargs)


@nox.session(python=False)
def reproduce(session: nox.Session) -> None:
    """Builds a cell twice and compares the bytes: `nox -s reproduce -- build-3.11-cu130`."""
    run_patiently(session, sys.executable, "-m", "service.reproduce", *session.posargs)


@nox.session(python=False)
def survey(session: nox.Session) -> None:
    """Builds and tests cells one by one, into the table of benchmarks/results/matrix.json."""
    run_patiently(session, sys.executable, "-m", "service.survey", *session.posargs)


def install_new_wheel(session: nox.Session, cell: Cell) -> None:
    """Builds the cell's wheel from the sources as they are, away from dist/, and installs it."""
    with tempfile.TemporaryDirectory(prefix="extops-dist-") as dist:
        session.run("python", "-m", "service.wheels", cell.variant.name, f"--dist={dist}")
        wheel = wheels.wheel_for(cell, Path(dist))
        session.install("--force-reinstall", "--no-deps", str(wheel))


@nox.session(reuse_venv=True)
def test(session: nox.Session) -> None:
    """The quick default: builds the CPU wheel and tests it and the service; all with `-- --thorough`."""
    cell = MATRIX.cell(f"{sys.version_info.major}.{sys.version_info.minor}-cpu")
    install_torch(session, cell.torch)
    session.install(*MATRIX.tools["build"], *MATRIX.tools["test"])
    session.install(*MATRIX.tools["docker"], *MATRIX.tools["nox"], *MATRIX.tools["service"])
    session.install(*MATRIX.tools["index"], *MATRIX.tools["uv"])
    install_new_wheel(session, cell)
    chosen = place.options(session.posargs)[1]
    test_wheel(session, *chosen)
    if chosen in ([], ["--thorough"]):  # others choose among the wheel's tests
        session.install("--editable", "./service")
        for own in ("tests/service", "tests/torchwheels"):
            session.run("python", "-m", "pytest", "-p", "no:cacheprovider", own, *chosen)


def asks_for_cuda(arguments: list[str]) -> bool:
    """Whether a session that takes `--device cpu|cuda` shall use the GPU."""
    return "cuda" in arguments or "--device=cuda" in arguments


@nox.session(reuse_venv=True)
def audit(session: nox.Session) -> None:
    """Judges the wheels in dist/, or those named, and writes a passport beside each."""
    session.install(*MATRIX.tools["build"])
    session.run("python", "-m", "service.audit", *session.posargs)


@nox.session(reuse_venv=True)
def bench(session: nox.Session) -> None:
    """Measures the operators beside others: on the CPU, or with `-- --device cuda` on a GPU."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    arguments = place.options(session.posargs)[1]
    cuda = asks_for_cuda(arguments)
    built = [x.name for x in MATRIX.variants.values() if x.cuda and wheels.published(x)]
    if cuda and not built:
        session.error(f"dist/ has no CUDA wheel: build one with `nox -s build-{python}-cu130`")
    cell = MATRIX.cell(f"{python}-{built[-1] if cuda else 'cpu'}")
    install_torch(session, cell.torch)
    session.install(*MATRIX.tools["build"], *MATRIX.tools["test"])
    if cuda:
        session.install("--force-reinstall", "--no-deps", str(wheels.wheel_for(cell)))
    else:
        install_new_wheel(session, cell)
    session.run("python", "-m", "benchmarks", *arguments)


def prove_tests(session: nox.Session, module: str) -> None:
    """Runs a module that compiles kernels in ways of its own and runs the tests on them."""
    arguments = place.options(session.posargs)[1]
    cuda = asks_for_cuda(arguments)
    variant = mutants.variant_for("cuda" if cuda else "cpu")
    try:
        compiler = toolchain.missing_requirements(variant)
    except ServiceError as error:
        session.error(str(error))
    install_torch(session, variant.torch[0])
    session.install(*MATRIX.tools["build"], *MATRIX.tools["test"], *compiler)
    if cuda and module == "service.sanitize" and toolchain.missing_sanitizer():
        session.install(*toolchain.missing_sanitizer())
    run_patiently(session, "python", "-m", module, *arguments)


@nox.session(reuse_venv=True)
def sanitize(session: nox.Session) -> None:
    """Runs the tests with sanitizers in the CPU kernels, or on a GPU with `-- --device cuda`."""
    prove_tests(session, "service.sanitize")


@nox.session(reuse_venv=True)
def mutate(session: nox.Session) -> None:
    """Breaks the kernels on purpose, and fails where no test does: also `-- --device cuda`."""
    prove_tests(session, "service.mutate")


@nox.session(reuse_venv=True)
def index(session: nox.Session) -> None:
    """Makes a package index and its landing page, site/, from the wheels in dist/."""
    session.install(*MATRIX.tools["index"])
    session.run("python", "-m", "service.site")


@nox.session(python="3.11", reuse_venv=True)
@nox.parametrize("torch", ["2.4.1", MATRIX.headers_torch], ids=["legacy", "stable"])
def guide(session: nox.Session, torch: str) -> None:
    """Adds the operator of docs/write-an-operator.md to a copy of the tree, and tests it with either binding."""
    install_torch(session, torch)
    session.install(*MATRIX.tools["test"], *MATRIX.tools["build"])
    tree = Path(session.create_tmp()).resolve() / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    session.run("python", "tests/service/guide.py", str(tree))
    here = {
        "EXTOPS_JIT": "csrc",
        "PYTHONPATH": "package",
        "TORCH_EXTENSIONS_DIR": str(tree / "build"),
    }
    with session.chdir(tree):
        chosen = (
            "-k",
            "softsign",
            "--ignore=tests/service",
            "--ignore=tests/torchwheels",
            *session.posargs,
        )
        session.run("python", "-m", "pytest", "-p", "no:cacheprovider", "tests", *chosen, env=here)


@nox.session(reuse_venv=True)
def docs(session: nox.Session) -> None:
    """Makes the documentation, docs/_build/html or the folder after `--`; a warning is an error."""
    cell = MATRIX.cell(f"{sys.version_info.major}.{sys.version_info.minor}-cpu")
    install_torch(session, cell.torch)
    session.install(*MATRIX.tools["build"], *MATRIX.tools["index"], *MATRIX.tools["docs"])
    session.install("--quiet", "./service")  # whose help it shows
    install_new_wheel(session, cell)
    target = session.posargs or ["docs/_build/html"]
    session.run("sphinx-build", "--fail-on-warning", "--keep-going", "docs", *target)


@nox.session(reuse_venv=True)
def lint(session: nox.Session) -> None:
    """Checks style and types of the sources, without changing them."""
    session.install(*MATRIX.tools["lint"], *MATRIX.tools["build"], *MATRIX.tools["test"])
    session.install(*MATRIX.tools["docker"], *MATRIX.tools["nox"], *MATRIX.tools["index"])
    session.install("--no-deps", f"torch=={MATRIX.headers_torch}")  # for its types
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    own = ("--exclude", "torchwheels")
    session.run("mypy", *own, "package", "service", "noxfile.py", "setup.py")
    session.run("mypy", "-p", "torchwheels", env={"MYPYPATH": "service"})
    sources = [
        path
        for folder in ("csrc", "examples")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".h", ".cuh", ".cpp", ".cu")
    ]
    session.run("clang-format", "--dry-run", "-Werror", *map(str, sources))
    session.run("shellcheck", ".ci/run")
    lint_workflows(session)


def lint_workflows(session: nox.Session) -> None:
    """Checks what GitHub reads, as far as that can be done away from it."""
    session.run("actionlint")
    session.run("zizmor", "--offline", "--pedantic", "--quiet", ".")
    folder = ROOT / ".github"
    config = folder / "ISSUE_TEMPLATE" / "config.yml"
    forms = sorted({*folder.glob("ISSUE_TEMPLATE/*.yml")} - {config})
    workflows = sorted(folder.glob("workflows/*.yml"))
    for schema, files in (
        ("vendor.github-workflows", workflows),
        ("custom.github-workflows-require-timeout", workflows),
        ("vendor.github-actions", sorted(folder.glob("actions/*/action.yml"))),
        ("vendor.github-issue-forms", forms),
        ("vendor.github-issue-config", [config]),
        ("vendor.dependabot", [folder / "dependabot.yml"]),
    ):
        session.run("check-jsonschema", "--builtin-schema", schema, *map(str, files))


@nox.session(python=False)
def matrix(session: nox.Session) -> None:
    """Says which jobs CI starts: `nox -s matrix -- small`, or `full`."""
    session.run(sys.executable, "-m", "service.ci", *session.posargs)


@nox.session(python=False)
def notes(session: nox.Session) -> None:
    """Checks that a tag can be released, and writes its notes: `nox -s notes -- v0.1.0`."""
    session.run(sys.executable, "-m", "service.notes", *session.posargs)


@nox.session
def newest(session: nox.Session) -> None:
    """Tests the wheel that pip finds, PyPI's or that of `-- ARGUMENTS`, with the newest torch."""
    with tempfile.TemporaryDirectory(prefix="extops-newest-") as folder:
        download = ["pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        session.run("python", "-m", *download, f"--dest={folder}", *(session.posargs or ["extops"]))
        (wheel,) = Path(folder).glob("*.whl")
        install_torch(session)
        session.install(*MATRIX.tools["test"], str(wheel))
        record = Path(folder) / "record"
        # Whatever pytest's exit code, a signal's too: that they do not pass, or crash, is a result.
        test_wheel(session, f"--record={record}", success_codes=range(-64, 6))
        session.run("python", "-m", "service.newest", wheel.name, str(record))


# Last, so that `nox --list` begins with the sessions above.
for each in MATRIX.cells:
    add_sessions(each)
