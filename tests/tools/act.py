"""Runs a workflow on this machine, by `act`: its jobs, outputs and artifacts, with stubs for GitHub's actions.

    nox -s act -- sample    # a project of others, whose CI calls torchwheels.yml
    nox -s act -- farm      # a farm of three projects, and again once nothing is missing
    nox -s act -- main      # extops; further arguments are act's, such as `--job sanitize`

The targets are a CPU target and, of extops, that of the release for one kind of GPU. The tests are a few: it is the
workflow that is tried.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OURS = "OWNER/extops"
EXAMPLES = {"sample": "own_project", "farm": "farm"}
TARGETS = {"main": '["3.11-cpu", "3.11-release"]', "sample": '["3.11-cpu"]'}
ARCHITECTURE, GPU_CODE = "9.0", "sm_90a"
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
        if which in EXAMPLES:
            tree = folder / which
            shutil.copytree(ours / "examples" / EXAMPLES[which], tree)
            for caller in tree.glob(".github/workflows/*.yml"):
                caller.write_text(re.sub(r"@0{40}", "@here", caller.read_text()))
            subprocess.run(["git", "init", "--quiet"], cwd=tree, check=True)
        if which == "farm":
            return in_turn(tree, folder, *arguments)
        table = tree / "pyproject.toml"
        table.write_text(with_targets(table.read_text(), TARGETS[which]))
        empty_tests(tree)
        sizes = tree / "tools" / "sizes.json"
        if sizes.is_file():
            sizes.write_text(of_one_gpu(sizes.read_text()))
        return run(which, tree, folder, *arguments)


def of_one_gpu(noted: str) -> str:
    """What sizes.json says of wheels, but for the code of GPUs that these are not built for here."""
    wheels = json.loads(noted)
    kept = {
        name: {x: wheels[name][x] for x in ("host", GPU_CODE) if x in wheels[name]}
        for name in wheels
    }
    return json.dumps(kept)


def empty_tests(tree: Path) -> None:
    """Leaves the tests of a few files. The others stay there: sessions name some, and pages show parts of some."""
    pages = "".join(page.read_text() for page in tree.glob("docs/*.md"))
    for test in tree.glob("tests/**/test_*.py"):
        if f"../{test.relative_to(tree)}" in pages:
            test.write_text(f"{test.read_text()}\n\n__test__ = False\n")
        elif test.name not in KEPT:
            test.write_text("")


def run(which: str, tree: Path, folder: Path, *arguments: str) -> int:
    """Commits what is tried, and runs act; returns its exit code."""
    for each in {folder / "extops", tree}:
        identity = ["-c", "user.name=act", "-c", "user.email=act@localhost"]
        commit = ["git", *identity, "commit", "--quiet", "--allow-empty", "--message=tried by act"]
        subprocess.run(["git", "add", "--all"], cwd=each, check=True)
        subprocess.run(commit, cwd=each, check=True)
    shutil.rmtree(folder / "artifacts", ignore_errors=True)
    (folder / "artifacts").mkdir()
    variables = {**os.environ, "PATH": f"{HERE / 'act' / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    called = command(which, tree, folder, *arguments)
    return subprocess.run(called, cwd=tree, env=variables).returncode


def in_turn(tree: Path, folder: Path, *arguments: str) -> int:
    """Runs the workflow of a farm, and again with nothing to do; returns the first exit code that is not 0."""
    with served(folder / "served") as address:
        table = tree / "farm.toml"
        text = re.sub(r"https://OWNER\S*/NAME(?=\")", f"{address}/site", table.read_text())
        text = re.sub(r"https://\S+/(?={tag})", f"{address}/files/", text)
        text = re.sub(r"^targets = .*", 'targets = ["3.11-cpu"]', text, flags=re.MULTILINE)
        table.write_text(text.replace("versions = 2\n", ""))
        for _ in range(2):
            start = time.monotonic()
            if code := run("farm", tree, folder, *arguments):
                return code
            print(f"act: this run took {time.monotonic() - start:.0f} s", flush=True)
    return 0


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server that has that folder."""
    (folder / "files").mkdir(parents=True)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def with_targets(table: str, targets: str) -> str:
    """A project's `table` whose targets are these alone."""
    others = re.sub(r"(?ms)^(small|targets) = \[.*?\]\n", "", table)
    heading = "[tool.torchwheels]\n"
    return others.replace(heading, f"{heading}targets = {targets}\nsmall = {targets}\n")


def command(which: str, tree: Path, folder: Path, *arguments: str) -> list[str]:
    """How act is called: jobs run on this machine, and actions are the stubs."""
    workflow = {"sample": "wheels"}.get(which, which)
    event = {"main": "push", "sample": "pull_request"}.get(which, "workflow_dispatch")
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
        f"--env=TORCHWHEELS_ARCHITECTURES={ARCHITECTURE}",
        *(f"--env=ACT_TREE={tree}", f"--env=ACT_ARTIFACTS={folder / 'artifacts'}"),
        f"--env=ACT_SERVED={folder / 'served'}",
        *arguments,
    ]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
