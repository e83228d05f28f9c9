"""Makes a Python for aarch64 that runs here under QEMU, with a wheel and what its tests need.

`nox -s emulate` calls `python -m tools.emulate FOLDER WHEEL` and then runs the tests with FOLDER/bin/python. The
interpreter and its libraries are Debian's, torch and the rest PyPI's. Nothing is installed outside of FOLDER.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from extops_build import ROOT
from torchwheels.options import project
from torchwheels.system import AARCH64

# Each command, and Debian's package that has it.
_COMMANDS = {
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "mmdebstrap": "mmdebstrap",
    "qemu-aarch64-static": "qemu-user-static",
}
_KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_PACKAGES = "python3.11,libstdc++6"
# The newest torch whose build for aarch64 on PyPI is for the CPU alone: 0.1 GB instead of 3.
_TARGET = "3.11-cpu-torch2.10-aarch64"
# Subprocesses are started by the path of this script, which the interpreter takes for its own.
_PYTHON = """#!/bin/sh
PYTHONPATH={site} exec qemu-aarch64-static -L {root} -0 "$0" {root}/usr/bin/python3.11 "$@"
"""


def missing_packages() -> list[str]:
    """What Debian has, and this machine not, of what the session `emulate` needs."""
    missing = {package for name, package in _COMMANDS.items() if not shutil.which(name)}
    return sorted(missing | (set() if _KEYS.is_file() else {"debian-archive-keyring"}))


def make(folder: Path, wheel: Path) -> Path:
    """Puts the interpreter and its packages into `folder`; returns its path there."""
    root, site = folder / "root", folder / "site-packages"
    _unpack_debian(root)
    _install(site, wheel)
    python = folder / "bin" / "python"
    python.parent.mkdir()
    paths = {"root": shlex.quote(str(root)), "site": shlex.quote(str(site))}
    python.write_text(_PYTHON.format(**paths))
    python.chmod(0o755)
    return python


def _unpack_debian(root: Path) -> None:
    """Unpacks the packages with all that they need into `root`; nothing of them is run."""
    root.parent.mkdir(parents=True, exist_ok=True)
    command = ["mmdebstrap", "--quiet", "--variant=extract", "--mode=chrootless"]
    command += ["--architectures=arm64", f"--include={_PACKAGES}", "bookworm", str(root)]
    subprocess.run(command, check=True)


def _install(site: Path, wheel: Path) -> None:
    """Installs the wheel, torch and what the tests require, as uv does for other machines."""
    options = project.load(ROOT / "pyproject.toml")
    target = options.releases.target(_TARGET)
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-build"]
    command += [f"--python-platform={AARCH64.name}-manylinux_2_28", f"--target={site}"]
    command += [f"--python-version={target.python_version}"]
    requirements = [f"torch=={target.torch}", *options.tests.requires]
    subprocess.run([*command, *requirements, str(wheel)], check=True)


def main() -> None:
    """The command line."""
    folder, wheel = map(Path, sys.argv[1:])
    make(folder.resolve(), wheel.resolve())


if __name__ == "__main__":
    main()
