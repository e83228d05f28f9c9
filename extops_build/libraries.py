"""The native libraries: their sources, and how each is compiled and linked.

Two builders read it: the wheel build (`extops_build/compile.py`), and the just-in-time build of `extops.binding._jit`,
by the path of this file, which hands the same sources and flags to `torch.utils.cpp_extension.load`.
"""

from __future__ import annotations

import runpy
from dataclasses import dataclass
from pathlib import Path

_REQUIREMENTS = Path(__file__).parents[1] / "package" / "extops" / "_requirements.py"
STABLE_TORCH: tuple[int, int] = runpy.run_path(str(_REQUIREMENTS))["STABLE_TORCH"]

HOST_FLAGS = ("-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
CXX_STANDARD = "-std=c++17"

# Added to the above where memory accesses and arithmetic are to be checked at run time.
SANITIZERS = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
    "-g",
    "-O1",
)

# What the kernels' loops need from -ffast-math in order to be vectorised. Not -ffast-math itself: it
# folds away the rounding step of a polynomial exp, and linking with it sets flush-to-zero for the
# whole process. Not -fno-signed-zeros either: with -fno-trapping-math it lets GCC turn a comparison
# into a minimum that loses NaN, and it buys no speed.
_KERNEL_MATH = ("-fno-math-errno", "-fno-trapping-math")

# Pins the ABI to STABLE_TORCH, whatever newer torch the headers come from.
_TARGET_VERSION = "-DTORCH_TARGET_VERSION=0x{:02x}{:02x}000000000000".format(*STABLE_TORCH)


@dataclass(frozen=True)
class Library:
    """One shared library of the package: `name` is its file name without the extension."""

    name: str
    patterns: tuple[str, ...]
    """Its sources, as glob patterns inside csrc/: a new kernel file needs no entry here."""
    cuda: bool = False
    """Built in CUDA variants only."""
    cxx_flags: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    """Libraries of the package that it links, found beside it at run time."""
    torch_links: tuple[str, ...] = ()
    """Libraries of torch that it links; none if it does not depend on torch."""

    def sources(self, csrc: Path) -> list[Path]:
        """The source files under `csrc`, in a fixed order: first those of sequences, which take the longest."""
        found = (path for pattern in self.patterns for path in csrc.glob(pattern))
        return sorted(found, key=lambda path: ("sequence" not in path.name, path))


CPU = Library(
    "libextops_cpu",
    ("kernels/cpu/*.cpp", "bindings/*.cpp"),
    cxx_flags=_KERNEL_MATH,
)
CUDA = Library(
    "libextops_cuda",
    ("kernels/cuda/*/*.cu",),
    cuda=True,
)
STABLE_CPU = Library(
    "libextops_stable_cpu",
    ("bindings/stable/cpu.cpp",),
    cxx_flags=(_TARGET_VERSION,),
    links=("libextops_cpu",),
    torch_links=("torch_cpu",),
)
STABLE_CUDA = Library(
    "libextops_stable_cuda",
    ("bindings/stable/cuda.cpp",),
    cuda=True,
    # The headers declare the current-stream function only for CUDA builds.
    cxx_flags=(_TARGET_VERSION, "-DUSE_CUDA"),
    links=("libextops_cuda",),
    torch_links=("torch_cpu", "torch_cuda"),
)

LIBRARIES = (CPU, CUDA, STABLE_CPU, STABLE_CUDA)


def libraries(*, cuda: bool) -> tuple[Library, ...]:
    """The libraries of a build with or without CUDA, each after those that it links."""
    return tuple(library for library in LIBRARIES if cuda or not library.cuda)


def is_for_hopper_alone(source: Path) -> bool:
    """Whether the kernels of a file are for Hopper alone. For another GPU they are empty, but parsing them would take
    as long.
    """
    return source.name.endswith("_hopper_kernel.cu")


