"""Which kernel a call would take: for tests, and for those who measure."""

import functools
from ctypes import c_char_p, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from extops import _private, _schemas
from extops._libraries import Library

_library = functools.cache(Library)


def of_sequence(
    input: Tensor, state_size: int, *, cell: str = "lltm", backward: bool = False
) -> str:
    """The kernel of a cell's sequences on a GPU, on the current stream: ``"tensor_block"``, ``"float32_block"``,
    ``"float32_cluster"``, ``"tensor_cluster"`` or ``"group"``, and ``"step"`` for a product and a kernel for each step.
    ``EXTOPS_SEQUENCE_KERNEL`` names another one to be taken; ``"none"`` where that cannot serve the call.

    ``input`` is ``[time, batch, features]``, of any strides.
    """
    time, batch, _ = input.shape
    strides = (1, time) if _schemas.is_batch_first(input) else (batch, 1)
    library = _library("cuda")
    dtype = library.product_dtype(input.dtype, _private.allows_tf32())
    entry = library.entry(f"{cell}_sequence_kernel", c_char_p, c_int32, c_void_p, c_int64, c_void_p)
    # The stride of the weights is not asked: no kernel depends on it.
    sizes = (c_int64 * 8)(time, batch, state_size, state_size, *strides, 0, 0)
    with torch.cuda.device(input.device):
        stream = torch.cuda.current_stream().cuda_stream
        name: bytes = entry(dtype, sizes, backward, stream)
    return name.decode()
