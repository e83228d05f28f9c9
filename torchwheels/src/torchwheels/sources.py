"""Fetches sources: from an index, a folder, an archive, or a commit. None of their code runs."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import importlib
import re
import shutil
import ssl
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidSdistFilename, canonicalize_name, parse_sdist_filename
from packaging.version import Version

from torchwheels.errors import UserError

EXPECTED = (
    "a source is a folder, an archive (.tar.gz or .zip), `NAME==VERSION` from PyPI, or "
    "`git+URL@COMMIT`"
)
_TIMEOUT = 60  # seconds without an answer
# What earlier builds leave in a folder, and setuptools would pack again. What git keeps may hold a password.
_LEFTOVERS = {"build", "dist", ".nox", ".venv", "venv"}


@dataclass(frozen=True)
class Fetched:
    """Sources, what identifies them (a hash, or a commit), and what any version of them is from."""

    folder: Path
    origin: str
    project: str = ""


def fetch(source: str, into: Path) -> Fetched:
    """Puts the sources that `source` names into the folder `into`, which must not exist yet."""
    path = Path(source).expanduser()
    if source.startswith("git+"):
        return _clone(source, into)
    if path.is_dir():
        found = replace(_copy(path, into), project=str(path.resolve()))
        commit = _commit_of(path)
        return replace(found, origin=f"git:{commit}") if commit else found
    if path.is_file():
        return replace(_unpack(path, into), project=str(path.resolve()))
    try:
        requirement = Requirement(source)
    except InvalidRequirement:
        raise UserError(f"there is no {source}: {EXPECTED}") from None
    with tempfile.TemporaryDirectory(prefix="torchwheels-") as folder:
        found = _unpack(_download(requirement, Path(folder)), into)
    return replace(found, project=requirement.name)


def _copy(folder: Path, into: Path) -> Fetched:
    def leftovers(where: str, names: list[str]) -> set[str]:
        top = Path(where) == folder
        return {
            name
            for name in names
            if name in ("__pycache__", ".git")
            or (top and (name in _LEFTOVERS or name.endswith(".egg-info")))
        }

    shutil.copytree(folder, into, symlinks=True, ignore=leftovers)
    return Fetched(into, f"sha256:{hash_of_folder(into)}")


def _commit_of(folder: Path) -> str | None:
    """The commit of a git repository in which nothing has been changed since."""
    if not (folder / ".git").exists() or shutil.which("git") is None:
        return None
    commands = (["status", "--porcelain"], ["rev-parse", "HEAD"])
    done = [
        subprocess.run(["git", *x], cwd=folder, capture_output=True, text=True) for x in commands
    ]
    if any(x.returncode != 0 for x in done) or done[0].stdout:
        return None
    return done[1].stdout.strip()


def hash_of_folder(folder: Path) -> str:
    """One hash of the names and contents of all files in `folder`, but what git keeps of its own."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and ".git" not in path.relative_to(folder).parts:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{path.relative_to(folder)} {content}\n".encode())
    return digest.hexdigest()


