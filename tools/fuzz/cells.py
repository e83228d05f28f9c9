"""The cells that are drawn: in extops, in torch, and in plain PyTorch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import extops
from extops.ops import compositions
from extops_build import ROOT
from tools.fuzz.cases import Case

Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Shapes = dict[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A cell."""

    plain: compositions.Cell
    """In plain PyTorch, which the kernels are compared with."""
    shapes: Callable[[int, int], Shapes]
    """Those of the parameters, by the number of features and of units."""
    function: Callable[[], Callable[..., Any]]
    """Gives extops' function over a sequence."""
    states: tuple[str, ...] = ("h", "c")
    layer: type[torch.nn.Module] | None = None
    cell: type[torch.nn.Module] | None = None
    torchs_layer: type[torch.nn.Module] | None = None
    torchs_cell: type[torch.nn.Module] | None = None
    source: str = ""
    """C++ that defines `Own`, a cell of one's own."""

    def module(self, case: Case, torchs: bool = False) -> torch.nn.Module | None:
        """A module whose parameters have no memory; torch's, if there is such a one."""
        kind: Any = None
        arguments: tuple[Any, ...] = () if case.cell == "lltm" else (case.bias,)
        options: dict[str, Any] = {"device": "meta"}
        if case.call == "cell":
            kind = self.torchs_cell if torchs else self.cell
        elif case.call == "layer":
            kind = self.torchs_layer if torchs else self.layer
            arguments = (case.layers,)
            options |= {"bias": case.bias, "batch_first": case.batch_first}
            options |= {"bidirectional": case.bidirectional}
        if kind is None:
            return None
        module: torch.nn.Module = kind(case.features, case.units, *arguments, **options)
        return module


def _lltm_shapes(features: int, units: int) -> Shapes:
    return {"weights": (3 * units, units + features), "bias": (3 * units,)}


def _kind(
    count: int,
    step: Step,
    input: int,
    recurrent: int,
    first_input: int = 0,
    **options: Any,
) -> Kind:
    def shapes(features: int, units: int) -> Shapes:
        return {
            "weight_ih": (input * units, features),
            "weight_hh": (recurrent * units, units),
            "bias_ih": (input * units,),
            "bias_hh": (recurrent * units,),
        }

    gates = functools.partial(compositions.gates_of_parts, count=count, first_input=first_input)
    return Kind(compositions.Cell(gates, step, saves_new_c=False), shapes, **options)


@functools.cache
def own(name: str) -> Callable[..., Any]:
    """A cell of one's own. To compile it takes most of a minute; what has been compiled is taken again."""
    folder = ROOT / "build" / "fuzz"
    folder.mkdir(parents=True, exist_ok=True)
    sources = []
    for suffix, header, macro in (
        (".cpp", "extops_cell.h", "EXTOPS_CELL"),
        (".cu", "extops_cell.cuh", "EXTOPS_CELL_KERNELS"),
    ):
        text = f'{KINDS[name].source}\n\n#include "{header}"\n\n{macro}({name}, Own)\n'
        file = folder / (name + suffix)
        if not file.exists() or file.read_text() != text:
            file.write_text(text)
        sources.append(file)
    return extops.load_cell(name, sources, KINDS[name].plain.forward)


KINDS = {
    "lstm": _kind(
        4, compositions.lstm_cell, input=4, recurrent=4,
        function=lambda: extops.lstm_sequence,
        layer=extops.LSTM, cell=extops.LSTMCell, torchs_layer=torch.nn.LSTM, torchs_cell=torch.nn.LSTMCell,
    ),
    "gru": _kind(
        4, compositions.gru_cell, input=3, recurrent=3, first_input=1, states=("h",),
        function=lambda: extops.gru_sequence,
        layer=extops.GRU, cell=extops.GRUCell, torchs_layer=torch.nn.GRU, torchs_cell=torch.nn.GRUCell,
    ),
    "rnn": _kind(
        1, compositions.rnn_tanh_cell, input=1, recurrent=1, states=("h",),
        function=lambda: extops.rnn_sequence,
        layer=extops.RNN, cell=extops.RNNCell, torchs_layer=torch.nn.RNN, torchs_cell=torch.nn.RNNCell,
    ),
    "lltm": Kind(
        compositions.Cell(compositions.lltm_gates, compositions.lltm_cell, saves_new_c=False), _lltm_shapes,
        function=lambda: extops.lltm_sequence, layer=extops.LLTMLayer, cell=extops.LLTM,
    ),
    # Cells of one's own: those of the package again, one with the input's weights in another order.
    "own_gru": _kind(
        4, compositions.gru_cell, input=3, recurrent=3, first_input=1, states=("h",),
        function=lambda: own("own_gru"), source='#include "cells/gru.h"\nstruct Own : extops::Gru {};',
    ),
    "own_lstm": _kind(
        4, compositions.lstm_cell, input=4, recurrent=4, first_input=2, function=lambda: own("own_lstm"),
        source='#include "cells/lstm.h"\nstruct Own : extops::Lstm { static constexpr int kFirstInput = kG; };',
    ),
    "own_lltm": _kind(
        3, compositions.lltm_cell, input=3, recurrent=3,
        function=lambda: own("own_lltm"), source='#include "cells/lltm.h"\nstruct Own : extops::Lltm {};',
    ),
}  # fmt: skip
