"""The transforms of torch.func: vmap, grad, jvp, and what is composed of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import extops
from operators import (
    ELEMENTWISE_MULT,
    LLTM,
    Operator,
    Tensors,
    as_tuple,
    by_device,
    by_differentiable_operator,
    by_operator,
)

BATCH = 3


def stacked_inputs(operator: Operator, device: str) -> Tensors:
    """Inputs of several calls, stacked along a new first dimension."""
    batch = [operator.inputs("small", device) for _ in range(BATCH)]
    return tuple(torch.stack(tensors) for tensors in zip(*batch, strict=True))


def loss_of(function: Callable[..., Tensor | Tensors]) -> Callable[..., Tensor]:
    """A scalar that weighs every element of the results differently."""

    def loss(*inputs: Tensor) -> Tensor:
        total = inputs[0].new_zeros(())
        for result in as_tuple(function(*inputs)):
            weights = torch.linspace(-1, 2, result.numel(), dtype=result.dtype)
            total = total + (result * weights.to(result.device).view(result.shape)).sum()
        return total

    return loss


def assert_same(actual: object, expected: object) -> None:
    torch.testing.assert_close(actual, expected)


@by_device
@by_operator
def test_vmap(operator: Operator, device: str) -> None:
    inputs = stacked_inputs(operator, device)
    expected = [operator(*(tensor[place] for tensor in inputs)) for place in range(BATCH)]
    actual = as_tuple(vmap(operator.function)(*inputs))
    assert_same(actual, tuple(torch.stack(results) for results in zip(*expected, strict=True)))


@by_device
@by_operator
def test_vmap_over_each_input_alone(operator: Operator, device: str) -> None:
    stacked = stacked_inputs(operator, device)
    for place in range(len(stacked)):
        in_dims = tuple(0 if place == other else None for other in range(len(stacked)))
        inputs = [
            tensor if dim == 0 else tensor[0] for tensor, dim in zip(stacked, in_dims, strict=True)
        ]
        actual = vmap(operator.function, in_dims=in_dims)(*inputs)
        assert_same(actual, vmap(operator.reference, in_dims=in_dims)(*inputs))


@by_device
def test_vmap_over_another_dimension(device: str) -> None:
    a, b = torch.randn(4, 5, device=device), torch.randn(5, 4, device=device)
    actual = vmap(extops.elementwise_mult, in_dims=(0, 1), out_dims=1)(a, b)
    assert_same(actual, a.t() * b)


@by_device
def test_vmap_of_the_batch(device: str) -> None:
    """A cell written for one row, mapped over the rows."""
    input, weights, bias, h, c = LLTM.inputs("small", device)

    def row(input: Tensor, h: Tensor, c: Tensor) -> Tensors:
        new_h, new_cell = extops.lltm(input[None], weights, bias, h[None], c[None])
        return new_h[0], new_cell[0]

    assert_same(vmap(row)(input, h, c), LLTM(input, weights, bias, h, c))


@by_device
@by_operator
def test_grad(operator: Operator, device: str) -> None:
    inputs = operator.inputs("small", device)
    places = tuple(range(len(inputs)))
    actual = grad(loss_of(operator.function), argnums=places)(*inputs)
    assert_same(actual, grad(loss_of(operator.reference), argnums=places)(*inputs))


@by_device
@by_operator
def test_gradients_per_sample(operator: Operator, device: str) -> None:
    """vmap of grad."""
    inputs = stacked_inputs(operator, device)
    places = tuple(range(len(inputs)))
    actual = vmap(grad(loss_of(operator.function), argnums=places))(*inputs)
    assert_same(actual, vmap(grad(loss_of(operator.reference), argnums=places))(*inputs))


@by_device
@by_operator
def test_vjp(operator: Operator, device: str) -> None:
    inputs = operator.inputs("small", device)
    results, pull_back = vjp(operator.function, *inputs)
    eager, eager_pull_back = vjp(operator.reference, *inputs)
    assert_same(results, eager)
    towards = torch.utils._pytree.tree_map(torch.ones_like, results)
    assert_same(pull_back(towards), eager_pull_back(towards))


@by_device
@by_operator
def test_jvp(operator: Operator, device: str) -> None:
    inputs = operator.inputs("small", device)
    tangents = tuple(torch.randn_like(tensor) for tensor in inputs)
    actual = jvp(operator.function, inputs, tangents)
    assert_same(actual, jvp(operator.reference, inputs, tangents))


@by_device
@pytest.mark.parametrize("jacobian", [jacfwd, jacrev])
@by_operator
def test_jacobians(operator: Operator, jacobian: Callable[..., Callable], device: str) -> None:
    inputs = operator.inputs("small", device)
    places = tuple(range(len(inputs)))
    actual = jacobian(operator.function, argnums=places)(*inputs)
    assert_same(actual, jacobian(operator.reference, argnums=places)(*inputs))


@by_device
@by_differentiable_operator
def test_hessian(operator: Operator, device: str) -> None:
    inputs = operator.inputs("small", device)
    for place in range(len(inputs)):
        actual = hessian(loss_of(operator.function), argnums=place)(*inputs)
        assert_same(actual, hessian(loss_of(operator.reference), argnums=place)(*inputs))


@by_device
def test_grad_of_grad(device: str) -> None:
    a, b = (tensor[0, 0] for tensor in ELEMENTWISE_MULT.inputs("small", device))

    def cube(a: Tensor) -> Tensor:
        return extops.elementwise_mult(extops.elementwise_mult(a, a), a) * b

    assert_same(grad(grad(cube))(a), 6 * a * b)


@by_device
def test_a_module_in_functional_form(device: str) -> None:
    """torch.func.functional_call, per-sample gradients of the parameters."""
    module = extops.LLTM(5, 4, device=device, dtype=torch.float64)
    input, _, _, h, c = LLTM.inputs("small", device)
    parameters = {name: tensor.detach() for name, tensor in module.named_parameters()}

    def loss(parameters: dict[str, Tensor], input: Tensor, h: Tensor, c: Tensor) -> Tensor:
        state = (h[None], c[None])
        new_h, new_cell = torch.func.functional_call(module, parameters, (input[None], state))
        return (new_h * new_cell).sum()

    per_sample = vmap(grad(loss), in_dims=(None, 0, 0, 0))(parameters, input, h, c)
    new_h, new_cell = module(input, (h, c))
    (new_h * new_cell).sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        assert_same(per_sample[name].sum(0), parameter.grad)
