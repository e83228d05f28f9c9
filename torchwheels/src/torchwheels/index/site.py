"""Makes a static package index, and a page that says what is in it: what any web server then serves.

index.html        the page
simple/           the index of all projects (PEP 503, 658, 691, 714)
cu130/simple/     the index of the wheels with that label, and so on
wheels/           the wheels and their variants, the metadata of each, and the build reports
docs/             the documentation, where there is dist/docs
.torchwheels      what of all this was written here: nothing else may be in the folder when it is made again
"""

import contextlib
import hashlib
import html
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

import jinja2
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from torchwheels.audit import reports as audit
from torchwheels.errors import RefusedError, UserError
from torchwheels.options import Project, Target, minor, numbers, releases
from torchwheels.system import MARK, as_json, files, machines, scratch, sha256, write_text
from torchwheels.wheel import metadata_of, serves, variants

Json: TypeAlias = dict[str, Any]
"""An object of JSON: a build report, or what an index says of a file."""
Listings: TypeAlias = dict[str, dict[str, list[Json]]]
"""Of each address the projects, and the files of each."""

TEMPLATE = Path(__file__).with_name("page.html")
_HEAD = Path(__file__).with_name("head.html")
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(TEMPLATE.parent),
    autoescape=True,
    trim_blocks=True,
    keep_trailing_newline=True,
)


def make_site(dist: Path, site: Path, own: Project) -> list[str]:
    """Makes `site` anew of the wheels in `dist` and their build reports; returns the projects' names.

    One wheel that is not fit to publish refuses them all. `own` are the options of the project at hand.
    """
    has_docs = bool(files.own_files(dist / "docs"))
    projects: dict[str, list[Json]] = {}
    found = audit.read_reports(dist, own)
    for report in sorted(found, key=lambda x: Version(x["version"])):
        report["yanked"] = why_yanked(report["version"], own.yanked)
        projects.setdefault(report["name"], []).append(report)
    _check_distinct(found)
    with replaced(site, dist) as new:
        (new / "wheels").mkdir()
        listed: Listings = {}
        for name, reports in projects.items():
            for report in reports:
                audit.write(report, new / "wheels" / report["wheel"])
            entries = [(label(x), _copy(x, x, dist, new / "wheels")) for x in reports]
            # Installers prefer a version with a label to the same one without, and of two labels the
            # one that sorts last, whatever the machine: a label is here only where there is nothing else.
            plain = [entry for each, entry in entries if not each]
            own_variants = [(x["variant"], x) for x in reports if x.get("variant")]
            place = dist / variants.FOLDER, new / "wheels"
            plain += [_copy(variant, x, *place) for variant, x in own_variants]
            plain += write_variants((variant for variant, _ in own_variants), new / "wheels")
            listed.setdefault("simple", {})[name] = plain or [entry for _, entry in entries]
            for each, entry in entries:
                if each:
                    listed.setdefault(index_of(each), {}).setdefault(name, []).append(entry)
        write_listings(new, listed, "wheels/")
        if has_docs:
            shutil.copytree(dist / "docs", new / "docs")
        text = page(
            TEMPLATE,
            title=f"Wheels of {', '.join(projects)}",
            documentation=[(x, y[-1]["summary"] or "no description") for x, y in projects.items()],
            has_documentation=has_docs,
            sections="".join(_section(name, found) for name, found in projects.items()),
        )
        write_text(new / "index.html", text)
    return list(projects)


def _check_distinct(reports: Iterable[Json]) -> None:
    """Raises an error where installers would take one wheel for another."""
    seen: dict[tuple[object, ...], str] = {}
    for report in reports:
        name, version, build, tags = parse_wheel_filename(report["wheel"])
        other = seen.setdefault((name, version, build, tags), report["wheel"])
        if other != report["wheel"]:
            raise RefusedError(
                f"{other} and {report['wheel']} are of one version and for the same machines: delete one of them"
            )


