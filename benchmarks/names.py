"""The names and sizes that both the measuring and the reporting speak of; needs no torch."""

from __future__ import annotations

EAGER = "eager"
ATEN = "C++ ATen"
TUTORIAL = "tutorial kernel"
COMPILE = "best torch.compile"
STATIC = "torch.compile static"
DYNAMIC = "torch.compile dynamic"
MAX_AUTOTUNE = "torch.compile max-autotune"
REDUCE_OVERHEAD = "torch.compile reduce-overhead"
OURS = "extops"
LSTM_CELL = "nn.LSTMCell"
PRODUCT = "best product"
MM = "mm"
ADDMM = "addmm"
LINEAR = "linear"
TRIVIAL = "trivial kernel"
COPY = "copy"
MUL = "torch.mul"
ROUND = "torch.round"
LOOP = "eager loop"
TUTORIAL_LOOP = "tutorial kernel in a loop"
ONE_DIRECTION = "extops, one direction"
LSTM = "nn.LSTM"
GRU = "nn.GRU"
LAYERS = {"LSTM": LSTM, "GRU": GRU}
"""Our layers, each with torch's of that name."""

PEERS = {COMPILE: (STATIC, DYNAMIC, MAX_AUTOTUNE), PRODUCT: (MM, ADDMM, LINEAR)}
"""Each is measured in every one of these forms, and reported by the fastest."""

QUEUED = (TUTORIAL, OURS, COPY)
"""What is also timed without a graph: the first cannot be captured, and a graph copies memory more slowly."""

NO_RIVALS = (OURS, ONE_DIRECTION, PRODUCT, TRIVIAL, COPY, LSTM_CELL)
"""Floors and ourselves, and what computes another function; `torch.mul` is no rival of `round` either."""

STANDARD = ((16, 32, 128), (64, 512, 512), (128, 1024, 1024))
"""Batch, input features and state size of the cells that are measured in every way."""
BATCHES = tuple((batch, *shape[1:]) for shape in STANDARD for batch in (1, 8, 256))
SWEEP = ((13, 33, 127), (24, 200, 384), (512, 512, 512), *BATCHES)
"""More of them, by device time alone on a GPU."""
SEQUENCES = ((256, 16, 128, 128), (256, 64, 512, 512), (128, 128, 1024, 1024))
"""Steps, batch, input features and state size of whole sequences on a GPU."""
SEQUENCE_GOALS: dict[str, tuple[tuple[float, float], ...]] = {
    "float32": ((2.5, 2.5), (1.5, 1.5), (1.3, 1.3)),
    "tf32": ((2.5, 2), (4, 3), (1.3, 1.2)),
    "bfloat16": ((12, 10), (6, 4), (1.3, 1.2)),
}
"""What the faster of cuDNN's LSTM and GRU shall take, relative to ours, at each of these sizes: forward, and with the
gradients. At other sizes 1."""
LAYER_GOALS: dict[str, tuple[tuple[float, float], ...]] = {
    "float32": ((1.3, 1.3), (1.8, 1.8), (1.2, 1.2)),
    "tf32": ((1.3, 1.3), (2.5, 2.5), (1.2, 1.2)),
    "bfloat16": ((6, 6), (4, 4), (1, 1)),
}
"""The same for `extops.LSTM` and `extops.GRU`, relative to torch's layer of that name."""
RAGGED = SEQUENCES[1]
"""Of lengths from 1 to the number of steps, in TF32: as `lengths` (`ragged`) and as a `PackedSequence` (`packed`)."""
BIDIRECTIONAL = SEQUENCES[0]
"""Both directions beside one."""
SEQUENCE_SWEEP = (
    (256, 1, 64, 64),
    (256, 8, 128, 128),
    (32, 16, 128, 128),
    (1024, 16, 128, 128),
    (256, 256, 128, 128),
    (256, 256, 256, 256),
    (256, 1, 512, 512),
    (32, 64, 512, 512),
    (1024, 8, 512, 512),
    (100, 256, 512, 512),
    (128, 8, 1024, 1024),
    (64, 64, 2048, 2048),
    (77, 13, 33, 127),
    (100, 24, 200, 384),
)
"""More of them, without the loops."""
PRECISIONS = ("float32", "tf32", "bfloat16")
CPU_THREADS = (1, 2)
SMALL, LARGE_CPU, LARGE_CUDA = 2**10, 2**24, 2**28
"""Elements of the smallest and the largest vectors."""
