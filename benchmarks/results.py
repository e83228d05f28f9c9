"""Reads a `result.json`: finds cases and samples, and computes what is reported of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.samples import median, quantile, ratio


@dataclass(frozen=True)
class Spread:
    """A median with the 10th and the 90th percentile."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, samples: list[float]) -> Spread:
        """From samples, at least one."""
        return cls(median(samples), quantile(samples, 0.1), quantile(samples, 0.9))

    def __str__(self) -> str:
        return f"{digits(self.median)} ({digits(self.p10)}–{digits(self.p90)})"


def digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:.0f}" if abs(value) >= 99.95 or value == 0 else f"{value:#.3g}"


@dataclass(frozen=True)
class CaseResult:
    """One case of the JSON."""

    data: dict[str, Any]

    @property
    def operator(self) -> str:
        """`cell`, `multiply`, `round` or `sequence`."""
        return str(self.data["operator"])

    @property
    def mode(self) -> str:
        """The precision mode."""
        return str(self.data["mode"])

    @property
    def threads(self) -> int | None:
        """How many threads, on a CPU."""
        threads: int | None = self.data["threads"]
        return threads

    @property
    def size(self) -> tuple[int, ...]:
        """The sizes, in the order of the JSON."""
        return tuple(self.data["size"].values())

    @property
    def variants(self) -> list[str]:
        """The names of those that were tried."""
        return list(self.data["variants"])

    @property
    def title(self) -> str:
        """For a table's row."""
        if self.operator in ("multiply", "round"):
            size = f"2^{self.size[0].bit_length() - 1}"
        else:
            size = ", ".join(map(str, self.size))
        threads = f", {self.threads} thread{'s' * (self.threads > 1)}" if self.threads else ""
        return f"{size} {self.mode}{threads}"

    def samples(self, variant: str, measure: str) -> list[float] | None:
        """A variant's samples, one a round; none where it was not measured or failed."""
        found = self.data["variants"].get(variant, {}).get("samples", {}).get(measure)
        return list(found) if found else None

    def spread(self, variant: str, measure: str) -> Spread | None:
        """What is printed of the samples."""
        samples = self.samples(variant, measure)
        return Spread.of(samples) if samples else None

    def ratio(self, above: tuple[str, str], below: tuple[str, str]) -> Spread | None:
        """The ratio of two measures, each (variant, measure), taken round by round."""
        numerator, denominator = self.samples(*above), self.samples(*below)
        if not numerator or not denominator or len(numerator) != len(denominator):
            return None
        return Spread.of(ratio(numerator, denominator))


@dataclass(frozen=True)
class Result:
    """A whole run."""

    data: dict[str, Any]

    @classmethod
    def read(cls, file: Path) -> Result:
        """From its file."""
        return cls(json.loads(file.read_text()))

    @property
    def device(self) -> str:
        """`cpu` or `cuda`."""
        return str(self.data["environment"]["device"])

    @property
    def best_number(self) -> str:
        """The number that tells most of a kernel: device time, on a CPU wall time."""
        return "device" if self.device == "cuda" else "wall"

    @property
    def threads(self) -> list[int | None]:
        """The thread counts that were measured."""
        return sorted({case.threads for case in self.cases()}, key=lambda threads: threads or 0)

    def cases(
        self, operator: str | None = None, mode: str | None = None, threads: int | None = None
    ) -> Iterator[CaseResult]:
        """The cases that fit."""
        for data in self.data["cases"]:
            case = CaseResult(data)
            fits = operator in (None, case.operator) and mode in (None, case.mode)
            if fits and threads in (None, case.threads):
                yield case

    def floor(self, case: CaseResult, work: str) -> float | None:
        """The microseconds below which the machine's bandwidth or its arithmetic does not let this work go."""
        (ceilings,) = (x for x in self.data["ceilings"] if x["threads"] == case.threads)
        needed = case.data["work"].get(work)
        if needed is None:
            return None
        seconds = needed["bytes"] / ceilings["bytes_per_second"]
        if case.operator in ("cell", "sequence"):
            seconds = max(seconds, needed["flop"] / ceilings["flop_per_second"][case.mode])
        return float(seconds * 1e6)
