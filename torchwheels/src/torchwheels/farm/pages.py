"""The pages of a farm: one to search in, and one of each project that says what is missing, and why."""

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from packaging.version import Version

from torchwheels.farm.published import Known, Row
from torchwheels.farm.serving import Serving
from torchwheels.farm.wanted import Wanted, version_of
from torchwheels.index import site
from torchwheels.system import write_text

TEMPLATE = Path(__file__).with_name("page.html")


def write(
    rows: Sequence[Row],
    files: Mapping[str, str],
    wanted: Sequence[Wanted],
    lost: Mapping[str, str],
    folder: Path,
) -> None:
    """Writes all pages; `files` are the addresses of the wheels."""
    known = Known(rows)
    names = sorted({x["farm"]["project"] for x in rows} | {x.project for x in wanted} | {*lost})
    of_project: dict[str, list[Row]] = {name: [] for name in names}
    wanted_of: dict[str, list[Wanted]] = {name: [] for name in names}
    for row in rows:
        of_project[row["farm"]["project"]].append(row)
    for each in wanted:
        wanted_of[each.project].append(each)
    lines = []
    for name in names:
        own = of_project[name], wanted_of[name]
        text, line = _of_project(*own, known, lost.get(name, ""), files)
        _write(folder / "project" / name, name, "../../", f"{name} ", text)
        lines.append([f'<a href="project/{quote(name)}/">{html.escape(name)}</a>', *line])
    head = ["project", "what it is", "newest", "wheels", "missing", "failed", "last built"]
    _write(folder, "Wheels", "", "", _table(head, lines))


def _of_project(
    rows: Sequence[Row], wanted: Sequence[Wanted], known: Known, lost: str, files: Mapping[str, str]
) -> tuple[str, list[str]]:
    """The text of a project's page, and what the first page says of it."""
    cells: dict[tuple[str, str], str] = {}
    wheels = [x for x in rows if "failed" not in x]
    for row in wheels:
        farm = row["farm"]
        link = f'<a href="{html.escape(files[row["wheel"]])}">{_day(row)}</a>'
        cells[farm["version"], farm["target"]] = f"{link}, {row['size'] / 1e6:.2f} MB"
    missing, failures = 0, []
    for each in wanted:
        key = each.version, each.target.name
        if wheel := known.wheel(each):
            cells.setdefault(key, f"the wheel of {wheel['farm']['target']}")
            continue
        missing += 1
        failure = known.failure(each)
        cells[key] = "<b>failed</b>" if failure else "missing"
        if failure:
            said = f"{each.version}, {each.target.name}, {_day(failure)}"
            failures.append(f"<li>{said}: {html.escape(failure['failed'])}")
    numbered = {version: (version_of(version) or Version("0"), version) for version, _ in cells}
    versions = sorted(numbered, key=numbered.__getitem__, reverse=True)
    targets = sorted({x for _, x in cells})
    table = [[html.escape(v), *(cells.get((v, t), "–") for t in targets)] for v in versions]
    why = f"<p>Its versions are not known: {html.escape(lost)}</p>\n" if lost else ""
    text = why + _table(["version", *map(html.escape, targets)], table)
    text += f"<h2>Why it failed</h2>\n<ul>{''.join(failures)}</ul>\n" if failures else ""
    newest = max(map(_day, rows), default="")
    summary = html.escape(next((x["summary"] for x in wheels if x["summary"]), ""))
    counts = [str(len(wheels)), str(missing), str(len(failures))]
    return text, [summary, html.escape(versions[0]) if versions else "–", *counts, newest]


def _day(row: Row) -> str:
    return html.escape(row["farm"]["built"][:10])


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [f"<tr><td>{'<td>'.join(row)}</tr>" for row in rows]
    return f"<table><tr><th>{'<th>'.join(head)}</tr>\n{chr(10).join(lines)}\n</table>\n"


def _write(folder: Path, title: str, top: str, search: str, text: str) -> None:
    parts = {"title": title, "top": top, "search": search, "text": text}
    write_text(folder / "index.html", site.page(TEMPLATE, **parts))


def searched(rows: Iterable[Row], serving: Serving) -> str:
    """What the pages search in: each wheel, and for which Pythons and where it is listed."""
    kinds: dict[str, int] = {}
    found = []
    for row in rows:
        pythons = serving.pythons(row)
        kind = json.dumps([pythons, serving.places(row)])
        number = kinds.setdefault(kind, len(kinds))
        if not row["yanked"]:
            found.append([row["name"], row["version"], number])
    found.reverse()  # the newest versions first
    data = {"kinds": [*map(json.loads, kinds)], "wheels": found}
    return json.dumps(data, separators=(",", ":"))
