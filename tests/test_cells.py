"""Users' cells: what `load_cell` compiles and returns, and its messages."""

from __future__ import annotations

import copy
import ctypes
import fcntl
import functools
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import extops
from extops.ops import compositions
from operators import Tensors, by_device, needs_programs, upstream

SOURCES = Path(__file__).parent / "data" / "cells"
TIME, BATCH, FEATURES, STATE = 4, 3, 5, 6


@dataclass(frozen=True)
class Own:
    """A cell of tests/data/cells."""

    name: str
    step: Callable[..., Tensors]
    gates: int
    input: int
    first_input: int
    recurrent: int
    states: int

    def load(self, device: str) -> Callable[..., Any]:
        if extops.binding._loader.binding != "stable":
            pytest.skip("needs torch 2.10 or newer")
        needs_programs("c++", "ninja", *(["nvcc"] if device == "cuda" else []))
        return _load(self)

    def inputs(self, device: str, dtype: torch.dtype) -> Tensors:
        """The input, h_0, c_0 and the parameters."""
        shapes = (TIME, BATCH, FEATURES), (BATCH, STATE), (BATCH, STATE)
        rows = self.input * STATE, self.recurrent * STATE
        parameters = (rows[0], FEATURES), (rows[1], STATE), (rows[0],), (rows[1],)
        made = [torch.randn(x, dtype=torch.float64) for x in (*shapes, *parameters)]
        if self.states == 1:
            made[2] = made[1]
        return tuple(x.to(device, dtype).requires_grad_() for x in made)

    def loop(self, input: Tensor, h: Tensor, c: Tensor, *parameters: Tensor) -> Tensors:
        """A step after the other."""
        weight_ih, weight_hh, bias_ih, bias_hh = parameters
        output = []
        for x in input:
            gates: list[Any] = [0] * self.gates
            for place, part in enumerate(F.linear(x, weight_ih, bias_ih).chunk(self.input, 1)):
                gates[(place + self.first_input) % self.input] += part
            first = self.gates - self.recurrent
            for place, part in enumerate(F.linear(h, weight_hh, bias_hh).chunk(self.recurrent, 1)):
                gates[first + place] += part
            h, c = self.step(torch.cat(gates, 1), c)
            output.append(h)
        return torch.stack(output), h, c


def turned_step(gates: Tensor, old_c: Tensor) -> tuple[Tensor, Tensor]:
    o, i, g = gates.chunk(3, dim=1)
    new_c = old_c / 2 + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(new_c), new_c


def peephole_step(gates: Tensor, old_c: Tensor) -> tuple[Tensor, Tensor]:
    p_i, p_f, p_o, i, f, g, o = gates.chunk(7, dim=1)
    i, f = torch.sigmoid(i + p_i * old_c), torch.sigmoid(f + p_f * old_c)
    new_c = f * old_c + i * torch.tanh(g)
    return torch.sigmoid(o + p_o * new_c) * torch.tanh(new_c), new_c


def slstm_step(gates: Tensor, old_c: Tensor, old_n: Tensor, old_m: Tensor) -> Tensors:
    i, f, z, o = gates.chunk(4, dim=1)
    kept = torch.where(old_n == 0, i, F.logsigmoid(f) + old_m)
    m = torch.maximum(i, kept)
    i, f = torch.exp(i - m), torch.exp(kept - m)
    c, n = f * old_c + i * torch.tanh(z), f * old_n + i
    return torch.sigmoid(o) * c / n, c, n, m


OWN_GRU = Own("own_gru", compositions.gru_cell, 4, 3, 1, 3, states=1)
TURNED = Own("turned", turned_step, 3, 3, 1, 2, states=2)
PEEPHOLE = Own("peephole", peephole_step, 7, 7, 0, 4, states=2)
SLSTM = Own("slstm", slstm_step, 4, 4, 0, 4, states=4)
by_cell = pytest.mark.parametrize("own", [OWN_GRU, TURNED], ids=lambda own: own.name)


@functools.cache
def _load(own: Own) -> Callable[..., Any]:
    sources = [SOURCES / f"{own.name}.{suffix}" for suffix in ("cpp", "cu")]
    return extops.load_cell(own.name, sources, own.step)


def call(cell: Callable[..., Any], input: Tensor, h: Tensor, c: Tensor, *parameters: Tensor) -> Any:
    output, (h_n, c_n) = cell(input, (h, c), *parameters[:2], parameters[2:])
    return output, h_n, c_n


@pytest.mark.slow
@by_device
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@by_cell
def test_values_and_gradients(own: Own, dtype: torch.dtype, device: str) -> None:
    cell = own.load(device)
    inputs = own.inputs(device, dtype)
    results, expected = call(cell, *inputs), own.loop(*inputs)
    torch.testing.assert_close(results, expected)
    towards = upstream(expected)
    found = torch.autograd.grad(results, inputs, towards)
    torch.testing.assert_close(found, torch.autograd.grad(expected, inputs, towards))


