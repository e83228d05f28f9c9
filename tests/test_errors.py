"""Bad input: a Python error that names the argument, what was given and what is expected."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import extops
from extops.binding import _devices, _loader, _schemas
from extops.calling import _errors
from extops.ops import compositions
from operators import (
    ELEMENTWISE_MULT,
    GPU,
    LLTM,
    OPERATORS,
    REGISTERED,
    SEQUENCES,
    WITH_TABLES,
    Call,
    Operator,
    Tensors,
    by_device,
    by_dtype,
    by_few_operators,
    by_operator,
    gradients,
    lltm_inputs,
    maker,
    upstream,
)
from processes import run_alone

# Each argument of each operator, and each but the first, to which the others are compared.
by_argument = pytest.mark.parametrize(
    ("operator", "place"),
    [
        pytest.param(operator, place, id=f"{operator.name}-{name}")
        for operator in OPERATORS
        for place, name in enumerate(operator.arguments)
    ],
)
by_later_argument = pytest.mark.parametrize(
    ("operator", "place"),
    [
        pytest.param(operator, place, id=f"{operator.name}-{name}")
        for operator in OPERATORS
        for place, name in enumerate(operator.arguments)
        if place > 0
    ],
)


def expect_error(operator: Operator, argument: str, *parts: str):
    """Expects an error that begins with the operator's name and contains the parts in order."""
    pattern = ".*".join(re.escape(part) for part in (f"`{argument}`", *parts))
    return pytest.raises(RuntimeError, match=f"(?s)^{operator.name}: .*{pattern}")


def call_with(operator: Operator, place: int, replace: Callable[[Tensor], Tensor], device: str):
    inputs = list(operator.inputs("small", device, torch.float32))
    inputs[place] = replace(inputs[place])
    operator(*inputs)


# -- dtypes --------------------------------------------------------------------------------------

REFUSED = [torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64, torch.complex128]


@by_device
@pytest.mark.parametrize("dtype", REFUSED, ids=str)
@by_operator
def test_not_floating_point(operator: Operator, dtype: torch.dtype, device: str) -> None:
    inputs = [tensor.to(dtype) for tensor in operator.inputs("small", device)]
    with expect_error(operator, operator.arguments[0], "floating-point", "float32", str(dtype)):
        operator(*inputs)


@by_device
def test_float8(device: str) -> None:
    for operator in OPERATORS:
        inputs = [tensor.to(torch.float8_e5m2) for tensor in operator.inputs("small", device)]
        with expect_error(operator, operator.arguments[0], "floating-point", "float8_e5m2"):
            operator(*inputs)


@by_device
@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64], ids=str)
@by_argument
def test_one_argument_not_floating_point(
    operator: Operator, place: int, dtype: torch.dtype, device: str
) -> None:
    with expect_error(operator, operator.arguments[place], "float32", "got", str(dtype)):
        call_with(operator, place, lambda tensor: tensor.to(dtype), device)


@by_device
@by_later_argument
def test_mixed_dtypes(operator: Operator, place: int, device: str) -> None:
    argument = operator.arguments[place]
    with expect_error(operator, argument, "torch.float32", "got", "torch.float64"):
        call_with(operator, place, Tensor.double, device)
    with expect_error(operator, argument, "torch.float32", "got", "torch.float16"):
        call_with(operator, place, Tensor.half, device)


# -- devices and layouts -------------------------------------------------------------------------


@by_later_argument
def test_mixed_devices(operator: Operator, place: int) -> None:
    with expect_error(operator, operator.arguments[place], "cpu", "got", "meta"):
        call_with(operator, place, lambda tensor: tensor.to("meta"), "cpu")


@pytest.mark.parametrize("device", [GPU])
@by_later_argument
def test_cpu_and_gpu(operator: Operator, place: int, device: str) -> None:
    with expect_error(operator, operator.arguments[place], "cpu", "got", "cuda:0"):
        call_with(operator, place, lambda tensor: tensor.to(device), "cpu")
    with expect_error(operator, operator.arguments[place], "cuda:0", "got", "cpu"):
        call_with(operator, place, lambda tensor: tensor.cpu(), device)


