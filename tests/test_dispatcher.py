"""The registered operators: opcheck, meta and fake tensors, torch.compile and torch.export."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import getitem
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import extops
from extops import _private
from operators import (
    ELEMENTWISE_MULT,
    GPU,
    LLTM,
    REGISTERED,
    Call,
    Operator,
    Tensors,
    as_tuple,
    by_case,
    by_device,
    by_dtype,
    by_few_operators,
    by_operator,
    gradients,
    maker,
    needs_inductor,
    sliced,
    transposed,
    upstream,
)
from processes import run_alone

GRADIENTS = tuple(name for name in REGISTERED if name.endswith("_backward"))
DIFFERENTIABLE = tuple(name for name in REGISTERED if not name.endswith(("_backward", "_out")))

by_registered = pytest.mark.parametrize("name", REGISTERED)


def overload(name: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.extops, name).default


def has_autograd(name: str) -> bool:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    keys = ("Autograd", "AutogradCPU", "CompositeImplicitAutograd")
    return any(has_kernel(f"extops::{name}", key) for key in keys)


def test_differentiable_operators_have_autograd() -> None:
    assert [name for name in (*DIFFERENTIABLE, *GRADIENTS) if not has_autograd(name)] == []


def opcheck(name: str, calls: Iterable[Call], thorough: bool) -> None:
    """Checks all calls; traces all of them, which takes longest, or else the first of them alone."""
    untraced = ("test_schema", "test_autograd_registration", "test_faketensor")
    for place, call in enumerate(calls):
        checks = {} if thorough or place == 0 else {"test_utils": untraced}
        torch.library.opcheck(overload(name), call.arguments, dict(call.keywords), **checks)


@pytest.mark.every(8, "name", "dtype")
@by_dtype
@by_device
@by_registered
def test_opcheck(name: str, device: str, dtype: torch.dtype, thorough: bool) -> None:
    opcheck(name, REGISTERED[name](maker(device, dtype)), thorough)


@by_device
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=pytest.mark.slow if x in ("lstm_sequence", "gru_sequence") else ())
        for x in DIFFERENTIABLE
    ],
)
@pytest.mark.every(3, "name")
def test_opcheck_with_gradients(name: str, device: str, thorough: bool) -> None:
    calls = REGISTERED[name](maker(device))
    opcheck(name, (call.requiring_grad() for call in calls), thorough)


@by_device
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_gradients(name: str, device: str, thorough: bool) -> None:
    """Of the operators that compiled backwards call, in both modes."""
    call = next(REGISTERED[name](maker(device, torch.float64))).requiring_grad()
    fast = not thorough  # all elements at once
    assert torch.autograd.gradcheck(
        overload(name), call.arguments, check_forward_ad=True, fast_mode=fast
    )


# -- without data --------------------------------------------------------------------------------


def assert_same_metadata(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert actual.stride() == expected.stride()


@pytest.mark.every(4, "operator", "case", "dtype")
@by_dtype
@by_case
def test_meta(operator: Operator, case: str, dtype: torch.dtype) -> None:
    inputs = operator.inputs(case, "cpu", dtype)
    on_meta = operator(*(tensor.to("meta") for tensor in inputs))
    for actual, expected in zip(on_meta, operator(*inputs), strict=True):
        assert actual.device.type == "meta"
        assert_same_metadata(actual, expected)


def test_meta_of_out() -> None:
    a, b = (tensor.to("meta") for tensor in ELEMENTWISE_MULT.inputs("row"))
    out = torch.empty_like(a)
    assert extops.elementwise_mult(a, b, out=out) is out


@by_operator
def test_meta_of_gradients(operator: Operator) -> None:
    inputs = tuple(tensor.to("meta") for tensor in operator.inputs("small"))
    towards = tuple(torch.empty_like(result) for result in operator(*inputs))
    _, found = gradients(operator.function, inputs, towards)
    for gradient, input in zip(found, inputs, strict=True):
        assert gradient.shape == input.shape and gradient.device.type == "meta"


@by_device
@by_operator
def test_fake(operator: Operator, device: str) -> None:
    """Fake tensors predict what the operator does, gradients included."""
    inputs = operator.inputs("small", device, requires_grad=True)
    results = operator(*inputs)
    with FakeTensorMode() as mode:
        fake_inputs = [mode.from_tensor(tensor) for tensor in inputs]
        fake_results = operator(*fake_inputs)
        torch.autograd.backward(fake_results, [torch.ones_like(fake) for fake in fake_results])
    for actual, expected in zip(fake_results, results, strict=True):
        assert actual.device == expected.device
        assert_same_metadata(actual, expected)
    for fake_input in fake_inputs:
        assert fake_input.grad is not None and fake_input.grad.shape == fake_input.shape


@by_operator
def test_fake_of_strides(operator: Operator) -> None:
    inputs = tuple(transposed(tensor) for tensor in operator.inputs("small"))
    with FakeTensorMode() as mode:
        fake_results = operator(*(mode.from_tensor(tensor) for tensor in inputs))
    for actual, expected in zip(fake_results, operator(*inputs), strict=True):
        assert_same_metadata(actual, expected)


@by_device
@by_registered
def test_a_traced_call_is_one_node(name: str, device: str) -> None:
    """What the operator asks of its arguments leaves none; inductor replaces some calls, and counts on it."""
    call = next(REGISTERED[name](maker(device)))
    graph = make_fx(functools.partial(overload(name), **call.keywords))(*call.arguments).graph
    called = [node.target for node in graph.nodes if node.op == "call_function"]
    assert [target for target in called if target is not getitem] == [overload(name)]


@pytest.mark.slow
@pytest.mark.usefixtures("dynamo")
def test_registered_out_within_inductor() -> None:
    needs_inductor()

    def product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        torch.ops.extops.elementwise_mult_out(a, b, out)
        return out + 1

    a, b, out = torch.randn(3, 5)
    expected = a * b
    torch.testing.assert_close(torch.compile(product, fullgraph=True)(a, b, out), expected + 1)
    torch.testing.assert_close(out, expected)


def test_tensors_that_wrap_others() -> None:
    """A subclass whose memory is that of its parts gives what they give, `out` included."""
    from torch.testing._internal.two_tensor import TwoTensor

    a, b = torch.randn(3, 4), torch.randn(3, 4)
    both, out = TwoTensor(a, b), TwoTensor(torch.zeros(3, 4), torch.zeros(3, 4))
    extops.elementwise_mult(both, both, out=out)
    for part, found in ((a, out.a), (b, out.b)):
        assert torch.equal(found, part * part)
    rounded = extops.round_ste(both)
    assert torch.equal(rounded.b, extops.round_ste(b))


# -- torch.compile -------------------------------------------------------------------------------


def assert_same_when_compiled(
    operator: Operator, inputs: Tensors, backend: str, dynamic: bool | None = None
) -> None:
    compiled = torch.compile(operator.function, fullgraph=True, backend=backend, dynamic=dynamic)
    towards = upstream(operator(*inputs))
    actual = gradients(compiled, inputs, towards)
    expected = gradients(operator.function, inputs, towards)
    torch.testing.assert_close(actual, expected)


@pytest.mark.every(4, "operator", "dtype")
@by_dtype
@by_device
@by_operator
@pytest.mark.usefixtures("dynamo")
def test_compile(operator: Operator, device: str, dtype: torch.dtype) -> None:
    assert_same_when_compiled(operator, operator.inputs("small", device, dtype), "aot_eager")


@pytest.mark.slow
@by_device
@by_operator
@pytest.mark.usefixtures("dynamo")
def test_compile_with_inductor(operator: Operator, device: str) -> None:
    needs_inductor()
    assert_same_when_compiled(operator, operator.inputs("odd", device, torch.float32), "inductor")


@by_few_operators
@pytest.mark.usefixtures("dynamo")
def test_compile_of_strided_inputs(operator: Operator) -> None:
    inputs = tuple(transposed(tensor) for tensor in operator.inputs("small"))
    assert_same_when_compiled(operator, inputs, "aot_eager")


@by_device
@by_few_operators
@pytest.mark.usefixtures("dynamo")
def test_compile_without_gradients(operator: Operator, device: str) -> None:
    inputs = operator.inputs("small", device)
    compiled = torch.compile(operator.function, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(as_tuple(compiled(*inputs)), operator(*inputs))


@by_device
@pytest.mark.usefixtures("dynamo")
def test_compile_of_out(device: str) -> None:
    a, b = ELEMENTWISE_MULT.inputs("row", device)

    def in_the_middle(a: Tensor, b: Tensor) -> Tensor:
        out = torch.zeros_like(a)
        extops.elementwise_mult(a, b, out=out)
        return out + 1

    def given(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        return extops.elementwise_mult(a + 0, b, out=out)

    compile_it = functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compile_it(in_the_middle)(a, b), a * b + 1)
    out = torch.zeros_like(a)
    torch.testing.assert_close(compile_it(given)(a, b, out), a * b)
    torch.testing.assert_close(out, a * b)


@pytest.mark.usefixtures("dynamo")
def test_compile_of_out_for_any_size() -> None:
    """The check of its strides works on sizes that are symbols, too."""
    compiled = torch.compile(
        lambda a, b, out: extops.elementwise_mult(a, b, out=out),
        fullgraph=True,
        backend="aot_eager",
        dynamic=True,
    )
    for size in (4, 6, 9):
        a, b = ELEMENTWISE_MULT.batch(size)
        for out in (transposed(torch.zeros_like(a)), sliced(torch.zeros_like(a))):
            compiled(a, b, out)
            assert torch.equal(out, a * b)


@pytest.mark.slow
@by_device
@pytest.mark.usefixtures("dynamo")
def test_compile_of_out_that_overlaps(device: str) -> None:
    """Compiled for memory of its own or for that of an input: `a` counts as it was before the call."""
    needs_inductor()
    compiled = torch.compile(
        lambda a, b, out: extops.elementwise_mult(a, b, out=out), fullgraph=True, dynamic=False
    )
    views: list[Callable[[Tensor], tuple[Tensor, Tensor]]] = [
        lambda memory: (memory[1:].clone(), memory[1:]),
        lambda memory: (memory[1:].t(), memory[1:]),
        lambda memory: (memory[:-1], memory[1:]),
        lambda memory: (memory[1:], memory[:-1]),
        lambda memory: (memory[1], memory[1:]),
        lambda memory: (memory[1:], memory[1:]),
    ]
    b = torch.randn(65, 65, device=device)
    for view in views:
        a, out = view(torch.randn(66, 65, device=device))
        expected = a * b
        compiled(a, b, out)
        assert torch.equal(out, expected)


@by_device
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("dynamo")
def test_compile_of_out_that_becomes_an_input(backend: str, device: str) -> None:
    """The overlap begins within the graph."""
    if backend == "inductor":
        needs_inductor()

    def power(b: Tensor) -> Tensor:
        out = b + 1
        extops.elementwise_mult(out.t(), b, out=out)
        return extops.elementwise_mult(out.flip(0).t(), b, out=out)

    b = torch.randn(65, 65, device=device)
    compiled = torch.compile(power, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(b), power(b))


@by_few_operators
@pytest.mark.usefixtures("dynamo")
def test_compile_for_any_batch_size(operator: Operator) -> None:
    """One compilation serves every batch size, forward and backward."""
    batches = [operator.batch(size) for size in (6, 7, 19)]
    compiled = torch.compile(operator.function, fullgraph=True, backend="aot_eager", dynamic=True)
    with error_on_recompile():
        for tensors in batches:
            towards = upstream(operator(*tensors))
            actual = gradients(compiled, tensors, towards)
            torch.testing.assert_close(actual, gradients(operator.function, tensors, towards))


@contextmanager
def error_on_recompile() -> Iterator[None]:
    import torch._dynamo.config as config

    with config.patch(error_on_recompile=True):
        yield


@pytest.mark.usefixtures("dynamo")
def test_a_recompile_would_be_noticed() -> None:
    """The check above can fail: a static compilation does not serve another batch size."""
    compiled = torch.compile(extops.round_ste, backend="aot_eager", dynamic=False)
    compiled(torch.randn(4, 5))
    with error_on_recompile(), pytest.raises(Exception, match=r"[Rr]ecompil"):
        compiled(torch.randn(7, 5))


@by_device
@pytest.mark.usefixtures("dynamo")
def test_compile_of_a_module(device: str) -> None:
    """Several cells in one graph, trained by the compiled step as by the eager one."""
    module = extops.LLTM(5, 4, device=device, dtype=torch.float64)
    input, _, _, h, c = LLTM.inputs("small", device)

    def step(input: Tensor, h: Tensor, c: Tensor) -> Tensor:
        for _ in range(3):
            h, c = module(input, (h, c))
        return (h * c).sum()

    found = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        module.zero_grad()
        loss = function(input, h, c)
        loss.backward()
        found.append([loss, *(parameter.grad for parameter in module.parameters())])
    torch.testing.assert_close(*found)


# -- the counter of floating-point operations ------------------------------------------------------


# -- torch.export --------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """A module that uses every operator."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.cell = extops.LLTM(5, 4, device=device)
        self.layer = extops.LLTMLayer(4, 3, device=device)
        self.round = extops.RoundSTE()

    def forward(self, input: Tensor, h: Tensor, c: Tensor) -> Tensors:
        new_h, new_cell = self.cell(input, (h, c))
        output, _ = self.layer(torch.stack([new_h, new_cell]))
        return extops.elementwise_mult(new_h, self.round(4 * new_cell)), output


