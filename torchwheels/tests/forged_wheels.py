"""Wheels of small extensions that keep every rule, except for what a test spoils."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from torchwheels.audit.rules import Expectation, findings
from torchwheels.options import Project, releases
from torchwheels.wheel.archive import record_hash
from torchwheels.wheel.contents import BUILD_RECORD, read

CLASSIC = """
namespace at { struct Tensor { void zero_(); }; }
extern "C" {
void* PyModule_Create2(void*, int);
void* PyInit__C() { at::Tensor().zero_(); return PyModule_Create2(nullptr, 1013); }
}
"""
STABLE = """
extern "C" {
int torch_call_dispatcher();
int aoti_torch_get_sizes();
int call() { return torch_call_dispatcher() + aoti_torch_get_sizes(); }
}
"""
KERNEL = "__global__ void zero(float* to) { to[threadIdx.x] = 0; }"
ARCHITECTURES = ("8.0", "9.0+PTX")

BILL_OF_MATERIALS = "sboms/tinyops.cdx.json"
LIBRARY = "tinyops/_C.cpython-311-x86_64-linux-gnu.so"


class Forge:
    """A classic extension of the target 3.11-cpu, until it is made another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target = releases.load().target("3.11-cpu")
        self.version, self.tag, self.platform = "1.0+cpu.torch2.13", "cp311-cp311", "manylinux_2_5"
        self.processor = "x86_64"
        self.requires = ["torch==2.13.*"]
        self.files = {"tinyops/__init__.py": b"", LIBRARY: self.compile(CLASSIC)}
        self.replaced: dict[str, bytes | None] = {}
        """Files of the metadata that are to be others than they should be, or not there."""
        self.unrecorded: dict[str, bytes | None] = {}
        """Files that get into the wheel after RECORD was written, or that then go."""
        self.architectures: tuple[str, ...] = ()
        self.size_budget = 0.0
        self.allow_libraries: tuple[str, ...] = ()
        self.torches = ""
        self.summary = ""

    def make_cuda(self, gpu_code: Path) -> None:
        """Makes it an extension of 3.11-cu130, with that object linked in."""
        self.target, self.version = releases.load().target("3.11-cu130"), "1.0+cu130.torch2.13"
        self.architectures = ARCHITECTURES
        self.files[LIBRARY] = self.compile(CLASSIC, gpu_code, self.stub("libcudart.so.13"))

    def make_stable(self, code: str = STABLE) -> None:
        """Makes it one wheel for every Python, and for torch from 2.10 on."""
        self.version, self.tag, self.requires = "1.0", "py3-none", ["torch>=2.10"]
        self.files = {"tinyops/_C.so": self.compile(code)}

    def compile(self, code: str, *inputs: str | Path, flags: Sequence[str] = ()) -> bytes:
        """A shared library of that C++ code, linked as torch links one."""
        given = [(x.name, x.read_bytes()) if isinstance(x, Path) else x for x in inputs]
        return _compiled(code, (*given,), (*flags,))

    def stub(self, soname: str) -> Path:
        """A library of that name with nothing in it, to link against."""
        path = self.folder / soname
        path.write_bytes(self.compile("", flags=[f"-Wl,-soname,{soname}"]))
        return path

    @property
    def expectation(self) -> Expectation:
        """What the target and the project promise."""
        options = Project(size_budget=self.size_budget, allow_libraries=self.allow_libraries)
        return Expectation(self.target, options, self.architectures, self.torches)

    def findings(self) -> dict[str, list[str]]:
        """What is found wrong, by the rules that find something."""
        found = findings(read(self.wheel()), self.expectation)
        return {rule: problems for rule, problems in found.items() if problems}

    def wheel(self) -> Path:
        """Packs the wheel, with metadata that fit what is in it."""
        dist_info = f"tinyops-{self.version}.dist-info"
        metadata = {**self.fitting_metadata(), **self.replaced}
        packed = dict(self.files)
        packed |= {f"{dist_info}/{x}": data for x, data in metadata.items() if data is not None}
        lines = [f"{name},{record_hash(data)}," for name, data in packed.items()]
        record = "\n".join([*lines, f"{dist_info}/RECORD,,"])
        packed[f"{dist_info}/RECORD"] = record.encode()
        path = (
            self.folder / f"tinyops-{self.version}-{self.tag}-{self.platform}_{self.processor}.whl"
        )
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in {**packed, **self.unrecorded}.items():
                if data is not None:
                    archive.writestr(name, data)
        return path

    def fitting_metadata(self) -> dict[str, bytes]:
        """All in the .dist-info folder but RECORD."""
        lines = ["Metadata-Version: 2.4", "Name: tinyops", f"Version: {self.version}"]
        lines += [f"Requires-Dist: {each}" for each in self.requires]
        lines += [f"Summary: {self.summary}"] if self.summary else []
        record = {
            "name": "tinyops",
            "version": self.version,
            "source": "a hash",
            "cxx": "g++ 12.2.0",
            "nvcc": "13.0.88",
            "torchwheels": "0.1.0",
            "target": self.target.name,
            "python": self.target.python,
            "torch": self.target.torch,
            "cuda": self.target.cuda.version if self.target.cuda else None,
            "architectures": [*self.architectures],
        }
        libraries = [(x, data) for x, data in self.files.items() if data.startswith(b"\x7fELF")]
        bill = {
            "metadata": {"component": {"name": "tinyops", "version": self.version}},
            "components": [
                *(
                    {
                        "type": "file",
                        "name": name,
                        "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(data).hexdigest()}],
                    }
                    for name, data in libraries
                ),
                {"type": "library", "name": "torch", "version": self.target.torch},
            ],
        }
        tag = f"{self.tag}-{self.platform}_{self.processor}"
        return {
            "METADATA": "\n".join(lines).encode(),
            "WHEEL": f"Wheel-Version: 1.0\nTag: {tag}\n".encode(),
            BUILD_RECORD: json.dumps(record).encode(),
            BILL_OF_MATERIALS: json.dumps(bill).encode(),
        }


