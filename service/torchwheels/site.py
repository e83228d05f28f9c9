"""Makes a static package index, and a page that says what is in it: what any web server then serves.

index.html      the page
simple/         the index of all projects (PEP 503, 658, 691, 714)
wheels/         the wheels, the metadata of each, and its passport
"""

from __future__ import annotations

import hashlib
import html
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.version import Version

from torchwheels import wheel
from torchwheels.passports import passport_file, read_passports

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse }} td, th {{ border: 1px solid #bbb; padding: .3rem .6rem; text-align: left }}
pre {{ background: #f3f3f3; padding: .6rem; overflow-x: auto }}
</style>
<h1>{title}</h1>
{sections}
<script>
for (const e of document.querySelectorAll(".index")) e.textContent = new URL("simple/", location.href).href;
</script>
</html>
"""
_SECTION = """<h2>{name}</h2>
<table><tr><th>version<th>Python<th>torch<th>CUDA<th>GPU architectures<th>MB<th>tests</tr>
{rows}
</table>
<p>To install the newest, into an environment that has the torch which it is for or gets it from PyPI:</p>
<pre>pip install "{name}=={version}" --extra-index-url <span class="index">simple/</span></pre>
<pre>uv pip install "{name}=={version}" --extra-index-url <span class="index">simple/</span></pre>
"""


def make_site(dist: Path, site: Path) -> list[str]:
    """Makes `site` anew of the wheels in `dist` and their passports; returns the projects' names.

    What was there is replaced at the end, by a whole site: one that fails leaves the old one.
    """
    projects: dict[str, list[dict[str, Any]]] = {}
    for passport in sorted(read_passports(dist), key=lambda x: Version(x["version"])):
        projects.setdefault(passport["name"], []).append(passport)
    site.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".site-", dir=site.parent) as work:
        new = Path(work) / "new"
        (new / "wheels").mkdir(parents=True)
        for passports in projects.values():
            _write_project(passports, dist, new)
        _write_index(new / "simple", {"projects": [{"name": name} for name in projects]})
        sections = "".join(_section(name, found) for name, found in projects.items())
        title = html.escape(f"Wheels of {', '.join(projects)}")
        (new / "index.html").write_text(_PAGE.format(title=title, sections=sections))
        new.chmod(0o755)
        if site.exists():
            site.rename(Path(work) / "old")
        new.rename(site)
    return list(projects)


def _write_project(passports: list[dict[str, Any]], dist: Path, site: Path) -> None:
    """Copies the wheels of one project, and lists them."""
    files = []
    for passport in passports:
        path = dist / passport["wheel"]
        found = wheel.read(path)
        metadata = found.files[f"{found.dist_info}/METADATA"]
        target = site / "wheels" / path.name
        shutil.copyfile(path, target)
        target.with_name(f"{path.name}.metadata").write_bytes(metadata)
        shutil.copyfile(passport_file(path), passport_file(target))
        files.append(
            {
                "filename": path.name,
                "url": f"../../wheels/{quote(path.name)}",
                "hashes": {"sha256": passport["sha256"]},
                "requires-python": passport["requires_python"],
                "core-metadata": {"sha256": hashlib.sha256(metadata).hexdigest()},
                "size": passport["size"],
            }
        )
    name = passports[0]["name"]
    _write_index(
        site / "simple" / name,
        {"name": name, "versions": [x["version"] for x in passports], "files": files},
    )


def _write_index(folder: Path, listing: dict[str, Any]) -> None:
    """Writes a listing of projects or of files as HTML, which installers get, and as JSON beside it.

    A static server cannot choose between the two by what a client accepts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        f'<a href="{each["name"]}/">{each["name"]}</a><br>' for each in listing.get("projects", ())
    ]
    for each in listing.get("files", ()):
        python = html.escape(each["requires-python"] or "")
        lines.append(
            f'<a href="{each["url"]}#sha256={each["hashes"]["sha256"]}" '
            f'data-core-metadata="sha256={each["core-metadata"]["sha256"]}"'
            + (f' data-requires-python="{python}"' if python else "")
            + f">{each['filename']}</a><br>"
        )
    head = (
        '<!doctype html><meta name="pypi:repository-version" content="1.1"><title>Index</title>\n'
    )
    (folder / "index.html").write_text(head + "\n".join(lines) + "\n")
    document = {"meta": {"api-version": "1.1"}, **listing}
    (folder / "index.json").write_text(json.dumps(document, indent=2) + "\n")


def _section(name: str, passports: list[dict[str, Any]]) -> str:
    """What the page says of one project, the newest version first."""
    rows = []
    for passport in reversed(passports):
        build, tests = passport["build"], passport["tests"]
        passed = ", ".join(f"{x['passed']} passed on {x['device']}" for x in tests)
        cells = [
            f'<a href="wheels/{quote(passport["wheel"])}">{html.escape(passport["version"])}</a>',
            html.escape(passport["serves"]["python"] or "any"),
            html.escape(passport["serves"]["torch"] or "any"),
            html.escape(build["cuda"] or "–"),
            html.escape(" ".join(build["architectures"]) or "–"),
            f"{passport['size'] / 1e6:.2f}",
            html.escape(passed or "none"),
        ]
        rows.append(f"<tr><td>{'<td>'.join(cells)}</tr>")
    version = html.escape(passports[-1]["version"])
    return _SECTION.format(name=html.escape(name), rows="\n".join(rows), version=version)
