"""Gradients of each operator: any order, either mode, and however autograd may ask for them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import extops
import extops.reference
from operators import (
    ELEMENTWISE_MULT,
    LLTM,
    ROUND_STE,
    SEQUENCE_INPUTS,
    SEQUENCES,
    Operator,
    Tensors,
    as_tuple,
    assert_as_accurate_as_eager,
    by_case,
    by_device,
    by_differentiable_operator,
    by_dtype,
    by_layout,
    by_long_sizes,
    by_operator,
    gradients,
    lltm_inputs,
    offset,
    upstream,
)

# Small shapes of every kind: gradcheck evaluates the operator once or twice for each element.
CHECKED_CASES = [
    *((LLTM, case) for case in ("small", "one", "empty_batch", "no_features")),
    *((ELEMENTWISE_MULT, case) for case in ("small", "scalars", "scalar_a", "row", "outer")),
    *((ELEMENTWISE_MULT, case) for case in ("many_dims", "empty", "empty_broadcast")),
    *(
        (operator, case)
        for operator in SEQUENCES
        for case in ("small", "one", "empty_batch", "no_features")
    ),
]
by_checked_case = pytest.mark.parametrize(
    ("operator", "case"),
    [
        pytest.param(operator, case, id=f"{operator.name}-{case}")
        for operator, case in CHECKED_CASES
    ],
)


@by_device
@by_checked_case
def test_gradcheck(operator: Operator, case: str, device: str) -> None:
    inputs = operator.inputs(case, device, requires_grad=True)
    assert gradcheck(operator.function, inputs, check_forward_ad=True)


@by_device
@by_checked_case
def test_gradgradcheck(operator: Operator, case: str, device: str, thorough: bool) -> None:
    inputs = operator.inputs(case, device, requires_grad=True)
    fast = not thorough  # all elements at once
    assert gradgradcheck(operator.function, inputs, check_fwd_over_rev=True, fast_mode=fast)


@by_device
@by_layout
@by_differentiable_operator
@pytest.mark.every(2, "layout", "operator")
def test_gradcheck_of_layouts(operator: Operator, layout, device: str) -> None:
    leaves = operator.inputs("small", device, requires_grad=True)
    assert gradcheck(
        lambda *inputs: operator.function(*(layout(tensor) for tensor in inputs)),
        leaves,
        # On a GPU, as_strided's own backward adds up in any order.
        nondet_tol=1e-12 if device == "cuda" else 0.0,
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


@pytest.mark.every(8, "operator", "case", "dtype")
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


@pytest.mark.every(4, "sizes", "dtype")
@by_dtype
@by_device
@by_long_sizes
def test_gradients_of_long_sizes(
    sizes: tuple[int, int, int], device: str, dtype: torch.dtype
) -> None:
    inputs = tuple(tensor.to(device, dtype) for tensor in lltm_inputs(*sizes))
    assert_right_gradients(LLTM, inputs)


@by_dtype
@by_device
@pytest.mark.parametrize("case", ["odd", "tutorial", "large", "tiles"])
def test_gradients_of_the_parameters_alone(case: str, device: str, dtype: torch.dtype) -> None:
    """As in training: the kernels for the inputs' gradients have nothing to do."""
    inputs = LLTM.inputs(case, device, dtype)
    assert_right_gradients(LLTM, inputs, of=("weights", "bias"))


def assert_right_gradients(
    operator: Operator, inputs: tuple[Tensor, ...], of: Sequence[str] = ()
) -> None:
    """Checks the gradients of some inputs (by default all) against eager's and those in float64."""
    wanted = [i for i, name in enumerate(operator.arguments) if name in (of or operator.arguments)]
    leaves = tuple(
        tensor.detach().requires_grad_(place in wanted) for place, tensor in enumerate(inputs)
    )
    results = operator(*leaves)
    towards = upstream(results)
    actual = torch.autograd.grad(results, [leaves[place] for place in wanted], towards)
    _, eager = gradients(operator.reference, inputs, towards)
    doubles = [tuple(tensor.double() for tensor in tensors) for tensors in (inputs, towards)]
    _, exact = gradients(operator.reference, *doubles)
    for place, ours in zip(wanted, actual, strict=True):
        name = f"gradient of `{operator.arguments[place]}`"
        assert_as_accurate_as_eager(name, ours, eager[place], exact[place], operator.ulps)


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
@pytest.mark.parametrize(
    ("operator", "used"),
    [
        pytest.param(operator, used, id=f"{operator.name}-{used}")
        for operator in (LLTM, *SEQUENCES)
        for used in operator.results
    ],
)
def test_only_one_result_used(operator: Operator, used: str, device: str) -> None:
    inputs = operator.inputs("odd", device)
    place = operator.results.index(used)
    towards = upstream((operator.eager(*inputs)[place],))
    _, actual = gradients(lambda *leaves: operator(*leaves)[place], inputs, towards)
    _, expected = gradients(lambda *leaves: operator.eager(*leaves)[place], inputs, towards)
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


