"""Runs at the start of each Python of a build: hides a CUDA toolkit, pretends a GPU, keeps the target's architectures.

A copy of this file lies in the build's environment alone, with its settings beside it.
"""

import importlib.machinery
import json
import os
import re
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

# What says for which GPUs nvcc compiles.
OF_ARCHITECTURES = {
    "-arch", "--gpu-architecture", "-code", "--gpu-code", "-gencode", "--generate-code"
}  # fmt: skip

SETTINGS: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())


def pretend_gpu(cuda: Any) -> None:
    """A setup.py that asks for a GPU finds one of the newest architecture of the target."""
    major, minor = map(int, SETTINGS["pretend-gpu"].rstrip("abcdef").split("."))
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    name = f"a pretended GPU of compute capability {major}.{minor}"
    properties = SimpleNamespace(name=name, major=major, minor=minor, **OF_A_GPU)
    cuda.get_device_name = lambda device=None: name
    cuda.get_device_capability = lambda device=None: (major, minor)
    cuda.get_device_properties = lambda device=None: properties


def leave_out_architectures(extension: Any) -> None:
    """The flags of a project, too, may be for GPUs that are not the target's, or that its nvcc no longer knows."""
    flags = extension.extra_compile_args
    if not isinstance(flags, dict) or "nvcc" not in flags:
        return
    kept, words = [], iter(flags["nvcc"])
    named: set[str] = set()
    for word in words:
        option, joined, value = word.partition("=")
        if option in OF_ARCHITECTURES:
            named |= set(re.findall(r"sm_\w+", value if joined else next(words, "")))
        else:
            kept.append(word)
    # What is written for one GPU (sm_90a) does not compile for another.
    if kept == flags["nvcc"] or any(not name[-1].isdigit() for name in named):
        return
    flags["nvcc"] = kept
    asked = ", ".join(sorted(named)) or "GPUs of its own"
    built = SETTINGS["architectures"]
    print(f"torchwheels: its setup asks nvcc for {asked}; it is built for {built}")


def is_for_ninja(extension: Any) -> bool:
    """torch's ninja compiles C as C++, and takes relative folders for those of its own."""
    flags = extension.extra_compile_args
    words = [x for each in flags.values() for x in each] if isinstance(flags, dict) else flags
    relative = any(x.startswith("-I") and not x.startswith("-I/") for x in words)
    return not relative and not any(str(x).endswith(".c") for x in extension.sources)


def change_build(command: Any) -> None:
    """Each extension is built in torch's own way, but for its GPUs, and where that can be by ninja, on all cores."""
    make, build_one = command.__init__, command.build_extension

    def __init__(self: Any, dist: Any, **options: Any) -> None:
        extensions = dist.ext_modules or ()
        ninja = all(map(is_for_ninja, extensions)) or options.get("use_ninja", True)
        make(self, dist, **{**options, "use_ninja": ninja})

    def build_extension(self: Any, extension: Any) -> None:
        if self.use_ninja:  # which runs in another folder
            extension.include_dirs = [*map(os.path.abspath, extension.include_dirs)]
        if SETTINGS["gencode"]:
            leave_out_architectures(extension)
        build_one(self, extension)

    command.__init__, command.build_extension = __init__, build_extension


def keep_architectures(cpp_extension: Any) -> None:
    """A setup.py may set TORCH_CUDA_ARCH_LIST itself, and torch does not know all that nvcc does."""
    variable, ours = "TORCH_CUDA_ARCH_LIST", SETTINGS["architectures"]

    def _get_cuda_arch_flags(cflags: Any = None) -> list[str]:
        theirs, os.environ[variable] = os.environ.get(variable), ours
        if theirs != ours:
            print(f"torchwheels: its setup sets {variable} to {theirs}; it is built for {ours}")
        # As torch's own: the flags of the project may say it.
        own = (x for x in cflags or () if "arch" in x and "TORCH_EXTENSION_NAME" not in x)
        return [] if any(own) else SETTINGS["gencode"]

    cpp_extension._get_cuda_arch_flags = _get_cuda_arch_flags


def change_cpp_extension(cpp_extension: Any) -> None:
    """All that torch's own build code is changed in."""
    if SETTINGS["hide-toolkit"]:  # torch also looks into /usr/local/cuda, whatever variables say
        cpp_extension.CUDA_HOME = None
    if SETTINGS["gencode"]:
        keep_architectures(cpp_extension)
    change_build(cpp_extension.BuildExtension)


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
