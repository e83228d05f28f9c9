"""Sources from a folder, an archive, an index, a commit; their code never runs."""

from __future__ import annotations

import base64
import compileall
import functools
import hashlib
import http.server
import os
import re
import shutil
import socket
import stat
import subprocess
import tarfile
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from torchwheels import environments, sources
from torchwheels.errors import UserError
from torchwheels.options import indexes
from torchwheels.system import marked

SETUP = "raise SystemExit('setup.py ran')\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    for name in ("setup.py", "package/__init__.py", "build/old.o", "x.egg-info/PKG-INFO"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(SETUP)
    return folder


@pytest.fixture
def archive(folder: Path, tmp_path: Path) -> Path:
    archive = tmp_path / "some_project-1.5.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, "some_project-1.5")
    return archive


def files(folder: Path) -> set[str]:
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in found if path.parts[0] != ".git"}


FILES = {"setup.py", "package/__init__.py"}
ARCHIVED = FILES | {"build/old.o", "x.egg-info/PKG-INFO"}


def test_folder_is_copied_without_what_earlier_builds_left(folder: Path, tmp_path: Path) -> None:
    before = sources.hash_of_folder(folder)
    fetched = sources.fetch(str(folder), tmp_path / "copy")
    assert files(fetched.folder) == FILES
    assert fetched.origin == f"sha256:{sources.hash_of_folder(fetched.folder)}"
    assert sources.hash_of_folder(folder) == before


def test_the_folder_of_temporary_files_may_be_in_the_sources(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "tmp"))
    with sources.fetched(str(folder), "", "") as fetched:
        assert files(fetched.folder) == FILES


def test_folders_links_to_them_and_what_may_be_run_are_of_the_hash(folder: Path) -> None:
    for name in ("one", "two"):
        (folder / name).mkdir()
        (folder / name / "a.cpp").write_text(name)
    found = {sources.hash_of_folder(folder)}
    for target in ("one", "two"):
        (folder / "current").unlink(missing_ok=True)
        (folder / "current").symlink_to(target)
        found.add(sources.hash_of_folder(folder))
    (folder / "setup.py").chmod(0o755)
    found.add(sources.hash_of_folder(folder))
    (folder / "empty").mkdir()
    found.add(sources.hash_of_folder(folder))
    assert len(found) == 5


@pytest.mark.parametrize("name", ["[^x]*", "(", "/a/b", "a:b"])
def test_what_is_no_name_names_no_project(name: str, folder: Path) -> None:
    """It becomes part of paths, and of patterns."""
    (folder / "PKG-INFO").write_text(f"Name: {name}\n")
    assert sources.name_of(folder, "some-project") == "some-project"
    assert sources.parts(f"git+file:///x@v1#egg={name}")[1] == ""


def test_what_python_keeps_of_its_own_changes_no_hash(folder: Path) -> None:
    """Else wheels would be built again because the tool itself has run meanwhile."""
    before = sources.hash_of_folder(folder)
    compileall.compile_dir(folder, quiet=1)
    assert [*folder.rglob("*.pyc")]
    assert sources.hash_of_folder(folder) == before


@pytest.mark.parametrize("kind", ["tar", "zip"])
@pytest.mark.usefixtures("read_in_own_process")
def test_archive_is_unpacked(archive: Path, folder: Path, tmp_path: Path, kind: str) -> None:
    if kind == "zip":
        archive = tmp_path / "main.zip"
        with zipfile.ZipFile(archive, "w") as zipped:
            for name in FILES:
                zipped.write(folder / name, f"project-main/{name}")
    fetched = sources.fetch(str(archive), tmp_path / "copy")
    assert files(fetched.folder) == (ARCHIVED if kind == "tar" else FILES)
    assert fetched.origin == f"sha256:{hashlib.sha256(archive.read_bytes()).hexdigest()}"


IN_ARCHIVES = (
    "x.egg-info/SOURCES.txt",
    "build/x.py",
    "dist/x.py",
    "venv/x.py",
    "__pycache__/x.pyc",
)


@pytest.mark.parametrize("kind", ["archive", "folder of an archive"])
def test_archive_has_what_only_looks_like_leftovers(kind: str, tmp_path: Path) -> None:
    """setuptools knows by its SOURCES.txt which data belong to the package; a git of it would run commands."""
    folder = tmp_path / "some_project-1.5"
    repository(folder, **{"PKG-INFO": "Name: some_project", "setup.py": ""})
    for name in IN_ARCHIVES:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    if kind == "archive":
        command = f"touch {tmp_path}/has-run; false"
        subprocess.run(["git", "-C", folder, "config", "core.fsmonitor", command], check=True)
        archive = tmp_path / "some_project-1.5.tar.gz"
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(folder, folder.name)
        found = sources.fetch(str(archive), tmp_path / "copy").folder
        assert not (tmp_path / "has-run").exists()
        assert files(found) == {"PKG-INFO", "setup.py", *IN_ARCHIVES}
    else:
        shutil.rmtree(folder / ".git")
        found = sources.fetch(str(folder), tmp_path / "copy").folder
        assert files(found) == {"PKG-INFO", "setup.py", "x.egg-info/SOURCES.txt"}