def sparse(tensor: Tensor) -> Tensor:
    """`Tensor.to_sparse` takes no scalar."""
    if tensor.ndim:
        return tensor.to_sparse()
    return torch.sparse_coo_tensor(size=(), dtype=tensor.dtype, device=tensor.device)


@by_device
@by_argument
def test_sparse(operator: Operator, place: int, device: str) -> None:
    argument = operator.arguments[place]
    layouts = {"torch.sparse_coo": sparse}
    if operator.inputs()[place].ndim > 1:  # which CSR needs
        layouts["torch.sparse_csr"] = Tensor.to_sparse_csr
    for name, to_layout in layouts.items():
        with expect_error(operator, argument, "dense (strided)", "got", name):
            call_with(operator, place, to_layout, device)


@by_argument
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested(operator: Operator, place: int, layout: torch.layout) -> None:
    """The message names what does make it dense: a jagged tensor has no `to_dense`."""
    if layout is torch.jagged and operator.inputs()[place].ndim == 0:
        pytest.skip("torch makes no jagged tensor of scalars")
    words = "dense (strided)", "nested", "to_padded_tensor(0.0)"
    with expect_error(operator, operator.arguments[place], *words):
        call_with(
            operator,
            place,
            lambda tensor: torch.nested.nested_tensor([tensor], layout=layout),
            "cpu",
        )


@by_argument
def test_mkldnn(operator: Operator, place: int) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no MKL-DNN, so no tensors of its layout")
    if operator.inputs()[place].ndim == 0:
        pytest.skip("MKL-DNN has no scalars")
    with expect_error(operator, operator.arguments[place], "dense (strided)", "torch._mkldnn"):
        call_with(operator, place, Tensor.to_mkldnn, "cpu")


# -- ranks and sizes -----------------------------------------------------------------------------


@by_device
@pytest.mark.parametrize("place", range(5), ids=LLTM.arguments)
def test_lltm_rank(place: int, device: str) -> None:
    argument = LLTM.arguments[place]
    right = LLTM.inputs("small")[place].shape
    for wrong in ((1, *right), right[1:], ()):
        with expect_error(LLTM, argument, "got", str(list(wrong))):
            call_with(LLTM, place, lambda tensor: tensor.new_zeros(wrong), device)  # noqa: B023


# Batch 3, 5 features, a state of 4: what a size is changed to, and the expected and given shapes.
WRONG_SIZES = [
    ("weights", (12, 8), "[12, 9]"),
    ("weights", (13, 9), "[12, 9]"),
    ("weights", (9, 12), "[12, 9]"),
    ("weights", (0, 0), "[12, 9]"),
    ("bias", (11,), "[12]"),
    ("bias", (1,), "[12]"),
    ("old_h", (2, 4), "[3, 4]"),
    ("old_h", (1, 4), "[3, 4]"),
    ("old_cell", (2, 4), "[3, 4]"),
    ("old_cell", (3, 1), "[3, 4]"),
    ("old_cell", (1, 4), "[3, 4]"),
    ("old_cell", (0, 4), "[3, 4]"),
]


@by_device
@pytest.mark.parametrize(("argument", "given", "expected"), WRONG_SIZES, ids=str)
def test_lltm_sizes(argument: str, given: tuple[int, ...], expected: str, device: str) -> None:
    with expect_error(LLTM, argument, expected, "got", str(list(given))):
        call_with(
            LLTM, LLTM.arguments.index(argument), lambda tensor: tensor.new_zeros(given), device
        )


@by_device
def test_lltm_sizes_that_disagree_with_several(device: str) -> None:
    """Other features or another state size: the message names both shapes that disagree."""
    with expect_error(LLTM, "weights", "[12, 10]", "got [12, 9]", "from `input` of shape [3, 6]"):
        call_with(LLTM, 0, lambda tensor: tensor.new_zeros(3, 6), device)
    with pytest.raises(RuntimeError, match=r"^lltm: .*\[\d+, \d+\].*got \[\d+, \d+\]"):
        call_with(LLTM, 3, lambda tensor: tensor.new_zeros(3, 6), device)


