"""What a maintainer does with a wheel: its tests, its passport, the index."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from forged_wheels import Forge

from torchwheels import cli, environments, passports, project, releases, site, testing
from torchwheels.errors import UserError

torch = pytest.importorskip("torch", reason="torch is not installed")

TABLE = """
[tool.torchwheels]
cells = ["3.1?-cu130", "3.11-cpu"]
small = ["3.11-cpu"]
tests = { paths = ["tests"] }
"""


@pytest.fixture
def forge(tmp_path: Path) -> Forge:
    """A sound wheel, in dist/."""
    (tmp_path / "dist").mkdir()
    return Forge(tmp_path / "dist")


def sources_with_tests(folder: Path, test: str) -> Path:
    """The sources of a project whose only test is `test`."""
    (folder / "tests").mkdir(parents=True)
    (folder / "tests" / "test_it.py").write_text(test)
    (folder / "pyproject.toml").write_text(TABLE)
    return folder


@pytest.mark.parametrize(
    ("test", "require_gpu", "code", "counts"),
    [
        ("def test_it(): import tinyops", False, 0, (1, 0, 0)),
        ("def test_it(): assert 0", False, 1, (0, 1, 0)),
        (
            "import pytest\n@pytest.mark.skip('no CUDA')\ndef test_it(): pass",
            False,
            0,
            (0, 0, 1),
        ),
        ("def test_it(): pass", True, 4, None),
    ],
)
def test_own_tests_run_away_from_the_sources_and_leave_a_record(
    forge: Forge,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    test: str,
    require_gpu: bool,
    code: int,
    counts: tuple[int, int, int] | None,
) -> None:
    if require_gpu and torch.cuda.is_available():
        pytest.skip("this machine has the GPU that the test wants absent")
    base = environments.Environment(Path(sys.prefix))
    monkeypatch.setattr(environments, "with_torch", lambda cell, toolkit: base)
    monkeypatch.setattr(environments, "torch_requirement", lambda cell: "torch")
    folder = sources_with_tests(tmp_path / "source", test)
    (folder / "tinyops.py").write_text("raise RuntimeError('the sources')\n")
    forge.files["tinyops/__init__.py"] = b""
    forge.requires = []
    options = project.load(folder / "pyproject.toml")
    results = tmp_path / "results"
    results.mkdir()
    wheel = forge.wheel()
    found = testing.run_here(options, forge.cell, wheel, folder, [], require_gpu, results)
    assert found == code
    testing.keep_record(results, wheel, forge.cell, tmp_path / "dist")
    records = [json.loads(x.read_text()) for x in (tmp_path / "dist").glob("tests/*/*.json")]
    said = [(x["passed"], x["failed"], x["skipped"], x["sha256"]) for x in records]
    assert said == ([(*counts, testing.sha256(wheel))] if counts else [])


def test_a_wheel_is_found_for_the_cells_that_it_serves(forge: Forge, tmp_path: Path) -> None:
    wheel = forge.wheel()
    table = releases.load()
    assert testing.find_wheel(tmp_path / "dist", forge.cell) == wheel
    for name in ("3.12-cpu", "3.11-cu128", "3.11-cpu-torch2.12"):
        with pytest.raises(UserError, match=f"there is no wheel for {name} in .*: build it with"):
            testing.find_wheel(tmp_path / "dist", table.cell(name))


def test_passport_and_index_hold_what_there_is(
    forge: Forge, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dist, wheel = tmp_path / "dist", forge.wheel()
    with pytest.raises(UserError, match="has no passport: run"):
        site.make_site(dist, tmp_path / "site")
    passport = passports.write_passport(wheel, project.Project())
    assert passport["sha256"] == testing.sha256(wheel)
    assert passport["build"]["cell"] == forge.cell.name
    assert json.loads(passports.passport_file(wheel).read_text()) == passport
    assert site.make_site(dist, tmp_path / "site") == ["tinyops"]
    made = tmp_path / "site"
    page = (made / "index.html").read_text()
    assert f'pip install "tinyops=={passport["version"]}" --extra-index-url' in page
    listing = json.loads((made / "simple" / "tinyops" / "index.json").read_text())
    assert [x["filename"] for x in listing["files"]] == [wheel.name]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--isolated"]
    command += ["--only-binary=:all:", f"--dest={tmp_path / 'got'}", "--no-index"]
    command += [f"--find-links={(made / 'simple' / 'tinyops' / 'index.html').as_uri()}", "tinyops"]
    subprocess.run(command, check=True)
    assert (tmp_path / "got" / wheel.name).read_bytes() == wheel.read_bytes()


def test_a_passport_of_another_file_is_refused(forge: Forge, tmp_path: Path) -> None:
    wheel = forge.wheel()
    passports.write_passport(wheel, project.Project())
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("more", "")
    with pytest.raises(UserError, match="is another file's: run the audit again"):
        site.make_site(tmp_path / "dist", tmp_path / "site")


def test_audit_says_what_is_not_fit(
    forge: Forge, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forge.unrecorded = {"tinyops/more.py": b""}
    wheel = forge.wheel()
    with pytest.raises(SystemExit) as error:
        cli.main(["audit", str(wheel)])
    assert "not fit to publish" in str(error.value.code)
    assert "record: its RECORD is not right about tinyops/more.py" in str(error.value.code)
    assert "  FAIL  record  its RECORD" in capsys.readouterr().out


def test_matrix_is_the_projects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = sources_with_tests(tmp_path / "source", "") / "pyproject.toml"
    cli.main(["matrix", "small", f"--config={config}"])
    assert capsys.readouterr().out == 'cells=[{"cell": "3.11-cpu", "python": "3.11"}]\n'
    cli.main(["matrix", "full", f"--config={config}"])
    assert [x["cell"] for x in json.loads(capsys.readouterr().out.removeprefix("cells="))] == [
        *(f"3.1{minor}-cu130" for minor in range(5)),
        "3.11-cpu",
    ]


def test_two_lines_make_the_sessions(tmp_path: Path) -> None:
    folder = sources_with_tests(tmp_path / "source", "")
    (folder / "noxfile.py").write_text(
        "from torchwheels.sessions import add_sessions\nadd_sessions()\n"
    )
    command = [sys.executable, "-m", "nox", "--list"]
    path = str(Path(releases.__file__).parents[1])
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        check=True,
    )
    names = {*re.findall(r"^[*-] (\S+) ->", done.stdout.decode(), re.MULTILINE)}
    assert names == {
        *(f"{verb}-3.1{minor}-cu130" for verb in ("build", "test") for minor in range(5)),
        *("build-3.11-cpu", "test-3.11-cpu", "build", "test", "audit", "index"),
        *("reproduce", "matrix"),
    }
