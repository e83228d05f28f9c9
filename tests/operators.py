"""The table of the operators under test: samples, reference and the names of the arguments of each.

A test takes its operators, devices and dtypes from here, so that an operator added to the table is
tested everywhere.
"""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from ctypes import c_char_p
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import extops
import extops.reference
from extops.binding import _schemas
from extops.binding._libraries import library

Tensors = tuple[Tensor, ...]
Sample = Callable[[], Tensors]

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def name_kernel(name: str) -> None:
    """Makes all sequences on a GPU use a kernel; empty: the fastest."""
    library("cuda").entry("name_sequence_kernel", None, c_char_p)(name.encode())


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Operator:
    """An operator of the public interface."""

    name: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    samples: Mapping[str, Sample]
    """Makers of float64 inputs on the CPU, by the name of the case.

    Those named "threaded" are large enough for several threads on a CPU, which then meet in the
    middle of a row.
    """
    batch: Callable[[int], Tensors]
    """A maker of small inputs whose batch, the dimension that all rows share, has the given size."""
    exact: bool
    """Whether each result is the correctly rounded one, so equal to eager's bit for bit."""
    differentiable: bool
    """Whether the gradient is the derivative of the values (straight-through rounding's is not)."""
    ulps: float = 2
    """How far results and gradients may be off even where eager's are right by luck, in units in
    the last place of the largest value."""

    def __call__(self, *arguments: Tensor) -> Tensors:
        return as_tuple(self.function(*arguments))

    def eager(self, *arguments: Tensor) -> Tensors:
        return as_tuple(self.reference(*arguments))

    def inputs(
        self,
        case: str = "small",
        device: str = "cpu",
        dtype: torch.dtype = torch.float64,
        requires_grad: bool = False,
    ) -> Tensors:
        """New inputs of a case, leaves of the autograd graph."""
        return tuple(
            tensor.to(device, dtype).requires_grad_(requires_grad)
            for tensor in self.samples[case]()
        )


def as_tuple(result: Tensor | Sequence[Tensor]) -> Tensors:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def lltm_inputs(batch: int, features: int, state: int, spread: float = 1.0) -> Tensors:
    weights = torch.randn(3 * state, state + features, dtype=torch.float64)
    scale = spread / max(1, state + features) ** 0.5
    return (
        torch.randn(batch, features, dtype=torch.float64),
        weights * scale,
        torch.randn(3 * state, dtype=torch.float64) * scale,
        torch.randn(batch, state, dtype=torch.float64),
        torch.randn(batch, state, dtype=torch.float64),
    )


def cancelling_inputs(batch: int, features: int, state: int) -> Tensors:
    """The bias takes back large products: what is left is lost where a product is rounded before the sum."""
    weights = torch.randn(3 * state, state + features, dtype=torch.float64) * 0.05
    weights[:, state:] = 1 + 0.3 * torch.randn(3 * state, features, dtype=torch.float64)
    # Exact in every dtype: the products and the bias cancel only where their terms are the same.
    weights = weights.bfloat16().double()
    states = torch.randn(2, batch, state, dtype=torch.float64)
    bias = -weights[:, state:].sum(1).bfloat16().double()
    return torch.ones(batch, features, dtype=torch.float64), weights, bias, *states


def normal(*shapes: tuple[int, ...]) -> Tensors:
    return tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes)


def spread_out(*shape: int) -> Tensors:
    """Values on both sides of several halves."""
    return (torch.randn(shape, dtype=torch.float64) * 5,)