@by_device
@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [((2, 3), (4,)), ((2, 3), (3, 2)), ((2, 3), (0, 3)), ((5, 1, 3), (2, 4, 3)), ((2,), (3,))],
    ids=str,
)
def test_multiply_sizes(a_shape: tuple[int, ...], b_shape: tuple[int, ...], device: str) -> None:
    a, b = torch.randn(a_shape, device=device), torch.randn(b_shape, device=device)
    shapes = (str(list(a_shape)), "`b`", str(list(b_shape)), "broadcast")
    with expect_error(ELEMENTWISE_MULT, "a", *shapes):
        extops.elementwise_mult(a, b)


# -- out= ----------------------------------------------------------------------------------------


def multiply_into(out: Tensor, device: str) -> None:
    a, b = ELEMENTWISE_MULT.inputs("row", device, torch.float32)  # shape [6, 7]
    extops.elementwise_mult(a, b, out=out)


@by_device
@pytest.mark.parametrize("shape", [(7, 6), (42,), (7,), (1, 6, 7), (0,), ()], ids=str)
def test_out_shape(shape: tuple[int, ...], device: str) -> None:
    out = torch.full(shape, 7.0, device=device)
    with expect_error(ELEMENTWISE_MULT, "out", "[6, 7]", "got", str(list(shape))):
        multiply_into(out, device)
    assert out.shape == shape and bool((out == 7).all())


@by_device
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64], ids=str)
def test_out_dtype(dtype: torch.dtype, device: str) -> None:
    with expect_error(ELEMENTWISE_MULT, "out", "float32", "got", str(dtype)):
        multiply_into(torch.empty(6, 7, dtype=dtype, device=device), device)


@by_device
def test_out_device(device: str) -> None:
    with expect_error(ELEMENTWISE_MULT, "out", device, "got", "meta"):
        multiply_into(torch.empty(6, 7, device="meta"), device)


@pytest.mark.parametrize("device", [GPU])
def test_out_on_the_cpu(device: str) -> None:
    with expect_error(ELEMENTWISE_MULT, "out", "cuda:0", "got", "cpu"):
        multiply_into(torch.empty(6, 7), device)


@by_device
def test_out_layout(device: str) -> None:
    with expect_error(ELEMENTWISE_MULT, "out", "dense (strided)", "got", "torch.sparse_coo"):
        multiply_into(torch.zeros(6, 7, device=device).to_sparse(), device)


@by_device
@pytest.mark.parametrize("wanting", ["a", "b", "out"])
def test_out_where_a_gradient_is_wanted(wanting: str, device: str) -> None:
    tensors = {name: torch.randn(6, 7, device=device) for name in ("a", "b", "out")}
    tensors[wanting].requires_grad_()
    for function in (extops.elementwise_mult, torch.ops.extops.elementwise_mult_out):
        with expect_error(ELEMENTWISE_MULT, "out", "gradient", "no_grad"):
            function(tensors["a"], tensors["b"], out=tensors["out"])


@by_device
def test_registered_out_where_tangents_are_wanted(device: str) -> None:
    a, out = torch.randn(2, 6, 7, device=device)
    with (
        forward_ad.dual_level(),
        pytest.raises(RuntimeError, match=r"elementwise_mult_out .*forward-mode"),
    ):
        torch.ops.extops.elementwise_mult_out(forward_ad.make_dual(a, a), a, out)


@by_device
def test_out_of_inference_mode(device: str) -> None:
    """torch refuses to write its tensors elsewhere, since it does not count what is written to them."""
    with torch.inference_mode():
        out = torch.full((6, 7), 7.0, device=device)
    for a in (torch.ones(6, 7, device=device), out):
        with expect_error(ELEMENTWISE_MULT, "out", "inference tensor", "inference_mode"):
            extops.elementwise_mult(a, a, out=out)
    assert bool((out == 7).all())
    with torch.inference_mode():
        extops.elementwise_mult(out, out, out=out)
    assert bool((out == 49).all())


