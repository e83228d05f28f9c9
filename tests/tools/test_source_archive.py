"""The source archive: what builds a wheel is in it, and the wheel is that of the tree."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from extops_build import ROOT
from torchwheels import cli, sources

pytest.importorskip("setuptools", reason="setuptools is not installed")


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made of a copy of the tree, whose folders it leaves files in."""
    folder = tmp_path_factory.mktemp("archive")
    tree = sources.fetch(str(ROOT), folder / "tree").folder
    code = f"import setuptools.build_meta as backend; print(backend.build_sdist({str(folder)!r}))"
    environment = os.environ | {"GITHUB_REPOSITORY": "somebody/extops"}
    environment.pop("GITHUB_SERVER_URL", None)
    command = [sys.executable, "-c", code]
    subprocess.run(command, cwd=tree, check=True, stdout=subprocess.DEVNULL, env=environment)
    (found,) = folder.glob("*.tar.gz")
    return found


def test_it_holds_all_that_a_build_and_its_tests_read(archive: Path) -> None:
    assert "+" not in archive.name  # it is of no variant
    with tarfile.open(archive) as tar:
        held = {name.partition("/")[2] for name in tar.getnames()}
    folders = ("csrc", "extops_build", "package", "examples", "tests")
    tracked = ["git", "-C", str(ROOT), "ls-files", *folders, "pyproject.toml", "setup.py"]
    wanted = subprocess.run(tracked, capture_output=True, text=True).stdout.splitlines()
    if not wanted:
        pytest.skip("only git knows which files belong to the tree, and this is no repository")
    assert {each for each in wanted if not each.startswith("tests/tools/")} - held == set()


def test_it_says_where_its_sources_are(archive: Path) -> None:
    """Whose they are CI says: everybody's copy is built by their own."""
    with tarfile.open(archive) as tar:
        (name,) = (x for x in tar.getnames() if x.count("/") == 1 and x.endswith("PKG-INFO"))
        file = tar.extractfile(name)
        assert file is not None
        lines = file.read().decode().splitlines()
    assert "Project-URL: Source, https://github.com/somebody/extops" in lines
    assert "Project-URL: Issues, https://github.com/somebody/extops/issues" in lines


@pytest.mark.slow
def test_its_wheel_is_that_of_the_tree(archive: Path, tmp_path: Path) -> None:
    wheels = []
    for given in (ROOT, archive):
        dist = tmp_path / f"dist-{len(wheels)}"
        source = str(sources.fetch(str(given), tmp_path / given.name).folder)
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        build = ["build", source, f"--target={python}-cpu", "--backend=local", f"--dist={dist}"]
        # Which source it was is in the build record, and nothing else may differ.
        cli.main([*build, "--origin=the same"])
        wheels += dist.glob("*+*.whl")
    assert cli.differences(*wheels) == []
