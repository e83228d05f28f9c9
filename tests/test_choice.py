"""Who computes a layer, by a table of cases: no GPU is needed."""

from __future__ import annotations

import pytest
import torch

import extops
from extops.choosing import _choice

Sizes = tuple[int, int, int]

_CPU = _choice.Cpu(has_onednn=True, has_avx512=True)
_WITHOUT_ONEDNN = _choice.Cpu(has_onednn=False, has_avx512=False)
_WITHOUT_AVX512 = _choice.Cpu(has_onednn=True, has_avx512=False)


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
        _choice.on_cpu(problem_of(cell, dtype, sizes, gradients), _CPU)
        for gradients in (False, True)
    ]
    assert found == [forward, training]


def test_on_a_cpu_without_onednn() -> None:
    problem = problem_of("lstm", "float32", (58, 121, 50))
    assert _choice.on_cpu(problem, _WITHOUT_ONEDNN) == ""
    assert _choice.on_cpu(problem._replace(time=2, rows=242), _WITHOUT_ONEDNN) == "torch"


@pytest.mark.parametrize(
    ("cell", "dtype", "sizes", "forward", "training"),
    [
        # A step of torch's in bfloat16 takes several times as long as ours there.
        ("lstm", "bfloat16", (53, 4, 512), "", ""),
        ("lstm", "bfloat16", (58, 165, 100), "", ""),
        ("lstm", "bfloat16", (3, 417, 32), "", ""),
        ("lstm", "bfloat16", (2, 2, 640), "torch", "torch"),
        ("lstm", "bfloat16", (1, 508, 320), "torch", "torch"),
        ("gru", "bfloat16", (17, 4, 1024), "", ""),
        ("gru", "bfloat16", (1, 3, 400), "torch", "torch"),
        # In float32 oneDNN's is faster than with it, beside ours.
        ("lstm", "float32", (9, 3, 1024), "torch", ""),
        ("lstm", "float32", (7, 6, 150), "", "torch"),
        ("lstm", "float32", (2, 5, 150), "", ""),
    ],
)
def test_on_a_cpu_without_avx512(
    cell: str, dtype: str, sizes: Sizes, forward: str, training: str
) -> None:
    found = [
        _choice.on_cpu(problem_of(cell, dtype, sizes, gradients), _WITHOUT_AVX512)
        for gradients in (False, True)
    ]
    assert found == [forward, training]


@pytest.mark.parametrize(
    ("dtype", "sizes", "forward"),
    [
        ("float32", (185, 3, 1536), "torch"),
        ("float32", (185, 17, 1536), ""),
        ("float32", (191, 2, 320), ""),
        ("float64", (60, 3, 768), "torch"),
        ("bfloat16", (185, 3, 1536), "torch"),
    ],
)
def test_a_few_samples_by_some_threads(dtype: str, sizes: Sizes, forward: str) -> None:
    """Each of ours reads all weights; torch's divide them."""
    problem = problem_of("gru", dtype, sizes)
    assert _choice.on_cpu(problem, _CPU._replace(threads=2)) == forward
    assert dtype == "bfloat16" or _choice.on_cpu(problem, _CPU) == ""
    training = problem._replace(with_gradients=True)
    assert _choice.on_cpu(training, _CPU._replace(threads=2)) == ""


@pytest.mark.parametrize("rows", [1, 950, 1000])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_packed_rows_on_a_cpu(dtype: str, gradients: bool, rows: int) -> None:
    """A twentieth may be padded."""
    problem = problem_of("gru", dtype, (100, 10, 64), gradients, rows=rows)
    found = _choice.on_cpu(problem, _CPU)
    assert (found == "torch") == (rows < 952)


