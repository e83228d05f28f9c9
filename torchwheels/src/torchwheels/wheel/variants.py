"""Variant wheels (PEP 825): a labelled wheel under the project's own version, which an installer chooses.

What is in the two is the same, but for the metadata. The label of the version, `1.0+cu130`, becomes one
of the file, `…-cu130.whl`, and variant.json says what a machine must have.

variantlib could write these, but not twice the same bytes, and under the labelled version alone.
"""

import json
import re
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from torchwheels.errors import RefusedError
from torchwheels.options import sm
from torchwheels.system import as_json
from torchwheels.wheel.archive import metadata_of, renamed, unpack, with_record, write_wheel
from torchwheels.wheel.contents import Wheel

_SCHEMA = "https://variants-schema.wheelnext.dev/peps/825/v0.1.1.json"
# What says which values a machine has; the namespace that comes first counts most. The schema knows no
# providers, but uv 0.13 asks for one of each namespace. It has NVIDIA's built in. Without one for the other
# namespace it refuses the whole release; with this one it skips the wheels.
_PROVIDERS = {
    "abi_dependency": {"builtin": "abi_dependency"},
    "nvidia": {
        "requires": ["nvidia-variant-provider>=0.0.1"],
        "plugin-api": "nvidia_variant_provider.plugin:NvidiaVariantPlugin",
    },
}
_LABEL = re.compile(r"[+.](cpu|cu\d+)(?:\.torch(\d+\.\d+))?$")

FOLDER = "variants"

Properties = Mapping[str, Mapping[str, list[str]]]
"""Of each namespace the features, and for each the values of which a machine must have one."""


class Variant(NamedTuple):
    """The variant of a labelled wheel."""

    path: Path
    """In a folder beside the labelled one: pip takes no file of such a name."""
    label: str
    properties: Properties
    files: Mapping[str, bytes]


def of(found: Wheel) -> Variant | None:
    """The variant of a wheel that torchwheels built and labelled; None where it has no label."""
    label = _LABEL.search(str(found.version))
    if label is None or found.record is None:
        return None
    cuda_or_cpu, torch = label.groups()
    # Not for the torch that the targets of a CUDA version have by default: uv skips a wheel that names one.
    if not str(found.record.get("target")).endswith(f"-torch{torch}"):
        torch = None
    properties = _properties(found.record, torch)
    name = f"{cuda_or_cpu}.torch{torch}" if torch else cuda_or_cpu if properties else "null"
    release = f"{found.dist_info.partition('-')[0]}-{str(found.version)[: label.start()]}"
    info = f"{release}.dist-info"
    files = _under_another_version(found, release)
    files[f"{info}/variant.json"] = metadata({name: properties})
    tags = found.path.stem.split("-", 2)[2]
    path = found.path.parent / FOLDER / f"{release}-{tags}-{name}.whl"
    return Variant(path, name, properties, with_record(files, f"{info}/RECORD"))


def _properties(record: Mapping[str, Any], torch: str | None) -> Properties:
    found: dict[str, dict[str, list[str]]] = {}
    architectures = record.get("architectures") or []
    if record.get("cuda"):
        found["nvidia"] = {"cuda_version_lower_bound": [record["cuda"]]}
        # With PTX it runs on every newer GPU, too, and no list of architectures can say so.
        if not any(each.endswith("+PTX") for each in architectures):
            found["nvidia"]["sm_arch"] = sorted(f"{sm(each)}_real" for each in architectures)
    if torch:
        found["abi_dependency"] = {"torch": [torch]}
    return found


def _under_another_version(found: Wheel, release: str) -> dict[str, bytes]:
    """The files of a wheel, where what says its version says that of `release`."""
    old, new = str(found.version), release.partition("-")[2]
    files = {}
    for path, data in found.files.items():
        folder, _, name = path.partition("/")
        if folder == found.dist_info and name == "METADATA":
            data = data.replace(f"Version: {old}\n".encode(), f"Version: {new}\n".encode(), 1)
        elif folder == found.dist_info and name.endswith(".json"):
            for text in (str, quote):
                data = data.replace(text(old).encode(), text(new).encode())
        files[renamed(path, found.dist_info.removesuffix(".dist-info"), release)] = data
    return files


def metadata(variants: Mapping[str, Properties]) -> bytes:
    """The text of variant.json, or with several `variants` that of an index: for each label its properties."""
    used = [each for each in _PROVIDERS if any(each in found for found in variants.values())]
    namespaces = used or ["nvidia"]  # one is required
    document = {
        "$schema": _SCHEMA,
        "default-priorities": {"namespace": namespaces},
        "providers": {each: _PROVIDERS[each] for each in namespaces},
        "variants": dict(sorted(variants.items())),
    }
    return as_json(document).encode()


def one_torch(path: Path) -> str:
    """The one torch that a wheel or a variant requires; empty where it is none, or several.

    Once the targets of a label have another torch, two wheels of a release have variants of one name.
    """
    text = metadata_of(path).decode(errors="replace")
    return "".join(re.findall(r"(?m)^Requires-Dist: torch==([\d.]+)\.\*$", text))


def check(variant: Variant, labelled: Path) -> bool:
    """Whether the file of the variant is for the torch of the wheel `labelled`; an error where that gives another."""
    try:
        if one_torch(variant.path) != one_torch(labelled):
            return False
        with zipfile.ZipFile(variant.path) as archive:
            files = unpack(archive)
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError):
        files = {}  # it is no wheel at all
    info = variant.path.name.split("-")[:2]
    path, record = (f"{'-'.join(info)}.dist-info/{name}" for name in ("variant.json", "RECORD"))
    said = files.get(path, b"{}")  # its schema is that of the day
    wanted = {"variants": {variant.label: variant.properties}}
    same = json.loads(said).items() >= wanted.items()
    if not same or files != with_record({**variant.files, path: said}, record):
        way_out = "delete it, and build that again"
        raise RefusedError(f"{variant.path.name} is not the variant of {labelled.name}: {way_out}")
    return True


def write(found: Wheel) -> Path | None:
    """Writes the variant of a wheel, and returns its path; None where there is none."""
    variant = of(found)
    if variant is None:
        return None
    variant.path.parent.mkdir(exist_ok=True)
    write_wheel(variant.path, variant.files)
    return variant.path
