"""What the compilers of a build add: an old C library, no paths of this machine, nothing to strip."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile

from torchwheels import baseline, releases, toolchain

# Each of these has a newer version on a newer Linux, or is new itself.
CODE = """
#include <cmath>
#include <pthread.h>
#include <sstream>
static void* nothing(void* argument) { return argument; }
extern "C" int test(double x) {
  pthread_t thread;
  if (pthread_create(&thread, nullptr, nothing, nullptr) != 0) return -1;
  pthread_join(thread, nullptr);
  std::stringstream stream;
  stream << std::exp(x);
  return static_cast<int>(stream.str().size());
}
#ifdef LOOP
extern "C" void exponential(float* x) { for (int i = 0; i < 8; ++i) x[i] = std::exp(x[i]); }
#endif
#ifdef OPENMP
extern "C" int omp_get_max_threads();
extern "C" int threads() { return omp_get_max_threads(); }
#endif
extern "C" const char* file() { return __FILE__; }
"""


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the wrappers; the module's temporary folder is called `here` in what they build."""
    folder = tmp_path_factory.getbasetemp()
    prefixes = {folder: "here"}
    return toolchain.make_wrappers(folder / "compilers", toolchain.host_compiler(), prefixes)


def compile(commands: Path, folder: Path, *words: str, name: str = "g++") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "test.cpp").write_text(CODE)
    environment = {**os.environ, "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}"}
    command = [name, "-g", "-fPIC", *words, "-o", "test.so"]
    subprocess.run(command, cwd=folder, env=environment, check=True)
    return folder / "test.so"


def asked_versions(library: Path) -> set[str]:
    with library.open("rb") as file:
        section: Any = ELFFile(file).get_section_by_name(".gnu.version_r")
        return {version.name for _, versions in section.iter_versions() for version in versions}


@pytest.mark.parametrize("name", ["c++", "g++"])
@pytest.mark.parametrize("libraries", [[], ["-lm", "-lpthread", "-ldl"]])
def test_library_asks_for_an_old_system_and_runs_here(
    commands: Path, tmp_path: Path, name: str, libraries: list[str]
) -> None:
    source = str(tmp_path / "test.cpp")
    library = compile(commands, tmp_path, "-shared", source, *libraries, name=name)
    assert asked_versions(library) <= baseline.allowed_versions(releases.load().manylinux)
    assert ctypes.CDLL(str(library)).test(ctypes.c_double(0.0)) == len("1")


def test_two_folders_give_the_same_bytes_without_a_path_of_this_machine(
    commands: Path, tmp_path: Path
) -> None:
    found = []
    for folder in (tmp_path / "here", tmp_path / "a" / "here"):
        folder.mkdir(parents=True)
        toolchain.make_wrappers(
            folder / "compilers", toolchain.host_compiler(), {folder: "/source"}
        )
        source = str(folder / "test.cpp")
        found.append(compile(folder / "compilers" / "bin", folder, "-shared", source).read_bytes())
    assert found[0] == found[1]
    assert b"/source/test.cpp" in found[0]
    assert str(tmp_path).encode() not in found[0]


def test_library_is_stripped_and_has_no_build_id(commands: Path, tmp_path: Path) -> None:
    library = compile(commands, tmp_path, "-shared", "test.cpp")
    with library.open("rb") as file:
        names = {section.name for section in ELFFile(file).iter_sections()}
    assert ".dynsym" in names
    assert not {".symtab", ".debug_info", ".note.gnu.build-id"} & names


def test_objects_and_programs_are_as_ever(commands: Path, tmp_path: Path) -> None:
    compile(commands, tmp_path, "-c", "-shared", "test.cpp").rename(tmp_path / "test.o")
    (tmp_path / "main.cpp").write_text("#include <cstdio>\nint main() { std::puts(__FILE__); }\n")
    program = compile(commands, tmp_path, str(tmp_path / "main.cpp"), "test.o")
    said = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    assert said.startswith("here/")


def test_loops_of_fast_math_find_their_functions(commands: Path, tmp_path: Path) -> None:
    library = compile(commands, tmp_path, "-shared", "-O3", "-ffast-math", "-DLOOP", "test.cpp")
    numbers = (ctypes.c_float * 8)(*[0.0] * 8)
    ctypes.CDLL(str(library)).exponential(numbers)
    assert list(numbers) == [1.0] * 8


def test_openmp_finds_its_runtime(commands: Path, tmp_path: Path) -> None:
    library = compile(commands, tmp_path, "-shared", "-fopenmp", "-DOPENMP", "test.cpp")
    with library.open("rb") as file:
        dynamic: Any = ELFFile(file).get_section_by_name(".dynamic")
        assert "libgomp.so.1" in {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")}
    assert asked_versions(library) <= {
        *baseline.allowed_versions(releases.load().manylinux),
        "OMP_1.0",
    }


def test_versions_are_those_of_the_policy() -> None:
    allowed = baseline.allowed_versions("manylinux_2_28")
    assert {"GLIBC_2.2.5", "GLIBC_2.28", "GLIBCXX_3.4.24", "CXXABI_1.3.11"} <= allowed
    assert not {"GLIBC_2.29", "GLIBC_PRIVATE", "GLIBCXX_3.4.25"} & allowed
