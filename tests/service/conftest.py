"""The engine: one made of a script, and the real one where there is one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from fake_docker import SCRIPT, FakeDocker

from service import ROOT, ServiceError, place


@pytest.fixture
def fake_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDocker:
    folder = tmp_path / "fake-docker"
    (folder / "bin").mkdir(parents=True)
    command = folder / "bin" / "docker"
    command.write_text(SCRIPT.format(folder=folder))
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")
    fake = FakeDocker(folder)
    fake.says("")
    fake.builds("none")
    return fake


@pytest.fixture
def engine() -> None:
    """Skips where no Docker engine answers."""
    try:
        place.engine()
    except ServiceError as error:
        pytest.skip(f"no Docker engine answers: {error}")


@pytest.fixture
def small_image(engine: None) -> str:
    """An image with a shell, which must be here already: a test pulls nothing."""
    for image in ("ubuntu:22.04", "debian:bookworm-slim"):
        if (
            subprocess.run(["docker", "image", "inspect", image], capture_output=True).returncode
            == 0
        ):
            return image
    pytest.skip("the Docker engine has no ubuntu:22.04 or debian:bookworm-slim")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what a build needs, with a dist/ of its own."""
    copy = tmp_path / "tree"
    copy.mkdir()
    skip = shutil.ignore_patterns("__pycache__", "*.so", "_build_info.json")
    for name in ("csrc", "examples", "package", "service", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=skip)
    for name in ("Dockerfile", ".dockerignore", "README.md", "matrix.toml", "noxfile.py"):
        shutil.copy(ROOT / name, copy)
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, copy)
    return copy
