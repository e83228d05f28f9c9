"""The archive of a wheel: reads one, whoever made it, and writes one, with its RECORD."""

import base64
import copy
import csv
import hashlib
import io
import re
import stat
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

MOST_FILES = 50_000
MOST_BYTES = 4 * 10**9
"""The most bytes that a wheel may unpack to: it is held in memory."""
_FIXED = 30  # bytes before the name of a file
_END = struct.Struct("<4s4H2IH")
# Info-ZIP's program keeps them beside a name, and they change nothing of the file.
_OF_TIMES_AND_USERS = re.compile(
    rb"(UT\x05\0.{5}|UT\x09\0.{9}|UT\x0d\0.{13}|ux\x0b\0.{11})*", re.DOTALL
)
_TIME = (1980, 1, 1, 0, 0, 0)


class Program(bytes):
    """The contents of a file that may be run."""


def unpack(archive: zipfile.ZipFile) -> dict[str, bytes]:
    """The files in an archive. Raises ValueError if it is too large, or if streaming and central-directory readers
    would see different files.
    """
    entries = archive.infolist()
    if len(entries) > MOST_FILES:
        raise ValueError(f"it holds {len(entries)} files, over the {MOST_FILES} allowed")
    if (size := sum(entry.file_size for entry in entries)) > MOST_BYTES:
        allowed = f"over the {MOST_BYTES / 1e9:g} GB allowed"
        raise ValueError(f"it unpacks to {size / 1e9:.3g} GB, {allowed}")
    if unusual := _unusual(archive):
        raise ValueError(
            f"{unusual} is not packed as usual, so that installers may find different files there: where you "
            "trust it, pack it again (`wheel unpack`, then `wheel pack`)"
        )
    files = {}
    for entry in entries:
        if not entry.is_dir():
            with archive.open(entry) as file:
                # No more than the archive says: without a limit, everything would be unpacked first.
                data = file.read(entry.file_size + 1)
            files[entry.filename] = Program(data) if entry.external_attr >> 16 & 0o111 else data
    return files


def _unusual(archive: zipfile.ZipFile) -> str:
    """Where an archive differs from what zipfile writes, one file behind the other; empty where it does not.

    pip goes by the directory at the end. Others install while they download, and go by what stands before each file.
    """
    place, entries = 0, archive.infolist()
    taken = {str(x) for each in entries for x in PurePosixPath(each.orig_filename).parents}
    for entry in entries:
        plain = _is_plain(entry) and entry.filename not in taken and entry.header_offset == place
        if not plain or not (header := _header(archive, entry)):
            return repr(entry.orig_filename)
        taken.add(entry.filename)
        place += len(header) + entry.compress_size
    assert archive.fp
    last = archive.fp.seek(0, io.SEEK_END) - _END.size
    end = _END.pack(b"PK\5\6", 0, 0, len(entries), len(entries), last - place, place, 0)
    usual = archive.start_dir == place and _read(archive, last, _END.size) == end
    return "" if usual else "its end"


def _is_plain(entry: zipfile.ZipInfo) -> bool:
    """Whether it is a file or a folder inside of the wheel, packed without anything that only some readers know."""
    name, kind = entry.orig_filename, stat.S_IFMT(entry.external_attr >> 16)
    return (
        name.isprintable()
        and "\\" not in name
        and not {"", ".", ".."}.intersection(name.removesuffix("/").split("/"))
        and kind in (0, stat.S_IFDIR if entry.is_dir() else stat.S_IFREG)
        and entry.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
        and _OF_TIMES_AND_USERS.fullmatch(entry.extra) is not None
    )


def _header(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """The header of a file; empty if it is not what zipfile writes for the entry in the directory."""
    place, name = entry.header_offset + _FIXED, len(entry.filename.encode())
    length = int.from_bytes(_read(archive, place - 2, 2), "little")
    said = copy.copy(entry)
    said.extra = _read(archive, place + name, length)  # which holds more than the directory's
    header = said.FileHeader()
    usual = _OF_TIMES_AND_USERS.fullmatch(said.extra)
    return header if usual and _read(archive, entry.header_offset, len(header)) == header else b""


def _read(archive: zipfile.ZipFile, place: int, size: int) -> bytes:
    assert archive.fp
    archive.fp.seek(place)
    return archive.fp.read(size)


def metadata_of(path: Path) -> bytes:
    """The METADATA of a wheel or a variant."""
    with zipfile.ZipFile(path) as archive:
        (name,) = filter(re.compile(r"[^/]+\.dist-info/METADATA").fullmatch, archive.namelist())
        return archive.read(name)


def renamed(name: str, old: str, new: str) -> str:
    """Where a file lies under a `new` project and version, which .dist-info and .data have in their names."""
    return re.sub(rf"^{re.escape(old)}(?=\.(dist-info|data)/)", new, name)


def with_record(files: Mapping[str, bytes], record: str) -> dict[str, bytes]:
    """`files` with their RECORD, in the order of a wheel."""
    rows = io.StringIO()
    writer = csv.writer(rows, lineterminator="\n")
    # The .dist-info folder comes last: pip finds it there without reading the rest.
    names = sorted(files.keys() - {record}, key=lambda name: (".dist-info/" in name, name))
    for name in names:
        writer.writerow([name, record_hash(files[name]), len(files[name])])
    writer.writerow([record, "", ""])
    return {**{name: files[name] for name in names}, record: rows.getvalue().encode()}


def record_hash(data: bytes) -> str:
    """The hash of a file as RECORD has it."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
    return f"sha256={digest.rstrip('=')}"


def write_wheel(path: Path, files: Mapping[str, bytes]) -> None:
    """Writes the wheel `path`: always the same bytes."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, _TIME)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3  # Unix, whose modes these are
            is_program = isinstance(data, Program) or ".data/scripts/" in name
            mode = 0o755 if is_program else 0o644
            entry.external_attr = (stat.S_IFREG | mode) << 16
            archive.writestr(entry, data)
