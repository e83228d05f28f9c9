"""The lock file has what is asked for, with hashes, and what torchwheels imports is asked for."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from pathlib import Path

import nox
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from extops_build import ROOT
from torchwheels.options import releases

PROJECT = nox.project.load_toml(ROOT / "torchwheels" / "pyproject.toml")["project"]
GROUPS = nox.project.load_toml(ROOT / "pyproject.toml")
EXTRA = PROJECT["optional-dependencies"]["nox"]
TABLE = releases.load()
ASKED = [*PROJECT["dependencies"], *EXTRA, *TABLE.tools, TABLE.uv]
ASKED += nox.project.dependency_groups(GROUPS, "nox")


@pytest.mark.parametrize("said", ASKED)
def test_lock_file_has_what_is_asked_for(said: str) -> None:
    asked = Requirement(said)
    locked = releases.locked(lambda name: name == asked.name)
    versions = re.findall(rf"^{asked.name}==(\S+)", locked, re.MULTILINE)
    assert versions
    assert all(version in asked.specifier for version in versions)
    assert len(re.findall(r"\\\n    --hash=sha256:[0-9a-f]{64}", locked)) >= len(versions)


def test_what_is_imported_is_declared() -> None:
    """What another package happens to bring may go with its next release."""
    folder = Path(releases.__file__).parents[1]
    found = set()
    for file in {*folder.rglob("*.py")} - {*folder.glob("build/wrappers/**/*")}:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {x.name.partition(".")[0] for x in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(str(node.module).partition(".")[0])
    packages = importlib.metadata.packages_distributions()
    imported = {
        canonicalize_name(packages.get(module, [module])[0])
        for module in found - sys.stdlib_module_names - {"torchwheels"}
    }
    assert imported <= {Requirement(x).name for x in (*PROJECT["dependencies"], *EXTRA)}
