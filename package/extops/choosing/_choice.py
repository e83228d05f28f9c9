"""Chooses what computes the layers of torch's modules: our kernels, or torch's own. Plain functions of sizes and
properties, which need no GPU. Which of our kernels it is on a GPU is chosen in
``csrc/kernels/cuda/sequence/choice.cuh``.

The numbers were fitted to layers drawn at random by ``python -m benchmarks --random``: on a CPU of one thread, with
torch 2.13, and on an NVIDIA H200, with torch 2.11.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from extops.binding import _schemas

OURS, TORCH, CUDNN = "", "torch", "cudnn"

_MOST_PADDED = 1.05
"""The most padded rows for each given row: beyond that, ours would need more memory than torch's."""
_FEW_BYTES = 2**24
"""How many padded bytes are allowed nevertheless, if ours are much faster."""
SAVED_PER_UNIT = 8
"""Numbers of a padded row for each unit: gates, cells and outputs of a direction."""

_SMALL = 128
"""The largest state and batch for which cuDNN has a fast kernel of all steps, too."""
_FEW_STEPS = 16
"""The most steps that are few where each is a library GEMM and a kernel launch."""
_MOST_MULTIPLICATIONS = 3e8
"""Of a step: beyond, cuDNN's GEMMs make a faster forward than blocks and clusters."""


class Problem(NamedTuple):
    """One call of some layers."""

    cell: str
    dtype: torch.dtype
    time: int
    batch: int
    rows: int
    """Rows of a packed input: fewer than ``time * batch``."""
    features: int
    state: int
    layers: int
    directions: int
    with_gradients: bool
    is_captured: bool = False
    """In a CUDA graph, where the host's time does not count."""

    @property
    def gates(self) -> int:
        """Rows of weights for each unit."""
        return _schemas.CELLS[self.cell].recurrent

    @property
    def steps(self) -> int:
        """Steps that are computed one after the other."""
        return self.time * self.layers

    @property
    def multiply_adds(self) -> int:
        """Multiplications of a step by the recurrent weights."""
        return self.batch * self.gates * self.state**2

    @property
    def padded_bytes(self) -> int:
        """Roughly what forward and backward save for padded rows."""
        saved = max(SAVED_PER_UNIT, self.layers * self.directions * (self.gates + 3))
        width = self.features + self.state * saved
        return (self.time * self.batch - self.rows) * width * self.dtype.itemsize

    @property
    def is_ragged(self) -> bool:
        """Whether padding it, which our kernels require, would cost memory."""
        return self.time * self.batch > _MOST_PADDED * self.rows


def on_cpu(problem: Problem, has_onednn: bool) -> str:
    """Our kernel first packs the weights, which does not pay for few steps, and has no more threads than samples."""
    if problem.rows * problem.features * problem.state == 0:
        return OURS
    if problem.is_ragged or problem.gates == 1:  # whose step is little more than its GEMM
        return TORCH
    if problem.dtype is torch.float16:
        return OURS
    is_onednns = problem.cell == "lstm" and has_onednn and problem.dtype is not torch.float64
    is_torchs = _is_onednns(problem) if is_onednns else _is_few(problem)
    return TORCH if is_torchs else OURS


def _is_onednns(problem: Problem) -> bool:
    """oneDNN's LSTM has fast GEMMs, which matter if there are many rows for a unit, but a slow start."""
    rows_of_unit = problem.rows / problem.state
    if problem.dtype is torch.bfloat16:
        return not problem.with_gradients or problem.time == 1 or rows_of_unit > 2.7
    if problem.with_gradients:
        return rows_of_unit > 1.6
    return problem.time == 1 or problem.rows >= 44 or rows_of_unit > 1.3


def _is_few(problem: Problem) -> bool:
    """Where torch's composition is faster, which runs several kernels for each step."""
    time, state = problem.time, problem.state
    if problem.dtype is torch.bfloat16:
        if problem.with_gradients:
            return time <= max(1, state / 85)
        return time == 1 or state >= 128 or problem.rows > 50 * state
    if problem.with_gradients:
        return time <= max(3, state / 85)
    has_large_gemms = problem.cell == "gru" and problem.rows > 30 * state
    return time <= max(12 if has_large_gemms else 1, state / 22)


