"""Reads a shared library: its symbols, its GPU code, and what it does when it is loaded."""

import ctypes
import functools
import importlib.util
import io
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elftools.elf.constants import P_FLAGS
from elftools.elf.elffile import ELFFile
from elftools.elf.enums import ENUM_DT_FLAGS

from torchwheels.errors import UserError
from torchwheels.system import AARCH64, X86_64, processes

DRIVER = "libcuda.so.1"
"""The file name of CUDA's driver."""


@dataclass(frozen=True)
class GpuCode:
    """The GPU code in a library: the compute capabilities (`9.0`, `9.0a`) for which it has kernels."""

    machine_code: frozenset[str] = frozenset()
    ptx: frozenset[str] = frozenset()
    toolkit: str | None = None
    """The CUDA version whose compiler made the machine code."""

    def __bool__(self) -> bool:
        return bool(self.machine_code or self.ptx)


@dataclass(frozen=True)
class Library:
    """What a shared library needs and holds."""

    machine: str
    """The processor, as ELF has it: `EM_X86_64`."""
    is_program: bool
    """Whether it is one, which names its loader."""
    soname: str | None
    needed: tuple[str, ...]
    rpath: tuple[str, ...]
    undefined: Mapping[str, str]
    """The symbols that it requires, each with its version if it names one."""
    defined: frozenset[str]
    versions: frozenset[str]
    """Those that it wants of other libraries, by a symbol or without one."""
    gpu_code: GpuCode
    executable_stack: bool
    """Whether it wants one."""
    alignment: int
    """In bytes, of what is mapped into memory."""
    static_tls: int
    """The bytes of thread-local memory that it wants beside those of the program's start."""
    start_up_sets_fast_math: bool
    """Whether loading it makes the process flush denormal numbers to zero."""


def read_library(data: bytes) -> Library:
    """Reads an ELF shared library."""
    elf: Any = ELFFile(io.BytesIO(data))
    if name := next(_misleading_sections(elf), ""):
        raise UserError(f"its section {name} is not what is loaded: build the wheel again")
    is_program = any(True for _ in elf.iter_segments("PT_INTERP"))
    if elf["e_type"] != "ET_DYN" and not is_program:
        raise UserError(f"it is of the type {elf['e_type']}, which no process loads as a library")
    dynamic = elf.get_section_by_name(".dynamic")
    strings = elf.get_section_by_name(".dynstr")
    tags = {
        kind: [strings.get_string(tag["d_val"]) for tag in dynamic.iter_tags(f"DT_{kind}")]
        for kind in ("SONAME", "RPATH", "RUNPATH", *_NEEDED)
    }
    stacks = [each["p_flags"] for each in elf.iter_segments("PT_GNU_STACK")]
    undefined, defined, versions = _symbols(elf)
    # A loader that does not know packed relocations leaves them out. The linker asks for one only with its symbols.
    packed = {"GLIBC_ABI_DT_RELR" for _ in dynamic.iter_tags("DT_RELR")}
    is_linked = any(x.name.startswith(_OF_GPUS) for x in elf.iter_sections())
    gpu_code = [data] if is_linked else _modules(data)
    flags = [tag["d_val"] for tag in dynamic.iter_tags("DT_FLAGS")]
    is_static = any(each & ENUM_DT_FLAGS["DF_STATIC_TLS"] for each in flags)
    sets_fast_math = _SETS_FAST_MATH[str(elf["e_machine"])]
    return Library(
        machine=str(elf["e_machine"]),
        is_program=is_program,
        soname=tags["SONAME"][0] if tags["SONAME"] else None,
        needed=tuple(name for kind in _NEEDED for name in tags[kind]),
        rpath=tuple(x for each in tags["RPATH"] + tags["RUNPATH"] for x in each.split(":")),
        executable_stack=not stacks or any(flags & P_FLAGS.PF_X for flags in stacks),
        undefined=undefined,
        defined=defined,
        versions=versions | packed,
        alignment=min(each["p_align"] for each in elf.iter_segments("PT_LOAD")),
        static_tls=sum(each["p_memsz"] for each in elf.iter_segments("PT_TLS") if is_static),
        gpu_code=_gpu_code(gpu_code),
        start_up_sets_fast_math=any(map(sets_fast_math.search, _start_up_functions(elf))),
    )


