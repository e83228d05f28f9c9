"""What `import extops` does and, above all, does not do, each in a Python process of its own."""

from __future__ import annotations

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


def modules_after(statement: str, folder: Path) -> set[str]:
    code = f"import sys, json\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    return set(json.loads(run_python(code, folder)))


def test_import_loads_only_what_is_needed(tmp_path: Path) -> None:
    added = modules_after("import extops", tmp_path) - modules_after("import torch", tmp_path)
    deferred = [
        name
        for name in added
        if any(name == module or name.startswith(f"{module}.") for module in DEFERRED)
    ]
    assert deferred == []


def test_import_does_not_initialise_cuda(tmp_path: Path) -> None:
    code = "import extops, torch; print(torch.cuda.is_initialized())"
    assert run_python(code, tmp_path).strip() == "False"


def test_import_warns_of_nothing_and_prints_nothing(tmp_path: Path) -> None:
    code = "import torch, warnings; warnings.simplefilter('error'); import extops"
    assert run_python(code, tmp_path) == ""


def test_first_call_in_a_fresh_process(tmp_path: Path) -> None:
    code = "import extops, torch; print(extops.round_ste(torch.tensor([0.2, 0.5])).tolist())"
    assert run_python(code, tmp_path).strip() == "[0.0, 1.0]"


def test_import_before_torch_or_after_is_the_same(tmp_path: Path) -> None:
    names = "sorted(name for name in torch._C._dispatch_get_all_op_names() if 'extops' in name)"
    before = run_python(f"import extops, torch; print({names})", tmp_path)
    after = run_python(f"import torch, extops; print({names})", tmp_path)
    assert before == after and "extops::lltm_cell" in before


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


def test_the_package_holds_the_one_source_that_it_compiles() -> None:
    import extops

    package = Path(extops.__file__).parent
    files = (path.relative_to(package) for path in package.rglob("*"))
    sources = [x for x in files if x.suffix in (".cpp", ".h", ".cu") and x.parts[0] != "include"]
    assert sources == [Path("aten.cpp")]
