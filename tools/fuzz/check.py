"""Whether extops computes a case right: beside float64, eager PyTorch, torch's module, and itself."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_char_p

import torch
from torch import Tensor

import extops
from extops.binding._libraries import library
from extops.ops import sequence
from tools.fuzz.beside import beside
from tools.fuzz.cases import OWN_CELLS, Answer, Case
from tools.fuzz.problem import Problem, Run, Tensors, narrowest

# How far a number may be off where eager is right by luck, in units in the last place of the largest one. In float64
# the exact numbers have errors of their own.
ULPS = {torch.float64: 4096, torch.float32: 64, torch.bfloat16: 4, torch.float16: 4}


def check(case: Case, device: str) -> Answer:
    """Computes a case in every way, and compares."""
    with _precision(case), _chunks(case), _cores(1), _choices(case):
        problem = Problem(case, device)
        with _kernel(problem) as kernels:
            try:
                for kind, found in _complaints(problem, kernels):
                    if found:
                        return Answer(kind, "; ".join(found[:5]), kernels)
            finally:
                if case.compile:
                    torch._dynamo.reset()
    return Answer(kernels=kernels)


def _complaints(problem: Problem, kernels: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
    may_be_torchs = problem.case.accelerated == "measured"
    torchs = _torchs(problem.with_contiguous_leaves()) if may_be_torchs else {}
    run = _captured(problem) if problem.case.graph else problem.run
    with _cores(problem.case.cores):
        first = run()
    yield "values", _wrong(problem, torchs, first)
    # With a graph of the backward, torch's own LSTM has one tensor for both biases; its cell on a GPU has, always.
    if not may_be_torchs and "torch" not in kernels:
        yield "memory", _shared(first)
    yield "torch", _unlike_torch(problem, torchs, first)
    # torch keeps one cache of casts for all threads, and each region empties it at its end: what torch's own layers add
    # up in a 16-bit type then depends on other threads.
    if not (problem.case.autocast and may_be_torchs):
        yield "bits", _other_bits(problem, torchs, run, first)


@contextlib.contextmanager
def _cores(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _precision(case: Case) -> Iterator[None]:
    """Both switches of torch: that of GEMMs, and cuDNN's, which layers follow."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if case.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = case.precision == "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


@contextlib.contextmanager
def _choices(case: Case) -> Iterator[None]:
    """What serves modules that accelerate took; what is measured is not kept."""
    before = os.environ.get("EXTOPS_CHOICES")
    os.environ["EXTOPS_CHOICES"] = "extops" if case.accelerated == "extops" else os.devnull
    try:
        yield
    finally:
        del os.environ["EXTOPS_CHOICES"]
        os.environ.update({} if before is None else {"EXTOPS_CHOICES": before})


@contextlib.contextmanager
def _chunks(case: Case) -> Iterator[None]:
    """Gates of a few steps at a time."""
    before = sequence.CHUNK_BYTES
    sequence.CHUNK_BYTES = case.chunk or before
    try:
        yield
    finally:
        sequence.CHUNK_BYTES = before


@contextlib.contextmanager
def _kernel(problem: Problem) -> Iterator[tuple[str, ...]]:
    """Selects the kernel that the case names, if it can compute the case; yields the kernels in use."""
    case = problem.case
    if case.cell in OWN_CELLS or (case.call == "cell" and case.cell == "lltm"):
        yield (case.cell,)
        return
    if case.kernel:
        _name_kernel(case.kernel)
        if {"none", "torch", "not measured"}.intersection(_which(problem)):
            _name_kernel("")
    try:
        yield _which(problem)
    finally:
        if case.kernel:
            _name_kernel("")


def _name_kernel(name: str) -> None:
    library("cuda").entry("name_sequence_kernel", None, c_char_p)(name.encode())


def _which(problem: Problem) -> tuple[str, ...]:
    case = problem.case
    function = case.call == "function"
    with problem.region():
        return tuple(
            extops.which_kernel(
                problem.callable,
                problem.leaves["input"] if function else problem.packed(),
                problem.state(),
                lengths=problem.lengths if function else None,
                batch_first=function and case.batch_first,
                backward=backward,
            )
            for backward in (False, True)[: 1 + bool(problem.wanted)]
        )


