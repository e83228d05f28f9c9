"""The module `extops.LLTM`, a drop-in for the class of PyTorch's C++/CUDA extension tutorial."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import extops
from operators import LLTM, Tensors, by_device

State = tuple[Tensor, Tensor]


class TutorialLLTM(nn.Module):
    """The module as the tutorial writes it, in plain PyTorch."""

    def __init__(self, input_features: int, state_size: int) -> None:
        super().__init__()
        self.input_features = input_features
        self.state_size = state_size
        self.weights = nn.Parameter(torch.empty(3 * state_size, input_features + state_size))
        self.bias = nn.Parameter(torch.empty(3 * state_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        stdv = 1.0 / math.sqrt(self.state_size)
        for weight in self.parameters():
            weight.data.uniform_(-stdv, +stdv)

    def forward(self, input: Tensor, state: State) -> State:
        old_h, old_cell = state
        X = torch.cat([old_h, input], dim=1)
        gates = F.linear(X, self.weights, self.bias).chunk(3, dim=1)
        input_gate = torch.sigmoid(gates[0])
        output_gate = torch.sigmoid(gates[1])
        candidate_cell = F.elu(gates[2])
        new_cell = old_cell + candidate_cell * input_gate
        new_h = torch.tanh(new_cell) * output_gate
        return new_h, new_cell


def module_inputs(device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, State]:
    """Inputs for a module of 5 features and a state of 4."""
    input, _, _, h, c = LLTM.inputs("small", device, dtype)
    return input, (h, c)


def outputs_and_gradients(module: nn.Module, input: Tensor, state: State) -> Tensors:
    module.zero_grad()
    new_h, new_cell = module(input, state)
    (new_h.sum() + 2 * new_cell.sum()).backward()
    return new_h, new_cell, *(parameter.grad for parameter in module.parameters())


@by_device
def test_state_dicts_are_the_tutorials(device: str) -> None:
    theirs = TutorialLLTM(5, 4).to(device)
    ours = extops.LLTM(5, 4, device=device)
    input, state = module_inputs(device)

    ours.load_state_dict(theirs.state_dict())
    expected = outputs_and_gradients(theirs, input, state)
    torch.testing.assert_close(outputs_and_gradients(ours, input, state), expected)

    another = extops.LLTM(5, 4, device=device)
    theirs.load_state_dict(another.state_dict())
    expected = outputs_and_gradients(theirs, input, state)
    torch.testing.assert_close(outputs_and_gradients(another, input, state), expected)


def test_parameters() -> None:
    module = extops.LLTM(5, 4)
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    assert shapes == {"weights": (12, 9), "bias": (12,)}
    assert list(module.state_dict()) == ["weights", "bias"]
    assert (module.input_features, module.state_size) == (5, 4)


@pytest.mark.parametrize("state_size", [1, 4, 100])
def test_initialisation(state_size: int) -> None:
    """Uniform in +-1/sqrt(state_size): within the bound, and close to it on either side."""
    module = extops.LLTM(300, state_size)
    bound = 1 / math.sqrt(state_size)
    for parameter in module.parameters():
        assert parameter.abs().max().item() <= bound
    assert module.weights.max().item() > 0.95 * bound
    assert module.weights.min().item() < -0.95 * bound
    assert abs(module.weights.mean().item()) < 0.1 * bound
    deviation = bound / math.sqrt(3)
    assert abs(module.weights.std().item() / deviation - 1) < 0.1
    before = module.weights.clone()
    module.reset_parameters()
    assert not torch.equal(module.weights, before)


def test_the_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert extops.LLTM(5, 4).weights.dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_on_meta_then_materialised() -> None:
    module = extops.LLTM(5, 4, device="meta")
    assert module.weights.is_meta
    module.to_empty(device="cpu").reset_parameters()
    assert all(bool(torch.isfinite(result).all()) for result in module(*module_inputs()))


@by_device
@pytest.mark.parametrize("make", [extops.LLTM, extops.reference.LLTM])
def test_without_a_state(make: type[nn.Module], device: str) -> None:
    """It counts as zeros, as for nn.LSTMCell."""
    module = make(5, 4, device=device)
    input = torch.randn(3, 5, device=device)
    zeros = torch.zeros(3, 4, device=device)
    torch.testing.assert_close(module(input), module(input, (zeros, zeros)), rtol=0, atol=0)


def test_repr_shows_the_sizes() -> None:
    text = repr(extops.LLTM(37, 41))
    assert text.startswith("LLTM(") and "37" in text and "41" in text


@by_device
def test_the_functional_form(device: str) -> None:
    module = extops.LLTM(5, 4, device=device)
    input, (h, c) = module_inputs(device)
    results = module(input, (h, c))
    expected = extops.lltm(input, module.weights, module.bias, h, c)
    assert all(map(torch.equal, results, expected))


@by_device
def test_round_module(device: str) -> None:
    module = extops.RoundSTE()
    input = torch.tensor([-0.5, 0.2, 0.5, 1.5], device=device, requires_grad=True)
    result = module(input)
    result.sum().backward()
    assert result.tolist() == [0.0, 0.0, 1.0, 2.0]
    assert input.grad is not None and input.grad.tolist() == [1.0] * 4
    assert list(module.state_dict()) == [] and repr(module) == "RoundSTE()"
    assert type(pickle.loads(pickle.dumps(module))) is extops.RoundSTE
