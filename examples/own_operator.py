"""An operator of your own, compiled just in time: `own_operator.cpp`, and for a GPU `own_operator.cu`.

    python examples/own_operator.py                # needs g++ and ninja; a minute at most, then seconds
    python examples/own_operator.py --device cuda  # needs the CUDA compiler, too

PyTorch's dispatcher knows the operator: it has a gradient, works under `torch.compile`, and `opcheck` examines it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import cpp_extension


def compile_operator(device: str) -> None:
    """Compiles what has changed of the sources, and loads it."""
    source = Path(__file__).with_suffix(".cpp")
    sources = [source, source.with_suffix(".cu")] if device == "cuda" else [source]
    start = time.perf_counter()
    cpp_extension.load(f"own_operator_{device}", [*map(str, sources)], is_python_module=False)
    print(f"compiled and loaded in {time.perf_counter() - start:.0f} s")


def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    """Keeps what the gradient needs."""
    ctx.save_for_backward(*inputs)


def backward(ctx: Any, grad_output: Tensor) -> Tensor:
    """The gradient, by the operator for it."""
    return torch.ops.own.softsign_backward(grad_output, *ctx.saved_tensors)


def register() -> None:
    """Tells PyTorch the gradient, and the shapes that tracing needs without any data."""
    torch.library.register_autograd("own::softsign", backward, setup_context=setup_context)
    torch.library.register_fake("own::softsign")(torch.empty_like)
    torch.library.register_fake("own::softsign_backward")(lambda _, input: torch.empty_like(input))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device

    compile_operator(device)
    register()
    softsign = torch.ops.own.softsign

    x = torch.linspace(-2, 2, 1000, device=device, dtype=torch.float64, requires_grad=True)
    difference = (softsign(x) - torch.nn.functional.softsign(x)).abs().max().item()
    print(f"largest difference from torch's softsign: {difference:.1e}")
    assert torch.autograd.gradcheck(softsign, x[::100])
    torch.library.opcheck(softsign, (x,))
    print("the gradient is right, and opcheck finds no fault")


if __name__ == "__main__":
    main()
