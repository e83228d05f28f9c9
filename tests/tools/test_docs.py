"""The README and the documentation: their code runs, their links lead somewhere, their messages exist."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import nox
import pytest

from benchmarks import foreign
from extops_build import ROOT
from tools import tables
from torchwheels.options import project

DOCS = ROOT / "docs"
TABLES = nox.project.load_toml(ROOT / "pyproject.toml")
PAGES = [
    *ROOT.glob("*.md"),
    *sorted(DOCS.glob("*.md")),
    *sorted(DOCS.glob("reports/*.md")),
    ROOT / "benchmarks" / "README.md",
]
FILES = r"^```{code-block} \w+\n:caption: (\S+)\n\n(.*?)^```"
TUTORIAL = DOCS / "setup-py-to-index.md"
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

# Where the commands of the pages are run, or why they cannot be.
ELSEWHERE = {
    r"^(TORCHWHEELS_\S+ )?(\S*/)?nox .*": "test_sessions_that_pages_name_exist looks for them: they take minutes",
    r"^python3 -m venv \.venv && .*/nox -s (build-3\.11-cu130|test)$": "its first half downloads nox; the "
    "second is a session",
    r"^python3 -m venv .*&& \S+/pip install ": "downloads PyTorch",
    r"^(\.venv/bin/)?pip install numpy==\S+ dist/extops-": "test_maintainers_path.py runs the like",
    r"^pip install '?\./torchwheels(\[nox\]')?$": "the session docs runs the like",
    r"^\.venv/bin/uv pip install --python=\.venv torch==": "downloads PyTorch",
    r"pip install .*own_project|^uv pip compile ": "torchwheels/tests/test_variants.py runs the like",
    r"^rsync ": "needs a server",
    r"^sed -i ": "changes the workflows",
    r"^cp -r examples/own_project ": "torchwheels/tests/test_maintainers_path.py runs it",
    r"^(\.venv/bin/)?torchwheels build ": "compiles for minutes; test_building.py runs the like",
    r"^torchwheels (test|index) |^uv venv users ": "test_an_extension_from_its_setup_py_to_an_index runs it",
    r"^torchwheels farm |^python3 -m http\.server": "torchwheels/tests/test_farm.py runs the like",
    r"^(BASE_DIGEST= )?docker (compose|build) ": "test_compose.py compares what the services and the image are",
    r"^docker context create |^DOCKER_(HOST|CONTEXT)=": "needs another machine, or podman",
    r"^(\.venv/bin/)?python examples/": "tests/test_examples.py runs it",
    r"^EXTOPS_JIT=csrc ": "compiles for minutes; test_just_in_time.py loads libraries that were compiled so",
    r"^(TORCH_CUDA_ARCH_LIST=\S+ )?python -m tools\.(mutate|sanitize) ": "needs a GPU",
    r"^python -m benchmarks\.(report|plots) ": "test_benchmarks.py makes both",
    r"^git tag |^cp .* && gh release ": "releases",
    r"^gh attestation verify ": "needs a release",
}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def commands() -> Iterator[str]:
    """Each command line of the pages, without its comment."""
    for page in PAGES:
        for line in "".join(blocks(page, "bash")).splitlines():
            command = re.sub(r"\s+#.*", "", line).strip()
            if command:
                yield command


def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code_of(page: Path) -> str:
    return "\n".join(blocks(page, "python"))


# They train or compile models.
SLOW_PAGES = ("bfloat16", "compile", "questions", "speech-model")


def is_slow(page: Path) -> bool:
    return "own_cell" in code_of(page) or page.stem in SLOW_PAGES


@pytest.mark.parametrize(
    "page",
    [
        # A cell of one's own is compiled, too.
        pytest.param(page, id=str(page), marks=[pytest.mark.slow] * is_slow(page))
        for page in PAGES
        if code_of(page) and page != TUTORIAL
    ],
)
def test_python_code_runs(page: Path, tmp_path: Path) -> None:
    pytest.importorskip("extops")
    code = code_of(page)
    if "torch.onnx" in code:
        pytest.importorskip("onnxscript")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for picture in re.findall(r'"([\w-]+\.svg)"', code):
        assert (tmp_path / picture).stat().st_size > 0


@pytest.mark.slow
def test_an_extension_from_its_setup_py_to_an_index(tmp_path: Path) -> None:
    """The tutorial, from its files to its picture."""
    text = TUTORIAL.read_text()
    for name, content in re.findall(FILES, text, re.S | re.M):
        file = tmp_path / name.replace("\\", "")  # before what Markdown would read
        file.parent.mkdir(exist_ok=True)
        file.write_text(content)
    label = f"cpu.torch{'.'.join(project.load(ROOT / 'pyproject.toml').stable.split('.')[:2])}"
    assert f"muladd==0.1+{label} " in text
    here = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "torchwheels" / "src"),
    }
    # This process has torch and matplotlib, which a user downloads.
    changed = {
        "torchwheels ": f"{sys.executable} -m torchwheels ",
        "uv venv users": f"uv venv --quiet --python {sys.executable} users",
        "uv pip install ": "uv pip install --no-deps --no-index ",
        "numpy==2.4.6 matplotlib==3.10.9": "",
    }
    for command in "".join(blocks(TUTORIAL, "bash")).splitlines():
        for old, new in changed.items():
            command = command.replace(old, new)
        subprocess.run(command, shell=True, cwd=tmp_path, env=here, check=True)
    there = {**here, "PYTHONPATH": os.pathsep.join(x for x in sys.path if "site-packages" in x)}
    code = [tmp_path / "users" / "bin" / "python", "-c", code_of(TUTORIAL)]
    subprocess.run(code, cwd=tmp_path / "site", env=there, check=True)
    assert (tmp_path / "site" / "muladd.svg").stat().st_size > 0


def is_tried_elsewhere(command: str) -> bool:
    return any(re.search(pattern, command) for pattern in ELSEWHERE)


@pytest.mark.parametrize("command", sorted({x for x in commands() if not is_tried_elsewhere(x)}))
def test_commands_run(command: str) -> None:
    command = command.removeprefix(".venv/bin/")
    if command.startswith("python -m extops"):
        pytest.importorskip("extops")
    words = shlex.split(command.replace("python ", f"{shlex.quote(sys.executable)} ", 1))
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_noxfile_of_a_maintainer_gives_the_sessions(tmp_path: Path) -> None:
    text = (DOCS / "torchwheels.md").read_text()
    files = re.findall(FILES, text, re.S | re.M)
    for name, content in files:
        (tmp_path / name).write_text(content)
    command = [sys.executable, "-m", "nox", "--list"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "torchwheels" / "src")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    listed = set(re.findall(r"^[-*] (\S+)", done.stdout, re.MULTILINE))
    assert {*("build", "test", "audit", "index", "reproduce", "matrix")} < listed
    assert {"build-TARGET", "test-TARGET"} < listed


INSTALLING = [
    *PAGES,
    ROOT / "torchwheels" / "README.md",
    *ROOT.glob("examples/*.toml"),
    *ROOT.glob("examples/*.sh"),
]
# Neither an option nor a path, and no package.
OTHER_WORDS = {"FILE", "FOLDER", "wheel-variants"}


@pytest.mark.parametrize("page", INSTALLING, ids=lambda page: page.name)
def test_install_commands_name_versions(page: Path) -> None:
    """A name alone is whatever has the highest version, on whichever index. The versions are those of the tests."""
    text = re.sub(r"[ \t]+# .*", "", page.read_text())
    words = [
        word.strip("'\",")
        for command in re.findall(r"pip install ([^`\n&;)]+)", text)
        for word in command.split()
    ]
    named = [x for x in words if not re.match(r"-|.*[/:]", x) and x not in OTHER_WORDS]
    assert [x for x in named if "==" not in x] == []
    groups = [nox.project.dependency_groups(TABLES, each) for each in ("nox", "tools")]
    pinned = [
        f"torch=={tables.OPTIONS.releases.target('3.11-cu130').torch}",
        *(each.partition(";")[0] for found in groups for each in found),
        *(each.partition(";")[0] for each in tables.OPTIONS.tests.requires),
    ]
    pins = dict(each.split("==") for each in pinned)
    assert [x for x in named if (y := x.split("=="))[1] != pins.get(y[0], y[1])] == []


def test_every_reason_is_needed() -> None:
    for pattern in ELSEWHERE:
        assert any(re.search(pattern, command) for command in commands()), pattern


def test_sessions_that_pages_name_exist() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nox", "--noxfile", ROOT / "noxfile.py", "--list"],
        capture_output=True,
        text=True,
        check=True,
    )
    sessions = set(re.findall(r"^[-*] ([\w.-]+)", done.stdout, re.MULTILINE))
    sessions |= {
        f"{x}-{target.name}"
        for x in ("build", "test")
        for target in tables.OPTIONS.chosen_targets()
    }
    text = "\n".join([*commands(), *(page.read_text() for page in PAGES)])
    named = {
        name
        for names in re.findall(r"nox -s ((?:[a-z][\w.-]* ?)+)", text)
        for name in re.findall(r"[\w.-]*\w", names)
        if re.fullmatch(r"[a-z]+(-\d\.\d+-[\w.-]+)?", name)
    }
    assert {"build-3.11-cu130", "test", "docs"} <= named
    assert {name for name in named if "-" in name or name not in sessions} <= sessions


def anchors(text: str) -> set[str]:
    """The places of a page that a link can name."""
    headings = re.findall(r"^#+ (.*)", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@by_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert "_generated" in path or file.exists(), target
        if anchor:
            assert anchor in anchors(file.read_text()), target


@by_page
def test_files_that_pages_name_exist(page: Path) -> None:
    folders = (
        "csrc|package|extops_build|tools|torchwheels|tests|benchmarks|docs(?!/_build)|examples"
    )
    for name in re.findall(rf"`((?:{folders})/[\w./-]+)`", page.read_text()):
        assert (ROOT / name).exists() or (page.parent / name).exists(), name


@pytest.mark.slow
def test_parts_that_are_included_are_made(monkeypatch: Any, tmp_path: Path) -> None:
    made = generate()
    monkeypatch.setattr(made, "FOLDER", tmp_path)
    made.write()
    text = "".join(page.read_text() for page in DOCS.glob("*.md"))
    for name in re.findall(r"_generated/([\w./-]+)", text):
        assert (tmp_path / name).stat().st_size > 0, name
    report = made.read(ROOT / "benchmarks" / "results" / "release.report.json")
    release = (tmp_path / "release.md").read_text()
    assert report["wheel"] in release
    assert tables.tests_table(report) in release
    assert (
        "| `size-budget` | `0.0` | MB that the wheel may have"
        in (tmp_path / "torchwheels-options.md").read_text()
    )


def literals() -> str:
    """All texts in the Python sources, those around a value of an f-string apart."""
    found = []
    for folder in ("package", "extops_build", "tools", "torchwheels/src"):
        for path in (ROOT / folder).rglob("*.py"):
            nodes = ast.walk(ast.parse(path.read_text()))
            found += [
                node.value
                for node in nodes
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            ]
    return "\n".join(found) + (ROOT / "noxfile.py").read_text()


def test_messages_are_those_of_the_sources() -> None:
    page = (DOCS / "troubleshooting.md").read_text()
    messages = re.findall(r"^(?:`` (.+) ``|`(.+)`)\n: ", page, re.MULTILINE)
    assert len(messages) > 10
    launch = ROOT / "csrc" / "kernels" / "cuda" / "common" / "launch_definitions.cuh"
    known = literals() + launch.read_text()
    for message in messages:
        # That an argument does not fit is put together by `unfit` in `binding/_checks.py`.
        for part in re.split("^expected `…` |…|(?=, but got …$)", "".join(message)):
            assert part.strip() in known, message


def test_each_foreign_project_has_a_row() -> None:
    rows = json.loads(foreign.RESULTS.read_text())
    assert {row["project"] for row in rows} == set(map(foreign.source, foreign.PROJECTS))
    for name, known in foreign.PROJECTS.items():
        if known.tests:
            assert project.load(ROOT / "benchmarks" / "foreign" / f"{name}.toml").tests.paths
    built = [row for row in rows if not {"skipped", "failed"} & row.keys()]
    assert len({row["target"].partition("-")[0] for row in built}) >= 2
    assert len({row["torch"] for row in built}) >= 2
    assert all(row["command"] in generate().foreign(rows) for row in rows)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("3.11-cpu failed: the disk is full: free some", "the disk is full: free some"),
        (
            "x.whl does not pass:\n  a: b\n  the wheel is kept as /x.whl",
            "x.whl does not pass: a: b",
        ),
    ],
)
def test_a_foreign_project_that_fails_leaves_its_reason(
    said: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "benchmarks" / "foreign" / "quad-iou.toml"
    config.parent.mkdir(parents=True)
    config.write_text('pretend-gpu = true\ntests = { paths = ["test"] }\n')
    monkeypatch.setattr(foreign, "ROOT", tmp_path)
    printed = f"torchwheels: using torch\nrunning build\ntorchwheels: {said}\n"
    monkeypatch.setattr(foreign, "run_tool", lambda *_, **__: (printed, 2))
    row = foreign.measure("quad-iou", "3.11-cpu", ["--backend", "local"])
    assert row["failed"] == reason
    assert row["options"] == {"pretend-gpu": True}
    table = generate().foreign([row])
    assert "`pretend-gpu = true`" in table
    assert f"not built: {reason}" in table


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        (
            "3.11-cpu: quad_iou-0.2.0-py3-none-any.whl, kept (delete it to have it built again)",
            "has quad_iou-.*whl: remove it",
        ),
        ("stopped; /cache keeps what the next build can use", "stopped, so the row of quad-iou"),
    ],
)
def test_a_foreign_wheel_that_is_not_built_to_the_end_has_no_row_of_a_failure(
    printed: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "run_tool", lambda *_, **__: (f"torchwheels: {printed}\n", 0))
    with pytest.raises(SystemExit, match=said):
        foreign.measure("quad-iou", "3.11-cpu", [])


def test_a_foreign_project_that_is_too_large_says_how_far_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "python"
    tool.write_text(
        "#!/bin/sh\ntrap 'echo torchwheels: interrupted; kill $!; exit 130' INT\n"
        "echo '[1/94] nvcc a'; echo '[2/94] nvcc b'; sleep 30 & wait\n"
    )
    tool.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tool))
    row = foreign.measure("natten", "3.11-cpu", ["--minutes=0.02"])
    assert row["failed"].startswith("after 0.02 minutes on ")
    assert row["failed"].endswith("cores, 2/94 of it was compiled")
    assert row["command"].endswith("natten 3.11-cpu --minutes=0.02")


def test_compilers_below_a_process_are_counted(tmp_path: Path) -> None:
    shutil.copy("/bin/cat", tmp_path / "cc1plus")  # says a line, and waits for another
    pipe = subprocess.PIPE
    command = ["sh", "-c", f"({tmp_path}/cc1plus); :"]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as parent:
        assert parent.stdin and parent.stdout
        parent.stdin.write("line\n")
        parent.stdin.flush()
        parent.stdout.readline()
        assert foreign.Processes(parent).count() == 1
        parent.stdin.close()
        parent.wait()
        assert foreign.Processes(parent).count() == 0


def test_a_run_on_another_machine_is_added_to_the_row_of_its_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = {"device": "CPU", "passed": 1, "failed": 0, "skipped": 2}
    rows = [{"project": x, "target": "c", "sha256": x * 64, "tests": [run]} for x in ("a", "b")]
    monkeypatch.setattr(foreign, "RESULTS", tmp_path / "results.json")
    foreign.RESULTS.write_text(json.dumps(rows))
    record = tmp_path / "record.json"
    for passed in (7, 8):  # the second takes the place of the first
        on_gpu = {"device": "GPU", "passed": passed, "failed": 0, "skipped": 0}
        record.write_text(json.dumps({"sha256": "b" * 64, "torch": "2.11.0", **on_gpu}))
        foreign.add(record)
        rows[1]["tests"] = [run, on_gpu]
        assert json.loads(foreign.RESULTS.read_text()) == rows
    value = {"device": "GPU", "what": "sum and gradients", "difference": 3e-7, "right": True}
    record.write_text(json.dumps([{"project": "a", "sha256": "a" * 64, **value}]))
    foreign.add(record)
    assert json.loads(foreign.RESULTS.read_text())[0]["values"] == [value]
    record.write_text(json.dumps({"sha256": "c" * 64}))
    with pytest.raises(SystemExit, match=r"record\.json is of a wheel that has no row: sha256 ccc"):
        foreign.add(record)
