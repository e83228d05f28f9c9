"""The tables of the documentation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from extops_build import ROOT, libraries
from torchwheels.options import Target, numbers, project

OPTIONS = project.load(ROOT / "pyproject.toml")


def binding(torch: str) -> str:
    """`stable` (LibTorch stable ABI) or `legacy` (older torch: raw pointers)."""
    return "stable" if numbers(torch) >= libraries.STABLE_TORCH else "legacy"


def targets_table() -> str:
    """The targets, one row for each wheel and torch."""
    columns = ("session suffix", "torch", "Python", "CUDA", "GPU architectures")
    groups: dict[tuple[str, str], list[Target]] = {}
    for target in OPTIONS.chosen_targets():
        groups.setdefault((f"{target.label}{target.machine.suffix}", target.torch), []).append(
            target
        )
    rows = [
        (
            f"`{targets[0].name.replace(targets[0].python, '*', 1)}`",
            torch,
            _span(target.python for target in targets),
            *_cuda(targets[0]),
            f"`{targets[0].image.partition('@')[0]}`",
        )
        for (_, torch), targets in groups.items()
    ]
    return markdown((*columns, "base image"), rows)


def wheels_table() -> str:
    """The wheels: what each one is tested with."""
    columns = ("wheel", "torch", "Python", "CUDA", "GPUs (compute capability)")
    groups: dict[str, list[Target]] = {}
    for target in OPTIONS.chosen_targets():
        groups.setdefault(f"{target.label}{target.machine.suffix}", []).append(target)
    rows = [
        (
            f"`{label}`",
            _span(target.torch.rpartition(".")[0] for target in targets),
            _span(target.python for target in targets),
            *_cuda(targets[0]),
        )
        for label, targets in groups.items()
    ]
    return markdown(columns, rows)


def tests_table(report: dict[str, Any]) -> str:
    """The test runs of a build report."""
    columns = ("target", "Python", "torch", "device", "passed", "failed", "skipped")
    rows = [tuple(str(test[name.lower()]) for name in columns) for test in report["tests"]]
    return markdown(columns, rows)


def _span(versions: Iterable[str]) -> str:
    found = sorted(set(versions), key=numbers)
    return f"{found[0]}–{found[-1]}" if len(found) > 1 else found[0]


def _cuda(target: Target) -> tuple[str, str]:
    return target.cuda.version if target.cuda else "–", " ".join(target.architectures) or "–"


def markdown(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table."""
    head, *body = (f"| {' | '.join(line)} |" for line in (columns, *rows))
    return "\n".join([head, f"|{'---|' * len(columns)}", *body])
