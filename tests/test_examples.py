"""The programs of examples/, as a user runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import extops
from extops.binding import _jit
from operators import by_device, needs_inductor, needs_programs

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *arguments: str | Path) -> str:
    command = [sys.executable, EXAMPLES / f"{name}.py", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # others run beside it
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_has_a_test() -> None:
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    # In torchwheels/tests, since they build wheels.
    tested |= {"foreign_wheel", "own_project", "cibuildwheel", "farm"}
    assert {path.stem for path in EXAMPLES.iterdir()} - {"__pycache__"} <= tested


@by_device
def test_sequence(device: str, thorough: bool, tmp_path: Path) -> None:
    plot, iterations = tmp_path / "loss.png", 100 if thorough else 20
    output = run("sequence", "--device", device, "--plot", plot, f"--iterations={iterations}")
    losses = {}
    for name, *numbers in re.findall(
        r"^(\S+) +loss ([\d.]+) -> ([\d.]+) bits per byte, held-out text ([\d.]+)$", output, re.M
    ):
        losses[name] = first, _, held_out = tuple(map(float, numbers))
        assert 7.5 < first < 8.5  # bits per byte: it knows nothing
        assert held_out < (4 if thorough else 5)
    assert list(losses) == ["nn.LSTM", "accelerated", "LLTMLayer"], output
    assert losses["accelerated"] == pytest.approx(losses["nn.LSTM"], abs=0.05)  # the same model
    seconds = r"[\d.]+ s by"
    kernel = "cpu" if device == "cpu" else r"\w+"
    assert re.search(
        rf"^times: +nn.LSTM {seconds} torch, accelerated {seconds} (torch|{kernel}), LLTMLayer {seconds} {kernel}$",
        output,
        re.M,
    ), output
    assert plot.read_bytes().startswith(b"\x89PNG")


@by_device
@pytest.mark.slow
def test_own_cell(device: str) -> None:
    if extops.binding._loader.binding != "stable":
        pytest.skip("needs torch 2.10 or newer")
    needs_programs("c++", "ninja", *(["nvcc"] if device == "cuda" else []))
    output = run("own_cell/own_cell", "--device", device)
    assert "the cell agrees with its step" in output
    wrong = (
        "import own_cell, torch; own_cell.mgu(torch.ones(1, 1, 1), None, *[torch.ones(1, 1)] * 3)"
    )
    done = subprocess.run(
        [sys.executable, "-c", wrong], cwd=EXAMPLES / "own_cell", capture_output=True, text=True
    )
    assert "TypeError: mgu_sequence: expected `state` to be a pair of tensors" in done.stderr


@pytest.mark.slow
def test_ahead() -> None:
    if extops.binding._loader.binding != "stable":
        pytest.skip("needs torch 2.10 or newer")
    needs_inductor()
    difference = re.search("differ from Python's by (.*) at most", run("ahead/ahead"))
    assert difference and float(difference[1]) < 1e-5


def test_the_gpus_of_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """TORCH_CUDA_ARCH_LIST is for what goes to others. It cannot name Hopper's own target, without which a cell lacks
    most of its kernels there.
    """
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: [(9, 0), (8, 6), (9, 0)][device]
    )
    assert _jit.architecture_flags() == [
        "-gencode=arch=compute_86,code=sm_86",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-DEXTOPS_SM90A",
    ]


@pytest.mark.parametrize(
    ("capability", "flags"),
    [("AVX512", ["-DEXTOPS_VECTOR_BYTES=64"]), ("AVX2", ["-DEXTOPS_VECTOR_BYTES=32"]), ("VSX", [])],
)
def test_the_vectors_of_a_cell(
    capability: str, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of all CPUs are for what goes to others."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert _jit.vector_flags() == flags


def test_sequence_without_matplotlib() -> None:
    name = str(EXAMPLES / "sequence.py")
    code = "import runpy, sys; sys.modules['matplotlib'] = None; "
    code += f"runpy.run_path({name!r}, run_name='__main__')"
    command = [sys.executable, "-c", code, "--plot=loss.png"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--plot needs matplotlib: pip install matplotlib" in done.stderr


@by_device
@pytest.mark.slow
def test_binary_codes(device: str) -> None:
    output = run("binary_codes", "--device", device, "--iterations=150")
    losses = dict(re.findall(r"^(\w[\w ]*\w) +[\d.]+ s, loss ([\d.]+)", output, re.MULTILINE))
    assert float(losses["round_ste"]) < 0.7 * float(losses["rounded in the end"])
    nearest = re.findall(r"(\w+) \((\d+)\)", output.rpartition("differ: ")[2])
    assert ("while", "0") in nearest and len(nearest) > 3  # others may have the same bits


@pytest.mark.slow
@by_device
def test_own_operator(device: str) -> None:
    needs_programs("c++", "ninja", *["nvcc"] * (device == "cuda"))
    output = run("own_operator", "--device", device)
    difference = re.search("torch's softsign: (.*)", output)
    assert difference, output
    assert float(difference[1]) < 1e-15
    assert "opcheck finds no fault" in output
