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

from auditwheel.architecture import Architecture
from auditwheel.libc import Libc
from auditwheel.policy import WheelPolicies
from elftools.elf.elffile import ELFFile

LIBRARIES = (
    "libstdc++.so.6",
    "libgcc_s.so.1",
    "libm.so.6",
    "libmvec.so.1",  # what -ffast-math makes of loops over exp and the like
    "libc.so.6",
    "ld-linux-x86-64.so.2",
    # Part of libc itself since glibc 2.34; before, whoever used them had to name them.
    "libpthread.so.0",
    "libdl.so.2",
    "librt.so.1",
)
"""All that every Linux has, by their names at run time."""

_FUNCTION = (".text", "@function")
_DATA = {  # the kinds of symbols that are no functions, and how the assembler is told
    "STT_OBJECT": (".data", "@object"),
    "STT_TLS": ('.section .tbss,"awT",@nobits', "@tls_object"),
}


def make_stand_ins(folder: Path, compiler: str, manylinux: str) -> None:
    """Makes the stand-ins, by the names that the linker looks for: `libm.so` and so on."""
    folder.mkdir(parents=True)
    allowed = allowed_versions(manylinux)
    for name in LIBRARIES:
        asked = subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        )
        symbols = _symbols(Path(asked.stdout.strip()), allowed)
        target = folder / f"{name.partition('.so')[0]}.so"
        script = target.with_suffix(".map")
        script.write_text(_version_script(symbols))
        flags = ["-shared", "-nostdlib", f"-Wl,-soname,{name}", f"-Wl,--version-script={script}"]
        subprocess.run(
            [compiler, *flags, "-o", target, "-x", "assembler", "-"],
            input=_assembler(symbols),
            text=True,
            check=True,
        )


def allowed_versions(manylinux: str) -> frozenset[str]:
    """The symbol versions, such as `GLIBC_2.28`, that the policy allows."""
    architecture = Architecture.detect().baseline
    policies = WheelPolicies(libc=Libc.GLIBC, arch=architecture)
    policy = policies.get_policy_by_name(f"{manylinux}_{architecture}")
    return frozenset(
        f"{name}_{version}"
        for name, versions in policy.symbol_versions.items()
        for version in versions
    )


def _symbols(library: Path, allowed: frozenset[str]) -> dict[str, tuple[str, str]]:
    """For each symbol with an allowed version: the newest such, and the symbol's kind."""
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
