"""What is shown of a build's output: its compilers' errors, rather than the frames of build tools."""

import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

DEBUG = "TORCHWHEELS_DEBUG"
"""The variable that has all of it shown."""
_LONGEST = 300
_COMMAND = re.compile(r"(\[\d+/\d+\] )?\S*(cc|\+\+|nvcc|nvcc_launcher|clang)(-\d+)? -?\S*")
_BETWEEN_TRACEBACKS = re.compile(
    r"(The above exception was the direct cause|During handling of the above exception)"
)
# After one slash, too: so an address looks that is given as a path.
_USERINFO = re.compile(r"(?:(?<=://)|(?<=:/))(?!git@)[^/?#\s]+@")
_QUERY = re.compile(
    r"(?i)([?&;#][\w.%-]*(?:token|secret|passw(?:or)?d|pwd|signature|credential|sig|key|auth)=)[^&\s\"'<>()\[\],]+"
)
_SECRET = re.compile(r"UV_\w+_(PASSWORD|TOKEN)")
_SHORTEST = 6  # a shorter one is in many words


def masked(text: str) -> str:
    """`text`, whose addresses have neither passwords nor tokens, nor has it uv's: of all that leaves this process."""
    for name, value in os.environ.items():
        if _SECRET.fullmatch(name) and len(value) >= _SHORTEST:
            text = text.replace(value, "****")
    return _QUERY.sub(r"\1****", _USERINFO.sub("****@", text))


def without_userinfo(text: str) -> str:
    """`text`, whose addresses are as everybody has them."""
    return _USERINFO.sub("", text)


def mask_streams() -> None:
    """Masks what is printed here, whoever prints it; a file's name that is no text does not end that.

    A stream that was closed before we started, as some services have it, leads nowhere. Else the next file that is
    opened would take its place.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            free = os.open(os.devnull, os.O_RDWR)  # the lowest number that is
            os.set_inheritable(free, True)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        write = stream.write
        stream.write = lambda text, write=write: write(masked(text))  # type: ignore[method-assign]


def in_columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        columns = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        yield "  ".join(columns).rstrip()


class Shortened:
    """Goes through the lines of a build in `folder`: cuts commands, keeps only the project's frames of tracebacks."""

    def __init__(self, folder: Path) -> None:
        self.own = f'File "{folder}/'
        self.in_traceback = False
        self.is_own = False

    def __call__(self, line: str) -> str:
        """What is shown of a line; it may be nothing."""
        if os.environ.get(DEBUG):
            return line
        if line.startswith("Traceback (most recent call last):"):
            self.in_traceback, self.is_own = True, False
            return ""
        if self.in_traceback:
            if not line.startswith(" "):  # what was raised
                self.in_traceback = False
                return line
            if line.startswith("  File "):
                self.is_own = self.own in line
            return line if self.is_own else ""
        if _BETWEEN_TRACEBACKS.match(line):
            return ""
        if len(line) > _LONGEST and _COMMAND.match(line):
            return f"{line[:_LONGEST].rstrip()} ... (--debug shows all)\n"
        return line
