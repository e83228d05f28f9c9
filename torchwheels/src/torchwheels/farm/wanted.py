"""What a farm shall have: each project's versions and targets, and of what each wheel is made."""

import difflib
import fnmatch
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from torchwheels import sources
from torchwheels.errors import UserError
from torchwheels.farm.config import Entry, Farm, Versions
from torchwheels.options import Project, Target
from torchwheels.system import masked, scratch, sha256

_NEWEST_TAG = "newest-tag"
# What of a project's options does not change its wheels, but maybe whether there is one.
_TRIED_WITH = {"tests", "import", "time-limit", "memory-per-job", "size-budget"}
_NOT_BUILT_OF = {"source", "targets", "small", "yanked", *_TRIED_WITH}


@dataclass(frozen=True)
class Wanted:
    """A wheel that the farm shall have."""

    project: str
    version: str
    """That of the index, or a tag."""
    target: Target
    source: str
    """As `torchwheels build` takes it."""
    options: Project
    digest: str
    """Of its sources and its options: with another one it is another wheel."""

    @property
    def key(self) -> str:
        """What it is called: `torchsort 0.1.9 3.11-cpu`."""
        return f"{self.project} {self.version} {self.target.name}"

    @property
    def settings(self) -> str:
        """A digest of the other options: what has failed may not fail with others."""
        table = self.options.of_target(self.target).table
        return _hash({key: table[key] for key in table.keys() & _TRIED_WITH})


def of_farm(farm: Farm, only: str = "*") -> tuple[list[Wanted], dict[str, str]]:
    """All that the farm shall have, and of projects that nobody can look up, why.

    `only`: of what is called so, or of projects of that name.
    """
    known: list[Wanted] = []
    lost = {}
    for entry in farm.projects:
        if not fnmatch.fnmatchcase(entry.name, only.partition(" ")[0]):
            continue
        try:
            known += [*_of_project(entry)]
        except (UserError, OSError) as error:
            lost[entry.name] = masked(str(error))  # a page has it in other characters
    found = [x for x in known if " " not in only or fnmatch.fnmatchcase(x.key, only)]
    if known and not found:
        near = difflib.get_close_matches(only, [x.key for x in known], 1, cutoff=0.0)[0]
        raise UserError(f"`--only` names {only!r}, which no wheel is called: did you mean {near}?")
    key, times = max(Counter(x.key for x in found).items(), key=lambda x: x[1], default=("", 0))
    if times > 1:
        raise UserError(f"two tables [[project]] ask for {key}: leave it out of one of them")
    return found, lost


def _of_project(entry: Entry) -> Iterator[Wanted]:
    options = entry.options
    targets = options.targets_to_build(options.chosen_targets())
    for version, source, origin in _versions(entry):
        for target in targets:
            own = options.of_target(target)
            yield Wanted(entry.name, version, target, source, options, _digest(origin, own))


def _digest(origin: str, options: Project) -> str:
    assert options.file is not None
    used = {key: value for key, value in options.table.items() if key not in _NOT_BUILT_OF}
    patches = [sha256(options.file.parent / each) for each in options.patches]
    return _hash([origin, used, patches])


def _hash(said: object) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def _versions(entry: Entry) -> list[tuple[str, str, str]]:
    """The versions of a project, the newest first: what each is called, what fetches it, its hash or commit."""
    source = entry.options.source
    url, _, folder = sources.parts(source)
    if url.startswith("git+"):
        found = re.fullmatch(r"git\+(.+)@([^@:/][^@:]*)", url)
        if not found:
            raise UserError(f"{source} names no tag: write {url}@{_NEWEST_TAG}, a pattern or a tag")
        url, pattern = found.groups()
        behind = f"#subdirectory={folder}" if folder else ""
        tags = _chosen_tags(url, pattern, entry.versions)
        return [(tag, f"git+{url}@{commit}{behind}", f"git:{commit}") for tag, commit in tags]
    assert entry.options.file is not None
    place = entry.options.file.parent / source
    if place.exists():
        with scratch() as work:
            origin = sources.fetch(str(place), work / "source").origin
        return [(origin.partition(":")[2][:12], str(place), origin)]
    try:
        requirement = Requirement(source)
    except InvalidRequirement:
        raise UserError(
            f"there is no {source}: a project of a farm is a name on PyPI, a folder, or git+URL@TAG"
        ) from None
    known = sources.on_index(requirement)
    chosen = _chosen(known, entry.versions)
    if not chosen:
        raise UserError(f"no sources of {source} are of the versions that the farm names")
    return [(str(x), f"{requirement.name}=={x}", known[x]) for x in chosen]


def _chosen(known: Iterable[Version], versions: Versions) -> list[Version]:
    # Prereleases only where there is nothing else.
    allowed = SpecifierSet(versions.range).filter(known)
    return sorted(allowed, reverse=True)[: versions.count or None]


def _chosen_tags(url: str, pattern: str, versions: Versions) -> list[tuple[str, str]]:
    tags = sources.tags(url)
    if pattern in tags:
        return [(pattern, tags[pattern])]
    if re.fullmatch(r"[0-9a-f]{40}", pattern):
        return [(pattern[:12], pattern)]
    if pattern == _NEWEST_TAG:
        pattern = "*"
    fitting = {version_of(tag): tag for tag in tags if fnmatch.fnmatchcase(tag, pattern)}
    numbered = {version: tag for version, tag in fitting.items() if version}
    chosen = _chosen(numbered, versions)
    if not chosen:
        raise UserError(
            f"no tag of {url} is a version like {pattern}: {', '.join(tags) or 'it has none'}"
        )
    return [(numbered[x], tags[numbered[x]]) for x in chosen]


def version_of(tag: str) -> Version | None:
    """The version that a tag names: `v1.2`, `release-1.2` or `name/1.2`; None where it names none."""
    found = re.search(r"(?:^|[^\d.])v?(\d+(?:\.\d+)*\S*)$", tag)
    try:
        return Version(found[1]) if found else None
    except InvalidVersion:
        return None
