"""The rules that a wheel must keep, read from every library in it. None passes for want of something to look at."""

from __future__ import annotations

import base64
import csv
import email
import fnmatch
import hashlib
import importlib.metadata
import json
import posixpath
import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import PurePosixPath
from typing import Any

from packaging.metadata import ExceptionGroup, Metadata
from packaging.specifiers import SpecifierSet
from packaging.tags import parse_tag
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from torchwheels import baseline, machines
from torchwheels.errors import UserError
from torchwheels.machines import Machine
from torchwheels.project import Project
from torchwheels.releases import Releases, Target, load, minor, numbers, openmp
from torchwheels.stable_functions import first_releases, newest_release, oldest_release
from torchwheels.wheel import (
    BUILD_RECORD,
    CUDA_LIBRARY,
    Library,
    Wheel,
    admitted,
    demangle,
)

_OLDER_NAMES = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}
_MANYLINUX = re.compile(r"manylinux(1|2010|2014|_\d+_\d+)_")
_TAG_OF_A_PYTHON = re.compile(r"py3\d*-none|(cp3\d+)-(none|abi3|\1t?)")
_OF_LINUX = re.compile(r"(GLIBC|GLIBCXX|CXXABI|GCC)_")  # the versions of its symbols
# A torch of CUDA loads its runtime for all libraries of the process.
_OF_CUDA_RUNTIME = re.compile(r"(__)?cuda[A-Z]\w*")
_OF_OPENMP = re.compile(r"(GOMP|omp)_\w+")

# What comes with torch itself, or with the packages that a torch of CUDA requires.
_OF_TORCH = r"lib(torch(_cpu|_cuda\w*|_python|_global_deps)?|c10(_cuda)?|shm)"
_OF_CUDA = (
    r"lib(cudart|cublas(Lt)?|cudnn\w*|cufftw?|curand|cusolver(Mg)?|cusparse(Lt)?|cupti|cufile\w*|nccl|"
    r"nvrtc(-builtins)?|nvJitLink|nvToolsExt|nvshmem\w*)"
)
_VERSION = r"([-.][0-9a-f]{8})?\.so[.\d]*"  # with the hash that tools give what they bundle
_TORCHS_OWN = re.compile(_OF_TORCH + _VERSION)
_CUDAS_OWN = re.compile(_OF_CUDA + _VERSION)
_NEVER_BUNDLED = re.compile(rf"({_OF_TORCH}|{_OF_CUDA}|libcuda|libpython3[\w.]*?){_VERSION}")


# For all libraries that are loaded after the program has begun (TLS_STATIC_SURPLUS in glibc).
_MOST_STATIC_TLS = 1664


@dataclass(frozen=True)
class Expectation:
    """What the project and the target promise of a wheel."""

    target: Target
    manylinux: str
    architectures: tuple[str, ...]
    """GPU compute capabilities, as TORCH_CUDA_ARCH_LIST has them: `9.0`, `12.0+PTX`."""
    size_budget: float = 0.0
    """In MB (10**6 bytes); 0 where there is none."""
    allow_libraries: tuple[str, ...] = ()
    """Patterns of the further libraries that the wheel may bundle or need."""
    torches: str = ""
    """A specifier of the torches that its libraries work with, where the project declares one."""
    of_others: bool = False
    """Whether another tool has built it, which writes no label and no build record."""


