"""The list of mutants, and what counts as killed or as reported; `nox -s mutate` runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from extops_build import ROOT, UserError
from tools import mutants, mutate, sanitize
from tools.mutants import Mutant, Run

ALL = [mutant for device in mutants.DEVICES for mutant in mutants.mutants(device)]
SANITIZERS = {
    "cpu": {"AddressSanitizer", "UndefinedBehaviorSanitizer"},
    "cuda": {"memcheck", "racecheck", "initcheck", "synccheck"},
}
FAILED = """\
tests/test_golden.py::test_lltm[fused-odd-cpu-float64] PASSED            [  0%]
tests/test_values.py::test_values[lltm-one-cpu-float64] FAILED           [  1%]

=========================== short test summary info ============================
FAILED tests/test_values.py::test_values[lltm-one-cpu-float64] - AssertionErr...
================= 1 failed, 1 passed, 2 deselected in 5.61s ==================
"""
CRASHED = """\
tests/test_golden.py::test_lltm[fused-odd-cpu-float64] PASSED            [  0%]
tests/test_values.py::test_layouts[lltm-sliced-cpu-float64] Fatal Python error: Aborted
"""


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_mutant_changes_one_place_of_the_sources(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text()
    assert mutant.spoil(text) != text
    assert mutant.why


@pytest.mark.parametrize("device", mutants.DEVICES)
def test_of_a_device_only_the_named_tests_are_chosen(device: str) -> None:
    chosen = mutants.choice(device, ["test_named", "test_other"])
    expression = chosen[chosen.index("-k") + 1]
    words = {"cuda": device == "cuda", "gpu": False, "test_other": False}
    assert eval(expression, words | {"test_named": True})  # pytest's words are Python's
    assert not eval(expression, words | {"test_named": False})


def test_there_are_enough_mutants() -> None:
    names = [mutant.name for mutant in ALL]
    assert len(set(names)) == len(names)
    for device in mutants.DEVICES:
        seen_by = [mutant.seen_by for mutant in mutants.mutants(device)]
        assert seen_by.count("tests") >= 20
        assert set(seen_by) == {"tests"} | SANITIZERS[device]


def test_stale_mutant_is_an_error() -> None:
    mutant = Mutant("gone", "csrc/a.cpp", original="a + b", replacement="a - b", why="a sign")
    assert mutant.spoil("x = a + b;") == "x = a - b;"
    for text, count in (("x = a * b;", 0), ("a + b; a + b;", 2)):
        with pytest.raises(UserError, match=rf"gone changes a text .* {count} times .* adapt"):
            mutant.spoil(text)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (Run(0, "== 3 passed in 1s ==", 1.0), ("survived", "")),
        (
            Run(1, FAILED, 1.0),
            ("killed", "tests/test_values.py::test_values[lltm-one-cpu-float64]"),
        ),
        (
            Run(-6, CRASHED, 1.0),
            (
                "killed",
                "crashes in tests/test_values.py::test_layouts[lltm-sliced-cpu-float64] (signal 6)",
            ),
        ),
        (
            Run(None, FAILED.partition(" FAILED")[0], 9.0),
            ("killed", "hangs in tests/test_values.py::test_values[lltm-one-cpu-float64]"),
        ),
    ],
    ids=["passed", "failed", "crashed", "hung"],
)
def test_verdict(run: Run, expected: tuple[str, str]) -> None:
    assert mutate.verdict(run) == expected


def test_tests_that_do_not_run_kill_nothing() -> None:
    """An import error or a wrong option is no proof of a test."""
    with pytest.raises(UserError, match="did not run"):
        mutate.verdict(Run(2, "ERROR collecting tests/test_values.py", 1.0))


def test_count_of_passed_tests() -> None:
    assert Run(1, FAILED, 1.0).passed == 1
    assert Run(5, "== 12 deselected in 1.2s ==", 1.0).passed == 0


def make_package(folder: Path, value: str) -> None:
    (folder / "extops").mkdir(parents=True)
    (folder / "extops" / "__init__.py").write_text(f"value = {value}\n")


@pytest.mark.slow
def test_what_hangs_is_killed_and_what_is_tested_is_the_mutant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tests of our own: on the package as it is, on a mutant, and on one that never ends."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "tests" / "test_it.py").write_text(
        "import warnings\nimport extops\n"
        "def test_that_warns(): warnings.warn('listed after all tests')\n"
        "def test_it(): assert extops.value == 1 or extops.wait()\n"
    )
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    for name, value in {
        mutants.ORIGINAL: "1",
        "wrong": "2\ndef wait(): return False",
        "hangs": "2\ndef wait(): import signal; signal.pause()",
    }.items():
        make_package(tmp_path / "built" / name, value)
    runs = {
        name: mutants.run_tests(tmp_path / "built", name, ["tests"], limit=60)
        for name in (None, "wrong")
    }
    limit = 2 + 3 * runs[None].seconds
    runs["hangs"] = mutants.run_tests(tmp_path / "built", "hangs", ["tests"], limit=limit)
    assert (runs[None].code, runs[None].passed) == (0, 2)
    assert mutate.verdict(runs["wrong"]) == ("killed", "tests/test_it.py::test_it")
    with pytest.raises(UserError, match=r"has no gone: build .* again"):
        mutants.run_tests(tmp_path / "built", "gone", ["tests"], limit=60)
    assert mutate.verdict(runs["hangs"]) == ("killed", "hangs in tests/test_it.py::test_it")


def test_reports_of_compute_sanitizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those about kernels of ours count: initcheck watches those of torch, too."""
    command = tmp_path / "bin" / "compute-sanitizer"
    command.parent.mkdir()
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    tool = sanitize.compute_sanitizer("initcheck")
    assert tool.under[0] == str(command)
    theirs = (
        "========= Uninitialized __global__ memory read of size 4 bytes\n=========     at {}+0x1f0"
    )
    assert tool.reported(Run(0, theirs.format("void gemmk1_kernel<int>(float *)"), 1.0)) == {}
    ours = theirs.format("void extops::cuda::lltm_kernel<float>(extops::cuda::Sizes)")
    assert list(tool.reported(Run(0, ours, 1.0))) == ["initcheck"]


def test_reports_of_the_compilers_sanitizers() -> None:
    tool = sanitize.compiled_in()
    address = "==7==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x6 at pc 0x7"
    undefined = "csrc/kernels/cpu/math.h:79:64: runtime error: left shift of 3 by 52 places"
    assert list(tool.reported(Run(86, address, 1.0))) == ["AddressSanitizer"]
    assert list(tool.reported(Run(86, undefined, 1.0))) == ["UndefinedBehaviorSanitizer"]
    assert tool.reported(Run(1, FAILED, 1.0)) == {}
    assert all(Path(library).is_file() for library in tool.environment["LD_PRELOAD"].split(":"))


def test_compute_sanitizer_is_the_systems_or_pips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(sanitize.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(UserError, match="pip install nvidia-cuda-sanitizer-api"):
        sanitize.find_compute_sanitizer()
    from_pip = tmp_path / "nvidia" / "cu13" / "bin" / "compute-sanitizer"
    own = tmp_path / "home" / "bin" / "compute-sanitizer"
    for program in (from_pip, own):
        program.parent.mkdir(parents=True)
        program.touch(mode=0o755)
    assert sanitize.find_compute_sanitizer() == from_pip
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert sanitize.find_compute_sanitizer() == own
