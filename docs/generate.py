"""Writes the parts of the pages that are facts of the repository: tables, options, help texts.

Each is read from the one place where it stands, so a page cannot disagree with it.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import plots, summary
from extops_build import ROOT
from tools import tables

FOLDER = ROOT / "docs" / "_generated"
RESULTS = ROOT / "benchmarks" / "results"
TORCHWHEELS = ROOT / "torchwheels" / "src" / "torchwheels"
DEVICES = ("nvidia-h200", "cpu")


def version() -> str:
    """The version of extops."""
    text = (ROOT / "package" / "extops" / "_version.py").read_text()
    (found,) = re.findall(r'^__version__ = "(.+)"', text, re.MULTILINE)
    return str(found)


def write() -> None:
    """Writes all parts, and the plots beside them."""
    FOLDER.mkdir(exist_ok=True)
    parts = {
        "matrix": tables.targets_table(),
        "variants": tables.wheels_table(),
        "release": tested(read(RESULTS / "release.report.json")),
        "torchwheels-foreign": foreign(read(RESULTS / "foreign.json")),
        "torchwheels-help": "\n".join(help_texts()),
        "torchwheels-options": "\n".join(options()),
        "torchwheels-rules": "\n".join(rules()),
    }
    for file in (
        x
        for name in ("random*", "models", "compiled", "fullgraph")
        for x in RESULTS.glob(f"*/{name}.md")
    ):
        parts[f"{file.stem}-{file.parent.name}"] = file.read_text()
    for device in DEVICES:
        known = summary.Summary.read(RESULTS / device / summary.NAME)
        report = (RESULTS / device / "report.md").read_text()
        parts |= {
            f"sequence-{device}": summary.sequence_table(known),
            f"step-{device}": summary.step_table(known),
            f"protocol-{device}": summary.protocol_table(known),
            f"losses-{device}": section(report, "Where we lose"),
            f"report-{device}": folded(report),
        }
        (FOLDER / device).mkdir(exist_ok=True)
        plots.make(RESULTS / device / summary.NAME, FOLDER / device)
        plots.of_models(RESULTS / device / "ratios.json", FOLDER / device)
    for name, text in parts.items():
        file = FOLDER / f"{name}.md"
        if (
            not file.is_file() or file.read_text() != f"{text}\n"
        ):  # Sphinx reads again what is newer
            file.write_text(f"{text}\n")


def read(file: Path) -> Any:
    """What a JSON file holds."""
    return json.loads(file.read_text())


def tested(report: dict[str, Any]) -> str:
    """Which wheel passed its tests where."""
    wheel = f"`{report['wheel']}`, built from commit `{report['commit'][:12]}`:"
    return f"{wheel}\n\n{tables.tests_table(report)}"


def foreign(rows: list[dict[str, Any]]) -> str:
    """The wheels of projects of others, each with the command that makes the row."""
    columns = ("wheel", "style; options", "what came of it, and the command")
    lines = []
    for row in rows:
        name = re.sub(r"git\+.*/(.*@.{7}).*", r"\1", row["project"])
        given = [f"`{key} = {json.dumps(value)}`" for key, value in row.get("options", {}).items()]
        if why := row.get("skipped") or row.get("failed"):
            result = f"not built: {why}"
        else:
            runs = [
                f"{x['passed']} passed, {x['failed']} failed, {x['skipped']} skipped on {x['device']}"
                for x in row["tests"]
            ]
            at_once = f"{row['processes']} processes at a time, " if "processes" in row else ""
            code = f", code for {' '.join(row['architectures'])}" if row["architectures"] else ""
            result = (
                f"{at_once}the largest of {row['GB']:.1f} GB, built against torch {row['torch']}: "
                f"`{row['tag']}`, {row['MB']:.2f} MB{code}"
            )
            result += f". Audit: {', '.join(row['broken rules']) or 'passed'}"
            result += f". Own tests: {'; '.join(runs) or row.get('untested', 'not run')}"
            for x in row.get("values", []):
                off = f", off by {x['difference']:.0e} of the largest" if "difference" in x else ""
                verdict = "right" if x["right"] else "wrong"
                result += f". On {x['device']}, {x['what']}: {verdict}{off}"
        lines.append(
            (
                f"`{name}` `{row['target']}`",
                "; ".join([row.get("style") or "–", *given]),
                f"{result}. `{row['command']}`",
            )
        )
    return tables.markdown(columns, lines)


def section(report: str, heading: str) -> str:
    """What stands under a heading of the second level."""
    found = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", report, re.DOTALL | re.MULTILINE)
    assert found, f"there is no section {heading!r}"
    return found[1].strip()


def folded(report: str) -> str:
    """A report whose parts show their headings until a reader opens them.

    What is folded has no heading, which would begin a section that ends outside.
    """
    return re.sub(
        r"^(##+ [^\n]*)\n\n(.+?)(?=^#|\Z)",
        "\\1\n\n<details><summary>Show it</summary>\n\n\\2</details>\n\n",
        report,
        flags=re.DOTALL | re.MULTILINE,
    )


def help_texts() -> Iterator[str]:
    """What `torchwheels` and its commands print for `--help`."""
    overview = help_of()
    yield from ("```text", overview.rstrip(), "```")
    for command in re.findall(r"^    (\w+)(?: \(\w+\))?(?:  |$)", overview, re.MULTILINE):
        yield from (f"\n### `torchwheels {command}`\n", "```text", help_of(command).rstrip(), "```")


def help_of(*command: str) -> str:
    """The help of a command."""
    done = subprocess.run(
        [sys.executable, "-m", "torchwheels", *command, "--help"],
        env={**os.environ, "PYTHONPATH": str(TORCHWHEELS.parent), "COLUMNS": "80"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def options() -> Iterator[str]:
    """The keys of `[tool.torchwheels]`, as the classes that they fill explain them."""
    classes = {
        node.name: node
        for node in ast.parse((TORCHWHEELS / "options" / "project.py").read_text()).body
        if isinstance(node, ast.ClassDef)
    }
    yield from ("| option | default | what it says |", "|---|---|---|")
    for node, text in explained([*classes["Options"].body, *classes["OfTarget"].body]):
        name = ast.unparse(node.target).replace("_", "-")
        renamed = re.search(r"name='(\w+)'", ast.unparse(node))
        key = renamed[1] if renamed else name
        simple = isinstance(node.value, ast.Constant) and node.value.value != ""
        default = f"`{ast.unparse(node.value).lower()}`" if simple and node.value else "–"
        kind = classes.get(ast.unparse(node.annotation))
        if not kind:
            yield f"| `{key}` | {default} | {text} |"
            continue
        for field, text in explained(kind.body):  # a table of its own
            yield f"| `{key}.{ast.unparse(field.target).replace('_', '-')}` | – | {text} |"


def explained(body: list[ast.stmt]) -> Iterator[tuple[ast.AnnAssign, str]]:
    """The fields of a class, each with the text below it."""
    for field, below in zip(body, [*body[1:], ast.Pass()], strict=True):
        if isinstance(field, ast.AnnAssign):
            text = ast.literal_eval(below.value) if isinstance(below, ast.Expr) else ""
            yield field, " ".join(text.split())


def rules() -> Iterator[str]:
    """The rules of the audit, as their functions explain them."""
    yield from ("| rule | what holds |", "|---|---|")
    for file in ("libraries.py", "metadata.py"):
        for node in ast.parse((TORCHWHEELS / "audit" / file).read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                text = ast.get_docstring(node) or ""
                yield f"| `{node.name}` | {text.splitlines()[0]} |"
