"""What holds on a CUDA GPU only: streams, graphs, several devices, no waiting, huge tensors."""

from __future__ import annotations

import fcntl
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence

import extops
import extops.reference
from extops.ops import compositions
from operators import (
    ELEMENTWISE_MULT,
    LLTM,
    LLTM_SEQUENCE,
    OPERATORS,
    Operator,
    Tensors,
    as_tuple,
    assert_as_accurate_as_eager,
    by_operator,
    dtype_name,
    gradients,
    upstream,
)

pytestmark = pytest.mark.gpu

# A case for each of the kernels that an operator chooses between.
by_kernel = pytest.mark.parametrize(
    ("operator", "case", "dtype"),
    [
        pytest.param(operator, case, dtype, id=f"{operator.name}-{case}")
        for operator, case, dtype in (
            *((operator, "odd", torch.float32) for operator in OPERATORS),
            (LLTM, "large", torch.float32),
            (LLTM, "tiles", torch.bfloat16),
            (ELEMENTWISE_MULT, "outer", torch.float32),
        )
    ],
)


def forward_and_backward(operator: Operator, inputs: Tensors, towards: Tensors) -> Tensors:
    results, found = gradients(operator.function, inputs, towards)
    return *(result.detach() for result in results), *found


@pytest.mark.parametrize("state", [1024, 1023], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_cells_enough_for_wide_accesses(dtype: torch.dtype, state: int) -> None:
    """So many that a thread takes several neighbours, where rows begin at a multiple of them."""
    batch = 600  # whose GEMM is a library's
    shapes = [(batch, 5), (3 * state, state + 5), (3 * state,), *[(batch, state)] * 4]
    tensors = [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]
    tensors[1] /= 32
    *_, old_cell = inputs = tensors[:5]
    towards = tensors[5:]
    new_h, new_cell, gates = torch.ops.extops.lltm_step(*inputs)
    grad_gates, _, grad_old = torch.ops.extops.lltm_step_backward(*towards, gates, new_cell)
    found = grad_gates, grad_old

    leaves = [gates.double().requires_grad_(), old_cell.double().requires_grad_()]
    exact = compositions.lltm_cell(*leaves)
    expected = torch.autograd.grad(exact, leaves, [tensor.double() for tensor in towards])
    tolerance = 16 * torch.finfo(dtype).eps
    for actual, value in zip((new_h, new_cell, *found), (*exact, *expected), strict=True):
        torch.testing.assert_close(actual.double(), value, rtol=tolerance, atol=tolerance)


def assert_close(actual: Tensors, expected: Tensors) -> None:
    """Like torch's, for sums that a library may order otherwise from one call to the next."""
    tolerance = max(1e-4, 4 * torch.finfo(actual[0].dtype).eps)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# -- streams -------------------------------------------------------------------------------------


@by_kernel
def test_work_is_queued_on_the_current_stream(
    operator: Operator, case: str, dtype: torch.dtype
) -> None:
    """On a side stream the inputs arrive late; an operator on any other stream reads too early."""
    inputs = operator.inputs(case, "cuda", dtype)
    towards = upstream(operator(*inputs))
    expected = forward_and_backward(operator, inputs, towards)
    late = tuple(torch.full_like(tensor, float("nan")) for tensor in inputs)
    late_towards = tuple(torch.full_like(tensor, float("nan")) for tensor in towards)
    torch.cuda.synchronize()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # cycles of the GPU: the stream is busy while we queue
        for tensor, value in zip((*late, *late_towards), (*inputs, *towards), strict=True):
            tensor.copy_(value)
        actual = forward_and_backward(operator, late, late_towards)
    stream.synchronize()
    assert_close(actual, expected)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@by_operator
def test_the_host_never_waits(operator: Operator) -> None:
    for case in operator.samples:
        inputs = operator.inputs(case, "cuda", torch.float32)
        towards = upstream(operator(*inputs))
        with no_synchronisation():
            forward_and_backward(operator, inputs, towards)


def test_the_host_never_waits_for_a_layer() -> None:
    """Several layers in both directions, with lengths that the GPU or the CPU knows, under autocast."""
    layer = extops.LLTMLayer(5, 4, num_layers=2, bidirectional=True, device="cuda")
    input, h_0, c_0, weights, bias = LLTM_SEQUENCE.inputs("odd", "cuda", torch.float32)
    lengths_on_the_cpu = torch.randint(len(input), input.shape[1:2])
    lengths = lengths_on_the_cpu.cuda()
    sequence = torch.randn(3, 2, 5, device="cuda")
    for enabled in (False, True):
        with no_synchronisation(), torch.autocast("cuda", torch.bfloat16, enabled=enabled):
            output, _ = layer(sequence)
            output.sum().backward()
            for known_to in (lengths, lengths_on_the_cpu):
                extops.lltm_sequence(input, (h_0, c_0), weights, bias, lengths=known_to)


@by_kernel
def test_the_host_is_done_before_the_gpu(operator: Operator, case: str, dtype: torch.dtype) -> None:
    """What the debug mode cannot see: calls of the CUDA runtime inside the kernels' library."""
    inputs = operator.inputs(case, "cuda", dtype)
    towards = upstream(operator(*inputs))
    forward_and_backward(operator, inputs, towards)  # loads the kernels, fills the allocator
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    busy = torch.cuda.Event()
    busy.record()
    forward_and_backward(operator, inputs, towards)
    assert not busy.query(), f"{operator.name} waited for the GPU"
    torch.cuda.synchronize()


# -- graphs --------------------------------------------------------------------------------------


@by_kernel
def test_graph_is_replayed_with_new_data(operator: Operator, case: str, dtype: torch.dtype) -> None:
    inputs = operator.inputs(case, "cuda", dtype)
    towards = upstream(operator(*inputs))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # warm up outside of the capture, as PyTorch asks for
            forward_and_backward(operator, inputs, towards)
    torch.cuda.current_stream().wait_stream(stream)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward_and_backward(operator, inputs, towards)

    for _ in range(3):
        for tensor in (*inputs, *towards):
            tensor.copy_(torch.randn_like(tensor))
        graph.replay()
        assert_close(captured, forward_and_backward(operator, inputs, towards))


def test_lengths_of_the_host_are_not_captured() -> None:
    """A replay would read their memory when it is gone."""
    layer = extops.LLTMLayer(5, 4, device="cuda")
    input, state = torch.randn(3, 2, 5, device="cuda"), torch.zeros(2, 4, device="cuda")
    lengths = torch.tensor([3, 1])

    def call() -> None:
        extops.lltm_sequence(
            input + 1, (state, state), layer.weights_l0, layer.bias_l0, lengths=lengths
        )

    packed = pack_padded_sequence(input, lengths)
    for name, function in (("lengths", call), ("input.batch_sizes", lambda: layer(packed))):
        with torch.no_grad():
            function()  # outside of the capture, as PyTorch asks for
            torch.cuda.synchronize()
            with (
                pytest.raises(RuntimeError, match=f"`{name}` is on the CPU, where each replay"),
                torch.cuda.graph(torch.cuda.CUDAGraph()),
            ):
                function()


def test_graphed_callable() -> None:
    """PyTorch's own wrapper around a module, forward and backward."""
    module = extops.LLTM(5, 4, device="cuda")

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = module

        def forward(self, input: Tensor, h: Tensor, c: Tensor) -> Tensors:
            return as_tuple(self.cell(input, (h, c)))

    input, _, _, h, c = LLTM.inputs("small", "cuda", torch.float32)
    # Copies, since the tensors of the sample call become the graph's own and are written at every call.
    samples = tuple(tensor.clone() for tensor in (input, h, c))
    graphed = torch.cuda.make_graphed_callables(Step(), samples)
    for function in (graphed, Step()):
        module.zero_grad()
        torch.stack([result.sum() for result in function(input * 2, h, c)]).sum().backward()
        if function is graphed:
            found = [parameter.grad.clone() for parameter in module.parameters()]
    torch.testing.assert_close(found, [parameter.grad for parameter in module.parameters()])


# -- errors --------------------------------------------------------------------------------------

# After a failed assertion on the GPU no launch of the process succeeds.
FAILING_LAUNCH = """
import os, sys, torch
sys.path.insert(0, {folder!r})
from operators import OPERATORS
(operator,) = [operator for operator in OPERATORS if operator.name == {name!r}]
inputs = operator.inputs("odd", "cuda", torch.float32)
for _ in range(2):  # loads the kernels, and fills the allocator
    operator(*inputs)
index = torch.full((1,), 100, device="cuda")
torch.zeros(1, device="cuda")[index]
try:
    torch.cuda.synchronize()
except RuntimeError:
    pass
try:
    operator(*inputs)
except RuntimeError as error:
    print(error, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("name", ["lltm", "round_ste", "elementwise_mult"])
def test_a_failed_launch_is_an_error_of_python(name: str, tmp_path: Path) -> None:
    """In a process of its own, and by the name of the operator, or of torch's that it calls first on other GPUs than
    Hopper: its own check has noticed.
    """
    code = FAILING_LAUNCH.format(folder=str(Path(__file__).parent), name=name)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    noticed = rf"\b{name}(_step)?: .*device-side assert|^aten::\w+: torch's API call failed"
    assert re.search(noticed, done.stdout), done.stdout + done.stderr


LENGTHS_OUT_OF_RANGE = """
import contextlib, ctypes, os, torch, extops
input, state = torch.zeros(6, 3, 5, device="cuda"), torch.zeros(3, 4, device="cuda")
weights, bias = torch.zeros(12, 9, device="cuda"), torch.zeros(12, device="cuda")
lengths = torch.tensor([6, 7, 0], device="cuda")
with contextlib.suppress(RuntimeError):  # also of cuBLAS, which may notice first and names itself alone
    extops.lltm_sequence(input, (state, state), weights, bias, lengths=lengths)
try:
    torch.cuda.synchronize()
except RuntimeError as error:
    print(error, flush=True)
ctypes.CDLL(None).fflush(None)  # what the GPU printed
os._exit(0)
"""


def test_lengths_out_of_range(tmp_path: Path) -> None:
    """The host does not wait for lengths that the GPU alone knows, so the GPU refuses them."""
    done = subprocess.run(
        [sys.executable, "-c", LENGTHS_OUT_OF_RANGE],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    printed = done.stdout + done.stderr
    assert "device-side assert" in done.stdout, printed
    assert "lltm_sequence: expected `lengths` from 0 to 6" in printed


# -- several devices -----------------------------------------------------------------------------


@pytest.mark.multi_gpu
@by_operator
def test_second_device(operator: Operator) -> None:
    """Tensors of a device that is not the current one; the current device stays."""
    inputs = operator.inputs("odd", "cuda:0", torch.float32)
    towards = upstream(operator(*inputs))
    expected = forward_and_backward(operator, inputs, towards)
    on_second = [tuple(tensor.to("cuda:1") for tensor in tensors) for tensors in (inputs, towards)]
    actual = forward_and_backward(operator, *on_second)
    assert torch.cuda.current_device() == 0
    for tensor, value in zip(actual, expected, strict=True):
        assert tensor.device == torch.device("cuda:1")
        torch.testing.assert_close(tensor.to("cuda:0"), value)


@pytest.mark.multi_gpu
def test_two_devices_in_one_call() -> None:
    a, b = ELEMENTWISE_MULT.inputs("small", "cuda:0")
    with pytest.raises(RuntimeError, match=r"`b` on device cuda:0, .* got cuda:1"):
        extops.elementwise_mult(a, b.to("cuda:1"))


# -- more than 2**31 elements --------------------------------------------------------------------

BOUNDARY = 2**31
CHUNK = 2**26


@pytest.fixture
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests side by side share a GPU, which may have memory for one of the large ones."""
    of_all_workers = tmp_path_factory.getbasetemp().parent
    with (of_all_workers / "large.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()


def needs_memory(gigabytes: int) -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] // 2**30
    if free < gigabytes:
        pytest.skip(f"{gigabytes} GiB of GPU memory are needed, {free} are free")


def huge(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda").normal_()


def assert_rows_agree(
    function: Callable[..., Tensor | Tensors],
    results: Tensors,
    *inputs: Tensor,
    tolerance: float = 0.0,
) -> None:
    """Compares every row of the results with those of a function of the same rows of the inputs."""
    rows = len(results[0])
    step = max(1, CHUNK // max(1, results[0][0].numel()))
    for start in range(0, rows, step):
        chosen = slice(start, min(start + step, rows))
        expected = as_tuple(function(*(tensor[chosen] for tensor in inputs)))
        for result, value in zip(results, expected, strict=True):
            torch.testing.assert_close(result[chosen], value, rtol=tolerance, atol=tolerance)


by_half = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"]
)


@pytest.mark.large
@pytest.mark.usefixtures("alone")
@by_half
def test_large_round(dtype: torch.dtype) -> None:
    needs_memory(12)
    input = huge(BOUNDARY + 1029, dtype=dtype)
    result = extops.round_ste(input)
    assert_rows_agree(extops.reference.round_ste, (result,), input)


@pytest.mark.large
@pytest.mark.usefixtures("alone")
@by_half
def test_large_multiply(dtype: torch.dtype) -> None:
    needs_memory(20)
    a, b = huge(BOUNDARY + 1029, dtype=dtype), huge(BOUNDARY + 1029, dtype=dtype)
    result = extops.elementwise_mult(a, b)
    assert_rows_agree(torch.mul, (result,), a, b)
    extops.elementwise_mult(a, b, out=a[:])
    assert torch.equal(a, result)


@pytest.mark.large
@pytest.mark.usefixtures("alone")
def test_large_multiply_backward() -> None:
    needs_memory(32)
    a, b = (
        huge(BOUNDARY + 1029, dtype=torch.float16).requires_grad_(),
        huge(BOUNDARY + 1029, dtype=torch.float16).requires_grad_(),
    )
    towards = huge(BOUNDARY + 1029, dtype=torch.float16)
    extops.elementwise_mult(a, b).backward(towards)
    assert a.grad is not None and b.grad is not None
    assert_rows_agree(
        lambda towards, a, b: (towards * b, towards * a),
        (a.grad, b.grad),
        towards,
        a.detach(),
        b.detach(),
    )


@pytest.mark.large
@pytest.mark.usefixtures("alone")
def test_large_multiply_of_broadcast_inputs() -> None:
    """Small inputs whose product has more than 2**31 elements."""
    needs_memory(12)
    column = huge(2**16, 1, dtype=torch.bfloat16)
    row = huge(2**15 + 1, dtype=torch.bfloat16)
    result = extops.elementwise_mult(column, row)
    assert result.numel() > BOUNDARY
    assert_rows_agree(lambda part: part * row, (result,), column)


@pytest.mark.large
@pytest.mark.usefixtures("alone")
def test_more_samples_than_a_grid_has_clusters() -> None:
    """Clusters of eight samples are a grid's second dimension, which ends at 65,535."""
    needs_memory(12)
    features, state, batch = 1, 136, 8 * 65_535 + 9
    input = huge(2, batch, features, dtype=torch.bfloat16)
    h_0, weights = (
        huge(batch, state, dtype=torch.bfloat16),
        huge(3 * state, state + features, dtype=torch.bfloat16),
    )
    weights, bias = weights / state, weights[:, 0]
    output, _ = extops.lltm_sequence(input, (h_0, h_0), weights, bias)
    last = slice(-9, None)
    expected, _ = extops.lltm_sequence(input[:, last], (h_0[last], h_0[last]), weights, bias)
    torch.testing.assert_close(output[:, last], expected, rtol=2**-6, atol=2**-6)


@pytest.mark.large
@pytest.mark.usefixtures("alone")
def test_large_lltm() -> None:
    """The pointwise part of the cell: more than 2**31 elements in each tensor."""
    needs_memory(52)
    state = 1024
    batch = BOUNDARY // state + 3
    old_h, old_cell = (huge(batch, state, dtype=torch.bfloat16) for _ in range(2))
    input, weights = old_h[:, :1], huge(3 * state, state + 1, dtype=torch.bfloat16) / 32
    given = input, weights, weights[:, 0], old_h, old_cell
    new_h, new_cell, gates = torch.ops.extops.lltm_step(*given)
    del input, old_h, given
    assert_rows_agree(pointwise, (new_h, new_cell), gates, old_cell, tolerance=2**-6)
    grad_h, grad_cell = (huge(batch, state, dtype=torch.bfloat16) for _ in range(2))
    grad_gates, _, grad_old = torch.ops.extops.lltm_step_backward(
        grad_h, grad_cell, gates, new_cell
    )
    found = grad_gates, grad_old
    inputs = (grad_h, grad_cell, gates, old_cell)
    assert_rows_agree(pointwise_backward, found, *inputs, tolerance=2**-4)


@pytest.mark.large
@pytest.mark.usefixtures("alone")
def test_large_lltm_from_its_inputs() -> None:
    """The whole cell, forward and backward: few columns, but more than 2**31 products."""
    needs_memory(44)
    features, state = 2, 4
    batch = BOUNDARY // (3 * state) + 3
    shapes = (batch, features), (3 * state, state + features), (3 * state,), *[(batch, state)] * 2
    input, weights, bias, old_h, old_cell = (huge(*shape, dtype=torch.bfloat16) for shape in shapes)
    for parameter in (weights, bias):
        parameter.mul_(0.25)
    leaves = tuple(tensor.requires_grad_() for tensor in (input, old_h, old_cell))
    results = extops.lltm(input, weights, bias, old_h, old_cell)
    grad_h, grad_cell = (huge(batch, state, dtype=torch.bfloat16) for _ in range(2))
    found = torch.autograd.grad(results, leaves, (grad_h, grad_cell))

    def in_float32(*rows: Tensor) -> Tensors:
        input, old_h, old_cell, *towards = (tensor.detach().float() for tensor in rows)
        leaves = tuple(tensor.requires_grad_() for tensor in (input, old_h, old_cell))
        states = extops.reference.lltm(input, weights.float(), bias.float(), old_h, old_cell)
        gradients = torch.autograd.grad(states, leaves, towards)
        return tuple(tensor.detach().bfloat16() for tensor in (*states, *gradients))

    outputs = tuple(result.detach() for result in results)
    assert_rows_agree(in_float32, (*outputs, *found), *leaves, grad_h, grad_cell, tolerance=2**-3)


@pytest.mark.large
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=dtype_name)
@pytest.mark.parametrize(
    ("batch", "features", "state"),
    [(3, 2, 27_000), (2**16 + 3, 2**15 + 1, 1)],
    ids=["weights", "input"],
)
def test_large_products(batch: int, features: int, state: int, dtype: torch.dtype) -> None:
    """More than 2**31 elements in the weights, or in the input, and in its gradient."""
    needs_memory(48)
    shapes = (batch, features), (3 * state, state + features), (3 * state,), *[(batch, state)] * 2
    inputs = tuple(huge(*shape, dtype=dtype) for shape in shapes)
    assert max(tensor.numel() for tensor in inputs) > BOUNDARY
    inputs[1].mul_((state + features) ** -0.5)
    towards = tuple(huge(batch, state, dtype=dtype) for _ in range(2))

    def run(function: Callable[..., Tensors], inputs: Tensors, towards: Tensors) -> Tensors:
        leaves = tuple(tensor.requires_grad_() for tensor in inputs)
        results = function(*leaves)
        found = torch.autograd.grad(results, leaves, towards)
        return *(result.detach() for result in results), *found

    actual, eager = (run(function, inputs, towards) for function in (LLTM, LLTM.eager))
    by_units = state > batch
    # Gradients of these are sums over all units, or all samples.
    totals = dict.fromkeys(("input", "old_h") if by_units else ("weights", "bias"), 0.0)

    def part(name: str, tensor: Tensor, chosen: Tensor) -> Tensor:
        if name in totals:
            return tensor
        if by_units and name in ("weights", "bias"):
            return tensor[torch.cat([chosen + gate * state for gate in range(3)])]
        return tensor[:, chosen] if by_units else tensor[chosen]

    names = *LLTM.results, *LLTM.arguments
    # In float64 there is room for a part of the units, or of the samples, at a time.
    for chosen in torch.arange(max(batch, state), device="cuda").tensor_split(16):
        of_results, of_inputs = (
            tuple(part(name, x, chosen).detach().double() for name, x in zip(of, xs, strict=True))
            for of, xs in ((LLTM.results, towards), (LLTM.arguments, inputs))
        )
        found = run(LLTM.eager, of_inputs, of_results)
        for name, *values, exact in zip(names, actual, eager, found, strict=True):
            if name in totals:
                totals[name] = exact + totals[name]
            else:
                parts = (part(name, x, chosen) for x in values)
                assert_as_accurate_as_eager(name, *parts, exact, LLTM.ulps)
    for name, total in totals.items():
        of_all = (found[names.index(name)] for found in (actual, eager))
        assert_as_accurate_as_eager(name, *of_all, total, LLTM.ulps)


def pointwise(gates: Tensor, old_cell: Tensor) -> Tensors:
    """The LLTM from its gates on, in float32."""
    input_gate, output_gate, candidate = gates.float().chunk(3, dim=1)
    activation = torch.nn.functional.elu(candidate)
    new_cell = old_cell.float() + activation * torch.sigmoid(input_gate)
    new_h = torch.tanh(new_cell) * torch.sigmoid(output_gate)
    return new_h.to(gates.dtype), new_cell.to(gates.dtype)


def pointwise_backward(
    grad_h: Tensor, grad_cell: Tensor, gates: Tensor, old_cell: Tensor
) -> Tensors:
    leaves = tuple(tensor.detach().requires_grad_() for tensor in (gates, old_cell))
    return torch.autograd.grad(pointwise(*leaves), leaves, (grad_h, grad_cell))
