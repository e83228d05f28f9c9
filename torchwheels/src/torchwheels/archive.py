"""The archive of a wheel: reads one, whoever made it, and writes one, with its RECORD.

zipfile, and so pip, goes by the directory at the end. Others install while they download, and go by what
stands before each file. All who read an archive shall find the same files in it.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import stat
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

_HEADER = struct.Struct("<4s5H3I2H")  # before each file
_END = struct.Struct("<4s4H2IH")
_MOST = 0xFFFF  # or more: then another record has the number
_UTF8, _SIZES_FOLLOW = 0x800, 0x8
_IS_LONG = 0xFFFFFFFF
_LONG_SIZES, _SECOND_NAME = 0x1, 0x7075  # kinds of fields

MOST_FILES = 50_000
MOST_BYTES = 4 * 10**9
"""What a wheel may unpack to: it is held in memory."""
_TIME = (1980, 1, 1, 0, 0, 0)


def unpack(archive: zipfile.ZipFile) -> dict[str, bytes]:
    """The files in an archive that is what installers expect; else a ValueError says what it is not."""
    entries = archive.infolist()
    if len(entries) > MOST_FILES:
        raise ValueError(f"it holds {len(entries)} files, over the {MOST_FILES} allowed")
    if (size := sum(entry.file_size for entry in entries)) > MOST_BYTES:
        raise ValueError(
            f"it unpacks to {size / 1e9:.3g} GB, over the {MOST_BYTES / 1e9:g} GB allowed"
        )
    names = set()
    for entry in entries:
        name = entry.orig_filename  # the other one ends at a zero
        kind = stat.S_IFMT(entry.external_attr >> 16)
        if not name.isprintable() or "\\" in name:
            raise ValueError(f"the name {name!r} has characters that no file shall have")
        if {"", ".", ".."}.intersection(name.removesuffix("/").split("/")):
            raise ValueError(f"the name {name!r} leads out of the wheel")
        if kind not in (0, stat.S_IFDIR if entry.is_dir() else stat.S_IFREG):
            raise ValueError(f"{name} is neither a file nor a folder")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{name} is neither stored nor deflated")
        if name in names:
            raise ValueError(f"it holds {name} twice")
        names.add(name)
    folders = {str(parent) for name in names for parent in PurePosixPath(name).parents}
    if both := names & folders:
        raise ValueError(f"it holds {min(both)} as a file and as a folder")
    check_layout(archive)
    files = {}
    for entry in entries:
        if not entry.is_dir():
            with archive.open(entry) as file:
                # No more than it says: without a number, all that is there would be unpacked first.
                files[entry.orig_filename] = file.read(entry.file_size + 1)
    return files


def check_layout(archive: zipfile.ZipFile) -> None:
    """Raises a ValueError that says what some would find, and others not."""
    entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
    end = 0
    for entry in entries:
        # What may follow a file, its sizes, is shorter than what stands before another.
        if not 0 <= entry.header_offset - end < (_HEADER.size if end else 1):
            raise ValueError(f"there is something before {entry.orig_filename} that is none of it")
        end = _end_of(archive, entry)
    if archive.comment or not 0 <= archive.start_dir - end < _HEADER.size:
        raise ValueError("there is something behind its files")
    counts = _END.unpack(_read(archive, -_END.size, _END.size))[3:5]
    if {*counts} != {min(len(entries), _MOST)}:
        raise ValueError(
            f"its directory says that it has {min(counts)} files, and has {len(entries)}"
        )


def _end_of(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> int:
    """Where the data of a file end, by what stands before it."""
    header = _HEADER.unpack(_read(archive, entry.header_offset, _HEADER.size))
    flags, method, checksum, compressed, size, name_length, extra_length = *header[2:4], *header[6:]
    begin = entry.header_offset + _HEADER.size
    name = _read(archive, begin, name_length).decode("utf-8" if flags & _UTF8 else "cp437")
    fields = _fields(_read(archive, begin + name_length, extra_length))
    if size == compressed == _IS_LONG and len(long := fields.get(_LONG_SIZES, b"")) == 16:
        size, compressed = struct.unpack("<2Q", long)
    known = (method, checksum, compressed, size)
    if flags & _SIZES_FOLLOW and method == zipfile.ZIP_DEFLATED:  # whose data show their end
        known = (method, entry.CRC, entry.compress_size, entry.file_size)
    said = (entry.compress_type, entry.CRC, entry.compress_size, entry.file_size)
    if (name, *known) != (entry.orig_filename, *said):
        raise ValueError(f"its directory says other things of {entry.orig_filename} than the file")
    if _SECOND_NAME in fields | _fields(entry.extra):
        raise ValueError(f"{entry.orig_filename} has a second name")
    return int(begin + name_length + extra_length + entry.compress_size)


def _read(archive: zipfile.ZipFile, place: int, size: int) -> bytes:
    """Bytes of the file; from its end where `place` is negative."""
    assert archive.fp
    archive.fp.seek(place, 2 if place < 0 else 0)
    if len(data := archive.fp.read(size)) < size:
        raise ValueError("it ends within a file")
    return data


def _fields(extra: bytes) -> dict[int, bytes]:
    """What an entry has beside its name, by kind."""
    found = {}
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<2H", extra)
        found[kind] = extra[4 : 4 + length]
        extra = extra[4 + length :]
    return found


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
            mode = 0o755 if ".data/scripts/" in name else 0o644
            entry.external_attr = (stat.S_IFREG | mode) << 16
            archive.writestr(entry, data)
