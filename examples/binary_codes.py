"""Learns codes of 32 bits for texts, through `extops.round_ste`, and finds related texts by them.

    python examples/binary_codes.py                # seconds on a CPU
    python examples/binary_codes.py --device cuda

An autoencoder reads which words a page of Python's manual has, and must tell them again from 32 bits. Rounding has no
gradient of its own; `round_ste` passes the gradient of the bits on to what was rounded. Beside it: the same
autoencoder, trained without rounding, whose codes are rounded only in the end.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from collections.abc import Callable
from pydoc_data import topics

import torch
from torch import Tensor, nn

import extops

BITS, WORDS = 32, 1000
PAGE = "while"


class Autoencoder(nn.Module):
    """From words to a code and back; `binarize` makes bits of numbers between 0 and 1."""

    def __init__(self, binarize: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(WORDS, 256), nn.ReLU(), nn.Linear(256, BITS), nn.BatchNorm1d(BITS)
        )
        self.decoder = nn.Sequential(nn.Linear(BITS, 256), nn.ReLU(), nn.Linear(256, WORDS))
        self.binarize = binarize

    def code(self, words: Tensor) -> Tensor:
        """`[N, WORDS]` zeros and ones give `[N, BITS]` numbers between 0 and 1."""
        return self.binarize(torch.sigmoid(self.encoder(words)))


def loss(logits: Tensor, words: Tensor) -> Tensor:
    """Bits of information that are missing about each page's words."""
    missing = nn.functional.binary_cross_entropy_with_logits(logits, words, reduction="sum")
    return missing / 0.6931 / len(words)


def read_pages() -> tuple[list[str], Tensor]:
    """The titles of the manual's pages, and which of its commonest words each has, `[N, WORDS]`."""
    pages = {
        title: set(re.findall("[a-z_]{3,}", text.lower())) for title, text in topics.topics.items()
    }
    commonest = Counter(word for words in pages.values() for word in words).most_common(WORDS)
    rows = [[float(word in words) for word, _ in commonest] for words in pages.values()]
    return [*pages], torch.tensor(rows)


def train(
    binarize: Callable[[Tensor], Tensor], words: Tensor, iterations: int
) -> tuple[Autoencoder, float]:
    """Trains an autoencoder; with it, the loss from codes that are rounded to bits."""
    torch.manual_seed(0)
    model = Autoencoder(binarize).to(words.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    for _ in range(iterations):
        optimizer.zero_grad()
        loss(model.decoder(model.code(words)), words).backward()
        optimizer.step()
    with torch.no_grad():
        return model, loss(model.decoder(model.code(words).round()), words).item()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--iterations", type=int, default=300)
    arguments = parser.parse_args()

    torch.set_num_threads(1)  # each step is too small a task for more
    titles, words = read_pages()
    words = words.to(arguments.device)
    print(f"{len(titles)} pages, {BITS} bits each, on {arguments.device}")
    for name, binarize in (("rounded in the end", lambda x: x), ("round_ste", extops.round_ste)):
        start = time.perf_counter()
        model, missing = train(binarize, words, arguments.iterations)
        seconds = time.perf_counter() - start
        print(f"{name:18} {seconds:5.1f} s, loss {missing:.1f} bits per page")

    codes = model.code(words).detach()
    distances = (codes != codes[titles.index(PAGE)]).sum(dim=1)
    nearest = distances.argsort()[:6].tolist()
    found = ", ".join(f"{titles[each]} ({distances[each]})" for each in nearest)
    print(f"nearest to {PAGE}, with the number of bits that differ: {found}")


if __name__ == "__main__":
    main()
