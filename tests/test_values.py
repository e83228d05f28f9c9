"""The values of each operator: every dtype, any strides, empty and extreme inputs."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import extops
from extops.ops import compositions
from operators import (
    ELEMENTWISE_MULT,
    LLTM,
    Operator,
    assert_as_accurate_as_eager,
    by_case,
    by_device,
    by_dtype,
    by_layout,
    by_long_sizes,
    by_operator,
    by_writable_layout,
    dtype_name,
    expanded,
    lltm_inputs,
    negated,
    offset,
    padded,
    sliced,
    transposed,
)

INF = math.inf
NAN = math.nan


def assert_same(actual: Tensor, expected: Tensor, what: str = "values") -> None:
    """Checks for equal values, NaN included, and for equal dtype and device."""
    torch.testing.assert_close(
        actual,
        expected,
        rtol=0,
        atol=0,
        equal_nan=True,
        msg=lambda message: f"{what}: {message}",
    )


def assert_right(operator: Operator, inputs: tuple[Tensor, ...]) -> None:
    """Checks the results against eager's and against those in float64 of the same inputs."""
    results = operator(*inputs)
    eager = operator.eager(*inputs)
    assert len(results) == len(operator.results)
    if operator.exact:
        for name, result, expected in zip(operator.results, results, eager, strict=True):
            assert_same(result, expected, name)
        return
    exact = operator.eager(*(tensor.double() for tensor in inputs))
    for name, ours, theirs, right in zip(operator.results, results, eager, exact, strict=True):
        assert_as_accurate_as_eager(name, ours, theirs, right, operator.ulps)


@pytest.mark.every(2, "operator", "case", "dtype")
@by_dtype
@by_device
@by_case
def test_values(operator: Operator, case: str, device: str, dtype: torch.dtype) -> None:
    assert_right(operator, operator.inputs(case, device, dtype))


@by_dtype
@by_device
@by_layout
@by_operator
def test_layouts(operator: Operator, layout, device: str, dtype: torch.dtype) -> None:
    inputs = tuple(layout(tensor) for tensor in operator.inputs("odd", device, dtype))
    before = [tensor.clone() for tensor in inputs]
    assert_right(operator, inputs)
    for name, tensor, copy in zip(operator.arguments, inputs, before, strict=True):
        assert_same(tensor, copy, f"`{name}` after the call")


@by_dtype
@by_device
@by_operator
def test_tensors_that_start_anywhere(operator: Operator, device: str, dtype: torch.dtype) -> None:
    inputs = operator.inputs("tiles" if operator is LLTM else "odd", device, dtype)
    assert_right(operator, tuple(map(offset, inputs)))


@by_device
@by_layout
@by_operator
def test_layouts_of_large_tensors(operator: Operator, layout, device: str) -> None:
    inputs = operator.inputs("threaded", device, torch.float32)
    assert_right(operator, tuple(layout(tensor) for tensor in inputs))


@by_device
@pytest.mark.parametrize("layout", [transposed, sliced, padded, negated, expanded])
@by_operator
def test_one_argument_of_another_layout(operator: Operator, layout, device: str) -> None:
    for place in range(len(operator.arguments)):
        inputs = list(operator.inputs("odd", device, torch.float32))
        inputs[place] = layout(inputs[place])
        assert_right(operator, tuple(inputs))


@by_device
@pytest.mark.parametrize(
    "memory_format", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "last"]
)
def test_images_in_channels_last(memory_format: torch.memory_format, device: str) -> None:
    image = torch.randn(2, 3, 5, 4, device=device).to(memory_format=torch.channels_last)
    other = torch.randn(2, 3, 5, 4, device=device).to(memory_format=memory_format)
    assert_same(extops.round_ste(image), extops.reference.round_ste(image))
    assert_same(extops.elementwise_mult(image, other), image * other)
    assert_same(extops.elementwise_mult(other, image), image * other)