def label(wheel: Wheel, expectation: Expectation) -> Iterator[str]:
    """The name's version is that of the metadata, and its label names the libraries' CUDA and torch."""
    said = wheel.metadata["Version"]
    if _normalised(said) != str(wheel.version) or said != _normalised(said):
        yield f"its metadata have the version {said}, but its name {wheel.version}"
    target, text = expectation.target, wheel.version.local or ""
    cuda = re.search(r"(?<![a-z0-9])(cpu|cu\d+)(?![a-z0-9])", text)
    torch = re.search(r"(?<![a-z0-9])torch(\d+\.\d+)(?![a-z0-9])", text)
    if target.is_release:
        if text:
            yield f"its version {wheel.version} has a label, but {target.name} has none"
    elif _is_classic(wheel) and not (cuda and torch) and not expectation.of_others:
        yield (
            f"its version {wheel.version} does not say for which CUDA and which torch it is, and its "
            f"libraries work with one only: label it +{target.label}.torch{minor(target.torch)}"
        )
    several = re.findall(r"(?<![a-z0-9])(?:cpu|cu\d+|torch\d+\.\d+)(?![a-z0-9])", text)
    if len(several) > bool(cuda) + bool(torch):
        yield f"its label has {' and '.join(several)}, of which only one CUDA and one torch can be right"
    if cuda and cuda[1] != target.label and not target.is_release:
        yield f"its label says {cuda[1]}, but {target.name} is {target.label}"
    if torch and torch[1] != minor(target.torch):
        yield f"its label says torch {torch[1]}, but {target.name} has torch {target.torch}"
    if target.cuda is None:
        return  # the rules of GPU code and of needed libraries know that there must be none
    for name, library in wheel.libraries.items():
        for needed in library.needed:
            found = CUDA_LIBRARY.fullmatch(needed)
            if found and int(found[1]) != numbers(target.cuda.version)[0]:
                yield f"{name} needs {needed}, but {target.name} has CUDA {target.cuda.version}"
        toolkit = library.gpu_code.toolkit
        if toolkit and numbers(toolkit)[0] != numbers(target.cuda.version)[0]:
            yield f"{name} holds GPU code of CUDA {toolkit}, but {target.name} has {target.cuda.version}"


def _normalised(version: str) -> str:
    try:
        return str(Version(version))
    except InvalidVersion:
        return f"no version: {version}"


def _is_classic(wheel: Wheel) -> bool:
    return any(wheel.torch_functions(library)[1] for library in wheel.libraries.values())


def tags(wheel: Wheel, expectation: Expectation) -> Iterator[str]:
    """The name has one tag of a Python, which the metadata have, too."""
    said = ".".join(sorted({f"{tag.interpreter}-{tag.abi}" for tag in wheel.tags}))
    if not _TAG_OF_A_PYTHON.fullmatch(said):
        yield f"its tag is {said}, but one of cp311-cp311, cp311-abi3, cp311-none, py3-none is wanted"
    lines = wheel.files.get(f"{wheel.dist_info}/WHEEL", b"").decode(errors="replace")
    listed = re.findall(r"^Tag: *(\S+)", lines, re.MULTILINE)
    names = {str(tag) for each in listed for tag in parse_tag(each)}
    if names != {str(tag) for tag in wheel.tags}:
        yield f"its WHEEL file has the tags {', '.join(listed) or 'none'}, which are not those of its name"


def platform_tag(wheel: Wheel, expectation: Expectation) -> Iterator[str]:
    """The name's platforms are what auditwheel finds, and no newer than the target allows."""
    platforms = sorted({tag.platform for tag in wheel.tags}, key=lambda x: (_glibc(x), x))
    said, proved = ".".join(platforms), wheel.proved_platform
    processors = {_MANYLINUX.sub("", platform) for platform in (*platforms, proved)}
    machine, wanted = machines.of_platform(proved), expectation.target.machine
    if _glibc(platforms[0]) != _glibc(proved) or len(processors) != 1:
        yield f"its tag is {said}, but auditwheel proves {proved}"
    elif _glibc(proved) > _glibc(expectation.manylinux) and not expectation.of_others:
        newer = "".join(
            f"; {text}" for text in _newer_symbols(wheel, expectation.manylinux, machine)
        )
        yield f"its tag is {said}, but {expectation.manylinux} or older is wanted{newer}"
    for path, library in wheel.libraries.items():
        if library.machine != machine.elf:
            yield f"its tag is {said}, but {path} is for another processor ({library.machine})"
        elif library.machine != wanted.elf:
            yield f"{path} is for {library.machine}, but {expectation.target.name} for {wanted.elf}"
        allowed = baseline.allowed_versions(_policy(wheel, expectation), machine)
        versions = [x for x in sorted(library.versions - allowed) if _OF_LINUX.match(x)]
        if versions:  # auditwheel reads no library under the name of a source
            yield f"its tag is {said}, but {path} wants {', '.join(versions)}"


