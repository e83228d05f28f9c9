"""Writes the landing page: which wheel to install, what was tested, what was measured.

All that it says is read: from matrix.toml, the wheels, their passports, the recorded results. How
it looks is in landing.html, a Jinja template with its style and its script.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from service import ROOT, survey, wheels
from service.check import Wheel
from service.index import PROJECT, index_path, variant_of
from service.matrix import RELEASE, Cell, Matrix, Variant, lane, release

RESULTS = ROOT / "benchmarks" / "results"
BENCHMARK = "nvidia-h200"
NEWEST_TORCH = "newest-torch.json"
PLOTS = {
    "step.svg": "LLTM, one step at three sizes, beside other implementations",
    "sequence.svg": "LLTM, whole sequences, beside torch's own layers",
}

# What NVIDIA calls the GPUs of a compute capability.
GENERATIONS = {
    "5.0": "Maxwell",
    "6.0": "Pascal",
    "7.0": "Volta",
    "7.5": "Turing",
    "8.0": "Ampere",
    "8.6": "Ampere",
    "9.0": "Hopper",
    "10.0": "Blackwell",
    "12.0": "Blackwell",
}

# Stands in commands for the address of the site, which the browser knows.
SITE = "{site}"


@dataclass(frozen=True)
class Run:
    """One run of a cell's tests."""

    device: str
    passed: int
    failed: int
    skipped: int


def read_json(file: Path, default: Any = None) -> Any:
    """The file's content; `default` where there is no such file."""
    return json.loads(file.read_text()) if file.is_file() else default


def runs(survey_rows: Iterable[dict[str, Any]], found: Iterable[Wheel]) -> dict[str, list[Run]]:
    """The recorded test runs of each cell: those of the survey, and newer ones of the passports."""
    rows = [{"device": "no record" if row["built"] else "not built", **row} for row in survey_rows]
    for wheel in found:
        rows += read_json(wheels.passport(wheel.path), {"tests": []})["tests"]
    latest = {(row["cell"], row["device"]): row for row in rows}
    each: dict[str, list[Run]] = {}
    for row in latest.values():
        numbers = [row.get(key, 0) for key in ("passed", "failed", "skipped")]
        run = Run(row["device"].removeprefix("NVIDIA "), *numbers)
        each.setdefault(row["cell"], []).append(run)
    return each


def megabytes(size: int) -> str:
    """A size for people."""
    return f"{size / 1e6:.1f} MB"


def title(variant: Variant) -> str:
    """What the page calls the wheel of a variant."""
    if variant.name == RELEASE:
        return "Release: CPU, CUDA 12, CUDA 13"
    return f"CUDA {variant.cuda}" if variant.cuda else "CPU only"


def capabilities(wheel: Wheel) -> list[str]:
    """The GPU compute capabilities that the wheel has code for."""
    return [name.removesuffix("+PTX") for name in wheel.info["architectures"]]


def advantage(wheel: Wheel, released: Wheel) -> str:
    """Why to prefer a variant's wheel to the release; empty where nothing speaks for it."""
    if not capabilities(wheel):
        small, large = (megabytes(each.path.stat().st_size) for each in (wheel, released))
        return f"It has no GPU code: {small} rather than {large}."
    # Code for one GPU runs on the later ones of its own major version.
    majors = {int(float(name)) for name in capabilities(released)}
    others = [name for name in capabilities(wheel) if int(float(name)) not in majors]
    newer = [name for name in others if int(float(name)) > max(majors)]
    gpus = " and ".join(dict.fromkeys(GENERATIONS.get(name, name) for name in newer or others))
    if newer:
        return (
            f"It has code for {gpus} GPUs (compute capability {', '.join(newer)}); for those the "
            "release wheel is compiled by the driver at first use."
        )
    return f"It serves {gpus} GPUs, which the release wheel does not." if others else ""


def commands(wheel: Wheel) -> dict[str, str]:
    """What to type for the wheel: besides this site it takes PyPI, which has torch."""
    # With its label: an installed extops of the same version is not replaced otherwise.
    what = PROJECT if variant_of(wheel) == RELEASE else f"{PROJECT}=={wheel.version}"
    where = SITE + index_path(variant_of(wheel))
    return {
        "pip": f"pip install {what} --extra-index-url {where}",
        "uv": f"uv pip install {what} --index {where}",
    }


