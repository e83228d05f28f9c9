"""How large every wheel of the matrix is, and what of: `nox -s sizes` reads the wheels in dist/.

A wheel for CUDA takes minutes to build, in an image of its own. So those that dist/ lacks are estimated: sizes.json
has the parts of every wheel, noted when it was last built, and what has grown in a wheel of dist/ has grown alike in
the others. `nox -s sizes -- --note` notes those of dist/ anew.

A wheel above nine tenths of its budget is an error here, long before one above the budget is refused where it is built.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import struct
import tempfile
import zipfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from elftools.elf.elffile import ELFFile

from extops_build import UserError, errors_for_the_user, libraries, memory_model
from tools.notes import EXTOPS
from tools.tables import OPTIONS, markdown
from torchwheels.options import RELEASE, Target
from torchwheels.system import AARCH64
from torchwheels.wheel import demangle

NOTED = Path(__file__).with_name("sizes.json")
SHARE = 0.9
"""Of a budget: what is left is for the next kernel, and for what an estimate is wrong by."""
WITHIN = 0.03
"""How far an estimate may be from the wheel, once that is built."""

HOST = "host"
"""Instead of a GPU architecture: what is not GPU code."""
OTHER = "other files"


class Part(NamedTuple):
    """What bytes of a wheel are put down to."""

    family: str
    """The name of a kernel, or that of a library for the CPU."""
    cell: str
    architecture: str
    """`sm_90a`, `compute_90` for PTX, or `HOST`."""


Families = Mapping[str, Mapping[str, float]]
"""The bytes of each architecture and family."""


# ---- what a wheel is made of ----


def parts_of(wheel: Path) -> Counter[Part]:
    """The bytes of each part of a wheel, compressed as they are there: they add up to its size."""
    found: Counter[Part] = Counter()
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            name = Path(entry.filename).name
            if name == f"{libraries.CUDA.name}.so":
                code = _of_library(archive.read(entry))
                scale = entry.compress_size / sum(code.values())
                found.update({part: size * scale for part, size in code.items()})
            else:
                family = name if name.endswith(".so") else OTHER
                found[Part(family, "", HOST)] += entry.compress_size
    found[Part(OTHER, "", HOST)] += wheel.stat().st_size - found.total()  # names, and headers
    return found


def _of_library(library: bytes) -> dict[Part, float]:
    """The parts of the library of kernels, up to a factor.

    Its GPU code is compressed already, each module by itself: one for a source file and an architecture. A kernel's
    share of a module is the same as of what zlib makes of it.
    """
    elf: Any = ELFFile(io.BytesIO(library))
    code = elf.get_section_by_name(".nv_fatbin").data()
    found: defaultdict[Part, float] = defaultdict(float)
    for size, module in zip(_packed_sizes(code), _modules(library), strict=True):
        weights = {
            symbol: sum(map(_compressed, pieces)) for symbol, pieces in module.pieces.items()
        }
        for symbol, weight in weights.items():
            part = Part(*kernel(symbol), module.architecture)
            found[part] += size * weight / sum(weights.values())
    found[Part(f"{libraries.CUDA.name}.so", "", HOST)] = _compressed(library.replace(code, b""))
    return found


_FATBIN, _MODULE = struct.Struct("<IHHQ"), struct.Struct("<HHIQ")
"""The headers of a fat binary, and of a module in one: CUDA's, of which the last two numbers are two sizes in bytes."""
_MAGIC = 0xBA55ED50


def _packed_sizes(code: bytes) -> list[int]:
    """What zlib makes of each module of GPU code: first of machine code, then of PTX, as cuobjdump numbers them."""
    sizes: dict[int, list[int]] = {2: [], 1: []}
    at = 0
    while at < len(code):
        magic, _, header, size = _FATBIN.unpack_from(code, at)
        if magic != _MAGIC:  # what aligns the next one
            at += 8
            continue
        at, end = at + header, at + header + size
        while at < end:
            kind, _, header, size = _MODULE.unpack_from(code, at)
            sizes[kind].append(_compressed(code[at : at + header + size]))
            at += header + size
    return sizes[2] + sizes[1]


@dataclass(frozen=True)
class Module:
    """GPU code of a source file for one architecture."""

    architecture: str
    pieces: Mapping[str, Iterable[bytes]]
    """By the symbols of kernels; of none by an empty one."""


def _modules(library: bytes) -> Iterator[Module]:
    with tempfile.TemporaryDirectory(prefix="extops-sizes-") as name:
        folder = Path(name)
        (folder / "library.so").write_bytes(library)
        for kind in ("elf", "ptx"):
            memory_model.cuobjdump(f"-x{kind}", "all", "library.so", folder=folder)
        for file in sorted(folder.glob("*.cubin"), key=_place):
            yield Module(file.suffixes[-2][1:], _grouped(_sections(file.read_bytes())))
        for file in sorted(folder.glob("*.ptx"), key=_place):
            architecture = file.suffixes[-2].replace(".sm", "compute")
            yield Module(architecture, _grouped(_functions(file.read_text())))


