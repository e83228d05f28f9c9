"""Chooses what computes the layers of torch's modules: our kernels, or torch's own. Plain functions of sizes and
properties, which need no GPU. Which of our kernels it is on a GPU is chosen in
``csrc/kernels/cuda/sequence/choice.cuh``.

The numbers were fitted to layers drawn at random by ``python -m benchmarks --random``: on two CPUs, with AVX512 and
without, with torch 2.13, and on an NVIDIA H200, with torch 2.11.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from extops.binding import _schemas

OURS, TORCH, CUDNN = "", "torch", "cudnn"
ONE_STEP, ONE_STEP_BY_GEMMS = "one step", "one step by GEMMs"
"""How we compute a single step: by one kernel, or by GEMMs of a library and a kernel. Not in the binding for an older
torch, which has kernels of sequences alone.
"""

_MOST_PADDED = 1.05
"""The most padded rows for each given row: beyond that, ours would need more memory than torch's."""
_FEW_BYTES = 2**24
"""How many padded bytes are allowed nevertheless, if ours are much faster."""
SAVED_PER_UNIT = 8
"""Numbers of a padded row for each unit: gates, cells and outputs of a direction."""

_SMALL = 128
"""The largest state and batch for which cuDNN has a fast kernel of all steps, too; twice the batch for few units."""
_MOST_MULTIPLICATIONS = 3e8
"""Of a step: beyond, cuDNN's GEMMs make a faster forward than blocks, clusters and groups."""


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


class Cpu(NamedTuple):
    """What computes on a CPU."""

    has_onednn: bool
    has_avx512: bool
    """Without it oneDNN does not compute in bfloat16, where torch then takes many times as long as in float32."""
    threads: int = 1


def on_cpu(problem: Problem, cpu: Cpu) -> str:
    """Our kernel first packs the weights, which does not pay for few steps, and has no more threads than samples."""
    if problem.rows * problem.features * problem.state == 0:
        return OURS
    if problem.is_ragged or problem.gates == 1:  # whose step is little more than its GEMM
        return TORCH
    if problem.dtype is torch.float16:
        return OURS
    if problem.dtype is torch.bfloat16 and not cpu.has_avx512:
        return TORCH if problem.time == 1 or problem.rows <= problem.state / 85 else OURS
    if cpu.threads > 1 and _is_bound_by_weights(problem):
        return TORCH
    is_onednns = problem.cell == "lstm" and cpu.has_onednn and problem.dtype is not torch.float64
    is_torchs = _is_onednns(problem, cpu) if is_onednns else _is_few(problem)
    return TORCH if is_torchs else OURS


def _is_bound_by_weights(problem: Problem) -> bool:
    """Whether threads share what takes the time if a library multiplies: each of ours reads all weights at each step,
    for a few samples, and from memory if there are many.
    """
    weights = problem.gates * problem.state**2 * problem.dtype.itemsize
    return not problem.with_gradients and problem.batch <= 16 and weights > 2**23


def _is_onednns(problem: Problem, cpu: Cpu) -> bool:
    """oneDNN's LSTM has fast GEMMs, which matter if there are many rows for a unit, but a slow start."""
    rows_of_unit = problem.rows / problem.state
    if problem.dtype is torch.bfloat16:
        return not problem.with_gradients or problem.time == 1 or rows_of_unit > 2.7
    if problem.with_gradients:
        return rows_of_unit > (1.6 if cpu.has_avx512 else 0.15)
    is_large = problem.state >= 200 and not cpu.has_avx512
    return is_large or problem.time == 1 or problem.rows >= 44 or rows_of_unit > 1.3


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
    is_float32 = problem.dtype is torch.float32
    if problem.is_ragged:
        are_many = problem.steps * problem.directions >= (100 if is_float32 else 50)
        is_ours = are_many and problem.padded_bytes <= _FEW_BYTES and "step" not in kernels
        return OURS if is_ours else CUDNN
    if problem.gates == 1:  # which was not measured, and has no persistent kernel
        return OURS if _has_step(kernels) else CUDNN
    if not is_float32:
        return CUDNN if _is_slow_in_16_bits(problem, kernels) else OURS
    if problem.time == 1:
        is_torchs = _is_slow_step(problem, kernels, allow_tf32)
    elif "step" in kernels:
        is_torchs = not _is_by_steps(problem, kernels, allow_tf32)
    else:
        is_torchs = _is_slow_in_float32(problem, kernels, allow_tf32)
        is_torchs = is_torchs or _are_few_steps(problem, kernels, allow_tf32)
    return CUDNN if is_torchs else OURS


def _has_step(kernels: Sequence[str]) -> bool:
    return kernels[0] in (ONE_STEP, ONE_STEP_BY_GEMMS)


