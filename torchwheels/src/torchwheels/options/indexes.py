"""Where packages come from, as pip's files and variables say."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys

from torchwheels.errors import UserError
from torchwheels.system import output


def pip_settings(command: str) -> dict[str, str]:
    """What pip's files and variables say for one of its commands: `index-url`, `cert` ..."""
    said = _pip_config(tuple(sorted(os.environ.items())))
    lines = re.findall(r"^(\S+?)\.([\w-]+)=(.*)$", said, re.MULTILINE)
    return {
        key: " ".join(ast.literal_eval(value).split())
        for section in ("global", command, ":env:")  # the later more strongly
        for where, key, value in lines
        if where == section
    }


@functools.cache
def _pip_config(variables: tuple[tuple[str, str], ...]) -> str:
    command = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(command, env=dict(variables), capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"pip cannot read its configuration: {' '.join(done.stderr.split())}")
    return done.stdout


def places_of_torch() -> str:
    """Where pip looks for torch, without passwords."""
    settings = pip_settings("install")
    if index := os.environ.get("TORCHWHEELS_TORCH_INDEX"):
        settings["index-url"] = index
    keys = ("index-url", "extra-index-url", "find-links")
    return output.without_userinfo(" ".join(settings.get(key, "") for key in keys))
