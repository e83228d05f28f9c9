"""The kernels of all steps on a GPU, whose blocks wait for each other: each is taken where it should be, is right after
many steps, and ends whatever else the GPU does.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import extops
import operators
from extops._requirements import read_build_info
from extops.choosing import _table
from operators import Tensors, sequence, sequence_by_cells
from test_precision import tf32

pytestmark = pytest.mark.gpu

TIME, FEATURES = 40, 24


def which_kernel(input: Tensor, state_size: int, backward: bool = False) -> str:
    state = input.new_empty(input.shape[1], state_size)
    return extops.which_kernel(extops.lltm_sequence, input, (state, state), backward=backward)


def is_for_hopper() -> bool:
    """Whether the GPU has clusters, and the wheel kernels for them."""
    of_wheel = read_build_info(Path(extops.__file__).parent)["architectures"]
    return torch.cuda.get_device_capability() == (9, 0) and any(
        x.startswith("9.0") for x in of_wheel
    )


@dataclass(frozen=True)
class Case:
    """A problem, and the kernel that computes it, forward and backward."""

    kernel: str
    state: int
    batch: int
    precision: str

    def __str__(self) -> str:
        return f"{self.kernel}-{self.state}-{self.batch}-{self.precision}"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.precision == "tf32" else getattr(torch, self.precision)

    def inputs(self, time: int = TIME, spread: float = 1.0) -> Tensors:
        inputs = operators.sequence_inputs(time, self.batch, FEATURES, self.state, spread)
        return tuple(x.to("cuda", self.dtype) for x in inputs)

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Computes by this kernel; on GPUs that lack it, step by step."""
        has_clusters = is_for_hopper()
        kernel = self.kernel if has_clusters or not self.kernel.endswith("cluster") else "step"
        input = torch.empty(TIME, self.batch, FEATURES, device="cuda", dtype=self.dtype)
        operators.name_kernel(kernel)
        try:
            with tf32(self.precision == "tf32"):
                found = [which_kernel(input, self.state, backward=x) for x in (False, True)]
                if "none" in found and not has_clusters:  # its shared memory is too small
                    operators.name_kernel("step")
                    found, kernel = ["step", "step"], "step"
                assert found == [kernel, kernel]
                yield
        finally:
            operators.name_kernel("")


CASES = [
    Case("float32_block", 64, 300, "float32"),  # two samples a block
    Case("float32_block", 128, 16, "float32"),
    Case("float32_block", 128, 16, "tf32"),
    Case("tensor_block", 128, 200, "tf32"),
    Case("tensor_block", 128, 300, "tf32"),
    Case("tensor_block", 64, 16, "bfloat16"),
    Case("tensor_block", 128, 600, "float16"),  # four samples a block
    Case("float32_cluster", 256, 16, "float32"),
    Case("float32_cluster", 256, 300, "float32"),  # clusters of sixteen samples
    Case("float32_cluster", 512, 40, "float32"),
    Case("float32_cluster", 512, 80, "float32"),
    Case("tensor_cluster", 256, 64, "tf32"),
    Case("tensor_cluster", 256, 300, "tf32"),
    Case("tensor_cluster", 512, 40, "tf32"),
    Case("tensor_cluster", 512, 80, "tf32"),  # clusters of sixteen samples
    Case("group", 512, 300, "tf32"),
    Case("tensor_cluster", 256, 64, "bfloat16"),
    Case("tensor_cluster", 512, 64, "bfloat16"),
    Case("tensor_cluster", 512, 64, "float16"),
    Case("group", 512, 128, "float32"),
    Case("group", 512, 300, "float32"),  # a block has several tiles
    Case("group", 1024, 16, "float32"),  # tiles of few rows
    Case("group", 1024, 40, "float32"),
    Case("group", 1024, 128, "float32"),
    Case("group", 1024, 64, "tf32"),
    Case("group", 1024, 128, "tf32"),
    Case("group", 1024, 128, "bfloat16"),
    Case("group", 600, 300, "float16"),  # several tiles
    Case("group", 1021, 16, "bfloat16"),  # rows of no whole chunks
    Case("step", 256, 64, "float64"),
]
by_case = pytest.mark.parametrize("case", CASES, ids=str)
# One for each file of kernels.
SIZES = {(128, 16), (512, 40), (512, 64), (1024, 40), (1024, 64), (1024, 128)}
by_kernel = pytest.mark.parametrize(
    "case", [case for case in CASES if (case.state, case.batch) in SIZES], ids=str
)


