"""Just-in-time builds through ``torch.utils.cpp_extension.load``, for those who edit kernels.

``EXTOPS_JIT=csrc python …`` compiles the kernels and bindings of that folder with the flags of the wheel, for the torch
and the GPU at hand, and recompiles what was edited.
"""

import contextlib
import fcntl
import os
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

from extops._requirements import LoadError


@dataclass(frozen=True)
class Build:
    """A library, and of what it is compiled."""

    name: str
    sources: list[Path]
    cxx_flags: list[str] | None = None
    cuda_flags: list[str] | None = None
    link_flags: list[str] | None = None
    cuda: bool = False

    @property
    def folder(self) -> Path:
        """Where it is compiled."""
        from torch.utils import cpp_extension

        default = Path(cpp_extension.get_default_build_root(), f"torch-{torch.__version__}")
        return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or default, self.name).resolve()

    @property
    def library(self) -> Path:
        """The file that comes of it."""
        return self.folder / f"{self.name}.so"

    def is_current(self) -> bool:
        """Whether the file is what would be compiled now."""
        if not self._key.is_file() or self._key.read_text() != repr(self):
            return False
        ask = ["ninja", "-C", str(self.folder), "-n"]
        return "no work to do" in subprocess.run(ask, capture_output=True, text=True).stdout

    def load(self, announcement: str = "") -> Path:
        """Compiles what has changed of the sources, loads the library and returns its file.

        Args:
            announcement: what to say on standard error before something is compiled; without one, it says nothing,
                not even that it waits for another process.
        """
        from torch.utils import cpp_extension

        _check_tools(cpp_extension, self.cuda)
        self.folder.mkdir(parents=True, exist_ok=True)
        with _alone_in(self.folder, announces=bool(announcement)):
            if announcement and not self.is_current():
                print(announcement, file=sys.stderr, flush=True)
            # Where an earlier call failed, torch would not try the same again, or give the file another name.
            cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(self.name, None)
            cpp_extension.load(
                self.name,
                [str(source) for source in self.sources],
                extra_cflags=self.cxx_flags,
                extra_cuda_cflags=self.cuda_flags,
                extra_ldflags=self.link_flags,
                build_directory=str(self.folder),
                with_cuda=self.cuda,
                is_python_module=False,
            )
            self._key.write_text(repr(self))
        return self.library

    @property
    def _key(self) -> Path:
        return self.folder / "extops.txt"


@contextlib.contextmanager
def _alone_in(folder: Path, announces: bool) -> Iterator[None]:
    """Waits for other processes that compile there. The system takes this lock from a process that ends, however it
    ends; torch's own is a file, which one that was killed leaves there, and for which the next would wait for ever.
    """
    with (folder / "extops.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if announces:
                waiting = f"extops: waiting for another process, which compiles in {folder}"
                print(waiting, file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        yield


def _check_tools(cpp_extension: ModuleType, cuda: bool) -> None:
    """An error where a program that compiles is missing."""
    need = "compiling just in time needs"
    if not cpp_extension.is_ninja_available():
        raise LoadError(f"{need} ninja, which is not on the PATH", "pip install ninja")
    compiler = shlex.split(cpp_extension.get_cxx_compiler())[0]
    if shutil.which(compiler) is None:
        raise LoadError(
            f"{need} a C++ compiler, and {compiler} is not on the PATH",
            "sudo apt-get install g++  # or your system's way to one; CXX can name another",
        )
    toolkit = cpp_extension.CUDA_HOME
    if cuda and (toolkit is None or not Path(toolkit, "bin", "nvcc").exists()):
        raise LoadError(
            f"{need} CUDA's compiler, and CUDA_HOME is {toolkit}, where there is no bin/nvcc",
            "export CUDA_HOME=/usr/local/cuda  # or where your CUDA toolkit is",
        )


def _architectures() -> tuple[str, ...]:
    """The compute capabilities of the GPUs here, whatever TORCH_CUDA_ARCH_LIST names for others."""
    found = {
        torch.cuda.get_device_capability(device) for device in range(torch.cuda.device_count())
    }
    return tuple(f"{major}.{minor}" for major, minor in sorted(found))


def architecture_flags() -> list[str]:
    """The flags of nvcc for the GPUs here; Hopper's tensor cores are in a target of their own."""
    flags = []
    for architecture in _architectures():
        is_hopper = architecture == "9.0"
        number = architecture.replace(".", "") + ("a" if is_hopper else "")
        flags += [f"-gencode=arch=compute_{number},code=sm_{number}"]
        flags += ["-DEXTOPS_SM90A"] if is_hopper else []
    return flags


def vector_flags() -> list[str]:
    """The flags of the C++ compiler for the vectors of the CPU here: for those of all takes three times as long."""
    width = {"AVX2": 32, "AVX512": 64}.get(torch.backends.cpu.get_cpu_capability())
    return [f"-DEXTOPS_VECTOR_BYTES={width}"] if width else []


def build_libraries(csrc: Path, binding: str) -> dict[str, Path]:
    """All libraries that the torch at hand can use in this binding, from the sources in ``csrc``."""
    recipe = csrc.parent / "extops_build" / "libraries.py"
    if not (csrc / "kernels").is_dir() or not recipe.is_file():
        raise ImportError(
            f"EXTOPS_JIT is {csrc}; set it to the folder csrc of a checkout of extops"
        )
    recipes = SimpleNamespace(**runpy.run_path(str(recipe), run_name="extops_libraries"))
    built: dict[str, Path] = {}
    for library in recipes.libraries(cuda=torch.cuda.is_available()):
        if library.torch_links and binding != "stable":
            continue
        files = [built[name] for name in library.links]
        links = [x for file in files for x in (str(file), f"-Wl,-rpath,{file.parent}")]
        built[library.name] = Build(
            library.name,
            library.sources(csrc.resolve()),
            [*recipes.cxx_flags(library, strict=False), *vector_flags()],
            recipes.nvcc_flags(_architectures(), strict=False) if library.cuda else None,
            [shlex.quote(x).replace("$", "$$") for x in links],  # for the shell, and for ninja
            cuda=library.cuda,
        ).load()
    return built
