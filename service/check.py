"""The rules that a wheel must keep: what they find wrong, read from the file itself.

They need no tool of a CUDA toolkit, so they hold for every variant, everywhere. The build applies
them to what it has made, and the audit to what lies in dist/.
"""

from __future__ import annotations

import base64
import email
import fnmatch
import functools
import hashlib
import io
import json
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service import ROOT, ServiceError, baseline, native_libraries, sbom, wheels
from service.compile import BUILD_INFO
from service.matrix import Variant, load

PYTHON_SYMBOLS = re.compile(r"_?Py[A-Z_]\w*")
# torch's C++ functions change from release to release; the stable ones are plain C, of these names.
STABLE_TORCH_SYMBOLS = re.compile(r"(aoti_)?torch_\w+")
OUR_SYMBOLS = re.compile(r"extops_\w+")
# What GCC has every library ask for, to be used where it exists.
GCC_HOOKS = re.compile(r"_ITM_\w+|__gmon_start__")

_NAME = re.compile(r"extops-(\d[^-]*)-([^-]+-[^-]+)-([^-]+)\.whl")

_FACTS = {"architectures", "commit", "cuda", "cxx", "torch_headers", "variant"}
"""What a wheel says of its build."""

METADATA_FILES = {"METADATA", "RECORD", "WHEEL", "top_level.txt", sbom.PATH, "licenses/LICENSE"}
"""What is in the .dist-info folder."""

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
    """What the rules need to know of an ELF file."""

    needed: list[str]
    unversioned: list[str]
    """The symbols that it must find at run time, in no matter which version of a library."""
    gpu_code: bytes


def read_library(data: bytes) -> SharedLibrary:
    """Reads an ELF shared library."""
    from elftools.elf.elffile import ELFFile

    elf: Any = ELFFile(io.BytesIO(data))
    dynamic = elf.get_section_by_name(".dynamic")
    symbols = elf.get_section_by_name(".dynsym").iter_symbols()
    versions = elf.get_section_by_name(".gnu.version").iter_symbols()
    gpu_code = elf.get_section_by_name(".nv_fatbin")
    return SharedLibrary(
        needed=[tag.needed for tag in dynamic.iter_tags("DT_NEEDED")],
        unversioned=[
            symbol.name
            for symbol, version in zip(symbols, versions, strict=True)
            if symbol["st_shndx"] == "SHN_UNDEF"
            and version["ndx"] == "VER_NDX_GLOBAL"
            and not GCC_HOOKS.fullmatch(symbol.name)
        ],
        gpu_code=gpu_code.data() if gpu_code else b"",
    )


class Wheel:
    """A wheel's name and contents."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                files = [name for name in archive.namelist() if not name.endswith("/")]
                self.files = {name: archive.read(name) for name in files}
        except OSError as error:
            raise ServiceError(f"{path} cannot be read: {error.strerror}") from None
        # What zipfile raises for bytes that are no archive, or a spoiled or an encrypted one.
        except (ValueError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
            raise ServiceError(f"{path} is no wheel: {error}") from None
        named = _NAME.fullmatch(path.name)
        if not named:
            raise ServiceError(
                f"{path} is not named extops-<version>-<python>-<abi>-<platform>.whl"
            )
        self.version, self.abi, self.platform = named.groups()
        self.dist_info = f"extops-{self.version}.dist-info"
        """The folder of its metadata."""
        metadata = self.files.get(f"{self.dist_info}/METADATA")
        if metadata is None:
            raise ServiceError(
                f"{path} holds no {self.dist_info}/METADATA, as its name promises: give it the name "
                "that it was built with"
            )
        self.metadata = email.message_from_bytes(metadata)
        """Its METADATA."""

    @functools.cached_property
    def libraries(self) -> dict[str, bytes]:
        """The contents of the package's libraries, by their file names."""
        names = [name for name in self.files if fnmatch.fnmatch(name, "extops/libextops_*.so")]
        return {name.removeprefix("extops/"): self.files[name] for name in sorted(names)}

    @functools.cached_property
    def read_libraries(self) -> list[tuple[Any, SharedLibrary]]:
        """Those that it should have and has: how each is built, and what is in it."""
        known = [(library, f"{library.name}.so") for library in native_libraries().LIBRARIES]
        return [
            (library, read_library(self.libraries[name]))
            for library, name in known
            if name in self.libraries
        ]

    @functools.cached_property
    def info(self) -> dict[str, Any]:
        """What it says of its build."""
        try:
            info: dict[str, Any] = json.loads(self.files[f"extops/{BUILD_INFO}"])
            missing = _FACTS - info.keys()
        except (KeyError, ValueError, AttributeError):
            missing = _FACTS
        if missing:
            raise ServiceError(
                f"{self.path} holds no extops/{BUILD_INFO} that names {', '.join(sorted(missing))}: "
                "build it again"
            )
        return info

    @functools.cached_property
    def record(self) -> list[tuple[str, str]]:
        """The files and hashes that its RECORD names."""
        text = self.files.get(f"{self.dist_info}/RECORD", b"").decode(errors="replace")
        rows = [line.rsplit(",", 2) for line in text.splitlines()]
        return [(row[0], row[1]) for row in rows if len(row) == 3]

    @property
    def contents(self) -> str:
        """Identifies the package inside, without its metadata; tests/conftest.py does the same."""
        lines = sorted(f"{name} {digest.removeprefix('sha256=')}" for name, digest in self.record)
        ours = [line for line in lines if line.startswith("extops/")]
        return hashlib.sha256("\n".join(ours).encode()).hexdigest()

    @functools.cached_property
    def proved_platform(self) -> str:
        """The platform tag that auditwheel proves."""
        from auditwheel.error import NonPlatformWheelError
        from auditwheel.wheel_abi import analyze_wheel_abi

        needed = {name for _, read in self.read_libraries for name in read.needed}
        others = frozenset(name for name in needed if name not in baseline.LIBRARIES)
        try:
            found = analyze_wheel_abi(
                None, None, self.path, others, disable_isa_ext_check=False, allow_graft=False
            )
        except NonPlatformWheelError:
            return "any"
        return str(found.overall_policy.name)


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


