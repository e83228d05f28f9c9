"""Wheels that were made to get past the audit, or to harm who reads them."""

from __future__ import annotations

import ctypes
import errno
import io
import itertools
import json
import os
import resource
import shutil
import signal
import socket
import stat
import struct
import subprocess
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from elftools.elf.elffile import ELFFile

from forged_wheels import CLASSIC, LIBRARY, Forge
from torchwheels import wheel
from torchwheels.audit import reports
from torchwheels.errors import UserError
from torchwheels.index import site
from torchwheels.options import releases
from torchwheels.options.project import Project
from torchwheels.system import sandbox
from torchwheels.wheel.elf import read_library

OWN_PROCESS = pytest.mark.usefixtures("read_in_own_process")


@pytest.fixture
def forge(tmp_path: Path) -> Forge:
    return Forge(tmp_path)


def entry(name: str, mode: int = 0) -> zipfile.ZipInfo:
    """An entry of a zip file, whose name may hold anything."""
    made = zipfile.ZipInfo("x")
    made.filename = made.orig_filename = name
    made.external_attr = mode << 16
    return made


def refused(path: Path, where: str) -> None:
    """Asserts that the archive is refused because of what is at that place."""
    with pytest.raises(UserError) as error:
        wheel.read(path)
    assert str(error.value) == (
        f"{path} is no wheel: {where} is not packed as usual, so that installers may find different files there: "
        "where you trust it, pack it again (`wheel unpack`, then `wheel pack`)"
    )


def test_a_pipe_is_no_wheel(tmp_path: Path) -> None:
    """Reading one never ends."""
    path = tmp_path / "x-1-py3-none-any.whl"
    os.mkfifo(path)
    with pytest.raises(UserError, match=r"x-1-py3-none-any\.whl is no file$"):
        wheel.read(path)


@pytest.mark.parametrize(
    "said",
    [
        {"target": "3.11-cpu-torch"}, {"target": 3}, {"target": "3.12-cpu"}, {"target": "../3.11-cpu"},
        {"python": []}, {"python": "3.11<b>", "target": "3.11<b>-cpu"}, {"torch": "new"}, {"torch": None},
        {"torch": "3.0.0"}, {"cuda": 13.0, "target": "3.11-cu130"}, {"architectures": [90]}, {"architectures": None},
    ],
)  # fmt: skip
def test_a_build_record_that_names_no_target_is_refused(forge: Forge, said: dict[str, Any]) -> None:
    record = json.loads(forge.fitting_metadata()[wheel.BUILD_RECORD])
    forge.replaced[wheel.BUILD_RECORD] = json.dumps({**record, **said}).encode()
    with pytest.raises(
        UserError, match=r"^tinyops-.*\.whl has no build record that says for which target"
    ):
        reports.audited(forge.wheel(), Project())


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("/etc/profile.d/x.sh", 0),
        ("tinyops/../../x.py", 0),
        ("tinyops\\x.py", 0),
        ("tinyops/x.py\0.txt", 0),
        ("tinyops/\x1b[2J.py", 0),
        ("tinyops/\u202eyp.x", 0),
        ("tinyops/x.py", stat.S_IFLNK | 0o777),
        (LIBRARY, 0),  # a second time
        ("tinyops", 0),  # which is a folder
        ("tinyops/__init__.py/x.py", 0),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_names_that_no_wheel_has(forge: Forge, name: str, mode: int) -> None:
    path = forge.wheel()
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(entry(name, mode), b"")
    refused(path, repr("tinyops/__init__.py" if name.endswith("__.py/x.py") else name))


