"""What is compared: an implementation of an operator, as the calls that are timed.

The kinds of work that a call may do:

- `forward`: for the cell and the sequence with gradients recorded, for elementwise operators without;
- `forward_backward`: and the gradients of the parameters (cell, sequence) or of all inputs (elementwise);
- `forward_backward_all`: and those of all inputs;
- `grad_weights`, `grad_input`: matrix products alone, those of backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from benchmarks.protocol import Call

Step = Callable[[], tuple[Tensor, Tensor]]


@dataclass
class Variant:
    """One implementation, ready to be called."""

    calls: dict[str, Call]
    check: Callable[[], Sequence[Tensor]] | None = None
    """Its results, to be compared with the reference's."""
    step: Step | None = None
    """A cell's forward, as the tutorial's protocol calls it."""
    parameters: tuple[Tensor, ...] = ()
    not_captured: str | None = None
    """Why it has no device time by graph replay."""


Makers = dict[str, Callable[[], Variant]]
"""What makes the variants of a case, by name."""

DEFAULT_STREAM = (
    "launches on the default stream, which no graph captures, not on torch's current one"
)
"""Why the tutorial-style kernels have no device time by graph replay."""
