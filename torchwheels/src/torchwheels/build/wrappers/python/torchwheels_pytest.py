"""A pytest plugin: leaves a record of the run, and with TORCHWHEELS_REQUIRE_GPU lets no GPU test be skipped.

A copy of this file lies beside the tests of a wheel, and imports nothing of torchwheels.
"""

import json
import os
import platform
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

_ABOUT_GPUS = re.compile(r"gpu|cuda", re.IGNORECASE)
_ended: list[str] = []
"""What ended the run before its last test, but the user."""


def gpu_name() -> str | None:
    """The first GPU that torch sees."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def pytest_configure(config: pytest.Config) -> None:
    """Ends the run at once where there is no GPU and one is required."""
    if os.environ.get("TORCHWHEELS_REQUIRE_GPU") and not gpu_name():
        raise pytest.UsageError(
            "--require-gpu: torch sees no GPU here, as in any target without CUDA: install the NVIDIA driver, "
            "or leave the option out"
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Makes the skip of a test for want of a GPU a failure, where one is required."""
    report = yield
    if os.environ.get("TORCHWHEELS_REQUIRE_GPU") and report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        if _ABOUT_GPUS.search(str(reason)):
            report.outcome = "failed"
            report.longrepr = f"--require-gpu: a GPU test was skipped: {reason}"
    return report


def pytest_keyboard_interrupt(excinfo: pytest.ExceptionInfo[BaseException]) -> None:
    """Counts a run that a test ends as failed, whatever exit code it wants."""
    if not isinstance(excinfo.value, KeyboardInterrupt):
        _ended.append(str(excinfo.value))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Such a run does not end with 0."""
    if _ended:
        session.exitstatus = pytest.ExitCode.INTERRUPTED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Writes what was tested, where, and how it went."""
    import torch

    count = {name: len(found) for name, found in terminalreporter.stats.items()}
    record = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": gpu_name() or "CPU",
        "passed": count.get("passed", 0) + count.get("xpassed", 0),
        "failed": count.get("failed", 0) + count.get("error", 0) + len(_ended),
        "skipped": count.get("skipped", 0) + count.get("xfailed", 0),
    }
    Path(os.environ["TORCHWHEELS_RECORD"]).write_text(json.dumps(record))
