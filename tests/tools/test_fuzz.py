"""The fuzzer finds what is planted, prints the command that repeats it, and finds nothing where nothing is wrong."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from extops_build import ROOT, UserError
from tools.fuzz import cases
from tools.fuzz.cases import DEVICES, Case, draw, from_json, settled, shrink

by_device = pytest.mark.parametrize("device", DEVICES)


def drawn(device: str, number: int = 2000) -> list[Case]:
    random = Random(0)
    return [draw(random, device, {}) for _ in range(number)]


@by_device
def test_each_value_is_drawn(device: str) -> None:
    found = drawn(device)
    for name, field in cases.FIELDS.items():
        values = {getattr(case, name) for case in found}
        simpler = {x for value in values for x in field.metadata["simpler"](value)}
        assert len(values) > 1 or device == "cpu", name
        if isinstance(field.default, (str, bool)) and device == "cuda":
            assert simpler <= values, name
    sizes = {case.units for case in found}
    assert any(x % 2 for x in sizes) and min(sizes) == 1 and max(sizes) > 300


def test_a_race_of_large_bidirectional_layers_is_looked_for() -> None:
    """They were wrong beside small kernels, in strict float32."""
    found = [
        case
        for case in drawn("cuda")
        if case.bidirectional and case.precision == "float32" and case.units > 512
        if case.wanted and not case.autocast and case.kernel in ("", "group")
    ]
    assert len(found) >= 50
    assert {case.beside for case in found} >= {"elementwise", "nothing"}


def test_what_torchs_layers_refuse_is_not_drawn_where_they_may_serve() -> None:
    """They want contiguous states and weights on a GPU."""
    found = [case for case in drawn("cuda") if case.accelerated]
    for way, layouts in (("measured", {"contiguous"}), ("extops", set(cases.LAYOUTS))):
        assert {case.state_layout for case in found if case.accelerated == way} == layouts
    assert {case.weight_layout for case in found} == {"contiguous"}


@by_device
def test_a_case_can_be_repeated(device: str) -> None:
    for case in drawn(device, 300):
        assert settled(case, device) == case
        assert Case(**from_json(case.to_json())) == case
    assert drawn(device, 50) == drawn(device, 50)


def test_fields_that_are_given_are_kept() -> None:
    random = Random(0)
    given = {"cell": "gru", "precision": "bfloat16"}
    found = [draw(random, "cpu", given) for _ in range(50)]
    assert {(case.cell, case.precision) for case in found} == {("gru", "bfloat16")}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected a case as JSON, such as '{\"units\": 3}'"),
        ('{"size": 3}', "a case has no size, but cell, call, precision"),
        ('{"cell": "rnn_tanh"}', "cell of a case is never 'rnn_tanh': see tools/fuzz/cases.py"),
        ('{"batch": "one"}', "batch of a case is never 'one'"),
    ],
)
def test_what_is_no_case(text: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        from_json(text)


def test_shrinking_leaves_what_matters() -> None:
    def fails(case: Case) -> bool:
        return case.bidirectional and case.units >= 7 and "weight" in case.wanted

    found = next(case for case in drawn("cpu") if fails(case))
    simplest = shrink(found, "cpu", fails, lambda: False)
    assert simplest == Case(bidirectional=True, units=7, wanted="weight", towards="output")


def test_shrinking_ends_when_the_time_is_over() -> None:
    case = drawn("cpu")[0]
    assert shrink(case, "cpu", lambda _: True, lambda: True) == case


# What a program does before it is the fuzzer, also in the process that computes.
FAULTS = {
    "gradient": """
original = sequence.gradients
def planted(*arguments):
    of_input, *others = original(*arguments)
    return of_input if of_input is None else 1.01 * of_input, *others
sequence.gradients = planted
""",
    "crash": """
sequence.gradients = lambda *_: os.abort()
""",
    "bits": """
import itertools
original, count = sequence.gradients, itertools.count()
def planted(*arguments):
    of_input, *others = original(*arguments)
    if of_input is not None and next(count) % 3 == 1:
        of_input = of_input.clone()
        of_input.view(-1)[:1] *= 1 + 1e-5
    return of_input, *others
