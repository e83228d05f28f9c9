"""This machine: its processes, its files, what is kept on it between builds, and what is printed."""

from torchwheels.system import cache, files, machines, output, processes, sandbox
from torchwheels.system.files import MARK, as_json, marked, read_json, scratch, sha256, write_text
from torchwheels.system.machines import AARCH64, X86_64, Machine
from torchwheels.system.output import DEBUG, masked, without_userinfo

__all__ = [
    "AARCH64", "DEBUG", "MARK", "X86_64", "Machine", "as_json", "cache", "files", "machines", "marked", "masked",
    "output", "processes", "read_json", "sandbox", "scratch", "sha256", "without_userinfo", "write_text",
]  # fmt: skip