def _policy(wheel: Wheel, expectation: Expectation) -> str:
    """The manylinux, such as `manylinux_2_28`, that the wheel proves; without one that which is wanted."""
    proved = _MANYLINUX.match(wheel.proved_platform)
    return proved[0].removesuffix("_") if proved else expectation.manylinux


def _glibc(platform: str) -> tuple[int, int]:
    if older := _OLDER_NAMES.get(platform.partition("_")[0]):
        return older
    found = re.match(r"manylinux_(\d+)_(\d+)", platform)
    return (int(found[1]), int(found[2])) if found else (99, 0)


def _newer_symbols(wheel: Wheel, manylinux: str, machine: Machine) -> Iterator[str]:
    """What the libraries use that the policy does not allow, and what helps."""
    allowed = baseline.allowed_versions(manylinux, machine)
    for path, library in wheel.libraries.items():
        newer = {
            symbol: version
            for symbol, version in library.undefined.items()
            if _OF_LINUX.match(version) and version not in allowed
        }
        if newer:
            symbol = min(newer)
            yield (
                f"{path} uses {_some(sorted(newer))} in the version {newer[symbol]}: it was linked by a "
                "compiler of this machine, not by those that a build finds as c++ or cc on PATH and as "
                "$CXX or $CC: have its setup name the compiler without a folder"
            )


def undefined_symbols(wheel: Wheel, expectation: Expectation) -> Iterator[str]:
    """What the libraries use is in the wheel, torch, Python, or the oldest C and C++ libraries of the tag."""
    policy = _policy(wheel, expectation)
    machine = machines.of_platform(wheel.proved_platform)
    linux = baseline.symbols_of_linux(baseline.allowed_versions(policy, machine), machine)
    for path, library in wheel.libraries.items():
        of_torch = {*chain(*wheel.torch_functions(library))}
        of_others = of_torch.union(wheel.python_functions(library))
        wanted = {*wheel.wanted(library)}
        wanted |= {name for name, version in library.undefined.items() if _OF_LINUX.match(version)}
        if expectation.target.cuda:
            of_others |= {name for name in wanted if _OF_CUDA_RUNTIME.fullmatch(name)}
        if of_torch:  # whose libraries are loaded before, and with them their OpenMP
            of_others |= {name for name in wanted if _OF_OPENMP.fullmatch(name)}
        lacking = sorted(wanted - of_others - linux)
        if newer := [symbol for symbol in lacking if baseline.first_version(symbol, machine)]:
            first = baseline.first_version(newer[0], machine)
            yield (
                f"{path} uses {_some(newer)}, which Linux has from {first} on, "
                f"but its tag is {policy}: have its setup do without, or define it"
            )
        unknown = [symbol for symbol in lacking if symbol not in newer]
        if unknown and not any(_is_unknown(name, wheel) for name in library.needed):
            yield (
                f"{path} uses {_some(unknown)}, which neither the wheel nor torch, Python or the Linux of "
                "its tag has: link what defines it"
                + (", here with -fopenmp" if _OF_OPENMP.fullmatch(unknown[0]) else "")
            )


def _is_unknown(name: str, wheel: Wheel) -> bool:
    """Whether what a library of that name defines is known to nobody here."""
    known = wheel.brought.union(baseline.LIBRARIES)
    # Whatever OpenMP defines has a version of its own.
    return not (name in known or _TORCHS_OWN.fullmatch(name) or name.startswith("libgomp"))


