"""Who computes the layers of an LSTM or a GRU: our kernels, or torch's own. Plain functions of sizes and properties,
which need no GPU. Which of our kernels it is on a GPU is chosen in ``csrc/kernels/cuda/sequence_choice.cuh``.

The numbers were fitted to layers drawn at random by ``python -m benchmarks --random``: on a CPU of one thread, with
torch 2.13, and on an NVIDIA H200, with torch 2.11.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

OURS, TORCH, CUDNN = "", "torch", "cudnn"

_MOST_PADDED = 1.05
"""How many rows may be padded for one that is given: beyond, ours would take more memory than torch's."""
_FEW_BYTES = 2**24
"""What may be padded nevertheless, where ours are much faster."""
_STEPS_OF_TORCHS = 16
"""As many steps of ours, a product and a kernel each, take the host no longer than cuDNN's layers take to begin."""
_MULTIPLICATIONS = {torch.float32: 1e8, torch.bfloat16: 1e9, torch.float16: 1e9}
"""Of a step that keeps a GPU busy for longer than the host takes to start it; in TF32 as many as in 16 bits."""

_MOST_IN_GROUPS = 3e8
"""Multiplications of a step beyond which groups of blocks are slower in TF32."""


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
    def gates(self) -> int:
        """Rows of weights for each unit."""
        return 4 if self.cell == "lstm" else 3

    @property
    def steps(self) -> int:
        """Those that come one after the other."""
        return self.time * self.layers

    @property
    def products(self) -> int:
        """Multiplications of a step by the recurrent weights."""
        return self.batch * self.gates * self.state**2

    @property
    def padded_bytes(self) -> int:
        """About what a forward and a backward keep of rows that are only padded."""
        width = self.features + self.layers * self.directions * self.state * (self.gates + 3)
        return (self.time * self.batch - self.rows) * width * self.dtype.itemsize

    @property
    def is_ragged(self) -> bool:
        """Whether to pad it, as our kernels ask for, would cost memory."""
        return self.time * self.batch > _MOST_PADDED * self.rows


def on_cpu(problem: Problem, has_onednn: bool) -> str:
    """Ours packs the weights first, which few steps do not make up for, and has no more threads than samples."""
    if problem.rows * problem.features * problem.state == 0:
        return OURS
    if problem.is_ragged:
        return TORCH
    if problem.dtype is torch.float16:
        return OURS
    is_onednns = problem.cell == "lstm" and has_onednn and problem.dtype is not torch.float64
    is_torchs = _is_onednns(problem) if is_onednns else _is_few(problem)
    return TORCH if is_torchs else OURS


def _is_onednns(problem: Problem) -> bool:
    """oneDNN's LSTM has fast products, which count where there are many rows for a unit; but a slow start."""
    rows_of_unit = problem.rows / problem.state
    if problem.dtype is torch.bfloat16:
        return not problem.with_gradients or problem.time == 1 or rows_of_unit > 2.7
    if problem.with_gradients:
        return rows_of_unit > 1.6
    return problem.time == 1 or problem.rows >= 44 or rows_of_unit > 1.3


def _is_few(problem: Problem) -> bool:
    """Where torch's composition of products is faster, which has several kernels a step."""
    time, state = problem.time, problem.state
    if problem.dtype is torch.bfloat16:
        if problem.with_gradients:
            return time <= max(1, state / 85)
        return time == 1 or state >= 128 or problem.rows > 50 * state
    if problem.with_gradients:
        return time <= max(3, state / 85)
    has_large_products = problem.cell == "gru" and problem.rows > 30 * state
    return time <= max(12 if has_large_products else 1, state / 22)


def on_gpu(problem: Problem, kernels: Sequence[str], allow_tf32: bool) -> str:
    """``kernels`` are those of ours, for the passes that are wanted."""
    # Of one step and of few, cuDNN's layers take the host less in float32, and more in 16 bits.
    is_quick = problem.dtype is torch.float32 and not problem.with_gradients
    if problem.is_ragged:
        are_many = problem.steps * problem.directions >= (
            100 if problem.dtype is torch.float32 else 50
        )
        is_ours = are_many and problem.padded_bytes <= _FEW_BYTES and "step" not in kernels
        return OURS if is_ours else CUDNN
    if problem.time == 1:
        return CUDNN if is_quick else OURS
    if "step" in kernels:
        return OURS if _is_by_steps(problem, allow_tf32) else CUDNN
    if "group" in kernels and allow_tf32 and is_quick and problem.products > _MOST_IN_GROUPS:
        return CUDNN
    if is_quick and problem.steps <= (100 if problem.directions > 1 else 32):
        return CUDNN
    return OURS


def _is_by_steps(problem: Problem, allow_tf32: bool) -> bool:
    """Whether products of a library and a kernel for each step are no slower than cuDNN's layers."""
    if problem.dtype not in _MULTIPLICATIONS:
        return True
    if problem.directions > 1:
        return False
    dtype = torch.bfloat16 if allow_tf32 else problem.dtype
    return problem.steps <= _STEPS_OF_TORCHS or problem.products > _MULTIPLICATIONS[dtype]
