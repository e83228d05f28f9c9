"""Fetches sources: from an index, a folder, an archive, or a commit. None of their code runs."""

import contextlib
import hashlib
import os
import re
import shutil
import ssl
import stat
import subprocess
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import httpx2
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from unearth import PackageFinder
from unearth.auth import MultiDomainBasicAuth
from unearth.errors import UnpackError
from unearth.fetchers import PyPIClient
from unearth.preparer import download_link

from torchwheels.errors import UserError
from torchwheels.options import indexes
from torchwheels.system import MARK, files, processes, sandbox, scratch, sha256

EXPECTED = "a source is a folder, an archive (.tar.gz or .zip), `NAME==VERSION` from PyPI, or `git+URL@COMMIT`"
_TIMEOUT = 60  # seconds without an answer
# git has none of its own.
_LIMITS = ("-c", "http.lowSpeedLimit=1", "-c", f"http.lowSpeedTime={_TIMEOUT}")
_LEFTOVERS = ("build", "dist", ".nox", ".venv", "venv")

# In a hook of git they name its repository, whatever folder a command is for.
_OF_A_REPOSITORY = (
    "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_NAMESPACE", "GIT_PREFIX", "GIT_SHALLOW_FILE", "GIT_GRAFT_FILE",
)  # fmt: skip

_NAME = r"[A-Za-z0-9][\w.-]*"  # of a project

# Not the @ behind a user's name.
_COMMIT = re.compile(r"git\+((?:\w+://[^/]*/|[^/-][^/]*:(?!//)|[./]).*)@([^@:-][^@:]*)")


@dataclass(frozen=True)
class Fetched:
    """Sources."""

    folder: Path
    origin: str
    """A hash, or a commit."""
    project: str = ""
    """The address or path, without a version."""
    name: str = ""
    """That of the project."""


def parts(source: str) -> tuple[str, str, str]:
    """A source alone, and of a commit what else it says: `NAME @ git+URL@COMMIT#subdirectory=FOLDER`."""
    name = ""
    with contextlib.suppress(InvalidRequirement):
        requirement = Requirement(source)
        if requirement.extras:
            why = "and a wheel is one for all of them: leave them out, and install them with the wheel"
            raise UserError(f"{source} names extras, {why}")
        if requirement.url and requirement.url.startswith("git+"):
            name, source = requirement.name, requirement.url
    if not source.startswith("git+"):
        return source, "", ""
    source, _, fragment = source.partition("#")
    said = parse_qs(fragment)
    name, folder = said.get("egg", [name])[0], said.get("subdirectory", [""])[0]
    return source, name if re.fullmatch(_NAME, name) else "", folder


def is_elsewhere(source: str) -> bool:
    """Whether a source that is no file here has the form of a commit, or of a project on an index."""
    with contextlib.suppress(InvalidRequirement):
        return source.startswith("git+") or bool(Requirement(source))
    return False


def named(source: str, name: str, subdirectory: str) -> tuple[str, str]:
    """The normalised name of the project that a source is of, and of which versions; nothing where it says neither."""
    place = files.expanded(source)
    if place.is_dir():  # of a setup.py only what is its own name for certain
        patterns = {**_NAMES, "setup.py": r"""\bsetup\(\s*name *= *["']([\w.-]+)["']"""}
        name = name or _said(place / subdirectory, patterns)
    with contextlib.suppress(InvalidRequirement):
        if not (name or source.startswith("git+") or place.exists()):
            requirement = Requirement(source)
            return canonicalize_name(requirement.name), str(requirement.specifier)
    return canonicalize_name(name), ""


@contextlib.contextmanager
def fetched(source: str, name: str, subdirectory: str) -> Iterator[Fetched]:
    """The sources of a project, in a folder that goes away at the end; its `name`, where it is known, or its own."""
    with scratch() as work:
        found = fetch(source, work / "source")
        yield replace(found, name=name or name_of(found.folder / subdirectory, found.project))


