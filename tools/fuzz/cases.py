"""What a case of the fuzzer is, how one is drawn, and how one that fails becomes a simpler one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from random import Random
from typing import Any

from extops_build import UserError

DEVICES = ("cpu", "cuda")
BUILT_IN = ("lstm", "gru", "rnn", "lltm")
OWN_CELLS = ("own_gru", "own_lstm", "own_lltm")
LAYOUTS = ("contiguous", "offset", "padded", "sliced", "transposed", "expanded")
KERNELS = ("step", "tensor_block", "float32_block", "float32_cluster", "tensor_cluster", "group")

Draw = Callable[[Random], Any]


def _field(default: Any, draws: dict[str, Draw], simpler: Callable[[Any], list[Any]]) -> Any:
    return dataclasses.field(default=default, metadata={"draws": draws, "simpler": simpler})


def one_of(*values: Any, rarely: tuple[Any, ...] = (), once_in: int = 20, cuda: Any = None) -> Any:
    """A field that is one of some values, the simplest first; `cuda` are those to draw on a GPU, if others."""

    def draw_from(values: tuple[Any, ...]) -> Draw:
        return lambda random: random.choice(
            rarely if rarely and random.random() < 1 / once_in else values
        )

    every = tuple(dict.fromkeys((*values, *(cuda or ()), *rarely)))
    draws = {"cpu": draw_from(values), "cuda": draw_from(cuda or values)}
    return _field(values[0], draws, lambda value: list(every[: every.index(value)]))


def some_of(*names: str) -> Any:
    """A field that names some of these: usually all, but a single one says most of what fails."""

    def draw(random: Random) -> str:
        every = random.random() < 0.5
        return " ".join(name for name in names if every or random.random() < 0.6)

    def simpler(value: str) -> list[str]:
        return value.split() if " " in value else []

    return _field(" ".join(names), dict.fromkeys(DEVICES, draw), simpler)


def size(
    most: int,
    cuda: int = 0,
    least: int = 1,
    often: tuple[int, int] | None = None,
    zero: bool = False,
) -> Any:
    """A field that is a number up to `most`, on a GPU up to `cuda` or in the range `often`; rarely zero."""

    def up_to(most: int, often: tuple[int, int] | None = None) -> Draw:
        def draw(random: Random) -> int:
            if zero and random.random() < 0.01:
                return 0
            if often is not None and random.random() < 0.5:
                return random.randint(*often)
            # Small numbers as often as large ones, and odd ones as even ones.
            return int(least * ((most + 1) / least) ** random.random())

        return draw

    def simpler(number: int) -> list[int]:
        tries = least, number // 2, number * 3 // 4, number * 7 // 8, number - 1
        return [x for x in dict.fromkeys(tries) if least <= x < number]

    return _field(least, {"cpu": up_to(most), "cuda": up_to(cuda or most, often)}, simpler)


def any_number() -> Any:
    """A field whose value means nothing."""

    def draw(random: Random) -> int:
        return random.randrange(2**20)

    return _field(0, dict.fromkeys(DEVICES, draw), lambda number: [0] if number else [])


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of extops: the first value of a field is the simplest. A new dimension is a line here, and what it means
    in `problem.py`. On a GPU the kernels of large states are the most intricate, and so is what runs beside them.
    """

    cell: str = one_of(*3 * BUILT_IN, *OWN_CELLS)
    call: str = one_of("layer", "layer", "layer", "function", "cell")
    precision: str = one_of(
        "float32", "float64", "bfloat16", "float16",
        cuda=("float32", "float32", "float32", "tf32", "float64", "bfloat16", "float16"),
    )  # fmt: skip
    time: int = size(300, often=(30, 100), zero=True)
    batch: int = size(100, cuda=400, zero=True)
    features: int = size(200, cuda=600, zero=True)
    units: int = size(500, cuda=1200, often=(513, 1100))
    layers: int = one_of(1, 1, 1, 2, 3)
    bidirectional: bool = one_of(False, True, True)
    reverse: bool = one_of(False, True)
    batch_first: bool = one_of(False, True)
    batched: bool = one_of(True, rarely=(False,), once_in=8)
    bias: bool = one_of(True, True, True, False)
    state: bool = one_of(True, True, False)
    narrow_state: bool = one_of(False, True)
    lengths: str = one_of("", "", "sorted", "any")
    input_layout: str = one_of(*LAYOUTS)
    state_layout: str = one_of("contiguous", *LAYOUTS)
    weight_layout: str = one_of("contiguous", "contiguous", *LAYOUTS)
    upstream_layout: str = one_of("contiguous", *LAYOUTS)
    wanted: str = some_of("input", "state", "weight", "bias")
    towards: str = some_of("output", "h_n", "c_n")
    second_order: bool = one_of(False, rarely=(True,), once_in=10)
    transform: str = one_of("", rarely=("jvp", "vmap"), once_in=10)
    # torch's module, by ours or by what is faster
    accelerated: str = one_of("", "", "extops", "measured")
    autocast: str = one_of("", rarely=("bfloat16", "float16"), once_in=5)
    graph: bool = one_of(False, cuda=(False, False, False, True))
    compile: str = one_of("", rarely=("aot_eager", "aot_eager", "inductor"), once_in=100)
    beside: str = one_of(
        "nothing", "nothing", "elementwise", "gemms", "sequence", "threads",
        cuda=("nothing", "elementwise", "elementwise", "gemms", "sequence", "threads"),
    )  # fmt: skip
    kernel: str = one_of("", cuda=("",) * 12 + KERNELS)
    chunk: int = one_of(0, rarely=(2**18, 2**14, 2**10), once_in=6)  # bytes of gates, if not 0
    cores: int = one_of(1, 1, 1, 2, 3)
    repeats: int = size(4, cuda=40, least=2)
    seed: int = any_number()

    def to_json(self) -> str:
        """The fields that are not the simplest."""
        simplest = dataclasses.asdict(Case())
        return json.dumps(
            {name: x for name, x in dataclasses.asdict(self).items() if x != simplest[name]}
        )


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


