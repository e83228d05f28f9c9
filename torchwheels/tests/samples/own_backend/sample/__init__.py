"""One operator, `torch.ops.sample.answer`."""

from pathlib import Path

import torch

(_library,) = Path(__file__).parent.glob("*.so")
torch.ops.load_library(str(_library))