LLTM = Operator(
    name="lltm",
    function=extops.lltm,
    reference=extops.reference.lltm,
    arguments=("input", "weights", "bias", "old_h", "old_cell"),
    results=("new_h", "new_cell"),
    samples={
        "small": functools.partial(lltm_inputs, 3, 5, 4),
        "one": functools.partial(lltm_inputs, 1, 1, 1),
        "odd": functools.partial(lltm_inputs, 13, 33, 31),
        "tutorial": functools.partial(lltm_inputs, 16, 32, 128),
        # More rows than a CPU's vector has lanes, and not a multiple of them.
        "rows": functools.partial(lltm_inputs, 37, 5, 11),
        # On either side of the sizes at which each device changes from its own GEMM to a library's.
        "middle": functools.partial(lltm_inputs, 50, 130, 150),
        "large": functools.partial(lltm_inputs, 130, 300, 500),
        # What our own kernels for tensor cores take in 16-bit types.
        "tiles": functools.partial(lltm_inputs, 50, 96, 192),
        "long_rows": functools.partial(lltm_inputs, 2, 3, 523),
        "threaded": functools.partial(lltm_inputs, 501, 2, 301),
        "saturated": functools.partial(lltm_inputs, 5, 7, 9, spread=60.0),
        # By our own GEMMs and by a library's.
        "cancelling": functools.partial(cancelling_inputs, 16, 16, 128),
        "large_cancelling": functools.partial(cancelling_inputs, 130, 16, 512),
        "empty_batch": functools.partial(lltm_inputs, 0, 5, 4),
        "no_features": functools.partial(lltm_inputs, 3, 0, 4),
        "no_state": functools.partial(lltm_inputs, 3, 5, 0),
    },
    batch=lambda size: lltm_inputs(size, 5, 4),
    exact=False,
    differentiable=True,
)

ROUND_STE = Operator(
    name="round_ste",
    function=extops.round_ste,
    reference=extops.reference.round_ste,
    arguments=("input",),
    results=("output",),
    samples={
        "small": functools.partial(spread_out, 5, 7),
        "scalar": spread_out,
        "one": functools.partial(spread_out, 1),
        "odd": functools.partial(spread_out, 3, 11, 31),
        "vector": functools.partial(spread_out, 1023),
        "threaded": functools.partial(spread_out, 501, 301),
        "deep": functools.partial(spread_out, 2, 3, 4, 5, 6),
        "empty": functools.partial(spread_out, 0, 3),
    },
    batch=lambda size: spread_out(size, 5),
    exact=True,
    differentiable=False,
)

ELEMENTWISE_MULT = Operator(
    name="elementwise_mult",
    function=extops.elementwise_mult,
    reference=extops.reference.elementwise_mult,
    arguments=("a", "b"),
    results=("output",),
    samples={
        "small": functools.partial(normal, (4, 5), (4, 5)),
        "one": functools.partial(normal, (1,), (1,)),
        "odd": functools.partial(normal, (3, 11, 31), (3, 11, 31)),
        "vectors": functools.partial(normal, (1023,), (1023,)),
        "scalars": functools.partial(normal, (), ()),
        "scalar_a": functools.partial(normal, (), (3, 4)),
        "scalar_b": functools.partial(normal, (3, 4), ()),
        "row": functools.partial(normal, (6, 7), (7,)),
        "column": functools.partial(normal, (6, 7), (6, 1)),
        "outer": functools.partial(normal, (6, 1), (1, 7)),
        "threaded": functools.partial(normal, (501, 301), (501, 301)),
        "threaded_broadcast": functools.partial(normal, (3, 501, 101), (501, 1)),
        "many_dims": functools.partial(normal, (2, 1, 3, 1, 2, 1, 2), (4, 1, 2, 1, 3, 1)),
        "empty": functools.partial(normal, (0, 3), (0, 3)),
        "empty_broadcast": functools.partial(normal, (0, 3), (1, 3)),
    },
    batch=lambda size: normal((size, 5), (size, 5)),
    exact=True,
    differentiable=True,
)


def sequence_inputs(
    time: int, batch: int, features: int, state: int, spread: float = 1.0
) -> Tensors:
    _, weights, bias, h_0, c_0 = lltm_inputs(batch, features, state, spread)
    (input,) = normal((time, batch, features))
    return input, h_0, c_0, weights, bias


