"""What an accelerated model keeps of torch's: programs of users, each on torch's module and on an accelerated copy, by
torch's forward and by our kernels.
"""

from __future__ import annotations

import abc
import copy
import io
import math
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import extops
from conftest import seed
from extops.choosing import _measure, _table
from operators import Tensors, by_device

FEATURES, STATE, TIME, BATCH = 5, 7, 6, 3
LAYERS = "LSTM", "GRU", "RNN"
CELLS = "LSTMCell", "GRUCell", "RNNCell"
OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": False, "batch_first": True},
    {"num_layers": 2, "bidirectional": True},
    {"num_layers": 2, "bidirectional": True, "batch_first": True},
]
by_layer = pytest.mark.parametrize("name", LAYERS)
by_cell = pytest.mark.parametrize("name", CELLS)
since_2_6 = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6),
    reason="this torch does not trace what is asked of a class, nor export such layers",
)
by_module = pytest.mark.parametrize("name", LAYERS + CELLS)
by_options = pytest.mark.parametrize("options", OPTIONS, ids=lambda it: "-".join(it) or "plain")

Program = Callable[[Any], Any]


@pytest.fixture(autouse=True, params=["torch", "extops", "measured"])
def way(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """What serves all calls: one of both, or ours after a first call of each kind that runs both."""

    def measure(torchs: Callable[[], Any], ours: Callable[[], Any], *_: Any) -> Any:
        torchs()
        ours()
        return _table.Measured(_table.OURS, 2e-4, 1e-4)

    forced = {"measured": str(tmp_path / "choices.json")}.get(request.param, request.param)
    monkeypatch.setenv("EXTOPS_CHOICES", forced)
    monkeypatch.setattr(_measure, "measure", measure)
    _table.table.cache_clear()
    yield request.param
    _table.table.cache_clear()


def pair(name: str, device: str = "cpu", **options: Any) -> tuple[Any, Any]:
    """An accelerated module and torch's, with the same parameters."""
    options = {"dtype": torch.float64, **options}
    theirs = getattr(nn, name)(FEATURES, STATE, device=device, **options)
    return extops.accelerate(copy.deepcopy(theirs)), theirs


def random(*shape: int, device: str = "cpu") -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.float64)


def input_of(name: str, device: str = "cpu") -> Tensor:
    return random(*(TIME, BATCH, FEATURES)[name in CELLS :], device=device)


def states_of(name: str, *shape: int, device: str = "cpu") -> Any:
    """Both of an LSTM, or the one of another; without a shape, for :func:`input_of`."""
    shape = shape or ((BATCH, STATE) if name in CELLS else (1, BATCH, STATE))
    h, c = random(*shape, device=device), random(*shape, device=device)
    return (h, c) if name.startswith("LSTM") else h


def tensors_of(results: Any) -> Tensors:
    if isinstance(results, Tensor):
        return (results,)
    if isinstance(results, PackedSequence):
        return tuple(x for x in results if x is not None)
    return tuple(tensor for each in results for tensor in tensors_of(each))


def squares_of(results: Any) -> Tensor:
    floating = [x for x in tensors_of(results) if x.is_floating_point()]
    return torch.stack([(x**2).sum() for x in floating]).sum()


def gradients_of(results: Any, leaves: Iterable[Tensor], **options: Any) -> Any:
    """Which may be views, in any order of strides."""
    found = torch.autograd.grad(squares_of(results), list(leaves), **options)
    return [torch.zeros(0) if x is None else x.contiguous().clone() for x in found]


def trained(module: Any, *arguments: Any) -> Any:
    """Results and the gradients of all parameters."""
    results = module(*arguments)
    module.zero_grad()
    squares_of(results).backward()
    return results, [x.grad.contiguous() for x in module.parameters()]


def outcome(program: Program, module: Any) -> Any:
    """What it returns and where it leaves the generator, or the type and message of its error."""
    seed(7)
    try:
        return program(module), torch.rand(2)
    except Exception as error:
        return type(error), str(error)


def does_work(program: Program, module: Any) -> bool:
    return not isinstance(outcome(program, module)[0], type)


def assert_same(modules: Sequence[Any], program: Program, **tolerance: Any) -> None:
    """Values, dtypes, strides, and that no result is a view where torch's is none."""
    ours, theirs = (outcome(program, module) for module in modules)
    if isinstance(theirs[0], type) or isinstance(ours[0], type):
        assert ours == theirs
        return
    ours, theirs = tensors_of(ours), tensors_of(theirs)
    assert [kept(x) for x in ours] == [kept(x) for x in theirs]
    torch.testing.assert_close(ours, theirs, equal_nan=True, **tolerance)
    views = [x._is_view() for x in ours], [x._is_view() for x in theirs]
    assert not any(x and not y for x, y in zip(*views, strict=True)), views


def kept(x: Tensor) -> Any:
    strides = [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]
    return type(x), x.dtype, x.requires_grad, x.is_leaf, strides


# -- values, gradients, layouts ------------------------------------------------------------------

INPUTS: dict[str, Callable[[Tensor], Any]] = {
    "plain": lambda x: x,
    "one_step": lambda x: x[:1],
    "one_sample": lambda x: x[:, :1],
    "no_batch": lambda x: x[:, 0],
    "no_steps": lambda x: x[:0],
    "no_samples": lambda x: x[:, :0],
    "by_rows": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "reversed": lambda x: x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    "expanded": lambda x: x[:1].expand_as(x),
    "negated": torch._neg_view,
    "parameter": nn.Parameter,
    "not_finite": lambda x: x.masked_fill(x > 1, math.inf).masked_fill(x < -1, math.nan),
    "wants_gradient": lambda x: x.requires_grad_(),
}


@by_device
@by_layer
@by_options
@pytest.mark.parametrize("layout", INPUTS)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.every(6, "way", "layout", "options", "name")
def test_layers(grad: bool, layout: str, options: dict[str, Any], name: str, device: str) -> None:
    modules = pair(name, device, **options)
    input = INPUTS[layout](random(TIME, BATCH, FEATURES, device=device))

    def program(module: Any) -> Any:
        with torch.set_grad_enabled(grad):
            return trained(module, input) if grad else module(input)

    assert_same(modules, program)


@by_device
@by_cell
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("layout", ["plain", "parameter", "not_finite", "negated", "one_row"])
def test_cells(layout: str, bias: bool, name: str, device: str) -> None:
    modules = pair(name, device, bias=bias)
    input = random(BATCH, FEATURES, device=device)
    input = input[0] if layout == "one_row" else INPUTS[layout](input)
    state = states_of(name, *input.shape[:-1], STATE, device=device)
    assert_same(modules, lambda it: (trained(it, input), trained(it, input, state)))


