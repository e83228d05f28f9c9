"""Gradients of each operator: any order, either mode, and however autograd may ask for them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import extops
from operators import (
    ELEMENTWISE_MULT,
    LLTM,
    ROUND_STE,
    Operator,
    Tensors,
    as_tuple,
    assert_as_accurate_as_eager,
    by_case,
    by_device,
    by_differentiable_operator,
    by_dtype,
    by_layout,
    by_operator,
    gradients,
    offset,
    upstream,
)

# Small shapes of every kind: gradcheck evaluates the operator once or twice for each element.
CHECKED_CASES = [
    *((LLTM, case) for case in ("small", "one", "empty_batch", "no_features")),
    *((ELEMENTWISE_MULT, case) for case in ("small", "scalars", "scalar_a", "row", "outer")),
    *((ELEMENTWISE_MULT, case) for case in ("many_dims", "empty", "empty_broadcast")),
]
by_checked_case = pytest.mark.parametrize(
    ("operator", "case"),
    [
        pytest.param(operator, case, id=f"{operator.name}-{case}")
        for operator, case in CHECKED_CASES
    ],
)

# Sums of float64 products come in another order, and eager's error against itself is none.
ULPS = {torch.float64: 16, torch.float32: 2, torch.bfloat16: 2, torch.float16: 2}


@by_device
@by_checked_case
def test_gradcheck(operator: Operator, case: str, device: str) -> None:
    inputs = operator.inputs(case, device, requires_grad=True)
    assert gradcheck(operator.function, inputs, check_forward_ad=True)


@by_device
@by_checked_case
def test_gradgradcheck(operator: Operator, case: str, device: str) -> None:
    inputs = operator.inputs(case, device, requires_grad=True)
    assert gradgradcheck(operator.function, inputs, check_fwd_over_rev=True)


@by_device
@by_layout
@by_differentiable_operator
def test_gradcheck_of_layouts(operator: Operator, layout, device: str) -> None:
    leaves = operator.inputs("small", device, requires_grad=True)
    assert gradcheck(
        lambda *inputs: operator.function(*(layout(tensor) for tensor in inputs)), leaves
    )


@by_device
@by_differentiable_operator
def test_gradients_in_a_batch(operator: Operator, device: str) -> None:
    """Many upstream gradients at once, as `torch.autograd.functional.jacobian` asks for them."""
    inputs = operator.inputs("small", device)
    at_once, expected = (
        torch.autograd.functional.jacobian(function, inputs, vectorize=vectorize)
        for function, vectorize in ((operator.function, True), (operator.reference, False))
    )
    torch.testing.assert_close(at_once, expected)


@by_dtype
@by_device
@by_case
def test_values_of_gradients(
    operator: Operator, case: str, device: str, dtype: torch.dtype
) -> None:
    assert_right_gradients(operator, operator.inputs(case, device, dtype))


@by_dtype
@by_device
@by_operator
def test_gradients_of_tensors_that_start_anywhere(
    operator: Operator, device: str, dtype: torch.dtype
) -> None:
    inputs = operator.inputs("tiles" if operator is LLTM else "odd", device, dtype)
    assert_right_gradients(operator, tuple(map(offset, inputs)))


def assert_right_gradients(operator: Operator, inputs: tuple[Tensor, ...]) -> None:
    """Checks the gradients of all inputs against eager's and against those in float64."""
    leaves = tuple(tensor.detach().requires_grad_() for tensor in inputs)
    results = operator(*leaves)
    towards = upstream(results)
    actual = torch.autograd.grad(results, leaves, towards)
    _, eager = gradients(operator.reference, inputs, towards)
    doubles = [tuple(tensor.double() for tensor in tensors) for tensors in (inputs, towards)]
    _, exact = gradients(operator.reference, *doubles)
    for name, ours, theirs, right in zip(operator.arguments, actual, eager, exact, strict=True):
        ulps = ULPS[inputs[0].dtype]
        assert_as_accurate_as_eager(f"gradient of `{name}`", ours, theirs, right, ulps=ulps)