def cancelling_sequence_inputs() -> Tensors:
    input, weights, bias, h_0, c_0 = cancelling_inputs(16, 16, 128)
    return input.expand(3, -1, -1).clone(), h_0, c_0, weights, bias


def sequence(
    input: Tensor, h_0: Tensor, c_0: Tensor, weights: Tensor, bias: Tensor, **options: Any
) -> Tensors:
    output, (h_n, c_n) = extops.lltm_sequence(input, (h_0, c_0), weights, bias, **options)
    return output, h_n, c_n


def by_cells(
    step: Callable[..., Tensors],
    input: Tensor,
    states: Tensors,
    *parameters: Tensor,
    lengths: Tensor | None = None,
    batch_first: bool = False,
    reverse: bool = False,
) -> Tensors:
    """The definition: one cell after another, of which `step` computes one."""
    if batch_first:
        input = input.transpose(0, 1)
    outputs = []
    steps = list(enumerate(input))
    for t, of_step in reversed(steps) if reverse else steps:
        new = step(of_step, *states, *parameters)
        valid = torch.ones_like(new[0][:, :1]).bool()
        if lengths is not None:
            valid = (t < lengths)[:, None]
        states = tuple(torch.where(valid, x, old) for x, old in zip(new, states, strict=True))
        outputs.append(torch.where(valid, new[0], 0))
    output = torch.stack(outputs[::-1] if reverse else outputs)
    return output.transpose(0, 1) if batch_first else output, *states


def sequence_by_cells(
    input: Tensor, h: Tensor, c: Tensor, weights: Tensor, bias: Tensor, **options: Any
) -> Tensors:
    def step(input: Tensor, h: Tensor, c: Tensor, weights: Tensor, bias: Tensor) -> Tensors:
        return extops.reference.lltm(input, weights, bias, h, c)

    return by_cells(step, input, (h, c), weights, bias, **options)


def inputs_of_torch(
    gates: int,
    states: int,
    time: int,
    batch: int,
    features: int,
    state: int,
    spread: float = 1.0,
) -> Tensors:
    """The input, the states and the parameters of one direction of a layer of torch's."""
    input, *given = normal((time, batch, features), *[(batch, state)] * states)
    rows = gates * state
    parameters = normal((rows, features), (rows, state), (rows,), (rows,))
    scale = spread / max(1, state + features) ** 0.5
    return input, *given, *(x * scale for x in parameters)


def lstm_sequence(
    input: Tensor, h: Tensor, c: Tensor, w_ih: Tensor, w_hh: Tensor, *bias: Tensor, **options: Any
) -> Tensors:
    output, last = extops.lstm_sequence(input, (h, c), w_ih, w_hh, bias, **options)
    return output, *last


