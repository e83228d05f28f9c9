"""The rules about a wheel's libraries: which processor, Linux, Python, torch and GPUs they work with."""

import posixpath
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import PurePosixPath

from packaging.specifiers import SpecifierSet

from torchwheels.options import Expectation, admitted, minor, numbers, releases
from torchwheels.system import Machine, machines
from torchwheels.wheel import Library, Wheel, demangle, linux, stable_functions

_OLDER_NAMES = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}
_MANYLINUX = re.compile(r"manylinux(1|2010|2014|_\d+_\d+)_")
_OF_LINUX = re.compile(r"(GLIBC|GLIBCXX|CXXABI|GCC)_")  # the versions of its symbols

# A torch of CUDA loads its runtime for all libraries of the process.
_OF_CUDA_RUNTIME = re.compile(r"(__)?cuda[A-Z]\w*")
_OF_CUDA_LIBRARIES = re.compile(
    r"^(cuda[A-Z]|cu[A-Z]|cu(blas|dnn|fft|rand|solver|sparse)|nccl[A-Z]|nvrtc[A-Z])|\b(c10|at)::cuda::"
)
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


def platform_tag(wheel: Wheel, expectation: Expectation) -> Iterator[str]:
    """The name's platforms are what auditwheel finds, and no newer than the target allows."""
    platforms = sorted({tag.platform for tag in wheel.tags}, key=lambda x: (_glibc(x), x))
    said, proved = ".".join(platforms), wheel.proved_platform
    processors = {_MANYLINUX.sub("", platform) for platform in (*platforms, proved)}
    machine, wanted = machines.of_name(proved), expectation.target.machine
    if _glibc(platforms[0]) != _glibc(proved) or len(processors) != 1:
        yield f"its tag is {said}, but auditwheel proves {proved}"
    elif _glibc(proved) > _glibc(releases.load().manylinux) and not expectation.of_others:
        oldest = releases.load().manylinux
        newer = "".join(f"; {text}" for text in _newer_symbols(wheel, oldest, machine))
        yield f"its tag is {said}, but {oldest} or older is wanted{newer}"
    for path, library in wheel.libraries.items():
        if library.machine != machine.elf:
            yield f"its tag is {said}, but {path} is for another processor ({library.machine})"
        elif library.machine != wanted.elf:
            yield f"{path} is for {library.machine}, but {expectation.target.name} for {wanted.elf}"
        allowed = linux.allowed_versions(_policy(wheel, expectation), machine)
        versions = [x for x in sorted(library.versions - allowed) if _OF_LINUX.match(x)]
        if versions:  # auditwheel reads no library under the name of a source
            yield f"its tag is {said}, but {path} wants {', '.join(versions)}"


def _policy(wheel: Wheel, expectation: Expectation) -> str:
    """The manylinux, such as `manylinux_2_28`, that the wheel proves; without one that which is wanted."""
    proved = _MANYLINUX.match(wheel.proved_platform)
    return proved[0].removesuffix("_") if proved else releases.load().manylinux


def _glibc(platform: str) -> tuple[int, int]:
    if older := _OLDER_NAMES.get(platform.partition("_")[0]):
        return older
    found = re.match(r"manylinux_(\d+)_(\d+)", platform)
    return (int(found[1]), int(found[2])) if found else (99, 0)


def _newer_symbols(wheel: Wheel, manylinux: str, machine: Machine) -> Iterator[str]:
    """What the libraries use that the policy does not allow, and what helps."""
    allowed = linux.allowed_versions(manylinux, machine)
    for path, library in wheel.libraries.items():
        versions = library.undefined
        others = [x for x in sorted(versions) if versions[x] not in allowed]
        if newer := [x for x in others if _OF_LINUX.match(versions[x])]:
            yield (
                f"{path} uses {_some(newer)} in the version {versions[newer[0]]}: a compiler of this machine linked "
                "it, not the one that a build has as c++ or cc on PATH, or as $CXX or $CC (link programs with -static)"
            )


