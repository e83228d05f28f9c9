"""Builds, audits and tests a project of others in a target, for the table in the documentation.

    TORCHWHEELS_ARCHITECTURES=9.0 python -m benchmarks.foreign torch-scatter 3.11-cpu   # minutes

Further arguments, such as `--backend local`, are for `torchwheels build` and `torchwheels test`. The sources
are PyPI's, or a commit's where PyPI has none that are whole; those of the tests, where PyPI's lack them, are
the repository's. What fails leaves a row, too.

    python -m benchmarks.foreign natten 3.11-cu130 --minutes=10   # what takes hours says how far it came

    python -m benchmarks.foreign --add RECORD...   # of runs of such a wheel on another machine

A record is what `torchwheels test` leaves: the wheel's sha256, the device, and how many tests passed. Or it is
the list of values that `python -m benchmarks.foreign_values` leaves.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "torchwheels" / "src"))

from torchwheels.audit import reports  # noqa: E402
from torchwheels.options import project  # noqa: E402

PYG = "git+https://github.com/rusty1s/pytorch_"


@dataclass(frozen=True)
class Foreign:
    """A project of others."""

    version: str
    """The one on PyPI that has sources, or `git+URL@COMMIT`."""
    style: str
    """What is special about the way in which it builds."""
    tests: str = ""
    """Where its tests are; empty: in the same sources, if it has some."""


def source(name: str) -> str:
    """What torchwheels is told to build."""
    version = PROJECTS[name].version
    return version if version.startswith("git+") else f"{name}=={version}"


PROJECTS = {
    "beamgrad": Foreign("2.3.0", "a library for any torch"),
    "causal-conv1d": Foreign("1.7.0", "fetches a wheel unless it is told otherwise"),
    "chamferdist": Foreign("1.0.3", "setup.py alone"),
    "clic-inference-extensions": Foreign("0.1.0.post2", ""),
    "ctcdecode": Foreign("1.0.2", "downloads sources of others"),
    "dbscan-torch": Foreign("0.2.0", "pins torch"),
    "dcnv4": Foreign("1.0.0.post2", "CUDA only, asks for a GPU"),
    "diso": Foreign("0.1.4", "CUDA only"),
    "eden-simple-knn": Foreign("0.1.0a1", "compiles when it is used"),
    "extension-cpp": Foreign(
        "git+https://github.com/pytorch/extension-cpp@0ec4969c7bc8e15a8456e5eb9d9ca0a7ec15bc95",
        "abi3",
    ),
    "fast-hadamard-transform": Foreign("1.1.0", "CUDA only, incomplete archive"),
    "fast-rnnt": Foreign("1.3", "CMake, called by its setup.py"),
    "featomic-torch": Foreign("0.7.6", "CMake, linked with libraries of three packages"),
    "flash-attn": Foreign("2.8.3.post2", "fetches a wheel unless it is told otherwise"),
    "foldedtensor": Foreign("0.4.0", "pybind11, not torch's build code"),
    "fpscan": Foreign("0.1.2", "CUDA only"),
    "frame-analytics": Foreign("0.7.0", "loaded by ctypes, not told to compile"),
    "fused-ssim": Foreign(
        "git+https://github.com/rahul-goel/fused-ssim@0ac916a05f48f8e477dc8ce1651a346b65ce2072",
        "architectures of its own",
    ),
    "fussim": Foreign("0.3.1", "CUDA only"),
    "grid-fusion-pytorch": Foreign("0.1.2", "setuptools-scm, compiles when it is imported"),
    "gsplat": Foreign("1.5.3", "29 files, most of them CUDA"),
    "inplace-abn": Foreign("1.1.0", ""),
    "lanms-pytorch": Foreign("1.0.3", "CMake, called by a build.py"),
    "mamba-ssm": Foreign("2.3.2.post1", "fetches a wheel unless it is told otherwise"),
    "mctorch-mcts": Foreign("0.1.0", "CMake, called by its setup.py"),
    "metatensor-torch": Foreign("0.10.8", "CMake, a build backend of its own"),
    "mmcv": Foreign("2.2.0", "77 files"),
    "monotonic-alignment-search": Foreign("0.2.1", "Cython"),
    "natten": Foreign("0.21.7", "CMake"),
    "openpifpaf": Foreign("0.13.11", ""),
    "philtorch": Foreign("0.7.0", "setuptools-scm"),
    "pipablepytorch3d": Foreign("0.7.6", ""),
    "pointnet2": Foreign(
        "git+https://github.com/erikwijmans/Pointnet2_PyTorch@b5ceb6d9ca0467ea34beb81023f96ee82228f626",
        "a subfolder, sets architectures",
    ),
    "pov-shuffle": Foreign("0.1.4", "writes a header when its build runs"),
    "quartic-bspline-extension": Foreign("0.3.0", "CUDA where it finds a GPU, incomplete archive"),
    "quad-iou": Foreign("0.2.0", ""),
    "quad-iou-fixed": Foreign("0.2.2", "abi3"),
    "rosa-torch-native": Foreign("0.4.0", "pybind11, not torch's build code"),
    "rotary-emb": Foreign("0.5.2", "architectures and a platform of its own"),
    "serron": Foreign("0.5.1", "scikit-build-core, GPU code among its constants"),
    "simple-knn": Foreign(
        "git+https://github.com/camenduru/simple-knn@60f461f4a56b7967e5d8045bf92f8c33f36976d0",
        "CUDA only",
    ),
    "slangpy-torch": Foreign("0.7.0", "calls CUDA, without kernels"),
    "spatial-correlation-sampler": Foreign("0.5.0", "CUDA unless it is told otherwise"),
    "st-attn": Foreign("0.0.6", "for one GPU alone"),
    "torbi": Foreign("1.3.3", "abi3, asks for a GPU, wants an older setuptools"),
    "torch-ans": Foreign("0.4.0", "stable ABI"),
    "torch-bessel": Foreign("0.0.10", "incomplete archive"),
    "torch-c-dlpack-ext": Foreign("0.1.5", "a build backend of its own, for older torch"),
    "torch-cluster": Foreign("1.6.3", "no ninja, a library for each file", f"{PYG}cluster@1.6.3"),
    "torch-discounted-cumsum": Foreign("1.1.0", ""),
    "torch-harmonics": Foreign("0.8.0", ""),
    "torch-kdtree": Foreign("1.0", "CMake, downloads sources of others"),
    "torch-linear-assignment": Foreign("0.0.3", "CUDA where it finds a GPU"),
    "torch-ms-deform-attn": Foreign("0.1.1", ""),
    "torch-points-kernels": Foreign("0.7.0", "no ninja, pins numpy"),
    "torch-scatter": Foreign("2.1.2", "no ninja, a library for each file", f"{PYG}scatter@2.1.2"),
    "torch-sparse": Foreign("0.6.18", "a library for each file"),
    "torch-spline-conv": Foreign("1.2.2", "no ninja", f"{PYG}spline_conv@1.2.2"),
    "torchbvh": Foreign("0.3.4", "compiles when it is used"),
    "torchcompactradius": Foreign("0.5.5", "abi3"),
    "torchdtw": Foreign("0.4.2", "stable ABI, setuptools-scm"),
    "torchlpc": Foreign("0.7.2", ""),
    "torchmcubes": Foreign(
        "git+https://github.com/tatsy/torchmcubes@3381600ddc3d2e4d74222f8495866be5fafbace4",
        "scikit-build-core, pybind11",
    ),
    "torchsort": Foreign("0.1.9", "", "git+https://github.com/teddykoker/torchsort@v0.1.9"),
    "triple-walk": Foreign("0.0.4", ""),
    "vesin-torch": Foreign("0.6.2", "CMake, a build backend of its own"),
    "warp-rna": Foreign("0.3.0", "CUDA only, asks for a GPU"),
    "warp-rnnt": Foreign("0.7.0", "CUDA only, asks for a GPU"),
    "xformers": Foreign("0.0.35", "stable ABI, submodules"),
}

RESULTS = ROOT / "benchmarks" / "results" / "foreign.json"
DIST = ROOT / "build" / "foreign"
OF_A_RUN = ("device", "passed", "failed", "skipped")
OF_A_VALUE = ("device", "what", "difference", "right")
MINUTES = "--minutes="
BUILT = re.compile(r"built \S*?([^/\s]+\.whl), which .* largest process ([\d.]+) GB")
KEPT = re.compile(r"^torchwheels: \S+: (\S+\.whl), kept \(.+\)$", re.MULTILINE)
# ninja's and CMake's.
PROGRESS = re.compile(r"^\[ *(\d+(?:/\d+|%))\]", re.MULTILINE)
# The sentence and the lines that belong to it, without those that only this machine understands.
REASON = re.compile(
    r"^torchwheels: (?:\S+ failed: )?(.*(?:\n  .*)*?)(?:\n  the wheel is kept .*)?\n\Z",
    re.MULTILINE,
)
# One of these runs in each call of a compiler, and works for most of its time.
COMPILERS = {"cc1", "cc1plus", "cicc", "ptxas", "cudafe++", "lto1", "nvlink"}


class Processes(threading.Thread):
    """Counts the compilers that run below a process, every half a second until it ends."""

    def __init__(self, parent: subprocess.Popen[str]) -> None:
        super().__init__(daemon=True)
        self.parent = parent
        self.most = 0

    def run(self) -> None:
        """Remembers the highest count."""
        while self.parent.poll() is None:
            self.most = max(self.most, self.count())
            time.sleep(0.5)

    def count(self) -> int:
        """How many there are now."""
        names: dict[int, str] = {}
        parents: dict[int, int] = {}
        for file in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                before, _, after = file.read_text().rpartition(") ")
                number, _, name = before.partition(" (")
                names[int(number)], parents[int(number)] = name, int(after.split()[1])
        found = 0
        for pid in [pid for pid, name in names.items() if name in COMPILERS]:
            while pid in parents and pid != self.parent.pid:
                pid = parents[pid]
            found += pid == self.parent.pid
        return found


def run_tool(*arguments: str, minutes: float = 0) -> tuple[str, int]:
    """Runs torchwheels, passing on what it prints; returns that, and how many compilers ran at a time.

    After so many minutes, if any, it is interrupted.
    """
    command = [sys.executable, "-m", "torchwheels", *arguments, f"--dist={DIST}"]
    printed = []
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, text=True, **pipes) as run:
        processes = Processes(run)
        processes.start()
        limit = threading.Timer(60 * minutes, run.send_signal, [signal.SIGINT])
        if minutes:
            limit.start()
        assert run.stdout
        for line in run.stdout:
            print(line, end="", flush=True)
            printed.append(line)
        limit.cancel()
    return "".join(printed), processes.most


def measure(name: str, target: str, arguments: list[str]) -> dict[str, Any]:
    """The row of a project in a target."""
    config = ROOT / "benchmarks" / "foreign" / f"{name}.toml"
    options = project.load(config) if config.is_file() else project.Project()
    known = PROJECTS[name]
    minutes = [float(x.removeprefix(MINUTES)) for x in arguments if x.startswith(MINUTES)]
    passed_on = [x for x in arguments if not x.startswith(MINUTES)]
    given = [f"--target={target}", *passed_on]
    given += [f"--config={config}"] if config.is_file() else []
    start = time.monotonic()
    printed, processes = run_tool("build", source(name), *given, minutes=sum(minutes))
    is_over = 0 < 60 * sum(minutes) <= time.monotonic() - start
    row = {
        "project": source(name),
        "style": known.style,
        "target": target,
        "options": {key: value for key, value in options.table.items() if key != "tests"},
        "processes": processes,
        "command": " ".join(["python -m benchmarks.foreign", name, target, *arguments]),
    }
    if kept := KEPT.search(printed):
        sys.exit(f"{DIST} has {kept[1]}: remove it, so that it is built")
    found = BUILT.search(printed)
    if not is_over and "torchwheels: stopped; " in printed:
        sys.exit(f"it was stopped, so the row of {name} stays as it was")
    if not found and is_over:
        done = ["none", *PROGRESS.findall(printed)][-1]
        return row | {
            "failed": f"after {sum(minutes):g} minutes on {os.cpu_count()} cores, {done} of it was compiled"
        }
    if not found:
        reason = REASON.search(printed)
        why = " ".join(reason[1].split()) if reason else "it died without a word"
        return row | {"failed": why}
    wheel = DIST / found[1]
    if options.tests.paths or options.tests.command:
        run_tool("test", known.tests or source(name), f"--wheel={wheel}", *given)
    return row | {"GB": float(found[2])} | of_wheel(wheel, options)


def of_wheel(wheel: Path, options: project.Project) -> dict[str, Any]:
    """What the table says of a wheel."""
    report = reports.write_report(wheel, options)
    build = report["build"]
    return {
        "torch": build["torch"],
        "MB": report["size"] / 1e6,
        "sha256": report["sha256"],
        "tag": report["tags"][0],
        "architectures": build["architectures"],
        "broken rules": [x["rule"] for x in report["rules"] if not x["passed"]],
        "tests": [{x: run[x] for x in OF_A_RUN} for run in report["tests"]],
    }


def keep(new: dict[str, Any]) -> None:
    """Puts a row into the results, in place of the one of the same project and target.

    What was run of this very file, and not again, stays, and what compilers took that a cache spares by now.
    """
    known = json.loads(RESULTS.read_text()) if RESULTS.is_file() else []
    rows = {(each["project"], each["target"]): each for each in known}
    key = new["project"], new["target"]
    earlier = rows.get(key, {})
    if "sha256" in new and new["sha256"] == earlier.get("sha256"):
        ran = {x: earlier[x] for x in ("tests", "values") if not new.get(x) and earlier.get(x)}
        took = {
            x: max(earlier[x], new[x]) for x in ("GB", "processes") if x in earlier and x in new
        }
        new = {**new, **ran, **took}
    rows[key] = new
    lines = ",\n".join(json.dumps(rows[key]) for key in sorted(rows))
    RESULTS.write_text(f"[\n{lines}\n]\n")


def add(file: Path) -> None:
    """Puts runs on another machine into the rows of the wheels that were run."""
    said = json.loads(file.read_text())
    for run in said if isinstance(said, list) else [said]:
        found = [x for x in json.loads(RESULTS.read_text()) if x.get("sha256") == run["sha256"]]
        if not found:
            sys.exit(f"{file} is of a wheel that has no row: sha256 {run['sha256']}")
        key, known = ("values", OF_A_VALUE) if "right" in run else ("tests", OF_A_RUN)
        others = [x for x in found[0].get(key, []) if x["device"] != run["device"]]
        keep({**found[0], key: [*others, {x: run[x] for x in known if x in run}]})


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.foreign",
        usage="%(prog)s PROJECT TARGET [--minutes=N] [ARGUMENT...] | --add RECORD...",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--add", nargs="+", type=Path, metavar="RECORD", help="add these runs")
    parser.add_argument("project", nargs="?", metavar="PROJECT", help="one of PROJECTS")
    parser.add_argument("target", nargs="?", metavar="TARGET", help="such as 3.11-cpu")
    given, passed_on = parser.parse_known_args()
    if given.add:
        for record in given.add:
            add(record)
        return
    if not given.target:
        parser.error("the following arguments are required: PROJECT, TARGET")
    if given.project not in PROJECTS:
        parser.error(f"PROJECTS has no {given.project}")
    keep(measure(given.project, given.target, passed_on))


if __name__ == "__main__":
    main()
