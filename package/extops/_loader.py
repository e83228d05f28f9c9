"""Finds, checks and loads the compiled libraries, and says what does not fit.

The wheel holds two libraries of kernels that know nothing of torch, ``libextops_cpu`` and ``libextops_cuda``, and above
each of them a binding on torch's stable ABI. Which binding is used, the *lane*, follows from the torch that is found:

======  ==============  ================================================================================
lane    torch           binding
======  ==============  ================================================================================
stable  2.10 and newer  ``libextops_stable_cpu``, ``libextops_stable_cuda``
legacy  2.4 to 2.9      :mod:`extops._legacy`: raw pointers through ctypes, operators defined from Python
======  ==============  ================================================================================
"""

import os
import re
from pathlib import Path

import torch

from extops import _libraries
from extops._devices import devices
from extops._version import __version__

MINIMUM_TORCH = (2, 4)

_FOLDER = Path(__file__).parent

lane = ""
"""``"stable"`` or ``"legacy"``, once loaded."""


def load() -> None:
    """Loads what serves the torch at hand; called once, by ``import extops``."""
    global lane
    version = _torch_version()
    if version < MINIMUM_TORCH:
        raise ImportError(
            f"extops {__version__} needs torch {_dotted(MINIMUM_TORCH)} or newer, but found torch {torch.__version__}; "
            f'run: pip install "torch>={_dotted(MINIMUM_TORCH)}"'
        )
    lane = "stable" if version >= _libraries.STABLE_TORCH else "legacy"
    libraries = _find_libraries()
    names = [_libraries.CPU]
    if torch.version.cuda is not None and _libraries.CUDA.name in libraries:
        names.append(_libraries.CUDA)
    if lane == "stable":
        stable = {_libraries.CPU: _libraries.STABLE_CPU, _libraries.CUDA: _libraries.STABLE_CUDA}
        for library in names:
            torch.ops.load_library(libraries[stable[library].name])
    else:
        from extops import _legacy

        _legacy.load(*(libraries[library.name] for library in names))
    devices.add("cpu")
    if _libraries.CUDA in names:
        devices.add("cuda")


def _find_libraries() -> dict[str, Path]:
    """File names without their extension, and where they are."""
    sources = os.environ.get("EXTOPS_JIT")
    if sources:
        from extops import _jit

        return _jit.build_libraries(Path(sources), lane)
    found = {path.stem: path for path in _FOLDER.glob("libextops_*.so")}
    missing = [x.name for x in _libraries.libraries(cuda=False) if x.name not in found]
    if missing:
        raise ImportError(
            f"extops {__version__} in {_FOLDER} lacks its compiled libraries ({', '.join(missing)}); install a wheel "
            "(pip install extops), or build one (nox -s build-3.11-cpu), or set EXTOPS_JIT to the folder csrc to "
            "compile just in time"
        )
    return found


def _torch_version() -> tuple[int, int]:
    major, minor = re.findall(r"\d+", torch.__version__)[:2]
    return int(major), int(minor)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
