"""A farm of wheels: what it wants, what it lacks, what its builds leave, and what installers take from its index."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from conftest import ROOT
from test_variants import Served, _index_torches, _Quiet, do_not_audit, forge_target, published
from torchwheels import build, cli, environments, sources
from torchwheels.build import toolchain
from torchwheels.errors import BuildError, RefusedError, UserError
from torchwheels.farm import building, config, wanted
from torchwheels.farm import published as state
from torchwheels.options import project, releases
from torchwheels.run import testing
from torchwheels.system import MARK, processes

FILES = 'files = "https://example.org/{tag}"\n'


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=x", "-c", "user.email=x@localhost"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with tags, as its authors push it."""
    folder = tmp_path_factory.mktemp("pushed") / "tinyops"
    folder.mkdir()
    git(folder, "init", "--quiet")
    for tag in ("v0.9", "v1.0", "v1.1", "v1.2rc1", "nightly"):
        (folder / "setup.py").write_text(f"# {tag}\n")
        git(folder, "add", ".")
        git(folder, "commit", "--quiet", f"--message={tag}")
        git(folder, "tag", "--annotate", f"--message={tag}", tag)
    return folder


@pytest.fixture
def repository(pushed: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(pushed, tmp_path / "tinyops")


def written(folder: Path, *tables: str, first: str = FILES) -> config.Farm:
    (folder / "farm.toml").write_text(first + "".join(f"[[project]]\n{x}\n" for x in tables))
    return config.load(folder / "farm.toml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (FILES, "has no project: add a table"),
        (f'{FILES}project = "x"', "project is 'x', but tables are expected"),
        (f"{FILES}[[project]]\nversions = 1", "has no `source`"),
        (
            f'{FILES}[[project]]\nsource = "x"\nversions = 0',
            "versions is 0, but 'newest', a number",
        ),
        (f'{FILES}[[project]]\nsource = "x"\nversions = "new"', "versions is 'new', but"),
        (f'{FILES}[[project]]\nsource = "x"\nversion = 1', "did you mean 'versions'?"),
        (f'{FILES}[[project]]\nsource = "x"\npretend-gpus = true', "did you mean 'pretend-gpu'?"),
        (
            f'{FILES}targets = ["3.11-cpuu"]\n[[project]]\nsource = "x"\ntargets = ["3.11-cpu"]',
            "farm.toml: targets: there is no target '3.11-cpuu': a target is",
        ),
        (
            f'{FILES}[[project]]\nsource = "~nosuch/x"',
            "~nosuch/x is in a home folder that there is not",
        ),
        (f'{FILES}target = ["3.11-cpu"]\n[[project]]\nsource = "x"', "did you mean 'targets'?"),
        ('[[project]]\nsource = "x"', "files is '', but an address with {tag} in it is expected"),
        (
            'files = "files/{tag}"\n[[project]]\nsource = "x"',
            "files is 'files/{tag}', but an address with {tag} in it is expected",
        ),
        (
            'files = "https://x/{tag}/{y}"\n[[project]]\nsource = "x"',
            "files is 'https://x/{tag}/{y}'",
        ),
        *(
            (f'{FILES}index = "{x}"\n[[project]]\nsource = "x"', f"index is '{x}', but an address")
            for x in (
                "htps://example.org/x",
                "ftp://example.org/x",
                "http:/example.org",
                "farm.toml",
            )
        ),
        (
            'files = "https://example.org/{tag}?token=t0ken"\n[[project]]\nsource = "x"',
            "files has a query (`?`) or a fragment (`#`), but",
        ),
        (
            f'{FILES}index = "https://example.org/x#y"\n[[project]]\nsource = "x"',
            "index has a query (`?`) or a fragment (`#`), but",
        ),
        (
            f'{FILES}[[project]]\nsource = "."\nversions = 2',
            "versions is 2, but a folder or an archive has one version",
        ),
        ("[", "is not TOML"),
    ],
)
def test_a_mistake_in_the_file_is_named(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "farm.toml").write_text(text)
    with pytest.raises(UserError) as caught:
        config.load(tmp_path / "farm.toml")
    assert said in str(caught.value) and "t0ken" not in str(caught.value)
    with pytest.raises(UserError, match=r"none\.toml cannot be read \(No such file"):
        config.load(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("pattern", "versions", "found"),
    [
        ("newest-tag", '"newest"', ["v1.1"]),
        ("newest-tag", "2", ["v1.1", "v1.0"]),
        ("v*", '">=0.9,<1.1"', ["v1.0", "v0.9"]),
        ("v1.2*", '"newest"', ["v1.2rc1"]),  # where there is nothing else
        ("nightly", '"newest"', ["nightly"]),
    ],
)
def test_tags_of_a_repository(
    pattern: str, versions: str, found: list[str], repository: Path, tmp_path: Path
) -> None:
    source = f'source = "git+file://{repository}@{pattern}"\nversions = {versions}'
    farm = written(tmp_path, f'{source}\ntargets = ["3.11-cpu"]')
    all_of_it, lost = wanted.of_farm(farm)
    assert (lost, [x.version for x in all_of_it]) == ({}, found)
    assert {x.project for x in all_of_it} == {"tinyops"}
    said = subprocess.run(
        ["git", "rev-parse", f"{found[0]}^{{commit}}"],
        cwd=repository,
        capture_output=True,
        text=True,
    )
    assert all_of_it[0].source == f"git+file://{repository}@{said.stdout.strip()}"