FIELDS = {field.name: field for field in dataclasses.fields(Case)}


def from_json(text: str) -> dict[str, Any]:
    """Some fields of a case."""
    try:
        found = dict(json.loads(text))
    except ValueError as error:
        example = Case(units=3).to_json()
        raise UserError(f"expected a case as JSON, such as {example!r}: {error}") from None
    if unknown := sorted(found.keys() - FIELDS.keys()):
        raise UserError(f"a case has no {', '.join(unknown)}, but {', '.join(FIELDS)}")
    for name, value in found.items():
        try:
            FIELDS[name].metadata["simpler"](value)
        except (ValueError, TypeError):
            raise UserError(
                f"{name} of a case is never {value!r}: see tools/fuzz/cases.py"
            ) from None
    return found


def draw(random: Random, device: str, given: dict[str, Any]) -> Case:
    """A case at random, but for the fields that are given."""
    drawn = {name: field.metadata["draws"][device](random) for name, field in FIELDS.items()}
    if drawn["autocast"]:  # which is of float32 alone
        drawn["precision"] = "float32"
    return settled(Case(**{**drawn, **given}), device)


def settled(case: Case, device: str) -> Case:
    """The case, with what cannot be together made so that it can."""
    to: dict[str, Any] = {}
    call = "function" if case.cell in OWN_CELLS else case.call
    to["call"] = call
    if call == "function" or case.cell == "lltm":
        to["accelerated"] = ""
    if call != "layer":
        to |= {"layers": 1, "bidirectional": False}
    if call != "function":
        to["reverse"] = False
    if call != "function" or case.graph or case.compile:
        to["transform"] = ""
    if call == "cell":
        to |= {"time": 1, "batch_first": False}
    if call == "function":
        to |= {"state": True}
    if call == "function" or (call == "cell" and case.cell == "lltm"):
        to |= {"batched": True, "bias": case.bias or case.cell == "lltm"}
    if call != "function" and case.cell != "lltm":
        to["features"] = max(1, case.features)  # as torch's modules want
    if case.precision != "float32":
        to["autocast"] = ""
    if case.precision != "float32" or not case.autocast:
        to["narrow_state"] = False
    if device == "cpu" and case.autocast == "float16":
        to["accelerated"] = ""  # there torch's own layers may refuse a call
    if device == "cpu":
        precision = "float32" if case.precision == "tf32" else case.precision
        to |= {"graph": False, "kernel": "", "precision": precision}
    return _within_budget(_settled_shapes(dataclasses.replace(case, **to), device), device)


