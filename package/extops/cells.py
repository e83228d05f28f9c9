"""Recurrent cells of one's own, compiled against the headers in this package."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from extops import _checks, _devices, _jit, _loader, _schemas, reference
from extops.ops.sequence import Cell, as_biases

Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

_OPTIMIZE = "-O3", "-std=c++17"
_VECTORISE = "-fno-math-errno", "-fno-trapping-math"  # as extops_build/libraries.py


def include() -> Path:
    """The folder of the headers ``extops_cell.h`` and ``extops_cell.cuh``."""
    sources = os.environ.get("EXTOPS_JIT")
    return Path(sources).resolve() if sources else Path(__file__).parent / "include"


def load_cell(name: str, sources: Sequence[str | Path], step: Step) -> Callable[..., Any]:
    """Compiles a recurrent cell of one's own for the CPU and, where there is a GPU, for that; see ``extops_cell.h``.

    What has been compiled before is taken as it is, unless a source or a header has changed.

    Args:
        name: that of ``EXTOPS_CELL`` in the sources; the operator is ``torch.ops.extops.<name>_sequence``.
        sources: a C++ file and a CUDA file, which is left out where torch has no GPU.
        step: one step in PyTorch, for gradients of higher order: ``step(columns, old_c)`` gives ``h`` and the new
            ``c``, where ``columns`` is ``[B, kColumns * S]``.

    Returns:
        A function like :func:`extops.lstm_sequence` if it is called with a state ``(h_0, c_0)``, and like
        :func:`extops.gru_sequence` if the state is ``h_0``.

    Raises:
        RuntimeError: the sources cannot be compiled or define a cell of another name, torch is older than 2.10, or the
            name is taken.
        TypeError: ``sources`` is a single path.
    """
    _check_sources(name, sources)
    if _loader.binding != "stable":
        raise RuntimeError(f"load_cell: expected torch 2.10 or newer, but got {torch.__version__}")
    if f"{name}_sequence" in _schemas.OPERATORS:
        raise RuntimeError(
            f"load_cell: expected a new `name`, but there is a cell {name!r} already"
        )
    cuda = torch.cuda.is_available() and "cuda" in _devices.devices
    flags = [*_OPTIMIZE, f"-I{include()}", *(["-DEXTOPS_WITH_CUDA"] if cuda else [])]
    chosen = [Path(x).resolve() for x in sources if cuda or Path(x).suffix != ".cu"]
    library = _jit.load(
        f"extops_cell_{name}",
        chosen,
        [*flags, *_VECTORISE, "-fvisibility=hidden"],
        [*flags, *_jit.architecture_flags(), "-Xcompiler=-fvisibility=hidden"],
        cuda=cuda,
    )
    _schemas.register_fakes(_schemas.load(library))
    facts = _schemas.CELLS[name]
    backward = _backward_of_new(step) if facts.saves_new_c else _backward_of(step)
    composition = reference.cell_of_parts(facts, step, backward)
    return _function(Cell(name, composition=composition), facts)


def _check_sources(name: str, sources: Sequence[str | Path]) -> None:
    """Refuses a library that would define another cell: were that one loaded before, the process would end."""
    if isinstance(sources, (str, Path)):
        raise TypeError(
            f"load_cell: expected `sources` to be a list of files, but got one: {str(sources)!r}"
        )
    texts = (Path(source).read_text() for source in sources)
    defined = [cell for text in texts for cell in re.findall(r"^EXTOPS_CELL\((\w+)", text, re.M)]
    if defined != [name]:
        raise RuntimeError(
            f"load_cell: expected `sources` with one line EXTOPS_CELL({name}, ...), "
            f"but they define {', '.join(defined) or 'no cell'}"
        )


def _backward_of(step: Step) -> Callable[..., tuple[Tensor, Tensor]]:
    def backward(
        grad_h: Tensor, grad_c: Tensor, columns: Tensor, old_c: Tensor
    ) -> tuple[Tensor, Tensor]:
        _, pull_back = cast("Any", torch.func).vjp(step, columns, old_c)
        gradients: tuple[Tensor, Tensor] = pull_back((grad_h, grad_c))
        return gradients

    return backward


def _backward_of_new(step: Step) -> Callable[..., tuple[Tensor, Tensor]]:
    """From the cell state after the step. That is linear in the one before, whose gradient follows from the columns
    alone (``to_old_c`` in ``csrc/cells/cell.h``).
    """
    backward = _backward_of(step)

    def backward_of_new(
        grad_h: Tensor, grad_c: Tensor, columns: Tensor, new_c: Tensor
    ) -> tuple[Tensor, Tensor]:
        _, offset = step(columns, torch.zeros_like(new_c))
        slope = step(columns, torch.ones_like(new_c))[1] - offset
        old_c = (new_c - offset) / torch.where(slope == 0, 1, slope)
        return backward(grad_h, grad_c, columns, old_c)

    return backward_of_new


def _function(cell: Cell, facts: _schemas.CellFacts) -> Callable[..., Any]:
    def run(
        input: Tensor,
        state: Tensor | tuple[Tensor, Tensor],
        weight_ih: Tensor,
        weight_hh: Tensor,
        bias: tuple[Tensor, Tensor] | None = None,
        *,
        lengths: Tensor | None = None,
        batch_first: bool = False,
        reverse: bool = False,
    ) -> Any:
        if isinstance(state, Tensor) and facts.states == 2:
            raise TypeError(
                f"{cell.name}: expected `state` to be a pair of tensors, (h, c), of which the cell has both, "
                "but got one tensor"
            )
        pair = (state, state) if isinstance(state, Tensor) else state
        h_0, c_0 = _checks.as_pair(cell.name, pair)
        arguments = input, weight_ih, weight_hh, *as_biases(cell.name, bias), h_0, c_0
        output, h_n, c_n = cell(arguments, lengths, batch_first=batch_first, reverse=reverse)
        return output, h_n if isinstance(state, Tensor) else (h_n, c_n)

    run.__name__ = run.__qualname__ = cell.name
    return run
