"""Recurrent cells of one's own, compiled against the headers in this package."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from extops.binding import _checks, _devices, _jit, _loader, _schemas
from extops.calling import _autograd
from extops.choosing import _sequences
from extops.modules import NewLayers, Results, parameters_of
from extops.ops import compositions
from extops.ops.compositions import Pair
from extops.ops.sequence import Cell, as_biases

Step = Callable[..., tuple[Tensor, ...]]

_OPTIMIZE = "-O3", "-std=c++17"
_VECTORISE = "-fno-math-errno", "-fno-trapping-math"  # as extops_build/libraries.py

_NO_CODE = re.compile(r""""(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])'|//[^\n]*|/\*.*?\*/""", re.DOTALL)
"""Strings, characters and comments of C++."""


def include() -> Path:
    """The folder of the headers ``extops_cell.h`` and ``extops_cell.cuh``."""
    sources = os.environ.get("EXTOPS_JIT")
    return Path(sources).resolve() if sources else Path(__file__).parent / "include"


@dataclass(eq=False)
class LoadedCell:
    """What :func:`load_cell` returns. A pickle has the name, the sources' paths and the step, and loads the cell again;
    so ``step`` must be a function of a module.
    """

    name: str
    sources: list[Path]
    step: Step
    facts: _schemas.CellFacts
    build: _jit.Build
    version: tuple[int, int]
    """Of the library's file."""
    composition: compositions.Cell = field(init=False)
    """All steps in PyTorch."""
    cell: Cell = field(init=False)

    def __post_init__(self) -> None:
        def step(gates: Tensor, old_c: Tensor) -> Pair:
            h, *new_c = self.step(gates, *_apart(old_c, self.facts.cell_states))
            return h, _joined(new_c)

        self.composition = compositions.cell_of_parts(self.facts, step)
        self.cell = Cell(self.name, composition=self.composition)

    def __call__(
        self,
        input: Tensor,
        state: Tensor | tuple[Tensor, ...],
        weight_ih: Tensor,
        weight_hh: Tensor,
        bias: tuple[Tensor, Tensor] | None = None,
        *,
        numbers: Sequence[Tensor] | Tensor = (),
        lengths: Tensor | None = None,
        batch_first: bool = False,
        reverse: bool = False,
    ) -> Any:
        """As :func:`extops.lstm_sequence` or, of a state that is one tensor, as :func:`extops.gru_sequence`. A cell
        with more states than two takes and returns as many in place of ``(h, c)``. The ``numbers`` are those of the
        cell, each ``[S]``, or ``[]`` for all units.
        """
        cell, count = self.cell, self.facts.cell_states
        if isinstance(state, Tensor) and self.facts.states == 2:
            raise TypeError(
                f"{cell.name}: expected `state` to be a pair of tensors, (h, c), of which the cell has both, "
                "but got one tensor"
            )
        pair = (state, state) if isinstance(state, Tensor) and count == 1 else state
        h_0, *of_cell = _checks.as_states(cell.name, pair, 1 + count)
        if count > 1 and not _autograd.is_tracing():
            _check_parts(cell.name, h_0, of_cell)
        c_0 = _joined(of_cell)
        biases = as_biases(cell.name, bias)
        if self.facts.numbers or len(numbers):
            weight_ih, biases = self._with_numbers(weight_ih, weight_hh, biases, tuple(numbers))
        arguments = input, weight_ih, weight_hh, *biases, h_0, c_0
        output, h_n, c_n = cell(arguments, lengths, batch_first=batch_first, reverse=reverse)
        return output, h_n if isinstance(state, Tensor) else (h_n, *_apart(c_n, count))

    def _with_numbers(
        self, weight_ih: Tensor, weight_hh: Tensor, biases: Any, numbers: tuple[Tensor, ...]
    ) -> tuple[Tensor, Any]:
        """The parameters of the operator, in which a number is the bias of a gate whose weights are zeros."""
        facts, state_size = self.facts, weight_hh.shape[-1]
        shapes = [list(x.shape) for x in numbers]
        if len(shapes) != facts.numbers or not all(x in ([], [state_size]) for x in shapes):
            raise RuntimeError(
                f"{self.cell.name}: expected `numbers` to be {facts.numbers} tensors of shape [state_size] = "
                f"[{state_size}] or [], but got {len(shapes)} of shapes {shapes}"
            )
        rows = (facts.input - facts.numbers) * state_size
        _checks.check_shape(
            *(self.cell.name, "weight_ih", weight_ih, (rows, weight_ih.shape[-1])),
            f"[{facts.input - facts.numbers}*state_size, input_features]",
        )
        zeros = weight_ih.new_zeros(facts.numbers * state_size, weight_ih.shape[-1])
        bias_ih, bias_hh = biases
        if bias_ih is None:
            bias_ih = weight_ih.new_zeros(rows)
            bias_hh = weight_ih.new_zeros(facts.recurrent * state_size)
        units = (x.expand(state_size) for x in numbers)
        return torch.cat([zeros, weight_ih]), (torch.cat([*units, bias_ih]), bias_hh)

    def __reduce__(self) -> Any:
        return load_cell, (self.name, self.sources, self.step)

    def __deepcopy__(self, memo: dict[int, Any]) -> LoadedCell:
        return self  # a process has one, as it has one of a function


