"""Who computes the layers of torch's modules: our kernels, or torch's own. Plain functions of sizes and properties,
which need no GPU. Which of our kernels it is on a GPU is chosen in ``csrc/kernels/cuda/sequence/choice.cuh``.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

OURS, TORCH, CUDNN = "", "torch", "cudnn"

_MOST_PADDED = 1.05
"""How many rows may be padded for one that is given: beyond, ours would take more memory than torch's."""


class Problem(NamedTuple):
    """One call of some layers."""

    cell: str
    dtype: torch.dtype
    time: int
    batch: int
    rows: int
    """Of packed input, which has fewer than ``time * batch``."""
    features: int
    state: int
    layers: int
    directions: int
    with_gradients: bool

    @property
    def is_ragged(self) -> bool:
        """Whether padding it, as our kernels ask for, would cost memory."""
        return self.time * self.batch > _MOST_PADDED * self.rows


def on_cpu(problem: Problem, has_onednn: bool) -> str:
    """Ours packs the weights first, which few steps do not make up for, and has no more threads than samples."""
    if problem.rows * problem.features * problem.state == 0:
        return OURS
    if problem.is_ragged or problem.cell.startswith("rnn_"):  # a step is little but its product
        return TORCH
    if problem.with_gradients or problem.dtype is not torch.float32:
        return OURS
    time, batch, state = problem.time, problem.batch, problem.state
    if problem.cell == "lstm" and has_onednn:
        return TORCH if time == 1 or state >= 256 else OURS
    few = max(1, min(state // 64, 16 if batch == 1 else 4))
    return TORCH if time <= few else OURS


def on_gpu(problem: Problem, kernels: Sequence[str]) -> str:
    """``kernels`` are those of ours, for the passes that are wanted."""
    if problem.is_ragged or "step" in kernels:
        return CUDNN
    return OURS