def python_tag(wheel: Wheel, expectation: Expectation) -> Iterator[str]:
    """The name's tag promises no Python that a library does not work with."""
    claimed = wheel.pythons.what
    tag = min(f"{tag.interpreter}-{tag.abi}" for tag in wheel.tags)
    for limit, why in wheel.python_limits.values():
        if not _covers(limit, claimed):
            yield f"its tag is {tag}, but {why}"
    if not wheel.takes(expectation.target):
        yield f"its tag is {tag}, but {expectation.target.name} has Python {expectation.target.python}"


def _covers(limit: str | None, claimed: str | None) -> bool:
    """Whether a library of that limit works with every Python that the tag claims."""
    if not claimed:  # py3-none: every Python, and every other implementation of it
        return False
    if claimed.startswith("=="):
        python = claimed.removeprefix("==").removesuffix(".*")
        return limit is None or SpecifierSet(limit).contains(python)
    if limit is None or limit.startswith("=="):
        return False
    return numbers(claimed.removeprefix(">=")) >= numbers(limit.removeprefix(">="))


def torch_symbols(wheel: Wheel, expectation: Expectation) -> Iterator[str]:
    """The libraries use nothing of torch that the oldest promised release lacks."""
    promised = _promised(wheel, expectation)
    declared = expectation.torches
    for name, library in wheel.libraries.items():
        stable, classic = wheel.torch_functions(library)
        if classic and declared and len(promised) > 1:
            yield (
                f"{name} uses {_some(classic)}, C++ of torch, which changes with every release, but "
                f"torch{expectation.torches} is promised"
            )
        first = {x: first_releases()[x] for x in stable if x in first_releases()}
        if unknown := [symbol for symbol in stable if symbol not in first]:
            yield (
                f"{name} uses {_some(unknown)}, which no torch up to {newest_release()} has in its list "
                "of stable functions"
            )
        newer = [symbol for symbol in first if _is_newer(first[symbol], promised[0])]
        if newer := sorted(newer, key=lambda symbol: numbers(first[symbol]), reverse=True):
            yield (
                f"{name} uses {_some(newer)}, which is in torch's stable ABI from {first[newer[0]]} on, "
                f"but torch {promised[0]} is promised: compile with TORCH_TARGET_VERSION"
            )


def _promised(wheel: Wheel, expectation: Expectation) -> list[str]:
    """The minor releases of torch that the wheel is for, the oldest first."""
    one = SpecifierSet(f"=={minor(expectation.target.torch)}.*")
    declared = SpecifierSet(expectation.torches) if expectation.torches else None
    return admitted(declared or wheel.torch_requirement or one) or admitted(one)


def _is_newer(release: str, promised: str) -> bool:
    """Whether a function of `release` is not in `promised`; what the oldest list has may be older."""
    return release != oldest_release() and numbers(release) > numbers(promised)


def _some(symbols: list[str]) -> str:
    """The first of them, and how many more there are."""
    more = f" (and {len(symbols) - 1} more)" if len(symbols) > 1 else ""
    return f"{demangle(symbols[0])}{more}"


def requirement(wheel: Wheel, expectation: Expectation) -> Iterator[str]:
    """The metadata require only torch versions that the libraries load under, the target's among them."""
    wanted, torch = wheel.torch_requirement, expectation.target.torch
    if wanted is None:
        served = wheel.torches.what
        right = f"=={minor(torch)}.*" if served is None else served
        if right:  # else no library uses torch
            yield f"its metadata do not require torch: add `Requires-Dist: torch{right}`"
    elif not wanted.contains(torch, prereleases=True):
        yield f"its metadata require torch{wanted}, but {expectation.target.name} has torch {torch}"
    elif _is_classic(wheel) and len(admitted(wanted)) != 1:
        yield (
            f"its metadata require {f'torch{wanted}' if wanted else 'any torch'}, but "
            f"{wheel.torches.why}: require torch=={minor(torch)}.*"
        )


