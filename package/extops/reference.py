"""The operators in plain PyTorch calls, to compare with. Nothing here checks the input of a call."""

import math

import torch
from torch import Tensor

from extops.binding import _checks
from extops.calling._operator import reference_of
from extops.ops.compositions import lltm
from extops.ops.multiply import multiply as _multiply
from extops.ops.rounding import round_ste as _round_ste

elementwise_mult = reference_of(_multiply)
round_ste = reference_of(_round_ste)


class LLTM(torch.nn.Module):
    """See :class:`extops.LLTM`, which differs only in :meth:`step`."""

    step = staticmethod(lltm)

    def __init__(
        self,
        input_features: int,
        state_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _checks.check_layer_sizes("LLTM", input_features=input_features, state_size=state_size)
        _checks.check_layer_dtype("LLTM", dtype)
        super().__init__()
        self.input_features = input_features
        self.state_size = state_size
        self.weights = torch.nn.Parameter(
            torch.empty(3 * state_size, state_size + input_features, device=device, dtype=dtype)
        )
        self.bias = torch.nn.Parameter(torch.empty(3 * state_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws both parameters uniformly from ±1/sqrt(state_size)."""
        bound = 1 / math.sqrt(self.state_size) if self.state_size > 0 else 0.0
        for parameter in self.parameters():
            torch.nn.init.uniform_(parameter, -bound, bound)

    def zero_state(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """The state where none is given: zeros."""
        zeros = input.new_zeros(input.shape[0], self.state_size)
        return zeros, zeros

    def forward(
        self, input: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """One step: ``input`` [B, I] and ``state = (h, c)`` of [B, S] each give ``(new_h, new_cell)``."""
        old_h, old_cell = self.zero_state(input) if state is None else state
        return self.step(input, self.weights, self.bias, old_h, old_cell)

    def extra_repr(self) -> str:
        """The sizes, for ``repr``."""
        return f"input_features={self.input_features}, state_size={self.state_size}"