@by_dtype
@by_device
@pytest.mark.parametrize("gap", [0, 1, 8])
def test_rows_of_whole_vectors(gap: int, device: str, dtype: torch.dtype) -> None:
    """Rows that vectors divide, one after another and with gaps, aligned for vectors and not."""
    rows = padded_to(24 + gap, torch.randn(6, 24).to(device, dtype))
    column, row = rows[:, :1].clone(), rows[0].clone()
    assert_same(extops.round_ste(rows), extops.reference.round_ste(rows))
    for factor in (column, row, rows):
        assert_same(extops.elementwise_mult(rows, factor), rows * factor)
        assert_same(extops.elementwise_mult(factor, rows[:, None]), factor * rows[:, None])


def padded_to(size: int, rows: Tensor) -> Tensor:
    """A copy of the rows that begin every `size` elements, the first at the start of the storage."""
    larger = rows.new_full([len(rows), size], NAN)
    larger[:, : rows.shape[1]] = rows
    return larger[:, : rows.shape[1]]


@pytest.mark.every(4, "operator", "case", "dtype")
@by_dtype
@by_device
@by_case
def test_same_bits_on_every_run(
    operator: Operator, case: str, device: str, dtype: torch.dtype
) -> None:
    inputs = operator.inputs(case, device, dtype)
    for first, second in zip(operator(*inputs), operator(*inputs), strict=True):
        assert torch.equal(first, second)


@by_device
@by_operator
def test_results_share_no_memory(operator: Operator, device: str) -> None:
    inputs = operator.inputs("small", device)
    tensors = [*inputs, *operator(*inputs)]
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    assert len(storages) == len(tensors)


# -- extreme values ------------------------------------------------------------------------------


@by_dtype
@by_device
def test_lltm_of_nan_and_infinity(device: str, dtype: torch.dtype) -> None:
    """A NaN or an infinity spoils its own row and what depends on it, as in eager PyTorch."""
    for place in (0, 3, 4):
        for special in (NAN, INF, -INF):
            inputs = LLTM.inputs("small", device, dtype)
            inputs[place][1, 2] = special
            results, eager = LLTM(*inputs), LLTM.eager(*inputs)
            for name, result, expected in zip(LLTM.results, results, eager, strict=True):
                context = f"{name} where `{LLTM.arguments[place]}` holds {special}"
                assert_same(result.isnan(), expected.isnan(), context)
                assert_same(result.isinf(), expected.isinf(), context)
                tolerance = 4 * torch.finfo(dtype).eps
                torch.testing.assert_close(
                    result, expected, rtol=tolerance, atol=tolerance, equal_nan=True
                )


def cell(gates: Tensor, old_cell: Tensor) -> tuple[Tensor, Tensor]:
    """The LLTM of a row of states whose gates are the rows of `gates` [N, 3] exactly.

    The states are repeated until vectorised code and its remainder both meet each of them, and
    every copy must have the same bits.
    """
    count, copies = len(gates), 9
    state = count * copies
    results = extops.lltm(
        gates.new_zeros(1, 0),
        gates.new_zeros(3 * state, state),
        gates.t().repeat(1, copies).flatten(),
        gates.new_zeros(1, state),
        old_cell.repeat(copies).view(1, state),
    )
    new_h, new_cell = (result.view(copies, count) for result in results)
    assert_same(new_h, new_h[0].expand_as(new_h), "copies of new_h")
    assert_same(new_cell, new_cell[0].expand_as(new_cell), "copies of new_cell")
    return new_h[0], new_cell[0]


@by_dtype
@by_device
@pytest.mark.parametrize("old_cell", [0.25, -0.25, INF, NAN])
def test_lltm_of_special_gates(old_cell: float, device: str, dtype: torch.dtype) -> None:
    """Every combination of special gates: 0 * inf is NaN, and a NaN is never lost."""
    special = torch.tensor([-INF, -1000.0, -1.0, 0.0, 1.0, 1000.0, INF, NAN], dtype=torch.float64)
    gates = torch.cartesian_prod(special, special, special)
    cells = torch.full_like(gates[:, :1], old_cell)
    results = cell(gates.to(device, dtype), cells[:, 0].to(device, dtype))
    expected = compositions.lltm_cell(gates, cells)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        {name: result.cpu() for name, result in zip(LLTM.results, results, strict=True)},
        {name: value[:, 0].to(dtype) for name, value in zip(LLTM.results, expected, strict=True)},
        rtol=tolerance,
        atol=tolerance,
        equal_nan=True,
    )