def _place(file: Path) -> int:
    """`library.12.sm_80.cubin` is the twelfth."""
    return int(file.suffixes[-3][1:])


def _grouped(pieces: Iterable[tuple[str, bytes]]) -> dict[str, list[bytes]]:
    found: defaultdict[str, list[bytes]] = defaultdict(list)
    for symbol, data in pieces:
        found[symbol].append(data)
    return found


def _functions(ptx: str) -> Iterator[tuple[str, bytes]]:
    head, *functions = re.split(r"^(?=.*\.entry )", ptx, flags=re.MULTILINE)
    yield "", head.encode()
    for text in functions:
        yield text.partition(".entry ")[2].partition("(")[0], text.encode()


def _sections(module: bytes) -> Iterator[tuple[str, bytes]]:
    elf: Any = ELFFile(io.BytesIO(module))
    for section in elf.iter_sections():
        if section["sh_type"] != "SHT_NOBITS":
            start = section["sh_offset"]
            kernel = re.search(r"_Z\w+$", section.name)
            yield kernel[0] if kernel else "", module[start : start + section["sh_size"]]


def _compressed(data: bytes) -> int:
    return len(zlib.compress(data))


def kernel(symbol: str) -> tuple[str, str]:
    """The family of a kernel, and its cell."""
    name = demangle(symbol)
    family = re.search(r"(\w+)_kernel\b", name)
    cell = re.search(r"extops::((?!cuda\b)\w+(?:<\w+>)?)", name)
    return family[1] if family else "no kernel alone", cell[1] if cell else ""


def by_family(parts: Mapping[Part, float]) -> dict[str, dict[str, float]]:
    """The bytes of each architecture and family, as sizes.json has them."""
    found: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for part, size in parts.items():
        families = found[part.architecture]
        families[part.family] = families.get(part.family, 0) + size
    return dict(found)


def megabytes(families: Families) -> float:
    """The size of a wheel."""
    return sum(size for each in families.values() for size in each.values()) / 1e6


# ---- what a wheel would be made of ----


def estimated(noted: Families, built: Families, noted_of_built: Families) -> Families:
    """The parts of a wheel that were `noted` once, by how those of another have changed since they were noted."""
    found = {}
    for architecture, families in noted.items():
        like = _most_like(architecture, built)
        now, before = built[like], noted_of_built[like]
        # Compilers differ in how much code they make, and in how they compress it.
        ratio = sum(families.values()) / sum(before.values())
        growth = {x: now.get(x, 0) / size for x, size in before.items()}
        found[architecture] = {x: size * growth.get(x, 1.0) for x, size in families.items()}
        found[architecture] |= {x: size * ratio for x, size in now.items() if x not in before}
    return found


def _most_like(architecture: str, built: Iterable[str]) -> str:
    """The architecture of `built` that has the code for it, or the most similar one."""
    kind = architecture.partition("_")[0]
    others = [x for x in built if x.partition("_")[0] == kind]
    distance = {x: abs(_number(x) - _number(architecture)) for x in others}
    return min(others, key=lambda x: (distance[x], x))


def _number(architecture: str) -> int:
    return int(re.sub(r"\D", "", architecture) or 0)


# ---- the verdict ----


@dataclass(frozen=True)
class Size:
    """What is known of a wheel of the matrix."""

    target: Target
    budget: float
    """In MB."""
    noted: Families
    built: Families | None
    """If dist/ has it."""
    estimate: Families | None
    """If dist/ has another one to go by."""

    @property
    def families(self) -> Families:
        """Its parts, as far as is known."""
        return self.built or self.estimate or self.noted

    def row(self) -> tuple[str, ...]:
        """Its row of the table."""
        size, known = megabytes(self.families), "built" if self.built else "estimated"
        if self.built and self.estimate:
            known = f"built; estimated {megabytes(self.estimate):.2f}"
        share = f"{size / self.budget:.0%}"
        return _key(self.target), f"{size:.2f}", f"{self.budget:g}", share, known

    def faults(self) -> Iterator[str]:
        """What is wrong with it."""
        size = megabytes(self.families)
        if size > SHARE * self.budget:
            yield (
                f"{self.target.name} has {size:.2f} MB, above {SHARE:.0%} of the {self.budget:g} MB that "
                f"pyproject.toml allows it. {self._grown()}"
            )
        if self.built and self.estimate and abs(megabytes(self.estimate) / size - 1) > WITHIN:
            yield (
                f"{self.target.name} has {size:.2f} MB, but {megabytes(self.estimate):.2f} were estimated: "
                "if it is of these sources, note its sizes by `nox -s sizes -- --note`"
            )

    def _grown(self) -> str:
        """Which families have grown most since the wheel was noted, or else which are the largest."""
        now, before = _of_families(self.families), _of_families(self.noted)
        grown = Counter({family: now[family] - before[family] for family in now})
        most = [x for x in grown.most_common(3) if x[1] > 0.005]
        named = ", ".join(f"{family} by {size:.2f} MB" for family, size in most)
        if named:
            return f"Since that was noted, what grew most is {named}"
        largest = ", ".join(f"{family} with {size:.2f} MB" for family, size in now.most_common(3))
        return f"The largest are {largest}"