def lstm_by_cells(input: Tensor, h: Tensor, c: Tensor, *parameters: Tensor, **options: Any) -> Any:
    def step(
        input: Tensor, h: Tensor, c: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor
    ) -> Tensors:
        # Not torch.lstm_cell, which vmap does not know.
        gates = F.linear(input, w_ih, b_ih) + F.linear(h, w_hh, b_hh)
        i, f, g, o = gates.chunk(4, dim=1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c

    return by_cells(step, input, (h, c), *parameters, **options)


def gru_sequence(
    input: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, *bias: Tensor, **options: Any
) -> Tensors:
    return extops.gru_sequence(input, h, w_ih, w_hh, bias, **options)


def gru_by_cells(input: Tensor, h: Tensor, *parameters: Tensor, **options: Any) -> Any:
    def step(
        input: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor
    ) -> Tensors:
        # Not torch.gru_cell, which has no forward mode on GPUs.
        r, z, n = F.linear(input, w_ih, b_ih).chunk(3, dim=1)
        of_r, of_z, of_n = F.linear(h, w_hh, b_hh).chunk(3, dim=1)
        n = torch.tanh(n + torch.sigmoid(r + of_r) * of_n)
        return (n + torch.sigmoid(z + of_z) * (h - n),)

    return by_cells(step, input, (h,), *parameters, **options)


def rnn_by_cells(
    input: Tensor, h: Tensor, *parameters: Tensor, nonlinearity: str = "tanh", **options: Any
) -> Any:
    def step(
        input: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor
    ) -> Tensors:
        function = getattr(torch, nonlinearity)
        return (function(F.linear(input, w_ih, b_ih) + F.linear(h, w_hh, b_hh)),)

    return by_cells(step, input, (h,), *parameters, **options)


LLTM_SEQUENCE = Operator(
    name="lltm_sequence",
    function=sequence,
    reference=sequence_by_cells,
    arguments=("input", "h_0", "c_0", "weights", "bias"),
    results=("output", "h_n", "c_n"),
    samples={
        "small": functools.partial(sequence_inputs, 2, 3, 2, 3),
        "one": functools.partial(sequence_inputs, 1, 1, 1, 1),
        "odd": functools.partial(sequence_inputs, 3, 13, 33, 31),
        "threaded": functools.partial(sequence_inputs, 2, 501, 2, 301),
        "cancelling": cancelling_sequence_inputs,
        "empty_batch": functools.partial(sequence_inputs, 2, 0, 5, 4),
        "no_features": functools.partial(sequence_inputs, 2, 3, 0, 4),
        "no_state": functools.partial(sequence_inputs, 2, 3, 5, 0),
    },
    batch=lambda size: sequence_inputs(2, size, 5, 4),
    exact=False,
    differentiable=True,
    ulps=8,  # the product of each step is made of two, and errors travel from step to step
)

SEQUENCE_INPUTS: Mapping[str, Callable[..., Tensors]] = {
    "lltm_sequence": sequence_inputs,
    "lstm_sequence": functools.partial(inputs_of_torch, 4, 2),
    "gru_sequence": functools.partial(inputs_of_torch, 3, 1),
}
"""Makers of inputs by time, batch, features, state and spread."""


def operator_of_torch(
    cell: str, states: str, function: Callable[..., Any], reference: Callable[..., Any]
) -> Operator:
    make = SEQUENCE_INPUTS[f"{cell}_sequence"]
    return Operator(
        name=f"{cell}_sequence",
        function=function,
        reference=reference,
        arguments=(
            "input",
            *(f"{x}_0" for x in states),
            *("weight_ih", "weight_hh", "bias_ih", "bias_hh"),
        ),
        results=("output", *(f"{x}_n" for x in states)),
        samples={
            "small": functools.partial(make, 2, 3, 2, 3),
            "one": functools.partial(make, 1, 1, 1, 1),
            "odd": functools.partial(make, 3, 13, 33, 31),
            "threaded": functools.partial(make, 2, 501, 2, 301),
            "empty_batch": functools.partial(make, 2, 0, 5, 4),
            "no_features": functools.partial(make, 2, 3, 0, 4),
            "no_state": functools.partial(make, 2, 3, 5, 0),
        },
        batch=lambda size: make(2, size, 5, 4),
        exact=False,
        differentiable=True,
        ulps=8,
    )


LSTM_SEQUENCE = operator_of_torch("lstm", "hc", lstm_sequence, lstm_by_cells)
GRU_SEQUENCE = operator_of_torch("gru", "h", gru_sequence, gru_by_cells)
SEQUENCES = LLTM_SEQUENCE, LSTM_SEQUENCE, GRU_SEQUENCE

# A new operator's samples come here.

OPERATORS = (
    LLTM,
    ROUND_STE,
    ELEMENTWISE_MULT,
    *SEQUENCES,
)

by_device = pytest.mark.parametrize("device", ["cpu", GPU])
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
by_operator = pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
# For tests that take seconds and see no kernel: of the sequences, the LLTM's stands for all, except under --thorough.
by_few_operators = pytest.mark.parametrize(
    "operator",
    [
        pytest.param(x, id=x.name, marks=pytest.mark.slow if x in SEQUENCES[1:] else ())
        for x in OPERATORS
    ],
)
by_sequence = pytest.mark.parametrize(
    "operator", SEQUENCES, ids=[operator.name for operator in SEQUENCES]
)
by_differentiable_operator = pytest.mark.parametrize(
    "operator",
    [operator for operator in OPERATORS if operator.differentiable],
    ids=lambda operator: operator.name,
)
by_case = pytest.mark.parametrize(
    ("operator", "case"),
    [
        pytest.param(operator, case, id=f"{operator.name}-{case}")
        for operator in OPERATORS
        for case in operator.samples
    ],
)


# Batch, features and state: one far beyond what the grid of a GPU has in two of its three dimensions.
by_long_sizes = pytest.mark.parametrize(
    "sizes", [(1, 2_200_000, 1), (2_200_000, 1, 1)], ids=["features", "batch"]
)


def needs_programs(*programs: str) -> None:
    """Skips the running test where the programs with which it compiles are missing."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"compiles code, but finds no {' and no '.join(missing)}")


def needs_inductor() -> None:
    """Skips the running test where torch.compile's inductor can compile nothing for the CPU."""
    needs_programs("c++")
    if " " in torch.__file__:
        pytest.skip("inductor does not quote the path of torch's libraries, which has a space here")


def upstream(results: Tensors) -> Tensors:
    """Random gradients for the results of an operator."""
    return tuple(
        torch.randn(result.shape, dtype=torch.float64).to(result.device, result.dtype)
        for result in results
    )


def gradients(
    function: Callable[..., Any], inputs: Tensors, upstream_gradients: Tensors
) -> tuple[Tensors, Tensors]:
    """The results of a function on fresh copies of the inputs, and the gradients of all of them."""
    leaves = tuple(tensor.detach().clone().requires_grad_() for tensor in inputs)
    results = as_tuple(function(*leaves))
    return results, torch.autograd.grad(results, leaves, upstream_gradients)


def assert_as_accurate_as_eager(
    name: str, actual: Tensor, eager: Tensor, exact: Tensor, ulps: float
) -> None:
    """Checks that the error against the exact values is at most 1.5 times that of eager PyTorch.

    `ulps` units in the last place of the largest value are granted beyond that: eager may be right
    by luck.
    """
    assert actual.dtype == eager.dtype, f"{name}: dtype {actual.dtype}, eager's is {eager.dtype}"
    assert actual.device == eager.device, f"{name}: on {actual.device}, eager's on {eager.device}"
    assert actual.shape == exact.shape, f"{name}: shape {actual.shape}, not {exact.shape}"
    if exact.numel() == 0:
        return
    assert bool(torch.isfinite(actual).all()), f"{name}: not finite"
    error = (actual.double() - exact).abs().max().item()
    eager_error = (eager.double() - exact).abs().max().item()
    if actual.dtype == torch.float64:
        # The exact values are eager's own here. Only the order of sums differs, which may cost ten bits where they
        # cancel: how many depends on the processor, for which the library chooses its code.
        ulps = max(ulps, 1024)
    floor = ulps * torch.finfo(actual.dtype).eps * exact.abs().max().item()
    assert error <= 1.5 * eager_error + floor, (
        f"{name}: error {error:.3g}, but eager's is {eager_error:.3g} and the floor {floor:.3g}"
    )


# -- layouts: the same shape at other strides and storage offsets --------------------------------


def transposed(tensor: Tensor) -> Tensor:
    """A copy with the dimensions laid out in reverse order."""
    order = tuple(reversed(range(tensor.ndim)))
    return tensor.permute(order).contiguous().permute(order)


def sliced(tensor: Tensor) -> Tensor:
    """A copy that is every second element of a larger tensor, whose other elements are NaN."""
    larger = tensor.new_full([*tensor.shape, 2], float("nan"))
    larger[..., 1] = tensor
    return larger[..., 1]


def padded(tensor: Tensor) -> Tensor:
    """A copy whose rows have a gap of NaN between them: the last dimension is dense."""
    if tensor.ndim == 0:
        return offset(tensor)
    larger = tensor.new_full([*tensor.shape[:-1], tensor.shape[-1] + 3], float("nan"))
    view = larger[..., 1:-2]
    view.copy_(tensor)
    return view


def offset(tensor: Tensor) -> Tensor:
    """A contiguous copy that starts one element into its storage, so misaligned for vectors."""
    larger = tensor.new_full([tensor.numel() + 2], float("nan"))
    view = larger[1:-1].view(tensor.shape)
    view.copy_(tensor)
    return view


def negated(tensor: Tensor) -> Tensor:
    """A copy that is stored with the opposite sign and PyTorch's lazy negation bit set."""
    return torch._neg_view(-tensor)


def channels_last(tensor: Tensor) -> Tensor:
    """A copy whose second dimension is the innermost, as images are kept."""
    if tensor.ndim < 3:
        return tensor.contiguous()
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1)