def _unpack(archive: Path, into: Path) -> Fetched:
    with tempfile.TemporaryDirectory(dir=into.parent, prefix="unpacked-") as name:
        try:
            if zipfile.is_zipfile(archive):
                with zipfile.ZipFile(archive) as zipped:
                    zipped.extractall(name)
            else:
                with tarfile.open(archive) as tar:
                    _keep_inside(tar)
                    tar.extractall(name)
        except (tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
            raise UserError(f"{archive} cannot be unpacked ({error}): {EXPECTED}") from None
        entries = list(Path(name).iterdir())
        # An archive of sources holds one folder; GitHub's do, too.
        top = entries[0] if len(entries) == 1 and entries[0].is_dir() else Path(name)
        _copy(top, into)
    return Fetched(into, f"sha256:{hashlib.sha256(archive.read_bytes()).hexdigest()}")


def _keep_inside(tar: tarfile.TarFile) -> None:
    """No member shall leave the folder."""
    if hasattr(tarfile, "data_filter"):
        tar.extraction_filter = tarfile.data_filter
        return
    for member in tar:  # Pythons before 3.11.4 know no filter
        path = Path(member.name)
        if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
            raise tarfile.TarError(f"{member.name} is a link, a device or outside of the folder")


def _clone(source: str, into: Path) -> Fetched:
    url, at, commit = source.removeprefix("git+").rpartition("@")
    if not at or "/" in commit:
        raise UserError(f"{source} names no commit: write `{source}@COMMIT`, with a tag or a hash")
    if url.startswith("-") or commit.startswith("-"):
        raise UserError(f"{source} is not a source: {EXPECTED}")
    for command in (
        ["clone", "--quiet", "--no-checkout", "--", url, str(into)],
        ["-C", str(into), "checkout", "--quiet", "--detach", commit],
        ["-C", str(into), "submodule", "--quiet", "update", "--init", "--recursive"],
    ):
        try:
            done = subprocess.run(["git", *command], capture_output=True, text=True)
        except FileNotFoundError:
            raise UserError(f"there is no `git` command to fetch {source}: install git") from None
        if done.returncode != 0:
            said = " ".join(done.stderr.split())
            raise UserError(f"git cannot fetch {source} ({said}): check the address and the commit")
    show = ["git", "-C", str(into), "rev-parse", "HEAD"]
    head = subprocess.run(show, capture_output=True, text=True, check=True).stdout.strip()
    return Fetched(into, f"git:{head}", url)


def _download(requirement: Requirement, folder: Path) -> Path:
    """The newest sources that `requirement` allows, checked against the hash of the index.

    Not with `pip download`: that runs the setup.py to learn what it requires.
    """
    name = requirement.name
    settings = _pip_settings()
    index_url = settings.get("index-url") or _default_index()
    indexes = [index_url, *settings.get("extra-index-url", "").split()]
    context = ssl.create_default_context(cafile=settings.get("cert"))
    found: dict[Version, tuple[str, str]] = {}
    for index in indexes:
        for url, file in _links(f"{index.rstrip('/')}/{canonicalize_name(name)}/", context):
            try:
                project, version = parse_sdist_filename(file)
            except InvalidSdistFilename:
                continue
            if project == canonicalize_name(name):
                found.setdefault(version, (url, file))
    if not found:
        raise UserError(
            f"no index that pip is configured for has sources of {name}: check the name, or name a "
            "folder, an archive or `git+URL@COMMIT`"
        )
    allowed = sorted(requirement.specifier.filter(found))
    if not allowed:
        newest = ", ".join(str(version) for version in sorted(found, reverse=True)[:3])
        raise UserError(f"there are no sources of {requirement}: the newest versions are {newest}")
    url, file = found[allowed[-1]]
    data = _read(url, context)
    expected = re.search(r"#sha256=([0-9a-f]{64})", url)
    if data is None or (expected and hashlib.sha256(data).hexdigest() != expected[1]):
        raise UserError(
            f"{file} is missing or not what its index says it is: try again, or download it yourself "
            "and name the file"
        )
    archive = folder / file
    archive.write_bytes(data)
    return archive


def _default_index() -> str:
    """PyPI's address, as pip knows it."""
    module: Any = importlib.import_module("pip._internal.models.index")
    return str(module.PyPI.simple_url)


def _pip_settings() -> dict[str, str]:
    """What pip's files and variables say, the later more strongly: `index-url`, `cert` ..."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = re.findall(r"^(?:global|:env:|download)\.([\w-]+)='(.*)'$", done.stdout, re.MULTILINE)
    return {key: value.replace("\\n", " ") for key, value in lines}


class _Links(html.parser.HTMLParser):
    """The addresses on a page of an index."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "a" and given.get("href") and "data-yanked" not in given:
            self.found.append(str(given["href"]))


def _links(page: str, context: ssl.SSLContext) -> list[tuple[str, str]]:
    """The address and file name of everything on a page; nothing where there is no such page."""
    data = _read(page, context)
    parser = _Links()
    parser.feed((data or b"").decode(errors="replace"))
    addresses = [urllib.parse.urljoin(page, link) for link in parser.found]
    return [
        (x, urllib.parse.unquote(urllib.parse.urlsplit(x).path.split("/")[-1])) for x in addresses
    ]


def _read(url: str, context: ssl.SSLContext) -> bytes | None:
    """What is at `url`; None where there is nothing."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "file":
        path = Path(urllib.parse.unquote(parts.path))
        path = path / "index.html" if path.is_dir() else path
        return path.read_bytes() if path.is_file() else None
    request = urllib.request.Request(parts._replace(netloc=parts.netloc.split("@")[-1]).geturl())
    request.add_header("Accept", "text/html")
    if parts.username:
        login = (
            f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        )
        request.add_header("Authorization", f"Basic {base64.b64encode(login.encode()).decode()}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT, context=context) as answer:
            content: bytes = answer.read()
            return content
    except urllib.error.HTTPError as error:
        if error.code in (403, 404, 410):
            return None
        reason: object = error
    except OSError as error:
        reason = getattr(error, "reason", error)
    raise UserError(
        f"{parts.hostname} does not answer ({reason}): check the network and pip's configuration, or "
        "name a folder or an archive"
    )
