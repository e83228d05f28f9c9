"""The table of torch releases (releases.toml), and the targets that follow from it."""

import contextlib
import difflib
import fnmatch
import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from torchwheels.errors import UserError
from torchwheels.system import AARCH64, X86_64, Machine, machines, processes

RELEASE = "release"
"""What targets of the wheel without a label have instead of a variant's label."""

ARCHITECTURE = r"\d+\.\d[af]?(\+PTX)?"
"""A GPU's compute capability, as TORCH_CUDA_ARCH_LIST has it."""

_TARGET = re.compile(r"3\.\d+t?-(cpu|cu\d+|release)(-torch\d+\.\d+)?(-aarch64)?")

FILE = Path(__file__).with_name("releases.toml")
LOCK = Path(__file__).with_name("requirements.txt")
"""Versions and hashes of what torchwheels requires, of its tools and of nox: `nox -s lock` renews them."""


def locked(is_wanted: Callable[[str], bool]) -> str:
    """What the lock file says of the packages whose name is wanted, as a requirements file."""
    entries = re.findall(r"^(?:.+\\\n)+.+\n", LOCK.read_text(), re.MULTILINE)
    return "".join(entry for entry in entries if is_wanted(entry.partition("==")[0]))


def locked_own() -> str:
    """What it says of this tool's own requirements, and of nox."""
    others = names(load().tools) - {"pip", "setuptools"}
    return locked(lambda name: name not in others)


def names(requirements: Iterable[str]) -> set[str]:
    """`pip` of `pip==26.3`."""
    return {Requirement(x).name for x in requirements}


