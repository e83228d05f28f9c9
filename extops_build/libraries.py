"""The native libraries: their sources, and how each is compiled and linked.

Two builders read it: the wheel build (`extops_build/compile.py`), and the just-in-time build of `extops._jit`, by the
path of this file, which hands the same sources and flags to `torch.utils.cpp_extension.load`.
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
    """Libraries of torch that it names; none means that it knows nothing of torch."""

    def sources(self, csrc: Path) -> list[Path]:
        """The source files under `csrc`, in a fixed order."""
        return [path for pattern in self.patterns for path in sorted(csrc.glob(pattern))]


CPU = Library(
    "libextops_cpu",
    ("kernels/cpu/*.cpp", "bindings/*.cpp"),
    cxx_flags=_KERNEL_MATH,
)
CUDA = Library(
    "libextops_cuda",
    ("kernels/cuda/*.cu",),
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


# Their kernels are empty but for Hopper, and compiling them for another GPU would take as long as parsing them.
HOPPER_ALONE = (
    "gru_sequence_hopper_kernel.cu",
    "lltm_sequence_hopper_kernel.cu",
    "lstm_sequence_hopper_kernel.cu",
    "lltm_tensor_backward_kernel.cu",
    "lltm_tensor_kernel.cu",
    "lltm_tf32_backward_kernel.cu",
)


def architectures_of(source: Path, architectures: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `architectures` for which to compile `source`."""
    has_hopper = {"9.0", "9.0+PTX"} & set(architectures)
    return ("9.0",) if has_hopper and source.name in HOPPER_ALONE else architectures


def gencode_flags(architectures: tuple[str, ...]) -> list[str]:
    """The nvcc flags for compute capabilities such as `9.0` or `12.0+PTX`."""
    flags = []
    for architecture in architectures:
        number = architecture.removesuffix("+PTX").replace(".", "")
        machine = number
        if number == "90":
            # Hopper's tensor cores are in this target alone. Its machine code runs on every GPU of capability 9.0, but
            # its PTX on no newer one.
            machine = "90a"
            flags.append("-DEXTOPS_SM90A")
        flags.append(f"-gencode=arch=compute_{machine},code=sm_{machine}")
        if architecture.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def nvcc_flags(architectures: tuple[str, ...], *, strict: bool) -> list[str]:
    """All flags of nvcc for the CUDA kernels; where `strict`, a warning is an error."""
    errors = ["-Werror"] if strict else []
    host = ",".join(flag for flag in (*HOST_FLAGS, *errors) if flag != "-O3")
    return [
        "-O3",
        CXX_STANDARD,
        f"-Xcompiler={host}",
        *(["-Werror=all-warnings"] if strict else []),
        "-Wno-deprecated-gpu-targets",
        "-Xfatbin=-compress-all",
        *gencode_flags(architectures),
    ]


def cxx_flags(library: Library, *, strict: bool) -> list[str]:
    """All flags of the C++ compiler for the sources of `library`; where `strict`, a warning is an error."""
    return [CXX_STANDARD, *HOST_FLAGS, *(["-Werror"] if strict else []), *library.cxx_flags]
