"""What `nox -s releases` says of an index with a few wheels, beside a table of a few releases."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import pytest

from extops_build import UserError
from tools import lacking
from torchwheels.options import releases

TABLE = dataclasses.replace(
    releases.load(),
    torches=(
        releases.Torch("2.8.0", ("12.8",), ("3.12", "3.13")),
        releases.Torch("2.15.0", ("13.2", "13.0"), ("3.14",)),
    ),
)


def index(folder: Path, *wheels: str) -> str:
    """An index that has these wheels of torch: `2.15.0+cu132 3.15t`."""
    page = folder / "torch" / "index.html"
    page.parent.mkdir(parents=True)
    names = []
    for version, python in map(str.split, wheels):
        abi = f"cp{python.replace('.', '')}"
        tag = f"{abi.removesuffix('t')}-{abi}"
        names.append(f"torch-{version.replace('+', '%2B')}-{tag}-manylinux_2_28_x86_64.whl")
    names.append("torch-2.15.0-cp316-cp316-win_amd64.whl")
    page.write_text("".join(f'<a href="{name}">{name}</a>\n' for name in names))
    return folder.as_uri()


def said(folder: Path, *wheels: str) -> list[str]:
    return [*lacking.differences(TABLE, lacking.published([index(folder, *wheels)]))]


def test_nothing_is_said_of_what_the_table_has(tmp_path: Path) -> None:
    """Nor of older releases, Pythons and CUDA versions, of earlier patches, and of what is not final."""
    wheels = ["2.8.0+cu128 3.12", "2.8.0+cu128 3.13", "2.15.0+cu130 3.14", "2.15.0+cu132 3.14"]
    others = ["2.7.1+cu126 3.12", "2.8.0+cu118 3.9", "2.8.0rc1+cu129 3.12", "2.16.0.dev1 3.15"]
    assert said(tmp_path, *wheels, *others) == []


def test_differences_of_the_table_are_named(tmp_path: Path) -> None:
    wheels = ["2.8.0+cu128 3.12", "2.8.0+cu129 3.12", "2.9.1 3.12", "2.15.1+cu132 3.14"]
    assert said(tmp_path, *wheels, "2.15.1+cu134 3.15t") == [
        "no index has torch 2.8.0 for Python 3.13, as the table says",
        "the table lacks torch 2.8.0 for CUDA 12.9",
        "the table lacks torch 2.9.1",
        "the table has torch 2.15.0, and not 2.15.1",
        "the table lacks torch 2.15.1 for Python 3.15t",
        "no index has torch 2.15.1 for CUDA 13.0, as the table says",
        "the table lacks torch 2.15.1 for CUDA 13.4",
    ]


def test_an_index_without_torch_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"^{tmp_path.as_uri()} has no wheel of torch, or refuses"):
        lacking.published([tmp_path.as_uri()])


def test_the_indexes_are_those_that_pip_is_configured_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", index(tmp_path / "first", "2.15.0 3.14"))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", index(tmp_path / "second", "2.99.0+cu990 3.14"))
    monkeypatch.setattr(sys, "argv", ["lacking"])
    with pytest.raises(SystemExit, match=r"^extops: no index has torch 2\.") as said:
        lacking.main()
    assert str(said.value).endswith("extops: the table lacks torch 2.99.0")
