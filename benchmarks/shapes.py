"""Layers drawn at random from the ranges of real models, and what a run over them says: needs no torch."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.results import ratio

SIZES = (
    *(32, 50, 64, 100, 128, 150, 200, 256, 300, 320, 384, 400, 500, 512, 600, 640, 650),
    *(768, 800, 1000, 1024, 1150, 1500, 1536, 2048),
)
"""Of the hidden state: powers of two and what models have that are known."""
PRECISIONS = {
    "cuda": ("float32", "default", "tf32", "bfloat16"),
    "cpu": ("float32", "bfloat16", "float64"),
}
LENGTHS = ("uniform", "lognormal", "long")
"""Of the rows of packed input; of the last kind one row has all steps, and the others have few."""
MEASURES = {
    "cuda": (
        *("device_forward", "device_training", "wall_forward", "wall_training"),
        *("memory_forward", "memory_training"),
    ),
    "cpu": ("wall_forward", "wall_training"),
}

MOST_BYTES = {"cuda": 24 * 2**30, "cpu": 2 * 2**30}
MOST_SECONDS = {"cuda": 0.2, "cpu": 0.5}
"""Of one step of training, as estimated: a run shall see many shapes."""
_FLOPS = {
    "cuda": {"float32": 3e13, "default": 6e13, "tf32": 1.5e14, "bfloat16": 2.5e14},
    "cpu": {"float32": 5e10, "bfloat16": 2e10, "float64": 2.5e10},
}
_SECONDS_OF_A_STEP = {"cuda": 4e-5, "cpu": 2e-5}


@dataclass(frozen=True)
class Shape:
    """One layer, or some, and its input; of no time, a cell, which takes a single step."""

    cell: str
    time: int
    batch: int
    features: int
    state: int
    layers: int
    directions: int
    batch_first: bool
    precision: str
    threads: int
    lengths: str = ""

    @property
    def gates(self) -> int:
        """Rows of weights for each unit."""
        return {"lstm": 4, "gru": 3}.get(self.cell, 1)

    @property
    def steps(self) -> int:
        """At each of which a cell is computed."""
        return max(1, self.time)

    @property
    def multiply_adds(self) -> int:
        """Multiplications of a forward."""
        of_first = self.features + self.state
        of_others = (self.layers - 1) * (self.directions + 1) * self.state
        rows = self.steps * self.batch * self.directions * self.gates * self.state
        return rows * (of_first + of_others)

    def bytes(self) -> int:
        """About what a step of training keeps."""
        of_row = self.features + self.layers * self.directions * self.state * (2 * self.gates + 6)
        width = {"bfloat16": 2, "float64": 8}.get(self.precision, 4)
        return self.steps * self.batch * of_row * width

    def seconds(self, device: str) -> float:
        """About what a step of training takes."""
        steps = 3 * self.steps * self.layers * self.directions
        flops = 6 * self.multiply_adds
        return flops / _FLOPS[device][self.precision] + steps * _SECONDS_OF_A_STEP[device]

    def __str__(self) -> str:
        time = (self.time,) * bool(self.time)
        sizes = ", ".join(map(str, (*time, self.batch, self.features, self.state)))
        more = f" x {self.layers}" * (self.layers > 1) + " both ways" * (self.directions > 1)
        first = " batch first" * self.batch_first
        packed = f" packed ({self.lengths})" * bool(self.lengths)
        threads = f" {self.threads} thread{'s' * (self.threads > 1)}" if self.threads else ""
        kind = self.cell if self.time else f"{self.cell}cell"
        return f"{kind} {sizes}{more}{first}{packed} {self.precision}{threads}"

    def row_lengths(self) -> list[int]:
        """Of packed input, the longest first, which has all steps."""
        chance = random.Random(self.time * self.batch)

        def one() -> int:
            if self.lengths == "uniform":
                return chance.randint(1, self.time)
            if self.lengths == "lognormal":
                return min(self.time, max(1, round(self.time / 4 * chance.lognormvariate(0, 0.7))))
            return chance.randint(1, max(1, self.time // 100))

        return [self.time, *sorted((one() for _ in range(self.batch - 1)), reverse=True)]


def draw(device: str, number: int, seed: int, *, cells: bool = False) -> Iterator[Shape]:
    """As many shapes, of layers or of cells, without those that would take too long or too much memory."""
    chance = random.Random(seed)
    while number > 0:
        shape = _draw_cell(chance, device) if cells else _draw_layer(chance, device)
        is_small = shape.bytes() <= MOST_BYTES[device]
        if is_small and shape.seconds(device) <= MOST_SECONDS[device]:
            number -= 1
            yield shape


def _between(chance: random.Random, least: int, most: int) -> int:
    """Each octave is as likely."""
    return round(math.exp(chance.uniform(math.log(least), math.log(most))))


def _draw_cell(chance: random.Random, device: str) -> Shape:
    state = _between(chance, 32, 2048)
    return Shape(
        cell=chance.choice(("lstm", "gru", "rnn")),
        time=0,
        batch=_between(chance, 1, 20_000),
        features=state if chance.random() < 0.5 else _between(chance, 1, 2048),
        state=state,
        layers=1,
        directions=1,
        batch_first=False,
        precision=chance.choice(PRECISIONS[device]),
        threads=chance.choice((1, 2)) if device == "cpu" else 0,
    )


def _draw_layer(chance: random.Random, device: str) -> Shape:
    def between(least: int, most: int) -> int:
        return _between(chance, least, most)

    state = chance.choice(SIZES)
    return Shape(
        cell=chance.choice(("lstm", "gru")),
        time=between(1, 1000),
        batch=between(1, 20_000),
        features=state if chance.random() < 0.5 else between(1, 2048),
        state=state,
        layers=1 if chance.random() < 0.7 else 2,
        directions=1 if chance.random() < 0.6 else 2,
        batch_first=chance.random() < 0.5,
        precision=chance.choice(PRECISIONS[device]),
        threads=chance.choice((1, 2)) if device == "cpu" else 0,
        lengths="" if chance.random() < 0.8 else chance.choice(LENGTHS),
    )


# -- what is said of a run


@dataclass(frozen=True)
class Ratio:
    """torch's time, or its most memory, by ours or the control's: more than 1 where ours is faster, or takes less."""

    shape: Shape
    measure: str
    value: float
    kernel: str


def ratios(record: dict[str, Any], ours: str = "extops") -> Iterator[Ratio]:
    """Those of a shape's record."""
    shape = Shape(**record["shape"])
    torchs, others = (record["samples"].get(name, {}) for name in ("torch", ours))
    for measure in torchs:
        if measure in others:
            pairs = ratio(torchs[measure], others[measure])
            kernel = record["kernels"][measure.partition("_")[2]]
            yield Ratio(shape, measure, statistics.median(pairs), kernel)


