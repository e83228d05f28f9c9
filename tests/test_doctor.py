"""`python -m extops_doctor` and the import error: each mismatch is provoked, and has to be named.

Each runs in a Python of its own, which sees a copy of the installed extops, spoiled where the test
says so, and a torch: the installed one, or one that can only say what it is. A driver with GPUs is
a library of the real one's name.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import extops
from operators import needs_programs

PACKAGE = Path(extops.__file__).parent
REINSTALL = "pip install --force-reinstall --no-deps extops"
UPDATE_DRIVER = "sudo ubuntu-drivers install && sudo reboot"
LOOK = "python -m extops_doctor"

pytestmark = pytest.mark.skipif(
    "EXTOPS_JIT" in os.environ, reason="EXTOPS_JIT is set: there is no wheel to spoil"
)

# A torch that does no more than to load libraries.
LOADS = "import ctypes\nclass ops: load_library = staticmethod(lambda path: ctypes.CDLL(str(path)))"

# What extops asks the library of kernels for GPUs when it is imported.
KERNELS = """
extern "C" const char* extops_sequence_kernel_name_cuda(long) { return nullptr; }
extern "C" void extops_set_sequence_memory_cuda(const void*) {}
"""
DRIVER = """
#include <cstdlib>
#include <cstring>
static int number(const char* name) { return std::atoi(std::getenv(name)); }
extern "C" {
int cuDriverGetVersion(int* version) { *version = number("DRIVER_CUDA"); return 0; }
int cuInit(unsigned) { return number("DRIVER_STATUS"); }
int cuGetErrorName(int, const char** name) { *name = "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"; return 0; }
int cuDeviceGetCount(int* count) { *count = 1; return 0; }
int cuDeviceGet(int* device, int index) { *device = index; return 0; }
int cuDeviceGetName(char* name, int size, int) { std::strncpy(name, "NVIDIA Test", size); return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = number(attribute == 75 ? "GPU_MAJOR" : attribute == 76 ? "GPU_MINOR" : "");
  return 0;
}
}
"""


@functools.cache
def compiled(code: str, *flags: str) -> bytes:
    """A shared library."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile a library with")
    with tempfile.NamedTemporaryFile(suffix=".so") as output:
        command = ["g++", "-shared", "-fPIC", "-o", output.name, "-x", "c++", "-", "-x", "none"]
        subprocess.run([*command, *flags], input=code, text=True, check=True)
        return Path(output.name).read_bytes()


