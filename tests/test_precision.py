"""How GEMMs are computed: by tensor cores in 16-bit types, in TF32 where torch's switch allows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import extops
from extops import _gemm
from extops.binding._devices import build_info
from operators import (
    LLTM,
    Tensors,
    assert_as_accurate_as_eager,
    by_device,
    by_dtype,
    cancelling_inputs,
    gradients,
    lltm_inputs,
    upstream,
)

# Batch, input features and state size, for each way in which the kernels for Hopper split a problem up (the tiles have
# 64 or 128 rows and 24, 32 or 40 units), and what is left over at its edges. In float32 and TF32 rows end at multiples
# of 4 and states at multiples of 32, in 16-bit types at twice as many.
SIZES = {
    "units_of_24": (64, 512, 512),
    "units_of_32": (128, 1024, 1024),
    "units_of_40": (128, 512, 512),
    "one_share": (128, 64, 2112),
    "one_row": (1, 1024, 1024),
    "few_rows": (3, 1024, 1024),
    "one_row_more": (65, 200, 448),
    "left_over": (37, 8, 832),
    "no_features": (100, 0, 576),
    "vectors_of_few_rows": (7, 128, 512),
    "rows_of_a_cluster": (230, 32, 128),
    "rows_of_two_tiles": (250, 40, 320),
    "many_rows": (300, 40, 320),
    "many_rows_of_wide_tiles": (260, 1024, 1024),
}
PRECISIONS = ("bfloat16", "float16", "tf32", "float32")

by_size = pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
by_precision = pytest.mark.parametrize("precision", PRECISIONS)


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Turns torch's switch for TF32 on or off."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


Make = Callable[[int, int, int], Tensors]


def inputs_of(size: tuple[int, int, int], precision: str, make: Make = lltm_inputs) -> Tensors:
    dtype = torch.float32 if precision == "tf32" else getattr(torch, precision)
    return tuple(tensor.to("cuda", dtype) for tensor in make(*size))


@pytest.mark.gpu
@by_size
@pytest.mark.parametrize(
    ("make", "precision"),
    [
        *((lltm_inputs, precision) for precision in PRECISIONS),
        # TF32 stores products in float32.
        *((cancelling_inputs, precision) for precision in ("bfloat16", "float16")),
    ],
)
def test_as_accurate_as_eager(make: Make, size: tuple[int, int, int], precision: str) -> None:
    inputs = inputs_of(size, precision, make)
    with tf32(allowed=precision == "tf32"):
        towards = upstream(LLTM(*inputs))
        results, found = gradients(LLTM.function, inputs, towards)
        eager_results, eager_found = gradients(LLTM.reference, inputs, towards)
    doubles = tuple(tensor.double() for tensor in inputs)
    exact, exact_found = gradients(LLTM.reference, doubles, tuple(t.double() for t in towards))
    for name, *values in zip(
        (*LLTM.results, *LLTM.arguments),
        (*results, *found),
        (*eager_results, *eager_found),
        (*exact, *exact_found),
        strict=True,
    ):
        actual, eager, right = (value.detach() for value in values)
        assert_as_accurate_as_eager(name, actual, eager, right, LLTM.ulps)


@pytest.mark.gpu
@by_precision
@by_size
def test_same_bits_on_every_run(size: tuple[int, int, int], precision: str) -> None:
    input, weights, bias, *state = inputs_of(size, precision)
    parameters = weights.requires_grad_(), bias.requires_grad_()
    runs = []
    with tf32(allowed=precision == "tf32"):
        for _ in range(3):
            results = extops.lltm(input, *parameters, *state)
            runs.append((*results, *torch.autograd.grad(results, parameters, state)))
    for run in runs[1:]:
        assert all(map(torch.equal, runs[0], run))


@pytest.mark.gpu
@pytest.mark.parametrize("gemms", (True, False))
@pytest.mark.parametrize("layers", (True, False))
@pytest.mark.parametrize("steps", (2, 300))
@pytest.mark.parametrize("is_compiled", (False, True))
def test_all_gemms_of_a_layer_follow_cudnns_switch(
    is_compiled: bool, steps: int, layers: bool, gemms: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TF32 has no digit for 1 + 2**-12: it rounds that to 1."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", layers)
    layer = extops.RNN(64, 256, nonlinearity="relu", bias=False).cuda()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.weight_ih_l0[:64] = torch.eye(64)
        layer.weight_hh_l0[64:128, :64] = torch.eye(64)
    fine = 1 + 2**-12
    input = torch.full((steps, 5, 64), fine, device="cuda", requires_grad=True)
    torch.compiler.reset()
    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if is_compiled else layer
    with tf32(allowed=gemms):
        output, _ = run(input)
        towards = torch.zeros_like(output)
        towards[..., :64] = fine
        of_input, of_ih, _ = torch.autograd.grad(
            output, (input, layer.weight_ih_l0, layer.weight_hh_l0), towards
        )
    expected = 1 if layers else fine
    assert (output[..., :64] == expected).all()
    assert (output[1:, :, 64:128] == expected).all()
    assert (of_input == expected).all()
    torch.testing.assert_close(
        of_ih[:64], torch.full_like(of_ih[:64], steps * 5 * expected**2), rtol=2**-20, atol=0
    )


@pytest.mark.gpu
def test_tensors_that_start_between_chunks() -> None:
    """Copies of whole tiles cannot begin there, so other kernels are to do it."""
    inputs = inputs_of(SIZES["units_of_24"], "bfloat16")
    moved = tuple(tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape) for tensor in inputs)
    for tensor, value in zip(moved, inputs, strict=True):
        tensor.copy_(value)
        assert tensor.data_ptr() % 16 != 0
    towards = upstream(LLTM(*inputs))
    eager = flattened(gradients(LLTM.reference, inputs, towards))
    doubles = [tuple(x.double() for x in tensors) for tensors in (inputs, towards)]
    exact = flattened(gradients(LLTM.reference, *doubles))
    leaves = tuple(tensor.requires_grad_() for tensor in moved)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        results = LLTM(*leaves)
        actual = flattened((results, torch.autograd.grad(results, leaves, towards)))
        torch.cuda.synchronize()
    names = *LLTM.results, *LLTM.arguments
    for values in zip(names, actual, eager, exact, strict=True):
        assert_as_accurate_as_eager(*values, LLTM.ulps)
    built_for = " ".join(build_info().get("architectures", ["9.0"]))
    if torch.cuda.get_device_capability() == (9, 0) and "9.0" in built_for:
        kernels = " ".join(event.key for event in profile.key_averages())
        # Its 16-byte copies of tiles need an aligned copy first, which is far cheaper than other kernels.
        assert "split_k_kernel" in kernels


def flattened(results_and_gradients: tuple[Tensors, Tensors]) -> Tensors:
    results, found = results_and_gradients
    return *(result.detach() for result in results), *found


@pytest.mark.gpu
@by_size
def test_no_nan_becomes_infinite_in_tf32(size: tuple[int, int, int]) -> None:
    """Not even one whose payload is in the bits that TF32 lacks, and which no other NaN hides."""
    input, _, _, old_h, _ = inputs_of(size, "tf32")
    batch, _, state = size
    shapes = (batch, state), (batch, state), (batch, 3 * state), (batch, state)
    grad_h, grad_cell, gates, new_cell = (torch.randn(shape, device="cuda") for shape in shapes)
    poisoned = torch.tensor(0x7F800001, dtype=torch.int32, device="cuda").view(torch.float32)
    old_h[0, 0] = poisoned
    *_, grad_weights, _ = torch.ops.extops.lltm_step_parameters_backward(
        grad_h, grad_cell, input, old_h, gates, new_cell, allow_tf32=True
    )
    assert grad_weights[:, 0].isnan().all()
    assert grad_weights[:, 1:].isfinite().all()


@by_device
def test_float16_products_beyond_its_range_that_the_bias_takes_back(device: str) -> None:
    input, weights = torch.full((1, 2), 330.0), torch.zeros(12, 6)
    weights[8:, 4:] = 100.0
    bias = torch.tensor([-5.0, 0.0, -64000.0]).repeat_interleave(4)
    state = torch.zeros(1, 4)
    inputs = tuple(x.to(device, torch.float16) for x in (input, weights, bias, state, state))
    results = LLTM(*inputs)
    doubles = tuple(tensor.double() for tensor in inputs)
    _, new_cell = LLTM.reference(*doubles)
    torch.testing.assert_close(results[1].double(), new_cell, rtol=2e-3, atol=0)
    _, found = gradients(LLTM.function, inputs, upstream(results))
    assert all(gradient.isfinite().all() for gradient in found)


@by_device
@pytest.mark.parametrize("rows", [300, 5_000, 600_000])
def test_sums_over_any_number_of_rows(rows: int, device: str) -> None:
    """Equal rows, whose rounding errors do not cancel."""
    row = (torch.tensor([x]) for x in (0.1, 0.3, 0.7))
    input, old_h, old_cell = (x.to(device).expand(rows, 1).contiguous() for x in row)
    weights, bias = torch.tensor([[0.3, -0.2]] * 3, device=device), torch.zeros(3, device=device)
    inputs = input, weights, bias, old_h, old_cell
    towards = tuple(torch.full_like(old_cell, x) for x in (0.9, 1.1))
    _, actual = gradients(LLTM.function, inputs, towards)
    _, eager = gradients(LLTM.reference, inputs, towards)
    doubles = [tuple(x.double() for x in tensors) for tensors in (inputs, towards)]
    _, exact = gradients(LLTM.reference, *doubles)
    for name in ("weights", "bias"):
        place = LLTM.arguments.index(name)
        assert_as_accurate_as_eager(name, actual[place], eager[place], exact[place], LLTM.ulps)


@by_device
def test_sums_over_many_columns(device: str) -> None:
    features = 8_000
    inputs = tuple(
        torch.full(shape, value, device=device)
        for shape, value in (((4, features), 0.1), ((3, 1 + features), 0.0015), ((3,), 0.3))
    )
    inputs = *inputs, *(torch.zeros(4, 1, device=device) for _ in range(2))
    exact = LLTM.reference(*(tensor.double() for tensor in inputs))
    results = zip(LLTM.results, LLTM(*inputs), LLTM.reference(*inputs), exact, strict=True)
    for name, actual, eager, right in results:
        assert_as_accurate_as_eager(name, actual, eager, right, LLTM.ulps)


def error(inputs: Tensors) -> float:
    """How far float32 is off, forward and backward."""
    towards = upstream(LLTM(*inputs))
    results, found = gradients(LLTM.function, inputs, towards)
    doubles = tuple(tensor.double() for tensor in inputs)
    exact, right = gradients(LLTM.reference, doubles, tuple(tensor.double() for tensor in towards))
    pairs = zip((*results, *found), (*exact, *right), strict=True)
    return max(((x - y).abs().max() / y.abs().max()).item() for x, y in pairs)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(16, 32, 128), (64, 512, 512)], ids=str)
def test_float32_is_strict_where_tf32_is_not_allowed(size: tuple[int, int, int]) -> None:
    inputs = inputs_of(size, "tf32")
    with tf32(allowed=False):
        assert error(inputs) < 1e-5


@pytest.mark.gpu
def test_tf32_is_used_where_it_is_allowed() -> None:
    """By extops' kernels or the library's, on GPUs that have it."""
    inputs = inputs_of(SIZES["units_of_24"], "tf32")
    with tf32(allowed=True):
        lost = error(inputs)
    assert lost < 1e-2
    assert (lost > 1e-5) == (torch.cuda.get_device_capability() >= (8, 0))


# -- torch's switch, on any machine --------------------------------------------------------------


def switch_by_precision() -> None:
    torch.set_float32_matmul_precision("high")


def switch_by_flag() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


def switch_by_new_flag() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"


@pytest.fixture
def switch() -> Iterator[None]:
    """Puts torch's switch back as it was, whatever moved it."""
    yield
    torch.set_float32_matmul_precision("highest")


