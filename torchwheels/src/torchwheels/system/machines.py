"""The processors that wheels are built for, and what Linux, Debian and Docker call them."""

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from torchwheels.errors import UserError
from torchwheels.system import processes

_CALLS_THE_NEXT = ("ccache", "sccache", "distcc", "icecc")


@dataclass(frozen=True)
class Machine:
    """A processor, by the name that wheels' tags have."""

    name: str
    elf: str
    """As the header of a library has it."""
    page: int
    """The largest page of memory that its systems have, in bytes."""
    loader: str
    """The dynamic loader, a library of its own."""
    docker: str
    """The platform of its images."""
    runner: str
    """The label of GitHub's runners that have it."""

    @property
    def suffix(self) -> str:
        """What the names of its targets end with: nothing for x86-64, else `-aarch64` and the like."""
        return "" if self == X86_64 else f"-{self.name}"

    @property
    def is_here(self) -> bool:
        """Whether this is one."""
        return platform.machine() == self.name

    def compiler(self, name: str) -> str:
        """`gcc` or `g++` for it, of PATH: one that runs here, and no link of its name to a cache.

        Such a link calls the next compiler of its name on PATH, which in a build is the wrapper that calls it.
        """
        triplet = f"{self.name}-linux-gnu"
        command = name if self.is_here else f"{triplet}-{name}"
        for folder in os.get_exec_path():
            found = shutil.which(command, path=folder)
            if found and Path(found).resolve().name not in _CALLS_THE_NEXT:
                return found
        package = "g++" if self.is_here else f"g++-{triplet.replace('_', '-')}"  # Debian's
        way_out = f"install one, e.g. `apt-get install {package}`"
        raise UserError(f"there is no C or C++ compiler {command} on PATH: {way_out}")


MACHINES: Mapping[str, Machine] = msgspec.toml.decode(
    Path(__file__).with_suffix(".toml").read_bytes(), type=dict[str, Machine]
)
X86_64, AARCH64 = MACHINES["x86_64"], MACHINES["aarch64"]


def of_name(name: str) -> Machine:
    """That of a wheel's platform, a target or a pattern such as `3.11-cu*-aarch64`; x86-64 where it names none."""
    return next((each for each in MACHINES.values() if name.endswith(each.name)), X86_64)


def gpus() -> list[str]:
    """The compute capabilities of the GPUs that the driver lists, each once; none where it lists none."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = processes.ask(command, timeout=30)
    except (OSError, subprocess.TimeoutExpired):  # it is the driver's
        return []
    return sorted({*re.findall(r"^\d+\.\d+$", done.stdout, re.MULTILINE)})
