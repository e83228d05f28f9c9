"""The implementations of a whole sequence, and torch's own recurrent layers for context."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import extops
from benchmarks import tutorial_style
from benchmarks.cell import Cell
from benchmarks.names import GRU, LOOP, LSTM, ONE_DIRECTION, OURS, TUTORIAL_LOOP
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
        # Uniform from one step to all.
        self.lengths = torch.randint(1, self.steps + 1, (self.cell.batch,))

    def packed(self) -> PackedSequence:
        """The input as torch's layers take sequences of several lengths."""
        return pack_padded_sequence(self.input, self.lengths, enforce_sorted=False)


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


def layer_variants(data: Steps, kind: type[torch.nn.LSTM] | type[torch.nn.GRU]) -> Makers:
    """torch's layer, and ours of its name."""
    ours: type[torch.nn.LSTM] | type[torch.nn.GRU] = getattr(extops, kind.__name__)
    return {
        OURS: lambda: library_variant(data, ours),
        f"nn.{kind.__name__}": lambda: library_variant(data, kind),
    }


def ragged_variants(data: Steps) -> Makers:
    """Those of sequences of several lengths: ours by `lengths`."""
    weights, bias = data.cell.model.parameters()
    lengths = data.lengths.to(data.cell.device)

    def run() -> Tensor:
        return extops.lltm_sequence(data.input, data.cell.state, weights, bias, lengths=lengths)[0]

    return {
        **packed_variants(data),
        OURS: lambda: sequence_variant(run, (weights, bias), data.grad),
    }


def packed_variants(data: Steps) -> Makers:
    """Those of a `PackedSequence`, by modules."""
    kinds = {OURS: extops.LLTMLayer, LSTM: torch.nn.LSTM, GRU: torch.nn.GRU}
    return {name: functools.partial(packed_variant, data, kind) for name, kind in kinds.items()}


def packed_variant(data: Steps, kind: Callable[..., torch.nn.Module]) -> Variant:
    """A layer on a `PackedSequence`."""
    packed = data.packed()
    module = layer(data, kind)
    return module_variant(module, lambda: module(packed)[0].data)


def bidirectional_variants(data: Steps) -> Makers:
    """Ours in both directions, and in one."""
    directions = {OURS: True, ONE_DIRECTION: False}
    return {
        name: functools.partial(directed_variant, data, both) for name, both in directions.items()
    }


def directed_variant(data: Steps, bidirectional: bool) -> Variant:
    """`extops.LLTMLayer` in one direction or in both."""
    module = layer(data, extops.LLTMLayer, bidirectional=bidirectional)
    return module_variant(module, lambda: module(data.input)[0])


def layer(data: Steps, kind: Callable[..., torch.nn.Module], **options: bool) -> torch.nn.Module:
    """A recurrent layer of the sizes of the cell."""
    cell = data.cell
    return kind(
        cell.input_features, cell.state_size, device=cell.device, dtype=cell.dtype, **options
    )


def module_variant(module: torch.nn.Module, run: Callable[[], Tensor]) -> Variant:
    """What gives the output of a layer, of whatever shape."""
    return sequence_variant(run, tuple(module.parameters()), torch.randn_like(run()))


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
    """torch's own layers, by cuDNN on a GPU, or ours; a GRU has as many gates as an LLTM, an LSTM one more."""
    cell = data.cell
    module = layer(data, kind)
    h, c = (each.unsqueeze(0) for each in cell.state)
    state: Any = (h, c) if kind.__name__ == LSTM.removeprefix("nn.") else h

    def run() -> Tensor:
        output: Tensor = module(data.input, state)[0]
        return output

    return sequence_variant(run, tuple(module.parameters()), data.grad)