@pytest.mark.parametrize("data", [b"", b"\x1f\x8b\x08", b"PK\3\4", b"text"])
def test_a_file_that_is_no_archive_is_said_in_a_sentence(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.tar.gz").write_bytes(data)
    with pytest.raises(UserError) as error:
        sources.fetch(str(tmp_path / "x.tar.gz"), tmp_path / "copy")
    assert re.fullmatch(
        r"\S+/x\.tar\.gz cannot be unpacked \(.+\): a source is .*", str(error.value)
    )


@pytest.mark.parametrize("link", ["", "../../evil"], ids=["file", "link"])
def test_archive_that_leaves_its_folder_is_refused(link: str, tmp_path: Path) -> None:
    archive = tmp_path / "evil.tar.gz"
    member = tarfile.TarInfo("project/link" if link else "../evil")
    if link:
        member.type, member.linkname = tarfile.SYMTYPE, link
    with tarfile.open(archive, "w:gz") as tar:
        tar.addfile(member)
    with pytest.raises(UserError, match="cannot be unpacked"):
        sources.fetch(str(archive), tmp_path / "copy")


def index(folder: Path, archive: Path, digest: str) -> str:
    """An index in `folder`, with that archive in two versions, one of them yanked."""
    page = folder / "some-project" / "index.html"
    page.parent.mkdir(parents=True)
    links = [
        f'<a href="{archive.as_uri()}#sha256={digest}">{archive.name}</a>',
        '<a href="some_project-1.4.tar.gz">some_project-1.4.tar.gz</a>',
        '<a href="some_project-1.9.tar.gz" data-yanked="">some_project-1.9.tar.gz</a>',
        '<a href="some_project-1.6-py3-none-any.whl">some_project-1.6-py3-none-any.whl</a>',
    ]
    page.write_text("\n".join(links))
    return folder.as_uri()


@pytest.fixture
def only_index(tmp_path: Path, archive: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    monkeypatch.setenv("PIP_INDEX_URL", index(tmp_path / "simple", archive, digest))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    return tmp_path / "simple" / "some-project" / "index.html"


@pytest.mark.usefixtures("only_index")
@pytest.mark.parametrize("requirement", ["some.project==1.5", "Some-Project"])
def test_requirement_is_downloaded_and_not_run(
    requirement: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert files(sources.fetch(requirement, tmp_path / "copy").folder) == ARCHIVED
    # Who has mistyped the name of a folder sees what is built instead.
    assert (
        "torchwheels: fetching some_project-1.5.tar.gz from an index\n" in capsys.readouterr().out
    )


@pytest.mark.usefixtures("only_index")
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("some-project==7", "no sources of some-project==7: the newest versions are 1.5, 1.4"),
        ("other-project==1", "no index that pip is configured for has sources of other-project"),
        ("./no-folder", "there is no ./no-folder: a source is a folder, an archive"),
        ("git+https://localhost/x", "git+https://localhost/x names no commit"),
        ("git+file:///none@main", "git cannot fetch git+file:///none@main"),
    ],
)
def test_error_says_what_a_source_is(source: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        sources.fetch(source, tmp_path / "copy")
    assert message in str(error.value)


def test_archive_with_another_hash_is_refused(only_index: Path, tmp_path: Path) -> None:
    only_index.write_text(only_index.read_text().replace("sha256=", f"sha256={'0' * 64}&"))
    with pytest.raises(UserError, match=r"some-project==1\.5 are missing or not what"):
        sources.fetch("some-project==1.5", tmp_path / "copy")


@pytest.mark.usefixtures("only_index")
def test_a_withdrawn_release_is_taken_if_its_version_is_named(
    only_index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = only_index.read_text().replace("<a ", '<a data-yanked="it is wrong" ')
    only_index.write_text(page)
    assert files(sources.fetch("some-project==1.5", tmp_path / "copy").folder) == ARCHIVED
    assert "some_project-1.5.tar.gz was withdrawn: it is wrong\n" in capsys.readouterr().out
    with pytest.raises(UserError, match="no index that pip is configured for has sources of some-"):
        sources.fetch("some-project>=1.5", tmp_path / "again")


class Odd(http.server.BaseHTTPRequestHandler):
    """An index whose answers are none: the path says which."""

    def do_GET(self) -> None:
        body = ODD[self.path.split("/")[1]]
        is_page = body.startswith(b"<")
        self.send_response(200)
        kind = "text/html" if is_page else "application/vnd.pypi.simple.v1+json"
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body)


ODD = {
    "cut": b'{"files": [',
    "list": b"[]",
    "null": b'{"files": null}',
    "deep": b"[" * 100_000,
    "address": b'<a href="http://[::1/x-1.tar.gz">x-1.tar.gz</a>',
    "latin": b"<a href='/x-1.tar.gz'>\xe9</a>",
}


@pytest.mark.parametrize("kind", ODD)
def test_an_answer_that_nobody_can_read_is_one_sentence(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Odd) as server:
        threading.Thread(target=server.serve_forever).start()
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/{kind}")
        with pytest.raises(UserError) as caught:
            sources.fetch("x==1", tmp_path / "copy")
        server.shutdown()
    assert re.match(r"an index .* says of x what cannot be read \(", str(caught.value))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ALL_PROXY", "socks5h://127.0.0.1:1"),
        ("HTTPS_PROXY", "ftp://x"),
        ("HTTPS_PROXY", "http://[::1"),
        ("PIP_PROXY", "ftp://x"),
        ("PIP_CERT", "/nothing"),
        ("PIP_TRUSTED_HOST", "a:b:c"),
    ],
)
def test_a_proxy_or_a_certificate_that_is_none_is_named(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://localhost:9/simple")
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"^nothing can be fetched with the proxy, .*: correct"):
        sources.fetch("x==1", tmp_path / "copy")