def gpu_code(wheel: Wheel, expectation: Expectation) -> Iterator[str]:
    """The kernels are there for every GPU architecture, and as PTX; a CPU wheel has none."""
    target, wanted = expectation.target, expectation.architectures
    found = {
        name: library.gpu_code
        for name, library in wheel.libraries.items()
        if library.gpu_code and not _is_bundled(name, library)
    }
    if not target.cuda:
        yield from (f"{name} holds GPU code, but {target.name} is without CUDA" for name in found)
    elif not found:
        yield (
            f"it is silently CPU-only: no library holds GPU code, but {target.name} wants it for "
            f"{' '.join(wanted)}; its setup may ask for a GPU (`pretend-gpu = true`) or for a variable "
            "of its own"
        )
    else:
        for name, code in found.items():
            # Code for 9.0a runs on every GPU of 9.0, and only there.
            covered = {each.rstrip("abcdef") for each in code.machine_code}
            names = [each.removesuffix("+PTX") for each in wanted]
            lacking = [each for each in names if each not in covered | code.machine_code]
            ptx = [each.removesuffix("+PTX") for each in wanted if each.endswith("+PTX")]
            # The driver makes code for any newer GPU of it, but of that for 9.0a alone.
            for_newer = [numbers(each) for each in code.ptx if each[-1].isdigit()]
            lacking += [
                f"{x} as PTX"
                for x in ptx
                if x not in code.ptx and not any(y <= numbers(x.rstrip("af")) for y in for_newer)
            ]
            if lacking:
                yield (
                    f"{name} holds no GPU code for {', '.join(lacking)}, but {target.name} wants it "
                    "(TORCHWHEELS_ARCHITECTURES names the GPUs, where fewer are meant)"
                )


def bundled_libraries(wheel: Wheel, expectation: Expectation) -> Iterator[str]:
    """No library of CUDA, torch or Python is packed, nor one of anyone else that is not allowed."""
    for path, library in wheel.libraries.items():
        if _is_bundled(path, library) and not _allowed(_names(path, library), expectation):
            yield (
                f"it bundles {path}: a process must not have two, so leave it to torch or the system, or "
                "name it in `allow-libraries`"
            )


def _is_bundled(path: str, library: Library) -> bool:
    """Whether it is not the project's own."""
    grafted = PurePosixPath(path).parent.name.endswith(".libs")  # by auditwheel
    return grafted or any(_NEVER_BUNDLED.fullmatch(name) for name in _names(path, library))


def _names(path: str, library: Library) -> set[str]:
    return {PurePosixPath(path).name, library.soname or ""}


def _allowed(names: set[str], expectation: Expectation) -> bool:
    return any(
        fnmatch.fnmatchcase(name, each) for name in names for each in expectation.allow_libraries
    )


def needed_libraries(wheel: Wheel, expectation: Expectation) -> Iterator[str]:
    """The libraries need only what Linux, torch or the wheel has, and look only in folders beside them."""
    oldest = _promised(wheel, expectation)[0]
    torchs = openmp(oldest)
    for path, library in wheel.libraries.items():
        for name in library.needed:
            if (
                name in wheel.brought.union(baseline.LIBRARIES, [torchs])
                or _TORCHS_OWN.fullmatch(name)
                or (expectation.target.cuda and _CUDAS_OWN.fullmatch(name))
                or _allowed({name}, expectation)
            ):
                continue
            if name == openmp(newest_release()):  # and so torch is too old
                why = f"which torch {oldest} has as {torchs}: require torch>=2.7"
            else:
                why = "which a system may lack: link it statically"
            yield f"{path} needs {name}, {why}, or name it in `allow-libraries`"
        for folder in library.rpath:
            start, _, rest = folder.partition("/")
            _, place = _installed(wheel, path)
            inside = posixpath.normpath(f"{PurePosixPath(place).parent}/{rest}")
            if start != "$ORIGIN" or inside.split("/")[0] == "..":
                yield f"{path} looks for libraries in {folder or 'the current folder'} (its RPATH)"


def executable_stack(wheel: Wheel, expectation: Expectation) -> Iterator[str]:
    """No library wants a stack that can be executed: newer systems do not load it."""
    for path, library in wheel.libraries.items():
        if library.executable_stack:
            yield (
                f"{path} wants an executable stack, with which glibc 2.41 and newer do not load it: link "
                "with -z noexecstack"
            )


