"""Compares a cell of one's own with its step in PyTorch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from extops.binding import _checks
from extops.cells import LoadedCell

_TIME, _BATCH, _FEATURES = 3, 4, 5

_TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
"""Relative to the largest value: a few times the rounding error of a correct cell."""


def check_cell(cell: LoadedCell, state_sizes: Sequence[int] = (5, 100, 300, 600)) -> None:
    """Compares a cell of one's own with its step in PyTorch: each gate, the states, the gradients of each, and those
    of the parameters, on every device that is there, in float64, float32, float16 and bfloat16.

    On a GPU, states of different sizes are computed by different kernels, which precompute the local derivatives
    (``csrc/cells/cell.h``).

    Args:
        cell: what :func:`extops.load_cell` returned.
        state_sizes: the numbers of units to try.

    Raises:
        AssertionError: something differs; the message says what, in which gate, where, and by how much.
        TypeError: ``cell`` is something else.
    """
    if not isinstance(cell, LoadedCell):
        expected = "to be what load_cell returned"
        raise _checks.unfit("check_cell", "cell", expected, repr(cell), TypeError)
    for device in ("cpu", "cuda") if cell.build.cuda else ("cpu",):
        for dtype in _TOLERANCES:
            for state_size in state_sizes:
                _Check(cell, device, dtype, state_size).run()


@dataclass
class _Check:
    """The check of one size on one device. Each step is compared with float64 values computed from the kernels' own
    results of the step before, so that the first difference shows where the mistake is.
    """

    cell: LoadedCell
    device: str
    dtype: torch.dtype
    state_size: int

    def run(self) -> None:
        """Raises an error that says what differs."""
        self._check_step()
        inputs = self._inputs()
        operator = getattr(torch.ops.extops, f"{self.cell.name}_sequence")
        input, h_0, c_0, *parameters = inputs
        results = operator(input, *parameters, h_0, c_0, None)
        self._check_values(inputs, results)
        self._check_gradients(inputs, results)
        if self.dtype is torch.float64:
            self._check_parameters(inputs)

    def _inputs(self) -> list[Tensor]:
        """The input, both states and the parameters, the same in each run."""
        facts, size = self.cell.facts, self.state_size
        generator = torch.Generator().manual_seed(0)
        rows = facts.input * size, facts.recurrent * size
        shapes = [(_TIME, _BATCH, _FEATURES), (_BATCH, size), (_BATCH, size)]
        shapes += [(rows[0], _FEATURES), (rows[1], size), (rows[0],), (rows[1],)]
        made = [torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes]
        made[4] /= size**0.5
        if facts.states == 1:
            made[2] = made[1]
        if facts.cell_states > 1:  # not any numbers are a state, such as one that divides
            given = (
                made[0],
                *made[3:],
                made[1],
                torch.zeros(_BATCH, facts.cell_states * size).double(),
            )
            made[2] = self.cell.composition.sequence(*given, None)[2]
        return [x.to(self.device, self.dtype) for x in made]

    def _check_values(self, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        input, h, c, *parameters = (x.double() for x in inputs)
        output, h_n, c_n, gates, cells = (x.double() for x in results)
        new_cs = [*cells] if self.cell.facts.saves_new_c else [*cells[1:], c_n]
        for t in range(_TIME):
            expected_gates = self.cell.composition.gates(input[t], *parameters, h)
            for number, found, expected in self._parts(gates[t], expected_gates):
                self._compare(f"gate {number}", found, expected)
            h, c = self.cell.composition.forward(gates[t], c)
            for name, found, expected in self._states("the new c", new_cs[t], c):
                self._compare(name, found, expected, "new_c")
            self._compare("h", output[t], h, "output")
            h = output[t]
        self._compare("the last h", h_n, h)
        self._compare("the last c", c_n, c)

    def _check_step(self) -> None:
        """That it gives h and each number of the new c."""
        number = 1 + self.cell.facts.cell_states
        zeros = torch.zeros(_BATCH, self.state_size, dtype=torch.float64)
        found = self.cell.step(zeros.repeat(1, self.cell.facts.gates), *[zeros] * (number - 1))
        if len(found) != number or not all(isinstance(x, Tensor) for x in found):
            given = ", ".join(type(x).__name__ for x in found)
            raise AssertionError(f"{self._here()}: `step` gives {given}, not {number} tensors")
        if number > 2:
            for place, x in enumerate(found[1:]):
                self._check_shape(f"the new c[{place}]", x, found[0])

    def _check_gradients(self, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        output, h_n, c_n, gates, cells = results
        generator = torch.Generator().manual_seed(1)
        of_output, of_h, of_c = (
            torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
            for x in (output, h_n, c_n)
        )
        operator = getattr(torch.ops.extops, f"{self.cell.name}_sequence_backward")
        for given, time, towards in (
            ("a gradient of h alone", 1, (None, of_h, None)),
            ("a gradient of c alone", 1, (None, None, of_c)),
            (f"gradients of both and {_TIME} steps", _TIME, (of_output, of_h, of_c)),
        ):
            arguments: tuple[Any, ...] = (*towards, inputs[4], gates[:time], cells[:time])
            grad_gates, grad_h, grad_c = (x.double() for x in operator(*arguments, None))
            wide: list[Any] = [x if x is None else x.double() for x in arguments]
            expected_gates, expected_h, expected_c = self.cell.composition.sequence_backward(*wide)
            for t in reversed(range(time)):  # the order of the computation
                for number, found, expected in self._parts(grad_gates[t], expected_gates[t]):
                    what = f"the gradient of gate {number} for {given}"
                    self._compare(what, found, expected, "to_gates and to_c")
            for name, found, expected in self._states(
                "the gradient of the old c", grad_c, expected_c
            ):
                self._compare(f"{name} for {given}", found, expected, "to_old_c")
            self._compare(f"the gradient of the old h for {given}", grad_h, expected_h)

    def _check_parameters(self, inputs: Sequence[Tensor]) -> None:
        leaves = [x.clone().requires_grad_() for x in inputs]
        input, h_0, c_0, *parameters = leaves
        given = input, *parameters, h_0, c_0
        output, *_ = self.cell.cell(given, None, batch_first=False, reverse=False)
        loop, *_ = self.cell.composition.sequence(input, *parameters, h_0, c_0, None)
        names = "input", "h_0", "c_0", "weight_ih", "weight_hh", "bias_ih", "bias_hh"
        found, expected = (
            torch.autograd.grad(x.square().sum(), leaves, materialize_grads=True)
            for x in (output, loop)
        )
        for name, one, other in zip(names, found, expected, strict=True):
            self._compare(f"the gradient of {name}", one, other)

    def _parts(self, *tensors: Tensor) -> Iterator[Any]:
        """The number of each gate or state of the cell, and what it is in tensors of a step."""
        parts = zip(*(x.split(self.state_size, dim=1) for x in tensors), strict=True)
        return ((number, *of_one) for number, of_one in enumerate(parts))

    def _states(self, what: str, *tensors: Tensor) -> Iterator[Any]:
        """The name of each state of the cell, likewise."""
        is_alone = self.cell.facts.cell_states == 1
        parts = self._parts(*tensors)
        return ((what if is_alone else f"{what}[{x}]", *others) for x, *others in parts)

    def _here(self) -> str:
        return f"check_cell: {self.cell.name} on {self.device} in {self.dtype}, {self.state_size} units"

    def _check_shape(self, what: str, of_step: Tensor, expected: Tensor) -> None:
        if not _checks.same_shape(of_step.shape, expected.shape):
            shapes = f"{list(of_step.shape)}, not {list(expected.shape)}"
            raise AssertionError(f"{self._here()}: `step` gives {what} of shape {shapes}")

    def _compare(self, what: str, found: Tensor, expected: Tensor, where: str = "") -> None:
        here = self._here()
        self._check_shape(what, expected, found)
        largest = expected.abs().max().item()
        error = (found - expected).abs().max().item()
        if not error <= _TOLERANCES[self.dtype] * max(1, largest):
            advice = f" (see {where})" if where else ""
            raise AssertionError(
                f"{here}: {what} differs from that of `step` by {error:.3g}, where the largest value is {largest:.3g}"
                f"{advice}"
            )
