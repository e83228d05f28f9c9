"""What is said of two wheels that differ."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from service import ROOT, reproduce

NAME = "extops-0.1.0+cpu-py3-none-manylinux_2_28_x86_64.whl"
TIME = (2026, 1, 1, 0, 0, 0)

Member = tuple[str, bytes, tuple[int, int, int, int, int, int]]


def make_wheel(folder: Path, *members: Member, name: str = NAME) -> Path:
    folder.mkdir()
    with zipfile.ZipFile(folder / name, "w") as archive:
        for member, data, time in members:
            archive.writestr(zipfile.ZipInfo(member, time), data)
    return folder / name


A, B = ("a.py", b"a", TIME), ("b.py", b"b", TIME)


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([A, B], []),
        ([A, ("b.py", b"c", TIME)], ["b.py: the contents"]),
        ([A], ["b.py: in one wheel only"]),
        ([A, ("b.py", b"b", (2026, 1, 1, 0, 0, 2))], ["b.py: its time, mode or compression"]),
        ([B, A], ["the order of the files"]),
        (
            [("a.py", b"x", TIME), ("c.py", b"c", TIME)],
            ["b.py: in one wheel only", "c.py: in one wheel only", "a.py: the contents"],
        ),
    ],
    ids=["equal", "contents", "missing", "time", "order", "several"],
)
def test_differences_are_named(tmp_path: Path, members: list[Member], expected: list[str]) -> None:
    first = make_wheel(tmp_path / "first", A, B)
    second = make_wheel(tmp_path / "second", *members)
    assert reproduce.differences(first, second) == expected


def test_other_bytes_between_the_files(tmp_path: Path) -> None:
    first = make_wheel(tmp_path / "first", A)
    second = make_wheel(tmp_path / "second", A)
    with zipfile.ZipFile(second, "a") as archive:
        archive.comment = b"new"
    expected = ["the archives themselves, in none of their files"]
    assert reproduce.differences(first, second) == expected


def test_names_differ(tmp_path: Path) -> None:
    first = make_wheel(tmp_path / "first", A)
    second = make_wheel(tmp_path / "second", A, name=NAME.replace("2_28", "2_34"))
    (difference,) = reproduce.differences(first, second)
    assert difference.startswith("the names: ")


def test_unknown_build() -> None:
    command = [sys.executable, "-m", "service.reproduce", "build-3.11-cu999"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("extops: there is no cell '3.11-cu999' in matrix.toml")