@pytest.mark.parametrize(
    ("tag", "version"),
    [
        ("v1.2", "1.2"),
        ("release-1.2.0", "1.2.0"),
        ("torch/v0.3rc1", "0.3rc1"),
        ("nightly", None),
        ("2024x", None),
    ],
)
def test_the_version_that_a_tag_names(tag: str, version: str | None) -> None:
    found = wanted.version_of(tag)
    assert (found and str(found)) == version


def test_a_source_may_be_in_the_home_folder(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(repository.parent))
    found, lost = wanted.of_farm(written(tmp_path, 'source = "~/tinyops"'))
    assert ({x.source for x in found}, lost) == ({str(repository)}, {})


def test_a_project_that_nobody_can_look_up_stops_no_other(repository: Path, tmp_path: Path) -> None:
    gone = f'source = "git+file://{tmp_path}/gone@newest-tag"'
    farm = written(
        tmp_path,
        gone,
        f'source = "git+file://{repository}@none-*"',
        'source = "tinyops"',
        'source = "bad==1 ; @"',
    )
    all_of_it, lost = wanted.of_farm(farm)
    assert {x.project for x in all_of_it} == {"tinyops"}
    assert "git cannot list the tags of" in lost["gone"]
    assert "is a version like none-*: nightly, v0.9" in lost["tinyops"]
    assert lost["bad"].startswith("there is no bad==1 ; @: a project of a farm is a name on PyPI, ")


@pytest.mark.parametrize(
    "text",
    ["", '{"rows": 5}', '{"rows": ["x"]}', '{"rows": [{"farm": {}}]}', "[]", "5", "[" * 100_000],
)
def test_a_state_of_another_kind_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / state.FILE).write_text(text)
    with pytest.raises(UserError, match=r"farm\.json does not say which wheels there are \("):
        state.read(str(tmp_path))


class Builds:
    """What stands for compilers: it forges wheels, and fails or hangs where it shall."""

    def __init__(self, folder: Path) -> None:
        self.log, self.folder = folder / "built.txt", folder
        self.fails: dict[str, Callable[[], object]] = {}

    def __call__(
        self, options: object, target: releases.Target, source: object, dist: Path, *_: object
    ) -> Path:
        with self.log.open("a") as log:
            log.write(f"{target.name}\n")
        self.fails.get(target.name, str)()
        folder = self.folder / "work" / target.name
        wheel = forge_target(folder, target.name)
        tag = f"cp{target.python.replace('.', '')}"
        return published(wheel.rename(folder / wheel.name.replace("cp311", tag)), dist)

    @property
    def built(self) -> list[str]:
        found = self.log.read_text().split() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return found


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builds:
    do_not_audit(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHWHEELS_CACHE", str(tmp_path / "cache"))
    found = Builds(tmp_path)
    monkeypatch.setattr(build, "build_wheel", found)
    monkeypatch.setattr(toolchain, "compilers_of", str)
    return found


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "torchwheels" / "src")}
PROJECT = 'source = "tinyops"\ntargets = ["3.10-cpu", "3.11-cpu", "3.12-cpu"]'
PUBLISHED = 'index = "site"\n' + FILES


def farm(*words: str) -> None:
    cli.main(["farm", *words])


