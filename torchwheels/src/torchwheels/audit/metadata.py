"""The rules about a wheel's name, its metadata, and the files that it installs."""

import configparser
import csv
import email
import importlib.metadata
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

from packaging.metadata import ExceptionGroup, Metadata
from packaging.tags import parse_tag
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from torchwheels.options import Expectation, admitted, minor, numbers
from torchwheels.system import masked
from torchwheels.wheel import BUILD_RECORD, CUDA_LIBRARY, Wheel, finish, record_hash

# Python takes metadata under such names in any case.
_OF_OTHERS = re.compile(
    r".*\.pth|(site|user)customize(\..*)?|(?i:.*\.(dist|egg)-info)|.*\.data|(torch|nvidia|functorch|torchgen)(\..*)?"
)
_OF_ENVIRONMENT = re.compile(
    r"data/(lib.*|pyvenv\.cfg|pip\.conf)|(data/bin|scripts)/((python|pip)[\d.]*|.*/.*)"
)
_SCHEMES = "purelib", "platlib", "headers", "scripts", "data"
_CALLS = re.compile(r"[\w.]+\s*:\s*[\w.]+\s*(\[.*\])?")
_TAG_OF_A_PYTHON = re.compile(r"py3\d*-none|(cp3\d+)-(none|abi3|\1t?)")


def label(wheel: Wheel, expectation: Expectation) -> Iterator[str]:
    """The name's version is that of the metadata, and its label names the libraries' CUDA and torch."""
    said = wheel.metadata["Version"]
    if _normalised(said) != str(wheel.version) or said != _normalised(said):
        yield f"its metadata have the version {said}, but its name {wheel.version}"
    target, text = expectation.target, wheel.version.local or ""
    several = re.findall(r"(?<![a-z0-9])(?:cpu|cu\d+|torch\d+\.\d+)(?![a-z0-9])", text)
    cuda = next((x for x in several if not x.startswith("torch")), "")
    torch = next((x.removeprefix("torch") for x in several if x.startswith("torch")), "")
    if target.is_release:
        if text:
            yield f"its version {wheel.version} has a label, but {target.name} has none"
    elif wheel.classic_use and not (cuda and torch) and not expectation.of_others:
        yield (
            f"its version {wheel.version} does not say for which CUDA and which torch it is, and its "
            f"libraries work with one only: label it +{target.label}.torch{minor(target.torch)}"
        )
    if len(several) > bool(cuda) + bool(torch):
        yield f"its label has {' and '.join(several)}, of which only one CUDA and one torch can be right"
    if cuda and cuda != target.label and not target.is_release:
        yield f"its label says {cuda}, but {target.name} is {target.label}"
    if torch and torch != minor(target.torch):
        yield f"its label says torch {torch}, but {target.name} has torch {target.torch}"
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


def requirement(wheel: Wheel, expectation: Expectation) -> Iterator[str]:
    """The metadata require only torch versions that the libraries load under, the target's among them."""
    wanted, torch = wheel.torch_requirement, expectation.target.torch
    if wanted is None:
        right = f"=={minor(torch)}.*" if wheel.torches is None else wheel.torches
        if right:  # else no library uses torch
            yield f"its metadata do not require torch: add `Requires-Dist: torch{right}`"
    elif not wanted.contains(torch, prereleases=True):
        yield f"its metadata require torch{wanted}, but {expectation.target.name} has torch {torch}"
    elif wheel.classic_use and len(admitted(wanted)) != 1:
        yield (
            f"its metadata require {f'torch{wanted}' if wanted else 'any torch'}, but "
            f"{wheel.classic_use}: require torch=={minor(torch)}.*"
        )


def size(wheel: Wheel, expectation: Expectation) -> Iterator[str]:
    """The file is no larger than the project's budget."""
    megabytes, budget = wheel.path.stat().st_size / 1e6, expectation.options.size_budget
    if 0 < budget < megabytes:
        yield f"it has {megabytes:.2f} MB, over the {budget:g} MB allowed"


