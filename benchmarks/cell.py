"""The implementations of one step of the LLTM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

import extops
from benchmarks import aten, tutorial_style
from benchmarks.names import (
    ADDMM,
    ATEN,
    DYNAMIC,
    EAGER,
    LINEAR,
    LSTM_CELL,
    MAX_AUTOTUNE,
    MM,
    OURS,
    REDUCE_OVERHEAD,
    STATIC,
    TRIVIAL,
    TUTORIAL,
)
from benchmarks.protocol import Call
from benchmarks.variant import DEFAULT_STREAM, Makers, Step, Variant
from extops import reference

COMPILER: dict[str, dict[str, Any]] = {
    STATIC: {"dynamic": False},
    DYNAMIC: {"dynamic": True},
    MAX_AUTOTUNE: {"dynamic": False, "mode": "max-autotune-no-cudagraphs"},
    REDUCE_OVERHEAD: {"dynamic": False, "mode": "reduce-overhead"},
}
"""What torch.compile is given; no two may be equal, since equal ones share what they compile."""

PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    MM: lambda bias, a, b: a.mm(b),
    ADDMM: torch.addmm,
    LINEAR: lambda bias, a, b: torch.nn.functional.linear(a, b.t(), bias),
}
"""The forms of a product of two matrices, which libraries are asked for in different ways; `mm` has no bias."""


@dataclass
class Cell:
    """The data of one step."""

    batch: int
    input_features: int
    state_size: int
    device: str
    dtype: torch.dtype
    model: reference.LLTM = field(init=False)
    input: Tensor = field(init=False)
    state: tuple[Tensor, Tensor] = field(init=False)
    grads: tuple[Tensor, Tensor] = field(init=False)
    grad_gates: Tensor = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        make: Any = {"device": self.device, "dtype": self.dtype}
        self.model = reference.LLTM(self.input_features, self.state_size, **make)
        self.input = torch.randn(self.batch, self.input_features, **make)
        h, c, grad_h, grad_c = torch.randn(4, self.batch, self.state_size, **make).unbind(0)
        self.state, self.grads = (h, c), (grad_h, grad_c)
        self.grad_gates = torch.randn(self.batch, 3 * self.state_size, **make)

    def module(self, kind: type[reference.LLTM]) -> reference.LLTM:
        """A module of that kind on the shared parameters."""
        module = kind(self.input_features, self.state_size, device=self.device, dtype=self.dtype)
        module.weights, module.bias = self.model.weights, self.model.bias
        return module

    def expected(self) -> list[Tensor]:
        """The results in float64, from the inputs as rounded: states, then the parameters' gradients."""
        weights, bias, *others = (
            x.detach().double() for x in (*self.model.parameters(), self.input, *self.state)
        )
        parameters = weights.requires_grad_(), bias.requires_grad_()
        outputs = reference.lltm(others[0], *parameters, others[1], others[2])
        grads = [grad.double() for grad in self.grads]
        return [*outputs, *torch.autograd.grad(outputs, parameters, grads)]


def cell_variants(cell: Cell, *, compiled: Sequence[str] = (), context: bool = True) -> Makers:
    """Makers of the variants by name, with these modes of torch.compile, and with those that only give context."""
    modules: dict[str, Callable[[], torch.nn.Module]] = {
        EAGER: lambda: cell.module(reference.LLTM),
        ATEN: lambda: cell.module(aten.LLTM),
        TUTORIAL: lambda: tutorial_style.LLTM(cell.model.weights, cell.model.bias),
        OURS: lambda: cell.module(extops.LLTM),
    }
    if cell.device == "cpu" or not context:
        del modules[TUTORIAL]
    makers: Makers = {
        name: partial(module_variant, name, make, cell) for name, make in modules.items()
    }
    makers |= {name: partial(compiled_variant, name, cell) for name in compiled}
    makers |= {name: partial(product_variant, name, cell) for name in PRODUCTS}
    if context:
        makers[LSTM_CELL] = partial(lstm_cell_variant, cell)
    if context and cell.device == "cuda":
        makers[TRIVIAL] = trivial_variant
    return makers


