"""Runs a workflow on this machine, by `act`: its jobs, outputs and artifacts, with stubs for GitHub's actions.

    nox -s act -- sample    # a project of others, whose CI calls torchwheels.yml
    nox -s act -- main      # extops; further arguments are act's, such as `--job sanitize`

The targets are a CPU target and, of extops, that of the release for one kind of GPU. The tests are a few: it is the
workflow that is tried.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OURS = "OWNER/extops"
TARGETS = {"main": '["3.11-cpu", "3.11-release"]', "sample": '["3.11-cpu"]'}
# test_values.py has what `nox -s sanitize` plants reported.
KEPT = {"test_golden.py", "test_values.py", "test_compose.py", "test_targets.py", "test_swish.py"}


def main(which: str, *arguments: str) -> int:
    """Runs act on a copy of the tree; returns its exit code."""
    with tempfile.TemporaryDirectory(prefix="act-") as name:
        folder = Path(name)
        ours = folder / "extops"
        subprocess.run(["git", "clone", "--quiet", ROOT, ours], check=True)
        # act does not know `$/` yet, this repository from wherever the file is called.
        here = "./" if which == "main" else f"{OURS}/"
        at = "" if which == "main" else "@here"
        for file in ours.glob(".github/**/*.yml"):
            text = re.sub(r"\$/(\.github/\S+)", rf"{here}\1{at}", file.read_text())
            file.write_text(text)
        if which == "main":  # whose lint asks for `$/`
            rule = "rules: { self-repository: { disable: true } }\n"
            (ours / ".github" / "zizmor.yml").write_text(rule)
        tree = ours
        if which == "sample":
            tree = folder / "sample"
            shutil.copytree(ours / "examples" / "own_project", tree)
            caller = tree / ".github" / "workflows" / "wheels.yml"
            caller.write_text(re.sub(r"@0{40}", "@here", caller.read_text()))
            subprocess.run(["git", "init", "--quiet"], cwd=tree, check=True)
        table = tree / "pyproject.toml"
        table.write_text(with_targets(table.read_text(), TARGETS[which]))
        for test in tree.glob("tests/**/test_*.py"):
            if test.name not in KEPT:
                test.write_text("")  # and not gone, since sessions name some
        for each in {ours, tree}:
            identity = ["-c", "user.name=act", "-c", "user.email=act@localhost"]
            commit = ["git", *identity, "commit", "--quiet", "--message=tried by act"]
            subprocess.run(["git", "add", "--all"], cwd=each, check=True)
            subprocess.run(commit, cwd=each, check=True)
        (folder / "artifacts").mkdir()
        return subprocess.run(command(which, tree, folder, *arguments), cwd=tree).returncode


def with_targets(table: str, targets: str) -> str:
    """A project's `table` whose targets are these alone."""
    others = re.sub(r"(?ms)^(small|targets) = \[.*?\]\n", "", table)
    heading = "[tool.torchwheels]\n"
    return others.replace(heading, f"{heading}targets = {targets}\nsmall = {targets}\n")


def command(which: str, tree: Path, folder: Path, *arguments: str) -> list[str]:
    """How act is called: jobs run on this machine, and actions are the stubs."""
    workflow = "main" if which == "main" else "wheels"
    event = "push" if which == "main" else "pull_request"
    used = {
        found
        for file in [*tree.glob(".github/**/*.yml"), *(folder / "extops").glob(".github/**/*.yml")]
        for found in re.findall(r"uses: (actions/([\w-]+)@\w+)", file.read_text())
    }
    stubs = {action: HERE / "act" / name for action, name in used if (HERE / "act" / name).is_dir()}
    stubs[f"{OURS}@here"] = folder / "extops"
    return [
        *("act", event, f"--workflows=.github/workflows/{workflow}.yml"),
        *("--platform=ubuntu-24.04=-self-hosted", "--action-offline-mode", "--no-cache-server"),
        *(f"--local-repository={action}={path}" for action, path in stubs.items()),
        *(f"--env={name}={value}" for name, value in os.environ.items() if name.startswith("PIP_")),
        "--env=TORCHWHEELS_ARCHITECTURES=9.0",
        *(f"--env=ACT_TREE={tree}", f"--env=ACT_ARTIFACTS={folder / 'artifacts'}"),
        *arguments,
    ]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