@by_device
@pytest.mark.parametrize("strides", [(0, 1), (1, 0), (1, 1), (6, 1), (3, 5)], ids=str)
def test_out_of_elements_that_share_memory(strides: tuple[int, int], device: str) -> None:
    """What would be the value of an element that is written twice?"""
    memory = torch.full((64,), 7.0, device=device)
    with expect_error(ELEMENTWISE_MULT, "out", "location of its own", "[6, 7]", str(list(strides))):
        multiply_into(memory.as_strided((6, 7), strides), device)
    assert bool((memory == 7).all())


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_out_of_elements_that_share_no_memory_where_new_tensors_have_none() -> None:
    """Strides that may share memory, but do not: beside another default device, and in a tensor without values."""
    a = torch.randn(4, 4)
    memory = torch.empty(40)
    with torch.device("meta"):
        extops.elementwise_mult(a, a, out=memory.as_strided((4, 4), (5, 3)))
    assert torch.equal(memory.as_strided((4, 4), (5, 3)), a * a)
    with FakeTensorMode() as mode:
        fake, out = mode.from_tensor(a), mode.from_tensor(memory).as_strided((4, 4), (5, 3))
        assert extops.elementwise_mult(fake, fake, out=out) is out


# -- the module ----------------------------------------------------------------------------------


@by_device
def test_module(device: str) -> None:
    module = extops.LLTM(5, 4, device=device)
    h, c = torch.zeros(2, 3, 4, device=device)
    with expect_error(LLTM, "weights", "got [12, 9]", "input_features from `input`", "[3, 6]"):
        module(torch.zeros(3, 6, device=device), (h, c))
    for state in ((h, c), None):
        with expect_error(LLTM, "input", "float64"):
            module(torch.zeros(3, 5, device=device, dtype=torch.int64), state)
    with expect_error(LLTM, "input", "2 dimensions", "got 1 dimension: [5]"):
        module(torch.zeros(5, device=device))
    with pytest.raises(TypeError, match=r"^lltm: .*`input`.*torch.Tensor.*list"):
        module([1.0])


@by_device
def test_layer(device: str) -> None:
    layer = extops.LLTMLayer(5, 4, num_layers=2, device=device)
    input, h_0, c_0 = (torch.zeros(shape, device=device) for shape in [(6, 3, 5), *[(2, 3, 4)] * 2])
    with pytest.raises(RuntimeError, match=r"^LLTMLayer: .*`input`.*3 dim.*got 1: \[5\]"):
        layer(input[0, 0])
    with pytest.raises(RuntimeError, match=r"^LLTMLayer: .*`input`.*floating.*int64"):
        layer(input.long())
    with pytest.raises(TypeError, match=r"^LLTMLayer: .*`input`.*torch.Tensor.*list"):
        layer([input])
    with pytest.raises(RuntimeError, match=r"^LLTMLayer: .*`h_0`.*\[2, 3, 4\].*got \[3, 4\]"):
        layer(input, (h_0[0], c_0[0]))
    with pytest.raises(RuntimeError, match=r"^LLTMLayer: .*`c_0`.*\[2, 3, 4\].*got \[1, 3, 4\]"):
        layer(input, (h_0, c_0[:1]))
    with pytest.raises(TypeError, match=r"^LLTMLayer: .*`c_0`.*torch.Tensor.*NoneType"):
        layer(input, (h_0, None))


@by_device
@pytest.mark.parametrize(
    ("make", "given"),
    [
        (lambda x: None, "NoneType"),
        (lambda x: (x, x, x), "tuple of 3 items"),
        (lambda x: [x], "list of 1 items"),
        (lambda x: x, "Tensor of 3 items"),
        (lambda x: 7, "int"),
    ],
    ids=["none", "three", "one", "tensor", "number"],
)
def test_state_that_is_no_pair(make: Callable[[Tensor], object], given: str, device: str) -> None:
    input, weights, bias, h, _ = LLTM.inputs("small", device, torch.float32)
    state = make(h)
    for name, call in {
        "LLTM": lambda: extops.LLTM(5, 4, device=device)(input, state),
        "LLTMLayer": lambda: extops.LLTMLayer(5, 4, device=device)(input, state),
        "lltm_sequence": lambda: extops.lltm_sequence(input[None], state, weights, bias),
    }.items():
        if name != "lltm_sequence" and state is None:
            continue  # where it stands for zeros
        with pytest.raises(TypeError, match=rf"^{name}: .*`state`.*\(h, c\), but got {given}$"):
            call()


