"""Stubs of the C and C++ libraries of the oldest Linux, for the linker of a build instead of this machine's.

Code that is compiled here uses the headers of this machine's glibc, and so needs its symbols. Each stub has only the
symbols and versions that auditwheel's policy allows, and the linker binds a library to these. Symbols that only a newer
glibc has come from the sources in newer_glibc.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import struct
import subprocess
import tempfile
from collections.abc import Set
from pathlib import Path
from typing import Any

from auditwheel.architecture import Architecture
from auditwheel.libc import Libc
from auditwheel.policy import WheelPolicies
from elftools.elf.elffile import ELFFile
from elftools.elf.enums import ENUM_ST_INFO_TYPE

from torchwheels import machines
from torchwheels.errors import UserError
from torchwheels.machines import Machine

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

# What glibc 2.32 to 2.34 moved into libc, each with a new version: whoever uses it has to name the
# library where it was.
_MOVED = {
    "libpthread.so.0": re.compile(r"_*(pthread|sem)_"),
    "libdl.so.2": re.compile(r"dl[a-z]"),
    "librt.so.1": re.compile(r"(aio|lio|mq|shm|timer)_"),
}

_FUNCTION = (".text", "@function")
_DATA = {  # the kinds of symbols that are no functions, and how the assembler is told
    "STT_OBJECT": (".data", "@object"),
    "STT_TLS": ('.section .tbss,"awT",@nobits', "@tls_object"),
}

NEWER_GLIBC = Path(__file__).parent / "wrappers" / "newer_glibc"
"""Sources of what newer headers ask for, written with what the oldest glibc has."""


def make_stubs(folder: Path, compiler: str, manylinux: str, machine: Machine) -> None:
    """Makes the stubs, by the names that the linker looks for: `libm.so` and so on.

    `compiler` is one for `machine`. Beside them are libnewer_glibc.a, and in `include` a header that comes before the
    system's.
    """
    for name, data in _stubs(compiler, manylinux, machine).items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


@functools.cache
def _stubs(compiler: str, manylinux: str, machine: Machine) -> dict[str, bytes]:
    """The files of the stubs: made once for all builds of a process."""
    with tempfile.TemporaryDirectory(prefix="torchwheels-stubs-") as name:
        folder = Path(name)
        _compile_stubs(folder, compiler, manylinux, machine)
        return {
            str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }


def _compile_stubs(folder: Path, compiler: str, manylinux: str, machine: Machine) -> None:
    allowed = allowed_versions(manylinux, machine)
    found = _symbols(allowed, machine)
    vectors = "libmvec.so.1"
    newer = _versions(vectors, machine).keys() - found[vectors].keys()
    _hide_vector_functions(folder / "include", newer)
    for name, symbols in found.items():
        stub = folder / f"{name.partition('.so')[0]}.so"
        script = stub.with_suffix(".map")
        script.write_text(_version_script(symbols))
        flags = ["-shared", "-nostdlib", f"-Wl,-soname,{name}"]
        if symbols:  # an empty script is an error
            flags.append(f"-Wl,--version-script={script}")
        subprocess.run(
            [compiler, *flags, "-o", stub, "-x", "assembler", "-"],
            input=_assembler(symbols),
            text=True,
            check=True,
        )
    _make_newer_glibc(folder / "libnewer_glibc.a", compiler)


def _symbols(allowed: frozenset[str], machine: Machine) -> dict[str, dict[str, tuple[str, str]]]:
    """What each library had: for each symbol the newest allowed version, and the symbol's kind."""
    others = {each.loader for each in machines.MACHINES.values() if each != machine}
    found = {
        library: _newest(_versions(library, machine), allowed)
        for library in LIBRARIES
        if library not in others
    }
    libc, versions = found["libc.so.6"], _versions("libc.so.6", machine)
    moved = [x for x in libc if any(_order(y) >= (2, 32) for y in versions[x])]
    for library, names in _MOVED.items():
        for symbol in filter(names.match, moved):
            found[library][symbol] = libc.pop(symbol)
    return found


def _hide_vector_functions(folder: Path, functions: Set[str]) -> None:
    """Has the compiler, under -ffast-math, make no calls of functions that are too new.

    `functions` are such as `_ZGVbN4v_tanhf`, four of tanhf at once.
    """
    names = sorted({function.rpartition("_")[2] for function in functions})
    lines = [f"#undef __DECL_SIMD_{name}\n#define __DECL_SIMD_{name}" for name in names]
    header = folder / "bits" / "math-vector.h"
    header.parent.mkdir(parents=True)
    header.write_text("\n".join(["#include_next <bits/math-vector.h>", *lines, ""]))


