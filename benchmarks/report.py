"""Makes the Markdown report, the summary and the plots from a `result.json` and nothing else.

    python -m benchmarks.report benchmarks/results/cpu/result.json

`report.md`, `summary.json` and the plots (where matplotlib is installed) go beside it.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks import summary
from benchmarks.names import (
    CPU_THREADS,
    GRU,
    LAYER_GOALS,
    LAYERS,
    LSTM,
    OURS,
    SEQUENCE_GOALS,
    SEQUENCES,
    STANDARD,
)
from benchmarks.results import CaseResult, Result, Spread, digits
from benchmarks.targets import Target, against_peers, losses, targets, words

OPERATORS = ("cell", "multiply", "round", "sequence", "ragged", "packed", "bidirectional", *LAYERS)

READING = """\
Four numbers, which are never mixed:

- *host time*: how long the host is busy issuing a call;
- *device time*: how long the GPU is busy, by replaying a CUDA graph of 20 calls (a sequence: one call); *queued device
  time*: the same by calls that were all queued while the GPU was kept busy, for what a graph cannot hold (the
  tutorial-style kernels launch on the default stream) or does otherwise (it copies memory more slowly);
- *wall time*: a call and the wait for its end;
- *tutorial protocol*: that of PyTorch's tutorial "Custom C++ and CUDA Extensions": forward and
  `(new_h.sum() + new_cell.sum()).backward()` timed apart, each with the wait for its end, averaged over many runs.

On a CPU a call ends when it returns: host and wall time are one, and there is no device time.

*forward+backward* computes the gradients of the parameters (a cell, a sequence) or of all inputs (multiply, round);
*all gradients* also those of a cell's input and state. A cell's forward records for backward; that of multiply and
round at its own does not. All variants run in one process and take turns in each round; torch.compile's
reduce-overhead mode alone has rounds of its own, since its CUDA graphs do not live beside others; a figure is the
median over the rounds with the 10th and 90th percentile in parentheses; a ratio is taken round by round, then its
median. Inputs stay where they are from call to call: what fits a cache is in it. Precision modes: `float32` is strict
(no TF32 in torch's products or cuDNN), `tf32` lets both use it, `bfloat16` stores and multiplies in that type.

Two peers are measured in several forms, and each figure is that of the fastest, which stands beside it. The *best
product* is that of `mm`, `addmm` and `linear`, chosen for each matrix product by itself (forward; gradient of the
weights; of the input); the times of those that a step needs are added round by round. The *best torch.compile* is that
of static shapes, dynamic shapes and static shapes with `max-autotune-no-cudagraphs`. The raw samples have all forms.
"""


def make(file: Path) -> None:
    """Writes the report, the summary and the plots of `file`."""
    result = Result.read(file)
    small = file.with_name(summary.NAME)
    summary.write(result, small)
    plots: list[str] = []
    if importlib.util.find_spec("matplotlib"):
        from benchmarks import plots as plotting

        plots = plotting.make(small)
    else:
        print(f"no plots: install matplotlib, then run python -m benchmarks.plots {small}")
    report = file.parent / "report.md"
    report.write_text("\n".join(lines_of(result)) + "\n")
    found = [*chain.from_iterable(against_peers(result).values()), *targets(result)]
    missed = [row for row in target_rows(found) if row[-1] != "met"]
    print(f"{len(found) - len(missed)} of {len(found)} targets met; the others:")
    for what, ratio, goal, figure, verdict in missed:
        print(f"{verdict:13}{what}: {ratio} {figure}, target {goal}")
    print("wrote", ", ".join([report.name, small.name, *plots]), "into", file.parent)


def lines_of(result: Result) -> Iterator[str]:
    """The whole report."""
    yield f"# Benchmark: {result.data['environment']['device_name']}\n"
    yield from conditions(result)
    yield f"\n## How to read it\n\n{READING}"
    yield "## Targets\n"
    yield "Met or not is the median's, to two digits after the point.\n"
    if any(result.cases("cell")):
        yield from peer_table(result)
        heads = ["what", "ratio", "target", "measured", "verdict"]
        yield from table(heads, target_rows(targets(result)))
    if result.device == "cuda":
        yield from sequence_table(result, "sequence", (LSTM, GRU), SEQUENCE_GOALS)
        for ours, peer in LAYERS.items():
            yield from sequence_table(result, ours, (peer,), LAYER_GOALS)
    yield "\n## Where we lose\n"
    yield from loss_table(result)
    yield from headlines(result)
    yield from sections(result)


def conditions(result: Result) -> Iterator[str]:
    """Machine, versions, clocks, load."""
    environment = result.data["environment"]
    build = environment.get("extops_build") or {}
    found = [case["conditions"] for case in result.data["cases"]]
    loads = [each["load"] for each in found]
    rows = {
        "date": environment["date"],
        "commit": environment["commit"],
        "processor": f"{environment['processor']}, {environment['cores']} cores",
        "system": f"{environment['system']}, Python {environment['python']}",
        "torch": f"{environment['torch']}, CPU capability {environment['torch_cpu_capability']}",
        "extops": f"{environment['extops']}, {environment['extops_binding']} binding"
        + "".join(f", {key} {plain(x)}" for key, x in build.items() if x and key != "commit"),
        "rounds": f"{result.data['rounds']}; the run took {environment.get('seconds', '?')} s",
        "load average": f"{min(loads)} to {max(loads)}" if loads else "",
    }
    if result.device == "cuda":
        rows |= gpu_conditions(environment, found)
    for each in result.data["ceilings"]:
        speeds = [f"{mode} {x / 1e12:.3g}" for mode, x in each["flop_per_second"].items()]
        suffix = f", threads: {each['threads']}" if each["threads"] else ""
        rows[f"measured ceilings{suffix}"] = (
            f"copy {each['bytes_per_second'] / 1e9:.4g} GB/s; products {', '.join(speeds)} TFLOP/s"
        )
    yield from table(["", ""], rows.items())


def plain(value: object) -> str:
    """A value of the JSON for people."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def gpu_conditions(
    environment: dict[str, object], found: list[dict[str, object]]
) -> dict[str, str]:
    """What a GPU has besides."""
    clocks = sorted({str(each["clocks.sm"]) for each in found if "clocks.sm" in each})
    return {
        "GPU": f"{environment['device_name']}, compute capability "
        f"{environment['compute_capability']}, {environment['multiprocessors']} SMs, "
        f"{environment['memory_gib']} GiB",
        "CUDA": f"{environment['torch_cuda']}, driver {environment['driver']}, "
        f"cuDNN {environment['cudnn']}",
        "GPU clocks seen after cases": ", ".join(clocks) or "not known",
    }