@by_dtype
@by_device
def test_lltm_of_saturated_gates(device: str, dtype: torch.dtype) -> None:
    large = torch.finfo(dtype).max
    rows = [
        # input gate, output gate, candidate, old cell: new_h, new_cell
        ((-large, 0.0, 5.0, 0.25), (0.5 * math.tanh(0.25), 0.25)),
        ((large, 0.0, 5.0, 0.25), (0.5 * math.tanh(5.25), 5.25)),
        ((large, -large, 1.0, 0.0), (0.0, 1.0)),
        ((large, large, -large, 0.0), (math.tanh(-1.0), -1.0)),
        ((large, large, large, 0.0), (1.0, large)),
        ((large, large, 0.0, large), (1.0, large)),
        ((large, large, 0.0, -large), (-1.0, -large)),
    ]
    values = torch.tensor([row[0] for row in rows], dtype=torch.float64).to(device, dtype)
    new_h, new_cell = cell(values[:, :3], values[:, 3])
    expected = torch.tensor([row[1] for row in rows], dtype=torch.float64).to(device, dtype)
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(new_h, expected[:, 0], rtol=tolerance, atol=0)
    torch.testing.assert_close(new_cell, expected[:, 1], rtol=tolerance, atol=0)


@by_dtype
@by_device
def test_lltm_of_a_candidate_near_zero(device: str, dtype: torch.dtype) -> None:
    """elu(z) = exp(z) - 1 keeps its relative accuracy near zero, and the zeros are exact."""
    tiny = torch.finfo(dtype).tiny
    eps = torch.finfo(dtype).eps
    candidates = [0.0, -0.0, tiny, -tiny, eps / 4, -eps / 4, -eps, -8 * eps, -1e-3]
    exact = torch.tensor(candidates, dtype=torch.float64).to(dtype).double()
    gates = torch.stack([exact * 0 + 40, exact * 0, exact], dim=1).to(device, dtype)
    new_h, new_cell = cell(gates, gates.new_zeros(len(gates)))
    expected = torch.where(exact > 0, exact, torch.expm1(exact))
    tolerance = 4 * eps
    torch.testing.assert_close(new_cell.cpu().double(), expected, rtol=tolerance, atol=0)
    half_tanh = torch.tanh(expected) / 2
    smallest = tiny * eps  # half of a denormal number may round to either side
    torch.testing.assert_close(new_h.cpu().double(), half_tanh, rtol=tolerance, atol=smallest)


@by_device
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=dtype_name)
def test_lltm_is_accurate_over_the_whole_range(device: str, dtype: torch.dtype) -> None:
    """Relative to each value: neither exp, nor elu, nor tanh loses digits anywhere."""
    values = torch.linspace(-31, 29, 64, dtype=torch.float64).to(dtype)
    gates = torch.stack([values, values.roll(7), values.roll(23)], dim=1)
    zeros = torch.zeros(len(gates), 1, dtype=torch.float64)
    exact = compositions.lltm_cell(gates.double(), zeros)
    results = cell(gates.to(device), zeros[:, 0].to(device, dtype))
    for name, result, expected in zip(LLTM.results, results, exact, strict=True):
        error = ((result.cpu().double() - expected[:, 0]) / expected[:, 0]).abs().max().item()
        assert error < 16 * torch.finfo(dtype).eps, f"{name}: relative error {error:.3g}"