def undefined_symbols(wheel: Wheel, expectation: Expectation) -> Iterator[str]:
    """What the libraries use is in the wheel, torch, Python, or the oldest C and C++ libraries of the tag."""
    policy = _policy(wheel, expectation)
    machine = machines.of_name(wheel.proved_platform)
    of_linux = linux.symbols_of_linux(linux.allowed_versions(policy, machine), machine)
    for path, library in wheel.libraries.items():
        of_torch = {*chain(*wheel.torch_functions(library))}
        of_others = of_torch.union(wheel.python_functions(library))
        wanted = {*wheel.wanted(library)}
        wanted |= {name for name, version in library.undefined.items() if _OF_LINUX.match(version)}
        if expectation.target.cuda:
            of_others |= {name for name in wanted if _OF_CUDA_RUNTIME.fullmatch(name)}
        if of_torch:  # whose libraries are loaded before, and with them their OpenMP
            of_others |= {name for name in wanted if _OF_OPENMP.fullmatch(name)}
        lacking = sorted(wanted - of_others - of_linux)
        if newer := [symbol for symbol in lacking if linux.first_version(symbol, machine)]:
            first = linux.first_version(newer[0], machine)
            yield (
                f"{path} uses {_some(newer)}, which Linux has from {first} on, "
                f"but its tag is {policy}: have its setup do without, or define it"
            )
        unknown = [symbol for symbol in lacking if symbol not in newer]
        known = wheel.brought.union(linux.LIBRARIES)
        others = [x for x in library.needed if x not in known and not _TORCHS_OWN.fullmatch(x)]
        # Nobody here knows what those define, but whatever OpenMP does has a version of its own.
        if unknown and all(name.startswith("libgomp") for name in others):
            yield (
                f"{path} uses {_some(unknown)}, which neither the wheel nor torch, Python or the Linux of "
                "its tag has: link what defines it"
                + (", here with -fopenmp" if _OF_OPENMP.fullmatch(unknown[0]) else "")
            )


def python_tag(wheel: Wheel, expectation: Expectation) -> Iterator[str]:
    """The name's tag promises no Python that a library does not work with."""
    tag = min(f"{tag.interpreter}-{tag.abi}" for tag in wheel.tags)
    yield from (f"its tag is {tag}, but {why}" for why in wheel.too_many_pythons)
    if not wheel.takes(expectation.target):
        yield f"its tag is {tag}, but {expectation.target.name} has Python {expectation.target.python}"


def torch_symbols(wheel: Wheel, expectation: Expectation) -> Iterator[str]:
    """The libraries use nothing of torch that the oldest promised release lacks."""
    promised = _promised(wheel, expectation)
    first = stable_functions.first_releases()
    oldest, *_, newest = stable_functions.releases()
    for name, library in wheel.libraries.items():
        stable, classic = wheel.torch_functions(library)
        if classic and expectation.torches and len(promised) > 1:
            yield (
                f"{name} uses {_some(classic)}, C++ of torch, which changes with every release, but "
                f"torch{expectation.torches} is promised"
            )
        if unknown := [symbol for symbol in stable if symbol not in first]:
            yield f"{name} uses {_some(unknown)}, which torch {newest} does not list as stable"
        # What the oldest list has may be older.
        listed = [symbol for symbol in stable if first.get(symbol, oldest) != oldest]
        newer = [x for x in listed if numbers(first[x]) > numbers(promised[0])]
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


def _some(symbols: list[str]) -> str:
    """The first of them, and how many more there are."""
    more = f" (and {len(symbols) - 1} more)" if len(symbols) > 1 else ""
    return f"{demangle(symbols[0])}{more}"


