"""The one error that users see."""

from __future__ import annotations


class UserError(Exception):
    """A sentence that says what was given, what is expected and what to do."""