def offers(found: Sequence[Wheel]) -> dict[str, dict[str, Any]]:
    """The newest wheel of each variant, as the page offers it."""
    newest = {variant_of(wheel): wheel for wheel in found}
    released = newest.get(RELEASE)
    offered = {}
    for name, wheel in newest.items():
        why = f"{wheel.path.name}, {megabytes(wheel.path.stat().st_size)}"
        if wheel is released:
            why = "One wheel for every Python and torch, on the CPU, with CUDA 12 and with CUDA 13."
        passport = wheels.passport(wheel.path)
        offered[name] = {
            "file": wheel.path.name,
            "size": megabytes(wheel.path.stat().st_size),
            "architectures": wheel.info["architectures"],
            "commit": wheel.info["commit"],
            "passport": passport.name if passport.is_file() else None,
            "rules": read_json(passport, {"rules": []})["rules"],
            "index": index_path(name),
            "commands": commands(wheel),
            "why": why,
            "advantage": advantage(wheel, released) if released else "",
        }
    return offered


def all_pythons(matrix: Matrix) -> list[str]:
    """Every Python of the matrix, oldest first."""
    return sorted({each for pythons in matrix.pythons.values() for each in pythons}, key=release)


def choices(matrix: Matrix) -> dict[str, dict[str, Any]]:
    """For each torch, newest first: its Pythons, and the variant for each CUDA it is built for."""
    return {
        torch: {
            "pythons": matrix.pythons[torch],
            "variants": {
                **{
                    variant.cuda: variant.name
                    for variant in matrix.variants.values()
                    if variant.cuda and variant.name != RELEASE and torch in variant.torch
                },
                "none": "cpu",
            },
        }
        for torch in sorted(matrix.pythons, key=release, reverse=True)
    }


def cudas(matrix: Matrix) -> list[str]:
    """Every CUDA that a torch of the matrix is built for, newest first."""
    found = {each.cuda for each in matrix.variants.values() if each.cuda and each.name != RELEASE}
    return sorted(found, key=release, reverse=True)


def groups(matrix: Matrix, recorded: Mapping[str, list[Run]]) -> list[dict[str, Any]]:
    """The table: a group for each wheel, in it a row for each torch, in that a cell a Python."""

    def row(variant: Variant, torch: str) -> dict[str, Any]:
        cells = [
            recorded.get(Cell(python, variant, torch).name, [])
            if python in matrix.pythons[torch]
            else None
            for python in all_pythons(matrix)
        ]
        return {"torch": torch, "lane": lane(torch), "cells": cells}

    return [
        {
            "name": variant.name,
            "title": title(variant),
            "rows": [
                row(variant, torch) for torch in sorted(variant.torch, key=release, reverse=True)
            ],
        }
        for variant in sorted(matrix.variants.values(), key=lambda each: each.name != RELEASE)
    ]


def plots(folder: Path, target: Path) -> dict[str, str]:
    """Copies the plots of a benchmark; returns their names, each with what it shows."""
    target.mkdir()
    there = {name: text for name, text in PLOTS.items() if (folder / name).is_file()}
    for name in there:
        shutil.copyfile(folder / name, target / name)
    return there


def write(found: Sequence[Wheel], site: Path, matrix: Matrix, results: Path = RESULTS) -> None:
    """Writes the page into `site`, with the plots it shows."""
    rows = read_json(results / survey.RESULTS.name, [])
    offered = offers(found)
    known = choices(matrix)
    cuda, variant = next(iter(known[matrix.headers_torch]["variants"].items()))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("landing.html").render(
        project=PROJECT,
        summary=found[-1].metadata["Summary"],
        # What the picker begins with, and what stands there without JavaScript.
        default={"python": matrix.default_python, "torch": matrix.headers_torch, "cuda": cuda},
        plain=offered.get(RELEASE) or offered.get(variant) or next(iter(offered.values())),
        site="https://<this-site>/",
        pythons=all_pythons(matrix),
        choices=known,
        cudas=cudas(matrix),
        offers=offered,
        groups=groups(matrix, runs(rows, found)),
        newest=read_json(results / NEWEST_TORCH),
        plots=plots(results / BENCHMARK, site / "benchmarks"),
        measured=read_json(results / BENCHMARK / "summary.json", {"environment": None})[
            "environment"
        ],
    )
    (site / "index.html").write_text(page)
