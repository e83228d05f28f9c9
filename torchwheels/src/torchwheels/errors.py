"""The one error that users see."""


class UserError(Exception):
    """A sentence that says what was given, what is expected and what to do."""

    code = 1
    """The exit code of the command. 2 is for arguments that no command has."""


class BuildError(UserError):
    """The project's own build fails."""

    code = 3


class RefusedError(UserError):
    """A wheel is there, and it is not fit to publish."""

    code = 4


class TestsError(UserError):
    """The tests of a wheel fail."""

    code = 5
    __test__ = False  # for pytest


def of_code(code: int) -> type[UserError]:
    """The kind of failure that ends the command with that exit code."""
    return next((kind for kind in UserError.__subclasses__() if kind.code == code), UserError)
