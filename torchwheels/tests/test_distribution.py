"""torchwheels as its users have it: from its wheel, in an environment of its own, without these sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from test_building import TORCH, ask
from torchwheels.options import releases

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "torchwheels" / "src" / "torchwheels"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one that shall be published, else one that is built from the source archive as that is."""
    if given := os.environ.get("TORCHWHEELS_WHEEL"):
        return Path(given)
    folder = tmp_path_factory.mktemp("dist")
    copy = shutil.copytree(ROOT / "torchwheels", folder / "sources")  # where builds leave files
    subprocess.run([sys.executable, "-m", "build", "--outdir", folder, copy], check=True)
    (found,) = folder.glob("*.whl")
    return found


def installed_by_pip(wheel: Path, folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([folder / "bin" / "pip", "install", "--quiet", wheel], check=True)
    return folder / "bin"


def installed_by_uv(wheel: Path, folder: Path) -> Path:
    places = {"UV_TOOL_DIR": str(folder / "tools"), "UV_TOOL_BIN_DIR": str(folder / "bin")}
    command = [sys.executable, "-m", "uv", "tool", "install", "--python", sys.executable, wheel]
    subprocess.run(command, env={**os.environ, **places}, check=True)
    return folder / "bin"


def installed_by_pipx(wheel: Path, folder: Path) -> Path:
    places = {"PIPX_HOME": str(folder / "tools"), "PIPX_BIN_DIR": str(folder / "bin")}
    command = [sys.executable, "-m", "pipx", "install", wheel]
    subprocess.run(command, env={**os.environ, **places}, check=True)
    return folder / "bin"


@pytest.mark.slow
@pytest.mark.parametrize("install", [installed_by_pip, installed_by_uv, installed_by_pipx])
def test_installed_tool_needs_no_checkout(install, wheel: Path, tmp_path: Path) -> None:
    """It lists targets, and finds a project on the index, whose sources then have no such version."""
    command = install(wheel, tmp_path / "tool") / "torchwheels"
    empty = tmp_path / "empty"
    empty.mkdir()
    variables = {"PATH": os.environ["PATH"], "HOME": str(empty)}
    variables |= {k: v for k, v in os.environ.items() if k.startswith("PIP_")}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [command, *arguments], cwd=empty, env=variables, capture_output=True, text=True
        )

    assert "3.11-cu124-torch2.5" in run("targets").stdout
    failed = run("build", "torchsort==0.0.0", "--target", "3.11-cpu", "--backend", "local")
    assert "there are no sources of torchsort==0.0.0: the newest versions are " in failed.stderr


@pytest.mark.slow
def test_installed_tool_builds(wheel: Path, own_project: Path, tmp_path: Path) -> None:
    """Installs torch: minutes, the first time."""
    command = [installed_by_pip(wheel, tmp_path / "tool") / "torchwheels", "build", own_project]
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    target = f"{python}-cpu-torch{releases.minor(TORCH)}"  # that of these tests
    subprocess.run([*command, f"--target={target}", "--backend=local"], cwd=tmp_path, check=True)
    (built,) = (tmp_path / "dist").glob("*+*.whl")
    answer = ask(built, tmp_path / "target", "own_project.swish(torch.zeros(2)).tolist()")
    assert answer == "[0.0, 0.0]"


@pytest.mark.slow
def test_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = next(x for x in names if x.endswith("/METADATA")).removesuffix("METADATA")
        metadata = archive.read(f"{info}METADATA").decode()
    assert "\nDescription-Content-Type: text/markdown\n" in metadata
    assert "torchwheels build torchsort==0.1.9" in metadata
    assert f"{info}licenses/LICENSE" in names
    assert {
        f"torchwheels/{x.relative_to(PACKAGE)}"
        for x in PACKAGE.rglob("*")
        if x.is_file() and x.suffix != ".pyc"
    } < set(names)
