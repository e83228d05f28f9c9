"""Recurrent cells of one's own, compiled against the headers in this package."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from extops.binding import _checks, _devices, _jit, _loader, _schemas
from extops.choosing import _sequences
from extops.ops import compositions
from extops.ops.sequence import Cell, as_biases

Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

_OPTIMIZE = "-O3", "-std=c++17"
_VECTORISE = "-fno-math-errno", "-fno-trapping-math"  # as extops_build/libraries.py

_NO_CODE = re.compile(r""""(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])'|//[^\n]*|/\*.*?\*/""", re.DOTALL)
"""Strings, characters and comments of C++."""


def include() -> Path:
    """The folder of the headers ``extops_cell.h`` and ``extops_cell.cuh``."""
    sources = os.environ.get("EXTOPS_JIT")
    return Path(sources).resolve() if sources else Path(__file__).parent / "include"


@dataclass
class Loaded:
    """A cell that this process has loaded."""

    name: str
    step: Step
    facts: _schemas.CellFacts
    build: _jit.Build
    version: tuple[int, int]
    """Of the library's file."""
    composition: compositions.Cell = field(init=False)
    """All steps in PyTorch."""
    function: Callable[..., Any] = field(init=False)

    def __post_init__(self) -> None:
        def step(gates: Tensor, old_c: Tensor) -> tuple[Tensor, Tensor]:
            return self.step(gates, old_c)

        backward = _backward_of_new(step) if self.facts.saves_new_c else _backward_of(step)
        self.composition = compositions.cell_of_parts(self.facts, step, backward)
        self.function = _function(Cell(self.name, composition=self.composition), self.facts)


loaded: dict[str, Loaded] = {}
"""By name."""


def load_cell(name: str, sources: Sequence[str | Path], step: Step) -> Callable[..., Any]:
    """Compiles a recurrent cell of one's own for the CPU and, where there is a GPU, for that; see ``extops_cell.h``.

    That takes about a minute, as a line on standard error says. A library that was compiled before is loaded again,
    unless a source or a header has changed. A second call in a process returns the same function, with the newest
    ``step``.

    Args:
        name: that of ``EXTOPS_CELL`` in the sources; the operator is ``torch.ops.extops.<name>_sequence``.
        sources: a C++ file and a CUDA file, which is left out where torch has no GPU.
        step: one step in PyTorch, for gradients of higher order: ``step(gates, old_c)`` gives ``h`` and the new
            ``c``, where ``gates`` is ``[B, kGates * S]``. :func:`extops.check_cell` compares it with the sources.

    Returns:
        A function like :func:`extops.lstm_sequence` if it is called with a state ``(h_0, c_0)``, and like
        :func:`extops.gru_sequence` if the state is ``h_0``, which a cell can whose ``h`` is its ``c``.

    Raises:
        RuntimeError: the sources cannot be compiled or define a cell of another name, torch is older than 2.10, the
            name is taken, or what the name stands for has changed since this process loaded it.
        TypeError: ``sources`` is a single path.
    """
    _check_sources(name, sources)
    if _loader.binding != "stable":
        raise RuntimeError(f"load_cell: expected torch 2.10 or newer, but got {torch.__version__}")
    build = _build_of(name, sources)
    if name in loaded:
        return _again(loaded[name], build, step)
    if name in _schemas.CELLS:
        raise RuntimeError(
            f"load_cell: expected a new `name`, but there is a cell {name!r} already"
        )
    library = build.load(
        f"extops: compiling the cell {name}, which takes about a minute; what comes of it stays in {build.folder}"
    )
    _schemas.register_fakes(_schemas.load(library))
    if build.cuda:
        _sequences.remember_for(library)
    loaded[name] = Loaded(name, step, _schemas.CELLS[name], build, _version_of(library))
    return loaded[name].function


def _build_of(name: str, sources: Sequence[str | Path]) -> _jit.Build:
    cuda = torch.cuda.is_available() and "cuda" in _devices.devices
    flags = [*_OPTIMIZE, f"-I{include()}", *(["-DEXTOPS_WITH_CUDA"] if cuda else [])]
    return _jit.Build(
        f"extops_cell_{name}",
        [Path(x).resolve() for x in sources if cuda or Path(x).suffix != ".cu"],
        [*flags, *_VECTORISE, "-fvisibility=hidden"],
        [*flags, *_jit.architecture_flags(), "-Xcompiler=-fvisibility=hidden"],
        cuda=cuda,
    )


def _again(cell: Loaded, build: _jit.Build, step: Step) -> Callable[..., Any]:
    """The function of a cell that is loaded, if it is what would be loaded now."""
    if cell.build != build:
        given, before = (", ".join(map(str, x.sources)) for x in (build, cell.build))
        raise RuntimeError(
            f"load_cell: expected a new `name`, or the sources of the cell {cell.name!r} that this process has "
            f"loaded, {before}, but got {given}"
        )
    if not (build.is_current() and _version_of(build.library) == cell.version):
        raise RuntimeError(
            f"load_cell: the sources of {cell.name!r} have changed since this process loaded it, and it cannot load "
            "a cell twice: start Python anew (in a notebook: restart the kernel)"
        )
    cell.step = step
    return cell.function


def _version_of(library: Path) -> tuple[int, int]:
    about = library.stat()
    return about.st_ino, about.st_mtime_ns


def _check_sources(name: str, sources: Sequence[str | Path]) -> None:
    """Refuses a library that would define another cell: if that cell were loaded already, loading it again would abort
    the process.
    """
    if isinstance(sources, (str, Path)):
        raise TypeError(
            f"load_cell: expected `sources` to be a list of files, but got one: {str(sources)!r}"
        )
    texts = (_NO_CODE.sub(" ", Path(source).read_text()) for source in sources)
    defined = [x for text in texts for x in re.findall(r"\bEXTOPS_CELL\s*\(\s*(\w+)", text)]
    if defined != [name]:
        raise RuntimeError(
            f"load_cell: expected `sources` with one line EXTOPS_CELL({name}, ...), "
            f"but they define {', '.join(defined) or 'no cell'}"
        )


def _backward_of(step: Step) -> Callable[..., tuple[Tensor, Tensor]]:
    def backward(
        grad_h: Tensor, grad_c: Tensor, gates: Tensor, old_c: Tensor
    ) -> tuple[Tensor, Tensor]:
        _, pull_back = cast("Any", torch.func).vjp(step, gates, old_c)
        gradients: tuple[Tensor, Tensor] = pull_back((grad_h, grad_c))
        return gradients

    return backward


def _backward_of_new(step: Step) -> Callable[..., tuple[Tensor, Tensor]]:
    """The backward from the cell state after the step. This is linear in the state before, with a factor that depends
    on the gates alone (``to_old_c`` in ``csrc/cells/cell.h``).
    """
    backward = _backward_of(step)

    def backward_of_new(
        grad_h: Tensor, grad_c: Tensor, gates: Tensor, new_c: Tensor
    ) -> tuple[Tensor, Tensor]:
        _, offset = step(gates, torch.zeros_like(new_c))
        factor = step(gates, torch.ones_like(new_c))[1] - offset
        old_c = (new_c - offset) / torch.where(factor == 0, 1, factor)
        return backward(grad_h, grad_c, gates, old_c)

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
