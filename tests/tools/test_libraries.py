"""What each source file is compiled for."""

from __future__ import annotations

import re
from pathlib import Path

from extops_build import ROOT
from extops_build.libraries import CUDA, HOPPER_ALONE, architectures_of

CSRC = ROOT / "csrc"

# From the word to the end of the body's first line.
KERNEL = re.compile(r"^(?:template .*\n)?__global__[^{;]*\{(.*\n.*)", re.MULTILINE)


def with_headers(source: Path) -> str:
    """The text of a file and of the headers beside it that it includes: those of sequences hold their kernels."""
    texts, waiting = {}, [source]
    while waiting:
        path = waiting.pop()
        texts[path] = path.read_text()
        found = (path.parent / name for name in re.findall(r'#include "([^"]*)"', texts[path]))
        waiting += [each for each in found if each.suffix == ".cuh" and each not in texts]
    return "".join(texts.values())


def test_files_whose_kernels_all_are_empty_but_on_hopper_are_compiled_for_it_alone() -> None:
    found = []
    for source in CUDA.sources(CSRC):
        text = with_headers(source)
        bodies = KERNEL.findall(text)
        assert len(bodies) == text.count("__global__"), source
        if bodies and all("#if defined(__CUDA_ARCH_FEAT_SM90_ALL)" in body for body in bodies):
            found.append(source.name)
    assert sorted(HOPPER_ALONE) == found


def test_a_build_without_hopper_has_every_file() -> None:
    """The host code of those kernels is called, and says that it does not take the problem."""
    hopper, other = CSRC / "kernels" / "cuda" / HOPPER_ALONE[0], CSRC / "kernels/cuda/launch.cu"
    assert architectures_of(hopper, ("8.0", "9.0", "12.0+PTX")) == ("9.0",)
    assert architectures_of(hopper, ("8.0", "9.0+PTX")) == ("9.0",)
    assert architectures_of(hopper, ("8.0", "8.6+PTX")) == ("8.0", "8.6+PTX")
    assert architectures_of(other, ("8.0", "9.0+PTX")) == ("8.0", "9.0+PTX")