def memory(wheel: Wheel, expectation: Expectation) -> Iterator[str]:
    """Every system can map the libraries, and has room for their thread-local variables."""
    machine = expectation.target.machine
    for path, library in wheel.libraries.items():
        if library.alignment < machine.page:
            yield (
                f"{path} is aligned to {library.alignment} bytes, but {machine.name} has pages of up to "
                f"{machine.page}: link with -z max-page-size={machine.page}"
            )
        if library.static_tls > _MOST_STATIC_TLS:
            yield (
                f"{path} wants {library.static_tls} bytes of static thread-local memory, of which glibc "
                f"keeps {_MOST_STATIC_TLS} for libraries: compile without -ftls-model=initial-exec"
            )


def fast_math(wheel: Wheel, expectation: Expectation) -> Iterator[str]:
    """No library changes the arithmetic of the whole process when it is loaded (`-ffast-math` does)."""
    for path, library in wheel.libraries.items():
        if library.start_up_sets_fast_math:
            yield (
                f"{path} makes the whole process flush denormal numbers to zero when it is loaded: link "
                "without -ffast-math and -Ofast"
            )


def size(wheel: Wheel, expectation: Expectation) -> Iterator[str]:
    """The file is no larger than the project's budget."""
    megabytes = wheel.path.stat().st_size / 1e6
    if 0 < expectation.size_budget < megabytes:
        yield f"it has {megabytes:.2f} MB, over the {expectation.size_budget:g} MB allowed"


def metadata(wheel: Wheel, expectation: Expectation) -> Iterator[str]:
    """The metadata are valid, those of its name, and let the target's Python install it from an index."""
    project, _, version = wheel.dist_info.removesuffix(".dist-info").partition("-")
    if canonicalize_name(project) != wheel.name or _normalised(version) != str(wheel.version):
        yield f"its metadata are in {wheel.dist_info}, but its name is of {wheel.name} {wheel.version}"
    wheel_file = email.message_from_bytes(wheel.files.get(f"{wheel.dist_info}/WHEEL", b""))
    if not re.fullmatch(r"1\.\d+", wheel_file["Wheel-Version"] or ""):
        yield "its WHEEL file does not say Wheel-Version: 1.0"
    try:
        said = Metadata.from_email(wheel.files[f"{wheel.dist_info}/METADATA"])
    except ExceptionGroup as group:
        yield from (f"its metadata are not valid: {error}" for error in group.exceptions)
        return
    if canonicalize_name(said.name) != wheel.name:
        yield f"its metadata are of {said.name}, but its name is of {wheel.name}"
    python = expectation.target.python_version
    releases = [f"{python}.{patch}" for patch in range(100)]
    if said.requires_python is not None and not any(map(said.requires_python.contains, releases)):
        yield f"its metadata require Python {said.requires_python}, but its target has Python {python}"
    here = {"extra": "", "python_version": python}  # who asks for an extra has read what it is
    for each in said.requires_dist or []:
        if each.url and (each.marker is None or each.marker.evaluate(here)):
            yield f"its metadata require {each.name} from an address, which no index shall have"


def installed_files(wheel: Wheel, expectation: Expectation) -> Iterator[str]:
    """It installs into no other project, and nothing that runs in every start of Python."""
    installed = [(name, *_installed(wheel, name)) for name in wheel.files]
    installed += [(f"the script {each}", "scripts", each) for each in _scripts(wheel)]
    for name, scheme, path in installed:
        top = path.partition("/")[0]
        spoils: object
        if scheme in ("purelib", "platlib"):
            spoils = (
                re.fullmatch(r".*\.pth|(site|user)customize(\..*)?", top)
                # Python takes metadata under such names in any case.
                or (re.fullmatch(r"(?i).*\.(dist|egg)-info", top) and top != wheel.dist_info)
                or top.endswith(".data")
                or top.partition(".")[0] in ("torch", "nvidia", "functorch", "torchgen")
            )
        else:
            of_environment = (
                r"data/(lib.*|pyvenv\.cfg|pip\.conf)|(data/bin|scripts)/((python|pip)[\d.]*|.*/.*)"
            )
            spoils = re.fullmatch(of_environment, f"{scheme}/{path}")
        if spoils:
            yield f"it installs {name}, which is of another project or runs in every start of Python"