def expanded(tensor: Tensor) -> Tensor:
    """The first row for all, by a stride of 0."""
    return tensor[:1].expand_as(tensor) if tensor.ndim else tensor


def one_value(tensor: Tensor) -> Tensor:
    """The first element for all: every stride is 0."""
    return tensor.flatten()[0].expand_as(tensor) if tensor.numel() else tensor


def overlapping(tensor: Tensor) -> Tensor:
    """The first values of the memory, each dimension a step of one: elements share memory."""
    return tensor.contiguous().as_strided(tensor.shape, [1] * tensor.ndim)


Layout = Callable[[Tensor], Tensor]
# Each element has a place of its own.
WRITABLE_LAYOUTS: Mapping[str, Layout] = {
    "contiguous": lambda tensor: tensor.contiguous(),
    "transposed": transposed,
    "channels_last": channels_last,
    "sliced": sliced,
    "padded": padded,
    "offset": offset,
    "negated": negated,
}
LAYOUTS: Mapping[str, Layout] = {
    **WRITABLE_LAYOUTS,
    "expanded": expanded,
    "one_value": one_value,
    "overlapping": overlapping,
}
by_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
by_writable_layout = pytest.mark.parametrize(
    "layout", WRITABLE_LAYOUTS.values(), ids=WRITABLE_LAYOUTS.keys()
)