@pytest.mark.parametrize("name", ["RNN", "RNNCell"])
def test_a_rectifier_passes_gradients_at_nan(name: str) -> None:
    """So they tell of it."""
    modules, input = pair(name, nonlinearity="relu"), input_of(name)
    input[0, 0] = math.nan
    assert_same(modules, lambda it: trained(it, input))
    assert_same(modules, lambda it: gradients_of(it(input), it.parameters(), create_graph=True))


@by_device
@by_layer
@by_options
@pytest.mark.parametrize(
    ("lengths", "is_sorted"),
    [((6, 2, 1), True), ((2, 6, 1), False), ((6, 6, 6), True), ((4,), True), ((1, 6), False)],
    ids=["sorted", "unsorted", "equal", "one", "two"],
)
@pytest.mark.parametrize("given", [False, True], ids=["zeros", "states"])
@pytest.mark.every(6, "way", "lengths", "options", "name")
def test_packed(
    given: bool,
    lengths: tuple[int, ...],
    is_sorted: bool,
    options: dict[str, Any],
    name: str,
    device: str,
) -> None:
    modules = pair(name, device, **options)
    padded = random(max(lengths), len(lengths), FEATURES, device=device)
    input = pack_padded_sequence(padded, torch.tensor(lengths), enforce_sorted=is_sorted)
    layers = options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
    state = states_of(name, layers, len(lengths), STATE, device=device) if given else None

    def program(module: Any) -> Any:
        results, gradients = trained(module, input, state)
        return results, gradients, pad_packed_sequence(results[0])

    assert_same(modules, program)


@by_module
def test_states_in_other_layouts(name: str) -> None:
    modules = pair(name)

    def program(module: Any, layout: Callable[[Tensor], Tensor]) -> Any:
        seed(3)
        leaves = [x.requires_grad_() for x in tensors_of(states_of(name))]
        state: Any = tuple(map(layout, leaves))
        results = module(input, state if len(state) > 1 else state[0])
        return results, gradients_of(results, leaves)

    input = input_of(name)
    layouts: list[Callable[[Tensor], Tensor]] = [
        lambda x: x,
        lambda x: x[..., :1].expand_as(x),
        lambda x: x[..., :1, :].expand_as(x),
        lambda x: x.mT.contiguous().mT,
    ]
    for layout in layouts:
        assert_same(modules, lambda it, layout=layout: program(it, layout))


@by_module
def test_states_in_odd_forms(name: str) -> None:
    """Which torch takes, or refuses in its words."""
    modules, input, state = pair(name), input_of(name), states_of(name)
    h = state[0] if isinstance(state, tuple) else state
    one = h[:, :1] if name in LAYERS else h[:1]
    forms: list[Any] = [list(tensors_of(state)), (h,), (h, h), (h, h, h), h, h.float(), h[0]]
    forms += [(h, h.float()), (h, None), one, h[None], (), "h", 0, (one, one), (nn.Parameter(h), h)]
    for form in forms:
        assert_same(modules, lambda it, form=form: it(input, form))


@by_layer
def test_the_last_batch_of_an_epoch(name: str) -> None:
    """Row 1: rows in any order give contiguous results, whose sizes then vary."""
    modules = pair(name)

    def program(module: Any) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        found = []
        for batch in (4, 4, 2):
            seed(batch)
            output, _ = module(random(batch, TIME, FEATURES).permute(1, 0, 2))
            found.append(output.view(-1, STATE))
            optimizer.zero_grad()
            found[-1].square().mean().backward()
            optimizer.step()
        return found, list(module.parameters())

    assert_same(modules, program)


IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "detach": Tensor.detach_,
    "relu": Tensor.relu_,
    "zero": Tensor.zero_,
    "squeeze": Tensor.squeeze_,
}


@pytest.mark.every(2, "way", "name")
@by_module
@pytest.mark.parametrize("how", IN_PLACE)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_results_change_in_place(packed: bool, how: str, name: str) -> None:
    """Rows 2 and 13: of each result, alone, and without a change of the others."""
    if packed and name in CELLS:
        return
    for batch_first in (False, True)[: 2 if name in LAYERS else 1]:
        modules = pair(name, **({"batch_first": True} if batch_first else {}))
        input: Any = input_of(name)
        if packed:
            input = pack_padded_sequence(input, torch.tensor([TIME, TIME, TIME]))
        for place in range(3 if name == "LSTM" else 2):

            def program(module: Any, place: int = place, input: Any = input) -> Any:
                results = [x for x in tensors_of(module(input)) if x.is_floating_point()]
                changed = results[place % len(results)]
                IN_PLACE[how](changed)
                if wanted := [x for x in results if x.requires_grad]:
                    return results, gradients_of(wanted, module.parameters())
                return results

            if does_work(program, modules[1]):
                assert_same(modules, program)


@by_module
@pytest.mark.parametrize("wants", ["all", "input", "parameters", "states"])
def test_what_changes_before_the_backward(wants: str, name: str) -> None:
    """Where torch's backward does without a tensor, so does ours."""
    number = 2 if name.startswith("LSTM") else 1

    def program(module: Any, place: int) -> Any:
        seed(11)
        module.requires_grad_(wants in ("all", "parameters"))
        input = (input_of(name) * 1).requires_grad_(wants in ("all", "input"))
        states = [x.requires_grad_(wants in ("all", "states")) for x in tensors_of(states_of(name))]
        parameters = dict(module.named_parameters())
        results = module(input, tuple(states) if number > 1 else states[0])
        given = [input, *states, *parameters.values()]
        with torch.no_grad():
            given[place].add_(1)
        wanted = [x for x in given if x.requires_grad]
        return gradients_of(results, wanted)

    for place in range(1 + number + 4):
        if does_work(lambda it, place=place: program(it, place), pair(name)[1]):
            assert_same(pair(name), lambda it, place=place: program(it, place))


@by_layer
@pytest.mark.parametrize("shape", [(1, TIME), (BATCH, 1), (1, 1)], ids=str)
def test_recurrent_weights_that_change_before_the_backward(
    shape: tuple[int, int], name: str
) -> None:
    """Of a single step alone torch's backward does without them."""
    input = random(*shape, FEATURES)

    def program(module: Any) -> Any:
        results = module(input)
        with torch.no_grad():
            module.weight_hh_l0.mul_(2)
        return gradients_of(results, module.parameters())

    modules = pair(name, batch_first=True)
    ours, theirs = (outcome(program, module)[0] for module in modules)
    if theirs is RuntimeError:  # whose message has the shape of what was saved
        assert ours is theirs
    else:
        torch.testing.assert_close(ours, theirs)


