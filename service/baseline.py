"""Stand-ins for the system's libraries, as they were on the oldest Linux that the wheels serve.

The linker binds a symbol to its newest version, so a library linked against this machine's glibc
asks for one as new. Linked against a stand-in, which has only the symbols and versions that
auditwheel's policy allows, it asks for no more than that, whatever machine it was built on.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

from service.matrix import load

LIBSTDCXX, LIBGCC, LIBM = "libstdc++.so.6", "libgcc_s.so.1", "libm.so.6"
LIBC, LOADER = "libc.so.6", "ld-linux-x86-64.so.2"
# Part of libc itself since glibc 2.34; before, whoever used them had to name them.
FORMER_PARTS_OF_LIBC = ("libpthread.so.0", "libdl.so.2", "librt.so.1")

LIBRARIES = (LIBSTDCXX, LIBGCC, LIBM, LIBC, LOADER, *FORMER_PARTS_OF_LIBC)
"""All that every Linux has, by their names at run time."""

_FUNCTION = (".text", "@function")
_DATA = {  # the kinds of symbols that are no functions, and how the assembler is told
    "STT_OBJECT": (".data", "@object"),
    "STT_TLS": ('.section .tbss,"awT",@nobits', "@tls_object"),
}


def sources(library: Path) -> list[Path]:
    """The sources of a stand-in, which lie beside it."""
    return [Path(f"{library}.s"), Path(f"{library}.map")]


def compiler_flags(library: Path) -> list[str]:
    """What makes a stand-in of its sources."""
    assembler, version_script = sources(library)
    return [f"-Wl,--version-script={version_script}", "-x", "assembler", str(assembler)]


def write_sources(folder: Path, cxx: str) -> None:
    """Writes the sources of all stand-ins into `folder`: assembler, and a version script."""
    folder.mkdir(parents=True, exist_ok=True)
    allowed = allowed_versions()
    for name in LIBRARIES:
        printed = subprocess.run([cxx, f"-print-file-name={name}"], capture_output=True, text=True)
        symbols = _symbols(Path(printed.stdout.strip()), allowed)
        texts = (_assembler(symbols), _version_script(symbols))
        for file, text in zip(sources(folder / name), texts, strict=True):
            if not file.is_file() or file.read_text() != text:  # ninja goes by the time
                file.write_text(text)


def allowed_versions() -> frozenset[str]:
    """The symbol versions, such as `GLIBC_2.28`, that the manylinux tag of matrix.toml allows."""
    from auditwheel.architecture import Architecture
    from auditwheel.libc import Libc
    from auditwheel.policy import WheelPolicies

    architecture = Architecture.detect().baseline
    policies = WheelPolicies(libc=Libc.GLIBC, arch=architecture)
    policy = policies.get_policy_by_name(f"{load().manylinux}_{architecture}")
    return frozenset(
        f"{name}_{version}"
        for name, versions in policy.symbol_versions.items()
        for version in versions
    )


def _symbols(library: Path, allowed: frozenset[str]) -> dict[str, tuple[str, str]]:
    """For each symbol with an allowed version: the newest such, and the symbol's kind."""
    from elftools.elf.elffile import ELFFile

    found: dict[str, tuple[str, str]] = {}
    with library.open("rb") as file:
        elf: Any = ELFFile(file)
        definitions = elf.get_section_by_name(".gnu.version_d").iter_versions()
        versions = {entry["vd_ndx"]: next(names).name for entry, names in definitions}
        numbers = elf.get_section_by_name(".gnu.version").iter_symbols()
        for symbol, number in zip(
            elf.get_section_by_name(".dynsym").iter_symbols(), numbers, strict=True
        ):
            if symbol["st_shndx"] == "SHN_UNDEF" or not isinstance(number["ndx"], int):
                continue
            # The highest bit only says that the version is for old programs.
            version = versions[number["ndx"] & 0x7FFF]
            # Each version is a symbol, too, which the linker makes by itself.
            if version not in allowed or version == symbol.name:
                continue
            known = found.get(symbol.name)
            if known is None or _order(version) > _order(known[0]):
                found[symbol.name] = (version, symbol["st_info"]["type"])
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