class Machine:
    """What a Python process sees that has nothing installed but what a test puts there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.package = folder / "site" / "extops"
        for package in (PACKAGE, PACKAGE.with_name("extops_doctor")):
            copy = self.package.with_name(package.name)
            shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
        for info in PACKAGE.parent.glob("extops-*.dist-info"):
            ignored = shutil.ignore_patterns("direct_url.json")  # as if an index had it
            shutil.copytree(info, self.package.with_name(info.name), ignore=ignored)
        self.path = [self.package.parent]
        hidden = ("PYTHONPATH", "CUDA_VISIBLE_DEVICES")
        self.environ = {name: x for name, x in os.environ.items() if name not in hidden}

    def built(self, **changes: Any) -> None:
        """Has extops say that it was built in another way."""
        file = self.package / "_build_info.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    def pretend_torch(
        self, version: str = "2.13.0", cuda: str | None = None, code: str = ""
    ) -> None:
        """Installs a torch that can say what it is, and no more."""
        package = self.folder / "other" / "torch"
        package.mkdir(parents=True)
        (package / "version.py").write_text(f"__version__ = {version!r}\ncuda = {cuda!r}\n")
        names = "from torch import version\nfrom torch.version import __version__\n"
        (package / "__init__.py").write_text(f"{code}\n{names}")
        self.path.append(package.parent)

    def install_torch(self, cuda: str | None = torch.version.cuda) -> None:
        """Installs the torch of this run with all that it needs; it may claim another CUDA."""
        other = self.folder / "other"
        (other / "torch").mkdir(parents=True)
        installed = Path(torch.__file__).parent
        # Its environment may stand upon another, which has torch: a link to that may be here.
        folders = (installed.resolve().parent, PACKAGE.parent)
        entries = {entry.name: entry for folder in folders for entry in folder.iterdir()}
        for entry in entries.values():
            if entry.name != installed.name and not entry.name.startswith("extops"):
                (other / entry.name).symlink_to(entry)
        for entry in installed.iterdir():
            if entry.name != "version.py":
                (other / "torch" / entry.name).symlink_to(entry)
        version = (installed / "version.py").read_text()
        (other / "torch" / "version.py").write_text(f"{version}\ncuda = {cuda!r}\n")
        self.path.append(other)
        if cuda and torch.version.cuda is None:  # then libraries that call CUDA would not load
            for name in ("libextops_cuda.so", "libextops_stable_cuda.so"):
                (self.package / name).write_bytes(compiled(KERNELS))

    def driver(self, cuda: int, gpu: tuple[int, int] = (9, 0), status: int = 0) -> None:
        """Installs a driver that knows that CUDA, and a GPU of that compute capability."""
        folder = self.folder / "driver"
        folder.mkdir()
        (folder / "libcuda.so.1").write_bytes(compiled(DRIVER))
        self.environ |= {"LD_LIBRARY_PATH": str(folder)}
        self.environ |= {"DRIVER_CUDA": str(cuda), "DRIVER_STATUS": str(status)}
        self.environ |= {"GPU_MAJOR": str(gpu[0]), "GPU_MINOR": str(gpu[1])}

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs Python, without the packages that are installed for it."""
        environ = {**self.environ, "PYTHONPATH": os.pathsep.join(map(str, self.path))}
        command = [sys.executable, "-S", *arguments]
        return subprocess.run(command, cwd=self.folder, env=environ, capture_output=True, text=True)

    def import_error(self) -> str:
        """The last line of the traceback of `import extops`."""
        done = self.python("-c", "import extops")
        assert done.returncode == 1, done.stdout
        return done.stderr.splitlines()[-1].removeprefix("extops._requirements.LoadError: ")

    def doctor(self) -> Findings:
        """What the doctor finds."""
        done = self.python("-m", "extops_doctor", "--json")
        # Some torches say so when their tools for compiling are imported, where there is nvcc and no GPU.
        remark = r".*No CUDA runtime is found, using CUDA_HOME='.*'\n"
        assert re.fullmatch(rf"({remark})?", done.stderr)
        findings = Findings(json.loads(done.stdout))
        assert done.returncode == (1 if findings.problems else 0)
        return findings


