"""What `import extops` does and, above all, does not do, each in a Python process of its own."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

# What costs time or memory that a program which only calls the operators need not spend.
DEFERRED = ("torch._dynamo", "torch._inductor", "torch.utils.cpp_extension", "torch.export._trace")


def run_python(code: str, folder: Path, environment: dict[str, str] | None = None) -> str:
    """Runs code in a fresh interpreter, away from any source tree."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


# What a process sees that imports some modules and then extops, before it has any reason to import more.
START = """
import json, sys, warnings
before = []
{first}
warnings.simplefilter({warnings!r})
import extops
after = sorted(sys.modules)
import torch
from torch.utils.flop_counter import FlopCounterMode

with FlopCounterMode(display=False) as counter:
    extops.LLTM(5, 4)(torch.zeros(3, 5), (torch.zeros(3, 4), torch.zeros(3, 4)))
same = dict(
    operators=sorted(x for x in torch._C._dispatch_get_all_op_names() if "extops" in x),
    rounded=extops.round_ste(torch.tensor([0.2, 0.5])).tolist(),
    flops=counter.get_total_flops(),
    cuda=torch.cuda.is_initialized(),
)
print(json.dumps([before, after, same]))
"""


@pytest.mark.slow
def test_import_before_torch_or_after_is_the_same(tmp_path: Path) -> None:
    """It loads what is needed and no more, without a warning or another word."""
    _, of_extops, alone = json.loads(
        run_python(START.format(first="", warnings="default"), tmp_path)
    )
    first = "import torch; before = sorted(sys.modules); import torch.utils.flop_counter"
    of_torch, _, after = json.loads(
        run_python(START.format(first=first, warnings="error"), tmp_path)
    )
    assert alone == after
    assert "extops::lltm_step" in alone.pop("operators")
    flops = 2 * 3 * 12 * 9  # of the GEMM: batch 3, weights of 12 rows and 9 columns
    assert alone == {"rounded": [0.0, 1.0], "flops": flops, "cuda": False}
    added = set(of_extops) - set(of_torch)
    assert [x for x in added if x.startswith(DEFERRED)] == []


@pytest.mark.gpu
def test_a_child_process_may_use_the_gpu(tmp_path: Path) -> None:
    """Importing leaves no CUDA context behind: after a fork, CUDA would refuse to work."""
    code = """
import os, torch, extops
child = os.fork()
if child == 0:
    rounded = extops.round_ste(torch.full((3,), 0.75, device="cuda"))
    os._exit(0 if rounded.tolist() == [1.0, 1.0, 1.0] else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run_python(code, tmp_path).strip() == "0"


def test_the_installed_version_is_the_imported_one() -> None:
    import importlib.metadata

    import extops

    installed = importlib.metadata.version("extops")
    assert extops.__version__ == installed


ROOMS = (
    {"_version", "_requirements", "_private"},
    {"binding"},
    {"choosing"},
    {"calling", "_in_graph"},
    {"ops", "_gemm"},
    {"reference", "_packing", "_padded"},
    {"modules"},
    {"rnn", "cells"},
    {"accelerating"},
    {"comparing", "_kernels", "_cell_check"},
    {"__init__", "__main__"},
)
"""The modules and folders of the package, the lowest first."""


def test_imports_run_down() -> None:
    """A room takes from lower ones and from itself, so that each can be read without those above it."""
    import extops

    package = Path(extops.__file__).parent
    level = {name: place for place, names in enumerate(ROOMS) for name in names}
    upwards = []
    for path in package.rglob("*.py"):
        if "include" in path.parts:
            continue
        here = path.relative_to(package).with_suffix("").parts[0]
        for imported in imports_of(path):
            if level[imported] > level[here]:
                upwards.append(f"{path.relative_to(package)}: {imported}")
    assert not upwards


def imports_of(path: Path) -> set[str]:
    """The rooms that a file imports, wherever it does so, but for what only type checkers read."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("extops.")}
    return found


def test_the_package_holds_no_sources_but_the_headers_of_cells() -> None:
    import extops

    package = Path(extops.__file__).parent
    files = (path.relative_to(package) for path in package.rglob("*"))
    sources = [x for x in files if x.suffix in (".cpp", ".h", ".cu") and x.parts[0] != "include"]
    assert sources == []