@pytest.mark.slow
@by_device
@by_cell
def test_transforms(own: Own, device: str) -> None:
    """Gradients of gradients, in forward mode and of a batch: by the composition of PyTorch calls."""
    cell = functools.partial(call, own.load(device))
    inputs = own.inputs(device, torch.float64)
    assert gradgradcheck(cell, inputs, upstream(own.loop(*inputs)), fast_mode=True)
    tangents = tuple(torch.randn_like(x) for x in inputs)
    of_cell, of_loop = (torch.func.jvp(f, inputs, tangents) for f in (cell, own.loop))
    torch.testing.assert_close(of_cell, of_loop)
    batch = tuple(torch.stack([x, y]) for x, y in zip(inputs, tangents, strict=True))
    of_cell, of_loop = (torch.func.vmap(f)(*batch) for f in (cell, own.loop))
    torch.testing.assert_close(of_cell, of_loop)


@pytest.mark.slow
@by_device
@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
@by_cell
def test_composite_backward(own: Own, reverse: bool, device: str) -> None:
    """The backward as compiled code calls it: where it is differentiated, too, a composition takes its place."""
    own.load(device)
    input, h, c, *parameters = (x.detach() for x in own.inputs(device, torch.float64))
    lengths = torch.tensor([TIME, 2, 0], device=device)
    operators = torch.ops.extops
    forward = getattr(operators, f"{own.name}_sequence")
    backward = getattr(operators, f"{own.name}_sequence_backward")
    output, h_n, c_n, gates, cells = forward(input, *parameters, h, c, lengths, reverse=reverse)
    towards = upstream((output, h_n, c_n))
    kept = parameters[1], gates, cells
    expected = backward(*towards, *kept, lengths, reverse=reverse)
    leaves = tuple(x.clone().requires_grad_() for x in kept)
    found = backward(*towards, *leaves, lengths, reverse=reverse)
    torch.testing.assert_close(tuple(x.detach() for x in found), tuple(expected))
    assert cast("Tensor", found[0]).requires_grad


@pytest.mark.slow
@by_device
def test_a_state_alone(device: str) -> None:
    """A single state is valid only for a cell whose h is its c."""
    input, h, _, *parameters = OWN_GRU.inputs(device, torch.float64)
    cell = OWN_GRU.load(device)
    output, h_n = cell(input, h, *parameters[:2], parameters[2:])
    torch.testing.assert_close((output, h_n), OWN_GRU.loop(input, h, h, *parameters)[:2])
    input, h, _, *parameters = TURNED.inputs(device, torch.float64)
    expected = re.escape("turned_sequence: expected `state` to be a pair of tensors, (h, c)")
    for state in (h, h[:2]):
        with pytest.raises(TypeError, match=f"^{expected}"):
            TURNED.load(device)(input, state, *parameters[:2], parameters[2:])


# ---- check_cell


@pytest.mark.slow
@by_device
@by_cell
def test_check_cell(own: Own, device: str) -> None:
    extops.check_cell(own.load(device))


def halved(x: Tensor) -> Tensor:
    """The same, with half of the gradient."""
    return (x + x.detach()) / 2


def wrong_c(gates: Tensor, old_c: Tensor) -> tuple[Tensor, Tensor]:
    h, new_c = turned_step(gates, old_c)
    return h, new_c + 0.25


def wrong_h(gates: Tensor, old_c: Tensor) -> tuple[Tensor, Tensor]:
    h, new_c = turned_step(gates, old_c)
    return -h, new_c


def wrong_gradient_of_a_gate(gates: Tensor, old_c: Tensor) -> tuple[Tensor, Tensor]:
    o, i, g = gates.chunk(3, dim=1)
    return turned_step(torch.cat([o, i, halved(g)], dim=1), old_c)


def wrong_gradient_of_h(gates: Tensor, old_c: Tensor) -> tuple[Tensor, Tensor]:
    o, i, g = gates.chunk(3, dim=1)
    h, _ = turned_step(torch.cat([halved(o), i, g], dim=1), old_c)
    return h, turned_step(gates, old_c)[1]


def wrong_gradient_of_an_old_c(gates: Tensor, old_c: Tensor, *others: Tensor) -> Tensors:
    return slstm_step(gates, halved(old_c), *others)


def too_few_states(gates: Tensor, *old: Tensor) -> Tensors:
    return slstm_step(gates, *old)[:3]


def in_one_tuple(gates: Tensor, *old: Tensor) -> Any:
    h, *others = slstm_step(gates, *old)
    return h, tuple(others)


def cut_elsewhere(gates: Tensor, *old: Tensor) -> Tensors:
    h, c, n, m = slstm_step(gates, *old)
    return h, c[:, :3], torch.cat((c[:, 3:], n), 1), m


def wrong_shape(gates: Tensor, old_c: Tensor) -> tuple[Tensor, Tensor]:
    h, new_c = turned_step(gates, old_c)
    return h, new_c[:1]


