"""The names and sizes that both the measuring and the reporting speak of; needs no torch."""

from __future__ import annotations

EAGER = "eager"
ATEN = "C++ ATen"
TUTORIAL = "tutorial kernel"
COMPILE = "torch.compile"
REDUCE_OVERHEAD = "torch.compile reduce-overhead"
OURS = "extops"
LSTM_CELL = "nn.LSTMCell"
GEMM = "GEMM alone"
TRIVIAL = "trivial kernel"
COPY = "copy"
MUL = "torch.mul"
ROUND = "torch.round"
LOOP = "eager loop"
TUTORIAL_LOOP = "tutorial kernel in a loop"
LSTM = "nn.LSTM"
GRU = "nn.GRU"

QUEUED = (TUTORIAL, OURS, COPY)
"""What is also timed without a graph: the first cannot be captured, and a graph copies memory more slowly."""

NO_RIVALS = (OURS, GEMM, TRIVIAL, COPY, LSTM_CELL)
"""Floors and ourselves, and what computes another function; `torch.mul` is no rival of `round` either."""

STANDARD = ((16, 32, 128), (64, 512, 512), (128, 1024, 1024))
"""Batch, input features and state size of the cells that the targets speak of."""
CPU_THREADS = (1, 2)
SMALL, LARGE_CPU, LARGE_CUDA = 2**10, 2**24, 2**28
"""Elements of the smallest and the largest vectors."""