@by_dtype
@by_device
def test_lltm_of_denormals(device: str, dtype: torch.dtype) -> None:
    """Denormal candidates and states are not flushed to zero, and the sums are theirs."""
    tiny = torch.finfo(dtype).tiny
    denormals = torch.tensor([tiny / 2, -tiny / 2, tiny / 8, tiny, 0.0], dtype=torch.float64)
    candidate, old_cell = torch.cartesian_prod(denormals, denormals).unbind(1)
    if device == "cpu" and dtype is torch.bfloat16:
        # Some CPUs' instructions for products flush denormals, in torch as well.
        candidate = candidate * 0
    gates = torch.stack([candidate * 0 + 40, candidate * 0, candidate], dim=1)
    _, new_cell = cell(gates.to(device, dtype), old_cell.to(device, dtype))
    assert_same(new_cell, (candidate + old_cell).to(device, dtype))


HALVES = [(-0.5, 0.0), (-1.5, -1.0), (-2.5, -2.0), (0.5, 1.0), (1.5, 2.0), (2.5, 3.0)]
INSIDE = [(0.0, 0.0), (0.25, 0.0), (-0.25, 0.0), (-0.75, -1.0), (0.75, 1.0), (1.0, 1.0)]
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes
SPECIAL = [(INF, INF), (-INF, -INF), (NAN, NAN)]


@by_dtype
@by_device
def test_round_of_known_values(device: str, dtype: torch.dtype) -> None:
    input, expected = (
        torch.tensor(column, dtype=dtype, device=device)
        for column in zip(*HALVES, *INSIDE, *SPECIAL, strict=True)
    )
    assert_same(extops.round_ste(input), expected)


@by_dtype
@by_device
def test_round_beside_a_half(device: str, dtype: torch.dtype) -> None:
    """The neighbours of each half round to the integer on their own side."""
    halves = torch.tensor([0.5, 1.5, 2.5, 100.5], dtype=dtype, device=device)
    bits = halves.view(INTEGERS[halves.element_size()])
    smaller, larger = (bits - 1).view(dtype), (bits + 1).view(dtype)
    assert_same(extops.round_ste(smaller), halves - 0.5)
    assert_same(extops.round_ste(larger), halves + 0.5)
    assert_same(extops.round_ste(-smaller), 0.5 - halves)
    assert_same(extops.round_ste(-larger), -0.5 - halves)


@by_dtype
@by_device
def test_round_of_large_values(device: str, dtype: torch.dtype) -> None:
    """Where the spacing of numbers is 1 or more, each is its own nearest integer."""
    first = 1 / torch.finfo(dtype).eps
    large = torch.tensor(
        [first, first + 1, 2 * first - 1, 2 * first, torch.finfo(dtype).max], dtype=torch.float64
    ).to(device, dtype)
    assert_same(extops.round_ste(large), large)
    assert_same(extops.round_ste(-large), -large)
    with_half = large[:1] - 0.5  # the largest number that is not an integer
    assert_same(extops.round_ste(with_half), large[:1])
    assert_same(extops.round_ste(-with_half), -with_half - 0.5 + 1)


@by_dtype
@by_device
def test_round_of_denormals(device: str, dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).smallest_normal
    input = torch.tensor([tiny, -tiny, tiny / 2, -tiny / 2], dtype=torch.float64).to(device, dtype)
    assert_same(extops.round_ste(input), torch.zeros_like(input))


@pytest.mark.parametrize(
    ("dtype", "bits", "exponent", "quiet"),
    [
        (torch.float16, torch.int16, 0x7C00, 0x200),
        (torch.bfloat16, torch.int16, 0x7F80, 0x40),
        (torch.float32, torch.int32, 0x7F800000, 0x400000),
        (torch.float64, torch.int64, 0x7FF << 52, 1 << 51),
    ],
    ids=str,
)
def test_sign_and_payload_of_nan(
    dtype: torch.dtype, bits: torch.dtype, exponent: int, quiet: int
) -> None:
    """They stay, as in torch, in vectors and in what is left of them; GPUs convert to one NaN."""
    positive = [exponent + payload for payload in (1, quiet, quiet + 1, 2 * quiet - 1)]
    given = torch.tensor(positive, dtype=torch.int64)
    given = torch.cat([given, given + torch.iinfo(bits).min]).to(bits).repeat(5)[:37]
    expected = given | quiet
    one = torch.ones((), dtype=dtype)
    for found in (
        extops.round_ste(given.view(dtype)),
        extops.elementwise_mult(given.view(dtype), one),
    ):
        assert_same(found.view(bits), expected)


