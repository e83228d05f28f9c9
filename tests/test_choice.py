"""Who computes a layer, by a table of cases: no GPU is needed."""

from __future__ import annotations

import pytest
import torch

import extops
from extops.choosing import _choice

Sizes = tuple[int, int, int]


def problem_of(
    cell: str, dtype: str, sizes: Sizes, gradients: bool = False, **more: int
) -> _choice.Problem:
    time, batch, state = sizes
    problem = _choice.Problem(
        cell, getattr(torch, dtype), time, batch, time * batch, state, state, 1, 1, gradients
    )
    return problem._replace(**more)


@pytest.mark.parametrize(
    ("cell", "dtype", "sizes", "forward", "training"),
    [
        # GEMMs of many rows are oneDNN's.
        ("lstm", "float32", (58, 121, 50), "torch", "torch"),
        ("lstm", "float32", (8, 4, 500), "", ""),
        ("lstm", "float32", (10, 22, 128), "torch", "torch"),
        ("lstm", "float32", (10, 10, 128), "torch", ""),
        ("lstm", "float32", (1, 1, 32), "torch", ""),
        ("lstm", "bfloat16", (53, 4, 512), "torch", ""),
        ("lstm", "bfloat16", (58, 165, 100), "torch", "torch"),
        ("lstm", "bfloat16", (1, 508, 320), "torch", "torch"),
        # Of few steps ours would pack the weights.
        ("lstm", "float64", (3, 26, 640), "torch", "torch"),
        ("lstm", "float64", (40, 26, 640), "", ""),
        ("gru", "float32", (5, 2, 500), "torch", "torch"),
        ("gru", "float32", (17, 1, 1024), "torch", ""),
        ("gru", "float32", (48, 1, 1024), "", ""),
        ("gru", "float32", (2, 9, 32), "", "torch"),
        ("gru", "float32", (10, 899, 64), "torch", ""),
        ("gru", "float64", (13, 899, 64), "", ""),
        ("gru", "bfloat16", (40, 9, 256), "torch", ""),
        ("gru", "bfloat16", (40, 9, 64), "", ""),
        ("gru", "bfloat16", (32, 113, 64), "torch", ""),
        ("gru", "bfloat16", (2, 9, 256), "torch", "torch"),
        ("gru", "float16", (1, 9, 256), "", ""),
        ("gru", "float32", (1, 0, 256), "", ""),
    ],
)
def test_on_a_cpu(cell: str, dtype: str, sizes: Sizes, forward: str, training: str) -> None:
    found = [
        _choice.on_cpu(problem_of(cell, dtype, sizes, gradients), has_onednn=True)
        for gradients in (False, True)
    ]
    assert found == [forward, training]


def test_on_a_cpu_without_onednn() -> None:
    problem = problem_of("lstm", "float32", (58, 121, 50))
    assert _choice.on_cpu(problem, has_onednn=False) == ""
    assert _choice.on_cpu(problem._replace(time=2, rows=242), has_onednn=False) == "torch"


@pytest.mark.parametrize("rows", [1, 950, 1000])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_packed_rows_on_a_cpu(dtype: str, gradients: bool, rows: int) -> None:
    """A twentieth may be padded."""
    problem = problem_of("gru", dtype, (100, 10, 64), gradients, rows=rows)
    found = _choice.on_cpu(problem, has_onednn=True)
    assert (found == "torch") == (rows < 952)


