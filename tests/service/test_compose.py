"""docker-compose.yml says again what matrix.toml says: here the two are compared."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import small_wheels

from service import ROOT, images, matrix
from service.reproduce import LEFT_OUT

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SERVICES = COMPOSE["services"]


@pytest.mark.parametrize("name", SERVICES)
def test_arguments_are_those_of_the_matrix(name: str) -> None:
    arguments = SERVICES[name]["build"]["args"]
    of_the_environment = {argument for argument, value in arguments.items() if value is None}
    assert of_the_environment == {"EXTOPS_COMMIT", "SOURCE_DATE_EPOCH"}
    own = {argument: value for argument, value in arguments.items() if value is not None}
    assert own == images.build_arguments(matrix.load().cell(arguments["CELL"]))


@pytest.mark.parametrize("name", SERVICES)
def test_nothing_is_pulled(name: str) -> None:
    service = SERVICES[name]
    assert service["pull_policy"] == "build"
    assert re.search(rf"^FROM .* AS {service['build']['target']}$", DOCKERFILE, re.MULTILINE)


def command(name: str) -> list[str]:
    found: list[str] = SERVICES[name]["command"]
    return found


def test_commands_name_the_cell_of_their_image() -> None:
    cell = matrix.load().cell(SERVICES["build"]["build"]["args"]["CELL"])
    assert command("build")[0] == f"python{cell.python}"
    assert cell.variant.name in command("build")
    assert f"test-{SERVICES['test-gpu']['build']['args']['CELL']}" in command("test-gpu")


def test_services() -> None:
    shown = {name for name, service in SERVICES.items() if "profiles" not in service}
    assert shown == {"test", "build", "shell", "bench", "site", "index"}
    gpu: dict[str, Any] = SERVICES["test-gpu"]
    assert gpu["profiles"] == ["gpu"]
    assert "--require-gpu" in command("test-gpu")


@pytest.mark.slow
@pytest.mark.usefixtures("engine")
def test_index_comes_up_only_with_a_site(tmp_path: Path) -> None:
    tree = Path(shutil.copytree(ROOT, tmp_path / f"extops-{os.getpid()}", ignore=LEFT_OUT))

    def compose(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["docker", "compose", *arguments]
        return subprocess.run(command, cwd=tree, capture_output=True, text=True)

    try:
        up = compose("up", "index")
        assert (up.returncode, 'service "site" didn\'t complete' in up.stderr) == (1, True)
        assert (
            "extops: there is no wheel in /host/dist: build some" in compose("logs", "site").stdout
        )
        # The wheel of compose's own `build`, without what its comment tells to export.
        small_wheels.make(tree / "dist", "cu130", ["9.0"], commit=None)
        made = compose("run", "--rm", "site")
        assert made.returncode == 0, made.stdout + made.stderr
    finally:
        compose("down", "--rmi=local")
    page = tree / "site" / "index.html"
    assert "names no commit" in page.read_text()
    assert page.stat().st_uid == tree.stat().st_uid


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
    assert copied_from <= set(stages)
