"""The contents of a wheel, and what it works with: read from its files alone."""

import contextlib
import email
import functools
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from email.message import Message
from pathlib import Path
from typing import Any

import msgspec
from abi3info import DATAS, FUNCTIONS  # type: ignore[import-untyped]
from auditwheel.error import NonPlatformWheelError
from auditwheel.wheel_abi import analyze_wheel_abi
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from torchwheels.errors import RefusedError, UserError
from torchwheels.options import Target, admitted, numbers
from torchwheels.wheel import linux
from torchwheels.wheel.archive import unpack
from torchwheels.wheel.elf import Library, demangle, read_library
from torchwheels.wheel.stable_functions import first_releases

BUILD_RECORD = "torchwheels.json"
"""Inside the .dist-info folder."""

# torch's C++ functions change from release to release; the stable ones are plain C, of these names.
_TORCH_NAMESPACE = re.compile(
    r"\b(c10|c10d|at|torch|caffe2)::|\bTHP[A-Z]\w+|^(ParameterClass|getPyInterpreter\(\))$"
)
_STABLE_NAME = re.compile(r"(aoti_)?torch_\w+|aoti_record_function_\w+")
_PYTHON_NAME = re.compile(r"_?Py[A-Z_]\w*")
_OF_ONE_PYTHON = re.compile(r"\.cpython-3(\d+)t?-[^.]*\.so$")
# A text in place of a library, which says to a linker what the library is.
_LINKER_SCRIPT = re.compile(rb"(\s|/\*.*?\*/)*(OUTPUT_FORMAT|INPUT|GROUP)\s*\(", re.DOTALL)
# The libraries of CUDA whose own version is that of CUDA.
CUDA_LIBRARY = re.compile(r"lib(?:cudart|cublas|cublasLt|nvrtc|nvJitLink)\.so\.(\d+)")


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
    seen: Mapping[bytes, Library] = field(default_factory=dict, repr=False)
    """Libraries that were looked at before, by their bytes."""

    def with_files(self, files: Mapping[str, bytes], **others: Any) -> "Wheel":
        """Another wheel, with these files and `others` of its fields, which knows the libraries that it takes over."""
        seen = {self.files[name]: library for name, library in self.libraries.items()}
        return replace(self, files=files, seen=seen, **others)

    @functools.cached_property
    def metadata(self) -> Message:
        """Its METADATA."""
        text = self.files[f"{self.dist_info}/METADATA"].decode(errors="replace")
        return email.message_from_string(text)

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

    @property
    def required_pythons(self) -> SpecifierSet:
        """Those that its metadata name; all, where they name none."""
        with contextlib.suppress(InvalidSpecifier):  # which the audit reports
            return SpecifierSet(self.metadata["Requires-Python"] or "")
        return SpecifierSet()

    def installed(self, name: str) -> tuple[str, str]:
        """The scheme of a file, such as `platlib`, and where it comes to lie in the scheme's folder."""
        data = f"{self.dist_info.removesuffix('.dist-info')}.data/"
        if not name.startswith(data):
            return "platlib", name
        scheme, _, path = name.removeprefix(data).partition("/")
        return scheme, path

    @functools.cached_property
    def record(self) -> dict[str, Any] | None:
        """What it says of its build."""
        try:
            text = self.files[f"{self.dist_info}/{BUILD_RECORD}"]
            return msgspec.json.decode(text, type=dict[str, Any])
        except (KeyError, ValueError, RecursionError):
            return None

    @functools.cached_property
    def libraries(self) -> dict[str, Library]:
        """Every shared library, by its path in the wheel."""
        found = {}
        for name, data in sorted(self.files.items()):
            is_named_so = name.endswith(".so") or ".so." in name
            if _is_loaded(data) or (is_named_so and not _LINKER_SCRIPT.match(data)):
                try:
                    found[name] = self.seen.get(data) or read_library(data)
                except UserError as error:
                    raise RefusedError(f"{self.path.name}: {name}: {error}") from None
                except Exception as error:  # of many kinds, from pyelftools
                    raise RefusedError(
                        f"{self.path.name}: {name} is no whole shared library of Linux "
                        f"({type(error).__name__}: {error}): build the wheel again"
                    ) from None
        return found

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
        for symbol in library.undefined.keys() - loaded:
            known = symbol not in own or symbol in first_releases() or symbol in _limited_api()
            if known or _TORCH_NAMESPACE.search(demangle(symbol)):
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

    @functools.cached_property
    def classic_use(self) -> str:
        """What a library uses that belongs to one release of torch; empty where none does."""
        for name, library in self.libraries.items():
            if classic := self.torch_functions(library)[1]:
                used = f"{demangle(classic[0])} and {len(classic) - 1} more of torch's C++"
                return f"{name} uses {used}, which changes with every release"
        return ""

    def python_functions(self, library: Library) -> list[str]:
        """What `library` uses of Python."""
        return sorted(filter(_PYTHON_NAME.fullmatch, self._of_others(library)))

    @functools.cached_property
    def proved_platform(self) -> str:
        """The platform tag that auditwheel proves, `any` where it finds no library."""
        needed = {name for library in self.libraries.values() for name in library.needed}
        others = frozenset(needed.difference(linux.LIBRARIES))
        options = {"disable_isa_ext_check": False, "allow_graft": False}
        try:
            found = analyze_wheel_abi(None, None, self.path, others, **options)
        except NonPlatformWheelError:
            return "any"
        return str(found.overall_policy.name)

    @functools.cached_property
    def pythons(self) -> str:
        """A specifier of the Pythons that it installs for; `python_limits` says what its libraries stand."""
        tag = min(self.tags, key=str)
        release = re.fullmatch(r"(cp|py)3(\d+)", tag.interpreter)
        if not release:
            return ""
        is_oldest = tag.abi == "abi3" or release[1] == "py"
        return f">=3.{release[2]}" if is_oldest else f"==3.{release[2]}.*"

    def takes(self, target: Target) -> bool:
        """Whether the Python of `target` installs it."""
        return serves(target, self.pythons, min(map(str, self.tags)))

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

    @property
    def too_many_pythons(self) -> list[str]:
        """Why its libraries do not work with every Python that its tag promises."""
        limits = self.python_limits.values()
        return [why for limit, why in limits if not _covers(limit, self.pythons)]

    @functools.cached_property
    def torches(self) -> str | None:
        """A specifier of the torches that its libraries load under; None where nothing tells."""
        if self.classic_use:  # the one minor release that it was built beside, by all that it says
            minors = admitted(self.torch_requirement or SpecifierSet("==0"))
            torch = str((self.record or {}).get("torch", ""))
            named = minors[0] if len(minors) == 1 else ".".join(torch.split(".")[:2])
            return f"=={named}.*" if named else None
        used = {x for each in self.libraries.values() for x in self.torch_functions(each)[0]}
        if not used <= first_releases().keys():
            return None
        newest = max((first_releases()[x] for x in used), key=numbers, default="")
        return f">={newest}" if newest else ""

    @functools.cached_property
    def cuda(self) -> str:
        """A specifier of the CUDA that its libraries need at run time; empty where they need none."""
        needed = (name for library in self.libraries.values() for name in library.needed)
        found = next(filter(None, map(CUDA_LIBRARY.fullmatch, needed)), None)
        return f"=={found[1]}.*" if found else ""