@pytest.mark.slow
@by_device
@pytest.mark.parametrize(
    ("own", "step", "message"),
    [
        (TURNED, wrong_c, r"the new c differs .* by 0.25, where .* \(see new_c\)"),
        (TURNED, wrong_h, r"h differs from that of `step` by [\d.]+, where .* \(see output\)"),
        (
            TURNED,
            wrong_gradient_of_a_gate,
            r"gradient of gate 2 for a gradient of h alone differs .* \(see to_gates and to_c\)",
        ),
        (
            TURNED,
            wrong_gradient_of_h,
            r"the gradient of gate 0 for a gradient of h alone differs .*",
        ),
        (
            SLSTM,
            wrong_gradient_of_an_old_c,
            r"gradient of the old c.* for a gradient of h alone differs .* \(see to_old_c\)",
        ),
        (SLSTM, too_few_states, "`step` gives Tensor, Tensor, Tensor, not 4 tensors"),
        (SLSTM, in_one_tuple, "`step` gives Tensor, tuple, not 4 tensors"),
        (SLSTM, cut_elsewhere, r"`step` gives the new c\[0\] of shape \[4, 3\], not \[4, 5\]"),
        (TURNED, wrong_shape, r"`step` gives the new c of shape \[1, 5\], not \[4, 5\]"),
    ],
)
def test_check_cell_says_what_differs(own: Own, step: Any, message: str, device: str) -> None:
    cell = own.load(device)
    record = extops.cells.loaded[own.name]
    record.step = step
    try:
        with pytest.raises(AssertionError, match=message) as caught:
            extops.check_cell(cell)
    finally:
        record.step = own.step
    where = f"check_cell: {own.name} on cpu in torch.float64, 5 units: "
    assert str(caught.value).startswith(where)


def test_check_cell_of_another_function() -> None:
    expected = "check_cell: expected `cell` to be what load_cell returned, but got <function "
    with pytest.raises(TypeError, match=f"^{expected}"):
        extops.check_cell(extops.gru_sequence)


# ---- cell_layer


def like_torchs(own: Own, device: str, **options: Any) -> tuple[Any, Any]:
    """A layer of a cell, and torch's with the same parameters."""
    torch.manual_seed(0)
    ours = extops.cell_layer(own.load(device), FEATURES, STATE, **options, device=device)
    torchs = torch.nn.GRU(FEATURES, STATE, **options).to(device)
    with torch.no_grad():
        for name, x in ours.named_parameters():
            r, z, n = getattr(torchs, name).chunk(3)
            x.copy_(torch.cat([r, z, n]))
    return ours, torchs


@pytest.mark.slow
@by_device
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_layers": 2, "bidirectional": True},
        {"num_layers": 2, "batch_first": True, "bias": False, "dropout": 0.5},
    ],
    ids=str,
)
def test_a_layer_is_shaped_like_torchs(options: dict[str, Any], device: str) -> None:
    """The cell is a GRU, so it has the values of torch's, too; in training, and of packed input."""
    if device == "cuda":
        options = {**options, "dropout": 0.0}  # each draws in an order of its own there
    ours, torchs = like_torchs(OWN_GRU, device, **options)
    assert [(name, x.shape) for name, x in ours.named_parameters()] == [
        (name, x.shape) for name, x in torchs.named_parameters()
    ]
    input = torch.randn(TIME, TIME, FEATURES, device=device)
    packed = torch.nn.utils.rnn.pack_padded_sequence(
        input, torch.tensor([4, 3, 3, 1]), bool(options.get("batch_first"))
    )
    for given in (input, packed):
        results = []
        for layer in (ours, torchs):
            torch.manual_seed(1)
            with torch.backends.cudnn.flags(allow_tf32=False):
                output, last = layer(given)
            output = output if isinstance(output, Tensor) else output.data
            loss = output.square().sum() + last.square().sum()
            results.append([output, last, *torch.autograd.grad(loss, list(layer.parameters()))])
        torch.testing.assert_close(*results)