def gpu_code(wheel: Wheel, expectation: Expectation) -> Iterator[str]:
    """The kernels are there for every GPU architecture, and as PTX, unless it only calls CUDA; a CPU wheel has none."""
    target, wanted = expectation.target, expectation.architectures
    own = {name: x for name, x in wheel.libraries.items() if not _is_bundled(name, x)}
    found = {name: library.gpu_code for name, library in own.items() if library.gpu_code}
    # Without code of its own for a GPU it may ask for streams, say, or call cuBLAS.
    used = {symbol for library in wheel.libraries.values() for symbol in library.undefined}
    if not target.cuda:
        yield from (f"{name} holds GPU code, but {target.name} is without CUDA" for name in found)
    elif not found and not any(map(_OF_CUDA_LIBRARIES.search, map(demangle, used))):
        yield (
            f"it is silently CPU-only: no library holds GPU code, but {target.name} wants it for "
            f"{' '.join(wanted)}; its setup may ask for a GPU (`pretend-gpu = true`) or for a variable "
            "of its own (`environment`)"
        )
    else:
        for name, code in found.items():
            names = [each.removesuffix("+PTX") for each in wanted]
            made = code.machine_code
            lacking = [x for x in names if not any(releases.runs_on(y, x) for y in made)]
            ptx = [each.removesuffix("+PTX") for each in wanted if each.endswith("+PTX")]
            # The driver makes code for any newer GPU of it, but of that for 9.0a alone.
            for_newer = [numbers(each) for each in code.ptx if each[-1].isdigit()]
            others = [x for x in ptx if x not in code.ptx]
            old = [x for x in others if not any(y <= numbers(x.rstrip("af")) for y in for_newer)]
            lacking += [f"{x} as PTX" for x in old]
            if lacking:
                yield (
                    f"{name} holds no GPU code for {', '.join(lacking)}, but {target.name} wants it "
                    "(TORCHWHEELS_ARCHITECTURES names the GPUs, where fewer are meant)"
                )


def bundled_libraries(wheel: Wheel, expectation: Expectation) -> Iterator[str]:
    """No library of CUDA, torch or Python is packed, nor one of anyone else that is not allowed."""
    way_out = "leave it to torch or the system, or name it in `allow-libraries`"
    for path, library in wheel.libraries.items():
        if _is_bundled(path, library) and not expectation.options.allows(_names(path, library)):
            yield f"it bundles {path}: a process must not have two, so {way_out}"


def _is_bundled(path: str, library: Library) -> bool:
    """Whether it is not the project's own."""
    grafted = PurePosixPath(path).parent.name.endswith(".libs")  # by auditwheel
    return grafted or any(_NEVER_BUNDLED.fullmatch(name) for name in _names(path, library))


def _names(path: str, library: Library) -> set[str]:
    return {PurePosixPath(path).name, library.soname or ""}


def needed_libraries(wheel: Wheel, expectation: Expectation) -> Iterator[str]:
    """The libraries need only what Linux, torch or the wheel has, and look only in folders beside them."""
    oldest = _promised(wheel, expectation)[0]
    torchs = releases.openmp(oldest)
    for path, library in wheel.libraries.items():
        known = wheel.brought.union(linux.LIBRARIES, [torchs])
        for name in (x for x in library.needed if x not in known):
            of_cuda = expectation.target.cuda and _CUDAS_OWN.fullmatch(name)
            if of_cuda or _TORCHS_OWN.fullmatch(name) or expectation.options.allows([name]):
                continue
            if name == releases.openmp(stable_functions.releases()[-1]):  # and so torch is too old
                why = f"which torch {oldest} has as {torchs}: require torch>=2.7"
            else:
                why = "which a system may lack: link it statically"
            yield f"{path} needs {name}, {why}, or name it in `allow-libraries`"
        for folder in library.rpath:
            start, _, rest = folder.partition("/")
            _, place = wheel.installed(path)
            inside = posixpath.normpath(f"{PurePosixPath(place).parent}/{rest}")
            if start != "$ORIGIN" or inside.split("/")[0] == "..":
                yield f"{path} looks for libraries in {folder or 'the current folder'} (its RPATH)"


def executable_stack(wheel: Wheel, expectation: Expectation) -> Iterator[str]:
    """No library wants a stack that can be executed: newer systems do not load it."""
    for path, library in wheel.libraries.items():
        if library.executable_stack:
            why = "with which glibc 2.41 and newer do not load it: link with -z noexecstack"
            yield f"{path} wants an executable stack, {why}"


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
            does = "makes the whole process flush denormal numbers to zero when it is loaded"
            yield f"{path} {does}: link without -ffast-math and -Ofast"
