"""What torch.utils.flop_counter counts: the GEMMs, as for the same operators in plain PyTorch calls."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import extops
import extops.reference
from operators import LLTM, by_device, sequence, sequence_by_cells, sequence_inputs

FLOPS = (
    2 * 3 * 12 * 9
)  # of a GEMM of LLTM.inputs("small"): batch 3, weights of 12 rows and 9 columns


def forward_and_backward(lltm: object, *arguments: torch.Tensor) -> tuple[int, int]:
    with FlopCounterMode(display=False) as forward:
        outputs = lltm(*arguments)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    return forward.get_total_flops(), backward.get_total_flops()


@by_device
@pytest.mark.parametrize("parameters_only", [False, True], ids=["all", "parameters"])
def test_lltm(parameters_only: bool, device: str) -> None:
    """Forward is one GEMM; backward is one for the parameters, and one for the input and the state."""
    inputs = LLTM.inputs("small", device)
    for number, tensor in enumerate(inputs):
        tensor.requires_grad_(number in (1, 2) or not parameters_only)
    found = forward_and_backward(extops.lltm, *inputs)
    assert found == (FLOPS, FLOPS if parameters_only else 2 * FLOPS)
    if not parameters_only:
        assert found == forward_and_backward(extops.reference.lltm, *inputs)


@by_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sequence(dtype: torch.dtype, device: str) -> None:
    """Whether the input's part of the GEMM is done for all steps at once or not."""
    inputs = [
        tensor.detach().to(device, dtype).requires_grad_() for tensor in sequence_inputs(6, 3, 5, 4)
    ]
    assert forward_and_backward(sequence, *inputs) == (6 * FLOPS, 12 * FLOPS)
    assert forward_and_backward(sequence_by_cells, *inputs) == (6 * FLOPS, 12 * FLOPS)


@by_device
def test_pointwise_operators(device: str) -> None:
    """None, as for those of torch."""
    input = torch.randn(3, 4, device=device, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        extops.elementwise_mult(input, extops.round_ste(input)).sum().backward()
    assert counter.get_total_flops() == 0