def fetch(source: str, into: Path) -> Fetched:
    """Puts the sources that `source` names into the folder `into`, which must not exist yet."""
    path = files.expanded(source)
    if source.startswith("git+"):
        return _clone(source, into)
    if path.is_dir():
        _copy(path, into)
        commit = _commit_of(path)
        origin = f"git:{commit}" if commit else f"sha256:{hash_of_folder(into)}"
        return Fetched(into, origin, str(path.resolve()))
    if path.is_file():
        return Fetched(into, _unpack(path, into), str(path.resolve()))
    try:
        requirement = Requirement(source)
    except InvalidRequirement:
        raise UserError(f"there is no {source}: {EXPECTED}") from None
    with scratch() as folder:
        return Fetched(into, _unpack(_download(requirement, folder), into), requirement.name)


def _copy(folder: Path, into: Path, built_in: bool = True) -> None:
    """Copies sources, without what builds leave in a folder that was `built_in`, nor what git ignores in it."""
    ignored = {Path(place, said[2:]) for place, said in _status(folder) if said[0] == "!"}
    ignored |= {*map(Path, _ignored_around(folder))}
    if built_in:  # what earlier builds leave at its top, and setuptools would pack again
        left = {*map(Path, _LEFTOVERS)}
        if not (folder / "PKG-INFO").is_file():  # of an archive, which needs its own
            left |= {x.relative_to(folder) for x in folder.glob("*.egg-info")}
        ignored |= left - {Path(x.partition("/")[0]) for x in _ask_git(folder, "ls-files", "-z")}

    def left_out(where: str, names: list[str]) -> set[str]:
        paths = (Path(where, name) for name in names)
        return {
            x.name
            for x in paths
            if x.name in ("__pycache__", ".git")
            or x.relative_to(folder) in ignored
            # Made by this tool: the copy itself may be in there.
            or any((x / mark).is_file() for mark in (MARK, files.SCRATCH))
            or not (x.is_symlink() or x.is_file() or x.is_dir())  # a pipe, say
        }

    shutil.copytree(folder, into, symlinks=True, ignore=left_out)
    if _ask_git(folder, "rev-parse", "--verify", "--quiet", "HEAD"):
        _copy_commits(folder, into)


def _status(folder: Path) -> Iterator[tuple[str, str]]:
    """What git says of a repository and its submodules, each time with the place of that: of the commit behind `#`,
    of files that it ignores behind `!`, of all that was changed behind something else.
    """
    # Settings may have it say less. Each submodule is asked by itself.
    more = ["--ignored", "--untracked-files=normal", "--ignore-submodules=dirty", "--no-renames"]
    foreach = ["submodule", "--quiet", "foreach", "--recursive", 'printf "%s\\0" "$displaypath"']
    inside = _ask_git(folder, *foreach) if (folder / ".gitmodules").is_file() else ()
    for place in ("", *inside):
        for said in _ask_git(folder / place, "status", "--porcelain=v2", "--branch", *more, "-z"):
            yield place, said
        # A file that git was told not to look at may have been changed.
        files = _ask_git(folder / place, "ls-files", "-v", "-z")
        yield from ((place, said) for said in files if said[0] != "H")


def _ignored_around(folder: Path) -> list[str]:
    """What a repository around a folder ignores in it, where some of its files are there."""
    if (folder / ".git").exists() or not is_in_repository(folder):
        return []
    if not _ask_git(folder, "ls-files", "-z", is_part=True):
        return []
    options = ("--others", "--ignored", "--exclude-standard", "--directory")
    return _ask_git(folder, "ls-files", "-z", *options, is_part=True)


def is_in_repository(folder: Path) -> bool:
    """Whether a folder is a repository, or in one."""
    here = folder.resolve()
    return any((x / ".git").exists() for x in (here, *here.parents))