def summarise(records: list[dict[str, Any]], device: str, *, by_kernel: bool = True) -> str:
    """Tables for people: by measure, by precision, by kernel, and the worst."""
    every = [each for record in records for each in ratios(record)]
    controls = [each for record in records for each in ratios(record, "control")]
    skipped = sum(not record["samples"] for record in records)
    lines = [f"{len(records) - skipped} shapes, {skipped} skipped; torch's / ours"]
    if not every:
        return lines[0]
    precisions = PRECISIONS[device]
    for measure in MEASURES[device]:
        of_measure = [each for each in every if each.measure == measure]
        lines.append(_line(measure, of_measure))
        for precision in precisions:
            lines.append(
                _line(f"  {precision}", [x for x in of_measure if x.shape.precision == precision])
            )
        lines.append(_line("  packed", [x for x in of_measure if x.shape.lengths]))
        lines.append(_line("  control", [x for x in controls if x.measure == measure]))
    if by_kernel:
        lines += _by(every, lambda each: f"{each.measure} by {each.kernel}")
    lines.append("the worst:")
    for each in sorted(every, key=lambda each: each.value)[:10]:
        lines.append(f"  {each.value:.3f} {each.measure} {each.shape} by {each.kernel}")
    return "\n".join(lines)


def _by(every: list[Ratio], key: Callable[[Ratio], str]) -> list[str]:
    names = sorted({key(each) for each in every})
    return [_line(name, [each for each in every if key(each) == name]) for name in names]


def _line(name: str, of: list[Ratio]) -> str:
    values = [each.value for each in of]
    if not values:
        return f"{name:40} none"
    below = ", ".join(f"{sum(x < limit for x in values):4} below {limit}" for limit in (0.98, 0.9))
    mean = statistics.geometric_mean(values)
    return f"{name:40} {len(values):4}: {below}, least {min(values):.3f}, mean {mean:.3f}"
