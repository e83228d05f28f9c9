"""Just-in-time builds through ``torch.utils.cpp_extension.load``, for those who edit kernels.

``EXTOPS_JIT=csrc python …`` compiles the kernels and bindings of that folder with the flags of the wheel, for the torch
and the GPU at hand, and recompiles what was edited.
"""

import os
from pathlib import Path

import torch

from extops import _libraries

_PACKAGED_CSRC = Path(__file__).parent / "csrc"


def packaged_csrc() -> Path:
    """The C++/CUDA sources: inside the wheel, or beside the package in a checkout."""
    if _PACKAGED_CSRC.is_dir():
        return _PACKAGED_CSRC
    return Path(__file__).parents[2] / "csrc"


def load(
    name: str,
    sources: list[Path],
    cxx_flags: list[str] | None = None,
    link_flags: list[str] | None = None,
    cuda: bool = False,
) -> Path:
    """Compiles what has changed of ``sources``, loads the library ``name`` and returns its file."""
    from torch.utils import cpp_extension

    folder = Path(cpp_extension._get_build_directory(name, verbose=False))
    cpp_extension.load(
        name,
        [str(source) for source in sources],
        extra_cflags=cxx_flags,
        extra_cuda_cflags=_libraries.nvcc_flags(_architectures() if cuda else ()),
        extra_ldflags=link_flags,
        build_directory=str(folder),
        with_cuda=cuda,
        is_python_module=False,
    )
    return folder / f"{name}.so"


def _architectures() -> tuple[str, ...]:
    """The compute capabilities of the GPUs here; none where torch is told by TORCH_CUDA_ARCH_LIST."""
    if os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return ()
    found = {
        torch.cuda.get_device_capability(device) for device in range(torch.cuda.device_count())
    }
    return tuple(f"{major}.{minor}" for major, minor in sorted(found))


def build_libraries(csrc: Path, lane: str) -> dict[str, Path]:
    """All libraries that the torch at hand can use in this lane, from the sources in ``csrc``."""
    if not (csrc / "kernels").is_dir():
        raise ImportError(
            f"EXTOPS_JIT is set to {csrc}, which holds no folder `kernels`; set it to the folder csrc of a checkout"
        )
    built: dict[str, Path] = {}
    for library in _libraries.libraries(cuda=torch.cuda.is_available()):
        if library.torch_links and lane != "stable":
            continue
        links = [str(built[name]) for name in library.links]
        built[library.name] = load(
            library.name,
            library.sources(csrc.resolve()),
            _libraries.cxx_flags(library),
            [*links, *(f"-Wl,-rpath,{Path(link).parent}" for link in links)],
            cuda=library.cuda,
        )
    return built
