"""GEMMs, and what they serve."""

from ctypes import c_char_p, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from extops import _in_graph, _private
from extops.binding import _libraries
from extops.calling import _autograd

_LARGE = 2**20
"""Elements. Of smaller matrices the host's time matters, and a sum takes it less."""

_Sizes, _Strides = c_int64 * 3, c_int64 * 2
_FACTOR = c_void_p, _Strides
_ARGUMENTS = c_void_p, c_int32, _Sizes, *_FACTOR, *_FACTOR, c_void_p, c_int64


def mm(a: Tensor, b: Tensor, allow_tf32: bool | None = None, added: Tensor | None = None) -> Tensor:
    """A matrix product, to which a matrix may be added. ``allow_tf32`` says the precision of float32 on a GPU, whatever
    torch's switch of GEMMs does: layers follow that of cuDNN.
    """
    if a.is_cuda and allow_tf32 is not None and a.dtype is torch.float32:
        product = _mm_in_precision(a, b, allow_tf32, added)
        if product is not None:
            return product
    if added is not None:
        return torch.addmm(added, a, b)
    return _private.mm(a, b)


def _mm_in_precision(a: Tensor, b: Tensor, allow_tf32: bool, added: Tensor | None) -> Tensor | None:
    """None where torch has to compute it."""
    handle = _private.blas_handle
    if handle is None or allow_tf32 == _private.allows_tf32():
        return None
    if not (_autograd.is_plain() and all(type(x) in _autograd.TENSORS for x in (a, b))):
        if torch.is_grad_enabled() or not _autograd.is_compiled_plainly():
            return None
        product: Tensor = torch.ops.extops_torch.mm.default(a, b, allow_tf32)
        return product if added is None else added + product
    if a.get_device() != torch.cuda.current_device():  # whose handle it is
        return None
    (rows, inner), columns = a.shape, b.shape[1]
    product = a.new_empty(rows, columns) if added is None else added
    library = _libraries.library("cuda")
    error = library.entry("gemm", c_char_p, *_ARGUMENTS)(
        *(handle(), library.gemm_dtype(a.dtype, allow_tf32), _Sizes(rows, inner, columns)),
        *(*_of_factor(a), *_of_factor(b), product.data_ptr(), added is not None),
    )
    return product if error is None else None


# torch's own in a graph would follow the switch of GEMMs.
_in_graph.add_operator(
    "mm(Tensor a, Tensor b, bool allow_tf32) -> Tensor",
    mm,
    lambda a, b, allow_tf32: a.new_empty(a.shape[0], b.shape[1]),
)


def _of_factor(matrix: Tensor) -> tuple[int, Any]:
    return matrix.data_ptr(), _Strides(*matrix.stride())


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