# -- what is no plain call -----------------------------------------------------------------------


class Tagged(Tensor):
    pass


WRONG: dict[str, Callable[[Tensor], Any]] = {
    "rank_4": lambda x: x.expand(1, 1, *x.shape),
    "rank_1": lambda x: x.flatten(),
    "rank_0": lambda x: x.sum(),
    "features": lambda x: x[..., :-1],
    "float32": Tensor.float,
    "float16": Tensor.half,
    "complex": lambda x: x.to(torch.complex128),
    "int": Tensor.long,
    "sparse": Tensor.to_sparse,
    "meta": lambda x: x.to("meta"),
    "nested": lambda x: torch.nested.nested_tensor([x[0], x[0]]),
    "jagged": lambda x: torch.nested.nested_tensor([x[0], x[0]], layout=torch.jagged),
    "subclass": lambda x: x.as_subclass(Tagged),
    "numpy": Tensor.numpy,
    "list": Tensor.tolist,
    "none": lambda x: None,
    "tuple": lambda x: (x, x),
}


@pytest.mark.every(2, "way", "name")
@by_module
@pytest.mark.parametrize("what", WRONG)
def test_other_inputs(what: str, name: str) -> None:
    """Row 8: they give what torch gives, or its error."""
    input = WRONG[what](input_of(name))
    modules = pair(name)
    theirs = outcome(lambda it: it(input), modules[1])
    ours = outcome(lambda it: it(input), modules[0])
    assert [type(x) for x in ours] == [type(x) for x in theirs]
    if isinstance(theirs[0], type):
        assert ours == theirs
    elif what != "meta":
        results = [tensors_of(x) for x in (ours, theirs)]
        assert [type(x) for x in results[0]] == [type(x) for x in results[1]]
        plain = [[x.as_subclass(Tensor) for x in each] for each in results]
        torch.testing.assert_close(*plain)


@by_module
def test_wrong_arguments(name: str) -> None:
    """The errors name torch's class."""
    modules, input = pair(name), input_of(name)
    assert_same(modules, lambda it: it(input, None, None, None))
    assert_same(modules, lambda it: it(input, length=3))
    assert_same(modules, lambda it: it())
    assert_same(modules, lambda it: it(input, input=input))


@by_module
def test_complex_modules(name: str) -> None:
    """Row 6."""
    modules = pair(name, dtype=torch.complex64)
    input = input_of(name).to(torch.complex64)
    assert_same(modules, lambda it: it(input))


@by_module
@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
def test_quantized(name: str) -> None:
    kind = getattr(nn, name)
    modules = [nn.Sequential(it.float()) for it in pair(name)]
    input = input_of(name).float()

    def program(module: Any) -> Any:
        # It looks at types.
        restored = extops.restore(module)
        quantized = torch.ao.quantization.quantize_dynamic(restored, {kind, nn.Linear})
        assert type(quantized[0]).__module__.startswith("torch.ao.nn.quantized")
        return quantized(input)

    assert_same(modules, program)


@by_device
@by_module
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype, name: str, device: str) -> None:
    """Of input in float32 and in both 16-bit types: layers on a GPU return float16 whatever the region's dtype is."""
    modules = [module.float() for module in pair(name, device)]
    input, state = input_of(name, device).float(), states_of(name, device=device)
    state = tuple(x.float() for x in state) if isinstance(state, tuple) else state.float()

    def program(module: Any) -> Any:
        with torch.autocast(device, dtype):
            results = module(input), module(input.to(dtype), state)
        return results, gradients_of(results, module.parameters())

    if does_work(program, modules[1]):
        assert_same(modules, program, rtol=0.05, atol=0.05)
    other = torch.float16 if dtype is torch.bfloat16 else torch.bfloat16

    def run(module: Any, input: Any) -> Any:
        with torch.autocast(device, dtype):
            return module(input)

    assert_same(modules, partial(run, input=input.to(other)), rtol=0.05, atol=0.05)
    if name in LAYERS:
        for each in (input[:, 0], pack_padded_sequence(input, [TIME, TIME - 1, 1])):
            of_each = partial(run, input=each)
            # torch has no LSTM in float16 without a batch on a CPU.
            if does_work(of_each, modules[1]):
                assert_same(modules, of_each, rtol=0.05, atol=0.05)


@by_device
@by_module
@pytest.mark.parametrize("region", ["of another device", "of float64"])
def test_autocast_that_casts_nothing(region: str, name: str, device: str) -> None:
    others = {"cpu": "cuda", "cuda": "cpu"}
    dtype = torch.float64 if region == "of float64" else torch.float32
    modules = [module.to(dtype) for module in pair(name, device)]
    input = input_of(name, device).to(dtype)

    def program(module: Any) -> Any:
        with torch.autocast(device if dtype is torch.float64 else others[device], torch.bfloat16):
            results = module(input)
        return results, gradients_of(results, module.parameters())

    tolerance = {"rtol": 0.01, "atol": 0.001} if dtype is torch.float32 else {}  # of TF32
    assert_same(modules, program, **tolerance)


@pytest.mark.gpu
@by_module
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_without_cudnn(dtype: torch.dtype, name: str) -> None:
    """Which else decides the dtype of what a layer returns."""
    modules = [module.float() for module in pair(name, "cuda")]
    input = input_of(name, "cuda").to(dtype)

    def program(module: Any) -> Any:
        enabled = torch.backends.cudnn.flags(enabled=False)
        with enabled, torch.autocast("cuda", torch.bfloat16):
            results = module(input)
        return results, gradients_of(results, module.parameters())

    assert_same(modules, program, rtol=0.05, atol=0.05)


@by_device
@by_module
def test_changes_before_the_backward_under_autocast(name: str, device: str) -> None:
    """As of an optimizer: torch has kept what it has cast."""
    modules = [module.float() for module in pair(name, device)]
    given = input_of(name, device).float()

    def program(module: Any) -> Any:
        input = given.clone()
        with torch.autocast(device, torch.bfloat16):
            results = module(input)
        input.add_(1)
        with torch.no_grad():
            for x in module.parameters():
                x.add_(0.01)
        return gradients_of(results, module.parameters())

    assert_same(modules, program, rtol=0.05, atol=0.05)


