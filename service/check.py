"""Checks a finished wheel: its tag, its files, what its libraries need, and the GPU code inside.

Everything is read from the file itself, with no tool of a CUDA toolkit: it works for every variant,
everywhere.
"""

from __future__ import annotations

import io
import re
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service import ROOT, ServiceError, native_libraries, wheels
from service.compile import BUILD_INFO
from service.matrix import Variant

WHEEL_NAME = re.compile(r"extops-[0-9.]+(\+\w+)?-(?P<tag>py3-none-manylinux_[\w.]+)\.whl")

# What every Linux has, plus the package's own libraries and torch's where the library names them.
SYSTEM_LIBRARIES = re.compile(
    r"(libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s|ld-linux-x86-64)\.so\.\d+"
)

# Python's C API, and torch's C++ functions, which change from release to release (the stable ones
# are plain C).
FORBIDDEN_SYMBOLS = re.compile(r"_?Py[A-Z_]\w*|_ZNK?(2at|3c10|5torch)\w*")

# The layout of a fat binary, the container of GPU code that nvcc embeds, as far as needed here:
# regions of a 16-byte header and entries, each with a header of its own. NVIDIA does not document
# it, but keeps it: the driver of CUDA 13 reads what nvcc 12 wrote.
FATBIN_MAGIC = 0xBA55ED50
_REGION_HEADER = struct.Struct("<IHHQ")  # magic, version, size of this header, size of the entries
_ENTRY_HEADER = struct.Struct(
    "<HHIQ12xI"
)  # kind, version, size of this header, size of the code, architecture
_PTX, _MACHINE_CODE = 1, 2


@dataclass(frozen=True)
class SharedLibrary:
    """What the checks need to know of an ELF file."""

    needed: list[str]
    undefined: list[str]
    gpu_code: bytes


def read_library(data: bytes) -> SharedLibrary:
    """Reads an ELF shared library."""
    from elftools.elf.elffile import ELFFile

    elf: Any = ELFFile(io.BytesIO(data))
    dynamic = elf.get_section_by_name(".dynamic")
    symbols = elf.get_section_by_name(".dynsym")
    gpu_code = elf.get_section_by_name(".nv_fatbin")
    return SharedLibrary(
        needed=[tag.needed for tag in dynamic.iter_tags("DT_NEEDED")],
        undefined=[
            symbol.name for symbol in symbols.iter_symbols() if symbol["st_shndx"] == "SHN_UNDEF"
        ],
        gpu_code=gpu_code.data() if gpu_code else b"",
    )


def architectures(gpu_code: bytes) -> tuple[set[int], set[int]]:
    """The architectures that have machine code, and those that have PTX, e.g. ({75, 90}, {90})."""
    found: dict[int, set[int]] = {_PTX: set(), _MACHINE_CODE: set()}
    for kind, architecture in _fatbin_entries(gpu_code):
        found.setdefault(kind, set()).add(architecture)
    return found[_MACHINE_CODE], found[_PTX]


def _fatbin_entries(data: bytes) -> Iterator[tuple[int, int]]:
    position = 0
    while position + _REGION_HEADER.size <= len(data):
        magic, _, header, size = _REGION_HEADER.unpack_from(data, position)
        if magic != FATBIN_MAGIC:
            position += 8  # the linker pads between regions
            continue
        entry, end = position + header, position + header + size
        while entry < end:
            kind, _, entry_header, entry_size, architecture = _ENTRY_HEADER.unpack_from(data, entry)
            yield kind, architecture
            entry += entry_header + entry_size
        position = end


def problems(wheel: Path, variant: Variant) -> list[str]:
    """What is wrong with `wheel` as the wheel of `variant`; empty where nothing is."""
    found = []
    name = WHEEL_NAME.fullmatch(wheel.name)
    if name is None:
        found.append(
            "its name is not of the form extops-<version>[+<variant>]-py3-none-manylinux_….whl"
        )
    elif wheels.label(wheel) != variant.label:
        found.append(f"its label is {wheels.label(wheel)!r}, but {variant.name} was built")
    native = native_libraries()
    libraries = {
        f"{library.name}.so": library for library in native.libraries(cuda=bool(variant.cuda))
    }
    with zipfile.ZipFile(wheel) as archive:
        members = {name.removeprefix("extops/"): name for name in archive.namelist()}
        found += _wrong_members(set(members), set(libraries))
        for file_name, library in libraries.items():
            if file_name in members:
                read = read_library(archive.read(members[file_name]))
                found += [
                    f"{file_name} {problem}"
                    for problem in _library_problems(read, library, variant)
                ]
    return found


def _wrong_members(members: set[str], libraries: set[str]) -> list[str]:
    csrc = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.*")}
    package = ROOT / "package" / "extops"
    modules = {str(path.relative_to(package)) for path in package.rglob("*.py")}
    expected = libraries | csrc | modules | {BUILD_INFO}
    machine_code = {name for name in members if name.endswith(".so") or ".so." in name}
    return [
        *(f"it lacks {name}" for name in sorted(expected - members)),
        *(
            f"it holds the library {name}, which is not ours"
            for name in sorted(machine_code - libraries)
        ),
    ]


def _library_problems(read: SharedLibrary, library: Any, variant: Variant) -> list[str]:
    ours = [f"{name}.so" for name in library.links]
    torch = [f"lib{name}.so" for name in library.torch_links]
    found = [f"does not name {name}" for name in [*ours, *torch] if name not in read.needed]
    found += [
        f"needs {name}"
        for name in read.needed
        if name not in (*ours, *torch) and not SYSTEM_LIBRARIES.fullmatch(name)
    ]
    found += [f"uses {name}" for name in read.undefined if FORBIDDEN_SYMBOLS.fullmatch(name)]
    has_kernels = any(pattern.endswith(".cu") for pattern in library.patterns)
    wanted = variant.architectures if has_kernels else ()
    numbers = {name: int(name.removesuffix("+PTX").replace(".", "")) for name in wanted}
    expected = set(numbers.values()), {numbers[name] for name in wanted if name.endswith("+PTX")}
    if architectures(read.gpu_code) != expected:
        machine_code, ptx = map(sorted, architectures(read.gpu_code))
        found.append(
            f"holds GPU code for {machine_code} and PTX for {ptx}, "
            f"but {variant.name} names {' '.join(wanted) or 'none'}"
        )
    return found


def check(wheel: Path, variant: Variant) -> None:
    """Raises an error that names all that is wrong with `wheel`."""
    found = problems(wheel, variant)
    if found:
        raise ServiceError(f"{wheel.name} is not fit to publish: {'; '.join(found)}")
    print(f"extops: checked {wheel.name}: tag, files, libraries and GPU code are as they should be")