def version_and_label(wheel: Wheel, variant: Variant) -> list[str]:
    """The name's version is that of the metadata, and its label the variant's."""
    found = []
    if wheels.label(wheel.path) != variant.label:
        expected = f"+{variant.label}" if variant.label else "no label"
        found.append(f"its version is {wheel.version}, but {variant.name} has {expected}")
    if wheel.metadata["Version"] != wheel.version:
        found.append(f"its metadata names the version {wheel.metadata['Version']}")
    return found


def manylinux_tag(wheel: Wheel, variant: Variant) -> list[str]:
    """The name's platform is the one auditwheel proves, and as old as the matrix wants."""
    if wheel.platform != wheel.proved_platform:
        return [f"its tag is {wheel.platform}, but auditwheel proves {wheel.proved_platform}"]
    oldest, found = map(_glibc, (load().manylinux, wheel.platform))
    if found > oldest:
        return [f"its tag is {wheel.platform}, but {load().manylinux} or older is wanted"]
    return []


def _glibc(platform: str) -> tuple[int, int]:
    found = re.match(r"manylinux_(\d+)_(\d+)", platform)
    return (int(found[1]), int(found[2])) if found else (99, 0)


def python_abi(wheel: Wheel, variant: Variant) -> list[str]:
    """One wheel serves every Python: neither its tag nor its libraries know Python's ABI."""
    found = [f"its tag is {wheel.abi}, not py3-none"] if wheel.abi != "py3-none" else []
    for library, read in wheel.read_libraries:
        symbols = filter(PYTHON_SYMBOLS.fullmatch, read.unversioned)
        found += [f"{library.name}.so uses {symbol}" for symbol in symbols]
    return found


def stable_abi(wheel: Wheel, variant: Variant) -> list[str]:
    """The stable lane uses torch's stable functions only, and the kernels none of torch's."""
    found = []
    for library, read in wheel.read_libraries:
        for symbol in read.unversioned:
            known = OUR_SYMBOLS.fullmatch(symbol) or PYTHON_SYMBOLS.fullmatch(symbol)
            if known or (library.torch_links and STABLE_TORCH_SYMBOLS.fullmatch(symbol)):
                continue
            found.append(
                f"{library.name}.so uses {symbol}, which is neither in torch's stable ABI nor in "
                f"{load().manylinux}"
            )
    return found


def gpu_code(wheel: Wheel, variant: Variant) -> list[str]:
    """The kernels are there for every GPU architecture of the matrix, and as PTX."""
    found = []
    for library, read in wheel.read_libraries:
        has_kernels = any(pattern.endswith(".cu") for pattern in library.patterns)
        wanted = variant.architectures if has_kernels else ()
        numbers = {name: int(name.removesuffix("+PTX").replace(".", "")) for name in wanted}
        ptx = {numbers[name] for name in wanted if name.endswith("+PTX")}
        if architectures(read.gpu_code) != (set(numbers.values()), ptx):
            machine_code, ptx = architectures(read.gpu_code)
            found.append(
                f"{library.name}.so holds GPU code for {sorted(machine_code)} and PTX for "
                f"{sorted(ptx)}, but {variant.name} names {' '.join(wanted) or 'none'}"
            )
    return found