def _make_newer_glibc(archive: Path, compiler: str) -> None:
    """One object for each source, so that a library links only what it needs.

    Its symbols are hidden and weak: other libraries do not see them, and the project's own replace them.
    """
    objects = []
    for source in sorted(NEWER_GLIBC.glob("*.c")):
        object_file = archive.with_name(f"{source.stem}.o")
        flags = ["-std=c11", "-O2", "-fPIC", "-fvisibility=hidden"]
        subprocess.run([compiler, *flags, "-c", source, "-o", object_file], check=True)
        subprocess.run([_asked(compiler, "prog", "objcopy"), "--weaken", object_file], check=True)
        objects.append(object_file)
    subprocess.run([_asked(compiler, "prog", "ar"), "rcsD", archive, *objects], check=True)


def _asked(compiler: str, kind: str, name: str) -> str:
    """What the compiler says where it has a program or a file: the name alone, where it knows no better."""
    command = [compiler, f"-print-{kind}-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def allowed_versions(manylinux: str, machine: Machine) -> frozenset[str]:
    """The symbol versions, such as `GLIBC_2.28`, that the policy allows."""
    architecture = Architecture(machine.name)
    policies = WheelPolicies(libc=Libc.GLIBC, arch=architecture)
    policy = policies.get_policy_by_name(f"{manylinux}_{architecture}")
    return frozenset(
        f"{name}_{version}"
        for name, versions in policy.symbol_versions.items()
        for version in versions
    )


def symbols_of_linux(allowed: frozenset[str], machine: Machine) -> frozenset[str]:
    """All that a Linux with the `allowed` versions has in its C and C++ libraries.

    Read from those that are here: newer ones keep what they had.
    """
    return frozenset(
        name for library in LIBRARIES for name in _newest(_versions(library, machine), allowed)
    )


def first_version(symbol: str, machine: Machine) -> str | None:
    """The oldest version that the C and C++ libraries which are here have of `symbol`."""
    found = [x for library in LIBRARIES for x in _versions(library, machine).get(symbol, ())]
    return min(found, key=_order, default=None)


class _LinkMap(ctypes.Structure):
    """The beginning of glibc's `struct link_map`: a library that is loaded."""

    _fields_ = (("address", ctypes.c_void_p), ("path", ctypes.c_char_p))


def _path_of(library: str, machine: Machine) -> Path | None:
    """Where a library for `machine` is; None where there is none, as of libmvec on some processors."""
    if machine.is_here:
        return _path_here(library)
    compiler = machine.compiler("gcc")
    if compiler is None:
        raise UserError(
            f"there are no C and C++ libraries for {machine.name} here: `apt-get install {machine.package}` adds them"
        )
    found = Path(_asked(compiler, "file", library))
    return found if found.is_absolute() else None


def _path_here(library: str) -> Path | None:
    try:
        loaded = ctypes.CDLL(library)
    except OSError:
        return None
    found = ctypes.POINTER(_LinkMap)()
    RTLD_DI_LINKMAP = 2
    dlinfo = ctypes.CDLL("libdl.so.2").dlinfo
    if dlinfo(ctypes.c_void_p(loaded._handle), RTLD_DI_LINKMAP, ctypes.byref(found)) != 0:
        raise UserError(f"the system does not say where it has {library}")
    return Path(os.fsdecode(found.contents.path))


_NO_VERSION = {0, 1}  # of symbols that are local, or of no version
_KINDS = {number: name for name, number in ENUM_ST_INFO_TYPE.items() if name.startswith("STT_")}


@functools.cache
def _versions(library: str, machine: Machine) -> dict[str, dict[str, str]]:
    """The symbols of a library for `machine`: for each its versions, with the kind of symbol."""
    path = _path_of(library, machine)
    found: dict[str, dict[str, str]] = {}
    if path is None:
        return found
    with path.open("rb") as file:
        elf: Any = ELFFile(file)
        definitions = elf.get_section_by_name(".gnu.version_d").iter_versions()
        versions = {entry["vd_ndx"]: next(names).name for entry, names in definitions}
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
        version = versions[number & 0x7FFF]
        name = names[place : names.index(b"\0", place)].decode()
        # Each version is a symbol, too, which the linker makes by itself.
        if version != name:
            found.setdefault(name, {})[version] = _KINDS[kind & 0xF]
    return found


def _newest(
    versions: dict[str, dict[str, str]], allowed: frozenset[str]
) -> dict[str, tuple[str, str]]:
    """For each symbol with an allowed version: the newest such, and the symbol's kind."""
    found = {}
    for name, kinds in versions.items():
        if possible := allowed.intersection(kinds):
            version = max(possible, key=_order)
            found[name] = version, kinds[version]
    return found


def _order(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def _assembler(symbols: dict[str, tuple[str, str]]) -> str:
    lines = []
    for name, (_, kind) in sorted(symbols.items()):
        section, type = _DATA.get(kind, _FUNCTION)
        lines.append(f"{section}\n.globl {name}\n.type {name}, {type}\n{name}: .zero 1")
    return "\n".join([*lines, ""])


def _version_script(symbols: dict[str, tuple[str, str]]) -> str:
    members: dict[str, list[str]] = {}
    for name, (version, _) in sorted(symbols.items()):
        members.setdefault(version, []).append(name)
    return "".join(
        f"{version} {{ {'; '.join(names)}; }};\n" for version, names in sorted(members.items())
    )
