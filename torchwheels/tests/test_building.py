"""Builds the example, a small classic extension, beside the torch of these tests, as its sources are."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from conftest import version_of_torch
from forged_wheels import CLASSIC, Forge
from torchwheels import build, cli, environments, sources
from torchwheels.build import backend, steps, toolchain
from torchwheels.errors import BuildError, UserError
from torchwheels.options import project, releases
from torchwheels.options.releases import Target
from torchwheels.sources import name_of
from torchwheels.system import cache, processes, sandbox
from torchwheels.wheel import archive as archives
from torchwheels.wheel import contents, elf
from torchwheels.wheel.contents import read

TORCH = version_of_torch()

HOSTILE = {
    "CFLAGS": "-DSENTENCE=leaked",
    "CXXFLAGS": "-DSENTENCE=leaked",
    "CPPFLAGS": "-DSENTENCE=leaked",
    "LDFLAGS": "-lnowhere",
    "CC": "false",
    "CXX": "false",
    "CUDA_HOME": "/nowhere",
    "TORCH_CUDA_ARCH_LIST": "1.0",
    "OWN": "leaked",
}


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    """The CPU target of these tests' own Python and torch, with the environment that has that."""
    packages = Path(str(importlib.metadata.distribution("torch").locate_file("")))
    base = environments.Environment(packages.parents[2])
    monkeypatch.setattr(environments, "with_torch", lambda *_, **__: base)
    monkeypatch.setenv("TORCHWHEELS_CACHE", str(tmp_path / "my cache"))
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return releases.load().target(f"{python}-cpu-torch{releases.minor(TORCH)}")


def fetched(folder: Path) -> sources.Fetched:
    """The sources in `folder`, as the command line fetches them."""
    with tempfile.TemporaryDirectory() as name:
        found = sources.fetch(str(folder), Path(name) / "source")
    name = name_of(folder, found.project)
    return dataclasses.replace(found, folder=folder, name=name)


def ask(wheel: Path, folder: Path, question: str, package: str = "own_project") -> str:
    """What the package in `wheel` answers."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
    subprocess.run([*command, wheel], check=True)
    command = [sys.executable, "-c", f"import {package}, torch; print({question})"]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_a_build_ends_with_its_time(tmp_path: Path, target: Target) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "setup.py").write_text("import time; time.sleep(10**6)")
    options = project.Project(time_limit=0.02)
    with pytest.raises(UserError, match=r"failed: it took more than 0\.02 minutes: give it more"):
        build.build_wheel(options, target, fetched(source), tmp_path / "dist")


def test_builds_of_two_projects_do_not_wait_for_each_other(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one project do: paths end up in hashes that no prefix map reaches."""
    names = []

    def locked(name: str) -> None:
        names.append(name)
        raise UserError("seen")

    monkeypatch.setattr(cache, "locked", locked)
    for path in ("one", "two", "copy/two"):
        (tmp_path / path).mkdir(parents=True)
        with pytest.raises(UserError, match="seen"):
            build.build_wheel(project.Project(), target, fetched(tmp_path / path), tmp_path)
    assert names == [f"build/{target.name}-{name}" for name in ("one", "two", "two")]


WARNS = """
import warnings
from setuptools import setup
warnings.warn("Failed to initialize NumPy: No module named 'numpy'")
warnings.warn("of its own")
setup(name="warns", version="1")
"""


def test_a_backends_warnings_are_passed_on_but_torchs_of_numpy(
    tmp_path: Path, target: Target, recwarn: pytest.WarningsRecorder
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "setup.py").write_text(WARNS)
    (source / "pyproject.toml").write_text("[build-system]\nrequires = []\n")
    why = "its setup has compiled nothing: .* for CUDA alone needs such a target, .* `environment`, .* `pip wheel`"
    with pytest.raises(UserError, match=why):
        build.build_wheel(project.Project(), target, fetched(source), tmp_path / "dist")
    said = {str(each.message) for each in recwarn}
    assert "of its own" in said
    assert not any("NumPy" in each for each in said)