def differentiable(
    step: Step, parameters: tuple[Tensor, ...], grads: tuple[Tensor, ...], leaves: Any = None
) -> dict[str, Call]:
    """The calls of a cell: `leaves` is the step on inputs that want gradients, with those inputs."""

    def forward_backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(step(), parameters, grads)

    calls: dict[str, Call] = {"forward": step, "forward_backward": forward_backward}
    if leaves is not None:
        step_all, inputs = leaves
        wanted = (*parameters, *inputs)
        calls["forward_backward_all"] = lambda: torch.autograd.grad(step_all(), wanted, grads)
    return calls


def module_variant(name: str, make: Callable[[], torch.nn.Module], cell: Cell) -> Variant:
    """A module called as `rnn(x, (h, c))`."""
    module = make()
    parameters = tuple(module.parameters())
    x, h, c = (each.clone().requires_grad_() for each in (cell.input, *cell.state))

    def step() -> tuple[Tensor, Tensor]:
        outputs: tuple[Tensor, Tensor] = module(cell.input, cell.state)
        return outputs

    def step_all() -> tuple[Tensor, Tensor]:
        outputs: tuple[Tensor, Tensor] = module(x, (h, c))
        return outputs

    return Variant(
        differentiable(step, parameters, cell.grads, (step_all, (x, h, c))),
        check=lambda: checked(step, parameters, cell.grads),
        step=step,
        parameters=parameters,
        not_captured=DEFAULT_STREAM if name == TUTORIAL else None,
    )


def checked(step: Step, parameters: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> list[Tensor]:
    """What `Cell.expected` gives, by this implementation."""
    outputs = step()
    gradients = torch.autograd.grad(outputs, parameters, grads)
    return [x.detach().clone() for x in (*outputs, *gradients)]


def compiled_variant(name: str, cell: Cell) -> Variant:
    """The eager module through torch.compile."""
    module = torch.compile(cell.module(reference.LLTM), fullgraph=True, **COMPILER[name])
    parameters = tuple(cell.model.parameters())
    reduce_overhead = name == REDUCE_OVERHEAD

    def step() -> tuple[Tensor, Tensor]:
        if reduce_overhead:
            torch.compiler.cudagraph_mark_step_begin()
        outputs: tuple[Tensor, Tensor] = module(cell.input, cell.state)
        return outputs

    return Variant(
        differentiable(step, parameters, cell.grads),
        check=lambda: checked(step, parameters, cell.grads),
        step=step,
        parameters=parameters,
        not_captured="replays a CUDA graph of its own" if reduce_overhead else None,
    )


def product_variant(name: str, cell: Cell) -> Variant:
    """Only the matrix products, by torch: of a concatenated input, and of a given gradient of the gates."""
    product = PRODUCTS[name]
    weights, bias = (parameter.detach() for parameter in cell.model.parameters())
    joined = torch.cat([cell.state[0], cell.input], dim=1)
    zeros = torch.zeros_like(joined[0])
    return Variant(
        {
            "forward": lambda: product(bias, joined, weights.t()),
            "grad_weights": lambda: product(zeros, cell.grad_gates.t(), joined),
            "grad_input": lambda: product(zeros, cell.grad_gates, weights),
        }
    )


def lstm_cell_variant(cell: Cell) -> Variant:
    """torch's own cell, for context: a fourth gate, so a third more arithmetic."""
    make = partial(
        torch.nn.LSTMCell,
        *(cell.input_features, cell.state_size),
        device=cell.device,
        dtype=cell.dtype,
    )
    variant = module_variant(LSTM_CELL, make, cell)
    variant.check = None
    return variant


def trivial_variant() -> Variant:
    """The least that a kernel can do."""
    number = torch.zeros(1, device="cuda")
    return Variant({"forward": lambda: number.add_(1)})