@pytest.mark.parametrize(
    ("cell", "mode", "sizes", "kernel", "gradients", "expected"),
    [
        # Where each step keeps the GPU busy for long, or there are few, GEMMs and kernels by steps are as fast.
        ("lstm", "float32", (113, 17, 1536), "step", False, ""),
        ("gru", "float32", (5, 4993, 600), "step", False, "cudnn"),
        ("gru", "float32", (5, 4993, 600), "step", True, ""),
        ("lstm", "float32", (49, 17, 650), "step", True, "cudnn"),
        ("lstm", "float32", (4, 724, 650), "step", True, ""),
        ("lstm", "float32", (2, 991, 768), "step", True, "cudnn"),
        ("gru", "tf32", (35, 495, 1150), "step", True, ""),
        ("gru", "tf32", (227, 587, 768), "step", True, "cudnn"),
        ("lstm", "tf32", (39, 17, 1500), "step", False, "cudnn"),
        ("lstm", "tf32", (371, 299, 1024), "step", False, "cudnn"),
        ("lstm", "bfloat16", (2, 8, 1500), "step", False, ""),
        ("lstm", "bfloat16", (12, 4255, 1000), "step", False, "cudnn"),
        ("lstm", "bfloat16", (12, 4255, 1000), "step", True, ""),
        ("lstm", "bfloat16", (35, 10661, 1500), "step", True, "cudnn"),
        ("lstm", "bfloat16", (35, 20, 650), "step", False, "cudnn"),
        ("gru", "float64", (35, 20, 650), "step", True, ""),
        # One step, and few, of little: the host decides.
        ("lstm", "tf32", (1, 528, 300), "step", False, "cudnn"),
        ("lstm", "tf32", (1, 528, 300), "step", True, ""),
        ("lstm", "bfloat16", (1, 528, 300), "step", False, ""),
        ("gru", "float32", (121, 1, 100), "float32_block", False, "cudnn"),
        ("gru", "float32", (121, 1, 100), "float32_block", True, "cudnn"),
        ("gru", "tf32", (623, 6, 64), "float32_block", False, ""),
        ("gru", "tf32", (623, 6, 64), "float32_block", True, ""),
        ("lstm", "tf32", (17, 2, 128), "float32_block", True, "cudnn"),
        ("gru", "float32", (12, 3, 650), "step", False, "cudnn"),
        ("gru", "bfloat16", (20, 23, 32), "tensor_block", False, ""),
        ("lstm", "tf32", (268, 6, 128), "float32_block", False, ""),
        # For a larger state or batch cuDNN has no quick kernel.
        ("gru", "float32", (6, 46, 500), "float32_cluster", False, ""),
        ("lstm", "float32", (9, 2, 200), "float32_cluster", True, ""),
        ("gru", "tf32", (4, 4441, 128), "tensor_block", False, ""),
        ("lstm", "float32", (4, 1, 1000), "group", True, "cudnn"),
        ("lstm", "tf32", (4, 31, 800), "group", True, ""),
        ("lstm", "tf32", (2, 48, 150), "tensor_cluster", False, "cudnn"),
        # Blocks and clusters, and groups of blocks in TF32, are slower for very large steps, but not in training.
        ("gru", "tf32", (106, 10551, 200), "tensor_cluster", False, "cudnn"),
        ("gru", "tf32", (106, 10551, 200), "tensor_cluster", True, ""),
        ("lstm", "bfloat16", (147, 16433, 100), "tensor_block", False, "cudnn"),
        ("lstm", "tf32", (531, 209, 800), "group", False, "cudnn"),
        ("lstm", "float32", (531, 209, 800), "group", False, ""),
        ("lstm", "bfloat16", (531, 209, 800), "group", False, ""),
        ("lstm", "bfloat16", (531, 209, 800), "group", True, "cudnn"),
        ("lstm", "bfloat16", (161, 340, 800), "group", False, "cudnn"),
        ("gru", "bfloat16", (77, 120, 800), "group", True, ""),
        ("gru", "tf32", (450, 4, 800), "group", False, ""),
        ("gru", "tf32", (106, 149, 800), "group", True, "cudnn"),
        ("gru", "tf32", (95, 215, 600), "group", True, ""),
        # The backward of clusters takes a few samples at a time.
        ("lstm", "bfloat16", (2, 10605, 200), "tensor_cluster", True, "cudnn"),
        ("lstm", "bfloat16", (2, 10605, 200), "tensor_cluster", False, "cudnn"),
        ("lstm", "bfloat16", (16, 1168, 256), "tensor_cluster", True, ""),
        ("lstm", "bfloat16", (3, 431, 256), "tensor_cluster", True, ""),
    ],
)
def test_on_a_gpu(
    cell: str, mode: str, sizes: Sizes, kernel: str, gradients: bool, expected: str
) -> None:
    dtype = "float32" if mode == "tf32" else mode
    problem = problem_of(cell, dtype, sizes, gradients)
    kernels = [kernel] * (1 + gradients)
    assert _choice.on_gpu(problem, kernels, allow_tf32=mode == "tf32") == expected


