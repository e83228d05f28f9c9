"""The few figures of a run that the README, the documentation and the plots show: `summary.json`.

`python -m benchmarks.report` writes it beside the report. It is small, so it stays in the repository, where the raw
samples do not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.names import (
    ATEN,
    COMPILE,
    EAGER,
    GRU,
    LAYERS,
    LOOP,
    LSTM,
    OURS,
    PRODUCT,
    SEQUENCES,
    STANDARD,
    TUTORIAL,
    TUTORIAL_LOOP,
)
from benchmarks.results import CaseResult, Result, digits

NAME = "summary.json"
WORKS = {"forward": "forward", "forward_backward": "forward + backward"}
CELL = (EAGER, ATEN, TUTORIAL, COMPILE, PRODUCT, OURS)
SEQUENCE = (LOOP, TUTORIAL_LOOP, LSTM, GRU, OURS)
LABELS = {
    ATEN: "C++ ATen",
    TUTORIAL: "tutorial's kernel",
    COMPILE: "torch.compile",
    PRODUCT: "the GEMMs alone",
    LOOP: "eager, in a loop",
    TUTORIAL_LOOP: "tutorial's kernel, in a loop",
}
_ENVIRONMENT = ("date", "commit", "device", "device_name", "torch", "extops")


@dataclass(frozen=True)
class Case:
    """One case of the summary: its sizes, the medians in µs by variant and measure, and the floor by work."""

    operator: str
    mode: str
    threads: int | None
    size: dict[str, int]
    medians: dict[str, dict[str, float]]
    floor: dict[str, float]

    @property
    def title(self) -> str:
        """The sizes, for a table's row."""
        return ", ".join(map(str, self.size.values()))

    def median(self, variant: str, measure: str) -> float | None:
        """A variant's median; of queued calls where it cannot be captured in a graph."""
        found = self.medians.get(variant, {})
        return found.get(measure, found.get(measure.replace("device", "queued")))


@dataclass(frozen=True)
class Summary:
    """Where a run took place, and its cases."""

    environment: dict[str, str]
    cases: list[Case]

    @classmethod
    def read(cls, file: Path) -> Summary:
        """From its file."""
        data = json.loads(file.read_text())
        return cls(data["environment"], [Case(**case) for case in data["cases"]])

    @property
    def number(self) -> str:
        """The number that tells most of a kernel: device time, on a CPU wall time."""
        return "device" if self.environment["device"] == "cuda" else "wall"

    def chosen(self, operator: str, mode: str | None = "float32") -> list[Case]:
        """The cases of an operator in a precision mode (none: all), on one thread where threads are counted."""
        fits = (case for case in self.cases if case.threads in (None, 1))
        return [case for case in fits if case.operator == operator and mode in (None, case.mode)]


def summarise(result: Result) -> dict[str, Any]:
    """What is kept of a run: the cells of the standard sizes, and the sequences."""
    environment = result.data["environment"]
    number = result.best_number
    cases = []
    for case in result.cases():
        if case.operator == "cell" and case.size in STANDARD:
            measures = [f"{each}_{work}" for each in (number, "queued") for work in WORKS]
            kept = medians(case, CELL, [*measures, "tutorial_forward", "tutorial_backward"])
        elif case.operator in ("sequence", *LAYERS) and (
            number == "wall" or case.size in SEQUENCES
        ):
            numbers = dict.fromkeys((number, "wall"))
            kept = medians(case, SEQUENCE, [f"{each}_{work}" for each in numbers for work in WORKS])
        else:
            continue
        floors = {work: result.floor(case, work) for work in WORKS}
        cases.append(
            {
                **{key: case.data[key] for key in ("operator", "mode", "threads", "size")},
                "medians": kept,
                "floor": {work: rounded(floor) for work, floor in floors.items() if floor},
            }
        )
    return {"environment": {key: environment[key] for key in _ENVIRONMENT}, "cases": cases}


def medians(
    case: CaseResult, variants: Iterable[str], measures: list[str]
) -> dict[str, dict[str, float]]:
    """The medians of these variants, where they were measured."""
    kept: dict[str, dict[str, float]] = {}
    for name in variants:
        for measure in measures:
            spread = case.spread(name, measure)
            if spread:
                kept.setdefault(name, {})[measure] = rounded(spread.median)
    return kept


def rounded(value: float) -> float:
    """To four significant digits."""
    return float(f"{value:.4g}")


def write(result: Result, file: Path) -> None:
    """Writes the summary, a case to a line."""
    kept = summarise(result)
    cases = ",\n".join(json.dumps(case) for case in kept["cases"])
    environment = json.dumps(kept["environment"])
    file.write_text(f'{{"environment": {environment},\n"cases": [\n{cases}\n]}}\n')


def step_table(summary: Summary) -> str:
    """One step in float32: the time of each implementation, in µs."""
    measures = {label: f"{summary.number}_{work}" for work, label in WORKS.items()}
    return "\n".join(table(summary, measures, (EAGER, COMPILE, PRODUCT, OURS)))


def protocol_table(summary: Summary) -> str:
    """One step in float32 by the tutorial's protocol, in µs."""
    measures = {"forward": "tutorial_forward", "backward": "tutorial_backward"}
    return "\n".join(table(summary, measures, (EAGER, ATEN, TUTORIAL, COMPILE, OURS)))


def sequence_table(summary: Summary, operator: str = "sequence") -> str:
    """Whole sequences, or a layer, in each precision: device time in ms."""
    heads = [f"{label}: {name}" for label in WORKS.values() for name in ("cuDNN", OURS)]
    lines = [
        f"| steps, batch, input, state | precision | {' | '.join(heads)} |",
        "|---|---|" + "---:|" * len(heads),
    ]
    for case in summary.chosen(operator, mode=None):
        cells = []
        for work in WORKS:
            times = [case.median(name, f"{summary.number}_{work}") for name in (LSTM, GRU, OURS)]
            *peers, ours = (time / 1000 for time in times if time)
            cells += shown([min(peers), ours])
        lines.append(f"| {case.title} | {case.mode} | {' | '.join(cells)} |")
    return "\n".join(lines)


def table(summary: Summary, measures: dict[str, str], variants: Iterable[str]) -> Iterator[str]:
    """A Markdown table: a row for each size and measure, a column for each variant."""
    cases = summary.chosen("cell")
    names = [name for name in variants if any(name in case.medians for case in cases)]
    yield f"| batch, input, state | | {' | '.join(LABELS.get(name, name) for name in names)} |"
    yield "|---|---|" + "---:|" * len(names)
    for case in cases:
        for label, measure in measures.items():
            cells = shown([case.median(name, measure) for name in names])
            yield f"| {case.title} | {label} | {' | '.join(cells)} |"


def shown(times: Sequence[float | None]) -> list[str]:
    """A row of times as a table's cells, the shortest in bold."""
    texts = ["–" if time is None else digits(time) for time in times]
    best = digits(min(time for time in times if time is not None))
    return [f"**{text}**" if text == best else text for text in texts]
