"""Which types of device have kernels here, and why others have none."""

from pathlib import Path
from typing import Any

from extops._requirements import read_build_info
from extops._version import __version__

devices = {"meta"}
"""Filled by the loader; tensors on ``meta`` have no data to work on, and need no kernel."""


def build_info() -> dict[str, Any]:
    """What the installed libraries were built from and with; empty where they were compiled just in time."""
    return read_build_info(Path(__file__).parents[1])


def own_version() -> str:
    """The version with the label of the wheel, as pip shows it."""
    variant = build_info().get("variant", "release")
    return __version__ if variant == "release" else f"{__version__}+{variant}"


def why_no_kernels(device: str) -> str:
    """Why tensors on this type of device cannot be served, and what to do."""
    if device != "cuda":
        return "extops has kernels for CPU and CUDA: move the tensor with .cpu() or .cuda()"
    return (
        f"this extops {own_version()} was built without CUDA: "
        "install a wheel with CUDA kernels, pip install --force-reinstall --no-deps WHEEL"
    )
