from pathlib import Path

import torch

for library in sorted(Path(__file__).parent.glob("*.so")):
    torch.ops.load_library(library)