def table(heads: list[str], rows: Iterable[Iterable[object]]) -> Iterator[str]:
    """A Markdown table."""
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    for row in rows:
        yield "| " + " | ".join(str(each) for each in row) + " |"


def peer_table(result: Result) -> Iterator[str]:
    """Each size in each mode beside its best peers: ratio and form of the peer, bold where the target is missed."""
    found = against_peers(result)
    if not found:
        return
    every = [target for row in found.values() for target in row]
    met = sum(target.verdict == "met" for target in every)
    yield f"Device time against the best peers ({met} of {len(every)} met; **bold**: not met):\n"
    heads = [f"{x.what.split(', ')[-2]}: {x.ratio}, {x.goal}" for x in every[:4]]
    yield from table(
        ["B, I, S", *heads],
        ([title, *(peer_cell(target) for target in row)] for title, row in found.items()),
    )
    yield ""


def sequence_table(
    result: Result,
    operator: str,
    peers: Sequence[str],
    all_goals: Mapping[str, Sequence[tuple[float, float]]],
) -> Iterator[str]:
    """Each sequence beside the faster of torch's layers `peers`: the ratio, bold where the target is missed."""
    cases = list(result.cases(operator))
    if not cases:
        return
    fastest = f"the faster of {' and '.join(peers)}" if len(peers) > 1 else peers[0]
    yield f"\n{operator.capitalize() if operator.islower() else operator}: {fastest} / extops (**bold**: not met):\n"
    rows = []
    for case in cases:
        goals = dict(zip(SEQUENCES, all_goals[case.mode], strict=True))
        goal = dict(zip(summary.WORKS, goals.get(case.size, (1, 1)), strict=True))
        row = [case.title]
        for work in summary.WORKS:
            row.append(f"≥ {goal[work]:g}")
            for number in ("device", "wall"):
                ratios = (
                    case.ratio((peer, f"{number}_{work}"), (OURS, f"{number}_{work}"))
                    for peer in peers
                )
                found = [ratio.median for ratio in ratios if ratio]
                shown = digits(min(found)) if found else "–"
                missed = found and round(min(found), 2) < goal[work]
                row.append(f"**{shown}**" if missed else shown)
        rows.append(row)
    columns = ("target", "device time", "wall time")
    heads = [f"{label}: {column}" for label in summary.WORKS.values() for column in columns]
    yield from table([shape_of(cases[0]), *heads], rows)