@pytest.mark.parametrize(
    ("cell", "mode", "sizes", "kernel", "gradients", "expected"),
    [
        # GEMMs and kernels by steps pay where each step keeps the GPU busy for long.
        ("lstm", "float32", (113, 17, 1536), "step", False, ""),
        ("gru", "float32", (5, 4993, 600), "step", False, "cudnn"),
        ("gru", "float32", (5, 4993, 600), "step", True, ""),
        ("lstm", "float32", (49, 17, 650), "step", True, "cudnn"),
        ("gru", "float32", (3, 1901, 768), "step", True, "cudnn"),
        ("gru", "tf32", (35, 495, 1150), "step", True, ""),
        ("gru", "tf32", (227, 587, 768), "step", True, "cudnn"),
        ("lstm", "tf32", (39, 17, 1500), "step", False, "cudnn"),
        ("lstm", "tf32", (371, 299, 1024), "step", False, "cudnn"),
        ("lstm", "bfloat16", (2, 8, 1500), "step", False, "cudnn"),
        ("lstm", "bfloat16", (35, 20, 650), "step", True, "cudnn"),
        ("lstm", "bfloat16", (105, 2623, 320), "step", False, "cudnn"),
        ("lstm", "bfloat16", (105, 2623, 320), "step", True, ""),
        ("lstm", "bfloat16", (35, 10661, 1500), "step", True, "cudnn"),
        # One step, and few, of little: the host decides.
        ("lstm", "float32", (1, 528, 300), "one step", False, ""),
        ("lstm", "float32", (1, 7208, 150), "one step", False, ""),
        ("lstm", "tf32", (1, 299, 50), "one step by GEMMs", False, "cudnn"),
        ("lstm", "tf32", (1, 299, 50), "one step by GEMMs", True, ""),
        ("lstm", "float32", (1, 12650, 150), "one step by GEMMs", False, ""),
        ("lstm", "bfloat16", (1, 16900, 512), "one step by GEMMs", True, ""),
        ("lstm", "tf32", (1, 4374, 768), "one step", False, "cudnn"),
        ("lstm", "tf32", (1, 4374, 768), "one step", True, ""),
        ("lstm", "bfloat16", (1, 528, 300), "one step", False, "cudnn"),
        ("lstm", "bfloat16", (1, 528, 300), "one step", True, ""),
        ("rnn_tanh", "bfloat16", (1, 528, 300), "one step", False, ""),
        ("rnn_tanh", "bfloat16", (2, 528, 300), "step", False, "cudnn"),
        ("lstm", "tf32", (1, 528, 300), "step", False, "cudnn"),
        ("lstm", "tf32", (1, 528, 300), "step", True, ""),
        ("gru", "float32", (121, 1, 100), "float32_block", False, "cudnn"),
        ("gru", "float32", (121, 1, 100), "float32_block", True, "cudnn"),
        ("gru", "tf32", (623, 6, 64), "float32_block", False, ""),
        ("gru", "tf32", (57, 187, 50), "tensor_block", False, "cudnn"),
        ("gru", "tf32", (57, 187, 50), "float32_block", True, "cudnn"),
        ("gru", "tf32", (811, 189, 50), "tensor_block", False, ""),
        ("gru", "tf32", (811, 189, 50), "float32_block", True, ""),
        ("gru", "float32", (57, 187, 100), "float32_block", False, ""),
        ("lstm", "float32", (30, 2678, 200), "float32_cluster", True, "cudnn"),
        ("lstm", "tf32", (78, 13077, 256), "tensor_cluster", True, "cudnn"),
        ("lstm", "tf32", (78, 13077, 64), "tensor_block", True, ""),
        ("gru", "tf32", (623, 6, 64), "float32_block", True, ""),
        ("lstm", "tf32", (17, 2, 128), "float32_block", True, "cudnn"),
        ("gru", "float32", (12, 3, 650), "step", False, "cudnn"),
        ("gru", "bfloat16", (20, 23, 32), "tensor_block", False, ""),
        ("lstm", "tf32", (268, 6, 128), "float32_block", False, ""),
        # For a larger state or batch cuDNN has no quick kernel.
        ("gru", "float32", (6, 46, 500), "float32_cluster", False, ""),
        ("lstm", "float32", (9, 2, 200), "float32_cluster", True, ""),
        ("gru", "tf32", (4, 4441, 128), "tensor_block", False, ""),
        ("lstm", "float32", (3, 677, 64), "float32_block", False, ""),
        ("lstm", "float32", (4, 1, 1000), "group", True, "cudnn"),
        ("lstm", "tf32", (4, 31, 800), "group", True, ""),
        ("lstm", "tf32", (2, 48, 150), "tensor_cluster", False, "cudnn"),
        # Very large steps are cuDNN's. In training it is by far slower than blocks and clusters.
        ("gru", "tf32", (106, 10551, 200), "tensor_cluster", False, "cudnn"),
        ("gru", "tf32", (106, 10551, 200), "tensor_cluster", True, ""),
        ("lstm", "bfloat16", (147, 16433, 100), "tensor_block", False, "cudnn"),
        ("lstm", "bfloat16", (147, 16433, 100), "tensor_block", True, ""),
        ("lstm", "tf32", (531, 209, 800), "group", False, "cudnn"),
        ("gru", "tf32", (44, 111, 1000), "group", False, ""),
        ("lstm", "float32", (531, 209, 800), "group", False, ""),
        ("lstm", "float32", (248, 282, 640), "group", False, "cudnn"),
        ("lstm", "bfloat16", (531, 209, 800), "group", True, "cudnn"),
        ("lstm", "bfloat16", (43, 182, 600), "group", False, ""),
        ("lstm", "bfloat16", (43, 182, 600), "group", True, ""),
        ("gru", "bfloat16", (77, 120, 800), "group", True, ""),
        ("gru", "tf32", (450, 4, 800), "group", False, ""),
        ("gru", "tf32", (450, 4, 800), "group", True, ""),
        ("gru", "tf32", (97, 1, 1024), "group", False, ""),
        ("gru", "tf32", (97, 1, 1024), "group", True, "cudnn"),
        ("gru", "tf32", (5, 69, 1024), "group", True, "cudnn"),
        ("gru", "tf32", (106, 149, 800), "group", True, "cudnn"),
        ("gru", "tf32", (95, 215, 600), "group", False, "cudnn"),
        ("gru", "tf32", (95, 215, 600), "group", True, ""),
        # A large state makes a group of many blocks, which exchange it in each step.
        ("lstm", "bfloat16", (14, 1, 1536), "group", True, "cudnn"),
        ("lstm", "bfloat16", (49, 6, 1536), "group", True, ""),
        ("gru", "bfloat16", (5, 3, 1536), "group", False, "cudnn"),
        # Clusters take a few samples at a time.
        ("lstm", "bfloat16", (2, 10605, 200), "tensor_cluster", True, "cudnn"),
        ("gru", "bfloat16", (4, 249, 512), "tensor_cluster", False, "cudnn"),
        ("lstm", "bfloat16", (16, 1168, 256), "tensor_cluster", True, ""),
        ("lstm", "bfloat16", (8, 431, 256), "tensor_cluster", True, ""),
        ("lstm", "tf32", (5, 700, 256), "tensor_cluster", True, "cudnn"),
    ],
)
def test_on_a_gpu(
    cell: str, mode: str, sizes: Sizes, kernel: str, gradients: bool, expected: str
) -> None:
    dtype = "float32" if mode == "tf32" else mode
    problem = problem_of(cell, dtype, sizes, gradients)
    kernels = [kernel] * (1 + gradients)
    assert _choice.on_gpu(problem, kernels, allow_tf32=mode == "tf32") == expected