@contextlib.contextmanager
def replaced(site: Path, *dists: Path) -> Iterator[Path]:
    """A new folder, made of `dists`, which takes the place of `site` at the end: a failed run leaves the old one."""
    site = Path(os.path.realpath(site))  # not a link to it
    for part in (x / y for x in dists for y in ("builds", "docs", "tests", variants.FOLDER)):
        if Path(os.path.realpath(part)) in (site, *site.parents):
            why = f"and {part} is of the wheels: name a folder beside it"
            raise UserError(f"`--site` names {site}, {why}")
    files.check_writable(site.parent, "--site")
    site.parent.mkdir(parents=True, exist_ok=True)
    with scratch(site.parent, ".site-") as work:
        new = work / "new"
        new.mkdir()
        lock = os.open(site.parent, os.O_RDONLY)
        try:
            files.acquire(lock, site)
            _check_replaceable(site, new)  # before others are made for it
            yield new
            said = [f"{x.relative_to(new)}//{sha256(x)}" for x in files.below(new)]
            (new / MARK).write_bytes(os.fsencode("\0".join([*said, MARK])))
            _check_replaceable(site, new)
            if not site.exists():
                new.rename(site)
            elif not files.exchanged(new, site):
                site.rename(work / "old")
                new.rename(site)
        finally:
            if (work / "old").exists() and not site.exists():  # Ctrl-C between the two
                (work / "old").rename(site)
            os.close(lock)


def _check_replaceable(site: Path, new: Path) -> None:
    """Raises an error where something would go that no index has written, or a wheel become another one."""
    if os.path.lexists(site) and not site.is_dir():
        raise UserError(f"{site} is no folder: `--site` names one")
    mark = site / MARK
    said = os.fsdecode(mark.read_bytes()).split("\0") if mark.is_file() else []
    ours = {name: digest for name, _, digest in (x.partition("//") for x in said)}
    for file in files.below(site) if site.exists() else ():
        digest = ours.get(name := str(file.relative_to(site)))
        plain = file.is_file() and not file.is_symlink()
        # Until 0.2 a mark had no hashes.
        if digest is None or (digest and not (plain and sha256(file) == digest)):
            raise UserError(
                f"{site} holds {name}, which no index of torchwheels has written: name another folder (`--site`), "
                "or take it away"
            )
    for wheel in new.glob("wheels/*.whl"):
        earlier = site / "wheels" / wheel.name
        if earlier.is_file() and sha256(earlier) != sha256(wheel):
            raise RefusedError(
                f"{earlier} is another file than the one in its place, which nobody could then install by its hash: "
                "give that a new version, or delete it if nobody has it"
            )


def page(template: Path, **parts: object) -> str:
    """A page with its parts, below the head that all have."""
    text = "".join(x.read_text(encoding="utf-8") for x in (_HEAD, template))
    return _TEMPLATES.from_string(text).render(parts)


def why_yanked(version: str, yanked: Mapping[str, str]) -> str | None:
    """The reason why `version` is withdrawn; None where it is not."""
    for each, reason in yanked.items():
        if SpecifierSet(f"=={each}").contains(version, prereleases=True):
            return reason or "withdrawn"
    return None


def label(report: Json) -> str:
    """The local label of the wheel's version, empty where it has none."""
    return Version(report["version"]).local or ""


def index_of(label: str) -> str:
    """Where the wheels of a label are listed."""
    return f"{label}/simple" if label else "simple"


def _copy(file: Json, report: Json, own: Path, folder: Path) -> Json:
    """Copies a wheel, or its variant, of the folder `own` with its metadata; returns how an index lists it."""
    path = own / file["wheel"]
    shutil.copyfile(path, folder / path.name)
    if sha256(folder / path.name) != file["sha256"]:
        raise UserError(f"{path} was built again meanwhile: make the index again")
    return entry(file, report, quote(path.name), write_metadata(folder / path.name, folder))


def write_metadata(path: Path, folder: Path) -> str:
    """Puts the metadata of a wheel into `folder`, where installers look for them; returns their hash."""
    metadata = metadata_of(path)
    (folder / f"{path.name}.metadata").write_bytes(metadata)
    return hashlib.sha256(metadata).hexdigest()


def entry(file: Mapping[str, Any], report: Json, url: str, metadata: str) -> Json:
    """How an index lists a wheel, or its variant, whose metadata have that hash."""
    listed = {"filename": file["wheel"], "url": url, "hashes": {"sha256": file["sha256"]}}
    listed |= {"requires-python": report["requires_python"], "core-metadata": {"sha256": metadata}}
    listed |= {"size": file["size"]}
    return {**listed, "yanked": report["yanked"]} if report["yanked"] else listed


