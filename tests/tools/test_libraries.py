"""What each source file is compiled for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pytest import MonkeyPatch

from extops_build import ROOT, UserError
from extops_build.compile import architectures
from extops_build.libraries import (
    CUDA,
    architectures_of,
    compiled_architectures,
    gencode_flags,
    is_for_hopper_alone,
)
from torchwheels.options import project
from torchwheels.options.releases import Target

CSRC = ROOT / "csrc"
OPTIONS = project.load(ROOT / "pyproject.toml")

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
    for source in CUDA.sources(CSRC):
        text = with_headers(source)
        bodies = KERNEL.findall(text)
        assert len(bodies) == text.count("__global__"), source
        are_empty = all("#if defined(__CUDA_ARCH_FEAT_SM90_ALL)" in body for body in bodies)
        assert is_for_hopper_alone(source) == (bool(bodies) and are_empty), source


def test_older_gpus_get_no_kernels_for_tensor_cores() -> None:
    """They would be empty. A GPU whose other kernels are for 8.0 or newer finds these, too."""
    for source in CUDA.sources(CSRC):
        bodies = KERNEL.findall(with_headers(source))
        guarded = ["EXTOPS_TENSOR_CORES" in body for body in bodies]
        chosen = architectures_of(source, ("5.0", "7.5", "8.0", "10.0", "12.0+PTX"))
        are_newer = chosen == ("8.0", "10.0", "12.0+PTX")
        assert are_newer == source.name.endswith("_tensor_kernel.cu")
        assert are_newer == (bool(bodies) and all(guarded)), source
        assert are_newer or not any(guarded), source
        assert architectures_of(source, ("7.5+PTX",)) == ("7.5+PTX",)


def test_a_build_without_hopper_has_every_file() -> None:
    """The host code of those kernels is called, and says that it does not take the problem."""
    folder = CSRC / "kernels" / "cuda"
    hopper, other = folder / "cells/gru_hopper_kernel.cu", folder / "cells/gru_kernel.cu"
    assert hopper in CUDA.sources(CSRC) and other in CUDA.sources(CSRC)
    assert architectures_of(hopper, ("8.0", "9.0", "12.0+PTX")) == ("9.0",)
    assert architectures_of(hopper, ("8.0", "9.0+PTX")) == ("9.0",)
    assert architectures_of(hopper, ("8.0", "8.6+PTX")) == ("8.0", "8.6+PTX")
    assert architectures_of(other, ("8.0", "9.0+PTX")) == ("8.0", "9.0+PTX")


def test_gpus_that_kernels_do_not_tell_apart_share_their_ptx() -> None:
    newest = ("7.5", "8.0", "9.0", "10.0", "12.0+PTX")
    assert gencode_flags(newest) == [
        "-gencode=arch=compute_75,code=[sm_75]",
        "-gencode=arch=compute_80,code=[sm_80]",
        "-gencode=arch=compute_90a,code=[sm_90a]",
        "-gencode=arch=compute_90,code=[sm_100,sm_120,compute_90]",
        "-DEXTOPS_SM90A",
    ]
    assert compiled_architectures(newest) == ["7.5", "8.0", "9.0+PTX", "10.0", "12.0"]


def test_gpus_of_a_major_version_share_their_machine_code() -> None:
    release = ("5.0", "6.0", "7.0", "7.5", "8.0", "8.6", "9.0+PTX")
    assert gencode_flags(release) == [
        "-gencode=arch=compute_50,code=[sm_50,sm_60]",
        "-gencode=arch=compute_70,code=[sm_70]",
        "-gencode=arch=compute_80,code=[sm_80]",
        "-gencode=arch=compute_90a,code=[sm_90a]",
        "-gencode=arch=compute_90,code=[compute_90]",
        "-DEXTOPS_SM90A",
    ]
    assert compiled_architectures(release) == ["5.0", "6.0", "7.0", "8.0", "9.0+PTX"]
    assert gencode_flags(("8.6", "8.9")) == ["-gencode=arch=compute_80,code=[sm_86]"]
    assert compiled_architectures(("8.6", "8.9")) == ["8.6"]


def test_the_ptx_of_a_build_for_older_gpus() -> None:
    assert gencode_flags(("7.5+PTX",)) == ["-gencode=arch=compute_75,code=[sm_75,compute_75]"]
    assert gencode_flags(("8.0", "8.6+PTX")) == ["-gencode=arch=compute_80,code=[sm_80,compute_80]"]
    assert compiled_architectures(("8.0", "8.6+PTX")) == ["8.0+PTX"]
    assert compiled_architectures(("8.6+PTX",)) == ["8.0+PTX", "8.6"]
    assert compiled_architectures(("6.1", "7.0+PTX", "7.5+PTX")) == ["6.1", "7.0+PTX"]


GPUS = [
    "5.0",
    "5.2",
    "6.1",
    "7.0",
    "7.5",
    "8.0",
    "8.6",
    "8.9",
    "9.0",
    "10.0",
    "10.3",
    "12.0",
    "12.1",
]


def capability(name: str) -> tuple[int, ...]:
    return tuple(map(int, name.removesuffix("+PTX").split(".")))


def code_for(gpu: str, names: list[str]) -> tuple[int, ...] | None:
    """What a driver takes: machine code of the GPU's major version, else the newest PTX that is no newer than it."""
    older = [name for name in names if capability(name) <= capability(gpu)]
    code = [capability(x) for x in older if capability(x)[0] == capability(gpu)[0]]
    return max(code or [capability(x) for x in older if x.endswith("+PTX")], default=None)


@pytest.mark.parametrize(
    "target", OPTIONS.targets_to_build(OPTIONS.chosen_targets()), ids=lambda x: x.name
)
def test_kernels_that_are_chosen_on_a_gpu_have_code_for_it(target: Target) -> None:
    """Whether a GPU has tensor cores is asked of the code in launch.cu (code_architecture), and of it for Hopper."""
    code = {
        source: compiled_architectures(architectures_of(source, target.architectures))
        for source in CUDA.sources(CSRC)
    }
    (launch,) = (names for source, names in code.items() if source.name == "launch.cu")
    for gpu in GPUS if target.cuda else ():
        found = code_for(gpu, launch)
        promised = min(map(capability, target.architectures)) <= capability(gpu)
        assert (found is not None) == promised
        for source, names in code.items():
            if not found or ("hopper" in source.name and gpu != "9.0"):
                continue
            if "tensor" not in source.name or found >= (8, 0):
                assert code_for(gpu, names) == found, (gpu, source)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("8.0;9.0+PTX", ("8.0", "9.0+PTX")),
        ("9.0a", ("9.0",)),
        ("9.0;9.0a 10.0f;12.0a+PTX", ("9.0", "10.0", "12.0+PTX")),
        ("10.0;10.3a;12.0f", ("10.0", "10.3", "12.0")),
    ],
)
def test_names_of_gpus(given: str, expected: tuple[str, ...], monkeypatch: MonkeyPatch) -> None:
    """Only Hopper has kernels that want a target of their own, which the flags name."""
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", given)
    assert architectures() == expected


@pytest.mark.parametrize("wrong", ["Hopper", "90", "8.0a", "9.0f", "9.0+ptx", "8.0,9.0", "9.0b"])
def test_names_of_no_gpus(wrong: str, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", f"8.0;{wrong}")
    expected = f"expected compute capabilities such as .* but got `{re.escape(wrong)}`"
    with pytest.raises(UserError, match=rf"^TORCH_CUDA_ARCH_LIST: {expected}"):
        architectures()
