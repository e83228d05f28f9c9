"""Computes the values and gradients that the operators are held against, in NumPy alone.

    python tests/data/golden.py      # writes golden.npz beside this file

The formulas are those of the definitions, written once more, without PyTorch. They are evaluated in
extended precision (`numpy.longdouble`) and then rounded to float64: that gives the same bits whatever
CPU, matrix library and SIMD functions NumPy uses, which plain float64 does not.

The file holds the small cases. `golden_arrays` also computes the `COMPUTED` ones, whose arrays are
large; the random inputs of all cases come from one stream, in the order below.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

FILE = Path(__file__).with_suffix(".npz")
SEED = 20261120

Arrays = dict[str, NDArray[np.float64]]
Extended = NDArray[np.longdouble]

# Batch, input, state; the factor of the weights.
CASES = {
    "one": ((1, 1, 1), 1),
    "small": ((2, 3, 4), 1),
    "odd": ((13, 33, 31), 1),
    "tutorial": ((16, 32, 128), 1),
    "saturated": ((3, 5, 7), 40),
    "wide_input": ((2, 70, 5), 1),
}
COMPUTED = ("odd", "tutorial", "wide_input")
STEPS, BATCH, INPUT, STATE = 9, 4, 6, 5  # of the sequence
JUST_BELOW_HALF = np.nextafter(0.5, 0)
ROUNDED = {
    **{0.0: 0, 0.25: 0, JUST_BELOW_HALF: 0, 0.5: 1, 0.75: 1, 1.0: 1, 1.49: 1, 1.5: 2, 2.5: 3},
    **{-0.25: 0, -0.5: 0, -0.51: -1, -1.5: -1, 1e16: 1e16},
    **{np.inf: np.inf, -np.inf: -np.inf, np.nan: np.nan},
}


def sigmoid(x: Extended) -> Extended:
    return 1 / (1 + np.exp(-x))


def elu(x: Extended) -> Extended:
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


def forward(
    input: Extended, weights: Extended, bias: Extended, old_h: Extended, old_cell: Extended
) -> tuple[Extended, Extended]:
    """The LLTM cell: `new_h` and `new_cell`."""
    z_i, z_o, z_c = np.split(np.hstack([old_h, input]) @ weights.T + bias, 3, axis=1)
    new_cell = old_cell + elu(z_c) * sigmoid(z_i)
    return np.tanh(new_cell) * sigmoid(z_o), new_cell


def backward(
    grad_h: Extended,
    grad_cell: Extended,
    input: Extended,
    weights: Extended,
    bias: Extended,
    old_h: Extended,
    old_cell: Extended,
) -> tuple[Extended, Extended, Extended, Extended, Extended]:
    """The gradients of `input`, `weights`, `bias`, `old_h` and `old_cell`."""
    x = np.hstack([old_h, input])
    z_i, z_o, z_c = np.split(x @ weights.T + bias, 3, axis=1)
    _, new_cell = forward(input, weights, bias, old_h, old_cell)
    d_cell = grad_cell + grad_h * sigmoid(z_o) / np.cosh(new_cell) ** 2
    d_z = np.hstack(
        [
            d_cell * elu(z_c) * sigmoid(z_i) * sigmoid(-z_i),
            grad_h * np.tanh(new_cell) * sigmoid(z_o) * sigmoid(-z_o),
            d_cell * sigmoid(z_i) * np.exp(np.minimum(z_c, 0)),
        ]
    )
    d_x = d_z @ weights
    state = old_h.shape[1]
    return d_x[:, state:], d_z.T @ x, d_z.sum(axis=0), d_x[:, :state], d_cell


def lltm(
    random: np.random.Generator, batch: int, input_size: int, state: int, factor: int
) -> Iterator[tuple[str, NDArray[np.floating]]]:
    """The inputs, outputs and gradients of one cell."""
    bound = 1 / np.sqrt(state)
    inputs = {
        "input": random.standard_normal((batch, input_size)),
        "weights": random.uniform(-bound, bound, (3 * state, state + input_size)) * factor,
        "bias": random.uniform(-bound, bound, 3 * state),
        "old_h": random.standard_normal((batch, state)),
        "old_cell": random.standard_normal((batch, state)),
    }
    upstream = {name: random.standard_normal((batch, state)) for name in ("grad_h", "grad_cell")}
    exact = [np.longdouble(each) for each in inputs.values()]
    gradients = backward(*map(np.longdouble, upstream.values()), *exact)
    yield from (inputs | upstream).items()
    yield from zip(("new_h", "new_cell"), forward(*exact), strict=True)
    yield from zip((f"d_{name}" for name in inputs), gradients, strict=True)


def sequence(random: np.random.Generator) -> Iterator[tuple[str, NDArray[np.floating]]]:
    """The inputs, outputs and gradients of a cell that goes over `STEPS` steps."""
    bound = 1 / np.sqrt(STATE)
    inputs = {
        "input": random.standard_normal((STEPS, BATCH, INPUT)),
        "weights": random.uniform(-bound, bound, (3 * STATE, STATE + INPUT)),
        "bias": random.uniform(-bound, bound, 3 * STATE),
        "h0": random.standard_normal((BATCH, STATE)),
        "c0": random.standard_normal((BATCH, STATE)),
    }
    upstream = {
        "grad_output": random.standard_normal((STEPS, BATCH, STATE)),
        "grad_c_n": random.standard_normal((BATCH, STATE)),
    }
    yield from (inputs | upstream).items()

    input, weights, bias, h, c = map(np.longdouble, inputs.values())
    states = [(h, c)]
    for step in input:
        states.append(forward(step, weights, bias, *states[-1]))
    yield "output", np.stack([h for h, _ in states[1:]])
    yield "c_n", states[-1][1]

    d_h, d_c = np.zeros_like(h), np.longdouble(upstream["grad_c_n"])
    d_weights, d_bias = np.zeros_like(weights), np.zeros_like(bias)
    d_input = np.zeros_like(input)
    for step in reversed(range(STEPS)):
        of_step = backward(
            d_h + upstream["grad_output"][step], d_c, input[step], weights, bias, *states[step]
        )
        d_input[step], of_weights, of_bias, d_h, d_c = of_step
        d_weights += of_weights
        d_bias += of_bias
    gradients = (d_input, d_weights, d_bias, d_h, d_c)
    yield from zip((f"d_{name}" for name in inputs), gradients, strict=True)


def golden_arrays() -> Arrays:
    """All cases, by keys such as `lltm/<case>/<name>`, `sequence/<name>` and `round/<name>`."""
    random = np.random.default_rng(SEED)
    arrays = {
        f"lltm/{case}/{name}": array
        for case, (sizes, factor) in CASES.items()
        for name, array in lltm(random, *sizes, factor)
    }
    arrays |= {f"sequence/{name}": array for name, array in sequence(random)}
    arrays |= {
        "round/input": np.array([*ROUNDED]),
        "round/output": np.array([*ROUNDED.values()]),
    }
    return {key: np.asarray(array, np.float64) for key, array in arrays.items()}


def kept(arrays: Arrays) -> Arrays:
    """What the file holds of them."""
    return {key: array for key, array in arrays.items() if key.split("/")[1] not in COMPUTED}


if __name__ == "__main__":
    np.savez_compressed(FILE, **kept(golden_arrays()))
