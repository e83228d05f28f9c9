"""What a wheel holds, and what it works with: read from its files alone."""

from __future__ import annotations

import ctypes
import email
import functools
import importlib.util
import io
import json
import re
import stat
import subprocess
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from email.message import Message
from pathlib import Path, PurePosixPath
from typing import Any

from abi3info import DATAS, FUNCTIONS  # type: ignore[import-untyped]
from auditwheel.error import NonPlatformWheelError
from auditwheel.wheel_abi import analyze_wheel_abi
from elftools.elf.constants import P_FLAGS
from elftools.elf.elffile import ELFFile
from elftools.elf.enums import ENUM_DT_FLAGS
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from torchwheels import baseline
from torchwheels.archive import check_layout
from torchwheels.errors import UserError
from torchwheels.machines import AARCH64, X86_64
from torchwheels.releases import Target, numbers
from torchwheels.stable_functions import first_releases

BUILD_RECORD = "torchwheels.json"
"""Inside the .dist-info folder."""

MOST_FILES = 50_000
MOST_BYTES = 4 * 10**9
"""What a wheel may unpack to: it is held in memory."""

# torch's C++ functions change from release to release; the stable ones are plain C, of these names.
_TORCH_NAMESPACE = re.compile(r"\b(c10|c10d|at|torch|caffe2)::|\bTHP[A-Z]\w+")
_STABLE_NAME = re.compile(r"(aoti_)?torch_\w+|aoti_record_function_\w+")
_PYTHON_NAME = re.compile(r"_?Py[A-Z_]\w*")
_OF_ONE_PYTHON = re.compile(r"\.cpython-3(\d+)t?-[^.]*\.so$")
# The libraries of CUDA whose own version is that of CUDA.
CUDA_LIBRARY = re.compile(r"lib(?:cudart|cublas|cublasLt|nvrtc|nvJitLink)\.so\.(\d+)")


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
    soname: str | None
    needed: tuple[str, ...]
    rpath: tuple[str, ...]
    undefined: Mapping[str, str]
    """The symbols that it cannot do without, each with the version it wants, or with none."""
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


@dataclass(frozen=True)
class Compatibility:
    """The versions that a wheel works with, and what shows it."""

    what: str | None
    """A specifier of versions, such as `==2.13.*`, empty for all of them; None where nothing tells."""
    why: str