def test_what_a_build_took_is_that_of_all_its_steps(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    """A container has a process for each."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "setup.py").write_text(ONE_FILE.format("own.c"))
    (source / "pyproject.toml").write_text("[build-system]\nrequires = []\n")
    (source / "own.c").write_text("#include <Python.h>\nvoid *PyInit_sample(void) { return 0; }\n")
    clock = SimpleNamespace(monotonic=itertools.count(0, 10).__next__)
    sizes = iter((1e6, 3e6, 2e6, 1e6))
    used = SimpleNamespace(
        getrusage=lambda _: SimpleNamespace(ru_maxrss=next(sizes)), RUSAGE_CHILDREN=0
    )
    monkeypatch.setattr(steps, "time", clock)
    monkeypatch.setattr(steps, "resource", used)
    monkeypatch.setattr(steps.check_import, "check_import", lambda *_: None)
    given = project.Project(), target, fetched(source), tmp_path / "dist"
    for step in build.STEPS:
        build.build_wheel(*given, [step])
    assert "MB, 40 s, largest process 3.1 GB)" in capsys.readouterr().out


@pytest.mark.slow
def test_a_wheel_is_read_once(
    classic: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was built, and as auditwheel made it; a library that is the same in both is looked at once."""
    read, looked_at = [], []

    def reads(archive: zipfile.ZipFile) -> dict[str, bytes]:
        read.append(Path(str(archive.filename)).parent.name)
        return archives.unpack(archive)

    def looks_at(data: bytes) -> elf.Library:
        looked_at.append(hash(data))
        return elf.read_library(data)

    monkeypatch.setattr(contents, "unpack", reads)
    monkeypatch.setattr(contents, "read_library", looks_at)
    monkeypatch.delattr(sandbox, "call")  # what this machine has built
    build.build_wheel(project.Project(), target, fetched(classic), tmp_path / "dist")
    assert read == ["built", "repaired"]
    assert len(looked_at) == len({*looked_at}) <= 2


@pytest.mark.slow
def test_builds_the_same_wheel_twice_whatever_the_host_says(
    classic: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(classic, "import os; assert 'OWN' not in os.environ")
    before = sources.hash_of_folder(classic)
    first = build.build_wheel(project.Project(), target, fetched(classic), tmp_path / "dist")
    assert sources.hash_of_folder(classic) == before
    assert first.name.startswith(f"own_project-0.1+cpu.torch{releases.minor(target.torch)}-")
    assert "-manylinux_2_" in first.name
    answer = ask(first, tmp_path / "target", "torch.ops.own_project.sentence()")
    assert answer in ("csrc/swish.cpp is plain", "./csrc/swish.cpp is plain")  # ninja names it so

    nvcc = tmp_path / "stray" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.touch(mode=0o755)
    for name, value in HOSTILE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{nvcc.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TORCHWHEELS_CACHE", str(tmp_path / "another" / "cache"))
    (tmp_path / "another").mkdir()
    moved = classic.rename(tmp_path / "another" / "place")
    old = os.umask(0o077)
    try:
        second = build.build_wheel(project.Project(), target, fetched(moved), tmp_path / "again")
    finally:
        os.umask(old)
    assert second.read_bytes() == first.read_bytes()
    contents = b"".join(read(first).files.values())
    assert str(tmp_path).encode() not in contents
    assert str(Path.home()).encode() not in contents


def spoil(classic: Path, text: str) -> None:
    """Puts `text` at the beginning of the extension's setup.py."""
    setup = classic / "setup.py"
    setup.write_text(f"{text}\n{setup.read_text()}")


# Of another file than setup.py.
MISSING = """
import sys; sys.path.insert(0, ".")
import own_helper
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            MISSING,
            "its build imports a module that is not there (tom_of_nobody): add what has it to `build-requires`",
        ),
        (
            "import subprocess; subprocess.run(['cmake_of_nobody'])",
            "the command cmake_of_nobody is not there: install it",
        ),
        (
            "import os, sys; sys.exit(os.system('git_of_nobody'))",
            "the command git_of_nobody is not",
        ),
        (
            "import sys; sys.exit('c++: fatal error: Killed signal terminated program cc1plus')",
            "a compiler ran out of memory: build with fewer jobs at once (MAX_JOBS, now ",
        ),
        (
            "raise Exception('CPU version is not implemented')",
            "its setup asks for a GPU: in a CUDA target `pretend-gpu = true`",
        ),
        ("open('version')", "the messages above say why"),
        (
            "import torch.utils.cpp_extension as x; x._join_cuda_home('bin')",
            "its build needs a CUDA compiler, which a target for the CPU alone has not",
        ),
        (
            "import pathlib; pathlib.Path('csrc/swish.cpp').unlink(missing_ok=True)",
            "csrc/swish.cpp: an archive on PyPI may be incomplete, so build",
        ),
    ],
)
def test_failures_are_explained_and_leave_the_old_wheel(
    classic: Path, target: Target, tmp_path: Path, text: str, message: str
) -> None:
    spoil(classic, text)
    (classic / "own_helper.py").write_text("import tom_of_nobody")
    old = tmp_path / "dist" / "own_project-0.0-py3-none-any.whl"
    old.parent.mkdir()
    old.write_bytes(b"old")
    with pytest.raises(UserError) as error:
        build.build_wheel(project.Project(), target, fetched(classic), tmp_path / "dist")
    assert message in str(error.value)
    assert target.name in str(error.value)
    assert [(x, x.read_bytes()) for x in old.parent.iterdir()] == [(old, b"old")]


TRIED = "a.c:1:9: fatal error: numa.h: No such file or directory\n"
FAILS = "x.c:1:9: fatal error: own.h: No such file or directory\n"
RAISED = """Traceback (most recent call last):
  File "setup.py", line 1, in <module>
ModuleNotFoundError: No module named 'tried'
"""
ENDED = RAISED.replace("ModuleNotFoundError: No module named 'tried'", "{}")
FAILED = "subprocess.CalledProcessError: Command 'make' returned non-zero exit status 2."
CAUSED = "\nThe above exception was the direct cause of the following exception:\n\n"
HANDLED = "\nDuring handling of the above exception, another exception occurred:\n\n"


@pytest.mark.parametrize(
    ("printed", "part"),
    [
        (TRIED, 1),
        (f"{TRIED}[1/2] c++ -c x.c\nFAILED: [code=1] x.o \nc++ -c x.c\n{FAILS}[2/2] y\n", 3),
        (f"{TRIED}/bin/g++ -c x.c\n{FAILS}error: command '/bin/g++' failed with exit code 1\n", 3),
        (f"{TRIED}{FAILS}error: command 'swig' failed: No such file or directory\n", 2),
        (f"No space left on device\n{ENDED.format('ValueError: x')}", 3),
        (f"{RAISED}{HANDLED}{ENDED.format('ValueError: x')}", 3),
        (f"{RAISED}{CAUSED}{ENDED.format('ValueError: x')}", 9),
        (f"{RAISED}error: x\n", 1),
        (f"{RAISED}{FAILS}make: *** [x.o] Error 1\n{ENDED.format(FAILED)}", 5),
        (f"FAILED: x.o\n{FAILS}{ENDED.format('ValueError: x')}", 3),
        (f"{TRIED}CMake Error at x:1 (f):\n  No CUDA\nCMake Error: y\n{ENDED.format(FAILED)}", 6),
        (f"{TRIED}running build_ext\nsh: 1: nobody: not found\n", 1),
        ("No space left on device\nThis is for Windows.\n", 1),
        (f"1 Killed g++ x.c\nmake: *** [x.o] Error 137\n{ENDED.format(FAILED)}", 5),
        (f"{TRIED}running build_ext\nKilled\nerror: command '/bin/g++' failed\n", 2),
    ],
)
def test_what_a_setup_only_tries_is_no_reason(printed: str, part: int) -> None:
    """The lines from the one on that failed."""
    assert backend.of_failure(printed) == "".join(printed.splitlines(keepends=True)[-part:])


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("os.kill(os.getpid(), 11)", "failed: its build backend died of signal 11"),
        ("os._exit(3)", "failed: its build backend ended with exit code 3"),
    ],
)
def test_a_backend_that_says_nothing(
    code: str, message: str, target: Target, tmp_path: Path
) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "setup.py").write_text(f"import os; {code}")
    (folder / "pyproject.toml").write_text("[build-system]\nrequires = []\n")
    with pytest.raises(BuildError, match=f"{message}$"):
        build.build_wheel(project.Project(), target, fetched(folder), tmp_path / "dist")


@pytest.mark.parametrize(
    ("printed", "sentence"),
    [
        (
            "x.h:1:2: fatal error: zlib.h: No such file or directory",
            "the header zlib.h is not there: install what has it",
        ),
        (
            'x.cpp:1:10: fatal error: own.h: No such file or directory\n   10 | #include "own.h"\n',
            "the header own.h is not there, and may be of the project: an archive on PyPI may be incomplete, so "
            "build its repository (`git+URL@COMMIT`), or install what has it",
        ),
        (
            "x.cu:1:10: fatal error: THC/THC.h: No such file or directory\n",
            "the header THC/THC.h was torch's until 1.10: these sources are for an older torch than any target has",
        ),
        ("Killed 0 stale workers", ""),
        ("/bin/sh: line 1: 71 Killed   g++ -c x.cpp", "a compiler ran out of memory"),
        (
            "nvcc error   : 'cicc' died due to signal 9 (Kill signal)",
            "a compiler ran out of memory",
        ),
        ("make: *** [Makefile:3: x.o] Killed", "a compiler ran out of memory"),
        (
            "ATen.h:5:2: error: #error C++20 or later compatible compiler is required to use ATen.",
            "this torch's headers want C++20, and its setup asks for an older one: have `patches` or",
        ),
        (
            "/x/torch/include/c10/util/StringUtil.h:65:22: error: ‘is_enum_v’ is not a member of ‘std’; did you mean",
            "this torch's headers want a newer C++ than its setup asks for: have `patches` or",
        ),
        ("x.cpp:65:22: error: ‘is_enum_v’ is not a member of ‘std’; did you mean ‘is_enum’?", ""),
        (
            "AssertionError: Torch not compiled with CUDA enabled",
            "its setup asks for a GPU: in a CUDA target `pretend-gpu = true`",
        ),
        (
            "CMake Error at CMakeLists.txt:1: Compatibility with CMake < 3.5 has been removed from CMake.",
            "its CMakeLists.txt is for a CMake before 3.5, which this one no longer takes: set "
            'environment = { CMAKE_POLICY_VERSION_MINIMUM = "3.5" }',
        ),
        ("No space left on device", "the disk is full"),
        (
            "setuptools-scm was unable to detect version for /source",
            "its version comes from git, and these sources are no repository: build `git+URL@COMMIT`",
        ),
        (
            "<urlopen error [Errno -3] Temporary failure in name resolution>",
            "its build asks for the network, and reaches nobody: in a container the option `network`",
        ),
        (
            "<urlopen error [Errno -2] Name or service not known>",
            "its build asks for the network, and reaches nobody: in a container the option `network`",
        ),
        (
            "avx512fintrin.h:2386:1: error: inlining failed in call to ‘always_inline’ "
            "‘__m512i _mm512_cvtepu16_epi32(__m256i)’: target specific option mismatch",
            "its code uses instructions of CPUs that its flags do not name (-march=native is left out, since a wheel "
            'is for other CPUs, too): name them, as in environment = { CPPFLAGS = "-mavx2 -mfma" }',
        ),
        (
            "  Failed to detect a default CUDA architecture.",
            "its build needs a CUDA compiler, which a target for the CPU alone has not",
        ),
        (
            "/usr/bin/ld: cannot find -lc10_cuda: No such file or directory",
            "its build needs a CUDA compiler, which a target for the CPU alone has not",
        ),
        (
            "AssertionError: At least one source is required to build a library",
            "its setup finds no source to compile: an archive on PyPI may be incomplete, so build",
        ),
        ("nothing that is known", ""),
        ("No module named 'optional'\nNo space left on device", "the disk is full"),
        (
            "x.cpp:1:1: error: 'version' does not name a type\n 1 | version https://git-lfs.github.com/spec/v1",
            "a file of its sources is what Git LFS leaves",
        ),
        (
            "x.cpp:1:9: fatal error: cuda_runtime.h: No such file or directory",
            "its build needs a CUDA compiler",
        ),
    ],
)
def test_what_a_build_prints_is_explained(printed: str, sentence: str) -> None:
    known = {"jobs": "2", "space": processes.FREE_SPACE}
    said = backend.explained(f"running build_ext\n{printed}\n", "build", **known)
    assert said.startswith(sentence) and bool(said) == bool(sentence)


MODULE = """
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", 0, -1, 0};
PyMODINIT_FUNC PyInit__C(void) { return PyModule_Create(&module); }
"""
ONE_FILE = """
from setuptools import setup, Extension
setup(name="sample", version="1", packages=[], ext_modules=[Extension("sample", ["{}"])])
"""


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("own.cpp", None, "own.cpp: an archive on PyPI may be incomplete, so build its repository"),
        ("made.cpp", "", "lack the file made.cpp, which git ignores, or which lies where builds leave their own: add"),
        ("own.cpp", '#include "x/made.h"', "lack the file include/x/made.h, which git ignores, or"),
        ("own.cpp", '#include "of_nobody.h"', "the header of_nobody.h is not there, and may be of the"),
        ("../common.cpp", None, "its sources lack the file common.cpp, which lies outside of the folder that is"),
        ("link.cpp", None, "its sources lack the file link.cpp, a link out of their folder (../common.cpp): p"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("launcher", ["", pytest.param("sccache", marks=pytest.mark.slow)])
def test_a_file_that_is_missing_is_named_and_why(
    file: str, text: str | None, message: str, launcher: str, target: Target, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if launcher and not shutil.which(launcher):
        pytest.skip(f"there is no {launcher}")
    monkeypatch.setattr(toolchain, "find_launcher", lambda *_: shutil.which(launcher) or "")
    folder = tmp_path / "source"
    (folder / "include" / "x").mkdir(parents=True)
    for name in ("../common.cpp", "include/x/made.h"):
        (folder / name).touch()
    (folder / "link.cpp").symlink_to("../common.cpp")
    (folder / ".gitignore").write_text("made*\n")
    (folder / "setup.py").write_text(ONE_FILE.format(file))
    (folder / "pyproject.toml").write_text("[build-system]\nrequires = []\n")
    if text is not None:
        (folder / file).write_text(text)
    subprocess.run(["git", "init", "--quiet", folder], check=True)
    source = sources.fetch(str(folder), tmp_path / "copy")
    with tempfile.TemporaryDirectory() as short, pytest.raises(BuildError) as error:  # for a socket
        monkeypatch.setenv("TORCHWHEELS_CACHE", short)
        build.build_wheel(project.Project(), target, source, tmp_path / "dist")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("line", "has_git", "message"),
    [
        ("open('made.rst')", True, "lack the file made.rst, which git ignores, or"),
        ("import made", True, "lack the file made.py, which git ignores, or"),
        ("import made_too.inner", True, "lack the file made_too/__init__.py, which git ignores, or"),
        ("open('dist/x')", True, "lack the file dist/x, which git ignores, or which lies where builds leave their own"),
        ("open('dist/x')", False, "dist/x, which lies where builds leave their own: move it out of dist"),
        ("open('../README')", True, "README, which lies outside of the folder that is built: build {} with `--sub"),
        ("open('../README')", False, " with `--subdirectory source`"),
        ("open('nowhere')", True, "the messages above say why"),
        ("import made_by_nobody", True, "imports a module that is not there (made_by_nobody)"),
    ],
)  # fmt: skip
def test_what_setup_needs_and_the_copy_lacks_is_named(
    line: str, has_git: bool, message: str, target: Target, tmp_path: Path
) -> None:
    folder = tmp_path / "source"
    for name in ("../README", "made.rst", "made.py", "made_too/__init__.py", "dist/x"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    if has_git:
        (folder / ".gitignore").write_text("made*\ndist\n")
        subprocess.run(["git", "init", "--quiet", folder], check=True)
    (folder / "setup.py").write_text(f"import sys; sys.path.insert(0, '')\n{line}\n{ONE_FILE}")
    (folder / "pyproject.toml").write_text("[build-system]\nrequires = []\n")
    source = sources.fetch(str(folder), tmp_path / "copy")
    with pytest.raises(BuildError) as error:
        build.build_wheel(project.Project(), target, source, tmp_path / "dist")
    assert message.format(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("from . import _generated", "ImportError: cannot import name '_generated' from"),
        ("from ._generated import x", "ModuleNotFoundError: No module named"),
    ],
)
def test_a_module_that_git_ignores_is_named_where_the_wheel_lacks_it(
    line: str, error: str, target: Target, tmp_path: Path
) -> None:
    package = tmp_path / "source" / "sample"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"from . import _C\n{line}\n")
    (package / "_generated.py").touch()
    folder = package.parent
    (folder / "own.c").write_text(MODULE)
    setup = ONE_FILE.replace("packages=[]", 'packages=["sample"]').replace(
        '"sample", [', '"sample._C", ['
    )
    (folder / "setup.py").write_text(setup.format("own.c"))
    (folder / "pyproject.toml").write_text("[build-system]\nrequires = []\n")
    (folder / ".gitignore").write_text("_generated.py\n")
    subprocess.run(["git", "init", "--quiet", folder], check=True)
    source = sources.fetch(str(folder), tmp_path / "copy")
    with pytest.raises(UserError) as refused:
        build.build_wheel(project.Project(), target, source, tmp_path / "dist")
    assert f"does not import: {error}" in str(refused.value)
    lacks = "its sources lack the file sample/_generated.py, which git ignores, or which"
    assert f": {lacks}" in str(refused.value)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            "",
            "failed: its [build-system]: Failed to validate `build-system` in pyproject.toml: `requires`",
        ),
        (
            'requires = []\nbuild-backend = "backend_of_nobody"',
            "its build imports a module that is not there (backend_of_nobody): add what has it",
        ),
        (
            'requires = ["torch<2"]',
            ": choose a target with such a torch (`torchwheels targets` lists all), or add one by `[[",
        ),
        ('requires = ["a b"]', "its build requires 'a b', which is no requirement"),
        ("x = " + "[" * 9999, "failed: its [build-system]: maximum recursion depth exceeded"),
    ],
)
def test_build_system_that_cannot_be(
    classic: Path, target: Target, tmp_path: Path, table: str, message: str
) -> None:
    (classic / "pyproject.toml").write_text(f"[build-system]\n{table}\n")
    with pytest.raises(UserError) as error:
        build.build_wheel(project.Project(), target, fetched(classic), tmp_path / "dist")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("where", "makes", "said"),
    [
        ("..", "", "its [build-system]: paths must be inside source tree"),
        (".", "return None", "its build backend returns no name of a wheel"),
        (".", "return '../../x.whl'", "its build backend returns no name of a wheel"),
        (".", "os.mkfifo(folder + '/x.whl'); return 'x.whl'", "x.whl is no file"),
        (
            ".",
            "open(folder + '/x.whl', 'w'); return 'x.whl'",
            "x.whl is no wheel: File is not a zip file",
        ),
        (".", "return wheel(folder, '')", "says in its METADATA that its version is None"),
        (".", "return wheel(folder, 'Version: 2')", "says in its METADATA that its version is 2"),
        (
            ".",
            "return wheel(folder, 'Version: 1\\nRequires-Dist: a b')",
            "its wheel requires 'a b', which is no requirement",
        ),
    ],
)
def test_backend_that_makes_no_wheel(
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    makes: str,
    said: str,
) -> None:
    """That is a failure of the project; and the build leaves no variables, which may hold passwords."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("TORCHWHEELS_CACHE", str(cache))
    folder = tmp_path / "source"
    folder.mkdir()
    table = f'requires = []\nbuild-backend = "own"\nbackend-path = ["{where}"]'
    (folder / "pyproject.toml").write_text(f"[build-system]\n{table}\n")
    (folder / "own.py").write_text(
        "import os, zipfile\n"
        "def wheel(folder, said):\n"
        "    with zipfile.ZipFile(folder + '/x-1-py3-none-any.whl', 'w') as file:\n"
        "        file.writestr('x-1.dist-info/METADATA', said)\n"
        "    return 'x-1-py3-none-any.whl'\n"
        f"def build_wheel(folder, *_, **__):\n    {makes or 0}\n"
    )
    with pytest.raises(BuildError) as error:
        build.build_wheel(project.Project(), target, fetched(folder), tmp_path / "dist")
    assert said in str(error.value)
    left = {x.name for x in cache.glob("build/*/*")}
    assert "source" in left and "variables.json" not in left


def test_nobody_reads_what_a_build_prints(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind `| head`: that says nothing of the project."""

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            if "of the backend" in text:
                raise BrokenPipeError
            return super().write(text)

    table = 'requires = []\nbuild-backend = "own"\nbackend-path = ["."]'
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "pyproject.toml").write_text(f"[build-system]\n{table}\n")
    own = "def build_wheel(*_, **__):\n    print('of the backend', flush=True)\n"
    (tmp_path / "source" / "own.py").write_text(own)
    monkeypatch.setattr(sys, "stdout", Closed())
    with pytest.raises(BrokenPipeError):
        build.build_wheel(
            project.Project(), target, fetched(tmp_path / "source"), tmp_path / "dist"
        )


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("pyproject.toml", "[project]\nname = 'x'\nversion = '1'\nrequires-python = '>=3.12,<4'\n"),
        ("setup.cfg", "[options]\npython_requires = >=3.12,<4\n"),
        ("setup.py", "from setuptools import setup\nsetup(name='x', python_requires='>=3.12,<4')"),
    ],
)
def test_pythons_that_the_target_has_none_of(
    target: Target, tmp_path: Path, file: str, text: str
) -> None:
    """Before anything is installed or compiled."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "setup.py").write_text("raise SystemExit('it runs')")
    (source / file).write_text(text)
    old = dataclasses.replace(target, python="3.11")
    with pytest.raises(BuildError) as error:
        build.build_wheel(project.Project(), old, fetched(source), tmp_path / "dist")
    said = f"its sources are for Python <4,>=3.12, and {old.name} has Python 3.11: choose another"
    assert str(error.value).startswith(said)


def test_build_requirement_that_torchs_own_requirements_do_not_admit(
    classic: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many projects ask for an older setuptools than torch does: they get it, beside the target's torch."""
    info = "typing_extensions-4.0.dist-info"
    files = {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: typing_extensions\nVersion: 4.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    archive = archives.with_record(files, f"{info}/RECORD")
    archives.write_wheel(tmp_path / "typing_extensions-4.0-py3-none-any.whl", archive)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    table = 'requires = ["typing-extensions<4.10", "torch"]\nbuild-backend = "backend_of_nobody"'
    (classic / "pyproject.toml").write_text(f"[build-system]\n{table}\n")
    with pytest.raises(UserError, match=r"imports a module that is not there \(backend_of_nobody"):
        build.build_wheel(project.Project(), target, fetched(classic), tmp_path / "dist")
    other = table.replace("typing-extensions<4.10", f"torch=={TORCH}.post1")
    (classic / "pyproject.toml").write_text(f"[build-system]\n{other}\n")
    with pytest.raises(BuildError, match="its build requires torch=="):
        build.build_wheel(project.Project(), target, fetched(classic), tmp_path / "dist")


def test_a_table_that_is_no_file_is_not_read(target: Target, tmp_path: Path) -> None:
    """It may have no end."""
    (tmp_path / "setup.py").touch()
    (tmp_path / "pyproject.toml").symlink_to("/dev/full")
    with pytest.raises(BuildError, match=r"^the pyproject\.toml of the source is no plain file$"):
        steps.project_folder(project.Project(), target, tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            project.Project(subdirectory="python"),
            "has neither a setup.py nor a pyproject.toml in py",
        ),
        (
            project.Project(patches=("x.patch",), file=Path("options.toml")),
            "x.patch does not fit these sources",
        ),
        (project.Project(build_requires=("torch<2",)), "its build requires torch<2, and 3."),
    ],
)
def test_options_that_do_not_fit(
    classic: Path, target: Target, tmp_path: Path, options: project.Project, message: str
) -> None:
    """The project does not build then, and a farm tries it again with others alone."""
    with pytest.raises(BuildError) as error:
        build.build_wheel(options, target, fetched(classic), tmp_path / "dist")
    assert message in str(error.value)


def test_markers_of_requirements_are_those_of_the_targets_python(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip of the target's Python evaluates them."""
    asked = []
    monkeypatch.setattr(
        environments, "install", lambda _, requirements, *__, **___: asked.extend(requirements)
    )
    source = tmp_path / "source"
    source.mkdir()
    (source / "setup.py").write_text("")
    marked = f'x; python_full_version < "{target.python_version}.0"'
    options = project.Project(build_requires=(marked, 'torch<2; python_version < "3"'))
    with pytest.raises(UserError):
        build.build_wheel(options, target, fetched(source), tmp_path / "dist")
    assert str(Requirement(marked)) in asked


FETCHES = """
import shutil
from setuptools import Distribution, setup
from setuptools.command.build_py import build_py
class Fetch(build_py):
    def run(self):
        super().run()
        shutil.copy("finished.so", f"{self.build_lib}/_C.so")
class WithLibrary(Distribution):
    def has_ext_modules(self):
        return True
setup(name="NAME", version="1.0", py_modules=["fetched"], cmdclass={"build_py": Fetch}, distclass=WithLibrary)
"""


@pytest.mark.parametrize(
    ("name", "switch"),
    [
        pytest.param(
            "causal_conv1d",
            'set CAUSAL_CONV1D_FORCE_BUILD = "TRUE" in `environment` of',
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "mamba_ssm",
            'set MAMBA_FORCE_BUILD = "TRUE" in `environment` of',
            marks=pytest.mark.slow,
        ),
        (
            "flash_attn",
            'set FLASH_ATTENTION_FORCE_BUILD = "TRUE" and FLASH_ATTN_CUDA_ARCHS = "{sm}" in',
        ),
        pytest.param(
            "tinyops",
            "set what makes it compile (often NAME_FORCE_BUILD) in `environment` of",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_finished_library_is_no_build(
    target: Target, tmp_path: Path, name: str, switch: str
) -> None:
    """As the setup.py of these projects fetches one."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "setup.py").write_text(FETCHES.replace("NAME", name))
    (source / "fetched.py").touch()
    (source / "finished.so").write_bytes(Forge(tmp_path).compile(CLASSIC))
    with pytest.raises(UserError) as error:
        build.build_wheel(project.Project(), target, fetched(source), tmp_path / "dist")
    said = str(error.value)
    assert said.startswith("no compiler of this build linked _C.so (all linked 0 files): its setup")
    assert switch in said
    assert not (tmp_path / "dist").exists()


COMMANDS = project.Project(
    before_build="""echo "raise SystemExit('{label} $MAX_JOBS $OWN')" > setup.py""",
    environment={"OWN": "{label}"},
)


def test_command_before_each_build_changes_its_copy_of_the_sources(
    classic: Path,
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MAX_JOBS", "3")
    before = sources.hash_of_folder(classic)
    with pytest.raises(UserError, match="the messages above say why"):
        build.build_wheel(COMMANDS, target, fetched(classic), tmp_path / "dist")
    assert "\ncpu 3 cpu\n" in capsys.readouterr().out
    assert sources.hash_of_folder(classic) == before
    failing = project.Project(before_build="nothing_of_nobody {{x}}")
    with pytest.raises(UserError) as error:
        build.build_wheel(failing, target, fetched(classic), tmp_path / "dist")
    said = "the option `before-build` is `nothing_of_nobody {x}`, which ended with exit code 127"
    assert said in str(error.value)


def test_empty_submodules_are_named_where_a_build_fails(
    classic: Path, target: Target, tmp_path: Path
) -> None:
    spoil(
        classic, "import sys; sys.exit('x.h:1:2: fatal error: glm.hpp: No such file or directory')"
    )
    for folder, path in ((classic, "third_party/glm"), (classic / "third_party" / "ops", "fmt")):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".gitmodules").write_text(f'[submodule "x"]\n\tpath = {path}\n\turl = ../x\n')
    (classic / "third_party" / "glm").mkdir()
    with pytest.raises(UserError) as error:
        build.build_wheel(project.Project(), target, fetched(classic), tmp_path / "dist")
    assert "the header glm.hpp is not there" in str(error.value)
    said = (
        "; its submodules are empty (third_party/glm, third_party/ops/fmt), so try again once `git "
    )
    assert said in str(error.value)


@pytest.mark.parametrize("root", ["from setuptools import setup\nsetup(name='pure')\n", None])
def test_a_root_without_an_extension_is_one_sentence(
    root: str | None, target: Target, tmp_path: Path
) -> None:
    """The extension of pointnet2 is in a folder of its own."""
    source = tmp_path / "source"
    (source / "pure_lib" / "pure_ops").mkdir(parents=True)
    (source / "tests").mkdir()
    if root:
        (source / "setup.py").write_text(root)
    (source / "tests" / "setup.py").write_text("from setuptools import setup")
    (source / "pure_lib" / "setup.py").write_text("ext_modules=[CUDAExtension('x', ['x.cu'])]")
    with pytest.raises(UserError) as error:
        build.build_wheel(project.Project(), target, fetched(source), tmp_path / "dist")
    said = str(error.value)
    assert "the option `subdirectory`" in said
    assert "\n" not in said
    assert not (tmp_path / "dist").exists()


PLAIN_C = """
#include <Python.h>
static struct PyModuleDef plain = {PyModuleDef_HEAD_INIT, "plain"};
PyMODINIT_FUNC PyInit_plain(void) { return PyModule_Create(&plain); }
"""


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("cp {wheel} {dest}", r"platform_tag: its tag is linux_x86_64, but auditwheel proves many"),
        pytest.param(
            "test -f {wheel} -a -d {dest}",
            r"the option `repair` left 0 wheels in {dest}, but one is expected",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_command_in_place_of_auditwheel(
    target: Target, tmp_path: Path, command: str, message: str
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "plain.c").write_text(PLAIN_C)
    (source / "setup.py").write_text(
        "from setuptools import Extension, setup\n"
        "setup(name='plain', version='1', ext_modules=[Extension('plain', ['plain.c'])])\n"
    )
    with pytest.raises(UserError) as error:
        build.build_wheel(
            project.Project(repair=command), target, fetched(source), tmp_path / "dist"
        )
    assert message in str(error.value)


@pytest.mark.slow
def test_version_that_comes_from_git(target: Target, tmp_path: Path) -> None:
    """setuptools-scm comes from the index."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "plain.c").write_text(PLAIN_C)
    (source / "pyproject.toml").write_text(
        "[build-system]\nrequires = ['setuptools', 'setuptools-scm']\n"
        "build-backend = 'setuptools.build_meta'\n[tool.setuptools_scm]\n"
        "[project]\nname = 'plain'\ndynamic = ['version']\ndependencies = ['torch']\n"
        "[tool.setuptools]\next-modules = [{ name = 'plain', sources = ['plain.c'] }]\n"
    )
    git = ["git", "-C", str(source), "-c", "user.name=x", "-c", "user.email=x"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"], ["tag", "v1.2"]):
        subprocess.run([*git, *words], check=True)
    found = sources.fetch(str(source), tmp_path / "copy")
    built = build.build_wheel(project.Project(), target, found, tmp_path / "dist")
    assert built.name.startswith("plain-1.2+cpu-")


def test_command_before_all_builds_runs_once_in_the_sources_of_all(
    classic: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWN", "leaked")
    seen = []

    def build_wheel(
        options: project.Project, each: Target, source: sources.Fetched, *_: object
    ) -> None:
        seen.append((each.name, (source.folder / "made").read_text(), options.environment))
        raise UserError("no wheel is wanted")

    monkeypatch.setattr(build, "build_wheel", build_wheel)
    config = tmp_path / "options.toml"
    config.write_text(
        'before-all = "echo once$OWN >> made"\n[[overrides]]\nselect = "*-cu130"\n'
        'environment = { GPU = "1" }\n'
    )
    command = ["build", str(classic), f"--config={config}", f"--dist={tmp_path}", "--backend=local"]
    with pytest.raises(SystemExit, match="2 of 2 targets failed"):
        cli.main([*command, "--target=3.11-cpu", "--target=3.11-cu130"])
    assert seen == [("3.11-cpu", "once\n", {}), ("3.11-cu130", "once\n", {"GPU": "1"})]
    assert not (classic / "made").exists()


def test_presets_are_said(
    classic: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen = []
    monkeypatch.setattr(build, "build_wheel", lambda options, *_: seen.append(options.environment))
    project_file = classic / "pyproject.toml"
    text = project_file.read_text()
    project_file.write_text(text.replace('name = "own-project"', 'name = "natten"'))
    command = ["build", str(classic), f"--dist={tmp_path}", "--backend=local", "--target=3.11-cpu"]
    cli.main(command)
    config = tmp_path / "options.toml"
    config.write_text('environment = { NATTEN_N_WORKERS = "1" }')
    said = "natten is built with {} (a preset; [tool.torchwheels] overrides it)"
    arch = said.format("NATTEN_CUDA_ARCH={capabilities}")
    assert f"torchwheels: {arch}\n" in capsys.readouterr().out
    cli.main([*command, f"--config={config}"])
    printed = capsys.readouterr().out
    assert arch in printed and "NATTEN_N_WORKERS" not in printed
    assert [x["NATTEN_N_WORKERS"] for x in seen] == ["{jobs}", "1"]


@pytest.mark.parametrize(
    ("files", "source", "name"),
    [
        ({"PKG-INFO": "Metadata-Version: 2.1\nName: A_b\n", "setup.py": "name='x',"}, "", "a-b"),
        ({"pyproject.toml": "[project]\ndynamic = ['x']\nname = 'a.b'\n"}, "/x", "a-b"),
        ({"pyproject.toml": "[tool.x]\nname = 'x'\n"}, "https://localhost/me/A-b.git", "a-b"),
        ({"setup.py": "E(\n  name='x._C',\n)\nsetup(\n  name='a_b',\n"}, "/x", "a-b"),
        ({"setup.py": "PACKAGE_NAME = 'a_b'\nE(\n  name='a_b_cuda',\n)\n"}, "/x", "a-b"),
        ({"setup.py": "E(name='x', y=1)\nsetup(name='a_b', z=1)\n"}, "/x", "a-b"),
        ({}, "/home/me/a_b/", "a-b"),
    ],
)
def test_a_project_is_known_by_what_it_says_of_itself(
    tmp_path: Path, files: dict[str, str], source: str, name: str
) -> None:
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    assert name_of(tmp_path, source) == name


def test_a_project_without_readable_files_is_known_by_its_place(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").mkdir()
    (tmp_path / "setup.py").symlink_to("setup.py")
    assert name_of(tmp_path, "/home/me/a_b") == "a-b"


PATCH = """\
--- a/setup.py
+++ b/setup.py
@@ -0,0 +1,2 @@
+import os, sys
+sys.exit("OWN is " + os.environ["OWN"])
"""


def test_patches_and_environment_reach_the_build(
    classic: Path,
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "own.patch").write_text(PATCH)
    monkeypatch.setenv("MAX_JOBS", "3")
    options = project.Project(
        patches=("own.patch",), environment={"OWN": "{jobs} {{x}}"}, file=tmp_path / "options.toml"
    )
    with pytest.raises(UserError, match="the messages above say why"):
        build.build_wheel(options, target, fetched(classic), tmp_path / "dist")
    assert "OWN is 3 {x}" in capsys.readouterr().out


def test_a_patch_needs_the_command_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = project.Project(patches=("own.patch",), file=tmp_path / "options.toml")
    monkeypatch.setenv("PATH", str(tmp_path))
    said = r"^there is no `patch` command to apply \S+/own\.patch with: install patch$"
    with pytest.raises(UserError, match=said):
        steps._apply_patches(options, tmp_path)


def test_command_line_prints_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHWHEELS_CACHE", str(tmp_path))
    with pytest.raises(SystemExit) as error:
        cli.main(["build", "x", "--target", "3.14-cu121"])
    assert str(error.value.code).startswith(
        "torchwheels: there is no target '3.14-cu121' (torch 2.4.1 has no wheel for Python 3.14)"
    )
    cli.main(["targets"])
    assert "3.11-cu124-torch2.5" in capsys.readouterr().out


@pytest.mark.parametrize("source", ["a-name @ {}@v1#subdirectory=below", "{}@v1"])
def test_a_folder_of_a_commit_is_built(
    source: str, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = tmp_path / "x" / "below"
    below.mkdir(parents=True)
    (below / "setup.py").write_text("from setuptools import setup; setup()")
    (below / "pyproject.toml").write_text("[build-system]\nrequires = []\n")
    git = ["git", "-C", str(tmp_path / "x"), "-c", "user.name=x", "-c", "user.email=x"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"], ["tag", "v1"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.chdir(tmp_path)
    words = ["build", source.format(f"git+file://{tmp_path}/x"), f"--target={target.name}"]
    words += ["--backend=local", *([] if "#" in source else ["--subdirectory=below"])]
    with pytest.raises(SystemExit) as error:
        cli.main(words)
    assert error.value.code == BuildError.code  # its setup has compiled nothing
    name = "a-name" if "#" in source else "x"
    assert (tmp_path / "my cache" / "build" / f"{target.name}-{name}").is_dir()


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        (["build", "{}", "--dist={}/setup.py"], {}, "`--dist` names .*, but .*setup.py is no folder: name one"),
        (["build", "{}", "--dist={}/setup.py/x"], {}, "`--dist` names .*/x, but .*setup.py is no folder: "),
        (["build", "{}"], {"MAX_JOBS": "all"}, "MAX_JOBS is 'all', but a number of jobs from 1 is"),
        (["build", "{}"], {"SOURCE_DATE_EPOCH": "now"}, "SOURCE_DATE_EPOCH is 'now', but a number"),
        (["build", "{}"], {"SOURCE_DATE_EPOCH": "9" * 20}, "SOURCE_DATE_EPOCH is '9*', but a number of sec"),
        (["build", "{}"], {"SOURCE_DATE_EPOCH": "4354819200"}, "is '4354819200', but .*, at most 4354819198"),
        (["build", "{}"], {"TORCHWHEELS_TORCH_INDEX": "here"}, "TORCHWHEELS_TORCH_INDEX is 'here', but an address"),
        (["build", "{}"], {"TORCHWHEELS_TORCH_INDEX": "file:///{x}"}, "TORCHWHEELS_TORCH_INDEX is 'file:///{x}', but"),
        (["build", "{}"], {"TORCHWHEELS_CACHE": "/dev/null"}, "`TORCHWHEELS_CACHE` names /dev/null, .* is no folder"),
        (["build", "{}"], {"TORCHWHEELS_ARCHITECTURES": "x"}, "TORCHWHEELS_ARCHITECTURES names 'x'"),
        (["build", "{}", "--config={}"], {}, r"cannot be read \(Is a directory\): `--config` names"),
        (["audit", "--torch=2.13.0+cu130", "{}/x-1-py3-none-any.whl"], {}, "names 2.13.0.cu130, with a label, and"),
        (["build", "x[all]==1"], {}, r"x\[all\]==1 names extras, and a wheel is one for all of them: leave them out"),
        (["build", "x"], {"PIP_INDEX_URL": "htp://me@x"}, "has 'htp://x' as index-url, but an address such as"),
        (["audit", "--torch=new", "{}/x-1-py3-none-any.whl"], {}, "torch new is not known; the rel"),
        (["test", "{}", "--wheel={}/setup.py"], {}, "there is no wheel .*/setup.py: `--wheel` names the"),
        (["test", "{}", "--wheel={}/x-1-py3-none-any.whl", "--config={}/x.toml"], {}, "`tests.paths` names none"),
    ],
)  # fmt: skip
def test_what_is_given_is_checked_before_anything_is_installed(
    words: list[str],
    variables: dict[str, str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "setup.py").touch()
    (tmp_path / "x.toml").write_text("tests = { paths = ['none'] }")
    with zipfile.ZipFile(tmp_path / "x-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("x-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: x\nVersion: 1\n")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delattr(environments, "install")
    given = [word.format(tmp_path) for word in words]
    given += [] if "audit" in words else ["--target=3.11-cu130", "--backend=local"]
    with pytest.raises(SystemExit, match=message):
        cli.main(given)


def test_tools_of_builds_are_the_pinned_ones_where_a_project_takes_them(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Sequence[str]] = []
    monkeypatch.setattr(
        environments, "install", lambda _, *wanted, constraint: asked.append((*wanted, constraint))
    )
    place = SimpleNamespace(target=target, environment=None, home=tmp_path)
    steps._install(place, ["cmake>=3.20", "ninja", "cmake>=99", "wheel @ file:///x", "numpy>=2"])  # type: ignore[arg-type]
    tools = dict(x.split("==") for x in releases.load().tools)
    ((wanted, _, constraint),) = asked
    assert constraint == environments.torch_requirement(target)
    assert [*wanted] == [
        f"cmake=={tools['cmake']}",
        f"ninja=={tools['ninja']}",
        "cmake>=99",
        "wheel @ file:///x",
        "numpy>=2",
    ]


def test_strangers_code_does_not_run_unasked(
    classic: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{classic}/none.sock")
    spoil(classic, f"open({str(classic / 'ran')!r}, 'w')")
    with pytest.raises(SystemExit) as error:
        cli.main(["build", str(classic), "--target", "3.11-cpu"])
    assert f"no Docker engine answers (there is no socket {classic}/none.sock)" in str(
        error.value.code
    )
    assert "runs its own code with your rights outside of one" in str(error.value.code)
    assert not (classic / "ran").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sample", "settings"),
    [
        ("own_backend", {"answer": "4{jobs}"}),
        ("scikit_build_core", {"cmake.define.ANSWER": "4{jobs}"}),
        ("meson_python", {"setup-args": ["-Danswer=4{jobs}"]}),
    ],
)
def test_build_system(
    sample: str,
    settings: dict[str, str | list[str]],
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each asks for more than its pyproject.toml requires, and is told the answer."""
    monkeypatch.setenv("MAX_JOBS", "2")
    source = fetched(Path(__file__).parent / "samples" / sample)
    options = project.Project(config_settings=settings)
    built = build.build_wheel(options, target, source, tmp_path / "dist")
    assert ask(built, tmp_path / "target", "torch.ops.sample.answer()", "sample") == "42"


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        "",  # scikit-build-core takes site-packages for one of CMake's prefixes
        "find_package(Python REQUIRED)\nlist(APPEND CMAKE_PREFIX_PATH ${Python_SITELIB}/torch)\n",
    ],
)
def test_cmake_finds_torch_as_in_a_plain_environment(
    way: str, target: Target, tmp_path: Path
) -> None:
    source = shutil.copytree(Path(__file__).parent / "samples/scikit_build_core", tmp_path / "x")
    script = source / "CMakeLists.txt"
    begin, _, rest = script.read_text().partition("execute_process")
    script.write_text(begin + way + rest[rest.index("find_package") :])
    options = project.Project(config_settings={"cmake.define.ANSWER": "42"})
    built = build.build_wheel(options, target, fetched(source), tmp_path / "dist")
    assert ask(built, tmp_path / "target", "torch.ops.sample.answer()", "sample") == "42"


OPTIONS = """
config-settings = { "cmake.define.ANSWER" = "42", "cmake.define.WITH_CUDA" = "ON" }
"""


@pytest.mark.slow
def test_cmake_takes_cuda_from_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a toolkit on the machine; installs torch and CUDA, of 5 GB: minutes, the first time."""
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("TORCHWHEELS_ARCHITECTURES", "8.0 9.0+PTX")
    (tmp_path / "options.toml").write_text(OPTIONS)
    sample = Path(__file__).parent / "samples" / "scikit_build_core"
    options = [f"--config={tmp_path / 'options.toml'}", f"--dist={tmp_path / 'dist'}"]
    cli.main(["build", str(sample), "--target=3.11-cu130", "--backend=local", *options])
    (built,) = (tmp_path / "dist").glob("*+*.whl")
    found = read(built).libraries["sample/_C.so"]
    assert found.gpu_code.machine_code == {"8.0", "9.0"}
    assert found.gpu_code.ptx == {"9.0"}
    assert "libcudart.so.13" in found.needed


@pytest.mark.slow
def test_foreign_wheel(tmp_path: Path) -> None:
    """The example, as a user runs it; installs torch twice: minutes, the first time."""
    command = tmp_path / "bin" / "torchwheels"  # of these sources
    command.parent.mkdir()
    tool = Path(cli.__file__).parents[1]
    command.write_text(f'#!/bin/sh\nPYTHONPATH={tool} exec {sys.executable} -m torchwheels "$@"\n')
    command.chmod(0o755)
    path = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
    script = Path(__file__).parents[2] / "examples" / "foreign_wheel.sh"
    done = subprocess.run(
        ["sh", script],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"^step \d+: loss ([\d.]+)$", done.stdout, re.MULTILINE)
    assert float(losses[0]) == 2 and float(losses[-1]) < 0.01
    assert "ranks: [[3, 1, 5, 2, 4]]" in done.stdout
    (wheel,) = (tmp_path / "dist").glob("*+*.whl")
    assert wheel.name.startswith("torchsort-0.1.9+cpu.torch2.13-cp311-cp311-manylinux_2_")
    record = read(wheel).files["torchsort-0.1.9+cpu.torch2.13.dist-info/torchwheels.json"]
    assert json.loads(record)["source"] == (
        "sha256:a845c012e27d8cd14c7c072161ad39d87aa4168dd8a43a080b5534a37256f219"
    )
