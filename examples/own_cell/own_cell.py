"""A recurrent cell of your own, by the kernels of extops: a minimal gated unit.

    python examples/own_cell/own_cell.py                   # needs g++ and ninja; a minute the first time
    python examples/own_cell/own_cell.py --device cuda     # needs nvcc, too

It compares the cell with its step in plain PyTorch, and prints the time of a loop over that and of the operator.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import extops

HERE = Path(__file__).resolve().parent


def step(gates: Tensor, old_c: Tensor) -> tuple[Tensor, Tensor]:
    """One step in PyTorch."""
    n_x, f, n_h = gates.chunk(3, dim=1)
    f = torch.sigmoid(f)
    new_c = old_c + f * (torch.tanh(n_x + f * n_h) - old_c)
    return new_c, new_c


mgu = extops.load_cell("mgu", [HERE / "mgu.cpp", HERE / "mgu.cu"], step)


class MGU(torch.nn.Module):
    """A layer of them: `[T, B, I]` gives `[T, B, S]` and the last state."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        bound = hidden_size**-0.5
        rows = 2 * hidden_size
        shapes = (rows, input_size), (rows, hidden_size), (rows,), (rows,)
        self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh = (
            torch.nn.Parameter(torch.empty(shape).uniform_(-bound, bound)) for shape in shapes
        )

    def forward(self, input: Tensor, h_0: Tensor) -> tuple[Tensor, Tensor]:
        """All steps in one operator."""
        return mgu(input, h_0, self.weight_ih, self.weight_hh, (self.bias_ih, self.bias_hh))

    def loop(self, input: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """The same, a step at a time."""
        output = []
        for x in input:
            n_x, f_x = torch.nn.functional.linear(x, self.weight_ih, self.bias_ih).chunk(2, dim=1)
            f_h, n_h = torch.nn.functional.linear(h, self.weight_hh, self.bias_hh).chunk(2, dim=1)
            h, _ = step(torch.cat([n_x, f_x + f_h, n_h], dim=1), h)
            output.append(h)
        return torch.stack(output), h


def gradients(
    run: Callable[..., tuple[Tensor, Tensor]], layer: MGU, *inputs: Tensor
) -> tuple[Tensor, ...]:
    """Those of the parameters."""
    output, _ = run(*inputs)
    return torch.autograd.grad(output.square().sum(), tuple(layer.parameters()))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    extops.check_cell(mgu)
    print("the cell agrees with its step")
    torch.manual_seed(0)
    layer = MGU(64, 128).to(device)
    inputs = torch.randn(100, 16, 64, device=device), torch.randn(16, 128, device=device)
    for name, run in (("in a loop", layer.loop), ("extops", layer)):
        gradients(run, layer, *inputs)
        start = time.perf_counter()
        gradients(run, layer, *inputs)[0].sum().item()
        print(f"{name:10} {1000 * (time.perf_counter() - start):6.1f} ms with gradients")


if __name__ == "__main__":
    main()