def _settled_shapes(case: Case, device: str) -> Case:
    """The second half, which looks at what the first has changed."""
    to: dict[str, Any] = {}
    is_empty = case.time * case.batch * case.features == 0
    is_traced = case.graph or bool(case.compile)
    batch = case.batch if case.batched else 1
    if not case.batched:
        to["batch"] = 1
    # torch packs nothing that is empty, and on the host, which a graph and a compiler have left.
    may_pack = case.call == "layer" and case.batched and not (is_empty or is_traced)
    if not (may_pack or (case.call == "function" and case.batch > 0)):
        to["lengths"] = ""
    if is_traced:
        to |= {"graph": case.graph and not case.compile, "second_order": False}
    if case.accelerated:  # torch's layers refuse no steps, and their gradients may be torch's
        to |= {"second_order": False, "time": max(1, case.time), "batch": max(1, batch)}
        if device == "cuda":
            to["weight_layout"] = "contiguous"  # as torch's layers want them there
            if case.accelerated == "measured":
                to["state_layout"] = "contiguous"
    if case.compile:
        to["kernel"] = ""  # which_kernel says what is called without it
    if case.transform == "jvp" and case.input_layout == "expanded":
        to["input_layout"] = "contiguous"  # torch wants a place for each tangent
    # Of these torch has one at a time in a process.
    if (is_traced or case.transform == "jvp") and case.beside in ("sequence", "threads"):
        to["beside"] = "elementwise" if device == "cuda" else "nothing"
    return dataclasses.replace(case, **to)


def _within_budget(case: Case, device: str) -> Case:
    """Less of what is largest, until the case takes well below a second."""
    most_multiply_adds, most_steps = (3e11, 400) if device == "cuda" else (3e8, 150)
    while True:
        directions = 1 + case.bidirectional
        steps = case.time * case.layers * directions
        inputs = max(case.features, directions * case.units if case.layers > 1 else 0)
        multiply_adds = 24 * steps * case.batch * case.units * (case.units + inputs)
        if case.precision in ("bfloat16", "float16") and device == "cpu":
            multiply_adds *= 4
        if device == "cuda":
            multiply_adds *= max(1, case.repeats // 20)
            # Computed in PyTorch's own operations, a step keeps many times the memory.
            multiply_adds *= 16 if case.transform or case.second_order else 1
        if steps > most_steps:
            case = dataclasses.replace(case, time=case.time // 2)
        elif multiply_adds > most_multiply_adds:
            # Of units there shall be many: what is peculiar to a kernel depends on them.
            weights = {"time": 1.0, "batch": 1.0, "features": 1.0, "units": 0.125}
            largest = max(weights, key=lambda name: weights[name] * getattr(case, name))
            case = dataclasses.replace(case, **{largest: getattr(case, largest) // 2})
        else:
            return case


def shrink(
    case: Case, device: str, fails: Callable[[Case], bool], is_over: Callable[[], bool]
) -> Case:
    """The simplest case found that fails: each field in turn as simple as it can be, until none can be simpler."""
    tried = {case}

    def simpler(case: Case, name: str) -> Case | None:
        """The case with this field simpler, if that fails."""
        for value in FIELDS[name].metadata["simpler"](getattr(case, name)):
            candidate = settled(dataclasses.replace(case, **{name: value}), device)
            if candidate not in tried and not is_over():
                tried.add(candidate)
                if fails(candidate):
                    return candidate
        return None

    before = None
    while case != before:
        before = case
        for name in FIELDS:
            while (found := simpler(case, name)) is not None:
                case = found
    return case
