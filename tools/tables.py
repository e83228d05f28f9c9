"""The tables of the documentation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from extops_build import ROOT, libraries
from torchwheels import project
from torchwheels.releases import Cell, numbers

OPTIONS = project.load(ROOT / "pyproject.toml")


def binding(torch: str) -> str:
    """`stable` (LibTorch stable ABI) or `legacy` (older torch: raw pointers)."""
    return "stable" if numbers(torch) >= libraries.STABLE_TORCH else "legacy"


def cells_table() -> str:
    """The cells, one row for each wheel and torch."""
    columns = ("session suffix", "torch", "binding", "Python", "CUDA", "GPU architectures")
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in OPTIONS.chosen_cells():
        groups.setdefault((cell.label, cell.torch), []).append(cell)
    rows = [
        (
            f"`{cells[0].name.replace(cells[0].python, '*', 1)}`",
            torch,
            binding(torch),
            _span(cell.python for cell in cells),
            *_cuda(cells[0]),
            f"`{cells[0].image}`",
        )
        for (_, torch), cells in groups.items()
    ]
    return markdown((*columns, "base image"), rows)


def wheels_table() -> str:
    """The wheels: what each one is tested with."""
    columns = ("wheel", "torch", "Python", "CUDA", "GPUs (compute capability)")
    groups: dict[str, list[Cell]] = {}
    for cell in OPTIONS.chosen_cells():
        groups.setdefault(cell.label, []).append(cell)
    rows = [
        (
            f"`{label}`",
            _span(cell.torch.rpartition(".")[0] for cell in cells),
            _span(cell.python for cell in cells),
            *_cuda(cells[0]),
        )
        for label, cells in groups.items()
    ]
    return markdown(columns, rows)


def tests_table(passport: dict[str, Any]) -> str:
    """The test runs of a passport."""
    columns = ("cell", "Python", "torch", "device", "passed", "failed", "skipped")
    rows = [tuple(str(test[name.lower()]) for name in columns) for test in passport["tests"]]
    return markdown(columns, rows)


def _span(versions: Iterable[str]) -> str:
    found = sorted(set(versions), key=numbers)
    return f"{found[0]}–{found[-1]}" if len(found) > 1 else found[0]


def _cuda(cell: Cell) -> tuple[str, str]:
    return cell.cuda.version if cell.cuda else "–", " ".join(cell.architectures) or "–"


def markdown(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table."""
    head, *body = (f"| {' | '.join(line)} |" for line in (columns, *rows))
    return "\n".join([head, f"|{'---|' * len(columns)}", *body])