# All that name a library which the loader looks for.
_NEEDED = ("NEEDED", "AUXILIARY", "FILTER", "AUDIT", "DEPAUDIT")

# The sections that are read here, and what says where the loader finds them.
_LOADED = {
    ".dynsym": "DT_SYMTAB",
    ".dynstr": "DT_STRTAB",
    ".gnu.version": "DT_VERSYM",
    ".gnu.version_r": "DT_VERNEED",
}


def _misleading_sections(elf: Any) -> Iterator[str]:
    """The sections that are not what is loaded, by the segments."""
    (segment,) = elf.iter_segments("PT_DYNAMIC")
    places = {tag["d_tag"]: tag["d_val"] for tag in segment.iter_tags()}
    sizes = {".dynamic": segment["p_filesz"], ".dynstr": places["DT_STRSZ"]}
    tables = segment.get_relocation_tables().values()
    entries = (each for table in tables for each in table.iter_relocations())
    symbols = [each["r_info_sym"] for each in entries if "r_info_sym" in each.entry]
    for name in (".dynamic", *_LOADED):
        section = elf.get_section_by_name(name)
        address = segment["p_vaddr"] if name == ".dynamic" else places.get(_LOADED[name])
        if (
            (section and section["sh_addr"]) != address
            or (section and section["sh_offset"] not in elf.address_offsets(address))
            or (name in sizes and section["sh_size"] != sizes[name])
        ):
            yield name
    known = elf.get_section_by_name(".dynsym").num_symbols()
    if known < max([segment.num_symbols() - 1, *symbols]) + 1:
        yield ".dynsym"
    wanted = elf.get_section_by_name(".gnu.version_r")
    if wanted and wanted.num_versions() != places["DT_VERNEEDNUM"]:
        yield ".gnu.version_r"


def _symbols(elf: Any) -> tuple[dict[str, str], frozenset[str], frozenset[str]]:
    """The undefined symbols with their versions, the defined ones, and all versions that are wanted."""
    symbols = [*elf.get_section_by_name(".dynsym").iter_symbols()]
    numbers = elf.get_section_by_name(".gnu.version")
    wanted = elf.get_section_by_name(".gnu.version_r")
    libraries = wanted.iter_versions() if wanted else ()
    names = {entry["vna_other"]: entry.name for _, entries in libraries for entry in entries}
    undefined, defined = {}, set()
    for index, symbol in enumerate(symbols):
        if symbol["st_shndx"] != "SHN_UNDEF":
            defined.add(symbol.name)
        elif symbol["st_info"]["bind"] == "STB_GLOBAL":  # a weak one is used where it exists
            number = numbers.get_symbol(index)["ndx"] if numbers else 1
            undefined[symbol.name] = names.get(number, "")
    return undefined, frozenset(defined), frozenset(names.values())


# What crtfastmath.o does: on x86-64 it sets 0x8040, both ways to flush to zero, in what ldmxcsr then loads; on aarch64
# it writes the register FPCR (`msr fpcr, x0`, or from another one).
_SETS_FAST_MATH = {
    X86_64.elf: re.compile(rb"(?s)\x40\x80\x00\x00.{0,16}?\xae[\x10-\x17\x50-\x57\x90-\x97]"),
    AARCH64.elf: re.compile(rb"[\x00-\x1f]\x44\x1b\xd5"),
}
_LONGEST_START_UP = 64


def _start_up_functions(elf: Any) -> Iterator[bytes]:
    """The first bytes of the functions that run when the library is loaded."""
    array = elf.get_section_by_name(".init_array")
    if array is None:
        return
    data = array.data()
    addresses = {int.from_bytes(data[x : x + 8], "little") for x in range(0, len(data), 8)}
    relocations = elf.get_section_by_name(".rela.dyn")
    for relocation in relocations.iter_relocations() if relocations else ():
        if 0 <= relocation["r_offset"] - array["sh_addr"] < len(data):
            addresses.add(relocation["r_addend"])
    for address in addresses - {0}:
        for offset in elf.address_offsets(address):
            elf.stream.seek(offset)
            yield elf.stream.read(_LONGEST_START_UP)


