"""What the linker is told of the system: libraries built on it ask for no newer one."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import pytest

from service import baseline

elffile = pytest.importorskip("elftools.elf.elffile", reason="pyelftools is not installed")

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
"""


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("system")
    baseline.write_sources(folder, "g++")
    for name in baseline.LIBRARIES:
        command = ["g++", "-shared", "-nostdlib", "-o", str(folder / name), f"-Wl,-soname,{name}"]
        subprocess.run([*command, *baseline.compiler_flags(folder / name)], check=True)
    return folder


def link(folder: Path, code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = ["g++", "-shared", "-fPIC", "-O2", "-nodefaultlibs", "-Wl,--no-undefined"]
    command += ["-o", str(folder / "test.so"), "-x", "c++", "-", "-x", "none", *flags]
    return subprocess.run(command, input=code, text=True, capture_output=True)


def asked_versions(library: Path) -> set[str]:
    with library.open("rb") as file:
        section: Any = elffile.ELFFile(file).get_section_by_name(".gnu.version_r")
        return {version.name for _, versions in section.iter_versions() for version in versions}


def test_library_asks_for_an_old_system_and_runs_here(stand_ins: Path, tmp_path: Path) -> None:
    names = [name for name in baseline.LIBRARIES if name != baseline.LIBSTDCXX]
    libraries = [str(stand_ins / name) for name in names]
    newer_parts = [str(stand_ins / baseline.LIBSTDCXX), "-Wl,--exclude-libs,ALL", "-l:libstdc++.a"]
    done = link(tmp_path, CODE, *newer_parts, *libraries, "-l:libc_nonshared.a")
    assert done.returncode == 0, done.stderr
    assert asked_versions(tmp_path / "test.so") <= baseline.allowed_versions()
    assert ctypes.CDLL(str(tmp_path / "test.so")).test(ctypes.c_double(0.0)) == len("1")


def test_what_is_newer_does_not_exist(stand_ins: Path, tmp_path: Path) -> None:
    code = 'extern "C" char __libc_single_threaded; char test() { return __libc_single_threaded; }'
    done = link(tmp_path, code, str(stand_ins / baseline.LIBC))
    assert "undefined reference to `__libc_single_threaded'" in done.stderr


def test_versions_are_those_of_the_policy() -> None:
    allowed = baseline.allowed_versions()
    assert {"GLIBC_2.2.5", "GLIBC_2.28", "GLIBCXX_3.4.24", "CXXABI_1.3.11"} <= allowed
    assert not {"GLIBC_2.29", "GLIBC_PRIVATE", "GLIBCXX_3.4.25"} & allowed