@dataclass(frozen=True)
class Wheel:
    """A wheel's name and contents."""

    path: Path
    name: str
    version: Version
    tags: frozenset[Tag]
    files: Mapping[str, bytes]
    dist_info: str
    """The folder of its metadata."""

    @functools.cached_property
    def metadata(self) -> Message:
        """Its METADATA."""
        return email.message_from_bytes(self.files[f"{self.dist_info}/METADATA"])

    @functools.cached_property
    def torch_requirement(self) -> SpecifierSet | None:
        """The torch that it wants beside it everywhere, by its metadata."""
        found = None
        for line in self.metadata.get_all("Requires-Dist") or []:
            try:
                requirement = Requirement(line)
            except InvalidRequirement:
                continue  # which the audit reports
            if canonicalize_name(requirement.name) == "torch" and not requirement.marker:
                found = requirement.specifier & (found or SpecifierSet())
        return found

    @functools.cached_property
    def record(self) -> dict[str, Any] | None:
        """What it says of its build."""
        try:
            found = json.loads(self.files[f"{self.dist_info}/{BUILD_RECORD}"])
        except (KeyError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    @functools.cached_property
    def libraries(self) -> dict[str, Library]:
        """Every shared library, by its path in the wheel."""
        found = {}
        for name, data in sorted(self.files.items()):
            if data.startswith(b"\x7fELF") or name.endswith(".so") or ".so." in name:
                found[name] = self._read(name, data)
        return found

    def _read(self, name: str, data: bytes) -> Library:
        try:
            return read_library(data)
        except UserError as error:
            raise UserError(f"{self.path.name}: {name}: {error}") from None
        except Exception as error:  # of many kinds, from pyelftools
            raise UserError(
                f"{self.path.name}: {name} is no whole shared library of Linux "
                f"({type(error).__name__}: {error}): build the wheel again"
            ) from None

    @functools.cached_property
    def brought(self) -> frozenset[str]:
        """The names by which its libraries find each other."""
        sonames = {library.soname for library in self.libraries.values() if library.soname}
        return frozenset(sonames | {Path(name).name for name in self.libraries})

    def wanted(self, library: Library) -> Iterator[str]:
        """What `library` takes from anything but the wheel, and in no matter which version."""
        own = {name for each in self.libraries.values() for name in each.defined}
        for symbol, version in library.undefined.items():
            if not version and symbol not in own:
                yield symbol

    def _of_others(self, library: Library) -> Iterator[str]:
        """What `library` takes from torch or Python, among others.

        In whatever version: a library without versions works with all. What another library of the wheel has
        counts as such only where `library` loads that, or neither torch nor Python has it.
        """
        own = {name for each in self.libraries.values() for name in each.defined}
        loaded = {name for each in self._loaded_with(library) for name in each.defined}
        for symbol in library.undefined:
            known = symbol in first_releases() or symbol in _limited_api()
            if symbol not in loaded and (
                symbol not in own or known or _TORCH_NAMESPACE.search(demangle(symbol))
            ):
                yield symbol

    def _loaded_with(self, library: Library) -> list[Library]:
        """The libraries of the wheel that `library` loads, and those that they load."""
        named = {each.soname or Path(name).name: each for name, each in self.libraries.items()}
        found: dict[str, Library] = {}
        names = [*library.needed]
        while names:
            name = names.pop()
            if name in named and name not in found:
                found[name] = named[name]
                names += named[name].needed
        return [*found.values()]

    def torch_functions(self, library: Library) -> tuple[list[str], list[str]]:
        """What `library` uses of torch: the stable functions, and what belongs to one release."""
        stable, classic = [], []
        for symbol in self._of_others(library):
            if _STABLE_NAME.fullmatch(symbol):
                stable.append(symbol)
            elif _TORCH_NAMESPACE.search(demangle(symbol)):
                classic.append(symbol)
        return sorted(stable), sorted(classic)

    def python_functions(self, library: Library) -> list[str]:
        """What `library` uses of Python."""
        return sorted(filter(_PYTHON_NAME.fullmatch, self._of_others(library)))

    @functools.cached_property
    def proved_platform(self) -> str:
        """The platform tag that auditwheel proves, `any` where it finds no library."""
        needed = {name for library in self.libraries.values() for name in library.needed}
        others = frozenset(needed.difference(baseline.LIBRARIES))
        try:
            found = analyze_wheel_abi(
                None, None, self.path, others, disable_isa_ext_check=False, allow_graft=False
            )
        except NonPlatformWheelError:
            return "any"
        return str(found.overall_policy.name)

    @functools.cached_property
    def pythons(self) -> Compatibility:
        """The Pythons that it installs for; `python_limits` says what its libraries stand."""
        tag = min(self.tags, key=str)
        release = re.fullmatch(r"(cp|py)3(\d+)", tag.interpreter)
        reasons = [f"its tag is {tag.interpreter}-{tag.abi}"]
        reasons += [why for _, why in self.python_limits.values()]
        if not self.python_limits:
            reasons.append("no library uses Python")
        why = "; ".join(reasons)
        if not release:
            return Compatibility("", why)
        is_oldest = tag.abi == "abi3" or release[1] == "py"
        return Compatibility(f">=3.{release[2]}" if is_oldest else f"==3.{release[2]}.*", why)

    def takes(self, target: Target) -> bool:
        """Whether the Python of `target` installs it."""
        return serves(target, self.pythons.what, min(map(str, self.tags)))

    @functools.cached_property
    def python_limits(self) -> dict[str, tuple[str | None, str]]:
        """The specifier of the Pythons that each library which uses Python works with, and why.

        None instead of a specifier: one Python, which nothing names but the wheel's tag.
        """
        limits: dict[str, tuple[str | None, str]] = {}
        for name, library in self.libraries.items():
            of_one = _OF_ONE_PYTHON.search(name)
            used = self.python_functions(library)
            first = {symbol: _limited_api().get(symbol) for symbol in used}
            outside = [symbol for symbol in used if first[symbol] is None]
            modules = [symbol for symbol in library.defined if symbol.startswith("PyInit_")]
            if of_one:
                limits[name] = f"==3.{of_one[1]}.*", f"{name} has the name of one Python's module"
            elif outside:
                limits[name] = None, f"{name} uses {outside[0]}, which is not in the Limited API"
            elif used:
                newest = max(used, key=lambda symbol: numbers(first[symbol] or "0"))
                why = f"{name} uses {newest}, which is in the Limited API from {first[newest]} on"
                limits[name] = f">={first[newest]}", why
            elif modules:
                limits[name] = ">=3.2", f"{name} is a module of Python"
        return limits

    @functools.cached_property
    def torches(self) -> Compatibility:
        """The releases of torch that its libraries load under."""
        used = {name: self.torch_functions(each) for name, each in self.libraries.items()}
        for name, (_, classic) in used.items():
            if classic:
                why = (
                    f"{name} uses {demangle(classic[0])} and {len(classic) - 1} more of torch's C++, "
                    "which changes with every release"
                )
                return Compatibility(self._built_beside, why)
        stable = [(symbol, name) for name, (symbols, _) in used.items() for symbol in symbols]
        if not stable:
            return Compatibility("", "no library uses a function of torch")
        first = {symbol: first_releases().get(symbol) for symbol, _ in stable}
        symbol, name = max(stable, key=lambda each: numbers(first[each[0]] or "99"))
        if first[symbol] is None:
            return Compatibility(None, f"{name} uses {symbol}, which no list of torch's holds")
        return Compatibility(
            f">={first[symbol]}",
            f"of torch's stable ABI, {name} uses {symbol}, which is in it from {first[symbol]} on",
        )

    @property
    def _built_beside(self) -> str | None:
        """The specifier of the one minor release that it was built beside, by all that it says."""
        if self.torch_requirement is not None:
            minors = admitted(self.torch_requirement)
            if len(minors) == 1:
                return f"=={minors[0]}.*"
        torch = str((self.record or {}).get("torch", ""))
        return f"=={'.'.join(torch.split('.')[:2])}.*" if torch else None

    @functools.cached_property
    def cuda(self) -> Compatibility:
        """The major version of CUDA that its libraries need at run time."""
        for name, library in self.libraries.items():
            for needed in library.needed:
                if found := CUDA_LIBRARY.fullmatch(needed):
                    return Compatibility(f"=={found[1]}.*", f"{name} needs {needed}")
        for name, library in self.libraries.items():
            if library.gpu_code:
                return Compatibility(
                    "",
                    f"{name} holds GPU code, made by CUDA {library.gpu_code.toolkit}, and needs no "
                    "library of CUDA",
                )
        return Compatibility("", "no library uses CUDA")


def serves(target: Target, pythons: str | None, tag: str) -> bool:
    """Whether a wheel of that tag, for these Pythons, is for the target's, which may be free-threaded."""
    abi = tag.split("-")[1]
    return (
        SpecifierSet(pythons or "").contains(target.python_version)
        # A module of one of the two does not load in the other.
        and (abi == "none" or abi.endswith("t") == target.python.endswith("t"))
    )


# Its last part, the label of the variant, follows the platform; the part of the Python begins with a letter.
_VARIANT_NAME = re.compile(r"[^-]+-[^-]+(-\d[^-]*)?-[^-\d][^-]*-[^-]+-[^-]+-[0-9a-z_.]+\.whl")


def wheels_in(folder: Path) -> list[Path]:
    """The wheels in a folder, without those that are the variant of another (PEP 825)."""
    found = sorted(folder.glob("*.whl"))
    return [path for path in found if not _VARIANT_NAME.fullmatch(path.name)]


def read(path: Path) -> Wheel:
    """Reads a wheel."""
    if not re.fullmatch(r"[A-Za-z0-9_.+!-]+", path.name):
        raise UserError(f"{str(path)!r} has characters in its name that the name of no wheel has")
    try:
        with zipfile.ZipFile(path) as archive:
            files = _unpack(archive)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    # What zipfile raises for bytes that are no archive, or a spoiled or an encrypted one.
    except (ValueError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise UserError(f"{path} is no wheel: {error}") from None
    try:
        name, version, _, tags = parse_wheel_filename(path.name)
    except InvalidWheelFilename as error:
        raise UserError(
            f"{path} is not named <project>-<version>-<python>-<abi>-<platform>.whl: {error}"
        ) from None
    folders = [x.partition("/")[0] for x in files if re.fullmatch(r"[^/]+\.dist-info/METADATA", x)]
    if len(folders) != 1:
        raise UserError(
            f"{path} holds {len(folders)} files *.dist-info/METADATA, but a wheel has one: build it "
            "again"
        )
    return Wheel(path, name, version, tags, files, folders[0])


def _unpack(archive: zipfile.ZipFile) -> dict[str, bytes]:
    """The files in an archive that is what installers expect; else a ValueError says what it is not."""
    entries = archive.infolist()
    if len(entries) > MOST_FILES:
        raise ValueError(f"it holds {len(entries)} files, over the {MOST_FILES} allowed")
    if (size := sum(entry.file_size for entry in entries)) > MOST_BYTES:
        raise ValueError(
            f"it unpacks to {size / 1e9:.3g} GB, over the {MOST_BYTES / 1e9:g} GB allowed"
        )
    names = set()
    for entry in entries:
        name = entry.orig_filename  # the other one ends at a zero
        kind = stat.S_IFMT(entry.external_attr >> 16)
        if not name.isprintable() or "\\" in name:
            raise ValueError(f"the name {name!r} has characters that no file shall have")
        if {"", ".", ".."}.intersection(name.removesuffix("/").split("/")):
            raise ValueError(f"the name {name!r} leads out of the wheel")
        if kind not in (0, stat.S_IFDIR if entry.is_dir() else stat.S_IFREG):
            raise ValueError(f"{name} is neither a file nor a folder")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{name} is neither stored nor deflated")
        if name in names:
            raise ValueError(f"it holds {name} twice")
        names.add(name)
    folders = {str(parent) for name in names for parent in PurePosixPath(name).parents}
    if both := names & folders:
        raise ValueError(f"it holds {min(both)} as a file and as a folder")
    check_layout(archive)
    files = {}
    for entry in entries:
        if not entry.is_dir():
            with archive.open(entry) as file:
                # No more than it says: without a number, all that is there would be unpacked first.
                files[entry.orig_filename] = file.read(entry.file_size + 1)
    return files


@functools.cache
def admitted(specifier: SpecifierSet) -> list[str]:
    """The minor releases of torch 2 of which `specifier` admits one at least, the oldest first."""
    # However many there are or will be: of no minor release were there ten.
    return [
        f"2.{minor}"
        for minor in range(100)
        if any(specifier.contains(f"2.{minor}.{patch}") for patch in range(10))
    ]


def read_library(data: bytes) -> Library:
    """Reads an ELF shared library."""
    elf: Any = ELFFile(io.BytesIO(data))
    _check_sections(elf)
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
    flags = [tag["d_val"] for tag in dynamic.iter_tags("DT_FLAGS")]
    is_static = any(each & ENUM_DT_FLAGS["DF_STATIC_TLS"] for each in flags)
    return Library(
        machine=str(elf["e_machine"]),
        soname=tags["SONAME"][0] if tags["SONAME"] else None,
        needed=tuple(name for kind in _NEEDED for name in tags[kind]),
        rpath=tuple(
            folder for each in (*tags["RPATH"], *tags["RUNPATH"]) for folder in each.split(":")
        ),
        executable_stack=not stacks or any(flags & P_FLAGS.PF_X for flags in stacks),
        undefined=undefined,
        defined=defined,
        versions=versions | packed,
        alignment=min(each["p_align"] for each in elf.iter_segments("PT_LOAD")),
        static_tls=sum(each["p_memsz"] for each in elf.iter_segments("PT_TLS") if is_static),
        gpu_code=_gpu_code(data) if _has_gpu_code(elf) else GpuCode(),
        start_up_sets_fast_math=any(
            _SETS_FAST_MATH[str(elf["e_machine"])].search(code) for code in _start_up_functions(elf)
        ),
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


def _check_sections(elf: Any) -> None:
    """Raises an error where the sections are not what is loaded, by the segments."""
    (segment,) = elf.iter_segments("PT_DYNAMIC")
    places = {tag["d_tag"]: tag["d_val"] for tag in segment.iter_tags()}
    sizes = {".dynamic": segment["p_filesz"], ".dynstr": places["DT_STRSZ"]}
    symbols = [
        each["r_info_sym"]
        for table in segment.get_relocation_tables().values()
        for each in table.iter_relocations()
        if "r_info_sym" in each.entry
    ]
    for name in (".dynamic", *_LOADED):
        section = elf.get_section_by_name(name)
        address = segment["p_vaddr"] if name == ".dynamic" else places.get(_LOADED[name])
        if (
            (section and section["sh_addr"]) != address
            or (section and section["sh_offset"] not in elf.address_offsets(address))
            or (name in sizes and section["sh_size"] != sizes[name])
        ):
            raise UserError(f"its section {name} is not what is loaded: build the wheel again")
    table = elf.get_section_by_name(".dynsym")
    wanted = elf.get_section_by_name(".gnu.version_r")
    if table.num_symbols() < max([segment.num_symbols() - 1, *symbols]) + 1:
        raise UserError("its section .dynsym is not what is loaded: build the wheel again")
    if wanted and wanted.num_versions() != places["DT_VERNEEDNUM"]:
        raise UserError("its section .gnu.version_r is not what is loaded: build the wheel again")


def _symbols(elf: Any) -> tuple[dict[str, str], frozenset[str], frozenset[str]]:
    """The undefined symbols with their versions, the defined ones, and all versions that are wanted."""
    symbols = [*elf.get_section_by_name(".dynsym").iter_symbols()]
    numbers = elf.get_section_by_name(".gnu.version")
    wanted = elf.get_section_by_name(".gnu.version_r")
    names = {
        entry["vna_other"]: entry.name
        for _, entries in (wanted.iter_versions() if wanted else ())
        for entry in entries
    }
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
    X86_64.elf: re.compile(
        rb"\x40\x80\x00\x00.{0,16}?\xae[\x10-\x17\x50-\x57\x90-\x97]", re.DOTALL
    ),
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


def _has_gpu_code(elf: Any) -> bool:
    return any(
        section.name.startswith((".nv_fatbin", "__nv_relfatbin")) for section in elf.iter_sections()
    )


_MODULE = re.compile(r"^Fatbin (elf|ptx) code:$", re.MULTILINE)
_ARCHITECTURE = re.compile(r"^arch = sm_(\d+)(\d)([a-z]?)$", re.MULTILINE)
_KERNEL = {
    "elf": re.compile(r"^\w*FUNC\b.*ENTRY\s+\S+$", re.MULTILINE),
    "ptx": re.compile(r"^\s*(\.visible |\.weak )?\.entry ", re.MULTILINE),
}


def _gpu_code(library: bytes) -> GpuCode:
    """What cuobjdump lists; nvcc puts code without a kernel into all that it links."""
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(library)
        file.flush()
        _, *parts = _MODULE.split("".join(_cuobjdump("-symbols", "-ptx", file.name)))
        found: dict[str, set[str]] = {"elf": set(), "ptx": set()}
        for kind, text in zip(parts[::2], parts[1::2], strict=True):
            architecture = _ARCHITECTURE.search(text)
            if architecture and _KERNEL[kind].search(text):
                major, minor, suffix = architecture.groups()
                found[kind].add(f"{major}.{minor}{suffix}")
        return GpuCode(
            machine_code=frozenset(found["elf"]),
            ptx=frozenset(found["ptx"]),
            toolkit=toolkit_version(_cuobjdump("-elf", file.name)) if found["elf"] else None,
        )


def toolkit_version(listing: Iterable[str]) -> str | None:
    """The CUDA version in a listing of machine code: `13.0`, which older code has as 124."""
    for line in listing:
        if found := re.search(r"\btoolkit=(\d+)\.?(\d)(?![\d.])", line):
            return f"{found[1]}.{found[2]}"
    return None


def _cuobjdump(*arguments: str) -> Iterator[str]:
    """The lines that it prints; whoever has read enough of them may stop."""
    command = [str(_tool("cuobjdump")), *arguments]
    # What it could find on PATH it does not need for this.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={"PATH": ""}
    ) as process:
        assert process.stdout and process.stderr
        try:
            yield from process.stdout
        except GeneratorExit:
            process.kill()
            raise
        said = process.stderr.read()
    if process.returncode != 0 and "does not contain device code" not in said:
        raise UserError(f"cuobjdump cannot read its GPU code: {said.strip()}")


def _tool(name: str) -> Path:
    """A tool of the CUDA toolkit, from pip's packages."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for path in sorted(Path(folder).glob(f"*/bin/{name}"), reverse=True):
            return path
    raise UserError(f"GPU code cannot be read without {name}: run `pip install nvidia-cuda-{name}`")


@functools.cache
def demangle(symbol: str) -> str:
    """The C++ name of a symbol, or the symbol itself where it is none of C++."""
    function = _demangler()
    status = ctypes.c_int()
    pointer = function(symbol.encode(), None, None, ctypes.byref(status))
    if not pointer:
        return symbol
    name = ctypes.string_at(pointer).decode(errors="replace")
    ctypes.CDLL(None).free(ctypes.c_void_p(pointer))
    return name


@functools.cache
def _demangler() -> Any:
    """The C++ library's own function: no manylinux is without it."""
    try:
        function = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    except OSError as error:
        raise UserError(
            f"C++ names cannot be read without libstdc++.so.6 ({error}): install the system's libstdc++6"
        ) from None
    function.restype = ctypes.c_void_p
    return function


@functools.cache
def _limited_api() -> dict[str, str]:
    """CPython's Limited API: for each symbol the Python that first had it in it."""
    return {symbol.name: str(entry.added) for symbol, entry in [*FUNCTIONS.items(), *DATAS.items()]}
