"""What a case of the fuzzer is, how one is drawn, and how one that fails becomes a simpler one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from extops_build import UserError

DEVICES = ("cpu", "cuda")
OWN_CELLS = ("own_gru", "own_lstm", "own_lltm", "own_mgu")
LAYOUTS = ("contiguous", "offset", "padded", "sliced", "transposed", "expanded")
KERNELS = ("step", "tensor_block", "float32_block", "float32_cluster", "tensor_cluster", "group")

Draw = Callable[[Random], Any]


def _dimension(default: Any, draws: dict[str, Draw], simpler: Callable[[Any], list[Any]]) -> Any:
    return dataclasses.field(default=default, metadata={"draws": draws, "simpler": simpler})


def one_of(*values: Any, rarely: tuple[Any, ...] = (), once_in: int = 20, cuda: Any = None) -> Any:
    """A field that is one of some values, the simplest first; `cuda` are those to draw on a GPU, if not the same."""

    def draw_from(values: tuple[Any, ...]) -> Draw:
        return lambda random: random.choice(
            rarely if rarely and random.random() < 1 / once_in else values
        )

    every = tuple(dict.fromkeys((*values, *(cuda or ()), *rarely)))
    draws = {"cpu": draw_from(values), "cuda": draw_from(cuda or values)}
    return _dimension(values[0], draws, lambda value: list(every[: every.index(value)]))


def some_of(*names: str) -> Any:
    """A field that names some of these, or none."""

    def draw(random: Random) -> str:
        every = random.random() < 0.5
        return " ".join(name for name in names if every or random.random() < 0.6)

    def simpler(value: str) -> list[str]:
        """The largest number of names is the usual case, but one name says most about what fails."""
        given = value.split()
        return [*(name for name in given if given != [name])]

    return _dimension(" ".join(names), {"cpu": draw, "cuda": draw}, simpler)


def _log_uniform(random: Random, least: int, most: int) -> int:
    """Small numbers as often as large ones, and odd ones as even ones."""
    return int(least * ((most + 1) / least) ** random.random())


def _smaller(least: int) -> Callable[[int], list[int]]:
    return lambda n: [x for x in dict.fromkeys((least, n // 2, n - 1)) if least <= x < n]


def size(most: int, cuda: int = 0, least: int = 1, zero: bool = False) -> Any:
    """A field that is a number up to `most`, on a GPU up to `cuda`, and rarely zero."""

    def up_to(most: int) -> Draw:
        return lambda random: (
            0 if zero and random.random() < 0.01 else _log_uniform(random, least, most)
        )

    draws = {"cpu": up_to(most), "cuda": up_to(cuda or most)}
    return _dimension(least, draws, _smaller(least))


def number_of_units() -> Any:
    """On a GPU often so many that a group of blocks computes them, whose kernels are the most intricate."""

    def on_gpu(random: Random) -> int:
        return random.randint(513, 1100) if random.random() < 0.4 else _log_uniform(random, 1, 1200)

    draws = {"cpu": lambda random: _log_uniform(random, 1, 500), "cuda": on_gpu}
    return _dimension(1, draws, _smaller(1))


def any_number() -> Any:
    """A field whose value means nothing."""

    def draw(random: Random) -> int:
        return random.randrange(2**20)

    return _dimension(0, dict.fromkeys(DEVICES, draw), lambda n: [0] if n else [])


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of extops: the value that is given to a field here is the simplest. A new dimension is a line here, and
    what it means in `problem.py`.
    """

    cell: str = one_of("lstm", "gru", "lltm", "lstm", "gru", "lltm", *OWN_CELLS)
    call: str = one_of("layer", "layer", "function", "cell")
    precision: str = one_of(
        "float32", "float64", "bfloat16", "float16",
        cuda=("float32", "float32", "tf32", "float64", "bfloat16", "float16"),
    )  # fmt: skip
    time: int = size(300, zero=True)
    batch: int = size(100, cuda=400, zero=True)
    features: int = size(200, cuda=600, zero=True)
    units: int = number_of_units()
    layers: int = one_of(1, 1, 1, 2, 3)
    bidirectional: bool = one_of(False, True, True)
    reverse: bool = one_of(False, True)
    batch_first: bool = one_of(False, True)
    batched: bool = one_of(True, rarely=(False,), once_in=8)
    bias: bool = one_of(True, True, True, False)
    state: bool = one_of(True, True, False)
    lengths: str = one_of("", "", "sorted", "any")
    input_layout: str = one_of(*LAYOUTS)
    state_layout: str = one_of("contiguous", *LAYOUTS)
    weight_layout: str = one_of("contiguous", "contiguous", *LAYOUTS)
    upstream_layout: str = one_of("contiguous", *LAYOUTS)
    wanted: str = some_of("input", "state", "weight", "bias")
    towards: str = some_of("output", "h_n", "c_n")
    second_order: bool = one_of(False, rarely=(True,), once_in=10)
    autocast: str = one_of("", "", "", "", "bfloat16", "float16")
    graph: bool = one_of(False, cuda=(False, False, False, True))
    compile: str = one_of("", rarely=("aot_eager", "aot_eager", "inductor"), once_in=100)
    beside: str = one_of(
        "nothing", "nothing", "elementwise", "products", "sequence", "threads",
        cuda=("nothing", "elementwise", "elementwise", "products", "sequence", "threads"),
    )  # fmt: skip
    kernel: str = one_of("", cuda=("",) * 6 + KERNELS)
    cores: int = one_of(1, 1, 1, 2, 3)
    repeats: int = size(4, cuda=40, least=2)
    seed: int = any_number()

    def to_json(self) -> str:
        """The fields that are not the simplest."""
        values = dataclasses.asdict(self)
        plain = dataclasses.asdict(Case())
        return json.dumps({name: x for name, x in values.items() if x != plain[name]})