def _is_slow_in_16_bits(problem: Problem, kernels: Sequence[str]) -> bool:
    """Whether cuDNN's layers take less time, the host's or the GPU's. Their weights lie together (see
    ``flatten_parameters``); else the host would take up to a millisecond longer.
    """
    time, state, training = problem.time, problem.state, problem.with_gradients
    are_two, multiply_adds = problem.directions > 1, problem.directions * problem.multiply_adds
    if time == 1:  # which takes the host little, and the kernel of one step is for one layer
        return not training or are_two or not _has_step(kernels)
    if "step" in kernels:  # where a large batch makes its GEMMs long
        return not training or state > 1024 or multiply_adds < 1.05e9 or (are_two and time < 12)
    if "group" in kernels:
        # The groups of two directions share the GPU.
        is_wide = state > 1024 or (training and are_two and state >= 1000)
        if is_wide and (are_two or time < (32 if training else 16)):
            return True
        few = (16 if training else 12) if are_two else (5 if training else 4)
        return multiply_adds > _MOST_MULTIPLICATIONS or time < few
    if are_two and time < (8 if training else 5):
        return True
    if "tensor_cluster" in kernels:  # which take a few samples each
        are_few = time <= 2 or (time <= 6 and multiply_adds > 6e7)
    else:
        are_few = time <= 2 and problem.layers > 1
    return are_few or (not training and multiply_adds > _MOST_MULTIPLICATIONS)


def _is_slow_step(problem: Problem, kernels: Sequence[str], allow_tf32: bool) -> bool:
    """The same of one step in float32."""
    are_two, training = problem.directions > 1, problem.with_gradients
    if ONE_STEP not in kernels:
        # Many samples of a small state take cuDNN long.
        is_quick = problem.batch > 1000 and problem.state <= 200 and _has_step(kernels)
        return not is_quick and (not training or are_two)
    least = 2e8 if allow_tf32 else 1e9
    if problem.state <= 200 or problem.directions * problem.multiply_adds < least:
        return False
    are_many = are_two or problem.layers > 1
    return allow_tf32 and are_many if training else allow_tf32 or are_many


def _is_slow_in_float32(problem: Problem, kernels: Sequence[str], allow_tf32: bool) -> bool:
    """Whether blocks, clusters and groups take the GPU longer, for their steps are too large or too few."""
    time, batch, state = problem.time, problem.batch, problem.state
    training, are_two = problem.with_gradients, problem.directions > 1
    multiply_adds = problem.multiply_adds
    if "group" not in kernels:
        are_few = training and "tensor_cluster" in kernels and time <= 6 and multiply_adds > 1.2e8
        if not training:
            return multiply_adds > _MOST_MULTIPLICATIONS
        # Clusters take turns. The backward of blocks is faster than cuDNN's nevertheless.
        most = _MOST_MULTIPLICATIONS if "float32_cluster" in kernels else 2e9
        return are_few or (kernels[-1].endswith("cluster") and multiply_adds > most)
    if not allow_tf32:
        # The weights of two directions fill all shared memory.
        are_wide = are_two and batch <= 9 and problem.gates * state > 3050
        return not training and (are_wide or batch * problem.directions > 256)
    if training and kernels[-1] != "group":  # a backward of clusters is faster than cuDNN's
        return time < 9 and multiply_adds > 2.6e8
    if are_two:
        is_gru = problem.gates == 3
        is_wide = state >= 1000 and (training or is_gru or time < 20)
        return is_wide or multiply_adds > 1.5e8 or batch > 400 or (training and batch <= 8)
    if training:
        is_small = batch <= 8 and (time < 10 or (batch <= 2 and state >= 768))
        return is_small or multiply_adds > (1.4e8 if time < 8 else 2.6e8)
    # More than three tiles of 64 samples take turns.
    has_turns = batch > 192 and state >= 600
    return has_turns or multiply_adds > (3.5e8 if time >= 20 else 2.6e8)


def _are_few_steps(problem: Problem, kernels: Sequence[str], allow_tf32: bool) -> bool:
    """Whether cuDNN's layers, which take the host less time, end sooner in float32."""
    if problem.state <= _SMALL and problem.batch <= _SMALL * (2 if problem.state <= 64 else 1):
        # Its kernel takes about 1 us for a step, longer only for an LSTM of more units, and ours the host longer.
        most = 250.0 if problem.gates == 3 or problem.state <= 64 else 60.0
        if problem.with_gradients:
            most *= 3 if problem.directions > 1 else 1.3
        return problem.time < most and not problem.is_captured
    # For many samples of a small state cuDNN has no quick kernel at all.
    are_many = problem.batch >= (3000 if problem.with_gradients else 600)
    if are_many and problem.state <= 200 and problem.layers * problem.directions == 1:
        return False
    if problem.directions > 1:
        return problem.time < (12 if problem.batch <= _SMALL else 20)
    is_strict_group = "group" in kernels and not allow_tf32
    return problem.time < (5 if problem.layers > 1 or is_strict_group else 4)


def _is_by_steps(problem: Problem, kernels: Sequence[str], allow_tf32: bool) -> bool:
    """Whether a library GEMM and a kernel launch for each step are no slower than cuDNN's layers in float32."""
    multiply_adds = problem.multiply_adds
    is_large_group = "group" in kernels and multiply_adds > 1e8  # whose backward alone is by steps
    if problem.directions > 1:
        return is_large_group and not allow_tf32 and problem.time >= 14
    if not problem.with_gradients:  # a few rows are little but the reading of weights
        return not allow_tf32 and problem.batch <= 32 and multiply_adds > 1e8
    if is_large_group and problem.time >= 9:
        return True
    return problem.time >= 5 and (1.2e9 if allow_tf32 else 1e8) < multiply_adds < 3.2e10
