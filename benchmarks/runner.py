"""Measures one case: makes its variants, notes their first call and their accuracy, then takes samples in turn."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import environment, protocol
from benchmarks.cases import MODES, Case
from benchmarks.names import QUEUED, REDUCE_OVERHEAD
from benchmarks.variant import Makers, Variant


def set_mode(mode: str) -> None:
    """Lets torch use TF32, in its own products and in cuDNN's, in this mode; by default in cuDNN's alone."""
    tf32 = mode != "default" and MODES[mode][1]
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32 or mode == "default"


def run_case(case: Case, rounds: int) -> dict[str, Any]:
    """The record of a case, as it goes into the JSON."""
    start = time.perf_counter()
    set_mode(case.mode)
    if case.threads:
        torch.set_num_threads(case.threads)
    torch._dynamo.reset()
    makers, expected = case.makers()
    wanted = expected() if expected else None
    records: dict[str, dict[str, Any]] = {}
    # The CUDA graphs that torch.compile makes for itself do not live beside those that measure device times: replaying
    # either then ends in an illegal memory access (torch 2.11). They take turns.
    own_graphs = {name: make for name, make in makers.items() if name == REDUCE_OVERHEAD}
    others = {name: make for name, make in makers.items() if name not in own_graphs}
    for together in (others, own_graphs):
        records |= measure(together, case, rounds, wanted)
        tidy_up(case.device)
    records = {name: records[name] for name in makers}
    result = {
        **{key: getattr(case, key) for key in ("group", "operator", "size", "mode")},
        "threads": case.threads or None,
        "work": case.work(),
        "conditions": environment.conditions(case.device),
        "seconds": round(time.perf_counter() - start, 2),
        "variants": records,
    }
    return result


def measure(
    makers: Makers, case: Case, rounds: int, wanted: list[Tensor] | None
) -> dict[str, dict[str, Any]]:
    """The records of variants that are measured in turn, by name."""
    records: dict[str, dict[str, Any]] = {}
    samplers: dict[str, list[protocol.Sampler]] = {}
    for name, make in makers.items():
        record: dict[str, Any] = {"failed": {}}
        records[name] = record
        try:
            variant = first_call(make, record, case.device)
            if variant.check and wanted:
                record["relative_errors"] = relative_errors(variant.check(), wanted)
        except Exception as error:
            record["failed"]["all"] = protocol.describe(error)
            continue
        samplers[name] = make_samplers(name, variant, case, record["failed"])
    samples, failed = protocol.interleave(samplers, rounds)
    for name, record in records.items():
        record["samples"] = samples.get(name, {})
        if name in failed:
            record["failed"]["all"] = failed[name]
    return records


def first_call(make: Callable[[], Variant], record: dict[str, Any], device: str) -> Variant:
    """Makes a variant, and notes the seconds until its first result: compiling included."""
    start = time.perf_counter()
    variant = make()
    call = variant.calls.get("forward_backward", variant.calls["forward"])
    call()
    protocol.wait_for(device)()
    record["first_call_seconds"] = time.perf_counter() - start
    return variant


def relative_errors(results: Any, expected: list[Tensor]) -> dict[str, float]:
    """How far the results are from those in float64, in the 2-norm."""
    names = ("new_h", "new_cell", "grad_weights", "grad_bias")
    return {
        name: float((result.double().reshape(right.shape) - right).norm() / right.norm())
        for name, result, right in zip(names, results, expected, strict=True)
    }


def make_samplers(
    name: str, variant: Variant, case: Case, failed: dict[str, str]
) -> list[protocol.Sampler]:
    """What takes a round's samples of a variant; a measure that cannot be taken is noted in `failed`."""
    result: list[protocol.Sampler] = []
    for number, works in case.plan.items():
        if number == "device" and variant.not_captured:
            failed["device"] = variant.not_captured
            continue
        for work, call in variant.calls.items():
            if work in works and (number != "queued" or name in QUEUED):
                try:
                    result.append(make_sampler(number, work, call, case))
                except Exception as error:
                    failed[f"{number}_{work}"] = protocol.describe(error)
    if "tutorial" in case.plan and variant.step:
        try:
            result.append(
                protocol.tutorial(variant.step, variant.parameters, case.device, case.slice_seconds)
            )
        except Exception as error:
            failed["tutorial"] = protocol.describe(error)
    return result


def make_sampler(number: str, work: str, call: protocol.Call, case: Case) -> protocol.Sampler:
    """The sampler of one of the four numbers."""
    measure = f"{number}_{work}"
    if number == "host":
        return protocol.host(measure, call, case.slice_seconds)
    if number == "device":
        return protocol.device_time(measure, call, case.graph_calls, case.slice_seconds)
    if number == "queued":
        return protocol.queued(measure, call)
    return protocol.wall(measure, call, case.device, case.slice_seconds)


def tidy_up(device: str) -> None:
    """Gives the case's memory back."""
    torch._dynamo.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