class Findings:
    """What the doctor reports."""

    def __init__(self, report: dict[str, Any]) -> None:
        self.problems = [(x["cause"], x["command"]) for x in report["problems"]]
        self.works_on: list[str] = report["works_on"]
        self.notes: list[str] = report["notes"]
        self.rows = {
            fact["name"]: (fact["built_for"], fact["found"], fact["verdict"])
            for fact in report["facts"]
        }

    @property
    def problem(self) -> tuple[str, str]:
        """The one problem: its cause and its command."""
        (problem,) = self.problems
        return problem


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_machine_that_fits(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "extops_doctor"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    devices = "cpu and cuda" if torch.cuda.is_available() else "cpu"
    assert f"\nextops fits: it works on {devices}\n" in done.stdout
    assert done.stdout.startswith(f"extops {extops.__version__}")
    python = re.escape(".".join(map(str, sys.version_info[:3])))
    assert re.search(rf"^Python +>=3\.10 +{python} +fits$", done.stdout, re.MULTILINE)
    version = re.escape(torch.__version__)
    assert re.search(rf"^torch +2\.4 or newer +{version} +fits$", done.stdout, re.MULTILINE)
    assert re.search(r"^glibc +2\.\d+ or newer +2\.\d+ +fits$", done.stdout, re.MULTILINE)


def test_a_reader_that_has_seen_enough(machine: Machine) -> None:
    """As `head -1` is: the doctor then ends without a traceback."""
    command = [sys.executable, "-S", "-u", "-m", "extops_doctor"]
    environ = {**machine.environ, "PYTHONPATH": str(machine.package.parent)}
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, env=environ, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert done.returncode == -signal.SIGPIPE and done.stderr == b""


def test_usage(machine: Machine) -> None:
    done = machine.python("-m", "extops_doctor", "--jsn")
    assert done.returncode == 2
    assert "python -m extops_doctor: error: unrecognized arguments: --jsn" in done.stderr


@pytest.mark.slow
def test_the_command_of_before(machine: Machine) -> None:
    """It says the way, whether extops can be imported or not."""
    done = machine.python("-m", "extops", "doctor")
    assert done.returncode == 1
    assert done.stderr.endswith(f" (for more: {LOOK})\n")  # there is no torch
    machine.install_torch()
    done = machine.python("-m", "extops", "doctor")
    assert done.returncode == 1
    assert done.stderr.endswith(f"extops: run {LOOK}\n")


@pytest.mark.parametrize(
    ("url", "source"),
    [
        ("file:///home/me/my%20dist/extops-1%2Bcpu.whl", "'/home/me/my dist/extops-1+cpu.whl'"),
        ("https://localhost/extops-1+cu130.whl", "https://localhost/extops-1+cu130.whl"),
    ],
)
def test_extops_is_installed_again_from_where_it_came(
    machine: Machine, url: str, source: str
) -> None:
    """No index need have it."""
    (info,) = machine.package.parent.glob("extops-*.dist-info")
    (info / "direct_url.json").write_text(json.dumps({"url": url, "archive_info": {}}))
    machine.pretend_torch()
    for library in machine.package.glob("*.so"):
        library.unlink()
    command = f"pip install --force-reinstall --no-deps {source}"
    assert machine.import_error().endswith(f"; run: {command} (for more: {LOOK})")


def test_no_extops(machine: Machine) -> None:
    shutil.rmtree(machine.package)
    done = machine.python("-m", "extops_doctor")
    assert done.returncode == 1
    expected = (
        f"{sys.executable} has no extops; run: pip install --no-deps WHEEL, a file of extops\n"
    )
    assert done.stderr == expected


# -- torch ---------------------------------------------------------------------------------------


def test_no_torch(machine: Machine) -> None:
    cause = f"extops {extops.__version__} needs torch 2.4 or newer, and {sys.executable} has none"
    command = 'pip install "torch>=2.4"'
    assert machine.doctor().problem == (cause, command)
    assert machine.import_error() == f"{cause}; run: {command} (for more: {LOOK})"


def test_torch_too_old(machine: Machine) -> None:
    machine.pretend_torch("2.1.0+cu118", "11.8")
    cause = f"extops {extops.__version__} needs torch 2.4 or newer, but found torch 2.1.0+cu118"
    command = 'pip install "torch>=2.4"'
    assert machine.import_error() == f"{cause}; run: {command} (for more: {LOOK})"
    done = machine.python("-mextops_doctor")
    assert done.returncode == 1
    assert f"\nproblem: {cause}\n    run: {command}\n" in done.stdout
    row = r"^torch +2\.4 or newer +2\.1\.0\+cu118 +DOES NOT FIT$"
    assert re.search(row, done.stdout, re.MULTILINE)


def test_torch_broken(machine: Machine) -> None:
    machine.pretend_torch(code="import ctypes; ctypes.CDLL('libcudart.so.10.0')")
    cause, command = machine.doctor().problem
    assert cause == (
        f"extops {extops.__version__} needs torch, and `import torch` fails here: libcudart.so.10.0: "
        "cannot open shared object file: No such file or directory"
    )
    assert command == "pip install --force-reinstall torch"
    assert machine.import_error() == f"{cause}; run: {command} (for more: {LOOK})"


# -- the libraries of extops ---------------------------------------------------------------------


def test_libraries_missing(machine: Machine) -> None:
    for library in machine.package.glob("*.so"):
        library.unlink()
    machine.pretend_torch()
    cause, command = machine.doctor().problem
    assert "lacks its libraries (libextops_cpu, libextops_stable_cpu): it is a source tree" in cause
    assert command == REINSTALL
    assert machine.import_error() == f"{cause}; run: {command} (for more: {LOOK})"


def test_undefined_symbol(machine: Machine) -> None:
    """Of a torch that is no more; the installed one puts words of its own before the linker's."""
    code = "namespace c10 { int gone(); } int f() { return c10::gone(); }"
    (machine.package / "libextops_cpu.so").write_bytes(compiled(code))
    machine.install_torch()
    done = machine.python("-c", "import extops")
    assert "libextops_cpu.so: undefined symbol: _ZN3c104goneEv\n" in done.stderr
    assert done.stderr.splitlines()[-1] == (
        f"extops._requirements.LoadError: extops {extops.__version__} cannot load its libraries "
        f"under torch {torch.__version__}: libextops_cpu.so needs the symbol _ZN3c104goneEv, which "
        f"this torch does not have; run: {REINSTALL} (for more: {LOOK})"
    )


def cannot_load(machine: Machine, library: bytes, reason: str) -> None:
    """Puts the library in the place of the one that the stable binding loads first."""
    (machine.package / "libextops_stable_cpu.so").write_bytes(library)
    machine.pretend_torch(code=LOADS)
    cause = f"extops {extops.__version__} cannot load its libraries under torch 2.13.0: "
    assert machine.doctor().problem == (cause + reason, REINSTALL)
    assert machine.import_error() == f"{cause}{reason}; run: {REINSTALL} (for more: {LOOK})"


def test_missing_library(machine: Machine) -> None:
    cudart = machine.folder / "libcudart.so.11.0"
    cudart.write_bytes(compiled("", "-Wl,-soname,libcudart.so.11.0"))
    library = compiled("", "-Wl,--no-as-needed", str(cudart))
    cudart.unlink()
    cannot_load(machine, library, "they need the library libcudart.so.11.0, which is not here")


def test_newer_glibc(machine: Machine) -> None:
    """The library was linked with a newer glibc than any."""
    versions = machine.folder / "versions"
    versions.write_text("GLIBC_2.99 { new_function; };")
    libc = machine.folder / "libc.so.6"
    flags = ("-nostdlib", "-Wl,-soname,libc.so.6", f"-Wl,--version-script={versions}")
    libc.write_bytes(compiled('extern "C" int new_function() { return 0; }', *flags))
    code = 'extern "C" int new_function(); int f() { return new_function(); }'
    library = compiled(code, "-nostdlib", str(libc))
    found = os.confstr("CS_GNU_LIBC_VERSION")
    reason = f"libextops_stable_cpu.so needs GLIBC 2.99, and this system has {found}"
    cannot_load(machine, library, reason)


def test_library_that_crashes(machine: Machine) -> None:
    """What was found until then is shown all the same."""
    code = "#include <cstdlib>\n__attribute__((constructor)) static void crash() { std::abort(); }"
    (machine.package / "libextops_stable_cpu.so").write_bytes(compiled(code))
    machine.pretend_torch(code=LOADS)
    done = machine.python("-m", "extops_doctor")
    assert done.returncode == -signal.SIGABRT
    assert re.search(r"^torch +2\.4 or newer +2\.13\.0 +fits$", done.stdout, re.MULTILINE)


def test_glibc_older_than_the_wheel_promises(machine: Machine) -> None:
    (wheel,) = machine.package.parent.glob("extops-*/WHEEL")
    wheel.write_text("Wheel-Version: 1.0\nTag: py3-none-manylinux_2_99_x86_64\n")
    machine.pretend_torch()
    findings = machine.doctor()
    found = str(os.confstr("CS_GNU_LIBC_VERSION")).split()[1]
    assert findings.rows["glibc"] == ("2.99 or newer", found, "DOES NOT FIT")
    cause = f"this extops was built for glibc 2.99 or newer, and this system has {found}"
    assert findings.problem == (cause, REINSTALL)


# -- CUDA, driver and GPU ------------------------------------------------------------------------

CUDA = {"variant": "cu130", "cuda": "13.0.88", "architectures": ["7.5", "8.0", "9.0", "12.0+PTX"]}
RELEASE = {"variant": "release", "cuda": "12.4.131", "architectures": ["5.0", "8.0", "9.0+PTX"]}
CPU: dict[str, Any] = {"variant": "cpu", "cuda": None, "architectures": []}


def test_cpu_wheel_on_a_gpu(machine: Machine) -> None:
    machine.built(**CPU)
    machine.pretend_torch(cuda="13.0")
    machine.driver(13000)
    findings = machine.doctor()
    assert findings.rows["CUDA"] == ("none", "13.0 (torch)", "DOES NOT FIT")
    cause = "this extops was built without CUDA: it cannot use the NVIDIA Test"
    assert findings.problem == (cause, REINSTALL)


def test_cuda_wheel_with_a_torch_for_cpus(machine: Machine) -> None:
    machine.built(**CUDA)
    machine.install_torch(cuda=None)
    machine.driver(13000)
    findings = machine.doctor()
    assert findings.problems == [] and findings.works_on == ["cpu"]
    assert findings.rows["CUDA"] == ("13.0.88", "none (torch)", "CPU only")
    assert findings.rows["GPU"] == ("-", "9.0 (NVIDIA Test)", "not used")
    (note,) = findings.notes
    assert note == (
        "torch was built without CUDA: to use the NVIDIA Test, install a torch that was built with it"
    )


def test_no_driver(machine: Machine) -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("there is an NVIDIA driver on this machine")
    machine.built(**CUDA)
    machine.install_torch(cuda=torch.version.cuda or "13.0")
    findings = machine.doctor()
    assert findings.problems == [] and findings.works_on == ["cpu"]
    assert findings.rows["driver"] == ("CUDA 13.x", "none", "CPU only")
    (note,) = findings.notes
    assert note.startswith("there is no NVIDIA driver (libcuda.so.1): a GPU needs one")


def test_driver_does_not_start(machine: Machine) -> None:
    machine.built(**CUDA)
    machine.pretend_torch(cuda="13.0")
    machine.driver(13000, status=803)
    cause, command = machine.doctor().problem
    assert cause == "the NVIDIA driver does not start: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)"
    assert command.startswith("sudo reboot")


@pytest.mark.parametrize(
    ("build", "torch_cuda", "by", "command"),
    [
        (CUDA, "12.6", "this extops", REINSTALL),
        (CUDA, "13.0", "torch", UPDATE_DRIVER),
        (RELEASE, "13.2", "torch", UPDATE_DRIVER),
    ],
    ids=["extops", "both", "torch"],
)
def test_driver_too_old(
    machine: Machine, build: dict[str, Any], torch_cuda: str, by: str, command: str
) -> None:
    machine.built(**build)
    machine.pretend_torch(cuda=torch_cuda)
    machine.driver(12020)
    findings = machine.doctor()
    assert findings.rows["driver"] == ("CUDA 13.x", "CUDA 12.2", "DOES NOT FIT")
    cause = f"{by} was built for CUDA 13, and the NVIDIA driver knows CUDA up to 12.2"
    assert findings.problem[0] == cause
    assert findings.problem[1].startswith(command)


@pytest.mark.parametrize(
    ("build", "command"),
    [
        (CUDA, REINSTALL),
        (RELEASE, "TORCHWHEELS_ARCHITECTURES=3.7 nox -s build-3."),
    ],
    ids=["cu130", "release"],
)
def test_gpu_too_old(machine: Machine, build: dict[str, Any], command: str) -> None:
    machine.built(**build)
    machine.pretend_torch(cuda="12.4")
    machine.driver(13000, gpu=(3, 7))
    findings = machine.doctor()
    architectures = " ".join(build["architectures"])
    assert findings.rows["GPU"] == (architectures, "3.7 (NVIDIA Test)", "DOES NOT FIT")
    cause = f"this extops was compiled for {architectures}, which leaves out the NVIDIA Test"
    assert findings.problem[0] == cause
    assert findings.problem[1].startswith(command)


@pytest.mark.parametrize(
    ("gpu", "verdict"),
    [
        ((9, 0), "fits"),
        ((8, 9), "fits"),
        ((7, 0), "DOES NOT FIT"),
        ((10, 3), "DOES NOT FIT"),
        ((12, 1), "fits"),
        ((13, 0), "fits: compiles for it at first use"),
    ],
    ids=str,
)
def test_what_the_architectures_reach(machine: Machine, gpu: tuple[int, int], verdict: str) -> None:
    """Machine code serves GPUs of its major version, PTX all that are newer."""
    machine.built(**CUDA)
    machine.pretend_torch(cuda="13.0")
    machine.driver(13000, gpu)
    assert machine.doctor().rows["GPU"][2] == verdict


def test_driver_cannot_compile_for_the_gpu(machine: Machine) -> None:
    machine.built(**{**CUDA, "cuda": "13.2.51"})
    machine.pretend_torch(cuda="13.0")
    machine.driver(13010, gpu=(13, 0))
    assert machine.doctor().problem == (
        "for the NVIDIA Test the driver would have to compile what CUDA 13.2.51 made, and it knows "
        "CUDA up to 13.1",
        REINSTALL,
    )


@pytest.mark.slow
def test_gpu_hidden(machine: Machine) -> None:
    machine.built(**CUDA)
    machine.install_torch(cuda=torch.version.cuda or "13.0")
    machine.driver(13000, status=100)
    machine.environ["CUDA_VISIBLE_DEVICES"] = ""
    findings = machine.doctor()
    assert findings.problems == [] and findings.works_on == ["cpu"]
    assert findings.rows["GPU"][1:] == ("none", "CPU only")
    assert findings.notes == ["CUDA_VISIBLE_DEVICES is '', which hides the GPUs that there may be"]


# -- which extops is used ------------------------------------------------------------------------


def test_a_copy_hides_another(machine: Machine) -> None:
    """The folder package/ of a checkout, say, which has no libraries, before the installed wheel."""
    copy = machine.folder / "extops"
    shutil.copytree(machine.package, copy, ignore=shutil.ignore_patterns("*.so"))
    machine.pretend_torch()
    hidden, missing = machine.doctor().problems
    assert hidden == (f"this extops, in {copy}, hides that in {machine.package}", "cd ~")
    assert "lacks its libraries" in missing[0]


def test_a_copy_on_the_path_hides_another(machine: Machine) -> None:
    first = machine.folder / "first"
    shutil.copytree(machine.package, first / "extops", ignore=shutil.ignore_patterns("*.so"))
    machine.pretend_torch()
    machine.path.insert(0, first)
    hidden, _ = machine.doctor().problems
    assert hidden[1] == "unset PYTHONPATH"


@pytest.mark.slow
def test_copies_are_noted_where_all_is_well(machine: Machine) -> None:
    machine.install_torch()
    other = machine.folder / "other" / "extops"
    shutil.copytree(machine.package, other)
    findings = machine.doctor()
    assert findings.problems == []
    assert f"this extops, in {machine.package}, hides that in {other}" in findings.notes


def test_just_in_time(machine: Machine) -> None:
    machine.pretend_torch()
    machine.environ["EXTOPS_JIT"] = "/nowhere"
    switch, failure = machine.doctor().problems
    assert switch[0].startswith("EXTOPS_JIT is /nowhere: libraries are compiled from there")
    assert switch[1] == "unset EXTOPS_JIT"
    assert "set it to the folder csrc of a checkout" in failure[0]


RECIPE = """
from types import SimpleNamespace

def libraries(cuda):
    return [SimpleNamespace(name="libextops_cpu", torch_links=(), links=(), cuda=False, sources=lambda csrc: [])]

def cxx_flags(library, strict):
    return []
"""


@pytest.mark.slow
def test_just_in_time_without_its_tools(machine: Machine) -> None:
    """First without ninja, then with it, but no C++ compiler."""
    needs_programs("ninja")
    machine.install_torch()
    sources = machine.folder / "csrc"
    (sources / "kernels").mkdir(parents=True)
    (machine.folder / "extops_build").mkdir()
    (machine.folder / "extops_build" / "libraries.py").write_text(RECIPE)
    machine.environ |= {"EXTOPS_JIT": str(sources), "PATH": str(machine.folder)}
    machine.environ.pop("CXX", None)
    cause = "compiling just in time needs ninja, which is not on the PATH"
    assert machine.import_error() == f"{cause}; run: pip install ninja (for more: {LOOK})"
    (machine.folder / "ninja").symlink_to(shutil.which("ninja"))
    _, (cause, command) = machine.doctor().problems
    assert cause == "compiling just in time needs a C++ compiler, and c++ is not on the PATH"
    assert command.startswith("sudo apt-get install g++  # ")


# -- errors of the kernels -----------------------------------------------------------------------


def test_kernel_without_a_driver(machine: Machine) -> None:
    """The driver is missing, or older than the CUDA of the wheel: for the runtime it is the same."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, and a driver for it")
    if not (PACKAGE / "libextops_cuda.so").exists():
        pytest.skip("this wheel has no CUDA kernels")
    library = ctypes.CDLL(str(PACKAGE / "libextops_cuda.so"))
    library.extops_elementwise_cuda.restype = ctypes.POINTER(ctypes.c_void_p * 2)
    run = library.extops_elementwise_cuda(ctypes.c_size_t(0)).contents[1]
    types = ctypes.c_char_p, ctypes.c_int32, ctypes.c_int64, *[ctypes.c_void_p] * 4
    geometry, data = (ctypes.c_int64 * 3)(1, 1, 1), (ctypes.c_void_p * 2)(16, 16)
    error = ctypes.CFUNCTYPE(*types)(run)(6, 1, geometry, data, None, None)
    assert error.decode() == (
        "CUDA driver version is insufficient for CUDA runtime version; run: python -m extops_doctor"
    )


@pytest.mark.gpu
def test_kernel_for_other_gpus(machine: Machine) -> None:
    """All GPU code in a copy of the library is relabelled as that of a GPU which does not exist."""
    library = machine.package / "libextops_cuda.so"
    library.write_bytes(relabelled(library.read_bytes()))
    machine.install_torch()
    code = "import torch, extops; extops.round_ste(torch.ones(3, device='cuda'))"
    done = machine.python("-c", code)
    major, minor = torch.cuda.get_device_capability()
    error = rf"round_ste: this GPU is of compute capability {major}\.{minor}, and this extops was "
    error += r"compiled for( \d+\.\d)+; run: python -m extops_doctor$"
    assert re.search(error, done.stderr, re.MULTILINE), done.stderr
    cause, _ = machine.doctor().problem
    assert re.search(error, cause)


def relabelled(data: bytes) -> bytes:
    """Renames the architecture in the header of each piece of GPU code; they begin with a magic number."""
    found = bytearray(data)
    for place in gpu_code(data):
        struct.pack_into("<I", found, place + 28, 255)
    return bytes(found)


def gpu_code(data: bytes) -> Iterator[int]:
    """Where the headers are: they follow one another in regions that begin with a magic number."""
    region = data.find(b"\x50\xed\x55\xba\x01\x00\x10\x00")
    while region >= 0:
        (size,) = struct.unpack_from("<Q", data, region + 8)
        entry = region + 16
        while entry < region + 16 + size:
            yield entry
            header, code = struct.unpack_from("<IQ", data, entry + 4)
            entry += header + code
        region = data.find(b"\x50\xed\x55\xba\x01\x00\x10\x00", region + 16 + size)
