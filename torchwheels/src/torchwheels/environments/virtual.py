"""Virtual environments, alone or on top of another one, and what uv installs there."""

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchwheels.errors import UserError
from torchwheels.options import indexes, releases
from torchwheels.system import files, processes

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
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    variables |= {
        **indexes.uv_variables(settings),
        "UV_CACHE_DIR": str(files.expanded(f"{cache}/uv")),
        **{name: value for name, value in os.environ.items() if _OF_UV.match(name)},
        "UV_NO_CONFIG": "1",  # that of the folder which it is called in
    }
    # pip would look for its files, and for passwords, in the home that it is given.
    variables |= {**indexes.pip_variables(settings), "PIP_CONFIG_FILE": os.devnull}
    if (passwords := files.expanded(os.environ.get("NETRC") or "~/.netrc")).is_file():
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
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        if hashed:
            file.write(releases.locked(releases.names(requirements).__contains__))
            file.flush()
            requirements = ["--require-hashes", f"--requirement={file.name}"]
        elif constraint:
            file.write(constraint)
            file.flush()
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
