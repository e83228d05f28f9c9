"""docker-compose.yml and the defaults of the Dockerfile say again what the table of releases says."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from extops_build import ROOT
from torchwheels import containers, project

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SERVICES = COMPOSE["services"]
OPTIONS = project.load(ROOT / "pyproject.toml")


DEFAULTS = {
    name: shlex.split(value)[0] if value else ""
    for name, value in re.findall(r"^ARG (\w+)=?(.*)$", DOCKERFILE, re.MULTILINE)
}


@pytest.mark.parametrize("name", SERVICES)
def test_arguments_are_those_of_the_table(name: str) -> None:
    given = SERVICES[name]["build"].get("args", {})
    arguments = {**DEFAULTS, **given}
    target = OPTIONS.releases.target(arguments["TARGET"])
    expected = containers.build_arguments(OPTIONS, target)
    if not target.cuda:  # for which the project's own have no meaning
        assert OPTIONS.target_to_build(target) == target
        expected["RELEASE"] = ""
    else:
        assert arguments["STABLE"] == OPTIONS.stable
    assert {name: arguments[name] for name in expected} == expected
    assert {name for name, value in given.items() if value == DEFAULTS[name]} == set()


def test_the_images_hold_what_torchwheels_requires() -> None:
    required = importlib.metadata.requires("torchwheels") or []
    assert DEFAULTS["REQUIREMENTS"].split() == [x for x in required if ";" not in x]


@pytest.mark.parametrize("tool", [DEFAULTS["TOOL"], "."])
def test_what_is_copied_is_there(tool: str) -> None:
    """From the top of a checkout, and from the package."""
    context = ROOT if tool == DEFAULTS["TOOL"] else Path(containers.__file__).parent
    copied = re.findall(r"\$\{TOOL\}\S*", DOCKERFILE)
    assert len(copied) == 9
    for path in copied:
        assert (context / path.replace("${TOOL}", tool)).exists(), path


def test_an_index_without_wheels(tmp_path: Path) -> None:
    """Compose says the name of the service that fails, and nothing of what it printed."""
    (name,) = SERVICES["site"]["depends_on"]
    assert name == "wheels-in-dist-as-docker-compose-run-build-makes-them"
    command = SERVICES[name]["command"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode > 0
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "x.whl").touch()
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 0


@pytest.mark.parametrize("name", SERVICES)
def test_nothing_is_pulled(name: str) -> None:
    service = SERVICES[name]
    assert service["pull_policy"] == "build"
    assert re.search(rf"^FROM .* AS {service['build']['target']}$", DOCKERFILE, re.MULTILINE)


@pytest.mark.parametrize("name", ["test", "build", "test-gpu"])
def test_commands_name_the_target_of_their_image(name: str) -> None:
    service = SERVICES[name]
    targets = re.findall(r"--target=(\S+)", service["command"][-1])
    assert set(targets) == {{**DEFAULTS, **service["build"].get("args", {})}["TARGET"]}


def test_services() -> None:
    shown = {name for name, service in SERVICES.items() if "profiles" not in service}
    shown -= {*SERVICES["site"]["depends_on"]}
    assert shown == {"test", "build", "shell", "bench", "site", "index"}
    gpu: dict[str, Any] = SERVICES["test-gpu"]
    assert gpu["profiles"] == ["gpu"]
    assert "--require-gpu" in gpu["command"][-1]


def test_stages_inherit_from_the_base_image() -> None:
    stages = {
        stage: parent
        for parent, stage in re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.MULTILINE)
    }
    assert len(stages) == len(re.findall(r"^FROM ", DOCKERFILE, re.MULTILINE))
    roots = {parent for parent in stages.values() if parent not in stages}
    assert roots == {"${BASE_IMAGE}", "scratch"}
    assert not re.search(r"^# *syntax=", DOCKERFILE, re.MULTILINE)
    copied_from = set(re.findall(r"--from=(\S+)", DOCKERFILE))
    assert {x.partition(",")[0] for x in copied_from} <= {*stages}