def on_gpu(problem: Problem, kernels: Sequence[str], allow_tf32: bool) -> str:
    """``kernels`` are ours, for each pass that is needed."""
    # For one step or few, cuDNN's layers need less host time in float32, and more in 16 bits.
    is_float32 = problem.dtype is torch.float32
    if problem.is_ragged:
        are_many = problem.steps * problem.directions >= (100 if is_float32 else 50)
        is_ours = are_many and problem.padded_bytes <= _FEW_BYTES and "step" not in kernels
        return OURS if is_ours else CUDNN
    if problem.time == 1:  # where the binding for an older torch has no kernel of one step
        is_quick = not problem.with_gradients or problem.directions > 1
        return CUDNN if is_float32 and is_quick else OURS
    if problem.gates == 1:  # which was not measured, and has no persistent kernel
        return CUDNN
    if "step" in kernels:
        return OURS if _is_by_steps(problem, allow_tf32) else CUDNN
    if "group" in kernels:
        is_torchs = _is_slow_in_groups(problem, allow_tf32)
    else:
        is_large = not problem.with_gradients and problem.multiply_adds > _MOST_MULTIPLICATIONS
        is_torchs = is_large or _are_few_for_clusters(problem, kernels)
    if is_float32 and not is_torchs:
        is_torchs = _are_few_steps(problem, kernels, allow_tf32)
    return CUDNN if is_torchs else OURS


def _is_slow_in_groups(problem: Problem, allow_tf32: bool) -> bool:
    """Whether groups of blocks take the GPU longer: their steps are too large, or too few of two directions."""
    if problem.dtype is torch.float32:
        return allow_tf32 and problem.multiply_adds > 2.6e8
    is_large = problem.multiply_adds > (4e8 if problem.with_gradients else 6e8)
    return is_large or (problem.directions > 1 and problem.time <= 2)


def _are_few_for_clusters(problem: Problem, kernels: Sequence[str]) -> bool:
    """Whether the backward of clusters, which take a few samples each, has too many samples for its few steps."""
    is_clusters = problem.with_gradients and "tensor_cluster" in kernels
    return is_clusters and problem.time <= 6 and problem.multiply_adds > 1.2e8


def _are_few_steps(problem: Problem, kernels: Sequence[str], allow_tf32: bool) -> bool:
    """Whether cuDNN's layers, which take the host less time, end sooner in float32."""
    if max(problem.state, problem.batch) <= _SMALL:
        # Its kernel takes about 1 us for a step, longer only for an LSTM of more units, and ours the host longer.
        most = 250.0 if problem.gates == 3 or problem.state <= 64 else 60.0
        if problem.with_gradients:
            most *= 3 if problem.directions > 1 else 1.3
        return problem.time < most and not problem.is_captured
    if problem.directions > 1:
        return problem.time < (12 if problem.batch <= _SMALL else 20)
    is_strict_group = "group" in kernels and not allow_tf32
    return problem.time < (5 if problem.layers > 1 or is_strict_group else 4)


def _is_by_steps(problem: Problem, allow_tf32: bool) -> bool:
    """Whether a library GEMM and a kernel launch for each step are no slower than cuDNN's layers."""
    if problem.dtype is torch.float64:
        return True
    if problem.directions > 1:
        return False
    multiply_adds = problem.multiply_adds
    if problem.dtype is not torch.float32:
        are_few = problem.steps <= _FEW_STEPS
        if not problem.with_gradients:
            return are_few and multiply_adds < 5e9
        return (are_few or multiply_adds > 1e9) and multiply_adds < 5e10
    if not problem.with_gradients:  # a few rows are little but the reading of weights
        return not allow_tf32 and problem.batch <= 32 and multiply_adds > 1e8
    return problem.time >= 3 and (1.2e9 if allow_tf32 else 1e8) < multiply_adds < 3.2e10