@by_module
def test_transforms(name: str) -> None:
    modules, input = pair(name), input_of(name)
    tangents = torch.randn_like(input)

    def loss(module: Any, parameters: dict[str, Tensor], input: Tensor) -> Tensor:
        return squares_of(torch.func.functional_call(module, parameters, (input,)))

    def gradient(module: Any) -> Any:
        parameters = {key: x.detach() * 2 for key, x in module.named_parameters()}
        found = torch.func.grad(lambda p: loss(module, p, input))(parameters)
        return [x.clone() for x in found.values()], module(input)

    def per_sample(module: Any) -> Any:
        return torch.func.vmap(module, in_dims=0, randomness="different")(torch.stack([input] * 2))

    def forward_mode(module: Any) -> Any:
        found = torch.func.jvp(lambda x: tensors_of(module(x))[0], (input,), (tangents,))
        return [x.clone() for x in found]

    def batched(module: Any) -> Any:
        x = input.clone().requires_grad_()
        output = tensors_of(module(x))[0]
        upstream = torch.stack([torch.ones_like(output), output.detach()])
        (found,) = torch.autograd.grad(output, x, upstream, is_grads_batched=True)
        return found.contiguous().clone()

    def functional(module: Any) -> Any:
        parameters = {key: x.detach() * 2 for key, x in module.named_parameters()}
        return torch.func.functional_call(module, parameters, (input,)), module(input)

    for program in (gradient, per_sample, forward_mode, batched, functional):
        assert_same(modules, program)


@by_module
def test_second_derivatives(name: str) -> None:
    modules, input = pair(name), input_of(name).requires_grad_()

    def program(module: Any) -> Any:
        loss = squares_of(module(input))
        (first,) = torch.autograd.grad(loss, input, create_graph=True)
        return gradients_of(first, [input, *module.parameters()])

    if does_work(program, modules[1]):  # oneDNN's LSTM has none
        assert_same(modules, program)


# -- modules that users change -------------------------------------------------------------------


@by_module
def test_it_is_an_instance_of_torchs_class(name: str) -> None:
    """Row 3."""
    ours, theirs = pair(name)
    kind, met = getattr(nn, name), []
    assert isinstance(ours, kind) and ours.__class__ is kind and type(ours).__name__ == name
    assert issubclass(ours.__class__, kind) and repr(ours) == repr(theirs)
    assert type(ours).__module__ == kind.__module__ and type(ours).__doc__ == kind.__doc__
    assert set(dir(ours)) >= set(dir(theirs))
    nn.Sequential(ours).apply(lambda it: met.append(isinstance(it, kind)))
    assert met == [True, False]
    for other in {*LAYERS, *CELLS} - {name}:
        assert not isinstance(ours, getattr(nn, other))
    ours(input_of(name))
    assert list(ours.state_dict()) == list(theirs.state_dict())


class Checked(nn.LSTM):
    """Calls what torch's forward calls, and ends in it."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        sizes = None
        self.check_forward_args(input, torch.zeros(1, BATCH, STATE), sizes)  # type: ignore
        assert self.get_expected_cell_size(input, sizes) == (1, BATCH, STATE)
        hx = self.permute_hidden(hx, torch.tensor([2, 0, 1]))
        output, state = super().forward(input, hx)
        return 2 * output, state


class Permuting(nn.GRU):
    """Changes what torch's forward calls."""

    def permute_hidden(self, hx: Tensor, permutation: Tensor | None) -> Tensor:
        return 2 * hx


class Padding(nn.RNN):
    """Takes an input that torch's does not."""

    def check_forward_args(self, *arguments: Any) -> None:
        pass


class Step(nn.GRUCell):
    def forward(self, input: Tensor, hx: Any = None) -> Tensor:
        return super().forward(input.relu(), hx)


class Mixin:
    def forward(self, input: Any, hx: Any = None) -> Any:
        packed = pack_padded_sequence(input, torch.tensor([TIME] * BATCH))
        output, state = super().forward(packed, hx)  # type: ignore[misc]
        return pad_packed_sequence(output)[0], state


class Mixed(Mixin, nn.LSTM):
    pass


@pytest.mark.parametrize("kind", [Checked, Permuting, Padding, Step, Mixed])
def test_classes_of_users(kind: type[Any]) -> None:
    """Rows 4 and 5."""
    theirs = kind(FEATURES, STATE).double()
    modules = extops.accelerate(copy.deepcopy(theirs)), theirs
    assert isinstance(modules[0], kind) and modules[0].__class__ is kind
    assert type(modules[0]).__name__ == kind.__name__
    name = next(x for x in LAYERS + CELLS if issubclass(kind, getattr(nn, x)))
    input, state = input_of(name), states_of(name)
    assert_same(modules, lambda it: trained(it, input, state))
    for copied in (copy.deepcopy(modules[0]), pickle.loads(pickle.dumps(modules[0]))):
        assert isinstance(copied, kind)
        assert_same((copied, theirs), lambda it: trained(it, input, state))


class Reduced(nn.LSTM):
    def __reduce__(self) -> Any:
        return Reduced, (self.input_size, self.hidden_size)


class Noted(nn.LSTM):
    def __getstate__(self) -> Any:
        return {**super().__getstate__(), "note": "kept"}  # type: ignore[misc]

    def __setstate__(self, state: Any) -> None:
        self.said = state.pop("note")
        super().__setstate__(state)


def test_classes_of_users_that_pickle_in_their_own_way() -> None:
    ours = extops.accelerate(Reduced(FEATURES, STATE))
    for copied in (pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours), copy.copy(ours)):
        assert copied.__class__ is Reduced
        assert not torch.equal(copied.weight_hh_l0, ours.weight_hh_l0)
    noted = extops.accelerate(Noted(FEATURES, STATE))
    for copied in (pickle.loads(pickle.dumps(noted)), copy.deepcopy(noted), copy.copy(noted)):
        assert copied.said == "kept"


REGISTERED: dict[str, type] = {}


class Registered(nn.GRU):
    def __init_subclass__(cls) -> None:
        REGISTERED[cls.__name__] = cls


class OwnRegistered(Registered):
    pass


def test_a_class_that_registers_those_derived_from_it() -> None:
    before = dict(REGISTERED)
    theirs = OwnRegistered(FEATURES, STATE).double()
    modules = extops.accelerate(copy.deepcopy(theirs)), theirs
    assert before == REGISTERED == {"OwnRegistered": OwnRegistered}
    assert_same(modules, lambda it: trained(it, input_of("GRU")[:, :1]))


class Abstract(abc.ABC, nn.RNNBase):
    @abc.abstractmethod
    def named(self) -> str: ...


