"""The C and C++ libraries that every Linux has: their symbols, and which of these an old one has, too."""

import ctypes
import functools
import os
import re
import struct
from pathlib import Path
from typing import Any, TypeAlias

from auditwheel.architecture import Architecture
from auditwheel.libc import Libc
from auditwheel.policy import WheelPolicies
from elftools.elf.elffile import ELFFile
from elftools.elf.enums import ENUM_ST_INFO_TYPE

from torchwheels.system import Machine, machines, processes

Symbols: TypeAlias = dict[str, tuple[str, str]]
"""For each symbol its version and its kind."""

LIBRARIES = (
    "libstdc++.so.6",
    "libgcc_s.so.1",
    "libm.so.6",
    "libmvec.so.1",  # what -ffast-math makes of loops over exp and the like
    "libc.so.6",
    *(machine.loader for machine in machines.MACHINES.values()),
    "libpthread.so.0",
    "libdl.so.2",
    "librt.so.1",
)
"""All that every Linux has, by their names at run time: the loaders each on its machine."""


def asked(compiler: str, kind: str, name: str) -> str:
    """What the compiler says where it has a program or a file: the name alone, where it knows no better."""
    command = [compiler, f"-print-{kind}-name={name}"]
    return processes.ask(command, check=True).stdout.strip()


@functools.cache
def allowed_versions(manylinux: str, machine: Machine) -> frozenset[str]:
    """The symbol versions, such as `GLIBC_2.28`, that the policy allows."""
    architecture = Architecture(machine.name)
    policies = WheelPolicies(libc=Libc.GLIBC, arch=architecture)
    policy = policies.get_policy_by_name(f"{manylinux}_{architecture}")
    allowed = policy.symbol_versions.items()
    return frozenset(f"{name}_{version}" for name, each in allowed for version in each)


@functools.cache
def symbols_of_linux(allowed: frozenset[str], machine: Machine) -> frozenset[str]:
    """All that a Linux with the `allowed` versions has in its C and C++ libraries.

    Read from those that are here: newer ones keep what they had.
    """
    found = (newest(versions(library, machine), allowed) for library in LIBRARIES)
    return frozenset(name for each in found for name in each)


def first_version(symbol: str, machine: Machine) -> str | None:
    """The oldest version that the C and C++ libraries which are here have of `symbol`."""
    found = [x for library in LIBRARIES for x in versions(library, machine).get(symbol, ())]
    return min(found, key=order, default=None)


class _LinkMap(ctypes.Structure):
    """The beginning of glibc's `struct link_map`: a library that is loaded."""

    _fields_ = (("address", ctypes.c_void_p), ("path", ctypes.c_char_p))


def _path_of(library: str, machine: Machine) -> Path | None:
    """Where a library for `machine` is; None where there is none, as of libmvec on some processors."""
    if not machine.is_here:
        path = Path(asked(machine.compiler("gcc"), "file", library))
        return path if path.is_absolute() else None
    try:
        loaded = ctypes.CDLL(library)
    except OSError:
        return None
    found = ctypes.POINTER(_LinkMap)()
    RTLD_DI_LINKMAP = 2
    dlinfo = ctypes.CDLL("libdl.so.2").dlinfo
    dlinfo(ctypes.c_void_p(loaded._handle), RTLD_DI_LINKMAP, ctypes.byref(found))
    return Path(os.fsdecode(found.contents.path))


_NO_VERSION = {0, 1}  # of symbols that are local, or of no version
_KINDS = {number: name for name, number in ENUM_ST_INFO_TYPE.items() if name.startswith("STT_")}


@functools.cache
def versions(library: str, machine: Machine) -> dict[str, dict[str, str]]:
    """The symbols of a library for `machine`: for each its versions, with the kind of symbol."""
    path = _path_of(library, machine)
    found: dict[str, dict[str, str]] = {}
    if path is None:
        return found
    with path.open("rb") as file:
        elf: Any = ELFFile(file)
        definitions = elf.get_section_by_name(".gnu.version_d").iter_versions()
        numbered = {entry["vd_ndx"]: next(names).name for entry, names in definitions}
        numbers, symbols, names = (
            elf.get_section_by_name(name).data() for name in (".gnu.version", ".dynsym", ".dynstr")
        )
    # Both unpacked at once: pyelftools takes seconds for thousands of symbols.
    for (number,), (place, kind, section) in zip(
        struct.iter_unpack("<H", numbers), struct.iter_unpack("<IBxH16x", symbols), strict=True
    ):
        if section == 0 or number in _NO_VERSION:
            continue
        # The highest bit only says that the version is for old programs.
        version = numbered[number & 0x7FFF]
        name = names[place : names.index(b"\0", place)].decode()
        # Each version is a symbol, too, which the linker makes by itself.
        if version != name:
            found.setdefault(name, {})[version] = _KINDS[kind & 0xF]
    return found


def newest(symbols: dict[str, dict[str, str]], allowed: frozenset[str]) -> Symbols:
    """For each symbol with an allowed version: the newest such, and the symbol's kind."""
    found = {}
    for name, kinds in symbols.items():
        if possible := allowed.intersection(kinds):
            version = max(possible, key=order)
            found[name] = version, kinds[version]
    return found


def order(version: str) -> tuple[int, ...]:
    """The numbers of `GLIBC_2.28`, for comparing."""
    return tuple(map(int, re.findall(r"\d+", version)))
