"""Which place a session picks, what it says of it, and the options after `--`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from fake_docker import FakeDocker

from service import ROOT, ServiceError, place

NOWHERE = "unix:///nowhere/docker.sock"


def test_what_is_no_option_is_passed_on() -> None:
    options, others = place.options(
        ["--require-gpu", "--backend=local", "-k", "lltm and not cuda", "--builder", "far"], {}
    )
    assert options == place.Options("local", "far")
    assert others == ["--require-gpu", "-k", "lltm and not cuda"]


def test_environment_serves_where_nothing_is_asked_for() -> None:
    environ = {"EXTOPS_BACKEND": "docker", "BUILDX_BUILDER": "far"}
    assert place.options([], environ)[0] == place.Options("docker", "far")
    assert place.options(["--backend=local"], environ)[0].backend == "local"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend=podman"], "the backend is 'podman', but docker or local is expected"),
        (["--backend"], "expected one argument"),
    ],
)
def test_wrong_option(arguments: list[str], message: str) -> None:
    with pytest.raises(ServiceError, match=message):
        place.options(arguments, {})


@pytest.mark.usefixtures("fake_docker")
def test_an_engine_that_answers_is_picked() -> None:
    assert str(place.choose(None)) == "backend docker: Docker 26.1.5 answers"
    assert str(place.choose("docker")) == "backend docker: asked for"
    assert str(place.choose("local")) == "backend local: asked for"


def test_engine_without_buildx(fake_docker: FakeDocker) -> None:
    script = fake_docker.folder / "bin" / "docker"
    script.write_text(
        '#!/bin/sh\n[ "$1" = version ] || { echo "docker: unknown command: buildx" >&2; exit 1; }\n'
    )
    assert str(place.choose(None)) == (
        "backend local: no Docker engine answers (docker: unknown command: buildx)"
    )


def test_no_docker_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    reason = "no Docker engine answers (there is no `docker` command)"
    assert str(place.choose(None)) == f"backend local: {reason}"
    with pytest.raises(ServiceError) as error:
        place.choose("docker")
    assert str(error.value) == f"{reason}: start one, or use `--backend local`"


def test_dead_engine_is_said_by_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", NOWHERE)
    assert str(place.choose(None)).startswith("backend local: no Docker engine answers (")
    command = [sys.executable, "-m", "nox", "--noxfile", str(ROOT / "noxfile.py")]
    command += ["-s", "build-3.11-cpu", "--", "--backend", "docker"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    (line,) = done.stderr.strip().splitlines()
    assert re.fullmatch(
        r"extops: no Docker engine answers \(.+\): start one, or use `--backend local`", line
    )


def test_engine_that_does_not_answer_in_time(
    fake_docker: FakeDocker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = fake_docker.folder / "bin" / "docker"
    script.write_text("#!/bin/sh\nexec tail -f /dev/null\n")
    monkeypatch.setattr(place, "_ENGINE_TIMEOUT", 0.1)
    assert "did not answer in 0.1 seconds" in str(place.choose(None))