def test_the_proxy_of_pip_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://nowhere.invalid/simple")
    monkeypatch.setenv("PIP_PROXY", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"nowhere\.invalid does not answer \(.*refused"):
        sources.fetch("x==1", tmp_path / "copy")


class Private(http.server.SimpleHTTPRequestHandler):
    """An index that asks for a password, and has moved."""

    def do_GET(self) -> None:
        login = f"Basic {base64.b64encode(b'me:pass word').decode()}"
        if self.headers["Authorization"] != login:
            self.send_error(401)
        elif self.path.startswith("/simple/"):
            self.send_response(301)
            self.send_header("Location", self.path.replace("/simple/", "/moved/"))
            self.end_headers()
        else:
            super().do_GET()


@pytest.fixture
def private_index(tmp_path: Path, archive: Path) -> Iterator[str]:
    page = tmp_path / "moved" / "some-project" / "index.html"
    page.parent.mkdir(parents=True)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    page.write_text(f'<a href="/{archive.name}#sha256={digest}">{archive.name}</a>')
    handler = functools.partial(Private, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"127.0.0.1:{server.server_port}/simple"
        server.shutdown()


def test_private_index_gets_its_password(
    private_index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:pass%20word@{private_index}")
    assert files(sources.fetch("some-project", tmp_path / "copy").folder) == ARCHIVED
    monkeypatch.setenv("PIP_INDEX_URL", f"http://{private_index}")
    with pytest.raises(
        UserError,
        match=r"has sources of some-project \(127\.0\.0\.1 answers 401\): check the name and pip",
    ):
        sources.fetch("some-project", tmp_path / "again")


@pytest.mark.parametrize(
    ("data", "why"),
    [(b"\xff\xfe", "'utf-8' codec can't decode byte 0xff"), (None, "Permission denied")],
)
def test_a_file_with_passwords_that_nobody_can_read_is_named(
    data: bytes | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, read = tmp_path / "own.netrc", Path.read_text

    def denied(path: Path, *given: str, **named: str) -> str:
        if path == file and data is None:  # also to root, who may read all
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, *given, **named)

    file.write_bytes(data or b"")
    monkeypatch.setattr(Path, "read_text", denied)
    monkeypatch.setenv("NETRC", str(file))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    said = rf"own\.netrc, which holds passwords, .*{why}.*: make it .*, or have NETRC name another$"
    with pytest.raises(UserError, match=said):
        sources.fetch("some-project", tmp_path / "copy")
    with pytest.raises(UserError, match=said):
        environments.clean_variables(tmp_path)


def test_nobody_has_passwords_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user whom a container does not know."""
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.setenv("HOME", "~nobody-has-this-name")
    monkeypatch.setattr(Path, "expanduser", mock.Mock(side_effect=RuntimeError))
    assert indexes.passwords() is None


def test_no_index_is_asked_where_pip_asks_none(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But the folders in which it finds links."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://localhost:1/simple")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        UserError, match=r"^no index that pip is configured for has sources of some"
    ):
        sources.fetch("some-project==1.5", tmp_path / "copy")
    monkeypatch.setenv("PIP_FIND_LINKS", str(archive.parent))
    fetched = sources.fetch("some-project==1.5", tmp_path / "copy")
    assert fetched.origin == f"sha256:{hashlib.sha256(archive.read_bytes()).hexdigest()}"
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    with pytest.raises(UserError, match=r"^localhost does not answer"):
        sources.fetch("some-project==1.5", tmp_path / "again")
    assert indexes.uv_options() == []


def test_index_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(UserError, match=r"127\.0\.0\.1 does not answer \(.*refused"):
        sources.fetch("some-project", tmp_path / "copy")


def test_a_server_of_git_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [x.replace("Time=60", "Time=1") for x in sources._LIMITS]
    monkeypatch.setattr(sources, "_LIMITS", limits)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"git+http://127.0.0.1:{server.getsockname()[1]}/x@v1"
        with pytest.raises(UserError, match=r"git cannot fetch .*too slow"):
            sources.fetch(url, tmp_path / "copy")


def test_commit_is_cloned(folder: Path, tmp_path: Path) -> None:
    git = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x"]
    for command in (["init", "-q"], ["add", "setup.py"], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *command], check=True)
    (folder / "setup.py").write_text("something newer")
    head = subprocess.run(
        [*git, "rev-parse", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    fetched = sources.fetch(f"git+{folder.as_uri()}@{head}", tmp_path / "copy")
    assert fetched.origin == f"git:{head}"
    assert (fetched.folder / "setup.py").read_text() == SETUP


def repository(folder: Path, **files: str) -> str:
    """A git repository with these files, a tag, and a password in its settings; returns its commit."""
    folder.mkdir()
    for name, text in files.items():
        (folder / name.replace("__", "/")).parent.mkdir(exist_ok=True)
        (folder / name.replace("__", "/")).write_text(text)
    git = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"], ["tag", "v1.2"]):
        subprocess.run([*git, *words], check=True)
    address = "https://me:password@localhost/x"
    subprocess.run([*git, "remote", "add", "origin", address], check=True)
    said = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return said.stdout.strip()


@pytest.mark.parametrize("kind", ["{}", "git+file://{}@v1.2"])
def test_commits_are_copied(kind: str, tmp_path: Path) -> None:
    """Without the settings of the repository: any setup.py may ask git for its version."""
    commit = repository(tmp_path / "x", **{"setup.py": "", "data__kept": ""})
    found = sources.fetch(kind.format(tmp_path / "x"), tmp_path / "copy")
    assert found.origin == f"git:{commit}"
    assert (found.folder / "data" / "kept").is_file()
    describe = ["git", "-C", str(found.folder), "describe", "--tags", "--dirty"]
    said = subprocess.run(describe, check=True, capture_output=True, text=True).stdout
    assert said == "v1.2\n"
    assert "refs/tags/v1.2" in sources.versions(found.folder)
    for file in (found.folder / ".git").rglob("*"):
        assert file.is_dir() or b"password" not in file.read_bytes()


@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_part_of_a_repository_lacks_what_that_ignores(is_ignored: bool, tmp_path: Path) -> None:
    """But not where it is no part of it, as what was unpacked into a folder that is ignored."""
    part = tmp_path / "repository" / "part"
    part.mkdir(parents=True)
    for name in ("setup.py", "password.env", "made/x"):
        (part / name).parent.mkdir(exist_ok=True)
        (part / name).touch()
    ignored = "*.env\nmade\n" + "part\n" * is_ignored
    (part.parent / ".gitignore").write_text(ignored)
    for words in (["init", "--quiet"], ["add", "--all"]):
        subprocess.run(["git", "-C", str(part.parent), *words], check=True)
    sources.fetch(str(part), tmp_path / "copy")
    copied = {x.name for x in (tmp_path / "copy").iterdir()}
    assert copied == ({"setup.py", "password.env", "made"} if is_ignored else {"setup.py"})


@pytest.mark.parametrize("path", ["repository", "repository/part"])
def test_a_repository_needs_git(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, what it ignores would be built."""
    (tmp_path / "repository" / "part").mkdir(parents=True)
    (tmp_path / "repository" / ".git").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=rf"{path} is of a repository, and git, .*: install git"):
        sources.fetch(str(tmp_path / path), tmp_path / "copy")


def test_settings_of_git_change_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the user, of the repository, and what another one lends it."""
    commit, run = repository(tmp_path / "lender", **{"setup.py": ""}), tmp_path / "run"
    shared = ["git", "clone", "--quiet", "--shared", str(tmp_path / "lender"), str(tmp_path / "x")]
    subprocess.run(shared, check=True)
    (run.with_suffix(".sh")).write_text(f"#!/bin/sh\ntouch {run}\n")
    (run.with_suffix(".sh")).chmod(0o755)
    git = [
        "git",
        "-C",
        str(tmp_path / "x"),
        "config",
        "core.fsmonitor",
        str(run.with_suffix(".sh")),
    ]
    subprocess.run(git, check=True)
    (tmp_path / "settings").write_text("[clone]\ndefaultRemoteName = upstream\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "settings"))
    found = sources.fetch(str(tmp_path / "x"), tmp_path / "copy")
    assert found.origin == f"git:{commit}"
    assert not run.exists()
    (tmp_path / "lender").rename(tmp_path / "gone")
    assert "refs/tags/v1.2" in sources.versions(found.folder)
    subprocess.run(["git", "-C", str(found.folder), "fsck", "--strict"], check=True)


@pytest.mark.parametrize("place", ["x", "x/library"])
@pytest.mark.parametrize("setting", ["filter.a.clean", "filter.a.process", "core.fsmonitor"])
def test_commands_that_a_repository_names_do_not_run(
    setting: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has made it; the folder of sources may be somebody's, and is built in a container."""
    monkeypatch.setenv("GIT_ALLOW_PROTOCOL", "file")
    repository(tmp_path / "library", **{"a.h": "", ".gitattributes": "* filter=a\n"})
    repository(tmp_path / "x", **{"setup.py": "", ".gitattributes": "* filter=a\n"})
    git = ["git", "-C", str(tmp_path / "x"), "-c", "user.name=x", "-c", "user.email=x"]
    for words in (
        ["submodule", "--quiet", "add", (tmp_path / "library").as_uri(), "library"],
        ["commit", "-q", "-m", "y"],
    ):
        subprocess.run([*git, *words], check=True)
    file = next(x for x in (tmp_path / place).iterdir() if x.name in ("setup.py", "a.h"))
    file.write_text("changed")
    (tmp_path / "settings").write_text("")
    included = ["git", "-C", str(tmp_path / place), "config", "include.path"]
    subprocess.run([*included, str(tmp_path / "settings")], check=True)
    command = ["git", "config", "--file", str(tmp_path / "settings"), setting]
    subprocess.run([*command, f"touch {tmp_path}/run; cat"], check=True)
    found = sources.fetch(str(tmp_path / "x"), tmp_path / "copy")
    assert found.origin.startswith("sha256:")
    assert not (tmp_path / "run").exists()
    name = ["git", "config", "--file", str(tmp_path / "settings"), "filter.a=b.clean", "true"]
    subprocess.run(name, check=True)
    with pytest.raises(UserError, match=r"settings of \S+ name a filter a=b, .*: remove it from"):
        sources.fetch(str(tmp_path / "x"), tmp_path / "again")


def test_a_repository_fetches_nothing(tmp_path: Path) -> None:
    """What a partial clone lacks comes by a command that its settings name."""
    folder = tmp_path / "x"
    repository(folder, **{"setup.py": ""})
    git = ["git", "-C", str(folder)]
    tree = subprocess.check_output([*git, "rev-parse", "HEAD^{tree}"], text=True).strip()
    (folder / ".git" / "objects" / tree[:2] / tree[2:]).unlink()
    (folder / ".git" / "index").unlink()
    for name, value in (
        ("core.repositoryFormatVersion", "1"),
        ("extensions.partialClone", "origin"),
        ("remote.origin.promisor", "true"),
        ("remote.origin.url", str(folder)),
        ("remote.origin.uploadpack", f"touch {tmp_path}/run; git-upload-pack"),
    ):
        subprocess.run([*git, "config", name, value], check=True)
    with pytest.raises(UserError, match=r"^git refuses to read \S+/x: .*: mend it, or remove its"):
        sources.fetch(str(folder), tmp_path / "copy")
    assert not (tmp_path / "run").exists()


def test_what_git_will_commit_is_of_the_copy(tmp_path: Path) -> None:
    """setuptools-scm packs the files that git knows, a new one among them."""
    repository(tmp_path / "x", **{"setup.py": "", "old.txt": ""})
    (tmp_path / "x" / "new.txt").touch()
    git = ["git", "-C", str(tmp_path / "x")]
    for words in (["add", "new.txt"], ["rm", "--quiet", "--cached", "old.txt"]):
        subprocess.run([*git, *words], check=True)
    found = sources.fetch(str(tmp_path / "x"), tmp_path / "copy")
    listed = ["git", "-C", str(found.folder), "ls-files"]
    done = subprocess.run(listed, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["new.txt", "setup.py"]


@pytest.mark.parametrize("hidden", ["skip-worktree", "assume-unchanged"])
def test_a_changed_file_that_git_does_not_look_at_is_no_commit(hidden: str, tmp_path: Path) -> None:
    repository(tmp_path / "x", **{"setup.py": ""})
    git = ["git", "-C", str(tmp_path / "x"), "update-index", f"--{hidden}", "setup.py"]
    subprocess.run(git, check=True)
    (tmp_path / "x" / "setup.py").write_text("changed = True")
    found = sources.fetch(str(tmp_path / "x"), tmp_path / "copy")
    assert found.origin == f"sha256:{sources.hash_of_folder(found.folder)}"


def test_a_hook_of_git_keeps_its_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """git names the hook's repository by variables; the settings of another one must not be changed."""
    commit = repository(tmp_path / "x", **{"setup.py": ""})
    repository(tmp_path / "y", **{"setup.cfg": ""})
    settings = (tmp_path / "y" / ".git" / "config").read_bytes()
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "y" / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "y" / ".git" / "index"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "y"))
    found = sources.fetch(str(tmp_path / "x"), tmp_path / "copy")
    assert (found.origin, files(found.folder)) == (f"git:{commit}", {"setup.py"})
    assert (tmp_path / "y" / ".git" / "config").read_bytes() == settings
    assert "refs/tags/v1.2" in sources.versions(found.folder)