@functools.cache
def numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` as (2, 13, 0), for comparing."""
    return Version(version).release


def minor(version: str) -> str:
    """`2.13.0+cpu` as `2.13`."""
    return ".".join(map(str, numbers(version)[:2]))


@functools.cache
def admitted(specifier: SpecifierSet) -> list[str]:
    """The minor releases of torch 2 of which `specifier` admits one at least, the oldest first."""
    # However many there are or will be: of no minor release were there ten.
    minors = [f"2.{minor}" for minor in range(100)]
    return [x for x in minors if any(specifier.contains(f"{x}.{patch}") for patch in range(10))]


def openmp(torch: str) -> str:
    """The name of the GNU OpenMP library that a release of torch brings and has loaded."""
    return "libgomp.so.1" if numbers(torch) >= (2, 7) else "libgomp-a34b3233.so.1"


def sm(architecture: str) -> str:
    """`90` of `9.0+PTX`."""
    return architecture.removesuffix("+PTX").replace(".", "")


def runs_on(code: str, gpu: str) -> bool:
    """Whether machine code for one compute capability runs on GPUs of another: on newer ones of its major version."""
    if not (code[-1].isdigit() and gpu[-1].isdigit()):  # 9.0a, which runs on GPUs of 9.0 alone
        return gpu in (code, code.rstrip("abcdef"))
    return numbers(code)[0] == numbers(gpu)[0] and numbers(code) <= numbers(gpu)


@dataclass(frozen=True)
class Torch:
    """A release of torch: the CUDA versions that it is published for, PyPI's first, and its Pythons."""

    version: str
    cudas: tuple[str, ...]
    pythons: tuple[str, ...]
    aarch64: str = ""
    """What its default build for aarch64 has: the same CUDA version, `cpu` or, where there is none, nothing."""
    own: bool = False
    """Whether it is one that a project adds: of these CUDA versions alone, or of none."""
    index: str = ""
    """The package index that has it, where that is not pip's own."""


@dataclass(frozen=True)
class Cuda:
    """A CUDA version, and what its targets compile for and in."""

    version: str
    torch: str
    image: str
    architectures: tuple[str, ...]

    @property
    def label(self) -> str:
        """`cu130` of CUDA 13.0."""
        return f"cu{self.version.replace('.', '')}"


@dataclass(frozen=True)
class Target:
    """What one wheel is built for: a Python, a torch, and a CUDA version or none."""

    python: str
    torch: str
    cuda: Cuda | None
    image: str
    names_torch: bool
    """Whether the name holds the torch release; that of the CUDA version's own torch does not."""
    is_release: bool = False
    """Whether its wheel has no label, and is for a torch of any CUDA."""
    machine: Machine = X86_64
    """The processor."""
    is_extra: bool = False
    """Whether PyPI's torch is of another CUDA: patterns find it where they name the torch."""
    index: str = ""
    """The package index that has its torch, where that is not pip's own."""

    @property
    def python_version(self) -> str:
        """`3.14` of `3.14t`, which is Python 3.14 without the global lock."""
        return self.python.removesuffix("t")

    def is_of(self, pythons: SpecifierSet) -> bool:
        """Whether some patch release of its Python is among these."""
        return any(pythons.contains(f"{self.python_version}.{patch}") for patch in range(100))

    @property
    def label(self) -> str:
        """`cu130`, `cpu` or `release`."""
        if self.is_release:
            return RELEASE
        return self.cuda.label if self.cuda else "cpu"

    @property
    def name(self) -> str:
        """For example `3.11-cu130`, `3.12-cpu`, `3.11-cu124-torch2.5` or `3.11-cpu-aarch64`."""
        name = f"{self.python}-{self.label}"
        name = f"{name}-torch{minor(self.torch)}" if self.names_torch else name
        return name + self.machine.suffix

    @property
    def architectures(self) -> tuple[str, ...]:
        """The GPU compute capabilities to compile for."""
        said = os.environ.get("TORCHWHEELS_ARCHITECTURES", "")
        asked = () if said == "all" else tuple(said.split())
        for architecture in asked:
            if not re.fullmatch(ARCHITECTURE, architecture):
                raise UserError(
                    f"TORCHWHEELS_ARCHITECTURES names {architecture!r}, but GPU compute capabilities "
                    "such as `8.0 9.0a 12.0+PTX`, or `all`, are expected"
                )
        return (asked or self.cuda.architectures) if self.cuda else ()

    def for_gpus(self, capabilities: Iterable[str]) -> str:
        """What of the target's architectures GPUs of these run, as TORCHWHEELS_ARCHITECTURES has it.

        Empty where one of them would have to compile PTX.
        """
        ours = [x.removesuffix("+PTX") for x in self.cuda.architectures] if self.cuda else []
        runs = [[x for x in ours if runs_on(x, gpu)] for gpu in capabilities]
        found = [max(each, key=numbers) for each in runs] if all(runs) else []
        return " ".join(dict.fromkeys(found))


def recorded(record: Mapping[str, Any]) -> Target | None:
    """The target that a build record names, as that was on the day: the table may be another by now."""
    try:
        name, torch, cuda = record["target"], record["torch"], record["cuda"]
        _, label, *_ = name.split("-")
        architectures = tuple(map(str.strip, record["architectures"]))
        target = Target(
            record["python"],
            torch,
            Cuda(cuda, torch="", image="", architectures=architectures) if cuda else None,
            image="",
            names_torch="-torch" in name,
            is_release=label == RELEASE,
            machine=machines.of_name(name),
        )
        is_whole = _TARGET.fullmatch(target.name) and target.name == name
        return target if is_whole and Version(torch).major == 2 else None  # as `admitted` takes it
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


@dataclass(frozen=True)
class Releases:
    """The whole table."""

    manylinux: str
    cpu: Mapping[str, str]
    tools: tuple[str, ...]
    uv: str
    toolkit: str
    torches: tuple[Torch, ...]
    cudas: Mapping[str, Cuda]
    release: str = ""
    """The CUDA version of the wheel without a label, where the project has one."""

    @functools.cached_property
    def targets(self) -> tuple[Target, ...]:
        """Every target there can be."""
        found = []
        for torch in self.torches:
            for python in torch.pythons:
                if not torch.own or not torch.cudas:
                    found.append(self._target(python, torch, None))
                found += [self._target(python, torch, self.cudas[each]) for each in torch.cudas]
                if self.release and not torch.own:
                    cuda = self.cudas[self.release]
                    of_cpu = self._target(python, torch, None)
                    found.append(replace(of_cpu, cuda=cuda, image=cuda.image, is_release=True))
        for target in [x for x in found if not x.is_release]:
            built = self.torch(target.torch).aarch64
            if built and (target.cuda is None or target.cuda.version == built):
                found.append(replace(target, machine=AARCH64))
        one_of_each = {target.name: target for target in found}.values()  # a project's own is last
        return tuple(sorted(one_of_each, key=lambda x: (x.label, numbers(x.python_version))))

    def _target(self, python: str, torch: Torch, cuda: Cuda | None) -> Target:
        usual = {"torch": cuda.torch, "image": cuda.image} if cuda else self.cpu
        extra = cuda is not None and cuda.version != torch.cudas[0]
        # PyTorch's index has one of each CUDA, with that in its version.
        version = f"{torch.version}+{cuda.label}" if cuda and extra else torch.version
        parts = usual["image"], minor(version) != minor(usual["torch"])
        return Target(python, version, cuda, *parts, is_extra=extra, index=torch.index)

    def torch(self, version: str, said: str = "torch") -> Torch:
        """The release of that minor version."""
        with contextlib.suppress(InvalidVersion):
            for torch in self.torches:
                own = numbers(torch.version)
                if own[:2] <= numbers(version) <= own:  # no patch release that is to come
                    return torch
        known = ", ".join(minor(torch.version) for torch in self.torches)
        raise UserError(f"{said} {version} is not known; the releases that are: {known}")

    def target(self, name: str) -> Target:
        """The target of that name; the torch may be named where it need not be."""
        for target in self.targets:
            long = f"{target.python}-{target.label}-torch{minor(target.torch)}"
            if name in (target.name, long + target.machine.suffix):
                return target
        near = difflib.get_close_matches(name, [x.name for x in self.targets], n=3, cutoff=0.0)
        raise UserError(
            f"there is no target {name!r}{self._why_not(name)}: a target is a Python and a CUDA version "
            f"or `cpu`, perhaps with a torch, and the nearest are {', '.join(near)} "
            "(`torchwheels targets` lists all)"
        )

    def _why_not(self, name: str) -> str:
        """Why that target cannot be, where its parts are known ones."""
        machine = machines.of_name(name)
        python, _, rest = name.removesuffix(machine.suffix).partition("-")
        label, _, release = rest.partition("-torch")
        cuda = next((cuda for cuda in self.cudas.values() if cuda.label == label), None)
        if not release:
            release = minor(cuda.torch) if cuda else minor(self.cpu["torch"])
        torch = next((torch for torch in self.torches if minor(torch.version) == release), None)
        if torch is None or (cuda is None and label not in ("cpu", RELEASE)):
            return ""
        if cuda and cuda.version not in torch.cudas:
            cudas = " and ".join(torch.cudas)
            return f" (torch {torch.version} is built for CUDA {cudas}, not {cuda.version})"
        if python not in torch.pythons:
            return f" (torch {torch.version} has no wheel for Python {python})"
        if machine == AARCH64 and torch.aarch64 != torch.cudas[0]:
            return f" (torch {torch.version} has no CUDA build for aarch64 on PyPI)"
        return ""

    def matching(self, patterns: Iterable[str]) -> tuple[Target, ...]:
        """The targets that `patterns` name, such as `3.11-cpu`, `3.1?-cu130*` or `3.11-cu*-aarch64`.

        A pattern has torch of the CUDA that PyPI has it of; of others where it names the torch: `3.11-cu126-torch*`.
        """
        found: dict[Target, None] = {}
        for pattern in patterns:
            of_machine = [x for x in self.targets if x.machine == machines.of_name(pattern)]
            usual = [x for x in of_machine if not x.is_extra or "-torch" in pattern]
            matches = [x for x in usual if fnmatch.fnmatchcase(x.name, pattern)]
            found |= dict.fromkeys(matches or [self.target(pattern)])
        return tuple(found)

    def current_target(self, python: Path) -> Target:
        """The target of the torch that the interpreter `python` has."""
        # torch itself is not imported: it takes seconds, and an error of its own would be ours.
        done = processes.ask([python, "-c", _ASK])
        if done.returncode != 0:
            why = done.stderr.strip().splitlines()[-1]
            raise UserError(f"{python} cannot say which torch it has: {why}")
        torch = json.loads(done.stdout)
        own = torch and (torch["python"], minor(torch["version"]), torch["cuda"])
        for target in (x for x in self.targets if x.machine.is_here):
            if own == (target.python, minor(target.torch), target.cuda and target.cuda.version):
                return target
        has = "{version} of CUDA {cuda}, Python {python}".format(**torch) if torch else "no torch"
        raise UserError(
            f"{python} has {has}, which is no target: name one, such as `--target 3.11-cpu` or `--target 3.11-cu130` "
            "(`torchwheels targets` lists all), or run this in the environment whose torch the wheel is for"
        )


_ASK = """
import importlib.util, json, pathlib, runpy, sys
spec = importlib.util.find_spec("torch")
if spec is None or not spec.origin: sys.exit(print("null"))
said = runpy.run_path(str(pathlib.Path(spec.origin).with_name("version.py")))
python = ".".join(map(str, sys.version_info[:2])) + sys.abiflags
print(json.dumps({"version": said["__version__"], "cuda": said["cuda"], "python": python}))
"""


@functools.cache
def load() -> Releases:
    """The tool's own table."""
    table = msgspec.toml.decode(FILE.read_bytes())
    table["torches"] = [{"version": x, "cudas": y["cuda"], **y} for x, y in table["torch"].items()]
    table["cudas"] = {x: {"version": x, **y} for x, y in table["cuda"].items()}
    return msgspec.convert(table, Releases)
