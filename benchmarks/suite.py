"""A whole run: what comes before the cases, the cases, what comes after, and the JSON that grows meanwhile."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks import aten, ceilings, environment, kernels, protocol, table, tutorial_style
from benchmarks.cases import GROUPS, Case, cases
from benchmarks.precompile import fill_caches
from benchmarks.runner import run_case

RESULTS = Path(__file__).parent / "results"
IMPORT_ROUNDS = 5


def run(
    device: str,
    groups: tuple[str, ...],
    rounds: int,
    output: Path | None = None,
    commit: str | None = None,
    resume: bool = False,
) -> None:
    """Measures, and leaves the samples, the report, the summary and the plots in `output`."""
    unknown = set(groups) - set(GROUPS)
    if unknown:
        sys.exit(f"benchmarks: no such group: {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("benchmarks: torch finds no CUDA device; leave out `--device cuda` for the CPU")
    warnings.filterwarnings("ignore", category=UserWarning)  # torch.compile's advice
    start = time.perf_counter()
    result: dict[str, Any] = {"format": 1, "rounds": rounds}
    result["environment"] = environment.describe(device) | ({"commit": commit} if commit else {})
    folder = output or RESULTS / slug(result["environment"]["device_name"], device)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "result.json"
    say(
        f"{result['environment']['device_name']}, torch {torch.__version__}; results go to {folder}"
    )
    if resume:
        result = resumed(file, result)
    start -= result["environment"].get("seconds", 0)  # the seconds of both runs are recorded
    result |= {"cases": result.get("cases", []), "failed_cases": {}}
    done = [identity(record) for record in result["cases"]]
    todo = [case for case in cases(device, groups) if identity(vars(case)) not in done]
    builds = build_extensions(device, todo)
    if "import" not in result:
        result |= {"import": measure_import(), "builds": builds}
        result["ceilings"] = ceilings.measure(device)
        say(table.of_ceilings(result["ceilings"]))
    if device == "cuda" and "cell" in groups and "kernels" not in result:
        result["kernels"] = kernels.count_apart()
        say(f"kernels counted in {len(result['kernels'])} cases")
    start_compiler(device)
    for number, case in enumerate(todo, 1):
        say(f"\n[{number}/{len(todo)}] {case.title}  ({time.perf_counter() - start:.0f} s)")
        try:
            record = run_case(case, rounds)
        except Exception as error:
            result["failed_cases"][case.title] = protocol.describe(error)
            say(f"failed: {protocol.describe(error)}")
            continue
        result["cases"].append(record)
        result["environment"]["seconds"] = round(time.perf_counter() - start)
        write(file, result)
        say(table.of_case(record))
    result["environment"]["seconds"] = round(time.perf_counter() - start)
    result["environment"]["conditions_at_end"] = environment.conditions(device)
    write(file, result)
    finish(file)


def resumed(file: Path, new: dict[str, Any]) -> dict[str, Any]:
    """What was measured so far, by the same code on the same machine; `new` where there is nothing yet."""
    if not file.exists():
        return new
    before: dict[str, Any] = json.loads(file.read_text())
    there, here = ({**each["environment"], "rounds": each["rounds"]} for each in (before, new))
    differences = [
        f"{key} {there.get(key)} there, {value} here"
        for key, value in here.items()
        if key != "date" and there.get(key) != value
    ]
    if differences:
        sys.exit(
            f"benchmarks: {file} is of another run ({'; '.join(differences)}): resume that one with what it was "
            "measured with, or measure anew without --resume"
        )
    return before


def identity(case: dict[str, Any]) -> tuple[Any, ...]:
    """What tells a case from all others, planned or measured."""
    return case["operator"], case["size"], case["mode"], case["threads"] or None


def finish(file: Path) -> None:
    """Makes the report, in a process of its own: it needs nothing but the JSON."""
    done = subprocess.run([sys.executable, "-m", "benchmarks.report", str(file)])
    if done.returncode != 0:
        say(f"the report failed; make it again with: python -m benchmarks.report {file}")


def say(text: str) -> None:
    """Prints at once."""
    print(text, flush=True)


def slug(device_name: str, device: str) -> str:
    """A folder's name for a device."""
    if device == "cpu":
        return "cpu"
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


def write(file: Path, result: dict[str, Any]) -> None:
    """Replaces the JSON, whole or not at all; numbers have the digits that mean something."""
    text = json.dumps(rounded(result), indent=1)
    # A list of numbers on one line.
    text = re.sub(r"\[\s+([-\d.,\se+]+?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    partial = file.with_suffix(".partial")
    partial.write_text(text + "\n")
    partial.replace(file)


def rounded(value: Any) -> Any:
    """The same with five significant digits in every float."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return value


def measure_import() -> dict[str, Any]:
    """What `import extops` costs beyond `import torch`, each time in a new process."""
    code = (
        "import torch, time; start = time.perf_counter(); import extops; "
        "print((time.perf_counter() - start) * 1e3, torch.cuda.is_initialized())"
    )
    milliseconds, initialised = [], False
    for _ in range(IMPORT_ROUNDS):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        number, answer = done.stdout.split()
        milliseconds.append(float(number))
        initialised = initialised or answer == "True"
    say(f"import extops: {sorted(milliseconds)[IMPORT_ROUNDS // 2]:.1f} ms beyond import torch")
    return {"milliseconds": milliseconds, "initialises_cuda": initialised}


def build_extensions(device: str, todo: list[Case]) -> dict[str, Any]:
    """Compiles what is compiled just in time, all at once, and says how long each took."""
    if device == "cuda" and "TORCH_CUDA_ARCH_LIST" not in os.environ:
        major, minor = torch.cuda.get_device_capability()
        os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"
    builds = {"C++ ATen": aten_seconds}
    if device == "cuda":
        for name in tutorial_style.EXTENSIONS:
            builds[f"tutorial {name}"] = lambda name=name: tutorial_style.build_seconds(name)  # type: ignore[misc]
    compiled = [case for case in todo if case.compiled]
    if compiled:
        builds["torch.compile ahead of the cases"] = lambda: fill_caches(compiled)
    say(f"compiling {', '.join(builds)} ...")
    result: dict[str, Any] = {}
    with ThreadPoolExecutor() as pool:
        futures = {name: pool.submit(build) for name, build in builds.items()}
    for name, future in futures.items():
        try:
            result[name] = {"seconds": future.result()}
            say(f"  {name}: {result[name]['seconds']:.0f} s")
        except Exception as error:
            result[name] = {"failed": protocol.describe(error)}
            say(f"  {name}: {result[name]['failed']}")
    return result


def aten_seconds() -> float:
    """Compiles `aten.cpp`, and says how long that took."""
    start = time.perf_counter()
    h = c = torch.zeros(1, 1)
    aten.lltm(torch.zeros(1, 1), torch.zeros(3, 2), torch.zeros(3), h, c)
    return time.perf_counter() - start


def start_compiler(device: str) -> None:
    """Loads torch.compile's machinery, which the first case would pay for otherwise."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device, requires_grad=True))
    except Exception as error:
        say(f"torch.compile does not work here: {protocol.describe(error)}")