@pytest.mark.parametrize(
    ("spoil", "where"),
    [
        ("before", "'tinyops/__init__.py'"),
        ("between", "'tinyops/last.py'"),
        ("behind", "its end"),
        ("comment", "its end"),
        ("count", "its end"),
        ("name", "'tinyops/hidden.py'"),
        ("size", "'tinyops/hidden.py'"),
        ("folder", "'tinyops/more/'"),
        ("second name", "'tinyops/more.py'"),
        ("method", "'tinyops/more.py'"),
        ("long sizes", "'tinyops/more.py'"),
    ],
)
def test_archives_that_readers_find_different_files_in(
    forge: Forge, spoil: str, where: str
) -> None:
    """pip goes by the directory at the end, others by what stands before each file."""
    path = forge.wheel()
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("tinyops/hidden.py", b"raise ImportError")
        if spoil == "between":
            archive.filelist.pop()
        elif spoil == "comment":
            archive.comment = b"PK"
        elif spoil == "folder":
            archive.writestr("tinyops/more/", b"")
        elif spoil == "second name":
            made = entry("tinyops/more.py")
            made.extra = struct.pack("<2HBI", 0x7075, 5 + 4, 1, zlib.crc32(b"x")) + b"y.py"
            archive.writestr(made, b"")
        elif spoil == "method":
            archive.writestr("tinyops/more.py", b"", zipfile.ZIP_LZMA)
        elif spoil == "long sizes":
            archive.open("tinyops/more.py", "w", force_zip64=True).close()
        archive.writestr("tinyops/last.py", b"")
        if spoil == "behind":
            archive.filelist.pop()
    data = path.read_bytes()
    if spoil == "before":
        data = data + data
    elif spoil == "count":
        data = data[:-12] + b"\1\0" + data[-10:]
    elif spoil == "name":
        data = data.replace(b"tinyops/hidden.py", b"tinyops/hidden.pz", 1)
    elif spoil == "folder":
        data = data.replace(b"tinyops/more/", b"tinyops/more_", 1)
    elif spoil == "size":
        place = data.index(b"tinyops/hidden.py") - 8
        data = data[:place] + bytes(4) + data[place + 4 :]
    path.write_bytes(data)
    refused(path, where)


