"""Values and gradients that were computed without PyTorch: `data/golden.py`, `data/golden.npz`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import extops
import extops.reference
from data import golden as generator
from operators import LLTM, by_device, dtype_name

KEPT = np.load(generator.FILE)
GOLDEN = generator.golden_arrays() | dict(KEPT)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}

by_golden_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=dtype_name)
by_case = pytest.mark.parametrize("case", generator.CASES)
by_implementation = pytest.mark.parametrize(
    "function",
    [
        pytest.param(extops.lltm, id="fused"),
        pytest.param(extops.reference.lltm, id="reference"),
    ],
)


def golden(key: str, device: str, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(GOLDEN[key]).to(device, dtype)


def assert_close(name: str, actual: Tensor, expected: Tensor) -> None:
    """Compares relative to the largest expected value."""
    assert actual.shape == expected.shape, name
    tolerance = TOLERANCE[actual.dtype]
    scale = expected.abs().max().item()
    torch.testing.assert_close(
        actual,
        expected,
        rtol=0,
        atol=tolerance * scale,
        msg=lambda message: f"{name}: {message}",
    )


def test_the_generator_makes_the_file() -> None:
    made = generator.kept(generator.golden_arrays())
    assert made.keys() == set(KEPT.files), "renew the file with `python tests/data/golden.py`"
    for key, array in made.items():
        assert (array.shape, array.dtype) == (KEPT[key].shape, KEPT[key].dtype), key
        # numpy's GEMMs differ in their last bits from processor to processor.
        finite = np.abs(KEPT[key][np.isfinite(KEPT[key])])
        tolerance = 1e-13 * finite.max(initial=0)
        np.testing.assert_allclose(array, KEPT[key], rtol=0, atol=tolerance, err_msg=key)


@by_golden_dtype
@by_device
@by_case
@by_implementation
def test_lltm(function: Callable[..., Any], case: str, device: str, dtype: torch.dtype) -> None:
    inputs = [
        golden(f"lltm/{case}/{name}", device, dtype).requires_grad_() for name in LLTM.arguments
    ]
    upstream = [golden(f"lltm/{case}/grad_{name}", device, dtype) for name in ("h", "cell")]

    results = function(*inputs)
    gradients = torch.autograd.grad(results, inputs, upstream)

    for name, result in zip(LLTM.results, results, strict=True):
        assert_close(name, result, golden(f"lltm/{case}/{name}", device, dtype))
    for name, gradient in zip(LLTM.arguments, gradients, strict=True):
        assert_close(f"d_{name}", gradient, golden(f"lltm/{case}/d_{name}", device, dtype))


@by_golden_dtype
@by_device
def test_sequence(device: str, dtype: torch.dtype) -> None:
    names = ("input", "h0", "c0", "weights", "bias")
    leaves = [golden(f"sequence/{name}", device, dtype).requires_grad_() for name in names]
    input, h_0, c_0, weights, bias = leaves
    upstream = [golden(f"sequence/grad_{name}", device, dtype) for name in ("output", "c_n")]

    output, (h_n, c_n) = extops.lltm_sequence(input, (h_0, c_0), weights, bias)
    gradients = torch.autograd.grad([output, c_n], leaves, upstream)

    assert_close("output", output, golden("sequence/output", device, dtype))
    assert_close("h_n", h_n, golden("sequence/output", device, dtype)[-1])
    assert_close("c_n", c_n, golden("sequence/c_n", device, dtype))
    for name, gradient in zip(names, gradients, strict=True):
        assert_close(f"d_{name}", gradient, golden(f"sequence/d_{name}", device, dtype))


@by_golden_dtype
@by_device
@pytest.mark.parametrize(
    "function", [extops.round_ste, extops.reference.round_ste], ids=["fused", "reference"]
)
def test_round_ste(function: Callable[..., Any], device: str, dtype: torch.dtype) -> None:
    input = golden("round/input", "cpu", torch.float64)
    exactly_stored = input.isnan() | (input.to(dtype).double() == input)
    result = function(input[exactly_stored].to(device, dtype))
    expected = golden("round/output", device, dtype)[exactly_stored.to(device)]
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
