"""Medians, spreads and ratios of samples that were taken round by round."""

from __future__ import annotations

from collections.abc import Sequence


def quantile(samples: Sequence[float], share: float) -> float:
    """The value below which that share of the samples lies, interpolated between neighbours."""
    ordered = sorted(samples)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def median(samples: Sequence[float]) -> float:
    """The middle of the samples."""
    return quantile(samples, 0.5)


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
    """The ratios round by round."""
    return [a / b for a, b in zip(numerator, denominator, strict=True)]
