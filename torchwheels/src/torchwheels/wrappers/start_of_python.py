"""Runs at the start of each Python of a build: hides a CUDA toolkit, pretends a GPU, keeps the target's architectures.

A copy of this file lies in the build's environment alone, with its settings beside it.
"""

from __future__ import annotations

import copy
import importlib.machinery
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# What else a setup.py may ask of one; the numbers are those of an H100.
OF_A_GPU = {
    "total_memory": 80 * 2**30,
    "multi_processor_count": 132,
    "max_threads_per_multi_processor": 2048,
    "regs_per_multiprocessor": 65536,
    "shared_memory_per_multiprocessor": 228 * 2**10,
    "L2_cache_size": 50 * 2**20,
    "warp_size": 32,
    "is_integrated": False,
    "is_multi_gpu_board": False,
}

SETTINGS: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())


def hide_toolkit(cpp_extension: Any) -> None:
    """torch also looks into /usr/local/cuda, which no variable prevents."""
    cpp_extension.CUDA_HOME = None


def pretend_gpu(cuda: Any) -> None:
    """A setup.py that asks for a GPU finds one of the newest architecture of the target."""
    major, minor = map(int, SETTINGS["pretend-gpu"].rstrip("abcdef").split("."))
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.get_device_name = lambda device=None: (
        f"a pretended GPU of compute capability {major}.{minor}"
    )
    cuda.get_device_capability = lambda device=None: (major, minor)
    cuda.get_device_properties = lambda device=None: SimpleNamespace(
        name=cuda.get_device_name(), major=major, minor=minor, **OF_A_GPU
    )


def compile_in_parallel(cpp_extension: Any) -> None:
    """Where a project turns ninja off, torch compiles one file after another, and one extension."""
    command: Any = cpp_extension.BuildExtension
    begin, build_all = command.__init__, command.build_extensions
    build_one = command.build_extension

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **{**kwargs, "use_ninja": True})
        self.one_after_another = self.use_ninja and not kwargs.get("use_ninja", True)

    def build_extensions(self: Any) -> None:
        if self.one_after_another and len(self.extensions) > 1:
            jobs = int(os.environ["MAX_JOBS"])
            self.parallel = min(jobs, len(self.extensions))
            os.environ["MAX_JOBS"] = str(jobs // self.parallel)  # of each ninja
        build_all(self)

    def build_extension(self: Any, extension: Any) -> None:
        if self.one_after_another:
            # Two may compile the same file, and each ninja has a file of its own there.
            self = copy.copy(self)
            self.build_temp = str(Path(self.build_temp, extension.name))
        build_one(self, extension)

    command.__init__, command.build_extensions = __init__, build_extensions
    command.build_extension = build_extension


def keep_architectures(cpp_extension: Any) -> None:
    """A setup.py may set TORCH_CUDA_ARCH_LIST itself, and torch does not know all that nvcc does."""
    variable, ours = "TORCH_CUDA_ARCH_LIST", SETTINGS["architectures"]
    flags_of_torch = cpp_extension._get_cuda_arch_flags

    def _get_cuda_arch_flags(cflags: Any = None) -> list[str]:
        theirs, os.environ[variable] = os.environ.get(variable), "9.0"  # any that torch knows
        flags = flags_of_torch(cflags)  # none where the project's own flags say it
        os.environ[variable] = ours
        if theirs != ours:
            print(f"torchwheels: its setup sets {variable} to {theirs}; it is built for {ours}")
        return SETTINGS["gencode"] if flags else []

    cpp_extension._get_cuda_arch_flags = _get_cuda_arch_flags


def change_cpp_extension(cpp_extension: Any) -> None:
    """All that torch's own build code is changed in."""
    if SETTINGS["hide-toolkit"]:
        hide_toolkit(cpp_extension)
    if SETTINGS["gencode"]:
        keep_architectures(cpp_extension)
    compile_in_parallel(cpp_extension)


CHANGES = {
    "torch.utils.cpp_extension": change_cpp_extension,
    **({"torch.cuda": pretend_gpu} if SETTINGS["pretend-gpu"] else {}),
}


class Finder:
    """Changes modules of torch once they have been imported."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        """The usual spec, whose loader calls the change at the end."""
        change = CHANGES.get(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if change else None
        if spec is None or spec.loader is None or change is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder)
