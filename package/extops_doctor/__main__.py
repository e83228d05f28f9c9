"""The command: what extops was built for, what is found here, whether it fits, and what to do.

It changes nothing and needs no network. It looks from outside first, and where nothing is wrong so far, it imports
extops and calls an operator.
"""

import argparse
import importlib
import json
import os
import platform
import re
import runpy
import signal
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from extops_doctor import _machine
from extops_doctor._machine import dotted

# By its path: `import extops` may be what fails.
_requirements = Path(__file__).parents[1] / "extops" / "_requirements.py"
if not _requirements.is_file():
    sys.exit(f"{sys.executable} has no extops; run: pip install --no-deps WHEEL, a file of extops")
_needs = SimpleNamespace(**runpy.run_path(str(_requirements)))
REINSTALL: str = _needs.REINSTALL

_UPDATE_DRIVER = (
    "sudo ubuntu-drivers install && sudo reboot  # or your system's way to a newer NVIDIA driver"
)
_REPORT = "python -m extops_doctor --json  # and put what it prints into an issue"


@dataclass(frozen=True)
class Fact:
    """A row of the table."""

    name: str
    built_for: str
    found: str
    verdict: str


@dataclass(frozen=True)
class Problem:
    """Why extops does not work here, and the command that fixes it."""

    cause: str
    command: str


@dataclass
class Report:
    """The result."""

    version: str
    folder: str
    build: dict[str, Any]
    """What the libraries were built from and with; empty where they are compiled just in time."""
    facts: list[Fact] = field(default_factory=list)
    works_on: list[str] = field(default_factory=list)
    """The devices on which an operator gave the right values."""
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, built_for: str, found: str, verdict: str) -> None:
        """Adds a row."""
        self.facts.append(Fact(name, built_for, found, verdict))

    def add_unfit(
        self, name: str, built_for: str, found: str, cause: str, command: str = REINSTALL
    ) -> None:
        """Adds a row of what does not fit, and the problem."""
        self.add(name, built_for, found, "DOES NOT FIT")
        self.problems.append(Problem(cause, command))


def look(package: Path) -> Report:
    """What can be found without importing extops."""
    distribution = _machine.find_distribution(package)
    version = runpy.run_path(str(package / "_version.py"))["__version__"]
    torch, driver = _machine.find_torch(), _machine.find_driver()
    report = Report(
        version=distribution.version if distribution else version,
        folder=str(package),
        build={} if os.environ.get("EXTOPS_JIT") else _needs.read_build_info(package),
    )
    wanted = distribution.metadata["Requires-Python"] if distribution else "-"
    report.add("Python", wanted, platform.python_version(), "fits")
    _check_glibc(report, (distribution and distribution.read_text("WHEEL")) or "")
    _check_torch(report, report.version, torch)
    gpus = driver.gpus if driver else ()
    if torch and report.build:
        _check_cuda(report, torch, gpus)
    if torch and torch.cuda and report.build.get("cuda"):
        _check_driver(report, torch.cuda, driver)
    else:
        _list_gpus(report, driver)
    return report


def _check_glibc(report: Report, wheel: str) -> None:
    """Compares what the wheel's tag promises with what there is."""
    tags = re.findall(r"^Tag: .*manylinux_(\d+_\d+)", wheel, re.MULTILINE)
    needed = min(map(_machine.version, tags), default=None)
    library = os.confstr("CS_GNU_LIBC_VERSION")  # none where the C library is another
    found = _machine.version(library) if library else None
    wanted = f"{dotted(needed)} or newer" if needed else "-"
    row = "glibc", wanted, dotted(found) if found else "none"
    if needed and (found is None or found < needed):
        cause = f"this extops was built for glibc {row[1]}, and this system has {row[2]}"
        report.add_unfit(*row, cause)
    else:
        report.add(*row, "fits")


def _check_torch(report: Report, extops_version: str, torch: _machine.Torch | None) -> None:
    version = torch.version if torch else None
    row = "torch", f"{dotted(_needs.MINIMUM_TORCH)} or newer", version or "none"
    try:
        _needs.check_torch(extops_version, version)
    except _needs.LoadError as error:
        report.add_unfit(*row, error.cause, error.command)
    else:
        report.add(*row, "fits")