def _ask_git(folder: Path, *words: str, is_part: bool = False) -> list[str]:
    """What git lists of a repository, or of a part of one; nothing where there is none. An error says that git refuses,
    or is not there.
    """
    if not (is_part or (folder / ".git").exists()):
        return []
    if shutil.which("git") is None:
        why = "says which of its files belong to the sources: install git"
        raise UserError(f"{folder} is of a repository, and git, which is not on PATH, {why}")
    # What a partial clone lacks would be fetched by a command that its settings name.
    variables = {**_variables(), "LC_ALL": "C", "GIT_ALLOW_PROTOCOL": "none"}
    if not is_part:  # in its place it would take a repository around it
        variables["GIT_CEILING_DIRECTORIES"] = str(folder.resolve().parent)

    def ask(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, env=variables)
        said = " ".join(os.fsdecode(done.stderr).split())
        # 1: there is none of what was asked for. A submodule that nobody can fill is left empty.
        if done.returncode not in (0, 1) and "No url found for submodule" not in said:
            raise UserError(f"git refuses to read {folder}: {said}: mend it, or remove its .git")
        return [*filter(None, os.fsdecode(done.stdout).split("\0"))]

    settings = ask("config", "--list", "--show-scope", "--name-only", "-z")
    return ask(*_without_commands(settings, folder), *words)


def _without_commands(settings: list[str], folder: Path) -> Iterator[str]:
    """Options of git with which it runs no command that the settings of a repository name, each behind its scope."""
    yield from ("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}")
    own = {
        x for scope, x in zip(*[iter(settings)] * 2, strict=True) if scope in ("local", "worktree")
    }
    names = {x.removeprefix("filter.").rpartition(".")[0] for x in own if x.startswith("filter.")}
    for name in sorted(names):
        if "=" in name:
            why = "which cannot be turned off: remove it from them"
            raise UserError(f"the settings of {folder} name a filter {name}, {why}")
        for nothing in ("clean=", "process=", "required=false"):
            yield from ("-c", f"filter.{name}.{nothing}")


def _copy_commits(folder: Path, into: Path) -> None:
    """Makes `into` a repository with the commits and tags of `folder`: any setup.py may ask git for its version.

    It has nothing of the settings, which may hold a password.
    """
    inside = ["-C", str(into)]
    for command in (
        # Not by another name of the user's, and without the objects of another repository, which a container lacks.
        [
            *("-c", "clone.defaultRemoteName=origin", "clone", "--quiet", "--bare", "--dissociate"),
            *("--", str(folder), str(into / ".git")),
        ],
        [*inside, "config", "core.bare", "false"],
        [*inside, "remote", "remove", "origin"],
    ):
        _git(command, f"copy the commits of {folder}, of which its version may come")
    # git knows the files there that it will commit here, and looks which of them have changed.
    listed = os.fsencode("\0".join(_ask_git(folder, "ls-files", "--stage", "-z")))
    update = ["git", *inside, "update-index"]
    subprocess.run([*update, "-z", "--index-info"], input=listed, env=_variables(), check=True)
    subprocess.run([*update, "-q", "--refresh"], stdout=subprocess.DEVNULL, env=_variables())


def empty_submodules(folder: Path) -> list[str]:
    """The submodules of the sources in `folder` that nobody has filled."""
    found = []
    for file in folder.rglob(".gitmodules"):
        text = os.fsdecode(file.read_bytes()) if _is_own(file, folder) else ""
        for path in re.findall(r"^\s*path *= *(\S.*?)\s*$", text, re.MULTILINE):
            there = file.parent / path
            if not there.is_dir() or not any(there.iterdir()):
                found.append(str(there.relative_to(folder)))
    return sorted(found)


_NAMES = {
    "PKG-INFO": rf"^Name: *({_NAME})\s*$",
    "pyproject.toml": r"""^\[project\]\n(?:[^\[].*\n|\n)*?name *= *["']([\w.-]+)""",
}


def name_of(folder: Path, source: str) -> str:
    """The normalised name of the project in `folder`: what it says of itself, else the last part of `source`."""
    # With dots, or after such a constant, a name is an extension's.
    setup = r"""^(?:PACKAGE_NAME|(?:.*\bsetup\()?\s*name(?=.*,)) *= *["']([\w-]+)["']"""
    last = source.rstrip("/").rpartition("/")[2].removesuffix(".git")
    return canonicalize_name(_said(folder, {**_NAMES, "setup.py": setup}) or last)


def pythons_of(folder: Path) -> SpecifierSet:
    """Which Pythons the project in `folder` is for, where its files say so without being run: else all."""
    patterns = {
        "pyproject.toml": r"""^requires-python *= *["'](.+)["']""",
        "setup.cfg": r"^python_requires *= *(.+)",
        "setup.py": r"""\bpython_requires *= *["'](.+?)["']""",
    }
    with contextlib.suppress(InvalidSpecifier):  # of which the build says more
        return SpecifierSet(_said(folder, patterns))
    return SpecifierSet()