def test_a_repository_without_commits_is_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["git", "init", "--quiet", tmp_path / "x"], check=True)
    (tmp_path / "x" / "setup.py").touch()
    found = sources.fetch(str(tmp_path / "x"), tmp_path / "copy")
    assert files(found.folder) == {"setup.py"}
    assert sources.versions(found.folder) == capsys.readouterr().out == ""


def test_a_submodule_without_an_address_ends_no_build(tmp_path: Path) -> None:
    """git itself then says that this is fatal."""
    commit = repository(tmp_path / "x", **{"setup.py": "", ".gitmodules": ""})
    git = ["git", "-C", str(tmp_path / "x"), "-c", "user.name=x", "-c", "user.email=x"]
    for words in (
        ["update-index", "--add", "--cacheinfo", f"160000,{commit},below"],
        ["commit", "-qm", "y"],
    ):
        subprocess.run([*git, *words], check=True)
    (tmp_path / "x" / "below").mkdir()
    found = sources.fetch(str(tmp_path / "x"), tmp_path / "copy")
    assert files(found.folder) == {".gitmodules", "setup.py"}
    assert found.origin.startswith("git:")


def test_a_repository_of_another_owner_is_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it ignores, such as passwords, would be copied, and the commit lost."""
    repository(tmp_path / "x", **{"setup.py": ""})
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    why = r"git refuses to read .*: fatal: detected dubious ownership.*git config --global --add safe\.dir"
    with pytest.raises(UserError, match=why):
        sources.fetch(str(tmp_path / "x"), tmp_path / "copy")


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        (".git/config", "[core", "bad config line"),
        (".git/index", "no index", "index file smaller than expected"),
        (".git/HEAD", "", "not a git repository"),
    ],
)
def test_a_broken_repository_is_no_folder(file: str, text: str, said: str, tmp_path: Path) -> None:
    """What it ignores would be copied. Nor is it the repository around it."""
    repository(tmp_path / "outer", **{"setup.py": ""})
    repository(tmp_path / "outer" / "x", **{"setup.py": "", ".gitignore": "secret\n"})
    (tmp_path / "outer" / "x" / file).write_text(text)
    why = rf"git refuses to read {tmp_path}/outer/x: .*{said}.*: mend it, or remove its \.git$"
    with pytest.raises(UserError, match=why):
        sources.fetch(str(tmp_path / "outer" / "x"), tmp_path / "copy")


@pytest.mark.parametrize("is_repository", [False, True])
def test_names_may_have_any_bytes_and_pipes_are_no_sources(
    is_repository: bool, tmp_path: Path
) -> None:
    folder, name = tmp_path / "x", os.fsdecode(b"caf\xe9.cpp")
    if is_repository:
        repository(folder, **{"setup.py": "", name: "", ".gitignore": "ignored*\n"})
        (folder / os.fsdecode(b"ignored-\xe9")).touch()
    else:
        folder.mkdir()
        (folder / name).touch()
    os.mkfifo(folder / "pipe")
    (folder / "outwards").symlink_to("/dev/zero")
    (folder / "nowhere").symlink_to("../nowhere")
    found = sources.fetch(str(folder), tmp_path / "copy")
    usual = {"setup.py", ".gitignore"} if is_repository else set()
    assert {x.name for x in found.folder.iterdir()} - {".git"} == {
        name,
        "outwards",
        "nowhere",
        *usual,
    }
    assert (found.folder / "outwards").is_symlink()


@pytest.mark.parametrize("name", ["setup.cfg", "PKG-INFO", "pyproject.toml", ".gitmodules", "x"])
def test_no_file_outside_of_the_sources_is_read(name: str, folder: Path, tmp_path: Path) -> None:
    """A stranger's link may lead to what has no end, such as /proc/kmsg, or to what nobody may read."""
    outside = tmp_path / "outside"
    outside.write_text('Name: secret\nname = "secret"\nrequires-python = ">=9"\npath = secret\n')
    (folder / name).symlink_to(outside)
    with (
        mock.patch.object(Path, "open", autospec=True, side_effect=Path.open) as opened,
        sources.fetched(str(folder), "", "") as found,
    ):
        assert (found.name, str(sources.pythons_of(found.folder))) == ("project", "")
        assert sources.empty_submodules(found.folder) == []
    assert found.folder / name not in [x.args[0] for x in opened.call_args_list]