@pytest.mark.slow
def test_a_layer_in_a_file(tmp_path: Path) -> None:
    """Of a cell with two states; another process loads it, and compiles nothing."""
    cell = TURNED.load("cpu")
    layer = extops.cell_layer(cell, FEATURES, STATE)
    assert copy.deepcopy(layer).cell is cell and pickle.loads(pickle.dumps(cell)) is cell
    input = torch.randn(TIME, BATCH, FEATURES)
    torch.save((layer, input, layer(input)), tmp_path / "layer.pt")
    code = (
        "import torch, sys; layer, input, expected = torch.load(sys.argv[1], weights_only=False);"
        "torch.testing.assert_close(layer(input), expected); print(layer)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "layer.pt")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{layer}\n" and "turned, 5, 6, num_layers=1, bias=True" in done.stdout


def peephole_loop(input: Tensor, h: Tensor, c: Tensor, numbers: Any, *parameters: Tensor) -> Any:
    """A step after the other; nothing of extops."""
    weight_ih, weight_hh, *biases = parameters
    units = [x.expand(h.shape) for x in numbers]
    output = []
    for x in input:
        gates = x @ weight_ih.t() + h @ weight_hh.t() + sum(biases)
        h, c = peephole_step(torch.cat([*units, gates], 1), c)
        output.append(h)
    return torch.stack(output), h, c


@pytest.mark.slow
@by_device
@pytest.mark.parametrize("has_biases", [True, False])
def test_a_cell_with_numbers(has_biases: bool, device: str) -> None:
    """A vector of the units, and a number for all of them; their gradients, too, and those of second order."""
    cell = PEEPHOLE.load(device)
    rows = 4 * STATE
    shapes = (TIME, BATCH, FEATURES), (BATCH, STATE), (BATCH, STATE), (STATE,), (), (STATE,)
    shapes = *shapes, (rows, FEATURES), (rows, STATE), *((rows,), (rows,))[: 2 * has_biases]
    made = (torch.randn(x, dtype=torch.float64, device=device) for x in shapes)
    inputs = tuple(x.requires_grad_() for x in made)

    def by_cell(*inputs: Tensor) -> Any:
        input, h, c, *numbers, weight_ih, weight_hh = inputs[:8]
        bias = (inputs[8], inputs[9]) if has_biases else None
        output, (h, c) = cell(input, (h, c), weight_ih, weight_hh, bias, numbers=numbers)
        return output, h, c

    results = by_cell(*inputs)
    expected = peephole_loop(*inputs[:3], inputs[3:6], *inputs[6:])
    torch.testing.assert_close(results, expected)
    towards = upstream(expected)
    found = torch.autograd.grad(results, inputs, towards)
    torch.testing.assert_close(found, torch.autograd.grad(expected, inputs, towards))
    assert gradgradcheck(by_cell, inputs, towards, fast_mode=True)


@pytest.mark.slow
@by_device
def test_check_cell_of_one_with_numbers(device: str) -> None:
    extops.check_cell(PEEPHOLE.load(device), state_sizes=(5, 100))


@pytest.mark.slow
@by_device
def test_a_layer_with_numbers(device: str) -> None:
    layer = extops.cell_layer(PEEPHOLE.load(device), FEATURES, STATE, device=device)
    input = torch.randn(TIME, BATCH, FEATURES, device=device)
    zeros = input.new_zeros(BATCH, STATE)
    parameters = dict(layer.named_parameters())
    expected, h, c = peephole_loop(input, zeros, zeros, *parameters.values())
    torch.testing.assert_close(layer(input), (expected, (h[None], c[None])))
    assert {name: list(x.shape) for name, x in parameters.items()} == {
        "numbers_l0": [3, STATE],
        "weight_ih_l0": [4 * STATE, FEATURES],
        "weight_hh_l0": [4 * STATE, STATE],
        "bias_ih_l0": [4 * STATE],
        "bias_hh_l0": [4 * STATE],
    }


def original_slstm(input: Tensor, h: Tensor, c: Tensor, n: Tensor, *parameters: Tensor) -> Any:
    """The equations of the paper, a step after the other; nothing of extops."""
    weight_ih, weight_hh, *biases = parameters
    m, output = torch.zeros_like(h), []
    for x in input:
        i, f, z, o = (x @ weight_ih.t() + h @ weight_hh.t() + sum(biases)).chunk(4, 1)
        log_f = torch.log(torch.sigmoid(f)) + m
        m = torch.maximum(log_f, i)
        c = torch.exp(log_f - m) * c + torch.exp(i - m) * torch.tanh(z)
        n = torch.exp(log_f - m) * n + torch.exp(i - m)
        h = torch.sigmoid(o) * c / n
        output.append(h)
    return torch.stack(output), h, c * torch.exp(m), n * torch.exp(m)


def slstm_inputs(device: str, dtype: torch.dtype = torch.float64, units: int = STATE) -> Tensors:
    """The input, h, c, n and m, which are such as come of steps, and the parameters."""
    rows = 4 * units
    shapes = [(TIME, BATCH, FEATURES), *[(BATCH, units)] * 4]
    shapes += [(rows, FEATURES), (rows, units), (rows,), (rows,)]
    made = [torch.randn(x, dtype=torch.float64) for x in shapes]
    made[3] = 1 + made[3].abs()
    made[6] *= (STATE / units) ** 0.5
    return tuple(x.to(device, dtype).requires_grad_() for x in made)


def call_slstm(cell: Any, *inputs: Tensor, **options: Any) -> Tensors:
    output, states = cell(inputs[0], inputs[1:5], *inputs[5:7], inputs[7:], **options)
    return output, *states


def slstm_loop(*inputs: Tensor, lengths: Any = (TIME,) * BATCH, reverse: bool = False) -> Tensors:
    """Each row by itself, of as many steps as it has."""
    input, *states, weight_ih, weight_hh, bias_ih, bias_hh = inputs
    rows = []
    for row, length in enumerate(lengths):
        h, *c = (x[row : row + 1] for x in states)
        output = [torch.zeros_like(h)] * len(input)
        for t in reversed(range(length)) if reverse else range(length):
            gates = F.linear(input[t, row], weight_ih, bias_ih) + F.linear(h, weight_hh, bias_hh)
            h, *c = slstm_step(gates, *c)
            output[t] = h
        rows.append((torch.cat(output), h[0], *(x[0] for x in c)))
    output, *last = zip(*rows, strict=True)
    return torch.stack(output, 1), *map(torch.stack, last)


@pytest.mark.slow
@by_device
def test_slstm_of_the_paper(device: str) -> None:
    """From zeros, as a layer begins; also where the paper's own exponentials would overflow without a stabiliser."""
    cell = SLSTM.load(device)
    input, h, _, _, _, *parameters = (x.detach().requires_grad_() for x in slstm_inputs(device))
    zeros = torch.zeros_like(h)
    output, (h_n, c_n, n_n, m_n) = cell(
        input, (h, zeros, zeros, zeros), *parameters[:2], parameters[2:]
    )
    expected = original_slstm(input, h, zeros, zeros, *parameters)
    found = output, h_n, c_n * torch.exp(m_n), n_n * torch.exp(m_n)
    torch.testing.assert_close(found, expected)
    towards, leaves = upstream(expected), (input, h, *parameters)
    of_found, of_expected = (torch.autograd.grad(x, leaves, towards) for x in (found, expected))
    torch.testing.assert_close(of_found, of_expected)
    bias = parameters[2] + torch.tensor([900.0] * STATE + [0.0] * 3 * STATE, device=device)
    of_large = cell(input, (h, zeros, zeros, zeros), *parameters[:2], (bias, parameters[3]))[0]
    torch.testing.assert_close(
        of_large, original_slstm(input, h, zeros, zeros, *parameters[:2], bias, parameters[3])[0]
    )
    few = cell(input, (h, zeros, zeros, zeros), *parameters[:2], (bias - 1800, parameters[3]))[0]
    assert few.isfinite().all()


SLSTM_TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
by_lengths = pytest.mark.parametrize(
    "options", [{}, {"lengths": (4, 2, 0), "reverse": True}, {"lengths": (1, 0, 3)}], ids=str
)


def check_slstm(device: str, dtype: torch.dtype, units: int, options: dict[str, Any]) -> None:
    """Compares values and gradients with those in float64, in both layouts."""
    inputs = slstm_inputs(device, dtype, units)
    wide = tuple(x.detach().double().requires_grad_() for x in inputs)
    expected = slstm_loop(*wide, **options)
    towards = [*upstream(expected)]
    if dtype in (torch.float16, torch.bfloat16):
        # m is one of two numbers, and after rounding perhaps the other one. That does not change h, but the gradients
        # of the last c, n and m.
        towards[2:] = [torch.zeros_like(x) for x in towards[2:]]
    of_expected = torch.autograd.grad(expected, wide, towards)
    if "lengths" in options:
        options = {**options, "lengths": torch.tensor(options["lengths"], device=device)}
    for batch_first in (False, True):
        first = inputs[0].transpose(0, 1) if batch_first else inputs[0]
        given = first, *inputs[1:]
        results = call_slstm(SLSTM.load(device), *given, batch_first=batch_first, **options)
        output = results[0].transpose(0, 1) if batch_first else results[0]
        results = output, *results[1:]
        found = torch.autograd.grad(results, inputs, [x.to(dtype) for x in towards])
        for one, other in zip((*results, *found), (*expected, *of_expected), strict=True):
            atol = SLSTM_TOLERANCES[dtype] * (1 + other.abs().max().item())
            torch.testing.assert_close(one.double(), other, rtol=0, atol=atol)


@pytest.mark.slow
@by_device
@pytest.mark.parametrize("dtype", SLSTM_TOLERANCES, ids=str)
@by_lengths
def test_a_cell_with_more_states(dtype: torch.dtype, options: dict[str, Any], device: str) -> None:
    check_slstm(device, dtype, STATE, options)


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "dtype", "units"),
    [
        ("step", torch.float32, 20),
        ("step", torch.float16, 21),
        ("float32_block", torch.float32, 50),
        ("float32_block", torch.float32, 111),
        ("tensor_block", torch.float16, 50),
        ("tensor_block", torch.bfloat16, 111),
        ("tensor_cluster", torch.float16, 250),
        ("tensor_cluster", torch.bfloat16, 333),
        ("tensor_cluster", torch.bfloat16, 512),
    ],
    ids=str,
)
@by_lengths
def test_kernels_of_more_states(
    kernel: str, dtype: torch.dtype, units: int, options: dict[str, Any]
) -> None:
    SLSTM.load("cuda")
    if kernel == "tensor_cluster" and torch.cuda.get_device_capability() != (9, 0):
        kernel = "step"  # other GPUs have no clusters, and compute such states by it
    name = ctypes.CDLL(
        str(extops.cells.loaded["slstm"].build.library)
    ).extops_name_sequence_kernel_cuda
    name(kernel.encode())
    try:
        check_slstm("cuda", dtype, units, options)
    finally:
        name(b"")


