"""What every test shares: the options, the markers, the seeds, the count of what did not run.

And `--record FOLDER`, which leaves a note there on what was tested, where, and how it went.

The suite runs on the extops that is installed, from any copy of this folder. This file needs
neither extops nor torch, so that tests of the repository itself can live beside it.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
import tempfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

MARKERS = (
    "gpu: needs a CUDA GPU; left out without one, and never skipped under --require-gpu",
    "multi_gpu: needs two CUDA GPUs; skipped where there are fewer, also under --require-gpu",
    "slow: takes seconds or minutes, or repeats a long test in another dtype or cell; runs under --thorough only",
    "every(n, *parameters): of all combinations of these parameters, one of n; all on a GPU and under --thorough",
    "large: works on tensors of more than 2**31 elements, so takes gigabytes of GPU memory",
)

GPU_MARKERS = ("gpu", "multi_gpu")

# Their tests need more than the wheel does.
TOOLS = Path(__file__).parent / "tools"

# Set on a test whose skip is a property of the installed torch or of the machine's number of GPUs,
# and therefore allowed under --require-gpu.
ALLOWED_SKIP = pytest.StashKey[bool]()

# How many tests were not collected, by reason.
LEFT_OUT = pytest.StashKey[dict[str, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="fail where a GPU test would be skipped (default: leave GPU tests out where there is no GPU)",
    )
    parser.addoption(
        "--record",
        type=Path,
        metavar="FOLDER",
        help="leave a record of this run there, for the build report of the wheel (default: none)",
    )
    parser.addoption(
        "--thorough",
        action="store_true",
        help="run the slow tests, too, and the property tests on many more examples, new ones each time",
    )


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # to collect thousands of tests leaves no garbage, and takes a quarter longer with it
    # What tests measure, beside other tests, is no choice for the user's programs.
    folder = tempfile.TemporaryDirectory(prefix="extops-choices-")
    config.add_cleanup(folder.cleanup)
    os.environ.setdefault("EXTOPS_CHOICES", str(Path(folder.name, "choices.json")))
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    load_hypothesis_profile(config.getoption("--thorough"))
    if config.getoption("--require-gpu") and gpu_count() == 0:
        raise pytest.UsageError(
            "--require-gpu was given, but PyTorch finds no CUDA GPU on this machine: "
            "run where `torch.cuda.is_available()` is true, or leave the option out"
        )


def load_hypothesis_profile(thorough: bool) -> None:
    # Times differ from machine to machine, and the same commit is to give the same verdict.
    settings.register_profile("quick", max_examples=20, derandomize=True, deadline=None)
    settings.register_profile("thorough", max_examples=300, deadline=None, database=None)
    settings.load_profile("thorough" if thorough else "quick")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out the tests of the tools unless a path within their folder is given."""
    given = [config.invocation_params.dir / argument for argument in config.args]
    asked = any(collection_path in (path, *path.parents) for path in given)
    return True if collection_path == TOOLS and not asked else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what would not run: to skip thousands of tests takes a while, too."""
    without = {}
    if not config.getoption("--thorough"):
        without["slow"] = "slow: --thorough runs them"
        mark_repetitions(items)
    if gpu_count() == 0:  # then --require-gpu has ended the run already
        without |= dict.fromkeys(GPU_MARKERS, "no CUDA GPU")
    found = {
        item: next((why for name, why in without.items() if item.get_closest_marker(name)), "")
        for item in items
    }
    config.stash[LEFT_OUT] = dict(Counter(filter(None, found.values())))
    config.hook.pytest_deselected(items=[item for item in items if found[item]])
    items[:] = [item for item in items if not found[item]]


def pytest_collection_finish() -> None:
    gc.enable()


def mark_repetitions(items: list[pytest.Item]) -> None:
    """Marks as slow what the mark `every` leaves to a thorough run.

    Each parameter's values have numbers, and the combinations are chosen whose sum the n divides. Thus each value meets
    every n-th of another parameter's, and the next value those beside them.
    """
    found: dict[tuple[object, str], list[object]] = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("every")
        if mark is None or needs_gpu(item):
            continue
        assert isinstance(item, pytest.Function)
        number = 0
        for name in mark.args[1:]:
            values, value = found[item.function, name], item.callspec.params[name]
            if value not in values:
                values.append(value)
            number += values.index(value)
        if number % mark.args[0]:
            item.add_marker("slow")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Has a worker of pytest-xdist tell the process that started it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left out"] = session.config.stash.get(LEFT_OUT, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes what a worker of pytest-xdist left out: each collects the same tests."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left out", {})


def seed(number: int) -> None:
    """As torch.manual_seed, which keeps a stack of the call for each kind of GPU to come: that takes a millisecond."""
    import torch

    if gpu_count():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


@functools.cache
def gpu_count() -> int:
    """The number of CUDA GPUs PyTorch can use, 0 where there is no PyTorch at all."""
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def pytest_report_header(config: pytest.Config) -> str:
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("extops") is None:
        return "extops: not installed"
    if os.environ.get("EXTOPS_JIT"):  # compiling prints nothing, and may take minutes
        terminal = config.get_terminal_writer()
        terminal.line("extops: compiling what is new in csrc, all of it the first time", flush=True)
    import torch

    import extops
    from extops.binding import _loader

    return (
        f"extops {extops.__version__} ({_loader.binding} binding), "
        f"torch {torch.__version__}, {gpu_count()} GPU(s): {gpu_name() or 'no CUDA GPU'}"
    )


def gpu_name() -> str:
    """The name of the first CUDA GPU, empty where there is none."""
    import torch

    return torch.cuda.get_device_name(0) if gpu_count() else ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("multi_gpu") and gpu_count() == 1:
        item.stash[ALLOWED_SKIP] = True
        pytest.skip("one CUDA GPU, two are needed")


def needs_gpu(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in GPU_MARKERS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turns the skip of a GPU test into a failure under --require-gpu."""
    report = yield
    required = item.config.getoption("--require-gpu") and needs_gpu(item)
    if report.skipped and required and not item.stash.get(ALLOWED_SKIP, False):
        report.outcome = "failed"
        report.longrepr = f"--require-gpu: a GPU test was skipped: {skip_reason(report)}"
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reasons = Counter(skip_reason(report) for report in terminalreporter.stats.get("skipped", ()))
    if reasons:
        terminalreporter.section("skips by reason")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:5d}  {reason}")
    left_out = terminalreporter.config.stash.get(LEFT_OUT, {})
    if left_out:
        terminalreporter.section("left out by reason")
    for reason, count in left_out.items():
        terminalreporter.write_line(f"{count:5d}  {reason}")
    folder = terminalreporter.config.getoption("--record")
    if folder:
        write_record(folder, {name: len(found) for name, found in terminalreporter.stats.items()})