@pytest.mark.parametrize("is_repository", [False, True])
def test_what_this_tool_has_made_is_no_source(is_repository: bool, tmp_path: Path) -> None:
    """Else each build into a folder of the project is one of other sources."""
    folder = tmp_path / "x"
    if is_repository:
        repository(folder, **{"setup.py": ""})
    else:
        folder.mkdir()
        (folder / "setup.py").touch()
    before = sources.fetch(str(folder), tmp_path / "before")
    for name in ("out", "site"):
        (marked(folder / name) / "x.whl").touch()
    found = sources.fetch(str(folder), tmp_path / "copy")
    assert found.origin == before.origin
    assert files(found.folder) == files(before.folder)


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("git+https://h/x@v1#subdirectory=a/b&egg=n", ("git+https://h/x@v1", "n", "a/b")),
        ("n @ git+https://h/x@f/y", ("git+https://h/x@f/y", "n", "")),
        ("n@git+ssh://git@h/x@v1#subdirectory=a", ("git+ssh://git@h/x@v1", "n", "a")),
        ("n == 1.0", ("n == 1.0", "", "")),
        ("./x#y @ 2", ("./x#y @ 2", "", "")),
    ],
)
def test_a_source_may_say_its_name_and_folder(source: str, parts: tuple[str, str, str]) -> None:
    assert sources.parts(source) == parts