sequence.gradients = planted
""",
}
PROGRAM = """
import os
from extops.ops import sequence
from tools.fuzz.__main__ import main
{}
if __name__ == "__main__":
    main()
"""


def fuzz(program: Path | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    environment.pop(
        "NOX_CURRENT_SESSION", None
    )  # in which the command that repeats a case is nox's
    start = ["-m", "tools.fuzz"] if program is None else [str(program)]
    return subprocess.run(
        [sys.executable, *start, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )


def arguments_of(output: str) -> list[str]:
    """Of the last command that is printed."""
    *_, command = re.findall(r"^python -m tools\.fuzz (.*)$", output, re.M)
    return shlex.split(command)


@pytest.mark.parametrize("kind", ["gradient", pytest.param("bits", marks=pytest.mark.slow)])
def test_a_planted_fault_is_found_and_repeated(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("extops")
    program = tmp_path / "planted.py"
    program.write_text(PROGRAM.format(FAULTS[kind]))
    given = '{"cell": "gru", "precision": "float64", "call": "function"}'
    done = fuzz(program, "--seed=1", "--seconds=600", f"--given={given}")
    assert done.returncode == 1, done.stdout
    message = {"gradient": "values: gradient of input is off by", "bits": "bits: gradient of input"}
    assert message[kind] in done.stderr
    *_, text = arguments = arguments_of(done.stderr)
    assert from_json(text)["wanted"] == "input"
    assert len(from_json(text)) <= 7, text
    again = fuzz(program, *arguments)
    assert again.returncode == 1
    assert message[kind] in again.stderr
    assert arguments_of(again.stderr) == arguments
    healthy = fuzz(None, *arguments)
    assert healthy.returncode == 0, healthy.stderr
    assert healthy.stdout == "extops: nothing found, by cpu and cpu\n"


def test_a_crash_is_a_find(tmp_path: Path) -> None:
    pytest.importorskip("extops")
    program = tmp_path / "planted.py"
    program.write_text(PROGRAM.format(FAULTS["crash"]))
    # Of a function, since a layer may be torch's own.
    done = fuzz(program, '--case={"cell": "gru", "precision": "float64", "call": "function"}')
    assert done.returncode == 1
    assert "crash: the process ended with -6" in done.stderr


# torch.func.jvp compiles rules of torch's so.
ignores_script = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


@pytest.mark.parametrize("cell", cases.BUILT_IN)
def test_all_gradients_are_compared(cell: str) -> None:
    pytest.importorskip("extops")
    from tools.fuzz.problem import Problem

    problem = Problem(Case(cell=cell, call="function"), "cpu")
    gradients = {f"gradient of {name}" for name in problem.leaves}
    assert {"input", "h_0"} < problem.leaves.keys()
    assert gradients < problem.run().keys()
    assert problem.run().keys() == problem.run_plain(problem.leaves["input"].dtype).keys()


@ignores_script
@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_found(seed: int) -> None:
    """Of the cells that need not be compiled, in this process."""
    pytest.importorskip("extops")
    from tools.fuzz.check import check

    random = Random(seed)
    for place in range(12):
        given = {"cell": ("lstm", "gru", "lltm")[place % 3], "compile": ""}
        case = draw(random, "cpu", given)
        answer = check(case, "cpu")
        assert not answer.kind, f"{answer}: {case.to_json()}"


@ignores_script
@pytest.mark.slow
@pytest.mark.parametrize("cell", cases.OWN_CELLS)
def test_nothing_is_found_in_a_cell_of_ones_own(cell: str) -> None:
    pytest.importorskip("extops")
    from tools.fuzz.check import check

    random = Random(0)
    for _ in range(10):
        case = dataclasses.replace(draw(random, "cpu", {"cell": cell}), compile="")
        answer = check(case, "cpu")
        assert not answer.kind, f"{answer}: {case.to_json()}"
