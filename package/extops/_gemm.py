"""GEMMs, and what they serve."""

import torch
from torch import Tensor

_LARGE = 2**20
"""Elements. Of smaller matrices the host's time matters, and a sum takes it less."""


def mm(a: Tensor, b: Tensor) -> Tensor:
    """A matrix product. On a CPU, torch 2.7 to 2.10 read wrong numbers from a strided column of a 16-bit type."""
    is_column = b.shape[1] == 1 and b.stride(0) != 1
    return torch.mm(a, b.contiguous() if is_column and not b.is_cuda else b)


def column_sums(matrix: Tensor) -> Tensor:
    """The sum of each column. On a GPU a large matrix is multiplied by ones: torch's sums would take up to four times
    its memory, and longer (2.11).
    """
    elements = matrix.numel()
    # Compared by a traced program, the number of steps would be a constant of it.
    if not (matrix.is_cuda and isinstance(elements, int) and elements >= _LARGE):
        return matrix.sum(0)
    ones = torch.ones(1, matrix.shape[0], dtype=matrix.dtype, device=matrix.device)
    return torch.mm(ones, matrix).squeeze(0)
