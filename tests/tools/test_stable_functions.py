"""The list of the functions of torch's stable ABI is what torch's headers declare."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tools import stable_functions
from torchwheels.options.releases import numbers
from torchwheels.wheel.stable_functions import first_releases


def test_list_agrees_with_the_torch_at_hand() -> None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        pytest.skip("torch is not installed")
    release, declared = stable_functions.declared(Path(spec.origin).parent.parent)
    listed = first_releases().items()
    assert {x for x, first in listed if numbers(first) <= numbers(release)} == declared


HEADER = """
// AOTI_TORCH_EXPORT int torch_old(int);
AOTI_TORCH_EXPORT int torch_first(int);
AOTI_TORCH_EXPORT AOTITorchError
torch_second(void* of);
"""


def test_a_function_is_of_the_first_release_that_declares_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for release, text in (
        ("2.10.0", HEADER),
        ("2.9.1", re.sub("(?s)\n[^\n]*\ntorch_second.*", "", HEADER)),
    ):
        torch = tmp_path / release / "torch"
        (torch / "include/torch/csrc/stable/c").mkdir(parents=True)
        (torch / "version.py").write_text(f"__version__ = '{release}+cpu'\n")
        (torch / "include/torch/csrc/stable/c/shim.h").write_text(text)
        (torch / "include/torch/csrc/stable/c/shim_mps.h").write_text(
            text.replace("torch_", "mps_")
        )
    monkeypatch.setattr(stable_functions, "FILE", tmp_path / "list.txt")
    monkeypatch.setattr("sys.argv", ["", *(str(tmp_path / x) for x in ("2.10.0", "2.9.1"))])
    stable_functions.main()
    assert (tmp_path / "list.txt").read_text() == (
        "# From the headers of torch 2.9, 2.10; made by `python -m tools.stable_functions`.\n"
        "2.9 torch_first\n2.10 torch_second\n"
    )
