"""What was measured, in memory and in a file, by kind of call and its sizes."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import logging
import math
import os
import platform
import tempfile
import threading
from pathlib import Path
from typing import Any, NamedTuple

import torch

from extops.binding import _devices

_logger = logging.getLogger("extops")

TORCH, OURS = "torch", "extops"
VARIABLE = "EXTOPS_CHOICES"
SEPARATOR = "|"
"""Between two kernels of a sequence: that of eager calls, and that in CUDA graphs."""
Sizes = tuple[int, ...]

_EXACT = 32
"""So many sizes of a kind are measured as they are. Further ones are rounded, or lengths that vary would be measured
for hours.
"""
_A_DOUBLING = 4
_FORMAT = "extops choices 1"


class Measured(NamedTuple):
    """A choice, and the seconds that led to it: of a call, of the host's time and the GPU's.

    Of two kernels those of each: of an eager call, and of the GPU.
    """

    way: str
    torchs: float
    ours: float


class Kind:
    """Calls that differ in their sizes alone."""

    def __init__(self) -> None:
        self.measured: dict[Sizes, Measured] = {}
        self._rounded: dict[Sizes, str] = {}
        self._asked: set[Sizes] = set()

    def add(self, sizes: Sizes, measured: Measured) -> None:
        """Keeps what was measured."""
        self.measured[sizes] = measured
        self._rounded.setdefault(_rounded(sizes), measured.way)

    def way(self, sizes: Sizes) -> tuple[str | None, bool]:
        """What serves such a call, None where nothing is known; and whether that was measured. A neighbour's choice
        serves where there are many sizes and a rounded one comes for the first time.
        """
        if sizes in self.measured:
            return self.measured[sizes].way, True
        if len(self.measured) < _EXACT:
            return None, False
        rounded = _rounded(sizes)
        if rounded in self._rounded:
            return self._rounded[rounded], True
        if rounded in self._asked:
            return None, False
        self._asked.add(rounded)
        nearest = min(list(self.measured), key=functools.partial(_distance, sizes))
        return self.measured[nearest].way, False


def _rounded(sizes: Sizes) -> Sizes:
    return tuple(round(_A_DOUBLING * math.log2(max(x, 1))) for x in sizes)


def _distance(sizes: Sizes, others: Sizes) -> float:
    pairs = zip(sizes, others, strict=True)
    return sum(abs(math.log(max(x, 1) / max(y, 1))) for x, y in pairs)


class Table:
    """All kinds of one machine, read from a file and written to it."""

    def __init__(self, file: Path | None, machine: str) -> None:
        self.file, self.machine = file, machine
        self.kinds: dict[str, Kind] = {}
        self._lock = threading.Lock()
        for kind, of_kind in self._read().get(machine, {}).items():
            for sizes, measured in of_kind.items():
                self.kind(kind).add(*_parsed(sizes, measured))

    def kind(self, name: str) -> Kind:
        """The kind, new where nothing of it is known."""
        return self.kinds.setdefault(name, Kind())

    def add(self, kind: str, sizes: Sizes, measured: Measured) -> None:
        """Keeps what was measured, in the file, too."""
        with self._lock:
            self.kind(kind).add(sizes, measured)
            try:
                self._write(kind, sizes, measured)
            except OSError as error:
                _logger.warning("extops: choices are kept for this process alone: %s", error)
                self.file = None

    def _read(self) -> dict[str, Any]:
        """The machines of the file; none where it cannot be used, which ends the use of it."""
        try:
            if self.file is None or not self.file.exists():
                return {}
            content = json.loads(self.file.read_text(encoding="utf-8"))
            if content["format"] != _FORMAT:
                raise ValueError(f"its format is {content['format']!r}, not {_FORMAT!r}")
            machines: dict[str, Any] = content["machines"]
            for of_machine in machines.values():
                for of_kind in of_machine.values():
                    for entry in of_kind.items():
                        _parsed(*entry)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _logger.warning(
                "extops: %s holds no choices that this version can read (%s), so it is ignored, and left as it is: "
                "delete it, or set %s to another file",
                *(self.file, error, VARIABLE),
            )
            self.file = None
            return {}
        return machines

    def _write(self, kind: str, sizes: Sizes, measured: Measured) -> None:
        """Adds it to what other processes have written meanwhile; the file is always whole."""
        if (file := self.file) is None:
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.with_name(f".{file.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            machines = self._read()
            if self.file is None:
                return
            of_kind = machines.setdefault(self.machine, {}).setdefault(kind, {})
            of_kind[",".join(map(str, sizes))] = measured
            text = json.dumps({"format": _FORMAT, "machines": machines}, indent=1)
            with tempfile.NamedTemporaryFile(
                "w", dir=file.parent, delete=False, encoding="utf-8"
            ) as new:
                new.write(text)
            Path(new.name).replace(file)


def _parsed(text: str, content: Any) -> tuple[Sizes, Measured]:
    sizes, measured = tuple(map(int, text.split(","))), Measured(*content)
    is_known = measured.way in (TORCH, OURS) or SEPARATOR in measured.way
    if not (is_known and measured.torchs > 0 and measured.ours > 0 and min(sizes) >= 0):
        raise ValueError(f"it has {measured} of the sizes {text}")
    return sizes, measured


def _file() -> Path | None:
    named = os.environ.get(VARIABLE, "")
    if named in (TORCH, OURS):
        return None
    with contextlib.suppress(RuntimeError):  # a user without a home
        if named:
            return Path(named).expanduser()
        folder = Path(os.environ.get("XDG_CACHE_HOME", "") or "~/.cache").expanduser()
        return folder / "extops" / "choices.json" if folder.is_absolute() else None
    return None


def forced() -> str:
    """The way that the environment variable forces, else empty."""
    named = os.environ.get(VARIABLE, "")
    return named if named in (TORCH, OURS) else ""


@functools.cache
def table(device: int) -> Table:
    """That of a GPU by its number, or of the CPU: -1. GPUs that are alike have one."""
    libraries = f"torch {torch.__version__}, extops {_devices.own_version()}"
    if device < 0:
        return Table(_file(), f"{_cpu()}, {torch.backends.cpu.get_cpu_capability()}, {libraries}")
    gpu = f"{torch.cuda.get_device_name(device)}, driver {_driver()}"
    machine = f"{gpu}, cuDNN {torch.backends.cudnn.version()}, {libraries}"
    alike = (x for x in map(table, range(device)) if x.machine == machine)
    return next(alike, None) or Table(_file(), machine)


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _driver() -> str:
    with contextlib.suppress(OSError):
        words = Path("/proc/driver/nvidia/version").read_text().split()
        return next((word for word in words if word[:1].isdigit() and "." in word), "unknown")
    return "unknown"


def choices() -> None:
    """Prints what was measured on the devices that this process has used, a line each: what serves such calls, times,
    the sizes (steps, samples and, of packed input, rows) and the kind.

    Of calls of :func:`extops.accelerate` the times are torch's and ours, of the host and the GPU together. Of sequences
    by our kernels on a GPU, whose first 64 steps are measured, the line names the kernel of eager calls with its time,
    and the one in CUDA graphs with its time on the GPU.

    It is kept in the file that the environment variable ``EXTOPS_CHOICES`` names, by default ``extops/choices.json`` in
    the user's cache. ``EXTOPS_CHOICES=torch`` or ``extops`` forces one way instead.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for each in dict.fromkeys(map(table, range(-1, gpus))):
        if each.kinds:
            print(each.machine)
        for name, kind in each.kinds.items():
            for sizes, (way, *seconds) in kind.measured.items():
                of = way.split(SEPARATOR) if SEPARATOR in way else (TORCH, OURS)
                times = ", ".join(
                    f"{x} {s * 1e6:9.1f} us" for x, s in zip(of, seconds, strict=True)
                )
                taken = "" if SEPARATOR in way else way
                print(f"  {taken:6}  {times}  {' x '.join(map(str, sizes)):>14}  {name}")
