"""Adds one to a tensor."""

import ctypes
from pathlib import Path

import torch

(_library,) = Path(__file__).parent.glob("_cpu*.so")
torch.ops.load_library(str(_library))
add_one = torch.ops.classic_extension.add_one
sentence = ctypes.CDLL(str(_library)).sentence
sentence.restype = ctypes.c_char_p
