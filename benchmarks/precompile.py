"""Fills torch.compile's caches before anything is measured, on all cores at once.

Autotuning compiles dozens of kernels for each size: one size after the other, that takes longer than all measuring.
The processes share the GPU meanwhile, but the autotuner judges a kernel by the fastest of its runs, which stays.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import torch

from benchmarks.cases import Case
from benchmarks.names import COMPILE, PEERS
from benchmarks.runner import set_mode


def fill_caches(cases: Sequence[Case]) -> float:
    """Compiles each case's peers in a process of its own, and says how long that took."""
    start = time.perf_counter()
    context = multiprocessing.get_context("spawn")  # a process with a GPU cannot be forked
    with ProcessPoolExecutor(os.cpu_count(), context) as pool:
        list(pool.map(compile_case, cases))
    return time.perf_counter() - start


def compile_case(case: Case) -> None:
    """What runs in such a process."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # the processes are parallel already
    torch._dynamo.reset()  # it compiles a function for a handful of sizes and no more
    set_mode(case.mode)
    makers, _ = case.makers()
    for name in PEERS[COMPILE]:
        with contextlib.suppress(
            Exception
        ):  # what fails here fails again in its case, and is noted there
            makers[name]().calls["forward_backward"]()