WRITERS: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "eager": lambda a, b, out: extops.elementwise_mult(a, b, out=out),
    "registered": lambda a, b, out: torch.ops.extops.elementwise_mult_out(a, b, out),
    "overlapping": lambda a, b, out: extops.elementwise_mult(out.t(), b, out=out),
    "compiled": torch.compile(
        lambda a, b, out: extops.elementwise_mult(a, b, out=out),
        fullgraph=True,
        backend="aot_eager",
    ),
}


@by_device
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS.keys())
@pytest.mark.usefixtures("dynamo")
def test_out_counts_as_a_write(
    write: Callable[..., object], mode: Callable[[], AbstractContextManager[None]], device: str
) -> None:
    """A gradient that needs the values from before is an error, not a wrong gradient."""
    a, b = torch.randn(2, 4, 4, device=device)
    out = torch.randn(4, 4, device=device, requires_grad=True) * 2
    loss = (out * out).sum()
    with mode():
        write(a, b, out)
    assert out._version > 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@by_dtype
@by_device
@by_operator
def test_same_bits_on_every_run(operator: Operator, device: str, dtype: torch.dtype) -> None:
    inputs = operator.inputs("odd", device, dtype)
    towards = upstream(operator(*inputs))
    _, first = gradients(operator.function, inputs, towards)
    _, second = gradients(operator.function, inputs, towards)
    assert all(map(torch.equal, first, second))


@by_dtype
@by_device
@pytest.mark.parametrize("case", ["tutorial", "tiles"])
def test_same_bits_of_the_parameters_gradients(case: str, device: str, dtype: torch.dtype) -> None:
    """By extops' kernels alone: these sizes leave nothing to a library where the GPU has tensor cores."""
    input, weights, bias, *state = LLTM.inputs(case, device, dtype)
    parameters = weights.requires_grad_(), bias.requires_grad_()
    first, second = (
        torch.autograd.grad(extops.lltm(input, *parameters, *state), parameters, state)
        for _ in range(2)
    )
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
    eager = torch.autograd.grad(operator.eager(*leaves), leaves, towards, create_graph=True)
    wanted = [gradient.requires_grad for gradient in eager]
    assert [gradient.requires_grad for gradient in with_graph] == wanted


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
@by_operator
def test_modified_result_gives_no_wrong_gradient(operator: Operator, device: str) -> None:
    """The same for the results of the operator, one of which its backward pass reads."""
    for place in range(len(operator.results)):
        leaves = operator.inputs("small", device, requires_grad=True)
        results = operator(*leaves)
        with torch.no_grad():
            results[place].add_(1)
        assert_right_or_noticed(operator, results, leaves)


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


def unrolled(cell: Callable[..., Tensors]) -> Callable[..., Tensors]:
    """Several steps: each cell's results feed the next one, so its inputs depend on each other."""

    def run(input: Tensor, weights: Tensor, bias: Tensor, h: Tensor, c: Tensor) -> Tensors:
        for step in range(3):
            h, c = cell(input * step, weights, bias, h, c)
        return h, c

    return run


def with_one_state(cell: Callable[..., Tensors]) -> Callable[..., Tensors]:
    """One tensor as the hidden state and as the cell state."""
    return lambda input, weights, bias, state, _: cell(input, weights, bias, state, state)


