"""The implementations of a whole sequence, and torch's own recurrent layers for context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import extops
from benchmarks import tutorial_style
from benchmarks.cell import Cell
from benchmarks.names import GRU, LOOP, LSTM, OURS, TUTORIAL_LOOP
from benchmarks.variant import DEFAULT_STREAM, Makers, Variant
from extops import reference


@dataclass
class Steps:
    """The data of a sequence."""

    steps: int
    cell: Cell

    def __post_init__(self) -> None:
        shape = self.steps, self.cell.batch
        make: Any = {"device": self.cell.device, "dtype": self.cell.dtype}
        self.input = torch.randn(*shape, self.cell.input_features, **make)
        self.grad = torch.randn(*shape, self.cell.state_size, **make)


def sequence_variants(data: Steps, *, context: bool = True) -> Makers:
    """Makers of the variants over a whole sequence, with those that only give context."""
    cell = data.cell
    makers: Makers = {
        LOOP: lambda: loop_variant(data, cell.module(reference.LLTM)),
        TUTORIAL_LOOP: lambda: loop_variant(
            data,
            tutorial_style.LLTM(cell.model.weights, cell.model.bias),
            DEFAULT_STREAM,
        ),
        OURS: lambda: layer_variant(data),
        LSTM: lambda: library_variant(data, torch.nn.LSTM),
        GRU: lambda: library_variant(data, torch.nn.GRU),
    }
    if cell.device == "cpu" or not context:
        del makers[TUTORIAL_LOOP]
    if not context:
        del makers[LOOP]
    return makers


def sequence_variant(
    run: Callable[[], Tensor], parameters: tuple[Tensor, ...], grad: Tensor
) -> Variant:
    """What gives the output of all steps."""
    return Variant(
        {
            "forward": run,
            "forward_backward": lambda: torch.autograd.grad(run(), parameters, grad),
        }
    )


def loop_variant(data: Steps, module: torch.nn.Module, not_captured: str | None = None) -> Variant:
    """A cell in a Python loop."""

    def run() -> Tensor:
        state, outputs = data.cell.state, []
        for x in data.input.unbind(0):
            state = module(x, state)
            outputs.append(state[0])
        return torch.stack(outputs)

    variant = sequence_variant(run, tuple(module.parameters()), data.grad)
    variant.not_captured = not_captured
    return variant


def layer_variant(data: Steps) -> Variant:
    """`extops.lltm_sequence`."""
    weights, bias = data.cell.model.parameters()

    def run() -> Tensor:
        return extops.lltm_sequence(data.input, data.cell.state, weights, bias)[0]

    return sequence_variant(run, (weights, bias), data.grad)


def library_variant(data: Steps, kind: type[torch.nn.LSTM] | type[torch.nn.GRU]) -> Variant:
    """torch's own layers: by cuDNN on a GPU; GRU has as many gates as LLTM, LSTM one more."""
    cell = data.cell
    module = kind(cell.input_features, cell.state_size, device=cell.device, dtype=cell.dtype)
    h, c = (each.unsqueeze(0) for each in cell.state)
    state: Any = (h, c) if kind is torch.nn.LSTM else h

    def run() -> Tensor:
        output: Tensor = module(data.input, state)[0]
        return output

    return sequence_variant(run, tuple(module.parameters()), data.grad)
