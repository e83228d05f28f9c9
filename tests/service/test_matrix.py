"""The matrix, and everything that must agree with it."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from typing import Any

import pytest

from service import ROOT, ServiceError, matrix, native_libraries

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MATRIX = matrix.load()
DATA = tomllib.loads(matrix.FILE.read_text())
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def nox(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nox", "--noxfile", str(ROOT / "noxfile.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_nox_lists_exactly_the_cells() -> None:
    done = nox("--list")
    assert done.returncode == 0, done.stderr
    listed = set(re.findall(r"^[-*] ([\w.-]+)", done.stdout, re.MULTILINE))
    cells = {f"{verb}-{cell.name}" for cell in MATRIX.cells for verb in ("build", "test")}
    others = {
        "audit",
        "bench",
        "build",
        "docs",
        "guide",
        "index",
        "lint",
        "matrix",
        "newest",
        "notes",
    }
    others |= {"mutate", "reproduce", "sanitize", "survey", "test"}
    assert listed == cells | others


@pytest.mark.parametrize(
    ("session", "near"),
    [
        ("build-3.11-cu999", "3.11-cu130"),
        ("test-3.9-cu130", "3.12-cu130"),
        ("build-3.14-cu121", "3.12-cu121"),
        ("test-3.11-cu124-torch2.4", "3.11-cu124-torch2.5"),
    ],
)
def test_unknown_cell_names_the_nearest(session: str, near: str) -> None:
    done = nox("-s", session)
    assert done.returncode != 0
    (message,) = done.stderr.strip().splitlines()
    assert f"there is no cell {session.partition('-')[2]!r}" in message
    assert near in message


def test_names_of_cells() -> None:
    cell = MATRIX.cell("3.11-cu124-torch2.5")
    assert (cell.python, cell.variant.name, cell.torch) == ("3.11", "cu124", "2.5.1")
    assert MATRIX.cell("3.11-cu124").torch == "2.6.0"


def test_release_is_tested_with_every_torch() -> None:
    release = MATRIX.variant("release")
    assert set(release.torch) == set(MATRIX.pythons)
    assert MATRIX.cell("3.12-release").torch == MATRIX.headers_torch
    assert MATRIX.cell("3.12-release-torch2.4").torch == "2.4.1"
    assert [x.name for x in MATRIX.variants.values() if x.label != x.name] == ["release"]


@pytest.mark.parametrize("cell", ["3.13-cu121", "3.14-cu124", "3.10-cu132"])
def test_no_cell_where_torch_has_no_wheel(cell: str) -> None:
    with pytest.raises(ServiceError, match="no cell"):
        MATRIX.cell(cell)


@pytest.mark.parametrize(
    ("torch", "lane"), [("2.4.1", "legacy"), ("2.9.1", "legacy"), ("2.10.0", "stable")]
)
def test_lane_follows_from_torch(torch: str, lane: str) -> None:
    assert matrix.lane(torch) == lane


@pytest.mark.parametrize("variant", [v for v in MATRIX.variants.values() if v.cuda], ids=str)
def test_newest_architecture_has_ptx(variant: matrix.Variant) -> None:
    assert [name.endswith("+PTX") for name in variant.architectures].index(True) == (
        len(variant.architectures) - 1
    )


def test_architectures_can_be_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXTOPS_ARCHITECTURES", "8.0 9.0+PTX")
    assert MATRIX.variant("cu130").architectures == ("8.0", "9.0+PTX")
    assert MATRIX.variant("cpu").architectures == ()
    monkeypatch.setenv("EXTOPS_ARCHITECTURES", "8.0;sm_90")
    with pytest.raises(ServiceError, match=r"names '8\.0;sm_90', but GPU"):
        MATRIX.variant("cu130")


def test_default_cells_make_every_wheel() -> None:
    assert [cell.variant.name for cell in MATRIX.default_cells] == list(MATRIX.variants)
    data = {**DATA, "default_python": "3.14"}
    with pytest.raises(ServiceError, match=r"the default Python 3\.14 has no cell of cu121"):
        matrix.parse(data)


def test_readme_shows_the_wheels() -> None:
    readme = (ROOT / "README.md").read_text()
    found = re.search(r"<!-- wheels:begin -->\n(.*?)\n<!-- wheels:end -->", readme, re.DOTALL)
    assert found, "README.md has no table between <!-- wheels:begin --> and <!-- wheels:end -->"
    assert found[1].strip() == MATRIX.variants_table(), "renew it with `python -m service.matrix`"


def test_torch_versions_agree() -> None:
    loader = (ROOT / "package" / "extops" / "_loader.py").read_text()
    found = re.search(r"^MINIMUM_TORCH = \((\d+), (\d+)\)", loader, re.MULTILINE)
    assert found
    minimum = (int(found[1]), int(found[2]))
    assert f"torch>={minimum[0]}.{minimum[1]}" in PYPROJECT["project"]["dependencies"]
    assert min(map(matrix.release, MATRIX.pythons)) >= minimum
    stable = native_libraries().STABLE_TORCH
    assert f"torch>={stable[0]}.{stable[1]}" in PYPROJECT["build-system"]["requires"]
    assert matrix.release(MATRIX.headers_torch) >= stable


def test_pythons_agree() -> None:
    pythons = {python for pythons in MATRIX.pythons.values() for python in pythons}
    oldest = min(pythons, key=matrix.release)
    assert PYPROJECT["project"]["requires-python"] == f">={oldest}"


def spoil(**changes: Any) -> dict[str, Any]:
    data = copy.deepcopy(DATA)
    data["variant"]["cu130"].update(changes)
    return data


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cuda": "13.1"}, "variant cu130 names CUDA 13.1, which is another's"),
        ({"image": "nvidia/cuda:12.4.1-devel-ubuntu22.04"}, "but the image nvidia/cuda:12.4.1"),
        ({"architectures": []}, "cu130 needs `cuda` and `architectures`, or neither"),
        ({"torch": []}, "cu130 names no torch release"),
        ({"torch": ["2.99.0"]}, r"cu130 names torch 2.99.0, but \[torch\] does not"),
        ({"torch": ["2.14.1", "2.13.0", "2.13.0"]}, "make the cell 3.10-cu130-torch2.13"),
        ({"colour": "red"}, "variant cu130: .*colour"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_a_wrong_file_is_explained(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ServiceError, match=message):
        matrix.parse(spoil(**changes))
