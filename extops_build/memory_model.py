"""Checks each built library for what CUDA's memory model forbids, but a compiler may do nevertheless.

A kernel under programmatic dependent launch starts while the kernel before it still writes. It may then read by no
non-coherent load, which the model allows only for memory that nobody writes while the kernel runs. The compiler chooses
such loads by itself where a pointer is `const` and `__restrict__`.

And a warp may not give shared memory away while its loads from there are in flight: machine_code.py.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path

from extops_build import UserError, machine_code


@dataclass(frozen=True)
class Listing:
    """A form in which cuobjdump prints GPU code: how a function begins, waits, and reads without coherence."""

    function: re.Pattern[str]
    wait: str
    load: re.Pattern[str]


PTX, SASS = (
    Listing(
        re.compile(r"^\.?\w* ?\.entry (\w+)", re.MULTILINE),
        "griddepcontrol.wait",
        re.compile(r"ld\.global\S*\.nc"),
    ),
    Listing(
        re.compile(r"^\s*Function : (\w+)", re.MULTILINE),
        "ACQBULK",
        re.compile(r"LDG\S*\.CONSTANT"),
    ),
)


def check(library: Path) -> None:
    """Raises an error that names the kernels of `library` that break a rule."""
    machine_codes = _machine_codes(library.resolve())
    listings = [(PTX, _list(library, "-ptx")), *((SASS, text) for text in machine_codes)]
    if not any(listing.function.search(text) for listing, text in listings):
        raise UserError(f"{library.name} holds no GPU code")
    kernels = sorted({name for listing, text in listings for name in violations(listing, text)})
    if kernels:
        raise UserError(
            f"{library.name}: {', '.join(kernels)} may start before the kernel before it has ended (programmatic "
            "dependent launch), and must not read by non-coherent loads (ld.global.nc): take `__restrict__` off its "
            "`const` pointers"
        )
    racing = [x for text in machine_codes for x in machine_code.releases_with_loads_in_flight(text)]
    if racing:
        raise UserError(
            f"{library.name}: kernels let others overwrite shared memory while their loads from it are in flight: "
            f"{'; '.join(racing)}. Arrive in a block of code behind the one that uses the values, or put a fence "
            "(__threadfence_block) before it"
        )


def _machine_codes(library: Path) -> list[str]:
    """The listings of its parts for one architecture, since they take seconds: that of Hopper has every kernel."""
    compiled_for = set(re.findall(r"\bsm_\w+", _list(library, "-lelf")))
    if not compiled_for:
        return []
    newest = max(compiled_for, key=lambda name: int(name[3:].rstrip("af")))
    chosen = "sm_90a" if "sm_90a" in compiled_for else newest
    with tempfile.TemporaryDirectory() as folder, ThreadPool() as pool:
        cuobjdump("-xelf", chosen, str(library), folder=Path(folder))
        parts = [*Path(folder).iterdir()]
        return pool.map(lambda part: _list(part, "-sass"), parts, chunksize=1)


def violations(listing: Listing, text: str) -> Iterator[str]:
    """The functions in the text of a listing that wait for another kernel and read without coherence."""
    _, *parts = listing.function.split(text)
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        if listing.wait in body and listing.load.search(body):
            yield name


def _list(library: Path, *options: str) -> str:
    return cuobjdump(*options, str(library))


def cuobjdump(*arguments: str, folder: Path | None = None) -> str:
    """What it prints in `folder`, where it also leaves what it extracts."""
    path = f"{_tool('nvdisasm').parent}"  # which it calls
    command = [str(_tool("cuobjdump")), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": path}, cwd=folder)
    if done.returncode != 0:
        raise UserError(f"cuobjdump cannot read {arguments[-1]}: {done.stderr.strip()}")
    return done.stdout


def _tool(name: str) -> Path:
    """A tool of the CUDA toolkit, from pip's packages."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec and spec.submodule_search_locations else ()
    for folder in folders:
        for path in sorted(Path(folder).glob(f"*/bin/{name}"), reverse=True):
            return path
    raise UserError(f"there is no {name} here: run `pip install nvidia-cuda-{name}`")
