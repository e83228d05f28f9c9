"""``compare``: what ``accelerate`` is worth for a model, here."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from extops import accelerating

_ROUNDS = 3, 50
_TORCH, _CONTROL, _OURS = "torch", "torch again", "extops"

Call = Callable[[], list[Tensor]]
Samples = dict[str, list[float]]


@dataclass(frozen=True)
class Work:
    """A forward without gradients, or a step of training but for the optimiser."""

    name: str
    samples: Samples
    """Milliseconds of each round, of torch's model, the same model again, and the accelerated one."""
    memory: dict[str, float]
    """The most MiB on a GPU beyond what was held before, of torch's model and the accelerated one."""
    difference: float
    """The largest of the results, or of the gradients, divided by the largest of torch's."""

    def ratios(self, of: str) -> list[float]:
        """torch's time by that of a variant, round by round."""
        return [x / y for x, y in zip(self.samples[_TORCH], self.samples[of], strict=True)]

    def lines(self) -> Iterator[str]:
        """Of the control and of ours."""
        least, most = _spread(self.ratios(_CONTROL))
        for variant in (_CONTROL, _OURS):
            ratios = self.ratios(variant)
            found, (low, high) = statistics.median(ratios), _spread(ratios)
            before, after = (statistics.median(self.samples[x]) for x in (_TORCH, variant))
            line = f"{self.name:8} {variant:11} {before:9.3f} -> {after:9.3f} ms"
            line += f", {found:5.2f} times as fast ({low:.2f} to {high:.2f})"
            if variant == _OURS:
                line += ", within the noise" * (least <= found <= most)
                line += f"; differs by {self.difference:.1e} of the largest"
                if self.memory:
                    line += "; most memory {torch:.1f} -> {extops:.1f} MiB".format(**self.memory)
            yield line


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` found; as text, a table."""

    where: str
    layers: list[tuple[str, str, str]]
    """The name of a layer, what serves it, and the times that led to it."""
    works: list[Work] = field(default_factory=list)

    def __str__(self) -> str:
        width = max((len(name) for name, *_ in self.layers), default=0)
        layers = [f"{name:{width}}  by {way:6}  {times}" for name, way, times in self.layers]
        layers = layers or ["no call of a recurrent layer or cell of torch.nn"]
        works = [line for work in self.works for line in work.lines()]
        return "\n".join([self.where, "", *layers, "", *works])


def _spread(ratios: list[float]) -> tuple[float, float]:
    """Between which all but the outer tenths lie."""
    tenth = len(ratios) // 10
    return sorted(ratios)[tenth], sorted(ratios)[-1 - tenth]


def compare(
    model: torch.nn.Module, *inputs: Any, seconds: float = 30.0, **named: Any
) -> Comparison:
    """What :func:`extops.accelerate` is worth for a model on this machine: ``print(extops.compare(model, *inputs))``.

    The model is copied, and not changed. Copies of it run in turns, as they are and accelerated: a forward without
    gradients, and, if parameters want gradients, a step of training, whose loss is the mean of the squares of all
    results. A third copy is torch's again: what differs there is the machine's noise.

    Args:
        model: as it is used, on its device, in training or evaluation. Enter a region of autocast around the call if
            the model runs in one.
        inputs: those of a call of the model.
        seconds: how long it may take, beyond the first calls.
        named: the call's arguments by name.

    Returns:
        A table: each recurrent layer, what serves it and the times that led to it; medians of the times of the whole,
        and of the ratios of calls side by side, with their spread, and whether that is within the control's; the
        largest differences of results and gradients, and, on a GPU, memory.
    """
    accelerating.check_model("compare", model)
    variants = {
        name: accelerating.restore(copy.deepcopy(model)) for name in (_TORCH, _CONTROL, _OURS)
    }
    accelerating.accelerate(variants[_OURS])
    for each in variants.values():
        for module in each.modules():
            if isinstance(module, torch.nn.RNNBase):
                module.flatten_parameters()  # a copy scatters them, and cuDNN then copies them at each call
    device = next((x.device for x in model.parameters()), torch.device("cpu"))
    layers: dict[str, tuple[str, str, str]] = {}
    handles = [
        module.register_forward_pre_hook(_noting(layers, name), with_kwargs=True)
        for name, module in variants[_OURS].named_modules()
    ]
    found: list[Work] = []
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        with torch.enable_grad():
            wants = any(x.requires_grad for x in model.parameters()) and any(
                x.requires_grad for x in _tensors(variants[_TORCH](*inputs, **named))
            )
        kinds = [("forward", False), ("training", True)][: 1 + wants]
        for name, is_training in kinds:
            calls = {
                variant: _call_of(each, inputs, named, is_training)
                for variant, each in variants.items()
            }
            difference = _difference(calls[_TORCH], calls[_OURS])
            if is_training is wants:
                for handle in handles:
                    handle.remove()
            samples = _samples(calls, device, seconds / len(kinds))
            memory = _memory(calls, device)
            found.append(Work(name, samples, memory, difference))
    where = f"CPU, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    return Comparison(f"{where}, torch {torch.__version__}", list(layers.values()), found)


def _noting(layers: dict[str, tuple[str, str, str]], name: str) -> Callable[..., None]:
    """A hook that notes what serves a call of a layer."""

    def note(module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = dict(zip(("input", "hx"), arguments, strict=False)) | named
        way, why = accelerating.described(module, given.get("input"), given.get("hx"))
        if way:
            work = "training" if torch.is_grad_enabled() else "forward"
            layers[f"{name} {work}"] = f"{name or 'the model'}, {work}", way, why

    return note


def _tensors(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found] if found.is_floating_point() else []
    if isinstance(found, PackedSequence):
        return [found.data]
    if isinstance(found, dict):
        found = found.values()
    elif not isinstance(found, (tuple, list)):
        found = getattr(found, "__dict__", {}).values()
    return [x for each in found for x in _tensors(each)]


def _call_of(model: torch.nn.Module, inputs: Any, named: Any, is_training: bool) -> Call:
    """Gives the results, or the gradients of the parameters."""

    def call() -> list[Tensor]:
        torch.manual_seed(0)
        with torch.set_grad_enabled(is_training):
            results = _tensors(model(*inputs, **named))
            if not is_training:
                return results
            squares = [x.float().square().mean() for x in results if x.requires_grad]
            loss = torch.stack(squares).sum()
        wanted = [x for x in model.parameters() if x.requires_grad]
        found = torch.autograd.grad(loss, wanted, allow_unused=True)
        return [x for x in found if x is not None]

    return call


def _difference(torchs: Call, ours: Call) -> float:
    ours()  # measures
    found = zip(torchs(), ours(), strict=True)
    pairs = [(x.detach().double(), y.detach().double()) for x, y in found if x.numel()]
    largest = max((float(x.abs().max()) for x, _ in pairs), default=0.0)
    furthest = max((float((x - y).abs().max()) for x, y in pairs), default=0.0)
    return furthest / largest if largest else furthest


def _samples(calls: dict[str, Call], device: torch.device, seconds: float) -> Samples:
    samples: Samples = {name: [] for name in calls}
    least, most = _ROUNDS
    end = time.perf_counter() + seconds
    for number in range(most + 1):
        if number > least and time.perf_counter() > end:
            break
        names = list(calls)
        for name in names[number % 3 :] + names[: number % 3]:
            _wait(device)
            start = time.perf_counter()
            calls[name]()
            _wait(device)
            if number:  # the first call of each is slower
                samples[name].append((time.perf_counter() - start) * 1e3)
    return samples


def _memory(calls: dict[str, Call], device: torch.device) -> dict[str, float]:
    found = {}
    for name in (_TORCH, _OURS) if device.type == "cuda" else ():
        _wait(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        calls[name]()
        _wait(device)
        found[name] = (torch.cuda.max_memory_allocated(device) - before) / 2**20
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
