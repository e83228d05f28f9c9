"""The package index: served, and installed from by pip and uv, with wheels that hold nothing."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin
from urllib.request import urlopen

import pytest
import small_wheels

from service import ROOT, ServiceError, index, landing, matrix, site, wheels
from service.check import Wheel

MATRIX = matrix.load()
CURRENT = f"{sys.version_info.major}.{sys.version_info.minor}"


def another_python() -> str | None:
    """The command of another Python of the matrix, where there is one here that runs."""
    versions = {python for pythons in MATRIX.pythons.values() for python in pythons}
    commands = [shutil.which(f"python{python}") for python in sorted(versions - {CURRENT})]
    for command in commands:  # one may be there of a version that is not
        if command and subprocess.run([command, "-c", ""], capture_output=True).returncode == 0:
            return command
    return None


ANOTHER = another_python()


@pytest.fixture(autouse=True)
def _no_locks_in_the_source_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "ROOT", tmp_path)


@pytest.fixture
def released(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """The address of a site with a release wheel and two others; and what was asked of it.

    It is below the top, as on GitHub's pages.
    """
    small_wheels.make_site(tmp_path, "release", "cpu", "cu130")
    with small_wheels.served(tmp_path) as (top, requests):
        yield f"{top}site/", requests


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An empty environment; its Python."""
    return make_environment(sys.executable, tmp_path)


def make_environment(python: str, folder: Path) -> Path:
    folder = folder / "environment"
    subprocess.run([*uv("venv"), "--quiet", f"--python={python}", str(folder)], check=True)
    return folder / "bin" / "python"


def uv(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "uv", *arguments]


@pytest.fixture
def pypi(tmp_path: Path) -> Iterator[str]:
    """The address of what stands for PyPI."""
    with small_wheels.served(small_wheels.make_pypi(tmp_path / "pypi")) as (address, _):
        yield address


