"""Python environments: one with the target's torch, kept between builds, and small ones on top of it."""

from __future__ import annotations

import ast
import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from torchwheels import processes, releases
from torchwheels.errors import UserError
from torchwheels.output import without_userinfo
from torchwheels.releases import Target, load

# The caller's variables that a build sees, besides pip's configuration.
_KEPT = {
    "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "CCACHE_DIR", "CCACHE_RECACHE",
}  # fmt: skip

_SECONDS_OF_SILENCE = 20.0


def cache() -> Path:
    """Where environments and sources are kept between builds."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("TORCHWHEELS_CACHE") or f"{home}/torchwheels").expanduser()


MARK = ".torchwheels"
"""A file in each folder that is this tool's own: no sources are there, and what is there it may delete."""
PARTS = ("environments", "build", "compiled", "ccache")  # the last one was of 0.1


def marked(folder: Path) -> Path:
    """Makes `folder`, and marks it as this tool's own, where nothing is there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        (folder / MARK).touch()
    return folder


def own_cache() -> Path:
    """The cache, which is this tool's alone, or an error: `clean` empties it."""
    folder = marked(cache())
    others = {x.name for x in folder.iterdir()} - {*PARTS, "lost+found"}
    if MARK in others:
        return folder
    if others:
        raise UserError(
            f"TORCHWHEELS_CACHE names {folder}, which holds other files ({min(others)}), and `torchwheels clean` "
            "empties it: name a new folder"
        )
    (folder / MARK).touch()  # of 0.1
    return folder


@contextlib.contextmanager
def locked(name: str, wait: bool = True) -> Iterator[Path]:
    """The folder `name` of the cache, which no other process changes until the end.

    Where one does now, and this shall not `wait`, BlockingIOError is raised.
    """
    folder = own_cache() / name
    folder.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise
            print(f"torchwheels: waiting for another process that uses {folder}", flush=True)
            _wait_for(lock)
        yield folder


_in_use: dict[Path, int] = {}
"""The files of locks, which the end of the process closes."""


def use(folder: Path) -> Path:
    """The folder of the cache, which nobody removes before this process ends."""
    if folder not in _in_use:
        lock = folder.with_name(f"{folder.name}.used")
        _in_use[folder] = os.open(lock, os.O_RDWR | os.O_CREAT)
        fcntl.flock(_in_use[folder], fcntl.LOCK_SH)
    return folder


def remove(name: str) -> int:
    """Removes the folder `name` of the cache; returns its size. BlockingIOError is raised where a process uses it."""
    with (
        locked(name, wait=False) as folder,
        folder.with_name(f"{folder.name}.used").open("w") as used,
    ):
        fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
        taken = size(folder)
        shutil.rmtree(folder)
    return taken


def _wait_for(lock: TextIO) -> None:
    """Locks the file `lock`; Ctrl-C interrupts the wait."""
    while True:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(0.2)


