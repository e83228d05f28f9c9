"""What a result cannot be read without: machine, versions, flags, clocks, load."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import extops
from extops.binding import _devices, _loader

ROOT = Path(__file__).resolve().parent.parent
_CLOCKS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "temperature.gpu")


def describe(device: str) -> dict[str, Any]:
    """All that stays the same during a run."""
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "device": device,
        "device_name": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "extops": extops.__version__,
        "extops_binding": _loader.binding,
        "extops_build": _devices.build_info(),
        "commit": commit(),
        "omp_proc_bind": os.environ.get("OMP_PROC_BIND"),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        result |= {
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cudnn": torch.backends.cudnn.version(),
            "driver": nvidia_smi("driver_version").get("driver_version"),
        }
    return result


def conditions(device: str) -> dict[str, Any]:
    """What changes from one case to the next."""
    result: dict[str, Any] = {"load": round(os.getloadavg()[0], 2)}
    if device == "cuda":
        result |= nvidia_smi(*_CLOCKS)
    return result


def nvidia_smi(*fields: str) -> dict[str, str]:
    """What nvidia-smi says of the first GPU, or nothing where there is no nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields, (each.strip() for each in done.stdout.split(",")), strict=False))


def processor() -> str:
    """The name of the CPU."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit() -> str:
    """The commit of the source tree, or where that is no repository the one that extops was built from."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return str(_devices.build_info().get("commit") or "unknown")
