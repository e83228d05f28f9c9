"""Writes the files that do nothing but name a cell of the package: `python -m tools.cells`.

A cell's arithmetic is in `csrc/cells/`, and `csrc/cells/cells.h` has a line for each. Kernels are templates over it.
What instantiates them is a file of its own for each cell, so that they compile side by side.
"""

from __future__ import annotations

import re
from pathlib import Path

from extops_build import ROOT, errors_for_the_user

CSRC = ROOT / "csrc"

KERNELS = {
    "kernels/cpu/{cell}_kernel.cpp": """\
#include "sequence.h"
#include "step.h"

EXTOPS_DEFINE_SEQUENCE_CPU({cell}, extops::{Cell})
EXTOPS_DEFINE_STEP_CPU({cell}, extops::{Cell})
""",
    "kernels/cuda/cells/{cell}_kernel.cu": """\
#include "../sequence/float32_block.cuh"
#include "../sequence/kernels.cuh"
#include "../step/step.cuh"

EXTOPS_SEQUENCE_CUDA({cell}, extops::{Cell})
EXTOPS_STEP_CUDA({cell}, extops::{Cell})
""",
    "kernels/cuda/cells/{cell}_tensor_kernel.cu": """\
#include "../sequence/group.cuh"
#include "../sequence/tensor_block.cuh"

EXTOPS_SEQUENCE_TENSOR(extops::{Cell})
""",
    "kernels/cuda/cells/{cell}_hopper_kernel.cu": """\
#include "../sequence/float32_cluster.cuh"
#include "../sequence/tensor_cluster.cuh"
#include "../step/hopper.cuh"

EXTOPS_SEQUENCE_HOPPER(extops::{Cell})
EXTOPS_STEP_HOPPER(extops::{Cell})
""",
}
OF_ALL_STEPS = re.compile(
    r'^#include "\.\./sequence.*\n|^EXTOPS_SEQUENCE_(TENSOR|HOPPER).*\n', re.MULTILINE
)
"""Lines for newer GPUs that a cell without kernels of all steps does not have."""


def cells() -> dict[str, str]:
    """The names of the cells, and of the types that define them."""
    found = re.findall(r"^  CELL\((\w+), (\w+)\)", (CSRC / "cells/cells.h").read_text(), re.M)
    return dict(found)


def has_sequence_kernels(cell_type: str) -> bool:
    """Whether a GPU has kernels for all steps of a cell at once: what its definition says."""
    for header in (CSRC / "cells").glob("*.h"):
        text = header.read_text()
        if re.search(rf"^(struct|using) {cell_type}\b", text, re.M):
            return "kHasSequenceKernels = false" not in text
    raise AssertionError(f"csrc/cells defines no {cell_type}")


def files() -> dict[Path, str]:
    """The text of each file: none of a file that would be empty."""
    found = {}
    for cell, cell_type in cells().items():
        for name, text in KERNELS.items():
            if "{cell}_kernel" not in name and not has_sequence_kernels(cell_type):
                text = OF_ALL_STEPS.sub("", text)
            if text.strip():
                found[CSRC / name.format(cell=cell)] = text.format(cell=cell, Cell=cell_type)
    return found


def main() -> None:
    """Writes those that differ, and prints their names."""
    with errors_for_the_user():
        for path, text in files().items():
            if not path.exists() or path.read_text() != text:
                path.write_text(text)
                print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
