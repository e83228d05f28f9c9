"""Mixed precision with torch.autocast: what nn.LSTMCell does on a GPU, on either device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import extops
from operators import (
    ELEMENTWISE_MULT,
    GPU,
    LLTM,
    REGISTERED,
    ROUND_STE,
    Operator,
    Tensors,
    as_tuple,
    by_case,
    by_device,
    by_dtype,
    dtype_name,
    maker,
    needs_inductor,
    upstream,
)

AUTOCAST_DTYPES = (torch.bfloat16, torch.float16)
by_autocast_dtype = pytest.mark.parametrize("dtype", AUTOCAST_DTYPES, ids=dtype_name)


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
            assert_near(gradient, expected, dtype)


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


@by_autocast_dtype
@by_device
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("size", [(168, 128, 20, 40), (7, 33, 24, 72)], ids=str)
@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_a_decoder_goes_on_from_its_states(
    name: str, size: tuple[int, ...], layers: int, device: str, dtype: torch.dtype
) -> None:
    """A layer over the past, then step by step from states that have the dtype of the region."""
    time, batch, features, units = size
    torch.manual_seed(0)
    exact = getattr(torch.nn, name)(features, units, layers, batch_first=True)
    layer = getattr(extops, name)(features, units, layers, batch_first=True, device=device)
    layer.load_state_dict(exact.state_dict())
    exact = exact.double().to(device)
    state = None
    for call, steps in enumerate([time, 1, 1, 1]):
        input = torch.randn(batch, steps, features, device=device)
        before = state if state is None or name == "GRU" else tuple(x.double() for x in state)
        before = before.double() if isinstance(before, Tensor) else before
        with torch.autocast(device, dtype):
            output, state = layer(input, state)
        found = output, *as_tuple(state)
        output, last = exact(input.double(), before)
        for result, x, y in zip(
            ("output", "h_n", "c_n"), found, (output, *as_tuple(last)), strict=False
        ):
            error = (x.double() - y).abs().max().item()
            assert error < 0.03, f"{result} of call {call}: off by {error:.3g}"


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


# -- calls that nobody cast: of registered operators, as captured programs make them -------------


@pytest.mark.every(4, "name", "dtype")
@by_dtype
@by_device
@pytest.mark.parametrize("name", REGISTERED)
def test_a_registered_operator_computes_in_the_dtype_of_its_arguments(
    name: str, device: str, dtype: torch.dtype
) -> None:
    operator = getattr(torch.ops.extops, name).default
    for call in REGISTERED[name](maker(device, dtype)):
        expected = operator(*call.arguments, **call.keywords)
        for autocast_dtype in AUTOCAST_DTYPES:
            with torch.autocast(device, autocast_dtype):
                found = operator(*call.arguments, **call.keywords)
            if expected is not None:  # which an operator that writes into an argument returns
                assert_same(as_tuple(found), as_tuple(expected))


def assert_same(found: Tensors, expected: Tensors) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def exported(module: torch.nn.Module, inputs: Tensors, folder: Path) -> Callable[..., Any]:
    return torch.export.export(module, inputs).module()


def traced(module: torch.nn.Module, inputs: Tensors, folder: Path) -> Callable[..., Any]:
    # torch compares the two, which take different kernels: they may differ in the last bits of 16.
    tolerance = max(1e-5, 4 * torch.finfo(inputs[0].dtype).eps)
    found: Callable[..., Any] = torch.jit.trace(module, inputs, check_tolerance=tolerance)
    return found


def compiled_ahead(module: torch.nn.Module, inputs: Tensors, folder: Path) -> Callable[..., Any]:
    if torch.__version__ < (2, 6):
        pytest.skip(
            f"torch {torch.__version__} cannot load AOTInductor packages; 2.6 and newer can"
        )
    needs_inductor()
    package = torch._inductor.aoti_compile_and_package(
        torch.export.export(module, inputs), package_path=str(folder / "model.pt2")
    )
    found: Callable[..., Any] = torch._inductor.aoti_load_package(package)
    return found


class Ours(torch.nn.Module):
    """Our operators alone, of sizes whose GEMMs are a library's on the CPU."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.cell = extops.LLTM(160, 160, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Tensors:
        state = self.cell(input)
        steps = extops.elementwise_mult(input, state[0]).unsqueeze(0)
        output, (h, c) = extops.lltm_sequence(steps, state, self.cell.weights, self.cell.bias)
        return output, h, c