def model_inputs(device: str, batch: int) -> Tensors:
    return tuple(torch.randn(batch, size, device=device) for size in (5, 4, 4))


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.usefixtures("dynamo")
def test_export(device: str) -> None:
    model = Model(device)
    inputs = model_inputs(device, 3)
    program = torch.export.export(model, inputs)
    torch.testing.assert_close(program.module()(*inputs), model(*inputs))


def export_for_any_batch_size(model: Model) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=2, max=1024)
    shapes: dict[str, dict[int, object]] = {name: {0: batch} for name in ("input", "h", "c")}
    return torch.export.export(model, model_inputs("cpu", 3), dynamic_shapes=shapes)


@pytest.mark.usefixtures("dynamo")
def test_export_for_any_batch_size(tmp_path: Path) -> None:
    """An exported program is saved, loaded and run with another batch size."""
    model = Model("cpu")
    torch.export.save(export_for_any_batch_size(model), tmp_path / "model.pt2")
    loaded: Callable[..., Tensors] = torch.export.load(tmp_path / "model.pt2").module()
    other = model_inputs("cpu", 11)
    torch.testing.assert_close(loaded(*other), model(*other))


class Product(torch.nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return extops.elementwise_mult(a, b)


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("shapes", [((5, 4), (4,)), ((5, 4, 3), (4, 3)), ((4,), (5, 4))], ids=str)
def test_export_of_broadcasting_for_any_batch_size(shapes: tuple[tuple[int, ...], ...]) -> None:
    """Also for one that equals a size of the other factor."""
    factors = tuple(map(torch.randn, shapes))
    batch = torch.export.Dim("batch", min=2, max=100)
    dynamic = tuple({0: batch} if shape[0] == 5 else None for shape in shapes)
    exported = torch.export.export(Product(), factors, dynamic_shapes=dynamic).module()
    for size in (4, 7):
        other = tuple(torch.randn(size, *x[1:]) if x[0] == 5 else torch.randn(x) for x in shapes)
        assert torch.equal(exported(*other), other[0] * other[1])


@pytest.mark.slow
@pytest.mark.usefixtures("dynamo")
def test_aot_inductor(tmp_path: Path) -> None:
    """Compiled ahead of time into a package, which is loaded and run with another batch size."""
    if torch.__version__ < (2, 6):
        pytest.skip(
            f"torch {torch.__version__} cannot load AOTInductor packages; 2.6 and newer can"
        )
    needs_inductor()
    model = Model("cpu")
    with torch.no_grad():
        package = torch._inductor.aoti_compile_and_package(
            export_for_any_batch_size(model), package_path=str(tmp_path / "model.pt2")
        )
        loaded: Callable[..., Tensors] = torch._inductor.aoti_load_package(package)
        for batch in (3, 11):
            inputs = model_inputs("cpu", batch)
            torch.testing.assert_close(tuple(loaded(*inputs)), model(*inputs))


# -- private names of torch ----------------------------------------------------------------------


def test_private_names_that_are_in_use() -> None:
    """All of them, in every torch that is tested: where one is gone, its replacement is in use."""
    assert [name for name, found in _private.IN_USE.items() if not found] == []
    assert len(_private.IN_USE) >= 14


def test_private_names_stub_one_place() -> None:
    """What begins with an underscore, in an attribute of what was imported from torch."""
    package = Path(extops.__file__).parent
    found = set()
    for path in package.rglob("*.py"):
        tree = ast.parse(path.read_text())
        imports = [x for x in ast.walk(tree) if isinstance(x, ast.Import | ast.ImportFrom)]
        of_torch = {"torch"} | {
            alias.asname or alias.name
            for x in imports
            if isinstance(x, ast.ImportFrom) and (x.module or "").split(".")[0] == "torch"
            for alias in x.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr):
                root = node.value
                while isinstance(root, ast.Attribute):
                    root = root.value
                if isinstance(root, ast.Name) and root.id in of_torch:
                    found.add(path.name)
    assert found == {"_private.py"}


def test_the_mark_of_a_constant() -> None:
    """What the public function sets, which imports the compiler."""
    constant = torch.compiler.assume_constant_result(lambda: None)
    assert vars(constant) == {"_dynamo_marked_constant": True}


# Without these, no call passes by the dispatcher's keys for autograd.
BYPASS = (
    "_C._are_functorch_transforms_active",
    "_C._AutoDispatchBelowAutograd",
    "_C._AutoDispatchBelowADInplaceOrView",
    "_C._DisableTorchDispatch",
    "autograd.forward_ad._current_level",
)

WITHOUT_PRIVATE_NAMES = """
import operator, sys, types
import torch
import torch.autograd.forward_ad

missing = {missing!r}


def hiding(get, names):
    def hide(self, attribute):
        if attribute in names and sys._getframe(1).f_globals["__name__"] == "extops._private":
            raise AttributeError(attribute)
        return get(self, attribute)

    return hide


names_of = {{}}
for path in missing:
    owner, _, name = path.rpartition(".")
    names_of.setdefault(operator.attrgetter(owner)(torch) if owner else torch, []).append(name)
for owner, names in names_of.items():
    if isinstance(owner, types.ModuleType):
        base = types.ModuleType
        own = dict(__getattribute__=hiding(base.__getattribute__, names))
        owner.__class__ = type("Lacking", (base,), own)
    elif owner in (torch.autograd.Function, torch.autograd.Variable):
        type(owner).__getattribute__ = hiding(type.__getattribute__, names)
    else:
        owner.__getattribute__ = hiding(object.__getattribute__, names)
import extops
from extops.ops import sequence

assert [name for name, found in extops._private.IN_USE.items() if not found] == missing
assert extops.calling._autograd.is_plain() == {is_plain}

make = lambda *shape: torch.randn(shape, dtype=torch.float64, requires_grad=True)
cell = make(3, 5), make(12, 9), make(12), make(3, 4), make(3, 4)
lengths = torch.tensor([2, 0, 1])


def in_reverse(input, weights, bias, h, c):
    output, last = extops.lltm_sequence(input, (h, c), weights, bias, lengths=lengths, reverse=True)
    return output, *last


def in_reverse_by_cells(*inputs):
    return sequence.LLTM_CELL.reference(*inputs, lengths, reverse=True)[:3]


def gru(input, h, *weights):
    return extops.gru_sequence(input, h, *weights, lengths=lengths)


def gru_by_cells(input, h, weight_ih, weight_hh):
    biases = None, None
    return sequence.GRU_CELL.reference(input, weight_ih, weight_hh, *biases, h, h, lengths)[:2]


def gradients(outputs, inputs):
    return torch.autograd.grad(sum(x.square().sum() for x in outputs), inputs)


calls = []
for name, inputs in dict(
    lltm=cell,
    lltm_sequence=(make(2, 3, 5), *cell[1:]),
    gru_sequence=(make(2, 3, 5), make(3, 4), make(12, 5), make(12, 4)),
    elementwise_mult=(make(3, 4), make(4)),
    round_ste=(make(3, 4),),
).items():
    ours, reference = getattr(extops, name), getattr(extops.reference, name, None)
    if name == "lltm_sequence":
        ours, reference = in_reverse, in_reverse_by_cells
    elif name == "gru_sequence":
        ours, reference = gru, gru_by_cells
    calls.append((ours, reference, inputs))
    torch.testing.assert_close(ours(*inputs), reference(*inputs))
    with torch.no_grad():
        torch.testing.assert_close(ours(*inputs), reference(*inputs))
    if name != "round_ste":
        assert torch.autograd.gradgradcheck(ours, inputs, fast_mode=True)


def results(which):
    found = [call[which](*call[2]) for call in calls]
    return [x for each in found for x in (each if isinstance(each, tuple) else (each,))]


leaves = list(dict.fromkeys(x for call in calls for x in call[2]))
compiled = torch.compile(results, backend="aot_eager", fullgraph=True)
expected = gradients(results(1), leaves)
for run in (results, compiled):
    torch.testing.assert_close(gradients(run(0), leaves), expected)
out = torch.empty(3, 4)
a = torch.randn(3, 4)
assert extops.elementwise_mult(a, a, out=out) is out and torch.equal(out, a * a)
assert out._version == 1

try:
    in_reverse(make(1, 3, 5), *cell[1:])
except (RuntimeError, IndexError) as error:
    assert "from 0 to 1" in str(error) or "out of range" in str(error), error
else:
    raise AssertionError("2 is not a number of steps from 0 to 1")
assert not extops._private.allows_tf32()
torch.set_float32_matmul_precision("high")
assert extops._private.allows_tf32()
for allow in (False, True):
    torch.backends.cudnn.allow_tf32 = allow
    assert extops._private.cudnn_allows_tf32() == allow
assert not extops._private.is_tracing()
traced = torch.jit.trace(extops.round_ste, torch.randn(2))
torch.testing.assert_close(traced(a), a.add(0.5).floor())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "missing",
    [
        pytest.param({*BYPASS}, id="bypass"),
        pytest.param({*_private.IN_USE} - {*BYPASS}, id="others"),
        *(pytest.param({name}, id=name) for name in _private.IN_USE),
    ],
)
def test_without_private_names(missing: set[str]) -> None:
    names = [name for name in _private.IN_USE if name in missing]
    code = WITHOUT_PRIVATE_NAMES.format(missing=names, is_plain=missing.isdisjoint(BYPASS))
    run_alone(exec, code, {})


SHARDED = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
import extops

def main(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    a, b = torch.randn(5, 4, dtype=torch.float64) * 5, torch.randn(4, dtype=torch.float64)
    for first, second in ((Shard(0), Replicate()), (Shard(1), Shard(0)), (Replicate(), Shard(0))):
        x = distribute_tensor(a, mesh, [first]).requires_grad_()
        y = distribute_tensor(b, mesh, [second]).requires_grad_()
        product = extops.elementwise_mult(extops.round_ste(x), y)
        assert product.to_local().numel() == (12, 8)[rank] or first != Shard(0), product.placements
        product.sum().backward()
        rounded = extops.round_ste(a)
        assert torch.equal(product.full_tensor(), rounded * b)
        torch.testing.assert_close(x.grad.full_tensor(), b.expand(5, 4))
        torch.testing.assert_close(y.grad.full_tensor(), rounded.sum(0))
    try:
        shapes = (2, 2), (6, 4), (6,), (2, 2), (2, 2)
        extops.lltm(*(distribute_tensor(torch.ones(x), mesh, [Replicate()]) for x in shapes))
    except NotImplementedError as error:
        assert "extops.lltm" in str(error), error
    else:
        raise AssertionError("lltm has no strategy")
    dist.destroy_process_group()

if __name__ == "__main__":
    # Forked, as each would import torch again.
    torch.multiprocessing.start_processes(main, (sys.argv[1],), 2, start_method="fork")
"""


@pytest.mark.slow
def test_tensors_divided_among_processes(tmp_path: Path) -> None:
    """Elementwise operators take the DTensors of `torch.distributed`; the LLTM says that it does not."""
    pytest.importorskip("torch.distributed.tensor.experimental", reason="this torch has no DTensor")
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path / "meeting")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