def missing(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    capsys.readouterr()
    farm("missing", "--json", *words)
    return [x["target"] for x in json.loads(capsys.readouterr().out)]


@pytest.fixture
def one_project(repository: Path, tmp_path: Path) -> None:
    written(tmp_path, PROJECT, first=PUBLISHED)


@pytest.mark.usefixtures("one_project")
def test_only_what_is_not_published_is_built(
    builds: Builds, capsys: pytest.CaptureFixture[str]
) -> None:
    assert missing(capsys) == ["3.10-cpu", "3.11-cpu", "3.12-cpu"]
    farm("build", "--backend=local", "--only=tinyops * 3.11-*")
    assert builds.built == ["3.11-cpu"]
    assert len(missing(capsys)) == 3  # nothing is published yet
    farm("build", "--backend=local")  # but what was built is known
    assert builds.built == ["3.10-cpu", "3.12-cpu"]
    farm("index")
    shutil.rmtree("dist")
    assert missing(capsys) == []
    farm("build", "--backend=local")
    assert builds.built == []
    assert missing(capsys, "--rebuild=t*") == ["3.10-cpu", "3.11-cpu", "3.12-cpu"]


@pytest.mark.usefixtures("one_project")
def test_other_sources_or_options_are_another_wheel(
    builds: Builds, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    farm("build", "--backend=local")
    farm("index")
    for unbuilt in (
        "tests = { minutes = 5 }",
        "time-limit = 5",
        'yanked = { "1.0" = "it is wrong" }',
    ):
        written(tmp_path, f"{PROJECT}\n{unbuilt}", first=PUBLISHED)
        assert missing(capsys) == []
    of_one = '[[project.overrides]]\nselect = "3.11-*"\nenvironment = { X = "1" }'
    written(tmp_path, f"{PROJECT}\n{of_one}", first=PUBLISHED)
    assert missing(capsys) == ["3.11-cpu"]
    written(tmp_path, PROJECT, first=PUBLISHED)
    (tmp_path / "tinyops" / "setup.py").write_text("# another one")
    assert len(missing(capsys)) == 3


@pytest.mark.usefixtures("one_project")
def test_a_failure_is_noted_and_stops_nothing(
    builds: Builds, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise BuildError("its compiler says no to https://user:password@example.org")

    def lack() -> None:
        raise UserError("no network")

    builds.fails = {"3.10-cpu": refuse, "3.11-cpu": lambda: os.kill(os.getpid(), signal.SIGKILL)}
    farm("build", "--backend=local")
    assert "torchwheels: 1 of 3 wheels are done, 2 failed\n" in capsys.readouterr().out
    assert Path("dist", MARK).is_file()
    assert builds.built == ["3.10-cpu", "3.11-cpu", "3.12-cpu"]
    farm("index")
    # What cannot be built is left alone, what died is tried again.
    assert missing(capsys) == ["3.11-cpu"]
    assert missing(capsys, "--rebuild=tinyops") == ["3.10-cpu", "3.11-cpu", "3.12-cpu"]
    farm("missing")
    assert "failed 20" in (said := capsys.readouterr().out)
    assert "its compiler says no to https://****@example.org" in said
    page = Path("site", "project", "tinyops", "index.html").read_text()
    assert "its compiler says no" in page
    assert "its build has died: memory may have run out" in page
    builds.fails = {"3.11-cpu": lack}
    farm("build", "--backend=local")
    farm("index")
    assert "no network" in Path("site", "project", "tinyops", "index.html").read_text()
    builds.fails = {}
    farm("build", "--backend=local", "--rebuild=tinyops")
    assert builds.built == ["3.11-cpu", "3.10-cpu", "3.11-cpu", "3.12-cpu"]
    farm("index")
    assert "Why it failed" not in Path("site", "project", "tinyops", "index.html").read_text()


def test_a_wheel_whose_tests_fail_is_not_published(
    builds: Builds, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_here(_: object, target: releases.Target, folder: Path, *__: object) -> int:
        record = {"device": "CPU", "passed": 1, "failed": 0, "skipped": 0}
        (folder / testing.RECORD).write_text(json.dumps(record))
        return 0 if target.name == "3.12-cpu" else 1

    monkeypatch.setattr(testing, "install", lambda *_: None)  # downloads torch
    monkeypatch.setattr(testing, "run_here", run_here)
    written(tmp_path, f'{PROJECT}\ntests = {{ paths = ["setup.py"] }}', first=PUBLISHED)
    farm("build", "--backend=local")
    farm("index", "--release=release")
    good, *failed = state.read("site")
    assert good["farm"]["target"] == "3.12-cpu"
    assert [(x["target"], x["passed"]) for x in good["tests"]] == [("3.12-cpu", 1)]
    assert {x["failed"].rpartition(" fail in ")[2] for x in failed} == {
        "3.10-cpu (exit code 1)",
        "3.11-cpu (exit code 1)",
    }
    assert len([*Path("release").glob("*/tinyops-1.0+*.whl")]) == 1
    # Nothing has changed; then it has, but for no wheel that is there.
    for settings, tried in (("", 0), (", minutes = 5", 2)):
        builds.built.clear()
        written(
            tmp_path, f'{PROJECT}\ntests = {{ paths = ["setup.py"]{settings} }}', first=PUBLISHED
        )
        farm("build", "--backend=local")
        assert len(builds.built) == tried


@pytest.mark.usefixtures("one_project")
def test_a_run_stops_in_time_and_the_next_goes_on(
    builds: Builds,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = tmp_path / "cache" / "compiled"
    compiled.mkdir(parents=True)
    in_time, progress = building._in_time, [1, 2]

    def late(
        seconds: float, function: Callable[..., state.Row], wanted: wanted.Wanted, *more: object
    ) -> state.Row:
        if wanted.target.name != "3.11-cpu":
            return in_time(seconds, function, wanted, *more)
        for name in progress:
            (compiled / str(name)).touch()
        raise TimeoutError

    monkeypatch.setattr(building, "_in_time", late)
    for _ in range(2):
        farm("build", "--backend=local", "--minutes=60")
        assert "3.11-cpu was stopped; the next run goes on with it" in capsys.readouterr().out
        progress.append(3)
    assert builds.built == ["3.10-cpu"]
    farm("build", "--backend=local", "--minutes=60")  # in which nothing more was compiled
    farm("index")
    assert (
        "not one file of it compiles in 60 minutes" in (tmp_path / "site" / state.FILE).read_text()
    )
    assert missing(capsys) == ["3.11-cpu", "3.12-cpu"]


def test_what_takes_too_long_ends_with_all_that_it_started() -> None:
    reads, writes = os.pipe()

    def hang() -> state.Row:
        process = processes.start(["sh", "-c", "echo started; sleep 1000"], stdout=writes)
        process.wait()
        return {}

    with pytest.raises(TimeoutError):
        building._in_time(3, hang)
    os.close(writes)
    with os.fdopen(reads) as said:
        assert said.read() in ("", "started\n")  # and its end, once nobody is left who writes
    assert building._in_time(60, lambda: {"a": "row"}) == {"a": "row"}
    with pytest.raises(UserError, match=r"^ValueError: of ours$"):
        building._in_time(60, _fail)


def _fail() -> state.Row:
    raise ValueError("of ours")


def test_compiled_files_are_bounded_by_the_oldest(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "old", "older")):
        (tmp_path / name).write_bytes(bytes(1000))
        os.utime(tmp_path / name, (10**9 - age, 10**9 - age))
    building._bound(tmp_path, 2500)
    assert {x.name for x in tmp_path.iterdir()} == {"new", "old"}


@pytest.mark.usefixtures("one_project")
@pytest.mark.slow
def test_shards_are_parts_of_the_whole(builds: Builds, capsys: pytest.CaptureFixture[str]) -> None:
    for shard in ("0/3", "1/3", "2/3"):
        farm("build", "--backend=local", f"--shard={shard}", f"--dist={shard[0]}")
    assert sorted(builds.built) == ["3.10-cpu", "3.11-cpu", "3.12-cpu"]
    # Two that build the same wheel end in one, the first.
    farm("build", "--backend=local", "--dist=again")
    farm("index", "0", "1", "2", "again", "--release=release")
    rows = json.loads(Path("site", state.FILE).read_text())["rows"]
    assert len(rows) == len({x["wheel"] for x in rows}) == 3
    assert missing(capsys) == []
    assert [x.name for x in Path("release").iterdir()] == [rows[0]["farm"]["tag"]]
    with pytest.raises(SystemExit):
        farm("build", "--shard=3/3")
    assert "'3/3', but a part is expected: 0/3, 1/3 or 2/3" in capsys.readouterr().err
    for minutes in ("-5", "nan", "inf", "x"):
        with pytest.raises(SystemExit):
            farm("build", f"--minutes={minutes}")
        assert f"'{minutes}', but a positive number is expected" in capsys.readouterr().err


@pytest.mark.usefixtures("one_project")
def test_what_is_not_whole_is_built_again_and_stops_no_index(
    builds: Builds, capsys: pytest.CaptureFixture[str]
) -> None:
    farm("build", "--backend=local")
    first, second, third = sorted(Path("dist").glob("*.whl"))
    first.unlink()
    second.write_bytes(b"of somebody else")
    third.with_suffix(".report.json").write_text('{"farm"')
    Path("dist", f"x{state.FAILED}").write_text("[]")
    farm("index", "--release=release")
    said = capsys.readouterr().err
    assert f"{second.name} is another file" in said
    assert said.count("is left out: ") == 3
    assert json.loads(Path("site", state.FILE).read_text()) == {"rows": []}
    assert not Path("release").exists()
    assert builds.built == ["3.10-cpu", "3.11-cpu", "3.12-cpu"]
    farm("build", "--backend=local")
    assert builds.built == ["3.10-cpu", "3.11-cpu"]  # of the third the report alone was broken
    farm("index")
    rows = {x["farm"]["target"]: x.get("failed", "") for x in state.read("site")}
    assert (rows["3.10-cpu"], rows["3.12-cpu"]) == ("", "")
    assert rows["3.11-cpu"].startswith(f"{second} is there already, built for nobody knows what")


@pytest.mark.usefixtures("one_project")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["build", "--only=tinyop"], "`--only` names 'tinyop', and farm.toml has no such project: did you mean tiny"),
        (["missing", "--only=x 1.0 *"], "`--only` names 'x', and farm.toml has no such project: did you mean tinyops?"),
        (["missing", "--only=tinyops 9 3.11-cpu"], "`--only` names 'tinyops 9 3.11-cpu', which no wheel is called: "),
        (["missing", "--rebuild=x*"], "`--rebuild` names 'x*', and farm.toml has no such project"),
        (["build", "--dist=/proc/x"], "`--dist` names /proc/x, where nothing can be written"),
        (["index", "--release=site/files"], "`--release` names site/files, a part of the index site: name a folder"),
        (["index", "--release=loop"], "`--release` names loop, but loop is no folder: name one"),
        (["index", "--site=dist/tests"], "`--site` names "),
        (["index", "--release=/proc/x"], "`--release` names /proc/x, where nothing can be written"),
        (["index", "--release=site"], "`--release` names site, a part of the index site: name a folder beside it"),
        (["index", "--site=/proc/x/y"], "`--site` names /proc/x, where nothing can be written"),
    ],
)  # fmt: skip
def test_a_mistake_of_an_option_is_named(builds: Builds, words: list[str], said: str) -> None:
    Path("loop").symlink_to("loop")
    with pytest.raises(SystemExit) as ended:
        farm(*words)
    assert str(ended.value.code).startswith(f"torchwheels: {said}")
    assert builds.built == []
    assert not Path("site").exists()


@pytest.mark.usefixtures("one_project")
def test_a_folder_of_builds_that_is_not_there_is_said(
    builds: Builds, capsys: pytest.CaptureFixture[str]
) -> None:
    farm("build", "--backend=local", "--only=tinyops * 3.11-*")
    farm("index", "dist", "dits")
    said = capsys.readouterr()
    assert said.err == "torchwheels: there is no folder dits: it is left out\n"
    assert "made site of 1 wheels" in said.out


SOMETHING_ELSE: list[tuple[str, object]] = [
    ("farm.tag", "../../outside"),
    ("farm.tag", ".."),
    ("farm.project", "../../../outside"),
    ("farm.project", "\0"),
    ("farm.build", "1"),
    ("name", "../../../outside"),
    ("wheel", "../../outside.whl"),
    ("variant.wheel", "../../outside.whl"),
    ("build.target", "3.11-../../../outside"),
    ("build.torch", None),
    ("version", "of today"),
    ("tags", []),
    ("requires", ["torch=="]),
    ("requires_python", "three"),
    ("works_with", 3),
    ("summary", "\ud800"),
    ("farm.metadata", {}),
]


@pytest.mark.usefixtures("one_project")
def test_a_report_that_says_something_else_is_left_out(
    builds: Builds, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Whoever has written it: of its names paths are made, outside of the release, too."""
    farm("build", "--backend=local", "--only=tinyops * 3.11-*")
    (file,) = Path("dist").glob("*.report.json")
    right, site = file.read_text(), tmp_path / "site"
    for key, value in SOMETHING_ELSE:
        report = json.loads(right)
        *parents, last = key.split(".")
        functools.reduce(dict.__getitem__, parents, report)[last] = value
        file.write_text(json.dumps(report))
        before = {*tmp_path.rglob("*")}
        farm("index", "--release=release")
        assert f"{file} is left out: " in capsys.readouterr().err, key
        assert json.loads(Path(site, state.FILE).read_text()) == {"rows": []}, key
        assert all(site in (x, *x.parents) for x in {*tmp_path.rglob("*")} - before), key
        Path(site, state.FILE).write_text(json.dumps({"rows": [report]}))
        with pytest.raises(SystemExit, match="does not say which wheels there are"):
            farm("missing")
        shutil.rmtree(site)
    assert builds.built == ["3.11-cpu"]


@pytest.mark.usefixtures("one_project", "builds")
def test_what_speaks_against_a_wheel_by_now_leaves_it_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its tests have failed since, or an audit by stricter options; an audit that passes changes nothing."""
    farm("build", "--backend=local", "--only=tinyops * 3.11-*")
    (file,) = Path("dist").glob("*.report.json")
    right = json.loads(file.read_text())
    rows = json.dumps(json.loads(file.read_text())["farm"])
    cli.main(["audit"])
    assert json.dumps(json.loads(file.read_text())["farm"]) == rows
    failed = {"rule": "size", "passed": False, "detail": "it is too large"}
    run = {"target": "3.11-cpu", "device": "cpu", "passed": 1, "failed": 1, "skipped": 0}
    record = Path("dist/tests/3.11-cpu/0123456789ab-cpu.json")
    for report, of_run, why in (
        ({**right, "rules": [*right["rules"], failed]}, None, "size: it is too large"),
        (right, {**run, "sha256": right["sha256"]}, "its tests failed in 3.11-cpu"),
        (right, [], "is no whole record of tests"),
        (right, {**run, "failed": 0, "sha256": right["sha256"]}, ""),
    ):
        file.write_text(json.dumps(report))
        record.parent.mkdir(parents=True, exist_ok=True)
        if of_run is not None:
            record.write_text(json.dumps(of_run))
        farm("index", "--release=release")
        said = capsys.readouterr().err
        assert f"{file} is left out: " in said if why else "left out" not in said
        assert why in said
        assert bool(json.loads(Path("site", state.FILE).read_text())["rows"]) != bool(why)


@pytest.mark.usefixtures("one_project")
@pytest.mark.slow
def test_what_is_built_again_has_a_release_of_its_own(builds: Builds) -> None:
    farm("build", "--backend=local")
    farm("index", "--release=release")
    shutil.rmtree("dist")
    farm("build", "--backend=local", "--rebuild=tinyops", "--only=tinyops * 3.11-*")
    assert builds.built[3:] == ["3.11-cpu"]
    farm("index", "--release=release")
    first, again = sorted(x.name for x in Path("release").iterdir())
    assert again == f"{first}-2"
    listed = Path("site/cpu/torch2.13/simple/tinyops/index.html").read_text()
    assert listed.count(f"https://example.org/{first}/tinyops") == 2
    assert listed.count(f"https://example.org/{again}/tinyops") == 1


@pytest.mark.usefixtures("one_project")
def test_a_published_file_keeps_its_content(
    builds: Builds, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where the index was lost, or another farm lays out its files in the same folder."""
    farm("build", "--backend=local", "--only=tinyops * 3.11-*")
    farm("index", "--release=release")
    (wheel,) = Path("release").glob("*/*+*.whl")
    wheel.write_text("published")
    shutil.rmtree("site")
    with pytest.raises(SystemExit) as ended:
        farm("index", "--release=release")
    assert ended.value.code == RefusedError.code
    said = rf"^torchwheels: {re.escape(str(wheel))} is there already, with another content, .*: take it away if nob"
    assert re.match(said, capsys.readouterr().err)
    assert wheel.read_text() == "published"
    assert not Path("site").exists()


@pytest.mark.usefixtures("one_project")
def test_files_are_whole_and_come_before_the_index_that_names_them(
    builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copyfile(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:10])
        raise OSError(errno.ENOSPC, "full")

    farm("build", "--backend=local", "--only=tinyops * 3.11-*")
    monkeypatch.setattr(sources, "fetch", lambda *_: sources.Fetched(Path(), "sha256:0"))
    monkeypatch.setattr(shutil, "copyfile", copyfile)
    with pytest.raises(SystemExit, match=r"the disk of .*release/.* is full"):
        farm("index", "--release=release")
    assert not [x for x in Path("release").rglob("*") if x.is_file()]
    assert not Path("site").exists()


@pytest.mark.usefixtures("one_project")
def test_other_metadata_are_not_laid_out(
    builds: Builds, capsys: pytest.CaptureFixture[str]
) -> None:
    """Installers would refuse the wheel, and what is released stays as it is."""
    farm("build", "--backend=local", "--only=tinyops * 3.11-*")
    (metadata,) = Path("dist").glob("*.metadata")
    metadata.write_bytes(b"")
    farm("index", "--release=release")
    assert f"is left out: {metadata.name} is another file" in capsys.readouterr().err
    assert not Path("release").exists()


@pytest.mark.usefixtures("one_project")
def test_two_that_make_an_index_at_once_lose_nothing(builds: Builds, tmp_path: Path) -> None:
    dists = ["3.10", "3.11", "3.12"]
    for python in dists:
        farm("build", "--backend=local", f"--only=tinyops * {python}-*", f"--dist={python}")
    command = [sys.executable, "-m", "torchwheels", "farm", "index"]
    running = [subprocess.Popen([*command, x], env=ENVIRONMENT) for x in dists]
    assert [x.wait() for x in running] == [0, 0, 0]
    assert len(state.read("site")) == 3


def test_newer_sources_that_call_their_wheel_the_same_take_its_place(
    builds: Builds, capsys: pytest.CaptureFixture[str], tmp_path: Path, repository: Path
) -> None:
    """As of a project that never raises its version, built of one commit after another."""
    written(tmp_path, 'source = "tinyops"\ntargets = ["3.11-cpu"]', first=PUBLISHED)
    for content in ("# one", "# another", "# one"):
        (tmp_path / "tinyops" / "setup.py").write_text(content)
        farm("build", "--backend=local")
        farm("index", "--release=release")
        shutil.rmtree("dist")
        assert missing(capsys) == []
    first, _, again = sorted(Path("release").iterdir(), key=lambda x: x.stat().st_mtime_ns)
    assert again.name == f"{first.name}-2"
    listed = Path("site/cpu/torch2.13/simple/tinyops/index.html").read_text()
    assert f"https://example.org/{again.name}/tinyops" in listed


def test_one_name_for_two_wanted_wheels_is_a_failure_of_the_later(
    builds: Builds, capsys: pytest.CaptureFixture[str], tmp_path: Path, repository: Path
) -> None:
    tables = []
    for name in ("one", "two"):
        tables.append(f'source = "{name}"\ntargets = ["3.11-cpu"]')
        shutil.copytree(repository, tmp_path / name)
        written(tmp_path, *tables, first=PUBLISHED)
        farm("build", "--backend=local")
        farm("index")
        shutil.rmtree("dist")
    assert missing(capsys) == []  # it would be built each night, and never be published
    *_, failure = json.loads(Path("site/farm.json").read_text())["rows"]
    assert failure["farm"]["project"] == "two"
    assert re.match(r"^one \w+ has published another tinyops-\S+\.whl: ", failure["failed"])


@pytest.mark.parametrize("runs", [[1, 2], [2]])
def test_one_name_for_two_wheels_in_one_folder_is_a_failure_of_the_first(
    runs: list[int], builds: Builds, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    repository: Path,
) -> None:  # fmt: skip
    """The later one has its place, and of the first nobody would know."""
    tables = [f'source = "{name}"\ntargets = ["3.11-cpu"]' for name in ("one", "two")]
    for name in ("one", "two"):
        shutil.copytree(repository, tmp_path / name)
    for count in runs:
        written(tmp_path, *tables[:count], first=PUBLISHED)
        farm("build", "--backend=local")
    said = capsys.readouterr().out
    assert re.search(r"one \w+ 3\.11-cpu: another wheel of its name, .* in dist: an index ha", said)
    done = "1 of 1 wheels are done" if runs == [1, 2] else "1 of 2 wheels are done, 1 failed"
    assert said.endswith(f"torchwheels: {done}\n")
    farm("build", "--backend=local")
    assert builds.built == ["3.11-cpu"] * 2
    farm("index")
    wheel, failure = state.read("site")
    assert (wheel["farm"]["project"], failure["farm"]["project"]) == ("two", "one")
    assert missing(capsys) == []


def test_a_wheel_that_two_tables_ask_for_is_named(repository: Path, tmp_path: Path) -> None:
    named = 'source = "tinyops"\ntargets = ["3.11-cpu"]'
    with pytest.raises(
        UserError, match=r"^two tables \[\[project\]\] ask for tinyops \w+ 3\.11-cpu: "
    ):
        wanted.of_farm(written(tmp_path, PROJECT, named))


@pytest.mark.usefixtures("one_project")
def test_a_variant_of_a_newer_torch_takes_the_place_of_the_older_one(
    builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of releases has another torch for `cpu` meanwhile: their variants have one name."""
    table = releases.load()
    for torch in ("2.12.1", "2.13.0"):
        renewed = dataclasses.replace(table, cpu={**table.cpu, "torch": torch})
        monkeypatch.setattr(releases, "load", lambda table=renewed: table)
        farm("build", "--backend=local", "--only=tinyops * 3.11-cpu")
        farm("index", "--release=release")
        shutil.rmtree("dist")
    assert builds.built == ["3.11-cpu"] * 2
    files = json.loads(Path("site/simple/tinyops/index.json").read_text())["files"]
    (variant,) = (x for x in files if x["filename"].endswith("-null.whl"))
    assert "-2/" in variant["url"]  # the release of the second build
    for torch in ("2.12", "2.13"):
        assert Path(f"site/cpu/torch{torch}/simple/tinyops").is_dir()


@pytest.mark.usefixtures("one_project")
@pytest.mark.slow
def test_one_wheel_for_several_targets_is_built_once(
    builds: Builds,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def stable(
        _: object, target: releases.Target, source: object, dist: Path, *more: object
    ) -> Path:
        builds.log.write_text(target.name)
        return published(forge_target(tmp_path / "work", releases.RELEASE), dist)

    monkeypatch.setattr(build, "build_wheel", stable)
    farm("build", "--backend=local")
    assert builds.built == ["3.10-cpu"]
    farm("index")
    assert missing(capsys) == []
    assert "the wheel of 3.10-cpu" in Path("site", "project", "tinyops", "index.html").read_text()
    # It is at each address that it serves, and nowhere else.
    assert Path("site/cpu/torch2.10/simple/tinyops").is_dir()
    assert Path("site/cu130/torch2.13/simple/tinyops").is_dir()
    assert not Path("site/cpu/torch2.9/simple").exists()


def test_versions_are_in_their_order_and_old_torches_stay(builds: Builds, tmp_path: Path) -> None:
    written(tmp_path, 'source = "git+file:///none/tinyops@v*"', first=PUBLISHED)
    for version in ("0.9", "0.10", "1.0"):
        built = builds(None, releases.load().target("3.11-cu130"), None, Path("dist"))
        told = {"project": "tinyops", "version": version, "target": "3.11-cu130", "digest": version}
        more = {"built": "2026-11-27", "build": 1, "tag": version, "torchwheels": "1"}
        row = building._noted(built, project.Project(), {**told, **more})
        row["build"]["torch"] = f"1.{version[-1]}.0"  # of which the table of today has none
        row["requires"], row["wheel"] = ["torch==1.*"], row["wheel"].replace("1.0", version)
        row["farm"]["metadata"][row["wheel"]] = "0" * 64
        rows = [*state.read("site"), row]
        Path("site").mkdir(exist_ok=True)
        Path("site", state.FILE).write_text(json.dumps({"rows": rows}))
    shutil.rmtree("dist")
    (Path("site") / MARK).write_text(f"{state.FILE}\0{MARK}")
    farm("index")
    page = Path("site/project/tinyops/index.html").read_text()
    assert re.findall(r"<tr><td>([\d.]+)<td>", page) == ["1.0", "0.10", "0.9"]
    assert "git cannot list the tags of file:///none/tinyops" in page
    assert (
        Path("site/cu130/torch1.9/simple/tinyops/index.html").read_text().count("0.9%2Bcu130") == 1
    )
    said = json.loads(Path("site/search.json").read_text())
    assert ["3.11"] in [pythons for pythons, _ in said["kinds"]]


def test_an_index_that_does_not_answer_builds_nothing_anew(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="without that all would be built again"):
        state.read("http://127.0.0.1:9/farm")
    assert state.read(str(tmp_path)) == []


def test_an_address_with_no_index_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """It may be mistyped, or private by now: the next index would lack all that there was."""
    handler = functools.partial(_Quiet, directory="/nothing")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        rows = state.read(f"http://127.0.0.1:{server.server_port}/farm")
        server.shutdown()
    assert rows == []
    said = "/farm/farm.json is not there (404): nothing counts as published yet\n"
    assert capsys.readouterr().err.endswith(said)


def test_a_farm_in_its_project_has_the_name_of_that(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository)
    Path("package").mkdir()
    for source in (".", "./", "../tinyops/.", "package/.."):
        (entry,) = written(Path(), f'source = "{source}"').projects
        assert entry.name == "tinyops"
    (entry,) = written(Path(), 'source = "git+https://x/tinyops.git?token=secret@v1"').projects
    assert entry.name == "tinyops"


class Farm(Served):
    """The index of a farm at one address of this machine, and the files of its releases at another."""

    def __init__(self, address: str, folder: Path, builds: Builds) -> None:
        super().__init__(f"{address}/site", folder)
        self.builds, self.root = builds, Path("root")
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir()
        first = f'index = "{address}/site"\nfiles = "{address}/files/{{tag}}"\n'
        targets = '["3.11-cpu", "3.11-cu124*", "3.11-cu130"]'
        written(Path.cwd(), f'source = "tinyops"\ntargets = {targets}', first=first)
        farm("build", "--backend=local")
        farm("index", f"--site={self.root / 'site'}", f"--release={self.root / 'files'}")
        _index_torches(self.root / "site" / "others" / "simple")


@pytest.fixture
def served(builds: Builds, repository: Path, tmp_path: Path) -> Iterator[Farm]:
    handler = functools.partial(_Quiet, directory=str(tmp_path / "root"))
    (tmp_path / "installed").mkdir()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield Farm(f"http://127.0.0.1:{server.server_port}", tmp_path / "installed", builds)
        server.shutdown()


@pytest.mark.slow
def test_installers_take_what_fits_from_the_address_of_a_cuda_and_a_torch(
    served: Farm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert served.pip("cu130/torch2.13/simple", "tinyops") == "3.11-cu130 2.13.0"
    assert served.pip("cu124/torch2.6/simple", "tinyops") == "3.11-cu124 2.6.0"
    assert served.pip("cpu/torch2.13/simple", "tinyops") == "3.11-cpu 2.13.0"
    assert "No matching distribution" in served.pip("cpu/torch2.6/simple", "tinyops")
    for driver, found in (("", "3.11-cpu"), ("13.1", "3.11-cu130"), ("12.6", "3.11-cu124")):
        assert served.uv("tinyops", driver=driver).split()[0] == found
    assert missing(capsys) == []  # which asks the same server


def test_a_lock_file_of_uv_names_the_files_of_releases(served: Farm, tmp_path: Path) -> None:
    app = tmp_path / "app"
    app.mkdir()
    (app / "pyproject.toml").write_text(f"""
[project]
name = "app"
version = "0"
requires-python = "==3.11.*"
dependencies = ["tinyops"]
[tool.uv]
environments = ["sys_platform == 'linux'"]
[[tool.uv.index]]
url = "{served.address}/cu130/torch2.13/simple"
[[tool.uv.index]]
url = "{served.address}/others/simple"
default = true
""")
    variables = {**served.variables, "UV_PYTHON": sys.executable}
    variables.pop("UV_NO_CONFIG")
    variables.pop("VIRTUAL_ENV", None)

    def uv(*words: str) -> str:
        command = environments.uv(*words)
        done = subprocess.run(command, cwd=app, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    uv("lock")
    row = next(x for x in state.read(served.address) if x["farm"]["target"] == "3.11-cu130")
    (place,) = (served.root / "files").iterdir()
    locked = (app / "uv.lock").read_text()
    assert f"/files/{place.name}/{row['wheel'].replace('+', '%2B')}" in locked
    assert f"sha256:{row['sha256']}" in locked
    uv("sync", "--frozen")
    said = uv("run", "--frozen", "python", "-c", "import tinyops; print(tinyops.built_for)")
    assert said == "3.11-cu130\n"


def test_one_finds_a_wheel_by_typing_what_one_has(served: Farm) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright")
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("no browser: `apt-get install chromium` adds one")
    with playwright.sync_playwright() as running:
        options = ["--no-sandbox", "--disable-background-networking", "--disable-component-update"]
        page = running.chromium.launch(executable_path=program, args=options).new_page()
        page.goto(f"{served.address}/")
        for typed, label, torch in (
            ("tinyops python 3.11 cuda 13.0 torch 2.13", "cu130", "2.13"),
            ("tiny cu124 torch2.6", "cu124", "2.6"),
            ("tinyops==1.0 CPU", "cpu", "2.13"),
        ):
            page.fill("#search", typed)
            address = f"{served.address}/{label}/torch{torch}/simple/"
            assert page.locator("#found code").all_inner_texts() == [
                f'{tool} "tinyops==1.0+{label}.torch{torch}" --extra-index-url {address}'
                for tool in ("pip install", "uv pip install")
            ]
        page.fill("#search", "tinyops python 3.12")
        assert page.inner_text("#found") == "There is no wheel for these."
        page.click("text=tinyops")
        assert page.input_value("#search") == "tinyops "
        page.wait_for_selector("#found code")
        assert page.locator("#found code").count() == 8
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280
        running.stop()


def test_the_page_on_farms_begins_with_one_that_works(
    builds: Builds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repository: Path
) -> None:
    """But for PyPI: its project is a folder here."""
    page = (ROOT / "docs" / "farm.md").read_text()
    first, second = re.findall(
        r"```(?:{code-block} toml\n:caption: farm.toml\n|toml)\n(.*?)```", page, re.S
    )
    (tmp_path / "all.toml").write_text(second)
    assert len(config.load(tmp_path / "all.toml").projects) == 4
    (tmp_path / "farm.toml").write_text(first.replace('"torchsort"', '"tinyops"'))
    for line in re.findall(r"^torchwheels (farm .*?) *(?:#.*)?$", page, re.M)[:3]:
        cli.main(line.split())
    row = state.read("site")[0]
    assert (tmp_path / "files" / row["farm"]["tag"] / row["wheel"]).is_file()
    assert Path("site/cpu/torch2.13/simple/tinyops/index.html").is_file()


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ((ROOT / "examples" / "farm" / "farm.toml").read_text(), True),
        ((ROOT / "docs" / "farm.md").read_text().split("```toml\n")[1].split("```")[0], True),
        (f'{FILES}[[project]]\nsource = "x"\nversions = 0', False),
        (f'{FILES}[[project]]\nversions = 1', False),
        (f'{FILES}[[project]]\nsource = "x"\nnetwork = "yes"', False),
        (f"{FILES}project = []", False),
        ('[[project]]\nsource = "x"', False),
    ],
)  # fmt: skip
def test_editors_are_told_what_the_tool_takes(
    text: str, is_right: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    farm("schema")
    schema = json.loads(capsys.readouterr().out)
    errors = [*jsonschema.Draft7Validator(schema).iter_errors(msgspec.toml.decode(text))]
    (tmp_path / "farm.toml").write_text(text)
    with contextlib.nullcontext() if is_right else pytest.raises(UserError):
        config.load(tmp_path / "farm.toml")
    assert is_right == (errors == [])
