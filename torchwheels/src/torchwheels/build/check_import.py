"""Imports a wheel in an environment of its own with the target's torch."""

import contextlib
import importlib.metadata
import json
import re
import signal
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from torchwheels import environments
from torchwheels.build.backend import explained
from torchwheels.environments import Environment
from torchwheels.errors import RefusedError, UserError
from torchwheels.system import processes
from torchwheels.wheel import DRIVER, Wheel, elf, read

# Each library is loaded in a process of its own, which has loaded torch: many packages load only one of theirs, and
# some hide a failure. A library may need another package that is loaded only once the modules are imported, so these
# are imported after that, for all.
_IMPORT = """
import ctypes, importlib, json, os, sys, sysconfig, traceback
import torch
libraries, modules, driver = json.loads(sys.argv[1])
said = os.dup(1)  # a module may close or replace it
if driver[1:]:
    try:
        ctypes.CDLL(driver[0])
    except OSError:
        ctypes.CDLL(driver[1], ctypes.RTLD_GLOBAL)
for library in libraries:
    sys.stdout.flush(), sys.stderr.flush()
    child = os.fork()
    if child == 0:
        path = os.path.join(sysconfig.get_path("platlib"), library)
        try:
            ctypes.CDLL(path)
        except OSError as error:
            try:
                for module in modules:
                    importlib.import_module(module)
                ctypes.CDLL(path)
            except (OSError, ImportError):
                sys.stderr.write(f"{error}\\n"), sys.stderr.flush(), os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1] == 256:
        sys.exit(1)
for module in modules:
    importlib.import_module(module)
os.write(said, b"all is imported")
"""

_MODULE = re.compile(r"\w+(\.py|\.(cpython-|abi3)[\w-]*\.so)")
_TOP_MODULE = re.compile(r"\w+(\.[\w-]+)*\.(py|so)")


def install(path: Path, base: Environment, folder: Path) -> None:
    """Installs the wheel `path` beside the torch of `base`, in a new environment, with what it requires.

    Where these versions cannot be had, others will do, or none: the import shows what it needs.
    """
    environment = environments.on_top_of(base, folder)
    variables = environments.clean_variables(folder)
    try:
        environments.install(environment, [str(path)], variables)
    except UserError as error:
        environments.install(environment, ["--no-deps", str(path)], variables)
        print(f"torchwheels: {error}; it is imported beside other versions", flush=True)
        (torch,) = importlib.metadata.distributions(name="torch", path=[str(base.site_packages)])
        wanted = [f"torch=={torch.version}"]
        for each in map(Requirement, read(path).metadata.get_all("Requires-Dist") or []):
            each.specifier = SpecifierSet()
            wanted.append(str(each))
        with contextlib.suppress(UserError):
            environments.install(environment, wanted, variables)


def check_import(
    found: Wheel,
    environment: Environment,
    modules: Sequence[str] = (),
    driver: Path | None = None,
    known: Callable[[str], str] = lambda _: "",
) -> None:
    """Raises an error where the wheel does not import in the environment that it was installed in.

    What is linked with CUDA's driver takes `driver` where this machine has none. `known` says why, where more is known
    than the table of failures says.
    """
    libraries = [
        found.installed(name)[1]
        for name, library in found.libraries.items()
        if ".libs/" not in name and not library.is_program
    ]
    own = {re.split("[/.]", found.installed(x)[1])[0] for x in found.files}
    if modules and own.isdisjoint(x.partition(".")[0] for x in modules):
        named = f"the option `import` names {' and '.join(modules)}"
        raise UserError(f"{named}, of which {found.path.name} has none: name what is in it")
    modules = modules or top_level_modules(found.files)
    linked = driver and any(DRIVER in library.needed for library in found.libraries.values())
    given = json.dumps([libraries, list(modules), [DRIVER, str(driver)] if linked else []])
    # A warning would be the last word of one that dies.
    command = [str(environment.python), "-W", "ignore", "-c", _IMPORT, given]
    home = environment.folder
    variables, pipe = environments.clean_variables(home), subprocess.PIPE
    done = processes.run(command, env=variables, cwd=home, stdout=pipe, stderr=pipe, text=True)
    code = done.returncode
    if code or "all is imported" not in done.stdout:
        ends = f"it ends the process with exit code {code}"
        if code - 128 in {*signal.Signals}:
            ends = f"it dies of {signal.Signals(code - 128).name}"
        last = _said(done.stderr) or ends
        readable = re.sub(r"\b_Z\w+", lambda symbol: elf.demangle(symbol[0]), last)
        why = known(last)
        way_out = f": {why}" if why else explained(last, "import")
        raise RefusedError(f"{found.path.name} does not import: {readable}{way_out}")


def _said(stderr: str) -> str:
    """The first line of an exception's own words, which come behind its last frame; else the last line."""
    lines = stderr.strip().splitlines()
    frame = max((x for x, line in enumerate(lines) if line.startswith('  File "')), default=None)
    behind = lines[-1:] if frame is None else lines[frame + 1 :]
    return next((line for line in behind if line.strip() and not line[0].isspace()), "")


def top_level_modules(names: Iterable[str]) -> list[str]:
    """What can be imported of the files of a wheel: packages and modules at its top, or at that of its namespaces."""
    paths = [PurePosixPath(name) for name in names]
    packages = {x.parent for x in paths if x.name.split(".")[0] == "__init__" and x.parent.name}
    found = set()
    for path in paths:
        outermost = next((x for x in reversed(path.parents) if x in packages), None)
        if outermost or (_MODULE if path.parent.name else _TOP_MODULE).fullmatch(path.name):
            found.add((outermost or path.with_name(path.name.split(".")[0])).parts)
    found = {parts for parts in found if all(map(str.isidentifier, parts))}
    # A namespace is meant where libraries are in it, or nothing else is there.
    holding = {path.parts[0] for path in paths if path.suffix == ".so"}
    only = all(len(parts) > 1 for parts in found)
    return sorted(".".join(x) for x in found if len(x) == 1 or only or x[0] in holding)