def metadata(wheel: Wheel, expectation: Expectation) -> Iterator[str]:
    """The metadata are valid, those of its name, and let the target's Python install it from an index."""
    project, _, version = wheel.dist_info.removesuffix(".dist-info").partition("-")
    if canonicalize_name(project) != wheel.name or _normalised(version) != str(wheel.version):
        yield f"its metadata are in {wheel.dist_info}, but its name is of {wheel.name} {wheel.version}"
    wheel_file = email.message_from_bytes(wheel.files.get(f"{wheel.dist_info}/WHEEL", b""))
    if not re.fullmatch(r"1\.\d+", wheel_file["Wheel-Version"] or ""):
        yield "its WHEEL file does not say Wheel-Version: 1.0"
    if wheel.libraries and (wheel_file["Root-Is-Purelib"] or "").lower() == "true":
        yield "its WHEEL file says Root-Is-Purelib: true, but it has libraries, which are of one platform"
    text = wheel.files[f"{wheel.dist_info}/METADATA"]
    if b"\0" in text:
        yield "its metadata hold a NUL"
    said = Metadata.from_email(text, validate=False)
    try:
        Metadata.from_email(text)
    except ExceptionGroup as group:
        # Setuptools until 76 names the files of the license before that was in the metadata: no index minds.
        early = "license-file introduced in metadata version 2.4"
        faults = [x for x in group.exceptions if not str(x).startswith(early)]
        yield from (f"its metadata are not valid: {error}" for error in faults)
        if faults:
            return
    if canonicalize_name(said.name) == "unknown":
        yield "its metadata are of UNKNOWN, setuptools' word for no name: have its setup say one"
    elif canonicalize_name(said.name) != wheel.name:
        yield f"its metadata are of {said.name}, but its name is of {wheel.name}"
    python = expectation.target.python_version
    if said.requires_python is not None and not expectation.target.is_of(said.requires_python):
        yield f"its metadata require Python {said.requires_python}, but its target has Python {python}"
    here = {"extra": "", "python_version": python}  # who asks for an extra has read what it is
    for each in said.requires_dist or []:
        if each.url and (each.marker is None or each.marker.evaluate(here)):
            yield f"its metadata require {each.name} from an address, which no index shall have"
        torch, where = expectation.target.torch, each.marker
        is_of_torch = where and canonicalize_name(each.name) == "torch" and where.evaluate(here)
        if is_of_torch and not each.specifier.contains(torch, prereleases=True):
            of = f"torch{each.specifier} where {where}"
            yield f"its metadata require {of}, but {expectation.target.name} has torch {torch}"
    for field in sorted({*wheel.metadata} - {"Description"}):  # in which many show how to write one
        if any(masked(str(x)) != str(x) for x in wheel.metadata.get_all(field) or []):
            yield f"its metadata show a password or a token in {field}: have its setup leave it out"