def peer_cell(target: Target) -> str:
    """A ratio and the form of the peer."""
    if target.measured is None:
        return "–"
    bold = "**" if target.verdict == "not met" else ""
    return f"{bold}{target.measured} {target.peer}{bold}"


def target_rows(found: Iterable[Target]) -> Iterator[list[str]]:
    """Each target, its measured figure, met or not."""
    for each in found:
        measured = each.measured
        figure = digits(measured) if isinstance(measured, float) else str(measured or "–")
        yield [each.what, each.ratio, each.goal, f"{figure} {each.peer}".rstrip(), each.verdict]


def loss_table(result: Result) -> Iterator[str]:
    """Where another implementation is faster."""
    found = losses(result)
    if not found:
        yield "Nowhere in this run."
        return
    yield (
        "Where another implementation takes less time in nine rounds of ten, the worst first: its time / ours. torch's "
        "LSTM and GRU are other functions, of more and of as many gates.\n"
    )
    rows = []
    for loss in found:
        spread, title = loss.found[0]
        cases = f"{len(loss.found)} of {loss.of}"
        mildest = digits(loss.found[-1][0].median)
        rows.append(
            [loss.operator, words(loss.measure), loss.rival, cases, f"{spread}: {title}", mildest]
        )
    yield from table(["operator", "measure", "faster", "cases", "worst", "mildest"], rows)


def headlines(result: Result) -> Iterator[str]:
    """The standard cells in strict float32: medians alone, two measures to a table."""
    number = result.best_number
    pairs = (
        ("tutorial_forward", "tutorial_backward"),
        (f"{number}_forward", f"{number}_forward_backward"),
    )
    cases = [x for x in result.cases("cell", "float32") if x.size in STANDARD]
    for pair in pairs if cases else ():
        names = columns(cases, pair[0])
        yield f"\n## One step, strict float32: {words(pair[0])} / {words(pair[1])}, µs\n"
        rows = []
        for case in cases:
            cells = (
                " / ".join(case.figure(name, measure, median_alone) for measure in pair)
                for name in names
            )
            rows.append([case.title.replace(" float32", ""), *cells])
        yield from table(["B, I, S", *names], rows)


def median_alone(spread: Spread) -> str:
    """A figure without its spread."""
    return digits(spread.median)


def sections(result: Result) -> Iterator[str]:
    """The figures themselves."""
    works = ("forward", "forward_backward", "forward_backward_all")
    numbers = ("device", "queued", "host", "wall") if result.device == "cuda" else ("wall",)
    for operator in OPERATORS:
        cases = list(result.cases(operator))
        if not cases:
            continue
        yield f"\n## {operator[0].upper() + operator[1:]}"
        if operator == "cell":
            for part in ("forward", "backward"):
                yield from figures(result, cases, f"tutorial_{part}")
        for number in numbers:
            for work in works:
                yield from figures(result, cases, f"{number}_{work}")
        if operator == "cell":
            yield from first_calls(cases)
            yield from accuracy(cases)
    yield from kernel_table(result)
    yield from failures(result)


def figures(result: Result, cases: list[CaseResult], measure: str) -> Iterator[str]:
    """One measure of all cases: a row for each case, a column for each variant."""
    measured = [case for case in cases if any(case.samples(x, measure) for x in case.variants)]
    if not measured:
        return
    names = columns(measured, measure)
    with_floor = not measure.startswith(("host", "tutorial"))
    yield f"\n### {words(measure).capitalize()}, µs\n"
    heads = [shape_of(measured[0]), *names]
    rows = []
    for case in measured:
        row = [case.title, *(case.figure(name, measure) for name in names)]
        if with_floor:
            row += floor_cells(result, case, measure)
        rows.append(row)
    yield from table(heads + ["floor", "extops: % of floor"] * with_floor, rows)


