"""The plots of a summary: a bar for each implementation, and the floor. And that of whole models.

`nox -s docs` draws those of the documentation. Git keeps that of the models alone, which README shows.

python -m benchmarks.plots benchmarks/results/nvidia-h200/summary.json
python -m benchmarks.plots benchmarks/results/nvidia-h200/ratios.json docs/_static
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.lines import Line2D

from benchmarks.names import (
    COMPILE,
    EAGER,
    GRU,
    LSTM,
    OURS,
    PRODUCT,
    TUTORIAL,
)
from benchmarks.results import digits
from benchmarks.summary import LABELS, WORKS, Case, Summary

matplotlib.use("svg")
# The same summary gives the same file; text stays text.
matplotlib.rcParams.update({"svg.hashsalt": "extops", "svg.fonttype": "none", "font.size": 11})

# The palette of Okabe and Ito, which people of every colour vision tell apart.
COLOURS = {
    OURS: "#d55e00",
    EAGER: "#0072b2",
    TUTORIAL: "#009e73",
    COMPILE: "#cc79a7",
    PRODUCT: "#999999",
    LSTM: "#e69f00",
    GRU: "#f0e442",
}
FLOOR: Any = {"color": "black", "linewidth": 2, "linestyle": ":"}
CELL = (EAGER, TUTORIAL, COMPILE, PRODUCT, OURS)
SEQUENCE = (
    LSTM,
    GRU,
    OURS,
)  # beside a loop of cells, hundreds of times as long, none of these would be seen
STEP, SEQUENCES, MODELS = "step.svg", "sequence.svg", "models.svg"
MODES = {
    "default": ("by default", "#d55e00"),
    "float32": ("strict float32", "#0072b2"),
    "tf32": ("TF32", "#e69f00"),
    "autocast": ("autocast", "#009e73"),
}


def of_models(file: Path, folder: Path | None = None) -> list[str]:
    """Draws each model's wall time before `extops.accelerate` by that after it."""
    found = json.loads(file.read_text())
    models: dict[str, dict[str, list[float]]] = {
        name: of_model for name, of_model in found["models"].items() if "serving" not in name
    }

    def gain(model: str) -> float:
        return statistics.geometric_mean([x for each in models[model].values() for x in each])

    names = sorted(models, key=gain, reverse=True)
    modes = [mode for mode in MODES if any(mode in each for each in models.values())]
    # Narrow enough for a phone.
    size = 5, 1.6 + 0.2 * len(names)
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    works = {"forward": True, "training step": False}  # a dot, and a ring
    for place, name in enumerate(names):
        for mode in modes:
            for ratio, filled in zip(models[name].get(mode, []), works.values(), strict=False):
                axes.plot(ratio, place, **_dot(MODES[mode][1], filled))
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.grid(color="#dddddd")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_ylim(len(names) - 0.4, -0.6)
    of = found["environment"]
    where = f"{of['device_name']}, torch {of['torch']}; wall time"
    figure.suptitle(f"How many times as fast after accelerate\n{where}", fontsize=11)
    kinds = [(f"{MODES[x][0]}, {work}", MODES[x][1], y) for x in modes for work, y in works.items()]
    handles = [Line2D([], [], label=label, **_dot(*kind)) for label, *kind in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=9)
    figure.savefig((folder or file.parent) / MODELS, metadata={"Date": None})
    plt.close(figure)
    return [MODELS]


def _dot(colour: str, filled: bool) -> dict[str, Any]:
    face = colour if filled else "none"
    return {
        "color": colour,
        "markerfacecolor": face,
        "marker": "o",
        "linestyle": "",
        "markersize": 5,
    }


def make(file: Path, folder: Path | None = None) -> list[str]:
    """Draws what the summary has figures for, into `folder` or else beside it; the names of the files."""
    summary = Summary.read(file)
    where = f"{summary.environment['device_name']}, torch {summary.environment['torch']}"
    names = []
    for name, cases, variants, number, unit, heading in (
        (STEP, summary.chosen("cell"), CELL, summary.number, "µs", "one step"),
        (SEQUENCES, summary.chosen("sequence"), SEQUENCE, "wall", "ms", "a whole sequence"),
    ):
        if cases:
            heading = f"Time of {heading}, strict float32; shorter is better\n{where}"
            figure = bars(heading, cases, variants, number, unit)
            figure.savefig((folder or file.parent) / name, metadata={"Date": None})
            plt.close(figure)
            names.append(name)
    return names


def bars(heading: str, cases: list[Case], variants: tuple[str, ...], number: str, unit: str) -> Any:
    """A panel for each case, one above the other: narrow enough for a phone."""
    measures = {work: f"{number}_{work}" for work in WORKS}
    known = [
        x for x in variants if any(case.median(x, y) for case in cases for y in measures.values())
    ]
    height = 1 + len(cases) * (0.9 + 0.19 * len(measures) * (len(known) + 1.3))
    figure, grid = plt.subplots(
        len(cases), 1, figsize=(5, height), squeeze=False, layout="constrained"
    )
    for axes, case in zip(grid[:, 0], cases, strict=True):
        panel(axes, case, known, measures, unit)
    figure.suptitle(heading, fontsize=11)
    floor = Line2D([], [], **FLOOR)
    label = "floor: memory and arithmetic of this machine"
    figure.legend([floor], [label], loc="outside lower center")
    return figure


def panel(axes: Any, case: Case, variants: list[str], measures: dict[str, str], unit: str) -> None:
    """The bars of one case, with their times, by kind of work."""
    scale = {"µs": 1, "ms": 1000}[unit]
    places, labels = [], []
    place = 1.0
    for work, measure in measures.items():
        axes.text(0, place, WORKS[work], va="center", fontweight="bold")
        top = place + 0.5
        for name in variants:
            place += 1
            time = case.median(name, measure)
            places.append(place)
            labels.append(LABELS.get(name, name))
            if time is not None:
                (bar,) = axes.barh(place, time / scale, 0.8, color=COLOURS[name], zorder=2)
                text = f"\N{NO-BREAK SPACE}{digits(time / scale)} {unit}"
                axes.text(bar.get_width(), place, text, va="center", zorder=4)
        floor = case.floor.get(work)
        if floor:
            axes.plot([floor / scale] * 2, [top, place + 0.5], **FLOOR, zorder=3)
        place += 1.5
    axes.set_yticks(places, labels)
    axes.set_ylim(place - 0.5, 0)
    axes.set_xlim(0, 1.25 * max(bar.get_width() for bar in axes.patches))
    axes.grid(axis="x", color="#dddddd", zorder=0)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    sizes = ", ".join(f"{key} {value}" for key, value in case.size.items())
    axes.set_title(sizes, loc="left", fontsize=11)
    axes.set_xlabel(unit)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plots",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, help="a summary.json, or a ratios.json of models")
    parser.add_argument("folder", type=Path, nargs="?", help="default: that of the file")
    arguments = parser.parse_args()
    draw = of_models if arguments.file.name == "ratios.json" else make
    print("wrote", *draw(arguments.file, arguments.folder))


if __name__ == "__main__":
    main()