def test_an_archive_whose_sizes_follow_the_files(forge: Forge) -> None:
    """As who writes into a pipe has them. `wheel pack` has them in the usual place."""
    path = forge.wheel()
    files = wheel.read(path).files
    with path.open("wb") as file, zipfile.ZipFile(Pipe(file), "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    refused(path, "'tinyops/__init__.py'" if len(files) == 1 else repr([*files][1]))


class Pipe:
    """A file to write to that has no places."""

    def __init__(self, file: BinaryIO) -> None:
        self.write, self.flush = file.write, file.flush


def test_an_archive_of_the_program_zip(forge: Forge) -> None:
    """With which PyTorch's own wheels are packed. It keeps the times and the user of each file."""
    if not shutil.which("zip"):
        pytest.skip("the program zip is not installed")
    path = forge.wheel()
    files = wheel.read(path).files
    with zipfile.ZipFile(path) as archive:
        archive.extractall(forge.folder / "unpacked")
    path.unlink()
    subprocess.run(["zip", "-qr9", path, "."], cwd=forge.folder / "unpacked", check=True)
    assert wheel.read(path).files == files


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_files_of_a_usual_archive(forge: Forge, method: int) -> None:
    """With folders, names of any script, and times and modes of their own."""
    path = forge.wheel()
    added = {"tinyops/größe.txt": b"1", "tinyops/empty/": b"", "tinyops/run.sh": b"#!/bin/sh\n"}
    with zipfile.ZipFile(path, "a", method) as archive:
        for name, data in added.items():
            made = zipfile.ZipInfo(name, (2026, 11, 24, 23, 45, 59))
            made.external_attr = (stat.S_IFDIR if made.is_dir() else stat.S_IFREG | 0o755) << 16
            archive.writestr(made, data, method)
    found = wheel.read(path).files
    assert {name: found.get(name) for name in added} == {**added, "tinyops/empty/": None}


def test_files_over_the_budget(forge: Forge, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the sum of what they say, before one of them is unpacked."""
    path = forge.wheel()
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        for number in range(3):
            archive.writestr(f"tinyops/{number}", bytes(1_000_000))
    monkeypatch.setattr("torchwheels.wheel.archive.MOST_BYTES", 2_500_000)
    with pytest.raises(UserError, match=r"it unpacks to 0\.00302 GB, over the 0\.0025 GB allowed"):
        wheel.read(path)
    monkeypatch.setattr("torchwheels.wheel.archive.MOST_FILES", 5)
    with pytest.raises(UserError, match=r"it holds 10 files, over the 5 allowed"):
        wheel.read(path)


def test_a_file_that_unpacks_to_more_than_it_says(forge: Forge) -> None:
    """The archive says 1 byte of 500 MB: no more is unpacked."""
    path = forge.wheel()
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tinyops/bomb", bytes(500_000_000))
        (bomb,) = (x for x in archive.infolist() if x.filename == "tinyops/bomb")
        bomb.file_size = 1
    data = bytearray(path.read_bytes())
    place = data.index(b"tinyops/bomb") - 8
    data[place : place + 4] = (1).to_bytes(4, "little")
    path.write_bytes(data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match="is no wheel: Bad CRC-32 for file 'tinyops/bomb'"):
        wheel.read(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


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
    read_library(bytes(data))
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


def ends(path: Path) -> None:
    os._exit(0)


def fails(path: Path) -> None:
    raise UserError("said by the reader")


def errs(path: Path) -> None:
    raise RecursionError("too deep")


@OWN_PROCESS
@pytest.mark.parametrize(
    ("reader", "message"),
    [
        (takes_memory, "x.whl cannot be checked: reading it takes more than 12 GB of memory"),
        (takes_time, "x.whl cannot be checked: reading it takes more than 1 s"),
        (writes, "x.whl cannot be checked: OSError: [Errno 27] File too large"),
        (dies, "x.whl cannot be checked: its reader died of signal 11"),
        (ends, "x.whl cannot be checked: its reader ended with exit code 0, and said nothing"),
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


def fills(path: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@OWN_PROCESS
def test_a_full_disk_is_no_fault_of_a_wheel() -> None:
    with pytest.raises(OSError, match=r"No space left on device: '/.+home'") as error:
        sandbox.call(fills, Path("x.whl"))
    assert error.value.errno == errno.ENOSPC


@OWN_PROCESS
def test_a_reader_sees_no_variables_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_TOKEN", "password")
    assert "GITHUB_TOKEN" not in sandbox.call(variables, Path("x.whl"))


def variables(path: Path) -> list[str]:
    import os

    return [*os.environ]


def tries(path: Path, port: int, secret: Path, parent: int) -> dict[str, str]:
    """What code in a reader can do, by what it did with the user's rights."""
    tried: dict[str, Callable[[], object]] = {
        "read the wheel": path.read_bytes,
        "write its own folder": lambda: Path("x").write_text("x"),
        "start a program": lambda: subprocess.run(["sh", "-c", "echo $$"], capture_output=True),
        "write the wheel": lambda: path.write_bytes(b""),
        "add a wheel": path.with_name("other.whl").touch,
        "read another file": secret.read_text,
        "use the network": lambda: socket.create_connection(("127.0.0.1", port), timeout=9),
        "end another process": lambda: os.kill(parent, signal.SIGKILL),
        "write the system": lambda: Path("/usr/x").touch(),
        "take it back": lambda: (
            ctypes.CDLL(None).mount(None, b"/", None, 32 | 4096, None) and 1 / 0
        ),
    }
    found = {}
    for name, attempt in tried.items():
        try:
            attempt()
            found[name] = ""
        except (OSError, ZeroDivisionError) as error:
            found[name] = type(error).__name__
    return found


@OWN_PROCESS
def test_a_reader_can_only_crash(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "--user", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("this kernel lets nobody make a user namespace")
    wheel, secret = tmp_path / "dist" / "x.whl", tmp_path / "secret"
    wheel.parent.mkdir()
    wheel.write_bytes(b"x")
    secret.write_text("x")
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = sandbox.call(tries, wheel, server.getsockname()[1], secret, os.getpid())
    can = ("read the wheel", "write its own folder", "start a program")
    assert {name for name, error in found.items() if not error} == {*can}
    assert wheel.read_bytes() == b"x"
    assert [*wheel.parent.iterdir()] == [wheel]


@pytest.mark.parametrize(
    "row",
    [
        "torch/__init__.py,",
        "tinyops/more.py,sha256=x,1,more",
        "tinyops/__init__.py,sha256=x,0",
        "tinyops/__init__.py,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,7",
    ],
    ids=["short", "long", "twice", "size"],
)
def test_rows_of_record(forge: Forge, row: str) -> None:
    """pip takes over what is in a row of any length, and deletes such files with the project."""
    record = f"tinyops-{forge.version}.dist-info/RECORD"
    said = wheel.read(forge.wheel()).files[record].decode()
    forge.unrecorded[record] = f"{row}\n{said}".encode()
    assert forge.findings() == {
        "record": [f"its RECORD is not right about {row.partition(',')[0]}"]
    }


def test_versions_in_a_library_under_the_name_of_a_source(forge: Forge) -> None:
    """auditwheel reads none of that name; its symbols are old ones, in a new version."""
    code = "#include <math.h>\ndouble f(double x) { return pow(x, x); }"
    forge.files["tinyops/data.py"] = forge.compile(code, "-lm")
    message = "its tag is manylinux_2_5_x86_64, but tinyops/data.py wants GLIBC_2.29"
    assert forge.findings() == {"platform_tag": [message]}


TAKES = """
namespace at { struct Tensor { void zero_(); }; }
extern "C" void* PyList_New(long);
extern "C" void* take() { at::Tensor().zero_(); return PyList_New(0); }
"""
GIVES = """
namespace at { struct Tensor { void zero_(); }; void Tensor::zero_() {} }
extern "C" void* PyList_New(long) { return 0; }
"""


def test_functions_behind_a_version(forge: Forge) -> None:
    """The loader takes them from a library without versions all the same."""
    forge.make_stable()
    script, torch = forge.folder / "versions", forge.folder / "libtorch_python.so"
    script.write_text("OWN_1 { *; };")
    flags = ["-Wl,-soname,libtorch_python.so", f"-Wl,--version-script={script}"]
    torch.write_bytes(forge.compile(GIVES, flags=flags))
    forge.files["tinyops/_more.so"] = forge.compile(TAKES, torch)
    assert sorted(forge.findings()) == ["label", "python_tag", "requirement"]


def test_functions_that_a_library_pretends_to_bring(forge: Forge) -> None:
    """One beside it that it does not load: torch and Python have the same, and come first."""
    forge.make_stable()
    forge.files["tinyops/_more.so"] = forge.compile(TAKES)
    forge.files["tinyops/libgives.so"] = forge.compile(GIVES)
    assert sorted(forge.findings()) == ["label", "python_tag", "requirement"]
    gives = forge.folder / "libgives.so"
    gives.write_bytes(forge.compile(GIVES, flags=["-Wl,-soname,libgives.so"]))
    forge.files["tinyops/libgives.so"] = gives.read_bytes()
    forge.files["tinyops/_more.so"] = forge.compile(TAKES, gives)
    assert forge.findings() == {}


def test_libraries_of_two_cudas(forge: Forge) -> None:
    forge.target, forge.version = releases.load().target("3.11-cu130"), "1.0+cu130.torch2.13"
    for name, runtime in (("_a", "libcudart.so.13"), ("_b", "libcudart.so.12")):
        forge.files[f"tinyops/{name}.so"] = forge.compile("", forge.stub(runtime))
    message = "tinyops/_b.so needs libcudart.so.12, but 3.11-cu130 has CUDA 13.0"
    assert forge.findings()["label"] == [message]


@OWN_PROCESS
def test_a_report_of_another_name(forge: Forge) -> None:
    """Its name becomes that of a folder of the index."""
    path = forge.wheel()
    report = reports.write_report(path, Project())
    reports.write(report | {"name": "../../../out"}, path)
    (found,) = reports.read_reports(path.parent, Project())
    assert found["name"] == "tinyops"


def test_a_report_that_says_a_spoiled_wheel_passed(forge: Forge) -> None:
    forge.unrecorded = {"tinyops/more.py": b""}
    path = forge.wheel()
    report = reports.write_report(path, Project())
    rules = [{"rule": each["rule"], "passed": True, "detail": ""} for each in report["rules"]]
    reports.write(report | {"rules": rules}, path)
    with pytest.raises(UserError, match=r"RECORD is not right about tinyops/more\.py"):
        reports.read_reports(path.parent, Project())


def test_torch_is_told_from_names_that_begin_so(forge: Forge) -> None:
    forge.requires = ["Torch==2.13.*", "torchvision>=0.28"]
    path = forge.wheel()
    site.make_site(path.parent, path.parent / "site", Project())
    page = (path.parent / "site" / "index.html").read_text()
    assert "<td>==2.13.*<td>" in page
    assert "vision" not in page
