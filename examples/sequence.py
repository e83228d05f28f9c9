"""Trains a language model of bytes with `nn.LSTM`, with the same by `extops.accelerate`, and with `extops.LLTMLayer`.

    python examples/sequence.py                    # seconds on a CPU
    python examples/sequence.py --device cuda
    python examples/sequence.py --plot loss.png    # draws the loss curves, with matplotlib

The text is Python's own manual, which comes with every Python. It prints the losses, and the times of the three beside
each other, with the kernel that computed each.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics

import torch
from torch import Tensor, nn

import extops

try:
    from matplotlib.figure import Figure
except ImportError:
    Figure = None

STEPS, BATCH, EMBEDDING, STATE = 32, 16, 32, 128


class LanguageModel(nn.Module):
    """Predicts each byte from those before it."""

    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, EMBEDDING)
        self.recurrent = recurrent
        self.head = nn.Linear(STATE, 256)

    def forward(self, text: Tensor) -> Tensor:
        """`[T, B]` bytes give `[T, B, 256]` logits."""
        output, _ = self.recurrent(self.embedding(text))
        return self.head(output)

    def loss(self, text: Tensor) -> Tensor:
        """Bits for each byte of `text`, `[T + 1, B]`, but the first."""
        logits = self(text[:-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), text[1:].flatten()) / 0.6931


MODELS = {
    "nn.LSTM": lambda: LanguageModel(nn.LSTM(EMBEDDING, STATE)),
    "accelerated": lambda: extops.accelerate(LanguageModel(nn.LSTM(EMBEDDING, STATE))),
    "LLTMLayer": lambda: LanguageModel(extops.LLTMLayer(EMBEDDING, STATE)),
}


def batches(text: Tensor, count: int) -> Iterator[Tensor]:
    """Pieces of the text from random places, `[T + 1, B]`; the same ones in every run."""
    generator = torch.Generator().manual_seed(0)
    pieces = text.unfold(0, STEPS + 1, 1)
    for _ in range(count):
        places = torch.randint(len(pieces), (BATCH,), generator=generator)
        yield pieces[places.to(text.device)].t().long()


def train(model: LanguageModel, text: Tensor, iterations: int) -> tuple[list[float], float]:
    """Trains on all but the end of the text; the loss of each iteration, and the loss on that end."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    held_out = text[-100 * (STEPS + 1) :]
    losses = []
    for batch in batches(text[: -len(held_out)], iterations):
        optimizer.zero_grad()
        loss = model.loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1)
        optimizer.step()
        losses.append(loss.detach())
    with torch.no_grad():
        last = model.loss(held_out.view(100, STEPS + 1).t().long())
    return torch.stack(losses).tolist(), last.item()


def kernel(model: LanguageModel, text: Tensor) -> str:
    """What computes the recurrent layer of a training step: a kernel of extops, or torch's layer."""
    if type(model.recurrent) is nn.LSTM:
        return "torch"
    (batch,) = batches(text, 1)
    return extops.which_kernel(model.recurrent, model.embedding(batch[:-1]))


def draw(curves: dict[str, list[float]], file: Path) -> None:
    """Draws the losses, averaged over ten iterations."""
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.subplots()
    colours = "#d55e00", "#0072b2", "#009e73"
    for (name, losses), colour in zip(curves.items(), colours, strict=False):
        means = torch.tensor(losses).unfold(0, 10, 10).mean(dim=1)
        axes.plot(range(10, len(losses) + 1, 10), means, color=colour, label=name)
    axes.set(xlabel="iteration", ylabel="loss, bits per byte")
    axes.grid(color="#dddddd")
    axes.legend()
    figure.savefig(file)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the loss curves")
    arguments = parser.parse_args()
    if arguments.plot and not Figure:
        parser.error("--plot needs matplotlib: pip install matplotlib")

    torch.set_num_threads(1)  # each step is too small a task for more
    text = "\n".join(topics.topics.values()).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(arguments.device)
    print(f"{len(data)} bytes, {arguments.iterations} iterations on {arguments.device}")
    curves, times = {}, {}
    for name, build in MODELS.items():
        train(build().to(data.device), data, 1)  # the first use of anything takes longer
        torch.manual_seed(0)
        model = build().to(data.device)
        start = time.perf_counter()
        curves[name], held_out = train(model, data, arguments.iterations)
        times[name] = f"{time.perf_counter() - start:.1f} s by {kernel(model, data)}"
        first, last = curves[name][0], sum(curves[name][-10:]) / 10
        print(
            f"{name:11} loss {first:.2f} -> {last:.2f} bits per byte, held-out text {held_out:.2f}"
        )
    print("times: ", ", ".join(f"{name} {taken}" for name, taken in times.items()))
    if arguments.plot:
        draw(curves, arguments.plot)
        print(f"wrote {arguments.plot}")


if __name__ == "__main__":
    main()
