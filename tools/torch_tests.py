"""Runs torch's own tests of its recurrent modules with those of extops in their place.

`python -m tools.torch_tests CHECKOUT [ARGUMENTS OF PYTEST]`, with a checkout of PyTorch, or an unpacked source archive,
of the version of the torch at hand. A test of LEFT_OUT must fail.
"""

from __future__ import annotations

import fnmatch
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import extops

_PROJECTIONS = "makes an LSTM with `proj_size`, which extops refuses"
LEFT_OUT = {
    "test_cudnn_forward_exception": _PROJECTIONS,
    "test_projections_lstm_args_check": _PROJECTIONS,
    "test_projections_lstm_initial_hidden_state": _PROJECTIONS,
    "test_rnn_weight_norm": _PROJECTIONS,
    "test_variable_sequence_*": _PROJECTIONS,
    "test_projections_errors_on_gru_and_rnn": "compares the message that a GRU has no `proj_size`",
    "test_errors_nn_*Cell_*": "compares messages: extops words its own, and says what was expected",
}
"""Patterns of names, and why those tests fail."""
NAMES = "LSTM", "GRU", "LSTMCell", "GRUCell"
_ABOUT_OURS = re.compile(r"LSTM|GRU|lstm|gru_|[^a-z]rnn")
_BY_MODULE = re.compile(r"_nn_(?!(LSTM|GRU)(Cell)?_)[A-Z]")  # tests/test_modules.py: others'


def replace_torchs() -> None:
    """To be called before torch's own tests are imported: their tables hold the classes."""
    for name in NAMES:
        for module in (torch.nn, torch.nn.modules, torch.nn.modules.rnn):
            setattr(module, name, getattr(extops, name))
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        if info.module_cls is extops.LSTM:
            info.module_inputs_func = _without_projections(info.module_inputs_func)


def _without_projections(make: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """One test runs all inputs: those with `proj_size`, which extops refuses, would hide the others."""

    def inputs(*arguments: Any, **options: Any) -> list[Any]:
        made = make(*arguments, **options)
        return [x for x in made if "proj_size" not in x.constructor_input.kwargs]

    return inputs


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
    replace_torchs()
    arguments = ["--noconftest", "-c", "/dev/null", f"--rootdir={tests}", "-p", "no:cacheprovider"]
    files = [str(tests / name) for name in ("test_nn.py", "test_modules.py", "nn")]
    sys.exit(
        pytest.main([*arguments, "-rfEx", *sys.argv[2:], *files], plugins=[Selection(LEFT_OUT)])
    )


if __name__ == "__main__":
    main()
