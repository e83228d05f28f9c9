"""Recurrent layers in one graph: torch.compile with `fullgraph`, and torch.export."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import extops
from extops import _in_graph, accelerating
from extops.binding import _schemas
from extops.choosing import _measure, _table
from operators import by_device, needs_inductor

pytestmark = [
    pytest.mark.usefixtures("dynamo"),
    pytest.mark.skipif(torch.__version__ < "2.6", reason="this torch traces no packed sequence"),
]

FEATURES, STATE, TIME = 5, 6, 7
LENGTHS = (7, 7, 3, 1)
UNSORTED = (3, 7, 1, 7)
LAYERS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}


class Tagger(nn.Module):
    """As people write it."""

    def __init__(self, layer: str = "LSTM", *, is_sorted: bool = True, **options: Any) -> None:
        super().__init__()
        self.is_sorted = is_sorted
        self.embed = nn.Linear(FEATURES, FEATURES)
        self.rnn = LAYERS[layer](FEATURES, STATE, batch_first=True, **options)

    def packed(self, input: Tensor, lengths: Any) -> PackedSequence:
        options = {"batch_first": True, "enforce_sorted": self.is_sorted}
        return pack_padded_sequence(self.embed(input), lengths, **options)

    def forward(self, input: Tensor, lengths: Any) -> Any:
        self.rnn.flatten_parameters()
        output, last = self.rnn(self.packed(input, lengths))
        padded, counts = nn.utils.rnn.pad_packed_sequence(output, batch_first=True)
        return padded.relu(), counts, last


class LastStates(Tagger):
    def forward(self, input: Tensor, lengths: Any) -> Any:
        _, (h, _) = self.rnn(self.packed(input, lengths))
        return torch.cat(tuple(h), dim=1)


class Closure(LastStates):
    """LASER's encoder has a function of this kind."""

    def forward(self, input: Tensor, lengths: Any) -> Any:
        def joined(states: Tensor) -> Tensor:
            return torch.cat([self.embed.bias.sum() * x for x in states], dim=1)

        packed = pack_padded_sequence(input, lengths, batch_first=True, enforce_sorted=False)
        return joined(self.rnn(packed)[1][0])


class OtherName(LastStates):
    """The argument that is the module is not called `self`."""

    def forward(module, input: Tensor, lengths: Any) -> Any:
        packed = pack_padded_sequence(input, lengths, batch_first=True, enforce_sorted=False)
        return torch.cat(tuple(module.rnn(packed)[1][0]), dim=1)


