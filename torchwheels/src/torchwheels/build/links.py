"""What the compilers of a build linked, and whether the libraries of its wheel are among that."""

import fnmatch
import hashlib
import io
from pathlib import Path, PurePosixPath
from typing import Any

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

from torchwheels.errors import BuildError
from torchwheels.options import Project, preset
from torchwheels.wheel import Wheel

# Neither `strip` nor a new RPATH changes these; each library has the first.
_CONTENTS = (".text", ".rodata", ".data", ".nv_fatbin")


def check_linked(found: Wheel, links: Path, project: Project) -> None:
    """Raises an error where the wheel has a library that no compiler of the build linked.

    Each of those left a copy of what it linked in the folder `links`.
    """
    linked = {contents(path.read_bytes()) for path in links.iterdir()} - {None}
    for name in found.libraries:
        file = PurePosixPath(name).name
        allowed = any(fnmatch.fnmatchcase(file, each) for each in project.allow_libraries)
        if contents(found.files[name]) not in linked and not allowed:
            settings = preset(found.name).get("environment", {})
            switch = " and ".join(f'{key} = "{value}"' for key, value in settings.items())
            raise BuildError(
                f"no compiler of this build linked {name} (all linked {len(linked)} files): its setup has "
                f"fetched or copied it; set {switch or 'what makes it compile (often NAME_FORCE_BUILD)'} "
                "in `environment` of [tool.torchwheels], or name the library in `allow-libraries`"
            )


def contents(data: bytes) -> str | None:
    """Hashes of what a linker put together; None where that is no library."""
    try:
        elf: Any = ELFFile(io.BytesIO(data))
        if elf.get_section_by_name(".text") is None:
            return None
        sections = [elf.get_section_by_name(name) for name in _CONTENTS]
        return str([x and hashlib.sha256(x.data()).hexdigest() for x in sections])
    except (ELFError, ValueError, KeyError):
        return None
