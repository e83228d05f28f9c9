"""Fetches the wheels that a run of GitHub's CI has left as artifacts."""

import shutil
from pathlib import Path

from torchwheels.errors import UserError
from torchwheels.index import kept
from torchwheels.system import processes, scratch


def fetch(pattern: str, repository: str, run: str, dist: Path) -> list[Path]:
    """Puts the files of the newest artifacts that `pattern` names into `dist`; of one `run`, where that is named."""
    if not shutil.which("gh"):
        raise UserError(
            "there is no `gh`, GitHub's command, which hands out artifacts: install it, and run `gh auth login`"
        )
    with scratch() as folder:
        command = ["gh", "run", "download", *([run] if run else []), f"--pattern={pattern}"]
        command += [f"--repo={repository}"] if repository else []
        done = processes.ask([*command, f"--dir={folder}"])
        if done.returncode:
            raise UserError(
                f"`gh` cannot fetch {pattern} ({' '.join(done.stderr.split())}): check the names, and that you may "
                "read Actions there; GitHub keeps each for some weeks"
            )
        return kept.merge(sorted(folder.iterdir()), dist)
