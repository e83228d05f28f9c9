"""A case with its tensors, and how extops, torch's module and plain PyTorch compute it."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import extops
from tools.fuzz.cases import Case
from tools.fuzz.cells import KINDS

Tensors = dict[str, Tensor]
Run = Callable[[], Tensors]


def dtype_of(case: Case) -> torch.dtype:
    """That of the tensors."""
    found: torch.dtype = getattr(torch, "float32" if case.precision == "tf32" else case.precision)
    return found


def narrowest(case: Case) -> torch.dtype:
    """That in which it may be computed: the inputs are numbers that this holds."""
    found: torch.dtype = getattr(torch, case.autocast) if case.autocast else dtype_of(case)
    return found


def laid_out(values: Tensor, layout: str) -> Tensor:
    """The values elsewhere in memory, with NaN in the gaps; "expanded" repeats the first row."""
    if values.dim() == 0 or values.numel() == 0 or layout == "contiguous":
        return values
    if layout == "expanded":
        return values[:1].expand_as(values)
    if layout == "transposed":
        order = tuple(reversed(range(values.dim())))
        return values.permute(order).contiguous().permute(order)
    *others, last = values.shape
    if layout == "offset":
        memory = values.new_full((values.numel() + 1,), math.nan)[1:].view(values.shape)
    elif layout == "padded":
        memory = values.new_full((*others, last + 3), math.nan)[..., 1 : last + 1]
    else:
        memory = values.new_full((*others, 2 * last), math.nan)[..., 1::2]
    return memory.copy_(values)


class Problem:
    """The tensors of a case, and what computes them."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device, self.kind = case, device, KINDS[case.cell]
        self._generator = torch.Generator(device).manual_seed(case.seed)
        self.lengths = self._lengths()
        self.leaves: Tensors = {}
        self.upstream: Tensors = {}
        self._add_inputs()
        self._add_parameters()
        self.wanted = [x for x in self.leaves if _group(x) in case.wanted.split()]
        for name in self.wanted:
            self.leaves[name].requires_grad_()
        module = self.kind.module(case, torchs=bool(case.accelerated))
        if case.accelerated and module is not None:
            extops.accelerate(module)
        self.callable: Any = self._with_parameters(module) if module else self.kind.function()
        self.ours = (
            torch.compile(self.callable, backend=case.compile) if case.compile else self.callable
        )

    # -- tensors

    def _normal(self, *shape: int) -> Tensor:
        values = torch.randn(shape, device=self.device, generator=self._generator)
        return values.to(narrowest(self.case)).to(dtype_of(self.case))

    def _lengths(self) -> Tensor | None:
        case = self.case
        if not case.lengths:
            return None
        least = 1 if case.call == "layer" else 0  # packed rows have one at least
        numbers = torch.Generator().manual_seed(case.seed)
        found = torch.randint(least, case.time + 1, (case.batch,), generator=numbers)
        found[0] = case.time  # so many steps a packed sequence has
        found = found.sort(descending=True).values if case.lengths == "sorted" else found
        return found.to(self.device)

    def _add_inputs(self) -> None:
        case = self.case
        batch = (case.batch,) if case.batched else ()
        time = () if case.call == "cell" else (case.time,)
        values = self._normal(*time, *batch, case.features)
        if self.lengths is not None:  # what lies beyond them has no effect
            steps = torch.arange(case.time, device=self.device)
            values[steps[:, None] >= self.lengths] = math.nan
        if case.batch_first and case.batched:
            values = values.transpose(0, 1).contiguous()
        self.leaves["input"] = laid_out(values, case.input_layout)
        if case.state:
            sequences = (case.layers * (1 + case.bidirectional),) if case.call == "layer" else ()
            for name in self.kind.states:
                values = self._normal(*sequences, *batch, case.units)
                if case.narrow_state:  # as a call before has given it
                    values = values.to(narrowest(case))
                self.leaves[f"{name}_0"] = laid_out(values, case.state_layout)

    def _add_parameters(self) -> None:
        case = self.case
        for suffix, features in self._sequences():
            for name, shape in self.kind.shapes(features, case.units).items():
                if case.bias or not name.startswith("bias"):
                    values = self._normal(*shape) * max(1, case.units + features) ** -0.5
                    values = values.to(narrowest(case)).to(dtype_of(case))
                    parameter = laid_out(values, case.weight_layout)
                    self.leaves[name + suffix] = torch.nn.Parameter(parameter, requires_grad=False)

    def _sequences(self) -> Iterator[tuple[str, int]]:
        """The suffix of the names of parameters, and the number of features, of each direction of each layer."""
        case = self.case
        if case.call != "layer":
            yield "", case.features
            return
        for layer in range(case.layers):
            features = (1 + case.bidirectional) * case.units if layer else case.features
            for direction in ("", "_reverse")[: 1 + case.bidirectional]:
                yield f"_l{layer}{direction}", features

    def _towards(self, name: str, result: Tensor) -> Tensor:
        """The gradient of a result."""
        if name not in self.upstream:
            case = self.case
            values = self._normal(*result.shape) * max(1, case.time * case.batch) ** -0.5
            self.upstream[name] = laid_out(values.to(narrowest(case)), case.upstream_layout)
        return self.upstream[name].to(result.dtype)

    # -- results

    def run(self) -> Tensors:
        """The results and gradients of extops."""
        with self.region():
            is_module = self.case.call != "function"
            results = self._of_module(self.ours) if is_module else self._of_function(self.leaves)
            transformed = self._transformed(self._of_function, self.leaves)
        found = self._with_gradients(results, self.leaves, self.case.second_order)
        return {**found, **transformed}

    def with_contiguous_leaves(self) -> Problem:
        """The same numbers, as torch's module takes them."""
        other = copy.copy(self)
        other.leaves = {
            name: torch.nn.Parameter(x.detach().contiguous(), requires_grad=x.requires_grad)
            for name, x in self.leaves.items()
        }
        return other

    def run_torchs(self) -> Tensors | None:
        """Those of torch's module, if there is such a one."""
        module = self.kind.module(self.case, torchs=True)
        if module is None:
            return None
        with self.region():
            results = self._of_module(self._with_parameters(module))
        return self._with_gradients(results, self.leaves, second_order=False)

    def run_plain(self, dtype: torch.dtype, noise: float = 0.0) -> Tensors:
        """Those of plain PyTorch, computed in a dtype; from inputs with a relative error, if one is given."""
        leaves = {}
        for name, x in self.leaves.items():
            values = x.detach().to(dtype).contiguous()
            if noise:
                values = values * (1 + noise * torch.randn_like(values))
            leaves[name] = values.requires_grad_(name in self.wanted)
        found = self._with_gradients(self._plain(leaves), leaves, self.case.second_order)
        return {**found, **self._transformed(self._plain, leaves)}

    def _transformed(self, call: Callable[[Tensors], Tensors], leaves: Tensors) -> Tensors:
        """By a transform of torch.func, of the input alone."""
        if not self.case.transform:
            return {}
        others = {name: x.detach() for name, x in leaves.items()}
        input = others["input"]

        def of_input(input: Tensor) -> Tensors:
            return call({**others, "input": input})

        if self.case.transform == "jvp":
            found = torch.func.jvp(of_input, (input,), (input.sign(),))[1]
        else:
            found = torch.func.vmap(of_input)(torch.stack([input, -input]))
        return {f"{name} by {self.case.transform}": x for name, x in found.items()}

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        """Within, autocast and gradients are as in the case."""
        is_on = bool(self.case.autocast)
        dtype = narrowest(self.case) if is_on else None
        with (
            torch.autocast(self.device, dtype, enabled=is_on),
            torch.set_grad_enabled(bool(self.wanted)),
        ):
            yield

    def _with_parameters(self, module: torch.nn.Module) -> torch.nn.Module:
        for name, _ in list(module.named_parameters()):
            setattr(module, name, self.leaves[name])
        return module

    def state(self) -> Any:
        """As a call takes it."""
        if not self.case.state:
            return None
        states = tuple(self.leaves[f"{name}_0"] for name in self.kind.states)
        return states if len(states) > 1 else states[0]

    def _named(self, output: Tensor | None, last: Any) -> Tensors:
        states = last if isinstance(last, tuple) else (last,)
        found = {f"{name}_n": x for name, x in zip(self.kind.states, states, strict=True)}
        return found if output is None else {"output": output, **found}

    def packed(self) -> Any:
        """The input as a module takes it."""
        case, input = self.case, self.leaves["input"]
        if self.lengths is None:
            return input
        options: Any = {"batch_first": case.batch_first, "enforce_sorted": case.lengths == "sorted"}
        return pack_padded_sequence(input, self.lengths.cpu(), **options)

    def _of_module(self, module: Any) -> Tensors:
        case = self.case
        if case.call == "cell":
            return self._named(None, module(self.leaves["input"], self.state()))
        output, last = module(self.packed(), self.state())
        if self.lengths is not None:
            output, _ = pad_packed_sequence(output, case.batch_first, total_length=case.time)
        return self._named(output, last)

    def _of_function(self, leaves: Tensors) -> Tensors:
        case = self.case
        names = [name for name in self.kind.shapes(1, 1) if name in leaves]
        weights = [leaves[name] for name in names if name.startswith("weight")]
        biases = tuple(leaves[name] for name in names if name.startswith("bias"))
        bias = biases[0] if len(biases) == 1 else biases or None
        options = {
            "lengths": self.lengths,
            "batch_first": case.batch_first,
            "reverse": case.reverse,
        }
        results = self.ours(leaves["input"], self.state(), *weights, bias, **options)
        return self._named(*results)

    def _plain(self, leaves: Tensors) -> Tensors:
        """One step after another."""
        case = self.case
        input = leaves["input"]
        input = input if case.batched else input.unsqueeze(-2)
        input = input.unsqueeze(0) if case.call == "cell" else input
        input = input.transpose(0, 1) if case.batch_first and case.batched else input
        zeros = input.new_zeros(case.batch, case.units)
        last, together = [], []
        for number, (suffix, _) in enumerate(self._sequences()):
            names = [name + suffix for name in self.kind.shapes(1, 1)]
            states = [leaves.get(f"{name}_0", zeros) for name in self.kind.states]
            states = [x[number] if case.call == "layer" and case.state else x for x in states]
            states = [x.view(case.batch, case.units) for x in states]
            h, c = states[0], states[-1]
            reverse = case.reverse or suffix.endswith("_reverse")
            output, *found = self.kind.plain.sequence(
                input, *map(leaves.get, names), h, c, self.lengths, reverse=reverse
            )
            last.append(found[: len(states)])
            together.append(output)
            if len(together) > case.bidirectional:
                input, together = torch.cat(together, dim=2), []
        stack: Any = torch.stack if case.call == "layer" else lambda x: x[0]
        results = tuple(stack(x) for x in zip(*last, strict=True))
        if not case.batched:
            input, results = input.squeeze(1), tuple(x.squeeze(-2) for x in results)
        output = input.transpose(0, 1) if case.batch_first and case.batched else input
        return self._named(None if case.call == "cell" else output, results)

    def _with_gradients(self, results: Tensors, leaves: Tensors, second_order: bool) -> Tensors:
        found = {name: x.detach() for name, x in results.items()}
        wanted = [leaves[name] for name in self.wanted]
        of = [x for x in self.case.towards.split() if x in results and results[x].requires_grad]
        towards = [self._towards(x, results[x]) for x in of]
        from_ = [results[x] for x in of]
        for order in ("gradient", "second gradient")[: 1 + second_order]:
            if not from_:
                break
            gradients = torch.autograd.grad(
                from_, wanted, towards, create_graph=second_order, allow_unused=True
            )
            for name, leaf, gradient in zip(self.wanted, wanted, gradients, strict=True):
                found[f"{order} of {name}"] = (
                    torch.zeros_like(leaf) if gradient is None else gradient.detach()
                )
            from_ = [x for x in gradients if x is not None and x.requires_grad]
            towards = [torch.ones_like(x) for x in from_]
        return found


def _group(name: str) -> str:
    """What a tensor is: one of the words of `Case.wanted`."""
    if name.endswith("_0"):
        return "state"
    return next(word for word in ("input", "weight", "bias") if name.startswith(word))