def test_a_branch_may_have_a_slash(tmp_path: Path) -> None:
    repository(tmp_path / "x", **{"setup.py": ""})
    subprocess.run(["git", "-C", tmp_path / "x", "checkout", "-qb", "my/branch"], check=True)
    found = sources.fetch(f"git+file://{tmp_path / 'x'}@my/branch", tmp_path / "copy")
    assert files(found.folder) == {"setup.py"}


def test_commit_has_what_only_looks_like_leftovers(tmp_path: Path) -> None:
    repository(tmp_path / "x", **{"setup.py": "", "build__tracked": ""})
    found = sources.fetch(f"git+file://{tmp_path / 'x'}@v1.2", tmp_path / "copy")
    assert files(found.folder) == {"setup.py", "build/tracked"}


@pytest.mark.parametrize("name", ["build/tracked", "dist/tracked", "x.egg-info/tracked"])
def test_folder_of_a_commit_has_what_the_commit_has(name: str, tmp_path: Path) -> None:
    """What git ignores, such as what a build has left, is no part of it."""
    folder = tmp_path / "x"
    files_of_it = {"setup.py": "", name.replace("/", "__"): "", ".gitignore": "*.so\n/made/\n"}
    commit = repository(folder, **files_of_it)
    for path in ("x.so", "made/x.cpp", "__pycache__/x.pyc"):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).touch()
    (folder / ".git" / "info" / "exclude").write_text("__pycache__\n")
    found = sources.fetch(str(folder), tmp_path / "copy")
    assert files(found.folder) == {"setup.py", ".gitignore", name}
    assert found.origin == f"git:{commit}"
    (folder / "own.cpp").touch()
    changed = sources.fetch(str(folder), tmp_path / "another")
    assert files(changed.folder) == {"setup.py", ".gitignore", name, "own.cpp"}
    assert changed.origin == f"sha256:{sources.hash_of_folder(changed.folder)}"


