"""This machine: its processes, its files, what is kept on it between builds, and what is printed."""

from torchwheels.system import cache, machines, output, processes, sandbox
from torchwheels.system.files import (
    MARK,
    acquire,
    as_json,
    check_writable,
    exchanged,
    marked,
    read_json,
    scratch,
    sha256,
    whole,
    write_text,
)
from torchwheels.system.machines import AARCH64, X86_64, Machine
from torchwheels.system.output import DEBUG, masked, without_userinfo

__all__ = [
    "AARCH64", "DEBUG", "MARK", "X86_64", "Machine", "acquire", "as_json", "cache", "check_writable", "exchanged",
    "machines", "marked", "masked", "output", "processes", "read_json", "sandbox", "scratch", "sha256", "whole",
    "without_userinfo", "write_text",
]  # fmt: skip
