"""What the linters of the workflows cannot know: that they start what exists, and only that."""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import act
import pytest

from extops_build import ROOT
from tools import tables
from torchwheels import cli
from torchwheels.options import project
from torchwheels.options.releases import minor, numbers

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

OPTIONS = project.load(ROOT / "pyproject.toml")
FOLDER = ROOT / ".github"
FILES = sorted([*FOLDER.glob("workflows/*.yml"), *FOLDER.glob("actions/*/action.yml")])
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in FOLDER.glob("workflows/*.yml")}
JOBS = {
    f"{workflow}-{name}": job
    for workflow, data in WORKFLOWS.items()
    for name, job in data["jobs"].items()
}
GPU_JOBS = {name: job for name, job in JOBS.items() if "gpu" in job.get("runs-on", ())}
# All but the commands of `gh`, for what only exists there, and those of a farm, which has no noxfile.
STEPS = [
    pytest.param(job, step, id=f"{name}-{step['run']}")
    for name, job in JOBS.items()
    for step in job.get("steps", ())
    if not step.get("run", "gh ").startswith("gh ") and not name.startswith("farm-")
]


@pytest.fixture(scope="module")
def sessions() -> set[str]:
    command = [sys.executable, "-m", "nox", "--noxfile", str(ROOT / "noxfile.py"), "--list"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    targets = {f"{x}-{each.name}" for x in ("build", "test") for each in OPTIONS.chosen_targets()}
    return targets | set(re.findall(r"^[-*] (\S+)", done.stdout, re.MULTILINE))


@functools.cache
def jobs(targets: str) -> dict[str, list[dict[str, str]]]:
    """What `nox -s matrix` hands on."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        cli.main(["matrix", targets, f"--config={ROOT / 'pyproject.toml'}"])
    return {
        name: json.loads(text)
        for name, text in (line.split("=", 1) for line in out.getvalue().splitlines())
    }


def values(job: dict[str, Any], expression: str) -> Iterator[str]:
    """What a variable of a step stands for, in all jobs that the matrix makes of `job`."""
    if expression == "${{ inputs.target }}":  # yaml reads `on` as True
        yield WORKFLOWS["target"][True]["workflow_dispatch"]["inputs"]["target"]["default"]
        return
    name = re.fullmatch(r"\${{ matrix\.(\w+) }}", expression)
    assert name, f"{expression} is not of the matrix"
    rows = job["strategy"]["matrix"]
    if isinstance(rows.get(name[1]), list):
        yield from rows[name[1]]
        return
    kind = re.fullmatch(r"\${{ fromJson\(needs\.\w+\.outputs\.(\w+)\) }}", rows["include"])
    assert kind
    for row in jobs("full")[kind[1]]:
        yield row[name[1]]


def named_sessions(job: dict[str, Any], step: dict[str, Any]) -> Iterator[str]:
    """The sessions that a step runs, and those that it names after `--`."""
    for word in re.findall(r"nox -s (\S+)", step["run"]):
        name = word.strip('"')
        variable = re.search(r"\$([A-Z_]+)$", name)
        if variable is None:
            yield name
            continue
        for value in values(job, step["env"][variable[1]]):
            yield name[: variable.start()] + value


@pytest.mark.parametrize(("job", "step"), STEPS)
def test_a_step_is_a_session_that_exists(
    job: dict[str, Any], step: dict[str, Any], sessions: set[str]
) -> None:
    assert re.fullmatch(r"nox -s [^\n]+\n?", step["run"])
    named = set(named_sessions(job, step))
    assert named
    assert named <= sessions


@pytest.mark.parametrize(("job", "step"), STEPS)
def test_a_session_of_torchwheels_takes_what_a_step_gives_it(
    job: dict[str, Any], step: dict[str, Any]
) -> None:
    """`reproduce` was given the session of a build, as it had once taken one."""
    for command in step["run"].split(" && "):
        sessions, _, words = command.partition(" -- ")
        verb = re.match(r'nox -s "?(build|test-|audit|index|matrix|merge|reproduce)', sessions)
        given = shlex.split(words.partition(" >>")[0].replace("$TARGETS", "small"))
        if verb:
            target = ["--target=3.11-cpu"] if verb[1] == "test-" else []
            cli._parser().parse_args([verb[1].rstrip("-"), *target, *given])


def imports_torchwheels(module: str) -> bool:
    """Whether a module of the repository does, or one that it imports."""
    file = FOLDER.parent / f"{module.replace('.', '/')}.py"
    if not file.is_file():
        return module.partition(".")[0] == "torchwheels"
    named = {
        name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module
        for name in (node.module, *(f"{node.module}.{x.name}" for x in node.names))
    }
    return any(map(imports_torchwheels, named))


def test_a_session_has_torchwheels_where_what_it_runs_imports_it() -> None:
    """The folder of that name at the top is none, but Python takes it for one. `sys.executable` is nox's own."""
    text = (FOLDER.parent / "noxfile.py").read_text()
    found = {}
    for function in (x for x in ast.parse(text).body if isinstance(x, ast.FunctionDef)):
        code = ast.unparse(function)
        modules = re.findall(r"'-m', '(tools\.\w+)'", code)
        modules += ["docs.generate"] if "sphinx-build" in code else []
        if any(map(imports_torchwheels, modules)) and "sys.executable" not in code:
            found[function.name] = "install_tool(session)" in code or "./torchwheels" in code
    assert found == dict.fromkeys(["sizes", "emulate", "docs", "compare_releases"], True)


def test_the_commands_of_a_farm_have_the_options_that_it_gives(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (FOLDER / "workflows" / "farm.yml").read_text()
    named = re.findall(r"torchwheels farm (\w+)(.*)", text)
    assert {command for command, _ in named} == {"missing", "build", "index"}
    for command, words in named:
        with pytest.raises(SystemExit):
            cli.main(["farm", command, "--help"])
        assert {*re.findall(r"--\w+", words)} <= {*re.findall(r"--\w+", capsys.readouterr().out)}


@pytest.mark.parametrize("job", GPU_JOBS.values(), ids=GPU_JOBS)
def test_a_gpu_job_requires_its_gpu(job: dict[str, Any]) -> None:
    assert re.search(r"vars\.GPU_RUNNERS == 'true'|inputs\.gpu-runner != ''", job["if"])
    (run,) = [step["run"] for step in job["steps"] if "run" in step]
    assert run.endswith(("-- --require-gpu", "-- --device cuda"))


def test_an_action_has_one_commit_and_its_version_beside_it() -> None:
    pins: dict[str, set[str]] = {}
    for path in FILES:
        for action, pin in re.findall(r"uses: ([^\s@]+)(.*)", path.read_text()):
            if not action.startswith("$/"):
                pins.setdefault(action, set()).add(pin)
    for action, found in pins.items():
        (pin,) = found
        assert re.fullmatch(r"@[0-9a-f]{40} # v\d+\.\d+\.\d+", pin), action


def test_a_checkout_leaves_no_token_behind() -> None:
    """zizmor only minds where nothing is said."""
    steps = [step for job in JOBS.values() for step in job.get("steps", ())]
    checkouts = [step for step in steps if step.get("uses", "").startswith("actions/checkout@")]
    assert checkouts
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_a_pull_request_can_write_nothing() -> None:
    for name in ("pull-request", "checks"):
        assert "secrets." not in (FOLDER / "workflows" / f"{name}.yml").read_text()
        for job in WORKFLOWS[name]["jobs"].values():
            assert job["permissions"] == {"contents": "read"}


def test_only_a_tag_releases() -> None:
    assert all(workflow["permissions"] == {} for workflow in WORKFLOWS.values())
    releasing = [
        job
        for name, job in JOBS.items()
        if not name.startswith(
            "farm-"
        )  # of other repositories, whose releases are wheels of a night
        if job["permissions"].get("contents") == "write"
        or job.get("environment", {}).get("name") == "pypi"
    ]
    assert releasing
    assert all("github.ref_type == 'tag'" in job["if"] for job in releasing)


def test_setup_runs_nox_on_the_default_python() -> None:
    setup = yaml.safe_load((FOLDER / "actions" / "setup" / "action.yml").read_text())
    default = jobs("full")["build"][0]["python"]
    assert setup["inputs"]["python"]["default"] == default
    assert setup["runs"]["steps"][0]["with"]["python-version"].split()[-1] == default


def test_jobs_of_the_full_matrix() -> None:
    targets = OPTIONS.chosen_targets()
    assert [job["target"] for job in jobs("full")["test"]] == [target.name for target in targets]
    labels = {f"{target.label}{target.machine.suffix}" for target in targets}
    assert sorted(job["label"] for job in jobs("full")["build"]) == sorted(labels)
    on_arm = {job["target"] for job in jobs("full")["test"] if job["runner"] == "ubuntu-24.04-arm"}
    assert on_arm == {"3.11-cpu-aarch64", "3.11-cu130-aarch64"}
    # The GPU runners are x86-64.
    on_gpu = {(x.label, x.torch) for x in targets if x.cuda and x.machine.name == "x86_64"}
    found = [OPTIONS.releases.target(job["target"]) for job in jobs("full")["gpu"]]
    assert {(target.label, target.torch) for target in found} == on_gpu
    assert {target.python for target in found} == {"3.11"}
    # More than GitHub starts for one matrix would not start at all.
    assert len(targets) <= 256


def test_jobs_of_the_small_matrix() -> None:
    small = jobs("small")
    assert {job["label"] for job in small["test"]} == {job["label"] for job in small["build"]}
    targets = OPTIONS.small_targets()
    pythons = {target.python for target in OPTIONS.chosen_targets()}
    oldest, newest = min(pythons, key=numbers), max(pythons, key=numbers)
    assert {oldest, newest} <= {target.python for target in targets}
    assert {tables.binding(target.torch) for target in targets} == {"stable", "legacy"}
    assert set(small) == set(WORKFLOWS["checks"]["jobs"]["matrix"]["outputs"])


def test_main_builds_what_readme_shows() -> None:
    """Who reads of a wheel finds it among the artifacts."""
    shown = re.findall(r"nox -s build-([\w.-]+)", (ROOT / "README.md").read_text())
    labels = {OPTIONS.releases.target(name).label for name in shown}
    assert {"cu121", "cu130"} <= labels <= {job["label"] for job in jobs("small")["build"]}


def test_readme_says_what_works() -> None:
    readme = (ROOT / "README.md").read_text()
    targets = OPTIONS.chosen_targets()
    for name, found in (
        ("torch", {minor(target.torch) for target in targets}),
        ("Python", {target.python for target in targets}),
    ):
        oldest, *_, newest = sorted(found, key=numbers)
        assert re.search(rf"^\| {name} \| {oldest} to {newest}\b", readme, re.MULTILINE), name


def test_the_release_that_the_documentation_shows_has_passed() -> None:
    report = json.loads((ROOT / "benchmarks" / "results" / "release.report.json").read_text())
    assert all(rule["passed"] for rule in report["rules"])
    assert all(test["passed"] and not test["failed"] for test in report["tests"])


def test_act_compares_sizes_for_the_one_gpu_that_it_builds_for() -> None:
    noted = (ROOT / "tools" / "sizes.json").read_text()
    kept = json.loads(act.of_one_gpu(noted))
    assert kept.keys() == json.loads(noted).keys()
    assert {*kept["cpu"]} == {"host"}
    assert {*kept["release"]} == {"host", "sm_90a"}


def test_act_runs_the_tests_of_few_files(tmp_path: Path) -> None:
    """And leaves what pages show."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "x.md").write_text("```{literalinclude} ../tests/test_shown.py\n")
    (tmp_path / "tests" / "tools").mkdir(parents=True)
    test = "def test_it() -> None:\n    pass\n"
    for name in ("test_golden.py", "test_shown.py", "tools/test_other.py"):
        (tmp_path / "tests" / name).write_text(test)
    act.empty_tests(tmp_path)
    assert (tmp_path / "tests" / "tools" / "test_other.py").read_text() == ""
    shown = (tmp_path / "tests" / "test_shown.py").read_text()
    assert shown == f"{test}\n\n__test__ = False\n"  # as the session lint wants it
    command = [sys.executable, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1].startswith("1 passed")


@pytest.mark.parametrize(
    ("which", "folder"), [("main", "."), ("sample", "examples/own_project")], ids=["main", "sample"]
)
def test_act_gets_a_table_of_its_own_targets(which: str, folder: str, tmp_path: Path) -> None:
    table = tmp_path / "pyproject.toml"
    table.write_text(act.with_targets((ROOT / folder / table.name).read_text(), act.TARGETS[which]))
    options = project.load(table)
    wanted = json.loads(act.TARGETS[which])
    assert [x.name for x in options.chosen_targets()] == wanted
    assert [x.name for x in options.small_targets()] == wanted