def _check_cuda(report: Report, torch: _machine.Torch, gpus: tuple[_machine.Gpu, ...]) -> None:
    """Compares what extops and torch were built with: of two that have CUDA, the versions may differ."""
    cuda = report.build["cuda"]
    row = "CUDA", cuda or "none", f"{torch.cuda or 'none'} (torch)"
    if cuda and torch.cuda:
        report.add(*row, "fits")
    elif torch.cuda and gpus:
        cause = f"this extops was built without CUDA: it cannot use the {gpus[0].name}"
        report.add_unfit(*row, cause)
    else:
        report.add(*row, "CPU only")
        if gpus:
            report.notes.append(
                f"torch was built without CUDA: to use the {gpus[0].name}, install a torch that was built with it"
            )


def _list_gpus(report: Report, driver: _machine.Driver | None) -> None:
    """For information: no CUDA code of extops is going to run here."""
    verdict = "not used" if report.build else "not checked"
    report.add("driver", "-", f"CUDA {dotted(driver.cuda)}" if driver else "none", verdict)
    for gpu in driver.gpus if driver else ():
        report.add("GPU", "-", f"{dotted(gpu.capability)} ({gpu.name})", verdict)


def _check_driver(report: Report, torch_cuda: str, driver: _machine.Driver | None) -> None:
    """Checks what CUDA code needs, where both extops and torch have some."""
    torch_needs = _machine.version(torch_cuda)[0]
    needed = max(torch_needs, _machine.version(report.build["cuda"])[0])
    if driver is None:
        report.add("driver", f"CUDA {needed}.x", "none", "CPU only")
        report.notes.append(
            "there is no NVIDIA driver (libcuda.so.1): a GPU needs one, and a container `docker run --gpus all`"
        )
        return
    row = "driver", f"CUDA {needed}.x", f"CUDA {dotted(driver.cuda)}"
    if driver.error:
        cause = f"the NVIDIA driver does not start: {driver.error}"
        report.add_unfit(*row, cause, "sudo reboot  # starts the driver that is installed")
    elif driver.cuda[0] < needed:
        torch_too = driver.cuda[0] < torch_needs
        cause = (
            f"{'torch' if torch_too else 'this extops'} was built for CUDA {needed}, "
            f"and the NVIDIA driver knows CUDA up to {dotted(driver.cuda)}"
        )
        report.add_unfit(*row, cause, _UPDATE_DRIVER if torch_too else REINSTALL)
    else:
        report.add(*row, "fits")
        _check_gpus(report, driver)


def _check_gpus(report: Report, driver: _machine.Driver) -> None:
    """Looks for code that each GPU can run."""
    architectures = report.build["architectures"]
    built_for = " ".join(architectures)
    if not driver.gpus:
        report.add("GPU", built_for, "none", "CPU only")
        if "CUDA_VISIBLE_DEVICES" in os.environ:
            hidden = os.environ["CUDA_VISIBLE_DEVICES"]
            report.notes.append(
                f"CUDA_VISIBLE_DEVICES is {hidden!r}, which hides the GPUs that there may be"
            )
    for gpu in driver.gpus:
        row = "GPU", built_for, f"{dotted(gpu.capability)} ({gpu.name})"
        older = [x for x in architectures if _machine.version(x) <= gpu.capability]
        # Machine code serves the GPUs of its major version, PTX all that are newer: the driver compiles it.
        if any(_machine.version(x)[0] == gpu.capability[0] for x in older):
            report.add(*row, "fits")
        elif not any(x.endswith("+PTX") for x in older):
            cause = f"this extops was compiled for {built_for}, which leaves out the {gpu.name}"
            report.add_unfit(*row, cause, _command_for(report, gpu))
        elif driver.cuda >= _machine.version(report.build["cuda"]):
            report.add(*row, "fits: compiles for it at first use")
        else:
            cause = (
                f"for the {gpu.name} the driver would have to compile what CUDA {report.build['cuda']} made, "
                f"and it knows CUDA up to {dotted(driver.cuda)}"
            )
            report.add_unfit(*row, cause)