def clean_variables(home: Path) -> dict[str, str]:
    """The variables of a process that gets only pip's configuration from the caller."""
    variables = {name: value for name, value in os.environ.items() if name in _KEPT}
    # pip would look for its files, and for passwords, in the home that it is given.
    for key, value in pip_settings("install").items():
        variables[f"PIP_{key.replace('-', '_').upper()}"] = value
    variables["PIP_CONFIG_FILE"] = os.devnull
    if (passwords := Path(os.environ.get("NETRC") or "~/.netrc").expanduser()).is_file():
        variables["NETRC"] = str(passwords)
    variables |= {"HOME": str(home), "TMPDIR": str(home), "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
    return {**variables, "PYTHONDONTWRITEBYTECODE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def pip_settings(command: str) -> dict[str, str]:
    """What pip's files and variables say for one of its commands: `index-url`, `cert` ..."""
    said = _pip_config(tuple(sorted(os.environ.items())))
    lines = re.findall(r"^(\S+?)\.([\w-]+)=(.*)$", said, re.MULTILINE)
    return {
        key: " ".join(ast.literal_eval(value).split())
        for section in ("global", command, ":env:")  # the later more strongly
        for where, key, value in lines
        if where == section
    }


@functools.cache
def _pip_config(variables: tuple[tuple[str, str], ...]) -> str:
    command = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(command, env=dict(variables), capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"pip cannot read its configuration: {' '.join(done.stderr.split())}")
    return done.stdout


@dataclass(frozen=True)
class Environment:
    """A virtual environment."""

    folder: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        """Where its packages are."""
        (found,) = (self.folder / "lib").glob("python*/site-packages")
        return found


def find_python(version: str) -> str:
    """The interpreter of that version: the one that runs this, PATH's, or uv's."""
    if version == f"{sys.version_info[0]}.{sys.version_info[1]}{sys.abiflags}":
        return sys.executable
    uv = shutil.which("uv")
    candidates = [shutil.which(f"python{version}")]
    if uv:
        command = [uv, "python", "find", "--no-project", version]
        candidates.append(subprocess.run(command, capture_output=True, text=True).stdout.strip())
    for candidate in filter(None, candidates):
        said = "print('%d.%d' % sys.version_info[:2] + sys.abiflags, sys.executable)"
        # What pyenv has on PATH runs only the chosen one.
        chosen = {**os.environ, "PYENV_VERSION": version}
        ask = [candidate, "-c", f"import sys; {said}"]
        done = subprocess.run(ask, env=chosen, capture_output=True, text=True)
        found, _, path = done.stdout.strip().partition(" ")
        if found == version:
            return path
    raise UserError(
        f"there is no Python {version} on PATH: install one (`uv python install {version}` does), or "
        "build with `--backend docker`"
    )


def torch_requirement(target: Target) -> str:
    """The target's torch; never a CPU-only one in a CUDA target, which lacks what to link with."""
    any_label = target.cuda and "+" not in target.torch
    return f"torch=={target.torch}" + (f",!={target.torch}+cpu" if any_label else "")


def _options_of_index(target: Target) -> list[str]:
    """Where pip looks for torch, besides what its own configuration says, or instead."""
    if target.index:
        return [f"--extra-index-url={target.index}"]
    index = os.environ.get("TORCHWHEELS_TORCH_INDEX")
    return [f"--index-url={index.replace('{label}', target.label)}"] if index else []


def with_torch(target: Target, toolkit: tuple[str, ...], any_cuda: bool = False) -> Environment:
    """An environment with the target's torch, the build tools and pip's CUDA `toolkit`; kept.

    All targets share one for which pip finds the same torch. `any_cuda`: of whichever CUDA that is.
    """
    python = os.path.realpath(find_python(target.python))  # not that of a virtual environment
    with locked(f"environments/{_name(target, python)}") as folder:
        environment, complete = Environment(use(folder)), folder / "complete"
        if not complete.is_file():
            shutil.rmtree(folder)
            _install_torch(target, python, environment)
            complete.touch()
        if missing := [x for x in toolkit if x not in complete.read_text().splitlines()]:
            size = "0.1 GB to download, 0.2 GB on disk"
            what = f"CUDA's compiler for {target.name}"
            print(f"torchwheels: installing {what}, once: {size}", flush=True)
            # Named again, since torch pins the rest of the toolkit.
            wanted = [*_options_of_index(target), torch_requirement(target), *missing]
            pip_install(environment, wanted, clean_variables(folder), _lack_of_space(0.3))
            complete.write_text("".join(f"{x}\n" for x in toolkit))
    said: dict[str, str | None] = {}
    exec((environment.site_packages / "torch" / "version.py").read_text(), said)
    wanted_cuda = target.cuda.version if target.cuda and not any_cuda else None
    if wanted_cuda and str(said["cuda"]).split(".")[0] != wanted_cuda.split(".")[0]:
        raise UserError(
            f"{target.name} needs a torch of CUDA {wanted_cuda}, but pip installed "
            f"{said['__version__']} of CUDA {said['cuda']}: let pip's configuration name an index with "
            f"torch {target.torch} for {target.label}, or choose another target"
        )
    of_cuda = f" of CUDA {said['cuda']}" if said["cuda"] else ""
    print(f"torchwheels: using torch {said['__version__']}{of_cuda} in {folder}", flush=True)
    return environment


def _name(target: Target, python: str) -> str:
    """What the environment with the target's torch is called: by the file that pip finds, which is asked once."""
    tools = load().tools
    given = [python, *tools, torch_requirement(target), target.index, places_of_torch()]
    folder = own_cache() / "environments"
    known = folder / f"{_key(given)}.name"
    if known.is_file() and (folder / known.read_text() / "complete").is_file():
        return known.read_text()
    with tempfile.TemporaryDirectory(prefix="torchwheels-pip-") as work:
        environment, report = Environment(Path(work)), Path(work) / "report.json"
        processes.run([python, "-m", "venv", work]).check_returncode()
        variables = clean_variables(environment.folder)
        # That of Python may be too old to report.
        pip_install(environment, [x for x in tools if x.startswith("pip")], variables, hashed=True)
        asked = ["--dry-run", "--no-deps", f"--report={report}", *_options_of_index(target)]
        pip_install(environment, [*asked, torch_requirement(target)], variables)
        (found,) = json.loads(report.read_text())["install"]
    file = found["download_info"]
    hashes = file.get("archive_info", {}).get("hashes") or file["url"]
    key = _key([python, *tools, json.dumps(hashes)])
    name = f"{target.python}-torch{found['metadata']['version']}-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    known.write_text(name)
    return name


def _key(given: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(given).encode()).hexdigest()[:8]


def _install_torch(target: Target, python: str, environment: Environment) -> None:
    """Makes an environment with the target's torch and the build tools, or none."""
    download, space, kept = (0.2, 2, 1) if "+cpu" in environment.folder.name else (3, 9, 5)
    print(
        f"torchwheels: installing torch {target.torch} for {target.name}, once: needs {download} GB download, "
        f"{space} GB of free space, {kept} GB afterwards",
        flush=True,
    )
    lack = _lack_of_space(space)
    variables = clean_variables(environment.folder)
    try:
        processes.run([python, "-m", "venv", environment.folder]).check_returncode()
        with _progress(environment.folder):
            pip_install(environment, [*load().tools], variables, lack, hashed=True)
            # PyTorch's own index has smaller builds, for the CPU alone, and nothing of the tools.
            wanted = [*_options_of_index(target), torch_requirement(target)]
            pip_install(environment, wanted, variables, lack)
    except BaseException:
        # A partial installation is useless, and may have filled the disk.
        shutil.rmtree(environment.folder)
        raise


def _lack_of_space(needed: float) -> str:
    """Warns where the cache's disk has fewer GB free than an installation may need; returns the warning.

    It is no error: the need is that of the largest torch.
    """
    free = shutil.disk_usage(cache()).free
    if free >= needed * 1e9:
        return ""
    lack = (
        f"the disk of {cache()} has {gigabytes(free)} free, and up to {needed} GB are needed: free some (`torchwheels "
        "clean` removes what is kept there), or let TORCHWHEELS_CACHE name a folder on another disk"
    )
    print(f"torchwheels: {lack}", flush=True)
    return lack


def cuda_runtime(environment: Environment, target: Target, folder: Path) -> Path:
    """Installs the CUDA runtime of `environment` for the target's machine into `folder`: that of its libraries."""
    package = "nvidia-cuda-runtime"
    (found,) = importlib.metadata.distributions(name=package, path=[str(environment.site_packages)])
    requirement = f"{package}=={found.version}"
    options = ["--only-binary=:all:", "--no-deps", f"--target={folder}"]
    platforms = ("manylinux2014", "manylinux_2_17", "manylinux_2_28")
    options += [f"--platform={each}_{target.machine.name}" for each in platforms]
    pip_install(environment, [*options, requirement], clean_variables(environment.folder))
    assert target.cuda is not None
    return folder / "nvidia" / f"cu{target.cuda.version.split('.')[0]}" / "lib"


@contextlib.contextmanager
def _progress(folder: Path) -> Iterator[None]:
    """Prints the size of `folder` now and then; pip also downloads there."""
    start, ended = time.monotonic(), threading.Event()

    def say() -> None:
        while not ended.wait(_SECONDS_OF_SILENCE):
            seconds = time.monotonic() - start
            print(f"torchwheels: {gigabytes(size(folder))} after {seconds:.0f} s", flush=True)

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def size(folder: Path) -> int:
    """The bytes that a folder takes on the disk."""
    found = 0
    for parent, _, names in os.walk(folder):  # which passes over folders that have just gone
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found += os.lstat(f"{parent}/{name}").st_blocks * 512
    return found


def gigabytes(number: int) -> str:
    """`1.2 GB`."""
    return f"{number / 1e9:.1f} GB"


def places_of_torch() -> str:
    """Where pip looks for torch, without passwords."""
    settings = pip_settings("install")
    if index := os.environ.get("TORCHWHEELS_TORCH_INDEX"):
        settings["index-url"] = index
    keys = ("index-url", "extra-index-url", "find-links")
    return without_userinfo(" ".join(settings.get(key, "") for key in keys))


def on_top_of(base: Environment, folder: Path) -> Environment:
    """A new environment in `folder` that also has what `base` has, and cannot change that."""
    processes.run([base.python, "-m", "venv", "--without-pip", folder]).check_returncode()
    environment = Environment(folder)
    # Python does not read the .pth files of a folder that a .pth file names.
    files = sorted(base.site_packages.glob("*.pth"))
    lines = [line for file in files for line in file.read_text().splitlines()]
    folders = [str(base.site_packages), *(x for x in lines if x.strip() and Path(x).is_dir())]
    (environment.site_packages / "base.pth").write_text("".join(f"{x}\n" for x in folders))
    # CMake's ways to a package begin in site-packages.
    if torch := next((x for each in folders if (x := Path(each) / "torch").is_dir()), None):
        (environment.site_packages / "torch").symlink_to(torch)
    return environment


def pip_install(
    environment: Environment, requirements: list[str], variables: Mapping[str, str], lack: str = "",
    hashed: bool = False,
) -> None:  # fmt: skip
    """Installs `requirements`; an error says which of them cannot be had, or that space was lacking before.

    `hashed`: the very files that the lock file names.
    """
    command = [str(environment.python), "-m", "pip", "install"]
    pipe = subprocess.PIPE
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(releases.locked(releases.names(requirements).__contains__) if hashed else "")
        file.flush()
        command += ["--require-hashes", f"--requirement={file.name}"] if hashed else requirements
        done = processes.run(command, env=dict(variables), stdout=pipe, stderr=pipe, text=True)
    if done.returncode == 0:
        return
    # Which pip does not print as an error.
    conflict = re.search(r"^The conflict is caused by:\n((?: {4}.+\n)+)", done.stdout, re.MULTILINE)
    others = re.search(r"the requirement (.+) \(from versions: (?!none)", done.stderr)
    said = " ".join(re.findall(r"^ERROR: (.+)", done.stderr, re.MULTILINE)) or done.stderr.strip()
    advice = "check these names, the network and pip's configuration"
    if others:
        said, advice = others[1], "there is no such version, only others"
    elif conflict:
        said = ", ".join(map(str.strip, conflict[1].splitlines()))
        advice = "these cannot be had together"
    elif "No space left on device" in done.stderr:
        advice = lack or f"free some space on the disk of {environment.folder}"
    elif "(from versions: none)" not in done.stderr:
        # Where pip's cache is full, it says that the connection was interrupted.
        advice = lack or advice
    # An option may hold a password.
    wanted = " ".join(x for x in requirements if not x.startswith("--"))
    raise UserError(f"pip cannot install {wanted} ({said}): {advice}")