def test_layers_above_each_other_on_a_gpu() -> None:
    """Each takes the host as long as the first."""
    for layers, chosen in ((1, ""), (2, "cudnn")):
        problem = problem_of("gru", "float32", (4, 2354, 50))._replace(layers=layers)
        assert _choice.on_gpu(problem, ["tensor_block"], allow_tf32=True) == chosen


def test_two_directions_on_a_gpu() -> None:
    """Steps of both take the host twice as long."""
    problem = problem_of("lstm", "bfloat16", (2, 8, 1500), directions=2)
    assert _choice.on_gpu(problem, ["step"], allow_tf32=False) == "cudnn"
    problem = problem_of("lstm", "bfloat16", (2, 2, 1536), directions=2)
    assert _choice.on_gpu(problem, ["group"], allow_tf32=False) == "cudnn"
    problem = problem_of("lstm", "float32", (400, 8, 64), True, directions=2)
    assert _choice.on_gpu(problem, ["float32_block"] * 2, allow_tf32=False) == "cudnn"
    assert _choice.on_gpu(problem._replace(directions=1), ["float32_block"] * 2, False) == ""
    captured = problem._replace(is_captured=True)
    assert _choice.on_gpu(captured, ["float32_block"] * 2, allow_tf32=False) == ""
    for time, chosen in ((54, ""), (9, "cudnn")):
        problem = problem_of("lstm", "float32", (time, 16, 512), directions=2)
        assert _choice.on_gpu(problem, ["tensor_cluster"], allow_tf32=True) == chosen
    for dtype, chosen in (("float32", "cudnn"), ("bfloat16", "")):
        problem = problem_of("gru", dtype, (1, 3, 512), True, directions=2)
        assert _choice.on_gpu(problem, ["step", "step"], allow_tf32=False) == chosen


def test_packed_rows_on_a_gpu() -> None:
    """Little may be padded where ours are much faster: there are many steps, and a kernel for all of them."""
    little = problem_of("gru", "bfloat16", (587, 6, 300), rows=2000)
    assert _choice.on_gpu(little, ["group"], False) == ""
    assert _choice.on_gpu(little, ["step"], False) == "cudnn"
    assert _choice.on_gpu(little._replace(time=40, rows=100), ["group"], False) == "cudnn"
    # What would be cut into pieces takes the host longer.
    pieces = problem_of("gru", "float32", (121, 48, 200), rows=2900, features=1)
    assert _choice.on_gpu(pieces, ["tensor_cluster"], True) == "cudnn"
    much = problem_of("gru", "bfloat16", (587, 64, 300), rows=20_000)
    assert _choice.on_gpu(much, ["group"], False) == "cudnn"
    assert _choice.on_gpu(much._replace(rows=587 * 63), ["group"], False) == ""


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
@pytest.mark.parametrize("gradients", [False, True])
def test_which_kernel_is_asked_of_the_choice(
    gradients: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def choice(problem: _choice.Problem, has_onednn: bool) -> str:
        asked.append(problem)
        return _choice.TORCH

    monkeypatch.setattr(_choice, "on_cpu", choice)
    layer = getattr(extops, name)(3, 4, num_layers=2, bidirectional=True, batch_first=True)
    with torch.set_grad_enabled(gradients):
        assert extops.which_kernel(layer, torch.zeros(5, 6, 3)) == "torch"
    sizes = 6, 5, 30, 3, 4, 2, 2, gradients, False
    assert asked == [_choice.Problem(name.lower(), torch.float32, *sizes)]
