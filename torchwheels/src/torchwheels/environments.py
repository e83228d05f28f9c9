"""Python environments: one with a target's torch, kept between builds, and small ones on top of it."""

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from torchwheels.errors import UserError
from torchwheels.options import Target, indexes, releases
from torchwheels.system import cache, files, processes, scratch

# The caller's variables that a build sees, besides the configurations of pip and uv.
_KEPT = {
    "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "CCACHE_DIR", "CCACHE_RECACHE",
    "GITHUB_SERVER_URL", "GITHUB_REPOSITORY",  # a wheel may say where its sources are
}  # fmt: skip
_OF_UV = re.compile(r"UV_(?!PUBLISH_)")  # nothing is published here
_TAKES_TIME = re.compile(r" *(Downloading|Downloaded|Building|Built|Updating|Updated) ")


def clean_variables(home: Path) -> dict[str, str]:
    """The variables of a process that gets only the configurations of pip and uv from the caller."""
    variables = {name: value for name, value in os.environ.items() if name in _KEPT}
    settings = indexes.pip_settings("install")
    kept = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    variables |= {
        **indexes.uv_variables(settings),
        "UV_CACHE_DIR": str(files.expanded(f"{kept}/uv")),
        **{name: value for name, value in os.environ.items() if _OF_UV.match(name)},
        "UV_NO_CONFIG": "1",  # that of the folder which it is called in
    }
    # pip would look for its files, and for passwords, in the home that it is given.
    variables |= {**indexes.pip_variables(settings), "PIP_CONFIG_FILE": os.devnull}
    if passwords := indexes.passwords():
        variables["NETRC"] = str(passwords)
    variables |= {"HOME": str(home), "TMPDIR": str(home), "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
    return {**variables, "PYTHONDONTWRITEBYTECODE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def uv(*words: str | Path) -> list[str]:
    """A command of uv."""
    from uv import find_uv_bin  # only here: nox imports this, too

    return [find_uv_bin(), *map(str, words)]


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
    asked = version if version.endswith("t") else f"{version}+gil"
    # What pyenv has on PATH runs only the chosen one.
    variables = {**os.environ, "PYENV_VERSION": version, "UV_NO_CONFIG": "1"}
    command = uv("python", "find", "--system", "--no-project", asked)
    done = processes.ask(command, env=variables)
    if done.returncode:
        raise UserError(
            f"there is no Python {version} on PATH: install one (`uv python install {version}` does), or "
            "build with `--backend docker`"
        )
    return done.stdout.strip()


def make(python: str | Path, folder: Path) -> Environment:
    """A new environment of that interpreter, with nothing in it."""
    command = uv("venv", "--quiet", "--no-project", f"--python={python}", folder)
    processes.run(command, env={**os.environ, "UV_NO_CONFIG": "1"}).check_returncode()
    return Environment(folder)


def on_top_of(base: Environment, folder: Path) -> Environment:
    """A new environment in `folder` that also has what `base` has, and cannot change that."""
    environment = make(base.python, folder)
    # Python does not read the .pth files of a folder that a .pth file names.
    files = sorted(base.site_packages.glob("*.pth"))
    lines = [line for file in files for line in file.read_text().splitlines()]
    folders = [str(base.site_packages), *(x for x in lines if x.strip() and Path(x).is_dir())]
    (environment.site_packages / "base.pth").write_text("".join(f"{x}\n" for x in folders))
    for info in (x for each in folders for x in Path(each).glob("*.dist-info")):
        _note(info, environment.site_packages / info.name)
    # CMake's ways to a package begin in site-packages.
    if torch := next((x for each in folders if (x := Path(each) / "torch").is_dir()), None):
        (environment.site_packages / "torch").symlink_to(torch)
    return environment


def _note(info: Path, own: Path) -> None:
    """Has uv know a package of the folder below, of which it removes no more than this note."""
    names = [x for x in ("METADATA", "entry_points.txt") if (info / x).is_file()]
    # The module of cmake looks for its files by its metadata.
    if own.exists() or "METADATA" not in names or info.name.startswith("cmake-"):
        return
    own.mkdir()
    for name in names:
        shutil.copyfile(info / name, own / name)
    (own / "RECORD").write_text("".join(f"{own.name}/{x},,\n" for x in (*names, "RECORD")))


def install(
    environment: Environment, requirements: Sequence[str], variables: Mapping[str, str], hashed: bool = False,
    constraint: str = "",
) -> None:  # fmt: skip
    """Installs `requirements`, or with `hashed` the very files that the lock file has of them.

    What they require is of a version that the `constraint` admits.
    """
    if not requirements:
        return
    # An option may hold a password.
    wanted = " ".join(x for x in requirements if not x.startswith("--"))
    text = releases.locked(releases.names(requirements).__contains__) if hashed else constraint
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(text)
        file.flush()
        if hashed:
            requirements = ["--require-hashes", f"--requirement={file.name}"]
        elif constraint:
            # Over the variable's, which so are named again.
            files = [file.name, *variables.get("UV_CONSTRAINT", "").split()]
            requirements = [*requirements, *(f"--constraint={x}" for x in files)]
        uv_pip("install", [f"--python={environment.python}", *requirements], wanted, variables)


def uv_pip(verb: str, words: Sequence[str], wanted: str, variables: Mapping[str, str]) -> None:
    """Has uv do something about what is `wanted`; an error says that this fails, or that space was lacking before."""
    command = uv("pip", verb, *indexes.uv_options(), *words)
    code, printed = processes.follow(
        command, shown=lambda x: x if _TAKES_TIME.match(x) else "", env=dict(variables)
    )
    if code != 0:
        error = printed.partition("error: ")[2]
        said, *of_a_build = re.split(r"\n\n(?= +\[std)", error, maxsplit=1)
        print(*of_a_build, sep="", end="", flush=True)
        said = " ".join(said.split()).replace(" cause: ", ": ")
        does = "install" if verb == "install" else "find"
        advice = ": check these names, the network and pip's configuration"
        if "No space left on device" in said:
            advice = f": {processes.FREE_SPACE}"
        elif re.match(r"Failed to (install|read)\b", said):  # what is there
            advice = ""
        raise UserError(f"uv cannot {does} {wanted} ({said}){advice}")


def torch_requirement(target: Target) -> str:
    """The target's torch; never a CPU-only one in a CUDA target, which lacks what to link with."""
    any_label = target.cuda and "+" not in target.torch
    return f"torch=={target.torch}" + (f",!={target.torch}+cpu" if any_label else "")


def _variables(target: Target, home: Path) -> dict[str, str]:
    """Those of uv where it looks for torch: also on an index that pip's configuration does not name, or only there."""
    variables = clean_variables(home)
    if target.index:
        variables["UV_INDEX"] = f"{variables.get('UV_INDEX', '')} {target.index}".strip()
    elif index := indexes.of_torch(target.label):
        variables["UV_DEFAULT_INDEX"] = index
    return variables


def with_torch(target: Target, toolkit: tuple[str, ...], any_cuda: bool = False) -> Environment:
    """An environment with the target's torch, the build tools and pip's CUDA `toolkit`; kept.

    All targets share one for which uv finds the same torch. `any_cuda`: of whichever CUDA that is.
    """
    # Not that of a virtual environment.
    python = os.path.realpath(find_python(target.python))
    with cache.locked(f"environments/{_name(target, python)}") as folder:
        environment, complete = Environment(cache.use(folder)), folder / "complete"
        if not complete.is_file():
            shutil.rmtree(folder)
            _install_torch(target, python, environment)
            complete.touch()
        if missing := [x for x in toolkit if x not in complete.read_text().splitlines()]:
            print(f"torchwheels: installing CUDA's compiler for {target.name}, once", flush=True)
            # Named again, since torch pins the rest of the toolkit.
            wanted = [torch_requirement(target), *missing]
            install(environment, wanted, _variables(target, folder))
            complete.write_text("".join(f"{x}\n" for x in toolkit))
    said: dict[str, str | None] = {}
    exec((environment.site_packages / "torch" / "version.py").read_text(), said)
    wanted_cuda = target.cuda.version if target.cuda and not any_cuda else None
    if wanted_cuda and str(said["cuda"]).split(".")[0] != wanted_cuda.split(".")[0]:
        raise UserError(
            f"{target.name} needs a torch of CUDA {wanted_cuda}, but it got "
            f"{said['__version__']} of CUDA {said['cuda']}: let pip's configuration name an index with "
            f"torch {target.torch} for {target.label}, or choose another target"
        )
    of_cuda = f" of CUDA {said['cuda']}" if said["cuda"] else ""
    print(f"torchwheels: using torch {said['__version__']}{of_cuda} in {folder}", flush=True)
    return environment


def _name(target: Target, python: str) -> str:
    """What the environment with the target's torch is called: by the file that uv finds, which is asked once."""
    tools = releases.load().tools
    wanted = torch_requirement(target)
    given = [python, *tools, wanted, target.index, indexes.places_of_torch()]
    folder = cache.own() / "environments"
    known = folder / f"{_key(given)}.name"
    if known.is_file() and (folder / known.read_text() / "complete").is_file():
        return known.read_text()
    with scratch() as work:
        asked, lock = work / "torch.in", work / "pylock.toml"
        asked.write_text(wanted)
        words = ["--quiet", "--no-deps", f"--python={python}", f"--output-file={lock}", str(asked)]
        uv_pip("compile", words, wanted, _variables(target, work))
        (found,) = msgspec.toml.decode(lock.read_bytes())["packages"]
    file = found["wheels"][0]
    key = _key([python, *tools, json.dumps(file.get("hashes") or file["url"])])
    name = f"{target.python}-torch{found['version']}-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    known.write_text(name)
    return name


def _key(given: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(given).encode()).hexdigest()[:8]


def _install_torch(target: Target, python: str, environment: Environment) -> None:
    """Makes an environment with the target's torch and the build tools, or none."""
    home = environment.folder
    what = f"torch {target.torch} for {target.name}"
    room = f"{1 if '+cpu' in home.name else 5} GB in {cache.place()}"
    print(f"torchwheels: installing {what}, once: it takes {room}", flush=True)
    try:
        make(python, home)
        install(environment, releases.load().tools, clean_variables(home), hashed=True)
        # PyTorch's own index has smaller builds, for the CPU alone, and nothing of the tools.
        install(environment, [torch_requirement(target)], _variables(target, home))
    except BaseException:
        # A partial installation is useless, and may have filled the disk. What cannot go now does with the next.
        shutil.rmtree(home, ignore_errors=True)
        raise


def cuda_runtime(environment: Environment, target: Target, folder: Path) -> Path:
    """Installs the CUDA runtime of `environment` for the target's machine into `folder`: that of its libraries."""
    package = "nvidia-cuda-runtime"
    (found,) = importlib.metadata.distributions(name=package, path=[str(environment.site_packages)])
    options = ["--only-binary=:all:", "--no-deps", f"--target={folder}"]
    options += [f"--python-platform={target.machine.name}-manylinux_2_28"]
    wanted = [*options, f"{package}=={found.version}"]
    install(environment, wanted, clean_variables(environment.folder))
    assert target.cuda is not None
    return folder / "nvidia" / f"cu{target.cuda.version.split('.')[0]}" / "lib"
