"""The project's targets for speed, and whether a result meets them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.names import (
    BIDIRECTIONAL,
    COMPILE,
    COPY,
    CPU_THREADS,
    EAGER,
    GRU,
    LARGE_CUDA,
    LSTM,
    MUL,
    NO_RIVALS,
    ONE_DIRECTION,
    OURS,
    PRECISIONS,
    PRODUCT,
    RAGGED,
    SMALL,
    STANDARD,
    SWEEP,
    TRIVIAL,
    TUTORIAL,
)
from benchmarks.results import CaseResult, Result, Spread

Measured = Spread | float | None


@dataclass(frozen=True)
class Target:
    """One line of the table."""

    what: str
    ratio: str
    at_least: bool
    bound: float
    measured: Measured
    peer: str = ""
    """The form in which a peer is fastest."""

    @property
    def goal(self) -> str:
        """The bound in words."""
        return f"{'≥' if self.at_least else '≤'} {self.bound:.3g}"

    @property
    def verdict(self) -> str:
        """`met`, `not met` or `not measured`; the median decides, to two digits after the point."""
        if self.measured is None:
            return "not measured"
        value = self.measured.median if isinstance(self.measured, Spread) else self.measured
        value = round(value, 2)
        return (
            "met" if (value >= self.bound if self.at_least else value <= self.bound) else "not met"
        )


def targets(result: Result) -> list[Target]:
    """The targets that the device of this result can answer, but for those against peers."""
    lines = cuda_targets(result) if result.device == "cuda" else cpu_targets(result)
    return [*lines, *import_targets(result)]


class Chooser:
    """Makes the targets of one case."""

    def __init__(
        self, result: Result, operator: str, size: tuple[int, ...], mode: str, threads: int | None
    ) -> None:
        found = [x for x in result.cases(operator, mode, threads) if x.size == size]
        self.case = found[0] if found else CaseResult({"variants": {}})
        title = f"2^{size[0].bit_length() - 1}" if len(size) == 1 else ", ".join(map(str, size))
        suffix = f", {threads} thread{'s' * (threads > 1)}" if threads else ""
        self.title = f"{operator} {title} {mode}{suffix}"

    def faster(self, measure: str, rival: str, bound: float) -> Target:
        """`rival` takes at least `bound` times as long as we do."""
        measured = self.case.ratio((rival, measure), (OURS, measure))
        what, ratio = f"{self.title}, {words(measure)}", f"{rival} / extops"
        return Target(what, ratio, True, bound, measured, self.case.form(rival, measure))

    def within(
        self, measure: str, rival: str, bound: float, rival_measure: str | None = None
    ) -> Target:
        """We take at most `bound` times as long as `rival`."""
        measured = self.case.ratio((OURS, measure), (rival, rival_measure or measure))
        name = rival if rival_measure is None else f"{rival} {words(rival_measure)}"
        what, ratio = f"{self.title}, {words(measure)}", f"extops / {name}"
        return Target(what, ratio, False, bound, measured, self.case.form(rival, measure))


def words(measure: str) -> str:
    """`device_forward_backward` as people say it."""
    number, _, work = measure.partition("_")
    kinds = {
        "forward": "forward",
        "backward": "backward",
        "forward_backward": "forward+backward",
        "forward_backward_all": "forward+backward, all gradients",
    }
    numbers = {
        "device": "device time",
        "queued": "queued device time",
        "host": "host time",
        "wall": "wall time",
    }
    return f"{kinds[work]}, {numbers.get(number, number + ' protocol')}"


def against_peers(result: Result) -> dict[str, list[Target]]:
    """Those of a GPU's device time against the best product and the best torch.compile: four for each size and mode."""
    if result.device != "cuda":
        return {}
    cells = (
        Chooser(result, "cell", size, mode, None)
        for mode in PRECISIONS
        for size in (*STANDARD, *SWEEP)
    )
    return {
        cell.title.removeprefix("cell "): [
            target
            for measure in ("device_forward", "device_forward_backward")
            for target in (cell.within(measure, PRODUCT, 1.15), cell.faster(measure, COMPILE, 1))
        ]
        for cell in cells
    }


