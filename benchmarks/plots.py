"""The plots: time against size, with the floor drawn in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot as plt

from benchmarks.names import (
    ATEN,
    COMPILE,
    COPY,
    EAGER,
    GRU,
    LOOP,
    LSTM,
    LSTM_CELL,
    MUL,
    OURS,
    PRODUCT,
    REDUCE_OVERHEAD,
    ROUND,
    STANDARD,
    TRIVIAL,
    TUTORIAL,
    TUTORIAL_LOOP,
)
from benchmarks.results import CaseResult, Result, Spread

matplotlib.use("svg")
# The same JSON gives the same file; text stays text.
matplotlib.rcParams.update(
    {"svg.hashsalt": "extops", "svg.fonttype": "none", "font.size": 9, "axes.grid": True}
)

COLOURS = {
    OURS: "#d62728",
    EAGER: "#1f77b4",
    LOOP: "#1f77b4",
    ATEN: "#17becf",
    TUTORIAL: "#2ca02c",
    TUTORIAL_LOOP: "#2ca02c",
    COMPILE: "#9467bd",
    REDUCE_OVERHEAD: "#8c564b",
    PRODUCT: "#7f7f7f",
    LSTM_CELL: "#bcbd22",
    LSTM: "#bcbd22",
    GRU: "#e377c2",
    MUL: "#1f77b4",
    ROUND: "#ff7f0e",
    COPY: "#7f7f7f",
}
WORKS = {"forward": "forward", "forward_backward": "forward + backward"}


def make(result: Result, folder: Path) -> list[str]:
    """Draws all plots that the result has figures for; their file names."""
    names = []
    for threads in result.threads:
        suffix = f"-{threads}-thread{'s' * (threads > 1)}" if threads else ""
        drawn = {
            "tutorial": tutorial(result, threads),
            "cell": cell(result, threads),
            "multiply": elementwise(result, "multiply", threads),
            "round": elementwise(result, "round", threads),
            "sequence": sequence(result, threads),
        }
        for stem, figure in drawn.items():
            if figure is not None:
                name = f"{stem}{suffix}.svg"
                figure.savefig(folder / name, metadata={"Date": None}, bbox_inches="tight")
                plt.close(figure)
                names.append(name)
    return names


def title(result: Result, what: str, threads: int | None) -> str:
    """A figure's title: what, where, how."""
    where = result.data["environment"]["device_name"]
    suffix = f", {threads} thread{'s' * (threads > 1)}" if threads else ""
    return f"{what} · {where}{suffix}"


def panels(rows: int, columns: int) -> tuple[Any, Any]:
    """A grid of axes."""
    return plt.subplots(
        rows, columns, figsize=(4.2 * columns, 3.2 * rows), squeeze=False, layout="constrained"
    )


def draw_line(axes: Any, name: str, label: str, points: list[tuple[float, list[float]]]) -> None:
    """The medians of one variant, with the 10th to 90th percentile as a band."""
    spreads = [(x, Spread.of(samples)) for x, samples in points]
    xs = [x for x, _ in spreads]
    colour = COLOURS[name]
    wide = 2.2 if name == OURS else 1.2
    axes.plot(
        xs,
        [s.median for _, s in spreads],
        "o-",
        color=colour,
        lw=wide,
        ms=3 * wide**0.5,
        label=label,
    )
    axes.fill_between(
        xs, [s.p10 for _, s in spreads], [s.p90 for _, s in spreads], color=colour, alpha=0.15, lw=0
    )


def draw_cases(axes: Any, result: Result, cases: list[tuple[float, CaseResult]], work: str) -> None:
    """All variants of some cases over their sizes, and the floor."""
    names = dict.fromkeys(name for _, case in cases for name in case.variants)
    for name in names:
        # What cannot be captured in a graph has but the queued figure.
        for number, suffix in ((result.best_number, ""), ("queued", " (queued)")):
            points = [(x, case.samples(name, f"{number}_{work}")) for x, case in cases]
            found = [(x, samples) for x, samples in points if samples]
            if found and name in COLOURS and (cases[0][1].operator, name) != ("round", MUL):
                draw_line(axes, name, name + suffix, found)
                break
    floors = [(x, result.floor(case, work)) for x, case in cases]
    known = [(x, floor) for x, floor in floors if floor]
    if known:
        axes.plot(*zip(*known, strict=True), "k--", lw=1, label="floor (memory, arithmetic)")
    axes.set(xscale="log", yscale="log")