def _of_families(wheel: Families) -> Counter[str]:
    """The MB of each family, for all architectures."""
    found: Counter[str] = Counter()
    for families in wheel.values():
        found.update({family: size / 1e6 for family, size in families.items()})
    return found


def _key(target: Target) -> str:
    """What a wheel is called in sizes.json."""
    return f"{target.label}{target.machine.suffix}"


def sizes(built: Mapping[str, Families], noted: Mapping[str, Families]) -> list[Size]:
    """What is known of all wheels of the matrix by those that are built and those that are noted."""
    found = []
    for target in OPTIONS.targets_to_build(OPTIONS.chosen_targets()):
        key = _key(target)
        if key not in noted:
            raise UserError(
                f"sizes.json does not have {key}: build that wheel, then `nox -s sizes -- --note`"
            )
        others = [x for x in built if x != key and len(built[x]) > 1]  # with code for GPUs
        like = sorted(others, key=lambda x: (len({*noted[x]} ^ {*noted[key]}), x))
        estimate = estimated(noted[key], built[like[0]], noted[like[0]]) if like else None
        budget = OPTIONS.of_target(target).size_budget
        found.append(Size(target, budget, noted[key], built.get(key), estimate))
    return found


def wheels(dist: Path) -> dict[str, Path]:
    """The wheels in `dist` of the sources' version, as sizes.json calls them; refused ones, too."""
    found = {}
    for path in sorted(dist.glob(f"extops-{EXTOPS.version()}*.whl*"), reverse=True):
        _, version, *_, platform = path.name.split("-")
        suffix = AARCH64.suffix if AARCH64.name in platform else ""
        found[(version.partition("+")[2] or RELEASE) + suffix] = path
    return found


def table(parts: Mapping[Part, float]) -> str:
    """What takes the room in a wheel, in kB: a row for each family and cell, a column for each architecture."""
    architectures = sorted({part.architecture for part in parts}, key=_number)
    rows: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for part, size in parts.items():
        rows[part.family, part.cell][part.architecture] += round(size / 1000)
    ordered = sorted(rows.items(), key=lambda row: -row[1].total())
    lines = [
        (*names, *(str(sizes[x] or "") for x in architectures), str(sizes.total()))
        for names, sizes in ordered
    ]
    total = sum(rows.values(), Counter[str]())
    lines.append(("all", "", *(str(total[x]) for x in architectures), str(total.total())))
    return markdown(("family", "cell", *architectures, "kB"), lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.sizes", description=__doc__)
    parser.add_argument("--dist", type=Path, default=Path("dist"), help="where the wheels are")
    parser.add_argument("--note", action="store_true", help="note the sizes of these wheels")
    given = parser.parse_args()
    with errors_for_the_user():
        verdict(given.dist, note=given.note)


def verdict(dist: Path, *, note: bool) -> None:
    """Prints the sizes of all wheels; an error says which is too large."""
    parts = {name: parts_of(path) for name, path in wheels(dist).items()}
    built = {name: by_family(each) for name, each in parts.items()}
    if not any(len(families) > 1 for families in built.values()):
        raise UserError(
            f"{dist} has no wheel with code for GPUs to go by: `nox -s build-3.11-cu130` makes one"
        )
    for name, each in parts.items():
        print(f"{name}:\n{table(each)}\n")
    if note:
        _note(built)
    noted = json.loads(NOTED.read_text())
    for name, families in built.items():
        if {*families} != {*noted.get(name, {})}:
            raise UserError(
                f"{name} in {dist} has code for {' '.join(families)}, and sizes.json has it for "
                f"{' '.join(noted.get(name, {}))}: build it for all GPUs, and then `nox -s sizes -- --note`"
            )
    found = sizes(built, noted)
    print(markdown(("wheel", "MB", "allowed", "share", "known"), (size.row() for size in found)))
    if faults := [fault for size in found for fault in size.faults()]:
        raise UserError("\n  ".join(faults))


def _note(built: Mapping[str, Families]) -> None:
    noted = json.loads(NOTED.read_text())
    for name, families in built.items():
        noted[name] = {
            x: {y: max(1, round(size)) for y, size in each.items()} for x, each in families.items()
        }
    text = json.dumps(noted, indent=1, sort_keys=True)
    # A line for each architecture.
    NOTED.write_text(re.sub(r"(?<=[{\d,])\n {3,}(?=[\"}])", " ", text) + "\n")


if __name__ == "__main__":
    main()
