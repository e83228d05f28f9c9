"""The table of releases, and the targets that follow from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from torchwheels import releases
from torchwheels.errors import UserError

TABLE = releases.load()


@pytest.mark.parametrize(
    ("name", "torch", "cuda"),
    [
        ("3.11-cpu", "2.13.0", None),
        ("3.12-cpu-torch2.6", "2.6.0", None),
        ("3.11-cu130", "2.13.0", "13.0"),
        ("3.11-cu124-torch2.5", "2.5.1", "12.4"),
        ("3.11-cpu-aarch64", "2.13.0", None),
        ("3.11-cpu-torch2.10-aarch64", "2.10.0", None),
        ("3.12-cu130-aarch64", "2.13.0", "13.0"),
    ],
)
def test_target_has_the_torch_and_cuda_of_its_name(name: str, torch: str, cuda: str | None) -> None:
    target = TABLE.target(name)
    assert (target.name, target.torch) == (name, torch)
    assert (target.cuda.version if target.cuda else None) == cuda


def test_torch_may_be_named_where_it_need_not_be() -> None:
    assert TABLE.target("3.11-cu130-torch2.13") == TABLE.target("3.11-cu130")


def test_names_are_unique() -> None:
    names = [target.name for target in TABLE.targets]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("3.14-cu121", "torch 2.4.1 has no wheel for Python 3.14"),
        ("3.10-cpu-torch2.15", "torch 2.15.0 has no wheel for Python 3.10"),
        ("3.11-cu130-torch2.6", "torch 2.6.0 is built for CUDA 12.4, not 13.0"),
        ("3.11-cu128-aarch64", "torch 2.10.0 has no CUDA build for aarch64 on PyPI"),
        ("3.11-rocm", "there is no target '3.11-rocm': a target is"),
    ],
)
def test_error_says_why_there_is_no_such_target(name: str, reason: str) -> None:
    with pytest.raises(UserError, match="there is no target") as error:
        TABLE.target(name)
    assert reason in str(error.value)
    assert "the nearest are 3.1" in str(error.value)


def test_patterns_are_for_x86_64_where_they_do_not_say() -> None:
    assert {x.machine.name for x in TABLE.matching(["3.1?-cu*", "3.1?-cpu*"])} == {"x86_64"}
    found = TABLE.matching(["3.11-c*-aarch64"])
    assert {"3.11-cpu-aarch64", "3.11-cu130-aarch64"} < {x.name for x in found}
    assert {x.machine.name for x in found} == {"aarch64"}


def test_patterns_name_several_targets() -> None:
    found = TABLE.matching(["3.1[12]-cu130", "3.11-cpu"])
    assert [target.name for target in found] == ["3.11-cu130", "3.12-cu130", "3.11-cpu"]
    with pytest.raises(UserError, match=r"there is no target '3\.99-\*'"):
        TABLE.matching(["3.99-*"])


def python_with_torch(folder: Path, version: str | None, cuda: str | None = None) -> Path:
    """A new environment, whose torch is its version alone."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    if version:
        (site_packages,) = folder.glob("lib/python*/site-packages")
        (site_packages / "torch").mkdir()
        (site_packages / "torch" / "__init__.py").write_text("raise ImportError('not imported')\n")
        text = f"__version__ = {version!r}\ncuda = {cuda!r}\n"
        (site_packages / "torch" / "version.py").write_text(text)
    return folder / "bin" / "python"


def test_target_of_the_torch_at_hand(tmp_path: Path) -> None:
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    python = python_with_torch(tmp_path / "cuda", "2.14.9+cu130", "13.0")
    assert TABLE.current_target(python).name == f"{own}-cu130-torch2.14"
    python = python_with_torch(tmp_path / "cpu", "2.13.0+cpu")
    assert TABLE.current_target(python).name == f"{own}-cpu"


def test_error_without_a_torch_explains_how_to_name_a_target(tmp_path: Path) -> None:
    python = python_with_torch(tmp_path / "none", None)
    with pytest.raises(
        UserError, match=r"has no torch that .* name a target, such as `--target 3.11-"
    ):
        TABLE.current_target(python)
    python = python_with_torch(tmp_path / "old", "1.13.0+cu117", "11.7")
    with pytest.raises(UserError, match=r"no target for the torch .*1\.13\.0\+cu117 of CUDA 11\.7"):
        TABLE.current_target(python)
