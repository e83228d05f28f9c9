"""Processes that begin with torch and its compiler, which take seconds to import, and without extops."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

import torch

_COMPILER = ["torch._dynamo.backends.debugging", "torch._inductor.compile_fx"]

_CONTEXT = multiprocessing.get_context("forkserver")
# Where there is a GPU, the compiler calls the CUDA runtime when it is imported, and CUDA does not survive a fork.
_CONTEXT.set_forkserver_preload(["torch"] if torch.cuda.is_available() else _COMPILER)

Result = TypeVar("Result")


def run_alone(function: Callable[..., Result], *arguments: object) -> Result:
    """Calls a function in a process of its own, and raises what it raises."""
    with ProcessPoolExecutor(1, mp_context=_CONTEXT) as pool:
        return pool.submit(function, *arguments).result()
