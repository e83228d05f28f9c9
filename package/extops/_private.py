"""The names of torch that it does not promise to keep. All that extops uses are here, and each has a public replacement
for a torch that lacks it; :data:`IN_USE` says which of the two is in use.
"""

import functools
import operator
import sys
import types
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from importlib.machinery import PathFinder
from typing import Any, ParamSpec, cast

import torch
from torch.autograd import forward_ad

P = ParamSpec("P")
Functions = dict[Callable[..., Any], Callable[..., Any]]
Question = Callable[[], bool]
Region = Callable[[], AbstractContextManager[Any]]

IN_USE: dict[str, bool] = {}
"""By private name, within ``torch``: False where its replacement is used."""


def _find(name: str, otherwise: Any) -> Any:
    try:
        found = operator.attrgetter(name)(torch)
    except AttributeError:
        found = otherwise
    IN_USE[name] = found is not otherwise
    return found


# -- calls that bypass the dispatcher's keys for autograd: all of these, or none. Without them all calls go through the
#    dispatcher, with the gradient of _autograd._register_publicly.

are_transforms_active: Question = _find("_C._are_functorch_transforms_active", lambda: True)
below_autograd: Region = _find("_C._AutoDispatchBelowAutograd", nullcontext)
"""Calls within go straight to the kernels: the caller has seen to the gradient."""
below_counting: Region = _find("_C._AutoDispatchBelowADInplaceOrView", nullcontext)
"""The same for an operator that writes: the caller also sees to the count of writes."""
unrecorded: Region = _find("_C._DisableTorchDispatch", nullcontext)
"""A program that is traced does not record the calls within."""
_find("autograd.forward_ad._current_level", None)

may_bypass_autograd = all(IN_USE.values())


def is_forward_mode() -> bool:
    """Whether a level of forward-mode AD is entered; also True where that cannot be known."""
    return not may_bypass_autograd or forward_ad._current_level >= 0


# -- quick questions, which every call asks


def current_stream(device: int) -> int:
    """The address of the current stream of a GPU."""
    return torch.cuda.current_stream(device).cuda_stream


blas_handle: Callable[[], int] | None = None
"""torch's handle of cuBLAS for the current device and stream."""
if torch.backends.cuda.is_built():
    current_stream = _find("_C._cuda_getCurrentRawStream", current_stream)
    blas_handle = _find("_C._cuda_getCurrentBlasHandle", None)

is_tracing: Callable[[], bool] = _find("_C._is_tracing", cast("Any", torch.jit).is_tracing)
"""Whether ``torch.jit.trace`` records a call. For eager code: torch.compile cannot trace it."""

uncompiled: Callable[[Any], Any] = _find("_disable_dynamo", torch.compiler.disable)
"""What ``torch.compiler.disable`` does, without importing the compiler before the first call."""

_matmul, _cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
if hasattr(_matmul, "fp32_precision"):  # since torch 2.9
    _switches: dict[str, Any] = {"matmul": _matmul, "rnn": cast("Any", _cudnn).rnn}
    _precision = _find("_C._get_fp32_precision_getter", lambda _, of: _switches[of].fp32_precision)
else:
    _switches = {
        "matmul": _find("_C._get_cublas_allow_tf32", lambda: _matmul.allow_tf32),
        "rnn": _find("_C._get_cudnn_allow_tf32", lambda: _cudnn.allow_tf32),
    }

    def _precision(_: str, of: str) -> str:
        return "tf32" if _switches[of]() else "ieee"


def allows_tf32() -> bool:
    """Whether torch's switch lets GEMMs of float32 on CUDA be computed in TF32."""
    return bool(_precision("cuda", "matmul") == "tf32")


def cudnn_allows_tf32() -> bool:
    """The same for cuDNN's recurrent layers."""
    return bool(_precision("cuda", "rnn") == "tf32")


# What torch.compiler.assume_constant_result does, without importing the compiler. Code compiled for one position of the
# switch of GEMMs is guarded by it.
for _switch in (allows_tf32, cudnn_allows_tf32):
    cast("Any", _switch)._dynamo_marked_constant = True


class _Switches(types.ModuleType):
    @property
    def cudnn_allows_tf32(self) -> bool:
        """The same, where it is traced: Dynamo guards what it reads of a module, so that it compiles anew."""
        return cudnn_allows_tf32()


switches = _Switches(f"{__name__}.switches")


def without_frames(name: str) -> Callable[..., Any]:
    """The operator ``name`` without the Python frames that tracing needs, which cost half as much as a call."""
    overload = getattr(torch.ops.extops, name).default
    IN_USE["_ops.OpOverload._op"] = hasattr(overload, "_op")
    return cast("Callable[..., Any]", getattr(overload, "_op", overload))


def apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` for plain calls, without what it does for ``torch.func``."""
    # The engine's way to the backward is through a method that looks for it first, in each call.
    of_engine = getattr(function, "_backward_cls", None)
    IN_USE["autograd.Function._backward_cls"] = of_engine is not None
    if of_engine is not None:
        of_engine.apply = cast("Any", function).backward
    base = super(torch.autograd.Function, function)
    return cast("Callable[..., Any]", getattr(base, "apply", function.apply))


graph_task: Callable[[], int] = _find("_C._current_graph_task_id", lambda: 0)
"""The number of the backward that runs, as one does where a checkpoint computes a forward again; -1 where none does, 0
where that is not known.
"""
_hooks = _find("_C._autograd._top_saved_tensors_default_hooks", lambda _: True)


def has_hooks_of_saved_tensors() -> bool:
    """Whether a hook takes what is saved for a backward, as checkpoints have it; True where that is not known."""
    return _hooks(False) is not None


_dispatch_modes: Callable[[], int] = _find("_C._len_torch_dispatch_stack", lambda: 1)
_function_modes: Callable[[], int] = _find("_C._len_torch_function_stack", lambda: 1)
_function_mode: Callable[[int], Any] = _find("_C._get_function_stack_at", lambda _: None)
_is_profiled: Callable[[], bool] = _find("_C._autograd._profiler_enabled", lambda: True)


def is_watched() -> bool:
    """Whether a mode or a profiler sees each call; True where that is not known."""
    # torch.set_default_device is one that sees no call of ours.
    modes = [_function_mode(place) for place in range(_function_modes())]
    return bool(_dispatch_modes() or _is_profiled()) or any(
        type(x).__module__ != "torch.utils._device" for x in modes
    )


keep_busy: Callable[[int], object] = _find("cuda._sleep", lambda _: None)
"""Has the GPU do nothing for so many cycles. Without it times of the GPU contain those of the host."""


# -- GEMMs


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``torch.mm``, which on a CPU read wrong numbers from a strided column of a 16-bit type from torch 2.7 to 2.10."""
    is_column = b.shape[1] == 1 and b.stride(0) != 1
    return torch.mm(a, b.contiguous() if is_column and not b.is_cuda else b)


# -- what Dynamo traces in place of a function that it refuses


_at_import: dict[str, list[Callable[[], None]]] = {}
"""What to do once a module was imported."""


class _AtImport:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Called by ``import``, and by who only asks whether the module is there."""
        spec: Any = PathFinder.find_spec(name, path, target) if name in _at_import else None
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            for act in _at_import[name]:
                act()

        spec.loader.exec_module = exec_module
        return spec


def once_imported(name: str, act: Callable[[], None]) -> None:
    """Acts at once or, where a module is not imported, which would take seconds here, when it is."""
    if name in sys.modules:
        return act()
    if not _at_import:
        sys.meta_path.insert(0, cast("Any", _AtImport()))
    _at_import.setdefault(name, []).append(act)


def _with_dynamo(register: Callable[P, None]) -> Callable[P, None]:
    """Acts once Dynamo is there; where that lacks what is needed, it traces as without."""

    @functools.wraps(register)
    def later(*arguments: P.args, **named: P.kwargs) -> None:
        def tried() -> None:
            with suppress(ImportError, AttributeError):
                register(*arguments, **named)

        once_imported("torch._dynamo", tried)

    return later


def _trace_as(function: Any, variable: type[Any]) -> None:
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.variables.builder import VariableBuilder

    def dispatch(builder: Any, function: Any) -> Any:
        builder.install_guards(GuardBuilder.FUNCTION_MATCH)
        return variable(function, source=builder.source)

    VariableBuilder._id_dispatch()[id(function)] = dispatch


@_with_dynamo
def answer_in_traces(question: Callable[..., bool], answer: Callable[..., bool]) -> None:
    """Code that Dynamo traces gets what ``answer`` says once, as a constant, where it asks ``question``. Tensors are
    given without data, in the sizes of the call that is traced.
    """
    from torch._dynamo.variables import ConstantVariable, TensorVariable, UserFunctionVariable
    from torch._dynamo.variables.lists import BaseListVariable
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    class Answered(UserFunctionVariable):
        def call_function(self, tx: Any, arguments: Any, keywords: Any) -> Any:
            """A constant, unless a program is exported, which may run elsewhere."""
            is_exported = getattr(tx, "export", False) or is_exporting()
            found = False
            # Not of arguments that Dynamo cannot say, such as a list that changes.
            with unset_fake_temporarily(), suppress(NotImplementedError, LookupError):
                found = not is_exported and answer(*map(value_of, arguments))
            return ConstantVariable.create(found)

    def value_of(variable: Any) -> Any:
        known = variable.realize()
        if isinstance(known, BaseListVariable):
            return tuple(map(value_of, known.items))
        if isinstance(known, TensorVariable):
            return known.as_proxy().node.meta["example_value"]
        return known.value if hasattr(known, "value") else known.as_python_constant()

    _trace_as(question, Answered)


@_with_dynamo
def answer_isinstance(is_ours: Callable[[type], bool]) -> None:
    """Code that Dynamo traces gets of an instance of such a class what eager code gets: Dynamo goes by the type, and
    not by ``__class__``, of several classes at once and, from torch 2.15 on, of one.
    """
    from torch._dynamo.variables import BuiltinVariable, ConstantVariable

    class Asked(BuiltinVariable):
        def call_function(self, tx: Any, arguments: Any, keywords: Any) -> Any:
            with suppress(NotImplementedError, ValueError):
                known, kind = arguments
                if is_ours(known.python_type()):
                    answer = isinstance(known.realize().value, kind.as_python_constant())
                    return ConstantVariable.create(answer)
            return super().call_function(tx, arguments, keywords)

    _trace_as(isinstance, Asked)


is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)
"""Public since torch 2.7."""


# Only then are there operators for compiled code alone, and exports are told from it.
_may_be_plain = may_bypass_autograd and hasattr(torch.compiler, "is_exporting")
_compile_id: Callable[[], object] = getattr(
    _find("_guards.CompileContext", None), "current_compile_id", lambda: None
)


def is_compiled_here() -> bool:
    """Whether ``torch.compile`` traces, and no export, whose program may run without Python."""
    return _may_be_plain and _compile_id() is not None and not is_exporting()


def is_known(condition: Any) -> bool:
    """Whether a condition of sizes holds; not where only data will tell."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental import symbolic_shapes

    return bool(getattr(symbolic_shapes, "guard_or_false", bool)(condition))


def hints_of(sizes: Iterable[Any]) -> list[int | None]:
    """Sizes as the call had them that is traced; None where no call has one."""
    return [x if isinstance(x, int) else x.node.hint for x in sizes]


@_with_dynamo
def trace_instead(replaced: Functions, holds: Callable[[Any], bool], elsewhere: Functions) -> None:
    """Code that Dynamo traces gets other functions, but only within methods of objects of which ``holds`` is true, and
    ``elsewhere`` what is to be traced there.
    """
    from torch._dynamo import trace_rules
    from torch._dynamo.variables import LazyVariableTracker, UserFunctionVariable
    from torch._dynamo.variables.misc import CellVariable

    class Replaced(UserFunctionVariable):
        def call_function(self, tx: Any, *arguments: Any) -> Any:
            """The call, by the frame that makes it."""
            traced = (replaced if is_within(tx) else elsewhere).get(self.fn)
            if traced is not None:
                return UserFunctionVariable(cast("Any", traced)).call_function(tx, *arguments)
            rule: Any = trace_rules.lookup(self.fn)
            return rule(self.fn, source=self.source).call_function(tx, *arguments)

    def is_within(frame: Any) -> bool:
        while frame is not None:
            names = frame.f_code.co_varnames
            # Of a method the first is the object; behind a break of the graph it is any of them.
            is_resumed = frame.f_code.co_name.startswith("torch_dynamo_resume_in")
            if any(is_one(frame, name) for name in names[: None if is_resumed else 1]):
                return True
            frame = getattr(frame, "parent", None)
        return False

    def is_one(frame: Any, name: str) -> bool:
        found = frame.symbolic_locals.get(name)
        # Before Dynamo guards its value, as isinstance() lets it do.
        is_lazy = issubclass(type(found), LazyVariableTracker) and not found.is_realized()
        if is_lazy and not holds(found.peek_value()):
            return False
        if isinstance(found, CellVariable):  # where a function within the method uses it, too
            found = frame.output.side_effects.load_cell(found)
        with suppress(NotImplementedError):  # a list of tensors has no value
            return found is not None and holds(getattr(found.realize(), "value", None))
        return False

    for function in replaced:
        _trace_as(function, Replaced)


def is_asked_by_dynamo() -> bool:
    """Whether it is Dynamo that asks for the class of a layer: of torch's own classes it traces none. What the user's
    code asks while it is traced gets torch's class, as everywhere.
    """
    caller: str = sys._getframe(2).f_globals.get("__name__", "")
    return caller.startswith("torch._dynamo.") and caller != "torch._dynamo.variables.builtin"


# -- autocast


copy_all: Callable[[list[torch.Tensor], list[torch.Tensor]], object] = _find(
    "_foreach_copy_", lambda to, tensors: [x.copy_(y) for x, y in zip(to, tensors, strict=True)]
)
"""Copies tensors into others, on a GPU by one kernel where they are of one dtype."""


def _autocast_devices() -> list[str]:
    return [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]


def _disable_autocast() -> AbstractContextManager[Any]:
    stack = ExitStack()
    for device in _autocast_devices():
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack


is_autocasting: Question = _find("_C._is_any_autocast_enabled", lambda: bool(_autocast_devices()))
"""Whether autocast is on for some type of device."""

without_autocast: Region = _find("_C._DisableAutocast", _disable_autocast)
"""Calls within compute in the dtypes of their tensors."""


# -- assertions that a GPU checks itself

assert_async: Callable[[torch.Tensor, str], None] | None = _find("_assert_async", None)
_is_wrapped = _find("_C._functorch.is_functorch_wrapped_tensor", None)
_unwrap = _find("_C._functorch.get_unwrapped", None)
outside_transforms: Region = _find("_C._DisableFuncTorch", nullcontext)

if not (_is_wrapped and _unwrap):
    assert_async = None  # vmap has no rule for it


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The values behind a tensor of ``torch.func``."""
    while _is_wrapped(tensor):
        tensor = _unwrap(tensor)
    return tensor
