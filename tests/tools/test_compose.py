"""docker-compose.yml and the Dockerfile say again what the table of releases says: here these are compared."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from extops_build import ROOT
from torchwheels.options import project
from torchwheels.run import containers

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
# As compose reads it, where no variable is set.
COMPOSE = yaml.safe_load(
    re.sub(r"\$\{\w+-(.*?)\}", r"\1", (ROOT / "docker-compose.yml").read_text())
)
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SERVICES = COMPOSE["services"]
OPTIONS = project.load(ROOT / "pyproject.toml")


@pytest.fixture(autouse=True)
def base_images_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever images an engine that stands in for others has."""
    monkeypatch.delenv("TORCHWHEELS_BASE_IMAGE", raising=False)


def arguments(name: str) -> dict[str, str]:
    """Those of the image of a service: what it names, over the defaults of the Dockerfile."""
    lines = re.findall(r"^ARG (\w+)(?:=(.*))?$", DOCKERFILE, re.MULTILINE)
    defaults = {key: "".join(shlex.split(value)) for key, value in lines}
    return {**defaults, **SERVICES[name]["build"].get("args", {})}


@pytest.mark.parametrize("name", SERVICES)
def test_arguments_are_those_of_the_table(name: str) -> None:
    target = OPTIONS.releases.target(
        "3.11-cu130" if "CUDA_HOME" in SERVICES[name]["build"]["args"] else "3.11-cpu"
    )
    table = msgspec.toml.decode((ROOT / "torchwheels" / "pyproject.toml").read_text())
    required = table["project"]["dependencies"]
    given, wanted = arguments(name), containers.build_arguments(project.Project(), target)
    assert given.pop("REQUIREMENTS").split() == [x for x in required if ";" not in x]
    assert given == {key: value for key, value in wanted.items() if key != "REQUIREMENTS"}


@pytest.mark.parametrize("name", SERVICES)
def test_nothing_is_pulled(name: str) -> None:
    assert SERVICES[name]["pull_policy"] == "build"


@pytest.mark.parametrize("name", ["test", "build", "test-gpu"])
def test_commands_name_the_target_of_their_image(name: str) -> None:
    targets = re.findall(r"--target=(\S+)", SERVICES[name]["command"][-1])
    images = {OPTIONS.releases.target(target).image for target in targets}
    assert images == {arguments(name)["BASE_IMAGE"]}


@pytest.mark.parametrize("name", SERVICES)
def test_selinux_lets_containers_into_the_folders_of_the_checkout(name: str) -> None:
    for volume in SERVICES[name]["volumes"]:
        folder, _, mode = volume.partition(":")[0], *volume.rpartition(":")[1:]
        assert not folder.startswith(".") or "z" in mode.split(","), volume


def test_an_index_without_wheels(tmp_path: Path) -> None:
    """Compose says the name of the service that fails, and nothing of what it printed."""
    (name,) = SERVICES["site"]["depends_on"]
    assert name == "wheels-in-dist-as-docker-compose-run-build-makes-them"
    command = SERVICES[name]["command"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode > 0
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "x.whl").touch()
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 0


def test_services() -> None:
    shown = {name for name, service in SERVICES.items() if "profiles" not in service}
    shown -= {*SERVICES["site"]["depends_on"]}
    assert shown == {"test", "build", "shell", "bench", "site", "index"}
    gpu: dict[str, Any] = SERVICES["test-gpu"]
    assert gpu["profiles"] == ["gpu"]
    assert "--require-gpu" in gpu["command"][-1]


def test_the_image_is_its_base_image_and_no_other() -> None:
    assert re.findall(r"^FROM (.*)$", DOCKERFILE, re.MULTILINE) == ["${BASE_IMAGE}"]
    # It is made from the root, from its own folder, and by torchwheels, which alone has the file.
    assert re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE) == ["own.tx[t] /opt/"]
    assert not re.search(r"^# *syntax=", DOCKERFILE, re.MULTILINE)
