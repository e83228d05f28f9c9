"""What is measured: operators, sizes, precision modes, thread counts, and which times are taken of each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.cell import Cell, cell_variants
from benchmarks.elementwise import elementwise_variants
from benchmarks.names import (
    BIDIRECTIONAL,
    COMPILE,
    CPU_THREADS,
    LAYERS,
    PEERS,
    RAGGED,
    REDUCE_OVERHEAD,
    SEQUENCE_SWEEP,
    SEQUENCES,
    STANDARD,
    SWEEP,
)
from benchmarks.sequence import (
    Steps,
    bidirectional_variants,
    layer_variants,
    packed_variants,
    ragged_variants,
    sequence_variants,
)
from benchmarks.variant import Makers

GROUPS = ("cell", "elementwise", "sweep", "sequence", "layer")

MODES: dict[str, tuple[torch.dtype, bool]] = {
    "float32": (torch.float32, False),
    "tf32": (torch.float32, True),
    "bfloat16": (torch.bfloat16, False),
}
"""The dtype, and whether torch may use TF32 in float32 matrix products."""

WEIGHTS = ("forward", "forward_backward")
WITH_PRODUCTS = (*WEIGHTS, "grad_weights")
ALL = (*WITH_PRODUCTS, "forward_backward_all", "grad_input")

Plan = dict[str, tuple[str, ...]]
"""For each of the four numbers, the kinds of work that it is taken of."""


@dataclass(frozen=True)
class Case:
    """One operator at one size in one mode: variants that are measured in turn."""

    group: str
    operator: str
    size: dict[str, int]
    mode: str
    device: str
    threads: int
    plan: Plan
    compiled: tuple[str, ...] = ()
    context: bool = True
    graph_calls: int = 20

    @property
    def slice_seconds(self) -> float:
        """What each measure of each variant may take of a round."""
        if self.device == "cpu":
            return 8e-3
        return 5e-3 if self.group == "cell" else 3e-3

    @property
    def title(self) -> str:
        """For people."""
        size = ",".join(f"{key}={value}" for key, value in self.size.items())
        threads = f" {self.threads} threads" if self.device == "cpu" else ""
        return f"{self.operator} {size} {self.mode}{threads}"

    def makers(self) -> tuple[Makers, Callable[[], list[Tensor]] | None]:
        """Makers of the variants by name; also of the reference's results, where there is one."""
        dtype, _ = MODES[self.mode]
        if self.operator in ("multiply", "round"):
            numel = self.size["numel"]
            return elementwise_variants(self.operator, numel, self.device, dtype), None
        batch, features, state = (self.size[key] for key in ("B", "I", "S"))
        cell = Cell(batch, features, state, self.device, dtype)
        if "T" in self.size:
            data = Steps(self.size["T"], cell)
            variants: dict[str, Callable[[Steps], Makers]] = {
                "sequence": functools.partial(sequence_variants, context=self.context),
                "ragged": ragged_variants,
                "packed": packed_variants,
                "bidirectional": bidirectional_variants,
                "LSTM": functools.partial(layer_variants, kind=torch.nn.LSTM),
                "GRU": functools.partial(layer_variants, kind=torch.nn.GRU),
            }
            return variants[self.operator](data), None
        makers = cell_variants(cell, compiled=self.compiled, context=self.context)
        return makers, cell.expected

    def work(self) -> dict[str, dict[str, int]]:
        """The arithmetic and the memory traffic that each kind of work cannot do without."""
        width = torch.finfo(MODES[self.mode][0]).bits // 8
        if self.operator in ("multiply", "round"):
            return elementwise_work(self.operator, self.size["numel"], width)
        cell = cell_work(self.size["B"], self.size["I"], self.size["S"], width)
        steps = self.size.get("T", 1)
        if steps == 1:
            return cell
        if self.operator != "sequence":
            return {}  # depends on the lengths, or on the directions
        return {
            work: {"flop": each["flop"] * steps, "bytes": each["bytes"]}
            for work, each in cell.items()
            if work in WEIGHTS
        }


def cell_work(batch: int, features: int, state: int, width: int) -> dict[str, dict[str, int]]:
    """One step: every input read once, every output written once, the gates kept for backward."""
    joined, gates, cell = batch * (features + state), 3 * batch * state, batch * state
    weights, bias = 3 * state * (features + state), 3 * state
    gemm = 2 * batch * weights
    forward = weights + bias + joined + cell + 2 * cell + gates
    backward = gates + cell + joined + 2 * cell + weights + bias
    numbers = {
        "forward": (gemm, forward),
        "forward_backward": (2 * gemm, forward + backward),
        "forward_backward_all": (3 * gemm, forward + backward + weights + joined + cell),
    }
    return {work: {"flop": f, "bytes": n * width} for work, (f, n) in numbers.items()}


