"""Where packages come from, as pip's files and variables say, and in uv's words."""

import ast
import functools
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from torchwheels.errors import UserError
from torchwheels.system import files, output, processes

_OF_UV = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "constraint": "UV_CONSTRAINT",
    "timeout": "UV_HTTP_TIMEOUT",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
}
ADDRESS = r"(https?|file)://"
"""How that of an index begins."""
_OF_PIP = re.compile(r"PIP_|XDG_|HOME$")
_CHOOSES = re.compile(r"UV_(?!PUBLISH|CACHE|HTTP|RUN|INSECURE|\w+_(USERNAME|PASSWORD|TOKEN))")
_INCLUDED = re.compile(r"^\s*(?:-[cr]|--constraint|--requirement)[\s=]*(\S+)", re.MULTILINE)
_FLAGS = ("no-binary", "only-binary")  # for which uv has no variables
_TRUE = ("1", "y", "yes", "t", "true", "on")


def pip_settings(command: str) -> dict[str, str]:
    """What pip's files and variables say for one of its commands: `index-url`, `cert` ..."""
    said = _pip_config(tuple(sorted(x for x in os.environ.items() if _OF_PIP.match(x[0]))))
    lines = re.findall(r"^(\S+?)\.([\w-]+)=(.*)$", said, re.MULTILINE)
    found = {
        key.removeprefix("default-"): " ".join(ast.literal_eval(value).split())
        for section in ("global", command, ":env:")  # the later more strongly
        for where, key, value in lines
        if where == section
    }
    for key in ("index-url", "extra-index-url"):
        for place in found.get(key, "").split():
            if not (re.match(ADDRESS + ".", place) or Path(place).is_dir()):
                said = f"pip's configuration has {output.without_userinfo(place)!r} as {key}"
                raise UserError(
                    f"{said}, but an address such as 'https://x.org/simple' is expected"
                )
    return found


@functools.cache
def _pip_config(variables: tuple[tuple[str, str], ...]) -> str:
    """What it says, which follows from these variables."""
    done = processes.ask([sys.executable, "-m", "pip", "config", "list"])
    if done.returncode:
        why = " ".join((done.stderr + done.stdout).split())
        raise UserError(f"pip cannot read its configuration: {why}")
    return done.stdout


def passwords() -> Path | None:
    """The file with the passwords of addresses, where there is one; an error says that nobody can read it."""
    named = os.environ.get("NETRC")
    try:
        file = files.expanded(named) if named else Path.home() / ".netrc"
        if not file.is_file():
            return None
        file.read_text(encoding="utf-8")
    except RuntimeError:  # of a user whom the system does not know
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{file}, which holds passwords, cannot be read ({error}): make it a text in UTF-8 that you may read, or "
            "have NETRC name another"
        ) from None
    return file


def pip_variables(settings: Mapping[str, str]) -> dict[str, str]:
    """The variables that have pip do what these settings say."""
    return {f"PIP_{key.replace('-', '_').upper()}": value for key, value in settings.items()}


def uv_variables(settings: Mapping[str, str]) -> dict[str, str]:
    """The variables that have uv do what pip's `settings` say."""
    found = {name: settings[key] for key, name in _OF_UV.items() if key in settings}
    if "find-links" in settings:
        found["UV_FIND_LINKS"] = settings["find-links"].replace(" ", ",")
    # As pip, which takes the newest version, whichever index has it.
    return {**found, "UV_INDEX_STRATEGY": "unsafe-best-match"}


def uv_options() -> list[str]:
    """What else uv is told of pip's settings."""
    settings = pip_settings("install")
    values = ((key, x) for key in _FLAGS for x in settings.get(key, "").replace(",", " ").split())
    return ["--no-index"] * has_no_index(settings) + [f"--{key}={value}" for key, value in values]


def has_no_index(settings: Mapping[str, str]) -> bool:
    """Whether pip asks none, but `find-links` alone."""
    return settings.get("no-index", "").lower() in _TRUE


def choices() -> list[str]:
    """What decides which versions are installed: the settings, and of each file that constrains them the hash."""
    both = {**uv_variables(pip_settings("install")), **os.environ}
    found = sorted(f"{x}={output.without_userinfo(both[x])}" for x in both if _CHOOSES.match(x))
    said = (both.get(f"UV_{x}", "") for x in ("CONSTRAINT", "BUILD_CONSTRAINT", "OVERRIDE"))
    named = [x for each in said for x in each.split()]
    for place in named:  # to which come those that a file includes
        if (file := Path(place)).is_file():
            found.append(files.sha256(file))
            included = _INCLUDED.findall(file.read_text(encoding="utf-8", errors="replace"))
            named += {str(file.parent / x) for x in included} - {*named}
        elif file.exists():  # uv would wait for the end of a pipe
            raise UserError(f"{place}, which is to constrain versions, is no plain file: name one")
    return found + uv_options()


def of_torch(label: str) -> str:
    """The index that TORCHWHEELS_TORCH_INDEX names for targets of that label; empty where it names none."""
    said = os.environ.get("TORCHWHEELS_TORCH_INDEX", "")
    index = said.replace("{label}", label)
    if index and not (re.match(ADDRESS, index) and re.fullmatch(r"[^\s{}]+", index)):
        raise UserError(
            f"TORCHWHEELS_TORCH_INDEX is {output.without_userinfo(said)!r}, but an address such as "
            "'https://example.org/whl/{label}' is expected"
        )
    return index


def places_of_torch() -> str:
    """Where torch is looked for, without passwords."""
    settings = pip_settings("install")
    if index := os.environ.get("TORCHWHEELS_TORCH_INDEX"):
        settings["index-url"] = index
    keys = ("index-url", "extra-index-url", "find-links")
    return output.without_userinfo(" ".join(settings.get(key, "") for key in keys))
