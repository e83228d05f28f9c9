"""An operator in C++ and CUDA: `own_project.swish`."""

from pathlib import Path

import torch

(_library,) = Path(__file__).parent.glob("_C*.so")
torch.ops.load_library(str(_library))
swish = torch.ops.own_project.swish