def write_record(folder: Path, counts: dict[str, int]) -> None:
    """Writes what was tested, where, and how it went, into a file named after the device."""
    import torch

    device = gpu_name() or "CPU"
    record = {
        "contents": contents(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device,
        "passed": counts.get("passed", 0),
        "failed": counts.get("failed", 0) + counts.get("error", 0),
        "skipped": counts.get("skipped", 0),
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{re.sub(r'[^a-z0-9]+', '-', device.lower())}.json"
    file.write_text(json.dumps(record, indent=2) + "\n")


def contents() -> str:
    """Identifies the installed package: a hash of the hashes that its RECORD holds of its files."""
    files = importlib.metadata.files("extops") or []
    lines = sorted(f"{file} {file.hash.value}" for file in files if file.hash)
    ours = [line for line in lines if re.match(r"extops(_doctor)?/", line) and ".pyc" not in line]
    return hashlib.sha256("\n".join(ours).encode()).hexdigest()


def skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    place_and_reason = report.longrepr
    assert isinstance(place_and_reason, tuple)
    return str(place_and_reason[2]).removeprefix("Skipped: ")


@pytest.fixture
def thorough(request: pytest.FixtureRequest) -> bool:
    """Whether a test shall look as closely as it can, however long that takes."""
    return bool(request.config.getoption("--thorough"))


@pytest.fixture(autouse=True)
def _same_start(request: pytest.FixtureRequest) -> Iterator[None]:
    """Gives each test the same start in every run and in any order.

    Random numbers of its own, and denormal numbers that count: loading code that Inductor compiled
    makes the CPU flush them to zero in torch 2.4. Where pytest-xdist runs tests side by side, each has
    one thread, or two where threads are what it tests: more would only wait for one another.
    """
    torch = sys.modules.get("torch")  # imported by now by every test that uses it
    if torch is not None:
        seed(zlib.crc32(request.node.name.encode()))
        torch.set_flush_denormal(False)
        if "PYTEST_XDIST_WORKER" in os.environ:
            torch.set_num_threads(2 if "thread" in request.node.nodeid else 1)
    yield
    # Tests side by side share the memory of a GPU.
    if torch is not None and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()


@pytest.fixture
def take() -> Iterator[Callable[[str], None]]:
    """Makes all sequences on a GPU use a kernel: EXTOPS_SEQUENCE_KERNEL is read once in a process."""
    from operators import name_kernel  # tests of the tools do without

    yield name_kernel
    name_kernel("")


@pytest.fixture
def dynamo(request: pytest.FixtureRequest) -> Iterator[None]:
    """torch.compile with nothing left over from other tests; skips where this torch has none."""
    import torch
    from torch._dynamo.eval_frame import check_if_dynamo_supported

    try:
        check_if_dynamo_supported()
    except RuntimeError as error:
        request.node.stash[ALLOWED_SKIP] = True
        pytest.skip(f"no torch.compile in torch {torch.__version__}: {error}")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
