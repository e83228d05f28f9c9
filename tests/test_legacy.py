"""The legacy binding is used with torch 2.4 to 2.9, and nothing of it with newer torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import extops
from extops.binding import _loader

# Operators of every kind, and errors of every origin: the checks, torch in Python, torch in a binding.
CALLS = """
import sys, torch, extops
from extops import _kernels

def fails(function, *arguments):
    try:
        function(*arguments)
    except RuntimeError as error:
        return str(error)

x = torch.randn(3, 2, 4, requires_grad=True)
weights, bias, h, c = torch.randn(9, 7), torch.zeros(9), torch.zeros(2, 3), torch.zeros(2, 3)
extops.lltm(x[0], weights, bias, h, c)[0].sum().backward()
extops.lltm_sequence(x, (h, c), weights, bias)[0].sum().backward()
extops.elementwise_mult(x, x).sum().backward()
extops.round_ste(x).sum().backward()
assert "bias" in fails(extops.lltm, x[0], weights, bias[1:], h, c)
assert "bias" in fails(extops.lltm_sequence, x, (h, c), weights, bias[1:])
assert "broadcast" in fails(extops.elementwise_mult, x, x[:, :, 1:])
large = torch.ones(1).expand(2**46)
assert "allocate memory" in fails(extops.round_ste, large)
rows = [one[:1].detach().expand(2**46, -1) for one in (x[0], h, c)]
assert "allocate memory" in fails(extops.lltm, rows[0], weights, bias, *rows[1:])
print("extops.binding._legacy" in sys.modules)
"""


def test_it_is_loaded_only_where_torch_needs_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CALLS], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == [str(_loader.binding == "legacy")], done.stderr


def imported(path: Path) -> set[str]:
    """All names of modules, and of what is taken from them, that the statements of a file import."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names}
    return found


def test_only_the_choice_of_the_binding_imports_it() -> None:
    package = Path(extops.__file__).parent
    importers = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if any("_legacy" in name for name in imported(path))
    }
    assert importers == {"binding/_loader.py"}