@by_device
def test_state_that_holds_none(device: str) -> None:
    input, *_ = LLTM.inputs("small", device, torch.float32)
    with pytest.raises(TypeError, match=r"^lltm: .*`old_h`.*torch.Tensor.*NoneType"):
        extops.LLTM(5, 4, device=device)(input, (None, None))
    for steps in (input, input[None]):
        with pytest.raises(TypeError, match=r"^LLTMLayer: .*`h_0`.*torch.Tensor.*NoneType"):
            extops.LLTMLayer(5, 4, device=device)(steps, (None, None))


@pytest.mark.parametrize("make", [extops.LLTM, extops.LLTMLayer])
def test_sizes_of_a_module(make: Callable[..., object]) -> None:
    for wrong in (-1, 2.5, "4", True):
        with pytest.raises(ValueError, match=rf"`input_features`.*at least 0, but got {wrong!r}$"):
            make(wrong, 4)
        with pytest.raises(ValueError, match=rf"`state_size`.*at least 0, but got {wrong!r}$"):
            make(4, wrong)


@pytest.mark.parametrize("make", [extops.LLTM, extops.LLTMLayer])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.float8_e5m2], ids=str)
def test_dtype_of_a_module(dtype: torch.dtype, make: Callable[..., object]) -> None:
    with pytest.raises(ValueError, match=rf"`dtype`.*floating-point.*float16.*but got {dtype}$"):
        make(5, 4, dtype=dtype)


def test_options_of_a_layer() -> None:
    for wrong in (0, 1.0, True):
        with pytest.raises(ValueError, match=rf"`num_layers`.*at least 1, but got {wrong!r}$"):
            extops.LLTMLayer(5, 4, wrong)
    for wrong in (-0.1, 1.5, float("nan"), "0.5", True):
        with pytest.raises(ValueError, match=rf"`dropout`.*from 0 to 1, but got {wrong!r}$"):
            extops.LLTMLayer(5, 4, 2, dropout=wrong)
    with pytest.warns(UserWarning, match=r"LLTMLayer: `dropout`.*between layers.*num_layers=1"):
        extops.LLTMLayer(5, 4, dropout=0.5)


# -- the registered operators, called past the checks of the public functions ---------------------

BAD_TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "integers": lambda tensor: tensor.long(),
    "complex": lambda tensor: tensor.to(torch.complex64),
    "another_dtype": lambda tensor: tensor.double(),
    "another_device": lambda tensor: tensor.to("meta"),
    "sparse": lambda tensor: tensor.to_sparse(),
    "jagged": lambda tensor: torch.nested.nested_tensor(
        [torch.zeros(2), torch.zeros(3)],
        dtype=tensor.dtype,
        device=tensor.device,
        layout=torch.jagged,
    ),
    "larger": lambda tensor: tensor.new_zeros([*tensor.shape[:-1], tensor.shape[-1] + 1]),
    # Of no size, there is but a larger one.
    "smaller": lambda tensor: tensor.new_zeros([*tensor.shape[:-1], abs(tensor.shape[-1] - 1)]),
    "more_dimensions": lambda tensor: tensor.new_zeros([7, 3, *tensor.shape]),
}


def not_bad(name: str) -> set[str]:
    """What an elementwise operator takes: shapes that broadcast and, of a single input, anything."""
    first = next(REGISTERED[name](maker("cpu")))
    if name in WITH_TABLES or first.keywords:
        return set()
    alone = {"another_dtype", "another_device", "larger", "smaller"}
    tensors = [x for x in first.arguments if isinstance(x, Tensor)]
    return {"more_dimensions"} | (alone if len(tensors) == 1 else set())


def free_size(name: str) -> int | None:
    """The place of an argument whose last dimension has a size that no other one repeats."""
    rows = _schemas.OPERATORS[name].arguments if name in WITH_TABLES else ()
    sizes = [size for row in rows for terms in row.shape for _, size in terms]
    free = [
        place
        for place, row in enumerate(rows)
        if any(sizes.count(size) == 1 for _, size in row.shape[-1])
    ]
    return free[0] if free else None


