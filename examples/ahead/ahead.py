"""A model with recurrent layers compiled ahead of time, and run by a program without Python: `ahead.cpp`.

    python examples/ahead/ahead.py  # needs g++; a minute

`AOTInductor` makes a package of what `torch.export` gives. The program links torch's libraries and loads the one of
extops that has the operators; on a GPU also `libextops_stable_cuda.so`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils import cpp_extension

import extops


class Tagger(nn.Module):
    """Sentences of differing lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 32)
        self.rnn = nn.LSTM(32, 64, bidirectional=True, batch_first=True)
        self.tags = nn.Linear(128, 5)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Scores of each token."""
        rows = self.embed(tokens)
        packed = pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)
        found: Tensor = self.tags(pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0])
        return found


def compile_program(folder: Path) -> Path:
    """Compiles `ahead.cpp`."""
    program = folder / "ahead"
    include = [f"-isystem{x}" for x in cpp_extension.include_paths()]
    libraries = [f"-L{x} -Wl,-rpath,{x}" for x in cpp_extension.library_paths()]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    command = ["c++", "-std=c++20", "-O1", abi, *include, Path(__file__).with_suffix(".cpp")]
    command += [*" ".join(libraries).split(), "-ltorch", "-ltorch_cpu", "-lc10", "-ldl"]
    subprocess.run([*map(str, command), "-o", str(program)], check=True)
    return program


def main() -> int:
    """Compares the program's scores with those of the model in Python."""
    torch.manual_seed(0)
    model = extops.accelerate(Tagger()).eval()
    tokens, lengths = torch.randint(0, 1000, (3, 12)), torch.tensor([12, 7, 9])
    batch, time = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("time", max=512)
    shapes: Any = {0: batch, 1: time}, {0: batch}
    given = tokens, lengths
    exported = torch.export.export(model, given, dynamic_shapes=shapes, strict=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        package = torch._inductor.aoti_compile_and_package(
            exported, package_path=str(folder / "model.pt2")
        )
        operators = Path(extops.__file__).with_name("libextops_stable_cpu.so")
        command = [compile_program(folder), package, operators]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    by_program = torch.tensor([float(x) for x in done.stdout.split()])
    tokens, lengths = torch.arange(40).view(2, 20), torch.tensor([20, 5])
    with torch.no_grad():
        difference = (by_program.view(2, 20, 5) - model(tokens, lengths)).abs().max()
    print(f"the program's scores differ from Python's by {difference:.1e} at most")
    return int(difference > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
