"""Virtual environments, alone or on top of another one, and what pip installs there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchwheels.errors import UserError
from torchwheels.options import indexes, releases
from torchwheels.system import processes

# The caller's variables that a build sees, besides pip's configuration.
_KEPT = {
    "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "CCACHE_DIR", "CCACHE_RECACHE",
}  # fmt: skip


def clean_variables(home: Path) -> dict[str, str]:
    """The variables of a process that gets only pip's configuration from the caller."""
    variables = {name: value for name, value in os.environ.items() if name in _KEPT}
    # pip would look for its files, and for passwords, in the home that it is given.
    for key, value in indexes.pip_settings("install").items():
        variables[f"PIP_{key.replace('-', '_').upper()}"] = value
    variables["PIP_CONFIG_FILE"] = os.devnull
    if (passwords := Path(os.environ.get("NETRC") or "~/.netrc").expanduser()).is_file():
        variables["NETRC"] = str(passwords)
    variables |= {"HOME": str(home), "TMPDIR": str(home), "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
    return {**variables, "PYTHONDONTWRITEBYTECODE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


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