@by_device
@pytest.mark.parametrize(
    ("name", "bad"),
    [
        pytest.param(name, bad, id=f"{name}-{bad}")
        for name in REGISTERED
        for bad in BAD_TENSORS
        if bad not in not_bad(name)
    ],
)
def test_registered_operators(name: str, bad: str, device: str) -> None:
    """Each argument made bad in turn is an error of Python, never a crash or a result."""
    first = next(REGISTERED[name](maker(device)))
    free = free_size(name) if bad in ("larger", "smaller") else None
    for wrong in with_each_made_bad(first, BAD_TENSORS[bad], free):
        with pytest.raises(RuntimeError):
            getattr(torch.ops.extops, name)(*wrong.arguments, **wrong.keywords)


def with_each_made_bad(
    call: Call, make_bad: Callable[[Tensor], Tensor], but: int | None
) -> list[Call]:
    calls = []
    for place, tensor in enumerate(call.arguments):
        if isinstance(tensor, Tensor) and place != but:
            arguments = list(call.arguments)
            arguments[place] = make_bad(tensor)
            calls.append(Call(tuple(arguments), call.keywords))
    for name, tensor in call.keywords.items():
        calls.append(Call(call.arguments, {**call.keywords, name: make_bad(tensor)}))
    return calls


@by_dtype
@by_device
def test_a_refused_call_leaves_out_alone(device: str, dtype: torch.dtype) -> None:
    out = torch.full((2, 3), 7.0, device=device, dtype=dtype)
    a, b = torch.ones(2, 3, device=device, dtype=dtype), torch.ones(4, device=device, dtype=dtype)
    with pytest.raises(RuntimeError, match="broadcast"):
        extops.elementwise_mult(a, b, out=out)
    assert bool((out == 7).all())


# -- what torch raises keeps its type and message ------------------------------------------------


def out_of_memory(device: str):
    """Expects the error with which torch itself runs out of memory."""
    if device == "cpu":
        return pytest.raises(RuntimeError, match="DefaultCPUAllocator: can't allocate memory")
    return pytest.raises(torch.cuda.OutOfMemoryError, match=r"^CUDA out of memory\.")


def unaffordable_inputs(operator: Operator, device: str) -> Tensors:
    """Inputs of a few bytes, expanded to a batch whose results no memory holds."""
    inputs = []
    for one, two in zip(operator.batch(1), operator.batch(2), strict=True):
        grows = [size < larger for size, larger in zip(one.shape, two.shape, strict=True)]
        shape = [2**46 if batch else -1 for batch in grows]
        inputs.append(one.to(device, torch.float32).expand(shape))
    return tuple(inputs)


@by_device
@pytest.mark.parametrize("requires_grad", [False, True], ids=["no_grad", "grad"])
@by_operator
def test_out_of_memory(operator: Operator, requires_grad: bool, device: str) -> None:
    inputs = unaffordable_inputs(operator, device)
    leaves = tuple(tensor.detach().requires_grad_(requires_grad) for tensor in inputs)
    with out_of_memory(device):
        operator(*leaves)


@by_device
@pytest.mark.usefixtures("dynamo")
@by_few_operators
def test_out_of_memory_in_a_compiled_call(operator: Operator, device: str) -> None:
    compiled = torch.compile(operator.function, fullgraph=True, backend="aot_eager")
    with out_of_memory(device):
        compiled(*unaffordable_inputs(operator, device))


@by_device
@pytest.mark.parametrize(
    "name", sorted(REGISTERED.keys() - {"elementwise_mult_out"})
)  # allocates nothing
def test_out_of_memory_of_a_registered_operator(name: str, device: str) -> None:
    def unaffordable(*shape: int) -> Tensor:
        if len(shape) == 3:
            time, _, columns = shape
            return torch.randn(time, 1, columns, device=device).expand(time, 2**46, columns)
        # Tables have rows of 3, which no other size is.
        rows = shape[0] if name in WITH_TABLES and shape[0] != 3 else 2**46
        return torch.randn(1, *shape[1:], device=device).expand(rows, *shape[1:])

    first = next(REGISTERED[name](unaffordable))
    with out_of_memory(device):
        getattr(torch.ops.extops, name).default(*first.arguments)