def _scripts(wheel: Wheel) -> list[str]:
    """The names of the programs that an installer makes of its entry points."""
    with zipfile.ZipFile(wheel.path) as archive:
        folder = zipfile.Path(archive, f"{wheel.dist_info}/")
        entries = importlib.metadata.PathDistribution(folder).entry_points
        return [x.name for x in entries if x.group in ("console_scripts", "gui_scripts")]


def _installed(wheel: Wheel, name: str) -> tuple[str, str]:
    """The scheme of a file, such as `platlib`, and where it comes to lie in the scheme's folder."""
    data = f"{wheel.dist_info.removesuffix('.dist-info')}.data/"
    if not name.startswith(data):
        return "platlib", name
    scheme, _, path = name.removeprefix(data).partition("/")
    return scheme, path


def record(wheel: Wheel, expectation: Expectation) -> Iterator[str]:
    """RECORD names every file, with the hash and the size that the file has, and no other."""
    path = f"{wheel.dist_info}/RECORD"
    lines = wheel.files.get(path, b"").decode(errors="replace").splitlines()
    found: dict[str, list[str]] = {}
    for name, *said in filter(None, csv.reader(lines)):
        found.setdefault(name, []).extend(said)  # twice is too long
    for name in sorted({path, *found, *wheel.files}):
        row, data = found.get(name, []), wheel.files.get(name)
        if data is None or len(row) != 2:
            right = False
        else:  # its own hash it cannot name
            size = str(len(data))
            right = name == path or (row[0] == record_hash(data) and row[1] in ("", size))
        if not right:
            yield f"its RECORD is not right about {name}"


def record_hash(data: bytes) -> str:
    """The hash of a file as RECORD has it."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
    return f"sha256={digest.rstrip('=')}"


def build_record(wheel: Wheel, expectation: Expectation) -> Iterator[str]:
    """The build record is there, and names the target."""
    if wheel.record is None:
        yield f"it holds no build record ({wheel.dist_info}/{BUILD_RECORD})"
        return
    target = expectation.target
    expected = {
        "name": wheel.name,
        "version": str(wheel.version),
        "target": target.name,
        "python": target.python,
        "torch": target.torch,
        "cuda": target.cuda.version if target.cuda else None,
        "architectures": [*expectation.architectures],
    }
    for key in ("source", "cxx", "torchwheels", *(["nvcc"] if target.cuda else [])):
        if not (said := wheel.record.get(key)) or not isinstance(said, str):
            yield f"its build record names no {key}"
    for key, value in expected.items():
        if wheel.record.get(key) != value:
            yield f"its build record has {key} {wheel.record.get(key)!r}, not {value!r}"


def bill_of_materials(wheel: Wheel, expectation: Expectation) -> Iterator[str]:
    """The bill of materials is there, and is of these libraries, this version and the target's torch."""
    path = f"{wheel.dist_info}/sboms/{wheel.name}.cdx.json"
    if path not in wheel.files:
        yield f"it holds no bill of materials ({path})"
        return
    bill = json.loads(wheel.files[path])
    subject = bill["metadata"]["component"]
    if (subject["name"], subject["version"]) != (wheel.name, str(wheel.version)):
        yield f"its bill of materials is of {subject['name']} {subject['version']}"
    named = {each["name"]: _sha256(each) for each in bill["components"] if each["type"] == "file"}
    hashes = {name: hashlib.sha256(wheel.files[name]).hexdigest() for name in wheel.libraries}
    for name in sorted(hashes.keys() | named.keys()):
        if hashes.get(name) != named.get(name):
            yield f"its bill of materials is not right about {name}"
    torches = [each["version"] for each in bill["components"] if each["name"] == "torch"]
    if torches != [expectation.target.torch]:
        said = ", ".join(torches) or "none"
        yield f"its bill of materials names torch {said}, not {expectation.target.torch}"