@dataclasses.dataclass(frozen=True)
class Answer:
    """What was found of a case."""

    kind: str = ""
    """Empty where all is well."""
    text: str = ""
    kernels: tuple[str, ...] = ()
    """Those of the forward and the backward."""

    def __str__(self) -> str:
        by = f" (by {' and '.join(self.kernels)})" if self.kernels else ""
        return f"{self.kind}: {self.text}{by}"


_FIELDS = {field.name: field for field in dataclasses.fields(Case)}


def from_json(text: str) -> dict[str, Any]:
    """Some fields of a case."""
    try:
        found = dict(json.loads(text))
    except ValueError as error:
        raise UserError(
            f"expected a case as JSON, such as {Case(units=3).to_json()!r}: {error}"
        ) from None
    if unknown := sorted(found.keys() - _FIELDS.keys()):
        raise UserError(f"a case has no {', '.join(unknown)}, but {', '.join(_FIELDS)}")
    return found


def draw(random: Random, device: str, given: dict[str, Any]) -> Case:
    """A case at random, but for the fields that are given."""
    drawn = {name: field.metadata["draws"][device](random) for name, field in _FIELDS.items()}
    return settled(Case(**{**drawn, **given}), device)


def settled(case: Case, device: str) -> Case:
    """The case, with what cannot be together made so that it can."""
    to: dict[str, Any] = {}
    on_gpu = device == "cuda"
    if not on_gpu:
        to |= {"graph": False, "kernel": ""}
        if case.precision == "tf32":
            to["precision"] = "float32"
    if case.precision != "float32":
        to["autocast"] = ""
    call = "function" if case.cell in OWN_CELLS else case.call
    to["call"] = call
    if call == "cell":
        to |= {"time": 1, "batch_first": False, "lengths": ""}
    if call != "function" and case.cell != "lltm":
        to["features"] = max(1, case.features)  # as torch's modules want
    if call != "layer":
        to |= {"layers": 1, "bidirectional": False}
    if call != "function":
        to["reverse"] = False
    if call == "function" or (call == "cell" and case.cell == "lltm"):
        to |= {"batched": True}
        to |= {"bias": True} if case.cell == "lltm" else {}
        to |= {"state": True} if call == "function" else {}
    case = dataclasses.replace(case, **to)
    to = {}
    if not case.batched:
        to |= {"batch": 1, "lengths": ""}
    if case.call == "cell" or (case.call == "layer" and case.time * case.batch == 0):
        to["lengths"] = ""
    if case.graph or case.compile:
        to |= {"graph": case.graph and not case.compile, "second_order": False}
        if case.call == "layer":
            to["lengths"] = ""  # the host computes with those of packed input
        if case.beside in ("sequence", "threads"):
            to["beside"] = "elementwise" if on_gpu else "nothing"
    return _within_budget(dataclasses.replace(case, **to), on_gpu)


def _within_budget(case: Case, on_gpu: bool) -> Case:
    """Less of what is largest, until the case takes well below a second."""
    most_products, most_steps = (3e11, 400) if on_gpu else (3e8, 150)
    while True:
        sequences = case.layers * (1 + case.bidirectional)
        steps = case.time * sequences
        inputs = max(case.features, (1 + case.bidirectional) * case.units * (case.layers > 1))
        products = 24 * steps * case.batch * case.units * (case.units + inputs)
        if case.precision in ("bfloat16", "float16") and not on_gpu:
            products *= 4
        if steps > most_steps:
            case = dataclasses.replace(case, time=max(1, case.time // 2))
        elif products > most_products or (on_gpu and products * case.repeats > 20 * most_products):
            name = max(("time", "batch", "features", "units"), key=lambda name: _weight(case, name))
            case = dataclasses.replace(case, **{name: getattr(case, name) // 2})
        else:
            return case


def _weight(case: Case, name: str) -> float:
    value: int = getattr(case, name)
    # Of units there shall be many: what is peculiar to a kernel depends on them.
    return 0 if value <= 1 else value / 8 if name == "units" else value


def simpler(case: Case, device: str) -> Iterator[Case]:
    """Cases that differ from this one in a field, which is simpler."""
    for name, field in _FIELDS.items():
        for value in field.metadata["simpler"](getattr(case, name)):
            found = settled(dataclasses.replace(case, **{name: value}), device)
            if found != case:
                yield found


def shrink(
    case: Case, device: str, fails: Callable[[Case], bool], is_over: Callable[[], bool]
) -> Case:
    """The simplest case found that fails, a field at a time."""
    tried = {case}
    while True:
        for candidate in simpler(case, device):
            if is_over():
                return case
            if candidate not in tried:
                tried.add(candidate)
                if fails(candidate):
                    case = candidate
                    break
        else:
            return case
