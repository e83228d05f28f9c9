"""Mixed precision with torch.autocast: what nn.LSTMCell does on a GPU, on either device."""

from __future__ import annotations

import pytest
import torch

import extops
from operators import (
    ELEMENTWISE_MULT,
    GPU,
    LLTM,
    ROUND_STE,
    Operator,
    by_device,
    dtype_name,
    upstream,
)

by_autocast_dtype = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16], ids=dtype_name
)


@by_autocast_dtype
@by_device
def test_results_have_the_autocast_dtype(device: str, dtype: torch.dtype) -> None:
    inputs = LLTM.inputs("odd", device, torch.float32)
    expected = LLTM(*(tensor.to(dtype) for tensor in inputs))
    with torch.autocast(device, dtype):
        results = LLTM(*inputs)
    for result, same in zip(results, expected, strict=True):
        assert result.dtype == dtype
        torch.testing.assert_close(result, same)


@by_autocast_dtype
@by_device
def test_gradients_have_the_dtype_of_the_inputs(device: str, dtype: torch.dtype) -> None:
    """The backward pass runs outside of autocast, as PyTorch recommends, or inside."""
    leaves = LLTM.inputs("odd", device, torch.float32, requires_grad=True)
    with torch.autocast(device, dtype):
        results = LLTM(*leaves)
        towards = upstream(results)
        inside = torch.autograd.grad(results, leaves, towards, retain_graph=True)
    outside = torch.autograd.grad(results, leaves, towards)
    exact = torch.autograd.grad(LLTM.eager(*leaves), leaves, [tensor.float() for tensor in towards])
    for name, *found, expected in zip(LLTM.arguments, inside, outside, exact, strict=True):
        for gradient in found:
            assert gradient.dtype == torch.float32, name
            error = (gradient - expected).abs().max() / expected.abs().max()
            assert error < 8 * torch.finfo(dtype).eps, name


@by_autocast_dtype
@by_device
def test_module(device: str, dtype: torch.dtype) -> None:
    """A step of training: half precision in the middle, parameters and their gradients whole."""
    before = torch.nn.Linear(6, 5, device=device)
    module = extops.LLTM(5, 4, device=device)
    state = torch.zeros(3, 4, device=device), torch.zeros(3, 4, device=device)
    with torch.autocast(device, dtype):
        new_h, new_cell = module(before(torch.randn(3, 6, device=device)), state)
        assert new_h.dtype == new_cell.dtype == dtype
        new_h, new_cell = module(torch.randn(3, 5, device=device), (new_h, new_cell))
    (new_h.float().sum() + new_cell.float().sum()).backward()
    for parameter in (*module.parameters(), *before.parameters()):
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32


@by_autocast_dtype
@pytest.mark.parametrize("device", [GPU])
def test_as_lstm_cell(device: str, dtype: torch.dtype) -> None:
    """The same dtypes in and out as PyTorch's own cell, for every mixture of inputs."""
    theirs = torch.nn.LSTMCell(5, 4, device=device)
    ours = extops.LLTM(5, 4, device=device)
    input_dtypes = (torch.float32, dtype)
    for input_dtype in input_dtypes:
        for state_dtype in input_dtypes:
            input = torch.randn(3, 5, device=device, dtype=input_dtype)
            state = [torch.randn(3, 4, device=device, dtype=state_dtype) for _ in range(2)]
            with torch.autocast(device, dtype):
                expected = [tensor.dtype for tensor in theirs(input, tuple(state))]
                assert [tensor.dtype for tensor in ours(input, tuple(state))] == expected


@by_device
def test_double_is_left_alone(device: str) -> None:
    inputs = LLTM.inputs("small", device)
    with torch.autocast(device, torch.bfloat16):
        results = LLTM(*inputs)
    for result, expected in zip(results, LLTM(*inputs), strict=True):
        assert torch.equal(result, expected)


@by_device
def test_disabled_within(device: str) -> None:
    inputs = LLTM.inputs("small", device, torch.float32)
    with torch.autocast(device, torch.bfloat16), torch.autocast(device, enabled=False):
        results = LLTM(*inputs)
    for result, expected in zip(results, LLTM(*inputs), strict=True):
        assert torch.equal(result, expected)


@by_device
@pytest.mark.parametrize("operator", [ROUND_STE, ELEMENTWISE_MULT], ids=lambda it: it.name)
def test_elementwise_operators_keep_their_dtype(operator: Operator, device: str) -> None:
    for dtype in (torch.float32, torch.float16):
        leaves = operator.inputs("small", device, dtype, requires_grad=True)
        with torch.autocast(device, torch.bfloat16):
            (result,) = operator(*leaves)
        assert result.dtype == dtype
        for gradient in torch.autograd.grad(result.sum(), leaves):
            assert gradient.dtype == dtype


@by_device
@pytest.mark.usefixtures("dynamo")
def test_compiled(device: str) -> None:
    module = extops.LLTM(5, 4, device=device)
    input, state = torch.randn(3, 5, device=device), torch.randn(2, 3, 4, device=device)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    found = []
    for function in (module, compiled):
        module.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            results = function(input, (state[0], state[1]))
        torch.stack([result.float().sum() for result in results]).sum().backward()
        found.append([*results, *(parameter.grad for parameter in module.parameters())])
    torch.testing.assert_close(*found)