def _check_parts(name: str, h: Tensor, of_cell: Sequence[Tensor]) -> None:
    """What is joined: of other widths a number would become another unit's, and dtypes would be promoted."""
    _checks.check_tensor(name, "state[0]", h)
    for place, state in enumerate(of_cell, 1):
        _checks.check_tensor(name, f"state[{place}]", state)
        _checks.check_shape(name, f"state[{place}]", state, h.shape, "[batch, state_size]")
        _checks.check_matches(name, f"state[{place}]", state, "state[1]", of_cell[0])


def _joined(states: Sequence[Tensor]) -> Tensor:
    """The cell state as operators take it: the numbers of a unit, of all units one after the other."""
    return states[0] if len(states) == 1 else torch.cat(tuple(states), dim=1)


def _apart(c: Tensor, count: int) -> tuple[Tensor, ...]:
    """The inverse. No result is a view, which a caller could not change in place."""
    return (c,) if count == 1 else tuple([x.clone() for x in c.chunk(count, dim=1)])


loaded: dict[str, LoadedCell] = {}
"""By name."""


def load_cell(name: str, sources: Sequence[str | Path], step: Step) -> LoadedCell:
    """Compiles a recurrent cell of one's own for the CPU and, where there is a GPU, for that; see ``extops_cell.h``.

    That takes about a minute, as a line on standard error says. A library that was compiled before is loaded again,
    unless a source or a header has changed. A second call in a process returns the same function, with the newest
    ``step``.

    Args:
        name: that of ``EXTOPS_CELL`` in the sources; the operator is ``torch.ops.extops.<name>_sequence``.
        sources: a C++ file and a CUDA file, which is left out where torch has no GPU.
        step: one step in PyTorch, for gradients of higher order: ``step(gates, old_c)`` gives ``h`` and the new
            ``c``, where ``gates`` is ``[B, kGates * S]``; or as many of each ``c`` as ``kCellStates`` says.
            :func:`extops.check_cell` compares it with the sources.

    Returns:
        A function like :func:`extops.lstm_sequence` if it is called with a state ``(h_0, c_0)``, and like
        :func:`extops.gru_sequence` if the state is ``h_0``, which a cell can whose ``h`` is its ``c``. A cell with more
        states has one tensor for each. It can be
        pickled, if ``step`` can: the process that loads it needs the sources, and compiles nothing that is compiled.
        :func:`extops.cell_layer` makes a module of it.

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
    paths = [Path(x).resolve() for x in sources]
    facts = _schemas.CELLS[name]
    loaded[name] = LoadedCell(name, paths, step, facts, build, _version_of(library))
    return loaded[name]


def _build_of(name: str, sources: Sequence[str | Path]) -> _jit.Build:
    has_kernels = any(Path(x).suffix == ".cu" for x in sources)
    cuda = has_kernels and torch.cuda.is_available() and "cuda" in _devices.devices
    flags = [*_OPTIMIZE, f"-I{include()}", *(["-DEXTOPS_WITH_CUDA"] if cuda else [])]
    return _jit.Build(
        f"extops_cell_{name}",
        [Path(x).resolve() for x in sources if cuda or Path(x).suffix != ".cu"],
        [*flags, *_VECTORISE, *_jit.vector_flags(), "-fvisibility=hidden"],
        [*flags, *_jit.architecture_flags(), "-Xcompiler=-fvisibility=hidden"],
        cuda=cuda,
    )


def _again(cell: LoadedCell, build: _jit.Build, step: Step) -> LoadedCell:
    """A cell that is loaded, if it is what would be loaded now."""
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
    return cell


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


class CellLayer(NewLayers):
    r"""Layers of a cell of one's own over whole sequences, shaped like :class:`torch.nn.LSTM`: see
    :func:`extops.cell_layer`.
    """

    _features, _size = "input_size", "hidden_size"

    def __init__(self, cell: LoadedCell, *arguments: Any) -> None:
        self._facts, self._number_of_states = cell.facts, cell.facts.states
        super().__init__(*arguments)
        self.cell = cell

    @property
    def _name(self) -> str:
        return "cell_layer"

    def _shapes(self, features: int, state_size: int) -> dict[str, tuple[int, ...]]:
        facts = self._facts
        of_input = (facts.input - facts.numbers) * state_size
        of_state = facts.recurrent * state_size
        shapes: dict[str, tuple[int, ...]] = {"numbers": (facts.numbers, state_size)}
        return (shapes if facts.numbers else {}) | {
            "weight_ih": (of_input, features),
            "weight_hh": (of_state, state_size),
            "bias_ih": (of_input,),
            "bias_hh": (of_state,),
        }

    def _fits(self, input: Tensor, time: int, batch: int) -> bool:
        # The numbers become rows of weights between those of one direction and of the other.
        # So would the parts of a cell state.
        facts = self._facts
        return not facts.numbers and facts.cell_states == 1 and super()._fits(input, time, batch)

    def _run(self, input: Tensor, *arguments: Tensor, **options: Any) -> Results:
        number = self._number_of_states
        state = arguments[0] if number == 1 else arguments[:number]
        numbers: Tensor | tuple[()] = ()
        weight_ih, weight_hh, *biases = arguments[number:]
        if self._facts.numbers:
            numbers, weight_ih, weight_hh, *biases = arguments[number:]
        bias = (biases[0], biases[1]) if biases else None
        parameters = weight_ih, weight_hh, bias
        output, last = self.cell(input, state, *parameters, numbers=numbers, **options)
        return output, last if number > 1 else (last,)

    def _parameters_of(self, suffix: str) -> tuple[Tensor, ...]:
        return tuple(parameters_of(self, self._names(suffix)))

    def extra_repr(self) -> str:
        """The name of the cell and the sizes, for ``repr``."""
        return f"{self.cell.name}, {super().extra_repr()}"


def cell_layer(
    cell: LoadedCell,
    input_size: int,
    hidden_size: int,
    num_layers: int = 1,
    bias: bool = True,
    batch_first: bool = False,
    dropout: float = 0.0,
    bidirectional: bool = False,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> CellLayer:
    r"""A module of layers of a cell of one's own, shaped like :class:`torch.nn.LSTM`: the same arguments, names of
    parameters, and packed input. It can be pickled if the cell can.

    Args:
        cell: what :func:`extops.load_cell` returned.
        input_size: the size ``I`` of the input.
        hidden_size: the size ``S`` of the states.
        num_layers: each layer after the first reads the output of the one before.
        bias: whether there are biases.
        batch_first: ``input`` and ``output`` are ``[B, T, ...]`` instead of ``[T, B, ...]``.
        dropout: the probability, in training, that an element between two layers is dropped.
        bidirectional: each layer also runs backwards in time; ``D`` below is then 2, else 1.
        device: where the parameters are made.
        dtype: float64, float32, bfloat16 or float16.

    Returns:
        A module with ``weight_ih_l[k]`` of ``[kInput * S, I]``, ``weight_hh_l[k]`` of ``[kRecurrent * S, S]``, and
        ``bias_ih_l[k]`` and ``bias_hh_l[k]`` of as many rows, and ``numbers_l[k]`` of ``[kNumbers, S]`` for a cell that
        has numbers, of which ``weight_ih`` has no rows; all drawn uniformly from :math:`\pm 1/\sqrt{S}`; those of
        the other direction end in ``_reverse``. ``layer(input, state) -> output, last_state``, with states as of
        ``nn.LSTM`` or, of a cell whose ``h`` is its ``c``, as of ``nn.GRU``; a cell with more states has as many.

    Raises:
        TypeError: ``cell`` is something else.
        ValueError: an argument is out of range; the message names it.
    """
    if not isinstance(cell, LoadedCell):
        raise TypeError(
            f"cell_layer: expected `cell` to be what load_cell returned, but got {cell!r}"
        )
    options = num_layers, bias, batch_first, dropout, bidirectional
    return CellLayer(cell, input_size, hidden_size, *options, device, dtype)