@contextmanager
def little_memory(device: str, beyond: int) -> Iterator[None]:
    """Lets this process have some bytes more than it has."""
    left_over = []  # by other tests: memory that the process has, but does not use

    def fill(sizes: Sequence[int]) -> None:
        for size in sizes:
            with suppress(RuntimeError):
                while True:
                    left_over.append(torch.empty(size, dtype=torch.uint8, device=device))

    if device == "cpu":
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**22, before[1]))
        fill([2**23])
        resource.setrlimit(resource.RLIMIT_AS, (in_use + beyond, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
    else:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        reserved = torch.cuda.memory_reserved(device)
        torch.cuda.set_per_process_memory_fraction(reserved / total)
        # Blocks of up to 1 MiB have segments of their own.
        fill([2**24, 2**22, 2**21, 2**20 + 2**9])
        torch.cuda.set_per_process_memory_fraction((reserved + beyond) / total)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)


def run_with_little_memory(
    check: Callable[[str, str], None], operator: Operator, device: str
) -> None:
    """Runs a check that limits the memory of its process: on the CPU in a new one, which may end."""
    if device == "cpu":
        run_alone(with_one_thread, check, operator.name, device)
    else:
        check(operator.name, device)


def with_one_thread(check: Callable[[str, str], None], name: str, device: str) -> None:
    """The libraries end a process that cannot start another."""
    torch.set_num_threads(1)
    check(name, device)


# Of the results and gradients.
ROWS = 2**18


@pytest.mark.every(2, "operator")
@by_device
@pytest.mark.parametrize(
    "operator", [LLTM, ELEMENTWISE_MULT, *SEQUENCES], ids=lambda operator: operator.name
)
def test_out_of_memory_in_backward(operator: Operator, device: str) -> None:
    run_with_little_memory(check_out_of_memory_in_backward, operator, device)


def check_out_of_memory_in_backward(name: str, device: str) -> None:
    (operator,) = (operator for operator in OPERATORS if operator.name == name)
    inputs = tuple(tensor.to(device).requires_grad_() for tensor in operator.batch(ROWS))
    results = operator(*inputs)
    towards = upstream(results)
    small = tuple(tensor.to(device).requires_grad_() for tensor in operator.batch(1))
    gradients(operator, small, upstream(operator(*small)))  # what torch imports for its first one
    with little_memory(device, beyond=2**24), out_of_memory(device):
        torch.autograd.grad(results, inputs, towards)
    assert torch.autograd.grad(results, inputs, towards)[0].shape == inputs[0].shape


@by_device
def test_out_of_memory_in_a_product(device: str) -> None:
    run_with_little_memory(check_out_of_memory_in_a_product, LLTM, device)


def check_out_of_memory_in_a_product(name: str, device: str) -> None:
    """The input of the product has 17 columns, and its result 48."""
    input, weights, bias, h, c = (tensor.to(device) for tensor in lltm_inputs(1, 1, 16))
    batch = [tensor.expand(ROWS, -1) for tensor in (input, h, c)]
    with little_memory(device, beyond=ROWS * 8 * 40), out_of_memory(device):
        extops.lltm(batch[0], weights, bias, *batch[1:])


NO_MEMORY_FOR_A_KERNEL = """
import resource, torch, extops
torch.set_num_threads({threads})
input, weights = torch.ones(16, 40_000), torch.ones(6, 40_002)  # a buffer of the kernel takes 2.5 MB
bias, state = torch.zeros(6), torch.zeros(16, 2)
sizes = []
for _ in range(20):  # the first starts the threads; after some of them, a thread has yet to give its memory back
    extops.lltm(input, weights, bias, state, state)
    sizes.append(int(open("/proc/self/statm").read().split()[0]))
pages = min(sizes)
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**20,) * 2)
try:
    extops.lltm(input, weights, bias, state, state)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.skipif(_loader.binding == "legacy", reason="its steps are GEMMs of torch")
@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_kernel_that_finds_no_memory(threads: int, tmp_path: Path) -> None:
    """An error, not the end of the process."""
    done = subprocess.run(
        [sys.executable, "-c", NO_MEMORY_FOR_A_KERNEL.format(threads=threads)],
        # Of what was given back, nothing is left for the kernel to find.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**17)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("lltm_step: not enough memory"), done.stderr


CALL_FAILED = "torch's API call failed"


@pytest.mark.skipif(_loader.binding == "legacy", reason="this binding loses no error")
@pytest.mark.parametrize(
    ("device", "error", "expected"),
    [
        (
            "cuda",
            f"aten::mm: {CALL_FAILED}: CUDA out of memory. Tried",
            "CUDA out of memory. Tried",
        ),
        ("cuda", f"aten::mm: {CALL_FAILED}: CUDA error: misaligned", "CUDA error: misaligned"),
        ("cpu", f"empty_strided: {CALL_FAILED}: no memory", "no memory"),
        # Torch 2.10 to 2.12 keeps no message.
        (
            "cuda",
            f"empty_strided: {CALL_FAILED}",
            "CUDA out of memory: lltm_step_backward found none for more than its results; torch printed how much",
        ),
    ],
)
def test_an_error_beside_the_results(
    device: str, error: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the binding lost, in a call whose results find memory."""
    monkeypatch.setattr(_devices, "devices", {device})
    kind = torch.OutOfMemoryError if "out of memory" in expected else RuntimeError
    with FakeTensorMode(), pytest.raises(RuntimeError) as raised:  # of a GPU that need not be there
        gates, cell = torch.empty(2, 9, device=device), torch.empty(2, 3, device=device)
        _errors.raise_original(RuntimeError(error), "lltm_step_backward", None, None, gates, cell)
    assert (type(raised.value), str(raised.value)) == (kind, expected)


@pytest.mark.parametrize(
    "error",
    [
        f"aten::mm: {CALL_FAILED}",
        f"empty_strided: {CALL_FAILED}",
        "lltm_step_backward: of the kernel",
    ],
)
def test_an_error_of_which_no_more_is_known(error: str) -> None:
    """The caller raises it as it is."""
    given = None, None, torch.ones(2, 9), torch.ones(2, 3)
    _errors.raise_original(RuntimeError(error), "lltm_step_backward", *given)


@by_device
def test_a_shape_too_large_for_any_memory(device: str) -> None:
    """The message is that of torch's own GEMM."""
    a = torch.ones(1, device=device).expand(2**40)
    with pytest.raises(RuntimeError) as expected:
        a.unsqueeze(1) * a
    with pytest.raises(RuntimeError, match=f"^{re.escape(str(expected.value))}$"):
        extops.elementwise_mult(a.unsqueeze(1), a)


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("mgu2", ["EXTOPS_CELL(mgu, Mgu)"], "mgu2, ...), but they define mgu"),
        ("mgu", ["EXTOPS_CELL(mgu, Mgu)"] * 2, "mgu, ...), but they define mgu, mgu"),
        ("mgu", ["EXTOPS_CELL_KERNELS(mgu, Mgu)"], "mgu, ...), but they define no cell"),
        ("mgu", [], "mgu, ...), but they define no cell"),
        ("a", ["  EXTOPS_CELL ( mgu , Mgu)"], "a, ...), but they define mgu"),
        ("a", ["#define Q '\"'\nEXTOPS_CELL\n(mgu, Mgu)  // \""], "a, ...), but they define mgu"),
        ("mgu", ["/*\nEXTOPS_CELL(mgu, Mgu)\n*/"], "mgu, ...), but they define no cell"),
        ("mgu", ["// EXTOPS_CELL(mgu, Mgu)"], "mgu, ...), but they define no cell"),
        ("mgu", ['"\\" EXTOPS_CELL(mgu, Mgu)"'], "mgu, ...), but they define no cell"),
    ],
    ids=["other", "twice", "kernels", "none", "spaces", "lines", "comment", "line", "text"],
)
def test_sources_of_another_cell(name: str, lines: list[str], message: str, tmp_path: Path) -> None:
    """Loaded beside the cell that they define, the library would end the process."""
    sources = [tmp_path / f"{number}.cpp" for number in range(len(lines))]
    for source, line in zip(sources, lines, strict=True):
        source.write_text(f"{line}\n")
    with pytest.raises(RuntimeError) as caught:
        extops.load_cell(name, sources, compositions.lstm_cell)
    expected = "load_cell: expected `sources` with one line EXTOPS_CELL("
    assert str(caught.value) == expected + message


def test_a_single_source() -> None:
    with pytest.raises(TypeError, match=r"^load_cell: expected `sources` to be a list .* 'a.cpp'$"):
        extops.load_cell("mgu", "a.cpp", compositions.lstm_cell)