def _is_loaded(data: bytes) -> bool:
    """Whether the loader takes a file: GPU code, object files and static programs have no dynamic segment."""
    if not data.startswith(b"\x7fELF\x02\x01") or len(data) < 64:
        return False
    first, size, count = struct.unpack_from("<32xQ14xHH", data)
    places = (first + size * each for each in range(count))
    return any(data[x : x + 4] == b"\x02\0\0\0" for x in places)


def _covers(limit: str | None, claimed: str | None) -> bool:
    """Whether a library of that limit works with every Python that the tag claims."""
    if not claimed:  # py3-none: every Python, and every other implementation of it
        return False
    if limit is None:
        return claimed.startswith("==")
    pythons = [*SpecifierSet(claimed).filter(f"3.{minor}" for minor in range(100))]
    return bool(pythons) and all(map(SpecifierSet(limit).contains, pythons))


def serves(target: Target, pythons: str | None, tag: str) -> bool:
    """Whether a wheel of that tag, for these Pythons, is for the target's, which may be free-threaded."""
    abi = tag.split("-")[1]
    # A module of one of the two does not load in the other.
    loads = abi == "none" or abi.endswith("t") == target.python.endswith("t")
    return loads and SpecifierSet(pythons or "").contains(target.python_version)


# Its last part, the label of the variant, follows the platform; the part of the Python begins with a letter.
_VARIANT_NAME = re.compile(r"[^-]+-[^-]+(-\d[^-]*)?-[^-\d][^-]*-[^-]+-[^-]+-[0-9a-z_.]+\.whl")


def wheels_in(folder: Path) -> list[Path]:
    """The wheels in a folder, without those that are the variant of another (PEP 825)."""
    # `Path.glob` finds nothing in a folder that may not be read.
    files = folder.iterdir() if folder.is_dir() else ()
    found = sorted(path for path in files if path.suffix == ".whl")
    return [path for path in found if not _VARIANT_NAME.fullmatch(path.name)]


def read(path: Path) -> Wheel:
    """Reads a wheel, which is passed on then: nothing reads the file again."""
    if not re.fullmatch(r"[A-Za-z0-9_.+!-]+", path.name):
        why = "has characters in its name that the name of no wheel has"
        raise RefusedError(f"{str(path)!r} {why}: name it as its build did, or delete it")
    if path.exists() and not path.is_file():  # a pipe, say, would never end
        raise RefusedError(f"{path} is no file")
    try:
        with zipfile.ZipFile(path) as archive:
            files = unpack(archive)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    # What zipfile raises for bytes that are no archive, or a spoiled or an encrypted one.
    except (ValueError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise RefusedError(f"{path} is no wheel: {error}") from None
    try:
        name, version, _, tags = parse_wheel_filename(path.name)
    except InvalidWheelFilename as error:
        form = "<project>-<version>-<python>-<abi>-<platform>.whl"
        raise RefusedError(f"{path} is not named {form}: {error}") from None
    folders = [x.partition("/")[0] for x in files if re.fullmatch(r"[^/]+\.dist-info/METADATA", x)]
    if len(folders) != 1:
        held = f"{len(folders)} files *.dist-info/METADATA"
        raise RefusedError(f"{path} holds {held}, but a wheel has one: build it again")
    return Wheel(path, name, version, tags, files, folders[0])


@functools.cache
def _limited_api() -> dict[str, str]:
    """CPython's Limited API: for each symbol the Python that first had it in it."""
    return {symbol.name: str(entry.added) for symbol, entry in [*FUNCTIONS.items(), *DATAS.items()]}
