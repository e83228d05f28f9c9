"""The operators as extensions are commonly written (`benchmarks/tutorial`), compiled just in time; CUDA only."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = Path(__file__).parent / "tutorial"
EXTENSIONS = ("lltm", "elementwise")


@cache
def extension(name: str) -> Any:
    """The compiled extension of that name; compiles it at the first call."""
    from torch.utils import cpp_extension

    sources = [str(FOLDER / f"{name}.cpp"), str(FOLDER / f"{name}_kernel.cu")]
    return cpp_extension.load(f"tutorial_{name}", sources, extra_cuda_cflags=["-O3"])


def build_seconds(name: str) -> float:
    """Compiles the extension, and says how long that took."""
    start = time.perf_counter()
    extension(name)
    return time.perf_counter() - start


class _LLTM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        new_h, new_cell, *saved = extension("lltm").forward(*inputs)
        ctx.save_for_backward(new_cell, *saved, inputs[1])
        return new_h, new_cell

    @staticmethod
    def backward(ctx: Any, grad_h: Tensor, grad_cell: Tensor) -> tuple[Tensor, ...]:
        outputs = extension("lltm").backward(
            grad_h.contiguous(), grad_cell.contiguous(), *ctx.saved_tensors
        )
        d_old_h, d_input, d_weights, d_bias, d_old_cell, _ = outputs
        return d_input, d_weights, d_bias, d_old_h, d_old_cell


class LLTM(torch.nn.Module):
    """The tutorial's module, on the parameters given; its bias is a row [1, 3S]."""

    def __init__(self, weights: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(weights.detach())
        self.bias = torch.nn.Parameter(bias.detach().unsqueeze(0))

    def forward(self, input: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """One step."""
        outputs: tuple[Tensor, Tensor] = _LLTM.apply(input, self.weights, self.bias, *state)  # type: ignore[no-untyped-call]
        return outputs


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        output: Tensor = extension("elementwise").round_ste(input)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return grad_output


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        output = torch.empty_like(a)
        extension("elementwise").mult(a, b, output)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        grad_a, grad_b = extension("elementwise").mult_backward(
            grad_output.contiguous(), *ctx.saved_tensors
        )
        return grad_a, grad_b


def round_ste(input: Tensor) -> Tensor:
    """Straight-through rounding."""
    output: Tensor = _Round.apply(input)  # type: ignore[no-untyped-call]
    return output


def elementwise_mult(a: Tensor, b: Tensor) -> Tensor:
    """`a * b`."""
    output: Tensor = _Multiply.apply(a, b)  # type: ignore[no-untyped-call]
    return output