def floor_cells(result: Result, case: CaseResult, measure: str) -> list[str]:
    """The floor, and how much of it we reach."""
    floor = result.floor(case, measure.partition("_")[2])
    ours = case.spread("extops", measure)
    if floor is None or ours is None:
        return ["–", "–"]
    return [digits(floor), f"{100 * floor / ours.median:.0f} %"]


def shape_of(case: CaseResult) -> str:
    """The head of the column of sizes."""
    return ", ".join(case.data["size"])


def columns(cases: list[CaseResult], measure: str) -> list[str]:
    """The variants that were measured so in some case, in the order they were first met."""
    every = [(case, name) for case in cases for name in case.variants]
    return list(dict.fromkeys(name for case, name in every if case.samples(name, measure)))


def first_calls(cases: list[CaseResult]) -> Iterator[str]:
    """What the first call costs in a process that finds compiled code in the caches."""
    cases = [case for case in cases if case.size in STANDARD and case.mode == "float32"]
    if not cases:
        return
    yield "\n### First call, s\n"
    yield (
        "Until the first gradients: for torch.compile with full caches, as in every process but a machine's first. "
        "What it took to fill them, and to compile extensions just in time, is at the end.\n"
    )
    yield from noted(cases, "first_call_seconds", "{:.2g}".format)


def accuracy(cases: list[CaseResult]) -> Iterator[str]:
    """The errors against float64."""
    cases = [case for case in cases if case.threads in (None, CPU_THREADS[0])]
    yield "\n### Accuracy\n"
    yield "‖result − float64‖ / ‖float64‖ from the same rounded inputs: `new_h`; gradient of `weights`.\n"
    yield from noted(cases, "relative_errors", "{0[new_h]:.1e}; {0[grad_weights]:.1e}".format)


def noted(cases: list[CaseResult], key: str, show: Callable[[Any], str]) -> Iterator[str]:
    """A table of what was noted of each variant besides samples, a peer's forms apart."""
    variants = [case.data["variants"] for case in cases]
    names = list(
        dict.fromkeys(x for each in variants for x, record in each.items() if key in record)
    )
    rows = [
        [case.title, *(show(each[x][key]) if key in each.get(x, {}) else "–" for x in names)]
        for case, each in zip(cases, variants, strict=True)
    ]
    yield from table(["B, I, S", *names], rows)


def kernel_table(result: Result) -> Iterator[str]:
    """Kernels a call, where they were counted."""
    counted = result.data.get("kernels")
    if not counted:
        return
    yield "\n## Kernels of a call\n"
    yield (
        "How many (copies and fills included) and the sum of their durations in µs, by the CUDA profiler: forward; "
        "forward+backward. Gaps are not in it: it is no device time by graph replay. "
        "\n"
    )
    names = [name for name, each in counted[0]["variants"].items() if "failed" not in each]
    rows = []
    for each in counted:
        row = [", ".join(map(str, each["size"].values())) + " " + each["mode"]]
        for name in names:
            works = each["variants"].get(name, {})
            cells = [
                f"{works[work]['kernels']:.3g} in {digits(works[work]['microseconds'])}"
                for work in ("forward", "forward_backward")
                if work in works
            ]
            row.append("; ".join(cells) or "–")
        rows.append(row)
    yield from table(["B, I, S", *names], rows)


def failures(result: Result) -> Iterator[str]:
    """What could not be measured, and what was compiled."""
    yield "\n## Compiled just in time\n"
    for name, each in result.data["builds"].items():
        yield f"- {name}: " + (f"{each['seconds']:.0f} s" if "seconds" in each else each["failed"])
    messages: dict[tuple[str, str, str], list[str]] = {}
    for case in result.cases():
        for name, variant in case.data["variants"].items():
            for measure, message in variant["failed"].items():
                titles = messages.setdefault((name, measure, message), [])
                titles.append(f"{case.operator} {case.title}")
    yield "\n## Not measured\n"
    for (name, measure, message), titles in messages.items():
        where = titles[0] if len(titles) == 1 else f"{len(titles)} cases, e.g. {titles[0]}"
        what = "" if measure == "all" else f", {measure}"
        yield f"- {name}{what}: {message.replace('|', '/')} ({where})"
    for title, message in result.data.get("failed_cases", {}).items():
        yield f"- {title}: {message}"
    if not messages and not result.data.get("failed_cases"):
        yield "Nothing failed."


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("result", type=Path, help="a result.json")
    make(parser.parse_args().result)


if __name__ == "__main__":
    main()