def nobodys_settings(default: str) -> dict[str, str]:
    """This environment, but with no configuration of pip and uv other than their default index."""
    settings = ("PIP_", "UV_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(settings)}
    pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": default, "PIP_NO_CACHE_DIR": "1"}
    return {**clean, **pip, "UV_DEFAULT_INDEX": default, "UV_NO_CACHE": "1", "UV_NO_CONFIG": "1"}


def install(
    command: str, python: Path, default: str, *more: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command that the page prints."""
    tool, *words = shlex.split(command)
    runs = {"pip": [sys.executable, "-m", "pip", f"--python={python}"], "uv": uv()}[tool]
    words += [f"--python={python}"] if tool == "uv" else []
    return subprocess.run(
        [*runs, *words, *more], env=nobodys_settings(default), capture_output=True, text=True
    )


def printed(tool: str, wheel: Path, address: str) -> str:
    """What the page prints for a wheel and a tool, once a browser has filled in the address."""
    return landing.commands(Wheel(wheel))[tool].replace(landing.SITE, address)


def from_the_main_index(tool: str, address: str) -> str:
    """The command that takes what the main index gives."""
    option = {"pip": "pip install --extra-index-url", "uv": "uv pip install --index"}[tool]
    return f"{option} {address}simple/ extops"


def installed(python: Path) -> str:
    program = "import extops; print(extops.VARIANT)"
    command = [str(python), "-c", program]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_each_variant_has_its_own_index_and_the_release_the_main_one(tmp_path: Path) -> None:
    for variant in ("cu130", "release", "cpu"):
        small_wheels.make(tmp_path, variant)
    found = index.read_all(tmp_path)
    listed = {
        path: [index.variant_of(w) for w in there] for path, there in index.indices(found).items()
    }
    assert listed == {
        "simple/": ["release"],
        "cpu/simple/": ["cpu"],
        "cu130/simple/": ["cu130"],
    }


@pytest.mark.parametrize("python", [sys.executable, ANOTHER], ids=["this Python", "another"])
@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_installers_get_the_wheel_that_was_asked_for(
    tool: str, python: str | None, tmp_path: Path, released: tuple[str, list[str]], pypi: str
) -> None:
    if python is None:
        pytest.skip(f"there is no Python of the matrix here but {CURRENT}")
    environment = make_environment(python, tmp_path)
    for variant in ("release", "cu130"):  # the same version but for the label
        (wheel,) = wheels.published(MATRIX.variants[variant], tmp_path / "dist")
        done = install(printed(tool, wheel, released[0]), environment, pypi)
        assert done.returncode == 0, done.stderr
        assert installed(environment) == variant


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = "".join(
    block
    for page in PAGES
    for block in re.findall("```bash\n(.*?)```", page.read_text(), re.DOTALL)
)
INSTALL_LINES = sorted({*re.findall(r"^.*(pip install \S*extops.*)$", CODE, re.MULTILINE)})


@pytest.mark.parametrize("line", INSTALL_LINES)
def test_install_lines_of_the_pages(line: str, tmp_path: Path, pypi: str) -> None:
    """After the builds that they name, which leave several wheels in dist/."""
    built = "cu130", "cpu"
    with small_wheels.served(small_wheels.make_site(tmp_path, *built)) as (address, _):
        venv.create(tmp_path / "fresh", with_pip=True)
        tools = f"{tmp_path / 'fresh' / 'bin'}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", line.replace("http://localhost:8080/", address)],
            cwd=tmp_path,
            env={**nobodys_settings(pypi), "PATH": tools},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    assert installed(tmp_path / "fresh" / "bin" / "python") == "cu130"


def test_pages_say_how_to_install() -> None:
    assert len(INSTALL_LINES) == 2


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_metadata_is_enough_to_resolve(
    tool: str, environment: Path, released: tuple[str, list[str]]
) -> None:
    address, requests = released
    done = install(from_the_main_index(tool, address), environment, f"{address}simple/")
    assert done.returncode != 0
    assert "torch" in done.stderr  # which is neither in the environment nor in an index
    wheel = f"/site/wheels/extops-0.1.0-{small_wheels.TAG}.whl"
    assert f"{wheel}.metadata" in requests
    assert wheel not in requests


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_without_a_release_the_main_index_gives_the_last_label(
    tool: str, environment: Path, tmp_path: Path, pypi: str
) -> None:
    """Why each variant has an index of its own."""
    folder = small_wheels.make_site(tmp_path, "cpu", "cu130", "cu121")
    with small_wheels.served(folder) as (address, _):
        done = install(from_the_main_index(tool, address), environment, pypi)
    assert done.returncode == 0, done.stderr
    assert installed(environment) == "cu130"


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_a_wheel_that_was_tampered_with_is_refused(
    tool: str, environment: Path, tmp_path: Path, pypi: str
) -> None:
    folder = small_wheels.make_site(tmp_path, "release")
    (wheel,) = folder.glob("wheels/*.whl")
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("extops/evil.py", "")
    with small_wheels.served(folder) as (address, _):
        done = install(from_the_main_index(tool, address), environment, pypi)
    assert done.returncode != 0
    assert "hash" in done.stderr.lower()


@pytest.mark.parametrize("path", ["simple/", "cpu/simple/"])
def test_json_says_what_is_there(path: str, released: tuple[str, list[str]]) -> None:
    address = urljoin(released[0], path)
    projects = json.load(urlopen(urljoin(address, "index.json")))
    assert projects == {"meta": {"api-version": "1.1"}, "projects": [{"name": "extops"}]}
    page = urljoin(address, "extops/index.json")
    detail = json.load(urlopen(page))
    assert detail["meta"] == {"api-version": "1.1"}
    (file,) = detail["files"]
    assert detail["versions"] == [file["filename"].split("-")[1]]
    assert file["requires-python"] == ">=3.10"
    wheel = urlopen(urljoin(page, file["url"])).read()
    assert file["hashes"] == {"sha256": hashlib.sha256(wheel).hexdigest()}
    assert file["size"] == len(wheel)
    assert "+" not in file["url"]  # which some servers take for a space
    metadata = urlopen(urljoin(page, file["url"] + ".metadata")).read()
    assert file["core-metadata"] == {"sha256": hashlib.sha256(metadata).hexdigest()}
    assert metadata.startswith(b"Metadata-Version: 2.4\nName: extops\n")


def test_links_are_relative(tmp_path: Path) -> None:
    folder = small_wheels.make_site(tmp_path, "release", "cu130")
    for page in folder.rglob("index.*"):
        assert 'href="/' not in page.read_text()
        assert "://" not in page.read_text().replace("http://www.w3.org/2000/svg", "").replace(
            "https://&lt;this-site&gt;/", ""
        )


def test_a_passport_comes_along(tmp_path: Path) -> None:
    wheel = small_wheels.make(tmp_path / "dist", "cpu")
    wheel.with_suffix(".passport.json").write_text('{"tests": [], "rules": []}')
    folder = small_wheels.make_site(tmp_path)
    copied = folder / "wheels" / wheel.with_suffix(".passport.json").name
    assert copied.read_text() == '{"tests": [], "rules": []}'
    assert f'href="wheels/{copied.name.replace("+", "%2B")}"' in (folder / "index.html").read_text()


def test_what_cannot_be_served_is_said(tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    dist.mkdir()
    with pytest.raises(ServiceError, match=r"no wheel in .*: build some with `nox -s build`"):
        index.read_all(dist)
    small_wheels.make(dist, "cpu")
    for wheel in dist.iterdir():
        wheel.write_bytes(b"PK")
    with pytest.raises(ServiceError, match="is no wheel: File is not a zip file"):
        index.read_all(dist)


def test_the_site_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = small_wheels.make_site(tmp_path, "cu130")
    for wheel in (tmp_path / "dist").iterdir():
        wheel.unlink()

    def fail(*arguments: object) -> None:
        raise OSError("no space left on device")

    small_wheels.make(tmp_path / "dist", "cpu")
    with monkeypatch.context() as patch:
        patch.setattr(site.landing, "write", fail)
        with pytest.raises(OSError, match="no space"):
            site.build(tmp_path / "dist", folder, MATRIX)
    assert [path.name.split("-")[1] for path in folder.glob("wheels/*.whl")] == ["0.1.0+cu130"]
    said = site.build(tmp_path / "dist", folder, MATRIX)
    assert [path.name.split("-")[1] for path in folder.glob("wheels/*.whl")] == ["0.1.0+cpu"]
    assert not (folder / "cu130").exists()
    assert "of which `pip install extops` takes 0.1.0+cpu" in said[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["build", "dist", "site"]


def test_wheels_of_a_variant_that_was_dropped_stay(tmp_path: Path) -> None:
    """The index also lists old releases, which somebody's lock file may name."""
    small_wheels.make(tmp_path / "dist", "cu118", ["3.5"])
    folder = small_wheels.make_site(tmp_path, "release")
    assert "cu118" in (folder / "cu118/simple/extops/index.html").read_text()
    assert "cu118" not in (folder / "simple/extops/index.html").read_text()