class TwoLayers(Tagger):
    """With what many do between them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.drop = nn.Dropout(0.0)
        self.second = nn.LSTM(STATE, FEATURES, bidirectional=True)

    def forward(self, input: Tensor, lengths: Any) -> Any:
        output, _ = self.rnn(self.packed(input, lengths))
        dropped = PackedSequence(self.drop(output.data), *output[1:])
        output, last = self.second(dropped)
        padded, _ = pad_packed_sequence(output, total_length=TIME + 2, padding_value=-1.0)
        return padded, last, output.data.sum(0), output.batch_sizes


class Padding(Tagger):
    def forward(self, input: Tensor, lengths: Any) -> Any:
        return pad_packed_sequence(self.packed(input, lengths), batch_first=True)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "sorted": lambda: Tagger(num_layers=2, bidirectional=True),
    "unsorted": lambda: Tagger("GRU", is_sorted=False),
    "rnn": lambda: Tagger("RNN", is_sorted=False, bidirectional=True, bias=False),
    "states": lambda: LastStates(is_sorted=False),
    "padding": lambda: Padding(is_sorted=False),
    "closure": lambda: Closure(is_sorted=False),
    "between": lambda: TwoLayers(is_sorted=False),
    "between_sorted": TwoLayers,
    "other_name": lambda: OtherName(is_sorted=False),
}


def pair(name: str, device: str = "cpu") -> tuple[nn.Module, nn.Module]:
    """Accelerated, and as it was."""
    torch.manual_seed(0)
    model = MODELS[name]().to(device, torch.float64)
    return extops.accelerate(copy.deepcopy(model)), model


def inputs_of(model: Any, device: str = "cpu", *rows: int) -> tuple[Tensor, Tensor]:
    lengths = rows or (LENGTHS if model.is_sorted else UNSORTED)
    input = torch.randn(len(lengths), max(lengths), FEATURES, dtype=torch.float64, device=device)
    return input, torch.tensor(lengths)


def results_of(run: Callable[..., Any], module: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """With gradients."""
    input = inputs[0].detach().requires_grad_()
    found, _ = torch.utils._pytree.tree_flatten(run(input, *inputs[1:]))
    floats = [x for x in found if x.is_floating_point()]
    loss = sum((x * torch.linspace(0, 1, x.numel()).to(x).view_as(x)).sum() for x in floats)
    wanted = input, *(x for x in module.parameters())
    return found, torch.autograd.grad(loss, wanted, allow_unused=True)


@by_device
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.every(4, "name")
def test_packed(name: str, device: str) -> None:
    """One graph for any lengths, in training, with torch's values."""
    ours, theirs = pair(name, device)
    torch._dynamo.utils.counters.clear()
    run = torch.compile(ours, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in ((), (6, 5, 4), (9, 9, 2, 2, 1)):
        inputs = inputs_of(theirs, device, *rows)
        if name.startswith("between") and rows:
            continue  # its total_length is a number
        found, expected = results_of(run, ours, inputs), results_of(theirs, theirs, inputs)
        torch.testing.assert_close(found, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@by_device
@pytest.mark.skipif(
    torch.__version__ < "2.11", reason="this torch makes no packed sequence in a graph"
)
def test_packed_rows_of_lengths_that_are_numbers(device: str) -> None:
    """They have a size that no data tells, so a graph does not end at them, as one of `fullgraph=False` does else."""
    ours, theirs = pair("between", device)
    torch._dynamo.utils.counters.clear()
    run = torch.compile(ours, backend="aot_eager", dynamic=True)
    for rows in (UNSORTED, (TIME, 2, 2, 5)):
        input, _ = inputs_of(theirs, device, *rows)
        found, expected = (
            results_of(x, y, (input, [*rows])) for x, y in ((run, ours), (theirs, theirs))
        )
        torch.testing.assert_close(found, expected)
    counters = torch._dynamo.utils.counters
    assert counters["graph_break"] == {}
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.gpu
def test_lengths_have_arrived_on_the_cpu() -> None:
    """However long the GPU takes to compute them."""
    torch.ones(7, device="cuda").cpu()  # else CUDA is initialised meanwhile
    torch.cuda._sleep(10**8)
    lengths = torch.arange(7, device="cuda") + 1
    found = _in_graph.checked_lengths(lengths, torch.device("cpu"))
    assert found.tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_who_packs_at_run_time_is_told() -> None:
    """What eager code refuses is refused, and so is what would give a size that depends on data."""
    ours, _ = pair("sorted")
    run = torch.compile(ours, backend="aot_eager", fullgraph=True, dynamic=True)
    input, _ = inputs_of(ours)
    for lengths, message in (
        ((7, 3, 5, 1), "`lengths` array must be sorted in decreasing order"),
        ((7, 7, 3, 0), "Length of all samples has to be greater than 0"),
        ((6, 5, 3, 1), "in a graph the longest row has all steps of the input, or"),
        ((8, 7, 3, 1), "expected `lengths` from 1 to the number of steps of `input`"),
    ):
        with pytest.raises(RuntimeError, match=message):
            run(input, torch.tensor(lengths))


class Doubled(nn.Module):
    """Packs the rows of a layer anew."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(5, STATE)

    def forward(self, input: Tensor, lengths: Tensor) -> Tensor:
        packed, _ = self.rnn(pack_padded_sequence(input, lengths))
        packed = PackedSequence(packed.data * 2, packed.batch_sizes)
        return pad_packed_sequence(packed, total_length=TIME)[0]


def test_who_packs_rows_anew_is_told() -> None:
    """By `batch_sizes`, whose number would depend on data."""
    run = torch.compile(extops.accelerate(Doubled()), backend="eager")
    with pytest.raises(RuntimeError, match="what reads the `batch_sizes` of packed rows wants"):
        run(torch.randn(TIME, 3, 5), torch.tensor([4, 3, 1]))


def test_packed_results_leave_a_graph() -> None:
    """As packed sequences, which a layer of torch takes."""
    ours, theirs = pair("sorted")
    inputs = inputs_of(theirs)

    def packs(model: Any, *inputs: Any) -> Any:
        return model.rnn(model.packed(*inputs))

    last = nn.GRU(2 * STATE, 2).double()
    for model in (ours, theirs):
        model.forward = packs.__get__(model)
    run = torch.compile(ours, backend="eager", fullgraph=True)
    (found, _), (expected, _) = run(*inputs), theirs(*inputs)
    assert isinstance(found, PackedSequence)
    torch.testing.assert_close(tuple(found)[:2], tuple(expected)[:2])
    torch.testing.assert_close(last(found)[1], last(expected)[1])
    torch.testing.assert_close(found.to(torch.float32).data, expected.to(torch.float32).data)
    torch.testing.assert_close(found._replace(data=found.data * 2).data, expected.data * 2)
    torch.testing.assert_close(copy.copy(found).data, expected.data)


def test_packed_sequences_cross_a_break() -> None:
    """Of the user's code."""
    ours, theirs = pair("sorted")

    def breaks(model: Any, *inputs: Any) -> Any:
        packed = model.packed(*inputs)
        torch._dynamo.graph_break()
        output, last = model.rnn(packed)
        torch._dynamo.graph_break()
        return pad_packed_sequence(output)[0], last, output[0].sum()

    inputs = inputs_of(theirs)
    run = torch.compile(breaks, backend="eager")
    torch.testing.assert_close(run(ours, *inputs), breaks(theirs, *inputs))


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("is_method", [False, True])
def test_a_break_of_the_users_before_packing(is_method: bool, is_sorted: bool) -> None:
    """Behind it a method has one graph. A function, whose packing Dynamo refuses, failed in torch 2.11."""
    ours, theirs = pair("sorted" if is_sorted else "unsorted")

    def branches(model: Any, input: Tensor, lengths: Tensor) -> Any:
        if input.sum() > 0:
            input = input + 1
        output, last = model.rnn(model.packed(input, lengths))
        return pad_packed_sequence(output)[0] + 1, last

    def packs(rnn: Any, input: Tensor, lengths: Tensor) -> Any:
        if input.sum() > 0:
            input = input + 1
        packed = pack_padded_sequence(input, lengths, batch_first=True, enforce_sorted=is_sorted)
        output, last = rnn(packed)
        return pad_packed_sequence(output)[0] + 1, last

    graphs = []

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    inputs = inputs_of(theirs)
    run = torch.compile(branches if is_method else packs, backend=note)
    if is_method:
        found, expected = run(ours, *inputs), branches(theirs, *inputs)
        assert len(graphs) == 2
    else:
        found, expected = run(ours.rnn, *inputs), packs(theirs.rnn, *inputs)
    torch.testing.assert_close(found, expected)


def changes_packed_rows(model: Any, input: Tensor, lengths: Tensor) -> Any:
    packed = model.packed(input, lengths)
    packed.data.mul_(0.5)
    output, last = model.rnn(packed)
    nn.functional.relu(output.data, inplace=True)
    return pad_packed_sequence(output)[0], last, output.data is output.data


def changes_what_was_packed(model: Any, input: Tensor, lengths: Tensor) -> Any:
    found, buffer, counts = [], torch.zeros_like(input), lengths.clone()
    for number in range(3):
        buffer.copy_(input * number)
        options = {"batch_first": True, "enforce_sorted": model.is_sorted}
        found.append(pack_padded_sequence(buffer, counts, **options))
    counts -= 1
    outputs = [pad_packed_sequence(model.rnn(x)[0], total_length=TIME + 2) for x in found]
    return outputs, [x.batch_sizes for x in found]


def packs_numbers(model: Any, input: Tensor, lengths: Tensor) -> Any:
    options = {"batch_first": True, "enforce_sorted": model.is_sorted}
    packed = pack_padded_sequence((100 * input).long(), lengths, **options)
    of_bools = pack_padded_sequence(input > 0, lengths, **options)
    return pad_packed_sequence(packed, padding_value=-1), pad_packed_sequence(of_bools)


def pads_by_samples(model: Any, input: Tensor, lengths: Tensor) -> Any:
    padded, _ = pad_packed_sequence(model.rnn(model.packed(input, lengths))[0], batch_first=True)
    return padded, padded.stride()


def pads_behind_a_break(model: Any, input: Tensor, lengths: Tensor) -> Any:
    """Where the module is no more at hand."""
    output, last = model.rnn(model.packed(input, lengths - (lengths > 1).long()))
    torch._dynamo.graph_break()
    return pad_packed_sequence(output, total_length=TIME)[0] + 1, last


PROGRAMS = [
    changes_packed_rows,
    changes_what_was_packed,
    packs_numbers,
    pads_by_samples,
    pads_behind_a_break,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda it: it.__name__)
@pytest.mark.parametrize("name", ["sorted", "unsorted"])
def test_packed_input_is_that_of_torch(name: str, program: Callable[..., Any]) -> None:
    ours, theirs = pair(name)
    run = torch.compile(program, backend="aot_eager")
    inputs = inputs_of(theirs)
    with torch.no_grad():
        torch.testing.assert_close(run(ours, *inputs), program(theirs, *inputs))


def test_packed_rows_that_left_a_graph_change_in_place() -> None:
    ours, theirs = pair("unsorted")

    def packs(model: Any, *inputs: Any) -> Any:
        return model.rnn(model.packed(*inputs))[0]

    inputs = inputs_of(theirs)
    found, expected = torch.compile(packs, backend="eager")(ours, *inputs), packs(theirs, *inputs)
    for packed in (found, expected):
        packed.data.mul_(2)
    torch.testing.assert_close(pad_packed_sequence(found), pad_packed_sequence(expected))


@pytest.mark.skipif(torch.__version__ < "2.12", reason="this torch's own layers fail there")
def test_a_checkpoint_of_packed_rows() -> None:
    ours, theirs = pair("unsorted")

    def program(model: Any, *inputs: Any) -> Any:
        def of_packed(packed: Any) -> Any:
            return model.rnn(packed)[0].data

        packed = model.packed(*inputs)
        return torch.utils.checkpoint.checkpoint(of_packed, packed, use_reentrant=False)

    inputs = inputs_of(theirs)
    run = torch.compile(program, backend="eager")
    torch.testing.assert_close(run(ours, *inputs), program(theirs, *inputs))


def test_no_argument_is_guarded_behind_a_break() -> None:
    """But those that are used: each name would be a graph of its own."""
    ours, theirs = pair("unsorted")
    graphs = []

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def step(name: str, input: Tensor, lengths: Tensor, model: Any) -> Any:
        torch._dynamo.graph_break()
        padded = pad_packed_sequence(model.rnn(model.packed(input, lengths))[0])[0]
        torch._dynamo.graph_break()
        return name, padded

    run, inputs = torch.compile(step, backend=note), inputs_of(theirs)
    for number in range(4):
        assert run(f"batch {number}", *inputs, ours)[0] == f"batch {number}"
    assert len(graphs) == 1


def test_models_that_were_not_taken_compile_as_before() -> None:
    class Packs(nn.Module):
        def forward(self, input: Tensor, lengths: Tensor) -> Tensor:
            return pack_padded_sequence(input, lengths)[0] * 2

    extops.LSTM(2, 3)
    inputs = torch.randn(3, 2), torch.tensor([3, 2])
    refused = r"function `pack_padded_sequence`|'skip function pack_padded_sequence in file"
    with pytest.raises(Exception, match=refused):
        torch.compile(Packs(), backend="eager", fullgraph=True)(*inputs)
    found = torch.compile(Packs(), backend="eager")(*inputs)
    torch.testing.assert_close(found, Packs()(*inputs))


@pytest.mark.slow
def test_a_compiler_that_comes_later() -> None:
    """Somebody may have asked before whether it is there."""
    code = """
import importlib.util, sys
import extops, torch
from torch.nn.utils.rnn import pack_padded_sequence

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = extops.GRU(2, 3)
    def forward(self, input, lengths):
        return self.rnn(pack_padded_sequence(input, lengths))[1]

assert "torch._dynamo" not in sys.modules
assert importlib.util.find_spec("torch._dynamo")
run = torch.compile(Model(), backend="eager", fullgraph=True)
assert run(torch.randn(4, 2, 2), torch.tensor([4, 2])).shape == (1, 2, 3)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "list": lambda lengths: lengths.view(-1).tolist(),
    "items": lambda lengths: [x.item() for x in lengths],
    "tensors": lambda lengths: list(lengths),
    "array": lambda lengths: lengths.numpy(),
}


@pytest.mark.every(2, "form")
@pytest.mark.skipif(torch.__version__ < "2.11", reason="this torch ends a graph at tolist")
@pytest.mark.parametrize("form", FORMS)
def test_lengths_that_are_made_within_a_graph(form: str) -> None:
    ours, theirs = pair("unsorted")

    def program(model: Tagger, input: Tensor, lengths: Tensor) -> Any:
        return model(input, FORMS[form](lengths))

    given = inputs_of(theirs)
    run = torch.compile(program, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(ours, *given), program(theirs, *given))


@pytest.mark.skipif(torch.__version__ < "2.11", reason="this torch wants to know each size")
@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_a_batch_that_only_data_tells() -> None:
    """As torch_geometric's aggregations by LSTMs have it: the number of graphs in a batch."""
    theirs = nn.LSTM(FEATURES, STATE)
    ours = extops.accelerate(copy.deepcopy(theirs))

    def program(layer: nn.Module, input: Tensor, graphs: Tensor) -> Tensor:
        sums = input.new_zeros(int(graphs.max()) + 1, FEATURES).index_add(0, graphs, input)
        states = (input.new_zeros(1, len(sums), STATE),) * 2
        return layer(sums.unsqueeze(0), states)[0].squeeze(0)

    given = torch.randn(9, FEATURES), torch.tensor([0, 0, 1, 1, 1, 2, 2, 4, 4])
    run = torch.compile(program, backend="aot_eager", fullgraph=True)
    found, expected = run(ours, *given), program(theirs, *given)
    torch.testing.assert_close(found, expected)
    wanted = [
        torch.autograd.grad(y.sum(), m.weight_hh_l0) for y, m in ((found, ours), (expected, theirs))
    ]
    torch.testing.assert_close(*wanted)


def test_no_lengths() -> None:
    """Of no samples, as in eager code."""
    layer = extops.accelerate(nn.LSTM(FEATURES, STATE))
    input, lengths = torch.randn(TIME, 0, FEATURES), torch.zeros(0, dtype=torch.int64)
    run = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(input, lengths=lengths), extops.LSTM(FEATURES, STATE)(input))


def test_lists_of_lengths_and_of_sequences() -> None:
    ours, theirs = pair("sorted")

    class Sequences(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, a: Tensor, b: Tensor) -> Any:
            return self.layer(nn.utils.rnn.pack_sequence((a, b)))[1]

    input, lengths = inputs_of(theirs)
    run = torch.compile(ours, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(input, lengths.tolist()), theirs(input, lengths))
    run = torch.compile(Sequences(ours.rnn), backend="aot_eager", fullgraph=True)
    expected = Sequences(theirs.rnn)(input[0], input[1, :3])
    torch.testing.assert_close(run(input[0], input[1, :3]), expected)


def targets_of(model: nn.Module, *inputs: Any, **options: Any) -> tuple[list[str], Any]:
    """What its one graph calls; and what it gives."""
    found: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        found.extend(str(x.target) for x in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    return found, torch.compile(model, backend=backend, fullgraph=True, **options)(*inputs)


@pytest.mark.parametrize("form", ["list", "tensor"])
def test_lengths_are_checked_once(form: str) -> None:
    """By an operator: for tensors on the CPU that are made in the graph Inductor would compile C++."""
    ours, _ = pair("states")
    input, lengths = inputs_of(ours)
    given = input, lengths.tolist() if form == "list" else lengths
    names, results = targets_of(ours, *given)
    torch.testing.assert_close(results, ours(*given))
    assert [x.split(".")[0] for x in names if ".lengths" in x] == ["extops_torch"]
    assert not [x for x in names if "method tensor" in x or "assert" in x]


@pytest.mark.skipif(
    torch.__version__ < "2.11", reason="this torch makes no packed sequence in a graph"
)
@pytest.mark.parametrize("form", ["list", "tensor"])
@pytest.mark.parametrize("name", ["between", "between_sorted"])
def test_nothing_is_sorted_by_the_compiler(name: str, form: str) -> None:
    """Inductor compiled the sorts of one model for 86 s."""
    ours, theirs = pair(name)
    input, lengths = inputs_of(ours)
    given = input, lengths.tolist() if form == "list" else lengths
    names, results = targets_of(ours, *given)
    torch.testing.assert_close(results, theirs(*given))
    assert not [x for x in names if "sort" in x]


@by_device
@pytest.mark.parametrize("make", [extops.LLTMLayer, extops.LSTMCell, extops.GRU])
def test_one_step_is_the_operator_of_a_step(make: Any, device: str) -> None:
    """One kernel on a GPU, where that of sequences is at least two."""
    model = make(FEATURES, STATE).to(device)
    rows = (4, FEATURES) if make is extops.LSTMCell else (1, 4, FEATURES)
    input = torch.randn(rows, device=device)
    found, results = operators_of(model, input)
    expected = torch.utils._pytree.tree_leaves(model(input))
    torch.testing.assert_close(results, torch.cat([x.flatten() for x in expected]))
    names = " ".join(found)
    is_step = device == "cuda" or make is extops.LLTMLayer  # torch's own are faster on a CPU
    assert ("_step." in names, "_sequence." in names) == (is_step, not is_step)


@by_device
@pytest.mark.parametrize("how", ["zeros", "states", "both_ways"])
def test_the_compiler_makes_no_kernel_for_layers(how: str, device: str) -> None:
    """Each would make the first call longer. Without gradients; what joins two calls on a CPU is one for each layer."""
    needs_inductor()
    torch.manual_seed(0)
    model = extops.LSTM(FEATURES, STATE, 2, bidirectional=how == "both_ways").to(device).eval()
    input = torch.randn(TIME, 4, FEATURES, device=device)
    states = tuple(torch.randn(2, 4, STATE, device=device) for _ in range(2))
    run = torch.compile(model, fullgraph=True)
    inputs = (input, states) if how == "states" else (input,)
    with torch.no_grad():
        results, code = torch._inductor.utils.run_and_get_code(run, *inputs)
        torch.testing.assert_close(results, model(*inputs))
    kernels = re.findall(r"^\w+ = async_compile", "\n".join(code), re.MULTILINE)
    assert len(kernels) <= (2 if how == "both_ways" and device == "cpu" else 0)


@by_device
@pytest.mark.parametrize("is_bidirectional", [False, True], ids=["one_way", "both_ways"])
def test_vmap_without_gradients(is_bidirectional: bool, device: str) -> None:
    torch.manual_seed(0)
    options = {"bidirectional": is_bidirectional, "device": device, "dtype": torch.float64}
    layer = extops.LSTM(FEATURES, STATE, 2, **options)
    input = torch.randn(3, TIME, 4, FEATURES, device=device, dtype=torch.float64)

    @torch.no_grad()
    def run(input: Tensor) -> Any:
        return torch.func.vmap(lambda x: layer(x))(input)  # Dynamo cannot say what a module is

    with torch.no_grad():
        output, states = layer(input.transpose(0, 1).flatten(1, 2))
    expected = output.unflatten(1, (3, 4)).transpose(0, 1), [x.unflatten(1, (3, 4)) for x in states]
    for found, (h, c) in (
        run(input),
        torch.compile(run, backend="aot_eager", fullgraph=True)(input),
    ):
        torch.testing.assert_close(found, expected[0])
        for state, wanted in zip((h, c), expected[1], strict=True):
            torch.testing.assert_close(state, wanted.transpose(0, 1))


@by_device
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("make", [extops.LLTMLayer, extops.LSTM, extops.GRU])
def test_both_directions_are_one_call_on_a_gpu(make: Any, is_packed: bool, device: str) -> None:
    """With gradients; on a CPU they are two."""
    torch.manual_seed(0)
    model = make(FEATURES, STATE, 2, bidirectional=True, dtype=torch.float64).to(device)
    input = torch.randn(TIME, 4, FEATURES, dtype=torch.float64, device=device)
    lengths = torch.tensor(UNSORTED, device=device) if is_packed else None
    inputs = input, None, lengths
    found, _ = targets_of(model, *inputs)
    assert sum("_sequence" in x for x in found) == (2 if device == "cuda" else 4)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    results, expected = (results_of(x, model, inputs) for x in (run, model))
    torch.testing.assert_close(results, expected)


@pytest.mark.skipif(torch.__version__ < "2.7", reason="this torch exports no packed input")
@pytest.mark.parametrize("name", [pytest.param("sorted", marks=pytest.mark.slow), "between"])
def test_exported_and_saved(name: str, tmp_path: Path) -> None:
    """And compiled ahead of time, for any lengths."""
    ours, theirs = pair(name)
    sizes = {0: torch.export.Dim("batch", min=2, max=64)}
    if name == "sorted":
        sizes[1] = torch.export.Dim("time", min=2, max=512)
    program = torch.export.export(
        ours, inputs_of(theirs), dynamic_shapes=(sizes, {0: sizes[0]}), strict=True
    )
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2")
    runs = [loaded.module()]
    if name == "sorted":
        package = torch._inductor.aoti_compile_and_package(
            loaded, package_path=str(tmp_path / "ahead.pt2")
        )
        runs.append(torch._inductor.aoti_load_package(package))
    for run in runs:
        inputs = inputs_of(theirs, "cpu", *((9, 4, 4) if name == "sorted" else (7, 2, 1)))
        torch.testing.assert_close(run(*inputs), theirs(*inputs))


@by_device
@pytest.mark.parametrize("how", ["extops", "accelerated"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["by_steps", "by_samples"])
@pytest.mark.every(2, "batch_first", "how")
def test_lengths(batch_first: bool, how: str, device: str) -> None:
    """Of rows that stay padded, in eager code and in a graph of static sizes."""
    options: Any = {"num_layers": 2, "bidirectional": True, "batch_first": batch_first}
    theirs = nn.LSTM(FEATURES, STATE, **options).to(device, torch.float64)
    if how == "extops":
        ours = extops.LSTM(FEATURES, STATE, **options).to(device, torch.float64)
        ours.load_state_dict(theirs.state_dict())
    else:
        ours = extops.accelerate(copy.deepcopy(theirs))
    lengths = torch.tensor(UNSORTED)
    input = torch.randn(4, TIME + 1, FEATURES, device=device, dtype=torch.float64)
    input = input if batch_first else input.transpose(0, 1)
    states = tuple(torch.randn(4, 4, STATE, device=device, dtype=torch.float64) for _ in range(2))
    packed = pack_padded_sequence(input, lengths, batch_first, enforce_sorted=False)
    output, last = theirs(packed, states)
    expected = pad_packed_sequence(output, batch_first, total_length=TIME + 1)[0], last
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for run in (ours, compiled):
        torch.testing.assert_close(run(input, states, lengths=lengths), expected)
    torch.testing.assert_close(ours(input, None, lengths)[1][0].shape, last[0].shape)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("lengths", [(7,), (7, 3)], ids=["one", "two"])
@pytest.mark.parametrize("name", ["unsorted", "states", "padding"])
def test_fewer_lengths_than_rows(name: str, lengths: tuple[int, ...], dynamic: bool | None) -> None:
    """torch packs the first rows then, where it sorts them."""
    torch.compiler.reset()
    model, plain = pair(name)
    input, _ = inputs_of(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for given in (torch.tensor(lengths), list(lengths)):
        torch.testing.assert_close(compiled(input, given), plain(input, given))


@pytest.mark.parametrize("lengths", [(7,), (7, 7, 3, 2, 1)], ids=["fewer", "more"])
def test_another_number_of_sorted_lengths(lengths: tuple[int, ...]) -> None:
    """torch's error."""
    torch.compiler.reset()
    model, _ = pair("sorted")
    input, _ = inputs_of(model)
    message = f"Expected `len\\(lengths\\)` to be equal to batch_size, but got {len(lengths)} "
    with pytest.raises(RuntimeError, match=message):
        torch.compile(model, backend="aot_eager")(input, torch.tensor(lengths))


def test_a_graph_without_gradients_keeps_nothing_for_a_backward() -> None:
    kept = {}

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        (node,) = (x for x in graph.graph.nodes if "lstm_sequence" in str(x.target))
        _, _, _, *saved = node.meta["example_value"]
        kept[torch.is_grad_enabled()] = [x.numel() for x in saved]
        return graph.forward

    module = extops.LSTM(FEATURES, STATE)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            torch.compile(module, backend=note, fullgraph=True)(torch.ones(TIME, 2, FEATURES))
    assert kept[False] == [0, 0]
    assert kept[True] == [TIME * 2 * 4 * STATE, TIME * 2 * STATE]


CHECKED: dict[str, tuple[Callable[[], Callable[..., Any]], str]] = {
    "layer": (lambda: extops.accelerate(nn.LSTM(FEATURES, STATE, 2, bidirectional=True)), ""),
    "cell": (lambda: extops.accelerate(nn.LSTMCell(FEATURES, STATE)), ""),
    "lltm": (lambda: extops.LLTM(FEATURES, STATE), "lltm.*: expected `weights` to have shape"),
    "product": (lambda: lambda x: extops.elementwise_mult(x, x[..., :5]), "cannot be broadcast"),
}


@pytest.mark.parametrize("of", CHECKED)
def test_a_graph_is_traced_without_checks(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the operators take Dynamo 0.1 s each; what stands for them in its graph checks as much."""
    monkeypatch.setenv("EXTOPS_CHOICES", "extops")
    make, message = CHECKED[of]
    module = make()
    check = torch._dynamo.disable(_schemas.Operator.check)
    monkeypatch.setattr(_schemas.Operator, "check", check)  # which a whole graph cannot have
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    input = torch.randn(4, FEATURES)
    torch.testing.assert_close(compiled(input), module(input))
    if message:
        with pytest.raises(RuntimeError, match=message):
            compiled(torch.randn(4, FEATURES + 1))


def test_the_switch_of_precision_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that was compiled for one position does not serve the other."""
    allowed: list[bool] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        nodes = [x for x in module.graph.nodes if "allow_tf32" in x.kwargs]
        allowed.extend(x.kwargs["allow_tf32"] for x in nodes)
        return module

    run = torch.compile(extops.GRU(2, 3), backend=backend, fullgraph=True)
    for allow in (True, False, True):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allow)
        run(torch.randn(4, 1, 2))
    assert allowed == [True, False]


class Decoder(nn.Module):
    """Step by step, some inputs from outside and some from itself."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList((nn.LSTMCell(FEATURES, STATE), nn.GRUCell(STATE, STATE)))
        self.into = nn.Linear(STATE, FEATURES)

    def forward(self, input: Tensor) -> Tensor:
        h, c = (x.clone() for x in input.new_zeros(2, input.shape[1], STATE))
        upper, found = None, []
        for step in range(6):
            given = input[step] if step % 2 == 0 else self.into(found[-1])
            h, c = self.cells[0](given, (h, c))
            upper = self.cells[1](h, upper)
            found.append(upper)
        return torch.stack(found)


def counted(model: nn.Module, **options: Any) -> tuple[Callable[..., Any], list[object]]:
    """Compiled, and its graphs."""
    graphs: list[object] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(module)
        return module

    return torch.compile(model, backend=backend, fullgraph=True, **options), graphs


@pytest.mark.parametrize(
    "dynamic", [pytest.param(True, marks=pytest.mark.slow), None], ids=["dynamic", "automatic"]
)
def test_twenty_lengths_are_two_graphs_at_most(dynamic: bool | None) -> None:
    ours, theirs = pair("sorted")
    run, graphs = counted(ours, dynamic=dynamic)
    for steps in range(3, 23):
        inputs = inputs_of(theirs, "cpu", steps, steps - 1, 2)
        torch.testing.assert_close(run(*inputs), theirs(*inputs))
    assert len(graphs) <= 2


def test_a_decoder_is_one_graph() -> None:
    theirs = Decoder().double()
    ours = extops.accelerate(copy.deepcopy(theirs))
    run, graphs = counted(ours)
    inputs = (torch.randn(6, 3, FEATURES, dtype=torch.float64),)
    torch.testing.assert_close(results_of(run, ours, inputs), results_of(theirs, theirs, inputs))
    assert len(graphs) == 1
    with torch.no_grad():
        torch.testing.assert_close(run(*inputs), theirs(*inputs))
    assert len(graphs) == 2


def checkpointed(layer: nn.Module, input: Tensor) -> Tensor:
    found: Tensor = torch.utils.checkpoint.checkpoint(layer, input, use_reentrant=False)[0]
    return found * 2


def with_func(layer: nn.Module, input: Tensor) -> Tensor:
    parameters = {name: 2 * x for name, x in layer.named_parameters()}

    def loss(input: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(layer, parameters, (input,))[0]
        return found.square().sum()

    return torch.func.grad(loss)(input)


def with_vmap(layer: nn.Module, input: Tensor) -> Tensor:
    return torch.func.vmap(lambda x: layer(x)[0], in_dims=1, out_dims=1)(input)


def autocast_inside(layer: nn.Module, input: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        found: Tensor = layer(input)[0]
    return found.float()


WITHIN = [checkpointed, with_func, with_vmap, autocast_inside]


@pytest.mark.parametrize("program", WITHIN, ids=lambda it: it.__name__)
@pytest.mark.every(2, "program")
def test_what_acts_on_a_layer_within_a_graph(program: Callable[..., Tensor]) -> None:
    dtype = torch.float32 if program is autocast_inside else torch.float64
    theirs = nn.LSTM(FEATURES, STATE, dtype=dtype)
    ours = extops.accelerate(copy.deepcopy(theirs))
    run = torch.compile(program, backend="aot_eager", fullgraph=True)
    leaves = torch.randn(3, 2, FEATURES, dtype=dtype), *ours.parameters()
    leaves = tuple(x.detach().requires_grad_() for x in leaves)
    found = []
    for each, layer in ((run, ours), (program, extops.LSTM(FEATURES, STATE, dtype=dtype))):
        layer.load_state_dict(theirs.state_dict())
        result = each(layer, leaves[0])
        wanted = leaves[0], *layer.parameters()
        found.append((result, torch.autograd.grad(result.sum(), wanted, allow_unused=True)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("make", [extops.LSTM, extops.GRU, extops.LLTMLayer])
def test_a_module_that_holds_a_layer_of_ours(make: Any) -> None:
    """An older Dynamo looks for the defaults of its arguments in torch's class."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = make(FEATURES, STATE)

        def forward(self, input: Tensor, lengths: Tensor | None = None) -> Tensor:
            found: Tensor = self.rnn(input, lengths=lengths)[0] + self.rnn(input)[0]
            return found

    model, input = Model(), torch.randn(3, 2, FEATURES)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    for lengths in (None, torch.tensor([3, 1])):
        torch.testing.assert_close(run(input, lengths), model(input, lengths))


@pytest.mark.parametrize("program", [with_func, with_vmap], ids=lambda it: it.__name__)
def test_transforms_of_both_directions_at_once(
    program: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their composition needs no GPU."""
    layer = extops.LSTM(FEATURES, STATE, 2, bidirectional=True, dtype=torch.float64)
    input = torch.randn(3, 2, FEATURES, dtype=torch.float64)
    expected = program(layer, input)
    taken = extops.accelerate(extops.restore(layer))
    monkeypatch.setattr(extops.LSTM, "_fits", lambda *_: True)
    run = torch.compile(program, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(taken, input), expected)


def test_autocast_around_a_graph() -> None:
    theirs = nn.GRU(FEATURES, STATE)
    ours = extops.accelerate(copy.deepcopy(theirs))
    run = torch.compile(ours, backend="aot_eager", fullgraph=True)
    input = torch.randn(3, 2, FEATURES)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = run(input), theirs(input)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(run(input), theirs(input))


@pytest.mark.slow
def test_a_compiled_backward() -> None:
    """The whole backward is one graph, too."""
    ours, theirs = pair("unsorted")
    run = torch.compile(ours, backend="aot_eager", fullgraph=True)
    inputs = inputs_of(theirs)
    expected = results_of(theirs, theirs, inputs)
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(compiled_autograd=True):
        train = torch.compile(lambda: results_of(run, ours, inputs), backend="aot_eager")
        torch.testing.assert_close(train(), expected)
    assert torch._dynamo.utils.counters["compiled_autograd"]["captures"] > 0


DIVIDED = """
import sys
import torch
import torch.distributed as dist
from torch import nn
import extops


def main(rank, how, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    torch.manual_seed(0)
    theirs, ours = (nn.Sequential(nn.Linear(4, 5), nn.LSTM(5, 6)) for _ in range(2))
    ours.load_state_dict(theirs.state_dict())
    extops.accelerate(ours)
    if how == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(ours)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        wrapped = fully_shard(ours, mesh=init_device_mesh("cpu", (2,)))
    run = torch.compile(wrapped, backend="aot_eager")
    input = torch.randn(3, 8, 4)
    for _ in range(2):
        wrapped.zero_grad()
        run(input[:, 4 * rank : 4 * rank + 4])[0].square().mean().backward()
    theirs(input)[0].square().mean().backward()
    for name, x in theirs.named_parameters():
        grad = dict(ours.named_parameters())[name].grad
        grad = grad.full_tensor() if how == "fsdp" else grad
        torch.testing.assert_close(grad, x.grad, msg=lambda it: f"{name}: {it}")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.start_processes(main, sys.argv[1:], 2, start_method="fork")
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_models_divided_among_processes(how: str, tmp_path: Path) -> None:
    script = tmp_path / "divided.py"
    script.write_text(DIVIDED)
    command = [sys.executable, "-W", "ignore", str(script), how, str(tmp_path / "meeting")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- the choice ----------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "choices.json"
    monkeypatch.setenv("EXTOPS_CHOICES", str(path))
    _table.table.cache_clear()
    yield path
    _table.table.cache_clear()


def operators_of(model: nn.Module, *inputs: Tensor, **options: Any) -> tuple[set[str], Tensor]:
    """Of extops, in the graph of a call; and what it gives."""
    found, results = targets_of(model, *inputs, **options)
    leaves = torch.utils._pytree.tree_leaves(results)
    return {x for x in found if "extops" in x}, torch.cat([x.flatten() for x in leaves])


TORCHS = "extops_torch.layer.default"
AROUND = {f"extops_torch.{x}.default" for x in ("zeros", "stack", "cat")}
"""What makes the first states, and joins the last ones and, on a GPU, directions."""


@by_device
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("way", ["torch", "extops"])
@pytest.mark.every(4, "way", "batch_first", "name")
def test_choice(
    way: str, batch_first: bool, name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph gets the operator of what was measured to be faster, whatever the number of steps."""
    monkeypatch.setenv("EXTOPS_CHOICES", way)
    options = {
        "num_layers": 2,
        "bidirectional": True,
        "bias": name != "GRU",
        "batch_first": batch_first,
    }
    theirs = LAYERS[name](FEATURES, STATE, **options).to(device, torch.float64).eval()
    ours = extops.accelerate(copy.deepcopy(theirs))
    input = torch.randn(4, 3, FEATURES, dtype=torch.float64, device=device)
    with torch.no_grad():
        for dynamic in (False, True):
            found, results = operators_of(ours, input, dynamic=dynamic)
            assert (TORCHS in found) == (way == "torch") and len(found - AROUND) == 1
            output, last = theirs(input)
            expected = [
                output.flatten(),
                *(x.flatten() for x in torch.utils._pytree.tree_leaves(last)),
            ]
            torch.testing.assert_close(results, torch.cat(expected))
        found, results = operators_of(ours, input, last)
        assert (TORCHS in found) == (way == "torch")
        output, _ = theirs(input, last)
        torch.testing.assert_close(results[: output.numel()], output.flatten())
    # torch's backward cannot be traced.
    found, _ = operators_of(ours, input)
    assert TORCHS not in found


@by_device
@pytest.mark.parametrize("way", ["", "torch", "extops"])
@pytest.mark.parametrize("name", ["LSTMCell", "GRUCell", "RNNCell"])
def test_choice_of_cells(name: str, way: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph gets torch's own operators, which its compiler fuses, unless ours are forced."""
    if way:
        monkeypatch.setenv("EXTOPS_CHOICES", way)
    theirs = getattr(nn, name)(FEATURES, STATE).to(device, torch.float64)
    ours = extops.accelerate(copy.deepcopy(theirs))
    input = torch.randn(3, FEATURES, dtype=torch.float64, device=device)
    for is_trained in (True, False):
        with torch.set_grad_enabled(is_trained):
            found, results = operators_of(ours, input)
            assert any(x.startswith("extops") for x in found) == (way == "extops")
            expected = torch.utils._pytree.tree_leaves(theirs(input))
            torch.testing.assert_close(results, torch.cat([x.flatten() for x in expected]))


def test_choice_is_measured_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And kept; on a graph's inputs in numbers of ours, so that random numbers stay the user's."""
    asked: list[Any] = []
    is_faster = iter([False, True])

    def decides(*times: Any) -> bool:
        asked.append(times)
        return next(is_faster)

    monkeypatch.setattr(_measure, "is_faster_in_graph", decides)
    monkeypatch.setattr(accelerating, "_MOST_STEPS", 3)
    by_torchs, steps = _in_graph.by_torchs, set()

    def seen(module: Any, input: Tensor, *others: Any) -> Any:
        steps.add(len(input))
        return by_torchs(module, input, *others)

    monkeypatch.setattr(_in_graph, "by_torchs", seen)
    model = extops.accelerate(nn.LSTM(FEATURES, STATE).eval())
    with torch.no_grad():
        torch.manual_seed(1)
        before = torch.get_rng_state()
        assert TORCHS in operators_of(model, torch.ones(4, 3, FEATURES))[0]
        assert torch.equal(torch.get_rng_state(), before)
        assert TORCHS in operators_of(model, torch.ones(4, 3, FEATURES))[0]
        assert TORCHS not in operators_of(model, torch.ones(5, 3, FEATURES))[0]
    assert len(asked) == 2
    assert 3 in steps and 5 not in steps  # a part of a long call is measured
    kinds = next(iter(json.loads(file.read_text())["machines"].values()))
    assert [kind.rpartition(", ")[2] for kind in kinds] == ["in a graph"]


@pytest.mark.usefixtures("file")
def test_where_measuring_fails_torchs_layer_is_in_the_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ours may be what failed, or what had other values."""
    model, input = extops.accelerate(nn.LSTM(FEATURES, STATE).eval()), torch.ones(4, 3, FEATURES)
    monkeypatch.setattr(accelerating._Call, "measured_in_graph", lambda _: None)
    with torch.no_grad():
        assert TORCHS in operators_of(model, input)[0]


@pytest.mark.skipif(torch.__version__ < "2.10", reason="one direction follows the other there")
@pytest.mark.usefixtures("file")
def test_both_directions_are_measured_as_a_graph_computes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By one call where they fit, though Dynamo traces meanwhile."""
    asked: list[Any] = []
    monkeypatch.setattr(extops.LSTM, "_fits", lambda *of: bool(asked.append(of)))
    model = extops.accelerate(nn.LSTM(FEATURES, STATE, bidirectional=True).eval())
    with torch.no_grad():
        operators_of(model, torch.ones(4, 3, FEATURES))
    assert len(asked) > 1  # the graph itself asks once


def test_an_exported_program_is_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may run elsewhere."""
    monkeypatch.setenv("EXTOPS_CHOICES", "torch")
    model = extops.accelerate(nn.GRU(FEATURES, STATE).eval())
    for strict in (True, False):
        with torch.no_grad():
            program = torch.export.export(model, (torch.ones(4, 3, FEATURES),), strict=strict)
        assert "extops_torch" not in str(program.graph) and "gru_sequence" in str(program.graph)
