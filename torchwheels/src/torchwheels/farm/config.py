"""farm.toml: which projects, which versions of each, and for which targets."""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from torchwheels import sources
from torchwheels.errors import UserError
from torchwheels.options import Project, indexes, project
from torchwheels.options import schema as options_schema
from torchwheels.system import files, masked

NEWEST = "newest"


@dataclass(frozen=True)
class Versions:
    """Which versions of a project: the newest `count` of those that are in `range`; all of them where that is 0."""

    count: int = 1
    range: str = ""


@dataclass(frozen=True)
class Entry:
    """A project of the farm."""

    options: Project
    versions: Versions

    @property
    def name(self) -> str:
        """That of the source: of an index, or the last part of an address or a path."""
        source, name, _ = sources.parts(self.options.source)
        if source.startswith("git+"):
            address = re.split(r"@(?=[^/:]*$)", source)[0].partition("?")[0]
            name = name or address.rstrip("/").rpartition("/")[2].removesuffix(".git")
        assert self.options.file is not None
        last = Path(source).name
        if not re.search(r"\w", last):  # of `.` or `..`
            last = (self.options.file.parent / source).resolve().name
        return canonicalize_name(name or re.split(r"[\s<>=!~\[;]", last)[0])


class Settings(project.Table, frozen=True):
    """The file, but for its projects, which have tables of their own."""

    index: str = ""
    """The address of the published index, or its folder: it says which wheels there are."""
    files: str = ""
    """The address of the folder with a wheel in it, in which `{tag}` is the tag of the wheel's release."""
    targets: tuple[str, ...] = ()
    """The targets of projects that name none of their own: names or patterns."""
    cache: project.Positive = 5.0
    """GB of compiled files that are kept for later builds."""


class Farm(Settings, frozen=True):
    """The whole file."""

    projects: tuple[Entry, ...] = ()


def load(file: Path) -> Farm:
    """The farm that `file` describes."""
    table = project.read_file(file, "a farm is a file of [[project]] tables, and `--farm` names it")
    tables = table.pop("project", [])
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        raise UserError(f"{file}: project is {tables!r}, but tables are expected: [[project]]")
    if not tables:
        raise UserError(f"{file} has no project: add a table [[project]] with its `source`")
    settings = project.read(Settings, table, str(file))
    project.of_file({"targets": [*settings.targets]}, file, str(file))  # which no project may use
    fits = "{tag}" in settings.files and not re.search("[{}]", settings.files.replace("{tag}", ""))
    if not fits or not re.match(indexes.ADDRESS, settings.files):
        raise UserError(
            f"{file}: files is {settings.files!r}, but an address with {{tag}} in it is expected, such as "
            "https://github.com/OWNER/NAME/releases/download/{tag}"
        )
    for name, address in (("files", settings.files), ("index", settings.index)):
        if "://" in address and re.search(r"[?#]", address):
            raise UserError(
                f"{file}: {name} has a query (`?`) or a fragment (`#`), but the names of files follow it: "
                "name an address without one"
            )
    if masked(settings.files) != settings.files:
        raise UserError(
            f"{file}: files is {settings.files}, whose password the index would show to everybody: name an address "
            "without one"
        )
    is_address = settings.index.startswith(("http://", "https://"))
    is_other = re.match(r"\w+:/", settings.index) or (file.parent / settings.index).is_file()
    if is_other and not is_address:
        raise UserError(
            f"{file}: index is {settings.index!r}, but an address of http:// or https://, or a folder, is expected"
        )
    index = settings.index if "://" in settings.index else str(file.parent / settings.index)
    projects = tuple(_entry(each, settings, file) for each in tables)
    return Farm(index, settings.files, settings.targets, settings.cache, projects)


def schema() -> dict[str, Any]:
    """A JSON schema of the file."""
    found, entry = options_schema.of(Settings), options_schema.schema()
    found["$defs"] |= entry.pop("$defs")
    said = "The newest, a number of the newest ones, or a range."
    count = {"type": "integer", "minimum": 1}
    versions = {"anyOf": [count, {"type": "string"}], "description": said}
    entry["properties"] = {**entry["properties"], "versions": versions}
    entry["required"] = ["source"]
    found["properties"]["project"] = {"type": "array", "minItems": 1, "items": entry}
    return {"$schema": entry.pop("$schema"), **found, "required": ["files", "project"]}


def _entry(table: dict[str, Any], farm: Settings, file: Path) -> Entry:
    given = {"targets": [*farm.targets], **table}
    source = given.get("source")
    if not source:
        raise UserError(f"{file}: a [[project]] has no `source`: {table}")
    if str(source).startswith("~"):
        given["source"] = source = str(files.expanded(source))
    where = f"{file}: the project {source}"
    said = given.pop("versions", NEWEST)
    versions = _versions(said, f"{where}: versions")
    if said != NEWEST and (file.parent / source).exists():
        raise UserError(
            f"{where}: versions is {said!r}, but a folder or an archive has one version"
        )
    if near := difflib.get_close_matches("versions", given, n=1, cutoff=0.8):
        raise UserError(f"{where} has no option {near[0]!r}: did you mean 'versions'?")
    return Entry(project.of_file(given, file, where), versions)


def _versions(given: object, where: str) -> Versions:
    if given == NEWEST:
        return Versions()
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return Versions(given)
    try:
        if isinstance(given, str) and given and SpecifierSet(given):
            return Versions(0, given)
    except InvalidSpecifier:
        pass
    raise UserError(
        f"{where} is {given!r}, but {NEWEST!r}, a number of the newest ones or a range such as '>=0.1.8' is expected"
    )