def _command_for(report: Report, gpu: _machine.Gpu) -> str:
    """PyPI's wheel reaches the furthest; where that is not far enough, one has to be built."""
    if report.build["variant"] != "release":
        return REINSTALL
    python = dotted(sys.version_info[:2])
    architecture = dotted(gpu.capability)
    return f"TORCHWHEELS_ARCHITECTURES={architecture} nox -s build-{python}-release  # in a checkout of the sources"


def try_out(report: Report) -> None:
    """Imports extops, and calls an operator on every kind of device that has kernels."""
    gpu = any(fact.name == "GPU" and fact.found != "none" for fact in report.facts)
    try:
        extops = importlib.import_module("extops")
        import torch

        from extops.binding._devices import devices

        for device in ("cpu", "cuda") if gpu and "cuda" in devices else ("cpu",):
            rounded = extops.round_ste(torch.tensor([0.2, 0.5]).to(device)).tolist()
            if rounded != [0.0, 1.0]:
                raise RuntimeError(f"round_ste: rounds 0.2 and 0.5 to {rounded} on {device}")
            report.works_on.append(device)
    except Exception as error:  # whatever a user would get: of torch, the driver, a compiler
        cause = getattr(error, "cause", f"{type(error).__name__}: {error}")
        report.problems.append(Problem(cause, getattr(error, "command", _REPORT)))


def check_surroundings(report: Report) -> None:
    """Looks for what decides which extops is used: a likely cause where something is wrong, else worth a note."""
    found = []
    if copies := _machine.find_hidden_copies(Path(report.folder)):
        others = " and ".join(map(str, copies))
        cause = f"this extops, in {report.folder}, hides that in {others}"
        found.append(Problem(cause, _reveal(Path(report.folder).parent)))
    if sources := os.environ.get("EXTOPS_JIT"):
        cause = f"EXTOPS_JIT is {sources}: libraries are compiled from there, and those of the wheel not used"
        found.append(Problem(cause, "unset EXTOPS_JIT"))
    if report.problems:
        report.problems[:0] = found
    else:
        report.notes += [problem.cause for problem in found]


def _reveal(parent: Path) -> str:
    """The command that puts this copy of extops out of the way."""
    if parent == Path.cwd():
        return "cd ~"
    if parent in [Path(x).resolve() for x in os.environ.get("PYTHONPATH", "").split(os.pathsep)]:
        return "unset PYTHONPATH"
    return "pip uninstall extops"


def table(report: Report) -> str:
    """What was found from outside."""
    commit = report.build.get("commit") or "unknown"
    rows = [("", "built for", "found here", "verdict")]
    rows += [(x.name, x.built_for, x.found, x.verdict) for x in report.facts]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"extops {report.version} in {report.folder} (commit {commit[:12]})", ""]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([*lines, ""])


def verdict(report: Report) -> str:
    """Whether extops fits, else why not."""
    lines = []
    for problem in report.problems:
        lines += [f"problem: {problem.cause}", f"    run: {problem.command}"]
    if not report.problems:
        lines.append(f"extops fits: it works on {' and '.join(report.works_on)}")
    return "\n".join([*lines, *(f"note: {note}" for note in report.notes)])


def main() -> int:
    """The command line; returns 0 where extops fits, else 1."""
    # A reader that has seen enough, such as `head`, ends this program as it ends others: without a traceback.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    parser = argparse.ArgumentParser(
        prog="python -m extops_doctor",
        description="Says whether extops fits here, and if not, why.",
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON, for an issue")
    as_json = parser.parse_args().json
    report = look(_machine.find_package())
    if not as_json:
        print(table(report), flush=True)  # before the libraries are loaded, which may crash
    if not report.problems:
        try_out(report)
    check_surroundings(report)
    print(json.dumps(asdict(report), indent=2) if as_json else verdict(report))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