@by_device
@by_layout
@by_operator
def test_gradients_of_layouts(operator: Operator, layout, device: str) -> None:
    """Inputs and upstream gradients of any strides."""
    inputs = tuple(layout(tensor) for tensor in operator.inputs("odd", device, torch.float32))
    towards = tuple(layout(tensor) for tensor in upstream(operator(*inputs)))
    leaves = tuple(tensor.detach().requires_grad_() for tensor in inputs)
    actual = torch.autograd.grad(operator(*leaves), leaves, towards)
    _, expected = gradients(operator.reference, inputs, towards)
    torch.testing.assert_close(actual, expected)


@by_dtype
@by_device
def test_gradient_of_round_passes_unchanged(device: str, dtype: torch.dtype) -> None:
    special = [0.0, -0.0, 0.5, -0.5, 1e-3, 3e4, float("inf"), -float("inf"), float("nan")]
    values = torch.tensor(special, dtype=dtype, device=device)
    input = values.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(extops.round_ste(input), input, values.flip(0))
    assert gradient.dtype == dtype
    torch.testing.assert_close(gradient, values.flip(0), rtol=0, atol=0, equal_nan=True)


@by_device
def test_second_order_of_round(device: str) -> None:
    """The gradient is the identity of the upstream gradient, in reverse and in forward mode."""
    (input,) = ROUND_STE.inputs("small", device, requires_grad=True)
    towards = torch.randn_like(input).requires_grad_()

    def backward(towards: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(
            extops.round_ste(input), input, towards, create_graph=True
        )
        return gradient

    assert gradcheck(backward, (towards,), check_forward_ad=True)
    assert gradgradcheck(backward, (towards,))


@by_device
def test_round_within_a_graph(device: str) -> None:
    """d/dx round(x)**2 * x, where round counts as the identity: 2 round(x) x + round(x)**2."""
    (input,) = ROUND_STE.inputs("small", device, requires_grad=True)
    rounded = extops.round_ste(input)
    (gradient,) = torch.autograd.grad((rounded**2 * input).sum(), input, create_graph=True)
    torch.testing.assert_close(gradient, 2 * rounded * input + rounded**2)
    (second,) = torch.autograd.grad(gradient.sum(), input)
    torch.testing.assert_close(second, 2 * input + 4 * rounded)


@by_device
@by_operator
def test_forward_mode(operator: Operator, device: str) -> None:
    """Tangents of the results against those of the reference, for each input alone and for all."""
    inputs = operator.inputs("small", device)
    tangents = tuple(torch.randn_like(tensor) for tensor in inputs)
    for chosen in [*({place} for place in range(len(inputs))), set(range(len(inputs)))]:
        with forward_ad.dual_level():
            duals = [
                forward_ad.make_dual(tensor, tangent) if place in chosen else tensor
                for place, (tensor, tangent) in enumerate(zip(inputs, tangents, strict=True))
            ]
            actual, expected = (
                [forward_ad.unpack_dual(result) for result in as_tuple(function(*duals))]
                for function in (operator.function, operator.reference)
            )
        for name, ours, eager in zip(operator.results, actual, expected, strict=True):
            assert (ours.tangent is None) == (eager.tangent is None), (name, chosen)
            torch.testing.assert_close(ours.primal, eager.primal)
            if eager.tangent is not None:
                torch.testing.assert_close(ours.tangent, eager.tangent)


# -- how autograd may ask ------------------------------------------------------------------------


@by_device
@by_operator
def test_some_inputs_require_grad(operator: Operator, device: str) -> None:
    """Every subset of the inputs: the same gradients as when all are asked for, and no others."""
    inputs = operator.inputs("small", device)
    towards = upstream(operator(*inputs))
    _, expected = gradients(operator.function, inputs, towards)
    everything = range(len(inputs))
    for chosen in itertools.chain.from_iterable(
        itertools.combinations(everything, count) for count in range(1, len(inputs) + 1)
    ):
        leaves = [
            tensor.detach().clone().requires_grad_(place in chosen)
            for place, tensor in enumerate(inputs)
        ]
        torch.autograd.backward(operator(*leaves), towards)
        for place, leaf in enumerate(leaves):
            name = f"`{operator.arguments[place]}` where {chosen} require grad"
            if place in chosen:
                assert leaf.grad is not None, name
                torch.testing.assert_close(leaf.grad, expected[place], msg=name)
            else:
                assert leaf.grad is None, name


@by_device
@by_operator
def test_no_input_requires_grad(operator: Operator, device: str) -> None:
    for result in operator(*operator.inputs("small", device)):
        assert not result.requires_grad
    with torch.no_grad():
        for result in operator(*operator.inputs("small", device, requires_grad=True)):
            assert not result.requires_grad
    with torch.inference_mode():
        operator(*operator.inputs("small", device))


@by_device
@pytest.mark.parametrize("used", LLTM.results)
def test_one_result_unused(used: str, device: str) -> None:
    inputs = LLTM.inputs("odd", device)
    place = LLTM.results.index(used)
    towards = upstream((LLTM.eager(*inputs)[place],))
    _, actual = gradients(lambda *leaves: LLTM(*leaves)[place], inputs, towards)
    _, expected = gradients(lambda *leaves: LLTM.eager(*leaves)[place], inputs, towards)
    torch.testing.assert_close(actual, expected)


@by_device
@by_operator
def test_expanded_upstream_gradients(operator: Operator, device: str) -> None:
    """`.sum().backward()` hands an upstream gradient of stride 0 to each result."""
    inputs = operator.inputs("odd", device)
    found: list[Tensors] = []
    for function in (operator.function, operator.reference):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        torch.stack([result.sum() for result in as_tuple(function(*leaves))]).sum().backward()
        found.append(tuple(leaf.grad for leaf in leaves if leaf.grad is not None))
    assert len(found[0]) == len(inputs)
    torch.testing.assert_close(*found)


@by_device
@by_operator
def test_retain_graph(operator: Operator, device: str) -> None:
    leaves = operator.inputs("odd", device, requires_grad=True)
    results = operator(*leaves)
    towards = upstream(results)
    first, second, third = (
        torch.autograd.grad(results, leaves, towards, retain_graph=retain)
        for retain in (True, True, False)
    )
    assert all(map(torch.equal, first, second)) and all(map(torch.equal, first, third))
    if operator is ROUND_STE:
        return  # its graph keeps no tensors, so nothing is freed
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(results, leaves, towards)


@by_dtype
@by_device
@by_operator
def test_same_bits_on_every_run(operator: Operator, device: str, dtype: torch.dtype) -> None:
    inputs = operator.inputs("odd", device, dtype)
    towards = upstream(operator(*inputs))
    _, first = gradients(operator.function, inputs, towards)
    _, second = gradients(operator.function, inputs, towards)
    assert all(map(torch.equal, first, second))


@by_device
@by_differentiable_operator
def test_create_graph_changes_no_gradient(operator: Operator, device: str) -> None:
    leaves = operator.inputs("odd", device, requires_grad=True)
    results = operator(*leaves)
    towards = upstream(results)
    plain = torch.autograd.grad(results, leaves, towards, retain_graph=True)
    with_graph = torch.autograd.grad(results, leaves, towards, create_graph=True)
    torch.testing.assert_close(plain, tuple(gradient.detach() for gradient in with_graph))
    assert all(gradient.requires_grad for gradient in with_graph)


@by_device
@by_operator
def test_modified_input_gives_no_wrong_gradient(operator: Operator, device: str) -> None:
    """Writing over an input is noticed where the backward pass reads it, else without effect."""
    for place in range(len(operator.arguments)):
        leaves = operator.inputs("small", device, requires_grad=True)
        inputs = [tensor.clone() for tensor in leaves]
        results = operator(*inputs)
        with torch.no_grad():
            inputs[place].add_(1)
        assert_right_or_noticed(operator, results, leaves)


@by_device
def test_modified_result_gives_no_wrong_gradient(device: str) -> None:
    """The same for the results of the operator, one of which its backward pass reads."""
    for place in range(len(LLTM.results)):
        leaves = LLTM.inputs("small", device, requires_grad=True)
        results = LLTM(*leaves)
        with torch.no_grad():
            results[place].add_(1)
        assert_right_or_noticed(LLTM, results, leaves)


def assert_right_or_noticed(operator: Operator, results: Tensors, leaves: Tensors) -> None:
    towards = upstream(results)
    _, expected = gradients(operator.reference, leaves, towards)
    try:
        actual = torch.autograd.grad(results, leaves, towards)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        torch.testing.assert_close(actual, expected)


@by_device
def test_modified_factor_is_noticed(device: str) -> None:
    """The gradient of one factor is made of the other, so there is no right one any more."""
    for place in range(2):
        leaves = ELEMENTWISE_MULT.inputs("small", device, requires_grad=True)
        factors = [tensor.clone() for tensor in leaves]
        product = extops.elementwise_mult(*factors)
        with torch.no_grad():
            factors[place].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(product.sum(), leaves)


@by_device
def test_a_chain_of_cells(device: str) -> None:
    """Backpropagation through time: each cell's results feed the next one."""
    inputs = LLTM.inputs("small", device)

    def unrolled(cell):
        def run(input: Tensor, weights: Tensor, bias: Tensor, h: Tensor, c: Tensor) -> Tensors:
            for step in range(5):
                h, c = cell(input * step, weights, bias, h, c)
            return h, c

        return run

    towards = upstream(LLTM.eager(*inputs))
    actual = gradients(unrolled(extops.lltm), inputs, towards)
    expected = gradients(unrolled(extops.reference.lltm), inputs, towards)
    torch.testing.assert_close(actual, expected)


@by_device
def test_one_tensor_as_both_inputs(device: str) -> None:
    (a, _) = ELEMENTWISE_MULT.inputs("small", device, requires_grad=True)
    (gradient,) = torch.autograd.grad(extops.elementwise_mult(a, a).sum(), a)
    torch.testing.assert_close(gradient, 2 * a)


@by_device
def test_saturated_gates_have_finite_gradients(device: str) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        inputs = [tensor * 5 for tensor in LLTM.inputs("saturated", device, dtype)]
        towards = upstream(LLTM(*inputs))
        _, actual = gradients(LLTM.function, tuple(inputs), towards)
        for name, gradient in zip(LLTM.arguments, actual, strict=True):
            assert bool(torch.isfinite(gradient).all()), (name, dtype)


@by_dtype
@by_device
@pytest.mark.parametrize("spoilt", ["gates", "grad_h", "grad_cell"])
def test_nan_is_never_lost(spoilt: str, device: str, dtype: torch.dtype) -> None:
    """A NaN in a gate or in an upstream gradient shows wherever eager's gradients show it."""
    special = torch.tensor([-1000.0, 0.0, 1000.0], dtype=torch.float64)
    if spoilt == "gates":
        special = torch.cat([special, special.new_tensor([float("nan")])])
    gates = torch.cartesian_prod(special, special, special).t().repeat(1, 9).flatten()
    state = len(gates) // 3
    towards = {name: torch.ones(1, state, dtype=torch.float64) for name in ("grad_h", "grad_cell")}
    if spoilt in towards:
        towards[spoilt].fill_(float("nan"))
    zeros = torch.zeros(1, state, dtype=torch.float64)
    inputs = (zeros[:, :0], zeros.new_zeros(3 * state, state), gates, zeros, zeros + 0.25)
    inputs, upstream_gradients = (
        tuple(tensor.to(device, dtype) for tensor in tensors)
        for tensors in (inputs, towards.values())
    )
    _, actual = gradients(LLTM.function, inputs, upstream_gradients)
    _, expected = gradients(LLTM.reference, inputs, upstream_gradients)
    for name in ("bias", "old_cell"):
        place = LLTM.arguments.index(name)
        assert torch.equal(actual[place].isnan(), expected[place].isnan()), name
