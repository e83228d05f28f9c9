"""Passwords in addresses."""

from __future__ import annotations

import re

_USERINFO = re.compile(r"(?<=://)[^/\s'\"]+@")


def masked(text: str) -> str:
    """`text` without the users and passwords of its addresses, for people."""
    return _USERINFO.sub("****@", text)


def without_userinfo(text: str) -> str:
    """`text` with the addresses that they have for everybody."""
    return _USERINFO.sub("", text)
