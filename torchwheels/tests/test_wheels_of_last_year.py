"""What was published stays so: it is judged by what it says of its own build, whatever is new since."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT

WHEELS = Path(__file__).with_name("data") / "of_2026"

RENEWED = """
manylinux = "manylinux_2_34"
cpu = { image = "ubuntu:26.04", torch = "2.20.0" }
tools = []
uv = "uv==1"
toolkit = "cuda-toolkit"

[torch]
"2.20.0" = { cuda = ["14.0"], pythons = ["3.11", "3.16"] }

[cuda."14.0"]
torch = "2.20.0"
image = "nvidia/cuda:14.0"
architectures = ["10.0", "12.0+PTX"]
"""
OPTIONS = """
[project]
name = "tinyops"
[tool.torchwheels]
stable = "2.20.0"
torch = "{torch}"
environment = {{ TORCH_CUDA_ARCH_LIST = "12.0" }}
"""


@pytest.fixture
def newer(tmp_path: Path) -> Path:
    """A torchwheels of some years later."""
    package = tmp_path / "newer" / "torchwheels"
    shutil.copytree(ROOT / "torchwheels" / "src" / "torchwheels", package)
    (package / "options" / "releases.toml").write_text(RENEWED)
    for name, old, new in (
        ("__init__.py", r'__version__ = ".*"', '__version__ = "9.0"'),
        ("wheel/variants.py", r"v0\.1\.1\.json", "v1.0.json"),  # of the schema that uv reads
    ):
        text, count = re.subn(old, new, (package / name).read_text())
        assert count
        (package / name).write_text(text)
    return package.parent


@pytest.mark.parametrize("torch", [">=2.18", ">=2.10"])
def test_a_renewed_table_leaves_every_older_wheel_fit_to_publish(
    newer: Path, tmp_path: Path, torch: str
) -> None:
    shutil.copytree(WHEELS, tmp_path / "dist")
    (tmp_path / "pyproject.toml").write_text(OPTIONS.format(torch=torch))
    variables = {**os.environ, "PYTHONPATH": str(newer)}
    for command in ("audit", "index"):
        done = subprocess.run(
            [sys.executable, "-m", "torchwheels", command],
            cwd=tmp_path, env=variables, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    listing = json.loads((tmp_path / "site" / "simple" / "tinyops" / "index.json").read_text())
    listed = {each["filename"] for each in listing["files"]}
    assert {x.name for x in WHEELS.glob("variants/*.whl")} <= listed
    page = (tmp_path / "site" / "index.html").read_text()
    assert all(f"3.11 2.13 {x}&quot;: &quot;tinyops-1." in page for x in ("CPU", "13.0"))
    for wheel in WHEELS.rglob("*.whl"):
        assert (tmp_path / "site" / "wheels" / wheel.name).read_bytes() == wheel.read_bytes()