@pytest.mark.slow
@by_device
def test_transforms_of_more_states(device: str) -> None:
    cell = functools.partial(call_slstm, SLSTM.load(device))
    inputs = slstm_inputs(device)
    towards = upstream(slstm_loop(*inputs))
    assert gradcheck(cell, inputs, fast_mode=True) and gradgradcheck(
        cell, inputs, towards, fast_mode=True
    )
    tangents = tuple(torch.randn_like(x) for x in inputs)
    of_cell, of_loop = (torch.func.jvp(f, inputs, tangents) for f in (cell, slstm_loop))
    torch.testing.assert_close(of_cell, of_loop)


@pytest.mark.slow
@by_device
def test_compiled_and_exported_with_more_states(device: str) -> None:
    cell, inputs = SLSTM.load(device), slstm_inputs(device)

    def forward(*inputs: Tensor) -> Tensors:
        return call_slstm(cell, *inputs)

    results, expected = torch.compile(forward, fullgraph=True)(*inputs), forward(*inputs)
    torch.testing.assert_close(results, expected)
    towards = upstream(expected)
    found, of_expected = (torch.autograd.grad(x, inputs, towards) for x in (results, expected))
    torch.testing.assert_close(found, of_expected)
    layer = extops.cell_layer(
        cell, FEATURES, STATE, device=device, dtype=torch.float64
    ).requires_grad_(False)
    input = inputs[0].detach()
    program = torch.export.export(layer, (input,)).module()
    torch.testing.assert_close(program(input), layer(input))


