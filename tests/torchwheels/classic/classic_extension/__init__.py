"""Adds one to a tensor."""

import ctypes
from pathlib import Path

import torch

(_library,) = Path(__file__).parent.glob("_cpu*.so")
torch.ops.load_library(str(_library))
add_one = torch.ops.classic_extension.add_one
sentence = ctypes.CDLL(str(_library)).sentence
sentence.restype = ctypes.c_char_p


def add_one_cuda(x: torch.Tensor) -> torch.Tensor:
    """Adds one to each of the elements of `x`, up to 1024, in place."""
    (library,) = Path(__file__).parent.glob("_cuda*.so")
    if ctypes.CDLL(str(library)).add_one_cuda(ctypes.c_void_p(x.data_ptr()), x.numel()):
        raise RuntimeError("the kernel was not started")
    return x
