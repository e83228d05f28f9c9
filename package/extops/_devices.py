"""Which types of device have kernels here, and why others have none."""

from pathlib import Path
from typing import Any

from extops._requirements import read_build_info
from extops._version import __version__

devices = {"meta"}
"""Filled by the loader; tensors on ``meta`` have no data to work on, and need no kernel."""


def build_info() -> dict[str, Any]:
    """What the installed libraries were built from and with; empty where they were compiled just in time."""
    return read_build_info(Path(__file__).parent)


def why_no_kernels(device: str) -> str:
    """Why tensors on this type of device cannot be served, and what to do."""
    if device != "cuda":
        return "extops has kernels for CPU and CUDA: move the tensor with .cpu() or .cuda()"
    variant = build_info().get("variant", "unknown")
    return (
        f"this extops {__version__} was built without CUDA (variant {variant}): "
        "install a wheel with CUDA kernels, pip install --force-reinstall extops"
    )