def _said(folder: Path, patterns: Mapping[str, str]) -> str:
    """What the first of a project's files says that matches its pattern."""
    for file, pattern in patterns.items():
        if not _is_own(folder / file, folder):
            continue
        text = (folder / file).read_text(encoding="utf-8", errors="replace")
        if found := re.search(pattern, text, re.MULTILINE):
            return found[1]
    return ""


def _commit_of(folder: Path) -> str | None:
    """The commit of a git repository in which nothing has been changed since."""
    found = None
    for place, said in _status(folder):
        own = said[0] == "?" and (folder / place / said[2:] / MARK).is_file()
        if said[0] not in "#!" and not own:
            return None
        if not place and (oid := re.fullmatch(r"# branch\.oid ([0-9a-f]+)", said)):
            found = oid[1]
    return found


def hash_of_folder(folder: Path) -> str:
    """One hash of the names and contents of all in `folder`, but what git and Python keep of their own."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name, content = path.relative_to(folder), "a folder"
        if {".git", "__pycache__"} & {*name.parts}:
            continue
        if path.is_symlink():  # through which nothing is read
            content = f"-> {path.readlink()}"
        elif path.is_file():
            content = sha256(path) + " may be run" * bool(path.stat().st_mode & 0o111)
        digest.update(os.fsencode(f"{name} {content}\n"))
    return digest.hexdigest()


def outside(folder: Path) -> Iterator[tuple[int, int]]:
    """What tells whether that has changed which links lead to out of `folder`: it may be endless, and is not read."""
    for path in sorted(folder.rglob("*")):
        is_there = path.is_symlink() and os.access(path, os.F_OK)
        if is_there and not path.resolve().is_relative_to(folder.resolve()):
            said = path.stat()
            # Nobody knows what is new in a folder: it counts as another one each time.
            yield said.st_size, time.time_ns() if path.is_dir() else said.st_mtime_ns


def _is_own(path: Path, folder: Path) -> bool:
    """Whether a file of sources may be read: whoever made these, links may lead to any file of this machine."""
    return path.is_file() and path.resolve().is_relative_to(folder.resolve())


def _unpack(archive: Path, into: Path) -> str:
    """Unpacks an archive of sources; returns its hash."""
    if archive.suffix == ".whl":
        raise UserError(f"{archive.name} is a wheel, which is built already: {EXPECTED}")
    with tempfile.TemporaryDirectory(dir=into.parent, prefix="unpacked-") as name:
        sandbox.call(_extract, archive, Path(name), writes=Path(name))
        entries = list(Path(name).iterdir())
        # An archive of sources holds one folder; GitHub's do, too.
        top = entries[0] if len(entries) == 1 and entries[0].is_dir() else Path(name)
        # All of it: nobody has built in it. A git of it would run commands that its settings name.
        shutil.copytree(top, into, symlinks=True, ignore=shutil.ignore_patterns(".git"))
    return f"sha256:{sha256(archive)}"


# The last ones of a file that it lacks, of an encrypted one, of a link that is none, and of two things of one name.
_OF_A_BROKEN_ARCHIVE = (
    *(tarfile.TarError, zipfile.BadZipFile, EOFError),
    *(KeyError, RuntimeError, ValueError, OSError),
)


def _extract(archive: Path, into: Path) -> None:
    """Unpacks an archive, whoever has made it: this is for `sandbox.call`."""
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as zipped:
                _extract_zipped(zipped, into)
        else:
            with tarfile.open(archive) as tar:
                _keep_inside(tar)
                tar.extractall(into)
    except _OF_A_BROKEN_ARCHIVE as error:
        if processes.is_of_full_disk(error):
            raise
        why, *_ = str(error).splitlines() or ["it ends too early"]  # what each format lacks follows
        raise UserError(f"{archive} cannot be unpacked ({why}): {EXPECTED}") from None


def _extract_zipped(zipped: zipfile.ZipFile, into: Path) -> None:
    """With links and what can be run, which `zipfile` makes plain files."""
    links: dict[Path, str] = {}
    for member in zipped.infolist():
        path, mode = Path(zipped.extract(member, into)), member.external_attr >> 16
        links.pop(path, None)
        if stat.S_ISLNK(mode):
            links[path] = path.read_text()
        elif path.is_file() and mode & 0o111:
            path.chmod(0o755)
    for path, target in links.items():  # through which nothing is written any more
        path.unlink()
        path.symlink_to(target)
    for path, target in links.items():
        if not path.resolve().is_relative_to(into.resolve()):
            name = path.relative_to(into)
            raise zipfile.BadZipFile(f"{name} is a link to {target}, outside of the archive")


def _keep_inside(tar: tarfile.TarFile) -> None:
    """No member may escape the folder."""
    if hasattr(tarfile, "data_filter"):
        tar.extraction_filter = tarfile.data_filter
        return
    for member in tar:  # Pythons before 3.11.4 know no filter
        path = Path(member.name)
        if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
            raise tarfile.TarError(f"{member.name} is a link, a device or outside of the folder")


def _clone(source: str, into: Path) -> Fetched:
    found = _COMMIT.fullmatch(source)
    if not found:
        raise UserError(f"{source} names no commit: write `{source}@COMMIT`, with a tag or a hash")
    url, commit = found.groups()
    with tempfile.TemporaryDirectory(dir=into.parent, prefix="cloned-") as name:
        for command in (
            ["clone", "--quiet", "--no-checkout", "--", url, name],
            ["-C", name, "checkout", "--quiet", "--detach", commit],
            ["-C", name, "submodule", "--quiet", "update", "--init", "--recursive"],
        ):
            _git(command, f"fetch {source}", ": check the address and the commit")
        head = _git(["-C", name, "rev-parse", "HEAD"], f"read {source}").strip()
        # Without its settings: the address may hold a password.
        _copy(Path(name), into, built_in=False)
    return Fetched(into, f"git:{head}", url)


def _variables() -> dict[str, str]:
    """Those of git, which works on the repository that a command names, and with what that has."""
    own = {name: value for name, value in os.environ.items() if name not in _OF_A_REPOSITORY}
    return {**own, "GIT_NO_LAZY_FETCH": "1"}


def _git(arguments: list[str], purpose: str, way_out: str = "") -> str:
    """What git prints; an error says what it was for."""
    try:
        done = processes.ask(["git", *_LIMITS, *arguments], env=_variables())
    except FileNotFoundError:
        raise UserError(f"there is no `git` command to {purpose}: install git") from None
    if done.returncode != 0:
        raise UserError(f"git cannot {purpose} ({' '.join(done.stderr.split())}){way_out}")
    return done.stdout


def tags(url: str) -> dict[str, str]:
    """The tags of a repository, each with its commit."""
    command = ["ls-remote", "--tags", "--", url]
    said = _git(command, f"list the tags of {url}", ": check the address")
    found = re.findall(r"(?m)^(\w+)\trefs/tags/(.+?)(?:\^{})?$", said)
    return {tag: commit for commit, tag in found}  # a tag's commit comes behind it


def versions(folder: Path) -> str:
    """The commit and the tags of a repository, of which a version may be made; nothing where it is none."""
    return " ".join(_ask_git(folder, "show-ref", "--head", "--tags"))


def _download(requirement: Requirement, folder: Path) -> Path:
    """The newest sources that `requirement` allows, checked against the hash of the index.

    Not with `pip download`: that runs the setup.py to learn what it requires.
    """
    refused: dict[str, int] = {}
    finder = _finder(refused)
    try:
        with _answering(requirement):
            # Withdrawn ones only where the version is named, as pip.
            best, _, candidates = finder.find_best_match(requirement)
            if best is None:
                offered = (x for x in candidates if x.link.yank_reason is None)
                found = {Version(each.version or "0") for each in offered}
                _check_found(requirement, found, refused)
                newest = f"the newest versions are {', '.join(map(str, sorted(found)[:-4:-1]))}"
                raise UserError(f"there are no sources of {requirement}: {newest}")
            print(f"torchwheels: fetching {best.link.filename} from an index", flush=True)
            if best.link.yank_reason is not None:
                print(f"torchwheels: {best.link.filename} was withdrawn: {best.link.yank_reason}")
            return download_link(finder.session, best.link, folder, best.link.hash_option)
    except (UnpackError, FileNotFoundError) as error:
        raise UserError(
            f"the sources of {requirement} are missing or not what their index says they are "
            f"({' '.join(str(error).split())}): try again, or download them yourself and name the file"
        ) from None


def on_index(requirement: Requirement) -> dict[Version, str]:
    """The versions that an index has sources of, each with the hash of these, or where it says none, the address."""
    refused: dict[str, int] = {}
    with _answering(requirement):
        packages = _finder(refused).find_matches(
            requirement, allow_yanked=False, allow_prereleases=True
        )
    _check_found(requirement, packages, refused)
    found = {}
    for package in packages:
        link = package.link
        said = [f"{name}:{digest}" for name, (digest, *_) in (link.hash_option or {}).items()]
        found[Version(package.version or "0")] = [*said, str(link.url_without_fragment)][0]
    return found


def _check_found(
    requirement: Requirement, found: Collection[object], refused: Mapping[str, int]
) -> None:
    if not found:
        hosts = ", ".join(f"{host} answers {status}" for host, status in refused.items())
        why = f" ({hosts}): check the name and pip's configuration" if hosts else ": check the name"
        raise UserError(
            f"no index that pip is configured for has sources of {requirement.name}"
            f"{why}, or name a folder, an archive or `git+URL@COMMIT`"
        )


@contextlib.contextmanager
def _answering(requirement: Requirement) -> Iterator[None]:
    try:
        yield
    except httpx2.RequestError as error:
        raise UserError(
            f"{error.request.url.host} does not answer ({error}): check the network and pip's "
            "configuration, or name a folder or an archive"
        ) from None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:  # where it is no index
        raise UserError(
            f"an index that pip is configured for says of {requirement.name} what cannot be read ({error}): check its "
            "address, or name a folder or an archive"
        ) from None


def _finder(refused: dict[str, int]) -> PackageFinder:
    """What looks for sources where pip is configured to, and with its credentials; `refused` gets the hosts that did
    not answer what they were asked for, but that there is nothing, each with the status.
    """

    def note(response: httpx2.Response) -> None:
        if response.status_code >= 400 and response.status_code != 404:
            refused[response.url.host] = response.status_code

    indexes.passwords()  # which are not read before an address wants one
    settings = indexes.pip_settings("download")
    cert, proxy = settings.get("cert"), settings.get("proxy")
    trusted = settings.get("trusted-host", "").split()
    try:
        context = ssl.create_default_context(cafile=cert)
        session = PyPIClient(
            verify=context,
            timeout=_TIMEOUT,
            follow_redirects=True,
            trusted_hosts=trusted,
            proxy=proxy,
            event_hooks={"response": [note]},
        )
    except (OSError, ValueError, ImportError, httpx2.InvalidURL) as error:
        raise UserError(
            "nothing can be fetched with the proxy, the certificates or the trusted hosts that pip's configuration and "
            f"variables such as ALL_PROXY name ({error}): correct them; a proxy is http://HOST:PORT"
        ) from None
    kind: dict[str, Any] = {"no_binary": [":all:"], "ignore_compatibility": True}  # of any Python
    asked = index_urls()
    finder = PackageFinder(session, index_urls=asked, **kind)  # type: ignore[arg-type]  # of unearth's own
    if indexes.has_no_index(settings):
        finder.sources.clear()
    for place in settings.get("find-links", "").split():
        finder.add_find_links(place)
    session.auth = MultiDomainBasicAuth(prompting=False, index_urls=asked)
    return finder


def index_urls() -> list[str]:
    """The package indexes that pip asks for sources: PyPI alone, where nothing is configured."""
    settings = indexes.pip_settings("download")
    finder = PackageFinder(index_urls=settings.get("index-url", "").split())
    for url in settings.get("extra-index-url", "").split():
        finder.add_index_url(url)
    return [source["url"] for source in finder.sources]
