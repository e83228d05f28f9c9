"""Whole sequences: `extops.lltm_sequence` against a loop of cells, `extops.LLTMLayer` as nn.LSTM."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence, pad_sequence

import extops
import operators
from operators import Tensors, by_device, sequence, sequence_by_cells

TIME, BATCH, FEATURES, STATE = 6, 3, 5, 4


def sequence_inputs(device: str, time: int = TIME) -> Tensors:
    """The input, h_0, c_0, weights and bias of one layer."""
    inputs = operators.sequence_inputs(time, BATCH, FEATURES, STATE)
    return tuple(tensor.to(device) for tensor in inputs)


@by_device
def test_batch_first(device: str) -> None:
    input, *others = sequence_inputs(device)
    output, *last = sequence(input.transpose(0, 1), *others, batch_first=True)
    expected, *expected_last = sequence(input, *others)
    torch.testing.assert_close([output.transpose(0, 1), *last], [expected, *expected_last])


@by_device
@pytest.mark.parametrize("time", [0, 1])
def test_short_sequences(time: int, device: str) -> None:
    input, h, c, weights, bias = sequence_inputs(device, time)
    output, h_n, c_n = sequence(input, h, c, weights, bias)
    assert output.shape == (time, BATCH, STATE)
    if time == 0:
        torch.testing.assert_close([h_n, c_n], [h, c])


@by_device
def test_lengths(device: str) -> None:
    """Each row stops at its own length: zeros come after it, and its state stays."""
    input, h, c, weights, bias = sequence_inputs(device)
    lengths = [TIME, 2, 0]
    output, h_n, c_n = sequence(
        input, h, c, weights, bias, lengths=torch.tensor(lengths, device=device)
    )
    for row, length in enumerate(lengths):
        alone = slice(row, row + 1)
        expected, h_1, c_1 = sequence(input[:length, alone], h[alone], c[alone], weights, bias)
        torch.testing.assert_close(output[:length, alone], expected)
        assert bool((output[length:, alone] == 0).all())
        torch.testing.assert_close([h_n[alone], c_n[alone]], [h_1, c_1])


def test_errors() -> None:
    input, h, c, weights, bias = sequence_inputs("cpu")
    with pytest.raises(RuntimeError, match=r"^lltm_sequence: .*`input`.*3 dimensions.*got 2"):
        sequence(input[0], h, c, weights, bias)
    with pytest.raises(RuntimeError, match=r"^lltm_sequence: .*`c_0`.*\[3, 4\].*got \[2, 4\]"):
        sequence(input, h, c[:2], weights, bias)
    with pytest.raises(RuntimeError, match=r"^lltm_sequence: .*`weights`.*\[12, 9\].*\[12, 8\]"):
        sequence(input, h, c, weights[:, 1:], bias)
    with pytest.raises(RuntimeError, match=r"^lltm_sequence: .*`bias`.*float64.*got .*float32"):
        sequence(input, h, c, weights, bias.float())
    with pytest.raises(RuntimeError, match=r"^lltm_sequence: .*`lengths`.*\[3\].*got \[2\]"):
        sequence(input, h, c, weights, bias, lengths=torch.tensor([1, 2]))
    with pytest.raises(RuntimeError, match=r"^lltm_sequence: .*`lengths`.*integer.*float32"):
        sequence(input, h, c, weights, bias, lengths=torch.ones(3))
    with pytest.raises(TypeError, match=r"^lltm_sequence: .*`lengths`.*torch.Tensor.*list"):
        sequence(input, h, c, weights, bias, lengths=[1, 2, 3])


# -- the module, shaped like nn.LSTM -------------------------------------------------------------

OPTIONS = [
    {},
    {"num_layers": 2},
    {"bidirectional": True},
    {"num_layers": 2, "bidirectional": True, "batch_first": True},
]
by_options = pytest.mark.parametrize("options", OPTIONS, ids=lambda it: "-".join(it) or "plain")


def layer(device: str, **options: object) -> extops.LLTMLayer:
    return extops.LLTMLayer(FEATURES, STATE, device=device, dtype=torch.float64, **options)


def layer_input(device: str, module: extops.LLTMLayer) -> Tensor:
    leading = (BATCH, TIME) if module.batch_first else (TIME, BATCH)
    return torch.randn(*leading, FEATURES, dtype=torch.float64, device=device)


@by_device
@by_options
def test_shapes_are_those_of_lstm(options: dict[str, object], device: str) -> None:
    module = layer(device, **options)
    lstm = torch.nn.LSTM(FEATURES, STATE, device=device, dtype=torch.float64, **options)
    input = layer_input(device, module)
    ours, theirs = module(input), lstm(input)
    assert ours[0].shape == theirs[0].shape
    assert [state.shape for state in ours[1]] == [state.shape for state in theirs[1]]
    state = tuple(torch.randn_like(tensor) for tensor in theirs[1])
    assert module(input, state)[0].shape == lstm(input, state)[0].shape


@by_device
def test_layers_and_directions(device: str) -> None:
    """Two layers of two directions, written out cell by cell."""
    module = layer(device, num_layers=2, bidirectional=True)
    input = layer_input(device, module)
    h, c = (torch.randn(4, BATCH, STATE, dtype=torch.float64, device=device) for _ in range(2))
    parameters = dict(module.named_parameters())
    current, last = input, []
    for number in range(2):
        outputs = []
        for direction, suffix in enumerate((f"_l{number}", f"_l{number}_reverse")):
            place = 2 * number + direction
            steps = current.flip(0) if direction else current
            output, h_n, c_n = sequence_by_cells(
                steps,
                h[place],
                c[place],
                parameters[f"weights{suffix}"],
                parameters[f"bias{suffix}"],
            )
            outputs.append(output.flip(0) if direction else output)
            last.append((h_n, c_n))
        current = torch.cat(outputs, dim=2)
    output, states = module(input, (h, c))
    torch.testing.assert_close(output, current)
    torch.testing.assert_close(states, tuple(torch.stack(each) for each in zip(*last, strict=True)))


@by_device
@by_options
@pytest.mark.parametrize("enforce_sorted", [True, False], ids=["sorted", "unsorted"])
def test_packed_sequences(enforce_sorted: bool, options: dict[str, object], device: str) -> None:
    """Each sequence of a packed batch gives what it gives alone."""
    module = layer(device, **options)
    lengths = [6, 4, 1] if enforce_sorted else [4, 1, 6]
    rows = [torch.randn(length, FEATURES, dtype=torch.float64, device=device) for length in lengths]
    count = module.num_layers * (1 + module.bidirectional)
    h, c = (torch.randn(count, 3, STATE, dtype=torch.float64, device=device) for _ in range(2))
    packed, (h_n, c_n) = module(pack_sequence(rows, enforce_sorted), (h, c))
    assert isinstance(packed, PackedSequence)
    output, found_lengths = pad_packed_sequence(packed, batch_first=True)
    assert found_lengths.tolist() == lengths
    expected = []
    for row, steps in enumerate(rows):
        alone, (h_1, c_1) = module(steps, (h[:, row], c[:, row]))  # unbatched, as nn.LSTM takes it
        expected.append(alone)
        torch.testing.assert_close([h_n[:, row], c_n[:, row]], [h_1, c_1])
    torch.testing.assert_close(output, pad_sequence(expected, batch_first=True))


@by_device
def test_dropout_between_layers(device: str) -> None:
    module = layer(device, num_layers=2, dropout=0.5)
    input = layer_input(device, module)
    first, second = module(input)[0], module(input)[0]
    assert not torch.equal(first, second)
    module.eval()
    assert torch.equal(module(input)[0], module(input)[0])
    alone = layer(device, dropout=0.5)  # one layer: there is nothing in between
    assert torch.equal(alone(input)[0], alone(input)[0])
