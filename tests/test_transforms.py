"""The transforms of torch.func, and forward-mode AD: alone and nested, eager, within torch.compile and around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_map

import extops
import operators
from operators import (
    ELEMENTWISE_MULT,
    LLTM,
    Operator,
    Tensors,
    as_tuple,
    by_device,
    by_few_operators,
    by_operator,
    by_sequence,
    needs_inductor,
    upstream,
)

Function = Callable[..., Any]
Transform = Callable[[Function], Function]

BATCH = 3


def stacked_inputs(operator: Operator, device: str) -> Tensors:
    """Inputs of several calls, stacked along a new first dimension."""
    batch = [operator.inputs("small", device) for _ in range(BATCH)]
    return tuple(torch.stack(tensors) for tensors in zip(*batch, strict=True))


def loss_of(function: Callable[..., Tensor | Tensors]) -> Callable[..., Tensor]:
    """A scalar that weighs the square of every element of the results differently."""

    def loss(*inputs: Tensor) -> Tensor:
        total = inputs[0].new_zeros(())
        for result in as_tuple(function(*inputs)):
            weights = torch.linspace(-1, 2, result.numel(), dtype=result.dtype)
            total = total + (result**2 * weights.to(result.device).view(result.shape)).sum()
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
@by_sequence
def test_what_a_sequence_keeps(operator: Operator, device: str) -> None:
    """The composition of PyTorch calls keeps for a backward what the kernels do."""
    made = operators.SEQUENCE_INPUTS[operator.name](3, 2, 4, 5)
    states = len(operator.results) - 1
    input, *others = (x.to(device) for x in made)
    inputs = input, *others[states:], others[0], others[states - 1], None
    call = getattr(torch.ops.extops, operator.name)
    batched = vmap(lambda x: call(x, *inputs[1:]))(input.unsqueeze(0))
    torch.testing.assert_close([x.squeeze(0) for x in batched], [*call(*inputs)])


def by_all_inputs(transform: Callable[..., Function]) -> Transform:
    """A transform that is told by which inputs to differentiate: by all of them."""
    return lambda function: (
        lambda *inputs: transform(function, argnums=tuple(range(len(inputs))))(*inputs)
    )


def gradient(function: Function) -> Function:
    return by_all_inputs(grad)(loss_of(function))


def pulled_back(function: Function) -> Function:
    def results_and_gradients(*inputs: Tensor) -> Any:
        results, pull_back = vjp(function, *inputs)
        return results, pull_back(tree_map(torch.ones_like, results))

    return results_and_gradients


def pushed_forward(function: Function) -> Function:
    return lambda *inputs: jvp(function, inputs, tuple(torch.cos(tensor) for tensor in inputs))


def mapped(function: Function) -> Function:
    return lambda *inputs: vmap(function)(*(torch.stack([x, 2 * x, 3 * x]) for x in inputs))


def with_dual_numbers(function: Function) -> Function:
    """Forward-mode AD without torch.func."""

    def results_and_tangents(*inputs: Tensor) -> list[Any]:
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, torch.cos(x)) for x in inputs]
            unpacked = [forward_ad.unpack_dual(result) for result in as_tuple(function(*duals))]
            return [(result.primal, result.tangent) for result in unpacked]

    return results_and_tangents


TRANSFORMS: Mapping[str, Transform] = {
    "grad": gradient,
    "vjp": pulled_back,
    "jvp": pushed_forward,
    "vmap": mapped,
    "jacfwd": by_all_inputs(jacfwd),
    "jacrev": by_all_inputs(jacrev),
    "hessian": lambda function: hessian(loss_of(function), argnums=-1),
    "grad_of_grad": lambda function: gradient(gradient(function)),
    "grad_of_jvp": lambda function: gradient(lambda *inputs: pushed_forward(function)(*inputs)[1]),
    "grad_of_vmap": lambda function: gradient(mapped(function)),
    "jvp_of_grad": lambda function: pushed_forward(gradient(function)),
    "jvp_of_jvp": lambda function: pushed_forward(
        lambda *inputs: pushed_forward(function)(*inputs)[1]
    ),
    "vmap_of_grad": lambda function: mapped(gradient(function)),
    "vmap_of_jvp": lambda function: mapped(pushed_forward(function)),
    "vmap_of_vmap": lambda function: mapped(mapped(function)),
    "forward_ad": with_dual_numbers,
}
by_transform = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())


def compiled(function: Function, backend: str = "aot_eager") -> Function:
    return torch.compile(function, fullgraph=True, backend=backend)


@by_device
@by_transform
@by_operator
def test_transform(operator: Operator, transform: Transform, device: str) -> None:
    inputs = operator.inputs("small", device)
    assert_same(transform(operator.function)(*inputs), transform(operator.reference)(*inputs))


@pytest.mark.every(16, "transform", "inside", "operator")
@by_device
@pytest.mark.parametrize("inside", [True, False], ids=["compiled", "of_compiled"])
@by_transform
@by_few_operators
@pytest.mark.usefixtures("dynamo")
def test_transform_and_compile(
    operator: Operator, transform: Transform, inside: bool, device: str
) -> None:
    """The right value wherever plain PyTorch calls give one; an error at most where they do."""

    def apply(function: Function) -> Function:
        return compiled(transform(function)) if inside else transform(compiled(function))

    inputs = operator.inputs("small", device)
    try:
        actual = apply(operator.function)(*inputs)
    except Exception:
        torch._dynamo.reset()
        with pytest.raises(Exception):  # noqa: B017
            apply(operator.reference)(*inputs)
    else:
        assert_same(actual, transform(operator.reference)(*inputs))


@pytest.mark.slow
@by_device
@pytest.mark.parametrize("name", ["jvp", "vmap", "grad", "vmap_of_grad"])
@by_operator
@pytest.mark.usefixtures("dynamo")
def test_transform_within_inductor(operator: Operator, name: str, device: str) -> None:
    needs_inductor()
    transform, inputs = TRANSFORMS[name], operator.inputs("small", device)
    actual = compiled(transform(operator.function), "inductor")(*inputs)
    assert_same(actual, transform(operator.reference)(*inputs))


@pytest.mark.usefixtures("dynamo")
@pytest.mark.every(4, "operator", "name")
@pytest.mark.parametrize("name", ["jvp", "grad", "vmap", "forward_ad"])
@by_few_operators
def test_transforms_of_an_exported_program(operator: Operator, name: str) -> None:
    """Programs hold the registered operators, not the functions that call them."""

    class Module(torch.nn.Module):
        def forward(self, *inputs: Tensor) -> Tensors:
            return operator(*inputs)

    inputs = operator.inputs("small")
    program = torch.export.export(Module(), inputs).module()
    transform = TRANSFORMS[name]
    expected = transform(operator.eager)(*inputs)
    assert_same(transform(program)(*inputs), expected)
    # Dynamo of torch 2.6 refuses the hooks of any program.
    if not torch.__version__.startswith("2.6."):
        assert_same(compiled(transform(lambda *x: program(*x)))(*inputs), expected)


# -- of a gradient that was recorded outside -------------------------------------------------------


def recorded_gradient(
    operator: Operator, device: str, run: Function | None = None
) -> tuple[Function, Tensors]:
    """The backward as a function of the upstream gradients, which it is linear in, and values for those."""
    inputs = operator.inputs("small", device, requires_grad=True)
    results = as_tuple((run or operator.function)(*inputs))

    def backward(*towards: Tensor) -> Tensors:
        return torch.autograd.grad(results, inputs, towards, retain_graph=True)

    return backward, upstream(results)


@by_device
@pytest.mark.parametrize("transform", [pushed_forward, with_dual_numbers])
@by_operator
def test_tangents_of_a_backward(operator: Operator, transform: Transform, device: str) -> None:
    backward, towards = recorded_gradient(operator, device)
    expected = [backward(*towards), backward(*(torch.cos(gradient) for gradient in towards))]
    actual = transform(backward)(*towards)
    by_gradient = zip(*actual, strict=True) if transform is with_dual_numbers else actual
    assert_same([tuple(found) for found in by_gradient], expected)


@by_device
@by_operator
@pytest.mark.usefixtures("dynamo")
def test_tangents_of_a_compiled_backward(operator: Operator, device: str) -> None:
    """It calls the backward's operators, as dual numbers come to them."""
    backward, towards = recorded_gradient(operator, device, compiled(operator.function))
    expected = [backward(*towards), backward(*(torch.cos(gradient) for gradient in towards))]
    actual = zip(*with_dual_numbers(backward)(*towards), strict=True)
    assert_same([tuple(found) for found in actual], expected)


@by_device
@by_operator
def test_vmap_of_a_backward(operator: Operator, device: str) -> None:
    backward, towards = recorded_gradient(operator, device)
    expected = [backward(*(n * gradient for gradient in towards)) for n in (1, 2, 3)]
    assert_same(mapped(backward)(*towards), tuple(map(torch.stack, zip(*expected, strict=True))))


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