@pytest.mark.slow
@by_device
def test_check_cell_of_more_states(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = SLSTM.load(device)
    extops.check_cell(cell, state_sizes=(5, 100))

    def wrong(*given: Tensor) -> Tensors:
        h, c, n, m = slstm_step(*given)
        return h, c, n, m + 0.25

    monkeypatch.setattr(extops.cells.loaded["slstm"], "step", wrong)
    with pytest.raises(AssertionError, match=r"the new c\[2\] differs .* by 0.25"):
        extops.check_cell(cell, state_sizes=(5,))


@pytest.mark.slow
@by_device
def test_a_layer_with_more_states(device: str) -> None:
    """Both directions, two layers, packed input; another process can load it."""
    options = {"num_layers": 2, "bidirectional": True, "device": device}
    layer = extops.cell_layer(SLSTM.load(device), FEATURES, STATE, **options)
    assert pickle.loads(pickle.dumps(layer)).cell is layer.cell
    input, lengths = torch.randn(TIME, BATCH, FEATURES, device=device), torch.tensor([4, 3, 1])
    states = tuple(x.to(input) for x in torch.rand(4, 4, BATCH, STATE).add(0.5))
    packed = torch.nn.utils.rnn.pack_padded_sequence(input, lengths)
    output, last = layer(packed, states)
    output = torch.nn.utils.rnn.pad_packed_sequence(output)[0]
    torch.testing.assert_close((output, last), layer(input, states, lengths))
    given, expected, ends = input, [], []
    for of_layer in range(2):
        expected = []
        for place, suffix in enumerate((f"_l{of_layer}", f"_l{of_layer}_reverse"), 2 * of_layer):
            names = "weight_ih", "weight_hh", "bias_ih", "bias_hh"
            parameters = [getattr(layer, name + suffix) for name in names]
            arguments = given, *(x[place] for x in states), *parameters
            found, *end = slstm_loop(*arguments, lengths=lengths.tolist(), reverse=place % 2 == 1)
            expected.append(found)
            ends.append(end)
        given = torch.cat(expected, 2)
    torch.testing.assert_close(output, given)
    torch.testing.assert_close(last, tuple(torch.stack(x) for x in zip(*ends, strict=True)))
    for state in layer(input)[1]:
        state.detach_().zero_()  # no view
    message = "cell_layer: expected `state` to be 4 tensors, h and 3 of the cell, but got tuple of 2 items"
    with pytest.raises(TypeError, match=f"^{message}$"):
        layer(input, states[:2])


@pytest.mark.slow
@pytest.mark.parametrize("is_compiled", [False, True])
def test_wrong_states_of_several(is_compiled: bool) -> None:
    """Joined, wrong widths would only shift numbers, and dtypes be promoted."""
    cell = functools.partial(call_slstm, SLSTM.load("cpu"))
    if is_compiled:
        cell = torch.compile(cell, backend="eager", fullgraph=True, dynamic=False)
    input, *states = slstm_inputs("cpu")[:5]
    parameters = slstm_inputs("cpu")[5:]
    wide = torch.cat(states[1:], 1)
    fitting = f"to have shape [batch, state_size] = [{BATCH}, {STATE}], but got "
    for place, wrong, said in (
        (1, wide, f"`state[1]` {fitting}[{BATCH}, {3 * STATE}]"),
        (2, states[2][:, 1:], f"`state[2]` {fitting}[{BATCH}, {STATE - 1}]"),
        (2, states[2][:1], f"`state[2]` {fitting}[1, {STATE}]"),
        (3, states[3].float(), "`state[3]`"),
        (3, states[3].long(), "`state[3]` of a floating-point dtype"),
    ):
        given = [*states]
        given[place] = wrong
        with pytest.raises(Exception, match=re.escape(f"slstm_sequence: expected {said}")):
            cell(input, *given, *parameters)


@pytest.mark.slow
def test_wrong_numbers() -> None:
    cell, zeros = PEEPHOLE.load("cpu"), torch.zeros(BATCH, STATE)
    input, weight_ih = torch.zeros(TIME, BATCH, FEATURES), torch.zeros(4 * STATE, FEATURES)
    given = input, (zeros, zeros), weight_ih, torch.zeros(4 * STATE, STATE)
    message = "expected `numbers` to be 3 tensors of shape [state_size] = [6] or [], but got "
    for numbers, said in (
        ((), "0 of shapes []"),
        (torch.zeros(3, 5), "3 of shapes [[5], [5], [5]]"),
    ):
        with pytest.raises(RuntimeError, match=re.escape(f"peephole_sequence: {message}{said}")):
            cell(*given, numbers=numbers)
    message = "expected `weight_ih` to have shape [4*state_size, input_features] = [24, 5], but got [42, 5]"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        cell(*given[:2], torch.zeros(42, 5), given[3], numbers=torch.zeros(3, STATE))


def test_cell_layer_of_another_function() -> None:
    expected = "cell_layer: expected `cell` to be what load_cell returned, but got <function "
    with pytest.raises(TypeError, match=f"^{expected}"):
        extops.cell_layer(extops.gru_sequence, 3, 4)


# ---- load_cell


@pytest.mark.slow
@by_device
def test_the_same_sources_again(device: str, capfd: pytest.CaptureFixture[str]) -> None:
    cell = TURNED.load(device)
    capfd.readouterr()
    sources = [SOURCES / "turned.cpp", SOURCES / "turned.cu"]
    assert extops.load_cell("turned", sources, turned_step) is cell
    assert capfd.readouterr() == ("", "")
    message = f"expected a new `name`, or the sources of the cell 'turned' .* {SOURCES}/turned.cpp"
    with pytest.raises(RuntimeError, match=message):
        extops.load_cell("turned", [*sources, SOURCES / "own_gru.h"], turned_step)


START = """
import os, sys
from pathlib import Path
import extops
from extops.binding import _jit

folder = Path(sys.argv[1])
os.environ |= {"TORCH_EXTENSIONS_DIR": str(folder / "build"), "PROCESS": str(os.getpid())}

def load(name="turned"):
    return extops.load_cell(name, [folder / f"{name}.cpp"], lambda gates, c: (c, c))

def compile():
    print(_jit.Build("small", [folder / "small.cpp"]).load("compiling").is_file())
"""


def start(code: str, folder: Path) -> subprocess.Popen[str]:
    """A process of its own, which compiles what is in the folder."""
    needs_programs("c++", "ninja")
    (folder / "small.cpp").write_text("int number = 1;\n")
    return subprocess.Popen(
        [sys.executable, "-c", START + code, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_after_a_killed_compile(tmp_path: Path) -> None:
    """The lock of a process that has died does not block others."""
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *" -c "*) kill -9 $PROCESS ;; *) exec c++ "$@" ;; esac\n'
    )
    compiler.chmod(0o755)
    killed = start('os.environ["CXX"] = str(folder / "compiler"); compile()', tmp_path)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "build" / "small" / "lock").exists()  # torch's own
    output, errors = start("compile()", tmp_path).communicate(timeout=120)
    assert output == "True\n", errors