@functools.cache
def _compiled(
    code: str, inputs: tuple[str | tuple[str, bytes], ...], flags: tuple[str, ...]
) -> bytes:
    """What the compiler makes of it, once for all tests: of the inputs that are files, their names and contents."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = ["g++", "-shared", "-fPIC", "-s", "-x", "c++", "-", "-x", "none"]
        command += ["-Wl,--no-as-needed"]
        for each in inputs:
            if isinstance(each, str):
                command.append(each)
            else:
                (folder / each[0]).write_bytes(each[1])
                command.append(str(folder / each[0]))
        command += [*flags, "-o", str(folder / "library.so")]
        subprocess.run(command, input=code, text=True, check=True)
        return (folder / "library.so").read_bytes()


def made_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """`folder`, which the first of pytest's workers makes that asks for it."""
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            make(folder)
    return folder


class Nvcc:
    """The CUDA compiler; what it has compiled once it keeps in `folder`, for all workers."""

    def __init__(self, nvcc: str, folder: Path) -> None:
        self.nvcc, self.folder = nvcc, folder
        self.compile = functools.cache(self._compile)

    def _compile(self, *codes: str, source: str = KERNEL) -> Path:
        """An object with GPU code such as `sm_80`, or `compute_80` for PTX."""
        name = f"{'-'.join(codes)}-{len(source)}"

        def make(output: Path) -> None:
            file = self.folder / f"{name}.cu"
            file.write_text(source)
            command = [self.nvcc, "-c", str(file), "-o", str(output), "-Xcompiler=-fPIC"]
            command += [
                f"-gencode=arch=compute_{code.rpartition('_')[2]},code={code}" for code in codes
            ]
            subprocess.run(command, check=True)

        return made_once(self.folder / f"{name}.o", make)


def find_nvcc(folder: Path) -> Nvcc:
    """Skips where there is none."""
    folders = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin"), os.environ["PATH"]]
    found = shutil.which("nvcc", path=os.pathsep.join(map(str, folders)))
    if found is None:
        pytest.skip("there is no CUDA compiler (nvcc)")
    folder.mkdir(exist_ok=True)
    return Nvcc(found, folder)