class OwnAbstract(Abstract, nn.LSTM):
    """As pytorch-forecasting derives its layers: from an abstract class first."""

    def named(self) -> str:
        return "own"


def test_a_class_that_is_derived_from_an_abstract_one_first() -> None:
    theirs = OwnAbstract(FEATURES, STATE).double()
    ours = extops.accelerate(copy.deepcopy(theirs))
    assert type(ours) is not OwnAbstract
    assert (ours.named(), ours.__class__, isinstance(ours, Abstract)) == ("own", OwnAbstract, True)
    assert_same((ours, theirs), lambda it: trained(it, input_of("LSTM")[:, :1]))
    assert type(extops.restore(ours)) is OwnAbstract


@by_module
def test_attributes_of_users(name: str) -> None:
    modules, input = pair(name), input_of(name)
    for each in modules:
        each._name = "encoder"
    assert_same(modules, lambda it: trained(it, input))
    assert extops.restore(modules[0])._name == "encoder"


@by_layer
def test_flat_weights(name: str) -> None:
    """Row 7."""
    input = input_of(name)

    def program(module: Any) -> Any:
        module._flat_weights = [x * 2 for x in module._flat_weights]
        return module(input)

    assert_same(pair(name), program)


PARAMETRIZED: dict[str, Callable[[Any, str], Any]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "old_weight_norm": nn.utils.weight_norm,
    "old_spectral_norm": nn.utils.spectral_norm,
    "pruned": lambda module, name: prune.l1_unstructured(module, name, 0.5),
}


@pytest.mark.every(4, "way", "how", "name")
@by_module
@pytest.mark.parametrize("how", PARAMETRIZED)
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_parameters_that_are_computed(first: bool, how: str, name: str) -> None:
    """Before and after `accelerate`; what computes them runs as often as with torch's module."""
    weight = "weight_hh" if name in CELLS else "weight_hh_l0"
    ours = getattr(nn, name)(FEATURES, STATE, dtype=torch.float64)
    theirs = copy.deepcopy(ours)
    if not first:
        extops.accelerate(ours)
    for module in (ours, theirs):
        seed(2)
        PARAMETRIZED[how](module, weight)
    if first:
        extops.accelerate(ours)
    input = input_of(name)

    def program(module: Any) -> Any:
        seed(3)
        return trained(module, input), trained(module, input), list(module.buffers())

    assert_same((ours, theirs), program)
    if parametrize.is_parametrized(theirs):
        for module in (ours, theirs):
            parametrize.remove_parametrizations(module, weight)
        assert_same((ours, theirs), lambda it: trained(it, input))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "batch_first": lambda it: setattr(it, "batch_first", True),
    "dropout": lambda it: setattr(it, "dropout", 0.5),
    "all_dropped": lambda it: setattr(it, "dropout", 1.0),
    "eval": lambda it: it.eval(),
    "float": lambda it: it.float(),
    "frozen": lambda it: it.weight_hh_l0.requires_grad_(False),
    "tied": lambda it: setattr(it, "weight_hh_l1", it.weight_hh_l0),
    "assigned": lambda it: it.load_state_dict(
        {key: x * 2 for key, x in it.state_dict().items()}, assign=True
    ),
    "shared": lambda it: it.share_memory(),
    "narrow": lambda it: setattr(it, "bias_hh_l0", nn.Parameter(it.bias_hh_l0[:1].detach())),
    "no_bias": lambda it: setattr(it, "bias_hh_l0", None),
    "forward": lambda it: setattr(it, "forward", lambda input: input),
    "no_check": lambda it: setattr(it, "check_forward_args", lambda *_: None),
    "permuted": lambda it: setattr(it, "permute_hidden", lambda hx, _: 2 * hx),
    "few_weights": lambda it: setattr(it, "_flat_weights", it._flat_weights[:4]),
    "no_weights": lambda it: setattr(it, "_flat_weights", []),
    "mode": lambda it: setattr(it, "mode", "GRU"),
    "unknown_mode": lambda it: setattr(it, "mode", "MGU"),
}


@by_layer
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("late", [False, True], ids=["at_once", "after_a_call"])
@pytest.mark.every(4, "late", "change", "name")
def test_layers_that_change(late: bool, change: str, name: str) -> None:
    modules, input = pair(name, num_layers=2), input_of(name)
    state = states_of(name, 2, BATCH, STATE)

    def program(module: Any) -> Any:
        if late:
            module(input)
        CHANGES[change](module)
        if change == "forward":
            return module(input)
        dtype = module.weight_ih_l0.dtype
        given = tuple(x.to(dtype) for x in tensors_of(state))
        first = module(input.to(dtype))
        if not module.batch_first:
            first = first, module(input.to(dtype), given if len(given) > 1 else given[0])
        wanted = [x for x in module.parameters() if x.requires_grad]
        return first, gradients_of(first, wanted, allow_unused=True)

    if (name, change) == ("LSTM", "mode"):
        return  # torch reads weights of other sizes than there are
    assert_same(modules, program)


def test_cells_that_change() -> None:
    def program(module: Any) -> Any:
        found = [module(input)]
        module.nonlinearity = "relu"
        found.append(module(input))
        module.nonlinearity = "sigmoid"
        return found, module(input)

    input = input_of("RNNCell")
    assert_same(pair("RNNCell"), program)


@by_module
def test_an_old_pickle_lacks_attributes(name: str) -> None:
    def program(module: Any) -> Any:
        state = module.__getstate__() if name in LAYERS else dict(module.__dict__)
        for attribute in ("proj_size", "nonlinearity" if name == "RNN" else "proj_size"):
            state.pop(attribute, None)
        module.__dict__.clear()
        module.__setstate__(state)
        return module(input)

    input = input_of(name)
    assert_same(pair(name), program)


# -- copies, pickles, replicas -------------------------------------------------------------------

_LOADS = """
import sys
sys.modules["extops"] = None
import torch
torch.serialization.add_safe_globals([torch.nn.LSTM, torch.nn.GRUCell, torch.nn.ModuleList, set])
for weights_only in (False, True):
    model = torch.load(sys.argv[1], weights_only=weights_only)
    print([type(it).__module__ + "." + type(it).__qualname__ for it in model])
    print([tuple(model[0](torch.ones(2, 3, 5))[0].shape), "_extops_known" in vars(model[0])])
"""