def allowed_when_traced(inputs: Tensors) -> bool:
    """What a compiled call hands to the operator."""
    seen: list[bool] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(
            node.kwargs["allow_tf32"]
            for node in module.graph.nodes
            if node.target is torch.ops.extops.lltm_step.default
        )
        return module.forward

    torch.compiler.reset()
    torch.compile(extops.lltm, fullgraph=True, backend=backend)(*inputs)
    (allowed,) = seen
    return allowed


@pytest.mark.usefixtures("switch")
@pytest.mark.parametrize(
    "turn_on",
    [
        pytest.param(switch_by_precision, id="set_float32_matmul_precision"),
        pytest.param(switch_by_flag, id="allow_tf32"),
        pytest.param(
            switch_by_new_flag,
            id="fp32_precision",
            marks=pytest.mark.skipif(
                not hasattr(torch._C, "_get_fp32_precision_getter"),
                reason="this torch has no fp32_precision",
            ),
        ),
    ],
)
def test_operators_see_torchs_switch(turn_on: Any) -> None:
    from extops import _private

    inputs = LLTM.inputs("small", dtype=torch.float32)
    assert not _private.allows_tf32()
    assert allowed_when_traced(inputs) is False
    turn_on()
    assert _private.allows_tf32()
    assert allowed_when_traced(inputs) is True


