"""Whether all who read an archive find the same files in it.

zipfile, and so pip, goes by the directory at the end. Others install while they download, and go by what
stands before each file.
"""

from __future__ import annotations

import struct
import zipfile

_HEADER = struct.Struct("<4s5H3I2H")  # before each file
_END = struct.Struct("<4s4H2IH")
_MOST = 0xFFFF  # or more: then another record has the number
_UTF8, _SIZES_FOLLOW = 0x800, 0x8
_IS_LONG = 0xFFFFFFFF
_LONG_SIZES, _SECOND_NAME = 0x1, 0x7075  # kinds of fields


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
