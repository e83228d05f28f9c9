"""The suite itself: what it leaves out is counted and explained, and no GPU test goes missing."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from processes import run_alone

TESTS = """
import pytest

def test_anywhere():
    pass

def test_without_what_it_needs():
    pytest.skip("no such thing here")

@pytest.mark.gpu
def test_on_a_gpu():
    pass

@pytest.mark.gpu
def test_on_a_large_gpu():
    pytest.skip("too little memory")

@pytest.mark.multi_gpu
def test_on_two_gpus():
    pass

@pytest.mark.slow
def test_for_minutes():
    pass
"""

# Those of threads have two, else they would test nothing.
NUMBER_OF_THREADS = """
import torch

def test_alone():
    assert torch.get_num_threads() == 1

def test_threaded():
    assert torch.get_num_threads() == 2
"""

ONE_GPU = """
import torch

torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_name = lambda device: "pretended"
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A folder with the suite's configuration, and with a few tests."""
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "one_gpu.py").write_text(ONE_GPU)
    return tmp_path


def run_suite(folder: Path, *arguments: str) -> tuple[int, str]:
    """The exit status and the output of pytest on a machine without GPUs."""
    output = folder / "output"
    status = run_alone(_run_pytest, folder, output, ["-p", "no:cacheprovider", "-ra", *arguments])
    return status, output.read_text()


def _run_pytest(folder: Path, output: Path, arguments: list[str]) -> int:
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        del os.environ[name]  # of the process that this one was started by
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    return int(pytest.main(arguments))


def test_skips_are_counted_and_explained(suite: Path) -> None:
    status, output = run_suite(suite)
    assert status == 0
    assert "1 passed, 1 skipped, 4 deselected" in output
    skips, left_out = output.split("skips by reason")[1].split("left out by reason")
    assert "    1  no such thing here\n" in skips
    assert "    3  no CUDA GPU\n" in left_out and "    1  slow: --thorough runs them\n" in left_out


@pytest.mark.slow
def test_side_by_side_the_same_is_counted_and_recorded(suite: Path) -> None:
    """Each test has one thread."""
    (suite / "test_others.py").write_text(NUMBER_OF_THREADS)
    status, output = run_suite(suite, "-n", "1", "--record=record")
    assert status == 0
    assert "3 passed, 1 skipped" in output
    assert "    1  no such thing here\n" in output.split("skips by reason")[1]
    assert "    3  no CUDA GPU\n" in output.split("left out by reason")[1]
    record = json.loads((suite / "record" / "cpu.json").read_text())
    assert (record["passed"], record["failed"], record["skipped"]) == (3, 0, 1)


@pytest.mark.slow
def test_compiling_just_in_time_is_said_before(suite: Path) -> None:
    """It prints nothing, and may take minutes."""
    (suite / "jit.py").write_text("import os\nos.environ['EXTOPS_JIT'] = 'csrc'\n")
    (suite / "extops" / "binding").mkdir(parents=True)
    (suite / "extops" / "__init__.py").write_text("__version__ = '1'\n")
    (suite / "extops" / "binding" / "_loader.py").write_text("binding = 'pretended'\n")
    said = "extops: compiling what is new in csrc"
    assert said in run_suite(suite, "-p", "jit")[1].split("extops 1 (pretended binding)")[0]


EVERY_SECOND = """
import pytest

@pytest.mark.every(2, "a", "b")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(2))
def test_combination(a, b, device):
    assert (a + b) % 2 == 0
"""


@pytest.mark.slow
def test_one_of_some_combinations_runs(suite: Path) -> None:
    (suite / "test_some.py").write_text(EVERY_SECOND)
    status, output = run_suite(suite)
    assert status == 0 and "3 passed, 9 deselected" in output
    assert "    6  no CUDA GPU\n" in output and "    3  slow: --thorough runs them\n" in output
    status, output = run_suite(suite, "--thorough")
    assert status == pytest.ExitCode.TESTS_FAILED and "3 failed, 3 passed" in output


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ([], ["test_some.py"]),
        pytest.param(["."], ["test_some.py"], marks=pytest.mark.slow),
        pytest.param(["tools"], ["tools/test_more.py"], marks=pytest.mark.slow),
        pytest.param(
            ["tools/test_more.py::test_it"], ["tools/test_more.py"], marks=pytest.mark.slow
        ),
    ],
)
def test_tests_of_the_tools_run_when_asked_for(
    suite: Path, given: list[str], found: list[str]
) -> None:
    (suite / "tools").mkdir()
    (suite / "tools" / "test_more.py").write_text("def test_it(): pass")
    status, output = run_suite(suite, "--collect-only", "-q", *given)
    assert status == 0
    assert sorted({line.split("::")[0] for line in output.splitlines() if "::" in line}) == found


@pytest.mark.slow
def test_slow_tests_run_when_asked_for(suite: Path) -> None:
    status, output = run_suite(suite, "--thorough", "-k", "test_for_minutes")
    assert status == 0 and "1 passed" in output


def test_a_gpu_can_be_required(suite: Path) -> None:
    status, output = run_suite(suite, "--require-gpu")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "--require-gpu was given, but PyTorch finds no CUDA GPU" in output


def test_a_skipped_gpu_test_fails_where_one_is_required(suite: Path) -> None:
    """One GPU is pretended here, since the conftest alone is under test."""
    status, output = run_suite(suite, "-p", "one_gpu", "--require-gpu")
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "1 failed, 2 passed, 2 skipped, 1 deselected" in output
    assert "--require-gpu: a GPU test was skipped: too little memory" in output
    assert "    1  one CUDA GPU, two are needed\n" in output.split("skips by reason")[1]