def elementwise_work(operator: str, numel: int, width: int) -> dict[str, dict[str, int]]:
    """`multiply`: three tensors forward, five backward; `round`: two, and nothing backward."""
    forward, backward = (3, 5) if operator == "multiply" else (2, 0)
    return {
        "forward": {"flop": numel, "bytes": forward * numel * width},
        "forward_backward": {"flop": 3 * numel, "bytes": (forward + backward) * numel * width},
    }


def cases(device: str, groups: tuple[str, ...]) -> list[Case]:
    """All cases of a run, those that matter most first."""
    every = cuda_cases() if device == "cuda" else cpu_cases()
    return [case for case in every if case.group in groups]


def cuda_cases() -> Iterator[Case]:
    """The cases of a GPU."""
    large: Plan = {"device": WEIGHTS, "queued": WEIGHTS, "wall": WEIGHTS}
    small: Plan = {**large, "host": WEIGHTS}
    full: Plan = {**small, "device": ALL, "tutorial": ()}
    sweep: Plan = {"device": WITH_PRODUCTS}
    gpu: dict[str, Any] = {"device": "cuda", "threads": 0}
    for mode in MODES:
        for shape in STANDARD:
            compiled = (*PEERS[COMPILE], REDUCE_OVERHEAD)
            yield Case("cell", "cell", bis(*shape), mode, plan=full, compiled=compiled, **gpu)
    for operator in ("multiply", "round"):
        for mode, exponents in (("float32", range(10, 29, 3)), ("bfloat16", (10, 16, 22, 28))):
            for exponent in exponents:
                plan = small if exponent <= 16 else large
                size = {"numel": 2**exponent}
                yield Case("elementwise", operator, size, mode, plan=plan, **gpu)
    quick: dict[str, Any] = {"plan": sweep, "compiled": PEERS[COMPILE], "context": False, **gpu}
    for mode in MODES:
        for shape in SWEEP:
            yield Case("sweep", "cell", bis(*shape), mode, **quick)
    whole: dict[str, Any] = {
        "plan": {"device": WEIGHTS, "wall": WEIGHTS},
        "graph_calls": 1,
        **gpu,
    }
    for mode in MODES:
        for steps, *shape in SEQUENCES:
            size = {"T": steps, **bis(*shape)}
            yield Case("sequence", "sequence", size, mode, **whole)
    for operator in ("ragged", "packed"):
        size = {"T": RAGGED[0], **bis(*RAGGED[1:])}
        yield Case("sequence", operator, size, "tf32", plan={"wall": WEIGHTS}, **gpu)
    for mode in MODES:
        size = {"T": BIDIRECTIONAL[0], **bis(*BIDIRECTIONAL[1:])}
        yield Case("sequence", "bidirectional", size, mode, **whole)
    for mode in MODES:
        for steps, *shape in SEQUENCE_SWEEP:
            size = {"T": steps, **bis(*shape)}
            yield Case("sequence", "sequence", size, mode, context=False, **whole)
    for operator in LAYERS:
        for mode in MODES:
            for steps, *shape in (*SEQUENCES, *SEQUENCE_SWEEP):
                yield Case("layer", operator, {"T": steps, **bis(*shape)}, mode, **whole)


def cpu_cases() -> Iterator[Case]:
    """The cases of a CPU, at one and at two threads."""
    full: Plan = {"wall": ALL, "tutorial": ()}
    sweep: Plan = {"wall": WITH_PRODUCTS}
    for threads in CPU_THREADS:
        cpu: dict[str, Any] = {"device": "cpu", "threads": threads}
        for shape in STANDARD:
            yield Case(
                "cell", "cell", bis(*shape), "float32", plan=full, compiled=PEERS[COMPILE], **cpu
            )
        for operator in ("multiply", "round"):
            for exponent in range(10, 25, 2):
                size = {"numel": 2**exponent}
                yield Case("elementwise", operator, size, "float32", plan=sweep, **cpu)
        for shape in SWEEP[:-1]:  # the last would take a minute
            yield Case("sweep", "cell", bis(*shape), "float32", plan=sweep, context=False, **cpu)
        yield Case("sweep", "cell", bis(*STANDARD[0]), "bfloat16", plan=sweep, context=False, **cpu)
        for steps in (32, 256):
            size = {"T": steps, **bis(16, 128, 128)}
            yield Case("sequence", "sequence", size, "float32", plan=sweep, **cpu)
            for operator in LAYERS:
                yield Case("layer", operator, size, "float32", plan=sweep, **cpu)


def bis(batch: int, features: int, state: int) -> dict[str, int]:
    """The sizes of a cell by name."""
    return {"B": batch, "I": features, "S": state}