def test_folder_of_a_commit_has_what_its_submodules_have(tmp_path: Path) -> None:
    """Also where a setting has git pass over files that it does not know."""
    folder = tmp_path / "x"
    repository(tmp_path / "library", **{"x.h": "", ".gitignore": "*.so\n"})
    repository(folder, **{"setup.py": ""})
    git = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x"]
    for command in (
        [
            "-c",
            "protocol.file.allow=always",
            "submodule",
            "--quiet",
            "add",
            str(tmp_path / "library"),
            "below",
        ],
        ["commit", "-q", "-m", "y"],
        ["config", "status.showUntrackedFiles", "no"],
    ):
        subprocess.run([*git, *command], check=True)
    (folder / "below" / "x.so").touch()
    clean = sources.fetch(str(folder), tmp_path / "clean")
    assert clean.origin.startswith("git:")
    assert files(clean.folder) == {"setup.py", ".gitmodules", "below/x.h", "below/.gitignore"}
    for number, path in enumerate(("below/more.h", "more.cpp")):
        (folder / path).touch()
        changed = sources.fetch(str(folder), tmp_path / str(number))
        assert changed.origin.startswith("sha256:")
        assert path in files(changed.folder)
        (folder / path).unlink()


def test_commit_has_what_its_submodules_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of a submodule."""
    monkeypatch.setenv("GIT_ALLOW_PROTOCOL", "file")
    repository(tmp_path / "inner", **{"x.h": ""})
    for name, below in (("library", "inner"), ("x", "library")):
        repository(tmp_path / name, **{"setup.py": ""})
        git = ["git", "-C", str(tmp_path / name), "-c", "user.name=x", "-c", "user.email=x"]
        add = ["submodule", "--quiet", "add", (tmp_path / below).as_uri(), below]
        for command in (add, ["commit", "-q", "-m", "y"], ["tag", "v2"]):
            subprocess.run([*git, *command], check=True)
    found = sources.fetch(f"git+{(tmp_path / 'x').as_uri()}@v2", tmp_path / "copy")
    assert (found.folder / "library" / "inner" / "x.h").is_file()
    assert sources.empty_submodules(found.folder) == []


def test_a_wheel_is_no_source(archive: Path, tmp_path: Path) -> None:
    wheel = archive.rename(tmp_path / "x-1-py3-none-any.whl")
    for source in (str(wheel), f"x @ {wheel.as_uri()}"):
        with pytest.raises(UserError, match=r"^x-1-py3-none-any\.whl is a wheel, which is built"):
            sources.fetch(source, tmp_path / "copy")


def test_zip_archive_keeps_what_can_be_run(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for name, mode in (("x/setup.py", 0o644), ("x/configure", 0o755)):
            member = zipfile.ZipInfo(name)
            member.external_attr = mode << 16
            archive.writestr(member, "")
    found = sources.fetch(str(tmp_path / "x.zip"), tmp_path / "copy").folder
    modes = {path.name: path.stat().st_mode & 0o111 for path in found.iterdir()}
    assert modes["configure"] and not modes["setup.py"]


def test_links_in_a_zip_archive_are_links(tmp_path: Path) -> None:
    """As in a tar archive: a text with the name of a header is no header."""
    for name, target in (("x", "real.h"), ("y", "../../../out.h"), ("z", "/etc/hostname")):
        with zipfile.ZipFile(tmp_path / f"{name}.zip", "w") as archive:
            link = zipfile.ZipInfo("x/include/a.h")
            link.external_attr = (stat.S_IFLNK | 0o777) << 16
            archive.writestr(link, target)
            archive.writestr("x/include/real.h", "int x;")
        if name == "x":
            found = sources.fetch(str(tmp_path / "x.zip"), tmp_path / "copy").folder
            assert (found / "include/a.h").readlink() == Path("real.h")
        else:
            with pytest.raises(
                UserError, match=r"\.zip cannot be unpacked \(x/include/a.h .* outside"
            ):
                sources.fetch(str(tmp_path / f"{name}.zip"), tmp_path / name)


def test_archives_that_contradict_themselves_are_said_in_a_sentence(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "link.tar.gz", "w:gz") as tar:
        member = tarfile.TarInfo("x/a")
        member.type, member.linkname = tarfile.LNKTYPE, "x/missing"
        tar.addfile(member)
    with zipfile.ZipFile(tmp_path / "clash.zip", "w") as archive:
        archive.writestr("x/a", "")
        archive.writestr("x/a/b", "")
    with zipfile.ZipFile(tmp_path / "secret.zip", "w") as archive:
        archive.writestr("x/a", "text")
    data = bytearray((tmp_path / "secret.zip").read_bytes())
    for magic, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        data[data.index(magic) + offset] |= 1  # encrypted
    (tmp_path / "secret.zip").write_bytes(data)
    for name, why in (
        ("link.tar.gz", "(x/missing|x/a is a link)"),  # Pythons before 3.11.4 take no links
        ("clash.zip", "x/a/b"),
        ("secret.zip", "encrypted"),
    ):
        said = rf"/{name} cannot be unpacked \([^()]*{why}[^()]*\): a source is "
        with pytest.raises(UserError, match=said):
            sources.fetch(str(tmp_path / name), tmp_path / "copy")


@pytest.mark.parametrize("name", ["TIMEOUT", "NO_INPUT"])  # of which pip says the one on stdout
def test_what_pip_cannot_read_is_said_with_the_reason(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"PIP_{name}", "x")
    with pytest.raises(UserError, match=r"^pip cannot read its configuration: .*\bx\b"):
        indexes.pip_settings("install")