def architectures_of(source: Path, architectures: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `architectures` for which to compile `source`: where its kernels are for none of them, all."""
    chosen = architectures
    if is_for_hopper_alone(source):
        chosen = ("9.0",) if {"9.0", "9.0+PTX"} & set(architectures) else ()
    elif source.name.endswith("_tensor_kernel.cu"):
        chosen = tuple(x for x in architectures if _number(x) >= _TENSOR_CORES)
    return chosen or architectures


_TENSOR_CORES = (8, 0)
"""The compute capability from which on there are those that kernels use."""

# The GPUs that kernels tell apart: with programmatic dependent launch, with tensor cores, with more than 48 KB of
# shared memory for a block, and older ones.
_GENERATIONS = ("9.0", "8.0", "7.0", "0.0")


def _digits(architecture: str) -> str:
    return architecture.replace(".", "")


def _number(architecture: str) -> tuple[int, ...]:
    return tuple(map(int, architecture.removesuffix("+PTX").split(".")))


def _with_code_of_its_own(architectures: tuple[str, ...]) -> list[str]:
    """Of each major version the oldest: its machine code serves the newer ones.

    Code for 8.6 has the same instructions for arithmetic and memory as code for 8.0, and takes as much room again.
    """
    oldest: dict[int, str] = {}
    for name in sorted(architectures, key=_number):
        oldest.setdefault(_number(name)[0], name.removesuffix("+PTX"))
    return [*oldest.values()]


def _generation(architecture: str) -> str:
    return next(x for x in _GENERATIONS if _number(x) <= _number(architecture))


def _ptx_of(architecture: str, architectures: tuple[str, ...]) -> str:
    """The capability whose PTX becomes machine code for `architecture`: the oldest that kernels do not tell from it."""
    first = _generation(architecture)
    if _number(first) >= _TENSOR_CORES:
        return first
    # Newer compilers do not know the oldest of these.
    alike = (x for x in architectures if _generation(x) == first)
    return min(alike, key=_number).removesuffix("+PTX")


def compiled_architectures(architectures: tuple[str, ...]) -> list[str]:
    """What a build for them holds: code that serves each, and for `12.0+PTX` the PTX of 9.0, which serves more."""
    ptx = {_ptx_of(x, architectures) for x in architectures if x.endswith("+PTX")}
    names = ptx.union(_with_code_of_its_own(architectures))
    return [f"{x}+PTX" if x in ptx else x for x in sorted(names, key=_number)]


def gencode_flags(architectures: tuple[str, ...]) -> list[str]:
    """The nvcc flags for compute capabilities such as `9.0` or `12.0+PTX`.

    Generating PTX takes twice as long as compiling it to machine code, so it is generated once for all GPUs that the
    kernels do not distinguish.
    """
    codes: dict[str, list[str]] = {}
    for architecture in _with_code_of_its_own(architectures):
        # Hopper's tensor cores are in a target of their own. Its machine code runs on every GPU of capability 9.0, but
        # its PTX on no newer one.
        if architecture == "9.0":
            codes["90a"] = ["sm_90a"]
        else:
            ptx = _digits(_ptx_of(architecture, architectures))
            codes.setdefault(ptx, []).append(f"sm_{_digits(architecture)}")
    for architecture in architectures:
        if architecture.endswith("+PTX"):
            ptx = _digits(_ptx_of(architecture, architectures))
            codes.setdefault(ptx, []).append(f"compute_{ptx}")
    flags = [f"-gencode=arch=compute_{ptx},code=[{','.join(made)}]" for ptx, made in codes.items()]
    return [*flags, *(["-DEXTOPS_SM90A"] if "90a" in codes else [])]


def nvcc_flags(architectures: tuple[str, ...], *, strict: bool) -> list[str]:
    """All flags of nvcc for the CUDA kernels; where `strict`, a warning is an error.

    Host code only launches kernels, so -O1 is enough.
    """
    errors = ["-Werror"] if strict else []
    host = ",".join(flag for flag in (*HOST_FLAGS, *errors) if flag != "-O3")
    return [
        "-O1",
        CXX_STANDARD,
        f"-Xcompiler={host}",
        *(["-Werror=all-warnings"] if strict else []),
        "-Wno-deprecated-gpu-targets",
        *gencode_flags(architectures),
    ]


def cxx_flags(library: Library, *, strict: bool) -> list[str]:
    """All flags of the C++ compiler for the sources of `library`; where `strict`, a warning is an error."""
    return [CXX_STANDARD, *HOST_FLAGS, *(["-Werror"] if strict else []), *library.cxx_flags]