def test_a_backward_by_another_kernel_on_a_gpu() -> None:
    """That of clusters, or of GEMMs by steps, is faster than cuDNN's after a forward by groups."""
    by_clusters = problem_of("lstm", "float32", (26, 358, 500), True), ["group", "tensor_cluster"]
    by_steps = problem_of("lstm", "float32", (27, 323, 512), True), ["group", "step"]
    for (problem, kernels), allow_tf32 in ((by_clusters, True), (by_steps, False)):
        assert _choice.on_gpu(problem, kernels, allow_tf32) == ""
        assert _choice.on_gpu(problem._replace(time=4), kernels, allow_tf32) == "cudnn"


def test_layers_above_each_other_on_a_gpu() -> None:
    """Each takes the host as long as the first."""
    for layers, chosen in ((1, ""), (2, "cudnn")):
        problem = problem_of("gru", "float32", (4, 2354, 50))._replace(layers=layers)
        assert _choice.on_gpu(problem, ["tensor_block"], allow_tf32=True) == chosen
        problem = problem_of("gru", "bfloat16", (2, 354, 50))._replace(layers=layers)
        assert _choice.on_gpu(problem, ["tensor_block"], allow_tf32=False) == chosen
        problem = problem_of("lstm", "float32", (1, 3088, 400))._replace(layers=layers)
        assert _choice.on_gpu(problem, ["one step"], allow_tf32=False) == chosen


