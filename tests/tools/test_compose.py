"""docker-compose.yml says again what the table of releases says: here the two are compared."""

from __future__ import annotations

import importlib.metadata
import re
from typing import Any

import pytest

from extops_build import ROOT
from torchwheels import containers, project

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
# As compose reads it, where no variable is set.
COMPOSE = yaml.safe_load(
    re.sub(r"\$\{\w+-(.*?)\}", r"\1", (ROOT / "docker-compose.yml").read_text())
)
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SERVICES = COMPOSE["services"]
OPTIONS = project.load(ROOT / "pyproject.toml")


@pytest.mark.parametrize("name", SERVICES)
def test_arguments_are_those_of_the_table(name: str) -> None:
    arguments = dict(SERVICES[name]["build"]["args"])
    target = OPTIONS.releases.target(arguments["TARGET"])
    required = importlib.metadata.requires("torchwheels") or []
    assert arguments.pop("STABLE") == OPTIONS.stable
    assert arguments.pop("REQUIREMENTS").split() == [x for x in required if ";" not in x]
    assert {"SYSTEM_PACKAGES": "", **arguments} == containers.build_arguments(OPTIONS, target)


@pytest.mark.parametrize("name", SERVICES)
def test_nothing_is_pulled(name: str) -> None:
    service = SERVICES[name]
    assert service["pull_policy"] == "build"
    assert re.search(rf"^FROM .* AS {service['build']['target']}$", DOCKERFILE, re.MULTILINE)


@pytest.mark.parametrize("name", ["test", "build", "test-gpu"])
def test_commands_name_the_target_of_their_image(name: str) -> None:
    service = SERVICES[name]
    targets = re.findall(r"--target=(\S+)", service["command"][-1])
    assert set(targets) == {service["build"]["args"]["TARGET"]}


def test_services() -> None:
    shown = {name for name, service in SERVICES.items() if "profiles" not in service}
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
