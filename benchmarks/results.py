"""Reads a `result.json`: finds cases and samples, and computes what is reported of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.names import PEERS, PRODUCT

_PEER_OF = {form: peer for peer, forms in PEERS.items() for form in forms}
_PRODUCTS = {
    "forward": ("forward",),
    "forward_backward": ("forward", "grad_weights"),
    "forward_backward_all": ("forward", "grad_weights", "grad_input"),
}
"""The matrix products that a kind of work cannot do without."""


@dataclass(frozen=True)
class Spread:
    """A median with the 10th and the 90th percentile."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, samples: list[float]) -> Spread:
        """From samples, at least one."""
        at_least_two = samples * 2 if len(samples) == 1 else samples
        p10, *_, p90 = statistics.quantiles(at_least_two, n=10, method="inclusive")
        return cls(statistics.median(samples), p10, p90)

    def __str__(self) -> str:
        return f"{digits(self.median)} ({digits(self.p10)}–{digits(self.p90)})"


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
    """The ratios round by round."""
    return [a / b for a, b in zip(numerator, denominator, strict=True)]


def digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:.0f}" if abs(value) >= 99.95 or value == 0 else f"{value:#.3g}"


@dataclass(frozen=True)
class CaseResult:
    """One case of the JSON."""

    data: dict[str, Any]

    @property
    def operator(self) -> str:
        """`cell`, `multiply`, `round`, `sequence`, `ragged`, `packed`, `bidirectional`, `LSTM` or `GRU`."""
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
        """The names of those that were tried; the forms of a peer go by the peer's."""
        return list(dict.fromkeys(_PEER_OF.get(name, name) for name in self.data["variants"]))

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
        if variant in PEERS:
            return self.fastest(variant, measure)[1]
        found = self.data["variants"].get(variant, {}).get("samples", {}).get(measure)
        return list(found) if found else None

    def fastest(self, peer: str, measure: str) -> tuple[str, list[float] | None]:
        """The form in which a peer has the lowest median, and its samples; each matrix product has its own form."""
        number, _, work = measure.partition("_")
        forms: list[str] = []
        parts: list[list[float]] = []
        for part in _PRODUCTS.get(work, ()) if peer == PRODUCT else (work,):
            tried = ((form, self.samples(form, f"{number}_{part}")) for form in PEERS[peer])
            found = [(form, samples) for form, samples in tried if samples]
            if not found:
                return "", None
            form, samples = min(found, key=lambda each: statistics.median(each[1]))
            forms.append(form.removeprefix("torch.compile "))
            parts.append(samples)
        name = " + ".join(forms if len(set(forms)) > 1 else forms[:1])
        return name, [sum(samples) for samples in zip(*parts, strict=True)] or None

    def form(self, variant: str, measure: str) -> str:
        """The form in which a peer is fastest; nothing for any other variant."""
        return self.fastest(variant, measure)[0] if variant in PEERS else ""

    def figure(self, variant: str, measure: str, show: Callable[[Spread], str] = str) -> str:
        """What a table's cell holds: the samples' spread, and the form of a peer."""
        spread = self.spread(variant, measure)
        return f"{show(spread)} {self.form(variant, measure)}".rstrip() if spread else "–"

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
