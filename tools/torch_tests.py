"""Runs torch's own tests of its recurrent modules on accelerated ones, whose calls our kernels serve.

`python -m tools.torch_tests CHECKOUT [ARGUMENTS OF PYTEST]`, with a checkout of PyTorch, or an unpacked source archive,
of the version of the torch at hand. A test of LEFT_OUT must fail.
"""

from __future__ import annotations

import fnmatch
import functools
import inspect
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import extops

LEFT_OUT: dict[str, str] = {}
"""Patterns of names, and why those tests fail."""
NAMES = "LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell"
_ABOUT_OURS = re.compile(r"LSTM|GRU|RNN|lstm|gru_|[^a-z]rnn")
_BY_MODULE = re.compile(r"_nn_(?!(LSTM|GRU|RNN)(Cell)?_)[A-Z]")  # tests/test_modules.py: others'


def accelerate_torchs() -> None:
    """Each new module of torch's classes is accelerated as soon as it is made."""
    for name in NAMES:
        kind = getattr(torch.nn, name)
        kind.__init__ = _accelerating(kind, kind.__init__)


def _accelerating(kind: type[torch.nn.Module], make: Any) -> Any:
    @functools.wraps(make)
    def init(module: torch.nn.Module, *arguments: Any, **options: Any) -> None:
        make(module, *arguments, **options)
        if type(module) is kind:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what is left alone, such as projections
                extops.accelerate(module)

    return init


def is_about_ours(name: str, function: Any) -> bool:
    """Whether the name of a test, or what it does, is about one of the modules."""
    if _BY_MODULE.search(name):
        return False
    return bool(_ABOUT_OURS.search(name + inspect.getsource(inspect.unwrap(function))))


class Selection:
    """Chooses the tests, and marks those of the table."""

    def __init__(self, table: dict[str, str]) -> None:
        self.table = table

    @pytest.hookimpl(tryfirst=True)  # before pytest's own choice by `-k`
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Function]
    ) -> None:
        """A test that is marked so fails where it passes."""
        chosen = [item for item in items if is_about_ours(item.name, item.function)]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
        unused = []
        for pattern, reason in self.table.items():
            matching = [item for item in items if fnmatch.fnmatchcase(item.name, pattern)]
            if not matching:
                unused.append(pattern)
            for item in matching:
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
        if unused:
            raise pytest.UsageError(f"LEFT_OUT: no test is named {', '.join(unused)}")


def main() -> None:
    """The command line: see above."""
    if len(sys.argv) < 2 or not Path(sys.argv[1], "test", "test_nn.py").is_file():
        sys.exit("usage: python -m tools.torch_tests CHECKOUT-OF-PYTORCH [ARGUMENTS OF PYTEST]")
    tests = Path(sys.argv[1]).resolve() / "test"
    os.environ["EXTOPS_CHOICES"] = "extops"
    accelerate_torchs()
    arguments = ["--noconftest", "-c", "/dev/null", f"--rootdir={tests}", "-p", "no:cacheprovider"]
    files = [str(tests / name) for name in ("test_nn.py", "test_modules.py", "nn")]
    sys.exit(
        pytest.main([*arguments, "-rfEx", *sys.argv[2:], *files], plugins=[Selection(LEFT_OUT)])
    )


if __name__ == "__main__":
    main()
