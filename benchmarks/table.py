"""The tables on the terminal."""

from __future__ import annotations

import statistics
from typing import Any


def of_ceilings(ceilings: list[dict[str, Any]]) -> str:
    """What the machine can do, a line for each number of threads."""
    lines = []
    for each in ceilings:
        parts = [f"copy {each['bytes_per_second'] / 1e9:.0f} GB/s"]
        for mode, speed in each["flop_per_second"].items():
            parts.append(f"{mode} products {speed / 1e12:.3g} TFLOP/s")
        threads = f"{each['threads']} threads: " if each["threads"] else ""
        lines.append(threads + ", ".join(parts))
    return "\n".join(lines)


def of_case(record: dict[str, Any]) -> str:
    """The medians in microseconds, a row for each variant."""
    measures: list[str] = []
    for variant in record["variants"].values():
        measures += [each for each in variant["samples"] if each not in measures]
    heads = [each.replace("forward_backward", "f+b").replace("forward", "fwd") for each in measures]
    heads = [each.replace("backward", "bwd") for each in heads]
    lines = [f"{'µs':30}" + "".join(f"{head:>18}" for head in [*heads, "first call s"])]
    for name, variant in record["variants"].items():
        cells = []
        for measure in measures:
            samples = variant["samples"].get(measure)
            cells.append(f"{statistics.median(samples):.4g}" if samples else "–")
        cells.append(f"{variant.get('first_call_seconds', float('nan')):.2f}")
        line = f"{name:30}" + "".join(f"{cell:>18}" for cell in cells)
        if "all" in variant["failed"]:
            line = f"{name:30} failed: {variant['failed']['all'][:120]}"
        lines.append(line)
        lines += [
            f"{'':30} {measure} failed: {message[:120]}"
            for measure, message in variant["failed"].items()
            if measure not in ("all", "device")
        ]
    return "\n".join(lines)