@pytest.mark.every(3, "way")
def test_a_pickle_loads_without_extops(tmp_path: Path) -> None:
    model = extops.accelerate(nn.ModuleList([nn.LSTM(5, 7), nn.GRUCell(5, 7)]))
    model[0](torch.ones(2, 3, 5))
    torch.save(model, tmp_path / "model.pt")
    command = [sys.executable, "-c", _LOADS, tmp_path / "model.pt"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    classes = ["torch.nn.modules.rnn.LSTM", "torch.nn.modules.rnn.GRUCell"]
    assert run.stdout.splitlines() == [str(classes), str([(2, 3, 7), False])] * 2


@by_module
def test_copies(name: str) -> None:
    ours, theirs = pair(name)
    input = input_of(name)
    ours(input)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        loaded = pickle.loads(pickle.dumps(ours, protocol))
        assert type(loaded) is getattr(nn, name)
        assert_same((loaded, theirs), lambda it: trained(it, input))
    for copied in (copy.deepcopy(ours), copy.copy(ours), copy.deepcopy(nn.Sequential(ours))[0]):
        assert type(copied) is type(ours) and copied.__class__ is getattr(nn, name)
        assert_same((copied, theirs), lambda it: trained(it, input))
    assert copy.copy(ours).weight_hh is ours.weight_hh if name in CELLS else True
    with torch.no_grad():
        for x in copy.deepcopy(ours).parameters():
            x.zero_()
    assert_same((ours, theirs), lambda it: trained(it, input))


@by_module
def test_replicas(name: str) -> None:
    """As of nn.DataParallel: their parameters are computed, and no parameters."""
    modules, input = pair(name), input_of(name)

    def program(module: Any) -> Any:
        replica = module._replicate_for_data_parallel()
        assert isinstance(replica, getattr(nn, name))
        replica._former_parameters = {}
        for key, x in module.named_parameters():
            computed = x * 1
            setattr(replica, key, computed)
            replica._former_parameters[key] = computed
        return trained(module, input), replica(input)

    def trains(module: Any) -> Any:
        replica = module._replicate_for_data_parallel()
        for key, x in module.named_parameters():
            setattr(replica, key, x * 1)
        results = replica(input)
        return results, gradients_of(results, module.parameters())

    assert_same(modules, program)
    assert_same(modules, trains)


# -- the graph of gradients ----------------------------------------------------------------------


@by_module
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not_reentrant"])
@pytest.mark.parametrize("dropout", [False, True], ids=["plain", "dropout"])
def test_checkpoints(dropout: bool, reentrant: bool, name: str) -> None:
    options = {"num_layers": 2, "dropout": 0.5} if dropout and name in LAYERS else {}
    modules = pair(name, **options)

    def program(module: Any) -> Any:
        input = ones.clone().requires_grad_()
        results = checkpoint(module, input, use_reentrant=reentrant)
        squares_of(results).backward()
        return results, input.grad, [x.grad for x in module.parameters()]

    ones = input_of(name)
    assert_same(modules, program)


@by_module
def test_hooks(name: str) -> None:
    """Each is called as often as with torch's module."""
    modules, input = pair(name), input_of(name)

    def program(module: Any) -> Any:
        calls: list[str] = []
        for key, x in module.named_parameters():
            x.register_hook(lambda _, key=key: calls.append(key))
            x.register_post_accumulate_grad_hook(lambda _, key=key: calls.append(f"{key}.grad"))
        module.register_forward_pre_hook(lambda *_: calls.append("pre"))
        module.register_forward_hook(lambda *_: calls.append("forward"))
        module.register_full_backward_pre_hook(lambda *_: calls.append("backward_pre"))
        module.register_full_backward_hook(lambda *_: calls.append("backward"))
        module.register_state_dict_pre_hook(lambda *_: calls.append("state_dict"))
        found = trained(module, input.clone().requires_grad_()), trained(module, input)
        module.state_dict()
        return found, torch.tensor([hash(x) for x in sorted(calls)])

    assert_same(modules, program)


@by_device
@by_module
def test_hooks_on_a_result_that_another_may_come_from(name: str, device: str) -> None:
    """On a CPU torch's LSTMCell computes h from c."""
    modules, input = pair(name, device), input_of(name, device)

    def program(module: Any) -> Any:
        first, *_, last = tensors_of(module(input))
        last.register_hook(lambda x: x.clamp(-0.01, 0.01))
        leaves = [last, *module.parameters()]
        return gradients_of([first], leaves, allow_unused=True)

    assert_same(modules, program)


@pytest.mark.parametrize("name", [*LAYERS, "LSTMCell"])
def test_hooks_on_results_that_have_no_gradient(name: str) -> None:
    """None is called, and so with None in place of a gradient."""
    modules, input = pair(name), input_of(name)

    def program(module: Any) -> Any:
        *others, last = tensors_of(module(input))
        calls: list[Any] = []
        for x in others:
            x.register_hook(calls.append)
        last.sum().backward()
        return torch.tensor(len(calls))

    assert_same(modules, program)


@by_cell
def test_parameters_that_a_class_computes(name: str) -> None:
    def masked(module: Any, attribute: str) -> Any:
        found = nn.Module.__getattr__(module, attribute)
        return found * 0.5 if attribute == "weight_hh" else found

    kind = type("Masked", (getattr(nn, name),), {"__getattr__": masked})
    theirs = kind(FEATURES, STATE).double()
    modules = extops.accelerate(copy.deepcopy(theirs)), theirs
    assert_same(modules, lambda it: trained(it, input_of(name), states_of(name)))


@by_module
@pytest.mark.parametrize("attribute", ["torchs", "looks", "ours", "is_traced", "_cell"])
def test_attributes_of_the_users(attribute: str, name: str) -> None:
    modules, input = pair(name), input_of(name)
    for module in modules:
        setattr(module, attribute, 5)
    assert_same(modules, lambda it: [it(input), it(input)])
    assert_same(modules, lambda it: pickle.loads(pickle.dumps(it))(input))
    assert getattr(extops.restore(modules[0]), attribute) == 5


@by_module
def test_hooks_on_saved_tensors(name: str) -> None:
    modules, input = pair(name), input_of(name)

    def program(module: Any) -> Any:
        packed: list[Tensor] = []

        def pack(x: Tensor) -> int:
            packed.append(x.clone())
            return len(packed) - 1

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda place: packed[place]):
            results = module(input)
        assert packed
        squares_of(results).backward()
        return results, [x.grad for x in module.parameters()]

    def on_cpu(module: Any) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return trained(module, input)

    def disabled(module: Any) -> Any:
        with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
            return trained(module, input)

    for each in (program, on_cpu, disabled):
        assert_same(modules, each)


