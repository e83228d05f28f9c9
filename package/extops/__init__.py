"""Custom C++/CUDA operators for PyTorch: LLTM, straight-through rounding, elementwise multiplication.

Every operator runs on CPU and CUDA in float64, float32, bfloat16 and float16, takes any strides, has exact gradients of
any order, and works under ``torch.compile``, ``torch.export``, autocast, CUDA graphs and ``torch.func``.
"""

from extops import _loader

_loader.load()

from extops import reference  # noqa: E402  (operators can only be registered once the libraries are loaded)
from extops._version import __version__  # noqa: E402
from extops.modules import LLTM, LLTMLayer, RoundSTE  # noqa: E402
from extops.ops.lltm import lltm  # noqa: E402
from extops.ops.multiply import elementwise_mult  # noqa: E402
from extops.ops.rounding import round_ste  # noqa: E402
from extops.sequence import lltm_sequence  # noqa: E402

__all__ = [
    "LLTM",
    "LLTMLayer",
    "RoundSTE",
    "__version__",
    "elementwise_mult",
    "lltm",
    "lltm_sequence",
    "reference",
    "round_ste",
]
