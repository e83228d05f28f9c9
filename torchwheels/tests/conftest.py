"""torchwheels from the source tree where it is not installed, and projects to build."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pickle
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torchwheels.run import engines

ROOT = Path(__file__).parents[2]

# At the end: an installed one comes first.
sys.path.append(str(ROOT / "torchwheels" / "src"))

# Before any fixture and subprocess: the tests are of what a user gets who has set neither. CI has the first, which
# groups the output; who builds for few GPUs, the second.
for variable in ("GITHUB_ACTIONS", "TORCHWHEELS_ARCHITECTURES"):
    os.environ.pop(variable, None)


# Where it was compiled and with which flags, and so what reaches a wheel from the machine.
SENTENCE = """
#define TEXT(x) #x
#define TEXT_OF(x) TEXT(x)
#ifndef SENTENCE
#define SENTENCE plain
#endif
static std::string sentence() { return __FILE__ " is " TEXT_OF(SENTENCE); }
TORCH_LIBRARY_FRAGMENT(own_project, m) { m.def("sentence() -> str", &sentence); }
"""


@pytest.fixture
def read_in_own_process() -> None:
    """For tests of what a reader of wheels and archives may see."""


@pytest.fixture(autouse=True)
def _read_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has readers run in this process, which takes half a second less each; what they get and return is the same."""
    if "read_in_own_process" in request.fixturenames:
        return
    from torchwheels.errors import UserError
    from torchwheels.system import processes, sandbox

    def call(
        reader: sandbox.Reader, path: Path, *arguments: Any, writes: Path | None = None
    ) -> Any:
        function, given = pickle.loads(pickle.dumps((reader, (path.absolute(), *arguments))))
        try:
            return json.loads(json.dumps(function(*given)))
        except UserError:
            raise
        except Exception as error:
            if processes.is_of_full_disk(error):
                raise
            raise sandbox._refused(path, f"{type(error).__name__}: {error}") from None

    monkeypatch.setattr(sandbox, "call", call)


@pytest.fixture(autouse=True, scope="session")
def _prove_the_same_libraries_once() -> Iterator[None]:
    """auditwheel parses them with all of libstdc++, and most wheels of tests differ in other files."""
    from torchwheels.wheel import contents

    known: dict[tuple[object, ...], Any] = {}
    analyze = contents.analyze_wheel_abi

    def analyzed(
        libc: None, machine: None, path: Path, others: frozenset[str], **options: bool
    ) -> Any:
        with zipfile.ZipFile(path) as archive:
            files = {
                x.filename: x.CRC for x in archive.infolist() if ".dist-info/" not in x.filename
            }
        key = path.name.rpartition("-")[2], others, *sorted(files.items()), *sorted(options.items())
        if key not in known:
            known[key] = analyze(libc, machine, path, others, **options)
        return known[key]

    contents.analyze_wheel_abi = analyzed
    yield
    contents.analyze_wheel_abi = analyze


def version_of_torch() -> str:
    """Of the torch that builds in tests use; to import it here would take seconds."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("torch is not installed", allow_module_level=True)


@pytest.fixture
def own_project(tmp_path: Path) -> Path:
    """A copy of the example."""
    return shutil.copytree(ROOT / "examples" / "own_project", tmp_path / "own_project")


@pytest.fixture
def classic(own_project: Path) -> Path:
    """The example, a classic extension, with an operator that says how it was compiled.

    It requires nothing but what is there: pip would take longer than all else.
    """
    table = own_project / "pyproject.toml"
    table.write_text(
        table.read_text().replace('requires = ["setuptools", "torch"]', 'requires = ["torch"]')
    )
    with (own_project / "csrc" / "swish.cpp").open("a") as source:
        source.write(SENTENCE)
    return own_project


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all workers of pytest-xdist, for what is made once and then only read."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture
def engine() -> engines.Engine:
    """The engine of containers; skips where none answers."""
    from torchwheels import errors
    from torchwheels.run import engines

    try:
        return engines.find_engine()
    except errors.UserError as error:
        pytest.skip(f"no Docker engine answers: {error}")