def _captured(problem: Problem) -> Run:
    """The case in a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        problem.run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = problem.run()

    def replay() -> Tensors:
        graph.replay()
        return {name: x.clone() for name, x in found.items()}

    return replay


def _torchs(problem: Problem) -> Tensors:
    """What torch's module gives; nothing where there is none, or where it refuses what extops takes."""
    try:
        return problem.run_torchs() or {}
    except RuntimeError:
        return {}


def _wrong(problem: Problem, torchs: Tensors, ours: Tensors) -> list[str]:
    """What is further from float64 than three times what eager PyTorch is, and some units in the last place; cuDNN's
    layers, which are less accurate than single products and functions, have `torchs` beside them.
    """
    tf32 = problem.case.precision == "tf32"
    dtype = narrowest(problem.case)
    exact = problem.run_plain(torch.float64)
    # Where torch may use TF32, it may compute without, too: float16 has as many bits.
    eager = [problem.run_plain(x) for x in (dtype, torch.float16)[: 1 + tf32]]
    eager.append(torchs)
    info = torch.finfo(torch.float16 if tf32 else dtype)
    wrong = []
    # In float64 the exact numbers are eager's own: where a derivative cancels, as that of tanh near 1, both are off.
    scale = max((x.abs().max().item() for x in exact.values() if x.numel()), default=0.0)
    cancelled = 16 * info.eps * scale if dtype is torch.float64 else 0.0
    noise: Tensors = {}
    # A GEMM of all steps at once, for the gradient of a weight, adds up in one float32 number what eager adds by steps.
    summed = math.sqrt(problem.case.time * problem.case.batch) if dtype is torch.float32 else 0.0
    units = max(ULPS[dtype], summed)
    for name, value in exact.items():
        if name not in ours or ours[name].shape != value.shape:
            shape = list(ours[name].shape) if name in ours else "none"
            wrong.append(f"{name}: expected {list(value.shape)}, but got {shape}")
        elif value.numel() > 0:
            found = [ours, *(x for x in eager if name in x)]
            error, *eagers = (_difference(x[name], value).item() for x in found)
            largest = value.abs().max().item()
            # A number on the way to it may be infinite.
            if largest > torch.finfo(dtype).max / 16 or not math.isfinite(eagers[0]):
                continue
            eager_error = max((x for x in eagers if math.isfinite(x)), default=0.0)
            limit = 3 * eager_error + units * info.eps * max(largest, info.tiny) + cancelled
            if not error <= limit:
                noise = noise or _noise(problem, exact, info.eps)
                limit += 8 * noise[name].item()
            if not error <= limit:
                wrong.append(
                    f"{name} is off by {error:.3g}, eager PyTorch by {eager_error:.3g}, "
                    f"where the largest is {largest:.3g}"
                )
    return wrong


def _noise(problem: Problem, exact: Tensors, eps: float) -> Tensors:
    """How far the exact numbers are off if the inputs are by a unit in the last place: few numbers may cancel."""
    tries = [problem.run_plain(torch.float64, noise=eps) for _ in range(4)]
    return {
        name: torch.stack([_difference(x[name], value) for x in tries]).max()
        for name, value in exact.items()
    }


def _shared(found: Tensors) -> list[str]:
    """Gradients in the same memory: who scales one would scale both."""
    places: dict[int, str] = {}
    shared = []
    for name, x in found.items():
        if "gradient" in name and x.numel() > 0:
            other = places.setdefault(x.data_ptr(), name)
            if other != name:
                shared.append(f"{other} and {name} are the same memory")
    return shared