@by_device
def test_float16_where_the_cpu_flushes_denormals(device: str) -> None:
    """That is about float32, in which the CPU computes: float16's denormals are normal numbers there."""
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    every = bits.view(torch.float16)
    numbers = every[~every.isnan()].to(device)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormal numbers to zero")
    try:
        for layout in (numbers, padded(numbers[: len(numbers) // 7 * 7].view(-1, 7))):
            for factor in (1, 0.5, 3):
                assert_same(
                    extops.elementwise_mult(layout, layout.new_tensor(factor)), layout * factor
                )
            assert_same(extops.round_ste(layout), extops.reference.round_ste(layout))
        denormals = numbers[numbers.abs() < torch.finfo(torch.float16).tiny].view(-1, 1)
        zeros = denormals.new_zeros
        _, new_cell = extops.lltm(
            zeros(len(denormals), 0), zeros(3, 1), zeros(3), zeros(denormals.shape), denormals
        )
        assert_same(new_cell, denormals)
    finally:
        torch.set_flush_denormal(False)


@by_device
def test_lltm_of_more_rows_than_a_vector_has_lanes(device: str) -> None:
    """In float32, for which a CPU has a kernel of small problems: of the other cases every second is left out."""
    assert_right(LLTM, LLTM.inputs("rows", device, torch.float32))


@pytest.mark.every(4, "sizes", "dtype")
@by_dtype
@by_device
@by_long_sizes
def test_lltm_of_long_sizes(sizes: tuple[int, int, int], device: str, dtype: torch.dtype) -> None:
    assert_right(LLTM, tuple(tensor.to(device, dtype) for tensor in lltm_inputs(*sizes)))


@by_dtype
@by_device
@pytest.mark.parametrize("sizes", [(2**40, 0, 0), (0, 2**40, 0)], ids=str)
def test_lltm_of_huge_tensors_without_elements(
    sizes: tuple[int, int, int], device: str, dtype: torch.dtype
) -> None:
    """Nothing is to be computed, neither for each row nor for each column."""
    batch, features, state = sizes
    shapes = (batch, features), (3 * state, state + features), (3 * state,), *[(batch, state)] * 2
    inputs = [torch.empty(s, device=device, dtype=dtype, requires_grad=True) for s in shapes]
    results = LLTM(*inputs)
    assert [result.shape for result in results] == [(batch, state)] * 2
    found = torch.autograd.grad(results, inputs, results)
    assert [gradient.shape for gradient in found] == list(shapes)


@by_device
@pytest.mark.slow
def test_many_dimensions_that_do_not_merge(device: str) -> None:
    """More than torch takes on a GPU, so that the expected values are the CPU's."""
    dim = 26
    memory = torch.randn(2, dim)

    def factors(memory: Tensor) -> list[Tensor]:
        strides = [place % 2 for place in range(dim)]
        return [
            memory[0].as_strided((2,) * dim, strides),
            memory[1].as_strided((2,) * dim, strides[::-1]),
        ]

    a, b = factors(memory)
    assert torch.equal(extops.elementwise_mult(*factors(memory.to(device))).cpu(), a * b)


@by_device
@pytest.mark.large
def test_elements_far_apart(device: str) -> None:
    """Few elements, some of them more than 2**31 elements into their storage."""
    memory = torch.empty(2**31 + 4096, dtype=torch.bfloat16, device=device)
    a, b, out = (memory[start :: 2**25].copy_(torch.randn(65)) for start in (0, 1, 2))
    assert_same(extops.round_ste(a), extops.reference.round_ste(a))
    assert_same(extops.elementwise_mult(a, b, out=out), a * b)
    rows = [tensor.view(5, 13).transpose(0, 1) for tensor in (a, b)]
    assert_same(extops.elementwise_mult(*rows), rows[0] * rows[1])
    grad_h, grad_cell = (tensor.view(13, 5) for tensor in (a, b))
    gates, new_cell = torch.randn(13, 15).to(a), torch.randn(13, 5).to(a)
    backward = torch.ops.extops.lltm_step_backward
    for found, expected in zip(
        backward(grad_h, grad_cell, gates, new_cell),
        backward(grad_h.contiguous(), grad_cell.contiguous(), gates, new_cell),
        strict=True,
    ):
        assert_same(found, expected)


@by_device
def test_many_dimensions_of_one_element_or_none(device: str) -> None:
    for shape in ((*[1] * 70, 3, 3), (0, *[2] * 60), (*[2] * 50, 0, 0)):
        a, b = torch.randn(2, *shape, device=device)
        # On the CPU: torch's own comparison takes fewer dimensions on a GPU.
        assert torch.equal(extops.elementwise_mult(a, b.mT).cpu(), (a * b.mT).cpu())
        assert torch.equal(extops.round_ste(a).cpu(), extops.reference.round_ste(a).cpu())


@by_dtype
@by_device
def test_multiply_of_extreme_values(device: str, dtype: torch.dtype) -> None:
    """Every pair of special values: the sign of zero, overflow, denormal results, NaN."""
    info = torch.finfo(dtype)
    values = [0.0, -0.0, 1.0, -1.0, info.tiny, info.tiny / 2, info.max, -info.max, INF, -INF, NAN]
    row = torch.tensor(values, dtype=torch.float64).to(device, dtype)
    column = row[:, None]
    product = extops.elementwise_mult(column, row)
    assert_same(product, column * row)
    assert_same(torch.signbit(product).where(~product.isnan(), False), signs(column * row))


@by_device
@pytest.mark.parametrize("count", [7, 64], ids=["few", "many"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_name)
def test_multiply_rounds_ties_to_even(dtype: torch.dtype, count: int, device: str) -> None:
    """Products half-way between two numbers, normal and denormal ones."""
    info = torch.finfo(dtype)
    steps = torch.arange(1, count + 1, dtype=torch.float64)
    for numbers, factor in ((1 + steps * info.eps, 1.5), (steps * info.tiny * info.eps, 0.5)):
        a = numbers.to(device, dtype)
        b = torch.full_like(a, factor)
        assert_same(extops.elementwise_mult(a, b), (a.double() * factor).to(dtype))


def signs(tensor: Tensor) -> Tensor:
    return torch.signbit(tensor).where(~tensor.isnan(), False)


@by_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_name)
def test_round_of_every_number_of_16_bits(device: str, dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    exact = every.double()
    below = exact.floor()
    expected = torch.where(exact - below >= 0.5, below + 1, below)
    expected = torch.where(exact.isfinite(), expected, exact).to(device, dtype)
    found = extops.round_ste(every.to(device))
    assert_same(found, expected)
    within_a_transform = torch.vmap(extops.round_ste)(every.to(device))
    assert_same(within_a_transform, expected)
    assert torch.equal(signs(within_a_transform), signs(found))


# -- out= ----------------------------------------------------------------------------------------


@by_dtype
@by_device
@pytest.mark.parametrize("case", ELEMENTWISE_MULT.samples)
def test_out(case: str, device: str, dtype: torch.dtype) -> None:
    a, b = ELEMENTWISE_MULT.inputs(case, device, dtype)
    out = torch.full_like(a * b, NAN)
    assert extops.elementwise_mult(a, b, out=out) is out
    assert_same(out, a * b)


@by_device
@by_writable_layout
def test_out_of_any_layout(layout, device: str) -> None:
    """Only the elements of `out` are written, and nothing between or beside them."""
    a, b = ELEMENTWISE_MULT.inputs("row", device, torch.float32)
    out = layout(torch.zeros_like(a * b))
    storage = torch.as_strided(out, [out.untyped_storage().nbytes() // 4], [1], 0)
    beside = storage.isnan().sum().item()
    extops.elementwise_mult(a, b, out=out)
    assert_same(out, a * b)
    assert storage.isnan().sum().item() == beside


@by_device
@pytest.mark.parametrize("shape", [(2, 3), (2, 2, 3)], ids=str)
def test_out_of_any_strides(shape: tuple[int, ...], device: str) -> None:
    """Refused where two elements share a location, and only there."""
    a, b = (torch.randn(shape, device=device) for _ in range(2))
    indices = list(itertools.product(*map(range, shape)))
    for strides in itertools.product(range(6), repeat=len(shape)):
        places = {
            sum(i * stride for i, stride in zip(index, strides, strict=True)) for index in indices
        }
        out = torch.empty(64, device=device).as_strided(shape, strides)
        if len(places) == len(indices):
            assert_same(extops.elementwise_mult(a, b, out=out), a * b)
        else:
            with pytest.raises(RuntimeError, match="a memory location of its own"):
                extops.elementwise_mult(a, b, out=out)


@by_device
def test_out_is_channels_last(device: str) -> None:
    a, b = (torch.randn(2, 3, 5, 4, device=device) for _ in range(2))
    out = torch.empty_like(a, memory_format=torch.channels_last)
    extops.elementwise_mult(a, b, out=out)
    assert_same(out, a * b)
    assert out.is_contiguous(memory_format=torch.channels_last)


@by_dtype
@by_device
def test_out_is_an_input(device: str, dtype: torch.dtype) -> None:
    a, b = ELEMENTWISE_MULT.inputs("odd", device, dtype)
    product = a * b
    over_a, over_b, square = a.clone(), b.clone(), a.clone()
    extops.elementwise_mult(over_a, b, out=over_a)
    assert_same(over_a, product, "out is a")
    extops.elementwise_mult(a, over_b, out=over_b)
    assert_same(over_b, product, "out is b")
    extops.elementwise_mult(square, square, out=square)
    assert_same(square, a * a, "out is both")


@by_device
@pytest.mark.parametrize("shift", [-7, -1, 1, 7])
def test_out_overlaps_an_input(shift: int, device: str) -> None:
    """Reading ahead of or behind the writing, `a` counts as it was before the call."""
    memory = torch.randn(5021, device=device)
    start = 10
    a = memory[start : start + 5000]
    out = memory[start + shift : start + shift + 5000]
    b = torch.randn(5000, device=device)
    expected = a * b
    extops.elementwise_mult(a, b, out=out)
    assert_same(out, expected)


@by_device
@pytest.mark.parametrize("shift", [-1, 1])
def test_out_overlaps_an_input_of_another_storage(shift: int, device: str) -> None:
    """Tensors of one array of NumPy, or of another library's memory, have a storage each."""
    memory = torch.randn(5021, device=device)
    a, out = (torch.from_dlpack(memory[start : start + 5000]) for start in (10, 10 + shift))
    b = torch.randn(5000, device=device)
    expected = a * b
    extops.elementwise_mult(a, b, out=out)
    assert_same(out, expected)


@by_device
def test_out_overlaps_by_broadcasting_or_transposing(device: str) -> None:
    square = torch.randn(65, 65, device=device)
    other = torch.randn(65, 65, device=device)
    expected = square * other
    flipped = square.clone()
    extops.elementwise_mult(flipped.t(), other, out=flipped)
    assert_same(flipped, square.t() * other, "a is the transpose of out")
    by_row = square.clone()
    extops.elementwise_mult(by_row[0], other, out=by_row)
    assert_same(by_row, square[0] * other, "a is the first row of out")
    assert_same(extops.elementwise_mult(square, other), expected)


@by_device
def test_out_may_want_a_gradient_under_no_grad(device: str) -> None:
    a, b = ELEMENTWISE_MULT.inputs("row", device, requires_grad=True)
    with torch.no_grad():
        out = torch.empty_like(a * b)
        extops.elementwise_mult(a, b, out=out)
        assert_same(out, a * b)
    assert not out.requires_grad
