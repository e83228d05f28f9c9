"""Builds, audits and tests a project of others in a target, for the table in the documentation.

    TORCHWHEELS_ARCHITECTURES=9.0 python -m benchmarks.foreign torch-scatter 3.11-cpu   # minutes

Further arguments, such as `--backend local`, are for `torchwheels build` and `torchwheels test`. The sources
are PyPI's; those of the tests, which PyPI's lack, are the repository's.

    python -m benchmarks.foreign --add RECORD...   # of the tests of such a wheel on another machine

A record is what `torchwheels test` leaves: the wheel's sha256, the device, and how many tests passed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "torchwheels" / "src"))

from torchwheels import project, reports  # noqa: E402

PROJECTS = {
    "torch-cluster": ("1.6.3", "rusty1s/pytorch_cluster@1.6.3"),
    "torch-scatter": ("2.1.2", "rusty1s/pytorch_scatter@2.1.2"),
    "torch-spline-conv": ("1.2.2", "rusty1s/pytorch_spline_conv@1.2.2"),
    "torchsort": ("0.1.9", "teddykoker/torchsort@v0.1.9"),
}
"""Each with its version on PyPI, and where its tests are."""

RESULTS = ROOT / "benchmarks" / "results" / "foreign.json"
DIST = ROOT / "build" / "foreign"
OF_A_RUN = ("device", "passed", "failed", "skipped")
BUILT = re.compile(r"built \S*?([^/\s]+\.whl), which .* (\d+) s, largest process ([\d.]+) GB")


def run_tool(*arguments: str) -> str:
    """Runs torchwheels, passing on what it prints; returns that."""
    command = [sys.executable, "-m", "torchwheels", *arguments, f"--dist={DIST}"]
    printed = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout
        for line in run.stdout:
            print(line, end="", flush=True)
            printed.append(line)
    return "".join(printed)


def measure(name: str, target: str, arguments: list[str]) -> dict[str, Any]:
    """The row of a project in a target."""
    config = ROOT / "benchmarks" / "foreign" / f"{name}.toml"
    version, repository = PROJECTS[name]
    options = [f"--target={target}", f"--config={config}", *arguments]
    found = BUILT.search(run_tool("build", f"{name}=={version}", *options))
    if not found:
        sys.exit(f"{name} is not built: the messages above say why")
    wheel = DIST / found[1]
    run_tool("test", f"git+https://github.com/{repository}", f"--wheel={wheel}", *options)
    return row(wheel, int(found[2]), float(found[3]), config, arguments)


def row(
    wheel: Path, seconds: int, gigabytes: float, config: Path, arguments: list[str]
) -> dict[str, Any]:
    """What the table says of a wheel."""
    report = reports.write_report(wheel, project.load(config))
    build = report["build"]
    return {
        "project": f"{config.stem}=={build['version'].partition('+')[0]}",
        "target": build["target"],
        "torch": build["torch"],
        "seconds": seconds,
        "GB": gigabytes,
        "MB": report["size"] / 1e6,
        "sha256": report["sha256"],
        "tag": report["tags"][0],
        "architectures": build["architectures"],
        "broken rules": [x["rule"] for x in report["rules"] if not x["passed"]],
        "tests": [{x: run[x] for x in OF_A_RUN} for run in report["tests"]],
        "command": " ".join(
            ["python -m benchmarks.foreign", config.stem, build["target"], *arguments]
        ),
    }


def keep(new: dict[str, Any]) -> None:
    """Puts a row into the results, in place of the one of the same project and target."""
    rows = json.loads(RESULTS.read_text()) if RESULTS.is_file() else []
    rows = {(each["project"], each["target"]): each for each in [*rows, new]}
    RESULTS.write_text(json.dumps([rows[key] for key in sorted(rows)], indent=2) + "\n")


def add(file: Path) -> None:
    """Puts a run of tests on another machine into the row of the wheel that was tested."""
    run = json.loads(file.read_text())
    for found in json.loads(RESULTS.read_text()):
        if found.get("sha256") == run["sha256"]:
            others = [each for each in found["tests"] if each["device"] != run["device"]]
            keep({**found, "tests": [*others, {x: run[x] for x in OF_A_RUN}]})
            return
    sys.exit(f"{file} is of a wheel that has no row: sha256 {run['sha256']}")


if __name__ == "__main__":
    if sys.argv[1] == "--add":
        for name in sys.argv[2:]:
            add(Path(name))
    else:
        keep(measure(sys.argv[1], sys.argv[2], sys.argv[3:]))
