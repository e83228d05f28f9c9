"""The CPU wheel, built for real: its bytes follow from the sources, however and wherever it is built."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from service import ROOT, matrix, reproduce, toolchain

pytestmark = pytest.mark.slow

OF_GIT = {"EXTOPS_COMMIT": "0123456789abcdef", "SOURCE_DATE_EPOCH": "1700000000"}


def copy_of_the_sources(folder: Path) -> Path:
    return Path(shutil.copytree(ROOT, folder, ignore=reproduce.LEFT_OUT))


def build(tree: Path, umask: int = 0o022, environment: dict[str, str] | None = None) -> Path:
    """Builds the wheel of `tree` as a build session does."""
    done = subprocess.run(
        [sys.executable, "-m", "service.wheels", "cpu"],
        cwd=tree,
        env={**os.environ, **OF_GIT, **(environment or {})},
        umask=umask,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith(f" MB, commit {OF_GIT['EXTOPS_COMMIT']})\n")
    (wheel,) = (tree / "dist").glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(copy_of_the_sources(tmp_path_factory.mktemp("reference") / "extops"))


def torch_headers(folder: Path, version: str) -> Path:
    """All packages that are installed, with a torch that says it is of this version."""
    folder.mkdir()
    for entry in toolchain.SITE_PACKAGES.iterdir():
        (folder / entry.name).symlink_to(entry)
    (installed,) = folder.glob("torch-*.dist-info")
    installed.unlink()
    named = folder / f"torch-{version}.dist-info"
    named.mkdir()
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    return folder


@pytest.mark.parametrize(
    ("folder", "mode", "umask", "build_of_torch"),
    [("it's a folder with spaces", 0o600, 0o077, "cu999"), ("open", 0o777, 0o000, "cpu")],
)
def test_bytes_follow_from_the_sources(
    wheel: Path, tmp_path: Path, folder: str, mode: int, umask: int, build_of_torch: str
) -> None:
    tree = copy_of_the_sources(tmp_path / folder / "extops")
    for path in [tree, *tree.rglob("*")]:
        path.chmod(mode | 0o100 if path.is_dir() else mode)
    version = f"{matrix.load().headers_torch}+{build_of_torch}"
    packages = torch_headers(tmp_path / folder / "packages", version)
    again = build(tree, umask, {"PYTHONPATH": str(packages)})
    assert reproduce.differences(wheel, again) == []


def test_bytes_from_the_source_archive(wheel: Path, tmp_path: Path) -> None:
    tree = copy_of_the_sources(tmp_path / "extops")
    command = [sys.executable, "-m", "uv", "build", "--sdist", "--no-build-isolation", "--offline"]
    subprocess.run([*command, f"--out-dir={tmp_path}", str(tree)], check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    assert "+" not in archive.name  # it is of no variant
    shutil.unpack_archive(archive, tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert reproduce.differences(wheel, build(unpacked)) == []