# -- the operators that are registered with the dispatcher ---------------------------------------


@dataclass(frozen=True)
class Call:
    """A call of a registered operator."""

    arguments: tuple[Tensor | float | None, ...]
    keywords: Mapping[str, Any]

    def requiring_grad(self) -> Call:
        return Call(
            tuple(
                x.detach().requires_grad_()
                if isinstance(x, Tensor) and x.is_floating_point()
                else x
                for x in self.arguments
            ),
            self.keywords,
        )


def call(*arguments: Tensor | float | None, **keywords: Any) -> Call:
    return Call(arguments, keywords)


Maker = Callable[..., Tensor]


def maker(device: str, dtype: torch.dtype = torch.float32) -> Maker:
    return lambda *shape: torch.randn(shape, device=device, dtype=dtype)


def calls_by_table(name: str) -> Callable[[Maker], Iterator[Call]]:
    """Calls of an operator with a table: rows of 3, which no other size is."""
    operator = _schemas.OPERATORS[name]

    def calls(make: Maker) -> Iterator[Call]:
        def tensors(*sizes: int) -> Tensors:
            named = dict(zip(operator.sizes, sizes, strict=False))
            return tuple(make(*_schemas.shape_of(row, named)) for row in operator.arguments)

        small = tensors(3, 5, 4, 2)
        yield call(*small)
        for place, row in enumerate(operator.arguments):
            if row.optional:
                yield call(*small[:place], None, *small[place + 1 :])
        for layout in (transposed, sliced, expanded, one_value):
            yield call(*(layout(tensor) for tensor in small))
        yield call(*tensors(0, 5, 4, 2))
        yield call(*tensors(160, 300, 400, 2))

    return calls


