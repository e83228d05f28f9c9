"""Just-in-time builds through ``torch.utils.cpp_extension.load``, for those who edit kernels.

``EXTOPS_JIT=csrc python …`` compiles the kernels and bindings of that folder with the flags of the wheel, for the torch
and the GPU at hand, and recompiles what was edited.
"""

import os
import runpy
import shlex
import shutil
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

from extops._requirements import LoadError


def load(
    name: str,
    sources: list[Path],
    cxx_flags: list[str] | None = None,
    cuda_flags: list[str] | None = None,
    link_flags: list[str] | None = None,
    cuda: bool = False,
) -> Path:
    """Compiles what has changed of ``sources``, loads the library ``name`` and returns its file."""
    from torch.utils import cpp_extension

    _check_tools(cpp_extension, cuda)
    default = Path(cpp_extension.get_default_build_root(), f"torch-{torch.__version__}")
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or default, name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    cpp_extension.load(
        name,
        [str(source) for source in sources],
        extra_cflags=cxx_flags,
        extra_cuda_cflags=cuda_flags,
        extra_ldflags=link_flags,
        build_directory=str(folder),
        with_cuda=cuda,
        is_python_module=False,
    )
    return folder / f"{name}.so"


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


def _quoted(word: str) -> str:
    """A word of a command in a ninja file: quoted for the shell, and for ninja."""
    return shlex.quote(word).replace("$", "$$")


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
        links = [str(built[name]) for name in library.links]
        built[library.name] = load(
            library.name,
            library.sources(csrc.resolve()),
            recipes.cxx_flags(library, strict=False),
            recipes.nvcc_flags(_architectures(), strict=False) if library.cuda else None,
            [_quoted(x) for link in links for x in (link, f"-Wl,-rpath,{Path(link).parent}")],
            cuda=library.cuda,
        )
    return built
