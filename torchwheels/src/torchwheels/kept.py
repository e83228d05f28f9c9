"""What `dist` has already: the wheel of a target is not built again of the same inputs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path

from torchwheels import sources
from torchwheels.project import Project
from torchwheels.releases import Target
from torchwheels.sources import Fetched
from torchwheels.testing import sha256


def inputs(project: Project, target: Target, source: Fetched, place: str) -> str:
    """A hash of what the wheel of `target` follows from, where it is built in `place`."""
    file = project.file or Path()
    patches = [file.parent / patch for patch in project.patches]
    options = dataclasses.asdict(dataclasses.replace(project, file=None))
    variables = ("TORCHWHEELS_TORCH_INDEX", "SOURCE_DATE_EPOCH")
    said = [
        source.origin,
        sources.versions(source.folder),
        options,
        [sha256(patch) for patch in patches if patch.is_file()],
        [target.name, target.torch, *target.architectures],
        place,
        {name: os.environ.get(name) for name in variables},
        sources.hash_of_folder(Path(__file__).parent),
    ]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def find(dist: Path, digest: str) -> Path | None:
    """The wheel in `dist` that was built of these inputs, unless it has changed since."""
    try:
        said = json.loads(_file(dist, digest).read_text())
        path = dist / Path(said["wheel"]).name
        return path if sha256(path) == said["sha256"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def note(dist: Path, digest: str, path: Path) -> None:
    """Remembers that the wheel `path` was built of these inputs."""
    file = _file(dist, digest)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"wheel": path.name, "sha256": sha256(path)}) + "\n")


def _file(dist: Path, digest: str) -> Path:
    return dist / "builds" / f"{digest[:16]}.json"
