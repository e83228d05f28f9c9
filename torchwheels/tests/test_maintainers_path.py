"""What a maintainer does with a wheel: its tests, its build report, the index."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, version_of_torch
from forged_wheels import LIBRARY, Forge
from torchwheels import cli, environments
from torchwheels.audit import reports
from torchwheels.errors import RefusedError, TestsError, UserError
from torchwheels.index import site
from torchwheels.index.kept import kept_if_refused, publish
from torchwheels.options import project, releases
from torchwheels.run import testing
from torchwheels.system import MARK, sha256
from torchwheels.wheel import metadata_of

version_of_torch()  # else all is skipped

TABLE = """
[tool.torchwheels]
targets = ["3.1?-cu130", "3.11-cpu"]
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
        (
            "import os, pytest\ndef test_passes(): import tinyops\ndef test_fails(): assert 0\n"
            "def test_no_gpu_is_seen(): assert os.environ['CUDA_VISIBLE_DEVICES'] == ''\n"
            "def test_no_password_is_seen(): assert 'secret' not in str({**os.environ})\n"
            "@pytest.mark.skip('no CUDA')\ndef test_skipped(): pass",
            False,
            1,
            (3, 1, 1),
        ),
        (
            "import pytest\n@pytest.mark.xfail\ndef test_fails(): assert 0\n"
            "@pytest.mark.xfail\ndef test_passes(): pass",
            False,
            0,
            (1, 0, 1),
        ),
        ("def test_it(): pass", True, 4, None),
        ("import os\ndef test_passes(): pass\ndef test_ends(): os._exit(0)", False, 1, (0, 1, 0)),
        (
            "import pytest\ndef test_a(): pass\ndef test_b(): pytest.exit('x', 0)\ndef test_c(): assert 0",
            False,
            2,
            (1, 1, 0),
        ),
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
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # which a CPU target does not take
    for name in ("UV_PUBLISH_TOKEN", "UV_INDEX_OWN_PASSWORD", "NO_PROXY"):
        monkeypatch.setenv(name, "http://me:secret@localhost" if name == "NO_PROXY" else "secret")
    base = environments.Environment(Path(sys.prefix))
    monkeypatch.setattr(environments, "with_torch", lambda *_, **__: base)
    monkeypatch.setattr(environments, "torch_requirement", lambda target: "torch")
    folder = sources_with_tests(tmp_path / "source", test)
    (folder / "tinyops.py").write_text("raise RuntimeError('the sources')\n")
    forge.files["tinyops/__init__.py"] = b""
    forge.requires = []
    options = project.load(folder / "pyproject.toml")
    results = tmp_path / "results"
    results.mkdir()
    wheel = forge.wheel()
    testing.install(options, forge.target, wheel, tmp_path / "tests")
    found = testing.run_here(
        options, forge.target, tmp_path / "tests", folder, [], require_gpu, results
    )
    assert found == code
    dist = tmp_path / "new"
    testing.keep_record(results, wheel, forge.target, dist, code, is_asked=require_gpu)
    records = [json.loads(x.read_text()) for x in dist.glob("tests/*/*.json")]
    said = [(x["passed"], x["failed"], x["skipped"], x["sha256"]) for x in records]
    assert said == ([(*counts, sha256(wheel))] if counts else [])
    assert (dist / MARK).is_file() == bool(counts)