def installed_files(wheel: Wheel, expectation: Expectation) -> Iterator[str]:
    """Installers take it all, each file once, into no other project; nothing runs in every start of Python."""
    installed = [(name, *wheel.installed(name)) for name in wheel.files]
    text = wheel.files.get(f"{wheel.dist_info}/entry_points.txt", b"")
    try:
        configparser.ConfigParser(strict=False, delimiters="=").read_string(text.decode())
    except (ValueError, configparser.Error) as error:
        yield f"its entry_points.txt cannot be read: {' '.join(str(error).split())}"
        return
    with zipfile.ZipFile(wheel.path) as archive:
        folder = zipfile.Path(archive, f"{wheel.dist_info}/")
        entries = importlib.metadata.PathDistribution(folder).entry_points
    programs = [x for x in entries if x.group in ("console_scripts", "gui_scripts")]
    for each in programs:
        if not _CALLS.fullmatch(each.value):
            yield f"its script {each.name} calls {each.value!r}, which is no `module:function`"
    installed += [(f"the script {each.name}", "scripts", each.name) for each in programs]
    if f"{wheel.dist_info}/direct_url.json" in wheel.files:
        yield "it holds direct_url.json, where installers note from which address they took a wheel"
    places = set()
    for name, scheme, path in installed:
        place = scheme.replace("purelib", "platlib"), path
        if place in places:
            yield f"it installs {name}, and another file in its place"
        places.add(place)
        if scheme not in _SCHEMES or not path:
            yield f"it holds {name}, which installers refuse: it is none of {', '.join(_SCHEMES)}"
        top = path.partition("/")[0]
        if scheme in ("purelib", "platlib"):
            spoils = top != wheel.dist_info and _OF_OTHERS.fullmatch(top)
        else:
            spoils = _OF_ENVIRONMENT.fullmatch(f"{scheme}/{path}")
        if spoils:
            yield f"it installs {name}, which is of another project or runs in every start of Python"


def record(wheel: Wheel, expectation: Expectation) -> Iterator[str]:
    """RECORD names every file, with the hash and the size that the file has, and no other."""
    path = f"{wheel.dist_info}/RECORD"
    lines = wheel.files.get(path, b"").decode(errors="replace").splitlines()
    found: dict[str, list[str]] = {}
    for name, *said in filter(None, csv.reader(lines)):
        found.setdefault(name, []).extend(said)  # twice is too long
    for name in sorted({path, *found, *wheel.files}):
        row, data = found.get(name, []), wheel.files.get(name)
        right = data is not None and len(row) == 2
        if right and name != path:  # its own hash it cannot name
            right = row[0] == record_hash(data or b"") and row[1] in ("", str(len(data or b"")))
        if not right:
            yield f"its RECORD is not right about {name}"


def build_record(wheel: Wheel, expectation: Expectation) -> Iterator[str]:
    """The build record is there, and names the target."""
    if wheel.record is None:
        yield f"it holds no build record ({wheel.dist_info}/{BUILD_RECORD})"
        return
    named = ("source", "cxx", "torchwheels", *(["nvcc"] if expectation.target.cuda else []))
    used = finish.Used(expectation.target, expectation.architectures, "", "", nvcc=None)
    expected = finish.build_record(wheel.name, str(wheel.version), used)
    for key in named:
        if not (said := wheel.record.get(key)) or not isinstance(said, str):
            yield f"its build record names no {key}"
    for key, value in expected.items():
        said = wheel.record.get(key)
        if key not in (*named, "nvcc") and said != value:
            yield f"its build record has {key} {said!r}, not {value!r}"


def bill_of_materials(wheel: Wheel, expectation: Expectation) -> Iterator[str]:
    """The bill of materials is there, and is of these libraries, this version and the target's torch."""
    path = f"{wheel.dist_info}/sboms/{wheel.name}.cdx.json"
    if path not in wheel.files:
        yield f"it holds no bill of materials ({path})"
        return
    said = _facts(json.loads(wheel.files[path]))
    used = finish.Used(expectation.target, (), "", "", nvcc=None)
    built = finish.build_record(wheel.name, str(wheel.version), used)
    libraries = {name: wheel.files[name] for name in wheel.libraries}
    expected = _facts(finish.bill_of_materials(built, libraries))
    for name in sorted(said.keys() | expected.keys()):
        if said.get(name) != expected.get(name):
            yield f"its bill of materials is not right about {name}"


def _facts(bill: Mapping[str, Any]) -> dict[str, object]:
    """What a bill of materials says of the wheel, its libraries and its torch."""
    subject, components = bill["metadata"]["component"], bill["components"]
    found = {x["name"]: x.get("hashes") for x in components if x["type"] == "file"}
    torch = {x["name"]: x["version"] for x in components if x["name"] == "torch"}
    return {**found, **torch, subject["name"]: subject["version"]}