def run(inputs: Tensors) -> list[Tensor]:
    """The results and the gradients of all inputs, of sums that float16 holds."""
    towards = tuple(torch.full_like(x, 0.01) for x in sequence(*inputs))
    results, gradients = operators.gradients(sequence, inputs, towards)
    return [x.detach() for x in (*results, *gradients)]


def keep_busy(stream: torch.cuda.Stream) -> None:
    """Fills every SM for some tens of milliseconds."""
    with torch.cuda.stream(stream):
        matrix = torch.randn(8192, 8192, device="cuda")
        for _ in range(3):
            matrix = torch.tanh(matrix @ matrix)


@by_case
def test_five_hundred_steps(case: Case) -> None:
    """Errors travel from step to step, by small weights without growing. Eager's TF32 may be none: its float16 rounds
    to as many bits.
    """
    inputs = case.inputs(500, 0.05)
    towards = tuple(x / 500**0.5 for x in operators.upstream(sequence(*inputs)))

    def found(function: Callable[..., Tensors], dtype: torch.dtype) -> list[Tensor]:
        tensors = (tuple(x.to(dtype) for x in of) for of in (inputs, towards))
        results, gradients = operators.gradients(function, *tensors)
        return [x.detach().double() for x in (*results, *gradients)]

    with case.chosen():
        ours, eager = (found(f, case.dtype) for f in (sequence, sequence_by_cells))
    exact = found(sequence_by_cells, torch.float64)
    half = found(sequence_by_cells, torch.float16) if case.precision == "tf32" else eager
    names = *operators.LLTM_SEQUENCE.results, *operators.LLTM_SEQUENCE.arguments
    for name, *values, value in zip(names, ours, eager, half, exact, strict=True):
        error, eager_error, half_error = ((x - value).norm().item() for x in values)
        floor = 1e-10 * value.norm().item()
        assert error <= 1.5 * max(eager_error, half_error) + floor, name


@by_case
def test_without_gradients(case: Case) -> None:
    """Nothing is written for a backward then, and the results are the same."""
    inputs = case.inputs()
    lengths = torch.randint(TIME + 1, (case.batch,), device="cuda")
    with case.chosen(), torch.no_grad():
        for options in ({}, {"lengths": lengths}):
            found = sequence(*inputs, **options)
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in inputs]
                expected = sequence(*leaves, **options)
            torch.testing.assert_close(found, tuple(x.detach() for x in expected), rtol=0, atol=0)