def test_tf32_means_nothing_on_a_cpu() -> None:
    inputs = LLTM.inputs("tutorial", dtype=torch.float32)
    expected = LLTM(*inputs)
    with tf32(allowed=True):
        for result, value in zip(LLTM(*inputs), expected, strict=True):
            assert torch.equal(result, value)


def test_the_compiled_code_follows_the_switch() -> None:
    """Compiled once for each of its positions, and right in both."""
    inputs = LLTM.inputs("small", dtype=torch.float32)
    expected: tuple[Tensor, ...] = LLTM(*inputs)
    torch.compiler.reset()
    compiled = torch.compile(extops.lltm, fullgraph=True, backend="aot_eager")
    for allowed in (False, True, False):
        with tf32(allowed=allowed):
            torch.testing.assert_close(compiled(*inputs), expected)


@by_device
@by_dtype
def test_sums_of_columns(dtype: torch.dtype, device: str) -> None:
    """In full precision whatever the switch: TF32 would round each of these numbers down. And in no more memory."""
    matrix = torch.full((20_000, 64), 1 + 2**-12, dtype=dtype, device=device)
    matrix[:, 1] = 0
    with tf32(True):
        found = _gemm.column_sums(matrix)
    torch.testing.assert_close(found.double(), matrix.double().sum(0), rtol=2**-8, atol=0)
    if dtype.itemsize > 2:
        torch.testing.assert_close(found.double(), matrix.double().sum(0), rtol=1e-5, atol=0)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        _gemm.column_sums(matrix)
        assert torch.cuda.max_memory_allocated() - before < matrix.nbytes / 4