def sequence_calls(name: str) -> Callable[[Maker], Iterator[Call]]:
    operator = _schemas.OPERATORS[name]

    def calls(make: Maker) -> Iterator[Call]:
        def arguments(time: int, batch: int, features: int, state: int) -> Tensors:
            given = time, batch, features, state, state  # the units of all directions, and of one
            sizes = dict(zip(operator.sizes, given, strict=True))
            return tuple(make(*_schemas.shape_of(row, sizes)) for row in operator.arguments)

        small = arguments(2, 3, 5, 4)
        lengths = torch.tensor([2, 0, 1], device=small[0].device)
        yield call(*small, None)
        yield call(*small, lengths, reverse=True)
        yield call(*map(transposed, small), lengths)
        is_sequence = [row.axes.startswith("time, ") for row in operator.arguments]
        batch_first = [
            x.transpose(0, 1).contiguous().transpose(0, 1) if steps else x
            for x, steps in zip(small, is_sequence, strict=True)
        ]
        yield call(*batch_first, None, reverse=True)
        for sizes in ((0, 3, 5, 4), (2, 0, 5, 4), (2, 3, 0, 4), (2, 3, 5, 0)):
            yield call(*arguments(*sizes), None)
        if operator.arguments[0].optional:
            yield call(None, *small[1:], lengths)
            yield call(small[0], None, None, *small[3:], None, reverse=True)
            yield call(make(1, 1, 1).expand(2, 3, 4), *map(transposed, small[1:]), None)
        else:
            yield call(*small, lengths, training=False)
            yield call(*batch_first, None, training=False)
            for place, row in enumerate(operator.arguments):
                if row.optional:
                    yield call(*small[:place], None, *small[place + 1 :], None)

    return calls


def elementwise_calls(make: Maker, operator: _schemas.Operator) -> Iterator[Call]:
    """Calls of an elementwise operator: its first two inputs broadcast where it has as many."""
    inputs = len(operator.arguments) - bool(operator.out)
    numbers = [0.5 + place for place in range(operator.numbers)]

    def with_output(tensors: Iterable[Tensor], output: Tensor) -> Call:
        out = {operator.out: output} if operator.out else {}
        return call(*itertools.islice(tensors, inputs), *numbers, **out)

    for shape in ((4, 5), (), (0, 3)):
        yield with_output((make(*shape) for _ in range(inputs)), make(*shape))
    laid_out = [transposed(make(4, 5)), sliced(make(4, 5)), make(4, 5)]
    yield with_output(itertools.cycle(laid_out), transposed(make(4, 5)))
    image = make(2, 3, 4, 5).to(memory_format=torch.channels_last)
    yield with_output((torch.randn_like(image) for _ in range(inputs)), make(2, 3, 4, 5))
    broadcast = [make(4, 1), make(5), make(1, 1).expand(4, 5)]
    yield with_output(itertools.cycle(broadcast), make(4, 5 if inputs > 1 else 1))


def registered_names() -> list[str]:
    """The names of all operators that PyTorch knows in the namespace `extops`."""
    names = torch._C._dispatch_get_all_op_names()
    prefix = "extops::"
    return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))


WITH_TABLES: Mapping[str, Callable[[Maker], Iterator[Call]]] = {
    name: (sequence_calls if "_sequence" in name else calls_by_table)(name)
    for name in registered_names()
    if _schemas.OPERATORS[name].sizes
}
REGISTERED: Mapping[str, Callable[[Maker], Iterator[Call]]] = WITH_TABLES | {
    name: functools.partial(elementwise_calls, operator=_schemas.OPERATORS[name])
    for name in registered_names()
    if name not in WITH_TABLES
}