def cell(result: Result, threads: int | None) -> Any:
    """A panel for each (I, S): time against batch, in strict float32."""
    cases = list(result.cases("cell", "float32", threads))
    shapes = [shape[1:] for shape in STANDARD]
    chosen = {
        shape: sorted(
            ((float(case.size[0]), case) for case in cases if case.size[1:] == shape),
            key=lambda each: each[0],
        )
        for shape in shapes
    }
    chosen = {shape: found for shape, found in chosen.items() if found}
    if not chosen:
        return None
    figure, grid = panels(len(WORKS), len(chosen))
    for row, (work, label) in zip(grid, WORKS.items(), strict=True):
        for axes, (shape, found) in zip(row, chosen.items(), strict=True):
            draw_cases(axes, result, found, work)
            batches = [int(x) for x, _ in found]
            axes.set_xticks(batches, [str(batch) for batch in batches])
            axes.minorticks_off()
            axes.set(title=f"{label}, I={shape[0]} S={shape[1]}", xlabel="batch")
        row[0].set_ylabel(f"{result.best_number} time, µs")
    what = "LLTM, one step, strict float32"
    return finish(figure, grid, title(result, what, threads))


def elementwise(result: Result, operator: str, threads: int | None) -> Any:
    """Time against the number of elements, float32."""
    cases = [(float(x.size[0]), x) for x in result.cases(operator, "float32", threads)]
    if not cases:
        return None
    figure, grid = panels(1, len(WORKS))
    for axes, (work, label) in zip(grid[0], WORKS.items(), strict=True):
        draw_cases(axes, result, cases, work)
        axes.set_xscale("log", base=2)
        axes.set(title=label, xlabel="elements")
    grid[0][0].set_ylabel(f"{result.best_number} time, µs")
    what = f"{operator}, float32 (what fits a cache can beat the memory floor)"
    return finish(figure, grid, title(result, what, threads))


def tutorial(result: Result, threads: int | None) -> Any:
    """Bars: the tutorial's protocol at the standard sizes."""
    cases = [x for x in result.cases("cell", "float32", threads) if x.size in STANDARD]
    return bars(
        title(result, "The tutorial's protocol, strict float32", threads),
        cases,
        {"tutorial_forward": "forward", "tutorial_backward": "backward"},
    )


def sequence(result: Result, threads: int | None) -> Any:
    """Bars: whole sequences."""
    cases = list(result.cases("sequence", None, threads))
    works = {f"wall_{work}": label for work, label in WORKS.items()}
    heading = title(result, "Whole sequences: T, B, I, S; wall time", threads)
    return bars(heading, cases, works, scale="log")  # they span two powers of ten


def bars(
    heading: str, cases: list[CaseResult], measures: dict[str, str], scale: str = "linear"
) -> Any:
    """A panel for each measure: a group for each case, a bar for each variant."""
    names = list(
        dict.fromkeys(
            name
            for case in cases
            for name in case.variants
            if name != TRIVIAL and any(case.samples(name, measure) for measure in measures)
        )
    )
    if not names:
        return None
    figure, grid = panels(len(measures), 1)
    figure.set_size_inches(max(6.0, 1.1 * len(cases) + 2), 3.2 * len(measures))
    for axes, (measure, label) in zip(grid[:, 0], measures.items(), strict=True):
        width = 0.85 / len(names)
        for number, name in enumerate(names):
            spreads = [case.spread(name, measure) for case in cases]
            xs = [i + (number - (len(names) - 1) / 2) * width for i in range(len(cases))]
            known = [(x, s.median) for x, s in zip(xs, spreads, strict=True) if s]
            if known:
                axes.bar(*zip(*known, strict=True), width, color=COLOURS[name], label=name)
        axes.set_xticks(range(len(cases)), [tick(case) for case in cases])
        axes.set(yscale=scale, title=label, ylabel="µs")
        axes.grid(axis="x", visible=False)
    return finish(figure, grid, heading)


def tick(case: CaseResult) -> str:
    """A group of bars' name: sizes, and for sequences the precision mode."""
    shape = ", ".join(f"{case.data['size'][key]}" for key in ("B", "I", "S"))
    steps = case.data["size"].get("T")
    return shape if steps is None else f"T={steps}\n{shape}\n{case.mode}"


def finish(figure: Any, grid: Any, heading: str) -> Any:
    """Title and one legend for all panels."""
    figure.suptitle(heading)
    entries: dict[str, Any] = {}
    for axes in grid.flat:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    figure.legend(
        entries.values(), entries.keys(), loc="outside lower center", ncols=min(4, len(entries))
    )
    return figure