@pytest.mark.parametrize(
    ("cell", "mode", "sizes", "kernel", "forward", "training"),
    [
        ("lstm", "float32", (400, 8, 64), "float32_block", "", "cudnn"),
        ("lstm", "tf32", (54, 16, 512), "tensor_cluster", "", ""),
        ("lstm", "tf32", (9, 16, 512), "tensor_cluster", "cudnn", "cudnn"),
        # Groups of both directions share the GPU.
        ("gru", "float32", (141, 5, 800), "group", "", ""),
        ("lstm", "float32", (144, 9, 800), "group", "cudnn", ""),
        ("gru", "float32", (98, 505, 512), "step", "cudnn", "cudnn"),
        ("gru", "tf32", (141, 13, 800), "group", "", ""),
        ("gru", "tf32", (73, 15, 1000), "group", "cudnn", "cudnn"),
        ("gru", "tf32", (26, 510, 300), "group", "cudnn", "cudnn"),
        ("lstm", "tf32", (45, 7, 600), "group", "", "cudnn"),
        ("lstm", "bfloat16", (65, 51, 600), "group", "", ""),
        ("lstm", "bfloat16", (157, 2, 1024), "group", "", "cudnn"),
        ("gru", "bfloat16", (55, 9, 2048), "group", "cudnn", "cudnn"),
        ("lstm", "bfloat16", (14, 4, 800), "group", "", "cudnn"),
        ("lstm", "bfloat16", (12, 7485, 320), "step", "cudnn", ""),
        ("gru", "bfloat16", (6, 99, 128), "tensor_block", "", "cudnn"),
        ("gru", "bfloat16", (1, 218, 320), "one step", "cudnn", "cudnn"),
        ("gru", "float32", (1, 190, 512), "one step", "", ""),
        ("gru", "tf32", (1, 299, 50), "one step by GEMMs", "cudnn", "cudnn"),
        ("gru", "tf32", (4, 4746, 32), "tensor_block", "cudnn", "cudnn"),
    ],
)
def test_two_directions_on_a_gpu(
    cell: str, mode: str, sizes: Sizes, kernel: str, forward: str, training: str
) -> None:
    """Steps of both take the host twice as long."""
    dtype = "float32" if mode == "tf32" else mode
    found = []
    for gradients in (False, True):
        problem = problem_of(cell, dtype, sizes, gradients, directions=2)
        kernels = [kernel] * (1 + gradients)
        found.append(_choice.on_gpu(problem, kernels, allow_tf32=mode == "tf32"))
    assert found == [forward, training]


def test_captured_on_a_gpu() -> None:
    """In a graph the host's time does not count."""
    problem = problem_of("lstm", "float32", (400, 8, 64), True, directions=2)
    captured = problem._replace(is_captured=True)
    assert _choice.on_gpu(captured, ["float32_block"] * 2, allow_tf32=False) == ""


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

    def choice(problem: _choice.Problem, _: _choice.Cpu) -> str:
        asked.append(problem)
        return _choice.TORCH

    monkeypatch.setattr(_choice, "on_cpu", choice)
    layer = getattr(extops, name)(3, 4, num_layers=2, bidirectional=True, batch_first=True)
    with torch.set_grad_enabled(gradients):
        assert extops.which_kernel(layer, torch.zeros(5, 6, 3)) == "torch"
    sizes = 6, 5, 30, 3, 4, 2, 2, gradients, False
    assert asked == [_choice.Problem(name.lower(), torch.float32, *sizes)]
