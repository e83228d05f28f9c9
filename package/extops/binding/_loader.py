"""Finds, checks and loads the compiled libraries, and says what does not fit.

The wheel holds two libraries of kernels that are independent of torch, ``libextops_cpu`` and ``libextops_cuda``, and
above each of them a binding on torch's stable ABI. The torch that is found decides which binding is used:

=======  ==============  ================================================================================
binding  torch           how
=======  ==============  ================================================================================
stable   2.10 and newer  ``libextops_stable_cpu``, ``libextops_stable_cuda``
legacy   2.4 to 2.9      :mod:`extops.binding._legacy`: raw pointers through ctypes, operators defined from Python
=======  ==============  ================================================================================
"""

import os
import re
from pathlib import Path
from types import ModuleType

from extops._requirements import REINSTALL, STABLE_TORCH, LoadError, check_torch
from extops.binding._devices import devices, own_version

_FOLDER = Path(__file__).parents[1]

binding = ""
"""``"stable"`` or ``"legacy"``, once loaded."""


def load() -> None:
    """Loads what serves the torch at hand; called once, by ``import extops``."""
    global binding
    torch = _import_torch()
    version = check_torch(own_version(), torch.__version__)
    binding = "stable" if version >= STABLE_TORCH else "legacy"
    libraries = _find_libraries()
    found = ["cpu"]
    if torch.version.cuda is not None and "libextops_cuda" in libraries:
        found.append("cuda")
    try:
        if binding == "stable":  # first: if one does not load, this error is the one to report
            for device in found:
                torch.ops.load_library(libraries[f"libextops_stable_{device}"])
        from extops.binding import _libraries, _schemas

        _libraries.paths.update((device, libraries[f"libextops_{device}"]) for device in found)
        operators = _schemas.load(_libraries.paths["cpu"])
        if binding == "legacy":
            from extops.binding import _legacy

            _legacy.load()
        _schemas.register_fakes(operators)
    except (OSError, AttributeError) as error:  # the latter where a library lacks a function
        raise LoadError(_why_not_loaded(error, torch.__version__), REINSTALL) from error
    devices.update(found)


def _import_torch() -> ModuleType:
    try:
        import torch
    except Exception as error:  # a library that torch lacks is an OSError, and there are others
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            check_torch(own_version(), None)
        raise LoadError(
            f"extops {own_version()} needs torch, and `import torch` fails here: {error}",
            "pip install --force-reinstall torch",
        ) from error
    return torch


def _why_not_loaded(error: Exception, torch_version: str) -> str:
    """The reason in the words of the dynamic linker, whose error torch wraps in one of its own."""
    linker = str(error.__cause__ or error)
    if found := re.search(r"version `(\w+?)_([\d.]+)' not found \(required by (\S+)\)", linker):
        name, version, path = found.groups()
        here = os.confstr("CS_GNU_LIBC_VERSION")
        reason = f"{Path(path).name} needs {name} {version}, and this system has {here}"
    elif found := re.search(r"(\S+): undefined symbol: (\w+)", linker):
        path, symbol = found.groups()
        reason = f"{Path(path).name} needs the symbol {symbol}, which this torch does not have"
    elif found := re.search(r"(\S+): cannot open shared object file", linker):
        reason = f"they need the library {found[1]}, which is not here"
    else:
        reason = linker
    return f"extops {own_version()} cannot load its libraries under torch {torch_version}: {reason}"


def _find_libraries() -> dict[str, Path]:
    """File names without their extension, and where they are."""
    sources = os.environ.get("EXTOPS_JIT")
    if sources:
        from extops.binding import _jit

        return _jit.build_libraries(Path(sources), binding)
    found = {path.stem: path for path in _FOLDER.glob("libextops_*.so")}
    missing = [x for x in ("libextops_cpu", "libextops_stable_cpu") if x not in found]
    if missing:
        raise LoadError(
            f"extops {own_version()} in {_FOLDER} lacks its libraries ({', '.join(missing)}): it is a source tree, "
            "or was installed in part (a source tree works with EXTOPS_JIT=csrc, which compiles just in time)",
            REINSTALL,
        )
    return found