@by_module
def test_a_second_backward(name: str) -> None:
    modules, input = pair(name), input_of(name)

    def program(module: Any, keep: bool) -> Any:
        loss = squares_of(module(input))
        loss.backward(retain_graph=keep)
        loss.backward()
        return [x.grad for x in module.parameters()]

    for keep in (True, False):
        assert_same(modules, lambda it, keep=keep: program(it, keep))


@by_module
def test_gradients_belong_to_their_parameters(name: str) -> None:
    """They can be changed, detached and freed in place, as optimizers do."""
    modules, input = pair(name), input_of(name)

    def program(module: Any) -> Any:
        optimizer = torch.optim.AdamW(module.parameters(), 0.1, foreach=True)
        for _ in range(2):
            results, gradients = trained(module, input)
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            for x in gradients:
                x.detach_().add_(1)
        return results, gradients, list(module.parameters())

    assert_same(modules, program)


@by_layer
def test_dropout_masks(name: str) -> None:
    """Those of torch on a CPU, and the generator is then where torch leaves it."""
    input = input_of(name)
    for options in ({}, {"bidirectional": True}, {"batch_first": True}):
        modules = pair(name, num_layers=3, dropout=0.5, **options)
        assert_same(modules, lambda it: (trained(it, input), trained(it, input)))


# -- compilers and exporters ---------------------------------------------------------------------


@by_module
def test_fx(name: str) -> None:
    """Row 10."""
    modules, input = pair(name), input_of(name)

    def program(module: Any) -> Any:
        graph = torch.fx.symbolic_trace(nn.Sequential(module))
        assert [node.op for node in graph.graph.nodes] == ["placeholder", "call_module", "output"]
        return graph(input)

    assert_same(modules, program)
    assert_same(modules, lambda it: torch.fx.symbolic_trace(it)(input))


@by_module
@pytest.mark.every(6, "way", "name")
def test_jit(name: str) -> None:
    modules, input = pair(name), input_of(name)

    def traced(module: Any) -> Any:
        found = torch.jit.trace(module, input, check_trace=False)
        assert "extops" not in str(found.inlined_graph)
        return found(torch.cat([input, input]))

    def scripted(module: Any) -> Any:
        return torch.jit.script(nn.Sequential(module))(input), torch.jit.script(module)(input)

    assert_same(modules, traced)
    assert_same(modules, scripted)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for module in modules:
            torch.jit.trace(module, input, check_trace=False)
    messages = [str(x.message) for x in caught if "deprecated" not in str(x.message)]
    half = len(messages) // 2
    assert messages[:half] == messages[half:]


@by_layer
def test_jit_of_packed_sequences(name: str) -> None:
    class Packs(nn.Module):
        def __init__(self, layer: Any) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, input: Tensor, lengths: Tensor) -> Any:
            packed = pack_padded_sequence(input, lengths)
            return pad_packed_sequence(self.layer(packed)[0])

    found, input = [], input_of(name)
    for module in pair(name):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            traced = torch.jit.trace(Packs(module), (input, torch.tensor([TIME, 2, 1])))
        said = sorted(str(x.message) for x in caught)
        found.append((said, "extops" in str(traced.inlined_graph)))
        found.append(traced(input, torch.tensor([TIME, 5, 3])))
    assert found[0] == found[2]
    torch.testing.assert_close(found[1], found[3])