@by_device
@pytest.mark.parametrize("used_as", [unrolled, with_one_state])
def test_inputs_that_are_not_independent(used_as, device: str) -> None:
    """The gradients and, through `create_graph`, those of the gradients."""
    inputs = LLTM.inputs("small", device)
    towards = upstream(LLTM.eager(*inputs))
    found = []
    for function in (used_as(extops.lltm), used_as(extops.reference.lltm)):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        ask = functools.partial(
            torch.autograd.grad, inputs=leaves, allow_unused=True, retain_graph=True
        )
        results = function(*leaves)
        plain = ask(results, grad_outputs=towards)
        first = ask(results, grad_outputs=towards, create_graph=True)
        loss = sum((gradient**2).sum() for gradient in first if gradient is not None)
        found.append([plain, [g if g is None else g.detach() for g in first], ask(loss)])
    for actual, expected in zip(*found, strict=True):
        for ours, theirs in zip(actual, expected, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                torch.testing.assert_close(ours, theirs)


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


def cell_with_gates(
    gates: list[float], candidates: list[float], device: str, dtype: torch.dtype
) -> Tensors:
    """Inputs of a cell whose bias alone makes its gates: every combination of two and a candidate.

    The states are repeated until vectorised code and its remainder both meet each of them.
    """
    values = [torch.tensor(each, dtype=torch.float64) for each in (gates, gates, candidates)]
    bias = torch.cartesian_prod(*values).t().repeat(1, 9).flatten()
    state = len(bias) // 3
    zeros = torch.zeros(1, state, dtype=torch.float64)
    inputs = zeros[:, :0], zeros.new_zeros(3 * state, state), bias, zeros, zeros + 0.25
    return tuple(tensor.to(device, dtype) for tensor in inputs)


@by_dtype
@by_device
def test_gradients_at_special_gates(device: str, dtype: torch.dtype) -> None:
    """Where elu has its corner, at either zero, beside it, and where the gates are saturated."""
    info = torch.finfo(dtype)
    near_zero = [0.0, -0.0, info.tiny / 2, -info.tiny / 2, info.tiny, -info.tiny, -info.eps]
    candidates = [*near_zero, -1.0, 1.0, -1000.0, 1000.0]
    inputs = cell_with_gates([-1000.0, 0.5, 1000.0], candidates, device, dtype)
    towards = tuple(torch.full_like(inputs[-1], value) for value in (0.75, -1.5))
    _, actual = gradients(LLTM.function, inputs, towards)
    doubles = [tuple(tensor.double() for tensor in tensors) for tensors in (inputs, towards)]
    _, expected = gradients(LLTM.reference, *doubles)
    for name in ("bias", "old_cell"):
        place = LLTM.arguments.index(name)
        right = expected[place].to(dtype)
        tolerance = 8 * info.eps
        torch.testing.assert_close(actual[place], right, rtol=tolerance, atol=tolerance)


@by_dtype
@by_device
def test_gradients_at_zeros_of_either_sign(device: str, dtype: torch.dtype) -> None:
    """The slope of elu is 1 on both sides of its corner, and at it."""
    candidates = torch.tensor([0.0, -0.0] * 18, dtype=dtype, device=device).view(-1, 1)
    gates = torch.nn.functional.pad(candidates, (2, 0))
    towards = torch.ones_like(candidates)
    gradient, *_ = torch.ops.extops.lltm_step_backward(None, towards, gates, candidates)
    expected = torch.tensor([0.0, 0.0, 0.5], dtype=dtype, device=device)  # the input gate is half
    assert torch.equal(gradient, expected.expand_as(gradient))


@by_dtype
@by_device
@pytest.mark.parametrize("spoilt", ["gates", "grad_h", "grad_cell"])
def test_nan_is_never_lost(spoilt: str, device: str, dtype: torch.dtype) -> None:
    """A NaN in a gate or in an upstream gradient shows wherever eager's gradients show it."""
    special = [-1000.0, 0.0, 1000.0, *([float("nan")] if spoilt == "gates" else [])]
    inputs = cell_with_gates(special, special, device, dtype)
    upstream_gradients = tuple(
        torch.full_like(inputs[-1], float("nan") if spoilt == name else 1.0)
        for name in ("grad_h", "grad_cell")
    )
    _, actual = gradients(LLTM.function, inputs, upstream_gradients)
    _, expected = gradients(LLTM.reference, inputs, upstream_gradients)
    for name in ("bias", "old_cell"):
        place = LLTM.arguments.index(name)
        assert torch.equal(actual[place].isnan(), expected[place].isnan()), name


@by_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("features", "state"), [(1, 30), (30, 1)], ids=["input", "state"])
@pytest.mark.parametrize("operator", [LLTM, *SEQUENCES], ids=lambda operator: operator.name)
def test_many_rows_by_one_column_of_the_weights(
    operator: Operator, features: int, state: int, dtype: torch.dtype, device: str
) -> None:
    """GEMMs in which torch 2.7 to 2.10 read wrong numbers on a CPU, from about a thousand rows on."""
    rows = (4096,) if operator is LLTM else (4, 1024)
    make = SEQUENCE_INPUTS.get(operator.name, lltm_inputs)
    inputs = tuple(x.to(device, dtype) for x in make(*rows, features, state))
    exact = tuple(x.double() for x in inputs)
    towards = upstream(operator(*inputs))
    _, found = gradients(operator, inputs, towards)
    _, expected = gradients(operator, exact, tuple(x.double() for x in towards))
    for one, other in zip(found, expected, strict=True):
        if len(other) >= 1024 or other.dim() == 3:  # of rows, not sums over them
            torch.testing.assert_close(one.double(), other, rtol=0.02, atol=0.05)