_OF_GPUS = (".nv_fatbin", "__nv_relfatbin")
# The start of a fatbin: its magic number, version and length of this header, and the length of what follows.
_FATBIN = re.compile(rb"\x50\xed\x55\xba\x01\x00\x10\x00(.{8})", re.DOTALL)
_MODULE = re.compile(r"^Fatbin (elf|ptx) code:$", re.MULTILINE)
_ARCHITECTURE = re.compile(r"^arch = sm_(\d+)(\d)([a-z]?)$", re.MULTILINE)
_KERNEL = {
    "elf": re.compile(r"^\w*FUNC\b.*ENTRY\s+\S+$", re.MULTILINE),
    "ptx": re.compile(r"^\s*(\.visible |\.weak )?\.entry ", re.MULTILINE),
}


def _modules(library: bytes) -> Iterator[bytes]:
    """The GPU code among the constants of a library, where bin2c puts it for cuModuleLoadData."""
    for found in _FATBIN.finditer(library):
        yield library[found.start() : found.end() + int.from_bytes(found[1], "little")]


def _gpu_code(files: Iterable[bytes]) -> GpuCode:
    """What cuobjdump lists; nvcc puts code without a kernel into all that it links."""
    found: dict[str, set[str]] = {"elf": set(), "ptx": set()}
    toolkit = None
    for each in files:
        with tempfile.NamedTemporaryFile(suffix=".so") as file:
            file.write(each)
            file.flush()
            _, *parts = _MODULE.split("".join(_cuobjdump("-symbols", "-ptx", file.name)))
            for kind, text in zip(parts[::2], parts[1::2], strict=True):
                architecture = _ARCHITECTURE.search(text)
                if architecture and _KERNEL[kind].search(text):
                    major, minor, suffix = architecture.groups()
                    found[kind].add(f"{major}.{minor}{suffix}")
            if found["elf"]:
                toolkit = toolkit or toolkit_version(_cuobjdump("-elf", file.name))
    return GpuCode(frozenset(found["elf"]), frozenset(found["ptx"]), toolkit)


def toolkit_version(listing: Iterable[str]) -> str | None:
    """The CUDA version in a listing of machine code: `13.0`, which older code has as 124."""
    for line in listing:
        if found := re.search(r"\btoolkit=(\d+)\.?(\d)(?![\d.])", line):
            return f"{found[1]}.{found[2]}"
    return None


def _cuobjdump(*arguments: str) -> Iterator[str]:
    """The lines that it prints; whoever has read enough of them may stop."""
    spec = importlib.util.find_spec("nvidia")  # of pip's packages
    folders = map(Path, (spec.submodule_search_locations if spec else None) or ())
    found = [x for folder in folders for x in sorted(folder.glob("*/bin/cuobjdump"), reverse=True)]
    command = [str(found[0]), *arguments]
    # It needs nothing from PATH here.
    pipe = subprocess.PIPE
    with processes.start(command, stdout=pipe, stderr=pipe, text=True, env={"PATH": ""}) as process:
        assert process.stdout and process.stderr
        try:
            yield from process.stdout
            said = process.stderr.read()
        finally:
            processes.end(process)
    if process.returncode != 0 and "does not contain device code" not in said:
        raise UserError(f"cuobjdump cannot read its GPU code: {said.strip()}")


@functools.cache
def demangle(symbol: str) -> str:
    """The C++ name of a symbol, or the symbol itself where it is none of C++."""
    function = ctypes.CDLL("libstdc++.so.6").__cxa_demangle  # no manylinux is without it
    function.restype = ctypes.c_void_p
    pointer = function(symbol.encode(), None, None, ctypes.byref(ctypes.c_int()))
    if not pointer:
        return symbol
    name = ctypes.string_at(pointer).decode(errors="replace")
    ctypes.CDLL(None).free(ctypes.c_void_p(pointer))
    return name
