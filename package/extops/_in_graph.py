"""A layer of torch as one operator in a graph: Dynamo refuses torch's own, whose every step Inductor would compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_FUNCTIONS: dict[str, Any] = {
    "LSTM": torch._VF.lstm,
    "GRU": torch._VF.gru,
    "RNN_TANH": torch._VF.rnn_tanh,
    "RNN_RELU": torch._VF.rnn_relu,
}
_library = torch.library.Library("extops_torch", "DEF")
_library.define(
    "layer(Tensor input, Tensor[] states, Tensor[] weights, str mode, bool bias, int num_layers, "
    "bool bidirectional) -> Tensor[]"
)


def _compute(
    input: Tensor,
    states: list[Tensor],
    weights: list[Tensor],
    mode: str,
    bias: bool,
    num_layers: int,
    bidirectional: bool,
) -> list[Tensor]:
    """By steps, without dropout."""
    hx: Any = states if mode == "LSTM" else states[0]
    of_layers = bias, num_layers, 0.0, False, bidirectional, False
    return [x.contiguous() for x in _FUNCTIONS[mode](input, hx, weights, *of_layers)]


def _shapes(
    input: Tensor,
    states: list[Tensor],
    weights: list[Tensor],
    mode: str,
    bias: bool,
    num_layers: int,
    bidirectional: bool,
) -> list[Tensor]:
    steps, batch, _ = input.shape
    width = states[0].shape[2] * (1 + bidirectional)
    return [input.new_empty(steps, batch, width), *(x.new_empty(x.shape) for x in states)]


_library.impl("layer", _compute, "CompositeExplicitAutograd")
torch.library.register_fake("extops_torch::layer", _shapes, lib=_library)


def is_torchs(module: Any, input: Any, hx: Any) -> bool:
    """Whether the operator is to compute such a call of a layer: Dynamo asks what is measured. Elsewhere it is not."""
    return False


def by_torchs(module: Any, input: Tensor, hx: Any, weights: list[Tensor]) -> tuple[Tensor, Any]:
    """The call, with the parameters in torch's order."""
    steps = (input.transpose(0, 1) if module.batch_first else input).contiguous()
    number = module._number_of_states
    given = (hx,) if number == 1 else hx
    if hx is None:
        given = (steps.new_zeros(module._shape_of_states(steps.shape[1])),) * number
    of_layers = module.mode, module.bias, module.num_layers, module.bidirectional
    output, *last = torch.ops.extops_torch.layer.default(steps, list(given), weights, *of_layers)
    output = output.transpose(0, 1) if module.batch_first else output
    return output, tuple(last) if number > 1 else last[0]