@pytest.mark.slow
def test_while_another_process_compiles(tmp_path: Path) -> None:
    folder = tmp_path / "build" / "small"
    folder.mkdir(parents=True)
    with (folder / "extops.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = start("compile()", tmp_path)
        assert process.stderr is not None
        message = f"extops: waiting for another process, which compiles in {folder}\n"
        assert message in iter(process.stderr.readline, "")
        assert not list(folder.glob("*.so"))
    output, errors = process.communicate()
    assert output == "True\n", errors


@pytest.mark.slow
def test_after_an_error_is_mended(tmp_path: Path) -> None:
    """In the same process, as in a notebook; the header is not what torch looks at."""
    code = """
(folder / "small.cpp").write_text('#include "small.h"')
for text in ("int number = ;", "int number = 1;"):
    (folder / "small.h").write_text(text)
    try:
        compile()
    except RuntimeError as error:
        print(type(error).__name__)
"""
    output, errors = start(code, tmp_path).communicate()
    assert output == "RuntimeError\nTrue\n", errors


@pytest.mark.slow
def test_what_a_user_sees(tmp_path: Path) -> None:
    """Once that something is compiled; after an edit what to do."""
    OWN_GRU.load("cpu")  # or skips
    for source in SOURCES.iterdir():
        shutil.copy(source, tmp_path)
    output, errors = start("load()", tmp_path).communicate()
    folder = tmp_path / "build" / "extops_cell_turned"
    what = "extops: compiling the cell turned, which takes about a minute; what comes of it stays"
    assert (output, errors) == ("", f"{what} in {folder}\n")
    code = """
assert load() is load()
(folder / "turned.h").write_text((folder / "turned.h").read_text() + "// edited")
for name in ("turned", "lstm"):
    (folder / "lstm.cpp").write_text("EXTOPS_CELL(lstm, Lstm)")
    try:
        load(name)
    except RuntimeError as error:
        print(error)
"""
    output, errors = start(code, tmp_path).communicate()
    assert output.splitlines() == [
        "load_cell: the sources of 'turned' have changed since this process loaded it, and it cannot load a cell "
        "twice: start Python anew (in a notebook: restart the kernel)",
        "load_cell: expected a new `name`, but there is a cell 'lstm' already",
    ]
    assert errors == ""


# ---- what does not compile

GRADIENTS = """
#include "cells/cell.h"

struct Cell {
  enum { kA, kB, kGates };

  template <class Math, class G, class C>
  EXTOPS_FUNCTION static void to_gates(
      G grad_h, G grad_c, const C (&a)[kGates], C old_c, C squashed, C (&gradients)[kGates]) {
    gradients[kA] = grad_h * a[kA];
    TO_B
  }
  template <class G, class C>
  EXTOPS_FUNCTION static C to_c(G grad_h, const C (&a)[kGates], C squashed) {
    return TO_C;
  }
  template <class G, class C>
  EXTOPS_FUNCTION static C to_old_c(G grad_c, const C (&a)[kGates]) {
    return TO_OLD_C;
  }
};

void apply(
    const extops::LocalDerivatives<Cell, float>& derivatives, float grad_h, float& grad_c, float (&gradients)[2]) {
  extops::apply_local_derivatives(derivatives, grad_h, grad_c, gradients);
}
static_assert(extops::Gradients<Cell>::kByH == 1u << Cell::kA);
"""
RIGHT = {
    "TO_B": "gradients[kB] = (grad_c * Math::tanh(a[kA]) - gradients[kB] * 0 + grad_c / 2) * (1 - a[kB]);",
    "TO_C": "a[kA] > 0 ? grad_h * a[kA] : grad_h * C(0)",
    "TO_OLD_C": "grad_c * a[kB]",
}


def compile_gradients(**parts: str) -> str:
    """The compiler's errors about a cell's gradients; empty if they are right."""
    text = GRADIENTS
    for name, part in {**RIGHT, **parts}.items():
        text = text.replace(name, part)
    return errors_of(text)


def errors_of(text: str) -> str:
    needs_programs("c++")
    command = ["c++", "-std=c++17", "-fsyntax-only", f"-I{extops.cells.include()}", "-xc++", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True).stderr


@pytest.mark.parametrize(
    "right",
    ["", "gradients[kB] = C(0);", "gradients[kB] = grad_c; gradients[kB] *= a[kB] * old_c;"],
)
def test_gradients_that_compile(right: str) -> None:
    assert compile_gradients(**({"TO_B": right} if right else {})) == ""


A_SUM = "to_gates: the gradient of a pre-activation has a part of grad_h and a part of grad_c; "
NOT_LINEAR = "to_gates: the gradient of each pre-activation must be set, to a multiple of grad_h"


@pytest.mark.parametrize(
    ("part", "wrong", "message"),
    [
        ("TO_B", "gradients[kB] = grad_c * a[kB] + grad_h * a[kA];", A_SUM),
        ("TO_B", "gradients[kB] = (gradients[kA] - grad_c) * a[kA];", A_SUM),
        ("TO_B", "gradients[kB] = a[kB] > 0 ? grad_c * a[kB] : grad_h * a[kB];", A_SUM),
        ("TO_B", "if (a[kB] < 0) gradients[kA] = grad_c; gradients[kB] = grad_c;", A_SUM),
        ("TO_B", "gradients[kB] = a[kB];", NOT_LINEAR),
        ("TO_B", "gradients[kB] = grad_c * grad_c;", NOT_LINEAR),
        ("TO_B", "gradients[kB] = a[kB] / gradients[kA];", NOT_LINEAR),
        ("TO_B", "gradients[kB] = Math::tanh(gradients[kA]);", NOT_LINEAR),
        ("TO_B", "", NOT_LINEAR),
        ("TO_C", "squashed", "to_c must return a multiple of grad_h"),
        ("TO_OLD_C", "a[kB]", "to_old_c must return a multiple of grad_c"),
    ],
)
def test_gradients_that_do_not_compile(part: str, wrong: str, message: str) -> None:
    """Kernels for GPUs precompute local derivatives, one for each pre-activation."""
    assert re.search(
        f"static assertion failed.*{re.escape(message)}", compile_gradients(**{part: wrong})
    )


CHANGED = """
#include "bindings/make_schema.h"
#include "cells/lltm.h"

struct Cell : extops::Lltm {
  CHANGE
};
const int first = extops::kFirstRecurrent<Cell>;
const std::string text = describe_cell<Cell>("cell");
"""
NEW_C = """template <class Math, class C>
EXTOPS_FUNCTION static C new_c(const C (&a)[kGates], C old_c) {
  return a[0] * old_c * NUMBER;
}"""


@pytest.mark.parametrize(
    "right",
    ["", "static constexpr int kInput = 1, kRecurrent = 2;", NEW_C.replace("NUMBER", "0.1")],
)
def test_constants_that_compile(right: str) -> None:
    assert errors_of(CHANGED.replace("CHANGE", right)) == ""


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("static constexpr int kRecurrent = 7;", "kRecurrent: expected at least 1, and at most"),
        ("static constexpr int kRecurrent = 0;", "kRecurrent: expected at least 1, and at most"),
        ("static constexpr int kGates = 7, kRecurrent = 7;", "and at most kGates and 6"),
        ("static constexpr int kInput = 4;", "kInput: expected at least 1, and at most kGates"),
        ("static constexpr int kInput = 0;", "kInput: expected at least 1, and at most kGates"),
        ("static constexpr int kInput = 1, kRecurrent = 1;", "expected each of the kGates gates"),
        ("static constexpr int kFirstInput = 3;", "kFirstInput: expected 0 to kInput - 1"),
        (NEW_C.replace("NUMBER", "0.1f"), "a cell's numbers must be double"),
        ("static constexpr int kCellStates = 0;", "kCellStates: expected at least 1"),
        ("static constexpr int kCellStates = 2;", "kSavesNewC to be false where it is more"),
    ],
)
def test_constants_that_do_not_compile(wrong: str, message: str) -> None:
    """Kernels would write beyond their arrays, or compute in fewer digits."""
    errors = errors_of(CHANGED.replace("CHANGE", wrong))
    assert re.search(f"static assertion failed.*{re.escape(message)}", errors)
