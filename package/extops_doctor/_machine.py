"""What there is on this machine: torch, the NVIDIA driver and its GPUs, copies of extops.

All of it is found without importing torch or loading extops' libraries, either of which may be broken.
"""

import ctypes
import importlib.metadata
import importlib.util
import re
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path

Version = tuple[int, int]


def version(text: str) -> Version:
    """``2.13.0+cu130`` as (2, 13)."""
    major, minor = re.findall(r"\d+", text)[:2]
    return int(major), int(minor)


def dotted(number: Version) -> str:
    """(2, 13) as ``2.13``."""
    return ".".join(map(str, number))


@dataclass(frozen=True)
class Torch:
    """A torch, and the CUDA that it was built for."""

    version: str
    cuda: str | None


def find_torch() -> Torch | None:
    """Reads what torch says of itself."""
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if file is None or not file.is_file():
        return None
    said = runpy.run_path(str(file))
    return Torch(said["__version__"], said["cuda"])


@dataclass(frozen=True)
class Gpu:
    """A GPU, and its compute capability."""

    name: str
    capability: Version


@dataclass(frozen=True)
class Driver:
    """An NVIDIA driver: the newest CUDA that it knows, why it does not start where it does not, and its GPUs."""

    cuda: Version
    error: str | None = None
    gpus: tuple[Gpu, ...] = ()


def find_driver() -> Driver | None:
    """Asks the driver's own library."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(number))
    cuda = number.value // 1000, number.value % 1000 // 10
    status = library.cuInit(0)
    if status == 100:  # CUDA_ERROR_NO_DEVICE
        return Driver(cuda)
    if status != 0:
        name = ctypes.c_char_p()
        library.cuGetErrorName(status, ctypes.byref(name))
        return Driver(cuda, error=f"{(name.value or b'error').decode()} ({status})")
    library.cuDeviceGetCount(ctypes.byref(number))
    return Driver(cuda, gpus=tuple(_gpu(library, index) for index in range(number.value)))


def _gpu(library: ctypes.CDLL, index: int) -> Gpu:
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    library.cuDeviceGet(ctypes.byref(device), index)
    library.cuDeviceGetName(name, len(name), device)
    library.cuDeviceGetAttribute(ctypes.byref(major), 75, device)  # COMPUTE_CAPABILITY_MAJOR
    library.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)  # COMPUTE_CAPABILITY_MINOR
    return Gpu(name.value.decode(), (major.value, minor.value))


def find_package() -> Path:
    """The folder that ``import extops`` takes: there is one, beside the doctor."""
    spec = importlib.util.find_spec("extops")
    assert spec and spec.origin
    return Path(spec.origin).resolve().parent


def find_distribution(package: Path) -> importlib.metadata.Distribution | None:
    """What pip recorded of this copy of extops; None where it did not install it."""
    for distribution in importlib.metadata.distributions(name="extops"):
        if Path(str(distribution.locate_file("extops"))).resolve() == package:
            return distribution
    return None


def find_hidden_copies(package: Path) -> list[Path]:
    """Other folders from which `import extops` would take it, were it not for this one."""
    folders = [(Path(entry) / "extops").resolve() for entry in sys.path]
    copies = dict.fromkeys(path for path in folders if (path / "__init__.py").is_file())
    return [path for path in copies if path != package]
