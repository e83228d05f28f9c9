"""Stubs of the C and C++ libraries of the oldest Linux, for the linker of a build instead of this machine's.

Code that is compiled here uses the headers of this machine's glibc, and so needs its symbols. Each stub has only the
symbols and versions that auditwheel's policy allows, and the linker binds a library to these. Symbols that only a newer
glibc has come from the sources in wrappers/c.
"""

import functools
import re
import subprocess
from collections.abc import Set
from pathlib import Path

from torchwheels.system import Machine, machines, scratch
from torchwheels.wheel import linux

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

NEWER_GLIBC = Path(__file__).parent / "wrappers" / "c"
"""Sources of what newer headers ask for, written with what the oldest glibc has."""


@functools.cache
def stubs(compiler: str, manylinux: str, machine: Machine) -> dict[Path, bytes]:
    """The files of the stubs, by the names that the linker looks for: `libm.so` and so on.

    `compiler` is one for `machine`. Beside them are libnewer_glibc.a, and in `include` a header that comes before the
    system's. They are made once for all builds of a process.
    """
    allowed = linux.allowed_versions(manylinux, machine)
    found = _symbols(allowed, machine)
    vectors = "libmvec.so.1"
    newer = linux.versions(vectors, machine).keys() - found[vectors].keys()
    with scratch() as folder:
        _hide_vector_functions(folder / "include", newer)
        for name, symbols in found.items():
            _make_stub(name, symbols, folder, compiler)
        _make_newer_glibc(folder / "libnewer_glibc.a", compiler)
        return {x.relative_to(folder): x.read_bytes() for x in folder.rglob("*") if x.is_file()}


def _make_stub(name: str, symbols: linux.Symbols, folder: Path, compiler: str) -> None:
    """Makes the stub of the library `name` in `folder`."""
    stub, lines = folder / f"{name.partition('.so')[0]}.so", []
    members: dict[str, list[str]] = {}
    for symbol, (version, kind) in sorted(symbols.items()):
        section, type = _DATA.get(kind, _FUNCTION)
        lines.append(f"{section}\n.globl {symbol}\n.type {symbol}, {type}\n{symbol}: .zero 1\n")
        members.setdefault(version, []).append(symbol)
    script = stub.with_suffix(".map")
    versions = (f"{x} {{ {'; '.join(y)}; }};\n" for x, y in sorted(members.items()))
    script.write_text("".join(versions))
    flags = ["-shared", "-nostdlib", f"-Wl,-soname,{name}"]
    if symbols:  # an empty script is an error
        flags.append(f"-Wl,--version-script={script}")
    command = [compiler, *flags, "-o", str(stub), "-x", "assembler", "-"]
    subprocess.run(command, input="".join(lines), text=True, check=True)


def _symbols(allowed: frozenset[str], machine: Machine) -> dict[str, linux.Symbols]:
    """What each library had: for each symbol the newest allowed version, and the symbol's kind."""
    others = {each.loader for each in machines.MACHINES.values() if each != machine}
    names = [library for library in linux.LIBRARIES if library not in others]
    found = {x: linux.newest(linux.versions(x, machine), allowed) for x in names}
    libc, versions = found["libc.so.6"], linux.versions("libc.so.6", machine)
    moved = [x for x in libc if any(linux.order(y) >= (2, 32) for y in versions[x])]
    for library, pattern in _MOVED.items():
        for symbol in filter(pattern.match, moved):
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
    objects, flags = [], ["-std=c11", "-O2", "-fPIC", "-fvisibility=hidden"]
    objcopy, ar = (linux.asked(compiler, "prog", name) for name in ("objcopy", "ar"))
    for source in sorted(NEWER_GLIBC.glob("*.c")):
        object_file = archive.with_name(f"{source.stem}.o")
        subprocess.run([compiler, *flags, "-c", source, "-o", object_file], check=True)
        subprocess.run([objcopy, "--weaken", object_file], check=True)
        objects.append(object_file)
    subprocess.run([ar, "rcsD", archive, *objects], check=True)
