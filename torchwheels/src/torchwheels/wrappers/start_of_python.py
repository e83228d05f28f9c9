"""Runs at the start of each Python of a build: hides a CUDA toolkit, or pretends a GPU.

A copy of this file lies in the build's environment alone, with its settings beside it.
"""

from __future__ import annotations

import importlib.machinery
import json
import sys
from pathlib import Path
from typing import Any

SETTINGS: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())


def hide_toolkit(cpp_extension: Any) -> None:
    """torch also looks into /usr/local/cuda, which no variable prevents."""
    cpp_extension.CUDA_HOME = None


def pretend_gpu(cuda: Any) -> None:
    """A setup.py that asks for a GPU finds one of the newest architecture of the target."""
    major, minor = map(int, SETTINGS["pretend-gpu"].split("."))
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.get_device_name = lambda device=None: (
        f"a pretended GPU of compute capability {major}.{minor}"
    )
    cuda.get_device_capability = lambda device=None: (major, minor)


CHANGES = {
    **({"torch.utils.cpp_extension": hide_toolkit} if SETTINGS["hide-toolkit"] else {}),
    **({"torch.cuda": pretend_gpu} if SETTINGS["pretend-gpu"] else {}),
}


class Finder:
    """Changes modules of torch once they have been imported."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        """The usual spec, whose loader calls the change at the end."""
        change = CHANGES.get(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if change else None
        if spec is None or spec.loader is None or change is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder)
