"""LSTM, GRU and RNN layers for PyTorch in C++ and CUDA, ``accelerate(model)``, and recurrent cells of your own.

Every operator runs on CPU and CUDA in float64, float32, bfloat16 and float16, takes any strides, has exact gradients of
any order, and works under ``torch.compile``, ``torch.export``, autocast, CUDA graphs and ``torch.func``.

Where it cannot be imported or gives an error on the GPU, ``python -m extops_doctor`` says why.
"""

from extops.binding import _devices, _loader

__version__ = _devices.own_version()
_loader.load()

# Operators can only be registered once the libraries are loaded.
from extops import reference
from extops._cell_check import check_cell
from extops._kernels import which_kernel
from extops.accelerating import accelerate, restore
from extops.calling import _flops
from extops.cells import cell_layer, load_cell
from extops.choosing import _sequences
from extops.choosing._table import choices
from extops.comparing import compare
from extops.modules import LLTM, LLTMLayer, RoundSTE
from extops.ops.lltm import lltm
from extops.ops.multiply import elementwise_mult
from extops.ops.rounding import round_ste
from extops.ops.sequence import gru_sequence, lltm_sequence, lstm_sequence, rnn_sequence
from extops.rnn import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell

_flops.provide()
_sequences.provide()

__all__ = [
    "GRU",
    "LLTM",
    "LSTM",
    "RNN",
    "GRUCell",
    "LLTMLayer",
    "LSTMCell",
    "RNNCell",
    "RoundSTE",
    "__version__",
    "accelerate",
    "cell_layer",
    "check_cell",
    "choices",
    "compare",
    "elementwise_mult",
    "gru_sequence",
    "lltm",
    "lltm_sequence",
    "load_cell",
    "lstm_sequence",
    "reference",
    "restore",
    "rnn_sequence",
    "round_ste",
    "which_kernel",
]