@by_dtype
@by_device
@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize(
    "capture", [exported, traced, pytest.param(compiled_ahead, marks=pytest.mark.slow)]
)
def test_a_captured_program(
    capture: Callable[..., Any], device: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """It computes in the dtype in which it was captured."""
    module = Ours(device, dtype).requires_grad_(False)
    input = torch.randn(300, 160, device=device, dtype=dtype)
    program = capture(module, (input,), tmp_path)
    expected = as_tuple(program(input))
    for autocast_dtype in AUTOCAST_DTYPES:
        with torch.autocast(device, autocast_dtype):
            assert_same(as_tuple(program(input)), expected)


class Mixed(torch.nn.Module):
    """Our operators between GEMMs of PyTorch, which autocast casts in a captured program."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.before = torch.nn.Linear(6, 5, device=device)
        self.cell = extops.LLTM(5, 4, device=device)
        self.layer = extops.LLTMLayer(4, 4, num_layers=2, bidirectional=True, device=device)
        self.after = torch.nn.Linear(8, 4, device=device)

    def forward(self, input: Tensor) -> Tensor:
        h, c = self.cell(self.before(input))
        output, _ = self.layer(torch.stack((h, c)))
        return extops.elementwise_mult(self.after(output), h)


@by_device
@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("capture", [exported, traced])
def test_a_captured_program_beside_products_of_torch(
    capture: Callable[..., Any], device: str, tmp_path: Path
) -> None:
    """Tensors of several dtypes meet in our operators, which compute in the widest."""
    module = Mixed(device).requires_grad_(False)
    input = torch.randn(3, 6, device=device)
    program = capture(module, (input,), tmp_path)
    exact = module(input)
    for dtype in AUTOCAST_DTYPES:
        with torch.autocast(device, dtype):
            found = program(input)
        assert found.dtype == torch.float32
        assert_near(found, exact, dtype)


def assert_near(found: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    error = (found - exact).abs().max() / exact.abs().max()
    assert error < 8 * torch.finfo(dtype).eps


# -- a backward under another autocast than its forward ------------------------------------------


@pytest.mark.every(3, "operator", "case")
@by_device
@by_case
def test_the_autocast_of_the_forward_holds(operator: Operator, case: str, device: str) -> None:
    """A region around the backward of a call that was made outside of it changes no gradient."""
    leaves = operator.inputs(case, device, torch.float32, requires_grad=True)
    results = operator(*leaves)
    towards = upstream(results)
    once = torch.autograd.grad(results, leaves, towards, retain_graph=True)
    twice = torch.autograd.grad(results, leaves, towards, create_graph=True)
    for autocast_dtype in AUTOCAST_DTYPES:
        with torch.autocast(device, autocast_dtype):
            found_once = torch.autograd.grad(results, leaves, towards, retain_graph=True)
            found_twice = torch.autograd.grad(results, leaves, towards, create_graph=True)
        assert_same(found_once, once)
        assert_same(found_twice, twice)


@by_device
@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_autocast_of_a_compiled_forward_holds(backend: str, device: str) -> None:
    """The backward is compiled under another autocast than the forward, and must take what that saved."""
    if backend == "inductor":
        needs_inductor()
    module = Mixed(device)
    leaves = torch.randn(3, 6, device=device, requires_grad=True), *module.parameters()
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    expected = torch.autograd.grad(module(leaves[0]).sum(), leaves)
    for dtype in AUTOCAST_DTYPES:
        torch._dynamo.reset()
        loss = compiled(leaves[0]).sum()
        with torch.autocast(device, dtype):
            found = torch.autograd.grad(loss, leaves)
        for gradient, exact in zip(found, expected, strict=True):
            if backend == "inductor":
                torch.testing.assert_close(gradient, exact, rtol=1e-5, atol=1e-5)
            else:  # where PyTorch's own GEMMs are cast
                assert_near(gradient, exact, dtype)


@by_device
@pytest.mark.usefixtures("dynamo")
def test_gradients_of_a_compiled_cell_are_not_cast(device: str) -> None:
    """A graph of our operators alone, without a GEMM of PyTorch."""
    leaves = LLTM.inputs("odd", device, torch.float32, requires_grad=True)
    compiled = torch.compile(LLTM.function, fullgraph=True, backend="aot_eager")
    results = compiled(*leaves)
    towards = upstream(results)
    expected = torch.autograd.grad(results, leaves, towards, retain_graph=True)
    for dtype in AUTOCAST_DTYPES:
        with torch.autocast(device, dtype):
            assert_same(torch.autograd.grad(results, leaves, towards, retain_graph=True), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_parameters_of_a_layer_are_cast_by_one_kernel(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the input is: the host takes longer to launch the casts than the GPU for the layer."""
    monkeypatch.setenv("EXTOPS_CHOICES", "extops")
    model = extops.accelerate(torch.nn.LSTM(16, 32, num_layers=2).cuda().eval())
    input = torch.randn(5, 4, 16, device="cuda", dtype=dtype)

    def kernels(model: torch.nn.Module, input: Tensor) -> int:
        model(input)  # which loads them
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            model(input)
            torch.cuda.synchronize()
        return sum(x.count for x in profile.key_averages() if x.device_time_total > 0)

    with torch.no_grad():
        with torch.autocast("cuda", torch.bfloat16):
            number = kernels(model, input)
        of_layers = kernels(copy.deepcopy(model).half(), input.half())
    assert of_layers > 0
    assert number - of_layers == 1 + (dtype is torch.bfloat16)