@pytest.mark.parametrize(
    ("command", "code"),
    [("true && false", 1), ("cd tests && test -f test_it.py && test", 0), ("exit 7;", 7)],
)
def test_the_command_of_a_project_is_the_shells(
    command: str, code: int, forge: Forge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = environments.Environment(Path(sys.prefix))
    monkeypatch.setattr(environments, "with_torch", lambda *_, **__: base)
    folder = sources_with_tests(tmp_path / "source", "")
    options = project.Project(tests=project.Tests(paths=("tests",), command=command))
    (tmp_path / "run").mkdir()
    given = tmp_path / "run", folder, ["two words", "=", "two words"], False, tmp_path
    assert testing.run_here(options, forge.target, *given) == code


def test_a_command_that_runs_no_pytest_cannot_require_a_gpu(
    forge: Forge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = environments.Environment(Path(sys.prefix))
    monkeypatch.setattr(environments, "with_torch", lambda *_, **__: base)

    def code(name: str, **asked: str) -> int:
        options = project.Project(tests=project.Tests(**asked))
        (tmp_path / name).mkdir()
        given = tmp_path / name, tmp_path, [], True, tmp_path
        return testing.run_here(options, forge.target, *given)

    assert code("taken", command="test --own = ", require_gpu="--own") == 0
    with pytest.raises(
        UserError, match=r"^--require-gpu: the tests' command \(true\) has run no pyt"
    ):
        code("ignored", command="true")


def test_a_record_is_of_the_file_that_was_tested(
    forge: Forge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build may put another one in its place meanwhile."""
    wheel, source = forge.wheel(), sources_with_tests(tmp_path / "source", "")
    tested = sha256(wheel)

    def run_here(options: object, target: object, folder: Path, *_: object) -> int:
        wheel.write_bytes(b"another")
        record = {"device": "CPU", "passed": 1, "failed": 0, "skipped": 0}
        (folder / testing.RECORD).write_text(json.dumps(record))
        return 0

    monkeypatch.setattr(testing, "install", lambda *_: None)
    monkeypatch.setattr(testing, "run_here", run_here)
    options = project.load(source / "pyproject.toml")
    cli.pipeline.test(options, forge.target, wheel, source, tmp_path / "dist", None)
    (record,) = (tmp_path / "dist" / "tests").glob("*/*.json")
    assert json.loads(record.read_text())["sha256"] == tested


def test_tests_that_take_too_long_have_failed(
    forge: Forge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a run that passed, for an index."""
    wheel, source = forge.wheel(), sources_with_tests(tmp_path / "source", "")
    options = project.load(source / "pyproject.toml")

    def run_here(*_: object) -> int:
        raise TestsError(testing.too_long(options))

    monkeypatch.setattr(testing, "install", lambda *_: None)
    monkeypatch.setattr(testing, "run_here", run_here)
    with pytest.raises(TestsError, match=r"^the tests took more than 60 minutes"):
        cli.pipeline.test(options, forge.target, wheel, source, wheel.parent, None)
    with pytest.raises(UserError, match=r"its tests failed in 3\.11-cpu$"):
        site.make_site(wheel.parent, tmp_path / "site", project.Project())


@pytest.mark.parametrize("paths", ['"tests"', '"tests/test_it.py", ".", "tests"'])
def test_links_lead_to_the_same_file_and_copy_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paths: str
) -> None:
    """One out of the sources may lead to a whole disk, and one to its own folder to no end."""
    folder = sources_with_tests(tmp_path / "source", "")
    (folder / "data" / "below").mkdir(parents=True)
    (folder / "data" / "below" / "x").write_text("x")
    outside = tmp_path / "outside"
    outside.mkdir()
    links = {
        "data": "../data",
        "x": "../data/below/x",
        "self": ".",
        "nowhere": "gone",
        "loop": "loop",
    }
    for name, there in {**links, "far": str(outside), "up": "../../outside"}.items():
        (folder / "tests" / name).symlink_to(there)
    monkeypatch.setattr(
        environments, "with_torch", lambda *_, **__: environments.Environment(outside)
    )
    table = TABLE.replace('["tests"]', f'[{paths}], command = "true"')
    (folder / "pyproject.toml").write_text(table)
    options = project.load(folder / "pyproject.toml")
    target = releases.load().target("3.11-cpu")
    testing.check_paths(options, folder)
    (tmp_path / "run").mkdir()
    assert testing.run_here(options, target, tmp_path / "run", folder, [], False, tmp_path) == 0
    made = tmp_path / "run" / "work" / "tests"
    assert [(made / x).read_text() for x in ("data/below/x", "x")] == ["x", "x"]
    assert {x.name for x in made.iterdir() if x.is_symlink()} >= {"self", "nowhere", "far", "up"}


def test_a_wheel_is_found_for_the_targets_that_it_works_with(forge: Forge, tmp_path: Path) -> None:
    wheel = forge.wheel()
    table = releases.load()
    os.mkfifo(tmp_path / "dist" / "pipe.whl")  # which holds nothing up
    assert testing.find_wheel(tmp_path / "dist", forge.target) == wheel
    for name in ("3.12-cpu", "3.11-cu128", "3.11-cpu-torch2.12"):
        with pytest.raises(UserError, match=f"there is no wheel for {name} in .*: build it with"):
            testing.find_wheel(tmp_path / "dist", table.target(name))


@pytest.mark.usefixtures("read_in_own_process")
def test_the_wheel_of_another_project_is_not_taken(forge: Forge, tmp_path: Path) -> None:
    wheel = forge.wheel()
    other = wheel.with_name(wheel.name.replace("tinyops", "other_ops"))
    other.write_bytes(wheel.read_bytes())
    wheel.with_name("loop.whl").symlink_to("loop.whl")
    assert testing.find_wheel(tmp_path / "dist", forge.target, "tinyops") == wheel
    with pytest.raises(UserError, match=r"several projects for 3\.11-cpu, other-ops and tiny"):
        testing.find_wheel(tmp_path / "dist", forge.target)
    assert testing.find_wheel(tmp_path / "dist", forge.target, "tinyops", "==1.0") == wheel
    said = r"^there is no wheel of tinyops==2 for 3\.11-cpu in .*: build it"
    with pytest.raises(UserError, match=said):
        testing.find_wheel(tmp_path / "dist", forge.target, "tinyops", "==2")
    table = "[project]\nname = 'Tiny_Ops'\n[tool.torchwheels]\n"
    (tmp_path / "pyproject.toml").write_text(table)
    assert project.load(tmp_path / "pyproject.toml").name == "tiny-ops"


def test_a_wheel_for_other_pythons_is_not_taken(forge: Forge, tmp_path: Path) -> None:
    """Which its metadata say, where its tag promises more."""
    table, python = releases.load(), "Requires-Python: >=3.12\n"
    metadata = forge.fitting_metadata()["METADATA"]
    forge.replaced["METADATA"] = python.encode() + metadata
    forge.target = table.target("3.12-cpu")
    forge.wheel()
    with pytest.raises(UserError, match=r"there is no wheel for 3\.11-cpu in "):
        testing.find_wheel(tmp_path / "dist", table.target("3.11-cpu"))


def test_a_wheel_that_is_named_is_for_the_targets_python(forge: Forge, tmp_path: Path) -> None:
    sources_with_tests(tmp_path / "source", "")
    given = [str(tmp_path / "source"), "--target=3.12-cpu", f"--wheel={forge.wheel()}"]
    said = r"^torchwheels: `--wheel` names tinyops-\S+, and 3\.12-cpu has Python 3\.12$"
    with pytest.raises(SystemExit, match=said):
        cli.main(["test", *given, "--backend=local"])
    (tmp_path / "source" / "setup.py").write_text("setup(\n    name='other',\n)")
    said = r"^torchwheels: `--wheel` names tinyops-\S+, and the sources are those of other$"
    with pytest.raises(SystemExit, match=said):
        cli.main(["test", *given, "--backend=local"])


@pytest.mark.parametrize(
    ("source", "project", "versions"),
    [
        ("Tiny_Ops==0.2", "tiny-ops", "==0.2"),
        ("tinyops", "tinyops", ""),
        ("tinyops @ git+https://localhost/other@v1", "tinyops", ""),
        ("git+https://localhost/other@v1", "", ""),
        (".", "", ""),
        ("of_setup", "tiny-ops", ""),
        ("of_extension", "", ""),
        ("of_table", "tiny-ops", ""),
    ],
)
def test_a_test_takes_the_wheel_of_the_project_that_is_named(
    source: str, project: str, versions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not another's, of which nothing else in `dist` may be."""
    asked: list[Any] = []

    def find(*given: Any) -> Path:
        asked.extend(given)
        raise UserError("enough")

    monkeypatch.setattr(testing, "find_wheel", find)
    monkeypatch.chdir(tmp_path)
    for folder, file, text in (
        ("of_setup", "setup.py", "setup(name='Tiny_Ops')"),
        ("of_extension", "setup.py", "Extension(\n    name='_C',\n)\nsetup(**options)"),
        ("of_table", "pyproject.toml", "[project]\nname = 'tiny-ops'\n"),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text(text)
    with pytest.raises(SystemExit, match="enough"):
        cli.main(["test", source, "--target=3.11-cpu", "--backend=local"])
    assert asked[2:] == [project, versions]


def test_report_and_index_hold_what_there_is(
    forge: Forge, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dist, wheel = tmp_path / "dist", forge.wheel()
    report = reports.write_report(wheel, project.Project())
    assert report["sha256"] == sha256(wheel)
    assert report["build"]["target"] == forge.target.name
    assert json.loads(reports.report_file(wheel).read_text()) == report
    assert site.make_site(dist, tmp_path / "site", project.Project()) == ["tinyops"]
    made = tmp_path / "site"
    page = (made / "index.html").read_text()
    assert f'pip install "tinyops=={report["version"]}" --extra-index-url' in page
    assert (made / report["version"].partition("+")[2] / "simple" / "tinyops").is_dir()
    listing = json.loads((made / "simple" / "tinyops" / "index.json").read_text())
    assert [x["filename"] for x in listing["files"]] == [wheel.name]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--isolated"]
    command += ["--only-binary=:all:", f"--dest={tmp_path / 'got'}", "--no-index"]
    command += [f"--find-links={(made / 'simple' / 'tinyops' / 'index.html').as_uri()}", "tinyops"]
    subprocess.run(command, check=True)
    assert (tmp_path / "got" / wheel.name).read_bytes() == wheel.read_bytes()


def test_refused_wheel_is_kept_by_a_name_that_nothing_installs(
    forge: Forge, tmp_path: Path
) -> None:
    forge.requires = []
    wheel, dist = forge.wheel(), tmp_path / "kept"
    kept = dist / f"{wheel.name}.refused"
    message = rf"(?s)is not fit to publish.*the wheel is kept as {re.escape(str(kept))}$"
    with pytest.raises(UserError, match=message), kept_if_refused(wheel, dist):
        reports.refuse([reports.audited(wheel, project.Project())])
    assert kept.read_bytes() == wheel.read_bytes()
    assert (dist / MARK).is_file()  # which has it count as no sources
    with pytest.raises(UserError, match="there is no wheel in"):
        reports.read_reports(dist, project.Project())
    forge.requires = ["torch==2.13.*"]
    with kept_if_refused(forge.wheel(), dist):
        reports.refuse([reports.audited(wheel, project.Project())])
    assert [*dist.iterdir()] == [dist / MARK]


@pytest.mark.usefixtures("read_in_own_process")
def test_a_name_has_one_content(forge: Forge, tmp_path: Path) -> None:
    """A wheel for all Pythons is built by one, whose record it has; each further one took its place."""
    forge.tag, dist = "cp310-abi3", tmp_path / "kept"
    forge.files = {"tinyops/_C.abi3.so": forge.files[LIBRARY]}
    first = forge.wheel()
    reports.write_report(first, project.Project())
    content = publish(first, dist).read_bytes()
    forge.target = releases.load().target("3.12-cpu")
    reports.write_report(forge.wheel(), project.Project())
    with pytest.raises(RefusedError) as error:
        publish(first, dist)
    assert str(error.value) == (
        f"{dist / first.name} is there already, built for 3.11-cpu, and a name has one content: delete the wheel "
        "first, or leave 3.12-cpu out of the targets, which the other may serve, too"
    )
    assert (dist / first.name).read_bytes() == content
    forge.target, forge.files["tinyops/more.py"] = releases.load().target("3.11-cpu"), b""
    reports.write_report(forge.wheel(), project.Project())
    assert (
        publish(first, dist).read_bytes() == first.read_bytes() != content
    )  # edited, and built again


def test_a_pipe_in_place_of_a_report_or_a_record_holds_nothing_up(
    forge: Forge,
) -> None:
    wheel = forge.wheel()
    os.mkfifo(reports.report_file(wheel))
    with pytest.raises(
        RefusedError, match=r"report\.json is no whole build report: delete it, and"
    ):
        reports.read_reports(wheel.parent, project.Project())
    reports.report_file(wheel).unlink()
    record = wheel.parent / "tests" / "3.11-cpu" / "a.json"
    record.parent.mkdir(parents=True)
    os.mkfifo(record)
    with pytest.raises(UserError, match=r"a\.json is no whole record of tests: delete it, and run"):
        reports.read_reports(wheel.parent, project.Project())


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "5", '{"tests": 5}', '{"tests": [{"target": "", "device": "", "passed": 1, "failed": null}]}',
        '{"options": {"tests": "\\ud800"}}', "\xe9", "[" * 100_000,
    ],
)  # fmt: skip
def test_a_damaged_report_is_not_forgotten(
    forge: Forge, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may have said that tests failed."""
    wheel, file = forge.wheel(), reports.report_file(forge.wheel())
    (sound,) = reports.read_reports(wheel.parent, project.Project())
    changed = {**sound, **json.loads(text)} if text.startswith("{") else text
    content = changed if isinstance(changed, str) else json.dumps(changed)
    file.write_text(content, encoding="latin-1")
    before = file.read_bytes()
    for words in (["audit"], ["index", f"--site={tmp_path / 'site'}"]):
        with pytest.raises(SystemExit) as error:
            cli.main([*words, f"--dist={wheel.parent}"])
        assert error.value.code == RefusedError.code
        assert f"torchwheels: {file} is no whole build report: delete" in capsys.readouterr().err
        assert file.read_bytes() == before
    file.unlink()
    assert reports.read_reports(wheel.parent, project.Project()) == [sound]


def test_a_failure_counts_whatever_became_of_the_variant(forge: Forge) -> None:
    wheel = forge.wheel()
    (sound,) = reports.read_reports(wheel.parent, project.Project())
    run = {"target": "3.11-cpu", "device": "CPU", "passed": 1, "failed": 1, "sha256": sha256(wheel)}
    gone = {"wheel": "gone.whl", "sha256": ""}
    reports.write({**sound, "tests": [run], "variant": gone}, wheel)
    with pytest.raises(RefusedError, match=r"its tests failed in 3\.11-cpu$"):
        reports.read_reports(wheel.parent, project.Project())


def test_an_index_is_made_of_no_links(forge: Forge, tmp_path: Path) -> None:
    """They may lead to anybody's files, or to themselves."""
    dist, outside = forge.wheel().parent, tmp_path / "outside"
    (outside / "secrets").mkdir(parents=True)
    for name, to in (
        ("docs", outside),
        ("docs/index.html", outside / "secrets"),
        ("docs/a/b", outside),
        ("docs/loop", dist / "docs" / "loop"),
        ("docs", dist / "docs"),
        ("tests", outside),
        ("tests/3.11-cpu", outside),
        ("tests/3.11-cpu/a.json", outside / "gone"),
        ("tests", dist / "tests"),
    ):
        (dist / name).parent.mkdir(parents=True, exist_ok=True)
        (dist / name).symlink_to(to)
        said = f"^{dist / name} is a link, and an index would publish what it leads to: put a copy"
        with pytest.raises(RefusedError, match=said):
            site.make_site(dist, tmp_path / "site", project.Project())
        (dist / name).unlink()
        for folder in ("docs", "tests"):
            shutil.rmtree(dist / folder, ignore_errors=True)
    assert not (tmp_path / "site").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["build", ".", "--target=3.11-cpu", "--backend=local", "--dist=loop"], "`--dist` names loop, but loop is no"),
        (["build", ".", "--target=3.11-cpu", "--backend=local", "--subdirectory=loop"], "the source has neither a"),
        (["audit", "--dist=loop"], "there is no wheel in loop"),
        (["index", "--dist=loop"], "`--dist` names loop, but loop is no folder: name one"),
        (["index", "--site=loop"], ".*loop is no folder: `--site` names one"),
        (["index", "--site=loop/x"], "`--site` names .*loop, but .*loop is no folder: name one"),
        (["merge", "dist", "--dist=loop/x"], "`--dist` names loop/x, but .*loop is no folder: name one"),
    ],
)  # fmt: skip
def test_a_link_to_itself_is_no_folder(
    forge: Forge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    forge.wheel()
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    with pytest.raises(SystemExit) as error:
        cli.main(words)
    message = capsys.readouterr().err if isinstance(error.value.code, int) else error.value.code
    assert re.match(f"torchwheels: {said}", (message or "").splitlines()[-1])


def test_wheels_of_several_builds_are_merged_where_a_name_has_one_content(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where two targets give one `cp310-abi3` wheel, of which the last one would win."""
    for part, content in (("one", "x"), ("two", "x"), ("three", "y")):
        (tmp_path / part / "variants").mkdir(parents=True)
        (tmp_path / part / "variants" / "a-1-py3-none-any-cu130.whl").write_text(content)
        (tmp_path / part / f"{part}-1-py3-none-any.report.json").write_text(part)
        (tmp_path / part / "a-1-py3-none-any.whl").write_text("a")
    dist, parts = tmp_path / "dist", [str(tmp_path / x) for x in ("one", "two", "three")]
    cli.main(["merge", *parts[:2], f"--dist={dist}"])
    assert f"torchwheels: put 4 files into {dist}\n" in capsys.readouterr().out
    assert sorted(x.name[:3] for x in dist.rglob("*.report.json")) == ["one", "two"]
    with pytest.raises(SystemExit) as error:
        cli.main(["merge", *parts, f"--dist={dist}"])
    with pytest.raises(SystemExit, match=r"^torchwheels: there is no folder none: name those in"):
        cli.main(["merge", *parts[:1], "none", f"--dist={dist}"])
    for folder in (tmp_path / "empty", tmp_path):  # the second is around what builds left
        folder.mkdir(exist_ok=True)
        with pytest.raises(SystemExit, match=rf"^torchwheels: there is no wheel in {folder}: name"):
            cli.main(["merge", str(folder), f"--dist={tmp_path / 'other'}"])
    assert error.value.code == RefusedError.code
    assert "has the name of a file with another content, " in capsys.readouterr().err
    assert (dist / "variants" / "a-1-py3-none-any-cu130.whl").read_text() == "x"
    for name in ("setup.py", "a.report.json", "b.json", "builds/notes.txt", "tests/test_a.py"):
        for place, text in ((tmp_path / "one", "theirs"), (dist, "mine")):
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).write_text(text)
        cli.main(["merge", *parts[:2], f"--dist={dist}"])
        said = f"torchwheels: {tmp_path / 'one' / name} is left out: it is no wheel, and no record"
        assert said in capsys.readouterr().err
        assert (dist / name).read_text() == "mine"
        (dist / name).unlink()
        cli.main(["merge", *parts[:2], f"--dist={dist}"])
        assert not (dist / name).exists()
        (tmp_path / "one" / name).unlink()
    (dist / "docs").mkdir()
    (dist / "docs" / "index.html").write_text("mine")
    (tmp_path / "one" / "docs").mkdir()
    (tmp_path / "one" / "docs" / "index.html").write_text("theirs")
    with pytest.raises(SystemExit):
        cli.main(["merge", *parts[:2], f"--dist={dist}"])
    assert (dist / "docs" / "index.html").read_text() == "mine"
    shutil.rmtree(tmp_path / "one" / "docs")
    name = "a-1-py3-none-any.report.json"
    for place, text in ((dist, "mine"), (tmp_path / "one", "theirs")):
        (place / name).write_text(text)
    (tmp_path / "one" / MARK).touch()  # which would have no sources be here
    (dist / MARK).unlink()
    cli.main(["merge", *parts[:2], f"--dist={dist}"])
    assert (dist / name).read_text() == "theirs"
    assert not (dist / MARK).exists()


def test_a_merge_leaves_nothing_out_in_silence(tmp_path: Path) -> None:
    part, dist = tmp_path / "part", tmp_path / "dist"
    for name, make in (
        ("gone-1-py3-none-any.whl", lambda path: path.symlink_to("nowhere")),
        ("pipe-1-py3-none-any.whl", os.mkfifo),
    ):
        part.mkdir()
        (part / "a-1-py3-none-any.whl").touch()
        make(part / name)
        with pytest.raises(SystemExit, match=rf"^torchwheels: {part}/{name} is no file, or a link"):
            cli.main(["merge", str(part), f"--dist={dist}"])
        assert not [*dist.glob("*.whl")]
        shutil.rmtree(part)


def test_a_command_without_a_source_is_about_the_project_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="no source is named, and there is no "):
        cli.main(["build", "--target=3.11-cpu"])
    text = '[tool.torchwheels]\nsource = "nothing here"\n'
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(SystemExit, match="/nothing here: a source is a folder"):
        cli.main(["build", "--target=3.11-cpu", "--backend=local"])


@pytest.mark.parametrize("source", ["x==1.2", "git+https://localhost/x@v1", "../x", "y"])
def test_the_source_of_a_table_is_what_the_command_line_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """A folder is relative to the table, wherever the command runs; nothing else is a path."""

    def fetched(source: str, *_: str) -> None:
        raise UserError(f"asked for {source}")

    monkeypatch.chdir(tmp_path)
    for folder in ("x", "own/y"):
        (tmp_path / folder).mkdir(parents=True)
    file = tmp_path / "own" / "pyproject.toml"
    file.write_text(f'[tool.torchwheels]\nsource = "{source}"\n')
    monkeypatch.setattr(cli.sources, "fetched", fetched)
    asked = str(tmp_path / "own" / source) if source in ("../x", "y") else source
    for config in (file, Path("own/pyproject.toml")):
        with pytest.raises(SystemExit) as ended:
            cli.main(["build", "--target=3.11-cpu", "--backend=local", f"--config={config}"])
        expected = asked if config == file else asked.removeprefix(f"{tmp_path}/")
        assert ended.value.code == f"torchwheels: asked for {expected}"


def test_index_replaces_no_file_that_was_published(forge: Forge, tmp_path: Path) -> None:
    """Whoever has its hash in a lock file would no longer get it."""
    wheel, made = forge.wheel(), tmp_path / "site"
    site.make_site(tmp_path / "dist", made, project.Project())
    site.make_site(tmp_path / "dist", made, project.Project())
    before = {x: x.read_bytes() for x in made.rglob("*") if x.is_file()}
    forge.files["tinyops/more.py"] = b""
    forge.wheel()
    why = (
        rf"^{made}/wheels/{re.escape(wheel.name)} is another file .* a new version, or delete it if"
    )
    with pytest.raises(RefusedError, match=why):
        site.make_site(tmp_path / "dist", made, project.Project())
    assert {x: x.read_bytes() for x in made.rglob("*") if x.is_file()} == before


def test_there_is_an_index_whenever_one_is_made_anew(
    forge: Forge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is killed between two names leaves none, and the next run clears what is left beside it away."""
    forge.wheel()
    made = tmp_path / "site"
    site.make_site(tmp_path / "dist", made, project.Project())
    before = made.stat().st_ino
    monkeypatch.setattr(Path, "rename", lambda *_: pytest.fail("it was away"))
    site.make_site(tmp_path / "dist", made, project.Project())
    assert made.stat().st_ino != before
    assert {x.name for x in tmp_path.iterdir()} == {"dist", "site"}


def test_a_file_system_that_cannot_exchange_folders(
    forge: Forge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forge.wheel()
    monkeypatch.setattr(site.files, "exchanged", lambda *_: False)
    for _ in range(2):
        site.make_site(tmp_path / "dist", tmp_path / "site", project.Project())
    assert (tmp_path / "site" / "index.html").is_file()


def test_index_is_in_no_folder_that_it_reads(forge: Forge, tmp_path: Path) -> None:
    dist = forge.wheel().parent
    (dist / "docs").mkdir()
    (tmp_path / "link").symlink_to(dist / "docs")
    inside = "docs", "docs/site", "tests", "variants", "builds/site"
    for place in (*(dist / x for x in inside), tmp_path / "link" / "a" / "site"):
        with pytest.raises(
            UserError, match=r"site` names .*, and .* is of the wheels: name a fold"
        ):
            site.make_site(dist, place, project.Project())
    assert {x.name for x in dist.iterdir() if x.is_dir()} == {"docs"}
    assert not [*(dist / "docs").iterdir()]


def test_index_names_the_metadata_of_its_own_copy(
    forge: Forge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build may put another wheel in the place of the one that was copied."""
    wheel = forge.wheel()
    old, hash_of = metadata_of(wheel), site.sha256

    def built_again(path: Path) -> str:
        forge.summary = "another one"
        forge.wheel()
        return hash_of(path)

    monkeypatch.setattr(site, "sha256", built_again)
    site.make_site(wheel.parent, tmp_path / "site", project.Project())
    assert metadata_of(wheel) != old
    assert (tmp_path / "site" / "wheels" / f"{wheel.name}.metadata").read_bytes() == old


def test_index_deletes_nothing_of_others(forge: Forge, tmp_path: Path) -> None:
    forge.wheel()
    made = tmp_path / "site"
    made.mkdir()
    (tmp_path / "link").symlink_to(made)
    site.make_site(tmp_path / "dist", tmp_path / "link", project.Project())
    assert (tmp_path / "link").is_symlink() and (made / "index.html").is_file()
    (made / "wheels" / "thesis.txt").write_text("mine")
    for place in (made, tmp_path / "link", tmp_path / "dist"):
        with pytest.raises(UserError, match=r"holds .*, which no index of torchwheels has written"):
            site.make_site(tmp_path / "dist", place, project.Project())
    assert (made / "wheels" / "thesis.txt").read_text() == "mine"
    with pytest.raises(UserError, match=r"thesis\.txt is no folder: `--site` names one"):
        site.make_site(tmp_path / "dist", made / "wheels" / "thesis.txt", project.Project())
    (made / "wheels" / "thesis.txt").unlink()
    (made / "mine").symlink_to(tmp_path / "dist")
    with pytest.raises(UserError, match=r"site holds mine, which no index of torchwheels has"):
        site.make_site(tmp_path / "dist", made, project.Project())
    (made / "mine").unlink()
    page = (made / "index.html").read_text()
    for spoil in (
        lambda file: file.write_text("mine"),
        lambda file: file.symlink_to(tmp_path / "dist"),
        os.mkfifo,
    ):
        (made / "index.html").unlink()
        spoil(made / "index.html")
        with pytest.raises(
            UserError, match=r"holds index\.html, which no index of torchwheels has"
        ):
            site.make_site(tmp_path / "dist", made, project.Project())
    (made / "index.html").unlink()
    (made / "index.html").write_text(page)
    site.make_site(tmp_path / "dist", made, project.Project())
    (made / MARK).write_text(
        "\0".join(x.partition("//")[0] for x in (made / MARK).read_text().split("\0"))
    )
    site.make_site(tmp_path / "dist", made, project.Project())  # one of torchwheels 0.1
    with pytest.raises(UserError, match=r"^/ holds .*, which no index of torchwheels has written"):
        site.make_site(tmp_path / "dist", Path("/"), project.Project())


@pytest.mark.parametrize(
    "words",
    [
        ["build", "--target=3.11-cpu", "--backend=local", "--dist=/proc/x"],
        ["test", "--target=3.11-cpu", "--backend=local", "--dist=/proc/x", "--wheel={}"],
        ["merge", "dist", "--dist=/proc/x"],
        ["index", "--dist=/proc/x"],
        ["index", "--site=/proc/x/site"],
    ],
)
def test_a_folder_that_cannot_be_written_is_named_before_all_work(
    forge: Forge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError

    wheel = forge.wheel()
    sources_with_tests(tmp_path / "source", "")
    monkeypatch.chdir(tmp_path / "source")
    (tmp_path / "source" / "dist").symlink_to(wheel.parent)
    monkeypatch.setattr(cli.pipeline, "run", never)
    monkeypatch.setattr(cli.pipeline, "test", never)
    option = "--site" if "--site=/proc/x/site" in words else "--dist"
    said = f"^torchwheels: `{option}` names /proc/x, where nothing can be written \\(No such file"
    with pytest.raises(SystemExit, match=said):
        cli.main([word.format(wheel) for word in words])


def test_a_folder_of_wheels_that_may_not_be_read(
    forge: Forge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not without wheels."""

    def unreadable(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    dist = forge.wheel().parent
    monkeypatch.setattr(Path, "iterdir", unreadable)
    for words in (["audit"], ["index", f"--site={tmp_path / 'site'}"]):
        with pytest.raises(SystemExit, match=f"^torchwheels: permission denied: {dist}"):
            cli.main([*words, f"--dist={dist}"])


def test_two_indexes_are_made_side_by_side(forge: Forge, tmp_path: Path) -> None:
    forge.wheel()
    command = [sys.executable, "-m", "torchwheels", "index"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "torchwheels" / "src")}
    both = [
        subprocess.Popen(command, cwd=tmp_path, env=variables, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [each.communicate()[1] for each in both] == ["", ""]
    assert [*(tmp_path / "site").glob("wheels/*.whl")]


def test_text_is_text_everywhere(forge: Forge, tmp_path: Path) -> None:
    """Also where the system's encoding is ASCII."""
    forge.summary, forge.files["tinyops/größe.txt"] = "Monte Carlo — in Zürich", b""
    forge.wheel()
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "torchwheels" / "src"), "LC_ALL": "C"}
    variables |= {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    page = tmp_path / "dist" / "docs" / os.fsdecode(b"caf\xe9") / "index.html"
    page.parent.mkdir(parents=True)
    page.touch()
    for words in (["audit"], ["audit", "--torch=2.13"], ["index"], ["index"]):
        done = subprocess.run(
            [sys.executable, "-m", "torchwheels", *words],
            cwd=tmp_path, env=variables, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert done.stderr == ""
    page = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert "<b>tinyops</b>: Monte Carlo — in Zürich</p>" in page
    report = next((tmp_path / "dist").glob("*.report.json"))
    assert json.loads(report.read_text())["summary"] == "Monte Carlo — in Zürich"


def test_index_shows_names_as_text(tmp_path: Path) -> None:
    file = {"url": "x.whl", "hashes": {"sha256": "1"}, "core-metadata": {"sha256": "2"}}
    files = [{**file, "filename": "<b>.whl", "requires-python": None}]
    site.write_listing(tmp_path, {"projects": [{"name": "<i>"}], "files": files})
    page = (tmp_path / "index.html").read_text()
    assert "&lt;b&gt;.whl" in page and "&lt;i&gt;" in page
    assert "<b>" not in page and "<i>" not in page


def test_page_offers_what_there_is_and_says_how_to_install_it(forge: Forge, tmp_path: Path) -> None:
    dist, wheel = tmp_path / "dist", forge.wheel()
    report = reports.write_report(wheel, project.Project())
    newest = "Python 3.14 with the newest torch, 2.99"  # which a build report may have got later
    run = {"target": newest, "device": "CPU", "passed": 3, "failed": 1}
    reports.report_file(wheel).write_text(json.dumps({**report, "tests": [run, run]}))
    (dist / "docs").mkdir()
    (dist / "docs" / "index.html").write_text("how to use it")
    site.make_site(dist, tmp_path / "site", project.Project())
    page = (tmp_path / "site" / "index.html").read_text()
    (link,) = re.findall(r'<a href="(\S+)">Documentation</a>', page)
    assert (tmp_path / "site" / link / "index.html").read_text() == "how to use it"
    (data,) = re.findall(r'<form name="tinyops" data-rows="(.*)"><output>', page)
    assert json.loads(html.unescape(data)) == {"3.11 2.13 CPU": wheel.name}
    (row,) = re.findall(rf'<tr id="{re.escape(wheel.name)}">(.*)</tr>', page)
    assert f'pip install "tinyops=={report["version"]}" --extra-index-url' in row
    one = f"3 passed, 1 failed in {newest} on CPU"
    assert f"<td>{one}; {one}<td>" in row


def test_page_prefers_the_newest_version_and_the_wheel_without_a_label() -> None:
    works_with, requires = {"python": ""}, ["torch>=2.10", "numpy"]
    common = {"works_with": works_with, "requires": requires, "requires_python": ">=3.12"}
    common["tags"] = ["py3-none-linux_x86_64"]
    build = {"target": "3.12-cpu", "python": "3.12", "torch": "2.13.0", "architectures": []}
    wheels = [
        {"version": version, "build": {**build, "cuda": cuda}, **common}
        for version, cuda in (("2.0", "12.4"), ("2.0+cu130", "13.0"), ("1.0", "12.4"))
    ]
    wheels.append({**wheels[1], "version": "2.1+cu130"})
    found = {key: wheel["version"] for key, wheel in site.choices(wheels).items()}
    assert found["3.12 2.10 12.8"] == found["3.14 2.13 CPU"] == "2.0"
    assert found["3.12 2.13 13.0"] == "2.1+cu130"
    assert next(iter(found)) == "3.15 2.15 13.2"
    pythons, torches, _ = ({*each} for each in zip(*map(str.split, found), strict=True))
    assert pythons == {"3.12", "3.13", "3.14", "3.15", "3.13t", "3.14t", "3.15t"}
    assert torches == {f"2.{minor}" for minor in range(10, 16)}


def test_page_offers_what_is_for_a_target_that_the_table_no_longer_has() -> None:
    build = {
        "target": "3.9-cu118-torch2.1-aarch64",
        "python": "3.9",
        "torch": "2.1.2",
        "cuda": "11.8",
        "architectures": [],
    }
    wheel = {
        "version": "1.0+cu118.torch2.1", "build": build, "tags": ["cp39-cp39-manylinux_2_17_aarch64"],
        "works_with": {"python": "==3.9.*"}, "requires": ["torch==2.1.*"], "requires_python": None,
    }  # fmt: skip
    assert site.choices([wheel]) == {"3.9 2.1 11.8-aarch64": wheel}


def run_of_tests(wheel: Path, failed: int) -> None:
    """Leaves the record of a run beside the wheel."""
    run = {"target": "3.11-cpu", "device": "CPU", "passed": 3, "failed": failed}
    record = wheel.parent / "tests" / "3.11-cpu" / "record.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({**run, "sha256": sha256(wheel)}))


@pytest.mark.usefixtures("read_in_own_process")
def test_index_refuses_what_failed(
    forge: Forge, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reasons of all wheels at once; the old site stays."""
    dist, made = tmp_path / "dist", tmp_path / "site"
    made.mkdir()
    forge.unrecorded = {"tinyops/more.py": b""}
    wheel = forge.wheel()
    spoiled = wheel.rename(dist / wheel.name.replace("1.0+", "2.0+"))
    forge.unrecorded = {}
    sound = forge.wheel()
    reports.write_report(sound, project.Project())
    run_of_tests(sound, failed=1)  # after the audit
    with pytest.raises(SystemExit) as error:
        cli.main(["index", f"--dist={dist}", f"--site={made}"])
    assert error.value.code == RefusedError.code
    said = capsys.readouterr().err
    assert " is not fit to publish:\n" in said
    assert f"{sound.name} is not fit to publish:\n  its tests failed in 3.11-cpu\n" in said
    assert (
        f"{spoiled.name} is not fit to publish:\n  label: its metadata have the version 1" in said
    )
    assert "record: its RECORD is not right about tinyops/more.py" in said
    assert [*made.iterdir()] == []
    assert reports.report_file(spoiled).is_file()


@pytest.mark.parametrize("code", [-11, 139, 1, 4])
def test_index_refuses_a_wheel_whose_tests_died(forge: Forge, tmp_path: Path, code: int) -> None:
    """A segmentation fault leaves no record of the run, nor does a conftest.py that cannot be imported."""
    (tmp_path / "results").mkdir()
    wheel = forge.wheel()
    testing.keep_record(tmp_path / "results", wheel, forge.target, wheel.parent, code)
    with pytest.raises(UserError, match=r"not fit to publish:\n.*its tests failed in 3\.11-cpu"):
        site.make_site(wheel.parent, tmp_path / "site", project.Project())


@pytest.mark.parametrize(
    ("counts", "code", "failed"),
    [((0, 0), 0, 1), ((0, 0), 5, 1), ((3, 0), 139, 1), ((3, 2), 1, 2), ((3, 0), 0, 0)],
    ids=["collected", "none chosen", "died at its end", "failed", "passed"],
)
def test_a_failure_is_forgotten_by_no_run_but_one_that_passes(
    forge: Forge, tmp_path: Path, counts: tuple[int, int], code: int, failed: int
) -> None:
    wheel = forge.wheel()
    for (passed, bad), ended in (((2, 1), 1), (counts, code)):
        record = {"device": "CPU", "passed": passed, "failed": bad, "skipped": 0}
        (tmp_path / testing.RECORD).write_text(json.dumps(record))
        testing.keep_record(tmp_path, wheel, forge.target, wheel.parent, ended)
    (record,) = reports.tests_of(wheel.parent / "tests", sha256(wheel))
    assert record["failed"] == failed


def test_what_the_user_asks_of_pytest_says_nothing_of_the_wheel(
    forge: Forge, tmp_path: Path
) -> None:
    """Exit code 4 is that of an option that there is not, too."""
    wheel = forge.wheel()
    testing.keep_record(tmp_path, wheel, forge.target, wheel.parent, 4, is_asked=True)
    assert reports.tests_of(wheel.parent / "tests", sha256(wheel)) == []


def test_options_of_another_version_do_not_stop_an_index(forge: Forge) -> None:
    """A report of a wheel of another project has them."""
    wheel = forge.wheel()
    report = reports.write_report(wheel, project.Project())
    report["options"] = {"of-2027": 1, "yanked": 5, "allow-libraries": ["libx.so"]}
    reports.write(report, wheel)
    assert reports.promised(wheel, project.Project()).allow_libraries == ("libx.so",)
    reports.write({**report, "options": [1]}, wheel)
    with pytest.raises(RefusedError, match="is no whole build report"):
        reports.promised(wheel, project.Project())


@pytest.mark.parametrize("order", [("passed", "failed"), ("failed", "passed")])
def test_a_failure_in_any_folder_stays_one_in_a_merge(
    forge: Forge, tmp_path: Path, order: tuple[str, str]
) -> None:
    wheel = forge.wheel()
    for name in order:
        (tmp_path / name).mkdir()
        shutil.copy(wheel, tmp_path / name)
        record = {"device": "CPU", "passed": 1, "failed": int(name == "failed"), "skipped": 0}
        (tmp_path / testing.RECORD).write_text(json.dumps(record))
        testing.keep_record(tmp_path, wheel, forge.target, tmp_path / name, record["failed"])
    dist = tmp_path / "merged"
    cli.main(["merge", *(str(tmp_path / x) for x in order), f"--dist={dist}"])
    (record,) = reports.tests_of(dist / "tests", sha256(wheel))
    assert record["failed"] == 1
    cli.main(["merge", str(tmp_path / "passed"), f"--dist={dist}"])  # of a later run
    (record,) = reports.tests_of(dist / "tests", sha256(wheel))
    assert record["failed"] == 0


@pytest.mark.parametrize("linked", ["tests", "tests/3.11-cpu", "docs/1.0/secret.txt"])
def test_a_merge_follows_no_link_into_records_or_documentation(tmp_path: Path, linked: str) -> None:
    part = tmp_path / "part"
    (part / linked).parent.mkdir(parents=True)
    (part / "a-1-py3-none-any.whl").touch()
    (part / linked).symlink_to(tmp_path)
    with pytest.raises(SystemExit) as error:
        cli.main(["merge", str(part), f"--dist={tmp_path / 'dist'}"])
    assert error.value.code == RefusedError.code
    assert not [*(tmp_path / "dist").glob("*.whl")]


def test_the_last_run_of_a_command_of_the_project_is_what_counts(
    forge: Forge, tmp_path: Path
) -> None:
    """It leaves no record, and `make` says 2 of a failure."""
    (tmp_path / "results").mkdir()
    wheel, made = forge.wheel(), tmp_path / "site"
    for code, stopped in ((2, 130), (0, 143)):
        for each in (code, stopped):
            testing.keep_record(
                tmp_path / "results", wheel, forge.target, wheel.parent, each, own_command=True
            )
        if code:
            with pytest.raises(UserError, match=r"its tests failed in 3\.11-cpu$"):
                site.make_site(wheel.parent, made, project.Project())
    site.make_site(wheel.parent, made, project.Project())
    (run,) = json.loads(reports.report_file(wheel).read_text())["tests"]
    assert (run["device"], run["passed"], run["failed"]) == ("unknown", 1, 0)


def test_a_command_of_the_project_that_passes_is_of_all_devices(
    forge: Forge, tmp_path: Path
) -> None:
    """Else what pytest has said before, on a GPU, say, would count for ever; a run that dies forgets no failure."""
    wheel, dist = forge.wheel(), tmp_path / "dist"
    record, made = tmp_path / testing.RECORD, tmp_path / "site"

    def run(device: str, code: int) -> None:
        said = {"device": device, "passed": 1, "failed": code, "skipped": 0}
        record.write_text(json.dumps(said if device else {}))
        testing.keep_record(tmp_path, wheel, forge.target, dist, code, own_command=True)

    for device, code, fails in (
        ("CPU", 1, 1), ("H200", 1, 2), ("", 1, 3), ("CPU", 0, 1), ("", 0, 0), ("H200", 1, 1), ("", 0, 0),
    ):  # fmt: skip
        run(device, code)
        for _ in range(2):
            found = reports.audited(wheel, project.Project())
            reports.write(found, wheel)
            assert len(reports.problems(found)) == fails
    site.make_site(dist, made, project.Project())


@pytest.mark.parametrize("failure", [None, {"device": "CPU", "passed": 2, "failed": 1}])
def test_tests_that_pass_in_the_end_are_what_counts(
    forge: Forge, tmp_path: Path, failure: dict[str, object] | None
) -> None:
    """Also where an index has written the failure, or that a run died, into the build report."""
    wheel, passed = forge.wheel(), {"device": "CPU", "passed": 3, "failed": 0, "skipped": 0}
    dist, made = wheel.parent, tmp_path / "site"
    for number, found in enumerate((passed, failure, passed)):
        results = tmp_path / str(number)
        results.mkdir()
        if found:
            (results / testing.RECORD).write_text(json.dumps(found))
        testing.keep_record(results, wheel, forge.target, dist, 0 if found is passed else 1)
        if found is passed:
            site.make_site(dist, made, project.Project())
            continue
        for _ in range(2):
            with pytest.raises(UserError, match=r"its tests failed in 3\.11-cpu$"):
                site.make_site(dist, made, project.Project())
    (run,) = json.loads(reports.report_file(wheel).read_text())["tests"]
    assert run == {"target": "3.11-cpu", "sha256": sha256(wheel), **passed}
    (record,) = dist.glob("tests/*/*.json")  # without which a site is made of what was published
    record.unlink()
    site.make_site(dist, made, project.Project())
    assert json.loads(reports.report_file(wheel).read_text())["tests"] == [run]


@pytest.mark.usefixtures("read_in_own_process")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        (b"tinyops-1.0.whl", "is not named <project>-<version>-"),
        (b"tinyops-1.0-cp311-cp311-linux_x86_64.whl", "its metadata have the version 1.0+cpu.torch2.13"),
        (b"tinyops-1.0-cp311-cp311-linux_x86_64-cpu.whl", "is a wheel's variant: it belongs into"),
        (b"caf\xe9-1.0-cp311-cp311-linux_x86_64.whl", "caf\\udce9-1.0-cp311-cp311-linux_x86_64.whl' has characters"),
        (b"tiny\nops-1.0-cp311-cp311-linux_x86_64.whl", "wheel has: name it as its build did, or delete it\n"),
        (b"Tinyops-1.0+cpu.torch2.13-cp311-cp311-manylinux_2_5_x86_64.whl", "are of one version and for the same ma"),
    ],
)  # fmt: skip
def test_a_wheel_that_no_index_takes_ends_with_its_exit_code(
    forge: Forge, tmp_path: Path, name: bytes, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel, made = forge.wheel(), tmp_path / "site"
    shutil.copy(wheel, os.fsdecode(bytes(wheel.parent) + b"/" + name))
    with pytest.raises(SystemExit) as error:
        cli.main(["index", f"--dist={wheel.parent}", f"--site={made}"])
    assert (error.value.code, made.exists()) == (RefusedError.code, False)
    assert said in capsys.readouterr().err


def test_index_checks_what_has_no_report_of_its_own(forge: Forge, tmp_path: Path) -> None:
    wheel, made = forge.wheel(), tmp_path / "site"
    site.make_site(tmp_path / "dist", made, project.Project())
    assert (made / "wheels" / reports.report_file(wheel).name).is_file()
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("more", "")
    with pytest.raises(UserError, match=r"not fit to publish:\n.*RECORD is not right about more"):
        site.make_site(tmp_path / "dist", made, project.Project())


def test_an_index_that_is_interrupted_leaves_the_old_one(
    forge: Forge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forge.wheel()
    made = tmp_path / "site"
    site.make_site(tmp_path / "dist", made, project.Project())
    before = {x: x.stat().st_ino for x in made.rglob("*")}
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    monkeypatch.setattr(site.files, "exchanged", lambda *_: False)
    with pytest.raises(KeyboardInterrupt):
        site.make_site(tmp_path / "dist", made, project.Project())
    assert {x: x.stat().st_ino for x in made.rglob("*")} == before


def test_a_report_that_is_interrupted_leaves_the_old_one(
    forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = forge.wheel()
    reports.write({"old": True}, wheel)

    def interrupted(self: Path, text: str, encoding: str) -> int:
        with self.open("w", encoding=encoding) as file:
            file.write(text[:5])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reports.write({"new": True}, wheel)
    assert json.loads(reports.report_file(wheel).read_text()) == {"old": True}


def test_a_wheel_is_audited_by_the_table_of_its_own_project(
    forge: Forge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    """The project at hand allows 1 byte; the other was built with a table that allows a library."""
    forge.files["tinyops.libs/libjpeg.so.8"] = forge.compile("")
    wheel = forge.wheel()
    table = "[tool.torchwheels]\nsize-budget = 0.000001\n"
    (tmp_path / "pyproject.toml").write_text(table)
    (tmp_path / "other.toml").write_text("allow-libraries = ['libjpeg*']\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        cli.main(["audit", str(wheel)])
    assert re.search(r"bundled_libraries: .*\n  size: ", capsys.readouterr().err)
    reports.report_file(wheel).unlink()  # whose table is the one at hand
    (tmp_path / "pyproject.toml").write_text(f"[project]\nname = 'own'\n{table}")
    with pytest.raises(SystemExit):
        cli.main(["audit", str(wheel)])
    said = capsys.readouterr().err
    assert "it bundles tinyops.libs/libjpeg.so.8" in said
    assert "over the" not in said
    reports.refuse([reports.write_report(wheel, project.load(tmp_path / "other.toml"))])
    target = publish(wheel, tmp_path / "out")
    cli.main(["audit", str(target)])
    cli.main(["index", "--dist=out"])
    wheel.unlink()
    reports.report_file(wheel).unlink()
    target.rename(wheel)
    with pytest.raises(SystemExit):
        cli.main(["index"])
    assert re.search(r"not fit to publish:\n.*bundles", capsys.readouterr().err)


def test_audit_says_what_is_not_fit(
    forge: Forge, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forge.unrecorded = {"tinyops/more.py": b""}
    wheel = forge.wheel()
    with pytest.raises(SystemExit) as error:
        cli.main(["audit", str(wheel)])
    said = capsys.readouterr()
    assert error.value.code == RefusedError.code
    assert "not fit to publish" in said.err
    assert "record: its RECORD is not right about tinyops/more.py" in said.err
    assert "  FAIL  record  its RECORD" in said.out


def test_matrix_is_the_projects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = sources_with_tests(tmp_path / "source", "") / "pyproject.toml"
    cli.main(["matrix", "small", f"--config={config}"])
    job = '[{"target": "3.11-cpu", "label": "cpu", "python": "3.11", "runner": "ubuntu-24.04"}]'
    assert capsys.readouterr().out == f"build={job}\ntest={job}\ngpu=[]\n"
    cli.main(["matrix", "full", f"--config={config}"])
    jobs = dict(line.split("=", 1) for line in capsys.readouterr().out.splitlines())
    targets = {name: [x["target"] for x in json.loads(text)] for name, text in jobs.items()}
    cuda = [f"3.1{minor}-cu130" for minor in range(5)]
    assert targets == {
        "build": [*cuda, "3.11-cpu"],
        "test": [*cuda, "3.11-cpu"],
        "gpu": ["3.10-cu130"],
    }


def test_one_wheel_covers_all_targets_of_a_stable_project() -> None:
    options = project.Project(
        stable="2.13.0", release="12.4", targets=("3.11-*", "3.1?-cu128*", "3.12-release*")
    )
    built = {x.name: x.torch for x in options.targets_to_build(options.chosen_targets())}
    labels = ("cpu", "cu121", "cu124", "cu126", "cu128", "cu130", "cu132", "release")
    assert built == {f"3.11-{label}": "2.13.0" for label in labels}
    release = options.releases.target("3.12-release-torch2.5")
    assert (release.torch, release.label) == ("2.5.1", "release")
    assert release.architectures == releases.load().cudas["12.4"].architectures
    with pytest.raises(UserError, match=r"release has '12\.5', but a known CUDA version, such"):
        project.of_table({"release": "12.5"}, "the options")


def nox(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """nox, with the torchwheels of these tests."""
    path = str(Path(cli.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-m", "nox", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def maintained(folder: Path) -> Path:
    """A project with a noxfile of two lines."""
    sources_with_tests(folder, "")
    (folder / "noxfile.py").write_text(
        "from torchwheels.sessions import add_sessions\nadd_sessions()\n"
    )
    return folder


def test_two_lines_make_the_sessions(tmp_path: Path) -> None:
    folder = maintained(tmp_path / "source")
    own = [
        "test",
        "build",
        "build-TARGET",
        "test-TARGET",
        "reproduce",
        "audit",
        "merge",
        "index",
        "matrix",
    ]
    listing = r"^[*-] (\S+) -> (.*)$"
    done = nox(folder, "--list")
    assert [name for name, _ in re.findall(listing, done.stdout, re.MULTILINE)] == own
    done = nox(folder, "--list", "-s", "test-3.1[12]-cu*", "--session=build-3.11-cpu")
    listed = dict(re.findall(listing, done.stdout, re.MULTILINE))
    assert listed["test-3.1[12]-cu*"] == "Tests 3.11-cu130, 3.12-cu130."
    assert listed["build-3.11-cpu"] == "Builds 3.11-cpu."
    assert nox(folder, "-s", "build-TARGET").stdout.startswith(
        "torchwheels: there is no target 'TARGET': a target is"
    )


def test_a_pattern_stands_for_the_targets_of_a_session(tmp_path: Path) -> None:
    folder = maintained(tmp_path / "source")
    done = nox(folder, "-s", "test-3.1[12]-cu*", "--", "--backend=local")
    assert "there is no wheel for 3.11-cu130 in dist" in done.stdout
    assert "--target=3.12-cu130" not in done.stdout  # the first has failed
    done = nox(folder, "-s", "build-3.1[12]-cu*", "--", "--backend=local", "nothing==1")
    assert "--target=3.11-cu130 --target=3.12-cu130" in done.stdout


@pytest.mark.slow
def test_own_project(own_project: Path) -> None:
    """The example, from its sources to its index; installs torch: a minute, the first time."""
    done = nox(own_project, "-s", "test", "audit", "index", TORCHWHEELS_BACKEND="local")
    assert done.returncode == 0, done.stdout
    assert "torchwheels: 1 of 1 wheels are fit to publish" in done.stdout
    (file,) = (own_project / "site" / "wheels").glob("*.report.json")
    report = json.loads(file.read_text())
    assert report["wheel"].startswith("own_project-0.1+cpu.torch2.13-cp311-cp311-manylinux_2_")
    (run,) = report["tests"]
    assert (run["target"], run["passed"], run["skipped"]) == ("3.11-cpu", 2, 2)


def test_sessions_mask_what_they_print(tmp_path: Path) -> None:
    """nox says each command, and again where it fails."""
    source = "git+https://me:secret@127.0.0.1:9/x@v1"
    done = nox(maintained(tmp_path / "source"), "-s", "build-3.11-cpu", "--", source)
    assert "git+https://****@127.0.0.1:9/x@v1" in done.stdout
    assert "secret" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["-s", "build-3.14-cu121"],
            "there is no target '3.14-cu121' (torch 2.4.1 has no wheel for Python 3.14)",
        ),
        (["-s", "build", "--", "--backned=local"], "unrecognized arguments: --backned=local"),
        (["-s", "audit"], "torchwheels: there is no wheel in dist: build one first"),
        (
            ["-s", "test-3.11-cpu", "--", "--backend=local"],
            "there is no wheel for 3.11-cpu in dist: build it with `nox -s build-3.11-cpu`",
        ),
    ],
)
def test_errors_of_sessions(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = nox(maintained(tmp_path / "source"), *arguments)
    assert done.returncode != 0
    assert message in done.stdout
    assert "Traceback" not in done.stdout
