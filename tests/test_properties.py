"""What holds for any input, good or bad: hypothesis looks for the one for which it does not.

Good input, of any shape, strides and dtype, gives the values and gradients of the reference. Bad
input is an error of Python that names an argument, or gives the reference's values all the same.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import hypothesis.extra.numpy as hypothesis_numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import extops
from extops.binding import _schemas
from operators import (
    DTYPES,
    ELEMENTWISE_MULT,
    REGISTERED,
    ROUND_STE,
    SEQUENCE_INPUTS,
    Call,
    Operator,
    Tensors,
    as_tuple,
    assert_as_accurate_as_eager,
    by_device,
    by_operator,
    maker,
)

Draw = Callable[[st.SearchStrategy[Any]], Any]
Shape = tuple[int, ...]

by_registered = pytest.mark.parametrize("name", REGISTERED)

dtypes = st.sampled_from(DTYPES)
sizes = st.integers(0, 9)
any_shape = hypothesis_numpy.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=5)


def shapes_that_broadcast(count: int) -> st.SearchStrategy[tuple[Shape, ...]]:
    if count == 1:
        return any_shape.map(lambda shape: (shape,))
    return hypothesis_numpy.mutually_broadcastable_shapes(
        num_shapes=count, max_dims=5, min_side=0, max_side=4
    ).map(lambda shapes: shapes.input_shapes)


def shapes_of(operator: Operator) -> st.SearchStrategy[tuple[Shape, ...]]:
    schema = _schemas.OPERATORS["lltm_step" if operator.name == "lltm" else operator.name]
    if not schema.sizes:
        return shapes_that_broadcast(len(operator.arguments))
    names = [x for x in schema.sizes if x != "direction_size"]
    drawn = {size: st.integers(1, 3) if size == "time" else sizes for size in names}
    if operator.name in SEQUENCE_INPUTS:
        make = SEQUENCE_INPUTS[operator.name]
        return st.tuples(*drawn.values()).map(lambda found: tuple(x.shape for x in make(*found)))
    return st.fixed_dictionaries(drawn).map(
        lambda found: tuple(
            _schemas.shape_of(row, {**found, "direction_size": found["state_size"]})
            for row in schema.arguments
        )
    )


@st.composite
def numbers(draw: Draw, shape: Shape, special: tuple[float, ...] = ()) -> Tensor:
    """Normal numbers in float64, of which some are replaced by special ones."""
    # Not torch.manual_seed: it remembers every call until CUDA is initialised, with its traceback.
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    values = torch.randn(shape, dtype=torch.float64, generator=generator)
    values = values * draw(st.sampled_from([0.1, 1.0, 5.0]))
    if special:
        places = torch.randint(len(special), shape, generator=generator)
        chosen = torch.tensor(special, dtype=torch.float64)[places]
        values = torch.where(torch.rand(shape, generator=generator) < 0.3, chosen, values)
    return values


@st.composite
def laid_out(draw: Draw, values: Tensor) -> Tensor:
    """The values, with dimensions in any order and gaps of NaN, some expanded, some negated."""
    dims = range(values.ndim)
    order = draw(st.permutations(dims))
    gaps = draw(st.tuples(*(st.integers(1, 3) for _ in dims)))
    offset = draw(st.integers(0, 2))
    reach = [values.shape[dim] * gaps[dim] for dim in order]
    memory = values.new_full((offset + math.prod(reach),), math.nan)
    view = memory[offset:].view(reach)[tuple(slice(None, None, gaps[dim]) for dim in order)]
    view = view.permute([order.index(dim) for dim in dims])
    view.copy_(values)
    repeated = draw(st.sets(st.sampled_from(dims), max_size=2)) if values.numel() and dims else ()
    for dim in repeated:
        view = view.narrow(dim, 0, 1).expand_as(values)
    return torch._neg_view(view) if draw(st.booleans()) else view


@st.composite
def inputs_of(draw: Draw, operator: Operator, dtype: torch.dtype, device: str) -> Tensors:
    shapes = draw(shapes_of(operator))
    inputs = [draw(laid_out(draw(numbers(shape)).to(device, dtype))) for shape in shapes]
    if "bias" in operator.arguments and draw(st.booleans()):
        inputs[operator.arguments.index("bias")] = cancelling_bias(operator, inputs)
    return tuple(inputs)


def rows_and_weights(operator: Operator, inputs: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """What a recurrent operator multiplies, in float64: the states and the inputs, each with their weights."""
    named = {
        name: x.double()
        for name, x in zip(operator.arguments, inputs, strict=True)
        if x is not None
    }
    h = named["old_h" if "old_h" in named else "h_0"]
    rows = h, named["input"].flatten(0, -2)
    if "weights" in named:
        weights = named["weights"].split([x.shape[1] for x in rows], 1)
    else:
        weights = named["weight_hh"], named["weight_ih"]
    return list(zip(rows, weights, strict=True))


def cancelling_bias(operator: Operator, inputs: list[Tensor]) -> Tensor:
    """Such that nothing is left of the first row."""
    bias = inputs[operator.arguments.index("bias")]
    sums = [weight @ x[0] for x, weight in rows_and_weights(operator, inputs) if len(x)]
    return -sum(sums, torch.zeros_like(bias, dtype=torch.float64)).to(bias.dtype)


# -- good input ----------------------------------------------------------------------------------


@by_device
@by_operator
@given(data=st.data())
def test_values_and_gradients(operator: Operator, device: str, data: st.DataObject) -> None:
    dtype = data.draw(dtypes)
    inputs = data.draw(inputs_of(operator, dtype, device))
    wanted = data.draw(st.sets(st.sampled_from(range(len(inputs))), min_size=1))
    towards = tuple(
        data.draw(laid_out(data.draw(numbers(tuple(result.shape))).to(device, dtype)))
        for result in operator.eager(*inputs)
    )
    ours = results_and_gradients(operator.function, inputs, towards, wanted)
    eager = results_and_gradients(operator.reference, inputs, towards, wanted)
    doubles = [tuple(tensor.double() for tensor in tensors) for tensors in (inputs, towards)]
    exact = results_and_gradients(operator.reference, *doubles, wanted)
    names = [*operator.results, *(f"gradient of `{operator.arguments[i]}`" for i in sorted(wanted))]
    upstream_scale = max(largest_of(tensor) for tensor in towards)
    # A sum whose terms cancel has their errors; in 16-bit types it is computed in float32, which has digits to spare.
    condition = 1.0
    if {"old_h", "h_0"}.intersection(operator.arguments) and dtype.itemsize > 2:
        terms = [x.abs() @ weight.abs().T for x, weight in rows_and_weights(operator, list(inputs))]
        condition = max(condition, sum(largest_of(x) for x in terms))
    for name, *values in zip(names, ours, eager, exact, strict=True):
        # Of so few elements, eager's may well be right by luck.
        ulps = 4.0 * operator.ulps * condition
        if name not in operator.results:
            # Where large upstream gradients cancel, what is left has their errors.
            ulps *= max(1.0, upstream_scale / max(largest_of(values[-1]), 1e-300))
        assert_as_accurate_as_eager(name, *values, ulps=ulps)


def largest_of(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() > 0 else 0.0


def results_and_gradients(
    function: Callable[..., Any], inputs: Tensors, towards: Tensors, wanted: set[int]
) -> Tensors:
    leaves = [
        tensor.detach().requires_grad_(place in wanted) for place, tensor in enumerate(inputs)
    ]
    results = as_tuple(function(*leaves))
    found = torch.autograd.grad(results, [leaves[place] for place in sorted(wanted)], towards)
    return *(result.detach() for result in results), *found


SPECIAL = (0.0, -0.0, 0.5, -0.5, 1.5, 2.0**-14, 2.0**-126, 6e4, 3e38, math.inf, -math.inf, math.nan)


def assert_identical(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@by_device
@given(data=st.data())
def test_round_of_special_values(device: str, data: st.DataObject) -> None:
    values = data.draw(numbers(data.draw(any_shape), SPECIAL))
    input = data.draw(laid_out(values.to(device, data.draw(dtypes))))
    exact = ROUND_STE.reference(input.double())
    assert_identical(extops.round_ste(input), exact.to(input.dtype))


@by_device
@given(data=st.data())
def test_product_of_special_values(device: str, data: st.DataObject) -> None:
    dtype = data.draw(dtypes)
    a, b = (
        data.draw(laid_out(data.draw(numbers(shape, SPECIAL)).to(device, dtype)))
        for shape in data.draw(shapes_that_broadcast(2))
    )
    # Twice the digits hold the product, so that it is rounded once.
    wider = torch.float64 if dtype.itemsize >= 4 else torch.float32
    assert_identical(extops.elementwise_mult(a, b), (a.to(wider) * b.to(wider)).to(dtype))


@by_device
@given(data=st.data())
def test_out_in_the_memory_of_the_factors(device: str, data: st.DataObject) -> None:
    """The factors count as they were before the call, and nothing beside `out` is written."""
    size = data.draw(st.integers(1, 40))
    memory = data.draw(numbers((size + 3, size + 3))).to(device)

    def window(of: Tensor, row: int, column: int, flipped: bool) -> Tensor:
        view = of[row : row + size, column : column + size]
        return view.t() if flipped else view

    places = st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans())
    a, b = (window(memory, *data.draw(places)) for _ in range(2))
    if data.draw(st.booleans()):
        b = b[:1]
    where = data.draw(places)
    expected = memory.clone()
    window(expected, *where).copy_(a * b)
    extops.elementwise_mult(a, b, out=window(memory, *where))
    assert_identical(memory, expected)


# -- bad input -----------------------------------------------------------------------------------

ERRORS = (RuntimeError, TypeError, ValueError)


def resized(tensor: Tensor, change: int) -> Tensor:
    """A tensor whose last dimension, where there is one, is longer or shorter."""
    if tensor.ndim == 0:
        return tensor
    return tensor.new_ones([*tensor.shape[:-1], max(0, tensor.shape[-1] + change)])


def quantized(tensor: Tensor) -> Tensor:
    return torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8)


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "none": lambda tensor: None,
    "number": lambda tensor: 2.0,
    "text": lambda tensor: "tensor",
    "list": lambda tensor: tensor.tolist(),
    "array": lambda tensor: tensor.cpu().resolve_neg().double().numpy(),
    "dtype itself": lambda tensor: tensor.dtype,
    **{
        str(dtype): (lambda tensor, dtype=dtype: tensor.to(dtype))
        for dtype in (torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn)
    },
    **{str(dtype): (lambda tensor, dtype=dtype: tensor.to(dtype)) for dtype in DTYPES},
    "on meta": lambda tensor: tensor.to("meta"),
    "on the cpu": lambda tensor: tensor.cpu(),
    "sparse": lambda tensor: tensor.to_sparse(),
    "nested": lambda tensor: torch.nested.nested_tensor([tensor]),
    "quantized": lambda tensor: quantized(tensor.cpu()),
    "longer": lambda tensor: resized(tensor, 1),
    "shorter": lambda tensor: resized(tensor, -1),
    "of two rows": lambda tensor: torch.stack([tensor, tensor]),
    "flat": lambda tensor: tensor.flatten(),
    "transposed": lambda tensor: tensor.t() if tensor.ndim == 2 else tensor,
    "empty": lambda tensor: tensor.new_empty(0),
    "scalar": lambda tensor: tensor.new_ones(()),
    "wanting a gradient": lambda tensor: tensor.detach().requires_grad_(),
}


@by_device
@by_operator
@given(data=st.data())
def test_bad_input(operator: Operator, device: str, data: st.DataObject) -> None:
    inputs: list[Any] = list(data.draw(inputs_of(operator, data.draw(dtypes), device)))
    changed = data.draw(st.sets(st.sampled_from(range(len(inputs))), min_size=1, max_size=2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested and quantized tensors announce their end
        for place in sorted(changed):
            inputs[place] = CHANGES[data.draw(st.sampled_from(sorted(CHANGES)))](inputs[place])
    assert_named_or_right(operator.function, operator, inputs)


@by_device
@given(data=st.data())
def test_bad_out(device: str, data: st.DataObject) -> None:
    dtype = data.draw(dtypes)
    shapes = data.draw(shapes_that_broadcast(2))
    a, b = (data.draw(numbers(shape)).to(device, dtype) for shape in shapes)
    change = data.draw(st.sampled_from(sorted(CHANGES.keys() - {"none"})))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = CHANGES[change](torch.full_like(a * b, math.nan))
    names = (*ELEMENTWISE_MULT.arguments, "out")
    try:
        result = extops.elementwise_mult(a, b, out=out)
    except ERRORS as error:
        assert any(f"`{name}`" in str(error) for name in names), error
    else:
        assert result is out
        if out.device.type != "meta":
            assert_identical(result, a * b)


def assert_named_or_right(
    function: Callable[..., Any], operator: Operator, inputs: list[Any]
) -> None:
    """Either an error that names an argument, or the values of the reference."""
    try:
        results = as_tuple(function(*inputs))
    except ERRORS as error:
        assert any(f"`{name}`" in str(error) for name in operator.arguments), error
        return
    eager = operator.eager(*inputs)
    if any(result.device.type == "meta" for result in results):
        assert [(x.shape, x.dtype) for x in results] == [(x.shape, x.dtype) for x in eager]
        return
    exact = operator.eager(*(tensor.double() for tensor in inputs))
    for name, *values in zip(operator.results, results, eager, exact, strict=True):
        assert_as_accurate_as_eager(name, *values, ulps=4 * operator.ulps)


@pytest.mark.every(2, "name")
@by_device
@by_registered
@given(data=st.data())
def test_what_tracing_accepts_the_kernels_accept(
    name: str, device: str, data: st.DataObject
) -> None:
    """A registered operator refuses what its fake refuses, and else returns what that predicts."""
    calls = list(REGISTERED[name](maker(device, data.draw(dtypes))))
    call = data.draw(st.sampled_from(calls[:3]))
    arguments: list[Any] = list(call.arguments)
    for place in sorted(data.draw(st.sets(st.sampled_from(range(len(arguments))), max_size=2))):
        if isinstance(arguments[place], Tensor):
            shape = data.draw(st.one_of(near(arguments[place].shape), any_shape))
            arguments[place] = data.draw(numbers(tuple(shape))).to(arguments[place])
    actual = shapes_or_refusal(name, Call(tuple(arguments), call.keywords))

    def on_meta(x: Any) -> Any:
        return torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x

    keywords = {key: on_meta(x) for key, x in call.keywords.items()}
    assert actual == shapes_or_refusal(name, Call(tuple(map(on_meta, arguments)), keywords))


@st.composite
def near(draw: Draw, shape: Shape) -> Shape:
    """A shape with sizes exchanged, or one of them changed by one."""
    if draw(st.booleans()):
        return tuple(draw(st.permutations(shape)))
    changes = [draw(st.integers(-1, 1)) for _ in shape]
    return tuple(max(0, size + change) for size, change in zip(shape, changes, strict=True))


def shapes_or_refusal(name: str, call: Call) -> object:
    try:
        results = getattr(torch.ops.extops, name).default(*call.arguments, **call.keywords)
    except RuntimeError:
        return "refused"
    # Without elements, any strides will do, and devices differ in theirs.
    return [
        (result.shape, result.stride() if result.numel() > 0 else None, result.dtype)
        for result in as_tuple(() if results is None else results)
    ]