def _unlike_torch(problem: Problem, torchs: Tensors, ours: Tensors) -> list[str]:
    """What has another dtype or shape than of torch's module; or other strides, but for gradients, whose strides depend
    on how torch computes them, and where states are given that are not contiguous.
    """
    case = problem.case
    if 0 in (case.time, case.batch) or case.graph:
        return []
    # cuDNN's layers give float16 in a region of bfloat16.
    is_bfloat16 = problem.device == "cuda" and case.autocast == "bfloat16"
    dtypes_differ = is_bfloat16 and not case.accelerated

    def described(name: str, x: Tensor) -> str:
        dtype = "" if dtypes_differ else f"{x.dtype} "
        is_compared = name in ("output", "h_n", "c_n") and case.state_layout == "contiguous"
        # Of one element any stride will do.
        taken = [stride for length, stride in zip(x.shape, x.stride(), strict=True) if length > 1]
        strides = f" at strides {taken}" if is_compared and not case.compile else ""
        return f"{dtype}{list(x.shape)}{strides}"

    # On a GPU torch's module moves the parameters that it is given: a compiled one of ours has seen their strides.
    found = (torchs or _torchs(problem.with_contiguous_leaves())).items()
    pairs = ((name, described(name, x), described(name, ours[name])) for name, x in found)
    return [f"{name} is {b}, torch's is {a}" for name, a, b in pairs if a != b]


def _other_bits(problem: Problem, torchs: Tensors, run: Run, known: Tensors) -> list[str]:
    """What differs when it is computed again, beside other work; or is wrong in a quiet thread already."""
    case, device = problem.case, problem.device
    runs: list[tuple[Run, Tensors]] = [(run, known)] * (3 if case.beside == "threads" else 1)
    if case.beside == "sequence":
        runs.append((Problem(dataclasses.replace(case, seed=case.seed + 1), device).run, {}))
    if device == "cuda":
        torch.cuda.synchronize()  # the streams below wait for no other
    # In each thread: torch takes as many cores as there are for the first product of a new one.
    pool = ThreadPoolExecutor(len(runs), initializer=torch.set_num_threads, initargs=(case.cores,))
    all_have_begun = threading.Barrier(len(runs))
    quiet = threading.Lock()
    with pool, contextlib.ExitStack() as others:

        def compute(run: Run, known: Tensors) -> list[str]:
            # A library may add up in another order in another thread, and on another stream: right, with other bits.
            with torch.cuda.stream(torch.cuda.Stream() if device == "cuda" else None):
                try:
                    with quiet:
                        first = run()
                        if device == "cuda":
                            torch.cuda.synchronize()
                except BaseException:
                    all_have_begun.abort()
                    raise
                if all_have_begun.wait() == 0:
                    others.enter_context(beside(case.beside, device))
                differ = any(_difference(first[name], x).any() for name, x in known.items())
                wrong = _wrong(problem, torchs, first) if differ else []
                quiet_already = [f"{text}, in a quiet thread already" for text in wrong]
                return quiet_already or _differences(run, first, case.repeats)

        started = [pool.submit(compute, *each) for each in runs]
        found = [each.result() for each in started]
    return list(dict.fromkeys(text for texts in found for text in texts))


def _differences(run: Run, first: Tensors, repeats: int) -> list[str]:
    """How the results of repeats differ. The host does not wait for a GPU between them."""
    rows = []
    for _ in range(repeats):
        found = run()
        rows.append([_difference(found[name], x) for name, x in first.items()])
    texts = []
    for (name, x), *each in zip(first.items(), *rows, strict=True):
        most = torch.stack(each)
        if most.any():
            texts.append(
                f"{name} has other bits in {int((most > 0).sum())} of {repeats} repeats: off by "
                f"{most.max().item():.3g}, where the largest is {x.abs().max().item():.3g}"
            )
    return texts


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """The largest one; infinite where one is NaN. Infinite numbers may be the same, and so may NaN."""
    if a.numel() == 0:
        return a.new_zeros((), dtype=torch.float64)
    are_same = (a == b) | (a.isnan() & b.isnan())
    differences = (a.double() - b.double()).masked_fill(are_same, 0)
    return differences.abs().max().nan_to_num(nan=math.inf)