def write_variants(files: Iterable[Json], folder: Path) -> list[Json]:
    """Writes what uv reads of the variants of each release; returns how an index lists that."""
    listed: list[Json] = []
    releases: dict[str, dict[str, variants.Properties]] = {}
    for variant in files:
        release = "-".join(variant["wheel"].split("-")[:2])
        known = releases.setdefault(release, {})
        if known.setdefault(variant["label"], variant["properties"]) != variant["properties"]:
            raise RefusedError(
                f"the variants {variant['label']} of {release} want different machines, "
                f"{known[variant['label']]} and {variant['properties']}: build all Pythons of a target "
                "for the same GPU architectures"
            )
    for release, known in releases.items():
        name, data = f"{release}-variants.json", variants.metadata(known)
        (folder / name).write_bytes(data)
        hashes = {"sha256": hashlib.sha256(data).hexdigest()}
        listed.append({"filename": name, "url": quote(name), "hashes": hashes, "size": len(data)})
    return listed


def write_listings(folder: Path, listed: Listings, files: str = "") -> None:
    """Writes all listings of an index, of addresses in the part `files` of its folder, or of whole ones."""
    for path, projects in listed.items():
        write_listing(folder / path, {"projects": [{"name": name} for name in projects]})
        up = f"{'../' * (path.count('/') + 2)}{files}" if files else ""
        for name, found in projects.items():
            found = [{**file, "url": f"{up}{file['url']}"} for file in found]
            write_listing(folder / path / name, {"name": name, "files": found})


def write_listing(folder: Path, listing: Json) -> None:
    """Writes a listing of projects or of files as HTML, which installers get, and as JSON beside it.

    A static server cannot choose between the two by what a client accepts.
    """
    text = _TEMPLATES.get_template("listing.html").render(listing)
    write_text(folder / "index.html", text)
    document = {"meta": {"api-version": "1.1"}, **listing}
    write_text(folder / "index.json", as_json(document))


def choices(reports: Iterable[Json]) -> dict[str, Json]:
    """The wheel for each Python, torch and CUDA (`CPU` for none) that there is one for, the newest first.

    It is that of the newest version, and where that has several, the one without a label. The table of releases may no
    longer have what a wheel was built for.
    """
    found = {}
    offered = [each for each in reports if not each.get("yanked")]
    order = sorted(offered, key=lambda x: (Version(Version(x["version"]).public), not label(x)))

    def rank(x: Target) -> tuple[object, ...]:  # those without the global lock come last
        return x.python == x.python_version, numbers(x.python_version), numbers(x.torch), x.label

    own = filter(None, (releases.recorded(each["build"]) for each in offered))
    targets = sorted([*own, *releases.load().targets], key=rank)
    for target in reversed(targets):
        cuda = target.cuda.version if target.cuda else "CPU"
        name = f"{target.python} {minor(target.torch)} {cuda}{target.machine.suffix}"
        if fitting := [x for x in order if works_with(x, target)]:
            found[name] = fitting[-1]
    return found


def works_with(report: Json, target: Target) -> bool:
    """Whether an installer takes the wheel beside the torch of `target`."""
    return (
        machines.of_name(report["build"]["target"]) == target.machine
        and (not label(report) or report["build"]["cuda"] == (target.cuda and target.cuda.version))
        and serves(target, report["works_with"]["python"], report["tags"][0])
        and SpecifierSet(report["requires_python"] or "").contains(target.python_version)
        and all(specifier.contains(target.torch) for specifier in torches(report))
    )


def torches(report: Json) -> list[SpecifierSet]:
    """What the wheel requires of torch."""
    required = map(Requirement, report["requires"])
    return [x.specifier for x in required if canonicalize_name(x.name) == "torch"]


def _section(name: str, reports: list[Json]) -> str:
    """What the page says of one project, the newest version first."""
    chosen = {key: wheel["wheel"] for key, wheel in choices(reports).items()}
    return _TEMPLATES.get_template("section.html").render(
        name=name,
        reports=reports[::-1],
        chosen=html.escape(json.dumps(chosen)),
        has_variants=any(each.get("variant") and not each["yanked"] for each in reports),
        **{"label": label, "index_of": index_of, "torches": torches},
    )
