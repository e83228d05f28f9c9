"""A `docker` command made of a script."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

SCRIPT = """#!/bin/sh
echo "$@" >> {folder}/calls
case "$1 $2" in
"version --format") echo 26.1.5 ;;
"buildx version") ;;
"buildx build")
    cat {folder}/output
    for argument; do
        case $argument in type=local,dest=*)
            mkdir -p "${{argument#type=local,dest=}}"
            echo new > "${{argument#type=local,dest=}}/$(cat {folder}/wheel)" ;;
        esac
    done
    [ ! -p {folder}/wait ] || read -r _ < {folder}/wait
    exit "$(cat {folder}/code)" ;;
esac
"""


@dataclass(frozen=True)
class FakeDocker:
    """What the script reads and writes."""

    folder: Path

    def says(self, output: str, code: int = 0) -> None:
        """What `docker buildx build` prints and returns from now on."""
        (self.folder / "output").write_text(output)
        (self.folder / "code").write_text(str(code))

    def builds(self, wheel: str) -> None:
        """The name of the wheel that `docker buildx build` exports from now on."""
        (self.folder / "wheel").write_text(wheel)

    def waits(self) -> Path:
        """A pipe: from now on `docker buildx build` ends only after it was written to."""
        os.mkfifo(self.folder / "wait")
        return self.folder / "wait"

    @property
    def calls(self) -> list[str]:
        """The command lines so far."""
        return (self.folder / "calls").read_text().splitlines()
