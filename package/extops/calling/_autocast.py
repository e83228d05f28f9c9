"""What autocast does to calls of the operators: it casts the arguments of public functions, and nothing else."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeGuard, TypeVar

import torch
from torch import Tensor

from extops import _private

P = ParamSpec("P")
T = TypeVar("T")

CAST_FROM = (torch.float32, torch.bfloat16, torch.float16)

# Every call asks.
is_on = _private.is_autocasting


def cast(input: Tensor, *others: Any) -> tuple[Any, ...]:
    """The arguments as autocast hands them to operators that run in lower precision: all but float64 are cast."""
    device = input.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return input, *others
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if is_cast(x) else x for x in (input, *others))


def cast_with_state(*arguments: Any) -> tuple[Any, ...]:
    """The same for the cells of torch, whose state comes last: on a CPU only their GEMMs run in lower precision, and
    the results have the wider dtype of the region and the state.
    """
    input, *_, state = arguments
    if input.device.type != "cpu" or not torch.is_autocast_enabled("cpu") or not is_cast(state):
        return cast(*arguments)
    dtype = torch.promote_types(torch.get_autocast_dtype("cpu"), state.dtype)
    # Copies, as those that torch's GEMMs keep: a program may change what is given before the backward.
    copy = torch.is_grad_enabled()
    return tuple(x.to(dtype, copy=copy) if is_cast(x) else x for x in arguments)


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.dtypes = [x.dtype for x in tensors]
        ctx.set_materialize_grads(False)
        return _copies(tensors, [dtype] * len(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        pairs = zip(gradients, ctx.dtypes, strict=True)
        if torch.is_grad_enabled():  # for one of second order
            return None, *(None if x is None else x.to(dtype) for x, dtype in pairs)
        given = [(x, dtype) for x, dtype in pairs if x is not None]
        copies = iter(_copies([x for x, _ in given], [dtype for _, dtype in given]))
        return None, *(None if x is None else next(copies) for x in gradients)


def _copies(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> tuple[Tensor, ...]:
    """Those of one kind by one kernel: a list of several kinds takes as many as it has tensors."""
    copies = tuple([torch.empty_like(x, dtype=y) for x, y in zip(tensors, dtypes, strict=True)])
    of_kinds: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for copy, x in zip(copies, tensors, strict=True):
        to, given = of_kinds.setdefault((copy.dtype, x.dtype, x.is_contiguous()), ([], []))
        to.append(copy)
        given.append(x)
    for to, given in of_kinds.values():
        _private.copy_all(to, given)
    return copies


def cast_together(dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
    """All in a dtype, the parameters of a module by one kernel: the host takes longer than the GPU to cast each of
    them.
    """
    others = [x for x in tensors if x.dtype is not dtype]
    if others and torch.is_grad_enabled():
        found = iter(_Together.apply(dtype, *others))
    else:
        found = iter(_copies(others, [dtype] * len(others)))
    return tuple([x if x.dtype is dtype else next(found) for x in tensors])


def is_cast(argument: object) -> TypeGuard[Tensor]:
    """Whether autocast may change its dtype."""
    return isinstance(argument, Tensor) and argument.dtype in CAST_FROM


def outside(function: Callable[P, T]) -> Callable[P, T]:
    """A function within which autocast casts nothing: the kernels rely on the dtypes of their arguments, which were
    cast before the forward.

    A captured program that runs under autocast may call it with tensors of several dtypes, where PyTorch's own
    operators before it were cast. They get the widest dtype, as those of ``torch.cat`` do.
    """

    @functools.wraps(function)
    def call(*arguments: P.args, **keywords: P.kwargs) -> T:
        if not is_on():
            return function(*arguments, **keywords)
        dtypes = {x.dtype for x in arguments if is_cast(x)}
        given: Any = arguments
        if len(dtypes) > 1:
            widest = functools.reduce(torch.promote_types, dtypes)
            given = tuple(x.to(widest) if is_cast(x) else x for x in arguments)
        with _private.without_autocast():
            return function(*given, **keywords)

    return call