@by_module
@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "script"])
@pytest.mark.every(7, "way", "dynamo", "name")
def test_onnx(dynamo: bool, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 9: the same graph, without an operator of ours."""
    monkeypatch.chdir(tmp_path)  # where an older torch reports an export that fails
    onnx = pytest.importorskip("onnx", reason="exports to ONNX, but finds no onnx")
    if dynamo:
        pytest.importorskip("onnxscript", reason="exports to ONNX, but finds no onnxscript")
    input, graphs = input_of(name).float(), []
    for module in pair(name):
        file = io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(module.float(), (input,), file, dynamo=dynamo, verbose=False)
        graphs.append(onnx.load_model_from_string(file.getvalue()).graph)
    nodes = [[(node.op_type, node.domain) for node in graph.node] for graph in graphs]
    assert nodes[0] == nodes[1]
    assert {node.domain for node in graphs[0].node} <= {"", "aten", "pkg.onnxscript.torch_lib"}


ASKS: dict[str, Callable[[Any], Any]] = {
    "isinstance": lambda it: isinstance(it, nn.LSTM),
    "isinstance_of_several": lambda it: isinstance(it, (nn.GRU, nn.LSTM)),
    "isinstance_of_another": lambda it: not isinstance(it, (nn.GRU, nn.Linear)),
    "name_of_type": lambda it: type(it).__name__ == "LSTM",
    "base": lambda it: isinstance(it, nn.RNNBase),
    "mode": lambda it: it.mode == "LSTM",
}


class Asking(nn.Module):
    def __init__(self, layer: Any, ask: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.ask = layer, ask

    def forward(self, input: Tensor) -> Tensor:
        return input + 1 if self.ask(self.layer) else input


@since_2_6
@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.usefixtures("dynamo")
def test_what_compiled_code_asks_of_a_layer(ask: str) -> None:
    """It takes the way that it takes uncompiled."""
    model = Asking(pair("LSTM")[0], ASKS[ask])
    input = torch.ones(1)
    assert torch.equal(model(input), input + 1)
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(input), input + 1)


@by_module
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.usefixtures("dynamo")
@pytest.mark.every(7, "way", "dynamic", "name")
def test_compiled(dynamic: bool, name: str) -> None:
    ours, theirs = pair(name)
    run = torch.compile(ours, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for input in (input_of(name), input_of(name)[:2], input_of(name).requires_grad_()):
        results = []
        for model, module in ((run, ours), (theirs, theirs)):
            found = model(input)
            results.append((found, gradients_of(found, module.parameters())))
        torch.testing.assert_close(*results)


@by_layer
@pytest.mark.parametrize("how", ["view", "detach", "relu"])
@pytest.mark.usefixtures("dynamo")
@pytest.mark.every(5, "way", "how", "name")
def test_what_is_done_with_results_of_compiled_code(how: str, name: str) -> None:
    """Rows 1, 2 and 13."""

    def program(module: Any) -> Any:
        torch._dynamo.reset()
        output, *states = tensors_of(torch.compile(module, backend="aot_eager")(input))
        if how == "detach":
            states[0].detach_()
        elif how == "relu":
            output.relu_()
        return output.view(-1, STATE), gradients_of(output, module.parameters())

    input = random(BATCH, TIME, FEATURES).permute(1, 0, 2)
    modules = pair(name)
    if does_work(program, modules[1]):
        assert_same(modules, program)


@since_2_6
@by_layer
@pytest.mark.usefixtures("dynamo")
@pytest.mark.every(4, "way", "name")
def test_both_directions_of_compiled_code_lie_by_steps(name: str) -> None:
    modules = pair(name, batch_first=True, bidirectional=True)
    input = random(BATCH, TIME, FEATURES)

    def program(module: Any) -> Any:
        torch._dynamo.reset()
        output, _ = torch.compile(module, backend="aot_eager")(input)
        return output.transpose(0, 1).view(TIME, -1), output

    assert_same(modules, program)


class Padded(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, rows: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)
        padded, _ = pad_packed_sequence(self.layer(packed)[0], batch_first=True)
        return padded.view(-1, STATE)


@since_2_6
@by_layer
@pytest.mark.usefixtures("dynamo")
@pytest.mark.every(4, "way", "name")
def test_padded_rows_of_compiled_code_are_contiguous(name: str) -> None:
    rows, lengths = random(BATCH, TIME, FEATURES), torch.tensor([2, TIME, 3])

    def program(module: Any) -> Any:
        torch._dynamo.reset()
        return torch.compile(Padded(module), backend="aot_eager")(rows, lengths)

    assert_same(pair(name), program)


@since_2_6
@by_module
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=str)
@pytest.mark.filterwarnings("ignore:.*is a deprecated type:FutureWarning")
@pytest.mark.every(6, "way", "name")
def test_exported(dtype: torch.dtype, name: str) -> None:
    modules, input = pair(name, dtype=dtype), input_of(name).to(dtype)
    if name in LAYERS:
        input = input.transpose(0, 1).contiguous().transpose(0, 1)

    def program(module: Any) -> Any:
        found = tensors_of(torch.export.export(module, (input,)).module()(input))
        return found[0].view(-1), found[1:]

    if does_work(program, modules[1]):
        assert_same(modules, program)


@since_2_6
@by_module
@pytest.mark.parametrize("what", ["complex", "float32", "features", "rank"])
@pytest.mark.usefixtures("dynamo")
@pytest.mark.every(8, "way", "what", "name")
def test_compiled_calls_that_are_not_plain(what: str, name: str) -> None:
    dtype = torch.complex64 if what == "complex" else torch.float64
    input = input_of(name).to(dtype)
    given = {
        "complex": input,
        "float32": input.float() if what != "complex" else input,
        "features": input[..., :2],
        "rank": input.expand(1, 1, *input.shape),
    }[what]

    def program(module: Any) -> Any:
        torch._dynamo.reset()
        try:
            return torch.compile(module, backend="eager")(given)
        except Exception as error:
            raise type(error)("as torch's") from error

    modules = pair(name, dtype=dtype)
    ours, theirs = (outcome(program, module) for module in modules)
    if isinstance(theirs[0], type):
        assert ours == theirs
    else:
        torch.testing.assert_close(ours, theirs)


# -- what is of the whole process ----------------------------------------------------------------


def switches() -> dict[str, Any]:
    found: dict[str, Any] = {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "default": torch.get_default_dtype(),
        "cudnn": (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark),
        "denormal": torch.tensor(1e-310, dtype=torch.float64).mul(1).item(),
    }
    for owner in ("", ".cudnn", ".cudnn.rnn", ".cudnn.conv", ".cuda.matmul", ".mkldnn"):
        module: Any = torch.backends
        for part in filter(None, owner.split(".")):
            module = getattr(module, part)
        found[owner] = getattr(module, "fp32_precision", None)
    return found


@by_device
@by_module
@pytest.mark.parametrize("precision", ["none", "ieee", "tf32"])
@pytest.mark.skipif(
    not hasattr(torch.backends, "fp32_precision"), reason="torch has no fp32_precision here"
)
def test_precision_switches(
    precision: str, name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 12."""
    monkeypatch.setattr(torch.backends, "fp32_precision", precision)
    before = switches()
    modules = [module.float() for module in pair(name, device)]
    input = input_of(name, device).float()
    assert_same(modules, lambda it: trained(it, input), rtol=0.01, atol=0.01)
    assert switches() == before


@by_layer
@pytest.mark.slow
def test_5000_lengths(name: str) -> None:
    """Row 14."""
    ours, theirs = (module.float() for module in pair(name))
    input = torch.randn(5000, 1, FEATURES)
    with torch.no_grad():
        for length in range(1, 5001, 1):
            if length % 500 == 1:
                torch.testing.assert_close(ours(input[:length]), theirs(input[:length]))
            else:
                ours(input[:4].expand(4, length, FEATURES)[:1])
    assert len(vars(ours).get("_extops_known", {})) <= 4096


@by_module
def test_threads(name: str) -> None:
    ours, theirs = pair(name)
    input = input_of(name)
    expected, found = theirs(input), []
    threads = [threading.Thread(target=lambda: found.append(ours(input))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    for each in found:
        torch.testing.assert_close(each, expected)


def test_accelerate_says_what_it_does_not_take() -> None:
    """Row 17."""
    with pytest.warns(UserWarning, match=r"^extops.accelerate found no LSTM, GRU or RNN of torch"):
        extops.accelerate(nn.Linear(2, 2))
    scripted = torch.jit.script(nn.Sequential(nn.LSTM(2, 2)))
    with pytest.warns(UserWarning, match=r"left alone: `0`, which torch.jit has compiled$"):
        extops.accelerate(scripted)
    with pytest.warns(UserWarning, match=r"left alone: the model, which has `proj_size`$"):
        extops.accelerate(nn.LSTM(4, 4, proj_size=2))


@by_module
def test_classes_derived_from_that_of_an_accelerated_module(name: str) -> None:
    ours, theirs = pair(name)
    kind = type("Derived", (type(ours),), {})
    derived = kind(FEATURES, STATE, dtype=torch.float64)
    derived.load_state_dict(theirs.state_dict())
    sibling = type(ours)(FEATURES, STATE, dtype=torch.float64)
    sibling.load_state_dict(theirs.state_dict())
    input = input_of(name)
    for module in (derived, sibling, copy.deepcopy(derived)):
        assert isinstance(module, getattr(nn, name))
        assert_same((module, theirs), lambda it: trained(it, input))


def test_restored_by_its_user() -> None:
    """`__class__` may be assigned, as torch.nn.utils.parametrize does."""
    ours, theirs = pair("LSTM")
    ours.__class__ = nn.LSTM
    assert type(ours) is nn.LSTM
    assert_same((ours, theirs), lambda it: trained(it, input_of("LSTM")[:, :1]))