def cuda_targets(result: Result) -> Iterator[Target]:
    """Those of a GPU, but for those against peers."""
    small = Chooser(result, "cell", STANDARD[0], "float32", None)
    yield small.faster("tutorial_forward", TUTORIAL, 4)
    yield small.faster("tutorial_backward", TUTORIAL, 3)
    yield small.within("tutorial_forward", TRIVIAL, 3, "wall_forward")
    yield Target(f"{small.title}, forward", "kernels of extops", False, 1, kernels_of_ours(result))
    yield small.within("device_forward_backward", EAGER, 1 / 3)
    for size in STANDARD[1:]:
        cell = Chooser(result, "cell", size, "float32", None)
        yield cell.within("device_forward_backward_all", PRODUCT, 1.1)
    multiply = Chooser(result, "multiply", (LARGE_CUDA,), "float32", None)
    yield multiply.faster("device_forward", MUL, 0.98)
    yield multiply.faster("device_forward_backward", MUL, 1.1)
    rounding = Chooser(result, "round", (LARGE_CUDA,), "float32", None)
    yield rounding.faster("queued_forward", COPY, 0.98)
    yield rounding.within("device_forward_backward", OURS, 1.02, "device_forward")
    yield from overhead_targets(result, "host", None)
    for operator in ("ragged", "packed"):
        ragged = Chooser(result, operator, RAGGED, "tf32", None)
        for measure, bound in (("wall_forward", 3), ("wall_forward_backward", 2)):
            yield from (ragged.faster(measure, peer, bound) for peer in (LSTM, GRU))
    for mode in PRECISIONS:
        both = Chooser(result, "bidirectional", BIDIRECTIONAL, mode, None)
        for measure in ("device_forward", "device_forward_backward"):
            yield both.within(measure, ONE_DIRECTION, 1.2)


def cpu_targets(result: Result) -> Iterator[Target]:
    """Those of a CPU."""
    for threads in CPU_THREADS:
        small = Chooser(result, "cell", STANDARD[0], "float32", threads)
        yield small.faster("wall_forward", EAGER, 1.6)
        yield small.faster("wall_forward_backward", EAGER, 2.2)
        yield small.faster("wall_forward", COMPILE, 1)
        yield small.faster("wall_forward_backward", COMPILE, 1)
        for size in STANDARD[1:]:
            cell = Chooser(result, "cell", size, "float32", threads)
            for rival in (EAGER, COMPILE):
                yield cell.faster("wall_forward", rival, 1)
                yield cell.faster("wall_forward_backward", rival, 1)
    yield from overhead_targets(result, "wall", 1)


def overhead_targets(result: Result, number: str, threads: int | None) -> Iterator[Target]:
    """The overhead of a call: small tensors."""
    for operator in ("multiply", "round"):
        small = Chooser(result, operator, (SMALL,), "float32", threads)
        yield small.within(f"{number}_forward", MUL, 1.5)
    multiply = Chooser(result, "multiply", (SMALL,), "float32", threads)
    yield multiply.within(f"{number}_forward_backward", MUL, 1.5)


def import_targets(result: Result) -> Iterator[Target]:
    """Those of `import extops`."""
    found = result.data["import"]
    spread = Spread.of(found["milliseconds"])
    yield Target("import extops", "ms beyond import torch", False, 50, spread)
    initialised = float(found["initialises_cuda"])
    yield Target("import extops", "initialises CUDA (1: yes)", False, 0, initialised)


def kernels_of_ours(result: Result) -> float | None:
    """How many kernels our forward launches at the smallest standard size."""
    for counted in result.data.get("kernels", []):
        if tuple(counted["size"].values()) == STANDARD[0] and counted["mode"] == "float32":
            work = counted["variants"].get(OURS, {}).get("forward")
            return None if work is None else float(work["kernels"])
    return None


@dataclass
class Loss:
    """A rival that is faster than we are in some cases of an operator, by one measure."""

    operator: str
    measure: str
    rival: str
    of: int = 0
    """How many cases were compared."""
    found: list[tuple[Spread, str]] = field(default_factory=list)
    """The rival's time over ours with the case's title, where it is faster in nine rounds of ten; worst first."""


def losses(result: Result) -> list[Loss]:
    """Where we lose, the worst first."""
    every: dict[tuple[str, str, str], Loss] = {}
    for case in result.cases():
        for rival in rivals(case):
            for measure in case.data["variants"][OURS].get("samples", {}):
                spread = case.ratio((rival, measure), (OURS, measure))
                if spread is None:
                    continue
                key = case.operator, measure, rival
                loss = every.setdefault(key, Loss(*key))
                loss.of += 1
                if round(spread.p90, 2) < 1:
                    form = case.form(rival, measure)
                    loss.found.append((spread, f"{case.title}, {form}".removesuffix(", ")))
    lost = [loss for loss in every.values() if loss.found]
    for loss in lost:
        loss.found.sort(key=lambda each: each[0].median)
    return sorted(lost, key=lambda loss: loss.found[0][0].median)


def rivals(case: CaseResult) -> list[str]:
    """The variants of a case that compute what we compute, and in a sequence torch's layers."""
    others = (*NO_RIVALS, MUL) if case.operator == "round" else NO_RIVALS
    return [name for name in case.variants if name not in others]