def test_a_kernel_by_its_name(take: Callable[[str], None]) -> None:
    case = Case("float32_block", 128, 16, "float32")
    inputs = case.inputs()
    expected = run(inputs)
    take("step")
    for backward in (False, True):
        assert which_kernel(inputs[0], case.state, backward=backward) == "step"
    for x, y in zip(run(inputs), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def test_one_step_of_both_directions_is_a_sequence(take: Callable[[str], None]) -> None:
    """In float32 without TF32 the kernel that is named serves none."""
    take("tensor_block")
    input = torch.randn(1, 16, FEATURES, device="cuda")
    one, both = (extops.LLTMLayer(FEATURES, 128, bidirectional=x).cuda() for x in (False, True))
    with tf32(False):
        assert extops.which_kernel(one, input) == "step"
        assert one(input)[0].shape == (1, 16, 128)
        assert extops.which_kernel(both, input) == "none"
        with pytest.raises(RuntimeError, match="expected EXTOPS_SEQUENCE_KERNEL to name a kernel"):
            both(input)


BY_THE_ENVIRONMENT = """
import os, test_sequence_kernels as tests
case = tests.Case("float32_block", 128, 16, "float32")
input, *_ = case.inputs()
for name in ("step", "float32_block"):
    os.environ["EXTOPS_SEQUENCE_KERNEL"] = name
    print(tests.which_kernel(input, case.state))
"""


def test_a_kernel_by_the_environment(request: pytest.FixtureRequest) -> None:
    """Which is read once: to read it in each call would race with those who change it."""
    done = subprocess.run(
        [sys.executable, "-c", BY_THE_ENVIRONMENT],
        cwd=request.path.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["step", "step"], done.stderr


@pytest.mark.parametrize("name", ["tensor_block", "nonsense"])
def test_a_name_of_no_kernel_for_the_problem(take: Callable[[str], None], name: str) -> None:
    inputs = Case("float32_block", 128, 16, "float32").inputs()
    take(name)
    assert which_kernel(inputs[0], 128) == "none"
    expected = (
        r"expected EXTOPS_SEQUENCE_KERNEL to name a kernel for such a sequence on this GPU "
        rf"\(float32_block, [^)]*step\), but got {name}"
    )
    with pytest.raises(RuntimeError, match=expected):
        sequence(*inputs)


@by_kernel
def test_beside_a_busy_stream(case: Case) -> None:
    inputs = case.inputs()
    with case.chosen():
        expected = run(inputs)
        torch.cuda.synchronize()
        keep_busy(torch.cuda.Stream())
        found = run(inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def small_kernels(count: int = 300) -> list[Callable[[], None]]:
    """Launch elementwise kernels on other streams, whose blocks fit onto the SMs beside those of a sequence."""
    starts = []
    for elements in (2**14, 2**17, 2**20):
        values, stream = torch.zeros(elements, device="cuda"), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(count):
                values += 1

        # The values, too: nobody else would keep the memory that the graph writes to.
        def start(graph: Any = graph, stream: Any = stream, values: Tensor = values) -> None:
            with torch.cuda.stream(stream):
                graph.replay()

        starts.append(start)
    return starts


def repeats_that_differ(function: Callable[[], list[Tensor]], count: int = 50) -> int:
    """How often a function gives other bits while small kernels share the SMs with it."""
    expected = function()
    torch.cuda.synchronize()
    starts = small_kernels()
    wrong = []
    for _ in range(count):
        for start in starts:
            start()
        found = function()
        wrong.append(
            torch.stack([(x != y).any() for x, y in zip(found, expected, strict=True)]).any()
        )
    torch.cuda.synchronize()  # nobody may get the memory to which the graphs still write
    return int(torch.stack(wrong).sum())


@by_case
@pytest.mark.parametrize("batch_first", [False, True], ids=["by steps", "by samples"])
def test_both_directions(case: Case, batch_first: bool) -> None:
    """One call gives what two give, each of one direction, in whatever order they compute it."""
    options: Any = {"batch_first": batch_first, "device": "cuda", "dtype": case.dtype}
    layer = extops.LLTMLayer(FEATURES, case.state, bidirectional=True, **options)
    shape = (case.batch, TIME) if batch_first else (TIME, case.batch)
    input = torch.randn(*shape, FEATURES, device="cuda", dtype=case.dtype, requires_grad=True)
    h_0, c_0 = torch.randn(2, 2, case.batch, case.state, device="cuda", dtype=case.dtype)
    leaves = [input, *layer.parameters(), *(x.requires_grad_() for x in (h_0, c_0))]
    ahead, back = (
        [layer.weights_l0, layer.bias_l0],
        [layer.weights_l0_reverse, layer.bias_l0_reverse],
    )
    lengths = torch.randint(TIME + 1, (case.batch,), device="cuda")

    def apart() -> tuple[Tensor, tuple[Tensor, ...]]:
        one, other = (
            extops.lltm_sequence(
                input,
                (h_0[place], c_0[place]),
                *parameters,
                lengths=lengths,
                batch_first=batch_first,
                reverse=bool(place),
            )
            for place, parameters in enumerate((ahead, back))
        )
        last = (torch.stack(x) for x in zip(one[1], other[1], strict=True))
        return torch.cat((one[0], other[0]), dim=2), tuple(last)

    def of(function: Callable[[], Any]) -> list[Tensor]:
        output, last = function()
        factors = torch.linspace(0, 0.1, case.state, device="cuda")
        loss = sum(
            (x.float().unflatten(-1, (-1, case.state)) * factors).sum() for x in (output, *last)
        )
        return [output, *last, *torch.autograd.grad(loss, leaves)]

    with case.chosen():
        found = of(lambda: layer(input, (h_0, c_0), lengths))
        expected = of(apart)
    for x, y in zip(found, expected, strict=True):
        assert (x - y).float().norm() <= 0.01 * y.float().norm()


@by_case
def test_beside_small_kernels(case: Case) -> None:
    """A late load reads the next copy's data, unless the kernel waits for it."""
    inputs = case.inputs()
    with case.chosen():
        assert repeats_that_differ(lambda: run(inputs)) == 0


@pytest.mark.parametrize(
    "layer", [extops.LSTM, extops.GRU, extops.LLTMLayer], ids=lambda it: it.__name__
)
@pytest.mark.parametrize(("state", "batch"), [(576, 64), (768, 16)])
def test_two_directions_beside_small_kernels(
    take: Callable[[str], None], layer: Any, state: int, batch: int
) -> None:
    """Their gradients are copied while the other direction computes."""
    if is_for_hopper():
        take("group")
    rnn = layer(64, state, bidirectional=True, device="cuda")
    input = torch.randn(70, batch, 64, device="cuda")

    def train() -> list[Tensor]:
        output, _ = rnn(input)
        return list(torch.autograd.grad(output.square().mean(), list(rnn.parameters())))

    assert repeats_that_differ(train) == 0


@by_case
def test_two_at_once(case: Case) -> None:
    """Each needs most of the SMs for itself."""
    inputs = case.inputs(time=500, spread=0.05)
    with case.chosen():
        expected = run(inputs)
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in range(2)]
        found = []
        for _ in range(3):
            for stream in streams:
                with torch.cuda.stream(stream):
                    found.append(run(inputs))
        torch.cuda.synchronize()
    for each in found:
        torch.testing.assert_close(each, expected, rtol=0, atol=0)


def captured(inputs: Tensors, state: int) -> tuple[torch.cuda.CUDAGraph, list[Tensor], list[str]]:
    """The graph of a run, its results, and the kernels in it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels = [which_kernel(inputs[0], state, backward=backward) for backward in (False, True)]
        found = run(inputs)
    return graph, found, kernels


@by_kernel
def test_in_a_captured_graph(case: Case) -> None:
    inputs = case.inputs()
    other = tuple(x.flip(0) for x in inputs)
    with case.chosen():
        expected = run(other)
        graph, found, kernels = captured(inputs, case.state)
        assert kernels == [which_kernel(inputs[0], case.state)] * 2
    for target, source in zip(inputs, other, strict=True):
        target.copy_(source)
    for _ in range(2):
        graph.replay()
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


ANOTHER_PROCESS = """
import torch, test_sequence_kernels as tests
(case,) = [case for case in tests.CASES if str(case) == {case!r}]
inputs = case.inputs()
with case.chosen():
    expected = tests.run(inputs)
    print("begun", flush=True)
    for _ in range(20):
        torch.testing.assert_close(tests.run(inputs), expected, rtol=0, atol=0)
"""


@by_kernel
def test_beside_another_process(case: Case, request: pytest.FixtureRequest) -> None:
    inputs = case.inputs()
    with case.chosen():
        expected = run(inputs)
        with subprocess.Popen(
            [sys.executable, "-c", ANOTHER_PROCESS.format(case=str(case))],
            cwd=request.path.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as other:
            assert other.stdout is not None
            begun = other.stdout.readline()
            for _ in range(20):
                torch.testing.assert_close(run(inputs), expected, rtol=0, atol=0)
            _, errors = other.communicate(timeout=120)
    assert begun == "begun\n", errors
    assert other.returncode == 0, errors


# -- fewer SMs than the GPU has ------------------------------------------------------------------

# Two kernels of one problem add up in different orders.
ROUNDING = {"float64": 1e-12, "float32": 1e-5, "tf32": 1e-2, "bfloat16": 3e-2, "float16": 1e-2}


@functools.cache
def green_contexts() -> list[Any]:
    from torch.cuda.green_contexts import GreenContext

    count = torch.cuda.get_device_properties(0).multi_processor_count
    return [GreenContext.create(num_sms=sms, device_id=0) for sms in range(8, count, 24)]


@contextmanager
def current(context: Any) -> Iterator[None]:
    context.set_context()
    try:
        # Autograd's own thread would work on the default stream of the whole GPU.
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        context.pop_context()


@contextmanager
def on_its_stream(context: Any) -> Iterator[None]:
    stream = context.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


@by_case
@pytest.mark.parametrize("enter", [current, on_its_stream], ids=lambda it: it.__name__)
def test_in_a_green_context(case: Case, enter: Callable[[Any], Any]) -> None:
    """A kernel whose blocks do not all fit is not chosen, and the values stay right."""
    if not pytest.importorskip("torch.cuda.green_contexts").SUPPORTED:
        pytest.skip("this torch was built without green contexts")
    inputs = case.inputs()
    with case.chosen():
        expected = run(inputs)
    with tf32(case.precision == "tf32"):
        for context in green_contexts():
            with enter(context):
                found = run(inputs)
            for value, of_all in zip(found, expected, strict=True):
                error = (value - of_all).double().norm() / of_all.double().norm()
                assert error < ROUNDING[case.precision]


# -- which kernel is the fastest is measured -----------------------------------------------------


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where it is kept. What a process has measured it knows for ever, so each test has sizes of its own."""
    file = tmp_path / "choices.json"
    monkeypatch.setenv("EXTOPS_CHOICES", str(file))
    _table.table.cache_clear()
    yield file
    _table.table.cache_clear()


def measured() -> dict[str, list[str]]:
    """The kernels of eager calls and of those in graphs, by kind."""
    kinds = _table.table(0).kinds.items()
    return {
        name: of.way.split("|")
        for name, kind in kinds
        for of in kind.measured.values()
        if "_sequence" in name
    }


@pytest.mark.parametrize("time", [TIME, 200])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_first_call_measures(file: Path, precision: str, time: int) -> None:
    """Its results are those of the calls after it, which measure nothing."""
    case = Case("step", 116 + 4 * (time == TIME), 24, precision)
    inputs = case.inputs(time)
    first = run(inputs)
    kinds = measured()
    assert {name.partition(",")[0] for name in kinds} == {
        "lltm_sequence",
        "lltm_sequence_backward",
    }
    for backward, (eager, _) in enumerate(kinds.values()):
        assert which_kernel(inputs[0], case.state, backward=bool(backward)) == eager
    kept = file.read_bytes()
    torch.testing.assert_close(run(inputs), first, rtol=0, atol=0)
    assert file.read_bytes() == kept
    with case.chosen():
        for value, of_steps in zip(first, run(inputs), strict=True):
            error = (value - of_steps).double().norm() / of_steps.double().norm()
            assert error < 3 * ROUNDING[precision]


def test_nothing_is_measured_where_results_must_repeat(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    inputs = Case("step", 104, 24, "bfloat16").inputs()
    torch.use_deterministic_algorithms(True)
    try:
        run(inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not file.exists()
    run(inputs)
    assert len(measured()) == 2


def test_a_capture_measures_nothing_and_takes_what_the_gpu_computes_soonest(file: Path) -> None:
    inputs = Case("step", 108, 24, "bfloat16").inputs()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        sequence(*inputs)
    assert not file.exists()
    _, _, kernels = captured(inputs, 108)
    assert kernels == [in_graphs for _, in_graphs in measured().values()]


IN_ANOTHER_PROCESS = """
import test_sequence_kernels as tests
inputs = tests.Case("step", 112, 24, "bfloat16").inputs()
tests.run(inputs)
print(*[tests.which_kernel(inputs[0], 112, backward) for backward in (False, True)])
"""


def test_a_second_process_measures_nothing(file: Path, request: pytest.FixtureRequest) -> None:
    inputs = Case("step", 112, 24, "bfloat16").inputs()
    run(inputs)
    # Other kernels than the fastest, so that they can only come from the file.
    content = json.loads(file.read_text())
    ((_, kinds),) = content["machines"].items()
    for kind in kinds.values():
        for of in kind.values():
            of[0] = "step|step"
    file.write_text(json.dumps(content))
    done = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS],
        cwd=request.path.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["step", "step"], done.stderr
    assert json.loads(file.read_text()) == content
    _table.table.cache_clear()
    assert "step" in str(measured())


def test_choices_name_the_kernels(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(Case("step", 100, 24, "bfloat16").inputs())
    extops.choices()
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "lltm_sequence, " in x]
    eager, in_graphs = measured()[line.partition("x 24  ")[2]]
    assert re.match(rf" +{eager} +[0-9.]+ us, {in_graphs} +[0-9.]+ us +40 x 24  ", line)