def _sha256(component: dict[str, Any]) -> str | None:
    return next((x["content"] for x in component.get("hashes", []) if x["alg"] == "SHA-256"), None)


Rule = Callable[[Wheel, Expectation], Iterator[str]]

RULES: tuple[Rule, ...] = (
    label,
    tags,
    platform_tag,
    python_tag,
    undefined_symbols,
    torch_symbols,
    requirement,
    gpu_code,
    bundled_libraries,
    needed_libraries,
    executable_stack,
    memory,
    fast_math,
    size,
    metadata,
    installed_files,
    record,
    build_record,
    bill_of_materials,
)

# What only torchwheels writes.
_OF_OUR_BUILDS: frozenset[Rule] = frozenset({build_record, bill_of_materials})

# They check what the metadata and the file say. The others check libraries, and so fail where there is none.
_OF_THE_FILE: frozenset[Rule] = frozenset({size, metadata, installed_files, record, build_record})

NO_LIBRARY = "it holds no shared library: its setup has compiled nothing"


def findings(wheel: Wheel, expectation: Expectation) -> dict[str, list[str]]:
    """What each rule finds wrong with the wheel."""
    rules = [x for x in RULES if not (expectation.of_others and x in _OF_OUR_BUILDS)]
    return {rule.__name__: _apply(rule, wheel, expectation) for rule in rules}


def _apply(rule: Rule, wheel: Wheel, expectation: Expectation) -> list[str]:
    if not wheel.libraries and rule not in _OF_THE_FILE:
        return [NO_LIBRARY]
    try:
        return [*rule(wheel, expectation)]
    # Of any kind: of auditwheel, say, or about a bill of materials that is no JSON.
    except Exception as error:
        return [f"it cannot be checked: {type(error).__name__}: {error}"]


def target_of(wheel: Wheel, torch: str, releases: Releases) -> Target:
    """The target of a wheel that says nothing of it, built beside `torch`: by its tag, its label and its libraries."""
    release = releases.torch(torch)
    image = releases.cpu["image"]
    machine = machines.of_platform(min(tag.platform for tag in wheel.tags))
    targets = [
        Target(each, release.version, None, image, True, machine=machine)
        for each in release.pythons
    ]
    target = next(filter(wheel.takes, targets), None)
    if target is None:
        raise UserError(
            f"{wheel.path.name} is for Python {wheel.pythons.what}, but torch {release.version} is for "
            f"{', '.join(release.pythons)}"
        )
    toolkits = [x.gpu_code.toolkit for x in wheel.libraries.values() if x.gpu_code.toolkit]
    needed = wheel.cuda.what or ("".join(toolkits[:1]) and f"=={numbers(toolkits[0])[0]}.*")
    if not needed and not any(library.gpu_code for library in wheel.libraries.values()):
        return target
    # torch is published for several versions of CUDA; a wheel names its own, or takes that of PyPI's torch.
    fitting = [x for x in releases.cudas.values() if SpecifierSet(needed or "").contains(x.version)]
    named = [x for x in fitting if x.label in (wheel.version.local or "").split(".")]
    default = [x for x in fitting if x.version == release.cudas[0]]
    if not fitting:
        raise UserError(f"{wheel.cuda.why}, but only CUDA {', '.join(releases.cudas)} is known")
    cuda = (named or default or fitting[::-1])[0]
    return replace(target, cuda=cuda, image=cuda.image)


def expectation_of(project: Project, target: Target, of_others: bool = False) -> Expectation:
    """What `project` promises of its wheel for `target`."""
    return Expectation(
        target=target,
        manylinux=load().manylinux,
        architectures=project.architectures(target),
        size_budget=project.size_budget,
        allow_libraries=project.allow_libraries,
        torches=project.torch,
        of_others=of_others,
    )
