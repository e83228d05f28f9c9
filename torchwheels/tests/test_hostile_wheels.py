"""Wheels that were made to get past the audit, or to harm who reads them."""

from __future__ import annotations

import io
import itertools
import resource
import stat
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile

from forged_wheels import CLASSIC, LIBRARY, Forge
from torchwheels import sandbox, wheel
from torchwheels.errors import UserError


@pytest.fixture
def forge(tmp_path: Path) -> Forge:
    return Forge(tmp_path)


def entry(name: str, mode: int = 0) -> zipfile.ZipInfo:
    """An entry of a zip file, whose name may hold anything."""
    made = zipfile.ZipInfo("x")
    made.filename = made.orig_filename = name
    made.external_attr = mode << 16
    return made


@pytest.mark.parametrize(
    ("name", "mode", "message"),
    [
        ("/etc/profile.d/x.sh", 0, "the name '/etc/profile.d/x.sh' leads out of the wheel"),
        ("tinyops/../../x.py", 0, "the name 'tinyops/../../x.py' leads out of the wheel"),
        ("tinyops\\x.py", 0, r"the name 'tinyops\\x.py' has characters that no file shall have"),
        ("tinyops/x.py\0.txt", 0, r"the name 'tinyops/x.py\x00.txt' has characters that no"),
        ("tinyops/\x1b[2J.py", 0, r"the name 'tinyops/\x1b[2J.py' has characters that no"),
        ("tinyops/\u202eyp.x", 0, r"the name 'tinyops/\u202eyp.x' has characters that no"),
        ("tinyops/x.py", stat.S_IFLNK | 0o777, "tinyops/x.py is neither a file nor a folder"),
        (LIBRARY, 0, f"it holds {LIBRARY} twice"),
        (f"{LIBRARY}/x.py", 0, f"it holds {LIBRARY} as a file and as a folder"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_names_that_no_wheel_has(forge: Forge, name: str, mode: int, message: str) -> None:
    path = forge.wheel()
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(entry(name, mode), b"")
    with pytest.raises(UserError) as error:
        wheel.read(path)
    assert f"{path} is no wheel: {message}" in str(error.value)


def test_files_over_the_budget(forge: Forge, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the sum of what they say, before one of them is unpacked."""
    path = forge.wheel()
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        for number in range(3):
            archive.writestr(f"tinyops/{number}", bytes(1_000_000))
    monkeypatch.setattr(wheel, "MOST_BYTES", 2_500_000)
    with pytest.raises(UserError, match=r"it unpacks to 0\.00302 GB, over the 0\.0025 GB allowed"):
        wheel.read(path)
    monkeypatch.setattr(wheel, "MOST_FILES", 5)
    with pytest.raises(UserError, match=r"it holds 10 files, over the 5 allowed"):
        wheel.read(path)


def test_a_file_that_unpacks_to_more_than_it_says(forge: Forge) -> None:
    """The archive says 1 byte of 500 MB: no more is unpacked."""
    path = forge.wheel()
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tinyops/bomb", bytes(500_000_000))
        (bomb,) = (x for x in archive.infolist() if x.filename == "tinyops/bomb")
        bomb.file_size = 1
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match="is no wheel: Bad CRC-32 for file 'tinyops/bomb'"):
        wheel.read(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


def test_a_file_that_is_compressed_in_a_way_that_installers_lack(forge: Forge) -> None:
    path = forge.wheel()
    with zipfile.ZipFile(path, "a", zipfile.ZIP_LZMA) as archive:
        archive.writestr("tinyops/x", b"")
    with pytest.raises(UserError, match="tinyops/x is neither stored nor deflated"):
        wheel.read(path)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        *itertools.product(
            [".dynamic", ".dynsym", ".dynstr", ".gnu.version", ".gnu.version_r"],
            ["sh_addr", "sh_offset"],
        ),
        *itertools.product([".dynamic", ".dynsym", ".dynstr"], ["sh_size"]),
        (".gnu.version_r", "sh_info"),  # how many entries
    ],
)
def test_sections_that_the_loader_does_not_read(forge: Forge, name: str, field: str) -> None:
    """It goes by the segments: what the sections say instead is not what is loaded."""
    data = bytearray(forge.compile(f"#include <cstdio>\nvoid f() {{ std::puts(0); }}\n{CLASSIC}"))
    elf: Any = ELFFile(io.BytesIO(bytes(data)))
    wheel.read_library(bytes(data))
    index = elf.get_section_index(name)
    header = elf["e_shoff"] + index * elf["e_shentsize"]
    place = header + {"sh_addr": 16, "sh_offset": 24, "sh_size": 32, "sh_info": 44}[field]
    less = 1 if field == "sh_info" else {".dynamic": 16, ".dynsym": 24}.get(name, 8)
    said = elf.get_section(index)[field] - less
    data[place : place + 4] = said.to_bytes(4, "little")
    forge.files[LIBRARY] = bytes(data)
    found = wheel.read(forge.wheel())
    with pytest.raises(UserError, match=f"{LIBRARY}: its section {name} is not what is loaded"):
        _ = found.libraries


def takes_memory(path: Path) -> list[int]:
    return [len(bytes(sandbox.MEMORY))]


def takes_time(path: Path) -> None:
    while True:
        time.sleep(1)


def writes(path: Path) -> None:
    with Path("written").open("wb") as file:
        file.truncate(sandbox.FILE_SIZE + 1)


def dies(path: Path) -> None:
    import ctypes

    ctypes.string_at(0)


def fails(path: Path) -> None:
    raise UserError("said by the reader")


def errs(path: Path) -> None:
    raise RecursionError("too deep")


@pytest.mark.parametrize(
    ("reader", "message"),
    [
        (takes_memory, "x.whl cannot be checked: reading it takes more than 12 GB of memory"),
        (takes_time, "x.whl cannot be checked: reading it takes more than 1 s"),
        (writes, "x.whl cannot be checked: OSError: [Errno 27] File too large"),
        (dies, "x.whl cannot be checked: its reader died of signal 11"),
        (fails, "said by the reader"),
        (errs, "x.whl cannot be checked: RecursionError: too deep"),
    ],
)
def test_limits_of_the_reader(
    monkeypatch: pytest.MonkeyPatch, reader: sandbox.Reader, message: str
) -> None:
    if reader is takes_time:
        monkeypatch.setattr(sandbox, "SECONDS", 1)
    with pytest.raises(UserError) as error:
        sandbox.call(reader, Path("x.whl"))
    assert str(error.value) == message


def test_a_reader_sees_no_variables_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_TOKEN", "password")
    assert "GITHUB_TOKEN" not in sandbox.call(variables, Path("x.whl"))


def variables(path: Path) -> list[str]:
    import os

    return [*os.environ]