def bundled_libraries(wheel: Wheel, variant: Variant) -> list[str]:
    """No library of CUDA, of torch or of anyone else is packed."""
    strangers = sorted(name for name in wheel.files if _is_library(name) and not _is_ours(name))
    return [f"it holds the library {name}, which is not ours" for name in strangers]


def linked_libraries(wheel: Wheel, variant: Variant) -> list[str]:
    """The libraries name each other and torch's, and need nothing else that a system may lack."""
    found = []
    for library, read in wheel.read_libraries:
        name = f"{library.name}.so"
        wanted = [f"{each}.so" for each in library.links]
        wanted += [f"lib{each}.so" for each in library.torch_links]
        found += [f"{name} does not name {each}" for each in wanted if each not in read.needed]
        others = [x for x in read.needed if x not in (*baseline.LIBRARIES, *wanted)]
        found += [f"{name} needs {each}" for each in others]
    return found


def size(wheel: Wheel, variant: Variant) -> list[str]:
    """The file keeps to the budget of the matrix."""
    budget = load().budget["cuda" if variant.cuda else "cpu"]
    megabytes = wheel.path.stat().st_size / 1e6
    return (
        [f"it has {megabytes:.2f} MB, over the {budget} MB allowed"] if megabytes > budget else []
    )


def files(wheel: Wheel, variant: Variant) -> list[str]:
    """It holds the package, its libraries and sources, and the metadata: all, and nothing else."""
    csrc = {f"csrc/{path.relative_to(ROOT / 'csrc')}" for path in (ROOT / "csrc").rglob("*.*")}
    package = ROOT / "package" / "extops"
    modules = {str(path.relative_to(package)) for path in package.rglob("*.py")}
    libraries = {f"{x.name}.so" for x in native_libraries().libraries(cuda=bool(variant.cuda))}
    wanted = {f"extops/{name}" for name in csrc | modules | libraries | {BUILD_INFO, "py.typed"}}
    wanted |= {f"{wheel.dist_info}/{name}" for name in METADATA_FILES}
    found = {name for name in wheel.files if not _is_library(name) or _is_ours(name)}
    return [
        *(f"it lacks {name}" for name in sorted(wanted - found)),
        *(f"it holds {name}, which does not belong" for name in sorted(found - wanted)),
    ]


def _is_library(name: str) -> bool:
    return name.endswith((".so", ".a")) or ".so." in name


def _is_ours(name: str) -> bool:
    return name in {f"extops/{library.name}.so" for library in native_libraries().LIBRARIES}


def record(wheel: Wheel, variant: Variant) -> list[str]:
    """RECORD names every file, with the hash that the file has."""
    path = f"{wheel.dist_info}/RECORD"
    expected = {name: record_hash(data) for name, data in wheel.files.items() if name != path}
    found = dict(wheel.record)
    differing = {name for name, digest in expected.items() if found.get(name) != digest}
    return [f"its RECORD is not right about {name}" for name in sorted(differing)]


def record_hash(data: bytes) -> str:
    """The hash of a file as RECORD has it."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
    return f"sha256={digest.rstrip('=')}"


def bill_of_materials(wheel: Wheel, variant: Variant) -> list[str]:
    """The bill of materials says what the wheel's other files say."""
    path = f"{wheel.dist_info}/{sbom.PATH}"
    metadata = wheel.files.get(f"{wheel.dist_info}/METADATA")
    if metadata is None or path not in wheel.files:
        return []  # which `files` says already
    right = wheel.files[path].decode() == sbom.text(metadata, wheel.info, wheel.libraries)
    return [] if right else [f"its {sbom.PATH} does not describe this wheel"]


Rule = Callable[[Wheel, Variant], list[str]]

RULES: tuple[Rule, ...] = (
    version_and_label,
    manylinux_tag,
    python_abi,
    stable_abi,
    gpu_code,
    bundled_libraries,
    linked_libraries,
    size,
    files,
    record,
    bill_of_materials,
)


def findings(wheel: Wheel, variant: Variant) -> dict[str, list[str]]:
    """What each rule finds wrong with `wheel` as the wheel of `variant`."""
    return {rule.__name__: _apply(rule, wheel, variant) for rule in RULES}


def _apply(rule: Rule, wheel: Wheel, variant: Variant) -> list[str]:
    try:
        return rule(wheel, variant)
    except Exception as error:  # of pyelftools or auditwheel, say, about a library cut short
        return [f"it cannot be judged: {type(error).__name__}: {error}"]


def check(path: Path, variant: Variant) -> None:
    """Raises an error that names all that is wrong with the wheel."""
    found = findings(Wheel(path), variant)
    problems = [problem for problems in found.values() for problem in problems]
    if problems:
        raise ServiceError(f"{path.name} is not fit to publish: {'; '.join(problems)}")
    print(f"extops: checked {path.name}: it keeps all {len(found)} rules")
